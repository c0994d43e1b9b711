//! Tests of the memory tier: room, age, tenants, pins, and deletes that race with loads.

use std::time::Duration;

use super::*;
use crate::arena::ArenaOptions;

const CHUNK: usize = 8192;

/// Objects of two pages.
fn space(tenant: &str) -> Space {
    Space::from_json(&format!(
        r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "tenant": "{tenant}",
            "mha": {{"layers": 1, "heads": 1, "head_dim": 64}}}}"#
    ))
    .unwrap()
}

fn arena(chunks: usize) -> Arena {
    let size = chunks * CHUNK;
    Arena::new(&ArenaOptions {
        size,
        ..ArenaOptions::default()
    })
    .unwrap()
}

fn options() -> MemoryOptions {
    MemoryOptions {
        policy: EvictionPolicy::Lru,
        ttl: None,
        watermark_percent: 100,
        tenant_bytes: None,
        min_accesses: 0,
    }
}

fn key(space: &Space, i: u8) -> ChunkId {
    (space.key(), ChunkHash([i; 32]))
}

fn put(memory: &Arc<Memory>, arena: &Arena, space: &Space, i: u8) -> bool {
    assert_eq!(space.layout().object_len().next_multiple_of(4096), CHUNK);
    let slot = arena
        .try_reserve(space.layout().object_len())
        .expect("room")
        .freeze();
    memory.insert(key(space, i), space, slot, Instant::now())
}

fn here(memory: &Memory, space: &Space) -> Vec<u8> {
    (0..=u8::MAX).filter(|&i| memory.has(&key(space, i))).collect()
}

#[tokio::test(start_paused = true)]
async fn the_arena_takes_what_nobody_uses() {
    let (arena, space) = (arena(4), space(""));
    let memory = Memory::new(&arena, options());
    for i in 0..4 {
        assert!(put(&memory, &arena, &space, i));
    }
    // 0 is in use, 1 is dirty, 2 is pinned.
    let used = memory.get(&key(&space, 0), &space).unwrap();
    memory.soil(&key(&space, 1));
    let soon = Instant::now() + Duration::from_secs(5);
    assert_eq!(memory.pin(space.key(), &[key(&space, 2).1], soon), 1);
    assert!(put(&memory, &arena, &space, 4));
    assert_eq!(here(&memory, &space), [0, 1, 2, 4]);
    assert!(put(&memory, &arena, &space, 5));
    assert_eq!(here(&memory, &space), [0, 1, 2, 5]);
    let slot = arena.try_reserve(CHUNK);
    assert!(
        slot.is_some() && arena.try_reserve(CHUNK).is_none(),
        "all others may not go"
    );
    drop(slot);
    drop(used);
    memory.clean(&key(&space, 1));
    tokio::time::advance(Duration::from_secs(6)).await;
    assert!(arena.try_reserve(4 * CHUNK).is_some());
    assert!(here(&memory, &space).is_empty());
}

#[tokio::test(start_paused = true)]
async fn below_the_watermark_and_in_the_policy_s_order() {
    for (policy, left) in [(EvictionPolicy::Lru, [0, 3]), (EvictionPolicy::Fifo, [2, 3])] {
        let (arena, space) = (arena(10), space(""));
        let watermark_percent = 20;
        let options = MemoryOptions {
            policy,
            watermark_percent,
            ..options()
        };
        let memory = Memory::new(&arena, options);
        for i in 0..2 {
            put(&memory, &arena, &space, i);
        }
        memory.get(&key(&space, 0), &space).unwrap();
        put(&memory, &arena, &space, 2);
        memory.get(&key(&space, 0), &space);
        put(&memory, &arena, &space, 3);
        assert_eq!(here(&memory, &space), left, "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_chunk_past_its_ttl_is_not_there() {
    let (arena, space) = (arena(4), space(""));
    let ttl = Some(Duration::from_secs(10));
    let memory = Memory::new(&arena, MemoryOptions { ttl, ..options() });
    put(&memory, &arena, &space, 0);
    tokio::time::advance(Duration::from_secs(9)).await;
    put(&memory, &arena, &space, 1);
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(here(&memory, &space), [1]);
    assert!(memory.get(&key(&space, 0), &space).is_none());
    assert_eq!(arena.stats().slots, 2);
    memory.expire();
    assert_eq!((arena.stats().slots, memory.stats().expired), (1, 1));
    // Stored anew.
    assert!(put(&memory, &arena, &space, 0) && !put(&memory, &arena, &space, 0));
}

#[tokio::test(start_paused = true)]
async fn a_tenant_over_its_share_loses_its_own() {
    let arena = arena(10);
    let tenant_bytes = Some(3 * CHUNK);
    let memory = Memory::new(
        &arena,
        MemoryOptions {
            tenant_bytes,
            ..options()
        },
    );
    let (one, other) = (space("one"), space("other"));
    for i in 0..3 {
        assert!(put(&memory, &arena, &one, i) && put(&memory, &arena, &other, i));
    }
    assert!(put(&memory, &arena, &one, 3));
    assert_eq!(
        (here(&memory, &one), here(&memory, &other)),
        (vec![1, 2, 3], vec![0, 1, 2])
    );
    for i in 1..4 {
        memory.soil(&key(&one, i));
    }
    assert!(memory.share("one", CHUNK).is_none(), "none of its chunks may go");
    let shares: Vec<_> = (0..3)
        .map(|_| memory.share("other", one.layout().object_len()))
        .collect();
    assert!(shares.iter().all(Option::is_some) && here(&memory, &other).is_empty());
    assert!(
        memory.share("other", CHUNK).is_none(),
        "what is about to come counts"
    );
    drop(shares);
    assert!(memory.share("other", CHUNK).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_pinned_chunk_goes_last_and_only_for_the_oldest_load() {
    let (arena, space) = (arena(4), space(""));
    let memory = Memory::new(&arena, options());
    for i in 0..4 {
        put(&memory, &arena, &space, i);
    }
    let soon = Instant::now() + Duration::from_secs(60);
    let chunks: Vec<_> = (0..3).map(|i| key(&space, i).1).collect();
    assert_eq!(memory.pin(space.key(), &chunks, soon), 3);
    memory.soil(&key(&space, 0));
    let used = memory.get(&key(&space, 1), &space).unwrap();
    let first = arena.try_reserve(CHUNK).expect("3 is not pinned");
    assert!(
        arena.try_reserve(CHUNK).is_none(),
        "who does not wait gets no pinned one"
    );
    let ticket = arena.ticket().await;
    let reserve = || tokio::time::timeout(Duration::from_secs(1), ticket.reserve(CHUNK));
    let second = reserve().await.expect("2 is only pinned");
    assert_eq!(here(&memory, &space), [0, 1]);
    assert!(reserve().await.is_err(), "what is dirty or in use stays");
    assert_eq!(memory.stats().pinned_chunks, 2);
    drop((first, second, used));
}

#[tokio::test(start_paused = true)]
async fn a_load_that_began_before_a_delete_does_not_put_the_chunk_back() {
    let (arena, space) = (arena(4), space(""));
    let memory = Memory::new(&arena, options());
    let object = || arena.try_reserve(space.layout().object_len()).unwrap().freeze();
    let before = Instant::now();
    tokio::time::advance(Duration::from_secs(1)).await;
    memory.delete(&key(&space, 0));
    assert!(!memory.insert(key(&space, 0), &space, object(), before));
    assert!(memory.insert(key(&space, 1), &space, object(), before));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(memory.insert(key(&space, 0), &space, object(), Instant::now()));
}

#[tokio::test(start_paused = true)]
async fn the_counts_are_those_of_what_is_there() {
    let (arena, space) = (arena(8), space(""));
    let memory = Memory::new(&arena, options());
    let bytes = space.layout().object_len() as u64;
    for i in 0..4 {
        put(&memory, &arena, &space, i);
    }
    let counts = |memory: &Memory| {
        let stats = memory.stats();
        (
            stats.chunks,
            stats.bytes / bytes,
            stats.dirty_bytes / bytes,
            stats.pinned_chunks,
        )
    };
    let soon = Instant::now() + Duration::from_secs(5);
    let chunks: Vec<_> = (0..4).map(|i| key(&space, i).1).collect();
    memory.pin(space.key(), &chunks, soon);
    for _ in 0..2 {
        memory.soil(&key(&space, 0));
        memory.soil(&key(&space, 1));
    }
    assert_eq!(counts(&memory), (4, 4, 2, 4));
    memory.clean(&key(&space, 0));
    memory.delete(&key(&space, 1));
    memory.unpin(space.key(), &chunks[2..3]);
    assert_eq!(counts(&memory), (3, 3, 0, 2));
    tokio::time::advance(Duration::from_secs(6)).await;
    assert_eq!(counts(&memory), (3, 3, 0, 0));
}
