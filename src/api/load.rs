use std::sync::Arc;

use futures::FutureExt;
use hyper::Request;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::body::{Answer, Lines, json, lines, push_line};
use super::lookup::limited;
use super::problem::Problem;
use super::wire::{LoadLine, LoadRequest, ReleaseAnswer, ReleaseRequest};
use super::{Api, body, spaces};
use crate::gateway::{AfterMiss, Miss};
use crate::node::{Lent, Load, LoadCall, Session};

const LOAD_ID_BYTES_MAX: usize = 256;
/// Bytes of lines that go together when they are ready at once.
const TOGETHER: usize = 16 << 10;

/// `POST /v1/load`: a line for each chunk, or group of layers, as soon as it may be read.
pub async fn load(api: &Arc<Api>, request: Request<Incoming>) -> Result<Answer, Problem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: LoadRequest = body::parse(&text)?;
    let session = api.node.session(&request.session)?;
    let space = spaces::named(api, &request.space)?;
    api.check_count(request.hashes.len())?;
    if !(1..=LOAD_ID_BYTES_MAX).contains(&request.load_id.len()) {
        return Err(Problem::bad(format!(
            "`load_id` must have 1 to {LOAD_ID_BYTES_MAX} bytes"
        )));
    }
    let call = LoadCall {
        load_id: request.load_id,
        space,
        chunks: request.hashes,
        order: request.order,
        after_miss: match request.continue_after_miss {
            true => AfterMiss::Continue,
            false => AfterMiss::Stop,
        },
        deadline: Instant::now() + limited(request.deadline_ms, api.options.load_deadline),
    };
    let load = api.node.load(&session, call)?;
    let (lines, answer) = lines(api.options.timeout);
    tokio::spawn(async move {
        tokio::select! {
            () = pump(load, &lines) => {}
            // What was lent stays lent until it is released.
            () = lines.closed() => {}
            () = over(&session) => {}
        }
    });
    Ok(answer)
}

async fn over(session: &Session) {
    session.over().await;
}

async fn pump(mut load: Load, to: &Lines) {
    let order = load.order();
    let mut loaded = 0;
    let mut next = load.next().await;
    while let Some(outcome) = next {
        let mut lines = Vec::new();
        let mut outcome = Some(outcome);
        // All that is ready goes at once.
        while let Some((i, of)) = outcome.take() {
            loaded += usize::from(of.is_ok());
            push_line(&mut lines, &line(i, of));
            if lines.len() < TOGETHER {
                outcome = load.next().now_or_never().flatten();
            }
        }
        if to.send(lines).await.is_err() {
            return;
        }
        next = load.next().await;
    }
    let mut last = Vec::new();
    let end = true;
    push_line(&mut last, &LoadLine::End { end, loaded, order });
    // Whoever is gone needs no end.
    let _ = to.send(last).await;
}

fn line(i: usize, outcome: Result<Lent, Miss>) -> LoadLine {
    match outcome {
        Ok(lent) => LoadLine::Here {
            i,
            slot: lent.slot,
            generation: lent.generation,
            offset: lent.offset,
            planes: lent.planes,
            tier: lent.tier.word().to_owned(),
        },
        Err(miss) => LoadLine::Missing {
            i,
            miss: miss.code().to_owned(),
            detail: miss.to_string(),
        },
    }
}

/// `POST /v1/release`.
pub async fn release(api: &Arc<Api>, request: Request<Incoming>) -> Result<Answer, Problem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: ReleaseRequest = body::parse(&text)?;
    let session = api.node.session(&request.session)?;
    let released = match &request.slots {
        None => api.node.release_load(&session, &request.load_id),
        Some(slots) => {
            let slots: Vec<_> = slots.iter().map(|slot| (slot.slot, slot.generation)).collect();
            api.node.release(&session, &request.load_id, &slots)
        }
    };
    Ok(json(&ReleaseAnswer { released }))
}
