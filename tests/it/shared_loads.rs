//! Loads of one node that want the same chunks at the same time.

use std::sync::Arc;
use std::time::Duration;

use kvgate::cache::gateway::{AfterMiss, BehindOptions, DiskTier, Flow, Gateway, LoadSpec, TierOptions};
use kvgate::cache::tier::{Disk, DiskOptions, EventOptions, MemoryOptions};
use kvgate::protocol::EvictionPolicy;
use kvgate::protocol::{Order, WhenFull};
use kvgate::s3::object::{Capabilities, ObjectStore};
use tokio::time::Instant;

use crate::support::daemon::eventually;
use crate::support::fixture::{Prompt, Site, arena, soon, store_all};
use crate::support::paused_store::Held;

const BOTH: Flow = Flow {
    asks_lower: true,
    stores_lower: true,
};

fn tiers(disk: Option<Disk>) -> TierOptions {
    TierOptions {
        memory: MemoryOptions {
            policy: EvictionPolicy::Lru,
            ttl: None,
            watermark_percent: 100,
            tenant_bytes: None,
            min_accesses: 0,
        },
        memory_flow: BOTH,
        disk: disk.map(|disk| DiskTier {
            disk,
            flow: BOTH,
            promotes: true,
        }),
        peers: None,
        behind: BehindOptions {
            bytes_max: 1 << 20,
            when_full: WhenFull::Refuse,
            deadline: Duration::from_secs(30),
            retry_base: Duration::from_millis(100),
            retry_max: Duration::from_secs(1),
        },
        admission: None,
        promote_bytes_max: 1 << 20,
        load_deadline: Duration::from_secs(60),
        shares_loads: true,
        events: EventOptions {
            chunks_max: 0,
            removals_max: 0,
        },
    }
}

/// Its deadline was told to those who had joined it as the chunk's miss.
#[tokio::test(start_paused = true)]
async fn the_deadline_of_a_load_is_no_miss_of_those_who_joined_it() {
    let (held, mut line) = Held::new();
    let mut site = Site::new(Arc::clone(&held) as Arc<dyn ObjectStore>).await;
    site.capabilities = Capabilities::default();
    let prompt = Prompt::new(2);
    store_all(&site.gateway(), &prompt).await;
    for (hasty, patient) in [(Order::Layer, Order::Chunk), (Order::Layer, Order::Layer)] {
        let gateway = Gateway::with_tiers(
            Arc::clone(&site.store),
            arena(8 << 20),
            site.options(),
            tiers(None),
        );
        let load = |order, deadline| {
            gateway.load(LoadSpec {
                space: prompt.space.clone(),
                chunks: prompt.hashes.clone(),
                order,
                after_miss: AfterMiss::Continue,
                deadline,
            })
        };
        held.hold();
        let hasty = load(hasty, Instant::now() + Duration::from_secs(1));
        let waiting = line.still().await;
        assert!(!waiting.is_empty());
        let patient = load(patient, soon());
        assert!(line.still().await.is_empty(), "it joined the other one");
        // Of the GETs that are under way none is answered.
        held.let_go();
        let codes: Vec<_> = hasty.collect().await;
        assert!(
            codes
                .iter()
                .all(|miss| miss.as_ref().unwrap_err().code() == "unknown"),
            "{codes:?}"
        );
        drop(waiting);
        let outcomes = patient.collect().await;
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
}

/// It had come to memory meanwhile, and was not on S3 yet.
#[tokio::test(start_paused = true)]
async fn a_load_that_joined_one_that_was_given_up_finds_the_chunk_in_memory() {
    let (held, mut line) = Held::new();
    let site = Site::new(Arc::clone(&held) as Arc<dyn ObjectStore>).await;
    let prompt = Prompt::new(1);
    let gateway = Gateway::with_tiers(
        Arc::clone(&site.store),
        arena(8 << 20),
        site.options(),
        tiers(None),
    );
    let (chunk, parent) = (prompt.hashes[0], prompt.parent(0));
    let Ok(mut reserved) = gateway
        .reserve_behind(&prompt.space, None)
        .reserve(&chunk, &parent)
    else {
        panic!("there is room")
    };
    reserved.slot.payload_mut().copy_from_slice(&prompt.payload(0));
    let load = || {
        gateway.load(LoadSpec {
            space: prompt.space.clone(),
            chunks: prompt.hashes.clone(),
            order: Order::Layer,
            after_miss: AfterMiss::Continue,
            deadline: soon(),
        })
    };
    held.hold();
    let first = load();
    let _unanswered = line.still().await;
    let second = load();
    assert!(line.still().await.is_empty(), "it joined the first one");
    assert_eq!(gateway.commit(chunk, parent, reserved), Ok(true));
    held.let_go();
    drop(first);
    let outcomes = second.collect().await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

/// A load that had read the chunk before its delete put it back to memory, and by its promotion to the disk.
#[tokio::test]
async fn a_load_that_began_before_a_delete_does_not_bring_the_chunk_back() {
    let (held, mut line) = Held::new();
    let mut site = Site::new(Arc::clone(&held) as Arc<dyn ObjectStore>).await;
    site.capabilities = Capabilities::default();
    let (deleted, other) = (Prompt::new(1), Prompt::new(1));
    store_all(&site.gateway(), &deleted).await;
    store_all(&site.gateway(), &other).await;
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::open(&DiskOptions {
        paths: vec![folder.path().to_owned()],
        size_bytes: 1 << 30,
        watermark_percent: 100,
        depth: 1,
        ..DiskOptions::default()
    });
    let disk = disk.unwrap();
    let tiers = tiers(Some(disk.clone()));
    let gateway = Gateway::with_tiers(Arc::clone(&site.store), arena(8 << 20), site.options(), tiers);
    let is_on_disk = |prompt: &Prompt| disk.has(&(prompt.space.key(), prompt.hashes[0]), Instant::now());
    for order in [Order::Chunk, Order::Layer] {
        let load = |prompt: &Prompt| {
            gateway.load(LoadSpec {
                space: prompt.space.clone(),
                chunks: prompt.hashes.clone(),
                order,
                after_miss: AfterMiss::Continue,
                deadline: soon(),
            })
        };
        held.hold();
        let mut early = load(&deleted);
        // Its last GET is answered when the chunk is nowhere any more.
        let mut last = line.next().await;
        let sections = deleted.space.layout().sections(site.options().part_bytes).len();
        for _ in 1..sections {
            last.go();
            last = line.next().await;
        }
        gateway
            .remove(&deleted.space, &deleted.hashes[0], soon())
            .await
            .unwrap();
        held.let_go();
        last.go();
        while let Some((_, outcome)) = early.next().await {
            assert!(outcome.is_ok(), "it goes on: {outcome:?}");
        }
        let late = load(&deleted).collect().await;
        assert_eq!(late[0].as_ref().unwrap_err().code(), "absent");
        // A later promotion is there. So the first one would be there, too.
        assert!(load(&other).collect().await.iter().all(Result::is_ok));
        eventually(|| is_on_disk(&other)).await;
        assert!(!is_on_disk(&deleted));
        gateway
            .remove(&other.space, &other.hashes[0], soon())
            .await
            .unwrap();
        // Stored anew it is there like any.
        store_all(&site.gateway(), &deleted).await;
        store_all(&site.gateway(), &other).await;
        gateway.forget_existence();
        assert!(load(&deleted).collect().await.iter().all(Result::is_ok));
        eventually(|| is_on_disk(&deleted)).await;
        gateway
            .remove(&deleted.space, &deleted.hashes[0], soon())
            .await
            .unwrap();
        assert!(!is_on_disk(&deleted));
        store_all(&site.gateway(), &deleted).await;
        gateway.forget_existence();
    }
}

/// The write-behind gave its PUT up, but S3 had received it, and carried it out after the DELETE.
#[tokio::test]
async fn a_delete_comes_after_this_node_s_own_put() {
    let (held, mut line) = Held::new();
    let site = Site::new(Arc::clone(&held) as Arc<dyn ObjectStore>).await;
    let prompt = Prompt::new(2);
    let gateway = Gateway::with_tiers(
        Arc::clone(&site.store),
        arena(8 << 20),
        site.options(),
        tiers(None),
    );
    let commit = |i: usize| {
        let (chunk, parent) = (prompt.hashes[i], prompt.parent(i));
        let Ok(mut reserved) = gateway
            .reserve_behind(&prompt.space, None)
            .reserve(&chunk, &parent)
        else {
            panic!("there is room")
        };
        reserved.slot.payload_mut().copy_from_slice(&prompt.payload(i));
        assert_eq!(gateway.commit(chunk, parent, reserved), Ok(true));
    };
    // The space is declared with it.
    commit(0);
    assert_eq!(gateway.flush(soon()).await.pending, 0);
    held.hold_puts();
    commit(1);
    let put = line.next().await;
    let remove = |deadline| gateway.remove(&prompt.space, &prompt.hashes[1], deadline);
    let late = remove(Instant::now() + Duration::from_millis(50))
        .await
        .unwrap_err();
    assert!(late.to_string().contains("waiting for a store"), "{late}");
    let (key, end) = (put.key.clone(), async { put.go() });
    let (removed, ()) = tokio::join!(remove(soon()), end);
    removed.unwrap();
    assert!(!held.has(&key), "it came back");
}
