//! The bench of these tests: disks as folders, objects to write to them, and opening them anew as after a restart.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::*;
use crate::arena::{Arena, ArenaOptions, Slot};
use crate::format::{ChunkHash, ChunkId, DType, Plane, Space, SpaceInput};
use crate::protocol::EvictionPolicy;

mod concurrent;
mod failures;
mod files;
mod hostile;
mod passed_over;
mod restart;
mod room;
mod unsent;

const POLICIES: [EvictionPolicy; 4] = [
    EvictionPolicy::Lru,
    EvictionPolicy::Fifo,
    EvictionPolicy::Sieve,
    EvictionPolicy::S3Fifo,
];

/// A tier in folders of its own, whose chunks all have the same length.
struct Bench {
    folders: Vec<tempfile::TempDir>,
    options: DiskOptions,
    disk: Disk,
    arena: Arena,
    space: Space,
}

impl Bench {
    fn new(folders: usize, change: impl FnOnce(&mut DiskOptions)) -> Self {
        let folders: Vec<_> = (0..folders).map(|_| tempfile::tempdir().unwrap()).collect();
        let mut options = options(folders.iter().map(|folder| folder.path().to_owned()).collect());
        change(&mut options);
        Self {
            folders,
            disk: Disk::open(&options).unwrap(),
            options,
            arena: arena(),
            space: space("", 3 * 4096),
        }
    }

    /// Closes and opens it.
    fn reopen(&mut self) {
        self.close();
        self.disk = Disk::open(&self.options).unwrap();
    }

    /// Closes the disks: their files can be changed, and they can be opened again.
    fn close(&mut self) {
        let elsewhere = tempfile::tempdir().unwrap();
        self.disk = Disk::open(&options(vec![elsewhere.path().to_owned()])).unwrap();
    }

    fn path(&self, folder: usize) -> &Path {
        self.folders[folder].path()
    }

    fn file(&self, folder: usize, key: &ChunkId) -> PathBuf {
        file(self.path(folder), key)
    }

    fn key(&self, chunk: u32) -> ChunkId {
        (self.space.key(), hash(chunk))
    }

    fn has(&self, chunk: u32) -> bool {
        self.disk.has(&self.key(chunk), Instant::now())
    }

    async fn write(&self, chunk: u32) -> Result<Wrote, DiskError> {
        self.write_to(&self.space, chunk).await
    }

    async fn write_to(&self, space: &Space, chunk: u32) -> Result<Wrote, DiskError> {
        let object = object(&self.arena, space, chunk);
        let since = Instant::now();
        self.disk
            .write(space, &hash(chunk), object, since, Below::Has)
            .await
    }

    async fn write_dirty(&self, chunk: u32) -> Result<Wrote, DiskError> {
        self.write_over(Below::Lacks, chunk).await
    }

    async fn write_over(&self, below: Below, chunk: u32) -> Result<Wrote, DiskError> {
        let object = object(&self.arena, &self.space, chunk);
        let since = Instant::now();
        self.disk
            .write(&self.space, &hash(chunk), object, since, below)
            .await
    }

    async fn soil(&self, chunks: impl IntoIterator<Item = u32>) {
        for chunk in chunks {
            assert_eq!(
                self.write_dirty(chunk).await.unwrap(),
                Wrote::Stored,
                "chunk {chunk}"
            );
        }
    }

    async fn store(&self, chunks: impl IntoIterator<Item = u32>) {
        for chunk in chunks {
            assert_eq!(self.write(chunk).await.unwrap(), Wrote::Stored, "chunk {chunk}");
        }
    }

    /// Reads a chunk and compares every byte.
    async fn read(&self, chunk: u32) -> Result<(), DiskError> {
        self.read_from(&self.space, chunk).await
    }

    async fn read_from(&self, space: &Space, chunk: u32) -> Result<(), DiskError> {
        let mut slot = self.arena.try_reserve(space.layout().object_len()).unwrap();
        slot.fill(0xee);
        let (slot, read) = self.disk.read(space, &hash(chunk), slot).await;
        read?;
        assert!(
            *slot.unwrap() == *bytes(space, chunk),
            "chunk {chunk} has other bytes"
        );
        Ok(())
    }

    fn one(&self, disk: usize) -> PathStats {
        self.disk.stats().disks.swap_remove(disk)
    }

    /// Waits for what still runs, then compares the index with the files of the disks that work.
    async fn check(&self) {
        while !self.disk.0.index.is_at_rest() {
            tokio::task::yield_now().await;
        }
        let mut files = BTreeMap::new();
        for (disk, folder) in self.folders.iter().enumerate() {
            if self.one(disk).state != DiskState::Ok {
                continue;
            }
            let mut disk_bytes = 0;
            for (key, len) in chunk_files(folder.path()) {
                assert_eq!(files.insert(key, disk), None, "{key:?} is there twice");
                disk_bytes += len.next_multiple_of(4096);
            }
            assert_eq!(self.one(disk).bytes, disk_bytes, "of disk {disk}");
            assert!(disk_bytes <= self.options.watermark_bytes());
            assert_eq!(count(&folder.path().join("tmp")), 0, "temporary files");
        }
        assert_eq!(self.disk.0.index.entries_at_rest(), files);
        let chunks: u64 = self.disk.stats().disks.iter().map(|disk| disk.chunks).sum();
        assert_eq!(chunks, files.len() as u64);
    }
}

fn options(paths: Vec<PathBuf>) -> DiskOptions {
    DiskOptions {
        paths,
        size_bytes: 64 << 20,
        watermark_percent: 100,
        depth: 4,
        ..DiskOptions::default()
    }
}

fn arena() -> Arena {
    let size = 64 << 20;
    Arena::new(&ArenaOptions {
        size,
        ..ArenaOptions::default()
    })
    .unwrap()
}

/// A space whose objects have a header of 4096 bytes and a payload of the given length.
fn space(tenant: &str, payload_len: u32) -> Space {
    Space::new(SpaceInput {
        model: "test".into(),
        revision: "9f0c1e55".into(),
        dtype: Some(DType::Int8),
        chunk_tokens: Some(1),
        tenant: Some(tenant.into()),
        planes: Some(vec![Plane {
            name: "kv".into(),
            layer: 0,
            heads: 1,
            row_bytes: payload_len,
        }]),
        ..SpaceInput::default()
    })
    .unwrap()
}

fn hash(chunk: u32) -> ChunkHash {
    ChunkHash(*blake3::hash(&chunk.to_le_bytes()).as_bytes())
}

/// The bytes of a chunk's object. The tier looks at no byte, so there is no real header.
fn bytes(space: &Space, chunk: u32) -> Vec<u8> {
    let mut bytes = vec![0; space.layout().object_len()];
    let mut hasher = blake3::Hasher::new_keyed(space.id().as_bytes());
    hasher
        .update(hash(chunk).as_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    bytes
}

fn object(arena: &Arena, space: &Space, chunk: u32) -> Slot {
    let bytes = bytes(space, chunk);
    let mut slot = arena.try_reserve(bytes.len()).expect("the arena is large enough");
    slot.copy_from_slice(&bytes);
    slot.freeze()
}

fn file(path: &Path, key: &ChunkId) -> PathBuf {
    path.join(format!("{}/{}", key.0, key.1))
}

/// All chunks' files, by their names.
fn chunk_files(path: &Path) -> Vec<(ChunkId, u64)> {
    let mut files = Vec::new();
    for folder in std::fs::read_dir(path).unwrap().map(Result::unwrap) {
        let name = folder.file_name().into_string().unwrap();
        let Some(space) = crate::format::SpaceKey::from_hex(&name) else {
            continue;
        };
        for file in std::fs::read_dir(folder.path()).unwrap().map(Result::unwrap) {
            if let Ok(chunk) = file.file_name().into_string().unwrap().parse() {
                files.push(((space, chunk), file.metadata().unwrap().len()));
            }
        }
    }
    files
}

fn count(path: &Path) -> usize {
    std::fs::read_dir(path).unwrap().count()
}
