//! Tests of what makes an endpoint look cheap, and what must not.

use std::array;

use super::*;

/// How many of a thousand HEADs go to each of twelve.
async fn heads(takes: impl Fn(SocketAddr) -> Duration) -> [usize; 12] {
    let endpoints = unseen(12);
    let numbers: [usize; 12] = array::from_fn(|number| number);
    let mut at = Vec::new();
    for _ in 0..1000 {
        at.push(head(&endpoints, &takes).await);
    }
    numbers.map(|number| at.iter().filter(|at| **at == address(number)).count())
}

/// Many gateways ask; they must not all go to the same one.
#[tokio::test(start_paused = true)]
async fn heads_go_to_all_that_are_not_slow() {
    let takes = |fast: u64, at| Duration::from_millis(if at == address(3) { fast } else { 10 });
    let to = heads(|at| takes(5, at)).await;
    assert!(
        (110..200).contains(&to[3]) && to.iter().all(|&to| to > 40),
        "{to:?}"
    );
    let slow = heads(|at| takes(100, at)).await;
    assert!(slow[3] < 10, "{slow:?}");
    // Two of them are drawn together now and then.
    let slow = heads(|at| Duration::from_millis(if at < address(2) { 100 } else { 10 })).await;
    assert!(slow[0] + slow[1] < 20, "{slow:?}");
}

/// It answers faster than the others send.
#[tokio::test(start_paused = true)]
async fn one_that_denies_gets_no_more_than_others() {
    let mut script = [Does::Serve(40); 12];
    script[5] = Does::Deny;
    let fleet = Fleet::new(&script);
    let attempts = attempts(POLICY);
    let turns = Arc::new(tokio::sync::Semaphore::new(24));
    let loads = (0..600).map(async |_| {
        let _turn = turns.acquire().await.unwrap();
        fleet.load(&attempts, 4 * MIB).await
    });
    let ended = futures::future::join_all(loads).await;
    let denied = ended
        .iter()
        .filter(|ended| **ended == Err(Failed::Denied))
        .count();
    assert!((1..=50).contains(&denied), "{denied} of 600");
}

/// Its answer may come before the body is sent, and then all of it would count as moved.
#[tokio::test(start_paused = true)]
async fn an_upload_that_was_refused_says_nothing_of_speed() {
    let endpoints = unseen(2);
    let upload = async |takes, status| {
        let mut permit = endpoints.permit(Class::Store, MIB, &Route::default()).await;
        sleep(takes).await;
        permit.answered(MIB);
        permit.end(Outcome::Answered { status });
    };
    for _ in 0..8 {
        upload(SECOND, 200).await;
    }
    for _ in 0..20 {
        upload(SECOND / 1000, 412).await;
    }
    assert!(both_are_used(&endpoints, Class::Store).await);
}

/// A lease or a list of keys takes as long as any request, for its few bytes.
#[tokio::test(start_paused = true)]
async fn small_uploads_say_nothing_of_throughput() {
    let endpoints = unseen(2);
    for _ in 0..8 {
        moves(&endpoints, Class::Load, MIB, SECOND / 100).await;
        moves(&endpoints, Class::Store, MIB, SECOND / 100).await;
    }
    for _ in 0..4 {
        moves(&endpoints, Class::Store, 100, SECOND / 10).await;
    }
    assert!(both_are_used(&endpoints, Class::Load).await);
    assert!(both_are_used(&endpoints, Class::Store).await);
    // Nor is its endpoint late while it is under way.
    let _small = endpoints.permit(Class::Store, 100, &Route::default()).await;
    sleep(SECOND / 10).await;
    assert!(both_are_used(&endpoints, Class::Load).await);
}

/// A load that ends early gives up its ranges.
#[tokio::test(start_paused = true)]
async fn what_was_given_up_at_once_makes_no_endpoint_look_fast() {
    let endpoints = unseen(1);
    for _ in 0..8 {
        moves(&endpoints, Class::Load, MIB, SECOND / 100).await;
    }
    endpoints.update(&[0, 1].map(address), |_| ());
    for _ in 0..3 {
        assert!(both_are_used(&endpoints, Class::Load).await);
    }
}

/// A quota is the bucket's, and loads go on.
#[tokio::test(start_paused = true)]
async fn uploads_that_are_refused_say_nothing_of_loads() {
    let endpoints = unseen(2);
    for _ in 0..8 {
        moves(&endpoints, Class::Load, MIB, SECOND / 100).await;
    }
    for _ in 0..8 {
        let permit = endpoints.permit(Class::Store, MIB, &Route::default()).await;
        permit.end(Outcome::Answered { status: 403 });
    }
    assert!(both_are_used(&endpoints, Class::Load).await);
}
