//! Turns to send a GET: a limit on the bytes in flight of all loads together, and an order among those that wait.
//! The limit is the lower of the configured one and the bytes that the working endpoints can have in flight. So
//! GETs wait here, where the one that is needed first is first in the queue.
//!
//! A GET queues by its *position*: the number of its load, then its position in the load's plan. So an earlier load
//! goes before a later one, and within a load the part needed first goes first, whenever the GETs queued. No GET
//! overtakes the first in the queue, however small; so large parts are not starved by small ones, and a part that
//! is larger than the whole limit goes alone.
//!
//! Queueing is synchronous: GETs that queue in order are served in order. Dropping the [`Waiting`] leaves the queue
//! at any time, and a [`Turn`] ends when it is dropped, in any task.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::sync::oneshot;

/// See the [module](self). Cheap to clone.
#[derive(Clone)]
pub struct Turns(Arc<Shared>);

struct Shared {
    limit_bytes: usize,
    /// A second limit, which changes.
    window_bytes: Box<dyn Fn() -> usize + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    in_flight_bytes: usize,
    turns: usize,
    loads: u64,
    /// Number of arrivals so far: tells equal positions apart.
    arrivals: u64,
    queue: BTreeMap<Ticket, Waiter>,
}

/// A position in the queue; the lower one goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TurnPosition {
    pub load: u64,
    /// Position in the load's plan.
    pub position: u64,
}

/// A position, and the number of the arrival.
type Ticket = (TurnPosition, u64);

struct Waiter {
    bytes: usize,
    sender: oneshot::Sender<Turn>,
}

/// A position in the queue, until it is dropped; ends with the turn.
pub struct Waiting {
    turns: Turns,
    ticket: Ticket,
    turn: oneshot::Receiver<Turn>,
}

/// The right to have some bytes in flight, until it is dropped.
pub struct Turn {
    turns: Turns,
    bytes: usize,
}

impl Turns {
    pub fn new(limit_bytes: usize, window_bytes: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        let state = State {
            in_flight_bytes: 0,
            turns: 0,
            loads: 0,
            arrivals: 0,
            queue: BTreeMap::new(),
        };
        Self(Arc::new(Shared {
            limit_bytes,
            window_bytes: Box::new(window_bytes),
            state: Mutex::new(state),
        }))
    }

    /// The number of a new load, higher than all before.
    pub fn load(&self) -> u64 {
        let mut state = self.lock();
        state.loads += 1;
        state.loads
    }

    /// Queues now.
    pub fn wait(&self, place: TurnPosition, bytes: usize) -> Waiting {
        let (sender, turn) = oneshot::channel();
        let mut state = self.lock();
        state.arrivals += 1;
        let ticket = (place, state.arrivals);
        state.queue.insert(ticket, Waiter { bytes, sender });
        self.grant(state);
        Waiting {
            turns: self.clone(),
            ticket,
            turn,
        }
    }

    /// Serves the first in the queue for as long as there is room.
    fn grant(&self, mut state: MutexGuard<'_, State>) {
        if state.queue.is_empty() {
            return;
        }
        let limit_bytes = self.0.limit_bytes.min((self.0.window_bytes)());
        let mut granted = Vec::new();
        while let Some((_, first)) = state.queue.first_key_value() {
            let in_flight_bytes = state.in_flight_bytes.saturating_add(first.bytes);
            if state.turns > 0 && in_flight_bytes > limit_bytes {
                break;
            }
            state.in_flight_bytes = in_flight_bytes;
            state.turns += 1;
            granted.extend(state.queue.pop_first().map(|(_, waiter)| waiter));
        }
        drop(state);
        for Waiter { bytes, sender } in granted {
            let turns = self.clone();
            // A turn without a receiver ends here, which serves the next.
            drop(sender.send(Turn { turns, bytes }));
        }
    }

    /// No panic can leave the state half-changed, so a poisoned lock is still usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for Waiting {
    type Output = Turn;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Turn> {
        // The sender stays in the queue until it has sent, and the queue lives as long as this future.
        Pin::new(&mut self.turn)
            .poll(context)
            .map(|turn| turn.expect("a waiter is in the queue"))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // A turn that was granted and not taken ends with the receiver.
        let mut state = self.turns.lock();
        if state.queue.remove(&self.ticket).is_some() {
            // The others may have waited only for this one.
            self.turns.grant(state);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        state.in_flight_bytes -= self.bytes;
        state.turns -= 1;
        self.turns.grant(state);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    fn turns_of(limit_bytes: usize) -> Turns {
        Turns::new(limit_bytes, || usize::MAX)
    }

    fn place(load: u64, position: u64) -> TurnPosition {
        TurnPosition { load, position }
    }

    fn in_flight(turns: &Turns) -> usize {
        turns.lock().in_flight_bytes
    }

    #[test]
    fn earlier_loads_and_earlier_parts_go_first() {
        let turns = turns_of(10);
        assert!(turns.load() < turns.load());
        let first = turns.wait(place(9, 0), 10).now_or_never().expect("free");
        let mut line: Vec<_> = [(2, 0), (1, 7), (2, 1), (1, 3), (1, 3)]
            .map(|(load, position)| (place(load, position), turns.wait(place(load, position), 10)))
            .into();
        let mut turn = first;
        let mut served = Vec::new();
        while !line.is_empty() {
            drop(turn);
            let mut ready = line
                .iter_mut()
                .enumerate()
                .filter_map(|(i, (_, waiting))| Some((i, waiting.now_or_never()?)));
            let (i, next) = ready.next().expect("the first in the queue is served");
            assert!(ready.next().is_none(), "and only he");
            drop(ready);
            turn = next;
            served.push(line.remove(i).0);
        }
        assert!(served.is_sorted());
    }

    #[test]
    fn nobody_overtakes_a_large_part_which_goes_alone() {
        let turns = turns_of(10);
        let small = turns.wait(place(1, 0), 4).now_or_never().expect("free");
        let mut large = turns.wait(place(1, 1), 11);
        let mut after = turns.wait(place(1, 2), 4);
        assert!((&mut large).now_or_never().is_none() && (&mut after).now_or_never().is_none());
        drop(small);
        let alone = (&mut large).now_or_never().expect("nothing else is in flight");
        assert!((&mut after).now_or_never().is_none());
        drop(alone);
        assert!((&mut after).now_or_never().is_some());
        assert_eq!(in_flight(&turns), 0);
        assert!(turns_of(0).wait(place(1, 0), 5).now_or_never().is_some());
    }

    #[test]
    fn the_endpoints_windows_are_a_limit_too() {
        let window = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let now = Arc::clone(&window);
        let turns = Turns::new(10, move || now.load(std::sync::atomic::Ordering::Relaxed));
        let first = turns
            .wait(place(1, 0), 4)
            .now_or_never()
            .expect("one goes always");
        let mut second = turns.wait(place(1, 1), 4);
        let mut third = turns.wait(place(1, 2), 4);
        assert!((&mut second).now_or_never().is_none());
        window.store(8, std::sync::atomic::Ordering::Relaxed);
        drop(first);
        assert!((&mut second).now_or_never().is_some() && (&mut third).now_or_never().is_some());
    }

    #[test]
    fn a_get_that_leaves_lets_the_others_go() {
        let turns = turns_of(10);
        let held = turns.wait(place(1, 0), 5).now_or_never().expect("free");
        let large = turns.wait(place(1, 1), 10);
        let mut small = turns.wait(place(1, 2), 5);
        drop(large);
        let second = (&mut small)
            .now_or_never()
            .expect("there was room for it all the time");
        let not_taken = turns.wait(place(1, 3), 5);
        drop((held, second));
        assert_eq!(in_flight(&turns), 5, "granted");
        drop(not_taken);
        assert_eq!(in_flight(&turns), 0);
        assert!(turns.lock().queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_wakes_who_waits_for_it() {
        let turns = turns_of(1);
        let served = Arc::new(Mutex::new(Vec::new()));
        // The last in the queue starts to wait first.
        let tasks: Vec<_> = (0..20)
            .rev()
            .map(|position| {
                let (turns, served) = (turns.clone(), Arc::clone(&served));
                tokio::spawn(async move {
                    let _turn = turns.wait(place(1, position), 1).await;
                    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                    served.lock().unwrap().push(position);
                })
            })
            .collect();
        let started = tokio::time::Instant::now();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(started.elapsed().as_secs(), 20, "one at a time");
        let mut expected: Vec<u64> = (0..19).collect();
        expected.insert(0, 19);
        assert_eq!(
            *served.lock().unwrap(),
            expected,
            "19 came when the queue was empty"
        );
    }

    #[derive(Debug, Clone)]
    enum Act {
        Wait { load: u64, position: u64, bytes: usize },
        Leave(prop::sample::Index),
        Take,
        End(prop::sample::Index),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => (0_u64..3, 0_u64..4, 0_usize..30)
                .prop_map(|(load, position, bytes)| Act::Wait { load, position, bytes }),
            1 => any::<prop::sample::Index>().prop_map(Act::Leave),
            1 => Just(Act::Take),
            2 => any::<prop::sample::Index>().prop_map(Act::End),
        ]
    }

    proptest! {
            /// Against a model: a sorted list of the queue, and the bytes of those that were served.
            #[test]
            fn the_queue_is_served_in_order_and_within_the_limit(
                limit in 0_usize..40,
                acts in prop::collection::vec(act(), 1..120),
            ) {
                let turns = turns_of(limit);
                // Waiting, granted, and taken turns.
                let mut line: Vec<(TurnPosition, usize, Waiting)> = Vec::new();
                let mut granted: Vec<(usize, Waiting)> = Vec::new();
                let mut taken: Vec<Turn> = Vec::new();
                for act in acts {
                    match act {
                        Act::Wait { load, position, bytes } => {
                            let place = place(load, position);
                            let at = line.partition_point(|other| other.0 <= place);
                            line.insert(at, (place, bytes, turns.wait(place, bytes)));
                        }
                        Act::Leave(i) if !line.is_empty() => drop(line.remove(i.index(line.len()))),
                        Act::Take => for (_, waiting) in granted.drain(..) {
                            taken.push(waiting.now_or_never().expect("granted"));
                        },
                        Act::End(i) if granted.is_empty() && !taken.is_empty() => {
                            drop(taken.swap_remove(i.index(taken.len())));
                        }
                        // A grant that is never taken.
                        Act::End(i) if !granted.is_empty() => drop(granted.swap_remove(i.index(granted.len()))),
                        _ => {}
                    }
                    loop {
                        let bytes = granted.iter().map(|(bytes, _)| bytes).sum::<usize>()
                            + taken.iter().map(|turn| turn.bytes).sum::<usize>();
                        let some = !granted.is_empty() || !taken.is_empty();
                        match line.first() {
                            Some(first) if !some || bytes + first.1 <= limit => {
                                let (_, bytes, waiting) = line.remove(0);
                                granted.push((bytes, waiting));
                            }
                            _ => {
                                prop_assert_eq!(in_flight(&turns), bytes);
                                break;
                            }
                        }
                    }
                    prop_assert_eq!(turns.lock().queue.len(), line.len());
                    for (_, _, waiting) in &mut line {
                        prop_assert!(waiting.now_or_never().is_none());
                    }
                }
                drop((line, granted, taken));
    let state = turns.lock();
                prop_assert_eq!((state.in_flight_bytes, state.turns, state.queue.len()), (0, 0, 0));
            }
        }
}
