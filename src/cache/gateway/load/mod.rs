//! Loads: a driver gets slots and starts the fetches, in chunk order or in layer order; the stream hands out the
//! outcomes.

mod chunk_order;
mod drive;
mod layer_order;
mod spec;
mod stream;

use std::collections::VecDeque;
use std::sync::Arc;

use self::drive::Drive;
use self::layer_order::window;
pub use self::spec::{AfterMiss, LoadSpec};
pub use self::stream::LoadStream;
use super::credit::Credit;
use super::task::Task;
use super::tiers::Tiers;
use crate::format::{ChunkHash, Protection, Space};
use crate::protocol::Order;

/// Brings chunks into slots, verified. Needs a tokio runtime; starts at once.
pub fn start(tiers: &Arc<Tiers>, request: LoadSpec, credit: Option<Credit>) -> LoadStream {
    let chunks = request.chunks.len();
    // A window takes half of the credit or of the arena, whichever is less.
    let most = credit
        .as_ref()
        .map_or(usize::MAX, Credit::bytes)
        .min(tiers.arena.size());
    let window = match request.order {
        Order::Chunk => 1,
        // The header of a decrypted chunk takes all of its planes.
        Order::Layer if request.space.protection() == Protection::Encrypted => 1,
        Order::Layer => window(&request.space, chunks, most),
    };
    let order = match window {
        // One chunk is the whole load, however small the arena.
        _ if chunks == 1 && request.space.protection() != Protection::Encrypted => request.order,
        1 => Order::Chunk,
        _ => Order::Layer,
    };
    let after_miss = request.after_miss;
    let (mut drive, steps) = Drive::new(tiers, request, credit);
    let ready = match order {
        Order::Chunk => drive.begin_with_memory(),
        Order::Layer => VecDeque::new(),
    };
    let (of, space, all) = (Arc::clone(tiers), drive.space.clone(), Arc::clone(&drive.chunks));
    let start = |run_end| {
        Task::spawn(async move {
            match order {
                Order::Chunk => drive.in_chunk_order().await,
                Order::Layer => drive.in_layer_order(window, run_end).await,
            }
        })
    };
    LoadStream::new(chunks, order, window, after_miss, steps, ready, start)
        .at_a_gap(move |gap| doubt(&of, &space, &all[gap + 1..]))
}

/// A chunk that was to be there is gone, and the load ends before these, which may be gone too. What was known of them counts
/// no more: an engine computes them, and a store asks S3 first.
fn doubt(tiers: &Tiers, space: &Space, chunks: &[ChunkHash]) {
    if tiers.asks_s3() && space.kind().is_full() {
        tiers.bucket.doubt(space, chunks);
    }
}
