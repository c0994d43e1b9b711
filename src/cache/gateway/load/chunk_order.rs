//! Whole chunks, in the order of the prompt.

use std::sync::Arc;

use super::drive::{Announce, ChunkSource, Drive};
use super::stream::LoadGone;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::fetch::WholeFetch;

impl Drive {
    pub async fn in_chunk_order(mut self) {
        // An error means that the stream is gone.
        let _dropped = self.chunk_by_chunk().await;
    }

    async fn chunk_by_chunk(&mut self) -> Result<(), LoadGone> {
        let sections = Arc::clone(&self.sections);
        for index in self.first..self.chunks.len() {
            let (credit, source) = self.source(index, Announce::Now).await;
            let with_credit = |chunk: LoadedChunk| chunk.with_credit(credit);
            match source {
                ChunkSource::Missing(miss) => self.send(index, true, async { Err(miss) })?,
                ChunkSource::Memory(chunk) => self.send(index, true, async { Ok(with_credit(chunk)) })?,
                ChunkSource::Flight(flight) => {
                    let joined = self.joined(index, flight);
                    self.send(index, true, async { joined.await.map(with_credit) })?;
                }
                ChunkSource::S3(slot, announcement) => {
                    let place = |section| self.place(index * sections.len() + section);
                    // Queued here and not in the task, which may run later than the next chunk's.
                    let started = WholeFetch::new(self.wanted(index), slot, &sections, place);
                    let fetch = started.fetch();
                    match announcement {
                        Some(announcement) => {
                            let joined = self.joined(index, announcement.fly(fetch));
                            self.send(index, true, async { joined.await.map(with_credit) })?;
                        }
                        None => self.send(index, true, async { fetch.await.map(with_credit) })?,
                    }
                }
            }
        }
        Ok(())
    }
}
