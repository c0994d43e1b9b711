//! A start after a kill: the files that it uses, and those that it removes. Each test makes the state that one step leaves.

use std::fs;

use super::*;

#[tokio::test]
async fn a_start_finds_everything_in_order_of_use() {
    let mut bench = Bench::new(2, |options| options.size_bytes = 10 * 16_384);
    bench.store(0..20).await;
    // Two of each disk, in another order than they were written in.
    for chunk in [4, 17, 6, 3] {
        bench.read(chunk).await.unwrap();
    }
    bench.reopen();
    bench.check().await;
    for chunk in (0..20).filter(|chunk| ![4, 17, 6, 3].contains(chunk)) {
        assert!(bench.has(chunk));
    }
    bench.store(100..116).await;
    bench.check().await;
    for chunk in 0..20 {
        assert_eq!(bench.has(chunk), [4, 17, 6, 3].contains(&chunk), "chunk {chunk}");
    }
    for chunk in (100..116).chain([4, 17, 6, 3]) {
        bench.read(chunk).await.unwrap();
    }
}

#[tokio::test]
async fn a_kill_leaves_nothing_that_is_not_whole() {
    let mut bench = Bench::new(1, |_| {});
    bench.store([1]).await;
    bench.close();
    let (path, json) = (bench.path(0).to_owned(), bench.space.canonical_json().to_owned());
    let whole = bytes(&bench.space, 2);
    let other = space("other", 100);
    let other_folder = path.join(other.key().to_string());

    // While an object was written.
    fs::write(path.join("tmp/0.part"), &whole[..5000]).unwrap();
    bench.reopen();
    assert!(bench.has(1));
    bench.check().await;
    // Written and not renamed.
    bench.close();
    fs::write(path.join("tmp/1.part"), &whole).unwrap();
    bench.reopen();
    assert!(!bench.has(2));
    bench.check().await;
    // Renamed, and not in the index.
    bench.close();
    fs::write(bench.file(0, &bench.key(2)), &whole).unwrap();
    bench.reopen();
    bench.read(2).await.unwrap();
    bench.check().await;

    // The folder of a space was made.
    bench.close();
    fs::create_dir(&other_folder).unwrap();
    bench.reopen();
    assert!(!other_folder.exists());
    // Its space.json was written, and not renamed.
    bench.close();
    fs::create_dir(&other_folder).unwrap();
    fs::write(path.join("tmp/2.part"), &other.canonical_json()[..50]).unwrap();
    bench.reopen();
    assert!(!other_folder.exists());
    bench.check().await;
    // Renamed, and no chunk is there yet.
    bench.close();
    fs::create_dir(&other_folder).unwrap();
    fs::write(other_folder.join("space.json"), other.canonical_json()).unwrap();
    bench.reopen();
    assert_eq!(bench.write_to(&other, 1).await.unwrap(), Wrote::Stored);
    bench.read_from(&other, 1).await.unwrap();
    bench.check().await;

    // Evicted, and not unlinked: it is back.
    bench.store([3]).await;
    let copy = fs::read(bench.file(0, &bench.key(3))).unwrap();
    bench.disk.remove(&bench.key(3)).await;
    bench.close();
    fs::write(bench.file(0, &bench.key(3)), copy).unwrap();
    bench.reopen();
    bench.read(3).await.unwrap();
    bench.check().await;
    assert_eq!(
        fs::read_to_string(path.join(format!("{}/space.json", bench.space.key()))).unwrap(),
        json
    );
}

#[tokio::test]
async fn broken_chunks_are_removed_and_foreign_files_stay() {
    let mut bench = Bench::new(1, |_| {});
    bench.store([1, 2, 3]).await;
    let damaged = space("damaged", 100);
    let missing = space("missing", 100);
    let shared = space("shared", 100);
    for space in [&damaged, &missing, &shared] {
        bench.write_to(space, 1).await.unwrap();
    }
    bench.close();
    let path = bench.path(0).to_owned();
    let folder = |space: &Space| path.join(space.key().to_string());
    let truncated = bench.file(0, &bench.key(1));
    fs::File::options()
        .write(true)
        .open(&truncated)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let longer = bench.file(0, &bench.key(2));
    fs::File::options()
        .write(true)
        .open(&longer)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    fs::write(
        folder(&damaged).join("space.json"),
        &damaged.canonical_json()[..80],
    )
    .unwrap();
    fs::remove_file(folder(&missing).join("space.json")).unwrap();
    // Another space's.
    fs::write(folder(&shared).join("space.json"), damaged.canonical_json()).unwrap();
    // Not kvgate's.
    let others = [
        path.join("notes.txt"),
        path.join("tmp/notes.txt"),
        folder(&bench.space).join("README"),
        folder(&shared).join("README"),
        folder(&bench.space).join(hash(9).to_string().to_uppercase()),
    ];
    others.iter().for_each(|file| fs::write(file, "mine").unwrap());
    fs::create_dir(folder(&bench.space).join(hash(8).to_string())).unwrap();

    bench.reopen();
    assert!(!truncated.exists() && !longer.exists());
    assert!(!folder(&damaged).exists() && !folder(&missing).exists());
    assert_eq!(count(&folder(&shared)), 1);
    assert!(others.iter().all(|file| file.exists()));
    assert_eq!(bench.one(0).chunks, 1);
    bench.read(3).await.unwrap();
    bench.store([1, 2]).await;
    bench.write_to(&shared, 1).await.unwrap();
    bench.reopen();
    bench.read_from(&shared, 1).await.unwrap();
}

#[tokio::test]
async fn a_chunk_on_two_disks_is_kept_once() {
    let mut bench = Bench::new(2, |_| {});
    bench.store(0..4).await;
    bench.close();
    let (from, to) = (bench.path(0).join(bench.space.key().to_string()), bench.path(1));
    for file in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(
            file.path(),
            to.join(bench.space.key().to_string()).join(file.file_name()),
        )
        .unwrap();
    }
    bench.reopen();
    bench.check().await;
    for chunk in 0..4 {
        bench.read(chunk).await.unwrap();
    }
}

#[tokio::test]
async fn limits_that_were_lowered_hold_from_the_start() {
    let mut bench = Bench::new(1, |_| {});
    let other = space("other", 3 * 4096);
    for chunk in 0..20 {
        bench.store([chunk]).await;
        bench.write_to(&other, chunk).await.unwrap();
    }
    bench.options.tenant_bytes = Some(5 * 16_384);
    bench.reopen();
    bench.check().await;
    assert_eq!(bench.one(0).chunks, 10);
    for chunk in 15..20 {
        bench.read(chunk).await.unwrap();
        bench.read_from(&other, chunk).await.unwrap();
    }
    bench.options.size_bytes = 4 * 16_384;
    bench.reopen();
    bench.check().await;
    assert_eq!(bench.one(0).chunks, 4);
    assert!(bench.has(19) && bench.disk.has(&(other.key(), hash(19)), Instant::now()));
}

#[tokio::test]
async fn two_gateways_can_not_have_one_folder() {
    let mut bench = Bench::new(2, |_| {});
    let mut twice = bench.options.clone();
    twice.paths.remove(0);
    let refused = Disk::open(&twice).map(|_| ()).unwrap_err().to_string();
    let path = bench.path(1).display().to_string();
    assert!(
        refused.contains(&path) && refused.contains("another folder in [disk] paths"),
        "{refused}"
    );
    bench.close();
    Disk::open(&twice).unwrap();
    twice.paths.push(twice.paths[0].clone());
    assert!(
        matches!(Disk::open(&twice), Err(DiskError::InUse { .. })),
        "itself"
    );
}

/// They were answered like any other after a restart, and nobody sent them.
#[tokio::test]
async fn chunks_that_the_tier_below_lacks_stay_and_are_told_at_start() {
    let mut bench = Bench::new(2, |options| {
        options.size_bytes = 10 * 16_384;
        options.ttl = Some(Duration::from_hours(1));
    });
    bench.store(0..10).await;
    for chunk in [14, 12, 13, 11] {
        assert_eq!(bench.write_dirty(chunk).await.unwrap(), Wrote::Stored);
    }
    bench.disk.clean(&bench.key(13)).await;
    bench.disk.clean(&bench.key(0)).await;
    bench.close();
    let old = (0..2).find_map(|disk| fs::File::open(bench.file(disk, &bench.key(14))).ok());
    let old = old.unwrap();
    let time = std::time::SystemTime::now() - Duration::from_hours(2);
    old.set_times(fs::FileTimes::new().set_modified(time).set_accessed(time))
        .unwrap();
    bench.reopen();
    let backlog = bench.disk.take_backlog().chunks;
    let space = bench.space.key();
    assert!(backlog.iter().all(|(of, _)| of.key() == space));
    let hashes: Vec<_> = backlog.into_iter().map(|(_, chunk)| chunk).collect();
    assert_eq!(
        hashes,
        [hash(14), hash(12), hash(11)],
        "in the order they were written in"
    );
    assert!(bench.disk.take_backlog().chunks.is_empty());
    bench.store(100..150).await;
    bench.disk.expire().await;
    for chunk in [14, 12, 11] {
        bench.read(chunk).await.unwrap();
        bench.disk.clean(&bench.key(chunk)).await;
    }
    assert!(!bench.has(13));
    bench.store(200..250).await;
    bench.disk.expire().await;
    assert!(![14, 12, 11].into_iter().any(|chunk| bench.has(chunk)));
    assert_eq!(bench.one(0).dirty + bench.one(1).dirty, 0);
    bench.check().await;
    bench.reopen();
    assert!(bench.disk.take_backlog().chunks.is_empty());
}
