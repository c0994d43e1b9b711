//! The first half of the demo, turn by turn: look up, generate the rest into pages, gather it into slots, store it.

use tokio::time::Instant;

use super::error::DemoError;
use super::report::DemoPhase;
use super::session::{Demo, KindPages, RequestWatch};
use super::synthetic::generate;
use crate::cache::gateway::{FilledSlot, StoreOutcome};

/// Chunks of a conversation that S3 lacks: `prompt[from..to]`.
struct Missing {
    conversation: usize,
    from: usize,
    to: usize,
}

impl Demo {
    /// For each turn of each conversation: looks up the prompt's stored chunks, generates the rest, and stores it.
    ///
    /// The three take turns instead of overlapping, so that each has its own time.
    pub async fn prefill_and_store(&mut self) -> Result<(), DemoError> {
        self.progress
            .start("prefill, store", self.report.unique_bytes(), true);
        for conversation in 0..self.plan.conversations.len() {
            self.deal();
            for turn in 0..self.plan.conversations[conversation].turns.len() {
                let prompt = self.plan.conversations[conversation].turns[turn];
                let found = self.look(conversation, prompt).await?;
                let missing = Missing {
                    conversation,
                    from: found,
                    to: prompt,
                };
                for kind in 0..self.kinds.len() {
                    self.generate(kind, &missing).await;
                    let watch = RequestWatch::start(&*self.store);
                    let result = self.store(kind, &missing).await;
                    self.report.phase(DemoPhase::STORE).add(&watch, &*self.store);
                    result?;
                }
            }
        }
        Ok(())
    }

    /// The engine's lookup: how much of this prompt need not be computed?
    async fn look(&mut self, conversation: usize, prompt: usize) -> Result<usize, DemoError> {
        let watch = RequestWatch::start(&*self.store);
        let chunks = &self.plan.conversations[conversation].chunks[..prompt];
        let found = self.boundary(chunks, self.config.lookup.strategy).await;
        let phase = self.report.phase(DemoPhase::LOOKUP).add(&watch, &*self.store);
        phase.chunks += prompt;
        phase.hits = Some(phase.hits.unwrap_or(0) + found.chunks);
        match found.error {
            Some(error) => Err(DemoError::Lookup(error)),
            None => Ok(found.chunks),
        }
    }

    async fn generate(&mut self, kind: usize, missing: &Missing) {
        for &chunk in self.plan.kept_within(kind, missing.from, missing.to) {
            let watch = RequestWatch::start(&*self.store);
            let conversation = &self.plan.conversations[missing.conversation];
            let KindPages { space, pages } = &mut self.kinds[kind];
            let states = conversation.row_states(space, chunk);
            generate(pages, self.plan.place(kind, chunk), states);
            let phase = self.report.phase(DemoPhase::GENERATE).add(&watch, &*self.store);
            phase.chunks += 1;
            phase.bytes += space.layout().payload_len() as u64;
            // The point where Ctrl-C takes effect.
            tokio::task::yield_now().await;
        }
    }

    /// Gathers pages into slots and stores them, as many at once as the arena holds.
    async fn store(&mut self, kind: usize, missing: &Missing) -> Result<(), DemoError> {
        for chunk in self.plan.kept_within(kind, missing.from, missing.to).to_vec() {
            let slot = loop {
                match self.gateway.reserve(&self.kinds[kind].space) {
                    Ok(slot) => break slot,
                    // Reserving never waits: a slot is free when a store ends.
                    Err(_) if !self.stores.is_empty() => self.one_stored().await?,
                    Err(full) => {
                        return Err(DemoError::Arena {
                            object_bytes: full.object_bytes,
                            arena: self.config.arena.size,
                        });
                    }
                }
            };
            let gathering = Instant::now();
            let place = self.plan.place(kind, chunk);
            let pages = &mut self.kinds[kind].pages;
            let slot = slot.filled_by(|object| pages.gather(place, object))?;
            self.report.gather_seconds += gathering.elapsed().as_secs_f64();

            let conversation = &self.plan.conversations[missing.conversation];
            let hash = conversation.chunks[chunk];
            let parent = conversation.parent(chunk, self.plan.root);
            let gateway = self.gateway.clone();
            let deadline = Instant::now() + self.config.store.deadline;
            self.stores.spawn(async move {
                let new = FilledSlot { hash, parent, slot };
                (kind, hash, gateway.write_through(new, deadline).await)
            });
        }
        while !self.stores.is_empty() {
            self.one_stored().await?;
        }
        Ok(())
    }

    async fn one_stored(&mut self) -> Result<(), DemoError> {
        let Some(done) = self.stores.join_next().await else {
            return Ok(());
        };
        let (kind, chunk, outcome) = done?;
        let bytes = self.kinds[kind].space.layout().payload_len() as u64;
        let phase = self.report.phase(DemoPhase::STORE);
        match outcome {
            StoreOutcome::Stored => {
                self.stored.insert((kind, chunk));
                phase.chunks += 1;
                phase.bytes += bytes;
            }
            // Stored by another run with the same seed, at the same time.
            StoreOutcome::Present | StoreOutcome::Pending => {
                phase.hits = Some(phase.hits.unwrap_or(0) + 1);
            }
            StoreOutcome::Failed(error) => return Err(DemoError::Store(error)),
        }
        self.progress.add(bytes);
        Ok(())
    }
}
