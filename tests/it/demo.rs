//! The demo's phases on an embedded server, with a tiny model: what goes wrong between them must be told.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aws_credential_types::Credentials;
use kvgate::cache::gateway::open_store;
use kvgate::config::Config;
use kvgate::config::units::{ByteSize, MIB};
use kvgate::embedded::EmbeddedS3;
use kvgate::format::{DType, Kind, Mha, Plane, Space, SpaceInput};
use kvgate::s3::object::ObjectStore;
use kvgate::tools::demo::{Demo, Plan, Shape};

const BUCKET: &str = "demo-tests";
const PREFIX: &str = "some/where";

/// 4 layers of 2 heads, 32 tokens a chunk: 16 KiB of KV, 20 KiB an object.
fn space() -> Space {
    Space::new(SpaceInput {
        model: "tiny".into(),
        revision: "1".into(),
        chunk_tokens: Some(32),
        mha: Some(Mha {
            layers: 4,
            heads: 2,
            head_dim: 16,
            v_head_dim: None,
        }),
        ..SpaceInput::default()
    })
    .unwrap()
}

fn shape(seed: u64) -> Shape {
    Shape {
        conversations: 3,
        tokens: 8 * 32,
        seed,
    }
}

async fn store(server: &EmbeddedS3) -> Arc<dyn ObjectStore> {
    let mut config = Config::default();
    config.s3.endpoint = Some(server.endpoint());
    config.s3.bucket = Some(BUCKET.into());
    let (access, secret) = (server.access_key(), server.secret_key());
    let credentials = Credentials::new(access, secret, None, None, "tests");
    open_store(&config, Some(credentials)).await.unwrap()
}

/// Full attention, a window of 40 tokens (which reaches over two chunks) and a state of 24 KiB.
fn kinds() -> Vec<Space> {
    let kind = |kind: Kind, layer: u32, row_bytes: u32| {
        Space::new(SpaceInput {
            model: "hybrid".into(),
            revision: "1".into(),
            dtype: Some(DType::Bytes),
            chunk_tokens: Some(32),
            kind: Some(kind),
            planes: Some(vec![Plane {
                name: "kv".into(),
                layer,
                heads: 1,
                row_bytes,
            }]),
            ..SpaceInput::default()
        })
        .unwrap()
    };
    vec![
        kind(Kind::Full, 0, 64),
        kind(Kind::Window(40), 1, 64),
        kind(Kind::State, 2, 24 << 10),
    ]
}

async fn demo(server: &EmbeddedS3, seed: u64) -> Demo {
    demo_of(server, seed, vec![space()]).await
}

async fn demo_of(server: &EmbeddedS3, seed: u64, spaces: Vec<Space>) -> Demo {
    let mut config = Config::default();
    config.s3.prefix = PREFIX.into();
    // Too small for a conversation: stores and loads must wait for slots.
    config.arena.size = ByteSize(64 << 10);
    let plan = Plan::new(&spaces, shape(seed), config.arena.size).unwrap();
    Demo::open(store(server).await, spaces, plan, config)
        .await
        .unwrap()
}

/// The objects in the bucket, as the server has them on disk.
fn files(server: &EmbeddedS3) -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(&path, found),
                false => found.push(path),
            }
        }
    }
    let mut found = Vec::new();
    walk(&server.root().join(BUCKET), &mut found);
    found.sort();
    found
}

fn chunk_file(server: &EmbeddedS3, demo: &Demo, conversation: usize, chunk: usize) -> PathBuf {
    let hash = demo.plan().conversations[conversation].chunks[chunk];
    let folder = server.root().join(BUCKET).join(PREFIX);
    folder.join(space().key().to_string()).join(hash.to_string())
}

async fn after_store(demo: &mut Demo) {
    demo.forget();
    demo.look_up().await.unwrap();
    demo.load_and_compare().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_comes_back_and_only_its_own_objects_are_removed() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut kept = demo(&server, 1).await;
    kept.prefill_and_store().await.unwrap();
    let before = files(&server);
    // 2 shared chunks, 6 of each conversation, space.json.
    assert_eq!(before.len(), 2 + 3 * 6 + 1, "{before:?}");

    let mut demo = demo(&server, 2).await;
    demo.prefill_and_store().await.unwrap();
    assert_eq!(files(&server).len(), before.len() + 20);
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(report.equal, "{report:?}");
    assert_eq!(report.compared_bytes, 3 * 8 * (16 << 10));
    assert_eq!((report.different_bytes, report.stray_bytes), (0, 0));
    assert!(report.arena_bytes_peak <= 64 << 10);
    let phase = |name| report.phases.iter().find(|phase| phase.name == name).unwrap();
    // Turns of 5 and 8 chunks: the first turns of the second and third find the system prompt, each second turn 5.
    assert_eq!(phase("prefill_lookup").hits, Some(2 * 2 + 3 * 5));
    // Each of the first stores, of which three fit in the arena, may put space.json.
    assert_eq!(phase("store").chunks, 20);
    assert!(phase("store").requests.put == 21, "{report:?}");
    assert_eq!(phase("generate").requests.total(), 0);
    assert_eq!(
        phase("lookup_exact").requests.total(),
        20,
        "shared chunks are asked for once"
    );
    assert_eq!(
        (phase("lookup_warm").hits, phase("lookup_warm").requests.total()),
        (Some(24), 0)
    );
    assert_eq!(phase("load").chunks, 24);

    demo.remove().await.unwrap();
    assert_eq!(
        files(&server),
        before,
        "what the other run stored stays, and the space.json that it made"
    );
    kept.remove().await.unwrap();
    assert_eq!(files(&server), Vec::<PathBuf>::new());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_run_with_the_same_seed_computes_nothing() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    demo(&server, 5).await.prefill_and_store().await.unwrap();
    let before = files(&server);
    let mut second = demo(&server, 5).await;
    second.prefill_and_store().await.unwrap();
    after_store(&mut second).await;
    let report = second.report();
    assert!(report.equal, "{report:?}");
    assert!(report.phases.iter().all(|phase| phase.name != "generate"));
    second.remove().await.unwrap();
    assert_eq!(files(&server), before, "they are not its own");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_and_states_come_back_and_only_as_far_as_they_are_needed() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut demo = demo_of(&server, 1, kinds()).await;
    demo.prefill_and_store().await.unwrap();
    // Of 2 shared chunks and turns of 5 and 8: 8 full chunks, 6 of the window, 3 snapshots; each has a space.json.
    assert_eq!(files(&server).len(), (2 + 3 * 6) + (2 + 3 * 4) + (1 + 3 * 2) + 3);
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(report.equal, "{report:?}");
    let phase = |name| report.phases.iter().find(|phase| phase.name == name).unwrap();
    // A state is at the end of the system prompt and of each turn, so all of a prompt that is there is a hit.
    assert_eq!(phase("prefill_lookup").hits, Some(2 * 2 + 3 * 5));
    assert_eq!(phase("lookup_prefix").hits, Some(24));
    assert_eq!(phase("load").chunks, 3 * (8 + 2 + 1));
    assert_eq!(report.compared_bytes, 3 * (10 * 32 * 64 + (24 << 10)));
    demo.remove().await.unwrap();
    assert_eq!(files(&server), Vec::<PathBuf>::new());
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_snapshot_moves_the_boundary_and_is_told() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut demo = demo_of(&server, 1, kinds()).await;
    demo.prefill_and_store().await.unwrap();
    let hash = demo.plan().conversations[1].chunks[7].to_string();
    let state = kinds()[2].key().to_string();
    std::fs::remove_file(server.root().join(BUCKET).join(PREFIX).join(state).join(hash)).unwrap();
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(!report.equal);
    let hits = |name| {
        report
            .phases
            .iter()
            .find(|phase| phase.name == name)
            .unwrap()
            .hits
    };
    // The second conversation can go on after its first turn.
    assert_eq!(
        (hits("lookup_exact"), hits("lookup_prefix")),
        (Some(8 + 5 + 8), Some(8 + 5 + 8))
    );
    let missed: Vec<_> = report
        .missed
        .iter()
        .map(|missed| (missed.conversation, missed.kind, missed.chunk, missed.code))
        .collect();
    assert_eq!(missed, [(1, Kind::State, 7, "absent")]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_is_a_miss_and_not_equal() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut demo = demo(&server, 1).await;
    demo.prefill_and_store().await.unwrap();
    let path = chunk_file(&server, &demo, 1, 4);
    let mut object = std::fs::read(&path).unwrap();
    *object.last_mut().unwrap() ^= 1;
    std::fs::write(&path, object).unwrap();
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(!report.equal);
    let codes: Vec<_> = report
        .missed
        .iter()
        .map(|missed| (missed.conversation, missed.chunk, missed.code))
        .collect();
    let ended = [5, 6, 7].map(|chunk| (1, chunk, "run_ended"));
    assert_eq!(codes, [vec![(1, 4, "bad_digest")], ended.to_vec()].concat());
    assert_eq!(
        (report.different_bytes, report.stray_bytes),
        (0, 0),
        "damage reaches no page"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_object_is_told_and_not_equal() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut demo = demo(&server, 1).await;
    demo.prefill_and_store().await.unwrap();
    std::fs::remove_file(chunk_file(&server, &demo, 2, 7)).unwrap();
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(!report.equal);
    assert_eq!(
        report.missed.iter().map(|missed| missed.code).collect::<Vec<_>>(),
        ["absent"]
    );
    let hits = |name| {
        report
            .phases
            .iter()
            .find(|phase| phase.name == name)
            .unwrap()
            .hits
    };
    assert_eq!(hits("lookup_exact"), Some(23));
    server.stop().await;
}

/// A good object, but of other KV: only the comparison can tell.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_with_right_digests_are_found_by_the_comparison() {
    let server = EmbeddedS3::start(None, None).await.unwrap();
    let mut demo = demo(&server, 1).await;
    demo.prefill_and_store().await.unwrap();
    let path = chunk_file(&server, &demo, 0, 3);
    let mut object = std::fs::read(&path).unwrap();
    let mut header = kvgate::format::Header::parse(&object).unwrap();
    let plane = space().layout().plane(2);
    object[plane.start + 70] ^= 1;
    header.digests[2] = kvgate::format::PlaneDigest::Crc64Nvme.of(&object[plane]);
    let header_len = space().layout().header_len();
    header.write(&mut object[..header_len]);
    std::fs::write(&path, object).unwrap();
    after_store(&mut demo).await;
    let report = demo.report();
    assert!(!report.equal && report.missed.is_empty());
    assert_eq!((report.different_bytes, report.stray_bytes), (1, 0));
    let first = report.first_difference.as_ref().unwrap();
    assert_eq!((first.conversation, first.chunk, first.layer), (0, 3, 2));
    // Rows of 64 bytes.
    assert_eq!(
        (first.position.head, first.position.row, first.position.row_byte),
        (0, 1, 6)
    );
    server.stop().await;
}

#[tokio::test]
async fn an_arena_below_one_object_is_a_usage_error() {
    let error = Plan::new(&[space()], shape(1), ByteSize(16 << 10)).unwrap_err();
    assert!(
        error.is_usage() && error.to_string().contains("[arena] size"),
        "{error}"
    );
    assert!(Plan::new(&[space()], shape(1), ByteSize(MIB)).is_ok());
}
