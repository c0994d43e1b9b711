//! Lookups of an engine's own pages, for a scheduler that asks for one after the other and never waits.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate::engine::client::{Client, ClientError, DaemonAddress};
use kvgate::engine::rank::LookupBreaker;
use kvgate::format::{ChunkHash, PageNames, Space};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tokio::sync::Semaphore;

use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::PySpace;

/// The gateway's share of the deadline; the rest is for the way.
const GATEWAYS_SHARE: f64 = 0.8;

#[pyclass(frozen, module = "kvgate._native")]
pub struct PageLookups(Arc<Asker>);

struct Asker {
    client: Client,
    spaces: Vec<Space>,
    names: Vec<PageNames>,
    deadline: Duration,
    pin_ms: u64,
    at_once: Semaphore,
    breaker: LookupBreaker,
    answers: Mutex<Vec<Answer>>,
}

/// A question's number, and whether each of its pages is there.
type Answer = (u64, Vec<u8>);

#[pymethods]
impl PageLookups {
    #[new]
    #[pyo3(signature = (
        socket, spaces, deadline_ms=50, pin_ms=30_000, breaker_timeouts=3, breaker_pause_ms=10_000, at_once=256,
        socket_owner=None,
    ))]
    fn new(
        socket: PathBuf,
        spaces: Vec<PyRef<'_, PySpace>>,
        deadline_ms: u64,
        pin_ms: u64,
        breaker_timeouts: u32,
        breaker_pause_ms: u64,
        at_once: usize,
        socket_owner: Option<u32>,
    ) -> Self {
        Self(Arc::new(Asker {
            client: Client::new(DaemonAddress::Unix(socket)).trusting(socket_owner),
            spaces: spaces.iter().map(|space| space.0.clone()).collect(),
            names: spaces.iter().map(|space| space.names()).collect(),
            deadline: Duration::from_millis(deadline_ms),
            pin_ms,
            at_once: Semaphore::new(at_once.min(Semaphore::MAX_PERMITS)),
            breaker: LookupBreaker::new(breaker_timeouts, Duration::from_millis(breaker_pause_ms)),
            answers: Mutex::default(),
        }))
    }

    #[pyo3(signature = (number, space, hashes, is_chain=false))]
    fn ask(
        &self,
        py: Python<'_>,
        number: u64,
        space: usize,
        hashes: PyBackedBytes,
        is_chain: bool,
    ) -> PyResult<()> {
        let asker = Arc::clone(&self.0);
        let names = asker.names.get(space);
        let names = names.ok_or_else(|| failed(format!("space {space} of {}", asker.spaces.len())))?;
        let hashes = names.of(split(&hashes)?);
        py.detach(|| {
            let asked = async move {
                let found = match asker.breaker.is_open() {
                    true => None,
                    false => asker.look_in_time(space, &hashes, is_chain).await,
                };
                let nothing = || vec![0; hashes.len()];
                asker.tell((number, found.unwrap_or_else(nothing)));
            };
            runtime()?.spawn(asked);
            Ok(())
        })
    }

    fn answers<'py>(&self, py: Python<'py>) -> Vec<(u64, Bound<'py, PyBytes>)> {
        let answers = std::mem::take(&mut *self.0.answers.lock().unwrap_or_else(PoisonError::into_inner));
        let of_python = |(number, there): Answer| (number, PyBytes::new(py, &there));
        answers.into_iter().map(of_python).collect()
    }
}

impl Asker {
    fn tell(&self, answer: Answer) {
        self.answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(answer);
    }

    /// None: the gateway did not say in time, or could not.
    async fn look_in_time(&self, space: usize, hashes: &[ChunkHash], is_chain: bool) -> Option<Vec<u8>> {
        let looked = async {
            let _permit = self.at_once.acquire().await.ok()?;
            Some(self.look(space, hashes, is_chain).await)
        };
        let in_time = tokio::time::timeout(self.deadline, looked).await;
        self.breaker.note(in_time.is_ok());
        in_time.ok()??.ok()
    }

    async fn look(&self, space: usize, hashes: &[ChunkHash], is_chain: bool) -> Result<Vec<u8>, ClientError> {
        let space = &self.spaces[space];
        let deadline_ms = self.deadline.mul_f64(GATEWAYS_SHARE).as_millis().max(1);
        // Without a strategy, the gateway's own.
        let strategy = if is_chain { "" } else { "&strategy=exact" };
        let query = format!(
            "prefetch=true&deadline_ms={deadline_ms}&pin_ms={}{strategy}",
            self.pin_ms
        );
        let found = self.client.lookup_space(space, hashes, &query).await?;
        let there = |chunk| u8::from(found.mask.get(chunk));
        Ok((0..hashes.len()).map(there).collect())
    }
}
