//! Reasons why a copy can't be made: a layout, a mapping, or the device.

use super::cuda::CudaError;

/// The tensors can't hold the space's planes as described; lists all that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the engine's KV tensors can't be used: {}", .0.join("; "))]
pub struct LayoutError(pub Vec<String>);

/// A chunk's tokens can't be where the engine says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    #[error("tokens {first} to {end} are not in a chunk of {chunk_tokens}")]
    Tokens { first: u32, end: u32, chunk_tokens: u32 },
    #[error("the block table has {blocks} blocks of {block_tokens} tokens, which end before token {token}")]
    TableTooShort {
        blocks: usize,
        block_tokens: u32,
        token: u64,
    },
    #[error(
        "a chunk whose tokens are dealt to several ranks begins at a multiple of {round} in the block table, not at token {token}"
    )]
    FirstToken { token: u64, round: u64 },
    #[error("{tokens} tokens need as many slots, not {slots}")]
    Slots { tokens: usize, slots: usize },
    #[error("block {block} is not in a cache of {blocks} blocks")]
    Block { block: u64, blocks: u32 },
    #[error("two tokens of the chunk would be written to block {block}, token {offset}")]
    Twice { block: u32, offset: u32 },
}

/// Why a copy was not made.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    #[error("planes {first} to {end} are not in a space of {planes}")]
    Planes { first: usize, end: usize, planes: usize },
    #[error("a copy of the object's bytes {first} to {end} needs all of them, and has {at} to {has}")]
    Object {
        first: usize,
        end: usize,
        at: usize,
        has: usize,
    },
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error("the spans are of another cache")]
    OtherCache,
    #[error(
        "a store needs all {chunk_tokens} tokens of a chunk that this rank has, and {tokens} of them are somewhere"
    )]
    Tokens { tokens: u32, chunk_tokens: u32 },
    #[error("the engine's framework could not copy: {0}")]
    Framework(String),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device may still use the memory: it must not be handed back while this process lives.
    #[error("{0}; its slot is kept until the engine is gone")]
    Kept(CudaError),
}
