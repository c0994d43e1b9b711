use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate::chunk::ChunkHash;
use kvgate::client::{Client, ClientError, Target};
use kvgate::connector::Breaker;
use pyo3::prelude::*;

use crate::error::failed;
use crate::prompt::{self, Prompt};
use crate::runtime::runtime;
use crate::space::Space;

/// For each request: None while it is under way, then the length of the prefix.
type Answers = Arc<Mutex<HashMap<String, Option<usize>>>>;

#[pyclass(frozen, module = "kvgate._native")]
pub struct Lookups {
    client: Client,
    space: kvgate::chunk::Space,
    deadline: Duration,
    pin_ms: u64,
    answers: Answers,
    breaker: Arc<Breaker>,
}

#[pymethods]
impl Lookups {
    #[new]
    #[pyo3(signature = (socket, space, deadline_ms=50, pin_ms=30_000, breaker_timeouts=3, breaker_pause_ms=10_000))]
    fn new(
        socket: PathBuf,
        space: &Space,
        deadline_ms: u64,
        pin_ms: u64,
        breaker_timeouts: u32,
        breaker_pause_ms: u64,
    ) -> Self {
        Self {
            client: Client::new(Target::Unix(socket)),
            space: space.0.clone(),
            deadline: Duration::from_millis(deadline_ms),
            pin_ms,
            answers: Answers::default(),
            breaker: Arc::new(Breaker::new(
                breaker_timeouts,
                Duration::from_millis(breaker_pause_ms),
            )),
        }
    }

    /// The hashes are made on the way, off the caller's thread.
    fn ask(&self, py: Python<'_>, request: String, prompt: &Prompt) -> PyResult<()> {
        let chain = prompt.chain();
        let is_empty = prompt::lock(&chain).chunks() == 0;
        let mut answers = self.lock();
        if is_empty || self.breaker.is_open() {
            answers.insert(request, Some(0));
            return Ok(());
        }
        answers.insert(request.clone(), None);
        drop(answers);
        let (client, space, answers) = (self.client.clone(), self.space.clone(), Arc::clone(&self.answers));
        let (deadline, pin_ms, breaker) = (self.deadline, self.pin_ms, Arc::clone(&self.breaker));
        py.detach(|| {
            runtime()?.spawn(async move {
                let hashes = prompt::lock(&chain).hashes().map(<[_]>::to_vec);
                // What nobody can tell is not there.
                let mut prefix = 0;
                if let Ok(hashes) = hashes {
                    let asked = look(&client, &space, &hashes, deadline, pin_ms);
                    let found = tokio::time::timeout(deadline, asked).await;
                    breaker.note(found.is_ok());
                    prefix = found.map_or(0, |found| found.unwrap_or(0));
                }
                // Unless it was forgotten meanwhile.
                if let Some(answer) = lock(&answers).get_mut(&request) {
                    *answer = Some(prefix);
                }
            });
            Ok(())
        })
    }

    fn answer(&self, request: &str) -> Option<usize> {
        self.lock().get(request).copied().flatten()
    }

    fn forget(&self, request: &str) {
        self.lock().remove(request);
    }
}

impl Lookups {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Option<usize>>> {
        lock(&self.answers)
    }
}

fn lock(
    answers: &Mutex<HashMap<String, Option<usize>>>,
) -> std::sync::MutexGuard<'_, HashMap<String, Option<usize>>> {
    answers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of the deadline; the rest is for the way.
const GATEWAYS_SHARE: f64 = 0.8;

/// Declares the space when the daemon, perhaps a new one, does not know it.
async fn look(
    client: &Client,
    space: &kvgate::chunk::Space,
    hashes: &[ChunkHash],
    deadline: Duration,
    pin_ms: u64,
) -> Result<usize, ClientError> {
    // What the gateway knows by then is better than no answer.
    let deadline_ms = (deadline.mul_f64(GATEWAYS_SHARE).as_millis()).max(1);
    let query = format!("deadline_ms={deadline_ms}&pin_ms={pin_ms}&prefetch=true");
    let id = space.id().to_string();
    match client.lookup_hashes(&id, hashes, &query).await {
        Err(ClientError::Refused(problem)) if problem.code == "unknown_space" => {
            client.declare(space).await?;
            Ok(client.lookup_hashes(&id, hashes, &query).await?.prefix)
        }
        found => Ok(found?.prefix),
    }
}

pub fn split(hashes: &[u8]) -> PyResult<Vec<ChunkHash>> {
    let (hashes, rest) = hashes.as_chunks::<32>();
    match rest.is_empty() {
        true => Ok(hashes.iter().map(|&hash| ChunkHash(hash)).collect()),
        false => Err(failed("hashes have 32 bytes each")),
    }
}
