//! Chunks that the disks have and S3 has not: the life of this node in which they were committed ended before they were
//! sent. Lookups find them here, so no engine stores them again; they must go to S3 by themselves.
//!
//! They go one after the other, each with a slot that nothing else wants at that moment and a turn among the other PUTs.
//! So they take no room of the write-behind, and a new store waits for one of them at most.

use std::future::Future;

use tokio::time::Instant;

use super::fetch::read_verified;
use super::tiers::Tiers;
use super::{Gateway, StoreOutcome};
use crate::chunk::{ChunkHash, Space};
use crate::tier::Disk;

impl Gateway {
    /// Sends what the disks had at start, and those that are taken up again. A flush waits for it from now on, and it goes on
    /// for as long as the answer is polled.
    pub fn send_backlog(&self) -> impl Future<Output = ()> + Send + use<> {
        let (gateway, mut backlog) = (self.clone(), Vec::new());
        if let Some(tiers) = &self.0.tiers
            && let Some(disk) = tiers.disk()
        {
            backlog = disk.take_backlog();
            tiers.behind.add_backlog(backlog.len() as u64);
        }
        async move {
            let Some(tiers) = &gateway.0.tiers else { return };
            let Some(disk) = tiers.disk() else { return };
            loop {
                if !backlog.is_empty() {
                    tracing::info!(
                        chunks = backlog.len(),
                        "sending what the disks have and S3 has not"
                    );
                }
                for (space, chunk) in &backlog {
                    gateway.send_from_disk(tiers, space, chunk).await;
                    tiers.behind.backlog_ends();
                }
                backlog = disk.more_backlog().await;
                tiers.behind.add_backlog(backlog.len() as u64);
            }
        }
    }

    async fn send_from_disk(&self, tiers: &Tiers, space: &Space, chunk: &ChunkHash) {
        let Some(tier) = &tiers.options.disk else { return };
        let key = (space.key(), *chunk);
        let options = tiers.behind.options();
        let mut wait = options.retry_base;
        // It may be deleted meanwhile, damaged, or sent by an engine's store.
        while tier.disk.is_dirty(&key) {
            // Where the disk is the last tier by now, it has arrived.
            if !tier.flow.stores_lower || self.try_send(tiers, &tier.disk, space, chunk).await {
                tier.disk.clean(&key).await;
                return;
            }
            tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64())).await;
            wait = (wait * 2).min(options.retry_max);
        }
    }

    /// True if S3 has it now. Nothing is held between two attempts.
    async fn try_send(&self, tiers: &Tiers, disk: &Disk, space: &Space, chunk: &ChunkHash) -> bool {
        if self.0.cache.is_present(&(space.key(), *chunk), Instant::now()) == Some(true) {
            return true;
        }
        let Some(slot) = self.0.arena.try_reserve(space.layout().object_len()) else {
            return false;
        };
        let Ok(object) = read_verified(disk, space, chunk, slot).await else {
            return false;
        };
        let permits = self.put_permits(object.len()).await;
        let deadline = Instant::now() + tiers.behind.options().deadline;
        let stored = self.store_object(space, *chunk, object.freeze(), deadline, permits);
        match stored.await {
            StoreOutcome::Stored | StoreOutcome::Present => true,
            StoreOutcome::Pending => false,
            StoreOutcome::Failed(error) => {
                tiers.behind.failed();
                tracing::warn!(%error, "a chunk waits on the disk to be stored");
                false
            }
        }
    }
}
