//! The gateway inside a program: an S3 server in this process, two gateways on it, and no daemon.
//!
//!     cargo run --example embed
//!
//! The first gateway stores a prompt's KV. The second one, which has never seen the prompt, finds it and loads it.

use aws_credential_types::Credentials;
use kvgate::cache::gateway::{AfterMiss, FilledSlot, Gateway, LoadSpec, StoreOutcome, open_store};
use kvgate::config::{self, Config, Override};
use kvgate::embedded::EmbeddedS3;
use kvgate::format::{ChunkHash, ChunkHasher, Space};
use kvgate::protocol::{Order, Strategy};
use tokio::time::{Duration, Instant};

type Error = Box<dyn std::error::Error>;

const SPACE: &str = r#"{"model": "example/embed", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
    "mha": {"layers": 4, "heads": 2, "head_dim": 64}}"#;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let s3 = EmbeddedS3::start(None, None).await?;
    let config = configuration(&s3)?;

    // The names of the chunks follow from their tokens alone.
    let space = Space::from_json(SPACE)?;
    let hasher = ChunkHasher::new(&space, None)?;
    let root = hasher.root(b"", b"")?;
    let prompt: Vec<u32> = (0..100).collect();
    let chunks = hasher.chain(&root, &prompt, &[])?;

    let writer = gateway(&s3, &config).await?;
    store(&writer, &space, root, &chunks).await?;
    let reader = gateway(&s3, &config).await?;
    load(&reader, &space, &chunks).await?;
    s3.stop().await;
    Ok(())
}

fn configuration(s3: &EmbeddedS3) -> Result<Config, Error> {
    let flag = |path, value: String| Override {
        path,
        value,
        flag: "set by the example",
    };
    let flags = [
        flag("s3.endpoint", s3.endpoint()),
        flag("s3.bucket", "example".to_owned()),
        flag("arena.size", "16MiB".to_owned()),
    ];
    // Neither a file nor the environment: this program decides alone.
    Ok(config::load(None, std::iter::empty(), &flags)?.config)
}

async fn gateway(s3: &EmbeddedS3, config: &Config) -> Result<Gateway, Error> {
    let credentials = Credentials::new(s3.access_key(), s3.secret_key(), None, None, "example");
    let store = open_store(config, Some(credentials)).await?;
    store.create_bucket(soon()).await?;
    Ok(Gateway::over(store, config).await?)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

async fn store(gateway: &Gateway, space: &Space, root: ChunkHash, chunks: &[ChunkHash]) -> Result<(), Error> {
    let mut parent = root;
    for (number, &hash) in chunks.iter().enumerate() {
        let mut slot = gateway.reserve(space)?;
        // An engine would gather its pages here.
        slot.payload_mut().fill(u8::try_from(number)?);
        let outcome = gateway
            .write_through(FilledSlot { hash, parent, slot }, soon())
            .await;
        if !matches!(outcome, StoreOutcome::Stored) {
            return Err(format!("chunk {number} was not stored: {outcome:?}").into());
        }
        parent = hash;
    }
    println!("stored {} chunks", chunks.len());
    Ok(())
}

async fn load(gateway: &Gateway, space: &Space, chunks: &[ChunkHash]) -> Result<(), Error> {
    let found = gateway.lookup(space, chunks, Strategy::Prefix, soon()).await;
    println!("found a prefix of {} chunks", found.prefix);
    let mut load = gateway.load(LoadSpec {
        space: space.clone(),
        chunks: chunks[..found.prefix].to_vec(),
        order: Order::Chunk,
        after_miss: AfterMiss::Stop,
        deadline: soon(),
    });
    let mut loaded = 0;
    while let Some((number, outcome)) = load.next().await {
        let chunk = outcome?;
        let filled = u8::try_from(number)?;
        if chunk.payload().iter().any(|&byte| byte != filled) {
            return Err(format!("chunk {number} came back with other bytes").into());
        }
        loaded += 1;
    }
    if loaded != chunks.len() {
        return Err(format!("{loaded} of {} chunks were loaded", chunks.len()).into());
    }
    println!("loaded {loaded} chunks, equal byte for byte");
    Ok(())
}
