//! The promise of flush: every chunk that was committed is on S3, counted as dropped, or kept back by the configuration.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kvgate::cache::gateway::BehindStats;
use kvgate::cache::tier::DiskState;
use kvgate::format::KeyPrefix;

use crate::support::daemon::{Serving, Site, eventually, store};
use crate::support::fixture::{Prompt, soon};

const SETTINGS: [(&str, &str); 6] = [
    ("disk.size", "64MiB"),
    ("disk.failures", "1"),
    ("disk.retry", "50ms"),
    ("api.degraded", "true"),
    ("store.drain", "100ms"),
    ("log.repeat", "100ms"),
];

fn settings(disk: &str) -> Vec<(&'static str, &str)> {
    let mut settings = SETTINGS.to_vec();
    settings.push(("disk.paths", disk));
    settings
}

fn behind(serving: &Serving) -> BehindStats {
    serving.node.status().tiers.write_behind
}

fn dirty(serving: &Serving) -> u64 {
    let disks = serving.node.status().tiers.disk.unwrap().disks;
    disks.iter().map(|disk| disk.dirty).sum()
}

async fn is_on_s3(site: &Site, prompt: &Prompt, i: usize) -> bool {
    let key = KeyPrefix::new("").chunk(prompt.space.key(), &prompt.hashes[i]);
    site.store().await.head(&key, soon()).await.is_ok()
}

async fn on_s3(site: &Site, prompt: &Prompt) -> usize {
    let mut there = 0;
    for i in 0..prompt.hashes.len() {
        there += usize::from(is_on_s3(site, prompt, i).await);
    }
    there
}

fn file(disk: &Path, prompt: &Prompt, i: usize) -> PathBuf {
    disk.join(prompt.space.key().to_string())
        .join(prompt.hashes[i].to_string())
}

/// A bit of it decays; its mode does not.
fn flip(file: &Path) {
    let mode = std::fs::metadata(file).unwrap().permissions();
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).unwrap();
    std::fs::set_permissions(file, mode).unwrap();
}

fn is_dirty(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & 0o1000 != 0)
}

/// Each has the other's name from now on; at no moment is one of them missing.
fn exchange(one: &Path, other: &Path) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
}

/// Leaves a prompt on the disk that S3 never got.
async fn leave(site: &Site, settings: &[(&'static str, &str)], prompt: &Prompt) {
    let serving = site.serve(settings).await;
    let engine = serving.attach("before").await;
    store(&serving.client, &engine, prompt).await;
    eventually(|| dirty(&serving) == prompt.hashes.len() as u64).await;
    drop(engine);
    assert_eq!(serving.end().await.dropped, 0);
}

/// They were unlinked, and flush said 200 with `dropped: 0`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_files_that_s3_never_got_are_counted_and_kept() {
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = settings(&path);
    site.stop_s3().await;
    let prompt = Prompt::new(12);
    leave(&site, &settings, &prompt).await;
    for i in [3, 7, 8] {
        flip(&file(&disk, &prompt, i));
    }
    std::fs::remove_file(file(&disk, &prompt, 11)).unwrap();
    let serving = site.serve(&settings).await;
    site.start_s3().await;
    let refused = serving.client.flush(Some(20_000)).await.unwrap_err().to_string();
    assert!(refused.starts_with("3 chunks were dropped"), "{refused}");
    let (one, two) = tokio::join!(
        serving.client.flush_but(Some(20_000), 3),
        serving.client.flush_but(Some(20_000), 3)
    );
    assert_eq!((one.unwrap().pending, two.unwrap().dropped), (0, 3));
    assert_eq!((behind(&serving).lost, behind(&serving).dropped), (3, 3));
    assert_eq!(on_s3(&site, &prompt).await, 8);
    for i in [3, 7, 8] {
        let name = format!("{}-{}", prompt.space.key(), prompt.hashes[i]);
        assert!(disk.join("lost").join(name).exists(), "chunk {i}");
    }
    // An engine brings one again: it is there, and the loss stays counted.
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &prompt).await;
    serving.client.flush_but(Some(20_000), 3).await.unwrap();
    assert_eq!(on_s3(&site, &prompt).await, 12);
    drop(engine);
    serving.end().await;
    let serving = site.serve(&settings).await;
    serving.flush().await;
    assert_eq!(behind(&serving).dropped, 0, "each loss is counted once");
}

/// It was moved aside as damaged, and counted as lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsent_file_of_a_newer_version_is_kept_for_that_version() {
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = settings(&path);
    site.stop_s3().await;
    let prompt = Prompt::new(3);
    leave(&site, &settings, &prompt).await;
    let file = file(&disk, &prompt, 1);
    let mode = std::fs::metadata(&file).unwrap().permissions();
    let ours = std::fs::read(&file).unwrap();
    let mut newer = ours.clone();
    newer[8] = 9;
    let end = u32::from_le_bytes(newer[12..16].try_into().unwrap()) as usize;
    let digest = blake3::hash(&newer[..end - 32]);
    newer[end - 32..end].copy_from_slice(digest.as_bytes());
    let write = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        std::fs::set_permissions(&file, mode.clone()).unwrap();
    };
    write(&newer);
    let serving = site.serve(&settings).await;
    site.start_s3().await;
    serving.client.flush(Some(2_000)).await.unwrap_err();
    assert_eq!((behind(&serving).lost, behind(&serving).dropped), (0, 0));
    assert!(is_dirty(&file) && std::fs::read(&file).unwrap() == newer);
    serving.end().await;
    write(&ours);
    let serving = site.serve(&settings).await;
    serving.flush().await;
    assert_eq!(on_s3(&site, &prompt).await, 3);
}

/// Its backlog was over, and flush said 200.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_is_out_keeps_its_chunks_unsent() {
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = settings(&path);
    site.stop_s3().await;
    let prompt = Prompt::new(6);
    leave(&site, &settings, &prompt).await;
    let serving = site.serve(&settings).await;
    // Nothing can be opened there any more, nor taken up again.
    let (away, aside) = (site.home.path().join("away"), disk.join("aside"));
    let space = prompt.space.key().to_string();
    std::fs::write(&away, "").unwrap();
    std::fs::write(&aside, "").unwrap();
    exchange(&away, &disk);
    exchange(&away.join("aside"), &away.join(&space));
    let state = || serving.node.status().tiers.disk.unwrap().disks.remove(0).state;
    eventually(|| matches!(state(), DiskState::Failed(_))).await;
    site.start_s3().await;
    // Longer than the pause between two attempts.
    let refused = serving.client.flush(Some(1_500)).await.unwrap_err().to_string();
    assert!(
        refused.starts_with("6 chunks") && refused.contains("not_flushed"),
        "{refused}"
    );
    // To remove one is no loss.
    let gone = format!("/v1/chunks/{space}/{}", prompt.hashes[5]);
    serving.client.declare(&prompt.space).await.unwrap();
    serving.client.delete(&gone).await.unwrap();
    let refused = serving.client.flush(Some(100)).await.unwrap_err().to_string();
    assert!(refused.starts_with("5 chunks"), "{refused}");

    exchange(&away.join("aside"), &away.join(&space));
    exchange(&away, &disk);
    serving.flush().await;
    assert_eq!((on_s3(&site, &prompt).await, behind(&serving).dropped), (5, 0));
}

/// They were removed with their space's folder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsent_chunks_whose_space_json_is_gone_are_sent_when_the_space_is_known() {
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = settings(&path);
    site.stop_s3().await;
    let prompt = Prompt::new(4);
    leave(&site, &settings, &prompt).await;
    let json = disk.join(prompt.space.key().to_string()).join("space.json");
    std::fs::remove_file(&json).unwrap();
    let serving = site.serve(&settings).await;
    site.start_s3().await;
    let refused = serving.client.flush(Some(100)).await.unwrap_err().to_string();
    assert!(refused.starts_with("4 chunks"), "{refused}");
    serving.client.declare(&prompt.space).await.unwrap();
    serving.flush().await;
    assert_eq!((on_s3(&site, &prompt).await, behind(&serving).dropped), (4, 0));
    serving.end().await;

    // S3 has the space by now, and nobody declares it.
    site.stop_s3().await;
    let more = Prompt::new(4);
    leave(&site, &settings, &more).await;
    std::fs::remove_file(&json).unwrap();
    let serving = site.serve(&settings).await;
    site.start_s3().await;
    serving.flush().await;
    assert_eq!(on_s3(&site, &more).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_the_configuration_keeps_from_s3_are_told() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk").display().to_string();
    for (more, is_kept) in [
        (vec![("memory.min_accesses", "2")], true),
        (vec![("memory.store", "stop")], true),
        (
            vec![
                ("disk.paths", disk.as_str()),
                ("disk.size", "64MiB"),
                ("disk.store", "stop"),
            ],
            true,
        ),
        (vec![], false),
    ] {
        let serving = site.serve(&more).await;
        serving.ready().await;
        let engine = serving.attach("one").await;
        let prompt = Prompt::new(3);
        store(&serving.client, &engine, &prompt).await;
        let flushed = serving.client.flush(Some(20_000)).await.unwrap();
        let expected = if is_kept { (3, 0) } else { (0, 3) };
        assert_eq!(
            (flushed.kept_back, on_s3(&site, &prompt).await),
            expected,
            "{more:?}"
        );
        drop(engine);
        serving.end().await;
    }
}

/// Nobody knew what it had, and flush said 200.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_was_not_read_holds_flush_up() {
    let site = Site::new().await;
    let (good, bad) = (site.home.path().join("good"), site.home.path().join("bad"));
    std::fs::write(&bad, "").unwrap();
    let paths = format!("{},{}", good.display(), bad.display());
    let serving = site.serve(&settings(&paths)).await;
    let refused = serving.client.flush(Some(20_000)).await.unwrap_err().to_string();
    assert!(refused.starts_with("1 disks could not be used"), "{refused}");
}

/// Random stores, removals, outages, decay and restarts. At the end each chunk that was committed is on S3 or counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_that_flush_acknowledged() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut site = Site::new().await;
    let disks = [site.home.path().join("disk0"), site.home.path().join("disk1")];
    let paths = format!("{},{}", disks[0].display(), disks[1].display());
    let mut settings = settings(&paths);
    settings.push(("store.write_behind", "2MiB"));
    let mut committed: Vec<(Prompt, Vec<usize>)> = Vec::new();
    let mut deleted = HashSet::new();
    let mut dropped = 0;
    for life in 0..6 {
        let serving = site.serve(&settings).await;
        let engine = serving.attach(&format!("life {life}")).await;
        for _ in 0..6 {
            match random.u32(..5) {
                0 if site.s3.is_some() => site.stop_s3().await,
                0 => site.start_s3().await,
                1 if !committed.is_empty() => {
                    let (prompt, chunks) = &committed[random.usize(..committed.len())];
                    if let Some(&i) = chunks.last() {
                        let path = format!("/v1/chunks/{}/{}", prompt.space.key(), prompt.hashes[i]);
                        // S3 may be away; here it is gone all the same.
                        let _ = serving.client.delete(&path).await;
                        deleted.insert(prompt.hashes[i]);
                    }
                }
                _ => {
                    let prompt = Prompt::new(random.usize(1..6));
                    let words = store(&serving.client, &engine, &prompt).await;
                    let stored = words.iter().enumerate().filter(|(_, word)| **word == "stored");
                    let stored = stored.map(|(i, _)| i).collect();
                    committed.push((prompt, stored));
                }
            }
        }
        drop(engine);
        let node = serving.node.clone();
        serving.end().await;
        dropped += node.status().tiers.write_behind.dropped;
        for (prompt, chunks) in &committed {
            for &i in chunks {
                let copies = disks.iter().map(|disk| file(disk, prompt, i));
                copies
                    .filter(|file| is_dirty(file))
                    .for_each(|file| match random.u32(..10) {
                        0 => flip(&file),
                        1 => std::fs::remove_file(file.with_file_name("space.json")).unwrap_or_default(),
                        _ => {}
                    });
            }
        }
    }
    if site.s3.is_none() {
        site.start_s3().await;
    }
    let serving = site.serve(&settings).await;
    if let Some((prompt, _)) = committed.first() {
        serving.client.declare(&prompt.space).await.unwrap();
    }
    eventually(|| serving.node.status().s3.answered).await;
    let first = serving.client.flush(Some(30_000)).await;
    let lost = behind(&serving).dropped;
    assert_eq!(first.is_ok(), lost == 0, "seed {seed}: {first:?}");
    serving.client.flush_but(Some(30_000), lost).await.unwrap();
    dropped += lost;
    let mut missing = 0;
    for (prompt, chunks) in &committed {
        for &i in chunks {
            let is_missing = !deleted.contains(&prompt.hashes[i]) && !is_on_s3(&site, prompt, i).await;
            missing += u64::from(is_missing);
        }
    }
    assert!(
        missing <= dropped,
        "seed {seed}: {missing} are nowhere, {dropped} were told"
    );
}
