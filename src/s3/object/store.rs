//! The calls of an object store that kvgate needs, as a trait.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use serde::Serialize;
use tokio::time::Instant;

use super::error::{ErrorKind, ObjectError, Operation};
use crate::metrics::{Histogram, Times};
use crate::s3::dns::NameState;
use crate::s3::fanout::{EndpointState, Requests};
use crate::s3::net::{Landing, Traffic};

pub type Result<T, E = ObjectError> = std::result::Result<T, E>;
pub type GetFuture<'a> = Pin<Box<dyn Future<Output = (Landing, Result<ObjectMeta>)> + Send + 'a>>;
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Tells one write of a key from another. The ETag alone can't: it is a hash of the bytes, so a damaged object and
/// the good bytes that it was written with, or that replace it, may share one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version {
    /// Without quotes.
    pub etag: Arc<str>,
    /// Seconds since 1970; S3 keeps no finer.
    pub modified: i64,
}

/// The answer to a HEAD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Bytes of the whole object.
    pub len: u64,
    pub version: Version,
    /// The user metadata `kvgate-run`, where it was asked for by HEAD.
    pub run: Option<Box<str>>,
}

/// What a PUT may say beside its bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct PutExtras<'a> {
    /// The CRC-64/NVME of the body, which a server that [checks it](super::Capabilities) compares with what has arrived.
    pub crc64: Option<u64>,
    /// The user metadata `kvgate-run`.
    pub run: Option<&'a str>,
}

/// A ranged GET.
#[derive(Debug, Clone)]
pub struct GetRange<'a> {
    pub key: &'a str,
    /// In the object; not empty.
    pub range: Range<usize>,
    /// The right length of the whole object; checked before a byte lands.
    pub object_len: usize,
    /// Land only bytes of the version with this ETag.
    pub if_match: Option<&'a str>,
}

/// When a PUT may take place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition<'a> {
    Always,
    IfAbsent,
    /// Only over the version with this ETag.
    IfMatch(&'a str),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listed {
    pub key: String,
    pub len: u64,
    /// Without quotes; empty where the server doesn't list it.
    pub etag: String,
    /// Seconds since 1970.
    pub modified: i64,
}

#[derive(Debug, Clone, Default)]
pub struct ListPage {
    pub objects: Vec<Listed>,
    /// Where the next page goes on.
    pub next: Option<String>,
}

/// The lifecycle rules of a bucket, as the server gives them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LifecycleRules {
    pub xml: String,
    /// AWS's setting beside the document: which objects are too small to be moved to another storage class. A write without
    /// it resets it.
    pub smallest_moved: Option<String>,
}

/// The calls that kvgate makes. All end by their deadline, with an error of kind `Deadline` if need be; dropping a
/// future gives the call up.
pub trait ObjectStore: Send + Sync + 'static {
    /// `HeadObject`.
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta>;

    /// `GetObjectAttributes`; see [`Capabilities`](super::Capabilities) for where it works.
    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta>;

    /// Fills the landing's slot, which has the range's length; after an error its bytes are anything. The landing is
    /// handed over and comes back when nothing writes to it any more; with a dropped future it is given up.
    fn get<'a>(&'a self, get: GetRange<'a>, landing: Landing, deadline: Instant) -> GetFuture<'a>;

    /// A whole small object of at most `limit` bytes.
    fn read<'a>(&'a self, key: &'a str, limit: usize, deadline: Instant) -> StoreFuture<'a, Bytes>;

    /// Writes the object whole or not at all; answers its ETag.
    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>>;

    /// The same with more. A store that is put around another one and leaves this out sends no more.
    fn put_with<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        extras: PutExtras<'a>,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        let _ = extras;
        self.put(key, body, when, deadline)
    }

    /// Up to 1000 objects whose keys start with `prefix`, in order.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage>;

    /// Removes up to 1000 keys; those that aren't there count as removed.
    fn delete<'a>(&'a self, keys: &'a [String], deadline: Instant) -> StoreFuture<'a, ()>;

    /// The same listing from the first key after `after` on: a place that outlives the server's own tokens.
    fn list_after<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        let _ = after;
        lacks(Operation::List, prefix, deadline)
    }

    /// Removes up to 1000 objects, each only while it has its ETag where the server honours that, and whatever it has
    /// where it does not. Objects that are not there count as removed. Answers how many were kept for their ETag.
    fn delete_matching<'a>(
        &'a self,
        objects: &'a [(String, String)],
        deadline: Instant,
    ) -> StoreFuture<'a, usize> {
        Box::pin(async move {
            let keys: Vec<String> = objects.iter().map(|(key, _)| key.clone()).collect();
            self.delete(&keys, deadline).await.map(|()| 0)
        })
    }

    /// The first `bytes` of an object, or all of a shorter one.
    fn read_front<'a>(&'a self, key: &'a str, bytes: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        let _ = bytes;
        lacks(Operation::Get, key, deadline)
    }

    /// Copies this version onto itself, so that it is as old as a new one. Its bytes, its ETag and its hint stay. A
    /// server that ignores the condition (RGW 16) does the same to another version that has taken its place.
    fn copy_in_place<'a>(
        &'a self,
        key: &'a str,
        meta: &'a ObjectMeta,
        deadline: Instant,
    ) -> StoreFuture<'a, ()> {
        let _ = meta;
        lacks(Operation::Put, key, deadline)
    }

    /// The server's clock, in seconds since 1970.
    fn server_time(&self, deadline: Instant) -> StoreFuture<'_, i64> {
        lacks(Operation::Bucket, "the server's clock", deadline)
    }

    /// The bucket's lifecycle rules; None where there are none.
    fn lifecycle(&self, deadline: Instant) -> StoreFuture<'_, Option<LifecycleRules>> {
        lacks(Operation::Bucket, "lifecycle", deadline)
    }

    /// Replaces all lifecycle rules of the bucket by these; None removes them.
    fn set_lifecycle<'a>(
        &'a self,
        rules: Option<&'a LifecycleRules>,
        deadline: Instant,
    ) -> StoreFuture<'a, ()> {
        let _ = rules;
        lacks(Operation::Bucket, "lifecycle", deadline)
    }

    /// Fails with what is wrong with endpoint, bucket or credentials.
    fn check_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()>;

    /// Makes the bucket where it is missing.
    fn create_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()>;

    /// Requests sent so far.
    fn requests(&self) -> RequestCounts;

    /// Of each kind of request, the times until its answer or its failure; none where nobody takes them.
    fn request_times(&self) -> RequestTimes {
        RequestTimes::new()
    }

    /// Waits for room at an endpoint, of the requests that had to.
    fn window_waits(&self) -> Times {
        Times::default()
    }

    /// Waits for a connection, of the requests that had to.
    fn connection_waits(&self) -> Times {
        Times::default()
    }

    /// The names that the endpoints come from, if there are any.
    fn names(&self) -> Vec<NameState> {
        Vec::new()
    }

    /// The bytes that the connections carried so far.
    fn traffic(&self) -> Traffic;

    /// Whether the latest PUT was refused because a quota is used up.
    fn is_over_quota(&self) -> bool {
        false
    }

    /// The state of the server's endpoints, if it has any.
    fn endpoints(&self) -> Vec<EndpointState> {
        Vec::new()
    }

    /// Whether no endpoint works that would be used.
    fn is_out_of_reach(&self) -> bool {
        false
    }

    /// Requests to all endpoints, also to those that have left.
    fn totals(&self) -> Requests {
        Requests::default()
    }

    /// Bytes that may be in flight to all endpoints that work.
    fn window_bytes(&self) -> usize {
        usize::MAX
    }
}

/// The answer of a store that does not know the call.
fn lacks<T: Send>(operation: Operation, target: &str, _deadline: Instant) -> StoreFuture<'_, T> {
    let error = ObjectError::new(operation, target, ErrorKind::Unsupported, "");
    Box::pin(async move { Err(error) })
}

/// HTTP requests by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct RequestCounts {
    pub head: u64,
    pub attributes: u64,
    pub get: u64,
    pub put: u64,
    pub list: u64,
    pub delete: u64,
    pub bucket: u64,
}

impl RequestCounts {
    pub fn total(&self) -> u64 {
        self.head + self.attributes + self.get + self.put + self.list + self.delete + self.bucket
    }

    /// The requests since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            head: self.head - earlier.head,
            attributes: self.attributes - earlier.attributes,
            get: self.get - earlier.get,
            put: self.put - earlier.put,
            list: self.list - earlier.list,
            delete: self.delete - earlier.delete,
            bucket: self.bucket - earlier.bucket,
        }
    }
}

/// By the kind's word, as in [`RequestCounts`].
pub type RequestTimes = Vec<(&'static str, Times)>;

/// Counts requests, by kind.
#[derive(Debug, Default)]
pub(super) struct CallCounters {
    counts: [AtomicU64; Operation::ALL.len()],
    times: [Histogram; Operation::ALL.len()],
}

impl CallCounters {
    pub fn add(&self, operation: Operation) {
        self.counts[operation as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn times_of(&self, operation: Operation) -> &Histogram {
        &self.times[operation as usize]
    }

    pub fn times(&self) -> RequestTimes {
        let times = |operation: Operation| (operation.word(), self.times_of(operation).read());
        Operation::ALL.map(times).to_vec()
    }

    pub fn read(&self) -> RequestCounts {
        let count = |operation: Operation| self.counts[operation as usize].load(Ordering::Relaxed);
        RequestCounts {
            head: count(Operation::Head),
            attributes: count(Operation::Attributes),
            get: count(Operation::Get),
            put: count(Operation::Put),
            list: count(Operation::List),
            delete: count(Operation::Delete),
            bucket: count(Operation::Bucket),
        }
    }
}
