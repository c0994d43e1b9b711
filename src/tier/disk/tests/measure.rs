//! Figures, not checks: `cargo test --release --lib tier::disk::tests::measure -- --ignored --nocapture`.

use std::fs;
use std::time::Instant;

use super::*;

const CHUNKS: u32 = 100_000;

#[test]
#[ignore = "takes a minute: prints figures"]
fn a_start_with_many_files() {
    let folder = tempfile::tempdir().unwrap();
    let (options, space) = (options(vec![folder.path().to_owned()]), space("", 4096));
    let options = DiskOptions {
        size_bytes: 1 << 40,
        ..options
    };
    drop(Disk::open(&options).unwrap());
    let space_folder = folder.path().join(space.key().to_string());
    fs::create_dir(&space_folder).unwrap();
    fs::write(space_folder.join("space.json"), space.canonical_json()).unwrap();
    for chunk in 0..CHUNKS {
        // Holes have a length too.
        let file = fs::File::create(space_folder.join(hash(chunk).to_string())).unwrap();
        file.set_len(space.layout().object_len() as u64).unwrap();
    }
    // A cold one: needs root.
    let is_cold = fs::write("/proc/sys/vm/drop_caches", "3").is_ok();
    for state in [if is_cold { "cold" } else { "warm" }, "warm"] {
        let started = Instant::now();
        let disk = Disk::open(&options).unwrap();
        println!("{state}: {CHUNKS} files in {:?}", started.elapsed());
        assert_eq!(disk.stats().disks[0].chunks, u64::from(CHUNKS));
    }
    for ttl in [None, Some(Duration::from_hours(1))] {
        let disk = Disk::open(&DiskOptions {
            ttl,
            ..options.clone()
        })
        .unwrap();
        let keys: Vec<CacheKey> = (0..4096).map(|i| (space.key(), hash(i * 7))).collect();
        // The first one finds nothing in the processor's caches.
        let took = (0..20).map(|_| {
            let (started, now) = (Instant::now(), tokio::time::Instant::now());
            assert!(keys.iter().all(|key| disk.has_at(key, now)));
            started.elapsed()
        });
        let took: Vec<_> = took.collect();
        let least = took.iter().min();
        println!(
            "ttl {ttl:?}: has_at() of 4096 in {:?} at first, then {least:?}",
            took[0]
        );
        let started = Instant::now();
        assert!(keys.iter().all(|key| disk.has(key)));
        println!("ttl {ttl:?}: has() of 4096 in {:?}", started.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute: prints figures"]
async fn throughput() {
    // On the disk that the target folder is on; a temporary folder may be memory.
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let disk = Disk::open(&DiskOptions {
        size_bytes: 1 << 40,
        ..options(vec![folder.path().to_owned()])
    })
    .unwrap();
    let (arena, space) = (arena(), space("", 1 << 20));
    let slot = object(&arena, &space, 0);
    for (what, is_direct) in [("direct", true), ("page cache", false)] {
        disk.0.folder(0).set_direct(is_direct);
        let first = if is_direct { 0 } else { 1000 };
        let started = Instant::now();
        let writes = (first..first + 500).map(|chunk| {
            let (disk, space, slot) = (disk.clone(), space.clone(), slot.clone());
            tokio::spawn(async move { disk.write(&space, &hash(chunk), slot).await.unwrap() })
        });
        for write in writes.collect::<Vec<_>>() {
            assert_eq!(write.await.unwrap(), Wrote::Stored);
        }
        println!("{what}: 500 chunks of 1 MiB written in {:?}", started.elapsed());
        let started = Instant::now();
        for chunk in first..first + 500 {
            let slot = arena.try_reserve(space.layout().object_len()).unwrap();
            disk.read(&space, &hash(chunk), slot).await.1.unwrap();
        }
        println!("{what}: 500 read one after another in {:?}", started.elapsed());
    }
}
