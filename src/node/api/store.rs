//! `POST /v1/store/reserve`, `/commit` and `/abort`.

use std::sync::Arc;

use hyper::Request;
use hyper::body::Incoming;

use super::body::{Reply, json};
use super::problem::ApiProblem;
use super::{Api, Caller, body, callers, spaces};
use crate::node::{NodeError, ReserveOutcome, SlotError, ToStore};
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
    each(api, caller, request, |session, slot| {
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
    each(api, caller, request, |session, slot| {
        api.node.abort(session, slot).map(|()| false)
    })
    .await
}

async fn each(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
    act: impl Fn(&crate::node::Session, (usize, u64)) -> Result<bool, SlotError>,
) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: CommitRequest = body::parse(&text)?;
    let session = callers::session(api, caller, &request.session)?;
    api.check_count(request.slots.len())?;
    let slots = request
        .slots
        .iter()
        .map(|slot| match act(&session, (slot.slot, slot.generation)) {
            Ok(published) => CommitOutcome::Ok { published },
            Err(error) => CommitOutcome::Refused {
                code: NodeError::from(error).code().to_owned(),
                detail: error.to_string(),
            },
        });
    Ok(json(&CommitAnswer {
        slots: slots.collect(),
    }))
}
