//! Locks and reads the disks, at the start and when a disk comes back after it was taken out.

use std::collections::{HashMap, HashSet};
use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use super::error::DiskError;
use super::folder::{Folder, FolderError, LOST_FOLDER};
use super::index::{Gone, Index, Restored};
use super::options::DiskOptions;
use super::scan::{Scan, scan};
use super::shared::DiskShared;
use super::stats::{Backlog, DiskState, PathStats, Unsent};
use crate::format::Space;

/// Locks and reads all disks.
pub(super) fn open(options: &DiskOptions) -> Result<Arc<DiskShared>, DiskError> {
    if options.paths.is_empty() {
        return Err(DiskError::NoPaths);
    }
    let mut unusable = Vec::new();
    let mut left_out = |path: &Path, error: &io::Error| {
        tracing::warn!(path = %path.display(), %error, "this disk can't be used, going on without it");
        unusable.push(PathStats {
            path: path.to_owned(),
            state: DiskState::Failed(error.to_string()),
            size_bytes: options.size_bytes,
            ..PathStats::default()
        });
    };
    let mut folders = Vec::new();
    for path in &options.paths {
        match Folder::open(path) {
            Ok(folder) => folders.push(folder),
            // Not the disk's fault, and not to be passed over: two would remove each other's files.
            Err(FolderError::InUse(error)) => return Err(error),
            Err(FolderError::Io(error)) => left_out(path, &error),
        }
    }
    let scans = give_homes(&folders, scan_all(&folders, options), options);
    let mut found = Vec::new();
    let mut working = Vec::new();
    for (folder, scan) in folders.into_iter().zip(scans) {
        match scan {
            Ok(scan) => {
                tell(&folder, &scan);
                found.push(scan);
                working.push(folder);
            }
            Err(error) => left_out(folder.path(), &error),
        }
    }
    if working.is_empty() {
        let reason = |disk: PathStats| match disk.state {
            DiskState::Failed(reason) => format!("{}: {reason}", disk.path.display()),
            DiskState::Ok => disk.path.display().to_string(),
        };
        let reasons = unusable.into_iter().map(reason).collect();
        return Err(DiskError::Unusable { reasons });
    }
    let paths = working.iter().map(|folder| folder.path().to_owned()).collect();
    let index = Index::new(options, paths);
    let (gone, stale) = index.restore(found.iter().enumerate().flat_map(restored).collect());
    let homeless = found.iter().enumerate().flat_map(|(disk, scan)| {
        let spaces = scan.homeless.iter().map(|(space, _)| *space);
        spaces.map(move |space| (disk, space))
    });
    let homeless = homeless.collect();
    let backlog = backlog(&index, found);
    let shared = DiskShared::new(index, working, options, unusable, backlog, homeless);
    let shared = Arc::new(shared);
    for Gone { disk, key } in stale {
        if let Some(folder) = shared.folder(disk) {
            shared.discard(disk, &folder, &key);
        }
    }
    drop(shared.leave(gone));
    Ok(shared)
}

impl DiskShared {
    /// Reads a disk that was taken out, and uses it again. Not while anything that was under way there has not ended: until
    /// then its folder is locked.
    pub fn take_up(self: &Arc<Self>, disk: usize) {
        let path = &self.paths[disk];
        let read = Folder::open_again(path, self.devices[disk]).and_then(|folder| {
            let found = scan(&folder, &self.options)?;
            Ok((folder, found))
        });
        let (folder, found) = match read {
            Ok(read) => read,
            Err(error) => {
                let (path, pause) = (path.display(), self.options.retry);
                tracing::warn!(%path, %error, "this disk still can't be used; trying again in {pause:?}");
                return;
            }
        };
        tell(&folder, &found);
        let (gone, stale) = self.index.restore(restored((disk, &found)).collect());
        // Before anybody writes there again, maybe under such a name.
        stale.iter().for_each(|one| self.discard(disk, &folder, &one.key));
        self.are_homeless(disk, found.homeless.iter().map(|(space, _)| *space));
        let mut backlog = backlog(&self.index, vec![found]);
        backlog.missing = self.index.missing(disk);
        self.use_folder(disk, folder);
        self.index.take_disk_up(disk);
        self.more_backlog(backlog);
        drop(self.leave(gone));
        tracing::warn!(path = %path.display(), "this disk is in use again");
    }
}

impl DiskShared {
    /// A space is known of which a disk has what the tier below has not.
    pub fn adopt(self: &Arc<Self>, disk: usize, space: &Space) {
        let Some(folder) = self.folder(disk) else { return };
        if !self.is_homeless(disk, space.key()) {
            return;
        }
        let mut found = Scan::default();
        if let Err(error) = found.adopt(&folder, space, &self.options) {
            tracing::warn!(path = %folder.path().display(), %error, "a space.json can't be written anew");
            return;
        }
        self.has_home(disk, space.key());
        let (gone, stale) = self.index.restore(restored((disk, &found)).collect());
        stale.iter().for_each(|one| self.discard(disk, &folder, &one.key));
        tracing::info!(path = %folder.path().display(), space = %space.key(), "a missing space.json is there again");
        self.more_backlog(backlog(&self.index, vec![found]));
        drop(self.leave(gone));
    }
}

/// A space that one disk knows is known for the others.
fn give_homes(
    folders: &[Folder],
    mut scans: Vec<io::Result<Scan>>,
    options: &DiskOptions,
) -> Vec<io::Result<Scan>> {
    let scanned = scans.iter().filter_map(|scan| scan.as_ref().ok());
    let spaces = scanned
        .flat_map(|scan| &scan.spaces)
        .map(|(space, _)| space.clone());
    let known: HashMap<_, _> = spaces.map(|space| (space.key(), space)).collect();
    for (folder, result) in folders.iter().zip(&mut scans) {
        let Ok(scan) = result else { continue };
        let homeless: HashSet<_> = scan.homeless.iter().map(|(space, _)| *space).collect();
        let mut spaces = homeless.iter().filter_map(|space| known.get(space));
        if let Err(error) = spaces.try_for_each(|space| scan.adopt(folder, space, options)) {
            *result = Err(error);
        }
    }
    scans
}

/// All at the same time.
fn scan_all(folders: &[Folder], options: &DiskOptions) -> Vec<io::Result<Scan>> {
    thread::scope(|scope| {
        let threads: Vec<_> = folders
            .iter()
            .map(|folder| scope.spawn(|| scan(folder, options)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

fn restored((disk, scan): (usize, &Scan)) -> impl Iterator<Item = Restored<'_>> {
    scan.spaces.iter().flat_map(move |(space, chunks)| {
        chunks.iter().map(move |chunk| Restored {
            key: (space.key(), chunk.chunk),
            disk,
            tenant: space.tenant(),
            object_len: space.layout().object_len(),
            used: chunk.used,
            written: chunk.written,
            mark: chunk.mark,
        })
    })
}

/// Chunks that the tier below does not have, in the order in which they were written: parents before their children.
fn backlog(index: &Index, found: Vec<Scan>) -> Backlog {
    let spaces = found.iter().flat_map(|scan| &scan.spaces);
    let all = spaces.flat_map(|(space, chunks)| chunks.iter().map(move |chunk| (space, chunk)));
    let mut dirty: Vec<_> = all
        .filter(|(space, chunk)| index.unsent(&(space.key(), chunk.chunk)) != Unsent::No)
        .collect();
    dirty.sort_by_key(|(_, chunk)| chunk.written);
    let dirty = dirty.into_iter();
    Backlog {
        chunks: dirty.map(|(space, chunk)| (space.clone(), chunk.chunk)).collect(),
        damaged: found.iter().map(|scan| scan.damaged).sum(),
        homeless: found.into_iter().flat_map(|scan| scan.homeless).collect(),
        missing: Vec::new(),
    }
}

fn tell(folder: &Folder, scan: &Scan) {
    if scan.damaged > 0 {
        tracing::error!(
            path = %folder.path().join(LOST_FOLDER).display(),
            chunks = scan.damaged,
            "damaged files were moved here that S3 never got: these chunks are lost; check the disk (dmesg, smartctl)"
        );
    }
    if scan.foreign > 0 {
        tracing::warn!(
            path = %folder.path().display(),
            files = scan.foreign,
            "files of other users are not used: chown them to the daemon's user if kvgate wrote them"
        );
    }
    if !scan.homeless.is_empty() {
        tracing::warn!(
            path = %folder.path().display(),
            chunks = scan.homeless.len(),
            "chunks that S3 does not have wait for their space.json: an engine of their model brings it, or S3 has it"
        );
    }
    let chunks: usize = scan.spaces.iter().map(|(_, chunks)| chunks.len()).sum();
    tracing::info!(
        path = %folder.path().display(),
        spaces = scan.spaces.len(),
        chunks,
        expired = scan.expired,
        removed = scan.removed,
        "disk read"
    );
}
