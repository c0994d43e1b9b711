//! One leader among nodes that know only the bucket: an object that says who leads, written under conditions.
//!
//! - **Taking it.** Where there is none: PUT `If-None-Match: *`. Where there is one: a node that has seen the same version of
//!   it for the whole term may replace it, by PUT `If-Match`. The time is measured by one's own clock from one's own first
//!   sight, so clocks need not agree.
//! - **Keeping it.** The leader writes it anew three times a term, by `If-Match` on its own last version. If that fails,
//!   or if no write was acknowledged for two thirds of a term, it leads no more. The time counts from before the
//!   request, so it gives up before anybody else may take over.
//! - **Two leaders.** A process that stops between its question whether it leads and its next DELETE may still send that
//!   DELETE when another leads. So the lease saves work and no more: what leaders do must be harmless if both do it.
//!   Removal is: see `gc`.
//!
//! Only for servers that honour both conditions.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tokio::time::Instant;

use crate::s3::object::{Condition, ErrorKind, ObjectError, ObjectStore};

/// See the [module](self). One for each node.
pub struct Lease {
    store: Arc<dyn ObjectStore>,
    key: String,
    /// This process; no other has the same.
    holder: String,
    term: Duration,
    state: State,
}

#[derive(Debug, Clone, Default)]
struct State {
    /// The version that was last seen, and when first.
    seen: Option<(Arc<str>, Instant)>,
    /// Our own version, and until when it counts.
    held: Option<(Arc<str>, Instant)>,
    number: u64,
}

/// The object's text.
#[derive(Debug, Serialize)]
struct Record {
    holder: String,
    /// Seconds without a new version after which another takes over.
    term_seconds: f64,
    /// Makes each version another one.
    number: u64,
}

impl Lease {
    pub fn new(store: Arc<dyn ObjectStore>, key: String, holder: String, term: Duration) -> Self {
        Self {
            store,
            key,
            holder,
            term,
            state: State::default(),
        }
    }

    /// Takes the lease or keeps it, where that is possible now. Returns until when this process leads.
    pub async fn hold(&mut self) -> Result<Option<Instant>, ObjectError> {
        let now = Instant::now();
        let deadline = now + self.term / 3;
        if let Some((etag, until)) = self.state.held.clone()
            && now < until
        {
            match self.write(Condition::IfMatch(&etag), now, deadline).await {
                Ok(()) => return Ok(self.until()),
                // Somebody took it, or our own write whose answer was lost did.
                Err(error) if matches!(error.kind, ErrorKind::Changed | ErrorKind::NotFound) => {
                    self.state.held = None;
                }
                // It counts until its time is over.
                Err(error) => return Err(error),
            }
        }
        self.state.held = None;
        let there = match self.store.head(&self.key, deadline).await {
            Ok(meta) => Some(meta.version.etag),
            Err(error) if error.kind == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let is_free = match (&there, &self.state.seen) {
            (None, _) => true,
            (Some(there), Some((seen, since))) if seen == there => now >= *since + self.term,
            (Some(there), _) => {
                self.state.seen = Some((Arc::clone(there), now));
                false
            }
        };
        if !is_free {
            return Ok(None);
        }
        let when = match &there {
            None => Condition::IfAbsent,
            Some(etag) => Condition::IfMatch(etag),
        };
        match self.write(when, now, deadline).await {
            Ok(()) => Ok(self.until()),
            // Another was first.
            Err(error)
                if matches!(
                    error.kind,
                    ErrorKind::Changed | ErrorKind::Conflict | ErrorKind::NotFound
                ) =>
            {
                self.state.seen = None;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Until when this process leads.
    pub fn until(&self) -> Option<Instant> {
        let until = self.state.held.as_ref().map(|(_, until)| *until);
        until.filter(|until| Instant::now() < *until)
    }

    async fn write(
        &mut self,
        when: Condition<'_>,
        now: Instant,
        deadline: Instant,
    ) -> Result<(), ObjectError> {
        self.state.number += 1;
        let record = Record {
            holder: self.holder.clone(),
            term_seconds: self.term.as_secs_f64(),
            number: self.state.number,
        };
        // Strings and numbers.
        let text = serde_json::to_vec(&record).unwrap_or_default();
        let etag = self
            .store
            .put(&self.key, Bytes::from(text), when, deadline)
            .await?;
        self.state.held = Some((Arc::clone(&etag), now + self.term * 2 / 3));
        self.state.seen = Some((etag, now));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::s3::net::{Landing, Traffic};
    use crate::s3::object::{
        GetFuture, GetRange, ListPage, ObjectMeta, Operation, RequestCounts, StoreFuture, Version,
    };

    const TERM: Duration = Duration::from_secs(9);

    /// One object, with conditions.
    #[derive(Default)]
    struct One {
        state: Mutex<(Option<Arc<str>>, Fault)>,
    }

    /// What happens to the next PUT.
    #[derive(Default, Clone, Copy, PartialEq)]
    enum Fault {
        #[default]
        None,
        /// It takes effect, and its answer is lost.
        AnswerLost,
        Refused,
    }

    fn error(kind: ErrorKind) -> ObjectError {
        ObjectError::new(Operation::Put, "lease", kind, "")
    }

    impl ObjectStore for One {
        fn head<'a>(&'a self, _: &'a str, _: Instant) -> StoreFuture<'a, ObjectMeta> {
            let etag = self.state.lock().unwrap().0.clone();
            Box::pin(async move {
                let etag = etag.ok_or_else(|| error(ErrorKind::NotFound))?;
                let version = Version { etag, modified: 0 };
                Ok(ObjectMeta {
                    len: 1,
                    version,
                    run: None,
                })
            })
        }

        fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
            self.head(key, deadline)
        }

        fn get<'a>(&'a self, _: GetRange<'a>, _: Landing, _: Instant) -> GetFuture<'a> {
            unreachable!()
        }

        fn read<'a>(&'a self, _: &'a str, _: usize, _: Instant) -> StoreFuture<'a, Bytes> {
            unreachable!()
        }

        fn put<'a>(
            &'a self,
            _: &'a str,
            body: Bytes,
            when: Condition<'a>,
            _: Instant,
        ) -> StoreFuture<'a, Arc<str>> {
            let (object, fault) = &mut *self.state.lock().unwrap();
            let fault = std::mem::take(fault);
            let holds = match when {
                Condition::Always => true,
                Condition::IfAbsent => object.is_none(),
                Condition::IfMatch(etag) => object.as_deref() == Some(etag),
            };
            let etag: Arc<str> = blake3::hash(&body).to_hex().as_str().into();
            let answer = match (fault, holds) {
                (Fault::Refused, _) => Err(error(ErrorKind::Unavailable)),
                (_, false) => Err(error(ErrorKind::Changed)),
                (fault, true) => {
                    *object = Some(Arc::clone(&etag));
                    match fault {
                        Fault::AnswerLost => Err(error(ErrorKind::Timeout)),
                        _ => Ok(etag),
                    }
                }
            };
            Box::pin(async move { answer })
        }

        fn list<'a>(&'a self, _: &'a str, _: Option<&'a str>, _: Instant) -> StoreFuture<'a, ListPage> {
            unreachable!()
        }

        fn delete<'a>(&'a self, _: &'a [String], _: Instant) -> StoreFuture<'a, ()> {
            self.state.lock().unwrap().0 = None;
            Box::pin(async { Ok(()) })
        }

        fn check_bucket(&self, _: Instant) -> StoreFuture<'_, ()> {
            Box::pin(async { Ok(()) })
        }

        fn create_bucket(&self, _: Instant) -> StoreFuture<'_, ()> {
            Box::pin(async { Ok(()) })
        }

        fn requests(&self) -> RequestCounts {
            RequestCounts::default()
        }

        fn traffic(&self) -> Traffic {
            Traffic::default()
        }
    }

    fn leases(store: &Arc<One>) -> [Lease; 2] {
        ["a", "b"].map(|holder| Lease::new(store.clone(), "lease".into(), holder.into(), TERM))
    }

    #[tokio::test(start_paused = true)]
    async fn one_leads_until_it_is_silent_for_a_term() {
        let store = Arc::new(One::default());
        let [mut a, mut b] = leases(&store);
        assert!(a.hold().await.unwrap().is_some());
        for _ in 0..10 {
            tokio::time::advance(TERM / 3).await;
            assert!(a.hold().await.unwrap().is_some() && b.hold().await.unwrap().is_none());
        }
        tokio::time::advance(TERM).await;
        assert!(a.until().is_none(), "it gave up before");
        assert!(b.hold().await.unwrap().is_some());
        assert!(a.hold().await.unwrap().is_none());
    }

    /// Every order of six steps: each side holds, or its PUT fails in one of two ways, or time
    /// goes by. Two never lead at once.
    #[tokio::test(start_paused = true)]
    async fn two_never_lead_at_once() {
        const STEPS: u32 = 6;
        const CHOICES: u32 = 7;
        let mut changes = 0;
        for mut order in 0..CHOICES.pow(STEPS) {
            let store = Arc::new(One::default());
            let mut leases = leases(&store);
            let mut led = None;
            for _ in 0..STEPS {
                let choice = order % CHOICES;
                order /= CHOICES;
                let fault = [Fault::None, Fault::AnswerLost, Fault::Refused];
                match choice {
                    6 => tokio::time::advance(TERM / 3 + Duration::from_millis(1)).await,
                    of => {
                        store.state.lock().unwrap().1 = fault[of as usize % 3];
                        let _ = leases[of as usize / 3].hold().await;
                        store.state.lock().unwrap().1 = Fault::None;
                    }
                }
                let lead = [leases[0].until().is_some(), leases[1].until().is_some()];
                assert_ne!(lead, [true, true]);
                let now = lead.iter().position(|&leads| leads);
                changes += u32::from(now.is_some() && led.is_some() && now != led);
                led = now.or(led);
            }
        }
        assert!(changes > 0, "in some orders the other takes over");
    }
}
