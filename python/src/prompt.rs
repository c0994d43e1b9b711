use kvgate::chunk::{ChunkHash, ChunkHasher, Extra, TenantSecret};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::failed;
use crate::space::Space;

#[pyclass(module = "kvgate._native")]
pub struct Prompt {
    hasher: ChunkHasher,
    root: ChunkHash,
    chunk_tokens: usize,
    hashes: Vec<ChunkHash>,
    /// After the last full chunk.
    rest: Vec<u32>,
    /// In the rest, with offsets that count from its start.
    extras: Vec<Extra>,
}

/// Bytes are several times quicker to take over.
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
        space: &Space,
        salt: Option<&[u8]>,
        adapter: Option<&[u8]>,
        secret: Option<&[u8]>,
    ) -> PyResult<Self> {
        let secret = secret.map(<[u8; 32]>::try_from).transpose();
        let secret = secret.map_err(|_| failed("a tenant's secret has 32 bytes"))?;
        let hasher = ChunkHasher::new(&space.0, secret.map(TenantSecret::new).as_ref()).map_err(failed)?;
        Ok(Self {
            root: hasher
                .root(salt.unwrap_or_default(), adapter.unwrap_or_default())
                .map_err(failed)?,
            chunk_tokens: space.0.chunk_tokens() as usize,
            hasher,
            hashes: Vec::new(),
            rest: Vec::new(),
            extras: Vec::new(),
        })
    }

    #[pyo3(signature = (tokens, extras=Vec::new()))]
    fn extend(&mut self, py: Python<'_>, tokens: Tokens, extras: Vec<(u64, Vec<u8>)>) -> PyResult<usize> {
        let tokens = match &tokens {
            Tokens::Numbers(numbers) => numbers,
            Tokens::Bytes(bytes) => {
                let (tokens, rest) = bytes.as_bytes().as_chunks::<4>();
                if !rest.is_empty() {
                    return Err(failed("tokens have 4 bytes each"));
                }
                &tokens.iter().map(|&token| u32::from_ne_bytes(token)).collect()
            }
        };
        py.detach(|| self.take(tokens, extras)).map_err(failed)
    }

    fn __len__(&self) -> usize {
        self.hashes.len()
    }

    fn hashes<'py>(&self, py: Python<'py>, first: usize, end: usize) -> PyResult<Bound<'py, PyBytes>> {
        let hashes = self.hashes.get(first..end).ok_or_else(|| {
            PyIndexError::new_err(format!("chunks {first} to {end} of {}", self.hashes.len()))
        })?;
        let bytes: Vec<u8> = hashes.iter().flat_map(|hash| *hash.as_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    fn parent<'py>(&self, py: Python<'py>, chunk: usize) -> PyResult<Bound<'py, PyBytes>> {
        let parent = match chunk.checked_sub(1) {
            None => Some(&self.root),
            Some(before) => self.hashes.get(before),
        };
        let parent =
            parent.ok_or_else(|| PyIndexError::new_err(format!("chunk {chunk} of {}", self.hashes.len())))?;
        Ok(PyBytes::new(py, parent.as_bytes()))
    }
}

impl Prompt {
    fn take(&mut self, tokens: &[u32], extras: Vec<(u64, Vec<u8>)>) -> Result<usize, String> {
        let before = (self.hashes.len() * self.chunk_tokens) as u64;
        for (offset, bytes) in extras {
            let in_rest = offset
                .checked_sub(before)
                .and_then(|offset| u32::try_from(offset).ok());
            let offset = in_rest
                .ok_or_else(|| format!("the extra at {offset} is in a chunk that is hashed already"))?;
            self.extras.push(Extra { offset, bytes });
        }
        self.rest.extend_from_slice(tokens);
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
                // It is `full` at least.
                offset: extra.offset - u32::try_from(full).unwrap_or(extra.offset),
                ..extra
            });
            self.extras = moved.collect();
        }
        Ok(self.hashes.len())
    }
}
