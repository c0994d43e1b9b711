//! What is in the modelled bucket: chunks, each with the hint that its PUT said; and the conversations that grow there.
//!
//! Objects are real ones, small: header, digests and all. A byte of them stands for [`SCALE`] bytes on the way.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Mutex;

use kvgate::format::{ChunkHash, DigestKind, Header, KeyPrefix, PlaneDigest, Run, Space};

use super::rgw::{Share, lock};

/// Bytes that each real one stands for: a chunk has 16 MiB then.
pub const SCALE: usize = 3277;
/// That a chunk's KV stands for.
pub const CHUNK_TOKENS: u64 = 512;
/// Chunks after which a conversation ends, and another takes its place.
const LONGEST: u32 = 20;
/// Of each turn.
pub const NEW_CHUNKS: u32 = 2;
/// Of a prompt on average, loaded and stored.
pub const CHUNKS: f64 = (LONGEST / 2 + NEW_CHUNKS) as f64;
/// Of the prompt that all share.
pub const SHARED_CHUNKS: u64 = 16;

/// Kinds of chunks.
const CONVERSATION: u64 = 1;
const SHARED: u64 = 2;
const TRACED: u64 = 3;

pub struct Bucket {
    pub space: Space,
    pub keys: KeyPrefix,
    digest: PlaneDigest,
    planes: Vec<[u8; 32]>,
    conversations: Mutex<Vec<Conversation>>,
    stored: Mutex<HashMap<ChunkHash, Hint>>,
    /// Chunks of the prompt that all share.
    pub shared: HashSet<ChunkHash>,
    /// Each reads what is placed there.
    osds: Vec<Share>,
}

/// The user metadata `kvgate-run`.
pub type Hint = Option<Box<str>>;

#[derive(Clone, Copy)]
pub struct Conversation {
    number: u32,
    /// How many were in its place before.
    generation: u32,
    chunks: u32,
}

impl Bucket {
    pub fn new(conversations: usize, osds: usize, osd_bytes_per_second: f64) -> Self {
        let space = Space::from_json(
            r#"{"model": "fleet/model", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
                "mha": {"layers": 1, "heads": 1, "head_dim": 16}}"#,
        )
        .expect("a space");
        let digest = PlaneDigest::open(DigestKind::default());
        let layout = space.layout();
        let zeros = vec![0; layout.payload_len()];
        let planes = (0..layout.planes()).map(|plane| {
            let len = layout.plane(plane).len();
            digest.of(&zeros[..len])
        });
        let begun = |number| Conversation {
            number,
            generation: 0,
            chunks: fastrand::u32(0..LONGEST / NEW_CHUNKS) * NEW_CHUNKS,
        };
        let bucket = Self {
            planes: planes.collect(),
            digest,
            keys: KeyPrefix::new("fleet"),
            conversations: Mutex::new((0..).take(conversations).map(begun).collect()),
            stored: Mutex::default(),
            shared: shared_prompt().into_iter().collect(),
            osds: (0..osds).map(|_| Share::new(osd_bytes_per_second)).collect(),
            space,
        };
        let turns = NEW_CHUNKS as usize;
        for conversation in lock(&bucket.conversations).iter() {
            let chunks = conversation.prompt();
            let stored = chunks[..conversation.chunks as usize].chunks(turns);
            stored.for_each(|turn| bucket.store(turn));
        }
        bucket.store(&shared_prompt());
        bucket
    }

    /// What a gateway stored after one lookup.
    fn store(&self, chunks: &[ChunkHash]) {
        for (place, chunk) in chunks.iter().enumerate() {
            let run = Run::of(&chunks[place + 1..]);
            self.put(*chunk, Some(run.text().into()));
        }
    }

    pub fn any_conversation(&self) -> Conversation {
        let conversations = lock(&self.conversations);
        conversations[fastrand::usize(..conversations.len())]
    }

    /// A turn of it was stored.
    pub fn grow(&self, turn: Conversation) {
        let mut conversations = lock(&self.conversations);
        let current = &mut conversations[turn.number as usize];
        if current.generation == turn.generation && current.chunks == turn.chunks {
            current.chunks += NEW_CHUNKS;
            if current.chunks > LONGEST {
                current.generation += 1;
                current.chunks = 0;
            }
        }
    }

    pub fn has(&self, chunk: &ChunkHash) -> bool {
        lock(&self.stored).contains_key(chunk)
    }

    pub fn hint(&self, chunk: &ChunkHash) -> Hint {
        lock(&self.stored).get(chunk).cloned().flatten()
    }

    /// False: it is there already, and stays as it is.
    pub fn put(&self, chunk: ChunkHash, hint: Hint) -> bool {
        match lock(&self.stored).entry(chunk) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(hint);
                true
            }
        }
    }

    pub fn object_len(&self) -> usize {
        self.space.layout().object_len()
    }

    pub fn chunk_of(key: &str) -> Option<ChunkHash> {
        key.rsplit('/').next()?.parse().ok()
    }

    /// The bytes of a chunk's object.
    pub fn read(&self, chunk: ChunkHash, range: Range<usize>, into: &mut [u8]) {
        let layout = self.space.layout();
        let mut front = vec![0; layout.header_len()];
        if range.start < front.len() {
            let header = Header {
                space_id: self.space.id(),
                chunk,
                parent: chunk,
                tokens: self.space.chunk_tokens(),
                payload_len: layout.payload_len() as u64,
                kind: self.space.kind(),
                is_draft: false,
                digest_kind: self.digest.kind(),
                digests: self.planes.clone(),
                seal: None,
            };
            header.write(&mut front);
        }
        for (at, byte) in range.zip(into) {
            *byte = front.get(at).copied().unwrap_or(0);
        }
    }

    pub fn osd_of(&self, chunk: &ChunkHash) -> &Share {
        let place = u64::from_le_bytes(std::array::from_fn(|i| chunk.0[i]));
        let at = usize::try_from(place % self.osds.len() as u64).unwrap_or(0);
        &self.osds[at]
    }
}

impl Conversation {
    /// The chunks of its next prompt: those that are stored, and new ones.
    pub fn prompt(&self) -> Vec<ChunkHash> {
        let text = u64::from(self.number) << 32 | u64::from(self.generation);
        let chunk = |index| hash([CONVERSATION, text, u64::from(index)]);
        (0..self.chunks + NEW_CHUNKS).map(chunk).collect()
    }
}

pub fn shared_prompt() -> Vec<ChunkHash> {
    (0..SHARED_CHUNKS).map(|index| hash([SHARED, 0, index])).collect()
}

/// Of an id of a trace.
pub fn traced(id: u64) -> ChunkHash {
    hash([TRACED, 0, id])
}

fn hash(parts: [u64; 3]) -> ChunkHash {
    let mut bytes = [0; 32];
    for (place, part) in [8, 16, 24].into_iter().zip(parts) {
        bytes[place..place + 8].copy_from_slice(&part.to_le_bytes());
    }
    let mixed = parts.iter().fold(0, |mixed, &part| mix(mixed ^ part));
    bytes[..8].copy_from_slice(&mixed.to_le_bytes());
    ChunkHash(bytes)
}

/// splitmix64.
fn mix(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
