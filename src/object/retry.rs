//! The one retry layer: jittered, with a budget, and never past the caller's deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::store::{
    Condition, GetFuture, GetRange, ListPage, ObjectMeta, ObjectStore, RequestCounts, Result, StoreFuture,
};
use crate::net::{Landing, Traffic};

/// When and how often a failed request is tried again.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Attempts after the first.
    pub retries: u32,
    /// Upper bound of the first wait; doubles with each retry.
    pub base: Duration,
    pub max: Duration,
    /// Retries that may be made in a burst, over all requests; ten successes earn one.
    pub budget: u32,
}

/// A store whose requests are tried again when that may help.
pub struct Retrying<S> {
    inner: S,
    policy: RetryPolicy,
    /// Tenths of retries.
    tokens: AtomicU32,
}

const TOKENS_A_RETRY: u32 = 10;

impl<S: ObjectStore> Retrying<S> {
    pub fn new(inner: S, policy: RetryPolicy) -> Self {
        Self {
            inner,
            policy,
            tokens: AtomicU32::new(policy.budget.saturating_mul(TOKENS_A_RETRY)),
        }
    }

    /// What to answer after attempt number `retry` (from 0) ended like this; None, after a pause, to try again.
    async fn settle<T>(&self, result: Result<T>, retry: u32, deadline: Instant) -> Option<Result<T>> {
        let error = match result {
            Err(error) if error.kind.retryable() => error,
            answer => {
                // The server works, whatever it said.
                self.earn();
                return Some(answer);
            }
        };
        let longest = self
            .policy
            .base
            .saturating_mul(1 << retry.min(16))
            .min(self.policy.max);
        let wait = longest.mul_f64(fastrand::f64());
        let late = Instant::now() + wait >= deadline;
        if retry >= self.policy.retries || late || !self.spend() {
            return Some(Err(error));
        }
        tracing::debug!(%error, ?wait, "trying again");
        tokio::time::sleep(wait).await;
        None
    }

    fn spend(&self) -> bool {
        let spend = |tokens: u32| tokens.checked_sub(TOKENS_A_RETRY);
        self.tokens
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend)
            .is_ok()
    }

    fn earn(&self) {
        let most = self.policy.budget.saturating_mul(TOKENS_A_RETRY);
        let earn = |tokens: u32| (tokens < most).then_some(tokens + 1);
        // An error here only says that the bucket is full.
        let _ = self
            .tokens
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, earn);
    }
}

/// The same request until it succeeds or may not be tried again.
macro_rules! retrying {
    ($self:ident, $deadline:ident, $request:expr) => {
        Box::pin(async move {
            for retry in 0.. {
                let result = $request.await;
                if let Some(answer) = $self.settle(result, retry, $deadline).await {
                    return answer;
                }
            }
            unreachable!("the policy ends the loop")
        })
    };
}

impl<S: ObjectStore> ObjectStore for Retrying<S> {
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        retrying!(self, deadline, self.inner.head(key, deadline))
    }

    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        retrying!(self, deadline, self.inner.attributes(key, deadline))
    }

    fn get<'a>(&'a self, get: GetRange<'a>, mut landing: Landing, deadline: Instant) -> GetFuture<'a> {
        Box::pin(async move {
            for retry in 0.. {
                let result;
                (landing, result) = self.inner.get(get.clone(), landing, deadline).await;
                if let Some(answer) = self.settle(result, retry, deadline).await {
                    return (landing, answer);
                }
            }
            unreachable!("the policy ends the loop")
        })
    }

    fn read<'a>(&'a self, key: &'a str, limit: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        retrying!(self, deadline, self.inner.read(key, limit, deadline))
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        retrying!(self, deadline, self.inner.put(key, body.clone(), when, deadline))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        retrying!(self, deadline, self.inner.list(prefix, from, deadline))
    }

    fn delete<'a>(&'a self, keys: &'a [String], deadline: Instant) -> StoreFuture<'a, ()> {
        retrying!(self, deadline, self.inner.delete(keys, deadline))
    }

    fn check_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        retrying!(self, deadline, self.inner.check_bucket(deadline))
    }

    fn create_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        retrying!(self, deadline, self.inner.create_bucket(deadline))
    }

    fn requests(&self) -> RequestCounts {
        self.inner.requests()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}
