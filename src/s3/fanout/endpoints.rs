//! The endpoints behind one name. Gives each request a permit for the cheapest one with room, or lets it wait in the queue.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::attempts::Hedge;
use super::breaker::{BreakerOptions, BreakerPhase};
use super::estimate::Estimates;
use super::member::{Ending, Member, Took};
use super::permit::{Class, Permit};
use super::queue::{PermitQueue, Waiter};
use super::route::{Route, Start};
use super::state::{EndpointState, Requests};
use super::subset::Subset;
use super::window::WindowOptions;
use crate::metrics::{Histogram, Times};

/// Limits of each endpoint.
#[derive(Debug, Clone, Copy)]
pub struct EndpointOptions {
    pub window: WindowOptions,
    pub breaker: BreakerOptions,
    /// No request is hedged sooner.
    pub hedge_min: Duration,
    /// Of more than twice as many endpoints, so many are used while they have room and work.
    pub subset: usize,
}

/// Endpoints that are drawn for a request without bytes. If it took the cheapest of all, many gateways would go to the same one.
const FOR_NO_BYTES: usize = 2;
/// Breakers that open together probe at different times, so how often they opened differs by this much.
const ABOUT_AS_OFTEN: u32 = 1;
/// An endpoint that costs more than this many times the typical cost is poor.
const POOR: f64 = 2.0;
/// The share of requests that are done before a hedge would be sent.
const HEDGE_QUANTILE: f64 = 0.95;
/// How fast the quantile follows.
const QUANTILE_STEP: f64 = 0.05;
/// The hedge's delay stays between these multiples of the typical duration.
const HEDGE_BETWEEN: (f64, f64) = (1.5, 10.0);
/// Requests after which their average counts as typical.
const TYPICAL_AFTER: u32 = 8;

/// The endpoints behind one name. Clones share them.
pub struct Endpoints<T>(Arc<Shared<T>>);

struct Shared<T> {
    options: EndpointOptions,
    set: Mutex<Set<T>>,
    waits: Histogram,
}

struct Set<T> {
    /// In the order in which this gateway uses them.
    members: Vec<Member<T>>,
    subset: Subset,
    queue: PermitQueue<T>,
    /// Requests to addresses that are no members any more.
    departed: Requests,
    /// The number of permits, and of requests that were queued.
    numbers: u64,
    /// Over all endpoints.
    typical: Estimates,
    samples: u32,
    /// The quantile of what requests take, in typical durations.
    quantile: f64,
}

/// An endpoint that a request could go to.
struct Choice {
    /// Its place among the members.
    at: usize,
    cost: f64,
    /// Decides between equals.
    draw: u32,
}

impl Choice {
    fn order(one: &Self, other: &Self) -> Ordering {
        let by_cost = one.cost.total_cmp(&other.cost);
        by_cost.then_with(|| one.draw.cmp(&other.draw))
    }
}

impl<T> Clone for Endpoints<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Endpoints<T> {
    /// None yet: who asks for a permit waits for the first.
    pub fn new(options: EndpointOptions) -> Self {
        let set = Set {
            members: Vec::new(),
            subset: Subset::new(options.subset, Instant::now()),
            queue: PermitQueue::new(),
            departed: Requests::default(),
            numbers: 0,
            typical: Estimates::default(),
            samples: 0,
            quantile: HEDGE_BETWEEN.0 * 2.0,
        };
        Self(Arc::new(Shared {
            options,
            set: Mutex::new(set),
            waits: Histogram::default(),
        }))
    }

    /// From here on these are the addresses. Those that stay keep what is known of them; requests to those that go are not
    /// disturbed.
    pub fn update(&self, addresses: &[SocketAddr], payload: impl Fn(SocketAddr) -> T) {
        let now = Instant::now();
        let mut set = self.lock();
        let leaves = |member: &mut Member<T>| !addresses.contains(&member.address);
        let leaving: Vec<_> = set.members.extract_if(.., leaves).collect();
        set.departed = leaving
            .iter()
            .fold(set.departed, |sum, member| sum.and(&member.totals()));
        let known: BTreeSet<_> = set.members.iter().map(|member| member.address).collect();
        let new = addresses.iter().filter(|address| !known.contains(address));
        let new = new.map(|&address| Member::new(address, payload(address), &self.0.options, now));
        set.members.extend(new);
        let Set { members, subset, .. } = &mut *set;
        members.sort_by_cached_key(|member| subset.place(member.address));
        self.grant(set);
    }

    pub fn is_empty(&self) -> bool {
        self.lock().members.is_empty()
    }

    /// An endpoint for a request that moves `bytes` of body; waits until one has room for them. With 0 bytes it waits only
    /// while there is no endpoint at all.
    pub async fn permit(&self, class: Class, bytes: usize, route: &Route) -> Permit<T> {
        let waiting = {
            let now = Instant::now();
            let mut set = self.lock();
            // A request without bytes takes nobody's room.
            if (bytes == 0 || set.queue.is_empty())
                && let Some(chosen) = set.choose(class, bytes, route, now)
            {
                return self.begin(&mut set, chosen, class, bytes, route, now);
            }
            set.members.iter_mut().for_each(|member| member.is_full(bytes));
            set.numbers += 1;
            let number = set.numbers;
            let (sender, permit) = oneshot::channel();
            set.queue.push(Waiter {
                number,
                class,
                bytes,
                route: route.clone(),
                sender,
            });
            Waiting {
                endpoints: self,
                class,
                number,
                permit,
            }
        };
        self.0.waits.of(waiting.granted()).await
    }

    /// Of the requests that had to wait for room.
    pub fn waits(&self) -> Times {
        self.0.waits.read()
    }

    /// The same for a hedge: another endpoint that has room now, or none. It does not queue: what it is for has
    /// waited already.
    pub fn try_permit(&self, bytes: usize, route: &Route) -> Option<Permit<T>> {
        let now = Instant::now();
        let mut set = self.lock();
        let chosen = set.choose_other(bytes, route, now)?;
        Some(self.begin(&mut set, chosen, Class::Load, bytes, route, now))
    }

    fn begin(
        &self,
        set: &mut Set<T>,
        at: usize,
        class: Class,
        bytes: usize,
        route: &Route,
        now: Instant,
    ) -> Permit<T> {
        set.numbers += 1;
        let number = set.numbers;
        // These endpoints are passed by for lack of room. With a limit on all bytes in flight that never happens to all at once.
        let full = set.members.iter_mut().filter(|member| !member.has_room(bytes));
        full.for_each(|member| member.is_full(bytes));
        let member = &mut set.members[at];
        member.begin(number, class, bytes, route.start(), now);
        let (payload, address) = (Arc::clone(&member.payload), member.address);
        let taken = route.taken();
        let others = set.members.iter().any(|member| {
            member.address != address && member.breaker.admits(now) && !taken.contains(&member.address)
        });
        route.take(address, number, others, now);
        Permit::new(self.clone(), payload, address, number, now)
    }

    /// A request could not be sent when its permit began, and is sent now.
    pub(super) fn goes(&self, address: SocketAddr, permit: u64, now: Instant) {
        let mut set = self.lock();
        let member = set.members.iter_mut().find(|member| member.address == address);
        if let Some(member) = member {
            member.goes(permit, now);
        }
    }

    /// A request ended.
    pub(super) fn end(&self, address: SocketAddr, ending: &Ending) {
        let now = Instant::now();
        let mut set = self.lock();
        let none_works = set.none_works(now);
        let member = set.members.iter_mut().find(|member| member.address == address);
        let Some(member) = member else {
            set.departed.end(ending);
            return;
        };
        if let Some(took) = member.end(ending, now) {
            set.learn(&took, ending, now);
        }
        if none_works && !set.none_works(now) {
            // What all had in common is over. Otherwise everything would go to this one, until the others are tried.
            set.members
                .iter_mut()
                .for_each(|member| member.breaker.may_work(now));
        }
        self.grant(set);
    }

    /// Serves the queue for as long as there is room.
    fn grant(&self, mut set: MutexGuard<'_, Set<T>>) {
        if set.queue.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut granted = Vec::new();
        while let Some(first) = set.queue.first() {
            let (class, bytes, route) = (first.class, first.bytes, first.route.clone());
            let Some(chosen) = set.choose(class, bytes, &route, now) else {
                set.members.iter_mut().for_each(|member| member.is_full(bytes));
                break;
            };
            let Some(waiter) = set.queue.pop() else { break };
            let permit = self.begin(&mut set, chosen, class, bytes, &route, now);
            granted.push((waiter.sender, permit));
        }
        drop(set);
        for (sender, permit) in granted {
            // One that nobody takes ends here.
            drop(sender.send(permit));
        }
    }

    /// Bytes that all endpoints that work may have in flight together.
    pub fn window_bytes(&self) -> usize {
        let now = Instant::now();
        let set = self.lock();
        let usable = set.members.iter().filter(|member| member.breaker.admits(now));
        usable.map(Member::window_bytes).fold(0, usize::saturating_add)
    }

    /// Whether none works of those that this gateway would use first: the breakers of others are closed because they
    /// were not tried.
    pub fn are_out_of_reach(&self) -> bool {
        let now = Instant::now();
        let set = self.lock();
        let used = set.subset.len(set.members.len(), now);
        let closed = |member: &Member<T>| member.breaker.phase(now) == BreakerPhase::Closed;
        used > 0 && !set.members[..used].iter().any(closed)
    }

    /// For what goes with each endpoint.
    pub fn each(&self, act: impl Fn(&T)) {
        let payloads: Vec<_> = self
            .lock()
            .members
            .iter()
            .map(|member| Arc::clone(&member.payload))
            .collect();
        payloads.iter().for_each(|payload| act(payload));
    }

    pub fn states(&self) -> Vec<EndpointState> {
        let now = Instant::now();
        let set = self.lock();
        let mut states: Vec<_> = set.members.iter().map(|member| member.state(now)).collect();
        states.sort_by_key(|state| state.address);
        states
    }

    /// Of all endpoints, also of those that have left.
    pub fn totals(&self) -> Requests {
        let set = self.lock();
        let members = set.members.iter().map(Member::totals);
        members.fold(set.departed, |sum, one| sum.and(&one))
    }

    /// How requests for `bytes` are hedged.
    pub fn hedge(&self, bytes: usize) -> HedgeTo<T> {
        HedgeTo {
            endpoints: self.clone(),
            bytes,
        }
    }

    /// No panic can leave the set half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, Set<T>> {
        self.0.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Set<T> {
    /// The [best](Self::best) of the subset that has room; not one that this call has taken, if there is another that
    /// works. Where all of the subset are full, busy or poor, it widens. Where none works, see
    /// [`any_that_failed_little`](Self::any_that_failed_little).
    fn choose(&mut self, class: Class, bytes: usize, route: &Route, now: Instant) -> Option<usize> {
        let taken = route.taken();
        let place = |best: Option<Choice>| best.map(|best| best.at);
        let works = |member: &Member<T>| member.breaker.admits(now);
        let fresh = |member: &Member<T>| works(member) && !taken.contains(&member.address);
        if self.members.iter().any(fresh) {
            let has_room = |member: &Member<T>| fresh(member) && member.has_room(bytes);
            let used = self.used(now);
            if used == self.members.len() {
                return place(self.best(class, bytes, now, |_, member| has_room(member)));
            }
            let is_free = |member: &Member<T>| has_room(member) && !member.is_busy(bytes);
            // One that joined and failed is probed, though it has left.
            let near =
                |at, member: &Member<T>| at < used || member.breaker.phase(now) == BreakerPhase::HalfOpen;
            let best = self.best(class, bytes, now, |at, member| {
                near(at, member) && is_free(member)
            });
            // A HEAD takes nobody's room.
            let good = |best: &Choice| bytes == 0 || !self.is_poor(best, class, bytes);
            if let Some(best) = best.filter(good) {
                return Some(best.at);
            }
            let joins = |&at: &usize| is_free(&self.members[at]) && good(&self.choice(at, class, bytes, now));
            if let Some(next) = (used..self.members.len()).find(joins) {
                self.subset.widen(now);
                return Some(next);
            }
            let of_subset = self.best(class, bytes, now, |at, member| {
                near(at, member) && has_room(member)
            });
            place(of_subset.or_else(|| self.best(class, bytes, now, |_, member| has_room(member))))
        } else if self.members.iter().any(works) {
            place(self.best(class, bytes, now, |_, member| {
                works(member) && member.has_room(bytes)
            }))
        } else {
            self.any_that_failed_little(bytes, &taken)
        }
    }

    /// Where none works: any whose breaker opened about as seldom in a row as the best one's, if there is one not taken by this
    /// call. By chance, because all that waits goes out together once they are back.
    fn any_that_failed_little(&self, bytes: usize, taken: &[SocketAddr]) -> Option<usize> {
        let opened = |at: usize| self.members[at].breaker.opened_in_row();
        let room = (0..self.members.len()).filter(|&at| self.members[at].has_room(bytes));
        let mut those: Vec<usize> = room.collect();
        let least = those.iter().map(|&at| opened(at)).min()?;
        those.retain(|&at| opened(at) <= least + ABOUT_AS_OFTEN);
        let (taken, new): (Vec<usize>, Vec<usize>) = those
            .into_iter()
            .partition(|&at| taken.contains(&self.members[at].address));
        fastrand::choice(new).or_else(|| fastrand::choice(taken))
    }

    /// No breaker is closed.
    fn none_works(&self, now: Instant) -> bool {
        let closed = |member: &Member<T>| member.breaker.phase(now) == BreakerPhase::Closed;
        !self.members.iter().any(closed)
    }

    /// One that this call has not taken, with a closed breaker.
    fn choose_other(&self, bytes: usize, route: &Route, now: Instant) -> Option<usize> {
        let taken = route.taken();
        let used = self.used(now);
        let best = self.best(Class::Load, bytes, now, |at, member| {
            at < used
                && member.breaker.phase(now) == BreakerPhase::Closed
                && !taken.contains(&member.address)
                && member.has_room_for_hedge(bytes)
        });
        best.map(|best| best.at)
    }

    /// So many of the members, from the first on, have as many that work as the subset has.
    fn used(&self, now: Instant) -> usize {
        let mut left = self.subset.len(self.members.len(), now);
        if left == self.members.len() {
            return left;
        }
        let last = self.members.iter().position(|member| {
            left -= usize::from(member.breaker.admits(now));
            left == 0
        });
        last.map_or(self.members.len(), |last| last + 1)
    }

    /// The cheapest of all for a range or an upload: a load has a few ranges for each endpoint, and one too many at one of them
    /// holds up the whole load. Without bytes, the cheaper of two that are drawn at random, of those that are not poor if there
    /// are any.
    fn best(
        &self,
        class: Class,
        bytes: usize,
        now: Instant,
        fits: impl Fn(usize, &Member<T>) -> bool,
    ) -> Option<Choice> {
        let those = || (0..self.members.len()).filter(|&at| fits(at, &self.members[at]));
        let choices = || those().map(|at| self.choice(at, class, bytes, now));
        if bytes > 0 {
            return choices().min_by(Choice::order);
        }
        let better = |drawn: Vec<Choice>| drawn.into_iter().min_by(Choice::order);
        let drawn = fastrand::choose_multiple(those(), FOR_NO_BYTES).into_iter();
        let of_all = better(drawn.map(|at| self.choice(at, class, bytes, now)).collect())?;
        if !self.is_poor(&of_all, class, bytes) {
            return Some(of_all);
        }
        let good = choices().filter(|choice| !self.is_poor(choice, class, bytes));
        better(fastrand::choose_multiple(good, FOR_NO_BYTES)).or(Some(of_all))
    }

    fn choice(&self, at: usize, class: Class, bytes: usize, now: Instant) -> Choice {
        Choice {
            at,
            cost: self.members[at].cost(class, bytes, &self.typical, now),
            draw: fastrand::u32(..),
        }
    }

    fn is_poor(&self, choice: &Choice, class: Class, bytes: usize) -> bool {
        let typical = self.typical.of(class);
        // One that is larger than usual takes longer everywhere.
        let larger = typical.grown(bytes as f64).max(1.0);
        choice.cost > POOR * larger * typical.seconds(bytes).unwrap_or(1.0)
    }

    /// The typical time of a load of `bytes` where so much is in flight. With less than usual it is as long as usual.
    fn typical(&self, bytes: usize, load: f64) -> Option<f64> {
        let typical = self.typical.of(Class::Load);
        let loaded = if bytes == 0 {
            1.0
        } else {
            typical.loaded(load).max(1.0)
        };
        Some(typical.seconds(bytes)? * loaded)
    }

    fn learn(&mut self, took: &Took, ending: &Ending, now: Instant) {
        let &Took {
            class,
            bytes,
            time,
            load,
        } = took;
        if class == Class::Store {
            self.typical.of_mut(class).moved(bytes, time, load, now);
            return;
        }
        if let Some(typical) = self.typical(bytes, load)
            && typical > 0.0
        {
            let ratio = time.as_secs_f64() / typical;
            let step = match ratio > self.quantile {
                true => QUANTILE_STEP * HEDGE_QUANTILE,
                false => -QUANTILE_STEP * (1.0 - HEDGE_QUANTILE),
            };
            self.quantile = (self.quantile * (1.0 + step)).clamp(HEDGE_BETWEEN.0, HEDGE_BETWEEN.1);
        }
        let answered = ending.answered.unwrap_or(now);
        let typical = self.typical.of_mut(class);
        typical.answered(answered - ending.began, bytes, now - answered, load, now);
        self.samples = self.samples.saturating_add(1);
    }
}

/// A request in the queue, until this is dropped.
struct Waiting<'a, T> {
    endpoints: &'a Endpoints<T>,
    class: Class,
    number: u64,
    permit: oneshot::Receiver<Permit<T>>,
}

impl<T> Waiting<'_, T> {
    async fn granted(mut self) -> Permit<T> {
        // The sender stays in the queue until it has sent, and the queue is there as long as we are.
        (&mut self.permit).await.expect("a waiter is in the queue")
    }
}

impl<T> Drop for Waiting<'_, T> {
    fn drop(&mut self) {
        let mut set = self.endpoints.lock();
        if set.queue.leave(self.class, self.number) {
            // It may have been what the others waited for.
            self.endpoints.grant(set);
        }
    }
}

/// When and whether a request for some bytes is hedged; see [`Endpoints::hedge`].
pub struct HedgeTo<T> {
    endpoints: Endpoints<T>,
    bytes: usize,
}

impl<T: Send + Sync> Hedge for HedgeTo<T> {
    fn after(&self, route: &Route) -> Option<Duration> {
        let set = self.endpoints.lock();
        if set.members.len() < 2 || set.samples < TYPICAL_AFTER {
            return None;
        }
        // Before it has an endpoint, as long as typical.
        let load = route.last().and_then(|(address, permit)| {
            let member = set.members.iter().find(|member| member.address == address)?;
            member.load(permit, Instant::now())
        });
        let typical = set.typical(self.bytes, load.unwrap_or_default())?;
        let late = Duration::try_from_secs_f64(typical * set.quantile).ok()?;
        Some(late.max(self.endpoints.0.options.hedge_min))
    }

    fn has_room(&self, route: &Route) -> bool {
        let set = self.endpoints.lock();
        let hedge = route.then(Start::Hedge);
        set.choose_other(self.bytes, &hedge, Instant::now()).is_some()
    }
}
