//! Objects in and out, and what their files are.

use super::*;

#[tokio::test]
async fn objects_of_any_length_round_trip() {
    for is_direct in [true, false] {
        let bench = Bench::new(1, |_| {});
        bench.disk.0.folder(0).unwrap().set_direct(is_direct);
        for payload_len in [1, 511, 4095, 4096, 4097, 12_288, 100_003, 1 << 20] {
            let space = space("", payload_len);
            assert_eq!(bench.write_to(&space, 7).await.unwrap(), Wrote::Stored);
            bench.read_from(&space, 7).await.unwrap();
            let len = std::fs::metadata(bench.file(0, &(space.key(), hash(7))))
                .unwrap()
                .len();
            assert_eq!(len, 4096 + u64::from(payload_len));
            let json = bench.path(0).join(format!("{}/space.json", space.key()));
            assert_eq!(std::fs::read_to_string(json).unwrap(), space.canonical_json());
        }
        assert_eq!(
            (bench.one(0).reads, bench.one(0).writes, bench.one(0).errors),
            (8, 8, 0)
        );
        bench.check().await;
    }
}

#[tokio::test]
async fn a_part_of_a_slot_that_begins_anywhere_is_written_and_read_too() {
    let bench = Bench::new(1, |_| {});
    let object = bytes(&bench.space, 1);
    let mut slot = bench.arena.try_reserve(object.len() + 10).unwrap();
    slot[10..].copy_from_slice(&object);
    let part = slot.freeze().slice(10..10 + object.len());
    assert_eq!(
        bench
            .disk
            .write(&bench.space, &hash(1), part, Instant::now(), Below::Has)
            .await
            .unwrap(),
        Wrote::Stored
    );
    let mut slot = bench.arena.try_reserve(object.len() + 10).unwrap();
    let (slot, read) = bench.disk.read(&bench.space, &hash(1), slot.split_off(10)).await;
    read.unwrap();
    assert!(*slot.unwrap() == *object);
}

#[tokio::test]
async fn a_chunk_that_is_there_is_not_written_again() {
    let bench = Bench::new(2, |_| {});
    bench.store([1]).await;
    assert_eq!(bench.write(1).await.unwrap(), Wrote::Present);
    let two = tokio::join!(bench.write(2), bench.write(2));
    assert_eq!((two.0.unwrap(), two.1.unwrap()), (Wrote::Stored, Wrote::Present));
    bench.check().await;
}

#[tokio::test]
async fn removed_and_missing_chunks_are_absent() {
    let bench = Bench::new(1, |_| {});
    bench.store([1, 2]).await;
    bench.disk.remove(&bench.key(1)).await;
    assert!(!bench.has(1) && !bench.file(0, &bench.key(1)).exists());
    assert!(matches!(bench.read(1).await, Err(DiskError::Absent)));
    bench.disk.remove(&bench.key(1)).await;
    bench.store([1]).await;
    bench.read(1).await.unwrap();

    // Someone else removed the file, or the whole space.
    std::fs::remove_file(bench.file(0, &bench.key(2))).unwrap();
    assert!(matches!(bench.read(2).await, Err(DiskError::Absent)));
    assert!(!bench.has(2));
    std::fs::remove_dir_all(bench.path(0).join(bench.space.key().to_string())).unwrap();
    std::fs::remove_dir(bench.path(0).join("tmp")).unwrap();
    assert!(matches!(bench.read(1).await, Err(DiskError::Absent)));
    bench.store([1, 2]).await;
    bench.read(2).await.unwrap();
    assert_eq!(bench.one(0).errors, 0);
    bench.check().await;
}

#[tokio::test]
async fn a_file_of_another_length_is_removed() {
    let bench = Bench::new(1, |_| {});
    bench.store([1]).await;
    let file = bench.file(0, &bench.key(1));
    std::fs::File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(5000)
        .unwrap();
    let expected = bench.space.layout().object_len() as u64;
    match bench.read(1).await {
        Err(DiskError::Damaged {
            expected: length,
            actual,
        }) => assert_eq!((length, actual), (expected, 5000)),
        other => panic!("{other:?}"),
    }
    assert!(!bench.has(1) && !file.exists());
    bench.store([1]).await;
    bench.read(1).await.unwrap();
}

#[tokio::test]
async fn a_slot_of_another_length_is_refused() {
    let bench = Bench::new(1, |_| {});
    let slot = bench.arena.try_reserve(100).unwrap();
    let (slot, read) = bench.disk.read(&bench.space, &hash(1), slot).await;
    assert!(matches!(read, Err(DiskError::Length { actual: 100, .. })));
    let written = bench
        .disk
        .write(
            &bench.space,
            &hash(1),
            slot.unwrap().freeze(),
            Instant::now(),
            Below::Has,
        )
        .await;
    assert!(matches!(written, Err(DiskError::Length { actual: 100, .. })));
}

#[tokio::test]
async fn chunks_are_spread_over_the_disks() {
    let bench = Bench::new(3, |_| {});
    bench.store(0..30).await;
    for disk in 0..3 {
        assert_eq!(bench.one(disk).chunks, 10);
    }
    for chunk in 0..30 {
        bench.read(chunk).await.unwrap();
    }
    bench.check().await;
}
