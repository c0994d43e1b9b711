//! The reasons why a demo fails, and whether flags or the server are to blame.

use std::sync::Arc;

use crate::cache::gateway::OpenError;
use crate::config::units::ByteSize;
use crate::engine::copy::{CopyError, HostPagesError};
use crate::format::{HashError, SpaceError};
use crate::s3::object::ObjectError;
use crate::tools::s3_server::S3ServerError;

/// Why the demo can't run, or can't go on. Misses and wrong bytes are not errors: the report has them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DemoError {
    #[error("there is no model preset {name:?}: give --model one of {known}")]
    Model { name: String, known: String },
    #[error("--tokens {tokens} is less than one chunk: give at least {chunk_tokens}")]
    Tokens { tokens: usize, chunk_tokens: usize },
    #[error(
        "chunk_tokens {chunk_tokens} is not a multiple of the paged cache's block of {block_tokens} tokens"
    )]
    Blocks {
        chunk_tokens: usize,
        block_tokens: usize,
    },
    #[error(
        "a conversation has {} of KV, and the paged cache may have {}: lower --tokens",
        ByteSize(*bytes), ByteSize(*bytes_max)
    )]
    Cache { bytes: u64, bytes_max: u64 },
    #[error(
        "the arena of {arena} can't hold one object of {object_bytes} bytes: raise [arena] size \
         (KVGATE__ARENA__SIZE) to at least {} MiB, or give a smaller --model",
        object_bytes.div_ceil(1 << 20)
    )]
    Arena { object_bytes: usize, arena: ByteSize },
    #[error(transparent)]
    Server(#[from] S3ServerError),
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error(transparent)]
    Hash(#[from] HashError),
    #[error("can't write --save-tokens {}: {source}. Give a file in a folder that is there", path.display())]
    SaveTokens {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Pages(#[from] HostPagesError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("a chunk could not be stored: {0}")]
    Store(Arc<ObjectError>),
    #[error("it is unknown which chunks exist: {0}")]
    Lookup(Arc<ObjectError>),
    #[error("interrupted; the stored objects are removed unless --keep was given")]
    Interrupted,
    #[error("a task of the demo ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
    #[error("can't write the report: {0}")]
    Output(#[from] std::io::Error),
}

impl DemoError {
    /// Whether flags or configuration must change (exit 2), or something failed (exit 1).
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Open(OpenError::Object(error)) | Self::Object(error) => error.kind.is_setup(),
            Self::Open(error) => matches!(error, OpenError::NoBucket | OpenError::Client(_)),
            Self::Server(error) => error.is_usage(),
            Self::Model { .. }
            | Self::Tokens { .. }
            | Self::Blocks { .. }
            | Self::Cache { .. }
            | Self::Arena { .. }
            | Self::SaveTokens { .. }
            | Self::Space(_)
            | Self::Hash(_) => true,
            _ => false,
        }
    }
}
