//! `POST /v1/load` and `/v1/release`: a JSON line for each chunk or group of layers as soon as it may be read.

use std::collections::HashSet;
use std::sync::Arc;

use futures::FutureExt;
use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use tokio::time::Instant;

use super::body::{JSON_LINES, JsonLines, Reply, json, lines, push_line};
use super::lookup::limited;
use super::problem::ApiProblem;
use super::traces::TracedLoad;
use super::{Api, Caller, body, callers, spaces};
use crate::cache::gateway::{AfterMiss, Miss};
use crate::node::{EngineLoad, Lent, LoadCall};
use crate::protocol::{LoadLine, LoadRequest, ReleaseAnswer, ReleaseRequest};

const LOAD_ID_BYTES_MAX: usize = 256;
/// Bytes of ready lines that are sent together.
const TOGETHER: usize = 16 << 10;

/// `POST /v1/load`: a line for each chunk, or group of layers, as soon as it may be read.
pub async fn load(api: &Arc<Api>, caller: &Caller, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let sampled = api.sample("load", request.headers());
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: LoadRequest = body::parse(&text)?;
    let session = callers::session(api, caller, &request.session)?;
    let space = spaces::named(api, &request.space)?;
    api.check_count(request.hashes.len())?;
    check_load_id(&request.load_id)?;
    let mut seen = HashSet::with_capacity(request.hashes.len());
    if let Some(twice) = request.hashes.iter().find(|hash| !seen.insert(**hash)) {
        // One release would end both loads of the chunk.
        return Err(ApiProblem::bad(format!(
            "chunk {twice} is named twice: name each chunk once in a load"
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
        declines: request.declines,
    };
    let traced = api.traces.begin(&call, &session, sampled);
    let load = || api.node.load(&session, call);
    let load = match &traced {
        Some(traced) => traced.trace.run(load)?,
        None => load()?,
    };
    let mut pump = Pump::new(api, load, traced);
    // Chunks in memory are ready without waiting; often these are all.
    if pump.ready() {
        let text = std::mem::take(&mut pump.lines);
        return Ok(body::bytes(StatusCode::OK, JSON_LINES, text.into()));
    }
    let (lines, answer) = lines(api.options.timeout);
    tokio::spawn(async move {
        tokio::select! {
            () = pump.run(&lines) => {}
            // A lent slot stays lent until its release.
            () = lines.closed() => {}
            () = session.over() => {}
        }
    });
    Ok(answer)
}

/// A load's outcomes on their way into lines.
struct Pump {
    api: Arc<Api>,
    began: std::time::Instant,
    load: EngineLoad,
    traced: Option<Arc<TracedLoad>>,
    lines: Vec<u8>,
    loaded: usize,
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.traced.iter().for_each(|traced| traced.ended());
    }
}

impl Pump {
    fn new(api: &Arc<Api>, load: EngineLoad, traced: Option<Arc<TracedLoad>>) -> Self {
        Self {
            api: Arc::clone(api),
            began: std::time::Instant::now(),
            load,
            traced,
            lines: Vec::new(),
            loaded: 0,
        }
    }

    /// Takes the outcomes that are ready, up to `TOGETHER` bytes of lines. True after the last line.
    fn ready(&mut self) -> bool {
        while self.lines.len() < TOGETHER
            && let Some(next) = self.load.next().now_or_never()
        {
            if self.push(next) {
                return true;
            }
        }
        false
    }

    /// Writes an outcome as a line. True after the last line.
    fn push(&mut self, next: Option<(usize, Result<Lent, Miss>)>) -> bool {
        let figures = &self.api.figures;
        let Some((i, outcome)) = next else {
            figures.load.since(self.began);
            self.traced.iter().for_each(|traced| traced.ended());
            let (end, loaded, order) = (true, self.loaded, self.load.order());
            push_line(&mut self.lines, &LoadLine::End { end, loaded, order });
            return true;
        };
        match &outcome {
            Ok(lent) => {
                if self.loaded == 0 {
                    figures.load_first.since(self.began);
                }
                self.loaded += 1;
                figures.loaded(lent);
                self.traced.iter().for_each(|traced| traced.came(i, lent));
            }
            Err(miss) => {
                figures.missed_chunks.add(miss.code(), 1);
                self.traced.iter().for_each(|traced| traced.missed(i, miss));
            }
        }
        push_line(&mut self.lines, &line(i, outcome));
        false
    }

    async fn run(&mut self, to: &JsonLines) {
        let mut over = false;
        loop {
            if !self.lines.is_empty() && to.send(std::mem::take(&mut self.lines)).await.is_err() {
                return;
            }
            if over {
                return;
            }
            let next = self.load.next().await;
            over = self.push(next) || self.ready();
        }
    }
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
pub async fn release(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Reply, ApiProblem> {
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: ReleaseRequest = body::parse(&text)?;
    let session = callers::session(api, caller, &request.session)?;
    check_load_id(&request.load_id)?;
    let released = match &request.slots {
        None => api.node.release_load(&session, &request.load_id),
        Some(slots) => {
            api.check_count(slots.len())?;
            let slots: Vec<_> = slots.iter().map(|slot| (slot.slot, slot.generation)).collect();
            api.node.release(&session, &request.load_id, &slots)
        }
    };
    Ok(json(&ReleaseAnswer { released }))
}

fn check_load_id(load_id: &str) -> Result<(), ApiProblem> {
    match (1..=LOAD_ID_BYTES_MAX).contains(&load_id.len()) {
        true => Ok(()),
        false => Err(ApiProblem::bad(format!(
            "`load_id` must have 1 to {LOAD_ID_BYTES_MAX} bytes"
        ))),
    }
}
