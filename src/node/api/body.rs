//! Request and answer bodies: reading within limits, and writing.

use std::convert::Infallible;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Request, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::problem::ApiProblem;

pub type Reply = Response<BoxBody<Bytes, Infallible>>;

pub const JSON: &str = "application/json";
pub const JSON_LINES: &str = "application/x-ndjson";
pub const OCTETS: &str = "application/octet-stream";

/// Whether a header names one of these types.
pub fn content_type(headers: &HeaderMap, name: &HeaderName, kinds: &[&str]) -> bool {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    let names = |one: &str| kinds.iter().any(|kind| one.trim().eq_ignore_ascii_case(kind));
    value.is_some_and(|value| value.split([',', ';']).any(names))
}

/// A request's body, of at most `most` bytes, sent within `time`.
pub async fn read(request: Request<Incoming>, most: usize, time: Duration) -> Result<Bytes, ApiProblem> {
    let too_large = || {
        let detail = format!("the body may have {most} bytes ([api] body_max): send fewer chunks in a call");
        ApiProblem::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", detail)
    };
    let mut body = request.into_body();
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let all = async {
        let mut first: Option<Bytes> = None;
        let known = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        let mut rest = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|error| ApiProblem::bad(format!("the body did not come whole: {error}")))?;
            let Ok(bytes) = frame.into_data() else { continue };
            if rest.len() + bytes.len() + first.as_ref().map_or(0, Bytes::len) > most {
                return Err(too_large());
            }
            match &first {
                None if rest.is_empty() => first = Some(bytes),
                _ => {
                    if let Some(first) = first.take() {
                        // Reserves the announced length, and never more than the limit.
                        rest.reserve(known.min(most));
                        rest.extend_from_slice(&first);
                    }
                    rest.extend_from_slice(&bytes);
                }
            }
        }
        Ok(first.unwrap_or_else(|| rest.freeze()))
    };
    tokio::time::timeout(time, all).await.unwrap_or_else(|_| {
        let detail = format!("the body did not come within {time:?} ([api] timeout)");
        Err(ApiProblem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", detail))
    })
}

/// A body as JSON; an empty one counts as `{}`.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiProblem> {
    let body = body.trim_ascii();
    let bad = |detail: &str| ApiProblem::bad(format!("the body is not what this call takes: {detail}"));
    match body.first() {
        // Only an object: serde would also read a struct from an array, by the order of its fields.
        Some(b'{') => serde_json::from_slice(body).map_err(|error| bad(&error.to_string())),
        None => serde_json::from_slice(b"{}").map_err(|error| bad(&error.to_string())),
        Some(_) => Err(bad("it must be a JSON object")),
    }
}

pub fn json(value: &impl Serialize) -> Reply {
    let text = serde_json::to_vec(value).unwrap_or_else(|_| b"{}".to_vec());
    bytes(StatusCode::OK, JSON, Bytes::from(text))
}

pub fn bytes(status: StatusCode, kind: &'static str, bytes: Bytes) -> Reply {
    let mut answer = Response::new(Full::new(bytes).boxed());
    *answer.status_mut() = status;
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

pub fn problem(problem: &ApiProblem) -> Reply {
    let text = serde_json::to_vec(&problem.wire()).unwrap_or_default();
    bytes(problem.status, "application/problem+json", Bytes::from(text))
}

/// A stream of JSON lines, written as fast as its reader takes them.
pub struct JsonLines {
    sender: mpsc::Sender<Bytes>,
    time: Duration,
}

/// The reader is gone, or has taken nothing for too long.
#[derive(Debug)]
pub struct CallerGone;

/// Parts of a stream that may wait for its reader.
const PARTS: usize = 8;

pub fn lines(time: Duration) -> (JsonLines, Reply) {
    let (sender, mut receiver) = mpsc::channel::<Bytes>(PARTS);
    let stream = futures::stream::poll_fn(move |context| {
        let part = receiver.poll_recv(context);
        part.map(|part| part.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes))))
    });
    let mut answer = Response::new(BodyExt::boxed(StreamBody::new(stream)));
    answer
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(JSON_LINES));
    (JsonLines { sender, time }, answer)
}

impl JsonLines {
    pub async fn send(&self, lines: Vec<u8>) -> Result<(), CallerGone> {
        let sent = tokio::time::timeout(self.time, self.sender.send(Bytes::from(lines))).await;
        match sent {
            Ok(Ok(())) => Ok(()),
            _ => Err(CallerGone),
        }
    }

    /// Sends the lines if there is room now.
    pub fn offer(&self, lines: Vec<u8>) {
        // Fails when there is no room or no reader.
        let _ = self.sender.try_send(Bytes::from(lines));
    }

    /// Waits until the reader is gone.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }
}

pub fn push_line(lines: &mut Vec<u8>, value: &impl Serialize) {
    // Writing to memory can't fail, and the types have no map keys that JSON can't have.
    let _ = serde_json::to_writer(&mut *lines, value);
    lines.push(b'\n');
}
