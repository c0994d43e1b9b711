//! A refused call, in the format of RFC 9457: what was wrong and what to do.

use std::fmt::Display;

use hyper::StatusCode;

use crate::node::NodeError;
use crate::protocol;

/// A call's refusal: what was wrong and what to do.
#[derive(Debug, Clone)]
pub struct ApiProblem {
    pub status: StatusCode,
    /// A stable word.
    pub code: &'static str,
    pub detail: String,
}

impl ApiProblem {
    pub fn new(status: StatusCode, code: &'static str, detail: impl Display) -> Self {
        Self {
            status,
            code,
            detail: detail.to_string(),
        }
    }

    /// A request that can't be used.
    pub fn bad(detail: impl Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", detail)
    }

    pub fn not_found(detail: impl Display) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", detail)
    }

    pub fn wire(&self) -> protocol::Problem {
        protocol::Problem {
            kind: format!("urn:kvgate:problem:{}", self.code),
            title: self.status.canonical_reason().unwrap_or("Error").to_owned(),
            status: self.status.as_u16(),
            detail: self.detail.clone(),
            code: self.code.to_owned(),
        }
    }
}

impl From<NodeError> for ApiProblem {
    fn from(error: NodeError) -> Self {
        let status = match error.code() {
            "no_session" | "unknown_space" => StatusCode::NOT_FOUND,
            "too_many" | "no_resources" | "draining" => StatusCode::SERVICE_UNAVAILABLE,
            "bad_rank" | "uncovered" => StatusCode::BAD_REQUEST,
            _ => StatusCode::CONFLICT,
        };
        Self::new(status, error.code(), error)
    }
}
