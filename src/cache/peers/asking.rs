//! One chunk asked of its owner, straight into the asker's slot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dashmap::mapref::entry::Entry;
use tokio::time::Instant;

use super::members::{Asks, Attempt};
use super::transport::{PeerCall, Said};
use super::{Member, PeerOptions, Peers};
use crate::format::ChunkId;
use crate::s3::net::{BodyWatch, Expect, Landing, LandingCell, NetError};

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

    /// By the status of an answer.
    pub fn of(status: u16) -> Self {
        match status {
            200..=299 => Self::Landed,
            503 => Self::UseS3,
            421 => Self::Own,
            401 | 403 => Self::Refused,
            _ => Self::Failed,
        }
    }

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

/// A chunk that a load has no more time for is late after so many times of what a head has.
const BODY_OVER_HEAD: u32 = 10;

/// A chunk's owner, about to be asked. As long as it lives, no peer waits here for this chunk: that might close a circle.
pub struct Asking {
    peers: Arc<Peers>,
    attempt: Attempt,
    chunk: ChunkId,
    /// Asked as the owner, and not because it is known to have the chunk.
    is_owner: bool,
    /// Owners that may still be asked after this one.
    owners_left: u32,
    /// The node that has the chunk, as this one says.
    told: Option<SocketAddr>,
    /// Asked before, without an answer: not again.
    tried: Option<SocketAddr>,
    /// An answer has begun to come.
    begun: bool,
    /// It was given up before it was late.
    is_cut_short: bool,
}

impl Peers {
    /// The node to ask for a chunk: the one that has it, if that is known, else its owner. None: it is this node, or none may
    /// be asked now.
    pub fn ask(self: &Arc<Self>, chunk: ChunkId) -> Option<Asking> {
        let owners = self.options.owners;
        match self.member_that_has(&chunk) {
            Some(holder) => Some(self.asking(&holder, chunk, false, owners)),
            None => self.ask_owner(chunk, owners, None, None),
        }
    }

    /// The owner that comes after another one, of so many, and past one that was tried.
    fn ask_owner(
        self: &Arc<Self>,
        chunk: ChunkId,
        owners: u32,
        after: Option<&Member>,
        tried: Option<SocketAddr>,
    ) -> Option<Asking> {
        let owners_left = owners.checked_sub(1)?;
        let mut member = self.members.owner(&chunk.1, after)?;
        if tried == Some(member.address) {
            member = self.members.owner(&chunk.1, Some(&member))?;
        }
        (!member.is_self()).then(|| {
            let mut asking = self.asking(&member, chunk, true, owners_left);
            asking.tried = tried;
            asking
        })
    }

    fn asking(
        self: &Arc<Self>,
        member: &Arc<Member>,
        chunk: ChunkId,
        is_owner: bool,
        owners_left: u32,
    ) -> Asking {
        *self.asking.entry(chunk).or_default() += 1;
        Asking {
            peers: Arc::clone(self),
            attempt: member.begin(Asks::Chunk),
            chunk,
            is_owner,
            owners_left,
            told: None,
            tried: None,
            begun: false,
            is_cut_short: false,
        }
    }

    /// One request to a member, without a time limit for its answer.
    pub(super) async fn request(
        &self,
        member: &Member,
        method: &'static str,
        path: &str,
        body: &[u8],
        landing: Option<&LandingCell>,
    ) -> Result<Said, NetError> {
        let (host, port) = (member.address.to_string(), self.options.listen.port().to_string());
        let bearer = self.token().map(|token| format!("Bearer {token}"));
        let length = body.len().to_string();
        let mut headers = vec![
            ("host", host.as_str()),
            (NODE_HEADER, self.id()),
            (PORT_HEADER, &port),
        ];
        headers.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
        headers.extend((method == "POST").then_some(("content-length", length.as_str())));
        let call = PeerCall {
            method,
            path,
            headers: &headers,
            body,
            landing,
        };
        self.transport.call(member.address, call).await
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
        let (len, since) = (landing.slot.len(), Instant::now());
        let came = Arc::new(Came::default());
        let Landing { slot, watch } = landing;
        let watch: Box<dyn BodyWatch> = Box::new(Begun {
            came: Arc::clone(&came),
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
        let asked = tokio::time::timeout_at(until, self.send(&cell, &came)).await;
        // The request is over or given up, so nothing else holds it.
        let landing = cell.take().expect("the HTTP client gives the landing back");
        self.begun = came.head.load(Ordering::Relaxed);
        let asked = match asked {
            Ok(Ok(asked)) => {
                // An odd answer is one.
                self.begun |= asked == Asked::Failed;
                asked
            }
            // The chunk was on its way to the peer, and did not come there.
            Ok(Err(NetError::Cut { .. } | NetError::Io(_) | NetError::Closed)) if came.head_alone() => {
                Asked::UseS3
            }
            // The client's own limit may end first.
            Ok(Err(NetError::Timeout { .. })) if !self.begun => Asked::Slow,
            Ok(Err(error)) => {
                self.begun |= error.is_of_the_answer();
                tracing::debug!(peer = %self.attempt.member.address, %error, "a peer did not answer");
                Asked::Failed
            }
            Err(_) => {
                // The load may have had less time than a peer has a right to.
                let PeerOptions {
                    first_byte, stall, ..
                } = self.peers.options;
                let right = if self.begun {
                    stall.min(first_byte * BODY_OVER_HEAD)
                } else {
                    first_byte
                };
                self.is_cut_short = since.elapsed() < right;
                Asked::Slow
            }
        };
        if asked != Asked::Landed {
            self.settle(asked, 0);
        }
        (landing, asked)
    }

    async fn send(&mut self, cell: &LandingCell, came: &Came) -> Result<Asked, NetError> {
        let Self {
            peers,
            attempt,
            chunk,
            ..
        } = self;
        let path = format!("/v1/peer/{}/{}", chunk.0, chunk.1);
        let sent = peers.request(&attempt.member, "GET", &path, &[], Some(cell));
        tokio::pin!(sent);
        let sent = match tokio::time::timeout(peers.options.first_byte, &mut sent).await {
            Ok(sent) => sent,
            Err(_) if came.head.load(Ordering::Relaxed) => sent.await,
            Err(_) => return Ok(Asked::Slow),
        };
        let said = sent?;
        self.told = said.holder;
        Ok(Asked::of(said.status))
    }

    /// The next owner, for a chunk whose owner does not answer: all nodes turn to the same one.
    pub fn next(&self) -> Option<Self> {
        let (after, tried) = match self.is_owner {
            true => (Some(&*self.attempt.member), self.tried),
            // It may be an owner as well.
            false => (None, Some(self.address())),
        };
        self.peers.ask_owner(self.chunk, self.owners_left, after, tried)
    }

    /// The node that has the chunk, as its owner said. A holder sends nobody on: two might point to each other.
    pub fn holder(&self) -> Option<Self> {
        if !self.is_owner {
            return None;
        }
        let member = self.peers.member(self.told?)?;
        let is_new = member.address != self.address() && Some(member.address) != self.tried;
        let is_fit = is_new && !member.is_self() && member.may_be_asked();
        is_fit.then(|| self.peers.asking(&member, self.chunk, false, 0))
    }

    pub fn address(&self) -> SocketAddr {
        self.attempt.member.address
    }

    /// What became of it; `bytes` of the chunk if it came.
    pub fn settle(&mut self, asked: Asked, bytes: usize) {
        let figures = &self.peers.figures;
        figures.asked.add(asked.word(), 1);
        if asked == Asked::Landed {
            figures.asked_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if !self.is_owner && asked != Asked::Landed && !self.is_cut_short {
            self.peers.holders.deny(self.chunk);
        }
        if !self.is_cut_short {
            self.attempt.settle(asked, self.begun);
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
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
/// The header with the port where the asker is asked.
pub const PORT_HEADER: &str = "kvgate-port";
/// The header of an answer with the node that has the chunk.
pub const HOLDER_HEADER: &str = "kvgate-holder";

/// What has come of an answer.
#[derive(Default)]
struct Came {
    head: AtomicBool,
    body: AtomicBool,
}

impl Came {
    fn head_alone(&self) -> bool {
        self.head.load(Ordering::Relaxed) && !self.body.load(Ordering::Relaxed)
    }
}

/// Notes what has come: the client tells the watch of the bytes that came with the head, even if there are none.
struct Begun {
    came: Arc<Came>,
    watch: Option<Box<dyn BodyWatch>>,
}

impl BodyWatch for Begun {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        self.came.head.store(true, Ordering::Relaxed);
        self.came.body.fetch_or(!bytes.is_empty(), Ordering::Relaxed);
        if let Some(watch) = &mut self.watch {
            watch.arrived(at, bytes);
        }
    }
}
