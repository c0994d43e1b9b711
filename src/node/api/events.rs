//! `POST /v1/bind` and `POST /v1/events`: what an engine's own events say of chunks, and which of these chunks came into
//! memory and onto disks, or left them.

use std::sync::{Arc, PoisonError};

use hyper::Request;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::body::{Reply, json};
use super::bound_blocks::LocalHasher;
use super::lookup::limited;
use super::problem::ApiProblem;
use super::{Api, body, spaces};
use crate::format::{ChunkHash, Space};
use crate::protocol::{BindRequest, Count, EventsRequest};

/// Events of an answer: with tokens they have some kilobytes each.
const EVENTS_MAX: usize = 512;

/// `POST /v1/bind`.
pub async fn bind(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: BindRequest = body::parse(&text)?;
    let space = spaces::named(api, &request.space)?;
    api.check_count(request.chunks.len())?;
    check(api, &space, &request)?;
    bind_blocks(api, &space, &request);
    let count = request.chunks.len();
    api.node.gateway().bind(&space, &request.scheme, request.chunks);
    Ok(json(&Count { chunks: count }))
}

fn check(api: &Api, space: &Space, request: &BindRequest) -> Result<(), ApiProblem> {
    let (full, most) = (space.chunk_tokens() as usize, api.options.note_bytes);
    let blocks = request.block_size.unwrap_or(1);
    if blocks == 0 || !full.is_multiple_of(blocks) {
        return Err(ApiProblem::bad(format!(
            "block_size {blocks}: chunks of {full} tokens are no whole blocks of that"
        )));
    }
    if request.scheme.len() > most {
        return Err(ApiProblem::bad(format!(
            "the scheme has more than {most} bytes ([events] note_size)"
        )));
    }
    for (i, chunk) in request.chunks.iter().enumerate() {
        if chunk.tokens.len() != full {
            let tokens = chunk.tokens.len();
            return Err(ApiProblem::bad(format!(
                "chunk {i} has {tokens} tokens: a chunk of this space has {full}"
            )));
        }
        if chunk.event.len() > most {
            let bytes = chunk.event.len();
            return Err(ApiProblem::bad(format!(
                "the event of chunk {i} has {bytes} bytes: {most} may be ([events] note_size)"
            )));
        }
        if request.block_size.is_some() && i > 0 && chunk.parent != Some(request.chunks[i - 1].hash) {
            return Err(ApiProblem::bad(format!(
                "chunk {i} does not follow the one before: bind a prompt's chunks in order"
            )));
        }
    }
    Ok(())
}

/// A router may ask for them by its own hashes from now on.
fn bind_blocks(api: &Api, space: &Space, request: &BindRequest) {
    let (Some(size), Some(first)) = (request.block_size, request.chunks.first()) else {
        return;
    };
    let hasher = LocalHasher::new(&request.lora_name, &request.cache_salt);
    let blocks = request
        .chunks
        .iter()
        .flat_map(|chunk| hasher.blocks(&chunk.tokens, size));
    let local: Vec<u64> = blocks.collect();
    let hashes: Vec<ChunkHash> = request.chunks.iter().map(|chunk| chunk.hash).collect();
    let mut bound = api.bound.lock().unwrap_or_else(PoisonError::into_inner);
    bound.bind(space.model_id(), first.parent, &local, &hashes);
}

/// `POST /v1/events`: waits while there is none.
pub async fn events(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: EventsRequest = body::parse(&text)?;
    let space = spaces::named(api, &request.space)?;
    let events = api.node.gateway().events();
    let until = Instant::now() + limited(Some(request.wait_ms), api.options.event_wait);
    loop {
        let changes = events.changes();
        let answer = events.read(
            space.key(),
            &request.scheme,
            request.cursor.as_deref(),
            EVENTS_MAX,
        );
        let is_answer = !answer.events.is_empty() || answer.is_lost || request.cursor.is_none();
        let is_answer = is_answer || api.node.is_draining();
        if is_answer || tokio::time::timeout_at(until, changes).await.is_err() {
            return Ok(json(&answer));
        }
    }
}
