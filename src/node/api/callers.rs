//! Access checks: which caller may make which call.
//!
//! The unix socket's file rights decide which users can open it, and the kernel names the calling process: it may
//! make every call, and a session's calls come from the process that attached. TCP has no such proof. There a call
//! that reads or changes the cache needs the token, also on loopback, where every user of the machine and every
//! page in its browsers can connect; and sessions don't exist. A page can have a browser send requests under a name
//! that it makes resolve to this machine (DNS rebinding), so `Host` must be a name of ours; and bodies must have a
//! content type that a page can't send unasked.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hyper::body::{Body, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::http::uri::Authority;
use hyper::{Method, Request, StatusCode, Version};

use super::body::{JSON, OCTETS, content_type};
use super::problem::ApiProblem;
use super::{Api, Caller};
use crate::node::Session;

/// Refuses a call that the caller may not make.
pub fn allowed(api: &Api, caller: &Caller, request: &Request<Incoming>) -> Result<(), ApiProblem> {
    let Caller::Tcp { local } = caller else {
        return Ok(());
    };
    is_for_us(api, *local, request)?;
    let given = token_of(request);
    if given.is_some() || !is_public(request) {
        check_token(api, given)?;
    }
    if needs_session(request) {
        return Err(ApiProblem::new(
            StatusCode::FORBIDDEN,
            "unix_socket_only",
            "sessions exist only over the unix socket, where the caller's process is known: call it there ([api] socket)",
        ));
    }
    has_a_known_type(request)
}

/// The session of that name, if it is the caller's: an overheard name is worth nothing to another process.
pub fn session(api: &Api, caller: &Caller, name: &str) -> Result<Arc<Session>, ApiProblem> {
    let session = api.node.session(name)?;
    match caller {
        Caller::Unix(process) if *process == session.process => Ok(session),
        _ => Err(ApiProblem::new(
            StatusCode::FORBIDDEN,
            "other_process",
            "the session was attached by another process: attach this one, and name its own session",
        )),
    }
}

fn is_public(request: &Request<Incoming>) -> bool {
    let paths = [
        "/",
        "/v1/status",
        "/v1/history",
        "/metrics",
        "/healthz",
        "/readyz",
        "/v1/openapi.json",
    ];
    matches!(*request.method(), Method::GET | Method::HEAD) && paths.contains(&request.uri().path())
}

fn needs_session(request: &Request<Incoming>) -> bool {
    let path = request.uri().path();
    matches!(path, "/v1/attach" | "/v1/load" | "/v1/release") || path.starts_with("/v1/store/")
}

fn token_of(request: &Request<Incoming>) -> Option<&str> {
    let value = request.headers().get(AUTHORIZATION)?;
    // An unreadable token counts as a wrong one.
    let text = value.to_str().unwrap_or_default();
    Some(text.strip_prefix("Bearer ").unwrap_or_default().trim())
}

fn check_token(api: &Api, given: Option<&str>) -> Result<(), ApiProblem> {
    let unauthorized = |detail| Err(ApiProblem::new(StatusCode::UNAUTHORIZED, "unauthorized", detail));
    match (api.token(), given) {
        (None, _) => unauthorized(
            "by TCP this call needs a token, also on loopback: set [api] token_file, or call over the unix socket ([api] socket)",
        ),
        // Compares digests, so the time taken says nothing of the token.
        (Some(token), Some(given)) if blake3::hash(given.as_bytes()) == blake3::hash(token.as_bytes()) => {
            Ok(())
        }
        _ => {
            unauthorized("send the header `Authorization: Bearer TOKEN`, with the token of [api] token_file")
        }
    }
}

/// Whether `Host` names this daemon: the address that was called, `localhost`, or a name of `[api] hosts`. HTTP/1.0
/// may omit `Host`, as the health checks of load balancers do; no browser speaks HTTP/1.0.
fn is_for_us(api: &Api, local: SocketAddr, request: &Request<Incoming>) -> Result<(), ApiProblem> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()),
        _ => None,
    };
    let is_old = request.version() == Version::HTTP_10 && !request.headers().contains_key(HOST);
    let in_target = request.uri().authority();
    let is_known = |authority: &Authority| is_known(authority, local.ip(), &api.options.hosts);
    match (is_old || host.as_ref().is_some_and(is_known)) && in_target.is_none_or(is_known) {
        true => Ok(()),
        false => Err(ApiProblem::new(
            StatusCode::MISDIRECTED_REQUEST,
            "wrong_host",
            "the Host header names another server: call the address that kvgate listens on, or add the name to [api] hosts",
        )),
    }
}

fn is_known(authority: &Authority, local: IpAddr, hosts: &[String]) -> bool {
    if authority.as_str().contains('@') {
        return false;
    }
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let local = local.to_canonical();
    if let Ok(address) = bare.unwrap_or(host).parse::<IpAddr>() {
        let address = address.to_canonical();
        return address == local
            || (address.is_loopback() && local.is_loopback())
            || hosts.iter().any(|name| name.parse() == Ok(address));
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    (local.is_loopback() && host.eq_ignore_ascii_case("localhost"))
        || hosts.iter().any(|name| name.eq_ignore_ascii_case(host))
}

/// Checks the content type: a page may have a browser send text and forms to any server, but nothing else without
/// asking that server first.
fn has_a_known_type(request: &Request<Incoming>) -> Result<(), ApiProblem> {
    let has_body = !request.body().is_end_stream();
    let known = [JSON, OCTETS];
    if !has_body || content_type(request.headers(), &CONTENT_TYPE, &known) {
        return Ok(());
    }
    Err(ApiProblem::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "wrong_type",
        format!(
            "by TCP a body needs the header `Content-Type: {JSON}`, or {OCTETS} where the call takes bytes"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_daemon_are_known() {
        let hosts = ["kv.example".to_owned(), "10.9.9.9".to_owned()];
        let known = |host: &str, local: &str| {
            let authority = host.parse().unwrap();
            is_known(&authority, local.parse().unwrap(), &hosts)
        };
        for host in [
            "127.0.0.1",
            "127.0.0.1:9180",
            "localhost:1",
            "LOCALHOST.",
            "[::1]:9180",
            "127.8.8.8",
        ] {
            assert!(known(host, "127.0.0.1"), "{host}");
            assert!(!known(host, "10.0.0.1"), "{host}");
        }
        for host in ["kv.example", "KV.example.:80", "10.9.9.9:80"] {
            assert!(known(host, "127.0.0.1") && known(host, "10.0.0.1"), "{host}");
        }
        assert!(known("10.0.0.1:9180", "10.0.0.1") && known("[fd00::1]", "fd00::1"));
        assert!(known("10.0.0.1", "::ffff:10.0.0.1"));
        for host in [
            "evil.example",
            "10.0.0.2",
            "localhost.evil.example",
            "user@localhost",
            "0.0.0.0",
        ] {
            assert!(!known(host, "127.0.0.1"), "{host}");
        }
    }
}
