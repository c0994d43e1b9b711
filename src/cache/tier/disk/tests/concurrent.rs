//! Many calls at once, and callers that don't wait for the end.

use std::fs;
use std::future::Future;
use std::pin::pin;

use futures::FutureExt;

use super::*;

/// Polls a future a few times, then drops it. True if it was done.
async fn give_up_after<T>(polls: usize, work: impl Future<Output = T>) -> bool {
    tokio::select! {
        biased;
        _ = work => true,
        () = async { for _ in 0..polls { tokio::task::yield_now().await; } } => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writers_readers_and_removers_see_whole_chunks_or_none() {
    for policy in POLICIES {
        let bench = Arc::new(Bench::new(2, |options| {
            options.policy = policy;
            options.size_bytes = 12 * 16_384;
            options.tenant_bytes = Some(20 * 16_384);
        }));
        let other = space("other", 9000);
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let (bench, other) = (Arc::clone(&bench), other.clone());
                let mut random = fastrand::Rng::with_seed(task);
                tokio::spawn(async move {
                    for _ in 0..300 {
                        let chunk = random.u32(0..40);
                        let space = if random.bool() { &bench.space } else { &other };
                        let key = (space.key(), hash(chunk));
                        match random.u32(0..12) {
                            0..5 => drop(bench.write_to(space, chunk).await.unwrap()),
                            5..9 => match bench.read_from(space, chunk).await {
                                Ok(()) | Err(DiskError::Absent) => {}
                                Err(error) => panic!("{error}"),
                            },
                            9 => bench.disk.remove(&key).await,
                            10 => {
                                bench.disk.pin(&key);
                                tokio::task::yield_now().await;
                                bench.disk.unpin(&key);
                            }
                            _ => drop(give_up_after(random.usize(0..3), bench.write_to(space, chunk)).await),
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        bench.check().await;
        assert_eq!(bench.one(0).errors + bench.one(1).errors, 0);
    }
}

#[tokio::test]
async fn dropped_futures_leave_nothing_behind() {
    let bench = Bench::new(2, |options| {
        options.size_bytes = 12 * 16_384;
        options.depth = 1;
    });
    // Both disks are busy, so those wait.
    let turns = (bench.disk.0.turn(0).await, bench.disk.0.turn(1).await);
    for chunk in 0..100 {
        assert!(!give_up_after(2, bench.write(chunk)).await);
    }
    drop(turns);
    bench.check().await;
    assert_eq!(bench.one(0).chunks + bench.one(1).chunks, 0, "none had begun");

    let mut done = 0;
    for round in 0..400 {
        let (chunk, polls) = (round % 40, round as usize % 7);
        done += usize::from(give_up_after(polls, bench.write(chunk)).await);
        done += usize::from(give_up_after(polls, bench.read(chunk / 2)).await);
        done += usize::from(give_up_after(polls, bench.disk.remove(&bench.key(chunk / 3))).await);
    }
    assert!(done < 1200, "some were dropped");
    bench.check().await;
    // Dropped calls give their slots back, the last one a moment after its turn.
    while bench.arena.stats().used_bytes > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_chunk_that_is_being_removed_is_written_after_that() {
    let bench = Bench::new(1, |_| {});
    for round in 0..50 {
        bench.store([1]).await;
        // The file's removal has begun, and nobody waits for its end.
        give_up_after(0, bench.disk.remove(&bench.key(1))).await;
        assert!(!bench.has(1), "round {round}");
        bench.store([1]).await;
        bench.read(1).await.unwrap();
        bench.disk.remove(&bench.key(1)).await;
    }
    bench.check().await;
}

#[tokio::test]
async fn a_chunk_that_is_deleted_while_it_is_written_does_not_come() {
    let bench = Bench::new(1, |options| options.depth = 1);
    let before = Instant::now();
    // The disk is busy, so that one waits.
    let turn = bench.disk.0.turn(0).await;
    let in_vain = pin!(bench.write(1));
    let mut in_vain = in_vain.fuse();
    assert!(futures::poll!(&mut in_vain).is_pending());
    bench.disk.delete(&bench.key(1)).await;
    let anew = pin!(bench.write(1));
    let mut anew = anew.fuse();
    assert!(futures::poll!(&mut anew).is_pending(), "after the other one");
    drop(turn);
    let (in_vain, anew) = futures::join!(in_vain, anew);
    assert_eq!((in_vain.unwrap(), anew.unwrap()), (Wrote::Deleted, Wrote::Stored));
    bench.read(1).await.unwrap();
    let object = object(&bench.arena, &bench.space, 1);
    let late = bench
        .disk
        .write(&bench.space, &hash(1), object, before, Below::Has)
        .await;
    assert_eq!(late.unwrap(), Wrote::Present, "it was stored again since");
    bench.disk.delete(&bench.key(1)).await;
    assert!(!bench.has(1));
    bench.check().await;
}

#[tokio::test]
async fn the_second_writer_of_a_chunk_was_told_that_it_is_there_before_the_first_had_written_it() {
    let bench = Bench::new(1, |options| options.depth = 1);
    // The first write finds a folder at the name of its file.
    let in_its_way = bench.path(0).join("tmp/0.part");
    fs::create_dir_all(&in_its_way).unwrap();
    let turn = bench.disk.0.turn(0).await;
    let (mut fails, mut waits) = (pin!(bench.write(1)), pin!(bench.write(1)));
    assert!(futures::poll!(&mut fails).is_pending() && futures::poll!(&mut waits).is_pending());
    drop(turn);
    let (failed, wrote) = futures::join!(fails, waits);
    assert!(matches!(failed, Err(DiskError::Io { .. })), "{failed:?}");
    assert_eq!(wrote.unwrap(), Wrote::Stored, "in its stead");
    bench.read(1).await.unwrap();

    // The same where the first is given up, and where all goes well.
    let turn = bench.disk.0.turn(0).await;
    let mut given_up = Box::pin(bench.write(2));
    let (mut waits, mut third) = (pin!(bench.write(2)), pin!(bench.write(2)));
    assert!(futures::poll!(&mut given_up).is_pending() && futures::poll!(&mut waits).is_pending());
    drop(given_up);
    assert!(futures::poll!(&mut waits).is_pending() && futures::poll!(&mut third).is_pending());
    drop(turn);
    let (stored, present) = futures::join!(waits, third);
    assert_eq!(
        (stored.unwrap(), present.unwrap()),
        (Wrote::Stored, Wrote::Present)
    );
    fs::remove_dir(in_its_way).unwrap();
    bench.check().await;
}

#[test]
fn a_runtime_that_goes_down_leaves_nothing_behind() {
    let bench = Bench::new(1, |options| options.size_bytes = 12 * 16_384);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(1)
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        bench.store(0..10).await;
        for chunk in 0..30 {
            give_up_after(1, bench.write(chunk % 20)).await;
            give_up_after(1, bench.disk.remove(&bench.key(chunk / 2))).await;
        }
    });
    // Some were waiting for a thread.
    drop(runtime);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(bench.check());
}
