use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::folder::Folder;
use crate::chunk::{KeyPrefix, Space, SpaceKey};

/// A space's canonical JSON is far below this, with its tens of thousands of planes at most.
const SPACE_JSON_BYTES_MAX: u64 = 64 << 20;

/// The spaces whose `space.json` is in place on a disk.
#[derive(Default)]
pub(super) struct SpaceFolders(Mutex<HashSet<SpaceKey>>);

impl SpaceFolders {
    /// Makes a space's folder with its `space.json`, before the first chunk: chunks without it are removed at start.
    pub fn ensure(&self, folder: &Folder, space: &Space) -> io::Result<()> {
        let key = space.key();
        if !self.lock().contains(&key) {
            // Two at a time write the same.
            folder.make_folder(&key.to_string())?;
            folder.write_small(&json_name(key), space.canonical_json())?;
            self.lock().insert(key);
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
            self.lock().insert(key);
        }
        Ok(space)
    }

    pub fn forget(&self, key: SpaceKey) {
        self.lock().remove(&key);
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<SpaceKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn json_name(key: SpaceKey) -> String {
    KeyPrefix::default().space_json(key)
}
