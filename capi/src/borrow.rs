//! What callers hand over: structs of `kvgate.h`, checked and turned into Rust.

use std::ffi::{CStr, c_char, c_void};

use kvgate::engine::copy::Tensor;
use kvgate::engine::direct::DirectMemory;
use kvgate::format::{ChunkHash, ChunkHasher, PLANES_MAX, Space, TenantSecret};

use crate::status::Failed;

const DIMS: usize = 8;

/// `kvgate_prompt`.
#[repr(C)]
pub struct Prompt {
    tokens: *const u32,
    tokens_len: usize,
    salt: *const u8,
    salt_len: usize,
    adapter: *const u8,
    adapter_len: usize,
}

/// `kvgate_tensor`.
#[repr(C)]
pub struct CTensor {
    address: *mut c_void,
    bytes: u64,
    axes: *const c_char,
    shape: [u64; DIMS],
    strides: [u64; DIMS],
    element_bytes: u32,
    first_plane: u32,
    row_offset: u32,
}

/// `kvgate_memory`.
#[repr(C)]
pub struct CMemory {
    tensors: *const CTensor,
    tensors_len: usize,
    slots: *const i64,
    slots_len: usize,
}

/// The hashes of a prompt's full chunks, and the first one's parent.
pub struct Chain {
    pub root: ChunkHash,
    pub hashes: Vec<ChunkHash>,
}

/// # Safety
/// `pointer` is NULL, or valid for reads until the call returns.
pub unsafe fn borrowed<'a, T>(name: &str, pointer: *const T) -> Result<&'a T, Failed> {
    // SAFETY: as the caller says.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failed::argument(format!("{name} is NULL")))
}

/// # Safety
/// `pointer` is NULL, or valid for a write until the call returns.
pub unsafe fn result<'a, T>(name: &str, pointer: *mut T) -> Result<&'a mut std::mem::MaybeUninit<T>, Failed> {
    // SAFETY: as the caller says; a value that was never set may be there.
    unsafe { pointer.cast::<std::mem::MaybeUninit<T>>().as_mut() }
        .ok_or_else(|| Failed::argument(format!("{name} is NULL: the result goes there")))
}

/// # Safety
/// `pointer` is NULL, or ends with a zero byte and is not changed until the call returns.
pub unsafe fn text<'a>(name: &str, pointer: *const c_char) -> Result<Option<&'a str>, Failed> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some)
        .map_err(|_| Failed::argument(format!("{name} is not UTF-8")))
}

/// # Safety
/// `pointer` is NULL, or valid for reads of `len` values until the call returns.
pub unsafe fn slice<'a, T>(name: &str, pointer: *const T, len: usize) -> Result<&'a [T], Failed> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failed::argument(format!("{name} is NULL, and {len} are named"))),
        // SAFETY: as the caller says.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

impl Prompt {
    /// # Safety
    /// Its pointers are NULL or valid for their lengths.
    pub unsafe fn chain(&self, space: &Space, secret: Option<&TenantSecret>) -> Result<Chain, Failed> {
        // SAFETY: as the caller says.
        let (tokens, salt, adapter) = unsafe {
            (
                slice("prompt.tokens", self.tokens, self.tokens_len)?,
                slice("prompt.salt", self.salt, self.salt_len)?,
                slice("prompt.adapter", self.adapter, self.adapter_len)?,
            )
        };
        let hasher = ChunkHasher::new(space, secret).map_err(Failed::argument)?;
        let root = hasher.root(salt, adapter).map_err(Failed::argument)?;
        let hashes = hasher.chain(&root, tokens, &[]).map_err(Failed::argument)?;
        Ok(Chain { root, hashes })
    }
}

impl Chain {
    pub fn parents(&self) -> Vec<ChunkHash> {
        let before = self.hashes.iter().copied();
        std::iter::once(self.root)
            .chain(before)
            .take(self.hashes.len())
            .collect()
    }
}

impl CMemory {
    /// # Safety
    /// Its pointers are NULL or valid for their lengths.
    pub unsafe fn of(&self, space: &Space) -> Result<DirectMemory, Failed> {
        // SAFETY: as the caller says.
        let tensors = unsafe { slice("memory.tensors", self.tensors, self.tensors_len)? };
        // SAFETY: as the caller says, for each tensor too.
        let tensors = tensors.iter().map(|tensor| unsafe { tensor.of() });
        let tensors: Vec<Tensor> = tensors.collect::<Result<_, _>>()?;
        let slots = match self.slots.is_null() {
            true => None,
            // SAFETY: as the caller says.
            false => Some(unsafe { slice("memory.slots", self.slots, self.slots_len)? }.to_vec()),
        };
        Ok(DirectMemory::new(space, &tensors, slots)?)
    }
}

impl CTensor {
    /// # Safety
    /// Its axes are NULL or end with a zero byte.
    unsafe fn of(&self) -> Result<Tensor, Failed> {
        // SAFETY: as the caller says.
        let axes = unsafe { text("axes", self.axes)? };
        let axes = axes.ok_or_else(|| Failed::argument("axes is NULL"))?;
        let dims = axes.len();
        if dims > DIMS {
            return Err(Failed::argument(format!("axes {axes:?} are more than {DIMS}")));
        }
        if self.address.is_null() {
            return Err(Failed::argument("a tensor's address is NULL"));
        }
        let shape = self.shape[..dims].to_vec();
        let strides = match self.strides.iter().all(|&stride| stride == 0) {
            true => Tensor::contiguous_strides(&shape, self.element_bytes),
            false => self.strides[..dims].to_vec(),
        };
        let layers = axes.find('L').map_or(1, |at| shape[at]);
        // More planes than a space may have are refused by their number.
        let layers = usize::try_from(layers).unwrap_or(usize::MAX);
        let layers = layers.min(PLANES_MAX as usize + 1);
        let first = self.first_plane as usize;
        Ok(Tensor {
            address: self.address as u64,
            bytes: self.bytes,
            axes: axes.to_owned(),
            shape,
            strides,
            element_bytes: self.element_bytes,
            planes: (first..first.saturating_add(layers)).collect(),
            heads: None,
            row_offset: self.row_offset,
        })
    }
}
