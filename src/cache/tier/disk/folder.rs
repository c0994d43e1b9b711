//! One disk's folder: locked, with an object a file. A file is written under another name and renamed, so it is whole or
//! not there. Reads and writes go past the page cache where the file system can.

use std::fmt;
use std::fs::{File, FileTimes, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, fchmod, flock, fstat, fsync, mkdirat, open, openat,
    renameat, stat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::direct;
use super::error::DiskError;
use super::fault::DiskFault;
use super::space_folder::SpaceFolders;
use super::temp::{TEMP_FOLDER, Temp};
use crate::format::{ChunkHash, ChunkId, KeyPrefix, Space, SpaceKey};

const LOCK_FILE: &str = "kvgate.lock";
/// Files that can't be read and that the tier below never got, for people to look at: `{space}-{chunk}`.
pub(super) const LOST_FOLDER: &str = "lost";
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o700);
/// A file with it is dirty: the tier below does not have the chunk yet. In the mode, because that is there as soon as the
/// file has its name, can be changed at once while others read the file, and comes with the length that a start asks for
/// anyway. Nothing else uses the sticky bit of a file, and no umask takes it away.
const DIRTY: Mode = Mode::SVTX;
/// A file that its owner may not write was declined: the tier below does not have the chunk, and need not. A umask that
/// takes the right away from other files as well makes a start ask for too many chunks, never for too few.
const DECLINED: Mode = Mode::from_raw_mode(0o400);
/// No link that somebody else put under a name is followed.
const SAFE: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);

/// One disk's folder, locked for as long as this lives, and everything that is done to files in it.
///
/// All names are relative to the folder as it was opened. A disk that is unmounted under us, or a folder that is moved,
/// never lets us write to what is then found at its path.
pub(super) struct Folder {
    path: PathBuf,
    root: OwnedFd,
    /// The device of its file system.
    pub device: u64,
    _lock: OwnedFd,
    /// Whether direct I/O is still believed to work.
    is_direct: AtomicBool,
    temps: AtomicU64,
    spaces: SpaceFolders,
}

/// The outcome of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FolderFound {
    Whole,
    Absent,
    /// It has this length instead.
    Length(u64),
}

/// What the mode of a file says of the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// It has the chunk, or there is none.
    Clean,
    /// It lacks the chunk, and must get it.
    Dirty,
    /// It lacks the chunk, and need not get it.
    Declined,
}

/// Why a folder can't be used.
pub(super) enum FolderError {
    /// Another process uses it, or this one under another path.
    InUse(DiskError),
    Io(io::Error),
}

impl fmt::Display for FolderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(error) => error.fmt(f),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl<E: Into<io::Error>> From<E> for FolderError {
    fn from(error: E) -> Self {
        Self::Io(error.into())
    }
}

impl Folder {
    /// Makes it if it is missing, and locks it.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        std::fs::create_dir_all(path)?;
        let folder = Self::lock(path)?;
        if folder.is_open_to_others()? {
            tracing::warn!(
                path = %path.display(),
                "other users may write to this folder of [disk] paths: give it to the daemon's user alone (chown, chmod go-w)"
            );
        }
        Ok(folder)
    }

    /// Once more, for one that was on this device: what is found where a disk was mounted before is left alone.
    pub fn open_again(path: &Path, device: u64) -> Result<Self, FolderError> {
        let now = stat(path)?.st_dev;
        let is_mounted_here = || Ok::<_, Errno>(stat(path.join(".."))?.st_dev != now);
        if now != device && !is_mounted_here()? {
            let text =
                "its file system is not mounted: mount it, or restart kvgate to use the folder as it is";
            return Err(io::Error::other(text).into());
        }
        Self::lock(path)
    }

    fn lock(path: &Path) -> Result<Self, FolderError> {
        let root = open(
            path,
            OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let device = fstat(&root)?.st_dev;
        let lock = openat(&root, LOCK_FILE, OFlags::CREATE | OFlags::RDWR | SAFE, FILE_MODE)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                let path = path.to_owned();
                return Err(FolderError::InUse(DiskError::InUse { path }));
            }
            locked => locked?,
        }
        let folder = Self {
            path: path.to_owned(),
            root,
            device,
            _lock: lock,
            is_direct: AtomicBool::new(true),
            temps: AtomicU64::new(0),
            spaces: SpaceFolders::default(),
        };
        folder.make_folder(TEMP_FOLDER)?;
        Ok(folder)
    }

    /// Then they can put files there under names that kvgate gives.
    fn is_open_to_others(&self) -> io::Result<bool> {
        let root = fstat(&self.root)?;
        let may_write = Mode::from_raw_mode(root.st_mode).intersects(Mode::WGRP | Mode::WOTH);
        Ok(may_write || !(is_own(root.st_uid) || root.st_uid == 0))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn spaces(&self) -> &SpaceFolders {
        &self.spaces
    }

    /// Writes an object; its file is whole or is not there.
    /// One that `syncs` survives a power loss from then on.
    pub fn write(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        object: &[u8],
        mark: Mark,
        syncs: bool,
    ) -> io::Result<()> {
        let mut temp = self.temp();
        let file = self.write_file(&temp, object, mark.mode())?;
        if syncs {
            file.sync_all()?;
        }
        let name = name_of(&(space.key(), *chunk));
        self.spaces.ensure(self, space)?;
        match temp.rename(&name) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                // Someone removed the space's folder.
                self.spaces.forget(space.key());
                self.spaces.ensure(self, space)?;
                temp.rename(&name)?;
            }
            result => result?,
        }
        match syncs {
            true => self.spaces.sync(self, space.key()),
            false => Ok(()),
        }
    }

    /// Files that were renamed in a folder of this one keep their names after a power loss.
    pub fn sync_folder(&self, name: &str) -> io::Result<()> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(fsync(openat(&self.root, name, flags, Mode::empty())?)?)
    }

    /// Moves an object's file to where people find it. There, the oldest go when they are more than `bytes_max`.
    pub fn set_aside(&self, key: &ChunkId, bytes_max: u64) -> io::Result<()> {
        self.make_folder(LOST_FOLDER)?;
        let aside = format!("{LOST_FOLDER}/{}-{}", key.0, key.1);
        match renameat(&self.root, name_of(key), &self.root, &aside) {
            // Someone removed the file.
            Err(Errno::NOENT) => return Ok(()),
            result => result?,
        }
        let mut files = Vec::new();
        for entry in std::fs::read_dir(self.path.join(LOST_FOLDER))? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            let is_ours = metadata.is_file() && is_lost_name(&entry.file_name().to_string_lossy());
            if is_ours {
                files.push((metadata.modified()?, metadata.len(), entry.path()));
            }
        }
        files.sort();
        let mut bytes: u64 = files.iter().map(|(_, len, _)| len).sum();
        let newest = self.path.join(&aside);
        for (_, len, path) in files.iter().filter(|(_, _, path)| *path != newest) {
            if bytes <= bytes_max {
                break;
            }
            std::fs::remove_file(path)?;
            bytes -= len;
        }
        Ok(())
    }

    /// Fills `object` from the file, if it has that length. Notes the use in the file's times: the order after a restart.
    pub fn read(&self, key: &ChunkId, object: &mut [u8]) -> io::Result<FolderFound> {
        let name = name_of(key);
        if self.is_direct() && direct::is_aligned(object) {
            match self.read_file(&name, object, OFlags::DIRECT) {
                Err(error) if DiskFault::of(&error) == DiskFault::NotDirect => self.stop_direct(&error),
                result => return result,
            }
        }
        self.read_file(&name, object, OFlags::empty())
    }

    /// An object's file is neither dirty nor declined any more, if it is there.
    pub fn clean(&self, key: &ChunkId) -> io::Result<()> {
        let name = name_of(key);
        let clean = || {
            let file = openat(&self.root, &name, OFlags::RDONLY | SAFE, Mode::empty())?;
            fchmod(&file, FILE_MODE)
        };
        match clean() {
            Err(Errno::NOENT) => Ok(()),
            result => Ok(result?),
        }
    }

    /// Removes an object's file, if it is there.
    pub fn remove(&self, key: &ChunkId) -> io::Result<()> {
        match unlinkat(&self.root, name_of(key), AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            result => Ok(result?),
        }
    }

    /// Puts a small file in place, whole and synced.
    pub fn write_small(&self, name: &str, text: &str) -> io::Result<()> {
        let mut temp = self.temp();
        let mut file = self.create(&temp, OFlags::empty(), FILE_MODE)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        temp.rename(name)
    }

    /// A small file's text; None if it is missing, or longer than `bytes_max`, or no text.
    pub fn read_small(&self, name: &str, bytes_max: u64) -> io::Result<Option<String>> {
        // A start has no time limit, so it must not wait for who writes to a pipe.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | SAFE;
        let file = match openat(&self.root, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP) => return Ok(None),
            file => File::from(file?),
        };
        if !is_own_file(&file.metadata()?) {
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(bytes_max + 1).read_to_end(&mut text)?;
        let text = Some(text).filter(|text| text.len() as u64 <= bytes_max);
        Ok(text.and_then(|text| String::from_utf8(text).ok()))
    }

    /// Makes a folder in this one; one that is there is fine.
    pub fn make_folder(&self, name: &str) -> io::Result<()> {
        match mkdirat(&self.root, name, FOLDER_MODE) {
            Err(Errno::EXIST) => {}
            result => return Ok(result?),
        }
        let found = statat(&self.root, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_folder = FileType::from_raw_mode(found.st_mode).is_dir();
        if is_folder && is_own(found.st_uid) {
            return Ok(());
        }
        let path = self.path.join(name);
        let text = format!("{} is no folder of this user's: remove it", path.display());
        Err(io::Error::new(ErrorKind::NotADirectory, text))
    }

    pub fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub fn set_direct(&self, is_direct: bool) {
        self.is_direct.store(is_direct, Ordering::Relaxed);
    }

    fn temp(&self) -> Temp<'_> {
        Temp::new(self.root.as_fd(), self.temps.fetch_add(1, Ordering::Relaxed))
    }

    fn write_file(&self, temp: &Temp<'_>, object: &[u8], mode: Mode) -> io::Result<File> {
        if self.is_direct() && direct::is_aligned(object) {
            let written = self.create(temp, OFlags::DIRECT, mode).and_then(|file| {
                direct::write(&file, object)?;
                note_written(&file)?;
                Ok(file)
            });
            match written {
                Err(error) if DiskFault::of(&error) == DiskFault::NotDirect => self.stop_direct(&error),
                result => return result,
            }
        }
        let file = self.create(temp, OFlags::empty(), mode)?;
        file.write_all_at(object, 0)?;
        note_written(&file)?;
        Ok(file)
    }

    fn create(&self, temp: &Temp<'_>, flags: OFlags, mode: Mode) -> io::Result<File> {
        let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | SAFE;
        let create = || openat(&self.root, temp.name(), flags, mode);
        let file = match create() {
            Err(Errno::NOENT) => {
                // Someone removed the folder of temporary files.
                self.make_folder(TEMP_FOLDER)?;
                create()
            }
            Err(Errno::EXIST) => {
                // An earlier try, or what somebody put there.
                unlinkat(&self.root, temp.name(), AtFlags::empty())?;
                create()
            }
            file => file,
        };
        Ok(file?.into())
    }

    fn read_file(&self, name: &str, object: &mut [u8], flags: OFlags) -> io::Result<FolderFound> {
        let flags = flags | OFlags::RDONLY | SAFE;
        let file = match openat(&self.root, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP) if self.is_there()? => return Ok(FolderFound::Absent),
            file => File::from(file?),
        };
        let metadata = file.metadata()?;
        if !is_own_file(&metadata) {
            return Ok(FolderFound::Absent);
        }
        let len = metadata.len();
        if len != object.len() as u64 {
            return Ok(FolderFound::Length(len));
        }
        match flags.contains(OFlags::DIRECT) {
            true => direct::read(&file, object)?,
            false => file.read_exact_at(object, 0)?,
        }
        // The time of writing stays, from which age is counted. Without this only the order after a restart would suffer.
        let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
        Ok(FolderFound::Whole)
    }

    /// Whether the folder itself has not been removed: then a file that is missing is just that.
    fn is_there(&self) -> io::Result<bool> {
        Ok(fstat(&self.root)?.st_nlink > 0)
    }

    fn stop_direct(&self, error: &io::Error) {
        if self.is_direct.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                path = %self.path.display(),
                %error,
                "this file system does no direct I/O: the disk tier goes through the page cache there"
            );
        }
    }
}

impl Mark {
    fn mode(self) -> Mode {
        match self {
            Self::Clean => FILE_MODE,
            Self::Dirty => FILE_MODE | DIRTY,
            Self::Declined => DECLINED,
        }
    }

    pub fn of(mode: u32) -> Self {
        let mode = Mode::from_raw_mode(mode);
        match (mode.contains(DIRTY), mode.contains(Mode::WUSR)) {
            (true, _) => Self::Dirty,
            (false, true) => Self::Clean,
            (false, false) => Self::Declined,
        }
    }
}

/// Whether kvgate made it. A user with the right to put files here could put any KV under a chunk's name.
pub(super) fn is_own_file(metadata: &Metadata) -> bool {
    metadata.is_file() && is_own(metadata.uid())
}

pub(super) fn is_own(user: u32) -> bool {
    user == geteuid().as_raw()
}

/// The file of a chunk: its key on S3 without the prefix.
fn name_of(key: &ChunkId) -> String {
    KeyPrefix::default().chunk(key.0, &key.1)
}

fn is_lost_name(name: &str) -> bool {
    name.split_once('-').is_some_and(|(space, chunk)| {
        SpaceKey::from_hex(space).is_some() && chunk.parse::<ChunkHash>().is_ok()
    })
}

/// The kernel's own stamps are the same for all that is written within some milliseconds; order after a restart wants finer
/// ones.
fn note_written(file: &File) -> io::Result<()> {
    let now = SystemTime::now();
    file.set_times(FileTimes::new().set_accessed(now).set_modified(now))
}
