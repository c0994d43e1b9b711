//! The daemon, as engines use it.

use std::time::Duration;

use aws_credential_types::Credentials;
use kvgate::engine::client::{ApiSession, ClientError, LoadLines};
use kvgate::format::Space;
use kvgate::protocol::Order;
use kvgate::protocol::{
    CommitOutcome, LoadLine, LookupRequest, ReservedChunk, SlotName, Strategy, TokenShare,
};
use kvgate::s3::fanout::{BreakerPhase, EndpointState};

use crate::support::daemon::{
    Serving, Site, all, alone, chunks, eventually, id, load, load_request, store, write,
};
use crate::support::fixture::{Prompt, space};

fn code(error: &ClientError) -> String {
    match error {
        ClientError::Refused(problem) => problem.code.clone(),
        other => panic!("{other}"),
    }
}

fn slot_of(chunk: &ReservedChunk) -> SlotName {
    match chunk {
        &ReservedChunk::Slot { slot, generation, .. } => SlotName { slot, generation },
        ReservedChunk::Skip { skip } => panic!("{skip}"),
    }
}

async fn lookup(serving: &Serving, prompt: &Prompt) -> kvgate::protocol::LookupAnswer {
    let request = LookupRequest {
        space: id(&prompt.space),
        hashes: Some(prompt.hashes.clone()),
        strategy: Some(Strategy::Exact),
        ..LookupRequest::default()
    };
    serving.client.lookup(&request).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_committed_chunk_is_a_hit_at_once_and_on_s3_after_a_flush() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(12);
    let engine = serving.attach("one").await;
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["stored"; 12]);
    let found = lookup(&serving, &prompt).await;
    assert_eq!((found.prefix, found.tiers.len()), (12, 1), "{found:?}");
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("memory", 12));
    assert_eq!(load(&engine, &prompt, "b", Order::Layer).await, all("memory", 12));
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["present"; 12]);
    serving.flush().await;
    drop(engine);
    assert_eq!(serving.end().await.dropped, 0);

    // A node that knows nothing.
    let serving = site.serve(&[]).await;
    serving.ready().await;
    serving.client.declare(&prompt.space).await.unwrap();
    let found = lookup(&serving, &prompt).await;
    assert_eq!(serde_json::to_value(&found.tiers).unwrap()[0]["tier"], "s3");
    let engine = serving.attach("two").await;
    assert_eq!(load(&engine, &prompt, "c", Order::Layer).await, all("s3", 12));
    assert_eq!(load(&engine, &prompt, "d", Order::Chunk).await, all("memory", 12));
    let status = serving.client.status().await.unwrap();
    assert_eq!(status["slots"]["leases"], 0, "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_say_the_same_as_json_and_as_bytes() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(20);
    let engine = serving.attach("one").await;
    let some = Prompt {
        space: prompt.space.clone(),
        root: prompt.root,
        hashes: prompt.hashes[..13].to_vec(),
    };
    store(&serving.client, &engine, &some).await;
    let space = id(&prompt.space);
    for strategy in ["exact", "prefix"] {
        let query = format!("strategy={strategy}&pin_ms=500");
        let found = serving
            .client
            .lookup_hashes(&space, &prompt.hashes, &query)
            .await
            .unwrap();
        assert_eq!((found.prefix, found.mask.count()), (13, 13));
        assert_eq!(found.unknown.count(), 0);
        assert_eq!((found.memory.count(), found.disk.count()), (0, 0), "nobody asked");
        let query = query + "&tiers=true";
        let found = serving.client.lookup_hashes(&space, &prompt.hashes, &query).await;
        let found = found.unwrap();
        assert_eq!((found.memory.count(), found.disk.count()), (13, 0));
    }
    let json = lookup(&serving, &prompt).await;
    assert_eq!((json.prefix, json.chunks), (13, 20));
    // By the first half of the id, and by tokens.
    let short = serving
        .client
        .lookup_hashes(&space[..32], &prompt.hashes, "")
        .await;
    assert_eq!(short.unwrap().prefix, 13);
    let status = serving.client.status().await.unwrap();
    assert_eq!(status["tiers"]["memory"]["pinned_chunks"], 13);
    eventually(|| serving.node.status().tiers.memory.pinned_chunks == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_is_published_when_all_of_its_owners_have_committed() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let space = id(&prompt.space);
    let first = serving.rank("engine", 0, 2).await;
    let reserve = || first.reserve(&space, chunks(&prompt));
    let skip = |word: &str| ReservedChunk::Skip {
        skip: word.to_owned(),
    };
    assert_eq!(
        reserve().await.unwrap().chunks,
        [skip("pending")],
        "who owns what is not known yet"
    );
    let second = serving.rank("engine", 1, 2).await;

    let one = reserve().await.unwrap();
    assert_eq!(one.own[0].heads, (0, 2));
    assert_eq!(
        reserve().await.unwrap().chunks,
        [skip("pending")],
        "another call of the same rank does not write there too"
    );
    let two = second.reserve(&space, chunks(&prompt)).await.unwrap();
    assert_eq!(
        (two.own[0].heads, &two.chunks),
        ((2, 4), &one.chunks),
        "one slot for both"
    );
    let other = serving.attach("other").await;
    let others = other.reserve(&space, chunks(&prompt)).await.unwrap();
    assert_eq!(others.chunks, [skip("pending")]);

    let ReservedChunk::Slot {
        slot,
        generation,
        offset,
    } = one.chunks[0]
    else {
        panic!("{one:?}");
    };
    let name = SlotName { slot, generation };
    // Each writes its own heads of every plane.
    let layout = prompt.space.layout();
    let payload = prompt.payload(0);
    let planes = (0..layout.planes()).map(|plane| layout.plane(plane));
    for plane in planes {
        let start = plane.start - layout.header_len();
        let half = plane.len() / 2;
        first
            .arena
            .copy_in(offset + start, &payload[start..start + half])
            .unwrap();
        second
            .arena
            .copy_in(offset + start + half, &payload[start + half..start + plane.len()])
            .unwrap();
    }
    let refused = other.commit(vec![name]).await.unwrap();
    assert!(matches!(&refused.slots[0], CommitOutcome::Refused { code, .. } if code == "not_yours"));
    let committed = |published| vec![CommitOutcome::Ok { published }];
    assert_eq!(first.commit(vec![name]).await.unwrap().slots, committed(false));
    assert_eq!(lookup(&serving, &prompt).await.prefix, 0, "half of it is no hit");
    let again = first.commit(vec![name]).await.unwrap();
    assert!(matches!(&again.slots[0], CommitOutcome::Refused { code, .. } if code == "not_yours"));
    assert_eq!(second.commit(vec![name]).await.unwrap().slots, committed(true));
    assert_eq!(lookup(&serving, &prompt).await.prefix, 1);
    assert_eq!(load(&other, &prompt, "x", Order::Chunk).await, all("memory", 1));
}

/// It had committed its share of a chunk. Those who were still to write then wrote less, and the chunk was published.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_came_back_with_other_layers_left_some_to_nobody() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let space = id(&prompt.space);
    let rank = async |rank, layers| {
        let request = kvgate::protocol::AttachRequest {
            rank,
            world_size: 2,
            layers: Some(layers),
            ..alone("engine")
        };
        serving.client.attach(&request).await.unwrap()
    };
    let first = rank(0, (0, 3)).await;
    // It has all layers, and owns those that the first one hasn't.
    let second = rank(1, (0, 6)).await;
    let begun = first.reserve(&space, chunks(&prompt)).await.unwrap();
    let name = write(&first, &prompt, 0, &begun.own, &begun.chunks[0]);
    let committed = first.commit(vec![name]).await.unwrap();
    assert_eq!(committed.slots, [CommitOutcome::Ok { published: false }]);
    drop(first);
    eventually(|| serving.node.status().sessions.len() == 1).await;
    let first = rank(0, (0, 1)).await;
    let joined = second.reserve(&space, chunks(&prompt)).await.unwrap();
    assert_eq!(joined.own[0].planes, (1, 6));
    let pending = ReservedChunk::Skip {
        skip: "pending".to_owned(),
    };
    assert_eq!(joined.chunks, [pending]);
    assert_eq!(serving.node.status().slots.spoilt, 0, "nobody writes there");

    // Anew, all together.
    for (rank, published) in [(&first, false), (&second, true)] {
        let reserved = rank.reserve(&space, chunks(&prompt)).await.unwrap();
        let name = write(rank, &prompt, 0, &reserved.own, &reserved.chunks[0]);
        let committed = rank.commit(vec![name]).await.unwrap();
        assert_eq!(committed.slots, [CommitOutcome::Ok { published }]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_comes_too_late_or_dies_leaves_nothing_half_done() {
    let site = Site::new().await;
    let serving = site.serve(&[("store.commit_timeout", "1500ms")]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let space = id(&prompt.space);
    let first = serving.rank("engine", 0, 2).await;
    let second = serving.rank("engine", 1, 2).await;
    let reserved = first.reserve(&space, chunks(&prompt)).await.unwrap();
    let name = write(&first, &prompt, 0, &reserved.own, &reserved.chunks[0]);
    assert_eq!(
        name,
        slot_of(&second.reserve(&space, chunks(&prompt)).await.unwrap().chunks[0])
    );
    let committed = first.commit(vec![name]).await.unwrap();
    assert_eq!(committed.slots, [CommitOutcome::Ok { published: false }]);
    // Too long; the second one may still write there.
    eventually(|| serving.node.status().slots.spoilt == 1).await;
    let anew = slot_of(&first.reserve(&space, chunks(&prompt)).await.unwrap().chunks[0]);
    assert_ne!(
        anew.slot, name.slot,
        "nobody else gets a slot that may still be written"
    );
    let late = second.commit(vec![name]).await.unwrap();
    assert!(matches!(&late.slots[0], CommitOutcome::Refused { code, .. } if code == "spoilt"));
    eventually(|| serving.node.status().slots.spoilt <= 1).await;
    first.abort(vec![anew]).await.unwrap();

    // One that dies in the middle.
    let name = slot_of(&first.reserve(&space, chunks(&prompt)).await.unwrap().chunks[0]);
    assert_eq!(
        name,
        slot_of(&second.reserve(&space, chunks(&prompt)).await.unwrap().chunks[0])
    );
    write(
        &first,
        &prompt,
        0,
        &reserved.own,
        &ReservedChunk::Slot {
            slot: name.slot,
            generation: name.generation,
            offset: name.slot + prompt.space.layout().header_len(),
        },
    );
    drop(second);
    eventually(|| serving.node.status().sessions.len() == 1).await;
    let refused = first.commit(vec![name]).await.unwrap();
    assert!(matches!(&refused.slots[0], CommitOutcome::Refused { code, .. } if code == "spoilt"));
    assert_eq!(lookup(&serving, &prompt).await.prefix, 0);
    drop(first);
    eventually(|| serving.node.gateway().arena().stats().used_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_without_bytes_of_their_own_have_nothing_to_write() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    let latent = Space::from_json(
        r#"{"model": "test/mla", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
            "mla": {"layers": 3, "latent_dim": 64}}"#,
    )
    .unwrap();
    let prompt = Prompt::of(latent, 2);
    let first = serving.rank("engine", 0, 2).await;
    let second = serving.rank("engine", 1, 2).await;
    assert_eq!(store(&serving.client, &second, &prompt).await, ["other_rank"; 2]);
    assert_eq!(store(&serving.client, &first, &prompt).await, ["stored"; 2]);
    assert_eq!(load(&first, &prompt, "x", Order::Chunk).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_of_all_ranks_reads_s3_once() {
    let site = Site::new().await;
    let prompt = Prompt::new(10);
    site.store_by_another(&prompt, &[]).await;
    for order in [Order::Chunk, Order::Layer] {
        // So small that a rank that is behind would find them gone.
        let settings = [
            ("arena.size", "2MiB"),
            ("load.reserve", "1MiB"),
            ("store.write_behind", "1MiB"),
        ];
        let serving = site.serve(&settings).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let ranks = [
            serving.rank("engine", 0, 3).await,
            serving.rank("engine", 1, 3).await,
            serving.rank("engine", 2, 3).await,
        ];
        let before = serving.node.gateway().requests();
        let loads = ranks.iter().map(|rank| load(rank, &prompt, "request-1", order));
        for words in futures::future::join_all(loads).await {
            assert_eq!(words, all("s3", 10));
        }
        let gets = serving.node.gateway().requests().since(&before).get;
        // 100 KB a chunk, in parts of whole planes.
        assert!(gets <= 10 * 6, "{gets} GETs");
        let per_chunk = gets / 10;
        assert_eq!(gets, per_chunk * 10, "each chunk once");
        let taken = ranks[0].load(load_request(&prompt, "request-1", order)).await;
        if let Err(error) = taken {
            assert_eq!(code(&error), "load_taken");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_end_with_their_session_and_not_before() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(4);
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let mut lines = engine
        .load(load_request(&prompt, "kept", Order::Chunk))
        .await
        .unwrap();
    let mut slots = Vec::new();
    while let Some(line) = lines.next().await.unwrap() {
        if let LoadLine::Here { slot, generation, .. } = line {
            slots.push((slot, generation));
        }
    }
    assert_eq!(serving.node.status().slots.leases, 4);
    // Everything else may go, these may not.
    let more = Prompt::new(400);
    store(&serving.client, &engine, &more).await;
    serving.flush().await;
    for (slot, generation) in &slots {
        assert_eq!(engine.arena.generation(*slot).unwrap(), *generation);
    }
    assert_eq!(
        load(&engine, &prompt, "again", Order::Chunk).await,
        all("memory", 4)
    );
    assert_eq!(
        serving.node.status().slots.leases,
        4,
        "another load's release is its own"
    );
    assert_eq!(engine.release("kept", None).await.unwrap(), 4);
    assert_eq!(serving.node.status().slots.leases, 0);

    let mut lines = engine
        .load(load_request(&prompt, "lost", Order::Chunk))
        .await
        .unwrap();
    while lines.next().await.unwrap().is_some() {}
    assert_eq!(serving.node.status().slots.leases, 4);
    drop(engine);
    eventually(|| serving.node.status().slots.leases == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_larger_than_its_window_goes_on_as_it_is_released() {
    let site = Site::new().await;
    let serving = site.serve(&[("load.window", "1MiB")]).await;
    serving.ready().await;
    let prompt = Prompt::new(40);
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &prompt).await;
    for order in [Order::Chunk, Order::Layer] {
        assert_eq!(
            load(&engine, &prompt, order.word(), order).await,
            all("memory", 40)
        );
    }
    // Nothing is released: what fits in the window comes, the rest is told at the deadline.
    let mut request = load_request(&prompt, "hoarder", Order::Chunk);
    request.deadline_ms = Some(500);
    let mut lines = engine.load(request).await.unwrap();
    let (mut here, mut missing) = (0, Vec::new());
    while let Some(line) = lines.next().await.unwrap() {
        match line {
            LoadLine::Here { .. } => here += 1,
            LoadLine::Missing { miss, .. } => missing.push(miss),
            LoadLine::End { .. } => {}
        }
    }
    assert_eq!(
        here,
        (1 << 20) / (prompt.space.layout().object_len().next_multiple_of(1024))
    );
    assert_eq!(missing, vec!["not_released"; 40 - here]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_of_the_same_chunks_never_wait_for_each_other() {
    let site = Site::new().await;
    let prompt = Prompt::new(12);
    site.store_by_another(&prompt, &[]).await;
    // Windows of a few chunks, groups of a layer.
    let settings = [("load.window", "1MiB"), ("load.layer_part_size", "64KiB")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    serving.client.declare(&prompt.space).await.unwrap();
    let engine = serving.attach("one").await;
    let began = std::time::Instant::now();
    let mut twice = load_request(&prompt, "twice", Order::Layer);
    twice.hashes.push(prompt.hashes[0]);
    assert_eq!(code(&engine.load(twice).await.err().unwrap()), "bad_request");
    // Below the API it does no harm.
    let request = kvgate::cache::gateway::LoadSpec {
        space: prompt.space.clone(),
        chunks: vec![prompt.hashes[0], prompt.hashes[0], prompt.hashes[1]],
        order: Order::Layer,
        after_miss: kvgate::cache::gateway::AfterMiss::Stop,
        deadline: crate::support::fixture::soon(),
    };
    let outcomes = serving.node.gateway().load(request).collect().await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    drop(outcomes);
    serving
        .node
        .gateway()
        .remove(&prompt.space, &prompt.hashes[0], crate::support::fixture::soon())
        .await
        .unwrap();
    drop(engine);
    serving.end().await;
    for round in 0..3 {
        let serving = site.serve(&settings).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engines = [
            serving.attach("a").await,
            serving.attach("b").await,
            serving.attach("c").await,
        ];
        let orders = [Order::Layer, Order::Layer, Order::Chunk];
        let loads = engines
            .iter()
            .zip(orders)
            .map(|(engine, order)| load(engine, &prompt, "all", order));
        for words in futures::future::join_all(loads).await {
            let there = words
                .iter()
                .filter(|word| *word == "s3" || *word == "memory")
                .count();
            assert_eq!(there, 11, "round {round}: {words:?}");
        }
        drop(engines);
        serving.end().await;
    }
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "nobody waited for a deadline"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_is_released_is_over() {
    let site = Site::new().await;
    let serving = site.serve(&[("load.window", "1MiB")]).await;
    serving.ready().await;
    let prompt = Prompt::new(40);
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &prompt).await;
    let mut lines = engine
        .load(load_request(&prompt, "x", Order::Chunk))
        .await
        .unwrap();
    for _ in 0..5 {
        assert!(matches!(lines.next().await.unwrap(), Some(LoadLine::Here { .. })));
    }
    let again = engine.load(load_request(&prompt, "x", Order::Chunk)).await;
    assert_eq!(code(&again.err().unwrap()), "load_taken");
    assert!(engine.release("x", None).await.unwrap() >= 5);
    let mut rest = 0;
    while lines.next().await.unwrap().is_some() {
        rest += 1;
    }
    assert!(rest < 20, "{rest} more");
    assert_eq!(serving.node.status().slots.leases, 0);
    assert_eq!(load(&engine, &prompt, "x", Order::Chunk).await, all("memory", 40));
}

/// The ranks that never came kept its window until the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_all_who_joined_have_cancelled_keeps_nothing() {
    let site = Site::new().await;
    let serving = site.serve(&[("load.window", "1MiB")]).await;
    serving.ready().await;
    let prompt = Prompt::new(40);
    let engine = serving.attach("writer").await;
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let ranks = [
        serving.rank("engine", 0, 3).await,
        serving.rank("engine", 1, 3).await,
        serving.rank("engine", 2, 3).await,
    ];
    let arena = serving.node.gateway().arena();
    // All that is not the loads' reserve, which memory gives up if nobody uses any of it.
    let is_idle = || arena.try_reserve(24 << 20).is_some();
    for order in [Order::Chunk, Order::Layer] {
        let mut lines = Vec::new();
        for rank in &ranks[..2] {
            let mut of = rank.load(load_request(&prompt, "x", order)).await.unwrap();
            assert!(matches!(of.next().await.unwrap(), Some(LoadLine::Here { .. })));
            lines.push(of);
        }
        ranks[0].release("x", None).await.unwrap();
        assert!(!is_idle(), "the other one goes on");
        ranks[1].release("x", None).await.unwrap();
        eventually(is_idle).await;
        // It may be begun anew, by whoever comes.
        store(&serving.client, &engine, &prompt).await;
        serving.flush().await;
    }
    let loads = ranks.iter().map(|rank| load(rank, &prompt, "x", Order::Chunk));
    for words in futures::future::join_all(loads).await {
        assert!(
            words.iter().all(|word| word == "memory" || word == "s3"),
            "{words:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_attach_tells_why() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.sessions", "3")]).await;
    let _one = serving.rank("engine", 0, 2).await;
    let attach = async |mut request: kvgate::protocol::AttachRequest,
                        change: &dyn Fn(&mut kvgate::protocol::AttachRequest)| {
        change(&mut request);
        let refused = serving.client.attach(&request).await;
        code(&refused.err().expect("refused"))
    };
    let base = alone("engine");
    assert_eq!(
        attach(base.clone(), &|r| {
            r.world_size = 2;
            r.tp = Some((0, 2));
        })
        .await,
        "rank_taken"
    );
    assert_eq!(
        attach(base.clone(), &|r| {
            r.world_size = 3;
            r.rank = 1;
            r.tp = Some((0, 2));
        })
        .await,
        "other_world_size"
    );
    assert_eq!(
        attach(base.clone(), &|r| {
            r.world_size = 2;
            r.rank = 2;
            r.tp = Some((0, 1));
        })
        .await,
        "bad_rank"
    );
    // Its other rank cuts heads for two.
    for tp in [Some((1, 4)), Some((0, 1)), None] {
        assert_eq!(
            attach(base.clone(), &|r| {
                (r.rank, r.world_size) = (1, 2);
                (r.tp, r.layers) = (tp, Some((0, 6)));
            })
            .await,
            "bad_rank"
        );
    }
    // Its other rank has all tokens of its heads.
    let share = |rank, interleave| TokenShare {
        rank,
        size: 2,
        interleave,
    };
    assert_eq!(
        attach(base.clone(), &|r| {
            (r.rank, r.world_size, r.tp) = (1, 2, Some((1, 2)));
            r.tokens = share(1, 16);
        })
        .await,
        "bad_rank"
    );
    for tokens in [share(2, 1), share(0, 0)] {
        assert_eq!(attach(base.clone(), &|r| r.tokens = tokens).await, "bad_request");
    }
    assert_eq!(attach(base.clone(), &|r| r.world_size = 2).await, "bad_request");
    assert_eq!(attach(base.clone(), &|r| r.world_size = 0).await, "bad_request");
    assert_eq!(attach(base.clone(), &|r| r.instance.clear()).await, "bad_request");
    let _two = serving.attach("another").await;
    let _three = serving.attach("yet another").await;
    let crowd = &|r: &mut kvgate::protocol::AttachRequest| {
        r.world_size = u32::MAX;
        r.tp = Some((0, 1));
    };
    assert_eq!(attach(alone("crowd"), crowd).await, "bad_rank");
    assert_eq!(attach(alone("third"), &|_| {}).await, "too_many");
    let prompt = Prompt::new(1);
    let unknown = serving
        .client
        .lookup_hashes(&id(&space()), &prompt.hashes, "")
        .await;
    assert_eq!(code(&unknown.unwrap_err()), "unknown_space");
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// The next chunk, which is released.
async fn released(rank: &ApiSession, lines: &mut LoadLines) {
    match lines.next().await.unwrap() {
        Some(LoadLine::Here { slot, generation, .. }) => {
            let slot = SlotName { slot, generation };
            rank.release("x", Some(vec![slot])).await.unwrap();
        }
        other => panic!("{other:?}"),
    }
}

/// The others waited for it until the deadline, with all of the load's window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_does_not_join_is_left_out() {
    let site = Site::new().await;
    let serving = site
        .serve(&[("load.window", "1MiB"), ("load.join_grace", "100ms")])
        .await;
    serving.ready().await;
    let prompt = Prompt::new(40);
    let engine = serving.attach("writer").await;
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let ranks = [
        serving.rank("engine", 0, 3).await,
        serving.rank("engine", 1, 3).await,
        serving.rank("engine", 2, 3).await,
    ];
    // More than the window holds, so the third one was left out by then; and not all.
    let mut opened = Vec::new();
    for rank in &ranks[..2] {
        opened.push(rank.load(load_request(&prompt, "x", Order::Chunk)).await.unwrap());
    }
    for _ in 0..20 {
        for (rank, lines) in ranks.iter().zip(&mut opened) {
            released(rank, lines).await;
        }
    }
    let late = load(&ranks[2], &prompt, "x", Order::Chunk).await;
    assert_eq!(late, all("joined_late", 40));
    for _ in 20..40 {
        for (rank, lines) in ranks.iter().zip(&mut opened) {
            released(rank, lines).await;
        }
    }
    for lines in &mut opened {
        assert!(lines.next().await.unwrap().is_none());
    }
}

/// One that says so is not waited for at all, whether it is first or last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_declines_a_load_is_not_waited_for() {
    let site = Site::new().await;
    let serving = site
        .serve(&[("load.window", "1MiB"), ("load.join_grace", "1h")])
        .await;
    serving.ready().await;
    let prompt = Prompt::new(40);
    let engine = serving.attach("writer").await;
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let ranks = [
        serving.rank("engine", 0, 2).await,
        serving.rank("engine", 1, 2).await,
    ];
    let decline = async |load_id: &str| {
        let mut request = load_request(&prompt, load_id, Order::Chunk);
        request.declines = true;
        let mut lines = ranks[1].load(request).await.unwrap();
        assert!(lines.next().await.unwrap().is_none());
    };
    decline("first").await;
    assert_eq!(
        load(&ranks[0], &prompt, "first", Order::Chunk).await,
        all("memory", 40)
    );
    let (words, ()) = tokio::join!(load(&ranks[0], &prompt, "last", Order::Chunk), decline("last"));
    assert_eq!(words, all("memory", 40));
    // All of them: nothing is left of it.
    decline("none").await;
}

/// The same chunks of another space are other bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_name_another_space_are_in_no_load_together() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(2);
    let other = Space::from_json(&prompt.space.canonical_json().replace("test", "other")).unwrap();
    assert_ne!(other.id(), prompt.space.id());
    for space in [&prompt.space, &other] {
        serving.client.declare(space).await.unwrap();
    }
    let ranks = [
        serving.rank("engine", 0, 2).await,
        serving.rank("engine", 1, 2).await,
    ];
    let _first = ranks[0]
        .load(load_request(&prompt, "x", Order::Chunk))
        .await
        .unwrap();
    let mut request = load_request(&prompt, "x", Order::Chunk);
    request.space = id(&other);
    let refused = ranks[1].load(request).await.err().unwrap();
    assert_eq!(code(&refused), "load_taken");
}

/// They stayed for ever: at the limit every new model was without a cache.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_space_that_nobody_asked_for_longest_makes_room() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.spaces", "3")]).await;
    serving.ready().await;
    let of = |model: &str| {
        Space::from_json(&format!(
            r#"{{"model": "{model}", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
                "mha": {{"layers": 2, "heads": 4, "head_dim": 64}}}}"#
        ))
        .unwrap()
    };
    let [first, second, third, fourth, fifth, sixth] = ["a", "b", "c", "d", "e", "f"].map(of);
    let client = &serving.client;
    // Used by an engine, and stored while S3 has not got it.
    let (prompt, engine) = (Prompt::of(first, 1), serving.attach("one").await);
    store(client, &engine, &prompt).await;
    let knows = async |space: &Space| match client.lookup_hashes(&id(space), &[], "").await {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(code(&error), "unknown_space");
            false
        }
    };
    for space in [&second, &third] {
        client.declare(space).await.unwrap();
    }
    assert!(knows(&second).await, "and asks for it");
    client.declare(&fourth).await.unwrap();
    assert!(!knows(&third).await);
    assert!(knows(&prompt.space).await && knows(&second).await && knows(&fourth).await);
    for space in [&fifth, &sixth] {
        client.declare(space).await.unwrap();
    }
    assert!(knows(&prompt.space).await, "an engine uses it");
    drop(engine);
    eventually(|| serving.node.status().sessions.is_empty()).await;
    for space in [&second, &third, &fourth] {
        client.declare(space).await.unwrap();
    }
    assert!(!knows(&prompt.space).await);
    serving.flush().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_comes_back_although_no_engine_asks_for_anything() {
    let mut site = Site::new().await;
    let settings = [
        ("endpoints.breaker_failures", "1"),
        ("endpoints.breaker_open", "100ms"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let endpoints = || serving.node.gateway().endpoints();
    let all_are = |closed: bool| {
        let endpoints = endpoints();
        !endpoints.is_empty()
            && endpoints
                .iter()
                .all(|one| (one.breaker == BreakerPhase::Closed) == closed)
    };
    site.stop_s3().await;
    let prompt = Prompt::new(1);
    let look = serving
        .client
        .lookup_space(&prompt.space, &prompt.hashes, "deadline_ms=500");
    assert_eq!(look.await.unwrap().unknown.count(), 1);
    eventually(|| all_are(false)).await;
    site.start_s3().await;
    eventually(|| all_are(true)).await;
}

/// The engine got no answer, and computed what S3 has. Flush promises that S3 has it, so each chunk is asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_outage_no_body_is_sent_that_s3_has() {
    let mut site = Site::new().await;
    let mut prompt = Prompt::new(12);
    let new = prompt.hashes.pop().unwrap();
    site.store_by_another(&prompt, &[]).await;
    prompt.hashes.push(new);
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let puts = || serving.node.gateway().requests().put;
    let before = puts();
    let engine = serving.attach("one").await;
    site.stop_s3().await;
    let look = serving
        .client
        .lookup_space(&prompt.space, &prompt.hashes, "deadline_ms=500");
    assert_eq!(look.await.unwrap().unknown.count(), 12);
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["stored"; 12]);
    site.start_s3().await;
    serving.flush().await;
    let behind = serving.node.status().tiers.write_behind;
    assert_eq!((behind.present, behind.stored, behind.dropped), (11, 1, 0));
    assert_eq!(puts() - before, 2, "space.json, and the one that S3 lacked");
    drop(engine);
    serving.end().await;
}

/// After an outage the chunks of a lookup wait before S3 is asked for them, here for an hour at most. Those behind them in
/// their prompt wait too, and no others. The disk has them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pause_after_an_outage_ends_with_a_flush_a_removal_and_where_room_is_short() {
    let mut site = Site::new().await;
    let disk = tempfile::tempdir().unwrap();
    let disk = disk.path().display().to_string();
    let settings = [
        ("store.retry_max", "1h"),
        ("store.write_behind", "4MiB"),
        ("disk.paths", disk.as_str()),
        ("disk.size", "64MiB"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let behind = || serving.node.status().tiers.write_behind;
    let dirty = || serving.node.status().tiers.disk.unwrap().disks[0].dirty;
    let mut done = 0;
    for ending in ["flush", "removal", "short of room"] {
        let prompt = Prompt::new(2);
        let chunks = (2 << 20) / prompt.space.layout().object_len();
        let more = Prompt::of(prompt.space.clone(), chunks);
        site.stop_s3().await;
        for chunks in [&prompt.hashes[..1], &more.hashes] {
            let look = serving
                .client
                .lookup_space(&prompt.space, chunks, "deadline_ms=5000");
            assert_eq!(look.await.unwrap().unknown.count(), chunks.len());
        }
        site.start_s3().await;
        let other = Prompt::new(1);
        assert_eq!(store(&serving.client, &engine, &prompt).await, ["stored"; 2]);
        assert_eq!(store(&serving.client, &engine, &other).await, ["stored"]);
        done += 1;
        eventually(|| (behind().waiting_chunks, behind().stored, dirty()) == (2, done, 2)).await;
        match ending {
            "flush" => {
                serving.flush().await;
                done += 2;
            }
            "removal" => {
                for hash in &prompt.hashes {
                    let path = format!("/v1/chunks/{}/{hash}", prompt.space.key());
                    serving.client.delete(&path).await.unwrap();
                }
            }
            _ => {
                let stored = store(&serving.client, &engine, &more).await;
                assert!(stored.iter().all(|outcome| *outcome == "stored"), "{stored:?}");
                done += 2 + chunks as u64;
            }
        }
        eventually(|| (behind().waiting_chunks, behind().stored) == (0, done)).await;
    }
    assert_eq!(behind().failed_attempts, 0);
    drop(engine);
    serving.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_committed_during_a_flush_does_not_pause() {
    let mut site = Site::new().await;
    let serving = site.serve(&[("store.retry_max", "1h")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let behind = || serving.node.status().tiers.write_behind;
    site.stop_s3().await;
    let [tried, late] = [(); 2].map(|()| Prompt::new(1));
    assert_eq!(store(&serving.client, &engine, &tried).await, ["stored"]);
    eventually(|| behind().failed_attempts > 0).await;
    let look = serving
        .client
        .lookup_space(&late.space, &late.hashes, "deadline_ms=5000");
    assert_eq!(look.await.unwrap().unknown.count(), 1);
    let commit = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(store(&serving.client, &engine, &late).await, ["stored"]);
        tokio::time::sleep(Duration::from_millis(200)).await;
        site.start_s3().await;
        eventually(|| behind().waiting_chunks == 0).await;
    };
    tokio::join!(serving.flush(), commit);
    drop(engine);
    serving.end().await;
}

/// Hosts that hang refuse nothing: no connection fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_one_too_where_s3_hangs() {
    let mut site = Site::new().await;
    let hasty = site
        .store_with(|options| options.read_timeout = Duration::from_millis(200))
        .await;
    let serving = site.serve_over(hasty, &[("store.retry_max", "1h")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    site.stop_s3().await;
    let silent = tokio::net::TcpListener::bind(site.address()).await.unwrap();
    let works = || {
        serving
            .node
            .gateway()
            .endpoints()
            .iter()
            .any(EndpointState::works)
    };
    let prompts = [(); 20].map(|()| Prompt::new(1));
    for prompt in &prompts {
        let look = serving
            .client
            .lookup_space(&prompt.space, &prompt.hashes, "deadline_ms=300");
        assert_eq!(look.await.unwrap().unknown.count(), 1);
    }
    assert!(!works(), "{:?}", serving.node.gateway().endpoints());
    drop(silent);
    site.start_s3().await;
    // The last came when no endpoint worked: of ten, not all have a pause of a second, of an hour at most.
    for prompt in &prompts[10..] {
        assert_eq!(store(&serving.client, &engine, prompt).await, ["stored"]);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let behind = serving.node.status().tiers.write_behind;
    assert!(behind.waiting_chunks > 0, "{behind:?}");
    serving.flush().await;
    drop(engine);
    serving.end().await;
}

/// An engine that finds no room ends the pause too: for want of memory, say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_pauses_where_an_engine_finds_no_room_and_while_a_node_ends() {
    let mut site = Site::new().await;
    let settings = [
        ("store.retry_max", "1h"),
        ("store.write_behind", "16MiB"),
        ("memory.tenant_max", "1MiB"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let behind = || serving.node.status().tiers.write_behind;
    let chunks = (1 << 20) / Prompt::new(1).space.layout().object_len();
    let prompt = Prompt::new(chunks);
    let last = Prompt::new(1);
    site.stop_s3().await;
    for prompt in [&prompt, &last] {
        let look = serving
            .client
            .lookup_space(&prompt.space, &prompt.hashes, "deadline_ms=5000");
        assert_eq!(look.await.unwrap().unknown.count(), prompt.hashes.len());
    }
    site.start_s3().await;
    let stored = store(&serving.client, &engine, &prompt).await;
    assert!(stored.iter().all(|outcome| *outcome == "stored"), "{stored:?}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(behind().waiting_chunks, chunks as u64);
    assert_eq!(store(&serving.client, &engine, &last).await, ["full"]);
    eventually(|| behind().waiting_chunks == 0).await;
    assert_eq!(store(&serving.client, &engine, &last).await, ["stored"]);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((behind().waiting_chunks, behind().failed_attempts), (1, 0));
    drop(engine);
    assert_eq!(serving.end().await.dropped, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_s3_refuses_are_told_as_such() {
    let site = Site::new().await;
    let wrong = Credentials::from_keys("nobody", "nothing", None);
    let store = site.store_with(|options| options.credentials = Some(wrong)).await;
    let serving = site.serve_over(store, &[]).await;
    let prompt = Prompt::new(4);
    let look = serving
        .client
        .lookup_space(&prompt.space, &prompt.hashes, "strategy=exact&deadline_ms=2000");
    assert_eq!(look.await.unwrap().unknown.count(), 4);
    let totals = serving.node.gateway().endpoints()[0].totals;
    assert!(totals.denied >= 4 && totals.refused == 0, "{totals:?}");
    let status = serving.client.status().await.unwrap();
    let told = status["troubles"].to_string();
    assert!(told.contains("does not accept the node's keys"), "{told}");
}
