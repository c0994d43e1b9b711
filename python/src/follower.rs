//! An engine's own KV events: what the node's memory and disks hold of its chunks.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::follower::Follower;
use kvgate::format::ChunkHash;
use kvgate::protocol::BoundChunk;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::task::AbortHandle;

use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::PySpace;

#[pyclass(frozen, name = "Follower", module = "kvgate._native")]
pub struct PyFollower {
    follower: Follower,
    chunk_tokens: usize,
    /// The process that it runs in: a child's runtime has no tasks of its parent's.
    task: Mutex<Option<(u32, AbortHandle)>>,
}

/// The tier's word, whether the chunk came or left, its tokens (4 bytes each, in the machine's order), and the engine's own
/// words of it.
type PyChange<'py> = (&'static str, bool, Bound<'py, PyBytes>, String);

#[pymethods]
impl PyFollower {
    #[new]
    #[pyo3(signature = (socket, space, scheme, socket_owner=None))]
    fn new(socket: PathBuf, space: &PySpace, scheme: String, socket_owner: Option<u32>) -> Self {
        let client = Client::new(DaemonAddress::Unix(socket)).trusting(socket_owner);
        Self {
            chunk_tokens: space.0.chunk_tokens() as usize,
            follower: Follower::new(&client, space.0.clone(), scheme),
            task: Mutex::default(),
        }
    }

    #[pyo3(signature = (hashes, parent, tokens, events, block_size=None, lora_name="", cache_salt=""))]
    fn bind(
        &self,
        hashes: &[u8],
        parent: Option<&[u8]>,
        tokens: &[u8],
        events: Vec<String>,
        block_size: Option<usize>,
        lora_name: &str,
        cache_salt: &str,
    ) -> PyResult<()> {
        let hashes = split(hashes)?;
        let parent = parent.map(<[u8; 32]>::try_from).transpose();
        let mut parent = parent
            .map_err(|_| failed("a chunk's hash has 32 bytes"))?
            .map(ChunkHash);
        let (numbers, rest) = tokens.as_chunks::<4>();
        if !rest.is_empty()
            || numbers.len() != hashes.len() * self.chunk_tokens
            || events.len() != hashes.len()
        {
            return Err(failed("each chunk needs its tokens, 4 bytes each, and its event"));
        }
        let of_chunks = hashes
            .iter()
            .zip(numbers.chunks_exact(self.chunk_tokens))
            .zip(events);
        let bound = of_chunks.map(|((hash, numbers), event)| BoundChunk {
            hash: *hash,
            parent: parent.replace(*hash),
            tokens: numbers.iter().map(|number| u32::from_ne_bytes(*number)).collect(),
            event,
        });
        self.follower
            .bind(bound.collect(), block_size, lora_name, cache_salt);
        self.run()
    }

    fn tell_anew(&self) {
        self.follower.tell_anew();
    }

    fn succeeded_by(&self, scheme: String) -> Self {
        Self {
            chunk_tokens: self.chunk_tokens,
            follower: self.follower.succeeded_by(scheme),
            task: Mutex::default(),
        }
    }

    fn take<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Vec<PyChange<'py>>> {
        self.run()?;
        let changes = self.follower.take(most).into_iter().map(|change| {
            let tokens: Vec<u8> = change
                .chunk
                .tokens
                .iter()
                .flat_map(|token| token.to_ne_bytes())
                .collect();
            let (word, event) = (change.tier.word(), change.chunk.event.clone());
            (word, change.is_stored, PyBytes::new(py, &tokens), event)
        });
        Ok(changes.collect())
    }
}

impl PyFollower {
    /// Follows the node, unless it does so already.
    fn run(&self) -> PyResult<()> {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if task.as_ref().is_none_or(|(of, _)| *of != process) {
            let follow = runtime()?.spawn(self.follower.follow());
            *task = Some((process, follow.abort_handle()));
        }
        Ok(())
    }
}

impl Drop for PyFollower {
    fn drop(&mut self) {
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, follow)) = task.take() {
            follow.abort();
        }
    }
}
