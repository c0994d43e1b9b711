//! The request for a load.

use tokio::time::Instant;

use crate::format::{ChunkHash, Space};
use crate::protocol::Order;

/// How a load goes on once a chunk is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterMiss {
    /// Ends: an engine can use only the leading run.
    Stop,
    /// Loads the other chunks all the same.
    Continue,
}

/// Chunks to bring into slots.
#[derive(Debug, Clone)]
pub struct LoadSpec {
    pub space: Space,
    /// In the order of the prompt.
    pub chunks: Vec<ChunkHash>,
    pub order: Order,
    pub after_miss: AfterMiss,
    pub deadline: Instant,
}
