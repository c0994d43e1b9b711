//! The reasons why a bench does not run, or ends early.

use crate::arena::ArenaError;
use crate::config::units::{ByteSize, MIB};
use crate::format::{HashError, SpaceError};
use crate::s3::object::ObjectError;

/// Why the bench can't run, or can't go on. Single failed requests are in the report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("{0}")]
    Settings(String),
    #[error(
        "{slots} slots of {} need {} of memory, and {} are available: lower {lower}",
        ByteSize(*slot_bytes), ByteSize(slots * slot_bytes), ByteSize(available / MIB * MIB)
    )]
    Memory {
        slots: u64,
        slot_bytes: u64,
        available: u64,
        lower: &'static str,
    },
    #[error("--tokens {tokens} is less than one chunk: give at least {chunk_tokens}")]
    Tokens { tokens: u32, chunk_tokens: u32 },
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error(transparent)]
    Hash(#[from] HashError),
    /// Before there was anything to report.
    #[error("interrupted")]
    Interrupted,
    /// An error that every request would meet: no bucket, no credentials, no right.
    #[error(transparent)]
    Object(#[from] ObjectError),
}
