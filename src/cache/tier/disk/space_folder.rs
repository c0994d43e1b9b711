//! A space's folder on a disk: its `space.json`, and one sync for all files that were renamed before it began.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::folder::Folder;
use crate::format::{KeyPrefix, Space, SpaceKey};

/// A space's canonical JSON is far below this, with its tens of thousands of planes at most.
const SPACE_JSON_BYTES_MAX: u64 = 64 << 20;

/// The spaces whose `space.json` is in place on a disk.
#[derive(Default)]
pub(super) struct SpaceFolders(Mutex<HashMap<SpaceKey, Arc<Syncs>>>);

/// Syncs of a folder: one is enough for all files that were renamed before it began.
#[derive(Default)]
struct Syncs {
    renamed: Mutex<u64>,
    /// Up to which rename; locked while a sync is under way.
    synced: Mutex<u64>,
}

impl SpaceFolders {
    /// Makes a space's folder with its `space.json`, before the first chunk: chunks without it are of no use at start.
    pub fn ensure(&self, folder: &Folder, space: &Space) -> io::Result<()> {
        let key = space.key();
        if !self.lock().contains_key(&key) {
            // Two at a time write the same.
            folder.make_folder(&key.to_string())?;
            folder.write_small(&json_name(key), space.canonical_json())?;
            folder.sync_folder(&key.to_string())?;
            folder.sync_folder(".")?;
            self.lock().entry(key).or_default();
        }
        Ok(())
    }

    /// The space of a folder, from its `space.json`; None if that is missing or another's.
    pub fn read(&self, folder: &Folder, key: SpaceKey) -> io::Result<Option<Space>> {
        let text = folder.read_small(&json_name(key), SPACE_JSON_BYTES_MAX)?;
        let space = text.and_then(|text| {
            let space = Space::from_json(&text).ok()?;
            (space.key() == key && space.canonical_json() == text).then_some(space)
        });
        if space.is_some() {
            self.lock().entry(key).or_default();
        }
        Ok(space)
    }

    /// The files that the caller renamed in a space's folder keep their names after a power loss.
    pub fn sync(&self, folder: &Folder, key: SpaceKey) -> io::Result<()> {
        let syncs = Arc::clone(self.lock().entry(key).or_default());
        let own = {
            let mut renamed = lock(&syncs.renamed);
            *renamed += 1;
            *renamed
        };
        let mut synced = lock(&syncs.synced);
        if *synced < own {
            let upto = *lock(&syncs.renamed);
            folder.sync_folder(&key.to_string())?;
            *synced = upto;
        }
        Ok(())
    }

    pub fn forget(&self, key: SpaceKey) {
        self.lock().remove(&key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SpaceKey, Arc<Syncs>>> {
        lock(&self.0)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn json_name(key: SpaceKey) -> String {
    KeyPrefix::default().space_json(key)
}
