//! Objects as files: names, metadata, publishing, opening, deleting. All of it blocking.
//!
//! Mechanism: an object is a file plus a JSON record. Two files cannot be replaced in one step, so
//! the record carries the length and mtime of the file it describes and is published first; after a
//! crash between the two renames it does not fit the old file and is ignored, never believed.
//! Nothing here locks: `FolderStore` calls it under the key's lock.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use s3s::dto::{ETag, Metadata};
use s3s::{S3Error, S3Result, s3_error};
use serde::{Deserialize, Serialize};

/// Folder for records; no bucket can have this name, as bucket names start with a letter or digit.
const META: &str = ".meta";

/// The record beside an object's file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Record {
    pub len: u64,
    pub mtime: u64,
    pub etag: String,
    pub crc32: Option<String>,
    pub crc32c: Option<String>,
    pub crc64nvme: Option<String>,
    pub sha1: Option<String>,
    pub sha256: Option<String>,
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    pub content_disposition: Option<String>,
    pub content_language: Option<String>,
    pub cache_control: Option<String>,
    pub metadata: Option<Metadata>,
}

/// One version of an object; stays readable when the object is replaced or deleted.
pub(super) struct Object {
    pub file: File,
    pub len: u64,
    pub modified: SystemTime,
    pub record: Record,
}

impl Object {
    pub fn etag(&self) -> ETag {
        ETag::Strong(self.record.etag.clone())
    }
}

/// The places of a key's data and record.
#[derive(Debug, Clone)]
pub(super) struct ObjectPath {
    data: PathBuf,
    record: PathBuf,
}

impl ObjectPath {
    /// The place of `key`; only for keys that a file system can name as they are.
    pub fn new(root: &Path, bucket: &str, key: &str) -> S3Result<Self> {
        if key.len() > 1024 {
            return Err(s3_error!(KeyTooLongError));
        }
        for part in key.split('/') {
            // An empty part, `.` or `..` would make two keys one file, or leave the bucket.
            if matches!(part, "" | "." | "..") || part.contains(char::is_control) {
                return Err(s3_error!(
                    InvalidArgument,
                    "the embedded server takes no key with control characters or with an empty, \
                     `.` or `..` part between slashes"
                ));
            }
            if part.len() > 255 {
                return Err(s3_error!(
                    KeyTooLongError,
                    "the embedded server takes at most 255 bytes between slashes of a key"
                ));
            }
        }
        let data = root.join(bucket).join(key);
        Ok(Self {
            data,
            record: root.join(META).join(bucket).join(key),
        })
    }

    /// The object, or `None` when there is none.
    pub fn open(&self) -> S3Result<Option<Object>> {
        let file = match File::open(&self.data) {
            Err(error) if is_absent(&error) => return Ok(None),
            result => result.map_err(internal)?,
        };
        let meta = file.metadata().map_err(internal)?;
        if !meta.is_file() {
            return Ok(None);
        }
        let (len, modified) = (meta.len(), meta.modified().map_err(internal)?);
        Ok(Some(Object {
            file,
            len,
            modified,
            record: self.record(len, modified),
        }))
    }

    /// The record fitting a file of this length and mtime. Without one (a crash, a file put there
    /// by hand) the object still has an `ETag` that changes with it.
    pub fn record(&self, len: u64, modified: SystemTime) -> Record {
        let mtime = nanos(modified);
        let record = fs::read(&self.record).ok();
        record
            .and_then(|json| serde_json::from_slice::<Record>(&json).ok())
            .filter(|record| (record.len, record.mtime) == (len, mtime))
            .unwrap_or_else(|| Record {
                etag: format!("{mtime:x}-{len:x}"),
                ..Record::default()
            })
    }

    /// Makes the finished file `staged` this object.
    pub fn publish(&self, staged: &Path, mut record: Record) -> S3Result<()> {
        let meta = fs::metadata(staged).map_err(internal)?;
        record.len = meta.len();
        record.mtime = nanos(meta.modified().map_err(internal)?);
        let staged_record = staged.with_extension("record");
        let json = serde_json::to_vec(&record).map_err(S3Error::internal_error)?;
        fs::write(&staged_record, json).map_err(internal)?;
        for path in [&self.record, &self.data] {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).map_err(clash)?;
            }
            if path.is_dir() {
                // Folders left empty by deletes; otherwise `a/b` exists and `a` cannot.
                remove_empty_dirs(path).map_err(clash)?;
            }
        }
        fs::rename(&staged_record, &self.record).map_err(internal)?;
        fs::rename(staged, &self.data).map_err(internal)
    }

    /// Deletes the object if it is there.
    pub fn delete(&self) -> S3Result<()> {
        if self.data.is_dir() {
            return Ok(()); // a "folder" of other keys is no object
        }
        for path in [&self.data, &self.record] {
            match fs::remove_file(path) {
                Err(error) if !is_absent(&error) => return Err(internal(error)),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Makes a bucket.
pub(super) fn create_bucket(root: &Path, bucket: &str) -> S3Result<()> {
    match fs::create_dir(root.join(bucket)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(s3_error!(BucketAlreadyOwnedByYou)),
        result => result.map_err(internal),
    }
}

/// Removes a bucket without objects.
pub(super) fn delete_bucket(root: &Path, bucket: &str) -> S3Result<()> {
    match remove_empty_dirs(&root.join(bucket)) {
        Err(error) if is_absent(&error) => return Err(s3_error!(NoSuchBucket)),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            return Err(s3_error!(BucketNotEmpty));
        }
        result => result.map_err(internal)?,
    }
    // Only records without objects are left; the next bucket of that name ignores them.
    let _ = fs::remove_dir_all(root.join(META).join(bucket));
    Ok(())
}

/// Removes a tree of folders; touches no file, so nothing can be lost to a race.
fn remove_empty_dirs(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        remove_empty_dirs(&entry.path())?;
    }
    fs::remove_dir(dir)
}

/// The file was deleted meanwhile, or was never there.
pub(super) fn is_absent(error: &io::Error) -> bool {
    // If `a` is a file, `a/b` does not exist; an invalid name does not exist either.
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound};
    matches!(
        error.kind(),
        NotFound | NotADirectory | InvalidFilename | InvalidInput
    )
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn clash(error: io::Error) -> S3Error {
    use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
    if matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | NotADirectory) {
        s3_error!(
            error,
            InvalidRequest,
            "on the embedded server a key cannot be both an object and a folder of other keys"
        )
    } else {
        internal(error)
    }
}

pub(super) fn internal(error: io::Error) -> S3Error {
    S3Error::internal_error(error)
}
