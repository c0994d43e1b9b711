//! A scheduler's lookups, none of which it ever waits for.
//!
//! The first call for a request starts a task on the runtime and says "not yet"; later calls take its answer. The answer
//! is kept until the request loads or ends, so that a scheduler may ask in each step. After some lookups in a row that
//! ran out of time, a breaker answers "nothing there" for a while without asking.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvgate::engine::client::{Client, ClientError, DaemonAddress, FoundChunks, traced};
use kvgate::engine::rank::LookupBreaker;
use kvgate::format::{ChunkHash, Mask, Space};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::error::failed;
use crate::prompt::{self, Chain, Prompt};
use crate::runtime::runtime;
use crate::space::PySpace;

/// The latest question of each request.
type Questions = Arc<Mutex<HashMap<String, Question>>>;

#[pyclass(frozen, module = "kvgate._native")]
pub struct Lookups {
    asker: Asker,
    deadline: Duration,
    pin: Duration,
    again: Duration,
    questions: Questions,
}

/// The parts of a question that its task needs, off the caller's thread.
#[derive(Clone)]
struct Asker {
    client: Client,
    /// The spaces of all kinds of KV that an engine can't go on without, then those of drafts.
    spaces: Vec<Space>,
    /// The query's part that is the same in all questions.
    query: String,
    /// Time of the first round.
    round: Duration,
    pin_ms: u64,
    patience: Duration,
    at_once: Arc<Semaphore>,
    breaker: Arc<LookupBreaker>,
    /// Times of the answered questions, since they were last taken.
    seconds: Arc<Mutex<Vec<f64>>>,
}

/// A lookup of a waiting request. It goes on while the request waits: its time is over only when the scheduler has
/// come to the request, and has then waited for the deadline.
struct Question {
    /// Unique, so that an older question's result is not taken for this one's answer.
    number: Number,
    /// The answer so far, and its time: its pins hold from then on.
    told: Option<Told>,
    /// The answer of the question before.
    before: Option<Told>,
    /// More chunks than in `before` are there: it counts only if this question has no answer in time.
    is_awaited: bool,
    /// The time when the question ended.
    ended: Option<Instant>,
    /// The time when the scheduler came to the request.
    wanted: Option<Instant>,
    /// An answer was returned to the scheduler.
    is_given: bool,
    /// More chunks than in this question's answer are there by now.
    is_outdated: bool,
    /// The reason for a missing answer: `paused` (the breaker is open), `failed` (the gateway could not say),
    /// `late`.
    trouble: Option<&'static str>,
    /// The breaker that must still be told whether the gateway answered in time.
    owed: Option<Arc<LookupBreaker>>,
    task: Option<AbortHandle>,
}

/// Compared by address.
type Number = Arc<()>;

#[derive(Clone)]
struct Told {
    /// Leading chunks after which an engine can go on.
    boundary: usize,
    /// Leading chunks that all full kinds have.
    full: usize,
    at: Instant,
    /// The chunks of the first full kind in the node's memory and on its disks.
    memory: Mask,
    disk: Mask,
}

#[pymethods]
impl Lookups {
    #[new]
    #[pyo3(signature = (
        socket, spaces, drafts, deadline_ms=50, pin_ms=30_000, breaker_timeouts=3, breaker_pause_ms=10_000,
        again_ms=5_000, patience_ms=10_000, at_once=256, socket_owner=None, state_every=0, lookahead=0,
    ))]
    fn new(
        socket: PathBuf,
        spaces: Vec<PyRef<'_, PySpace>>,
        drafts: Vec<PyRef<'_, PySpace>>,
        deadline_ms: u64,
        pin_ms: u64,
        breaker_timeouts: u32,
        breaker_pause_ms: u64,
        again_ms: u64,
        patience_ms: u64,
        at_once: usize,
        socket_owner: Option<u32>,
        state_every: usize,
        lookahead: usize,
    ) -> PyResult<Self> {
        if spaces.is_empty() {
            return Err(failed("a lookup is about one space at least"));
        }
        let mut query = String::from("prefetch=true&tiers=true");
        let others = spaces[1..].iter().map(|space| ("with", space));
        for (name, space) in others.chain(drafts.iter().map(|space| ("drafts", space))) {
            let _ = write!(query, "&{name}={}", space.0.id());
        }
        for (name, number) in [("state_every", state_every), ("lookahead", lookahead)] {
            if number > 0 {
                let _ = write!(query, "&{name}={number}");
            }
        }
        let deadline = Duration::from_millis(deadline_ms);
        let pause = Duration::from_millis(breaker_pause_ms);
        Ok(Self {
            asker: Asker {
                client: Client::new(DaemonAddress::Unix(socket)).trusting(socket_owner),
                spaces: spaces
                    .iter()
                    .chain(&drafts)
                    .map(|space| space.0.clone())
                    .collect(),
                query,
                round: deadline.mul_f64(GATEWAYS_SHARE),
                pin_ms,
                patience: Duration::from_millis(patience_ms),
                at_once: Arc::new(Semaphore::new(at_once.min(Semaphore::MAX_PERMITS))),
                breaker: Arc::new(LookupBreaker::new(breaker_timeouts, pause)),
                seconds: Arc::default(),
            },
            deadline,
            pin: Duration::from_millis(pin_ms),
            again: Duration::from_millis(again_ms),
            questions: Questions::default(),
        })
    }

    /// Asks about the first `most` chunks of a prompt, in place of the request's earlier question. The hashes are
    /// made off the caller's thread.
    #[pyo3(signature = (request, prompt, most, traceparent=None))]
    fn ask(
        &self,
        py: Python<'_>,
        request: String,
        prompt: &Prompt,
        most: usize,
        traceparent: Option<String>,
    ) -> PyResult<()> {
        let (chain, number) = (prompt.chain(), Number::default());
        let is_empty = most == 0 || prompt::lock(&chain).chunks() == 0;
        let is_asked = !is_empty && !self.asker.breaker.is_open();
        let mut question = Question::new(Arc::clone(&number));
        if is_empty {
            question.tell_nothing();
        }
        if is_asked {
            question.ended = None;
        }
        question.trouble = (!is_asked && !is_empty).then_some("paused");
        self.put(request.clone(), question);
        if !is_asked {
            return Ok(());
        }
        let (asker, questions, name) = (self.asker.clone(), Arc::clone(&self.questions), request.clone());
        let asked = async move {
            let change = |change: &dyn Fn(&mut Question)| with(&questions, &name, &number, change);
            let looks = traced(traceparent.as_deref(), asker.look(&chain, most, &change));
            let in_time = tokio::time::timeout(asker.patience, looks).await;
            change(&|question| {
                question.ended = Some(Instant::now());
                if in_time.is_err() {
                    question.trouble.get_or_insert("failed");
                }
                question.note(in_time.is_ok());
            });
        };
        py.detach(|| {
            let task = runtime()?.spawn(asked);
            if let Some(question) = self.lock().get_mut(&request) {
                question.task = Some(task.abort_handle());
            }
            Ok(())
        })
    }

    /// Whether its answer is too old for a request that goes on waiting.
    fn is_old(&self, request: &str) -> bool {
        let is_old = |question: &Question| question.is_over_for(self.again);
        self.lock().get(request).is_some_and(is_old)
    }

    /// Whether there is no question, or its answer is worthless by now. An answer that was waited for counts once,
    /// however long a step of the engine takes.
    fn is_due(&self, request: &str) -> bool {
        let is_due = |question: &Question| {
            let may_wait = question.is_given || question.is_outdated || question.wanted.is_none();
            may_wait && question.is_over_for(self.pin)
        };
        self.lock().get(request).is_none_or(is_due)
    }

    /// The boundary in chunks, if known. The deadline counts from the first call on.
    fn answer(&self, request: &str) -> Option<usize> {
        let mut questions = self.lock();
        let question = questions.get_mut(request)?;
        let wanted = *question.wanted.get_or_insert_with(Instant::now);
        let is_late = wanted.elapsed() >= self.deadline;
        // No wait where an answer is still good, or where the wait would be in vain.
        let is_good = !question.is_awaited && question.pinned(self.pin).is_some();
        let is_vain = question.told.is_none() && self.asker.breaker.is_open();
        if question.ended.is_none() && !is_late && !is_good && !is_vain {
            return None;
        }
        if question.ended.is_none() && is_late {
            question.trouble.get_or_insert("late");
            question.note(false);
        }
        question.is_given = true;
        Some(question.counts(self.pin).map_or(0, |told| told.boundary))
    }

    /// The chunks that all full kinds have, of the answer: up to here a snapshot would be of use.
    fn full(&self, request: &str) -> usize {
        let questions = self.lock();
        let told = questions
            .get(request)
            .and_then(|question| question.counts(self.pin));
        told.map_or(0, |told| told.full)
    }

    /// The tier of each chunk of the answer in the first full kind, as a byte: `m`emory, `d`isk, `s`3.
    fn tiers<'py>(&self, py: Python<'py>, request: &str) -> Bound<'py, PyBytes> {
        let questions = self.lock();
        let told = questions
            .get(request)
            .and_then(|question| question.counts(self.pin));
        let tier_of = |told: &Told, chunk| match (told.memory.get(chunk), told.disk.get(chunk)) {
            (true, _) => b'm',
            (_, true) => b'd',
            _ => b's',
        };
        let tiers = told.map_or_else(Vec::new, |told| {
            (0..told.boundary).map(|chunk| tier_of(told, chunk)).collect()
        });
        PyBytes::new(py, &tiers)
    }

    /// The outcome of its question; None while it goes on.
    fn outcome(&self, request: &str) -> Option<&'static str> {
        let questions = self.lock();
        let question = questions.get(request)?;
        question.trouble.or(question.ended.map(|_| "answered"))
    }

    /// The times of the questions answered since the last call, and whether the breaker is open.
    fn told(&self) -> (Vec<f64>, bool) {
        let seconds = std::mem::take(&mut *self.asker.seconds());
        (seconds, self.asker.breaker.is_open())
    }

    /// Notes that more chunks are there than its question could find.
    fn outdate(&self, request: &str) {
        if let Some(question) = self.lock().get_mut(request) {
            question.is_outdated = true;
        }
    }

    fn forget(&self, request: &str) {
        self.lock().remove(request);
    }
}

impl Lookups {
    fn put(&self, request: String, mut question: Question) {
        let mut questions = self.lock();
        if let Some(before) = questions.get(&request) {
            question.before = before.told.clone().or_else(|| before.before.clone());
            question.is_awaited = before.is_outdated || (before.told.is_none() && before.is_awaited);
        }
        questions.insert(request, question);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Question>> {
        lock(&self.questions)
    }
}

fn lock(questions: &Mutex<HashMap<String, Question>>) -> MutexGuard<'_, HashMap<String, Question>> {
    questions.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Question {
    /// A question that has already ended.
    fn new(number: Number) -> Self {
        Self {
            number,
            told: None,
            before: None,
            is_awaited: true,
            ended: Some(Instant::now()),
            wanted: None,
            is_given: false,
            is_outdated: false,
            trouble: None,
            owed: None,
            task: None,
        }
    }

    fn tell(&mut self, found: &FoundChunks) {
        self.told = Some(Told {
            boundary: found.boundary,
            full: found.full,
            at: Instant::now(),
            memory: found.memory.clone(),
            disk: found.disk.clone(),
        });
    }

    fn tell_nothing(&mut self) {
        self.tell(&FoundChunks::default());
    }

    /// The answer that counts: until this question has one, that of the question before, as long as its pins hold.
    fn counts(&self, pin: Duration) -> Option<&Told> {
        let told = self.told.as_ref();
        if self.ended.is_some() && told.is_some() {
            return told;
        }
        told.into_iter()
            .chain(self.pinned(pin))
            .max_by_key(|told| told.boundary)
    }

    fn pinned(&self, pin: Duration) -> Option<&Told> {
        self.before.as_ref().filter(|before| before.at.elapsed() < pin)
    }

    fn is_over_for(&self, age: Duration) -> bool {
        self.ended
            .is_some_and(|ended| self.is_outdated || ended.elapsed() >= age)
    }

    /// Tells the breaker, once.
    fn note(&mut self, in_time: bool) {
        if let Some(breaker) = self.owed.take() {
            breaker.note(in_time);
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// The gateway's share of the deadline; the rest is for the way.
const GATEWAYS_SHARE: f64 = 0.8;

impl Asker {
    /// Stores what the gateway knows after one round, and again after twice the time, until no missing answer could
    /// tell of more, or it fails.
    async fn look(
        &self,
        chain: &Mutex<Chain>,
        most: usize,
        change: &(impl Fn(&dyn Fn(&mut Question)) + Sync),
    ) {
        let hashes = prompt::lock(chain)
            .hashes()
            .map(|hashes| hashes[..most.min(hashes.len())].to_vec());
        let (mut time, asked) = (self.round, Instant::now());
        let mut is_first = true;
        while let (Ok(hashes), Ok(_permit)) = (&hashes, self.at_once.acquire().await) {
            if std::mem::take(&mut is_first) {
                change(&|question| question.owed = Some(Arc::clone(&self.breaker)));
            }
            let began = Instant::now();
            let Ok(found) = self.look_for(hashes, time).await else {
                break;
            };
            change(&|question| {
                question.tell(&found);
                question.note(true);
            });
            // A gateway that answered early has no one left to ask.
            if !found.is_open || began.elapsed() < time {
                self.seconds().push(asked.elapsed().as_secs_f64());
                return;
            }
            time *= 2;
        }
        change(&|question| {
            question.trouble.get_or_insert("failed");
            // An unknown chunk counts as missing.
            question.tell_nothing();
            question.note(true);
        });
    }

    fn seconds(&self) -> MutexGuard<'_, Vec<f64>> {
        self.seconds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up; declares the spaces first if the daemon, perhaps a new one, does not know one.
    async fn look_for(&self, hashes: &[ChunkHash], time: Duration) -> Result<FoundChunks, ClientError> {
        // The gateway answers with what it knows by then, which is better than no answer.
        let (deadline_ms, pin_ms) = (time.as_millis().max(1), self.pin_ms);
        let mut query = format!("{}&deadline_ms={deadline_ms}&pin_ms={pin_ms}", self.query);
        let id = self.spaces[0].id().to_string();
        match self.client.lookup_hashes(&id, hashes, &query).await {
            Err(ClientError::Refused(problem)) if problem.code == "unknown_space" => {
                for space in &self.spaces {
                    match self.client.declare(space).await {
                        // An engine goes on without its drafts' KV.
                        Err(ClientError::Refused(_)) if !space.draft().is_empty() => {
                            query = query.replace(&format!("&drafts={}", space.id()), "");
                        }
                        declared => drop(declared?),
                    }
                }
                self.client.lookup_hashes(&id, hashes, &query).await
            }
            found => found,
        }
    }
}

/// Changes the question, unless it was forgotten or replaced.
fn with(questions: &Questions, request: &str, number: &Number, change: impl FnOnce(&mut Question)) {
    if let Some(question) = lock(questions).get_mut(request)
        && Arc::ptr_eq(&question.number, number)
    {
        change(question);
    }
}

pub fn split(hashes: &[u8]) -> PyResult<Vec<ChunkHash>> {
    let (hashes, rest) = hashes.as_chunks::<32>();
    match rest.is_empty() {
        true => Ok(hashes.iter().map(|&hash| ChunkHash(hash)).collect()),
        false => Err(failed("hashes have 32 bytes each")),
    }
}
