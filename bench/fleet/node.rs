//! A gateway of the fleet, and the prompts that come to it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate::arena::{Arena, ArenaOptions};
use kvgate::cache::gateway::{AfterMiss, Gateway, GatewayOptions, LoadSpec};
use kvgate::config::Config;
use kvgate::format::ChunkHash;
use kvgate::protocol::{Order, Strategy};
use kvgate::s3::object::{Capabilities, Condition, ObjectStore, S3Options};
use tokio::time::{Instant, sleep};

use super::bucket::{Conversation, NEW_CHUNKS, SCALE, shared_prompt};
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

pub struct Node {
    gateway: Gateway,
    store: Arc<Store>,
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

/// One that has come, and what became of it.
pub struct Prompt {
    pub came: Instant,
    pub looked_up: Duration,
    pub took: Duration,
    pub chunks: usize,
    /// A chunk that is there was not found, or not loaded.
    pub failed: bool,
}

impl Node {
    pub fn new(
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
        limits.cache.bytes = CACHE_BYTES;
        let seen: Arc<dyn ObjectStore> = Arc::<Store>::clone(&store);
        let gateway = Gateway::new(seen, arena.expect("an arena"), Capabilities::default(), limits);
        Arc::new(Self {
            gateway,
            store,
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
                node.load(turn.prompt(), turn.chunks as usize).await;
                sleep(COMPUTES).await;
                node.keep(turn).await;
            });
        }
    }

    pub async fn load_shared(self: Arc<Self>, within: f64) {
        sleep(Duration::from_secs_f64(within * fastrand::f64())).await;
        let prompt = shared_prompt(0);
        let there = prompt.len();
        self.load(prompt, there).await;
    }

    /// `there`: so many of its chunks are stored.
    async fn load(&self, prompt: Vec<ChunkHash>, there: usize) {
        let came = Instant::now();
        let space = &self.world.bucket.space;
        let deadline = came + self.limits.lookup;
        let found = self
            .gateway
            .lookup(space, &prompt, Strategy::Prefix, deadline)
            .await;
        let looked_up = came.elapsed();
        let mut loaded = 0;
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
            }
        }
        lock(&self.prompts).push(Prompt {
            came,
            looked_up,
            took: came.elapsed(),
            chunks: loaded,
            failed: loaded < there,
        });
    }

    /// What the engine has computed.
    async fn keep(&self, turn: Conversation) {
        let body = vec![0; self.world.bucket.object_len()];
        let deadline = Instant::now() + self.limits.store;
        let new = turn.prompt().split_off(turn.chunks as usize);
        debug_assert_eq!(new.len(), NEW_CHUNKS as usize);
        for chunk in new {
            let key = self.world.bucket.key(&chunk);
            let body = body.clone().into();
            if self
                .store
                .put(&key, body, Condition::IfAbsent, deadline)
                .await
                .is_err()
            {
                return;
            }
        }
        self.world.bucket.grow(turn);
    }
}
