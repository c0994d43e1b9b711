//! Pages for a browser: the status page, and the API's description.

use bytes::Bytes;
use hyper::StatusCode;

use super::body::{JSON, Reply, bytes};

const PAGE: &str = include_str!("page.html");
const OPENAPI: &str = include_str!("../../../docs/openapi.json");

/// `GET /`: reads `/v1/status` once a second.
pub fn page() -> Reply {
    bytes(
        StatusCode::OK,
        "text/html; charset=utf-8",
        Bytes::from_static(PAGE.as_bytes()),
    )
}

/// `GET /v1/openapi.json`.
pub fn openapi() -> Reply {
    bytes(StatusCode::OK, JSON, Bytes::from_static(OPENAPI.as_bytes()))
}
