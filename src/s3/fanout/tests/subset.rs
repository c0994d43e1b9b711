//! Tests of the part of many endpoints that a gateway uses.

use futures::FutureExt;

use super::*;

/// Of 40 endpoints, those that a gateway uses.
async fn used(endpoints: &Endpoints<()>, bytes: usize, requests: usize) -> Vec<SocketAddr> {
    let mut used = Vec::new();
    for _ in 0..requests {
        let permit = endpoints.permit(Class::Load, bytes, &Route::default()).await;
        used.push(permit.address());
        permit.end(Outcome::Answered { status: 200 });
    }
    used.sort_unstable();
    used.dedup();
    used
}

#[tokio::test(start_paused = true)]
async fn of_many_a_subset_is_used_and_the_next_takes_the_place_of_one_that_fails() {
    let endpoints = unseen(40);
    let first = used(&endpoints, 0, 1000).await;
    assert_eq!(first.len(), OPTIONS.subset);
    // The fleet loses one that is used.
    let dead = first[3];
    while endpoints
        .states()
        .iter()
        .any(|state| state.address == dead && state.breaker == BreakerPhase::Closed)
    {
        let permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
        let outcome = match permit.address() == dead {
            true => Outcome::Lost(Loss::Connection),
            false => Outcome::Answered { status: 200 },
        };
        permit.end(outcome);
    }
    let then = used(&endpoints, 0, 1000).await;
    assert_eq!(then.len(), OPTIONS.subset);
    let new: Vec<_> = then.iter().filter(|address| !first.contains(address)).collect();
    assert_eq!((new.len(), then.contains(&dead)), (1, false));
    // It comes back, and so do the first.
    sleep(OPTIONS.breaker.open).await;
    assert_eq!(used(&endpoints, 0, 1000).await, first);
}

/// Of many endpoints most have closed breakers, since nobody asks them.
#[tokio::test(start_paused = true)]
async fn all_are_out_of_reach_when_those_of_the_subset_fail() {
    for count in [1, 40] {
        let endpoints = unseen(count);
        assert!(!endpoints.are_out_of_reach());
        let mut failed = 0;
        while !endpoints.are_out_of_reach() {
            let permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
            permit.end(Outcome::Lost(Loss::Timeout));
            failed += 1;
            assert!(failed < 1000);
        }
        assert_eq!(closed(&endpoints) > 0, count == 40);
        sleep(OPTIONS.breaker.open).await;
        used(&endpoints, 0, 100).await;
        assert!(!endpoints.are_out_of_reach());
    }
    assert!(!unseen(0).are_out_of_reach());
}

/// They take nobody's room, so a lookup of many chunks must not lead its ranges to more endpoints.
#[tokio::test(start_paused = true)]
async fn heads_don_t_widen_a_subset() {
    let endpoints = unseen(40);
    for _ in 0..100 {
        head(&endpoints, |_| SECOND / 100).await;
    }
    let asking = (0..200).map(|_| head(&endpoints, |_| SECOND / 100));
    let mut at = futures::future::join_all(asking).await;
    at.sort_unstable();
    at.dedup();
    assert_eq!(at.len(), OPTIONS.subset);
}

/// Of a chunk that is larger than others, at every endpoint.
#[tokio::test(start_paused = true)]
async fn large_uploads_stay_in_the_subset() {
    let endpoints = unseen(40);
    for _ in 0..200 {
        moves(&endpoints, Class::Store, 2 * MIB, SECOND / 10).await;
    }
    let mut at = Vec::new();
    for _ in 0..200 {
        at.push(moves(&endpoints, Class::Store, 20 * MIB, SECOND).await);
    }
    at.sort_unstable();
    at.dedup();
    assert!(at.len() <= OPTIONS.subset, "{}", at.len());
}

/// A busy one that works is better than an idle one that does not.
#[tokio::test(start_paused = true)]
async fn one_of_a_subset_that_is_slow_is_not_taken_because_it_is_idle() {
    let endpoints = unseen(40);
    let range = async || endpoints.permit(Class::Load, MIB, &Route::default()).await;
    let permits = futures::future::join_all((0..OPTIONS.subset).map(|_| range())).await;
    let slow = permits[0].address();
    for mut permit in permits.into_iter().rev() {
        permit.answered(0);
        sleep(SECOND / if permit.address() == slow { 1 } else { 1000 }).await;
        permit.moved(MIB);
        permit.end(Outcome::Answered { status: 206 });
    }
    let permits = futures::future::join_all((0..3 * OPTIONS.subset).map(|_| range())).await;
    assert!(permits.iter().all(|permit| permit.address() != slow));
}

#[tokio::test(start_paused = true)]
async fn a_subset_without_room_widens_and_narrows_again() {
    let endpoints = unseen(40);
    let all = OPTIONS.window.start;
    let mut permits = Vec::new();
    for _ in 0..30 {
        let route = Route::default();
        let permit = endpoints.permit(Class::Load, all, &route).now_or_never();
        permits.push(permit.expect("another has room"));
    }
    let mut at: Vec<_> = permits.iter().map(Permit::address).collect();
    at.sort_unstable();
    at.dedup();
    assert_eq!(at.len(), 30, "each is full");
    permits
        .into_iter()
        .for_each(|permit| permit.end(Outcome::Answered { status: 200 }));
    assert!(used(&endpoints, 0, 2000).await.len() >= 30);
    sleep(60 * SECOND).await;
    assert_eq!(used(&endpoints, 0, 1000).await.len(), OPTIONS.subset);
}
