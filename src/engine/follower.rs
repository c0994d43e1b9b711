//! What a node's memory and disks hold of an engine's chunks, for the engine's own KV events.
//!
//! An engine publishes events when it steps, and may not step for a long time. So nothing is queued: for each chunk this
//! keeps what the node has (`here`) and what the engine has taken (`told`), and [`Follower::take`] is the difference. A task
//! sends what is to be bound, and follows the node's log. While the node can't be reached nothing is there. After that, or
//! when the log was lost, all is read anew. A new daemon is told what is known here, for its disks may have it.
//!
//! Routers drop a chunk whose parent they don't know. The log is in another order: a parent that left and came back is newer
//! than what follows it. So a chunk is told of only after its parent, and waits until then.
//!
//! Routers also forget what they were told, when the engine says that its own cache is empty. Then all is told anew, that it
//! is gone at first: some routers keep it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::engine::client::{Client, ClientError};
use crate::format::{ChunkHash, Space};
use crate::protocol::{BindRequest, BoundChunk, EventsAnswer, EventsRequest, Tier};

/// Time that the node waits for an event before it answers that there is none.
const WAIT: Duration = Duration::from_secs(2);
/// Between two questions: events of a busy node come together.
const PAUSE: Duration = Duration::from_millis(50);
/// After a call that failed.
const AGAIN: Duration = Duration::from_millis(500);
/// Time for an answer, and after the last one, after which nothing is there.
const PATIENCE: Duration = Duration::from_secs(2);
/// Chunks that wait to be bound; beyond that the oldest have no events.
const BINDS_MAX: usize = 8192;
/// Chunks of one call, when all are bound anew.
const BINDS_AT_ONCE: usize = 256;

const TIERS: [Tier; 2] = [Tier::Memory, Tier::Disk];

/// See the [module](self).
pub struct Follower(Arc<Following>);

struct Following {
    client: Client,
    space: Space,
    scheme: String,
    state: Mutex<Followed>,
    /// There is something to bind.
    is_asked: Notify,
}

#[derive(Default)]
struct Followed {
    known: HashMap<ChunkHash, KnownChunk>,
    /// Those of which `here` and `told` may differ, by the numbers of their changes.
    changed: BTreeMap<u64, ChunkHash>,
    /// Chunks that are known and wait for their parents, each behind its parent.
    held: BTreeSet<(ChunkHash, ChunkHash)>,
    /// To be told first: what was told, and is not told any more or is told anew.
    gone: VecDeque<TierChange>,
    to_bind: VecDeque<BindRequest>,
    /// What is known is of a node that can't be reached, or whose log was lost: it may be there all the same.
    is_open: bool,
    /// It is being read anew, and nothing is told meanwhile: most of it is there all the same.
    is_reading: bool,
    /// Of the latest change, or chunk that came to be known.
    number: u64,
    /// Chunks that were not bound because too many waited.
    unbound: u64,
}

struct KnownChunk {
    bound: Arc<BoundChunk>,
    number: u64,
    here: [bool; 2],
    told: [bool; 2],
    /// Its place in `changed`.
    changed: Option<u64>,
}

/// A chunk came into a tier, or left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierChange {
    pub tier: Tier,
    pub is_stored: bool,
    pub chunk: Arc<BoundChunk>,
}

impl Follower {
    pub fn new(client: &Client, space: Space, scheme: String) -> Self {
        Self(Arc::new(Following {
            // One that hangs is as good as gone.
            client: client.with_patience(PATIENCE),
            space,
            scheme,
            state: Mutex::default(),
            is_asked: Notify::new(),
        }))
    }

    /// The task. It ends when the follower is dropped.
    pub fn follow(&self) -> impl Future<Output = ()> + Send + use<> {
        let (bound, read) = (Arc::downgrade(&self.0), Arc::downgrade(&self.0));
        async move {
            tokio::join!(bind_while_there(bound), read_while_there(read));
        }
    }

    /// Chunks of one prompt, parents first, that the node has or is about to have. Does not wait.
    pub fn bind(
        &self,
        chunks: Vec<BoundChunk>,
        block_size: Option<usize>,
        lora_name: &str,
        cache_salt: &str,
    ) {
        let request = BindRequest {
            space: self.0.space.id().to_string(),
            scheme: self.0.scheme.clone(),
            chunks,
            block_size,
            lora_name: lora_name.to_owned(),
            cache_salt: cache_salt.to_owned(),
        };
        self.0.lock().ask(request);
        self.0.is_asked.notify_one();
    }

    /// The engine's subscribers may have forgotten all.
    pub fn tell_anew(&self) {
        self.0.lock().tell_anew();
    }

    /// Another in the place of this one: it first tells that all that this one has told is gone.
    #[must_use]
    pub fn succeeded_by(&self, scheme: String) -> Self {
        let mut before = self.0.lock();
        before.retire();
        let state = Followed {
            gone: mem::take(&mut before.gone),
            ..Followed::default()
        };
        Self(Arc::new(Following {
            client: self.0.client.clone(),
            space: self.0.space.clone(),
            scheme,
            state: Mutex::new(state),
            is_asked: Notify::new(),
        }))
    }

    /// At most so many changes since the last call.
    pub fn take(&self, most: usize) -> Vec<TierChange> {
        self.0.lock().take(most)
    }

    /// Chunks that were not bound so far, because too many waited for the node.
    pub fn unbound(&self) -> u64 {
        self.0.lock().unbound
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Its task has no other reason to wake.
        self.0.is_asked.notify_one();
    }
}

async fn bind_while_there(following: Weak<Following>) {
    while let Some(following) = following.upgrade() {
        following.bind_next().await;
    }
}

async fn read_while_there(following: Weak<Following>) {
    let mut reader = LogReader::default();
    while let Some(following) = following.upgrade() {
        reader.read(&following).await;
    }
}

impl Following {
    async fn bind_next(&self) {
        let next = self.lock().to_bind.pop_front();
        let Some(request) = next else {
            // It wakes at times to see whether the follower is gone.
            let _ = tokio::time::timeout(WAIT, self.is_asked.notified()).await;
            return;
        };
        let Err(error) = self.bind(&request).await else {
            return;
        };
        tracing::debug!(%error, "chunks were not bound");
        // Refused ones have no events; nothing is wrong by that.
        if !matches!(error, ClientError::Refused(_)) {
            self.lock().ask_first(request);
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn bind(&self, request: &BindRequest) -> Result<(), ClientError> {
        let bound = self.client.bind(request).await;
        match self.is_unknown(&bound).await? {
            true => self.client.bind(request).await.map(drop),
            false => bound.map(drop),
        }
    }

    async fn events(&self, cursor: Option<&str>) -> Result<EventsAnswer, ClientError> {
        let request = EventsRequest {
            space: self.space.id().to_string(),
            scheme: self.scheme.clone(),
            cursor: cursor.map(str::to_owned),
            wait_ms: u64::try_from(WAIT.as_millis()).unwrap_or(u64::MAX),
        };
        let answer = self.client.events(&request).await;
        match self.is_unknown(&answer).await? {
            true => self.client.events(&request).await,
            false => answer,
        }
    }

    /// Whether a daemon, perhaps a new one, did not know the space. Now it does.
    async fn is_unknown<T>(&self, answer: &Result<T, ClientError>) -> Result<bool, ClientError> {
        let is_unknown =
            matches!(answer, Err(ClientError::Refused(problem)) if problem.code == "unknown_space");
        if is_unknown {
            self.client.declare(&self.space).await?;
        }
        Ok(is_unknown)
    }

    /// Tells a daemon, perhaps a new one, what is known.
    async fn bind_all(&self) -> Result<(), ClientError> {
        let all = self.lock().all();
        for chunks in all.chunks(BINDS_AT_ONCE) {
            let request = BindRequest {
                space: self.space.id().to_string(),
                scheme: self.scheme.clone(),
                chunks: chunks.to_vec(),
                block_size: None,
                lora_name: String::new(),
                cache_salt: String::new(),
            };
            self.bind(&request).await?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Followed> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task's place in the node's log.
#[derive(Default)]
struct LogReader {
    /// None: it begins.
    cursor: Option<String>,
    answered: Option<Instant>,
}

impl LogReader {
    async fn read(&mut self, following: &Following) {
        let pause = match self.read_on(following).await {
            Ok(()) => PAUSE,
            Err(error) => {
                tracing::debug!(%error, "no events");
                if self
                    .answered
                    .is_none_or(|answered| answered.elapsed() >= PATIENCE)
                {
                    self.cursor = None;
                    following.lock().withdraw();
                }
                AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }

    async fn read_on(&mut self, following: &Following) -> Result<(), ClientError> {
        if self.cursor.is_none() {
            return self.read_all(following).await;
        }
        let answer = following.events(self.cursor.as_deref()).await?;
        self.answered = Some(Instant::now());
        if answer.is_lost {
            self.cursor = None;
            return Ok(());
        }
        self.cursor = Some(answer.cursor.clone());
        following.lock().apply(answer);
        Ok(())
    }

    /// What is there now. What was known and is not there is forgotten.
    async fn read_all(&mut self, following: &Following) -> Result<(), ClientError> {
        following.lock().begin();
        following.bind_all().await?;
        let mut cursor = None;
        loop {
            let answer = following.events(cursor.as_deref()).await?;
            self.answered = Some(Instant::now());
            if answer.is_lost {
                return Ok(());
            }
            let is_end = answer.is_end;
            cursor = Some(answer.cursor.clone());
            let mut followed = following.lock();
            followed.apply(answer);
            if is_end {
                followed.close();
                self.cursor = cursor;
                return Ok(());
            }
        }
    }
}

impl Followed {
    fn ask(&mut self, request: BindRequest) {
        self.to_bind.push_back(request);
        self.drop_the_oldest();
    }

    fn ask_first(&mut self, request: BindRequest) {
        self.to_bind.push_front(request);
        self.drop_the_oldest();
    }

    fn drop_the_oldest(&mut self) {
        let mut waiting: usize = self.to_bind.iter().map(|request| request.chunks.len()).sum();
        while waiting > BINDS_MAX
            && let Some(oldest) = self.to_bind.pop_front()
        {
            waiting -= oldest.chunks.len();
            self.unbound += oldest.chunks.len() as u64;
        }
    }

    /// In the order in which they came to be known.
    fn all(&self) -> Vec<BoundChunk> {
        let mut all: Vec<&KnownChunk> = self.known.values().collect();
        all.sort_unstable_by_key(|known| known.number);
        all.into_iter()
            .map(|known| BoundChunk::clone(&known.bound))
            .collect()
    }

    fn apply(&mut self, answer: EventsAnswer) {
        for event in answer.events {
            let Some(place) = TIERS.iter().position(|tier| *tier == event.tier) else {
                continue;
            };
            if let Some(bound) = event.stored {
                self.number += 1;
                let number = self.number;
                let known = self.known.entry(event.hash).or_insert_with(|| KnownChunk {
                    bound: Arc::new(bound),
                    number,
                    here: [false; 2],
                    told: [false; 2],
                    changed: None,
                });
                known.here[place] = true;
            } else if let Some(known) = self.known.get_mut(&event.hash) {
                known.here[place] = false;
            }
            self.note(event.hash);
        }
    }

    /// Its state may have changed.
    fn note(&mut self, hash: ChunkHash) {
        if self.is_reading {
            return;
        }
        let Some(known) = self.known.get_mut(&hash) else {
            return;
        };
        let has_changed = known.here != known.told;
        if has_changed && known.changed.is_none() {
            self.number += 1;
            known.changed = Some(self.number);
            self.changed.insert(self.number, hash);
        }
        self.forget_absent(&hash);
    }

    fn forget_absent(&mut self, hash: &ChunkHash) {
        let is_absent = |known: &KnownChunk| [known.here, known.told] == [[false; 2]; 2];
        if self.is_open || !self.known.get(hash).is_some_and(is_absent) {
            return;
        }
        // Also if it came and left between two steps: an engine may not step for a long time.
        if let Some(known) = self.known.remove(hash) {
            if let Some(number) = known.changed {
                self.changed.remove(&number);
            }
            if let Some(parent) = known.bound.parent {
                self.held.remove(&(parent, *hash));
            }
        }
    }

    fn take(&mut self, most: usize) -> Vec<TierChange> {
        let gone = self.gone.len().min(most);
        let mut changes: Vec<TierChange> = self.gone.drain(..gone).collect();
        while !self.is_reading
            && changes.len() < most
            && let Some((_, hash)) = self.changed.pop_first()
        {
            self.tell(hash, &mut changes);
            self.forget_absent(&hash);
        }
        changes
    }

    fn tell(&mut self, hash: ChunkHash, changes: &mut Vec<TierChange>) {
        let parent = self.known.get(&hash).and_then(|known| known.bound.parent);
        let has_parent = parent.is_none_or(|parent| self.is_told(&parent));
        let was_told = self.is_told(&hash);
        let Some(known) = self.known.get_mut(&hash) else {
            return;
        };
        known.changed = None;
        for (place, tier) in TIERS.into_iter().enumerate() {
            let is_stored = known.here[place];
            if is_stored == known.told[place] {
                continue;
            }
            if is_stored && !has_parent {
                self.held.extend(parent.map(|parent| (parent, hash)));
                continue;
            }
            known.told[place] = is_stored;
            changes.push(TierChange {
                tier,
                is_stored,
                chunk: Arc::clone(&known.bound),
            });
        }
        if !was_told && self.is_told(&hash) {
            self.release(hash);
        }
    }

    /// In some tier.
    fn is_told(&self, hash: &ChunkHash) -> bool {
        self.known.get(hash).is_some_and(|known| known.told != [false; 2])
    }

    /// What follows a chunk waits no longer.
    fn release(&mut self, parent: ChunkHash) {
        let behind = (parent, ChunkHash([0; 32]))..=(parent, ChunkHash([u8::MAX; 32]));
        let held: Vec<ChunkHash> = self.held.range(behind).map(|(_, hash)| *hash).collect();
        for hash in held {
            self.held.remove(&(parent, hash));
            self.note(hash);
        }
    }

    fn tell_anew(&mut self) {
        self.retire();
        self.note_all(|_| {});
    }

    fn retire(&mut self) {
        for known in self.known.values_mut() {
            for (place, tier) in TIERS.into_iter().enumerate() {
                if mem::take(&mut known.told[place]) {
                    self.gone.push_back(TierChange {
                        tier,
                        is_stored: false,
                        chunk: Arc::clone(&known.bound),
                    });
                }
            }
        }
    }

    /// Nothing is there as far as is known: the node can't be reached.
    fn withdraw(&mut self) {
        (self.is_open, self.is_reading) = (true, false);
        self.note_all(|known| known.here = [false; 2]);
    }

    /// All is read anew. What was withdrawn is told as it is read.
    fn begin(&mut self) {
        self.is_reading |= !self.is_open;
        self.is_open = true;
        self.known.values_mut().for_each(|known| known.here = [false; 2]);
    }

    /// All was read: what is not there is gone.
    fn close(&mut self) {
        (self.is_open, self.is_reading) = (false, false);
        self.note_all(|_| {});
    }

    fn note_all(&mut self, change: impl Fn(&mut KnownChunk)) {
        let mut all: Vec<(u64, ChunkHash)> = Vec::with_capacity(self.known.len());
        for (hash, known) in &mut self.known {
            change(known);
            all.push((known.number, *hash));
        }
        all.sort_unstable();
        all.into_iter().for_each(|(_, hash)| self.note(hash));
    }
}

#[cfg(test)]
mod tests;
