//! A prompt's tokens and the hashes of its chunks, made when they are asked for: each hash takes the one before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvgate::format::{ChunkHash, ChunkHasher, Extra, ModelId};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::failed;
use crate::space::{PySpace, secret_of};

#[pyclass(frozen, module = "kvgate._native")]
pub struct Prompt {
    root: ChunkHash,
    /// Its chunks' size is part of it.
    model_id: ModelId,
    chain: Arc<Mutex<Chain>>,
}

/// Tokens, and the hashes of their chunks once they are needed.
pub struct Chain {
    hasher: ChunkHasher,
    root: ChunkHash,
    chunk_tokens: usize,
    hashes: Vec<ChunkHash>,
    /// Tokens after the last hashed chunk.
    rest: Vec<u32>,
    /// Extras in the rest, with offsets from its start.
    extras: Vec<Extra>,
}

/// Bytes are taken over several times faster.
#[derive(FromPyObject)]
enum Tokens<'py> {
    Bytes(Bound<'py, PyBytes>),
    Numbers(Vec<u32>),
}

#[pymethods]
impl Prompt {
    #[new]
    #[pyo3(signature = (space, salt=None, adapter=None, secret=None))]
    fn new(
        space: &PySpace,
        salt: Option<&[u8]>,
        adapter: Option<&[u8]>,
        secret: Option<&[u8]>,
    ) -> PyResult<Self> {
        let secret = secret_of(secret)?;
        let hasher = ChunkHasher::new(&space.0, secret.as_ref().or(space.secret())).map_err(failed)?;
        let root = hasher.root(salt.unwrap_or_default(), adapter.unwrap_or_default());
        let root = root.map_err(failed)?;
        let chain = Chain {
            hasher,
            root,
            chunk_tokens: space.0.chunk_tokens() as usize,
            hashes: Vec::new(),
            rest: Vec::new(),
            extras: Vec::new(),
        };
        let chain = Arc::new(Mutex::new(chain));
        Ok(Self {
            root,
            model_id: space.0.model_id(),
            chain,
        })
    }

    fn fits(&self, space: &PySpace) -> bool {
        space.0.model_id() == self.model_id
    }

    #[pyo3(signature = (tokens, extras=Vec::new()))]
    fn extend(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extras: Vec<(u64, Vec<u8>)>,
    ) -> PyResult<usize> {
        let tokens = tokens.extract::<Tokens>();
        let tokens = match tokens.map_err(|_| failed("tokens are whole numbers from 0, in one dimension"))? {
            Tokens::Numbers(numbers) => numbers,
            Tokens::Bytes(bytes) => {
                let (tokens, odd) = bytes.as_bytes().as_chunks();
                if !odd.is_empty() {
                    return Err(failed("tokens have 4 bytes each"));
                }
                tokens.iter().copied().map(u32::from_ne_bytes).collect()
            }
        };
        // A lookup may be hashing the present tokens.
        py.detach(|| {
            let mut chain = lock(&self.chain);
            chain.add_extras(extras).map_err(failed)?;
            chain.rest.extend(tokens);
            Ok(chain.chunks())
        })
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        py.detach(|| lock(&self.chain).chunks())
    }

    fn hashes<'py>(&self, py: Python<'py>, first: usize, end: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes: Option<Vec<u8>> = py.detach(|| {
            let mut chain = lock(&self.chain);
            let hashes = chain.hashes().map_err(failed)?.get(first..end);
            PyResult::Ok(hashes.map(|hashes| hashes.iter().flat_map(|hash| *hash.as_bytes()).collect()))
        })?;
        let bytes = bytes.ok_or_else(|| {
            PyIndexError::new_err(format!("chunks {first} to {end} of {}", self.__len__(py)))
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn parent<'py>(&self, py: Python<'py>, chunk: usize) -> PyResult<Bound<'py, PyBytes>> {
        match chunk.checked_sub(1) {
            None => Ok(PyBytes::new(py, self.root.as_bytes())),
            Some(before) => self.hashes(py, before, chunk),
        }
    }
}

impl Prompt {
    pub fn chain(&self) -> Arc<Mutex<Chain>> {
        Arc::clone(&self.chain)
    }
}

impl Chain {
    /// Number of full chunks, hashed or not.
    pub fn chunks(&self) -> usize {
        self.hashes.len() + self.rest.len() / self.chunk_tokens
    }

    fn add_extras(&mut self, extras: Vec<(u64, Vec<u8>)>) -> Result<(), String> {
        let full = (self.chunks() * self.chunk_tokens) as u64;
        let hashed = (self.hashes.len() * self.chunk_tokens) as u64;
        for (offset, bytes) in extras {
            let in_rest = (offset >= full)
                .then(|| u32::try_from(offset - hashed).ok())
                .flatten();
            let offset =
                in_rest.ok_or_else(|| format!("the extra at {offset} is in a chunk that is full already"))?;
            self.extras.push(Extra { offset, bytes });
        }
        Ok(())
    }

    /// The hashes of all full chunks.
    pub fn hashes(&mut self) -> Result<&[ChunkHash], String> {
        let full = self.rest.len() / self.chunk_tokens * self.chunk_tokens;
        if full > 0 {
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            let (hashed, later) = std::mem::take(&mut self.extras)
                .into_iter()
                .partition::<Vec<Extra>, _>(|extra| (extra.offset as usize) < full);
            let new = self.hasher.chain(&parent, &self.rest[..full], &hashed);
            self.hashes.extend(new.map_err(|error| error.to_string())?);
            self.rest.drain(..full);
            let moved = later.into_iter().map(|extra| Extra {
                // The offset is at least `full`.
                offset: extra.offset - u32::try_from(full).unwrap_or(extra.offset),
                ..extra
            });
            self.extras = moved.collect();
        }
        Ok(&self.hashes)
    }
}

pub fn lock(chain: &Mutex<Chain>) -> MutexGuard<'_, Chain> {
    chain.lock().unwrap_or_else(PoisonError::into_inner)
}
