//! Which bytes a load asks for first, and in which order its outcomes come.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate::arena::SLOT_ALIGN;
use kvgate::cache::gateway::{AfterMiss, Gateway, GatewayOptions, LoadSpec, LoadStream, TierOptions};
use kvgate::protocol::Order;
use kvgate::protocol::Strategy;
use kvgate::s3::object::{Capabilities, ObjectStore};
use proptest::prelude::*;

use crate::support::fixture::{Prompt, Site, arena, arena_empties, lookup, soon, store_all};
use crate::support::paused_store::{Asked, Held, Line};

/// A prompt that is stored, and gateways to it.
struct Setup {
    site: Site,
    held: Arc<Held>,
    line: Line,
    prompt: Prompt,
}

/// A layer a group: six groups.
const GROUPS: usize = 6;

impl Setup {
    async fn new(chunks: usize) -> Self {
        let (held, line) = Held::new();
        let store: Arc<dyn ObjectStore> = Arc::clone(&held) as Arc<_>;
        let mut site = Site::new(store).await;
        site.capabilities = Capabilities::default();
        let prompt = Prompt::new(chunks);
        store_all(&site.gateway(), &prompt).await;
        Self {
            site,
            held,
            line,
            prompt,
        }
    }

    fn object_bytes(&self) -> usize {
        self.prompt
            .space
            .layout()
            .object_len()
            .next_multiple_of(SLOT_ALIGN)
    }

    /// With room for so many chunks.
    fn gateway(&self, arena_chunks: usize, set: impl FnOnce(&mut GatewayOptions)) -> Gateway {
        self.built_from(TierOptions::library(), arena_chunks, set)
    }

    /// The same, where loads share what they fetch, as on a node.
    fn sharing_gateway(&self, arena_chunks: usize, set: impl FnOnce(&mut GatewayOptions)) -> Gateway {
        let tiers = TierOptions {
            shares_loads: true,
            load_deadline: std::time::Duration::from_secs(60),
            ..TierOptions::library()
        };
        self.built_from(tiers, arena_chunks, set)
    }

    fn built_from(
        &self,
        tiers: TierOptions,
        arena_chunks: usize,
        set: impl FnOnce(&mut GatewayOptions),
    ) -> Gateway {
        let mut options = self.site.options();
        options.layer_part_bytes = 1;
        options.get_bytes_max = usize::MAX;
        set(&mut options);
        let arena = arena(arena_chunks * self.object_bytes());
        let gateway = Gateway::with_tiers(Arc::clone(&self.site.store), arena, options, tiers);
        gateway.found_capabilities(self.site.capabilities);
        gateway
    }

    fn load(&self, gateway: &Gateway, order: Order, after_miss: AfterMiss) -> LoadStream {
        gateway.load(LoadSpec {
            space: self.prompt.space.clone(),
            chunks: self.prompt.hashes.clone(),
            order,
            after_miss,
            deadline: soon(),
        })
    }

    /// Chunk and first plane of a GET.
    fn what(&self, asked: &Asked) -> (usize, usize) {
        let key = |hash| self.site.keys.chunk(self.prompt.space.key(), hash);
        let mut hashes = self.prompt.hashes.iter();
        let chunk = hashes.position(|hash| key(hash) == asked.key).unwrap();
        let layout = self.prompt.space.layout();
        let plane = (0..layout.planes()).find(|&plane| layout.plane(plane).end > asked.range.start);
        (chunk, plane.unwrap())
    }

    fn damage(&self, chunk: usize, plane: usize) {
        let byte = self.prompt.space.layout().plane(plane).start + 5;
        self.held.damage(&self.site.key(&self.prompt, chunk), byte);
    }

    /// Outcomes as (chunk, first plane or the miss's code); checks every byte.
    async fn outcomes(&self, mut load: LoadStream) -> Vec<(usize, Result<usize, String>)> {
        let mut outcomes = Vec::new();
        while let Some((chunk, outcome)) = load.next().await {
            let outcome = outcome.map(|loaded| {
                let payload = self.prompt.payload(chunk);
                let layout = self.prompt.space.layout();
                let planes = loaded.planes();
                let of = |plane: usize| {
                    let bytes = layout.plane(plane);
                    &payload[bytes.start - layout.header_len()..bytes.end - layout.header_len()]
                };
                for plane in planes.clone() {
                    assert!(
                        loaded.plane(plane)[..] == *of(plane),
                        "chunk {chunk}, plane {plane}"
                    );
                }
                assert!(loaded.payload()[..] == planes.clone().map(of).collect::<Vec<_>>().concat());
                assert_eq!(loaded.hash(), self.prompt.hashes[chunk]);
                planes.start
            });
            outcomes.push((chunk, outcome.map_err(|miss| miss.code().to_owned())));
        }
        outcomes
    }
}

/// (chunk, first plane) of layer order without misses.
fn layer_by_layer(chunks: usize, window: usize) -> Vec<(usize, usize)> {
    let chunks: Vec<usize> = (0..chunks).collect();
    let windows = chunks.chunks(window);
    windows
        .flat_map(|window| (0..GROUPS).flat_map(|group| window.iter().map(move |&chunk| (chunk, group))))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn outcomes_come_layer_by_layer() {
    let setup = Setup::new(5).await;
    for (arena_chunks, window) in [(20, 5), (10, 5), (9, 4), (5, 2), (4, 2)] {
        let gateway = setup.gateway(arena_chunks, |_| {});
        for known in [false, true] {
            if known {
                lookup(&gateway, &setup.prompt, Strategy::Exact).await;
            }
            let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
            assert_eq!((load.order(), load.window()), (Order::Layer, window));
            let outcomes = setup.outcomes(load).await;
            let expected: Vec<_> = layer_by_layer(5, window)
                .into_iter()
                .map(|(chunk, group)| (chunk, Ok(group)))
                .collect();
            assert_eq!(outcomes, expected, "room for {arena_chunks}");
            assert_eq!(gateway.arena().stats().used_bytes, 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn groups_are_whole_layers_of_about_the_size_that_is_wished() {
    let setup = Setup::new(2).await;
    let gateway = setup.gateway(20, |options| options.layer_part_bytes = 3 * 16_384);
    let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
    let planes: Vec<_> = load
        .collect()
        .await
        .into_iter()
        .map(|outcome| outcome.unwrap().planes())
        .collect();
    assert_eq!(planes, [0..3, 0..3, 3..6, 3..6]);
    let gateway = setup.gateway(20, |options| options.layer_part_bytes = usize::MAX);
    let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
    assert_eq!(setup.outcomes(load).await, [(0, Ok(0)), (1, Ok(0))]);
}

#[tokio::test(start_paused = true)]
async fn without_room_for_two_chunks_it_is_chunk_order_and_says_so() {
    let setup = Setup::new(3).await;
    for arena_chunks in [1, 2, 3] {
        let gateway = setup.gateway(arena_chunks, |_| {});
        let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
        assert_eq!((load.order(), load.window()), (Order::Chunk, 1));
        let outcomes = setup.outcomes(load).await;
        assert_eq!(outcomes, [(0, Ok(0)), (1, Ok(0)), (2, Ok(0))]);
    }
    // One chunk has its layers in order wherever it fits.
    let one = Setup::new(1).await;
    let gateway = one.gateway(1, |_| {});
    let load = one.load(&gateway, Order::Layer, AfterMiss::Stop);
    assert_eq!((load.order(), load.window()), (Order::Layer, 1));
    let expected: Vec<_> = (0..GROUPS).map(|group| (0, Ok(group))).collect();
    assert_eq!(one.outcomes(load).await, expected);
}

/// However the answers come, and although nothing limits what is in flight.
#[tokio::test(start_paused = true)]
async fn layer_0_of_every_chunk_arrives_before_the_last_layer_of_any() {
    const CHUNKS: usize = 4;
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut setup = Setup::new(CHUNKS).await;
        let gateway = setup.gateway(20, |_| {});
        if seed % 2 == 0 {
            lookup(&gateway, &setup.prompt, Strategy::Exact).await;
        }
        setup.held.hold();
        let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
        let (mut waiting, mut landed) = (Vec::new(), BTreeSet::new());
        while landed.len() < CHUNKS * GROUPS {
            waiting.extend(setup.line.still().await);
            for asked in &waiting {
                let (chunk, group) = setup.what(asked);
                assert!(
                    group == 0 || landed.contains(&(chunk, 0)),
                    "its version is not known"
                );
                let before =
                    (0..CHUNKS).flat_map(|chunk| (0..group.saturating_sub(1)).map(move |g| (chunk, g)));
                for before in before {
                    assert!(
                        landed.contains(&before),
                        "group {group} is asked for without {before:?}"
                    );
                }
            }
            let groups: BTreeSet<_> = waiting.iter().map(|asked| setup.what(asked).1).collect();
            assert!(groups.len() <= 2, "{groups:?}");
            assert!(!waiting.is_empty(), "it goes on");
            let asked = waiting.swap_remove(random.usize(..waiting.len()));
            landed.insert(setup.what(&asked));
            asked.go();
        }
        let expected: Vec<_> = layer_by_layer(CHUNKS, CHUNKS)
            .into_iter()
            .map(|(chunk, group)| (chunk, Ok(group)))
            .collect();
        assert_eq!(setup.outcomes(load).await, expected);
    }
}

/// The group after the one that is under way is asked for already: no pause between groups.
#[tokio::test(start_paused = true)]
async fn two_groups_are_under_way() {
    let mut setup = Setup::new(2).await;
    let gateway = setup.gateway(20, |_| {});
    setup.held.hold();
    let _load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
    let what =
        |setup: &Setup, asked: &[Asked]| asked.iter().map(|asked| setup.what(asked)).collect::<Vec<_>>();
    let mut asked = setup.line.still().await;
    assert_eq!(what(&setup, &asked), [(0, 0), (1, 0)]);
    asked.remove(0).go();
    asked.extend(setup.line.still().await);
    assert_eq!(what(&setup, &asked), [(1, 0), (0, 1)]);
    asked.remove(0).go();
    asked.extend(setup.line.still().await);
    assert_eq!(what(&setup, &asked), [(0, 1), (1, 1), (0, 2), (1, 2)]);
    asked.remove(0).go();
    let more = setup.line.still().await;
    assert!(more.is_empty(), "group 1 of chunk 1 is not here");
}

/// The next window's first group is under way with this one's last.
#[tokio::test(start_paused = true)]
async fn windows_follow_without_a_pause() {
    let mut setup = Setup::new(4).await;
    let gateway = setup.gateway(4, |_| {});
    setup.held.hold();
    let load = setup.load(&gateway, Order::Layer, AfterMiss::Stop);
    assert_eq!(load.window(), 2);
    let mut waiting = Vec::new();
    loop {
        let asked = setup.line.still().await;
        if asked.is_empty() {
            break;
        }
        for asked in asked {
            match setup.what(&asked) {
                (0 | 1, 0..=4) => asked.go(),
                what => {
                    waiting.push(what);
                    std::mem::forget(asked);
                }
            }
        }
    }
    assert_eq!(waiting, [(0, 5), (1, 5), (2, 0), (3, 0)]);
}

/// One part at a time: what goes first is exactly the order of the plan, and the earlier load's.
#[tokio::test(start_paused = true)]
async fn earlier_loads_and_what_is_needed_first_go_first() {
    const CHUNKS: usize = 3;
    // It is more than twice what may be in flight, so its parts are larger.
    let chunk_by_chunk = || (0..CHUNKS).flat_map(|chunk| [0, 3].map(|plane| (chunk, plane)));
    for known in [false, true] {
        for order in [Order::Chunk, Order::Layer] {
            let mut setup = Setup::new(CHUNKS).await;
            let gateway = setup.gateway(20, |options| options.get_bytes_max = 1);
            if known {
                lookup(&gateway, &setup.prompt, Strategy::Exact).await;
            }
            setup.held.hold();
            let first = setup.load(&gateway, order, AfterMiss::Stop);
            let second = setup.load(&gateway, Order::Chunk, AfterMiss::Stop);
            let mut expected: Vec<_> = match order {
                Order::Chunk => chunk_by_chunk().collect(),
                Order::Layer => layer_by_layer(CHUNKS, CHUNKS),
            };
            expected.extend(chunk_by_chunk());
            for expected in expected {
                let mut asked = setup.line.still().await;
                assert_eq!(asked.len(), 1, "one at a time");
                let asked = asked.remove(0);
                assert_eq!(setup.what(&asked), expected, "{order:?}, known: {known}");
                asked.go();
            }
            for outcome in first.collect().await.into_iter().chain(second.collect().await) {
                outcome.unwrap();
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_load_that_is_dropped_gives_everything_back() {
    for order in [Order::Chunk, Order::Layer] {
        for steps in 0..30 {
            let mut setup = Setup::new(4).await;
            let gateway = setup.gateway(6, |options| options.get_bytes_max = 100_000);
            setup.held.hold();
            let mut load = setup.load(&gateway, order, AfterMiss::Stop);
            let mut kept = Vec::new();
            for _ in 0..steps {
                let asked = setup.line.still().await;
                asked.into_iter().for_each(Asked::go);
                if let Ok(Some((_, outcome))) =
                    tokio::time::timeout(std::time::Duration::from_millis(1), load.next()).await
                {
                    kept.push(outcome.unwrap());
                }
            }
            let left = setup.line.still().await;
            drop(load);
            assert!(setup.line.still().await.is_empty(), "nothing new is asked for");
            assert!(
                left.into_iter().all(|asked| asked.is_given_up()),
                "and nobody waits for what was"
            );
            let chunks: BTreeSet<_> = kept.iter().map(|loaded| loaded.hash().to_string()).collect();
            assert_eq!(
                gateway.arena().stats().slots,
                chunks.len(),
                "only what was handed out is kept"
            );
            drop(kept);
            assert_eq!(gateway.arena().stats().used_bytes, 0);
        }
    }
}

/// Each holds chunks while it waits for more, and some are given up on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_of_both_orders_share_a_small_arena() {
    let setup = Setup::new(12).await;
    for room in [4, 5, 9] {
        let gateway = setup.gateway(room, |options| options.get_bytes_max = 100_000);
        all_end(&setup, &gateway, |number| number % 4 == 3).await;
    }
}

/// A load in chunk order held slots while it waited for a chunk of one in layer order, which waited for slots before it went
/// on with that chunk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_that_wait_for_each_others_chunks_share_a_small_arena() {
    let setup = Setup::new(12).await;
    for room in [4, 5, 9].repeat(10) {
        let gateway = setup.sharing_gateway(room, |options| options.get_bytes_max = 100_000);
        all_end(&setup, &gateway, |_| false).await;
    }
}

/// Of twelve loads at once all chunks come, but for those that are given up on the way.
async fn all_end(setup: &Setup, gateway: &Gateway, is_given_up: impl Fn(usize) -> bool) {
    let loads = (0..12).map(async |number| {
        let order = if number % 3 == 0 {
            Order::Chunk
        } else {
            Order::Layer
        };
        let mut load = setup.load(gateway, order, AfterMiss::Stop);
        if is_given_up(number) {
            for _ in 0..2 * number {
                drop(load.next().await);
            }
            return;
        }
        let outcomes = setup.outcomes(load).await;
        let expected = if order == Order::Chunk { 12 } else { 12 * GROUPS };
        assert_eq!(outcomes.len(), expected);
        assert!(
            outcomes.iter().all(|(_, outcome)| outcome.is_ok()),
            "{outcomes:?}"
        );
    });
    let all = futures::future::join_all(loads);
    let in_time = tokio::time::timeout(std::time::Duration::from_secs(50), all).await;
    assert!(in_time.is_ok(), "they wait for each other");
    arena_empties(gateway).await;
}

#[tokio::test(start_paused = true)]
async fn a_chunk_stored_anew_since_the_lookup_is_loaded() {
    let setup = Setup::new(3).await;
    let reader = setup.gateway(20, |_| {});
    lookup(&reader, &setup.prompt, Strategy::Exact).await;
    // The same bytes under another ETag.
    let writer = setup.gateway(20, |options| options.digest = kvgate::format::DigestKind::Blake3);
    setup.site.remove(setup.site.key(&setup.prompt, 1)).await;
    crate::support::fixture::store_chunk(&writer, &setup.prompt, 1).await;
    let outcomes = setup
        .outcomes(setup.load(&reader, Order::Layer, AfterMiss::Stop))
        .await;
    assert!(outcomes.len() == 3 * GROUPS && outcomes.iter().all(|(_, outcome)| outcome.is_ok()));
}

/// The obvious twin of the outcomes' order. `faults` tells for each chunk the group that is damaged.
fn outcomes_of(
    faults: &[Option<usize>],
    window: usize,
    after_miss: AfterMiss,
) -> Vec<(usize, Result<usize, String>)> {
    let mut outcomes = Vec::new();
    let mut over = vec![false; faults.len()];
    for (chunk, group) in layer_by_layer(faults.len(), window) {
        if over[chunk] {
            continue;
        }
        if faults[chunk] != Some(group) {
            over[chunk] = group + 1 == GROUPS;
            outcomes.push((chunk, Ok(group)));
            continue;
        }
        over[chunk] = true;
        outcomes.push((chunk, Err("bad_digest".into())));
        if after_miss == AfterMiss::Stop {
            for (later, over) in over.iter_mut().enumerate().skip(chunk + 1) {
                if !std::mem::replace(over, true) {
                    outcomes.push((later, Err("run_ended".into())));
                }
            }
        }
    }
    outcomes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn misses_end_what_they_should_and_nothing_else(
        faults in prop::collection::vec(prop::option::weighted(0.3, 0..GROUPS), 1..8),
        room in 4_usize..20,
        stop in any::<bool>(),
        known in any::<bool>(),
        parts in 1_usize..40,
    ) {
        let after_miss = if stop { AfterMiss::Stop } else { AfterMiss::Continue };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let setup = Setup::new(faults.len()).await;
            for (chunk, fault) in faults.iter().enumerate() {
                if let Some(group) = fault {
                    setup.damage(chunk, *group);
                }
            }
            let gateway = setup.gateway(room, |options| options.get_bytes_max = parts * 16_384);
            if known {
                lookup(&gateway, &setup.prompt, Strategy::Exact).await;
            }
            let load = setup.load(&gateway, Order::Layer, after_miss);
            let window = load.window();
            prop_assert_eq!(window, faults.len().min(room / 2));
            prop_assert_eq!(setup.outcomes(load).await, outcomes_of(&faults, window, after_miss));
            // A load that was ended gives its slots back as its tasks end.
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            prop_assert_eq!(gateway.arena().stats().used_bytes, 0);
            let found = lookup(&gateway, &setup.prompt, Strategy::Exact).await;
            for (chunk, fault) in faults.iter().enumerate().filter(|_| !stop) {
                prop_assert_eq!(found.mask.get(chunk), fault.is_none(), "quarantined if damaged");
            }
            Ok(())
        })?;
    }
}
