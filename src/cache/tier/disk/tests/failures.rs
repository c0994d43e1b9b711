//! Disks that break.

use std::fs;
use std::io;

use super::*;
use crate::cache::tier::disk::folder::Mark;

/// Writes new chunks until one is stored; how many failed.
async fn failures_until_stored(bench: &Bench, chunks: std::ops::Range<u32>) -> usize {
    for (failed, chunk) in chunks.enumerate() {
        match bench.write(chunk).await {
            Ok(Wrote::Stored) => return failed,
            Err(DiskError::Io { .. }) => assert!(!bench.has(chunk)),
            other => panic!("{other:?}"),
        }
    }
    panic!("none was stored");
}

#[tokio::test]
async fn a_disk_whose_folder_is_gone_is_taken_out_and_the_other_serves() {
    let bench = Bench::new(2, |_| {});
    bench.store(0..20).await;
    let on_first: Vec<u32> = (0..20)
        .filter(|&chunk| bench.file(0, &bench.key(chunk)).exists())
        .collect();
    assert_eq!(on_first.len(), 10);
    // Something else is there under its name now, and must not be written to.
    fs::remove_dir_all(bench.path(0)).unwrap();
    fs::write(bench.path(0), "a file").unwrap();
    bench.disk.remove(&bench.key(on_first[0])).await;
    assert_eq!(failures_until_stored(&bench, 100..200).await, 3);
    for chunk in 0..20 {
        let is_lost = on_first.contains(&chunk);
        assert_eq!(bench.has(chunk), !is_lost);
        assert_eq!(bench.read(chunk).await.is_ok(), !is_lost);
    }
    let stats = bench.one(0);
    assert!(matches!(stats.state, DiskState::Failed(_)), "{stats:?}");
    assert_eq!((stats.chunks, stats.bytes, stats.errors), (0, 0, 3));
    assert_eq!((bench.one(1).state, bench.one(1).chunks), (DiskState::Ok, 11));
    bench.store(on_first).await;
    bench.check().await;
    assert_eq!(fs::read_to_string(bench.path(0)).unwrap(), "a file");
}

#[tokio::test]
async fn reads_that_fail_take_a_disk_out_and_an_empty_tier_goes_on() {
    let mut bench = Bench::new(1, |options| options.failures = 2);
    bench.store(0..4).await;
    // Its space is a file.
    let folder = bench.path(0).join(bench.space.key().to_string());
    let aside = bench.path(0).join("aside");
    fs::rename(&folder, &aside).unwrap();
    fs::write(&folder, "").unwrap();
    assert!(matches!(bench.read(0).await, Err(DiskError::Io { .. })));
    assert!(!bench.has(0), "what can't be read is no hit");
    assert!(bench.read(1).await.is_err());
    assert!((0..4).all(|chunk| !bench.has(chunk)));
    assert!(matches!(bench.one(0).state, DiskState::Failed(_)));
    assert_eq!(bench.write(9).await.unwrap(), Wrote::NoRoom);
    assert!(matches!(bench.read(9).await, Err(DiskError::Absent)));
    bench.disk.remove(&bench.key(2)).await;
    bench.disk.touch(&bench.key(2));

    // Repaired, it is used again after a restart.
    bench.close();
    fs::remove_file(&folder).unwrap();
    fs::rename(&aside, &folder).unwrap();
    bench.reopen();
    for chunk in 0..4 {
        bench.read(chunk).await.unwrap();
    }
    bench.check().await;
}

#[tokio::test]
async fn a_write_to_a_disk_that_was_taken_out_meanwhile_is_not_called_stored() {
    let bench = Bench::new(1, |options| options.failures = 1);
    let index = &bench.disk.0.index;
    let placed = index.place(bench.key(1), "", 16_384, Instant::now(), Mark::Clean);
    let index::Placed::On(mut reservation) = placed else {
        panic!("there is room")
    };
    assert!(reservation.take_room().0);
    assert!(index.has_failed(0, &io::Error::from_raw_os_error(5)));
    assert_eq!(reservation.commit(), (Wrote::NoRoom, None));
    assert!(!bench.has(1));
}

#[tokio::test]
async fn failures_count_only_in_a_row() {
    let bench = Bench::new(1, |_| {});
    bench.store([1]).await;
    for _ in 0..10 {
        for errno in [5, 30] {
            let failed = bench
                .disk
                .0
                .not_written(0, 4096, io::Error::from_raw_os_error(errno));
            assert!(matches!(failed, Err(DiskError::Io { .. })));
        }
        bench.read(1).await.unwrap();
    }
    assert_eq!((bench.one(0).state, bench.one(0).errors), (DiskState::Ok, 20));
}

#[tokio::test]
async fn a_full_file_system_is_no_failure() {
    let bench = Bench::new(1, |_| {});
    bench.store(0..20).await;
    for errno in [28, 122, 28, 28] {
        let full = bench
            .disk
            .0
            .not_written(0, 16_384, io::Error::from_raw_os_error(errno));
        assert_eq!(full.unwrap(), Wrote::NoRoom);
        bench.check().await;
    }
    let stats = bench.one(0);
    assert_eq!(
        (stats.state, stats.chunks, stats.evicted, stats.errors),
        (DiskState::Ok, 4, 16, 0)
    );
}

#[tokio::test]
async fn a_full_file_system_is_left_alone_for_a_while() {
    let bench = Bench::new(2, |options| options.size_bytes = 10 * 16_384);
    bench.store(0..4).await;
    let full = || {
        bench
            .disk
            .0
            .not_written(0, 16_384, io::Error::from_raw_os_error(28))
    };
    assert_eq!(full().unwrap(), Wrote::NoRoom);
    // A write's own bytes would have been among those that it had.
    assert_eq!((bench.one(0).chunks, bench.one(1).chunks), (1, 2));
    bench.store(10..18).await;
    assert_eq!((bench.one(0).chunks, bench.one(1).chunks), (1, 10));
    // With no room anywhere they take turns.
    let mut not_stored = 0;
    for chunk in 100..1000 {
        not_stored += usize::from(bench.write(chunk).await.unwrap() == Wrote::NoRoom);
        if bench.one(0).chunks == 10 {
            break;
        }
    }
    assert_eq!((bench.one(0).chunks, not_stored), (10, 4));
    bench.check().await;
}

#[tokio::test]
async fn a_disk_that_can_not_be_used_at_start_is_left_out() {
    let mut bench = Bench::new(2, |_| {});
    bench.store(0..10).await;
    bench.close();
    fs::remove_dir_all(bench.path(0)).unwrap();
    fs::write(bench.path(0), "").unwrap();
    bench.reopen();
    assert_eq!((0..10).filter(|&chunk| bench.has(chunk)).count(), 5);
    let states: Vec<_> = bench
        .disk
        .stats()
        .disks
        .into_iter()
        .map(|disk| (disk.path, disk.state))
        .collect();
    assert_eq!(states[0], (bench.path(1).to_owned(), DiskState::Ok));
    assert!(states[1].0 == bench.path(0) && matches!(states[1].1, DiskState::Failed(_)));
    let json = serde_json::to_value(bench.disk.stats()).unwrap();
    assert_eq!(json["disks"][0]["state"], "ok");
    assert!(json["disks"][1]["state"]["failed"].is_string(), "{json}");
    bench.store(20..25).await;

    bench.close();
    bench.options.paths.truncate(1);
    let unusable = Disk::open(&bench.options).map(|_| ()).unwrap_err().to_string();
    assert!(
        unusable.contains(&bench.path(0).display().to_string()),
        "{unusable}"
    );
    bench.options.paths.clear();
    assert!(matches!(Disk::open(&bench.options), Err(DiskError::NoPaths)));
}

/// Every caller waited for ever.
#[tokio::test]
async fn a_disk_that_hangs_is_taken_out() {
    let bench = Bench::new(1, |options| {
        options.depth = 1;
        options.timeout = Duration::from_millis(100);
    });
    bench.store([1, 2]).await;
    // Opening a pipe to read waits for a writer.
    let file = bench.file(0, &bench.key(1));
    fs::remove_file(&file).unwrap();
    let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, &file, pipe, mode, 0).unwrap();
    let slot = || {
        bench
            .arena
            .try_reserve(bench.space.layout().object_len())
            .unwrap()
    };
    let (one, two) = (hash(1), hash(2));
    let hangs = bench.disk.read(&bench.space, &one, slot());
    let waits = bench.disk.read(&bench.space, &two, slot());
    let ((kept, hangs), (slot, waits)) = futures::future::join(hangs, waits).await;
    assert!(
        kept.is_none() && matches!(hangs, Err(DiskError::Late { .. })),
        "{hangs:?}"
    );
    assert!(
        slot.is_some() && matches!(waits, Err(DiskError::Out)),
        "{waits:?}"
    );
    let stats = bench.one(0);
    assert!(
        matches!(&stats.state, DiskState::Failed(why) if why.contains("100ms")),
        "{stats:?}"
    );
    assert_eq!(
        (bench.has(2), bench.write(3).await.unwrap()),
        (false, Wrote::NoRoom)
    );
    // The runtime's end waits for who still reads.
    std::mem::forget(fs::File::options().read(true).write(true).open(&file).unwrap());
}

/// It stayed out until kvgate was started again.
#[tokio::test(start_paused = true)]
async fn a_disk_that_was_repaired_is_read_anew_and_used_again() {
    let bench = Bench::new(1, |options| {
        options.failures = 1;
        options.retry = Duration::from_millis(20);
    });
    bench.store(0..4).await;
    bench.write_dirty(4).await.unwrap();
    let aside = bench.path(0).with_extension("aside");
    fs::rename(bench.path(0), &aside).unwrap();
    fs::write(bench.path(0), "").unwrap();
    let broken = bench.disk.0.not_written(0, 4096, io::Error::from_raw_os_error(5));
    assert!(matches!(broken, Err(DiskError::Io { .. })));
    assert_eq!(bench.write(9).await.unwrap(), Wrote::NoRoom);
    bench.disk.delete(&bench.key(2)).await;

    let retry = tokio::spawn({
        let disk = bench.disk.clone();
        async move { disk.retry().await }
    });
    // The paused clock goes on only when an attempt has ended, so these are some four attempts.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!bench.has(1));
    fs::remove_file(bench.path(0)).unwrap();
    fs::rename(&aside, bench.path(0)).unwrap();
    let up = async {
        while !bench.has(1) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), up).await.unwrap();
    retry.abort();
    for chunk in [0, 1, 3, 4] {
        bench.read(chunk).await.unwrap();
    }
    assert!(!bench.has(2), "it was deleted meanwhile");
    let hashes: Vec<_> = bench
        .disk
        .take_backlog()
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    assert_eq!((hashes, bench.one(0).state), (vec![hash(4)], DiskState::Ok));
    bench.store([9]).await;
    bench.check().await;
}
