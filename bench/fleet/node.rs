//! A gateway of the fleet, and the prompts that come to it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{StreamExt, stream};
use kvgate::arena::{Arena, ArenaOptions};
use kvgate::cache::gateway::{
    AfterMiss, FilledSlot, Gateway, GatewayOptions, LoadSpec, StoreOutcome, TierOptions,
};
use kvgate::cache::peers::Peers;
use kvgate::cache::tier::MemoryOptions;
use kvgate::config::Config;
use kvgate::format::ChunkHash;
use kvgate::protocol::{Order, Strategy, Tier};
use kvgate::s3::object::{Capabilities, S3Options};
use tokio::time::{Instant, sleep};

use super::bucket::{SCALE, shared_prompt};
use super::rgw::lock;
use super::scenario::PROMPTS;
use super::store::{Store, World};

const ARENA_BYTES: usize = 1 << 20;
/// More than it learns in a minute.
const CACHE_BYTES: usize = 1 << 20;
/// A chunk is one part.
const PART_BYTES: usize = 1 << 13;
/// Until an engine has computed what was not there.
const COMPUTES: Duration = Duration::from_millis(500);
/// Chunks of a prompt that are stored at a time.
const STORES: usize = 8;

pub struct Node {
    gateway: Gateway,
    world: Arc<World>,
    limits: Limits,
    pub prompts: Arc<Mutex<Vec<Prompt>>>,
}

#[derive(Clone, Copy)]
struct Limits {
    lookup: Duration,
    load: Duration,
    store: Duration,
}

/// What a node has with peers: a memory whose chunks they may ask for.
fn with_memory(config: &Config, peers: Arc<Peers>) -> TierOptions {
    let library = TierOptions::library();
    TierOptions {
        memory: MemoryOptions {
            watermark_percent: config.memory.watermark,
            ..library.memory
        },
        peers: Some(peers),
        load_deadline: config.load.deadline,
        shares_loads: true,
        ..library
    }
}

/// One that has come, and what became of it.
pub struct Prompt {
    pub came: Instant,
    pub looked_up: Duration,
    pub took: Duration,
    pub loaded: usize,
    /// Of these, from other gateways.
    pub from_peers: usize,
    /// A chunk that is there was not found, or not loaded.
    pub failed: bool,
}

impl Node {
    pub fn new(
        number: usize,
        world: &Arc<World>,
        config: &Config,
        options: &S3Options,
        prompts: &Arc<Mutex<Vec<Prompt>>>,
    ) -> Arc<Self> {
        let store = Store::new(world, options);
        let arena = Arena::new(&ArenaOptions {
            size: ARENA_BYTES,
            ..ArenaOptions::default()
        });
        let mut limits = GatewayOptions::from(config);
        limits.keys = world.bucket.keys.clone();
        limits.part_bytes = PART_BYTES;
        limits.get_bytes_max /= SCALE;
        limits.put_bytes_max /= SCALE;
        limits.cache.bytes = CACHE_BYTES;
        let can = Capabilities {
            if_none_match: true,
            metadata: true,
            ..Capabilities::default()
        };
        let arena = arena.expect("an arena");
        let gateway = match &world.fabric {
            None => Gateway::new(store, arena, can, limits),
            Some(fabric) => {
                let peers = fabric.peers_of(number, config, &world.names);
                let gateway = Gateway::with_tiers(store, arena, limits, with_memory(config, peers));
                gateway.found_capabilities(can);
                fabric.has_started(number, &gateway);
                gateway
            }
        };
        Arc::new(Self {
            gateway,
            world: Arc::clone(world),
            limits: Limits {
                lookup: config.lookup.deadline,
                load: config.load.deadline,
                store: config.store.deadline,
            },
            prompts: Arc::clone(prompts),
        })
    }

    /// Prompts come at random moments, however long they take.
    pub async fn serve(self: Arc<Self>, end: Instant) {
        loop {
            sleep(Duration::from_secs_f64(-(1.0 - fastrand::f64()).ln() / PROMPTS)).await;
            if Instant::now() >= end {
                return;
            }
            let turn = self.world.bucket.any_conversation();
            let node = Arc::clone(&self);
            tokio::spawn(async move {
                node.answer(&turn.prompt()).await;
                node.world.bucket.grow(turn);
            });
        }
    }

    pub async fn load_shared(self: Arc<Self>, within: f64) {
        sleep(Duration::from_secs_f64(within * fastrand::f64())).await;
        self.load(&shared_prompt()).await;
    }

    /// Loads what is there, computes the rest, and stores that.
    pub async fn answer(&self, prompt: &[ChunkHash]) {
        let loaded = self.load(prompt).await;
        sleep(COMPUTES).await;
        let new = (loaded..prompt.len()).map(|place| self.keep(prompt, place));
        let mut stores = stream::iter(new).buffered(STORES);
        // What follows one that is missing is of no use.
        while stores.next().await == Some(true) {}
    }

    /// How many chunks it loaded.
    async fn load(&self, prompt: &[ChunkHash]) -> usize {
        let came = Instant::now();
        let bucket = &self.world.bucket;
        let there = prompt.iter().take_while(|chunk| bucket.has(chunk)).count();
        let space = &bucket.space;
        let deadline = came + self.limits.lookup;
        let found = self
            .gateway
            .lookup(space, prompt, Strategy::Prefix, deadline)
            .await;
        let looked_up = came.elapsed();
        let (mut loaded, mut from_peers) = (0, 0);
        if found.prefix > 0 {
            let mut load = self.gateway.load(LoadSpec {
                space: space.clone(),
                chunks: prompt[..found.prefix].to_vec(),
                order: Order::Chunk,
                after_miss: AfterMiss::Stop,
                deadline: Instant::now() + self.limits.load,
            });
            while let Some((_, outcome)) = load.next().await {
                loaded += usize::from(outcome.is_ok());
                from_peers += usize::from(outcome.is_ok_and(|chunk| chunk.tier() == Tier::Peer));
            }
        }
        lock(&self.prompts).push(Prompt {
            came,
            looked_up,
            took: came.elapsed(),
            loaded,
            from_peers,
            failed: loaded < there,
        });
        loaded
    }

    /// Stores a chunk that the engine has computed.
    async fn keep(&self, prompt: &[ChunkHash], place: usize) -> bool {
        let Ok(mut slot) = self.gateway.reserve(&self.world.bucket.space) else {
            return false;
        };
        slot.payload_mut().fill(0);
        let chunk = FilledSlot {
            hash: prompt[place],
            parent: prompt[place.saturating_sub(1)],
            slot,
        };
        let deadline = Instant::now() + self.limits.store;
        let outcome = self.gateway.write_through(chunk, deadline).await;
        !matches!(outcome, StoreOutcome::Failed(_))
    }
}
