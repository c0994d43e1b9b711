//! The one place where a request is tried again, moved or hedged: with budgets, and never past the deadline.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::handover::Handover;
use super::route::{Route, Start};
use super::token_bucket::TokenBucket;

/// When and how often something is tried again.
#[derive(Debug, Clone, Copy)]
pub struct AttemptPolicy {
    /// Attempts after the first, hedges apart.
    pub retries: u32,
    /// Upper bound of the first wait, where there is no other endpoint to go to; doubles with each retry.
    pub base: Duration,
    pub max: Duration,
    /// Retries that may be made in a burst, over all calls; ten successes earn one.
    pub budget: u32,
    /// Hedges in a hundred calls that can be hedged.
    pub hedges: u32,
}

/// Hedges that may be saved up.
const HEDGES_SAVED: u32 = 16;
pub(super) const CALLS_A_RETRY: u32 = 10;

/// The meaning of an error for the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptVerdict {
    /// It would be the same: the server has said so.
    Final,
    /// No time is left. It says nothing of the servers, which may all hang.
    Late,
    /// It may succeed.
    Again,
    /// The same, and its endpoint is not there: to go to another for the first time costs no token.
    Lost,
    /// The same, and it never got there: to go to another is no retry, either.
    Unreached,
}

/// An error of an attempt.
pub trait Failure {
    fn verdict(&self) -> AttemptVerdict;
}

/// When and where else a slow attempt may be sent.
pub trait Hedge: Send + Sync {
    /// How long the last attempt may take before it is slow, by what has been in flight beside it so far; None: nothing is
    /// known, or there is no other endpoint.
    fn after(&self, route: &Route) -> Option<Duration>;
    /// Whether another endpoint has room for it now.
    fn has_room(&self, route: &Route) -> bool;
}

/// The one place where something is tried again. Jittered, with budgets, and never past the caller's deadline.
#[derive(Debug)]
pub struct Attempts {
    policy: AttemptPolicy,
    retries: TokenBucket,
    hedges: TokenBucket,
}

impl Attempts {
    pub fn new(policy: AttemptPolicy) -> Self {
        Self {
            retries: TokenBucket::full(policy.budget),
            hedges: TokenBucket::empty(HEDGES_SAVED),
            policy,
        }
    }

    /// Makes attempts until one succeeds or none may follow.
    pub async fn run<T, E, F>(&self, deadline: Instant, attempt: impl Fn(Route) -> F) -> Result<T, E>
    where
        E: Failure,
        F: Future<Output = Result<T, E>>,
    {
        let mut so_far = SoFar::default();
        loop {
            let result = attempt(so_far.route.clone()).await;
            if let Some(answer) = self.settle(result, &mut so_far, deadline).await {
                return answer;
            }
        }
    }

    /// The same for what may be under way twice at a time. The attempts write to what `handover` holds, if anything.
    pub async fn run_hedged<T, E, F, L>(
        &self,
        deadline: Instant,
        hedge: &impl Hedge,
        handover: Option<&Handover<L>>,
        attempt: impl Fn(Route) -> F,
    ) -> Result<T, E>
    where
        E: Failure,
        F: Future<Output = Result<T, E>>,
    {
        self.hedges.earn(self.policy.hedges);
        let mut so_far = SoFar::default();
        loop {
            let result = self.race(so_far.route.clone(), hedge, handover, &attempt).await;
            if let Some(answer) = self.settle(result, &mut so_far, deadline).await {
                return answer;
            }
        }
    }

    /// The answer after an attempt ended like this; None, after a pause if need be, to make another one.
    async fn settle<T, E: Failure>(
        &self,
        result: Result<T, E>,
        so_far: &mut SoFar,
        deadline: Instant,
    ) -> Option<Result<T, E>> {
        let (error, verdict) = match result {
            Err(error) => {
                let verdict = error.verdict();
                (error, verdict)
            }
            Ok(answer) => {
                self.retries.earn(100 / CALLS_A_RETRY);
                return Some(Ok(answer));
            }
        };
        match verdict {
            AttemptVerdict::Late => return Some(Err(error)),
            AttemptVerdict::Final => {
                // The servers work: they have answered.
                self.retries.earn(100 / CALLS_A_RETRY);
                return Some(Err(error));
            }
            AttemptVerdict::Again | AttemptVerdict::Lost | AttemptVerdict::Unreached => {}
        }
        let moves = so_far.route.can_move();
        // Many addresses may be dead: all may be tried before a call fails.
        let counts = !moves || verdict != AttemptVerdict::Unreached || self.policy.retries == 0;
        let wait = match moves {
            true => Duration::ZERO,
            false => self.pause(so_far.retries),
        };
        let late = Instant::now() + wait >= deadline;
        let over = counts && so_far.retries >= self.policy.retries;
        let free =
            moves && !so_far.again && matches!(verdict, AttemptVerdict::Lost | AttemptVerdict::Unreached);
        if over || late || !(free || self.retries.spend()) {
            return Some(Err(error));
        }
        if !moves {
            so_far.route.forget();
            tokio::time::sleep(wait).await;
        }
        so_far.route = so_far.route.then(Start::Retry);
        so_far.retries += u32::from(counts);
        so_far.again = true;
        None
    }

    fn pause(&self, retry: u32) -> Duration {
        let longest = self
            .policy
            .base
            .saturating_mul(1 << retry.min(16))
            .min(self.policy.max);
        longest.mul_f64(fastrand::f64())
    }

    /// One attempt; and a second one beside it, once it is slow. The first success counts.
    async fn race<T, E, F, L>(
        &self,
        route: Route,
        hedge: &impl Hedge,
        handover: Option<&Handover<L>>,
        attempt: &impl Fn(Route) -> F,
    ) -> Result<T, E>
    where
        E: Failure,
        F: Future<Output = Result<T, E>>,
    {
        // One place for the future, which is large.
        let mut first = pin!(Some(attempt(route.clone())));
        let mut after;
        loop {
            after = match hedge.after(&route) {
                Some(after) => after,
                None => return running(first).await,
            };
            // It is not slow while it waits for its turn.
            let slow = route.sent().unwrap_or_else(Instant::now) + after;
            tokio::select! {
                biased;
                answer = running(first.as_mut()) => return answer,
                () = sleep_until(slow) => {}
            }
            // It may have had more company than when that was worked out.
            after = hedge.after(&route).unwrap_or(after);
            if route.sent().is_none_or(|sent| sent + after > Instant::now()) {
                continue;
            }
            if hedge.has_room(&route) && self.hedges.spend() {
                break;
            }
            // Slow, and nowhere to go: once more later.
            tokio::select! {
                biased;
                answer = running(first.as_mut()) => return answer,
                () = tokio::time::sleep(after) => {}
            }
        }
        let second = attempt(route.then(Start::Hedge));
        // Boxed: rare, and large.
        Box::pin(both(first, second, handover, after)).await
    }
}

/// The attempts at one call.
#[derive(Default)]
struct SoFar {
    route: Route,
    /// Retries that count.
    retries: u32,
    /// It was tried more than once.
    again: bool,
}

/// The first success of two, or the last error. The second takes over what the first holds as soon as its answer begins,
/// unless the first has done more than half: then it has the time `grace` to do the rest.
async fn both<T, E: Failure, F: Future<Output = Result<T, E>>, L>(
    mut first: Pin<&mut Option<F>>,
    second: F,
    handover: Option<&Handover<L>>,
    grace: Duration,
) -> Result<T, E> {
    let mut second = pin!(Some(second));
    let mut take_over: Option<Instant> = None;
    loop {
        let both = first.is_some() && second.is_some();
        let waits_on =
            |error: &E| both && !matches!(error.verdict(), AttemptVerdict::Final | AttemptVerdict::Late);
        tokio::select! {
            biased;
            answer = running(first.as_mut()) => match answer {
                Err(error) if waits_on(&error) => first.set(None),
                answer => return answer,
            },
            answer = running(second.as_mut()) => match answer {
                Err(error) if waits_on(&error) => second.set(None),
                answer => return answer,
            },
            () = wanted(handover), if both && take_over.is_none() => {
                let left = handover.map_or(1.0, Handover::left);
                let patience = if left > 0.5 { Duration::ZERO } else { grace };
                take_over = Some(Instant::now() + patience);
            }
            () = sleep_until(take_over.unwrap_or_else(Instant::now)), if both && take_over.is_some() => {
                first.set(None);
            }
        }
    }
}

/// The sum, as long as it is there.
async fn running<F: Future>(mut slot: Pin<&mut Option<F>>) -> F::Output {
    poll_fn(|cx| match slot.as_mut().as_pin_mut() {
        Some(future) => future.poll(cx),
        None => Poll::Pending,
    })
    .await
}

async fn wanted<L>(handover: Option<&Handover<L>>) {
    match handover {
        Some(handover) => handover.wanted().await,
        None => std::future::pending().await,
    }
}
