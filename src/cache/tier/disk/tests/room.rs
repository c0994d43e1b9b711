//! Room on the disks: which chunks stay, and which go.

use proptest::prelude::*;

use super::*;

/// The bytes that a chunk of the bench takes.
const CHUNK: u64 = 16_384;

#[tokio::test]
async fn every_policy_keeps_each_disk_below_its_watermark() {
    for policy in POLICIES {
        let bench = Bench::new(2, |options| {
            options.policy = policy;
            options.size_bytes = 20 * CHUNK;
            options.watermark_percent = 52;
        });
        for chunk in 0..100 {
            bench.store([chunk]).await;
            assert!(bench.has(chunk), "what was just written stays ({policy:?})");
            for disk in 0..2 {
                let bytes: u64 = chunk_files(bench.path(disk)).iter().map(|file| file.1).sum();
                assert!(bytes <= 10 * CHUNK);
            }
            let _ = bench.read(chunk / 2).await;
        }
        bench.check().await;
        assert_eq!(bench.one(0).chunks + bench.one(1).chunks, 20);
        assert_eq!(
            (bench.one(0).evicted, bench.one(1).evicted),
            (40, 40),
            "they take turns"
        );
    }
}

#[tokio::test]
async fn uses_and_touches_keep_a_chunk() {
    let bench = Bench::new(1, |options| options.size_bytes = 10 * CHUNK);
    bench.store(0..10).await;
    bench.read(0).await.unwrap();
    bench.disk.touch(&bench.key(1));
    bench.disk.touch(&bench.key(99));
    assert_eq!(bench.write(2).await.unwrap(), Wrote::Present);
    bench.store(10..17).await;
    assert!((0..3).all(|chunk| bench.has(chunk)) && !(3..10).any(|chunk| bench.has(chunk)));
}

#[tokio::test]
async fn pinned_chunks_stay() {
    for policy in POLICIES {
        let bench = Bench::new(1, |options| {
            options.policy = policy;
            options.size_bytes = 10 * CHUNK;
        });
        bench.store(0..10).await;
        (0..5).for_each(|chunk| bench.disk.pin(&bench.key(chunk)));
        bench.disk.pin(&bench.key(0));
        bench.store(100..150).await;
        assert!((0..5).all(|chunk| bench.has(chunk)), "{policy:?}");
        (145..150).for_each(|chunk| bench.disk.pin(&bench.key(chunk)));
        assert_eq!(bench.write(200).await.unwrap(), Wrote::NoRoom, "all are pinned");
        (0..5).for_each(|chunk| bench.disk.unpin(&bench.key(chunk)));
        bench.disk.unpin(&bench.key(1));
        bench.store(201..221).await;
        assert!(bench.has(0), "pinned twice");
        // S3-FIFO has them in its main queue, which new ones that nobody uses hardly touch.
        if policy != EvictionPolicy::S3Fifo {
            assert!(!(1..5).any(|chunk| bench.has(chunk)), "{policy:?}");
        }
        bench.disk.remove(&bench.key(0)).await;
        assert!(!bench.has(0), "damage goes whoever pins it");
        bench.check().await;
    }
}

#[tokio::test]
async fn an_object_that_never_fits_is_not_tried() {
    let bench = Bench::new(1, |options| {
        options.size_bytes = 10 * CHUNK;
        options.watermark_percent = 50;
        options.tenant_bytes = Some(3 * CHUNK);
    });
    bench.store([1]).await;
    for payload_len in [6 * 16_384, 4 * 16_384, 3 * 16_384 - 4095] {
        assert_eq!(
            bench.write_to(&space("", payload_len), 1).await.unwrap(),
            Wrote::NoRoom
        );
    }
    assert_eq!(
        bench.write_to(&space("", 3 * 16_384 - 4096), 1).await.unwrap(),
        Wrote::Stored
    );
    assert!(!bench.has(1));
    bench.check().await;
}

#[tokio::test]
async fn a_tenant_over_its_share_evicts_its_own() {
    for policy in POLICIES {
        let bench = Bench::new(2, |options| {
            options.policy = policy;
            options.tenant_bytes = Some(6 * CHUNK);
        });
        let greedy = space("greedy", 3 * 4096);
        let also_greedy = space("greedy", 3 * 4096 - 1);
        bench.store(0..5).await;
        for chunk in 0..50 {
            assert_eq!(bench.write_to(&greedy, chunk).await.unwrap(), Wrote::Stored);
            assert_eq!(bench.write_to(&also_greedy, chunk).await.unwrap(), Wrote::Stored);
        }
        assert!((0..5).all(|chunk| bench.has(chunk)), "{policy:?}");
        assert_eq!(bench.one(0).chunks + bench.one(1).chunks, 5 + 6);
        bench.check().await;
    }
}

#[tokio::test(start_paused = true)]
async fn chunks_expire() {
    let mut bench = Bench::new(1, |options| options.ttl = Some(Duration::from_mins(1)));
    bench.store([1]).await;
    tokio::time::advance(Duration::from_secs(30)).await;
    bench.store([2, 3]).await;
    bench.disk.pin(&bench.key(2));
    bench.read(1).await.unwrap();
    tokio::time::advance(Duration::from_secs(30)).await;
    assert!(!bench.has(1) && bench.has(2), "a use does not make it younger");
    assert!(matches!(bench.read(1).await, Err(DiskError::Absent)));
    // One that is past its time is written anew.
    bench.store([1]).await;
    assert!(bench.has(1));
    bench.check().await;
    tokio::time::advance(Duration::from_secs(30)).await;
    bench.disk.expire().await;
    assert_eq!((bench.one(0).chunks, bench.one(0).expired), (2, 2));
    assert!(!bench.has(2));
    bench.read(2).await.expect("it is pinned");
    bench.disk.unpin(&bench.key(2));
    assert!(bench.read(2).await.is_err());
    bench.disk.expire().await;
    assert_eq!((bench.one(0).chunks, bench.one(0).expired), (1, 3));
    bench.check().await;

    // Files that are older than that are removed at start; the files' clock is not the paused one.
    bench.store([4]).await;
    let file = std::fs::File::open(bench.file(0, &bench.key(4))).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(61))
        .unwrap();
    let file = std::fs::File::open(bench.file(0, &bench.key(1))).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(50))
        .unwrap();
    bench.reopen();
    assert!(bench.has(1) && !bench.has(4));
    tokio::time::advance(Duration::from_secs(10)).await;
    assert!(!bench.has(1));
    bench.check().await;
}

#[tokio::test(start_paused = true)]
async fn writes_remove_what_is_past_its_time() {
    let bench = Bench::new(1, |options| options.ttl = Some(Duration::from_mins(1)));
    bench.store(0..40).await;
    tokio::time::advance(Duration::from_mins(1)).await;
    bench.store(100..103).await;
    assert_eq!((bench.one(0).chunks, bench.one(0).expired), (3, 40));
    bench.check().await;
}

#[derive(Debug, Clone)]
enum Act {
    Write(bool, u32),
    Read(bool, u32),
    Remove(bool, u32),
    Pin(u32),
    Unpin(u32),
    Reopen,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (any::<bool>(), 0_u32..30).prop_map(|(small, chunk)| Act::Write(small, chunk)),
        4 => (any::<bool>(), 0_u32..30).prop_map(|(small, chunk)| Act::Read(small, chunk)),
        1 => (any::<bool>(), 0_u32..30).prop_map(|(small, chunk)| Act::Remove(small, chunk)),
        1 => (0_u32..30).prop_map(Act::Pin),
        1 => (0_u32..30).prop_map(Act::Unpin),
        1 => Just(Act::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_index_is_the_files_whatever_happens(
        acts in prop::collection::vec(act(), 1..60),
        policy in prop::sample::select(POLICIES.to_vec()),
        has_quota in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut bench = Bench::new(2, |options| {
                options.policy = policy;
                options.size_bytes = 7 * CHUNK;
                options.watermark_percent = 90;
                options.tenant_bytes = has_quota.then_some(8 * CHUNK);
            });
            let (large, small) = (bench.space.clone(), space("small", 1));
            let of = |is_small| if is_small { &small } else { &large };
            for act in acts {
                match act {
                    Act::Write(is_small, chunk) => {
                        let wrote = bench.write_to(of(is_small), chunk).await.unwrap();
                        let has = bench.disk.has(&(of(is_small).key(), hash(chunk)), Instant::now());
                        assert_eq!(has, wrote != Wrote::NoRoom);
                    }
                    Act::Read(is_small, chunk) => {
                        let has = bench.disk.has(&(of(is_small).key(), hash(chunk)), Instant::now());
                        assert_eq!(bench.read_from(of(is_small), chunk).await.is_ok(), has);
                    }
                    Act::Remove(is_small, chunk) => {
                        bench.disk.remove(&(of(is_small).key(), hash(chunk))).await;
                    }
                    Act::Pin(chunk) => bench.disk.pin(&bench.key(chunk)),
                    Act::Unpin(chunk) => bench.disk.unpin(&bench.key(chunk)),
                    Act::Reopen => bench.reopen(),
                }
                bench.check().await;
            }
        });
    }
}
