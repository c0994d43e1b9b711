//! Which call is which.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ALLOW, AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, StatusCode};

use super::body::{Answer, problem};
use super::problem::Problem;
use super::{Api, Caller, admin, attach, chunk, load, lookup, metrics, page, spaces, store};

/// Serves one request; whatever is wrong becomes a problem of the answer.
pub async fn serve(api: Arc<Api>, caller: Caller, request: Request<Incoming>) -> Answer {
    let answer = match allowed(&api, caller, &request) {
        Ok(()) => route(&api, caller, request).await,
        Err(problem) => Err(problem),
    };
    answer.unwrap_or_else(|error| {
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
    })
}

/// Who may open the unix socket may call. By TCP the token is needed, unless there is none and it is loopback.
fn allowed(api: &Api, caller: Caller, request: &Request<Incoming>) -> Result<(), Problem> {
    let probe = matches!(request.uri().path(), "/healthz" | "/readyz");
    let Caller::Tcp { loopback } = caller else {
        return Ok(());
    };
    let Some(token) = api.token() else {
        return match loopback {
            true => Ok(()),
            false => Err(unauthorized("this kvgate takes calls from loopback only")),
        };
    };
    if probe {
        return Ok(());
    }
    let given = request
        .headers()
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    let given = given.and_then(|text| text.strip_prefix("Bearer "));
    match given.is_some_and(|given| blake3::hash(given.trim().as_bytes()) == blake3::hash(token.as_bytes())) {
        true => Ok(()),
        false => Err(unauthorized(
            "send the header `Authorization: Bearer TOKEN`, with the token of [api] token_file",
        )),
    }
}

fn unauthorized(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail)
}

async fn route(api: &Arc<Api>, caller: Caller, request: Request<Incoming>) -> Result<Answer, Problem> {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let method = request.method().clone();
    let get = method == Method::GET || method == Method::HEAD;
    match segments.as_slice() {
        ["v1", "lookup"] => {
            only(&method, "POST")
                .map(|()| lookup::lookup(api, request))?
                .await
        }
        ["v1", "load"] => only(&method, "POST").map(|()| load::load(api, request))?.await,
        ["v1", "release"] => only(&method, "POST").map(|()| load::release(api, request))?.await,
        ["v1", "store", "reserve"] => {
            only(&method, "POST")
                .map(|()| store::reserve(api, request))?
                .await
        }
        ["v1", "store", "commit"] => only(&method, "POST").map(|()| store::commit(api, request))?.await,
        ["v1", "store", "abort"] => only(&method, "POST").map(|()| store::abort(api, request))?.await,
        ["v1", "attach"] => {
            only(&method, "POST")
                .map(|()| attach::attach(api, caller, request))?
                .await
        }
        ["v1", "spaces"] => {
            only(&method, "PUT")
                .map(|()| spaces::declare(api, request))?
                .await
        }
        ["v1", "prefetch"] => {
            only(&method, "POST")
                .map(|()| admin::prefetch(api, request))?
                .await
        }
        ["v1", "pin"] => only(&method, "POST").map(|()| admin::pin(api, request))?.await,
        ["v1", "unpin"] => only(&method, "POST").map(|()| admin::unpin(api, request))?.await,
        ["v1", "flush"] => only(&method, "POST").map(|()| admin::flush(api, request))?.await,
        ["v1", "reload"] => only(&method, "POST").and_then(|()| admin::reload(api)),
        ["v1", "status"] if get => Ok(admin::status(api)),
        ["v1", "openapi.json"] if get => Ok(page::openapi()),
        ["v1", "chunks", space, hash] => chunk::serve(api, &method, space, hash, request).await,
        ["metrics"] if get => Ok(metrics::metrics(api)),
        ["healthz"] if get => Ok(admin::healthz()),
        ["readyz"] if get => admin::readyz(api),
        [""] if get => Ok(page::page()),
        ["v1", "status" | "openapi.json"] | ["metrics" | "healthz" | "readyz" | ""] => {
            only(&method, "GET, HEAD").map(|()| page::page())
        }
        _ => Err(Problem::not_found(format!(
            "there is no {path}: GET /v1/openapi.json describes all calls"
        ))),
    }
}

/// Refuses other methods; the detail is what the Allow header says.
pub fn only(method: &Method, allowed: &str) -> Result<(), Problem> {
    match allowed.split(", ").any(|one| one == method.as_str()) {
        true => Ok(()),
        false => Err(Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            allowed,
        )),
    }
}
