//! `POST /v1/store/reserve`, `/commit` and `/abort`.

use std::sync::Arc;

use hyper::Request;
use hyper::body::Incoming;

use super::body::{Reply, json};
use super::otlp::Sampled;
use super::problem::ApiProblem;
use super::{Api, Caller, body, callers, spaces, traces};
use crate::metrics::trace::CallTrace;
use crate::node::{NodeError, ReserveOutcome, ToStore};
use crate::protocol::{
    CommitAnswer, CommitOutcome, CommitRequest, ReserveAnswer, ReserveRequest, ReservedChunk,
};

/// `POST /v1/store/reserve`.
pub async fn reserve(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: ReserveRequest = body::parse(&text)?;
    let session = callers::session(api, caller, &request.session)?;
    let space = spaces::named(api, &request.space)?;
    api.check_count(request.chunks.len())?;
    for (i, chunk) in request.chunks.iter().enumerate() {
        if let Some(tokens) = chunk.tokens
            && tokens != space.chunk_tokens()
        {
            let full = space.chunk_tokens();
            return Err(ApiProblem::bad(format!(
                "chunk {i} has {tokens} tokens: only full chunks of {full} are stored"
            )));
        }
    }
    let chunks: Vec<ToStore> = request
        .chunks
        .iter()
        .map(|chunk| ToStore {
            hash: chunk.hash,
            parent: chunk.parent,
        })
        .collect();
    let reserved = api.node.reserve(&session, &space, &chunks)?;
    let chunks = reserved.chunks.into_iter().map(|chunk| match chunk {
        ReserveOutcome::Slot {
            slot,
            generation,
            offset,
        } => ReservedChunk::Slot {
            slot,
            generation,
            offset,
        },
        ReserveOutcome::Skip(skip) => skipped(skip.word()),
        ReserveOutcome::OtherRank => skipped("other_rank"),
    });
    let chunks: Vec<ReservedChunk> = chunks.collect();
    chunks.iter().for_each(|chunk| api.figures.reserved(chunk));
    Ok(json(&ReserveAnswer {
        own: reserved.shares,
        chunks,
        ranks_missing: reserved.ranks_missing,
    }))
}

fn skipped(word: &str) -> ReservedChunk {
    ReservedChunk::Skip {
        skip: word.to_owned(),
    }
}

/// `POST /v1/store/commit`.
pub async fn commit(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Reply, ApiProblem> {
    let sampled = api.sample("store", request.headers());
    each(api, caller, request, sampled, |session, slot| {
        let committed = api.node.commit(session, slot);
        let word = match &committed {
            Ok(true) => "published",
            Ok(false) => "share",
            Err(_) => "refused",
        };
        api.figures.committed_chunks.add(word, 1);
        committed
    })
    .await
}

/// `POST /v1/store/abort`.
pub async fn abort(api: &Arc<Api>, caller: &Caller, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    each(api, caller, request, None, |session, slot| {
        Ok(api.node.abort(session, slot).map(|()| false)?)
    })
    .await
}

async fn each(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
    sampled: Option<Sampled>,
    act: impl Fn(&crate::node::Session, (usize, u64)) -> Result<bool, NodeError>,
) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: CommitRequest = body::parse(&text)?;
    let session = callers::session(api, caller, &request.session)?;
    api.check_count(request.slots.len())?;
    let each = || {
        let slots = request
            .slots
            .iter()
            .map(|slot| match act(&session, (slot.slot, slot.generation)) {
                Ok(published) => CommitOutcome::Ok { published },
                Err(error) => CommitOutcome::Refused {
                    code: error.code().to_owned(),
                    detail: error.to_string(),
                },
            });
        slots.collect()
    };
    let slots = match sampled {
        None => each(),
        Some(sampled) => {
            let mut about = traces::about(&session);
            about.push(("chunks", request.slots.len().to_string()));
            // It ends when the last of its chunks has gone down, or was dropped.
            CallTrace::new(api.options.spans_max, Some(sampled.export(about))).run(each)
        }
    };
    Ok(json(&CommitAnswer { slots }))
}
