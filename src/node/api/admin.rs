//! Operators' calls: prefetch, pin, flush, reload, status.

use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use tokio::time::Instant;

use super::body::{Reply, json};
use super::lookup::limited;
use super::problem::ApiProblem;
use super::{Api, body, spaces};
use crate::format::Space;
use crate::protocol::Flushed;
use crate::protocol::{ChunksRequest, Count, FLUSH_MAX, FlushRequest};

async fn chunks(api: &Api, request: Request<Incoming>) -> Result<(Space, ChunksRequest), ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: ChunksRequest = body::parse(&text)?;
    api.check_count(request.hashes.len())?;
    Ok((spaces::named(api, &request.space)?, request))
}

/// `POST /v1/prefetch`: the prefetch goes on in the background after the answer.
pub async fn prefetch(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let (space, request) = chunks(api, request).await?;
    let count = request.hashes.len();
    let until = Instant::now() + api.options.load_deadline;
    api.node.prefetch(space, request.hashes, until);
    let mut answer = json(&Count { chunks: count });
    *answer.status_mut() = StatusCode::ACCEPTED;
    Ok(answer)
}

/// `POST /v1/pin`: keeps the chunks that are in memory there.
pub async fn pin(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let (space, request) = chunks(api, request).await?;
    let most = api.node.options().pin_max;
    let until = Instant::now() + limited(request.ms, most);
    let chunks = api.node.gateway().pin(&space, &request.hashes, until);
    Ok(json(&Count { chunks }))
}

/// `POST /v1/unpin`.
pub async fn unpin(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let (space, request) = chunks(api, request).await?;
    let chunks = api.node.gateway().unpin(&space, &request.hashes);
    Ok(json(&Count { chunks }))
}

/// `POST /v1/flush`.
pub async fn flush(api: &Arc<Api>, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: FlushRequest = body::parse(&text)?;
    let time = limited(request.deadline_ms, FLUSH_MAX);
    let flushed = api.node.flush(Instant::now() + time).await;
    let Flushed {
        pending,
        dropped,
        unread_disks,
        ..
    } = flushed;
    if pending > 0 {
        let detail = format!(
            "{pending} chunks are not on S3 yet: flush again, or look at /v1/status for what S3 and the disks say; \
             what is on a disk that was taken out is sent when that is back"
        );
        return Err(ApiProblem::new(
            StatusCode::GATEWAY_TIMEOUT,
            "not_flushed",
            detail,
        ));
    }
    // An unread disk may hold chunks that an earlier life committed and S3 never got.
    if unread_disks > 0 {
        let detail = format!(
            "{unread_disks} disks could not be used at the start, so what they have and S3 has not is not known: \
             repair them (/v1/status tells which) and start kvgate again, or take them out of [disk] paths"
        );
        return Err(ApiProblem::new(
            StatusCode::GATEWAY_TIMEOUT,
            "not_flushed",
            detail,
        ));
    }
    // The answer must not pass for an acknowledgement of lost chunks.
    if dropped != request.dropped {
        let detail = format!(
            "{dropped} chunks were dropped since the daemon's start, and are not stored. \
             See [store] write_behind and when_full, and the folder lost of each disk; a flush with \"dropped\": {dropped} is refused only when more were"
        );
        return Err(ApiProblem::new(StatusCode::CONFLICT, "dropped", detail));
    }
    Ok(json(&flushed))
}

/// `POST /v1/reload`: reloads the settings that can change without a restart.
pub fn reload(api: &Api) -> Result<Reply, ApiProblem> {
    let bad = |detail: String| ApiProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "not_reloaded", detail);
    let reloaded = api.reload().map_err(bad)?;
    Ok(json(&serde_json::json!({ "reloaded": reloaded })))
}

/// `GET /v1/status`.
pub fn status(api: &Api) -> Reply {
    json(&api.node.status())
}

/// `GET /healthz`: the process answers.
pub fn healthz() -> Reply {
    body::bytes(StatusCode::OK, "text/plain", Bytes::from_static(b"ok\n"))
}

/// `GET /readyz`.
pub fn readyz(api: &Api) -> Result<Reply, ApiProblem> {
    match api.node.not_ready() {
        None => Ok(body::bytes(
            StatusCode::OK,
            "text/plain",
            Bytes::from_static(b"ready\n"),
        )),
        Some(why) => Err(ApiProblem::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", why)),
    }
}
