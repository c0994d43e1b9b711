//! `POST /v1/attach`: a stream that lasts as long as the session, with heartbeats and events.

use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::{HeaderValue, USER_AGENT};

use super::body::{JsonLines, Reply, lines, push_line};
use super::impatient::Patient;
use super::problem::ApiProblem;
use super::{Api, Caller, body};
use crate::node::{Attach, Has, Session, SessionEvent};
use crate::protocol::{ArenaInfo, AttachRequest, Attached, VERSION, version_in};

/// Sends a line as well, so that a dead connection is found out.
const HEARTBEAT: Duration = Duration::from_secs(10);
const INSTANCE_BYTES_MAX: usize = 256;

/// `POST /v1/attach`: a stream that lasts as long as the session.
pub async fn attach(
    api: &Arc<Api>,
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Reply, ApiProblem> {
    let version = request.headers().get(USER_AGENT).cloned();
    let text = body::read(request, api.options.body_max, api.options.timeout).await?;
    let request: AttachRequest = body::parse(&text)?;
    let (session, events) = api.node.attach(checked(request, caller)?)?;
    if let Some(theirs) = version_in(version.as_ref().map(HeaderValue::as_bytes))
        && theirs != VERSION
    {
        let instance = session.instance.escape_debug();
        api.other_version.tell(&format_args!(
            "engine {instance} has kvgate {theirs}, this daemon is kvgate {VERSION}"
        ));
    }
    let arena = api.node.gateway().arena();
    let first = Attached {
        session: session.name.clone(),
        arena: ArenaInfo {
            path: arena.path().map(|path| path.display().to_string()),
            bytes: arena.file_bytes(),
            boot_id: arena.boot_id().to_string(),
        },
        version: VERSION.to_owned(),
    };
    let (lines, mut answer) = lines(api.options.timeout);
    // The end of the caller's process is seen elsewhere, so an unread stream proves nothing.
    let is_seen = session.is_seen();
    if is_seen {
        answer.extensions_mut().insert(Patient);
    }
    let api = Arc::clone(api);
    tokio::spawn(async move {
        tokio::select! {
            () = tell(&lines, &first, events, is_seen) => {}
            () = lines.closed() => {}
            () = session.over() => return,
        }
        closed(&api, &session);
    });
    Ok(answer)
}

fn closed(api: &Api, session: &Arc<Session>) {
    api.node.stream_closed(session);
}

fn checked(request: AttachRequest, caller: &Caller) -> Result<Attach, ApiProblem> {
    let &Caller::Unix(process) = caller else {
        return Err(ApiProblem::bad("sessions exist only over the unix socket"));
    };
    let AttachRequest {
        instance,
        rank,
        world_size,
        layers,
        tp,
        tokens,
    } = request;
    if !(1..=INSTANCE_BYTES_MAX).contains(&instance.len()) {
        return Err(ApiProblem::bad(format!(
            "`instance` must have 1 to {INSTANCE_BYTES_MAX} bytes: the same for all ranks of one engine, and no other engine's"
        )));
    }
    if world_size == 0 {
        return Err(ApiProblem::bad("`world_size` must be 1 at least"));
    }
    if layers.is_some_and(|(first, end)| first >= end) {
        return Err(ApiProblem::bad("`layers` is [first, end] with first < end"));
    }
    if tp.is_some_and(|(rank, size)| rank >= size) {
        return Err(ApiProblem::bad("`tp` is [rank, size] with rank < size"));
    }
    if !tokens.is_valid() {
        return Err(ApiProblem::bad(
            "`tokens` is {rank, size, interleave} with rank < size and interleave of 1 at least",
        ));
    }
    if world_size > 1 && layers.is_none() && tp.is_none() && tokens.is_all() {
        return Err(ApiProblem::bad(
            "with several ranks, say what this one has by `tp`, `layers` and `tokens` (`tp`: [0, 1] where every rank has everything)",
        ));
    }
    Ok(Attach {
        instance,
        rank,
        world_size,
        has: Has { layers, tp, tokens },
        process,
    })
}

async fn tell(
    lines: &JsonLines,
    first: &Attached,
    mut events: tokio::sync::mpsc::Receiver<SessionEvent>,
    is_seen: bool,
) {
    let mut line = Vec::new();
    push_line(&mut line, first);
    if lines.send(line).await.is_err() {
        return;
    }
    loop {
        let mut line = Vec::new();
        match tokio::time::timeout(HEARTBEAT, events.recv()).await {
            Ok(Some(event)) => push_line(&mut line, &event),
            Ok(None) => return,
            Err(_) => line.extend_from_slice(b"{\"event\":\"heartbeat\"}\n"),
        }
        match is_seen {
            // A process that doesn't read its stream misses events; its calls report them too.
            true => lines.offer(line),
            false => match lines.send(line).await {
                Ok(()) => {}
                Err(_) => return,
            },
        }
    }
}
