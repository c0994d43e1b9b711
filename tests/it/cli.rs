//! The commands that look at a bucket, and those that need none: exit status, what they say, and what they leave.

use std::ops::Deref;
use std::process::Stdio;
use std::time::Duration;

use kvgate::arena::{Arena, ArenaOptions};
use kvgate::cache::gateway::{FilledSlot, Gateway, GatewayOptions, StoreOutcome, open_store};
use kvgate::config::{self, Config, Override};
use kvgate::embedded::EmbeddedS3;
use kvgate::format::{ChunkHash, ChunkHasher, KeyPrefix, Space};
use kvgate::s3::object::Capabilities;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::Instant;

use crate::support::program::{BUCKET, PREFIX, Place, Said, kvgate, say};

const TOKENS_A_CHUNK: u32 = 16;
const CHUNKS: u32 = 5;
const SPACE_JSON: &str = r#"{"model":"tiny","revision":"abc123","chunk_tokens":16,
    "mha":{"layers":2,"heads":2,"head_dim":8}}"#;

fn prompt() -> String {
    let words: Vec<String> = tokens().iter().map(ToString::to_string).collect();
    words.join(" ")
}

/// A bucket with a tiny space of [`CHUNKS`] chunks.
struct Stored {
    place: Place,
    space: Space,
    hashes: Vec<ChunkHash>,
}

fn tokens() -> Vec<u32> {
    (0..CHUNKS * TOKENS_A_CHUNK + 3).collect()
}

fn config_of(s3: &EmbeddedS3) -> Config {
    let flag = |path, value: &str| Override {
        path,
        value: value.to_owned(),
        flag: "--test",
    };
    let flags = [
        flag("s3.endpoint", &s3.endpoint()),
        flag("s3.bucket", BUCKET),
        flag("s3.prefix", PREFIX),
    ];
    config::load(None, std::iter::empty(), &flags).unwrap().config
}

impl Deref for Stored {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Stored {
    async fn new() -> Self {
        let space = Space::from_json(SPACE_JSON).unwrap();
        let hasher = ChunkHasher::new(&space, None).unwrap();
        let root = hasher.root(b"", b"").unwrap();
        let stored = Self {
            hashes: hasher.chain(&root, &tokens(), &[]).unwrap(),
            place: Place::new().await,
            space,
        };
        stored.store(&stored.space, root).await;
        std::fs::write(stored.home.path().join("space.json"), SPACE_JSON).unwrap();
        stored
    }

    /// Written by the library, with the server's well-known keys.
    async fn store(&self, space: &Space, root: ChunkHash) {
        let config = config_of(&self.s3);
        let credentials = aws_credential_types::Credentials::new(
            self.s3.access_key(),
            self.s3.secret_key(),
            None,
            None,
            "test",
        );
        let store = open_store(&config, Some(credentials)).await.unwrap();
        let soon = || Instant::now() + Duration::from_secs(10);
        let arena = Arena::new(&ArenaOptions {
            size: 1 << 20,
            ..ArenaOptions::default()
        })
        .unwrap();
        let options = GatewayOptions {
            keys: KeyPrefix::new(PREFIX),
            ..GatewayOptions::from(&config)
        };
        let gateway = Gateway::new(store, arena, Capabilities::default(), options);
        let mut parent = root;
        for (i, &hash) in self.hashes.iter().enumerate() {
            let mut slot = gateway.reserve(space).unwrap();
            slot.payload_mut().fill(u8::try_from(i).unwrap());
            let chunk = FilledSlot { hash, parent, slot };
            let outcome = gateway.write_through(chunk, soon()).await;
            assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
            parent = hash;
        }
    }

    async fn say_with(&self, args: &[&str], input: &str) -> Said {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // A command that refuses its flags does not read.
        let _ = stdin.write_all(input.as_bytes()).await;
        drop(stdin);
        Said::new(child.wait_with_output().await.unwrap())
    }

    fn id(&self) -> String {
        self.space.key().to_string()
    }

    /// The file behind an object.
    fn file(&self, name: &str) -> std::path::PathBuf {
        self.bucket().join(PREFIX).join(self.id()).join(name)
    }

    fn damage(&self, chunk: usize, at: usize) {
        let file = self.file(&self.hashes[chunk].to_string());
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
}

#[tokio::test]
async fn replay_tells_hits_by_policy_and_names_a_damaged_line() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, plot) = (folder.path().join("trace.jsonl"), folder.path().join("hits.svg"));
    let line = |at: u32, ids: &str| {
        format!(r#"{{"timestamp": {at}, "input_length": 1024, "output_length": 9, "hash_ids": [{ids}]}}"#)
    };
    let good = [line(0, "1, 2"), line(500, "1, 3"), line(900, "1, 2")].join("\n");
    std::fs::write(&trace, &good).unwrap();
    let (path, svg) = (trace.to_str().unwrap(), plot.to_str().unwrap());
    let json = say(&["replay", path, "--blocks", "2,1k", "--svg", svg, "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(
        (json["prompts"].as_u64(), json["blocks"].as_u64()),
        (Some(3), Some(6))
    );
    assert_eq!(json["infinite_hits_percent"], 50.0);
    assert_eq!(json["sizes"][1]["hits_percent"]["reuse"], 50.0);
    assert_eq!(json["costs"][0]["puts"], 3);
    assert!(std::fs::read_to_string(&plot).unwrap().starts_with("<svg"));
    say(&["replay", path, "--policy", "lru"])
        .await
        .exits(0)
        .says(&["lru", "bound", "$ / 1000 prompts"]);
    std::fs::write(&trace, format!("{good}\n{{}}\n")).unwrap();
    say(&["replay", path])
        .await
        .exits(2)
        .says(&["line 4", "timestamp"]);
    say(&["replay", path, "--policy", "mru"])
        .await
        .exits(2)
        .says(&["reuse, lru"]);
}

#[tokio::test]
async fn size_calculates_what_is_published() {
    let json = say(&["size", "--model", "qwen3-32b", "--tp", "16", "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(json["kinds"][0]["payload_bytes"], 64 << 20);
    assert_eq!(json["token_bytes"], 256 << 10);
    // 8 heads on 16 ranks: each rank has one, stored once.
    assert_eq!(json["kinds"][0]["rank_chunk_bytes"], 8 << 20);
    assert_eq!(json["contexts"][1]["tokens"], 32768);
    assert_eq!(json["contexts"][1]["objects"], 128);
    assert_eq!(json["contexts"][1]["rank_bytes"], 128_u64 * (8 << 20));
    say(&["size"])
        .await
        .exits(0)
        .says(&["qwen3-32b", "256 KiB", "deepseek-v3-fp8", "full, window 128"]);
    let geometry = [
        "size",
        "--layers",
        "61",
        "--latent-dim",
        "576",
        "--tp",
        "8",
        "--json",
    ];
    let json = say(&geometry).await.exits(0).json();
    assert_eq!(json["kinds"][0]["rank_token_bytes"], json["token_bytes"]);
    assert_eq!(json["token_bytes"], 61 * 1152);
    let fp8 = [
        "size",
        "--model",
        "llama-3-8b",
        "--dtype",
        "fp8_e4m3",
        "--context",
        "8k",
        "--json",
    ];
    let json = say(&fp8).await.exits(0).json();
    assert_eq!(json["token_bytes"], 64 << 10);
    assert_eq!(json["contexts"][0]["objects"], 32);
}

#[tokio::test]
async fn size_tells_what_each_kind_of_a_model_keeps() {
    let of = async |model: &str, more: &[&str]| {
        let line = [&["size", "--model", model, "--context", "16k", "--json"], more].concat();
        say(&line).await.exits(0).json()
    };
    let json = of("gpt-oss-20b", &[]).await;
    // 12 layers of each kind; a window of 128 tokens needs one chunk of 256.
    assert_eq!(json["kinds"][1]["kind"], serde_json::json!({"window": 128}));
    assert_eq!(json["contexts"][0]["objects"], 64 + 1);
    let object = &json["kinds"][0]["object_bytes"];
    assert_eq!(json["contexts"][0]["bytes"], 65 * object.as_u64().unwrap());
    let json = of("lfm2-1.2b", &["--tp", "2"]).await;
    assert_eq!(json["snapshot_bytes"], 10 * 2 * 2048 * 2);
    assert_eq!(json["kinds"][1]["rank_chunk_bytes"], 10 * 2048 * 2);
    assert_eq!(json["contexts"][0]["objects"], 64 + 1);
    say(&["size", "--model", "nemotron-nano-9b", "--tp", "2"])
        .await
        .exits(0)
        .says(&["state", "a snapshot", "a rank of 2", "at the prompt's end"]);
    say(&["bench", "--model", "gpt-oss-20b"])
        .await
        .exits(2)
        .says(&["full, window 128", "--space FILE"]);
}

#[tokio::test]
async fn bad_input_is_status_2_and_says_what_to_type() {
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["Usage"]),
        (&["frobnicate"], &["unrecognized subcommand"]),
        (
            &["size", "--model", "gpt-9"],
            &["gpt-9", "llama-3-8b", "--space FILE"],
        ),
        (
            &["size", "--model", "qwen3-32b", "--tp", "3"],
            &["divisor or a multiple of 8"],
        ),
        (&["size", "--tp", "0"], &["--tp"]),
        (&["size", "--layers", "4"], &["--kv-heads", "--latent-dim"]),
        (
            &["size", "--layers", "0", "--kv-heads", "1", "--head-dim", "1"],
            &["at least one layer"],
        ),
        (
            &["size", "--layers", "4294967295", "--latent-dim", "1"],
            &["4096 planes"],
        ),
        (
            &[
                "size",
                "--layers",
                "9",
                "--kv-heads",
                "9",
                "--head-dim",
                "4294967295",
            ],
            &["too large"],
        ),
        (
            &["size", "--model", "qwen3-32b", "--chunk-tokens", "0"],
            &["chunk_tokens"],
        ),
        (&["size", "--context", "12,x"], &["32768 or 128k"]),
        (&["size", "--dtype", "bf61"], &["bfloat16"]),
        (&["ls"], &["--bucket NAME", "KVGATE__S3__BUCKET"]),
        (
            &["ls", "--bucket", "B!", "--endpoint", "nope"],
            &["2 problems", "--bucket", "--endpoint"],
        ),
        (&["ls", "--config", "missing.toml"], &["missing.toml"]),
        (
            &["ls", "--bucket", "kv1", "--space", "nothere.json"],
            &["neither a file nor a space id"],
        ),
        (
            &["lookup", "--bucket", "kv1"],
            &["--space FILE", "--model PRESET"],
        ),
        (
            &["lookup", "--bucket", "kv1", "--model", "llama-3-8b"],
            &["--revision", "other weights"],
        ),
        (
            &[
                "lookup",
                "--bucket",
                "kv1",
                "--model",
                "llama-3-8b",
                "--revision",
                "main",
            ],
            &["does not pin the weights"],
        ),
        (
            &["lookup", "--space", "x", "--model", "y"],
            &["cannot be used with"],
        ),
        (&["lookup", "--strategy", "fast"], &["exact", "prefix"]),
        (&["stat", "--bucket", "kv1", "xyz"], &["64 hex digits"]),
        (
            &["stat", "--space", "5c2f0a3bd1e94f7786a0c1d2e3f4a5b6"],
            &["which chunk", "kvgate ls"],
        ),
        (&["rm", "--bucket", "kv1"], &["--space ID"]),
        (&["rm", "--chunk", "xyz"], &["64 hex digits"]),
    ];
    for (args, parts) in cases {
        say(args).await.exits(2).says(parts);
    }
    for args in [
        &["--version"][..],
        &["--help"],
        &["help", "lookup"],
        &["rm", "--help"],
    ] {
        say(args).await.exits(0);
    }
}

#[tokio::test]
async fn completions_and_manual_pages_know_every_command() {
    let home = TempDir::new().unwrap();
    let folder = home.path().join("man1");
    let bash = say(&["completions", "bash"]).await.exits(0).out;
    say(&["man", folder.to_str().unwrap()]).await.exits(0);
    for command in ["serve", "health", "config-check", "completions"] {
        assert!(bash.contains(command.split('-').next().unwrap()), "{command}");
        let page = folder.join(format!("kvgate-{command}.1"));
        assert!(page.is_file(), "{}", page.display());
    }
    say(&["man", "/proc/kvgate"]).await.exits(2);
    say(&["completions", "csh"]).await.exits(2);
}

#[tokio::test]
async fn config_is_checked_whole_and_its_file_loads_back() {
    let home = TempDir::new().unwrap();
    let said = |mut command: Command| async move { Said::new(command.output().await.unwrap()) };
    let mut bad = kvgate(home.path(), &["config", "check", "--json", "--region", "?"]);
    bad.env("KVGATE__S3__PART_SIZE", "1").env("KVGATE__NOPE__X", "1");
    let json = said(bad).await.exits(2).json();
    assert_eq!(json["problems"].as_array().unwrap().len(), 3);
    say(&["config", "check"]).await.exits(0).says(&["ok"]);
    // As `serve` refuses it.
    let small = |args: &[&str]| {
        let mut command = kvgate(home.path(), args);
        command.env("KVGATE__ARENA__SIZE", "64MiB");
        command
    };
    let words = ["[arena] size, 64MiB, has no room", "[load] reserve"];
    for command in [["config", "check"].as_slice(), &["serve", "--embedded", "s3"]] {
        said(small(command)).await.exits(2).says(&words);
    }
    let json = said(small(&["config", "check", "--json"])).await.exits(2).json();
    assert_eq!(
        (&json["ok"], &json["problems"][0]["path"]),
        (&false.into(), &"arena.size".into())
    );
    assert_eq!(json["problems"][0]["origin"]["name"], "KVGATE__ARENA__SIZE");

    let mut show = kvgate(home.path(), &["config", "show", "--toml", "--bucket", "123"]);
    show.env("KVGATE__ARENA__SIZE", "1.5GiB")
        .env("KVGATE__S3__RETRIES", "7")
        .env("KVGATE__S3__PATH_STYLE", "false");
    let file = home.path().join("kvgate.toml");
    std::fs::write(&file, said(show).await.exits(0).out).unwrap();
    let file = file.to_str().unwrap();
    let json = say(&["config", "show", "--json", "--config", file])
        .await
        .exits(0)
        .json();
    let value = |path: &str| {
        let keys = json.as_array().unwrap();
        let key = keys.iter().find(|key| key["path"] == path).unwrap();
        (
            key["value"].as_str().unwrap(),
            key["origin"]["kind"].as_str().unwrap(),
        )
    };
    assert_eq!(value("s3.bucket"), ("123", "file"));
    assert_eq!(value("arena.size"), ("1536MiB", "file"));
    assert_eq!(value("s3.retries"), ("7", "file"));
    assert_eq!(value("s3.path_style"), ("false", "file"));
    assert_eq!(value("s3.prefix"), ("", "default"));
    say(&["config", "show", "--config", file])
        .await
        .exits(0)
        .says(&["arena.size", "1536MiB"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lookup_tells_what_is_there() {
    let stored = Stored::new().await;
    std::fs::remove_file(stored.file(&stored.hashes[3].to_string())).unwrap();
    let exact = ["lookup", "--space", "space.json", "--strategy", "exact", "--json"];
    let json = stored.say_with(&exact, &prompt()).await.exits(0).json();
    assert_eq!(json["chunks"], CHUNKS);
    assert_eq!(json["prefix"], 3);
    assert_eq!(json["prefix_tokens"], 48);
    assert_eq!(json["mask"], "17");
    assert_eq!(json["unknown"], "00");
    assert_eq!(json["tiers"][1]["from"], 4);
    assert_eq!(json["requests"]["head"], CHUNKS);
    assert_eq!(json["requests"]["put"], 0);
    let said = stored.say_with(&exact[..5], &prompt()).await.exits(0);
    said.says(&["###.#", "3 chunks, 48 tokens", "5 HEAD", "83 given, 3 after"]);

    // The same by the space's id, by hashes, and under another salt.
    let id = stored.space.id().to_string();
    let hashes = format!("{}\n{}\n", stored.hashes[0], stored.hashes[3]);
    let by_hash = ["lookup", "--space", &id, "--hashes", "-", "--json"];
    assert_eq!(
        stored.say_with(&by_hash, &hashes).await.exits(0).json()["mask"],
        "01"
    );
    let salted = ["lookup", "--space", &id[..32], "--salt", "x", "--json"];
    let json = stored.say_with(&salted, &prompt()).await.exits(0).json();
    assert_eq!(json["prefix"], 0);
    assert_eq!(
        stored.say_with(&exact, "[1, 2]").await.exits(0).json()["chunks"],
        0
    );

    for (input, message) in [
        ("1 two", "tokenizer"),
        ("[1, -2]", "JSON array"),
        ("-1", "4294967295"),
    ] {
        stored.say_with(&exact, input).await.exits(2).says(&[message]);
    }
    let no_secret = stored.home.path().join("secret");
    std::fs::write(&no_secret, "hunter2").unwrap();
    let secret = [
        "lookup",
        "--space",
        "space.json",
        "--tenant-secret-file",
        "secret",
    ];
    for (mode, told) in [(0o644, "chmod 0400"), (0o400, "openssl rand")] {
        std::fs::set_permissions(&no_secret, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let said = stored.say_with(&secret, "1").await.exits(2).says(&[told]);
        assert!(!said.err.contains("hunter2"), "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bucket_credentials_space_or_server() {
    let stored = Stored::new().await;
    let bucket = ["ls", "--bucket", "other"];
    stored
        .say(&bucket)
        .await
        .exits(2)
        .says(&["does not exist", "--bucket"]);
    let unknown = "0".repeat(32);
    for command in ["ls", "verify", "rm", "lookup"] {
        let said = stored.say(&[command, "--space", &unknown]).await.exits(2);
        said.says(&["unknown space", "kvgate ls"]);
    }
    let mut wrong = stored.command(&["ls", "-vv"]);
    wrong.env("AWS_SECRET_ACCESS_KEY", "wrong-secret");
    let said = Said::new(wrong.output().await.unwrap()).exits(2);
    let said = said.says(&["credentials", "AWS_ACCESS_KEY_ID"]);
    assert!(!said.err.contains("wrong-secret"), "{said:?}");
    let mut none = stored.command(&["ls"]);
    none.env_remove("AWS_SECRET_ACCESS_KEY")
        .env_remove("AWS_ACCESS_KEY_ID");
    Said::new(none.output().await.unwrap())
        .exits(2)
        .says(&["AWS_PROFILE"]);
    let mut half = stored.command(&["ls"]);
    half.env_remove("AWS_SECRET_ACCESS_KEY");
    Said::new(half.output().await.unwrap())
        .exits(2)
        .says(&["AWS_SECRET_ACCESS_KEY is not"]);
    // Nobody listens there.
    let away = ["ls", "--endpoint", "http://127.0.0.1:1"];
    stored.say(&away).await.exits(1).says(&["no connection"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ls_and_stat_show_spaces_chunks_and_headers() {
    let stored = Stored::new().await;
    std::fs::write(stored.bucket().join("t/notes.txt"), "mine").unwrap();
    let json = stored.say(&["ls", "--json"]).await.exits(0).json();
    assert_eq!(json["spaces"][0]["space"], stored.space.id().to_string());
    assert_eq!(json["spaces"][0]["revision"], "abc123");
    assert_eq!(json["spaces"][0]["chunks"], CHUNKS);
    assert_eq!(json["foreign"]["objects"], 1);
    stored
        .say(&["ls"])
        .await
        .exits(0)
        .says(&["tiny", "1 other object", "no chunks under this prefix"]);
    // Under another prefix they are kvgate's all the same.
    for command in ["ls", "usage"] {
        let said = stored.say(&[command, "--prefix", ""]).await.exits(0);
        said.says(&[
            &format!("{} other objects", CHUNKS + 2),
            "that are no chunks under this prefix",
        ]);
    }
    let id = stored.id();
    let json = stored
        .say(&["ls", "--space", &id, "--limit", "2", "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(json["chunks"].as_array().unwrap().len(), 2);
    assert_eq!(json["truncated"], true);
    let said = stored.say(&["ls", "--space", "space.json"]).await.exits(0);
    assert_eq!(said.out.lines().count(), CHUNKS as usize + 1);

    let hash = stored.hashes[1].to_string();
    let json = stored
        .say(&["stat", &hash, "--space", &id, "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(json["state"], "ok");
    assert_eq!(json["header"]["parent"], stored.hashes[0].to_string());
    assert_eq!(json["header"]["digests"].as_array().unwrap().len(), 2);
    assert_eq!(json["bytes"], stored.space.layout().object_len());
    let key = format!("t/{id}/{hash}");
    stored
        .say(&["stat", &key])
        .await
        .exits(0)
        .says(&["crc64nvme", "layer 1 kv"]);
    stored.damage(1, 100);
    stored
        .say(&["stat", &key])
        .await
        .exits(1)
        .says(&["damaged", "header"]);
    std::fs::write(stored.file(&hash), "short").unwrap();
    stored.say(&["stat", &key]).await.exits(1).says(&["damaged"]);
    std::fs::write(stored.file(&hash), "").unwrap();
    stored.say(&["stat", &key]).await.exits(1).says(&["damaged"]);
    let missing = format!("t/{id}/{}", "0".repeat(64));
    stored.say(&["stat", &missing]).await.exits(1).says(&["missing"]);
    let elsewhere = format!("t/{}/{hash}", "0".repeat(32));
    stored
        .say(&["stat", &elsewhere])
        .await
        .exits(2)
        .says(&["unknown space"]);
}

/// A writer of the bucket could move the cursor, or name the window.
#[tokio::test(flavor = "multi_thread")]
async fn names_in_a_bucket_say_nothing_to_a_terminal() {
    let stored = Stored::new().await;
    let json = SPACE_JSON
        .replace("tiny", r"tiny\u001b]0;renamed\u0007")
        .replace("abc123", r"abc\n123");
    let space = Space::from_json(&json).unwrap();
    let folder = stored.bucket().join(PREFIX).join(space.key().to_string());
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("space.json"), space.canonical_json()).unwrap();
    let id = space.key().to_string();
    for command in [&["ls"][..], &["usage"], &["rm", "--space", &id]] {
        let said = stored.say(command).await;
        let told = said.out + &said.err;
        assert!(told.contains("tiny ]0;renamed"), "{command:?}: {told:?}");
        assert!(
            !told.contains(|c: char| c.is_control() && c != '\n'),
            "{command:?}: {told:?}"
        );
    }
}

/// A tenant's plain space and its signed one have the same model.
#[tokio::test(flavor = "multi_thread")]
async fn a_space_is_shown_with_its_tenant_and_protection() {
    let stored = Stored::new().await;
    for command in ["ls", "usage"] {
        let said = stored.say(&[command]).await.exits(0);
        assert!(!said.out.contains("protection"), "{}", said.out);
    }
    let json = SPACE_JSON.replace(
        r#""chunk_tokens""#,
        r#""tenant":"acme","protection":"signed","chunk_tokens""#,
    );
    let space = Space::from_json(&json).unwrap();
    let id = space.key().to_string();
    let folder = stored.bucket().join(PREFIX).join(&id);
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("space.json"), space.canonical_json()).unwrap();
    // A chunk's name, for usage counts no space without chunks.
    std::fs::write(folder.join("0".repeat(64)), "x").unwrap();
    for command in ["ls", "usage"] {
        let said = stored.say(&[command]).await.exits(0);
        said.says(&["tenant", "protection", "acme", "signed", "none"]);
        let json = stored.say(&[command, "--json"]).await.exits(0).json();
        let spaces = json["spaces"].as_array().unwrap().iter();
        let mut shown: Vec<_> = spaces.map(|of| [&of["tenant"], &of["protection"]]).collect();
        shown.sort_by_key(|of| of[0].to_string());
        assert_eq!(shown, [["", "none"], ["acme", "signed"]], "{command}");
    }
    let said = stored.say(&["rm", "--space", &id, "--dry-run"]).await.exits(0);
    said.says(&["(tiny, tenant acme, signed)"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kinds_of_a_model_stand_together_and_each_object_says_its_own() {
    let stored = Stored::new().await;
    let of = |model: &str, more: &str| {
        let json = format!(
            r#"{{"model":"{model}","revision":"abc123","chunk_tokens":16,{more},
                "mha":{{"layers":2,"heads":2,"head_dim":8}}}}"#
        );
        Space::from_json(&json).unwrap()
    };
    let state = of("tiny", r#""kind":"state""#);
    let spaces = [
        of("tiny", r#""draft":"eagle@1""#),
        of("zebra", r#""draft":"""#),
        state.clone(),
        of("tiny", r#""kind":{"window":32}"#),
        of("ant", r#""kind":{"chunked":64}"#),
    ];
    let root = ChunkHasher::new(&stored.space, None)
        .unwrap()
        .root(b"", b"")
        .unwrap();
    for space in &spaces {
        stored.store(space, root).await;
    }
    let json = stored.say(&["ls", "--json"]).await.exits(0).json();
    let shown = json["spaces"].as_array().unwrap().iter();
    let shown: Vec<_> = shown
        .map(|of| (of["model"].clone(), of["kind"].clone(), of["draft"].clone()))
        .collect();
    let row = |model: &str, kind, draft: &str| (json!(model), kind, json!(draft));
    assert_eq!(
        shown,
        [
            row("ant", json!({"chunked": 64}), ""),
            row("tiny", json!("full"), ""),
            row("tiny", json!({"window": 32}), ""),
            row("tiny", json!("state"), ""),
            row("tiny", json!("full"), "eagle@1"),
            row("zebra", json!("full"), ""),
        ]
    );
    let models: Vec<_> = (1..5).map(|i| json["spaces"][i]["model_id"].clone()).collect();
    assert!(models.iter().all(|id| *id == stored.space.model_id().to_string()));
    let said = stored.say(&["ls"]).await.exits(0);
    said.says(&["window 32", "chunked 64", "state", "full, draft"]);
    stored
        .say(&["verify"])
        .await
        .exits(0)
        .says(&["30 chunks in 6 spaces"]);

    let key = format!("{}/{}", state.key(), stored.hashes[1]);
    let stat = |key: &str| format!("{PREFIX}/{key}");
    let said = stored.say(&["stat", &stat(&key)]).await.exits(0);
    said.says(&["tokens", "16", "kind", "state", "layer 1 kv"]);
    // As a faulty writer would leave it: a window's chunk in the place of a snapshot.
    let file = stored.bucket().join(PREFIX).join(&key);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[176..184].copy_from_slice(&[2, 0, 0, 0, 32, 0, 0, 0]);
    let digest = blake3::hash(&bytes[..4096 - 32]);
    bytes[4096 - 32..4096].copy_from_slice(digest.as_bytes());
    std::fs::write(&file, bytes).unwrap();
    let wrong = ["it has KV of kind window 32 where state was expected"];
    stored.say(&["stat", &stat(&key)]).await.exits(1).says(&wrong);
    stored.say(&["verify"]).await.exits(1).says(&wrong);
    let said = stored.say(&["verify", "--delete"]).await.exits(1);
    said.says(&["removed 1", "bad_header"]);
    stored
        .say(&["verify"])
        .await
        .exits(0)
        .says(&["29 chunks in 6 spaces"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_finds_every_kind_of_damage_and_removes_it() {
    let stored = Stored::new().await;
    let said = stored.say(&["verify"]).await.exits(0);
    said.says(&["5 chunks in 1 space", "ok 5, damaged 0"]);
    let header = stored.space.layout().header_len();
    stored.damage(0, header + 5);
    stored.damage(1, 50);
    std::fs::write(stored.file(&stored.hashes[2].to_string()), "short").unwrap();
    let good = std::fs::read(stored.file(&stored.hashes[4].to_string())).unwrap();
    std::fs::write(stored.file(&stored.hashes[3].to_string()), &good).unwrap();

    let json = stored.say(&["verify", "--json"]).await.exits(1).json();
    assert_eq!(json["totals"]["ok"], 1);
    assert_eq!(json["totals"]["damaged"], 4);
    let codes: Vec<&str> = json["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["code"].as_str().unwrap())
        .collect();
    for code in ["bad_digest", "bad_header", "wrong_length", "foreign_chunk"] {
        assert!(codes.contains(&code), "{codes:?}");
    }
    let said = stored
        .say(&["verify", "--space", &stored.id(), "--delete"])
        .await
        .exits(1);
    assert_eq!(said.err, "", "the report says it already");
    said.says(&["removed 4", "bad_digest"]);
    stored.say(&["verify"]).await.exits(0).says(&["1 chunk in"]);

    // Of another format, so perhaps not damaged: reported, and never removed.
    let newer = stored.file(&stored.hashes[4].to_string());
    let mut bytes = good;
    bytes[8] = 9;
    let digest = blake3::hash(&bytes[..4096 - 32]);
    bytes[4096 - 32..4096].copy_from_slice(digest.as_bytes());
    std::fs::write(&newer, bytes).unwrap();
    stored
        .say(&["verify", "--delete"])
        .await
        .exits(1)
        .says(&["unknown 1"]);
    assert!(newer.exists());
    std::fs::write(stored.file("space.json"), r#"{"format": 99, "shape": "new"}"#).unwrap();
    stored.say(&["verify", "--delete"]).await.exits(1).says(&[
        "space_json_unreadable",
        "the space has format 99, and this kvgate knows formats up to 2: a newer kvgate made it",
        "damaged 0 (removed 0)",
    ]);
    std::fs::write(stored.file("space.json"), "{").unwrap();
    stored
        .say(&["verify"])
        .await
        .exits(1)
        .says(&["space_json_damaged"]);
    std::fs::remove_file(stored.file("space.json")).unwrap();
    stored
        .say(&["verify"])
        .await
        .exits(1)
        .says(&["space_json_missing"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_says_when_the_arena_is_smaller_than_a_chunk() {
    let stored = Stored::new().await;
    let large = Space::from_json(
        r#"{"model":"large","revision":"r1","chunk_tokens":256,"mha":{"layers":32,"heads":8,"head_dim":128}}"#,
    )
    .unwrap();
    let folder = stored.bucket().join(PREFIX).join(large.key().to_string());
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("space.json"), large.canonical_json()).unwrap();
    let mut command = stored.command(&["verify"]);
    command.env("KVGATE__ARENA__SIZE", "1MiB");
    let said = Said::new(command.output().await.unwrap()).exits(2);
    said.says(&["32.00 MiB", "KVGATE__ARENA__SIZE="]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rm_asks_first_and_leaves_what_is_not_ours() {
    let stored = Stored::new().await;
    let id = stored.id();
    std::fs::write(stored.file("notes.txt"), "mine").unwrap();
    let said = stored.say(&["rm", "--space", &id]).await.exits(2);
    said.says(&["--yes", "6 objects", "tiny"]);
    stored
        .say(&["rm", "--space", &id, "--dry-run"])
        .await
        .exits(0)
        .says(&["would remove"]);
    let hash = stored.hashes[0].to_string();
    let said = stored
        .say(&["rm", "--space", &id, "--chunk", &hash])
        .await
        .exits(0);
    said.says(&["removed 1 chunk"]);
    assert!(!stored.file(&hash).exists());
    let json = stored
        .say(&["rm", "--space", &id, "--yes", "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(json["objects"], CHUNKS);
    assert!(stored.file("notes.txt").exists());
    assert!(!stored.file("space.json").exists());
    std::fs::write(stored.file("space.json"), SPACE_JSON).unwrap();
    stored
        .say(&["rm", "--space", &id, "--yes"])
        .await
        .exits(0)
        .says(&["removed space", "not its chunks, so left: 1 object"]);
    stored
        .say(&["rm", "--space", &id, "--yes"])
        .await
        .exits(2)
        .says(&["unknown space"]);
}

#[tokio::test]
async fn a_closed_pipe_ends_quietly_and_a_full_disk_does_not() {
    let home = TempDir::new().unwrap();
    // Not `Command::output`: it would put a pipe of its own in place of ours.
    let say_into = async |stdout: Stdio| {
        let mut command = kvgate(home.path(), &["config", "show", "--json"]);
        let child = command.stdout(stdout).spawn().unwrap();
        drop(command);
        Said::new(child.wait_with_output().await.unwrap())
    };
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let said = say_into(writer.into()).await.exits(0);
    assert_eq!(said.err, "");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    say_into(full.into())
        .await
        .exits(1)
        .says(&["can't write the output"]);
}

/// The chain is the SDK's; that its credentials are asked for again before they expire is what matters here.
#[tokio::test]
async fn credentials_come_from_the_chain_and_are_refreshed() {
    use std::os::unix::fs::PermissionsExt;
    let stored = Stored::new().await;
    let (program, calls) = (stored.home.path().join("issue"), stored.home.path().join("calls"));
    let (access, secret) = (stored.s3.access_key(), stored.s3.secret_key());
    let script = format!(
        r#"#!/bin/sh
echo called >>"{}"
echo '{{"Version": 1, "AccessKeyId": "{access}", "SecretAccessKey": "{secret}", "Expiration": "'$(date -u -d '+3 seconds' +%Y-%m-%dT%H:%M:%SZ)'"}}'
"#,
        calls.display()
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let profile = stored.home.path().join("aws-config");
    std::fs::write(
        &profile,
        format!("[profile fleet]\ncredential_process = {}\n", program.display()),
    )
    .unwrap();
    let said = stored
        .command(&["verify"])
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY")
        .env("AWS_CONFIG_FILE", &profile)
        .env("AWS_PROFILE", "fleet")
        .output()
        .await
        .unwrap();
    Said::new(said).exits(0).says(&["ok 5"]);
    let calls = std::fs::read_to_string(calls).unwrap().lines().count();
    assert!(calls > 1, "asked again when they are about to expire: {calls}");
}
