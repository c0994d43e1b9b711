//! What routers ask, against what lookup says.

use kvgate::engine::client::ClientError;
use kvgate::format::{ChunkHasher, Space};
use kvgate::protocol::LookupRequest;
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use crate::support::daemon::{Serving, Site, id, store};
use crate::support::fixture::{Prompt, space};

const CHUNK: usize = 16;

/// A prompt whose tokens and salt are known.
struct Asked {
    prompt: Prompt,
    tokens: Vec<u32>,
    salt: String,
}

impl Asked {
    fn new(space: Space, chunks: usize) -> Self {
        let salt = format!("{:016x}", fastrand::u64(..));
        let hasher = ChunkHasher::new(&space, None).unwrap();
        let root = hasher.root(salt.as_bytes(), b"").unwrap();
        // A few tokens more than chunks.
        let tokens: Vec<u32> = (7..).take(chunks * CHUNK + 5).collect();
        let hashes = hasher.chain(&root, &tokens, &[]).unwrap();
        let prompt = Prompt { space, root, hashes };
        Self { prompt, tokens, salt }
    }

    fn first(&self, chunks: usize) -> Prompt {
        Prompt {
            space: self.prompt.space.clone(),
            root: self.prompt.root,
            hashes: self.prompt.hashes[..chunks].to_vec(),
        }
    }

    /// The question in the conductor's spelling, with more fields.
    fn question(&self, more: Value) -> Value {
        let mut question =
            json!({"model": self.prompt.space.model(), "token_ids": self.tokens, "cache_salt": self.salt});
        merge(&mut question, more);
        question
    }

    /// Dynamo's hashes of blocks.
    fn local(&self, block: usize) -> Vec<u64> {
        let seed = 1337_u64.wrapping_add(XxHash3_64::oneshot_with_seed(1, self.salt.as_bytes()));
        let bytes =
            |block: &[u32]| -> Vec<u8> { block.iter().flat_map(|token| token.to_le_bytes()).collect() };
        let blocks = self.tokens.chunks_exact(block);
        blocks
            .map(|block| XxHash3_64::oneshot_with_seed(seed, &bytes(block)))
            .collect()
    }

    async fn lookup(&self, serving: &Serving) -> kvgate::protocol::LookupAnswer {
        let request = LookupRequest {
            space: id(&self.prompt.space),
            tokens: Some(self.tokens.clone()),
            salt: Some(self.salt.clone()),
            ..LookupRequest::default()
        };
        serving.client.lookup(&request).await.unwrap()
    }
}

fn merge(question: &mut Value, more: Value) {
    let Value::Object(more) = more else {
        panic!("{more}")
    };
    question.as_object_mut().unwrap().extend(more);
}

async fn ask(serving: &Serving, path: &str, question: &Value) -> Result<Value, String> {
    match serving.client.post::<Value>(path, question).await {
        Ok(answer) => Ok(answer),
        Err(ClientError::Refused(problem)) => Err(problem.code),
        Err(other) => panic!("{other}"),
    }
}

fn named(answer: &Value, names: [&str; 4]) -> [u64; 4] {
    names.map(|name| answer[name].as_u64().unwrap())
}

const TIERS: [&str; 4] = ["prefix", "memory", "disk", "s3"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_are_told_what_lookup_says_in_tokens_and_by_tier() {
    let site = Site::new().await;
    let asked = Asked::new(space(), 12);
    // Seven chunks are on S3, of which three come to memory again.
    site.store_by_another(&asked.first(7), &[]).await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("engine-1").await;
    store(&serving.client, &engine, &asked.first(0)).await;
    let prefix = ask(&serving, "/v1/prefix", &asked.question(json!({})))
        .await
        .unwrap();
    assert_eq!(named(&prefix, TIERS), [7 * 16, 0, 0, 7 * 16]);
    assert_eq!(prefix["space"], id(&asked.prompt.space));
    let lead = asked.first(3);
    crate::support::daemon::load(&engine, &lead, "a", kvgate::protocol::Order::Chunk).await;
    let found = asked.lookup(&serving).await;
    assert_eq!((found.prefix, found.tiers[0].count), (7, 3));
    let prefix = ask(&serving, "/v1/prefix", &asked.question(json!({})))
        .await
        .unwrap();
    assert_eq!(named(&prefix, TIERS), [7 * 16, 3 * 16, 0, 4 * 16]);
    assert_eq!(prefix["open"], false);

    // The conductor's answer and Dynamo's, for the engines of the node or the one that is named.
    let conductor = ask(&serving, "/query", &asked.question(json!({}))).await.unwrap();
    let expected = json!({"longest_matched": 112, "GPU": 0, "DP": {}, "CPU": 48, "DISK": 112});
    assert_eq!(conductor, json!({"default": {"engine-1": expected}}));
    let more = json!({"instance_id": 42, "block_size": 64});
    let conductor = ask(&serving, "/query", &asked.question(more)).await.unwrap();
    let expected = json!({"longest_matched": 64, "GPU": 0, "DP": {}, "CPU": 0, "DISK": 64});
    assert_eq!(
        conductor,
        json!({"default": {"42": expected}}),
        "complete blocks only"
    );
    let mut question = asked.question(json!({"model_name": "test/tiny", "routing_group": "default"}));
    question.as_object_mut().unwrap().remove("model");
    let dynamo = ask(&serving, "/query", &question).await.unwrap();
    let expected = json!({"longest_matched": 112, "gpu": 0, "dp": {}, "cpu": 48, "disk": 112});
    assert_eq!(dynamo["instances"], json!({"engine-1": expected}));
    assert_eq!(dynamo["scores"], json!({"engine-1": {"0": 112}}));

    // Data-parallel ranks are one instance; an engine of another model is none.
    let mut engines = Vec::new();
    for rank in 0..2 {
        engines.push(serving.attach(&format!("engine-2_dp{rank}")).await);
        let space = id(&asked.prompt.space);
        engines[rank].reserve(&space, Vec::new()).await.unwrap();
    }
    let _idle = serving.attach("engine-3").await;
    let dynamo = ask(&serving, "/query", &question).await.unwrap();
    let of_ranks = json!({"0": 112, "1": 112});
    assert_eq!(
        dynamo["scores"],
        json!({"engine-1": {"0": 112}, "engine-2": of_ranks})
    );
    assert_eq!(
        dynamo["instances"],
        json!({"engine-1": expected, "engine-2": expected})
    );
    merge(&mut question, json!({"instance_id": "engine-2"}));
    let dynamo = ask(&serving, "/query", &question).await.unwrap();
    assert_eq!(dynamo["scores"], json!({"engine-2": of_ranks}));

    // With another salt it is another prompt.
    let other = asked.question(json!({"cache_salt": "other"}));
    let prefix = ask(&serving, "/v1/prefix", &other).await.unwrap();
    assert_eq!(named(&prefix, TIERS), [0; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_checked_by_tokens_and_then_by_their_hashes() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let asked = Asked::new(space(), 12);
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &asked.first(7)).await;
    let by_hashes = async |block| {
        let question = json!({"block_hashes": asked.local(block)});
        ask(&serving, "/check_blocks", &question).await.unwrap()["ranges"].clone()
    };
    assert_eq!(by_hashes(4).await, json!([]), "no call has told the tokens yet");
    for (block, expected) in [(4, 28), (16, 7), (32, 3), (5, 22)] {
        let question = asked.question(json!({"block_size": block}));
        let answer = ask(&serving, "/check_blocks", &question).await.unwrap();
        assert_eq!(answer["ranges"], json!([[0, expected]]), "{block} tokens a block");
    }
    assert_eq!(by_hashes(4).await, json!([[0, 28]]));
    assert_eq!(by_hashes(16).await, json!([[0, 7]]));
    // A hole in the prompt is one in the answer; what is stored later is there at once.
    let path = format!(
        "/v1/chunks/{}/{}",
        id(&asked.prompt.space),
        asked.prompt.hashes[2]
    );
    serving.flush().await;
    serving.client.delete(&path).await.unwrap();
    let question = asked.question(json!({"block_size": 4}));
    if asked.lookup(&serving).await.prefix == 2 {
        let answer = ask(&serving, "/check_blocks", &question).await.unwrap();
        assert_eq!(answer["ranges"][0], json!([0, 8]));
        assert_eq!(by_hashes(4).await[0], json!([0, 8]));
    } else {
        panic!("a removed chunk is there");
    }
    store(&serving.client, &engine, &asked.prompt).await;
    assert_eq!(by_hashes(4).await, json!([[0, 48]]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_is_told_of_the_tenant_and_model_that_it_names() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let with = |field: &str, value: Value| {
        let mut fields: Value = serde_json::from_str(space().canonical_json()).unwrap();
        merge(&mut fields, json!({field: value}));
        Space::from_json(&fields.to_string()).unwrap()
    };
    let asked = Asked::new(space(), 4);
    let question = asked.question(json!({"block_size": 16}));
    assert_eq!(
        ask(&serving, "/query", &question).await.unwrap_err(),
        "unknown_space"
    );
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &asked.prompt).await;
    serving
        .client
        .declare(&with("tenant", json!("acme")))
        .await
        .unwrap();
    let prefix = async |more| {
        let mut question = question.clone();
        merge(&mut question, more);
        let answer = ask(&serving, "/v1/prefix", &question).await;
        answer.map(|answer| answer["prefix"].as_u64().unwrap())
    };
    assert_eq!(prefix(json!({})).await, Ok(64));
    assert_eq!(prefix(json!({"tenant_id": "default"})).await, Ok(64));
    assert_eq!(prefix(json!({"tenant_id": "acme"})).await, Ok(0));
    let unknown = Err("unknown_space".to_owned());
    assert_eq!(prefix(json!({"tenant_id": "other"})).await, unknown);
    assert_eq!(prefix(json!({"model": "test/other"})).await, unknown);
    // Hashes that one tenant's call has told say nothing to another.
    let blocks = |tenant: &str| json!({"block_hashes": asked.local(16), "tenant_id": tenant});
    let checked =
        async |tenant| ask(&serving, "/check_blocks", &blocks(tenant)).await.unwrap()["ranges"].clone();
    assert_eq!(checked("default").await, json!([[0, 4]]));
    assert_eq!(checked("acme").await, json!([]));

    // Two revisions of the model, and two dtypes: once engines use both, its name alone is not enough.
    let (revision, dtype) = (with("revision", json!("2")), with("dtype", json!("bfloat16")));
    let by = |space: &Space| json!({"space": id(space)});
    for other in [&revision, &dtype] {
        serving.client.declare(other).await.unwrap();
        assert_eq!(prefix(json!({})).await, Ok(64), "no engine uses it");
    }
    let two = serving.attach("two").await;
    for other in [&dtype, &revision] {
        two.reserve(&id(other), Vec::new()).await.unwrap();
        assert_eq!(prefix(json!({})).await, Err("ambiguous_model".to_owned()));
        assert_eq!(prefix(by(&asked.prompt.space)).await, Ok(64));
        assert_eq!(prefix(by(other)).await, Ok(0));
    }
    // A window's chunks are needed as well.
    let window = with("kind", json!({"window": 32}));
    serving.client.declare(&window).await.unwrap();
    assert_eq!(prefix(by(&asked.prompt.space)).await, Ok(64));
    engine.reserve(&id(&window), Vec::new()).await.unwrap();
    assert_eq!(prefix(by(&asked.prompt.space)).await, Ok(0));

    for (path, question) in [
        ("/query", json!({"token_ids": [1]})),
        ("/query", json!({"model": "test/tiny", "tenant_id": "acme"})),
        ("/v1/prefix", json!({"tenant_id": "acme"})),
        ("/check_blocks", json!({"tenant_id": "acme"})),
        ("/check_blocks", json!({"tenant_id": "acme", "token_ids": [1]})),
        (
            "/check_blocks",
            json!({"tenant_id": "acme", "token_ids": [1], "block_size": 0}),
        ),
        ("/check_blocks", json!({"block_hashes": [-1]})),
    ] {
        let refused = ask(&serving, path, &question).await.unwrap_err();
        assert_eq!(refused, "bad_request", "{path} {question}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_is_answered_within_its_deadline_though_s3_is_not_there() {
    let mut site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let asked = Asked::new(space(), 6);
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &asked.first(2)).await;
    serving.flush().await;
    site.stop_s3().await;
    let question = asked.question(json!({"deadline_ms": 100, "block_size": 16}));
    let prefix = ask(&serving, "/v1/prefix", &question).await.unwrap();
    assert_eq!(
        (prefix["prefix"].as_u64(), prefix["open"].as_bool()),
        (Some(32), Some(true))
    );
    let blocks = ask(&serving, "/check_blocks", &question).await.unwrap();
    assert_eq!(blocks["ranges"], json!([[0, 2]]));
}
