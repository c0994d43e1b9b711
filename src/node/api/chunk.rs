//! `GET`, `HEAD` and `DELETE /v1/chunks/{space}/{hash}`: a chunk for people and tools, without the arena.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, HeaderValue, RANGE};
use hyper::{Method, Request, StatusCode};
use serde_json::json;
use tokio::time::Instant;

use super::body::{OCTETS, Reply};
use super::problem::ApiProblem;
use super::{Api, body, spaces};
use crate::arena::Slot;
use crate::cache::gateway::{AfterMiss, LoadSpec, LoadedChunk, Miss};
use crate::format::{ChunkHash, Header, Space};
use crate::protocol::Order;
use crate::protocol::Strategy;

pub async fn serve(
    api: &Arc<Api>,
    name: &str,
    hash: &str,
    request: Request<Incoming>,
) -> Result<Reply, ApiProblem> {
    let hash: ChunkHash = hash
        .parse()
        .map_err(|error| ApiProblem::bad(format!("{error}")))?;
    if request.method() == Method::DELETE {
        // What a reload of the keys left behind can still be removed.
        return delete(api, &spaces::declared(api, name)?, &hash).await;
    }
    let space = spaces::named(api, name)?;
    let header_alone = request.uri().query() == Some("header");
    if request.method() == Method::HEAD {
        return head(api, &space, hash, header_alone).await;
    }
    let chunk = loaded(api, &space, hash).await?;
    let object = chunk.object().ok_or_else(|| {
        // The chunk was committed a moment ago, and has no object yet.
        ApiProblem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "not_sealed",
            "its digests are being computed: ask again",
        )
    })?;
    if header_alone {
        return header(object);
    }
    let range = request
        .headers()
        .get(RANGE)
        .map(|value| range(value, object.len()));
    let (status, range) = match range {
        None => (StatusCode::OK, 0..object.len()),
        Some(Ok(range)) => (StatusCode::PARTIAL_CONTENT, range),
        Some(Err(problem)) => return Err(problem),
    };
    let (total, length) = (object.len(), range.len());
    let content_range = format!("bytes {}-{}/{total}", range.start, range.end.saturating_sub(1));
    let mut answer = body::bytes(
        status,
        OCTETS,
        Bytes::from_owner(Part::of(&chunk, object.slice(range))),
    );
    let headers = answer.headers_mut();
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    if status == StatusCode::PARTIAL_CONTENT
        && let Ok(value) = HeaderValue::from_str(&content_range)
    {
        headers.insert(CONTENT_RANGE, value);
    }
    Ok(answer)
}

/// Bytes of an object, and their share of the [credit](Api::chunks) until they are sent.
struct Part {
    bytes: Slot,
    _chunk: LoadedChunk,
}

impl Part {
    fn of(chunk: &LoadedChunk, bytes: Slot) -> Self {
        Self {
            bytes,
            _chunk: chunk.clone(),
        }
    }
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Loads and verifies a chunk.
async fn loaded(api: &Api, space: &Space, hash: ChunkHash) -> Result<LoadedChunk, ApiProblem> {
    let request = LoadSpec {
        space: space.clone(),
        chunks: vec![hash],
        order: Order::Chunk,
        after_miss: AfterMiss::Stop,
        deadline: Instant::now() + api.options.load_deadline,
    };
    let mut load = api.node.gateway().load_on_credit(request, api.chunks.clone());
    match load.next().await {
        Some((_, Ok(chunk))) => Ok(chunk),
        Some((_, Err(miss))) => Err(missed(&miss)),
        None => Err(ApiProblem::not_found("there is no such chunk")),
    }
}

fn missed(miss: &Miss) -> ApiProblem {
    let status = match miss.code() {
        "unknown" => StatusCode::BAD_GATEWAY,
        "arena_full" | "arena_too_small" | "not_released" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::NOT_FOUND,
    };
    ApiProblem::new(status, miss.code(), miss)
}

fn header(object: &Slot) -> Result<Reply, ApiProblem> {
    let header = Header::parse(object).map_err(|error| ApiProblem::not_found(error.to_string()))?;
    let kind = header.digest_kind;
    let digests: Vec<String> = header
        .digests
        .iter()
        .map(|digest| crate::format::hex::encode(&digest[..kind.width()]))
        .collect();
    Ok(body::json(&json!({
        "space_id": header.space_id,
        "chunk": header.chunk,
        "parent": header.parent,
        "tokens": header.tokens,
        "kind": header.kind,
        "is_draft": header.is_draft,
        "payload_bytes": header.payload_len,
        "digest": kind,
        "digests": digests,
    })))
}

/// Answers from a lookup: loads nothing, and verifies nothing.
async fn head(api: &Api, space: &Space, hash: ChunkHash, header_alone: bool) -> Result<Reply, ApiProblem> {
    let deadline = Instant::now() + api.options.lookup_deadline;
    let gateway = api.node.gateway();
    let found = gateway.lookup(space, &[hash], Strategy::Exact, deadline).await;
    if found.unknown.get(0) {
        let why = found
            .error
            .map_or_else(|| "the deadline passed".to_owned(), |error| error.to_string());
        return Err(ApiProblem::new(StatusCode::BAD_GATEWAY, "unknown", why));
    }
    if !found.mask.get(0) {
        return Err(missed(&Miss::Absent));
    }
    if header_alone {
        return Ok(body::bytes(StatusCode::OK, body::JSON, Bytes::new()));
    }
    let mut answer = body::bytes(StatusCode::OK, OCTETS, Bytes::new());
    let headers = answer.headers_mut();
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(space.layout().object_len()));
    Ok(answer)
}

async fn delete(api: &Api, space: &Space, hash: &ChunkHash) -> Result<Reply, ApiProblem> {
    let deadline = Instant::now() + api.options.load_deadline;
    let removed = api.node.gateway().remove(space, hash, deadline).await;
    removed.map_err(|error| ApiProblem::new(StatusCode::BAD_GATEWAY, "not_removed", error))?;
    Ok(body::bytes(StatusCode::NO_CONTENT, OCTETS, Bytes::new()))
}

/// Parses one range, as in RFC 9110.
pub(super) fn range(value: &HeaderValue, len: usize) -> Result<Range<usize>, ApiProblem> {
    let refused = || {
        ApiProblem::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            "bad_range",
            format!("the object has {len} bytes: send one range `bytes=FIRST-LAST` within them"),
        )
    };
    let text = value.to_str().map_err(|_| refused())?;
    let (first, last) = text
        .strip_prefix("bytes=")
        .and_then(|range| range.split_once('-'))
        .ok_or_else(refused)?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| refused());
    let range = match (first, last) {
        ("", last) => len.saturating_sub(number(last)?)..len,
        (first, "") => number(first)?..len,
        (first, last) => number(first)?..number(last)?.saturating_add(1).min(len),
    };
    match range.is_empty() {
        true => Err(refused()),
        false => Ok(range),
    }
}
