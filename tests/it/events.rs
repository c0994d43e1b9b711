//! KV events over the API: binding, following, waiting. `tests/engines/test_events.py` has vLLM's own events.

use std::cell::RefCell;
use std::time::Duration;

use kvgate::engine::client::ClientError;
use kvgate::engine::follower::{Follower, TierChange};
use kvgate::protocol::{BindRequest, BoundChunk, EventsAnswer, EventsRequest, Tier};
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use crate::support::daemon::{Serving, Site, eventually, id, store};
use crate::support::fixture::Prompt;

const SCHEME: &str = "blocks of 16";

fn bound(prompt: &Prompt) -> Vec<BoundChunk> {
    let tokens = prompt.space.chunk_tokens();
    let chunk = |(i, hash): (usize, &kvgate::format::ChunkHash)| BoundChunk {
        hash: *hash,
        parent: i.checked_sub(1).map(|before| prompt.hashes[before]),
        tokens: (0..tokens)
            .map(|token| token + 100 * u32::try_from(i).unwrap())
            .collect(),
        event: format!("event {i}"),
    };
    prompt.hashes.iter().enumerate().map(chunk).collect()
}

fn binding(prompt: &Prompt) -> BindRequest {
    BindRequest {
        space: id(&prompt.space),
        scheme: SCHEME.to_owned(),
        chunks: bound(prompt),
        block_size: None,
        lora_name: String::new(),
        cache_salt: String::new(),
    }
}

fn question(prompt: &Prompt, cursor: Option<String>, wait: Duration) -> EventsRequest {
    EventsRequest {
        space: id(&prompt.space),
        scheme: SCHEME.to_owned(),
        cursor,
        wait_ms: u64::try_from(wait.as_millis()).unwrap(),
    }
}

async fn events(serving: &Serving, prompt: &Prompt, cursor: Option<String>) -> EventsAnswer {
    let question = question(prompt, cursor, Duration::from_secs(60));
    serving.client.events(&question).await.unwrap()
}

fn code(refused: Result<impl Sized, ClientError>) -> String {
    match refused.map(drop) {
        Err(ClientError::Refused(problem)) => problem.code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_the_node_have_events_once_they_are_bound() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(4);
    store(&serving.client, &engine, &prompt).await;
    let before = events(&serving, &prompt, None).await;
    assert!(before.events.is_empty() && before.is_end && !before.is_lost);
    serving.client.bind(&binding(&prompt)).await.unwrap();
    let stored = events(&serving, &prompt, Some(before.cursor)).await;
    let told: Vec<_> = stored
        .events
        .iter()
        .map(|event| (event.tier, event.stored.clone().unwrap()))
        .collect();
    let expected: Vec<_> = bound(&prompt)
        .into_iter()
        .map(|chunk| (Tier::Memory, chunk))
        .collect();
    assert_eq!(told, expected);

    // One who waits is told of what leaves.
    let waiting = question(&prompt, Some(stored.cursor), Duration::from_secs(60));
    let waiting = tokio::spawn({
        let client = serving.client.clone();
        async move { client.events(&waiting).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let path = format!("/v1/chunks/{}/{}", id(&prompt.space), prompt.hashes[3]);
    serving.client.delete(&path).await.unwrap();
    let removed = waiting.await.unwrap().events;
    assert_eq!(
        (removed.len(), removed[0].hash, removed[0].stored.clone()),
        (1, prompt.hashes[3], None)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_ends_does_not_keep_those_who_wait() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let cursor = events(&serving, &prompt, None).await.cursor;
    let waiting = question(&prompt, Some(cursor), Duration::from_secs(600));
    let client = serving.client.clone();
    let waiting = tokio::spawn(async move { client.events(&waiting).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    serving.end().await;
    assert!(waiting.await.unwrap().unwrap().events.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_be_bound_is_refused() {
    let site = Site::new().await;
    let serving = site.serve(&[("events.note_size", "1KiB")]).await;
    serving.ready().await;
    let prompt = Prompt::new(3);
    assert_eq!(
        code(serving.client.bind(&binding(&prompt)).await),
        "unknown_space"
    );
    serving.client.declare(&prompt.space).await.unwrap();
    let (good, broken) = (binding(&prompt), |change: fn(&mut BindRequest)| {
        let mut request = binding(&prompt);
        change(&mut request);
        request
    });
    serving.client.bind(&good).await.unwrap();
    for request in [
        broken(|request| request.chunks[1].tokens.truncate(1)),
        broken(|request| request.chunks[1].event = "x".repeat(1025)),
        broken(|request| request.scheme = "x".repeat(1025)),
        broken(|request| request.block_size = Some(0)),
        broken(|request| request.block_size = Some(7)),
        broken(|request| {
            request.block_size = Some(4);
            request.chunks.swap(0, 1);
        }),
    ] {
        assert_eq!(
            code(serving.client.bind(&request).await),
            "bad_request",
            "{request:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_can_ask_for_bound_chunks_by_their_own_hashes() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(4);
    store(&serving.client, &engine, &prompt).await;
    let seed = 1337_u64.wrapping_add(XxHash3_64::oneshot_with_seed(1, b"team-a"));
    let block = prompt.space.chunk_tokens() as usize / 2;
    let tokens: Vec<u32> = bound(&prompt)
        .into_iter()
        .flat_map(|chunk| chunk.tokens)
        .collect();
    let local: Vec<u64> = tokens
        .chunks_exact(block)
        .map(|block| {
            let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
            XxHash3_64::oneshot_with_seed(seed, &bytes)
        })
        .collect();
    let ranges = async || {
        let question = json!({"model": prompt.space.model(), "block_hashes": local});
        serving
            .client
            .post::<Value>("/check_blocks", &question)
            .await
            .unwrap()["ranges"]
            .clone()
    };
    assert_eq!(ranges().await, json!([]));
    // An engine binds a prompt in parts.
    for part in [0..1, 1..4] {
        let request = BindRequest {
            chunks: bound(&prompt)[part].to_vec(),
            block_size: Some(block),
            cache_salt: "team-a".to_owned(),
            ..binding(&prompt)
        };
        serving.client.bind(&request).await.unwrap();
    }
    assert_eq!(ranges().await, json!([[0, 8]]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_with_an_adapters_name_leaves_what_its_engine_has_bound() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(4);
    store(&serving.client, &engine, &prompt).await;
    let block = prompt.space.chunk_tokens() as usize;
    let request = BindRequest {
        block_size: Some(block),
        lora_name: "adapter".to_owned(),
        ..binding(&prompt)
    };
    serving.client.bind(&request).await.unwrap();
    let tokens: Vec<u32> = bound(&prompt)
        .into_iter()
        .flat_map(|chunk| chunk.tokens)
        .collect();
    let seed = 1337_u64.wrapping_add(XxHash3_64::oneshot_with_seed(0, b"adapter"));
    let hash = |block: &[u32]| {
        let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
        XxHash3_64::oneshot_with_seed(seed, &bytes)
    };
    let local: Vec<u64> = tokens.chunks_exact(block).map(hash).collect();
    let model = prompt.space.model();
    let by_name = json!({"model": model, "token_ids": tokens, "lora_name": "adapter", "block_size": block});
    let _: Value = serving.client.post("/query", &by_name).await.unwrap();
    let by_hashes = json!({"model": model, "block_hashes": local});
    let found: Value = serving.client.post("/check_blocks", &by_hashes).await.unwrap();
    assert_eq!(found["ranges"], json!([[0, 4]]));
}

fn followed(serving: &Serving, prompt: &Prompt) -> (Follower, tokio::task::JoinHandle<()>) {
    let follower = Follower::new(&serving.client, prompt.space.clone(), SCHEME.to_owned());
    let task = tokio::spawn(follower.follow());
    (follower, task)
}

async fn changes(follower: &Follower, count: usize) -> Vec<(Tier, bool)> {
    let all = RefCell::new(Vec::<TierChange>::new());
    eventually(|| {
        all.borrow_mut().extend(follower.take(1));
        all.borrow().len() >= count
    })
    .await;
    let mut all = all.into_inner();
    all.extend(follower.take(99));
    all.iter().map(|change| (change.tier, change.is_stored)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_withdraws_what_was_of_a_daemon_that_is_gone_and_a_new_one_has_what_its_disks_have() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let settings = [("disk.paths", disk.to_str().unwrap())];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(3);
    let (follower, _task) = followed(&serving, &prompt);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    follower.bind(bound(&prompt), None, "", "");
    let mut told = changes(&follower, 6).await;
    told.sort_unstable();
    assert_eq!(
        told,
        [[(Tier::Memory, true); 3], [(Tier::Disk, true); 3]].concat()
    );
    drop(engine);
    serving.end().await;
    let mut told = changes(&follower, 6).await;
    told.sort_unstable();
    assert_eq!(
        told,
        [[(Tier::Memory, false); 3], [(Tier::Disk, false); 3]].concat()
    );
    let serving = site.serve(&settings).await;
    serving.ready().await;
    assert_eq!(changes(&follower, 3).await, [(Tier::Disk, true); 3]);
}
