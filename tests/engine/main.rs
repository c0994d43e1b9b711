//! A stand-in for an engine: a process of its own that stores and loads through the shared arena, for tests that kill it.
//!
//!     engine SOCKET store|load|hold|hoard|fill SEED CHUNKS [INSTANCE RANK WORLD_SIZE]
//!
//! `store` commits chunks whose bytes follow from the seed, `load` looks them up, loads them and compares every byte,
//! `hold` loads and never releases, `hoard` does that with four loads at a time, of four seeds, and `fill` reserves and never commits. Each says what it did as a line of JSON; the last two
//! wait to be killed then.

use std::time::Duration;

use kvgate::engine::client::{ApiSession, Client, ClientError, DaemonAddress};
use kvgate::format::{ChunkHash, ChunkHasher, Space};
use kvgate::protocol::Order;
use kvgate::protocol::Share;
use kvgate::protocol::{AttachRequest, LoadLine, LoadRequest, ReserveChunk, ReservedChunk, SlotName};
use serde_json::json;

const SPACE: &str = r#"{"model": "test/engine", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
    "mha": {"layers": 6, "heads": 4, "head_dim": 64}}"#;
const HEADS: u32 = 4;
/// Chunks in one call.
const CALL: usize = 8;

struct Engine {
    client: Client,
    session: ApiSession,
    space: Space,
    seed: String,
    root: ChunkHash,
    hashes: Vec<ChunkHash>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (rest, ranks) = arguments.split_at(arguments.len().min(4));
    let [socket, action, seed, chunks] = rest else {
        return Err("engine SOCKET store|load|hold|hoard|fill SEED CHUNKS [INSTANCE RANK WORLD_SIZE]".into());
    };
    let client = Client::new(DaemonAddress::Unix(socket.into()));
    let space = Space::from_json(SPACE)?;
    let hasher = ChunkHasher::new(&space, None)?;
    let root = hasher.root(seed.as_bytes(), b"")?;
    let tokens: Vec<u32> = (0..).take(chunks.parse::<usize>()? * 16).collect();
    let hashes = hasher.chain(&root, &tokens, &[])?;
    client.declare(&space).await?;
    let request = match ranks {
        [instance, rank, world_size] => {
            let (rank, world_size): (u32, u32) = (rank.parse()?, world_size.parse()?);
            AttachRequest {
                instance: instance.clone(),
                rank,
                world_size,
                tp: Some((rank, world_size)),
                ..AttachRequest::default()
            }
        }
        _ => AttachRequest {
            instance: format!("engine-{}", std::process::id()),
            world_size: 1,
            ..AttachRequest::default()
        },
    };
    let session = client.attach(&request).await?;
    let engine = Engine {
        client,
        session,
        space,
        seed: seed.clone(),
        root,
        hashes,
    };
    let (done, waits) = match action.as_str() {
        "store" => (engine.store(Store::Whole).await?, false),
        "fill" => (engine.store(Store::Uncommitted).await?, true),
        "lie" => (engine.store(Store::Unwritten).await?, false),
        "load" => (engine.load(true).await?, false),
        "hold" => (engine.load(false).await?, true),
        "hoard" => engine.hoard(&hasher).await?,
        other => return Err(format!("{other}?").into()),
    };
    println!("{done}");
    if waits {
        std::future::pending::<()>().await;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Store {
    Whole,
    Uncommitted,
    /// Committed all the same.
    Unwritten,
}

impl Engine {
    fn payload(&self, chunk: usize) -> Vec<u8> {
        let mut payload = vec![0; self.space.layout().payload_len()];
        let mut bytes = blake3::Hasher::new();
        bytes
            .update(self.hashes[chunk].as_bytes())
            .finalize_xof()
            .fill(&mut payload);
        payload
    }

    async fn store(&self, how: Store) -> Result<serde_json::Value, ClientError> {
        let space = self.space.id().to_string();
        let (mut stored, mut skipped) = (0, 0);
        for start in (0..self.hashes.len()).step_by(CALL) {
            let end = self.hashes.len().min(start + CALL);
            let chunk = |i: usize| ReserveChunk {
                hash: self.hashes[i],
                parent: if i == 0 { self.root } else { self.hashes[i - 1] },
                tokens: None,
            };
            let chunks = || (start..end).map(chunk).collect();
            let mut reserved = self.session.reserve(&space, chunks()).await?;
            // Until all ranks are attached nobody knows who writes what.
            for _ in 0..500 {
                if !reserved.own.is_empty() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
                reserved = self.session.reserve(&space, chunks()).await?;
            }
            let own = reserved.own;
            let mut slots = Vec::new();
            for (i, reserved) in (start..end).zip(reserved.chunks) {
                let ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } = reserved
                else {
                    skipped += 1;
                    continue;
                };
                if how != Store::Unwritten {
                    self.write(offset, &self.payload(i), &own)?;
                }
                slots.push(SlotName { slot, generation });
                stored += 1;
            }
            if how != Store::Uncommitted {
                self.session.commit(slots).await?;
            }
        }
        Ok(json!({ "stored": stored, "skipped": skipped }))
    }

    /// Writes this rank's share.
    fn write(&self, offset: usize, payload: &[u8], own: &[Share]) -> Result<(), ClientError> {
        let layout = self.space.layout();
        for share in own {
            for plane in share.planes.0..share.planes.1 {
                let bytes = layout.plane(plane);
                let start = bytes.start - layout.header_len();
                let head = bytes.len() / HEADS as usize;
                let part = start + share.heads.0 as usize * head..start + share.heads.1 as usize * head;
                self.session.arena.copy_in(offset + part.start, &payload[part])?;
            }
        }
        Ok(())
    }

    /// Waits to be killed with all that four loads can get.
    async fn hoard(
        &self,
        hasher: &ChunkHasher,
    ) -> Result<(serde_json::Value, bool), Box<dyn std::error::Error>> {
        let tokens: Vec<u32> = (0..).take(self.hashes.len() * 16).collect();
        let mut loads = Vec::new();
        for nth in 0..4 {
            let root = hasher.root(format!("{}-{nth}", self.seed).as_bytes(), b"")?;
            let mut request = self.request();
            request.load_id = format!("load-{nth}");
            request.hashes = hasher.chain(&root, &tokens, &[])?;
            loads.push(self.session.load(request).await?);
        }
        println!("{}", json!({ "loads": loads.len() }));
        std::future::pending().await
    }

    fn request(&self) -> LoadRequest {
        let deadline = std::env::var("KVGATE_TEST_DEADLINE_MS").ok();
        LoadRequest {
            session: String::new(),
            load_id: "load".into(),
            space: self.space.id().to_string(),
            hashes: self.hashes.clone(),
            order: Order::Chunk,
            continue_after_miss: true,
            deadline_ms: deadline.and_then(|ms| ms.parse().ok()).or(Some(20_000)),
            declines: false,
        }
    }

    async fn load(&self, releases: bool) -> Result<serde_json::Value, ClientError> {
        let found = self
            .client
            .lookup_hashes(&self.space.id().to_string(), &self.hashes, "strategy=exact")
            .await?;
        let mut lines = self.session.load(self.request()).await?;
        let (mut loaded, mut wrong, mut missing) = (0, 0, Vec::new());
        while let Some(line) = lines.next().await? {
            match line {
                LoadLine::Here {
                    i,
                    slot,
                    generation,
                    offset,
                    ..
                } => {
                    let expected = self.payload(i);
                    let mut bytes = vec![0; expected.len()];
                    self.session.arena.copy_out(offset, &mut bytes)?;
                    let same = bytes == expected && self.session.arena.generation(slot)? == generation;
                    loaded += 1;
                    wrong += usize::from(!same);
                    if releases {
                        let slot = SlotName { slot, generation };
                        self.session.release("load", Some(vec![slot])).await?;
                    }
                }
                LoadLine::Missing { miss, .. } => missing.push(miss),
                LoadLine::End { .. } => {}
            }
        }
        let present = found.mask.count();
        Ok(json!({ "present": present, "loaded": loaded, "wrong": wrong, "missing": missing }))
    }
}
