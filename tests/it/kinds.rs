//! Ranks of models with several kinds of KV, against a node in this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::rank::{Hold, LoadJob, LoadProgress, WantedChunk, WantedKind, WorkerError};
use kvgate::protocol::{LookupRequest, Order, TokenShare};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use crate::support::daemon::{Serving, Site, eventually, id};
use crate::support::fixture::Prompt;
use crate::support::ranks::{ALONE, DealtKind, Place, TestRank, space_of, space_with};

const CHUNKS: usize = 4;
const FULL: usize = 0;
const WINDOW: usize = 1;
const STATE: usize = 2;
const DRAFT: usize = 3;

/// A model of twelve layers: full attention, two groups of windows with blocks of other sizes, states and a draft's layer.
/// Of a state's convolution all ranks have a part.
fn writers_model() -> Vec<DealtKind> {
    let kind = |members: &str, layers: &[u32], heads, row_bytes, groups| DealtKind {
        space: space_of(members, layers, heads, row_bytes),
        groups,
    };
    let full = kind(r#""kind": "full""#, &[0, 4, 8], 4, 64, vec![(vec![0, 1, 2], 16)]);
    let window = kind(
        r#""kind": {"window": 24}"#,
        &[1, 3, 5, 7, 9],
        2,
        32,
        vec![(vec![0, 2, 4], 8), (vec![1, 3], 4)],
    );
    let of_state = |layer| {
        [
            ("conv.x", layer, 4, 99),
            ("conv.b", layer, 1, 33),
            ("state", layer, 4, 999),
        ]
    };
    let state = DealtKind {
        space: space_with(r#""kind": "state""#, &[of_state(2), of_state(6)].concat()),
        groups: vec![(vec![0, 1, 2], 1), (vec![3, 4, 5], 1)],
    };
    let draft = kind(
        r#""kind": "full", "draft": "test/draft""#,
        &[10],
        4,
        16,
        vec![(vec![0], 8)],
    );
    vec![full, window, state, draft]
}

/// The same model, as another engine deals its layers.
fn readers_model() -> Vec<DealtKind> {
    let mut kinds = writers_model();
    let groups = [
        vec![(vec![2, 0], 4), (vec![1], 8)],
        vec![(vec![4], 16), (vec![0, 1, 3], 2), (vec![2], 8)],
        vec![(vec![4, 3, 5, 1, 0, 2], 1)],
        vec![(vec![0], 2)],
    ];
    for (kind, groups) in kinds.iter_mut().zip(groups) {
        kind.groups = groups;
    }
    kinds
}

fn tensor_parallel(size: u32) -> Vec<Place> {
    let place = |rank| Place {
        rank,
        world_size: size,
        tp: (size > 1).then_some((rank, size)),
        ..ALONE
    };
    (0..size).map(place).collect()
}

/// Two stages: the second one has no state.
fn stages() -> Vec<Place> {
    let place = |(rank, layers)| Place {
        rank,
        world_size: 2,
        layers: Some(layers),
        ..ALONE
    };
    [(0, (0, 7)), (1, (7, 11))].map(place).to_vec()
}

/// Ranks of which neighbours have the same heads: each prompt's tokens are dealt to `size` of them (decode context parallel).
fn dealt(tp_size: u32, size: u32, interleave: u32) -> Vec<Place> {
    let mut places = tensor_parallel(tp_size);
    for place in &mut places {
        place.tokens = TokenShare {
            rank: place.rank % size,
            size,
            interleave,
        };
    }
    places
}

/// Ranks that split a prompt's prefill: `decode` of them have a share of its tokens each, or all have all of them.
fn prefill(size: u32, decode: u32, interleave: u32) -> Vec<Place> {
    let place = |rank| Place {
        rank,
        world_size: size,
        tp: Some((0, 1)),
        tokens: TokenShare {
            rank: rank % decode,
            size: decode,
            interleave,
        },
        ..ALONE
    };
    (0..size).map(place).collect()
}

fn engine(serving: &Serving, name: &str, places: &[Place], kinds: &[DealtKind]) -> Vec<TestRank> {
    let rank = |&place| TestRank::new(&serving.client, name, place, kinds);
    places.iter().map(rank).collect()
}

fn all(chunks: impl IntoIterator<Item = usize>) -> Vec<usize> {
    chunks.into_iter().collect()
}

/// What a prefix of all chunks needs, and the draft's layers.
fn needed() -> Vec<(usize, Vec<usize>)> {
    vec![
        (FULL, all(0..CHUNKS)),
        (WINDOW, all(2..CHUNKS)),
        (STATE, vec![CHUNKS - 1]),
        (DRAFT, all(0..CHUNKS)),
    ]
}

/// What a writer keeps of a prompt.
fn computed() -> Vec<(usize, Vec<usize>)> {
    vec![
        (FULL, all(0..CHUNKS)),
        (WINDOW, all(0..CHUNKS)),
        (STATE, vec![1, 3]),
        (DRAFT, all(0..CHUNKS)),
    ]
}

async fn store(ranks: &mut [TestRank], prompt: &Prompt, kinds: &[(usize, Vec<usize>)]) {
    // Until all ranks are attached nobody knows who owns what.
    for rank in ranks.iter() {
        rank.worker.session().await.unwrap();
    }
    for rank in ranks.iter_mut() {
        kinds
            .iter()
            .for_each(|(kind, chunks)| rank.compute(*kind, chunks));
    }
    let stores = ranks.iter().map(|rank| rank.store(prompt, kinds));
    for stored in join_all(stores).await {
        for (of, (kind, chunks)) in stored.iter().zip(kinds) {
            assert_eq!(
                (of.kind, &of.there, of.refused, &of.error),
                (*kind, &all(0..chunks.len()), 0, &None)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_engine_stores_another_loads_into_groups_of_its_own() {
    type Engine = Vec<Place>;
    let cases: [(&str, Engine, Engine); 7] = [
        ("tp 1 to 1", tensor_parallel(1), tensor_parallel(1)),
        ("tp 2 to 2", tensor_parallel(2), tensor_parallel(2)),
        ("tp 1 to 2", tensor_parallel(1), tensor_parallel(2)),
        ("tp 2 to 1", tensor_parallel(2), tensor_parallel(1)),
        ("tp 4 to 2", tensor_parallel(4), tensor_parallel(2)),
        ("stages to one", stages(), tensor_parallel(1)),
        ("one to stages", tensor_parallel(1), stages()),
    ];
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    for (name, writer, reader) in cases {
        let prompt = Prompt::of(writers_model()[FULL].space.clone(), CHUNKS);
        let mut writers = engine(&serving, &format!("writer {name}"), &writer, &writers_model());
        store(&mut writers, &prompt, &computed()).await;
        for order in [Order::Chunk, Order::Layer] {
            let instance = format!("reader {name} {order:?}");
            let mut readers = engine(&serving, &instance, &reader, &readers_model());
            let wanted = needed();
            for rank in &readers {
                rank.worker.session().await.unwrap();
            }
            let loads = readers
                .iter()
                .map(|rank| rank.load(&prompt, "load", order, &wanted, 0..u32::MAX));
            for failed in join_all(loads).await {
                assert_eq!(failed, [], "{instance}");
            }
            for rank in &mut readers {
                for (kind, chunks) in &wanted {
                    for chunk in 0..CHUNKS {
                        let expected = (rank.has(*kind) && chunks.contains(&chunk)).then_some(true);
                        let is_right = rank.is_right(*kind, chunk, &(0..u32::MAX));
                        assert_eq!(is_right, expected, "{instance}, kind {kind}, chunk {chunk}");
                    }
                }
            }
            eventually(|| serving.node.status().slots.leases == 0).await;
        }
    }
}

/// What ranks store that have a share of the tokens each is what one rank has, and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_are_dealt_to_ranks_are_one_object() {
    // GQA, whose two heads are on several ranks each, MLA's latents, a state of four heads, and a draft that is not dealt.
    let kind = |members: &str, layers: &[u32], heads, row_bytes, block_tokens| DealtKind {
        space: space_of(members, layers, heads, row_bytes),
        groups: vec![((0..layers.len()).collect(), block_tokens)],
    };
    let model = |state_heads| {
        vec![
            kind(r#""kind": "full""#, &[0, 4], 2, 64, 4),
            kind(r#""kind": "full", "extra": {"of": "mla"}"#, &[1, 5], 1, 24, 4),
            kind(r#""kind": "state""#, &[2], state_heads, 999, 1),
            kind(r#""kind": "full", "draft": "test/draft""#, &[10], 2, 16, 4),
        ]
    };
    let all_chunks = all(0..CHUNKS);
    let everything: Vec<(usize, Vec<usize>)> = vec![
        (0, all_chunks.clone()),
        (1, all_chunks.clone()),
        (STATE, vec![1, 3]),
        (DRAFT, all_chunks),
    ];
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let cases: [(&str, Vec<Place>); 9] = [
        ("none", tensor_parallel(1)),
        ("4 over 2, one by one", dealt(4, 2, 1)),
        ("4 over 2, two by two", dealt(4, 2, 2)),
        ("4 over 2, block by block", dealt(4, 2, 4)),
        ("8 over 4, each head on all", dealt(8, 4, 1)),
        ("8 over 2, copies of both", dealt(8, 2, 4)),
        ("prefill alone", prefill(2, 1, 1)),
        ("prefill and decode", prefill(2, 2, 2)),
        ("prefill over 4, decode over 4", prefill(4, 4, 1)),
    ];
    for (writer, places) in &cases {
        let prompt = Prompt::of(model(1)[FULL].space.clone(), CHUNKS);
        let heads_of = |places: &[Place]| places[0].tp.map_or(1, |(_, size)| size);
        let mut writers = engine(
            &serving,
            &format!("writer {writer}"),
            places,
            &model(heads_of(places)),
        );
        store(&mut writers, &prompt, &everything).await;
        for (reader, places_of_reader) in &cases {
            let instance = format!("{writer} to {reader}");
            let mut readers = engine(
                &serving,
                &instance,
                places_of_reader,
                &model(heads_of(places_of_reader)),
            );
            let mut wanted = everything.clone();
            // States are for readers that are cut as their writer was.
            wanted.retain(|(kind, _)| *kind != STATE || heads_of(places) == heads_of(places_of_reader));
            for rank in &readers {
                rank.worker.session().await.unwrap();
            }
            let loads = readers
                .iter()
                .map(|rank| rank.load(&prompt, "load", Order::Chunk, &wanted, 0..u32::MAX));
            for failed in join_all(loads).await {
                assert_eq!(failed, [], "{instance}");
            }
            for rank in &mut readers {
                for (kind, chunks) in &wanted {
                    for &chunk in chunks {
                        let is_right = rank.is_right(*kind, chunk, &(0..u32::MAX));
                        assert_eq!(is_right, Some(true), "{instance}, kind {kind}, chunk {chunk}");
                    }
                }
            }
        }
    }
}

/// A rank writes its own tokens, and the rows of a load that are wanted, and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_load_s_rows_each_rank_writes_its_own() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let model = vec![DealtKind {
        space: space_of(r#""kind": "full""#, &[0], 1, 64),
        groups: vec![(vec![0], 4)],
    }];
    let prompt = Prompt::of(model[FULL].space.clone(), 2);
    let mut writers = engine(&serving, "writer", &dealt(2, 2, 2), &model);
    store(&mut writers, &prompt, &[(FULL, all(0..2))]).await;
    let mut readers = engine(&serving, "reader", &dealt(2, 2, 1), &model);
    for rank in &readers {
        rank.worker.session().await.unwrap();
    }
    let wanted = [(FULL, vec![1])];
    let loads = readers
        .iter()
        .map(|rank| rank.load(&prompt, "load", Order::Chunk, &wanted, 5..14));
    for failed in join_all(loads).await {
        assert_eq!(failed, []);
    }
    for rank in &mut readers {
        assert_eq!(rank.is_right(FULL, 1, &(5..14)), Some(true));
    }
}

/// Local blocks may end inside of a chunk: then the rest of its rows is written, in all groups.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_rows_that_are_wanted_are_written() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::of(writers_model()[FULL].space.clone(), CHUNKS);
    store(
        &mut engine(&serving, "writer", &[ALONE], &writers_model()),
        &prompt,
        &computed(),
    )
    .await;
    let mut readers = engine(&serving, "reader", &[ALONE], &readers_model());
    let wanted = [(FULL, vec![1]), (WINDOW, vec![1])];
    let failed = readers[0]
        .load(&prompt, "load", Order::Chunk, &wanted, 5..14)
        .await;
    assert_eq!(failed, []);
    for kind in [FULL, WINDOW] {
        assert_eq!(readers[0].is_right(kind, 1, &(5..14)), Some(true), "kind {kind}");
    }
}

fn object(site: &Site, kind: &DealtKind, prompt: &Prompt, chunk: usize) -> PathBuf {
    let root = site.root.path().join(crate::support::daemon::BUCKET);
    let name = format!("{}/{}", kind.space.key(), prompt.hashes[chunk]);
    let found = walk(root).into_iter().find(|path| path.ends_with(&name));
    found.unwrap_or_else(|| panic!("no object {name}"))
}

fn walk(folder: PathBuf) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let below = entries.flat_map(|path| if path.is_dir() { walk(path) } else { vec![path] });
    below.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_and_misses_of_one_kind_leave_the_others_alone() {
    let site = Site::new().await;
    let model = writers_model();
    let prompt = Prompt::of(model[FULL].space.clone(), CHUNKS);
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let mut kinds = computed();
    // The draft has less than the model.
    kinds[DRAFT].1.truncate(2);
    let mut writers = engine(&serving, "writer", &[ALONE], &model);
    store(&mut writers, &prompt, &kinds).await;
    serving.flush().await;
    drop(writers);
    serving.end().await;

    for damaged in [FULL, WINDOW, STATE] {
        let path = object(&site, &model[damaged], &prompt, CHUNKS - 1);
        let whole = std::fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        let last = bytes.len() - 7;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let serving = site.serve(&[]).await;
        serving.ready().await;
        for order in [Order::Chunk, Order::Layer] {
            let mut readers = engine(&serving, &format!("{order:?}"), &[ALONE], &readers_model());
            let failed = readers[0]
                .load(&prompt, "load", order, &needed(), 0..u32::MAX)
                .await;
            let last = needed()[damaged].1.len() - 1;
            let (drafts, missing): (Vec<_>, Vec<_>) = failed
                .into_iter()
                .partition(|&(kind, _)| readers[0].worker.is_draft(kind));
            assert_eq!(missing, [(damaged, last)], "{order:?}");
            assert_eq!(drafts, [(DRAFT, 2), (DRAFT, 3)], "{order:?}");
            for (kind, chunks) in needed() {
                for (index, chunk) in chunks.into_iter().enumerate() {
                    let is_missing = (kind, index) == (damaged, last) || (kind == DRAFT && index >= 2);
                    if !is_missing {
                        let is_right = readers[0].is_right(kind, chunk, &(0..u32::MAX));
                        assert_eq!(is_right, Some(true), "kind {kind}, chunk {chunk}, {order:?}");
                    }
                }
            }
        }
        serving.end().await;
        std::fs::write(&path, &whole).unwrap();
    }
}

/// The pages of all kinds are given back together, and with them all slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_were_taken_back_are_not_stored_in_any_kind() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::of(writers_model()[FULL].space.clone(), CHUNKS);
    let mut ranks = engine(&serving, "writer", &[ALONE], &writers_model());
    let hold = Hold::default();
    hold.end();
    let stored = ranks[0].store_held(&prompt, &computed(), &hold).await;
    assert!(matches!(stored, Err(WorkerError::GivenUp)), "{stored:?}");
    assert_eq!(serving.node.status().slots.filling, 0);
    // Stored next time.
    store(&mut ranks, &prompt, &computed()).await;
}

/// A job that names a kind or a group that is not there would copy less than it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_do_not_fit_the_worker_are_refused() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::of(writers_model()[FULL].space.clone(), CHUNKS);
    let model = writers_model();
    let whole = engine(&serving, "whole", &[ALONE], &model);
    let only_full = TestRank::new(&serving.client, "full", ALONE, &model[..1]);
    let other_groups = engine(&serving, "other", &[ALONE], &readers_model());
    for (rank, of) in [(&only_full, WINDOW), (&other_groups[0], FULL)] {
        let computed = whole[0].computed(&prompt, of, &[0]);
        let refused = rank.store_of(&[computed], &Hold::default()).await.unwrap_err();
        assert!(
            matches!(refused, WorkerError::Kind { .. } | WorkerError::Tables { .. }),
            "{refused}"
        );
    }
}

/// A client whose connection breaks at this call: before the node has it, or once it has and has lent slots for it.
fn cut(serving: &Serving, site: &Site, call: &'static str, is_passed_on: bool) -> Client {
    let (own, behind) = (
        site.home.path().join("cut.sock"),
        serving.config.api.socket.clone(),
    );
    let listener = UnixListener::bind(&own).unwrap();
    let node = serving.node.clone();
    tokio::spawn(async move {
        while let Ok((mut engine, _)) = listener.accept().await {
            let (behind, node) = (behind.clone(), node.clone());
            tokio::spawn(async move {
                let mut daemon = UnixStream::connect(behind).await.unwrap();
                let (mut from_engine, mut to_engine) = engine.split();
                let (mut from_daemon, mut to_daemon) = daemon.split();
                let calls = async {
                    let mut bytes = vec![0; 1 << 16];
                    // A call is one write.
                    while let Ok(read @ 1..) = from_engine.read(&mut bytes).await {
                        let is_cut = bytes.starts_with(format!("POST {call} ").as_bytes());
                        if is_cut && !is_passed_on {
                            return;
                        }
                        to_daemon.write_all(&bytes[..read]).await.unwrap();
                        if is_cut {
                            eventually(|| node.status().slots.leases > 0).await;
                            return;
                        }
                    }
                };
                let answers = async {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(read @ 1..) = from_daemon.read(&mut bytes).await {
                        // Of a load that is cut the engine learns nothing.
                        if is_passed_on && node.status().slots.leases > 0 {
                            std::future::pending::<()>().await;
                        }
                        to_engine.write_all(&bytes[..read]).await.unwrap();
                    }
                };
                tokio::select! {
                    () = calls => {}
                    () = answers => {}
                }
            });
        }
    });
    Client::new(DaemonAddress::Unix(own))
}

/// They stayed leased until the engine's end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn good_chunks_are_committed_though_the_others_can_not_be_given_up() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let client = cut(&serving, &site, "/v1/store/abort", false);
    let model = writers_model();
    let prompt = Prompt::of(model[FULL].space.clone(), 3);
    let mut rank = TestRank::new(&client, "writer", ALONE, &model);
    rank.compute(FULL, &[0, 1, 2]);
    let mut computed = rank.computed(&prompt, FULL, &[0, 1, 2]);
    // A store leaves nothing out, so this one's copy fails.
    computed.chunks[2].spans = rank.spans(FULL, 2, 0..5);
    let stored = rank.store_of(&[computed], &Hold::default()).await.unwrap();
    assert!(stored[0].error.is_some(), "{stored:?}");
    assert_eq!(serving.node.status().slots.filling, 1, "only the one that failed");
    let lookup = LookupRequest {
        space: id(&prompt.space),
        hashes: Some(prompt.hashes.clone()),
        ..LookupRequest::default()
    };
    assert_eq!(serving.client.lookup(&lookup).await.unwrap().prefix, 2);
}

/// Its slots were leased until the engine's end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_whose_answer_is_lost_is_released() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let model = writers_model();
    let prompt = Prompt::of(model[FULL].space.clone(), CHUNKS);
    let writers = &mut engine(&serving, "writer", &[ALONE], &model);
    store(writers, &prompt, &computed()).await;
    let client = cut(&serving, &site, "/v1/load", true);
    let reader = TestRank::new(&client, "reader", ALONE, &readers_model());
    let wanted = [(FULL, all(0..CHUNKS))];
    let failed = reader
        .load(&prompt, "load", Order::Chunk, &wanted, 0..u32::MAX)
        .await;
    assert_eq!(failed.len(), CHUNKS);
    eventually(|| serving.node.status().slots.leases == 0).await;
}

/// The other rank waited for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_can_not_take_part_in_a_load_says_so() {
    let site = Site::new().await;
    let serving = site
        .serve(&[("load.window", "1MiB"), ("load.join_grace", "1h")])
        .await;
    serving.ready().await;
    let model = writers_model();
    // More than the window has room for: the rest comes once all ranks have had those before.
    let all = [(FULL, all(0..90))];
    let prompt = Prompt::of(model[FULL].space.clone(), 90);
    let mut ranks = engine(&serving, "engine", &tensor_parallel(2), &model);
    store(&mut ranks, &prompt, &all).await;
    let no_tables = |hash: &kvgate::format::ChunkHash| WantedChunk {
        hash: *hash,
        spans: Vec::new(),
    };
    let misfit = [WantedKind {
        kind: FULL,
        chunks: prompt.hashes.iter().map(no_tables).collect(),
    }];
    let load = LoadJob {
        id: "load",
        kinds: &misfit,
        order: Order::Chunk,
        deadline_ms: Some(20_000),
        after: None,
    };
    let progress = Arc::new(LoadProgress::new([]));
    let refused = ranks[1].worker.load(load, &progress).await;
    assert!(matches!(refused, Err(WorkerError::Tables { .. })), "{refused:?}");
    let load = ranks[0].load(&prompt, "load", Order::Chunk, &all, 0..u32::MAX);
    let failed = tokio::time::timeout(Duration::from_secs(60), load).await;
    assert_eq!(failed.unwrap(), []);
    eventually(|| serving.node.status().slots.leases == 0).await;
}
