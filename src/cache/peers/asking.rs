//! One chunk asked of its owner, straight into the asker's slot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::mapref::entry::Entry;
use tokio::time::Instant;

use super::{Member, Peers};
use crate::format::ChunkId;
use crate::s3::fanout::Route;
use crate::s3::net::{BodyWatch, Expect, Landing, LandingCell, NetError, Outgoing, head_of};

/// What became of an ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The bytes are in the slot, and still to be verified.
    Landed,
    /// The peer says so.
    UseS3,
    /// The owner is this node.
    Own,
    /// It did not begin to answer in time.
    Slow,
    /// It is gone, broke off, or answered something else.
    Failed,
    /// It does not take this node for a member.
    Refused,
    /// Its bytes are not the chunk.
    Wrong,
}

impl Asked {
    pub const WORDS: &'static [&'static str] =
        &["landed", "use_s3", "own", "slow", "failed", "refused", "wrong"];

    pub fn word(self) -> &'static str {
        match self {
            Self::Landed => "landed",
            Self::UseS3 => "use_s3",
            Self::Own => "own",
            Self::Slow => "slow",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Wrong => "wrong",
        }
    }
}

/// A chunk's owner, about to be asked. As long as it lives, no peer waits here for this chunk: that might close a circle.
pub struct Asking {
    peers: Arc<Peers>,
    member: Arc<Member>,
    chunk: ChunkId,
    /// Members that may still be asked after this one.
    owners_left: u32,
    /// Its outcome decides on the member's breaker.
    probe: bool,
    settled: bool,
}

impl Peers {
    /// The chunk's owner, to be asked; None: it is this node, or none may be asked now.
    pub fn ask(self: &Arc<Self>, chunk: ChunkId) -> Option<Asking> {
        self.ask_after(chunk, None)
    }

    /// `before`: the one that did not answer.
    fn ask_after(self: &Arc<Self>, chunk: ChunkId, before: Option<&Asking>) -> Option<Asking> {
        let owners_left = before.map_or(self.options.owners, |before| before.owners_left);
        let owners_left = owners_left.checked_sub(1)?;
        let after = before.map(|before| &*before.member);
        let member = self.members.owner(&chunk.1, after)?;
        if member.is_self() {
            return None;
        }
        let probe = member.breaker().begin(Instant::now());
        *self.asking.entry(chunk).or_default() += 1;
        Some(Asking {
            peers: Arc::clone(self),
            member,
            chunk,
            owners_left,
            probe,
            settled: false,
        })
    }

    /// The address of the chunk's owner, of those that may be asked now.
    pub fn owner(&self, chunk: &ChunkId) -> Option<SocketAddr> {
        self.members.owner(&chunk.1, None).map(|member| member.address)
    }

    /// Whether a peer is being asked for the chunk.
    pub fn is_asking(&self, chunk: &ChunkId) -> bool {
        self.asking.contains_key(chunk)
    }
}

impl Asking {
    /// Asks for the whole object, of the landing's length, until then at most. What landed is still to be verified, and then
    /// [settled](Self::settle); anything else is settled already.
    pub async fn get(&mut self, landing: Landing, until: Instant) -> (Landing, Asked) {
        let len = landing.slot.len();
        let begun = Arc::new(AtomicBool::new(false));
        let Landing { slot, watch } = landing;
        let watch: Box<dyn BodyWatch> = Box::new(Begun {
            begun: Arc::clone(&begun),
            watch,
        });
        let expect = Expect {
            range: 0..len as u64,
            object_len: len as u64,
            etag: None,
        };
        let cell = LandingCell::new(
            Landing {
                slot,
                watch: Some(watch),
            },
            expect,
        );
        let asked = tokio::time::timeout_at(until, self.send(&cell, &begun)).await;
        // The request is over or given up, so nothing else holds it.
        let landing = cell.take().expect("the HTTP client gives the landing back");
        let asked = match asked {
            Ok(Ok(asked)) => asked,
            Ok(Err(error)) => {
                tracing::debug!(peer = %self.member.address, %error, "a peer did not answer");
                Asked::Failed
            }
            Err(_) => Asked::Slow,
        };
        if asked != Asked::Landed {
            self.settle(asked, 0);
        }
        (landing, asked)
    }

    async fn send(&self, cell: &LandingCell, begun: &AtomicBool) -> Result<Asked, NetError> {
        let Self {
            peers, member, chunk, ..
        } = self;
        let host = member.address.to_string();
        let bearer = peers.token().map(|token| format!("Bearer {token}"));
        let bearer = bearer.as_deref().map(|bearer| ("authorization", bearer));
        let headers = [("host", host.as_str()), (NODE_HEADER, peers.id())];
        let path = format!("/v1/peer/{}/{}", chunk.0, chunk.1);
        let head = head_of("GET", &path, headers.into_iter().chain(bearer));
        let outgoing = Outgoing {
            head: head.as_bytes(),
            body: &[],
            bodyless: false,
        };
        let (first_byte, route) = (peers.options.first_byte, Route::default());
        let sent = peers
            .http
            .send(&member.origin, &outgoing, Some(cell), &route, first_byte);
        tokio::pin!(sent);
        let sent = match tokio::time::timeout(first_byte, &mut sent).await {
            Ok(sent) => sent,
            Err(_) if begun.load(Ordering::Relaxed) => sent.await,
            Err(_) => return Ok(Asked::Slow),
        };
        Ok(match sent?.0.status {
            200..=299 => Asked::Landed,
            503 => Asked::UseS3,
            421 => Asked::Own,
            401 | 403 => Asked::Refused,
            _ => Asked::Failed,
        })
    }

    /// The next owner, for a chunk whose owner does not answer: all nodes turn to the same one.
    pub fn next(&self) -> Option<Self> {
        self.peers.ask_after(self.chunk, Some(self))
    }

    pub fn address(&self) -> SocketAddr {
        self.member.address
    }

    /// What became of it; `bytes` of the chunk if it came.
    pub fn settle(&mut self, asked: Asked, bytes: usize) {
        self.settled = true;
        let figures = &self.peers.figures;
        figures.asked.add(asked.word(), 1);
        if asked == Asked::Landed {
            figures.asked_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        let mut breaker = self.member.breaker();
        match asked {
            Asked::Landed | Asked::UseS3 => breaker.succeeded(),
            Asked::Own => {
                self.member.is_this_node();
                breaker.succeeded();
            }
            Asked::Slow | Asked::Failed | Asked::Refused | Asked::Wrong => {
                breaker.failed(self.probe, Instant::now());
            }
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.settled && self.probe {
            self.member.breaker().probe_given_up(Instant::now());
        }
        if let Entry::Occupied(mut asks) = self.peers.asking.entry(self.chunk) {
            *asks.get_mut() -= 1;
            if *asks.get() == 0 {
                asks.remove();
            }
        }
    }
}

/// The header with the asker's [`id`](Peers::id).
pub const NODE_HEADER: &str = "kvgate-node";

/// Notes that an answer has begun: the client tells the watch of the bytes that came with the head, even if there are none.
struct Begun {
    begun: Arc<AtomicBool>,
    watch: Option<Box<dyn BodyWatch>>,
}

impl BodyWatch for Begun {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        self.begun.store(true, Ordering::Relaxed);
        if let Some(watch) = &mut self.watch {
            watch.arrived(at, bytes);
        }
    }
}
