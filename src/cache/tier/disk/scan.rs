//! The chunks on a disk at start: from names, lengths and times alone, no file of a chunk is opened.
//!
//! Only names that kvgate gives are touched; whatever else is in the folder stays as it is.

use std::fs::{DirEntry, FileType, Metadata, remove_dir, remove_file};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

use super::folder::{Folder, Mark, is_own, is_own_file};
use super::options::DiskOptions;
use super::temp::{TEMP_FOLDER, TEMP_SUFFIX};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};

/// The chunks of a disk.
#[derive(Default)]
pub(super) struct Scan {
    pub spaces: Vec<(Space, Vec<ScannedChunk>)>,
    /// Files that were no whole chunk of a known space, and temporary ones.
    pub removed: u64,
    /// Chunks that were too old.
    pub expired: u64,
    /// Files that were no whole chunk, and that the tier below does not have: they were moved aside.
    pub damaged: u64,
    /// Chunks that the tier below does not have, of spaces whose `space.json` is missing.
    pub homeless: Vec<ChunkId>,
    /// Files and folders of other users under names that kvgate gives: they are left alone.
    pub foreign: u64,
}

pub(super) struct ScannedChunk {
    pub chunk: ChunkHash,
    pub written: SystemTime,
    /// The last use that the file knows of.
    pub used: SystemTime,
    pub mark: Mark,
}

/// Reads a disk, and removes what is of no use.
pub(super) fn scan(folder: &Folder, options: &DiskOptions) -> io::Result<Scan> {
    let mut scan = Scan::default();
    for entry in entries(&folder.path().join(TEMP_FOLDER))? {
        let (entry, kind) = entry?;
        if kind.is_file() && name(&entry).ends_with(TEMP_SUFFIX) {
            scan.remove(&entry)?;
        }
    }
    for entry in entries(folder.path())? {
        let (entry, kind) = entry?;
        let Some(key) = space_of(&name(&entry)).filter(|_| kind.is_dir()) else {
            continue;
        };
        if !is_own(entry.metadata()?.uid()) {
            scan.foreign += 1;
            continue;
        }
        match folder.spaces().read(folder, key)? {
            Some(space) => scan.read_space(folder, space, options)?,
            None => scan.remove_space(key, &entry.path(), options)?,
        }
    }
    Ok(scan)
}

impl Scan {
    /// Chunks of a space that is known after all: its `space.json` is written anew.
    pub fn adopt(&mut self, folder: &Folder, space: &Space, options: &DiskOptions) -> io::Result<()> {
        self.homeless.retain(|(key, _)| *key != space.key());
        folder.spaces().forget(space.key());
        folder.spaces().ensure(folder, space)?;
        self.read_space(folder, space.clone(), options)
    }

    fn read_space(&mut self, folder: &Folder, space: Space, options: &DiskOptions) -> io::Result<()> {
        let path = folder.path().join(space.key().to_string());
        let object_len = space.layout().object_len() as u64;
        let mut chunks = Vec::new();
        for entry in entries(&path)? {
            let (entry, kind) = entry?;
            let Some(chunk) = chunk_of(&name(&entry)).filter(|_| kind.is_file()) else {
                continue;
            };
            match self.read_chunk(folder, (space.key(), chunk), &entry, object_len, options) {
                Ok(found) => chunks.extend(found),
                Err(error) => self.unreadable(&entry, &error),
            }
        }
        self.spaces.push((space, chunks));
        Ok(())
    }

    /// None: it is none, or too old, and is gone.
    fn read_chunk(
        &mut self,
        folder: &Folder,
        key: ChunkId,
        entry: &DirEntry,
        object_len: u64,
        options: &DiskOptions,
    ) -> io::Result<Option<ScannedChunk>> {
        let metadata = entry.metadata()?;
        if !is_own_file(&metadata) {
            self.foreign += 1;
            return Ok(None);
        }
        let mark = mark_of(&metadata, options);
        if metadata.len() != object_len {
            match mark {
                Mark::Dirty => {
                    folder.set_aside(&key, options.lost_bytes)?;
                    self.damaged += 1;
                }
                Mark::Clean | Mark::Declined => self.remove(entry)?,
            }
            return Ok(None);
        }
        let written = metadata.modified()?;
        // A clock that went back makes a chunk no older than new.
        let age = SystemTime::now().duration_since(written).unwrap_or_default();
        if mark != Mark::Dirty && options.ttl.is_some_and(|ttl| age >= ttl) {
            remove_file(entry.path())?;
            self.expired += 1;
            return Ok(None);
        }
        Ok(Some(ScannedChunk {
            chunk: key.1,
            written,
            used: written.max(metadata.accessed()?),
            mark,
        }))
    }

    /// One bad inode costs its chunk, not the disk. Nobody can tell whether the tier below has it.
    fn unreadable(&mut self, entry: &DirEntry, error: &io::Error) {
        if error.kind() != ErrorKind::NotFound {
            tracing::error!(path = %entry.path().display(), %error, "a file on the disk can't be looked at");
            self.damaged += 1;
        }
    }

    /// Removes a space's chunks, which can't be checked. Those that the tier below does not have wait for an engine that
    /// declares the space, or for a newer kvgate that can read its `space.json`.
    fn remove_space(&mut self, space: SpaceKey, path: &Path, options: &DiskOptions) -> io::Result<()> {
        let (waited, mut json) = (self.homeless.len(), None);
        for entry in entries(path)? {
            let (entry, kind) = entry?;
            let name = name(&entry);
            if let Some(chunk) = chunk_of(&name).filter(|_| kind.is_file()) {
                match entry.metadata() {
                    Ok(metadata) if !is_own_file(&metadata) => {
                        self.foreign += 1;
                        continue;
                    }
                    Ok(metadata) if mark_of(&metadata, options) == Mark::Dirty => {
                        self.homeless.push((space, chunk));
                        continue;
                    }
                    Ok(_) => {}
                    Err(error) => {
                        self.unreadable(&entry, &error);
                        continue;
                    }
                }
            }
            match kind.is_file() {
                true if chunk_of(&name).is_some() => self.remove(&entry)?,
                true if name == "space.json" => json = Some(entry),
                _ => {}
            }
        }
        if let Some(json) = json.filter(|_| self.homeless.len() == waited) {
            self.remove(&json)?;
        }
        match remove_dir(path) {
            // There is something of someone else's in it.
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
            result => result,
        }
    }

    fn remove(&mut self, entry: &DirEntry) -> io::Result<()> {
        remove_file(entry.path())?;
        self.removed += 1;
        Ok(())
    }
}

/// A declined chunk is dirty where it must get to the tier below after all.
fn mark_of(metadata: &Metadata, options: &DiskOptions) -> Mark {
    match Mark::of(metadata.permissions().mode()) {
        Mark::Declined if options.sends_declined => Mark::Dirty,
        mark => mark,
    }
}

fn entries(path: &Path) -> io::Result<impl Iterator<Item = io::Result<(DirEntry, FileType)>>> {
    let with_kind = |entry: DirEntry| {
        let kind = entry.file_type()?;
        Ok((entry, kind))
    };
    Ok(std::fs::read_dir(path)?.map(move |entry| entry.and_then(with_kind)))
}

fn name(entry: &DirEntry) -> String {
    entry.file_name().into_string().unwrap_or_default()
}

fn space_of(name: &str) -> Option<SpaceKey> {
    SpaceKey::from_hex(name).filter(|_| is_lower(name))
}

fn chunk_of(name: &str) -> Option<ChunkHash> {
    name.parse().ok().filter(|_| is_lower(name))
}

/// As kvgate writes hex.
fn is_lower(name: &str) -> bool {
    !name.bytes().any(|byte| byte.is_ascii_uppercase())
}
