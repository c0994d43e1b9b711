//! The second half of the demo: look up in three ways, load into other pages, and compare every byte.

use tokio::time::Instant;

use super::error::DemoError;
use super::paged::shuffled_blocks;
use super::report::{DemoPhase, Difference, Missed};
use super::session::{Demo, POISON, RequestWatch};
use super::synthetic::compare;
use crate::cache::gateway::{AfterMiss, LoadSpec};
use crate::protocol::Order;
use crate::protocol::Strategy;

impl Demo {
    /// Looks up all chunks three times: one by one, by searching for the end, and again with the answers known.
    pub async fn look_up(&mut self) -> Result<(), DemoError> {
        self.look_up_all(DemoPhase::COLD_EXACT, Strategy::Exact).await?;
        self.gateway.forget_existence();
        self.look_up_all(DemoPhase::COLD_PREFIX, Strategy::Prefix).await?;
        // The search inferred some answers; an exact lookup makes all of them known.
        self.gateway.forget_existence();
        let all = self
            .plan
            .conversations
            .iter()
            .flat_map(|conversation| &conversation.chunks);
        let all: Vec<_> = all.copied().collect();
        let deadline = Instant::now() + self.config.lookup.deadline;
        self.gateway
            .lookup(&self.space, &all, Strategy::Exact, deadline)
            .await;
        self.look_up_all(DemoPhase::WARM, Strategy::Exact).await
    }

    async fn look_up_all(&mut self, name: &'static str, strategy: Strategy) -> Result<(), DemoError> {
        self.progress.start(name, self.plan.chunks() as u64, false);
        let watch = RequestWatch::start(&*self.store);
        let (mut hits, mut unknown) = (0, None);
        for conversation in &self.plan.conversations {
            let deadline = Instant::now() + self.config.lookup.deadline;
            let chunks = &conversation.chunks;
            let lookup = self.gateway.lookup(&self.space, chunks, strategy, deadline).await;
            hits += lookup.prefix;
            unknown = unknown.or(lookup.error);
            self.progress.add(chunks.len() as u64);
        }
        let phase = self.report.phase(name).add(&watch, &*self.store);
        phase.chunks = self.plan.chunks();
        phase.hits = Some(hits);
        unknown.map_or(Ok(()), |error| Err(DemoError::Lookup(error)))
    }

    /// Loads each conversation into pages of its own, chunk by chunk as they arrive; then compares every byte.
    pub async fn load_and_compare(&mut self) -> Result<(), DemoError> {
        let bytes = (self.plan.chunks() * self.space.layout().payload_len()) as u64;
        self.progress.start("load, compare", 2 * bytes, true);
        for conversation in 0..self.plan.conversations.len() {
            if conversation > 0 {
                // The pages of the conversation before must not help this one.
                let watch = RequestWatch::start(&*self.store);
                self.cache.poison(POISON);
                let phase = self.report.phase(DemoPhase::FORGET).add(&watch, &*self.store);
                phase.bytes += self.cache.bytes() as u64;
            }
            let table = shuffled_blocks(self.cache.blocks(), &mut self.random);
            let loaded = self.load(conversation, &table).await?;
            self.compare(conversation, &table, loaded).await;
        }
        self.finish();
        Ok(())
    }

    /// Loads a conversation; returns the number of leading chunks that are in their pages.
    async fn load(&mut self, conversation: usize, table: &[u32]) -> Result<usize, DemoError> {
        let watch = RequestWatch::start(&*self.store);
        let mut stream = self.gateway.load(LoadSpec {
            space: self.space.clone(),
            chunks: self.plan.conversations[conversation].chunks.clone(),
            order: Order::Chunk,
            after_miss: AfterMiss::Stop,
            deadline: Instant::now() + self.config.load.deadline,
        });
        let mut loaded = 0;
        while let Some((chunk, outcome)) = stream.next().await {
            match outcome {
                Ok(object) => {
                    let scattering = Instant::now();
                    let blocks = &table[chunk * self.plan.chunk_blocks()..][..self.plan.chunk_blocks()];
                    self.cache.scatter(blocks, object.payload())?;
                    self.report.scatter_seconds += scattering.elapsed().as_secs_f64();
                    loaded += 1;
                    self.progress.add(object.payload().len() as u64);
                    // The slot is free again here.
                }
                Err(miss) => self.report.missed.push(Missed {
                    conversation,
                    chunk,
                    code: miss.code(),
                    reason: miss.to_string(),
                }),
            }
        }
        let phase = self.report.phase(DemoPhase::LOAD).add(&watch, &*self.store);
        phase.chunks += loaded;
        phase.bytes += (loaded * self.space.layout().payload_len()) as u64;
        Ok(loaded)
    }

    async fn compare(&mut self, conversation: usize, table: &[u32], loaded: usize) {
        let watch = RequestWatch::start(&*self.store);
        let chunk_blocks = self.plan.chunk_blocks();
        let mut compared_bytes = 0;
        for chunk in 0..loaded {
            let states = self.plan.conversations[conversation].chunk_states(chunk);
            let found = compare(
                &self.cache,
                &table[chunk * chunk_blocks..][..chunk_blocks],
                states,
            );
            compared_bytes += found.bytes;
            self.report.compared_bytes += found.bytes;
            self.report.different_bytes += found.different_bytes;
            if self.report.first_difference.is_none() {
                self.report.first_difference = found.first.map(|position| Difference {
                    conversation,
                    chunk,
                    layer: self.space.planes()[position.plane].layer,
                    position,
                });
            }
            self.progress.add(found.bytes);
            tokio::task::yield_now().await;
        }
        // Blocks outside this conversation: nothing may have been written there.
        let others = &table[loaded * chunk_blocks..];
        let stray: usize = others
            .iter()
            .map(|&block| self.cache.bytes_unlike(block, POISON))
            .sum();
        self.report.stray_bytes += stray as u64;
        let phase = self.report.phase(DemoPhase::COMPARE).add(&watch, &*self.store);
        phase.chunks += loaded;
        phase.bytes += compared_bytes;
    }
}
