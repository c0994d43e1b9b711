//! Chunks that the tier below does not have are never forgotten, and their files never unlinked.

use std::fs;
use std::io;

use super::*;

fn lost(bench: &Bench, disk: usize) -> Vec<String> {
    let Ok(files) = fs::read_dir(bench.path(disk).join("lost")) else {
        return Vec::new();
    };
    let mut names: Vec<_> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn lost_name(bench: &Bench, chunk: u32) -> String {
    format!("{}-{}", bench.space.key(), hash(chunk))
}

fn flip(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(file).unwrap().permissions().mode();
    let mut bytes = fs::read(file).unwrap();
    bytes[5000] ^= 1;
    fs::write(file, bytes).unwrap();
    // A write takes the bit away from everybody but root.
    fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
}

/// The backlog was over when its disk was taken out.
#[tokio::test]
async fn an_unsent_chunk_outlives_its_disk() {
    let bench = Bench::new(2, |options| options.failures = 1);
    bench.soil(0..6).await;
    let of_first: Vec<u32> = (0..6)
        .filter(|chunk| bench.file(0, &bench.key(*chunk)).exists())
        .collect();
    assert_eq!(of_first.len(), 3);
    let broken = bench.disk.0.not_written(0, 4096, io::Error::from_raw_os_error(5));
    assert!(matches!(broken, Err(DiskError::Io { .. })));
    for chunk in 0..6 {
        let expected = if of_first.contains(&chunk) {
            Unsent::Out
        } else {
            Unsent::Here
        };
        assert_eq!(bench.disk.unsent(&bench.key(chunk)), expected);
    }
    assert_eq!((bench.one(0).chunks, bench.one(0).dirty), (0, 3));
    // While it is out one is deleted, one is sent by somebody else, and the last one's file goes.
    let [deleted, sent, gone] = of_first[..] else {
        panic!()
    };
    bench.disk.delete(&bench.key(deleted)).await;
    bench.disk.clean(&bench.key(sent)).await;
    fs::remove_file(bench.file(0, &bench.key(gone))).unwrap();
    assert_eq!(bench.disk.unsent(&bench.key(deleted)), Unsent::No);
    bench.disk.take_backlog();
    bench.disk.0.take_up(0);
    let backlog = bench.disk.take_backlog();
    // Its file says so still; asking S3 once more does no harm.
    let chunks: Vec<_> = backlog.chunks.iter().map(|(_, chunk)| *chunk).collect();
    assert_eq!(chunks, [hash(sent)]);
    assert_eq!(backlog.missing, [bench.key(gone)]);
    assert_eq!(bench.disk.unsent(&bench.key(gone)), Unsent::No);
    bench.disk.clean(&bench.key(sent)).await;
    assert_eq!(bench.one(0).dirty, 0);
    bench.check().await;
}

/// Its second write came to a disk that works, and the first one's disk is back.
#[tokio::test]
async fn the_same_unsent_chunk_on_two_disks_is_one() {
    let bench = Bench::new(2, |options| options.failures = 1);
    bench.soil([1]).await;
    let first = usize::from(!bench.file(0, &bench.key(1)).exists());
    let broken = bench
        .disk
        .0
        .not_written(first, 4096, io::Error::from_raw_os_error(5));
    assert!(broken.is_err());
    bench.soil([1]).await;
    assert_eq!(bench.disk.unsent(&bench.key(1)), Unsent::Here);
    assert_eq!((bench.one(first).dirty, bench.one(1 - first).dirty), (0, 1));
    bench.disk.0.take_up(first);
    assert!(bench.disk.take_backlog().missing.is_empty());
    bench.read(1).await.unwrap();
    bench.disk.clean(&bench.key(1)).await;
    assert_eq!(bench.disk.unsent(&bench.key(1)), Unsent::No);
    bench.check().await;
}

/// They were unlinked, and the backlog was over.
#[tokio::test]
async fn an_unsent_file_that_is_no_good_is_moved_aside() {
    let mut bench = Bench::new(1, |_| {});
    bench.soil(0..4).await;
    bench.disk.remove(&bench.key(0)).await;
    assert!(bench.has(0), "only who gives it up may");
    assert!(bench.disk.set_aside(&bench.key(0)).await);
    assert!(!bench.disk.set_aside(&bench.key(0)).await, "once");
    assert_eq!(
        (bench.has(0), lost(&bench, 0)),
        (false, vec![lost_name(&bench, 0)])
    );
    assert_eq!(bench.one(0).dirty, 3);
    // The index says otherwise than the disk.
    fs::File::options()
        .write(true)
        .open(bench.file(0, &bench.key(1)))
        .unwrap()
        .set_len(100)
        .unwrap();
    assert!(matches!(bench.read(1).await, Err(DiskError::Damaged { .. })));
    assert!(bench.has(1) && bench.file(0, &bench.key(1)).exists());
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.damaged), (2, 1));
    let mut both = vec![lost_name(&bench, 0), lost_name(&bench, 1)];
    both.sort();
    assert_eq!(lost(&bench, 0), both);
    bench.reopen();
    assert_eq!(bench.disk.take_backlog().damaged, 0, "told once");
    bench.check().await;
}

/// It cost the disk.
#[tokio::test]
async fn a_file_that_nothing_can_be_done_with_costs_its_chunk() {
    let mut bench = Bench::new(1, |_| {});
    bench.soil(0..3).await;
    bench.close();
    let bad = bench.file(0, &bench.key(1));
    fs::File::options()
        .write(true)
        .open(&bad)
        .unwrap()
        .set_len(100)
        .unwrap();
    // It can't be moved aside.
    fs::write(bench.path(0).join("lost"), "no folder").unwrap();
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.damaged), (2, 1));
    assert!(bad.exists(), "nothing is unlinked");
    for chunk in [0, 2] {
        bench.read(chunk).await.unwrap();
    }
}

#[tokio::test]
async fn files_moved_aside_are_bounded_and_the_newest_stay() {
    let bench = Bench::new(1, |options| options.lost_bytes = 40_000);
    bench.soil(0..5).await;
    fs::create_dir(bench.path(0).join("lost")).unwrap();
    fs::write(bench.path(0).join("lost/notes"), vec![0; 100_000]).unwrap();
    for chunk in 0..5 {
        flip(&bench.file(0, &bench.key(chunk)));
        assert!(bench.disk.set_aside(&bench.key(chunk)).await);
    }
    let mut left = vec![lost_name(&bench, 3), lost_name(&bench, 4), "notes".to_owned()];
    left.sort();
    assert_eq!(lost(&bench, 0), left);
}

/// They were removed with all of their space.
#[tokio::test]
async fn unsent_chunks_without_a_space_json_wait_for_their_space() {
    let mut bench = Bench::new(1, |_| {});
    bench.soil(0..3).await;
    bench.store(10..13).await;
    bench.close();
    let json = bench.path(0).join(format!("{}/space.json", bench.space.key()));
    fs::remove_file(&json).unwrap();
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.homeless.len()), (0, 3));
    assert!((0..13).all(|chunk| !bench.has(chunk)));
    bench.disk.adopt(&space("other", 100)).await;
    assert!(bench.disk.is_homeless(bench.space.key()));
    // An engine has stored one of them anew.
    bench.soil([1]).await;
    bench.disk.adopt(&bench.space).await;
    assert!(!bench.disk.is_homeless(bench.space.key()));
    assert_eq!(bench.disk.take_backlog().chunks.len(), 3);
    for chunk in 0..3 {
        bench.read(chunk).await.unwrap();
    }
    assert!(json.exists());
    bench.check().await;
}

/// It was removed, so the newer kvgate did not know what they are either.
#[tokio::test]
async fn unsent_chunks_of_a_space_of_a_newer_kvgate_keep_their_space_json() {
    let mut bench = Bench::new(1, |_| {});
    bench.soil(0..2).await;
    bench.store(10..12).await;
    bench.close();
    let json = bench.path(0).join(format!("{}/space.json", bench.space.key()));
    let ours = bench.space.canonical_json().to_owned();
    let newer = ours.replace("\"format\":1", "\"format\":99");
    assert_ne!(ours, newer);
    fs::write(&json, &newer).unwrap();
    bench.reopen();
    assert_eq!(bench.disk.take_backlog().homeless.len(), 2);
    assert_eq!(fs::read_to_string(&json).unwrap(), newer);
    bench.close();
    fs::write(&json, ours).unwrap();
    bench.reopen();
    assert_eq!(bench.disk.take_backlog().chunks.len(), 2);
    for chunk in 0..2 {
        bench.read(chunk).await.unwrap();
    }
    bench.check().await;
}

#[tokio::test]
async fn a_missing_space_json_is_taken_from_another_disk() {
    let mut bench = Bench::new(2, |_| {});
    bench.soil(0..6).await;
    bench.close();
    fs::remove_file(bench.path(0).join(format!("{}/space.json", bench.space.key()))).unwrap();
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.homeless.len()), (6, 0));
    for chunk in 0..6 {
        bench.read(chunk).await.unwrap();
    }
    bench.check().await;
}

/// An engine that stored one anew, after its time, had its only file unlinked.
#[tokio::test]
async fn an_unsent_chunk_past_its_time_is_present_to_a_write() {
    let bench = Bench::new(1, |options| options.ttl = Some(Duration::from_millis(1)));
    bench.soil([1]).await;
    while bench.has(1) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(bench.write_dirty(1).await.unwrap(), Wrote::Present);
    bench.read(1).await.unwrap();
    bench.disk.expire().await;
    assert_eq!(bench.one(0).chunks, 1);
}

#[tokio::test]
async fn a_chunk_written_to_the_last_tier_is_there_after_a_restart() {
    let mut bench = Bench::new(1, |_| {});
    for chunk in 0..20 {
        let (object, hash) = (object(&bench.arena, &bench.space, chunk), hash(chunk));
        let write = bench
            .disk
            .write(&bench.space, &hash, object, Instant::now(), Below::Nothing);
        assert_eq!(write.await.unwrap(), Wrote::Stored);
    }
    bench.reopen();
    assert!(bench.disk.take_backlog().chunks.is_empty());
    for chunk in 0..20 {
        bench.read(chunk).await.unwrap();
    }
    bench.check().await;
}

fn declined(bench: &Bench) -> Vec<u32> {
    let declined = bench.disk.declined();
    (0..10)
        .filter(|chunk| declined.contains(&bench.key(*chunk)))
        .collect()
}

/// Nothing told them from those that the tier below has.
#[tokio::test]
async fn a_declined_chunk_is_one_after_a_restart_and_dirty_if_it_must_go_lower_after_all() {
    let mut bench = Bench::new(1, |options| options.failures = 1);
    for chunk in 0..6 {
        let wrote = bench.write_over(Below::Declines, chunk).await.unwrap();
        assert_eq!(wrote, Wrote::Stored);
    }
    bench.store(6..8).await;
    assert_eq!((declined(&bench), bench.one(0).dirty), ((0..6).collect(), 0));
    bench.disk.clean(&bench.key(0)).await;
    bench.disk.delete(&bench.key(1)).await;
    bench.disk.remove(&bench.key(2)).await;
    assert_eq!(declined(&bench), [3, 4, 5]);
    bench.reopen();
    assert_eq!((declined(&bench), bench.has(0)), (vec![3, 4, 5], true));
    assert!(bench.disk.take_backlog().chunks.is_empty());
    // Also while its disk is out, and when that is back.
    let broken = bench.disk.0.not_written(0, 4096, io::Error::from_raw_os_error(5));
    assert!(broken.is_err());
    assert_eq!(declined(&bench), [3, 4, 5]);
    fs::remove_file(bench.file(0, &bench.key(5))).unwrap();
    bench.disk.0.take_up(0);
    assert_eq!(declined(&bench), [3, 4]);

    bench.options.sends_declined = true;
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    let chunks: Vec<_> = backlog.chunks.iter().map(|(_, chunk)| *chunk).collect();
    assert_eq!(chunks, [hash(3), hash(4)], "the oldest first");
    assert_eq!(bench.disk.unsent(&bench.key(3)), Unsent::Here);
    assert_eq!(declined(&bench), [0; 0]);
    bench.disk.clean(&bench.key(3)).await;
    bench.reopen();
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.chunks[0].1), (1, hash(4)));
    bench.read(3).await.unwrap();
    bench.check().await;
}
