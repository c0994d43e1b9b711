//! The outcomes of a load in their order. A driver fetches in the background; the stream hands out the outcomes,
//! and ends the run at the first miss where the caller wants that.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::spec::AfterMiss;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::miss::Miss;
use crate::cache::gateway::task::Task;
use crate::protocol::Order;
use crate::s3::object::{ErrorKind, ObjectError, Operation};

/// The outcomes of a load, each as soon as it and those before it are known. Dropping the stream gives up the rest.
///
/// In chunk order every chunk has one outcome, in the order of the prompt. In layer order a chunk has one for each
/// group of layers until it misses; they come window by window, group by group, chunk by chunk. A miss is a chunk's
/// last outcome. With [`AfterMiss::Stop`] a miss ends the run: all later chunks get [`Miss::RunEnded`] at once, and
/// in layer order those before it go on.
pub struct LoadStream {
    order: Order,
    window: usize,
    after_miss: AfterMiss,
    /// For each chunk, whether its last outcome was told.
    over: Vec<bool>,
    open: usize,
    ended_at: Option<usize>,
    /// The next chunk to be told that the run ended.
    tell: usize,
    run_end: watch::Sender<usize>,
    /// See [`at_a_gap`](Self::at_a_gap).
    gap: Box<dyn Fn(usize) + Send + Sync>,
    steps: mpsc::UnboundedReceiver<LoadStep>,
    /// The step whose outcome comes next, once it is here.
    current: Option<LoadStep>,
    /// The leading chunks that were in memory when the load began.
    ready: VecDeque<LoadedChunk>,
    /// None if there is nothing to fetch.
    driver: Option<Task<()>>,
}

/// An outcome on its way; dropping it ends the fetch.
pub struct LoadStep {
    pub index: usize,
    /// Whether this is the chunk's last outcome.
    pub last: bool,
    pub fetch: Task<Result<LoadedChunk, Miss>>,
}

/// The stream was dropped: its outcomes are not wanted any more.
pub struct LoadGone;

/// The end of the run, for the tasks that fetch later chunks.
#[derive(Clone)]
pub struct RunEnd(watch::Receiver<usize>);

impl LoadStream {
    pub fn new(
        chunks: usize,
        order: Order,
        window: usize,
        after_miss: AfterMiss,
        steps: mpsc::UnboundedReceiver<LoadStep>,
        ready: VecDeque<LoadedChunk>,
        start: impl FnOnce(RunEnd) -> Task<()>,
    ) -> Self {
        let (run_end, receiver) = watch::channel(usize::MAX);
        Self {
            order,
            window,
            after_miss,
            over: vec![false; chunks],
            open: chunks,
            ended_at: None,
            tell: chunks,
            run_end,
            gap: Box::new(|_| ()),
            steps,
            current: None,
            driver: (ready.len() < chunks).then(|| start(RunEnd(receiver))),
            ready,
        }
    }

    /// `gap` is called with the position of a chunk that is gone, where that ends the run.
    #[must_use]
    pub fn at_a_gap(mut self, gap: impl Fn(usize) + Send + Sync + 'static) -> Self {
        self.gap = Box::new(gap);
        self
    }

    /// The order of the load: that of the request, or chunk order where layer order has no room.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Number of chunks whose layers come together: 1 in chunk order.
    pub fn window(&self) -> usize {
        self.window
    }

    /// The next outcome, with the chunk's position in the request; None after the last. Cancel safe: dropping the
    /// future loses nothing.
    pub async fn next(&mut self) -> Option<(usize, Result<LoadedChunk, Miss>)> {
        loop {
            if let Some((index, at)) = self.next_after_the_end() {
                return Some((index, Err(Miss::RunEnded { at })));
            }
            if self.open == 0 {
                return None;
            }
            if let Some(chunk) = self.ready.pop_front() {
                let index = self.over.len() - self.open;
                self.close(index);
                return Some((index, Ok(chunk)));
            }
            if self.current.is_none() {
                self.current = self.steps.recv().await;
            }
            let (index, last, outcome) = match &mut self.current {
                Some(step) if self.over[step.index] => {
                    self.current = None;
                    continue;
                }
                Some(step) => (step.index, step.last, step.fetch.join().await),
                // The driver panicked.
                None => (self.over.iter().position(|over| !over)?, true, None),
            };
            // No await from here on.
            self.current = None;
            let outcome = outcome.unwrap_or_else(|| Err(lost()));
            if last || outcome.is_err() {
                self.close(index);
            }
            if let Err(miss) = &outcome
                && self.after_miss == AfterMiss::Stop
            {
                if matches!(miss, Miss::Absent) {
                    (self.gap)(index);
                }
                self.end_run(index);
            }
            return Some((index, outcome));
        }
    }

    fn close(&mut self, index: usize) {
        self.over[index] = true;
        self.open -= 1;
    }

    /// Ends the fetches under way behind a missing chunk.
    fn end_run(&mut self, at: usize) {
        (self.ended_at, self.tell) = (Some(at), at + 1);
        self.run_end.send_replace(at);
        if self.over[..at].iter().all(|&over| over) {
            // No fetch before it goes on either. This gives the ticket back, too.
            if let Some(driver) = &self.driver {
                driver.end();
            }
            self.steps.close();
            while self.steps.try_recv().is_ok() {}
        }
    }

    /// A chunk behind the end of the run that was not told yet, and the position of the end.
    fn next_after_the_end(&mut self) -> Option<(usize, usize)> {
        let at = self.ended_at?;
        let index = (self.tell..self.over.len()).find(|&index| !self.over[index])?;
        self.tell = index + 1;
        self.close(index);
        Some((index, at))
    }

    /// All outcomes, in the order in which they come: in chunk order one for each chunk. Every loaded chunk keeps
    /// its slot meanwhile, so all must fit in the arena together.
    pub async fn collect(mut self) -> Vec<Result<LoadedChunk, Miss>> {
        let mut outcomes = Vec::with_capacity(self.open);
        while let Some((_, outcome)) = self.next().await {
            outcomes.push(outcome);
        }
        outcomes
    }
}

impl RunEnd {
    /// Whether a chunk is still wanted.
    pub fn wants(&self, index: usize) -> bool {
        index < *self.0.borrow()
    }

    /// Waits until a chunk is not wanted any more; returns the end of the run.
    pub async fn passes(mut self, index: usize) -> usize {
        let at = self.0.wait_for(|&at| at <= index).await.map(|at| *at);
        match at {
            Ok(at) => at,
            // The stream is gone, and soon the task that waits here as well.
            Err(_) => pending().await,
        }
    }
}

fn lost() -> Miss {
    let lost = ObjectError::new(
        Operation::Get,
        "a load",
        ErrorKind::Broken,
        "its task ended early",
    );
    Miss::Unknown(Arc::new(lost))
}
