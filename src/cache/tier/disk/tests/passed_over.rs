//! Files that are of no use now, as their key is not here.

use super::*;

#[tokio::test]
async fn a_file_that_is_passed_over_is_no_hit_and_makes_way_for_another() {
    let bench = Bench::new(1, |_| ());
    bench.store(0..2).await;
    std::fs::write(
        bench.file(0, &bench.key(0)),
        vec![7; bench.space.layout().object_len()],
    )
    .unwrap();
    bench.disk.pass_over(bench.key(0));
    bench.disk.pass_over(bench.key(1));
    assert!(!bench.has(0) && !bench.has(1));
    assert_eq!(bench.one(0).chunks, 2, "both stay");

    assert_eq!(bench.write(0).await.unwrap(), Wrote::Stored);
    assert!(bench.has(0) && !bench.has(1));
    bench.read(0).await.unwrap();
    bench.disk.all_of_use();
    assert!(bench.has(1));
    bench.read(1).await.unwrap();
    bench.check().await;
}

/// It is the only copy, and its key may come back.
#[tokio::test]
async fn an_unsent_file_that_is_passed_over_stays() {
    let bench = Bench::new(1, |_| ());
    bench.soil([0]).await;
    bench.disk.pass_over(bench.key(0));
    assert_eq!(bench.write(0).await.unwrap(), Wrote::Present);
    assert_eq!(bench.disk.unsent(&bench.key(0)), Unsent::Here);
    bench.read(0).await.unwrap();
    bench.check().await;
}
