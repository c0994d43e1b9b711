//! Routing: from a method and path to its call.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Request, StatusCode};

use super::body::{Reply, problem};
use super::problem::ApiProblem;
use super::{
    Api, Caller, admin, attach, callers, chunk, events, history, load, lookup, metrics, page, routers,
    spaces, store, traces,
};

/// Serves one request; every failure becomes a problem in the answer.
pub async fn serve(api: Arc<Api>, caller: Caller, request: Request<Incoming>) -> Reply {
    let answer = match callers::allowed(&api, &caller, &request) {
        Ok(()) => route(&api, &caller, request).await,
        Err(problem) => Err(problem),
    };
    let mut answer = answer.unwrap_or_else(|error| {
        let mut answer = problem(&error);
        if error.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            answer.headers_mut().insert(WWW_AUTHENTICATE, bearer);
        }
        if error.status == StatusCode::METHOD_NOT_ALLOWED
            && let Ok(methods) = HeaderValue::from_str(&error.detail)
        {
            answer.headers_mut().insert(ALLOW, methods);
        }
        answer
    });
    // A client of another version says both where it does not understand.
    let version = HeaderValue::from_static(concat!("kvgate/", env!("CARGO_PKG_VERSION")));
    answer.headers_mut().insert(hyper::header::SERVER, version);
    answer
}

async fn route(api: &Arc<Api>, caller: &Caller, request: Request<Incoming>) -> Result<Reply, ApiProblem> {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let unknown = || {
        ApiProblem::not_found(format!(
            "there is no {path}: GET /v1/openapi.json describes all calls"
        ))
    };
    let allowed = methods(&segments).ok_or_else(unknown)?;
    if !allowed.split(", ").any(|one| one == request.method().as_str()) {
        let (status, code) = (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        return Err(ApiProblem::new(status, code, allowed));
    }
    match segments.as_slice() {
        ["v1", "spaces"] => spaces::declare(api, request).await,
        ["v1", "attach"] => attach::attach(api, caller, request).await,
        ["v1", "lookup"] => lookup::lookup(api, request).await,
        ["v1", "prefix"] => routers::prefix(api, request).await,
        ["query"] => routers::query(api, request).await,
        ["check_blocks"] => routers::check_blocks(api, request).await,
        ["v1", "load"] => load::load(api, caller, request).await,
        ["v1", "release"] => load::release(api, caller, request).await,
        ["v1", "store", "reserve"] => store::reserve(api, caller, request).await,
        ["v1", "store", "commit"] => store::commit(api, caller, request).await,
        ["v1", "store", "abort"] => store::abort(api, caller, request).await,
        ["v1", "bind"] => events::bind(api, request).await,
        ["v1", "events"] => events::events(api, request).await,
        ["v1", "prefetch"] => admin::prefetch(api, request).await,
        ["v1", "pin"] => admin::pin(api, request).await,
        ["v1", "unpin"] => admin::unpin(api, request).await,
        ["v1", "flush"] => admin::flush(api, request).await,
        ["v1", "reload"] => admin::reload(api),
        ["v1", "chunks", space, hash] => chunk::serve(api, space, hash, request).await,
        ["v1", "status"] => Ok(admin::status(api)),
        ["v1", "history"] => Ok(history::history(api)),
        ["v1", "traces"] => traces::traces(api, &request),
        ["v1", "openapi.json"] => Ok(page::openapi()),
        ["metrics"] => Ok(metrics::metrics(api, request.headers().get(ACCEPT))),
        ["healthz"] => Ok(admin::healthz()),
        ["readyz"] => admin::readyz(api),
        [""] => Ok(page::page()),
        _ => Err(unknown()),
    }
}

/// The methods of a path, as in the Allow header. None: there is no such path.
fn methods(segments: &[&str]) -> Option<&'static str> {
    match segments {
        ["v1", "spaces"] => Some("PUT"),
        ["v1", "chunks", _, _] => Some("GET, HEAD, DELETE"),
        ["v1", "status" | "history" | "traces" | "openapi.json"]
        | ["metrics" | "healthz" | "readyz" | ""] => Some("GET, HEAD"),
        [
            "v1",
            "attach" | "bind" | "events" | "lookup" | "prefix" | "load" | "release" | "prefetch" | "pin"
            | "unpin" | "flush" | "reload",
        ]
        | ["v1", "store", "reserve" | "commit" | "abort"]
        | ["query" | "check_blocks"] => Some("POST"),
        _ => None,
    }
}
