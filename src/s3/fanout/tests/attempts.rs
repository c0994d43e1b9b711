//! Tests of attempts: retries, moves and hedges, their budgets, and the one writer of a slot.

use std::sync::atomic::{AtomicU32, Ordering};

use super::super::attempts::CALLS_A_RETRY;
use super::*;

const ALIKE: [Does; 3] = [Does::Serve(40); 3];

/// Endpoints of whose requests it is known how long they take.
async fn known(attempts: &Arc<Attempts>) -> Fleet {
    let fleet = Fleet::new(&ALIKE);
    fleet.load_many(attempts, 100, 3).await;
    fleet
}

/// A load whose first attempt goes to an endpoint that does this; the others serve. Also tells which one that is.
async fn load_from(
    does: Does,
    fleet: &Fleet,
    attempts: &Arc<Attempts>,
) -> (SocketAddr, Result<SocketAddr, Failed>) {
    for number in 0..ALIKE.len() {
        fleet.set(number, does);
    }
    let load = tokio::spawn({
        let (fleet, attempts) = (fleet.clone(), Arc::clone(attempts));
        async move { fleet.load(&attempts, 4 * MIB).await }
    });
    tokio::task::yield_now().await;
    let (first, others): (Vec<_>, Vec<_>) =
        (0..ALIKE.len()).partition(|&number| fleet.state(number).in_flight > 0);
    for number in others {
        fleet.set(number, Does::Serve(40));
    }
    (address(first[0]), load.await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn retries_are_bounded_by_count_budget_and_deadline() {
    let made = AtomicU32::new(0);
    let failing = |error| {
        made.store(0, Ordering::Relaxed);
        let made = &made;
        move |_: Route| async move {
            made.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(error)
        }
    };
    let soon = Instant::now() + 60 * SECOND;
    for (error, expected) in [
        (Failed::Throttled, 5),
        (Failed::Lost, 5),
        (Failed::NotFound, 1),
        (Failed::Late, 1),
    ] {
        let result = Attempts::new(POLICY).run(soon, failing(error)).await;
        assert_eq!((result, made.load(Ordering::Relaxed)), (Err(error), expected));
    }
    let attempts = Attempts::new(AttemptPolicy { budget: 3, ..POLICY });
    let attempt = failing(Failed::Throttled);
    for _ in 0..10 {
        assert!(attempts.run(soon, &attempt).await.is_err());
    }
    assert_eq!(made.load(Ordering::Relaxed), 10 + 3, "the budget is spent");
    // An endpoint that hangs until the deadline earns nothing; one that answers does, whatever the answer.
    for (error, retries) in [(Failed::Late, 0), (Failed::NotFound, 2)] {
        for _ in 0..2 * CALLS_A_RETRY {
            assert!(attempts.run(soon, failing(error)).await.is_err());
        }
        let attempt = failing(Failed::Throttled);
        for _ in 0..3 {
            assert!(attempts.run(soon, &attempt).await.is_err());
        }
        assert_eq!(made.load(Ordering::Relaxed), 3 + retries, "{error:?}");
    }

    let deadline = Instant::now() + Duration::from_millis(1);
    let result = Attempts::new(POLICY).run(deadline, failing(Failed::Lost)).await;
    assert!(
        result.is_err() && Instant::now() <= deadline,
        "never past the deadline"
    );
}

#[tokio::test(start_paused = true)]
async fn a_lost_request_moves_at_once_and_for_nothing() {
    let fleet = Fleet::new(&[Does::Serve(40), Does::Refuse, Does::Serve(40)]);
    // Not a single token.
    let broke = attempts(AttemptPolicy { budget: 0, ..POLICY });
    fleet.load_many(&broke, 200, 8).await;
    assert!(fleet.state(1).totals.lost > 0);
    assert_eq!(fleet.totals().retries, fleet.state(1).totals.lost);

    // A second loss costs one; and no answer at all is no loss of a connection.
    let fleet = Fleet::new(&[Does::Refuse; 3]);
    assert_eq!(fleet.load(&broke, MIB).await, Err(Failed::Lost));
    assert_eq!(fleet.totals().retries, 1);
    let fleet = Fleet::new(&[Does::Throttle; 3]);
    assert_eq!(fleet.load(&broke, MIB).await, Err(Failed::Throttled));
    assert_eq!(fleet.totals().retries, 0);
}

#[tokio::test(start_paused = true)]
async fn a_retry_goes_where_the_call_has_not_been() {
    let fleet = Fleet::new(&[Does::Throttle, Does::Throttle, Does::Throttle, Does::Serve(40)]);
    let began = Instant::now();
    for _ in 0..20 {
        let all = attempts(POLICY);
        assert_eq!(fleet.load(&all, MIB).await, Ok(address(3)));
    }
    assert!(began.elapsed() < SECOND, "without pauses: {:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn of_many_dead_endpoints_all_may_be_tried() {
    let fleet = Fleet::new(&[Does::Refuse; 20]);
    let alive = address(7);
    let attempt = |route: Route| {
        let endpoints = &fleet.endpoints;
        async move {
            let permit = endpoints.permit(Class::Load, MIB, &route).await;
            let at = permit.address();
            let (outcome, result) = match at == alive {
                true => (Outcome::Answered { status: 206 }, Ok(at)),
                false => (Outcome::Lost(Loss::Connection), Err(Failed::Unreached)),
            };
            permit.end(outcome);
            result
        }
    };
    let soon = Instant::now() + SECOND;
    for _ in 0..50 {
        assert_eq!(Attempts::new(POLICY).run(soon, attempt).await, Ok(alive));
    }
    // But none where there may be no retry; and each but the first costs a token.
    let fleet = Fleet::new(&[Does::Refuse; 20]);
    for policy in [
        AttemptPolicy { retries: 0, ..POLICY },
        AttemptPolicy { budget: 0, ..POLICY },
    ] {
        let made = AtomicU32::new(0);
        let never = |route: Route| {
            let (endpoints, made) = (&fleet.endpoints, &made);
            async move {
                made.fetch_add(1, Ordering::Relaxed);
                drop(endpoints.permit(Class::Load, MIB, &route).await);
                Err::<(), _>(Failed::Unreached)
            }
        };
        let all = Attempts::new(policy);
        assert_eq!(all.run(soon, never).await, Err(Failed::Unreached));
        assert_eq!(made.load(Ordering::Relaxed), policy.retries.min(1) + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_hangs_is_hedged() {
    let attempts = attempts(POLICY);
    let fleet = known(&attempts).await;
    let began = Instant::now();
    let (first, at) = load_from(Does::Hang, &fleet, &attempts).await;
    assert_ne!(at, Ok(first));
    assert!(began.elapsed() < 3 * SECOND, "{:?}", began.elapsed());
    assert_eq!(fleet.totals().hedges, 1);
}

/// It shares its endpoint's speed with more than was usual, and takes as much longer.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_slow_for_its_company_is_not_hedged() {
    let attempts = attempts(POLICY);
    let fleet = known(&attempts).await;
    fleet.load_many(&attempts, 100, 18).await;
    assert_eq!(fleet.totals().hedges, 0);
}

#[tokio::test(start_paused = true)]
async fn a_hedge_takes_over_from_one_that_stops() {
    for (stop_after, by_hedge) in [(MIB, true), (3 * MIB, true), (usize::MAX, false)] {
        let attempts = attempts(POLICY);
        let fleet = known(&attempts).await;
        let (first, at) = load_from(Does::StopAfter(stop_after), &fleet, &attempts).await;
        assert_eq!(at.unwrap() != first, by_hedge, "{stop_after}");
        let states = fleet.endpoints.states();
        assert!(states.iter().all(|state| state.in_flight == 0), "{states:#?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_tenth_of_the_calls_is_hedged_at_most() {
    let attempts = attempts(POLICY);
    let fleet = known(&attempts).await;
    fleet.set(0, Does::Serve(1));
    fleet.set(1, Does::Serve(1));
    fleet.load_many(&attempts, 300, 8).await;
    let Requests { hedges, ok, .. } = fleet.totals();
    assert!(hedges > 0 && hedges * 10 <= ok, "{hedges} hedges, {ok} requests");
    let none = super::attempts(AttemptPolicy { hedges: 0, ..POLICY });
    let fleet = known(&none).await;
    fleet.set(0, Does::Serve(1));
    fleet.load_many(&none, 100, 8).await;
    assert_eq!(fleet.totals().hedges, 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_leaves_nothing_behind() {
    let attempts = attempts(POLICY);
    let fleet = known(&attempts).await;
    for number in 0..3 {
        fleet.set(number, Does::Hang);
    }
    let loads = tokio::time::timeout(30 * SECOND, fleet.load(&attempts, 4 * MIB)).await;
    assert!(loads.is_err());
    let states = fleet.endpoints.states();
    assert!(
        states
            .iter()
            .all(|state| (state.in_flight, state.in_flight_bytes) == (0, 0)),
        "{states:#?}"
    );
}

#[tokio::test(start_paused = true)]
async fn only_one_holds_what_is_handed_over() {
    let value = Handover::new(7);
    let held = value.claim(Start::First).await;
    held.progress(1, 4);
    assert!(value.take().is_none() && (value.left() - 0.75).abs() < 0.01);
    let claim = tokio::spawn({
        let value = value.clone();
        async move { *value.claim(Start::Hedge).await }
    });
    value.wanted().await;
    drop(held);
    assert_eq!(claim.await.unwrap(), 7);
    assert_eq!(value.take(), Some(7));
}
