//! Removal of chunks and spaces, in batches of 1000 keys.

use futures::{TryStreamExt, pin_mut};
use serde::Serialize;

use super::{Inventory, StoredChunk};
use crate::format::{ChunkHash, SpaceKey};
use crate::s3::object::{ErrorKind, ObjectError};

/// Keys in one batch delete; S3's own limit.
const BATCH: usize = 1000;

/// The result of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Removed {
    pub objects: u64,
    /// Bytes of chunks, as listed.
    pub bytes: u64,
}

impl Inventory {
    /// Removes chunks of a space, in batches; those that aren't there count as removed.
    pub async fn remove_chunks(&self, space: SpaceKey, chunks: &[ChunkHash]) -> Result<(), ObjectError> {
        for batch in chunks.chunks(BATCH) {
            let keys: Vec<String> = batch.iter().map(|hash| self.keys.chunk(space, hash)).collect();
            self.store.delete(&keys, self.deadline()).await?;
        }
        Ok(())
    }

    /// Removes all chunks of a space, then its `space.json`; keys that kvgate did not write stay. Calls `progress`
    /// after every batch. After an error the rest stays as it was.
    pub async fn remove_space(
        &self,
        space: SpaceKey,
        mut progress: impl FnMut(Removed),
    ) -> Result<Removed, ObjectError> {
        let mut removed = Removed::default();
        let mut declared = false;
        let pages = self.pages(Some(space));
        pin_mut!(pages);
        // Listing goes on after the last key of a page, even if that key is gone.
        while let Some(page) = pages.try_next().await? {
            declared |= !page.spaces.is_empty();
            let hashes: Vec<ChunkHash> = page.chunks.iter().map(|chunk| chunk.hash).collect();
            self.remove_chunks(space, &hashes).await?;
            removed.objects += hashes.len() as u64;
            removed.bytes += page.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
            progress(removed);
        }
        if declared {
            self.remove_space_json(space).await?;
            removed.objects += 1;
            progress(removed);
        }
        Ok(removed)
    }

    /// Removes a space's readable form; the next store of one of its chunks writes it again.
    pub async fn remove_space_json(&self, space: SpaceKey) -> Result<(), ObjectError> {
        self.store
            .delete(&[self.keys.space_json(space)], self.deadline())
            .await
    }

    /// Removes the listed object, unless another one has replaced it since. Returns whether it is gone.
    pub async fn remove_if_unchanged(&self, chunk: &StoredChunk) -> Result<bool, ObjectError> {
        let key = self.keys.chunk(chunk.space, &chunk.hash);
        match self.store.head(&key, self.deadline()).await {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
            Ok(meta) => {
                let same_etag = chunk.etag.is_empty() || chunk.etag == *meta.version.etag;
                let same = same_etag && chunk.modified == meta.version.modified && chunk.bytes == meta.len;
                if !same {
                    return Ok(false);
                }
            }
        }
        self.store.delete(&[key], self.deadline()).await?;
        Ok(true)
    }
}
