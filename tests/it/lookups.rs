//! The cost of a lookup, in requests instead of seconds.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream;
use kvgate::cache::gateway::{Boundary, Gateway, GatewayOptions, Kinds, NeededRun};
use kvgate::format::{Run, Space};
use kvgate::protocol::{Strategy, Tier, TierRun};
use kvgate::s3::object::{Condition, PutExtras};

use crate::support::backends::{Backend, on_backends};
use crate::support::fixture::{Prompt, Site, lookup, soon, store_all};

on_backends! {
    a_prompt_of_4096_chunks_of_which_3000_exist: embedded, rgw, minio;
    run_hints_lead_to_the_end_of_a_prompt: embedded, rgw, minio, rclone, swift;
    forged_hints_change_no_answer: embedded, rgw;
    a_prompt_of_4096_chunks_over_three_kinds: embedded, rgw, minio;
    snapshots_of_branching_prompts: embedded, rgw, minio;
    what_is_inferred_of_a_long_window_is_marked: embedded;
    the_work_of_a_lookup_over_many_kinds_is_linear: embedded;
    one_question_at_a_time_finds_the_end_of_a_prompt: embedded;
}

const CHUNKS: usize = 4096;
const STORED: usize = 3000;

/// One byte a token, one token a chunk: objects of 4097 bytes.
fn smallest_space() -> Space {
    Space::from_json(
        r#"{"model": "test/smallest", "revision": "1", "dtype": "int8", "chunk_tokens": 1,
            "planes": [{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 1}]}"#,
    )
    .unwrap()
}

async fn a_prompt_of_4096_chunks_of_which_3000_exist(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::of(smallest_space(), CHUNKS);
    let object_len = prompt.space.layout().object_len();
    // Existence is a matter of key and length; what is in them no lookup reads.
    let body = Bytes::from(vec![0; object_len]);
    let puts = (0..STORED).map(|i| {
        let (store, key, body) = (Arc::clone(&site.store), site.key(&prompt, i), body.clone());
        async move { store.put(&key, body, Condition::Always, soon()).await.map(drop) }
    });
    let put: Vec<_> = stream::iter(puts).buffer_unordered(16).collect().await;
    put.into_iter().for_each(|put| put.unwrap());

    let gateway = site.gateway();
    let before = questions(&gateway);
    let prefix = lookup(&gateway, &prompt, Strategy::Prefix).await;
    let cost = questions(&gateway) - before;
    assert!(cost <= 64, "{cost} requests");
    assert_eq!((prefix.prefix, prefix.unknown.count()), (STORED, 0));
    assert_eq!(
        prefix.inferred.count(),
        CHUNKS - cost as usize,
        "all but those asked for"
    );
    let known = lookup(&gateway, &prompt, Strategy::Prefix).await;
    assert_eq!(
        (known.prefix, questions(&gateway)),
        (STORED, before + cost),
        "warm: no request"
    );

    let before = questions(&gateway);
    let exact = lookup(&gateway, &prompt, Strategy::Exact).await;
    assert_eq!(exact.mask, prefix.mask);
    assert_eq!(exact.inferred.count(), 0);
    let asked_now = questions(&gateway) - before;
    // Absent chunks may have expired since, and inferred ones were not known.
    assert!(
        asked_now >= CHUNKS as u64 - cost,
        "what was inferred is asked for: {asked_now}"
    );
}

/// Requests about existence so far.
fn questions(gateway: &Gateway) -> u64 {
    gateway.requests().head + gateway.requests().attributes
}

/// A node looks a prompt up and stores it. Another has a longer one that begins with it.
async fn run_hints_lead_to_the_end_of_a_prompt(backend: &Backend) {
    const SHARED: usize = 120;
    let site = Site::new(backend.store().await).await;
    let longer = Prompt::of(smallest_space(), SHARED + 60);
    let mut first = longer.clone();
    first.hashes.truncate(SHARED);
    let writer = site.gateway();
    lookup(&writer, &first, Strategy::Prefix).await;
    store_all(&writer, &first).await;

    let reader = site.gateway();
    let before = questions(&reader);
    let found = lookup(&reader, &longer, Strategy::Prefix).await;
    let cost = questions(&reader) - before;
    assert_eq!((found.prefix, found.unknown.count()), (SHARED, 0));
    // What a hint says is no answer: all but the chunks that were asked for are inferred.
    assert_eq!(found.inferred.count(), longer.hashes.len() - cost as usize);
    match site.capabilities.metadata {
        // The first chunk and five near the end; then the last that the hint names, three after it, and the
        // last that is open.
        true => assert_eq!(cost, 11),
        false => assert!(cost <= 64, "{cost} requests"),
    }
    let exact = lookup(&site.gateway(), &longer, Strategy::Exact).await;
    assert_eq!((exact.mask, exact.inferred.count()), (found.mask, 0));
}

/// An attacker may write any hint.
async fn forged_hints_change_no_answer(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::of(smallest_space(), 180);
    let body = Bytes::from(vec![0; prompt.space.layout().object_len()]);
    for (stored, hint) in [
        (50, Run::of(&prompt.hashes[1..]).text()),
        (100, Run::of([]).text()),
        (150, "1////".to_owned()),
        (160, "no hint".to_owned()),
        (170, "A".repeat(1900)),
    ] {
        let puts = (0..stored).map(|i| {
            let (store, key, body, hint) = (&site.store, site.key(&prompt, i), body.clone(), &hint);
            async move {
                let extras = PutExtras {
                    crc64: None,
                    run: Some(hint),
                };
                store
                    .put_with(&key, body, extras, Condition::Always, soon())
                    .await
                    .map(drop)
            }
        });
        let put: Vec<_> = stream::iter(puts).buffer_unordered(16).collect().await;
        put.into_iter().for_each(|put| put.unwrap());
        let reader = site.gateway();
        let before = questions(&reader);
        let found = lookup(&reader, &prompt, Strategy::Prefix).await;
        let cost = questions(&reader) - before;
        assert_eq!((found.prefix, found.unknown.count()), (stored, 0), "{hint}");
        assert!(cost <= 64, "{cost} requests: {hint}");
    }
}

/// The kinds of a model, as small: a chunk has a token.
fn kind(kind: &str, draft: &str) -> Space {
    Space::from_json(&format!(
        r#"{{"model": "test/smallest", "revision": "1", "dtype": "int8", "chunk_tokens": 1, "kind": {kind},
            "draft": "{draft}", "planes": [{{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 1}}]}}"#
    ))
    .unwrap()
}

/// A site, a prompt and the kinds of its model.
struct Model {
    site: Site,
    prompt: Prompt,
    spaces: Vec<Space>,
    drafts: Vec<Space>,
}

const STATE_EVERY: usize = 16;
/// What a lookup over three kinds may cost.
const REQUESTS_MAX: u64 = 100;

impl Model {
    async fn new(backend: &Backend, chunks: usize) -> Self {
        Self {
            site: Site::new(backend.store().await).await,
            prompt: Prompt::of(smallest_space(), chunks),
            spaces: vec![
                kind(r#""full""#, ""),
                kind(r#"{"window": 3}"#, ""),
                kind(r#""state""#, ""),
            ],
            drafts: vec![kind(r#""full""#, "eagle")],
        }
    }

    /// Stores these chunks of a kind. Existence is a matter of key and length; what is in them no lookup reads.
    async fn put(&self, space: &Space, chunks: impl Iterator<Item = usize>) {
        let body = Bytes::from(vec![0; space.layout().object_len()]);
        let puts = chunks.map(|i| {
            let key = self.site.keys.chunk(space.key(), &self.prompt.hashes[i]);
            let (store, body) = (Arc::clone(&self.site.store), body.clone());
            async move { store.put(&key, body, Condition::Always, soon()).await.map(drop) }
        });
        let put: Vec<_> = stream::iter(puts).buffer_unordered(16).collect().await;
        put.into_iter().for_each(|put| put.unwrap());
    }

    /// The lookup of a node that knows nothing, and its requests.
    async fn lookup(&self, kinds: &[usize], lookahead: usize, drafts: &[Space]) -> (Boundary, u64) {
        let spaces: Vec<Space> = kinds.iter().map(|&kind| self.spaces[kind].clone()).collect();
        let kinds = Kinds {
            spaces: &spaces,
            drafts,
            state_every: STATE_EVERY,
            lookahead,
        };
        let gateway = self.site.gateway();
        let asked = || gateway.requests().head + gateway.requests().attributes;
        let before = asked();
        let found = gateway
            .boundary(kinds, &self.prompt.hashes, Strategy::Prefix, soon())
            .await;
        let cost = asked() - before;
        // Warm, and with all questions, it finds no less.
        let again = gateway
            .boundary(kinds, &self.prompt.hashes, Strategy::Prefix, soon())
            .await;
        assert!(again.chunks >= found.chunks);
        assert!(!found.is_open && found.error.is_none());
        (found, cost)
    }
}

async fn a_prompt_of_4096_chunks_over_three_kinds(backend: &Backend) {
    let model = Model::new(backend, CHUNKS).await;
    let [full, window, state] = &model.spaces[..] else {
        unreachable!()
    };
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &model.drafts).await;
    assert_eq!((found.chunks, found.full), (0, 0));
    assert!(cost <= 16, "nothing is there: {cost} requests");

    // A number that no round of questions meets by chance.
    model.put(full, 0..STORED).await;
    model.put(window, 0..STORED).await;
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &[]).await;
    assert_eq!((found.chunks, found.full), (0, STORED));
    assert!(cost <= REQUESTS_MAX, "all but the states: {cost} requests");
    let (found, cost) = model.lookup(&[0, 1], 0, &[]).await;
    assert_eq!((found.chunks, found.full), (STORED, STORED));
    assert!(cost <= 66, "two chunks of the window: {cost} requests");

    let last = STORED / STATE_EVERY * STATE_EVERY;
    model
        .put(state, (1..=STORED / STATE_EVERY).map(|n| n * STATE_EVERY - 1))
        .await;
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &[]).await;
    assert_eq!((found.chunks, found.full), (last, STORED));
    let needed: Vec<_> = found.needed.iter().map(|run| run.chunks.clone()).collect();
    assert_eq!(needed, [0..last, last - 2..last, last - 1..last]);
    assert!(cost <= REQUESTS_MAX, "a snapshot at a distance: {cost} requests");
    let (found, _) = model.lookup(&[2, 1, 0], STORED - last, &[]).await;
    assert_eq!((found.chunks, found.full), (last, STORED), "in any order");
    let (found, cost) = model.lookup(&[0, 1, 2], STORED - last + 1, &[]).await;
    assert_eq!(
        (found.chunks, found.full),
        (last - STATE_EVERY, STORED),
        "so many chunks are left over"
    );
    assert!(cost <= REQUESTS_MAX, "{cost} requests");

    model.put(full, STORED..CHUNKS).await;
    model.put(window, STORED..CHUNKS).await;
    model.put(state, STORED..CHUNKS).await;
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &model.drafts).await;
    assert_eq!((found.chunks, found.full), (CHUNKS, CHUNKS));
    assert!(found.drafts[0].chunks.is_empty());
    assert!(cost <= 32, "all is there, but no draft: {cost} requests");
    let (found, _) = model.lookup(&[0, 1, 2], 1, &[]).await;
    assert_eq!((found.chunks, found.full), (CHUNKS - 1, CHUNKS));

    model.put(&model.drafts[0], 0..CHUNKS).await;
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &model.drafts).await;
    let draft = &found.drafts[0];
    assert_eq!((found.chunks, draft.chunks.clone()), (CHUNKS, 0..CHUNKS));
    let on_s3 = TierRun {
        tier: Tier::S3,
        from: 0,
        count: CHUNKS,
    };
    assert_eq!(draft.tiers, [on_s3]);
    // Of the full prefix and of the draft a few chunks were asked for, of the others all.
    let inferred = |run: &NeededRun| run.inferred.iter().map(ExactSizeIterator::len).sum::<usize>();
    assert!(inferred(draft) > CHUNKS / 2, "{:?}", draft.inferred);
    let of_kinds: Vec<usize> = found.needed.iter().map(inferred).collect();
    assert_eq!(of_kinds, [found.first.inferred.count(), 0, 0]);
    assert!(cost <= 32, "all is there: {cost} requests");

    // A window alone, and a plain lookup, which costs what it always did.
    let (found, cost) = model.lookup(&[1], 0, &[]).await;
    assert_eq!((found.chunks, found.full, cost), (CHUNKS, CHUNKS, 2));
    assert_eq!(found.first.mask.count(), 2);
    let (found, cost) = model.lookup(&[0], 0, &[]).await;
    let plain = lookup(&model.site.gateway(), &model.prompt, Strategy::Prefix).await;
    assert_eq!((found.chunks, cost as usize), (CHUNKS, plain.asked));
}

/// Prompts end where they like, and a snapshot is where one ended or two parted.
async fn snapshots_of_branching_prompts(backend: &Backend) {
    let model = Model::new(backend, 64).await;
    let [full, window, state] = &model.spaces[..] else {
        unreachable!()
    };
    model.put(full, 0..61).await;
    model.put(window, 0..61).await;
    let mut ends = vec![1, 2, 7, 16, 29, 44, 45, 60, 61];
    model.put(state, ends.iter().map(|end| end - 1)).await;
    // The deepest snapshot goes, one after another, as if a longer part of the prompt were another one's.
    while let Some(end) = ends.pop() {
        let (found, cost) = model.lookup(&[0, 1, 2], 0, &[]).await;
        assert_eq!((found.chunks, found.full), (end, 61));
        assert!(cost <= REQUESTS_MAX, "{cost} requests");
        let gone = model.site.keys.chunk(state.key(), &model.prompt.hashes[end - 1]);
        model.site.remove(gone).await;
    }
    let (found, cost) = model.lookup(&[0, 1, 2], 0, &[]).await;
    assert_eq!((found.chunks, found.full), (0, 61));
    assert!(cost <= REQUESTS_MAX, "{cost} requests");
}

/// Windows of up to 16 chunks are asked for as a whole; of a longer one the load confirms the middle.
async fn what_is_inferred_of_a_long_window_is_marked(backend: &Backend) {
    let mut model = Model::new(backend, 64).await;
    for (window, inferred) in [(17, None), (18, Some(48..63))] {
        model.spaces[1] = kind(&format!(r#"{{"window": {window}}}"#), "");
        model.put(&model.spaces[0], 0..64).await;
        model.put(&model.spaces[1], 0..64).await;
        let (found, _) = model.lookup(&[0, 1], 0, &[]).await;
        let of_window = &found.needed[1];
        assert_eq!(of_window.chunks, 64 - window + 1..64);
        assert_eq!(of_window.inferred, Vec::from_iter(inferred));
        // Alone, the window is what the masks are about.
        let (found, _) = model.lookup(&[1], 0, &[]).await;
        assert_eq!(found.needed[0], *of_window);
        assert_eq!((found.first.prefix, found.first.unknown.count()), (0, 0));
    }
}

/// Each chunk is looked for once in each space, however many rounds of questions follow.
async fn the_work_of_a_lookup_over_many_kinds_is_linear(backend: &Backend) {
    let mut model = Model::new(backend, 64).await;
    model
        .spaces
        .extend((1..=12).map(|span| kind(&format!(r#"{{"chunked": {span}}}"#), "")));
    for space in model.spaces.iter().chain(&model.drafts) {
        model.put(space, 0..64).await;
    }
    let kinds = Kinds {
        spaces: &model.spaces,
        drafts: &model.drafts,
        state_every: STATE_EVERY,
        lookahead: 0,
    };
    for strategy in [Strategy::Prefix, Strategy::Exact] {
        let gateway = model.site.gateway();
        let found = gateway
            .boundary(kinds, &model.prompt.hashes, strategy, soon())
            .await;
        assert_eq!(found.chunks, 64);
        assert_eq!(gateway.tier_stats().memory.looked_up, 16 * 64, "{strategy:?}");
    }
}

async fn one_question_at_a_time_finds_the_end_of_a_prompt(backend: &Backend) {
    let mut model = Model::new(backend, 64).await;
    model.spaces[1] = kind(r#"{"window": 17}"#, "");
    for space in &model.spaces {
        model.put(space, 0..61).await;
    }
    let options = GatewayOptions {
        lookup_probes: 1,
        ..model.site.options()
    };
    for kinds in [&model.spaces[..1], &model.spaces[..]] {
        let gateway = model
            .site
            .gateway_with(Arc::clone(&model.site.store), options.clone());
        let kinds = Kinds {
            spaces: kinds,
            drafts: &[],
            state_every: 0,
            lookahead: 0,
        };
        let found = gateway
            .boundary(kinds, &model.prompt.hashes, Strategy::Prefix, soon())
            .await;
        assert_eq!((found.chunks, found.full), (61, 61));
    }
}
