//! The reasons why a check on a GPU can't go on.

use crate::arena::ArenaError;
use crate::cache::gateway::OpenError;
use crate::engine::copy::cuda::{CudaError, PagesError};
use crate::engine::copy::{CopyError, HostPagesError, MappingError};
use crate::format::{HashError, SpaceError};
use crate::s3::object::ObjectError;

/// A difference that a check found, or why it could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error("the arena has no room for {0} bytes")]
    Room(usize),
    #[error(transparent)]
    HostPages(#[from] HostPagesError),
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Hash(#[from] HashError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("{0}")]
    Path(String),
    #[error(
        "{layout} ({model}): {what}: byte {at} is {got:#04x} and must be {must:#04x}. Don't use this GPU with kvgate, and report it"
    )]
    Differs {
        layout: &'static str,
        model: &'static str,
        what: &'static str,
        at: usize,
        got: u8,
        must: u8,
    },
}
