//! Loads of one node that want the same chunks at the same time.

use std::sync::Arc;
use std::time::Duration;

use kvgate::gateway::{AfterMiss, BehindOptions, Flow, Gateway, LoadRequest, Order, TierOptions, WhenFull};
use kvgate::object::{Capabilities, ObjectStore};
use kvgate::tier::{EvictionPolicy, MemoryOptions};
use tokio::time::Instant;

use crate::fixture::{Prompt, Site, arena, soon, store_all};
use crate::held::Held;

const BOTH: Flow = Flow {
    asks_lower: true,
    stores_lower: true,
};

fn tiers() -> TierOptions {
    TierOptions {
        memory: MemoryOptions {
            policy: EvictionPolicy::Lru,
            ttl: None,
            watermark_percent: 100,
            tenant_bytes: None,
            min_accesses: 0,
        },
        memory_flow: BOTH,
        disk: None,
        behind: BehindOptions {
            bytes_max: 1 << 20,
            when_full: WhenFull::Refuse,
            deadline: Duration::from_secs(30),
            retry_base: Duration::from_millis(100),
            retry_max: Duration::from_secs(1),
        },
        promote_bytes_max: 1 << 20,
        load_deadline: Duration::from_secs(60),
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
            Some(tiers()),
        );
        let load = |order, deadline| {
            gateway.load(LoadRequest {
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
