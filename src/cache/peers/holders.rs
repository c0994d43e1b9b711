//! Who has a chunk. A node that has committed chunks tells their owners, and a lookup that finds a chunk nowhere asks its
//! owner. So a chunk is a hit elsewhere before S3 has it, and is read from its writer. What is known here is a hint, of
//! bounded size and age: the load finds out.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dashmap::mapref::entry::Entry;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::members::Asks;
use super::transport::Said;
use super::{Asked, Member, PeerOptions, Peers};
use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, SpaceKey};

/// Whether a peer has a chunk, asked for all that want to know.
pub(super) type Question = Shared<BoxFuture<'static, bool>>;

/// Chunks that one message to an owner names.
pub const TOLD_MAX: usize = 4096;

pub struct Holders {
    keep: Duration,
    /// How long nobody counts as having a chunk that a load did not get.
    deny: Duration,
    known: Mutex<Recent<(Known, Instant)>>,
    committed: mpsc::Sender<ChunkId>,
}

#[derive(Clone, Copy)]
enum Known {
    Has(SocketAddr),
    /// A load did not get it from the one that said so.
    Denied,
}

impl Holders {
    /// Also returns the chunks to tell of.
    pub fn new(options: &PeerOptions) -> (Self, mpsc::Receiver<ChunkId>) {
        let most = options.hot_chunks;
        let (committed, to_tell) = mpsc::channel(most);
        let holders = Self {
            keep: options.holder_ttl,
            deny: options.denied_ttl,
            known: Mutex::new(Recent::new(most)),
            committed,
        };
        (holders, to_tell)
    }

    pub fn note(&self, chunk: ChunkId, holder: SocketAddr) {
        self.lock().add(chunk, (Known::Has(holder), Instant::now()));
    }

    pub fn get(&self, chunk: &ChunkId) -> Option<SocketAddr> {
        let known = self.lock();
        let (Known::Has(holder), since) = known.get(chunk)? else {
            return None;
        };
        (since.elapsed() < self.keep).then_some(*holder)
    }

    /// A load did not get it. Otherwise each lookup would promise it anew.
    pub fn deny(&self, chunk: ChunkId) {
        self.lock().add(chunk, (Known::Denied, Instant::now()));
    }

    pub fn is_denied(&self, chunk: &ChunkId) -> bool {
        let known = self.lock();
        matches!(known.get(chunk), Some((Known::Denied, since)) if since.elapsed() < self.deny)
    }

    fn lock(&self) -> MutexGuard<'_, Recent<(Known, Instant)>> {
        // No panic can leave it half-changed.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peers {
    /// A chunk was committed here: its owner is told. With too many to tell, some are found once S3 has them.
    pub fn committed(&self, chunk: ChunkId) {
        let _ = self.holders.committed.try_send(chunk);
    }

    /// The node that has a chunk, as far as is known here.
    pub fn holder(&self, chunk: &ChunkId) -> Option<SocketAddr> {
        self.holders.get(chunk)
    }

    /// A peer at that address says that it has chunks. Only a member may.
    pub fn hears_of(&self, from: SocketAddr, space: SpaceKey, hashes: impl Iterator<Item = ChunkHash>) {
        if self.member(from).is_some() {
            hashes.for_each(|hash| self.holders.note((space, hash), from));
        }
    }

    /// Whether a peer has a chunk, as its owner knows. Lookups that ask at the same time ask once. The question goes on when
    /// nobody waits for the answer any more: a lookup may wait less than `first_byte`, and a member that hangs must still be
    /// noticed.
    pub async fn finds(self: &Arc<Self>, chunk: ChunkId) -> bool {
        if self.holders.is_denied(&chunk) {
            return false;
        }
        if self.member_that_has(&chunk).is_some() {
            return true;
        }
        let owner = self.members.owner(&chunk.1, None);
        let Some(owner) = owner.filter(|owner| !owner.is_self()) else {
            return false;
        };
        let question = match self.questions.entry(chunk) {
            Entry::Occupied(question) => question.get().clone(),
            Entry::Vacant(place) => {
                let peers = Arc::clone(self);
                let question = tokio::spawn(async move {
                    let found = peers.asks_who_has(chunk, owner).await;
                    peers.questions.remove(&chunk);
                    found
                });
                let found: BoxFuture<'static, bool> = Box::pin(async { question.await.unwrap_or(false) });
                place.insert(found.shared()).clone()
            }
        };
        question.await
    }

    async fn asks_who_has(&self, chunk: ChunkId, owner: Arc<Member>) -> bool {
        let path = format!("/v1/peer/{}/{}", chunk.0, chunk.1);
        let holder = match self.ask_shortly(&owner, "HEAD", &path, &[]).await {
            Some(Said { status: 200, .. }) => owner,
            Some(Said {
                status: 503,
                holder: Some(holder),
            }) => {
                let is_fit = |holder: &Arc<Member>| !holder.is_self() && holder.may_be_asked();
                let Some(holder) = self.member(holder).filter(is_fit) else {
                    return false;
                };
                // It may have lost the chunk since the owner heard of it.
                let said = self.ask_shortly(&holder, "HEAD", &path, &[]).await;
                if said.is_none_or(|said| said.status != 200) {
                    return false;
                }
                holder
            }
            _ => return false,
        };
        self.holders.note(chunk, holder.address);
        true
    }

    /// One small request, which counts for the member's breaker.
    async fn ask_shortly(
        &self,
        member: &Arc<Member>,
        method: &'static str,
        path: &str,
        body: &[u8],
    ) -> Option<Said> {
        let mut attempt = member.begin(Asks::Question);
        let said = self.request(member, method, path, body, None);
        let said = tokio::time::timeout(self.options.first_byte, said).await;
        let asked = match &said {
            Ok(Ok(said)) => Asked::of(said.status),
            Ok(Err(_)) => Asked::Failed,
            Err(_) => Asked::Slow,
        };
        attempt.settle(asked, false);
        self.figures.questions.add(asked.word(), 1);
        said.ok()?.ok()
    }

    /// The node that has a chunk, if it may be asked.
    pub(super) fn member_that_has(&self, chunk: &ChunkId) -> Option<Arc<Member>> {
        let member = self.member(self.holder(chunk)?)?;
        (!member.is_self() && member.may_be_asked()).then_some(member)
    }

    pub(super) fn member(&self, address: SocketAddr) -> Option<Arc<Member>> {
        self.members
            .all()
            .iter()
            .find(|one| one.address == address)
            .cloned()
    }

    /// Tells owners of committed chunks, many in a message.
    pub(super) async fn tell(peers: Weak<Self>, mut committed: mpsc::Receiver<ChunkId>) {
        let mut chunks = Vec::new();
        while committed.recv_many(&mut chunks, TOLD_MAX).await > 0 {
            let Some(peers) = peers.upgrade() else { return };
            let mut messages: HashMap<(SocketAddr, SpaceKey), (Arc<Member>, Vec<u8>)> = HashMap::new();
            for (space, hash) in chunks.drain(..) {
                let owner = peers.members.owner(&hash, None).filter(|owner| !owner.is_self());
                if let Some(owner) = owner {
                    let message = messages
                        .entry((owner.address, space))
                        .or_insert((owner, Vec::new()));
                    message.1.extend_from_slice(hash.as_bytes());
                }
            }
            for ((_, space), (owner, hashes)) in messages {
                let path = format!("/v1/peer/{space}");
                peers.ask_shortly(&owner, "POST", &path, &hashes).await;
            }
        }
    }
}
