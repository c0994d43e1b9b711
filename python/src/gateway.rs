//! Whole calls over memory that each call names, for `kvgate.Gateway` (`python/kvgate/client.py`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::copy::Tensor;
use kvgate::engine::direct::{Direct, DirectError, DirectMemory};
use kvgate::format::{Mask, Space};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use tokio::sync::watch;

use crate::copier::Copiers;
use crate::error::failed;
use crate::lookups::split;
use crate::prompt::{self, Prompt};
use crate::runtime::runtime;
use crate::space::PySpace;

/// One process's session with the node. Each call begins at once, and keeps `held` until it has ended.
#[pyclass(frozen, module = "kvgate._native")]
pub struct Session(Mutex<Option<Arc<Direct>>>);

/// A call. It is there before it begins: so it can be stopped whatever interrupts Python.
#[pyclass(frozen, module = "kvgate._native")]
pub struct Call {
    /// Called when it has ended. It must not wait.
    done: Py<PyAny>,
    has_begun: AtomicBool,
    ended: Ended,
    stop: watch::Sender<bool>,
}

type Ended = Arc<Mutex<Option<Result<Answer, String>>>>;

enum Answer {
    Nothing,
    /// Chunks, whether all were told of, and the tier of each.
    Found(usize, bool, Vec<u8>),
    /// Chunks, and the reason why no more.
    Loaded(usize, Option<String>),
    /// Chunks, new ones, refused ones, and the reason why others are not there.
    Stored(usize, usize, usize, Option<String>),
}

#[pymethods]
impl Session {
    #[new]
    fn new(py: Python<'_>, socket: PathBuf, socket_owner: Option<u32>, patience_ms: u64) -> PyResult<Self> {
        let client = Client::new(DaemonAddress::Unix(socket))
            .trusting(socket_owner)
            .with_patience(Duration::from_millis(patience_ms));
        let copiers = py.detach(|| Copiers::new(None, None))?;
        let instance = format!("python-{}-{:016x}", std::process::id(), random());
        let direct = Direct::new(&client, instance, move |cache| copiers.make(cache));
        Ok(Self(Mutex::new(Some(Arc::new(direct)))))
    }

    fn attach(&self, call: &Bound<'_, Call>) -> PyResult<()> {
        let direct = self.direct()?;
        begin(call, None, move |_| async move {
            direct.attach().await?;
            Ok(Answer::Nothing)
        })
    }

    fn lookup(
        &self,
        space: &PySpace,
        prompt: &Prompt,
        deadline_ms: u64,
        pin_ms: u64,
        prefetch: bool,
        call: &Bound<'_, Call>,
    ) -> PyResult<()> {
        let (direct, space, chain) = (self.direct()?, space.0.clone(), prompt.chain());
        begin(call, None, move |_| async move {
            let hashes = prompt::lock(&chain).hashes().map_err(Failed::Given)?.to_vec();
            let (deadline, pin) = (Duration::from_millis(deadline_ms), Duration::from_millis(pin_ms));
            let found = direct.lookup(&space, &hashes, deadline, pin, prefetch).await?;
            let is_in = |mask: &Mask, chunk| chunk < mask.len() && mask.get(chunk);
            let tier = |chunk| match (is_in(&found.memory, chunk), is_in(&found.disk, chunk)) {
                (true, _) => b'm',
                (_, true) => b'd',
                _ => b's',
            };
            let tiers = (0..found.boundary).map(tier).collect();
            Ok(Answer::Found(found.boundary, !found.is_open, tiers))
        })
    }

    fn load(
        &self,
        space: &PySpace,
        hashes: PyBackedBytes,
        tensors: &str,
        slots: Option<Bound<'_, PyAny>>,
        deadline_ms: u64,
        held: Py<PyAny>,
        call: &Bound<'_, Call>,
    ) -> PyResult<()> {
        let (direct, space) = (self.direct()?, space.0.clone());
        let (hashes, memory) = (split(&hashes)?, memory(&space, tensors, slots)?);
        begin(call, Some(held), move |stop| async move {
            let deadline = Duration::from_millis(deadline_ms);
            let loaded = direct.load(&space, &hashes, &memory, deadline, stopped(stop));
            let loaded = loaded.await.map_err(|error| match error {
                DirectError::Room { room, tokens } => Failed::Given(format!(
                    "kv has room for {room} tokens, and the hit has {tokens}: give hit.first({room})"
                )),
                error => error.into(),
            })?;
            Ok(Answer::Loaded(loaded.chunks, loaded.reason))
        })
    }

    fn store(
        &self,
        space: &PySpace,
        hashes: PyBackedBytes,
        root: PyBackedBytes,
        tensors: &str,
        slots: Option<Bound<'_, PyAny>>,
        deadline_ms: u64,
        held: Py<PyAny>,
        call: &Bound<'_, Call>,
    ) -> PyResult<()> {
        let (direct, space) = (self.direct()?, space.0.clone());
        let (hashes, memory) = (split(&hashes)?, memory(&space, tensors, slots)?);
        let parents = [split(&root)?, hashes.clone()].concat();
        begin(call, Some(held), move |stop| async move {
            let deadline = Duration::from_millis(deadline_ms);
            let parents = &parents[..hashes.len()];
            let stored = direct.store(&space, &hashes, parents, &memory, deadline, stopped(stop));
            let stored = stored.await.map_err(|error| match error {
                DirectError::Room { room, tokens } => Failed::Given(format!(
                    "kv has {room} tokens, and the whole chunks of the prompt {tokens}: give no more tokens than kv has"
                )),
                error => error.into(),
            })?;
            Ok(Answer::Stored(
                stored.chunks,
                stored.new,
                stored.refused,
                stored.reason,
            ))
        })
    }

    fn flush(&self, deadline_ms: u64, call: &Bound<'_, Call>) -> PyResult<()> {
        let direct = self.direct()?;
        begin(call, None, move |_| async move {
            direct.flush(Duration::from_millis(deadline_ms)).await?;
            Ok(Answer::Nothing)
        })
    }

    /// Ends the session, once the calls under way have ended.
    fn close(&self) {
        self.lock().take();
    }
}

#[pymethods]
impl Call {
    #[new]
    fn new(done: Py<PyAny>) -> Self {
        Self {
            done,
            has_begun: AtomicBool::default(),
            ended: Ended::default(),
            stop: watch::Sender::new(false),
        }
    }

    #[getter]
    fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Relaxed)
    }

    /// Ends a load or a store early; the array is not touched after `done` was called.
    fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The call's answer, once it has ended.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        match ended.as_ref() {
            None => Err(failed("the call is still under way")),
            Some(Err(error)) => Err(failed(error)),
            Some(Ok(Answer::Nothing)) => ().into_bound_py_any(py),
            Some(Ok(Answer::Found(chunks, is_complete, tiers))) => {
                (chunks, is_complete, PyBytes::new(py, tiers)).into_bound_py_any(py)
            }
            Some(Ok(Answer::Loaded(chunks, reason))) => (chunks, reason).into_bound_py_any(py),
            Some(Ok(Answer::Stored(chunks, new, refused, reason))) => {
                (chunks, new, refused, reason).into_bound_py_any(py)
            }
        }
    }
}

/// Why a call failed.
enum Failed {
    Call(DirectError),
    Given(String),
}

impl From<DirectError> for Failed {
    fn from(error: DirectError) -> Self {
        Self::Call(error)
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Given(error) => error.fmt(f),
        }
    }
}

impl Session {
    fn direct(&self) -> PyResult<Arc<Direct>> {
        let direct = self.lock().clone();
        direct.ok_or_else(|| failed("the gateway is closed: call kvgate.connect() again"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Direct>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender goes with the call, which nobody can stop then.
    if stop.wait_for(|&stop| stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn memory(space: &Space, tensors: &str, slots: Option<Bound<'_, PyAny>>) -> PyResult<DirectMemory> {
    let numbers = |slots: Bound<'_, PyAny>| slots.extract::<Vec<i64>>();
    let slots = slots.map(numbers).transpose();
    let slots = slots.map_err(|_| failed("slots are whole numbers, in one dimension: one for each token"))?;
    let tensors: Vec<Tensor> = serde_json::from_str(tensors).map_err(failed)?;
    DirectMemory::new(space, &tensors, slots).map_err(failed)
}

/// Tells this process's sessions from those of every other process that had its number.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

fn begin<W>(
    call: &Bound<'_, Call>,
    held: Option<Py<PyAny>>,
    work: impl FnOnce(watch::Receiver<bool>) -> W,
) -> PyResult<()>
where
    W: Future<Output = Result<Answer, Failed>> + Send + 'static,
{
    let (done, call, runtime) = (call.get().done.clone_ref(call.py()), call.get(), runtime()?);
    if call.has_begun.swap(true, Ordering::Relaxed) {
        return Err(failed("a Call is for one call"));
    }
    let (told, work) = (
        Arc::clone(&call.ended),
        runtime.spawn(work(call.stop.subscribe())),
    );
    runtime.spawn(async move {
        let outcome = match work.await {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            // A panicked task has done nothing to rely on.
            Err(error) => Err(error.to_string()),
        };
        *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        // Python may be busy for long.
        tokio::task::spawn_blocking(move || {
            // None: Python ends, and nobody waits any more.
            Python::try_attach(|py| {
                drop(held);
                // An event loop that is closed has nobody to tell.
                let _ = done.call0(py);
                drop(done);
            })
        });
    });
    Ok(())
}
