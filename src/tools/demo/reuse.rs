//! The second half of the demo: look up in three ways, load into other pages, and compare every byte.

use tokio::time::Instant;

use super::error::DemoError;
use super::report::{DemoPhase, Difference, Missed};
use super::session::{Demo, KindPages, POISON, RequestWatch};
use super::synthetic::compare;
use crate::cache::gateway::{AfterMiss, LoadSpec};
use crate::protocol::Order;
use crate::protocol::Strategy;

impl Demo {
    /// Looks up all prompts three times: chunk by chunk, by searching for the end, and again with the answers known.
    pub async fn look_up(&mut self) -> Result<(), DemoError> {
        self.look_up_all(DemoPhase::COLD_EXACT, Strategy::Exact).await?;
        self.gateway.forget_existence();
        self.look_up_all(DemoPhase::COLD_PREFIX, Strategy::Prefix).await?;
        // The search inferred some answers; an exact lookup makes all of them known.
        self.gateway.forget_existence();
        for conversation in &self.plan.conversations {
            self.boundary(&conversation.chunks, Strategy::Exact).await;
        }
        self.look_up_all(DemoPhase::WARM, Strategy::Exact).await
    }

    async fn look_up_all(&mut self, name: &'static str, strategy: Strategy) -> Result<(), DemoError> {
        self.progress.start(name, self.plan.chunks() as u64, false);
        let watch = RequestWatch::start(&*self.store);
        let (mut hits, mut unknown) = (0, None);
        for conversation in &self.plan.conversations {
            let found = self.boundary(&conversation.chunks, strategy).await;
            hits += found.chunks;
            unknown = unknown.or(found.error);
            self.progress.add(conversation.chunks.len() as u64);
        }
        let phase = self.report.phase(name).add(&watch, &*self.store);
        phase.chunks = self.plan.chunks();
        phase.hits = Some(hits);
        unknown.map_or(Ok(()), |error| Err(DemoError::Lookup(error)))
    }

    /// Loads what each conversation needs into pages of its own, chunk by chunk as they arrive; then compares every byte.
    pub async fn load_and_compare(&mut self) -> Result<(), DemoError> {
        self.progress
            .start("load, compare", 2 * self.report.needed_bytes(), true);
        for conversation in 0..self.plan.conversations.len() {
            if conversation > 0 {
                // The pages of the conversation before must not help this one.
                let watch = RequestWatch::start(&*self.store);
                let bytes = self.poison();
                let phase = self.report.phase(DemoPhase::FORGET).add(&watch, &*self.store);
                phase.bytes += bytes;
            }
            self.deal();
            for kind in 0..self.kinds.len() {
                let loaded = self.load(kind, conversation).await?;
                self.compare(kind, conversation, &loaded).await;
            }
        }
        self.finish();
        Ok(())
    }

    /// Loads what a conversation needs of a kind; returns the chunks that are in their pages.
    async fn load(&mut self, kind: usize, conversation: usize) -> Result<Vec<usize>, DemoError> {
        let watch = RequestWatch::start(&*self.store);
        let chunks = &self.plan.conversations[conversation].chunks;
        let KindPages { space, pages } = &mut self.kinds[kind];
        let needed = space.needed(chunks.len());
        let mut stream = self.gateway.load(LoadSpec {
            space: space.clone(),
            chunks: chunks[needed.clone()].to_vec(),
            order: Order::Chunk,
            after_miss: AfterMiss::Stop,
            deadline: Instant::now() + self.config.load.deadline,
        });
        let mut loaded = Vec::new();
        while let Some((index, outcome)) = stream.next().await {
            let chunk = needed.start + index;
            match outcome {
                Ok(object) => {
                    let scattering = Instant::now();
                    pages.scatter(self.plan.place(kind, chunk), object.payload())?;
                    self.report.scatter_seconds += scattering.elapsed().as_secs_f64();
                    loaded.push(chunk);
                    self.progress.add(object.payload().len() as u64);
                    // The slot is free again here.
                }
                Err(miss) => self.report.missed.push(Missed {
                    conversation,
                    kind: space.kind(),
                    chunk,
                    code: miss.code(),
                    reason: miss.to_string(),
                }),
            }
        }
        let bytes = (loaded.len() * space.layout().payload_len()) as u64;
        let phase = self.report.phase(DemoPhase::LOAD).add(&watch, &*self.store);
        phase.chunks += loaded.len();
        phase.bytes += bytes;
        Ok(loaded)
    }

    async fn compare(&mut self, kind: usize, conversation: usize, loaded: &[usize]) {
        let watch = RequestWatch::start(&*self.store);
        let KindPages { space, pages } = &self.kinds[kind];
        let mut compared_bytes = 0;
        for &chunk in loaded {
            let states = self.plan.conversations[conversation].row_states(space, chunk);
            let found = compare(pages, self.plan.place(kind, chunk), states);
            compared_bytes += found.bytes;
            self.report.compared_bytes += found.bytes;
            self.report.different_bytes += found.different_bytes;
            if self.report.first_difference.is_none() {
                self.report.first_difference = found.first.map(|position| Difference {
                    conversation,
                    kind: space.kind(),
                    chunk,
                    layer: space.planes()[position.plane].layer,
                    position,
                });
            }
            self.progress.add(found.bytes);
            tokio::task::yield_now().await;
        }
        // All other blocks: nothing may have been written there.
        let places = 0..self.plan.kept[kind].len();
        let others = places
            .filter(|&place| !loaded.contains(&self.plan.kept[kind][place]))
            .flat_map(|place| pages.blocks(place))
            .chain(pages.blocks_behind(self.plan.kept[kind].len()));
        let stray: usize = others.map(|&block| pages.bytes_unlike(block, POISON)).sum();
        self.report.stray_bytes += stray as u64;
        let phase = self.report.phase(DemoPhase::COMPARE).add(&watch, &*self.store);
        phase.chunks += loaded.len();
        phase.bytes += compared_bytes;
    }
}
