//! The place where a body lands, and the checks before it does.

use std::ops::Range;
use std::sync::Arc;

use super::head::ResponseHead;
use crate::arena::SlotMut;
use crate::s3::fanout::{Handover, Held, Start};

/// Where the body of a ranged GET goes. It is handed over with the request and comes back when nothing writes to it any
/// more.
pub struct Landing {
    /// As long as the range.
    pub slot: SlotMut,
    pub watch: Option<Box<dyn BodyWatch>>,
}

/// Sees the bytes of a body right after they have arrived in the slot, while they are in the CPU's cache.
pub trait BodyWatch: Send {
    /// `bytes` begin `at` bytes after the slot's start. Stretches come in order and without gaps; 0 starts anew.
    fn arrived(&mut self, at: usize, bytes: &[u8]);
}

impl Landing {
    /// Without a watch.
    pub fn new(slot: SlotMut) -> Self {
        Self { slot, watch: None }
    }

    /// The stretch at `at` of `len` bytes is in the slot.
    pub fn arrived(&mut self, at: usize, len: usize) {
        if let Some(watch) = &mut self.watch {
            watch.arrived(at, &self.slot[at..at + len]);
        }
    }
}

/// The request; an answer to anything else does not land.
#[derive(Debug, Clone)]
pub struct Expect {
    /// In the object; not empty.
    pub range: Range<u64>,
    /// Bytes of the whole object.
    pub object_len: u64,
    /// Without quotes.
    pub etag: Option<Arc<str>>,
}

/// The answer is not what was asked for. Not a byte of it landed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error("the object has {actual} bytes, not {expected}")]
    Length { expected: u64, actual: u64 },
    #[error("the answer has another ETag")]
    Etag,
    #[error("{0}")]
    Range(String),
}

impl Expect {
    /// Checks the head of a 2xx answer. Some servers answer 200 with a Content-Range, or 200 with the whole object: right
    /// where that was asked for.
    pub(super) fn check(&self, head: &ResponseHead) -> Result<(), Mismatch> {
        let wanted = &self.range;
        let odd = |what: String| Err(Mismatch::Range(what));
        let wrong_len = |actual| Mismatch::Length {
            expected: self.object_len,
            actual,
        };
        if !matches!(head.status, 200 | 206) {
            return odd(format!("status {} to a GET", head.status));
        }
        match head.header("etag").map(unquoted) {
            // Not of an S3 server: a page of something between.
            None | Some("") => return odd("no ETag in the answer".into()),
            // A server that ignores If-Match.
            Some(came) if self.etag.as_ref().is_some_and(|etag| **etag != *came) => {
                return Err(Mismatch::Etag);
            }
            Some(_) => {}
        }
        let body = match head.body_len() {
            Some(len) => len as u64,
            None => return odd("the answer's length is not known in advance".into()),
        };
        match head.header("content-range") {
            Some(text) => {
                let Some((bytes, total)) = parse_content_range(text) else {
                    return odd(format!("Content-Range {text:?}"));
                };
                if total != self.object_len {
                    return Err(wrong_len(total));
                }
                if bytes != *wanted {
                    return odd(format!("Content-Range {text:?} where {wanted:?} was asked for"));
                }
            }
            None if wanted.start != 0 => {
                return odd(format!(
                    "a range was asked for, {body} bytes without Content-Range came"
                ));
            }
            None if body != self.object_len => return Err(wrong_len(body)),
            None if wanted.end != self.object_len => {
                return odd(format!(
                    "a range was asked for, the whole object of {body} bytes came"
                ));
            }
            None => {}
        }
        if body != wanted.end - wanted.start {
            return odd(format!("a body of {body} bytes where {wanted:?} was asked for"));
        }
        Ok(())
    }
}

/// An ETag without quotes and weakness.
pub(crate) fn unquoted(etag: &str) -> &str {
    etag.trim().trim_start_matches("W/").trim_matches('"')
}

/// `bytes FIRST-LAST/TOTAL`, as a half-open range and the total; one vendor writes `bytes=`.
fn parse_content_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, total) = text
        .trim()
        .strip_prefix("bytes")?
        .trim_start_matches(['=', ' '])
        .split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    Some((first..last.checked_add(1)?, total.trim().parse().ok()?))
}

/// Carries a [`Landing`] through the SDK to our HTTP client, as a request's extension, and back. The client holds it for
/// as long as it writes, and gives it back however that ends. Clones share it.
#[derive(Debug, Clone)]
pub struct LandingCell {
    expect: Arc<Expect>,
    landing: Handover<Landing>,
    len: usize,
}

impl LandingCell {
    /// Panics if the slot has not the length of the range.
    pub fn new(landing: Landing, expect: Expect) -> Self {
        let len = landing.slot.len();
        assert_eq!(
            len as u64,
            expect.range.end - expect.range.start,
            "slot and range differ in length"
        );
        Self {
            expect: Arc::new(expect),
            landing: Handover::new(landing),
            len,
        }
    }

    /// The landing, once nothing writes to it; None while something does.
    pub fn take(&self) -> Option<Landing> {
        self.landing.take()
    }

    pub fn handover(&self) -> &Handover<Landing> {
        &self.landing
    }

    pub(super) fn expect(&self) -> &Expect {
        &self.expect
    }

    /// Bytes of the slot.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Waits until nothing else writes to it.
    pub(super) async fn claim(&self, by: Start) -> Held<Landing> {
        self.landing.claim(by).await
    }
}
