//! Folders that others write to, and disks that were replaced.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;

use super::super::folder::Folder;
use super::*;

/// Chunks were written to the files that the links pointed at.
#[tokio::test]
async fn links_under_the_names_of_temporary_files_are_not_followed() {
    let bench = Bench::new(1, |_| {});
    let elsewhere = tempfile::tempdir().unwrap();
    let victim = elsewhere.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for number in 0..8 {
        symlink(&victim, bench.path(0).join(format!("tmp/{number}.part"))).unwrap();
    }
    bench.store(0..4).await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    for chunk in 0..4 {
        let file = fs::symlink_metadata(bench.file(0, &bench.key(chunk))).unwrap();
        assert!(file.is_file());
        bench.read(chunk).await.unwrap();
    }
}

#[test]
fn a_link_instead_of_the_folder_of_temporary_files_is_refused() {
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    symlink(elsewhere.path(), folder.path().join("tmp")).unwrap();
    let refused = Folder::open(folder.path()).err().unwrap().to_string();
    assert!(
        refused.contains("tmp is no folder of this user's: remove it"),
        "{refused}"
    );
}

/// A start waited for a writer.
#[tokio::test]
async fn a_pipe_in_place_of_a_space_json_holds_no_start_up() {
    let mut bench = Bench::new(1, |_| {});
    bench.store([1]).await;
    bench.close();
    let json = bench
        .path(0)
        .join(bench.space.key().to_string())
        .join("space.json");
    fs::remove_file(&json).unwrap();
    let (pipe, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, &json, pipe, mode, 0).unwrap();
    let options = bench.options.clone();
    let start = tokio::task::spawn_blocking(move || Disk::open(&options));
    let Ok(started) = tokio::time::timeout(Duration::from_secs(10), start).await else {
        // The runtime's end would wait as well.
        std::mem::forget(fs::File::options().read(true).write(true).open(&json).unwrap());
        panic!("it waits");
    };
    bench.disk = started.unwrap().unwrap();
    assert!(!bench.has(1));
}

#[tokio::test]
async fn a_link_under_a_chunks_name_is_no_chunk() {
    let mut bench = Bench::new(1, |_| {});
    bench.store([1, 2]).await;
    let elsewhere = bench.path(0).join("elsewhere");
    fs::rename(bench.file(0, &bench.key(1)), &elsewhere).unwrap();
    symlink(&elsewhere, bench.file(0, &bench.key(1))).unwrap();
    assert!(matches!(bench.read(1).await, Err(DiskError::Absent)));
    bench.reopen();
    assert_eq!((bench.has(1), bench.has(2)), (false, true));
}

/// Its chunks were declared lost, and the mount point's file system was filled.
#[tokio::test]
async fn a_disk_that_was_unmounted_is_not_replaced_by_its_mount_point() {
    let bench = Bench::new(2, |options| options.failures = 1);
    bench.soil(0..6).await;
    let of_first: Vec<u32> = (0..6)
        .filter(|chunk| bench.file(0, &bench.key(*chunk)).exists())
        .collect();
    let broken = bench.disk.0.not_written(0, 4096, io::Error::from_raw_os_error(5));
    assert!(matches!(broken, Err(DiskError::Io { .. })));
    let aside = bench.path(0).with_extension("aside");
    fs::rename(bench.path(0), &aside).unwrap();
    bench.disk.take_backlog();
    bench.disk.0.take_up(0);
    assert!(!bench.path(0).exists());
    assert!(matches!(bench.one(0).state, DiskState::Failed(_)));
    for chunk in &of_first {
        assert_eq!(bench.disk.unsent(&bench.key(*chunk)), Unsent::Out);
    }
    fs::rename(&aside, bench.path(0)).unwrap();
    bench.disk.0.take_up(0);
    let backlog = bench.disk.take_backlog();
    assert_eq!((backlog.chunks.len(), backlog.missing.len()), (of_first.len(), 0));
    bench.check().await;
}

#[test]
fn a_folder_on_another_file_system_is_used_again_only_if_it_is_mounted_there() {
    let folder = tempfile::tempdir().unwrap();
    let device = Folder::open(folder.path()).ok().unwrap().device;
    assert!(Folder::open_again(folder.path(), device).is_ok());
    let refused = Folder::open_again(folder.path(), device + 1).err().unwrap();
    assert!(refused.to_string().contains("not mounted"), "{refused}");
    // A file system of its own.
    let mounted = Folder::open_again("/proc".as_ref(), device).err().unwrap();
    assert!(!mounted.to_string().contains("not mounted"), "{mounted}");
}

/// The only file of it was taken for the one that was deleted.
#[tokio::test]
async fn a_chunk_that_was_stored_again_since_it_was_deleted_outlives_its_disk() {
    let bench = Bench::new(1, |options| options.failures = 1);
    bench.soil([1, 2]).await;
    bench.disk.delete(&bench.key(1)).await;
    bench.disk.delete(&bench.key(2)).await;
    bench.soil([1]).await;
    let broken = bench.disk.0.not_written(0, 4096, io::Error::from_raw_os_error(5));
    assert!(matches!(broken, Err(DiskError::Io { .. })));
    bench.disk.0.take_up(0);
    assert_eq!((bench.has(1), bench.has(2)), (true, false));
    bench.read(1).await.unwrap();
    let backlog = bench.disk.take_backlog();
    let chunks: Vec<_> = backlog.chunks.iter().map(|(_, chunk)| *chunk).collect();
    assert_eq!((chunks, backlog.missing), (vec![hash(1)], Vec::new()));
}
