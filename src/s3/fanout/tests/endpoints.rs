//! Tests of the choice of an endpoint: shares, windows, breakers, and addresses that come and go.

use std::array;

use futures::FutureExt;
use tokio::task::JoinHandle;

use super::*;

const EVEN: [Does; 4] = [Does::Serve(40); 4];

#[tokio::test(start_paused = true)]
async fn endpoints_that_are_alike_get_alike() {
    let fleet = Fleet::new(&EVEN);
    fleet.load_many(&attempts(POLICY), 400, 16).await;
    for number in 0..4 {
        let share = fleet.share(number);
        assert!((0.15..=0.35).contains(&share), "{number}: {share}");
    }
}

/// A name may have other addresses every minute: rates over all of them must not fall with each that leaves.
#[tokio::test(start_paused = true)]
async fn totals_keep_addresses_that_left() {
    let endpoints = Endpoints::new(OPTIONS);
    endpoints.update(&[address(0)], |_| ());
    let permit = || async {
        let mut permit = endpoints.permit(Class::Load, MIB, &Route::default()).await;
        permit.answered(0);
        permit.moved(MIB);
        permit
    };
    permit().await.end(Outcome::Answered { status: 206 });
    let late = permit().await;
    endpoints.update(&[address(1)], |_| ());
    late.end(Outcome::Answered { status: 503 });
    permit().await.end(Outcome::Answered { status: 206 });
    assert_eq!(endpoints.states().len(), 1);
    let totals = endpoints.totals();
    assert_eq!(
        (totals.ok, totals.throttled, totals.bytes),
        (2, 1, 3 * MIB as u64)
    );
}

/// How `parts` of 4 MiB are dealt to endpoints of so many MiB a second, which share that among what is under way; after
/// some rounds to learn, over some more.
async fn dealt<const N: usize>(speeds: [usize; N], parts: usize) -> Vec<[usize; N]> {
    let endpoints = unseen(N);
    let numbers: [usize; N] = array::from_fn(|number| number);
    let mut rounds = Vec::new();
    for _ in 0..60 {
        let permit = |_| {
            let route = Route::default();
            let permit = endpoints.permit(Class::Load, 4 * MIB, &route).now_or_never();
            permit.expect("there is room")
        };
        let mut permits: Vec<_> = (0..parts).map(permit).collect();
        let dealt = numbers.map(|number| {
            let there = permits
                .iter()
                .filter(|permit| permit.address() == address(number));
            there.count()
        });
        let takes = |permit: &Permit<()>| {
            let number = (0..N)
                .find(|&number| address(number) == permit.address())
                .unwrap();
            Duration::from_secs_f64(4.0 * dealt[number] as f64 / speeds[number] as f64)
        };
        permits.sort_by_key(takes);
        let began = Instant::now();
        permits.iter_mut().for_each(|permit| permit.answered(0));
        for mut permit in permits {
            tokio::time::sleep_until(began + takes(&permit)).await;
            permit.moved(4 * MIB);
            permit.end(Outcome::Answered { status: 206 });
        }
        rounds.push(dealt);
    }
    rounds.split_off(20)
}

/// With one too many at one of them, all would wait for that one.
#[tokio::test(start_paused = true)]
async fn parts_are_dealt_so_that_all_endpoints_end_together() {
    for dealt in dealt([40; 4], 8).await {
        assert_eq!(dealt, [2; 4]);
    }
    for mut dealt in dealt([40; 4], 9).await {
        dealt.sort_unstable();
        assert_eq!(dealt, [2, 2, 2, 3]);
    }
    for dealt in dealt([40, 20, 40, 20], 12).await {
        assert_eq!(dealt, [4, 2, 4, 2]);
    }
    for dealt in dealt([40; 12], 48).await {
        assert_eq!(dealt, [4; 12]);
    }
    let halves = array::from_fn(|number| if number < 6 { 40 } else { 20 });
    for dealt in dealt::<12>(halves, 36).await {
        assert_eq!(dealt, array::from_fn(|number| if number < 6 { 4 } else { 2 }));
    }
}

#[tokio::test(start_paused = true)]
async fn loads_get_what_all_endpoints_can_give() {
    let fleet = Fleet::new(&EVEN);
    let attempts = attempts(POLICY);
    fleet.load_many(&attempts, 32, 16).await;
    let reached = |mib: usize, began: Instant| mib as f64 / 160.0 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    for _ in 0..20 {
        fleet.load_many(&attempts, 32, 16).await;
    }
    let one_by_one = reached(20 * 32 * 4, began);
    assert!(one_by_one > 0.9, "{one_by_one}");
    // As several loads have it, of which one always has parts to send.
    let began = Instant::now();
    fleet.load_many(&attempts, 20 * 32, 16).await;
    let several = reached(20 * 32 * 4, began);
    assert!(several > 0.95, "{several}");
    assert_eq!(fleet.totals().hedges, 0, "nothing is slow");
}

#[tokio::test(start_paused = true)]
async fn a_slow_one_gets_little_and_holds_up_little() {
    let fleet = Fleet::new(&EVEN);
    let attempts = attempts(POLICY);
    let even = fleet.load_many(&attempts, 400, 16).await;
    fleet.set(2, Does::Serve(4));
    fleet.load_many(&attempts, 50, 16).await;
    fleet.came.lock().unwrap().clear();
    let slowed = fleet.load_many(&attempts, 400, 16).await;
    assert!(fleet.share(2) <= 0.1, "{}", fleet.share(2));
    let p99 = |mut took: Vec<Duration>| {
        took.sort_unstable();
        took[took.len() * 99 / 100]
    };
    let (even, slowed) = (p99(even), p99(slowed));
    assert!(slowed < 2 * even, "{slowed:?} where all alike take {even:?}");
}

/// Its slowness is forgotten after a while, also where requests without a body come all the time.
#[tokio::test(start_paused = true)]
async fn one_that_recovers_is_used_again() {
    for heads in [false, true] {
        let fleet = Fleet::new(&EVEN);
        let attempts = attempts(POLICY);
        let endpoints = fleet.endpoints.clone();
        let asking = heads.then(|| {
            tokio::spawn(async move {
                loop {
                    head(&endpoints, |_| Duration::from_millis(5)).await;
                    sleep(SECOND / 20).await;
                }
            })
        });
        fleet.set(1, Does::Serve(4));
        fleet.load_many(&attempts, 200, 16).await;
        fleet.set(1, Does::Serve(40));
        fleet.load_many(&attempts, 600, 16).await;
        fleet.came.lock().unwrap().clear();
        fleet.load_many(&attempts, 200, 16).await;
        assert!(fleet.share(1) >= 0.15, "{heads}: {}", fleet.share(1));
        asking.inspect(JoinHandle::abort);
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_refuses_is_left_alone_and_comes_back() {
    let fleet = Fleet::new(&EVEN);
    let attempts = attempts(POLICY);
    fleet.set(3, Does::Refuse);
    fleet.load_many(&attempts, 200, 8).await;
    let state = fleet.state(3);
    assert!(state.totals.lost <= 20, "the breaker opens: {state:?}");
    assert_ne!(state.breaker, BreakerPhase::Closed);
    fleet.set(3, Does::Serve(40));
    fleet.load_many(&attempts, 400, 8).await;
    assert_eq!(fleet.state(3).breaker, BreakerPhase::Closed);
    assert!(fleet.share(3) > 0.05, "{}", fleet.share(3));
}

#[tokio::test(start_paused = true)]
async fn where_all_fail_they_are_tried_all_the_same() {
    let fleet = Fleet::new(&[Does::Refuse; 2]);
    let attempts = attempts(AttemptPolicy { retries: 0, ..POLICY });
    for _ in 0..20 {
        assert_eq!(fleet.load(&attempts, MIB).await, Err(Failed::Lost));
    }
    for number in 0..2 {
        fleet.set(number, Does::Serve(40));
    }
    assert!(
        fleet.load(&attempts, MIB).await.is_ok(),
        "at once, not when the breakers close"
    );
}

/// What waits while all are gone comes together when they are back: from many gateways, at the same few endpoints.
#[tokio::test(start_paused = true)]
async fn while_none_works_requests_are_spread() {
    let endpoints = unseen(20);
    let ask = async || endpoints.permit(Class::Load, 0, &Route::default()).await;
    while closed(&endpoints) > 0 {
        ask().await.end(Outcome::Lost(Loss::Connection));
    }
    let mut asked = [0; 20];
    let mut under_way = Vec::new();
    for _ in 0..400 {
        let permit = ask().await;
        let at = (0..20).find(|&number| address(number) == permit.address());
        asked[at.unwrap()] += 1;
        under_way.push(permit);
    }
    assert!(asked.iter().all(|&asked| (5..=50).contains(&asked)), "{asked:?}");
}

/// Those that have failed for long are not as good as one that did just now.
#[tokio::test(start_paused = true)]
async fn where_none_works_those_that_failed_for_long_are_left_alone() {
    let endpoints = unseen(4);
    let fails = async |but: Option<SocketAddr>| {
        let permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
        match but == Some(permit.address()) {
            true => permit.end(Outcome::Answered { status: 200 }),
            false => permit.end(Outcome::Lost(Loss::Connection)),
        }
    };
    let last = address(3);
    for _ in 0..1000 {
        fails(Some(last)).await;
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    while closed(&endpoints) > 0 {
        fails(None).await;
    }
    for _ in 0..20 {
        let permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
        assert_eq!(permit.address(), last);
    }
}

/// What they have in common has failed, such as the network. The first that works again does not get everything.
#[tokio::test(start_paused = true)]
async fn once_one_works_again_after_all_had_failed_all_are_tried() {
    let endpoints = unseen(20);
    let request = async |outcome| {
        let permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
        let at = permit.address();
        permit.end(outcome);
        at
    };
    while closed(&endpoints) > 0 {
        request(Outcome::Lost(Loss::Connection)).await;
    }
    for _ in 0..200 {
        request(Outcome::Answered { status: 200 }).await;
    }
    assert_eq!(closed(&endpoints), 20);
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_one_gets_a_smaller_window() {
    let fleet = Fleet::new(&[Does::Serve(40), Does::Throttle]);
    fleet.load_many(&attempts(POLICY), 100, 8).await;
    let state = fleet.state(1);
    assert!(state.totals.throttled > 0);
    assert!(state.window_bytes < OPTIONS.window.start, "{state:?}");
}

#[tokio::test(start_paused = true)]
async fn windows_grow_where_nobody_ever_waits_for_room() {
    let endpoints = unseen(4);
    let at_first = endpoints.window_bytes();
    for _ in 0..100 {
        // As loads do it: no more than all windows together.
        let states = endpoints.states();
        let ranges: usize = states.iter().map(|state| state.window_bytes / (4 * MIB)).sum();
        let mut permits = Vec::new();
        for _ in 0..ranges {
            let route = Route::default();
            let permit = endpoints.permit(Class::Load, 4 * MIB, &route).now_or_never();
            permits.push(permit.expect("there is room"));
        }
        sleep(Duration::from_millis(100)).await;
        for mut permit in permits {
            permit.answered(0);
            permit.moved(4 * MIB);
            permit.end(Outcome::Answered { status: 206 });
        }
    }
    let now = endpoints.window_bytes();
    assert!(now > 2 * at_first, "{now}: the more is asked for, the more comes");
}

#[tokio::test(start_paused = true)]
async fn a_hedge_has_room_where_all_windows_are_full() {
    let endpoints = unseen(2);
    let route = Route::default();
    let permit = |route: &Route| {
        endpoints
            .permit(Class::Load, OPTIONS.window.start, route)
            .now_or_never()
    };
    let _full = (permit(&route).unwrap(), permit(&Route::default()).unwrap());
    assert!(permit(&Route::default()).is_none());
    let hedge = route.then(Start::Hedge);
    let first = endpoints.try_permit(OPTIONS.window.start, &hedge);
    assert!(first.is_some());
    assert!(
        endpoints.try_permit(MIB, &Route::default()).is_some() && endpoints.try_permit(MIB, &hedge).is_none(),
        "elsewhere, and no more than two windows"
    );
}

#[tokio::test(start_paused = true)]
async fn addresses_come_and_go_under_load() {
    let fleet = Fleet::new(&EVEN);
    let attempts = attempts(POLICY);
    let load = tokio::spawn({
        let (fleet, attempts) = (fleet.clone(), Arc::clone(&attempts));
        async move { fleet.load_many(&attempts, 400, 16).await }
    });
    sleep(SECOND).await;
    fleet.set(4, Does::Serve(40));
    fleet
        .endpoints
        .update(&[address(0), address(1), address(2), address(4)], |_| ());
    let gone = fleet.came.lock().unwrap()[&address(3)];
    load.await.unwrap();
    assert!(fleet.share(4) > 0.1, "{}", fleet.share(4));
    let after = fleet.came.lock().unwrap()[&address(3)];
    assert!(
        after - gone <= OPTIONS.window.start,
        "what was under way ends, nothing else begins"
    );
    assert!(fleet.endpoints.states().iter().all(|state| state.in_flight == 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_before_the_first_address_waits_for_it() {
    let fleet = Fleet::new(&[]);
    let route = Route::default();
    let mut head = Box::pin(fleet.endpoints.permit(Class::Load, 0, &route));
    assert!((&mut head).now_or_never().is_none());
    fleet.endpoints.update(&[address(0)], |_| ());
    assert_eq!(head.await.address(), address(0));
}

#[tokio::test(start_paused = true)]
async fn loads_go_first_and_stores_are_not_starved() {
    let endpoints: Endpoints<()> = Endpoints::new(OPTIONS);
    endpoints.update(&[address(0)], |_| ());
    let all = OPTIONS.window.start;
    let full = endpoints.permit(Class::Load, all, &Route::default()).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let wait = |class: Class| {
        let (endpoints, order) = (endpoints.clone(), Arc::clone(&order));
        tokio::spawn(async move {
            let permit = endpoints.permit(class, all, &Route::default()).await;
            order.lock().unwrap().push(class);
            sleep(SECOND).await;
            drop(permit);
        })
    };
    let mut tasks = vec![wait(Class::Store), wait(Class::Store)];
    tokio::task::yield_now().await;
    tasks.extend((0..8).map(|_| wait(Class::Load)));
    tokio::task::yield_now().await;
    // A request that leaves the queue is not missed.
    let route = Route::default();
    let left = Box::pin(endpoints.permit(Class::Load, all, &route)).now_or_never();
    assert!(left.is_none());
    drop(full);
    for task in tasks {
        task.await.unwrap();
    }

    let [load, store] = [Class::Load, Class::Store];
    let expected = [load, load, load, store, load, load, load, store, load, load];
    assert_eq!(*order.lock().unwrap(), expected);
    let state = &endpoints.states()[0];
    assert_eq!((state.in_flight, state.in_flight_bytes), (0, 0));
}

/// Half of them are poor. Whenever two of these were drawn, the very cheapest of all got the HEAD.
#[tokio::test(start_paused = true)]
async fn heads_are_spread_over_those_that_are_not_poor() {
    let endpoints = unseen(16);
    let good = |at: SocketAddr| (0..8).find(|&number| address(number) == at);
    let takes = |at: SocketAddr| match good(at) {
        Some(number) => Duration::from_micros(2000 + 100 * number as u64),
        None => Duration::from_millis(40),
    };
    let mut asked = [0; 8];
    for round in 0..1600 {
        let at = head(&endpoints, takes).await;
        if let Some(number) = good(at).filter(|_| round >= 800) {
            asked[number] += 1;
        }
    }
    assert!(asked.iter().sum::<u32>() > 720, "{asked:?}");
    assert!(asked.iter().all(|&asked| asked < 220), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn heads_wait_for_nobody() {
    let endpoints: Endpoints<()> = Endpoints::new(OPTIONS);
    endpoints.update(&[address(0)], |_| ());
    let _full = endpoints
        .permit(Class::Load, OPTIONS.window.start, &Route::default())
        .await;
    let route = Route::default();
    let _waits = Box::pin(endpoints.permit(Class::Load, MIB, &route));
    let head = endpoints.permit(Class::Load, 0, &Route::default()).now_or_never();
    assert!(head.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_not_sent_says_nothing_of_its_endpoint() {
    let endpoints: Endpoints<()> = Endpoints::new(OPTIONS);
    endpoints.update(&[address(0)], |_| ());
    let take = async |route: &Route| {
        let mut permit = endpoints.permit(Class::Load, MIB, route).await;
        permit.waits(route);
        assert_eq!(route.sent(), None, "it is not slow yet");
        sleep(60 * SECOND).await;
        permit
    };
    for _ in 0..2 * OPTIONS.breaker.failures {
        drop(take(&Route::default()).await);
    }
    let state = &endpoints.states()[0];
    assert_eq!((state.breaker, state.latency_us), (BreakerPhase::Closed, None));

    let route = Route::default();
    let mut permit = take(&route).await;
    permit.goes(&route);
    assert_eq!(route.sent(), Some(Instant::now()));
    sleep(Duration::from_millis(5)).await;
    permit.answered(0);
    sleep(Duration::from_millis(1)).await;
    permit.moved(MIB);
    permit.end(Outcome::Answered { status: 206 });
    assert_eq!(endpoints.states()[0].latency_us, Some(5000), "without the wait");

    // Once it goes, being given up after a long silence counts again.
    for _ in 0..OPTIONS.breaker.failures {
        let route = Route::default();
        let mut permit = take(&route).await;
        permit.goes(&route);
        sleep(SECOND).await;
        drop(permit);
    }
    assert_ne!(endpoints.states()[0].breaker, BreakerPhase::Closed);
}
