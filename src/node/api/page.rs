//! Pages for a browser: the status page, and the API's description.

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue, X_CONTENT_TYPE_OPTIONS};

use super::body::{JSON, Reply, bytes};

const PAGE: &str = include_str!("page.html");
const OPENAPI: &str = include_str!("../../../docs/openapi.json");

/// The page asks nobody but this node, and nobody shows it as part of another page.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
);

/// `GET /`: reads `/v1/status` every two seconds and `/v1/history` every ten.
pub fn page() -> Reply {
    let mut page = bytes(
        StatusCode::OK,
        "text/html; charset=utf-8",
        Bytes::from_static(PAGE.as_bytes()),
    );
    let headers = page.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    page
}

/// `GET /v1/openapi.json`.
pub fn openapi() -> Reply {
    bytes(StatusCode::OK, JSON, Bytes::from_static(OPENAPI.as_bytes()))
}
