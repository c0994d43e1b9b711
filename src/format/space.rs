//! A space: one kind of KV of a model, and all that must be equal for two of its chunks to be interchangeable, tokens
//! aside. Its id is the hash of its canonical JSON.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dtype::DType;
use super::hash::{HashScheme, ModelId, SpaceId};
use super::header::FORMAT_VERSION;
use super::key::SpaceKey;
use super::kind::Kind;
use super::layout::{Layout, Plane};
use super::protection::Protection;
use super::space_input::SpaceInput;

const CONTEXT: &str = "kvgate space v1";
const MODEL_CONTEXT: &str = "kvgate model v1";
pub const PLANES_MAX: u32 = 4096;
/// Below what one PUT may carry (5 GiB), header included.
pub const CHUNK_BYTES_MAX: u64 = 4 << 30;
const CHUNK_TOKENS_MAX: u32 = 65_536;
const ROW_BYTES_MAX: u32 = 1 << 20;
/// Of a state: all of a layer, or of a rank's share of it.
const STATE_BYTES_MAX: u32 = 1 << 28;
const LAYER_MAX: u32 = 65_535;
const HEADS_MAX: u32 = 65_536;
const TEXT_MAX: usize = 512;
const EXTRA_MAX: usize = 64;
const DEFAULT_CHUNK_TOKENS: u32 = 256;
/// Revisions that name no fixed weights.
const MOVING_REVISIONS: [&str; 8] = [
    "unknown", "none", "null", "main", "master", "head", "latest", "default",
];

/// The part of the model that a node holds. Half-open ranges in the whole model's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shard {
    Whole,
    Part { layers: (u32, u32), heads: (u32, u32) },
}

/// All that must be equal for two chunks to be interchangeable, tokens aside. Checked and immutable; cheap to clone.
#[derive(Clone)]
pub struct Space(Arc<Inner>);

struct Inner {
    fields: Fields,
    canonical: String,
    id: SpaceId,
    model_id: ModelId,
    layout: Layout,
}

/// The members of the canonical JSON, which sorts them.
#[derive(Serialize)]
struct Fields {
    format: u32,
    model: String,
    revision: String,
    dtype: DType,
    chunk_tokens: u32,
    tenant: String,
    hash: HashScheme,
    kind: Kind,
    draft: String,
    planes: Vec<Plane>,
    shard: Shard,
    extra: BTreeMap<String, String>,
    /// Left out where there is none, so that the ids of such spaces are those of format 1.
    #[serde(skip_serializing_if = "Protection::is_none")]
    protection: Protection,
}

/// The members that all spaces of one model share.
#[derive(Serialize)]
struct ModelFields<'a> {
    format: u32,
    model: &'a str,
    revision: &'a str,
    chunk_tokens: u32,
    tenant: &'a str,
    hash: HashScheme,
}

/// The problems of a space; all of them.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    #[error("the space is not valid JSON for a space: {0}. See docs/FORMAT.md section 1")]
    Json(#[from] serde_json::Error),
    #[error("the space can't be: {}", .0.join("; "))]
    Invalid(Vec<String>),
    #[error(
        "the space has format {0}, and this kvgate knows formats up to {FORMAT_VERSION}: a newer kvgate made it, so use that \
         version's program"
    )]
    Newer(u64),
}

/// The format of a space that a newer kvgate made. Nothing else of it need be known here.
fn newer_format(json: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Format {
        format: u64,
    }
    let format: Option<Format> = serde_json::from_str(json).ok();
    format
        .map(|of| of.format)
        .filter(|&format| format > u64::from(FORMAT_VERSION))
}

impl Space {
    /// Expands shorthands, fills in defaults and checks everything.
    pub fn new(input: SpaceInput) -> Result<Self, SpaceError> {
        let mut problems = Vec::new();
        let dtype = input.dtype.unwrap_or(DType::BFloat16);
        let planes = match (input.planes, input.mha, input.mla) {
            (Some(planes), None, None) => Some(planes),
            (None, Some(mha), None) => mha.planes(dtype),
            (None, None, Some(mla)) => mla.planes(dtype),
            _ => {
                problems.push("give exactly one of `planes`, `mha` and `mla`".into());
                Some(Vec::new())
            }
        };
        if planes.is_none() {
            problems.push("head_dim or latent_dim is too large".into());
        } else if planes.as_ref().is_some_and(Vec::is_empty) && problems.is_empty() {
            problems.push("it has no planes: give at least one layer".into());
        }
        let protection = input.protection.unwrap_or_default();
        let fields = Fields {
            format: input.format.unwrap_or(protection.format_version()),
            model: input.model,
            revision: input.revision,
            dtype,
            chunk_tokens: input.chunk_tokens.unwrap_or(DEFAULT_CHUNK_TOKENS),
            tenant: input.tenant.unwrap_or_default(),
            hash: input.hash.unwrap_or(HashScheme::KvgateV1),
            kind: input.kind.unwrap_or_default(),
            draft: input.draft.unwrap_or_default(),
            planes: planes.unwrap_or_default(),
            shard: input.shard.unwrap_or(Shard::Whole),
            extra: input.extra.unwrap_or_default(),
            protection,
        };
        fields.check(&mut problems);
        if !problems.is_empty() {
            return Err(SpaceError::Invalid(problems));
        }
        let canonical = serde_json_canonicalizer::to_string(&fields)?;
        let id = SpaceId(blake3::derive_key(CONTEXT, canonical.as_bytes()));
        let model = serde_json_canonicalizer::to_string(&fields.of_model())?;
        let model_id = ModelId(blake3::derive_key(MODEL_CONTEXT, model.as_bytes()));
        let layout = Layout::new(&fields.planes, fields.chunk_rows());
        Ok(Self(Arc::new(Inner {
            fields,
            canonical,
            id,
            model_id,
            layout,
        })))
    }

    /// Reads a space as people write it, or its canonical form.
    pub fn from_json(json: &str) -> Result<Self, SpaceError> {
        let space = serde_json::from_str(json)
            .map_err(SpaceError::Json)
            .and_then(Self::new);
        space.map_err(|error| newer_format(json).map_or(error, SpaceError::Newer))
    }

    pub fn id(&self) -> SpaceId {
        self.0.id
    }

    pub fn key(&self) -> SpaceKey {
        self.0.id.into()
    }

    /// The same for all kinds of KV of a model: chunk hashes are made with it.
    pub fn model_id(&self) -> ModelId {
        self.0.model_id
    }

    pub fn kind(&self) -> Kind {
        self.0.fields.kind
    }

    /// The draft model (MTP, EAGLE) whose layers these are; empty: the model's own.
    pub fn draft(&self) -> &str {
        &self.0.fields.draft
    }

    /// Rows that a head has in a chunk: one for each token, or the one of a state's snapshot or an engine's page.
    pub fn chunk_rows(&self) -> u32 {
        self.0.fields.chunk_rows()
    }

    /// The chunks that an engine needs to go on after the first `boundary` chunks of a prompt.
    pub fn needed(&self, boundary: usize) -> std::ops::Range<usize> {
        self.kind().needed(boundary, self.chunk_tokens())
    }

    /// RFC 8785 JSON; what the id is the hash of, and what `space.json` holds.
    pub fn canonical_json(&self) -> &str {
        &self.0.canonical
    }

    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    pub fn model(&self) -> &str {
        &self.0.fields.model
    }

    pub fn revision(&self) -> &str {
        &self.0.fields.revision
    }

    pub fn dtype(&self) -> DType {
        self.0.fields.dtype
    }

    pub fn chunk_tokens(&self) -> u32 {
        self.0.fields.chunk_tokens
    }

    /// What every object of the space must have.
    pub fn protection(&self) -> Protection {
        self.0.fields.protection
    }

    /// Empty where there are no tenants.
    pub fn tenant(&self) -> &str {
        &self.0.fields.tenant
    }

    pub fn hash(&self) -> HashScheme {
        self.0.fields.hash
    }

    /// What the bytes mean, beyond their dtype.
    pub fn extra(&self) -> &BTreeMap<String, String> {
        &self.0.fields.extra
    }

    pub fn planes(&self) -> &[Plane] {
        &self.0.fields.planes
    }

    pub fn shard(&self) -> Shard {
        self.0.fields.shard
    }

    /// Planes of the same shape together: `2 x layers 0 to 1: kv, 2 heads of 32 bytes`.
    pub fn planes_in_words(&self) -> Vec<String> {
        let mut shapes: Vec<(&Plane, u32, u32, usize)> = Vec::new();
        for plane in self.planes() {
            let is_alike = |of: &Plane| {
                (&of.name, of.heads, of.row_bytes) == (&plane.name, plane.heads, plane.row_bytes)
            };
            match shapes.iter_mut().find(|(of, ..)| is_alike(of)) {
                Some((_, first, last, count)) => {
                    (*first, *last) = ((*first).min(plane.layer), (*last).max(plane.layer));
                    *count += 1;
                }
                None => shapes.push((plane, plane.layer, plane.layer, 1)),
            }
        }
        let words = |(plane, first, last, count): (&Plane, u32, u32, usize)| {
            let Plane {
                name,
                heads,
                row_bytes,
                ..
            } = plane;
            format!("{count} x layers {first} to {last}: {name}, {heads} heads of {row_bytes} bytes")
        };
        shapes.into_iter().map(words).collect()
    }

    /// Bytes of a row of all heads of all planes: what a token keeps, or a state's snapshot.
    pub fn row_bytes(&self) -> u64 {
        self.planes().iter().map(|plane| plane.bytes(1)).sum()
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Space({} {})", self.key(), self.model())
    }
}

impl PartialEq for Space {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for Space {}

impl Fields {
    fn of_model(&self) -> ModelFields<'_> {
        ModelFields {
            format: self.format,
            model: &self.model,
            revision: &self.revision,
            chunk_tokens: self.chunk_tokens,
            tenant: &self.tenant,
            hash: self.hash,
        }
    }

    /// A state's snapshot and an engine's page are one row, whatever tokens they are of.
    fn is_one_row(&self) -> bool {
        self.kind == Kind::State || self.dtype == DType::Pages
    }

    fn chunk_rows(&self) -> u32 {
        if self.is_one_row() { 1 } else { self.chunk_tokens }
    }

    fn check(&self, problems: &mut Vec<String>) {
        let expected = self.protection.format_version();
        if self.format != expected {
            problems.push(format!(
                "format {} can't be: this kvgate writes {expected} where the protection is {}",
                self.format, self.protection
            ));
        }
        for (name, text) in [("model", &self.model), ("revision", &self.revision)] {
            if text.is_empty() || text.len() > TEXT_MAX {
                problems.push(format!(
                    "`{name}` must have 1 to {TEXT_MAX} bytes, not {}",
                    text.len()
                ));
            }
        }
        for (name, text) in [("tenant", &self.tenant), ("draft", &self.draft)] {
            if text.len() > TEXT_MAX {
                problems.push(format!("`{name}` may have {TEXT_MAX} bytes, not {}", text.len()));
            }
        }
        problems.extend(self.kind.check().err());
        self.check_revision(problems);
        if !(1..=CHUNK_TOKENS_MAX).contains(&self.chunk_tokens) {
            problems.push(format!(
                "`chunk_tokens` must be 1 to {CHUNK_TOKENS_MAX}, not {}",
                self.chunk_tokens
            ));
        }
        let long = |(key, value): (&String, &String)| key.len().max(value.len()) > TEXT_MAX;
        if self.extra.len() > EXTRA_MAX || self.extra.iter().any(long) {
            problems.push(format!(
                "`extra` may have {EXTRA_MAX} entries of {TEXT_MAX} bytes"
            ));
        }
        self.check_planes(problems);
        self.check_shard(problems);
    }

    fn check_revision(&self, problems: &mut Vec<String>) {
        let revision = self.revision.as_str();
        let moving = MOVING_REVISIONS.contains(&revision.to_ascii_lowercase().as_str());
        let path = revision.starts_with(['/', '.', '~', '\\']);
        if moving || path {
            problems.push(format!(
                "`revision` {revision:?} does not pin the weights: give the commit or a digest of the weight files"
            ));
        }
    }

    fn check_planes(&self, problems: &mut Vec<String>) {
        let before = problems.len();
        if self.planes.len() > PLANES_MAX as usize {
            problems.push(format!("there may be {PLANES_MAX} planes, not more"));
            return;
        }
        let mut seen = HashSet::new();
        for (index, plane) in self.planes.iter().enumerate() {
            if let Err(problem) = self.check_plane(plane) {
                problems.push(format!(
                    "plane {index} (layer {}, {:?}): {problem}",
                    plane.layer, plane.name
                ));
            } else if !seen.insert((plane.layer, &plane.name)) {
                problems.push(format!(
                    "there are two planes {:?} of layer {}",
                    plane.name, plane.layer
                ));
            }
            // One wrong number repeats itself in every layer.
            if problems.len() > before + 2 {
                return;
            }
        }
        if !self.planes.is_sorted_by_key(|plane| plane.layer) {
            problems.push("planes must be in order of their layers".into());
        }
        let bytes = self
            .planes
            .iter()
            .map(|plane| plane.bytes(self.chunk_rows()))
            .fold(0, u64::saturating_add);
        if bytes > CHUNK_BYTES_MAX {
            problems.push(format!(
                "a chunk would have {bytes} bytes, over 4 GiB: lower `chunk_tokens`"
            ));
        }
    }

    fn check_plane(&self, plane: &Plane) -> Result<(), String> {
        let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_.-".contains(&c);
        if !(1..=64).contains(&plane.name.len()) || !plane.name.bytes().all(allowed) {
            return Err("`name` must be 1 to 64 of a-z 0-9 _ . -".into());
        }
        if plane.layer > LAYER_MAX {
            return Err(format!("`layer` must be at most {LAYER_MAX}"));
        }
        if !(1..=HEADS_MAX).contains(&plane.heads) {
            return Err(format!("`heads` must be 1 to {HEADS_MAX}, not {}", plane.heads));
        }
        let (row, size) = (plane.row_bytes, self.dtype.size());
        let most = match self.is_one_row() {
            true => STATE_BYTES_MAX,
            false => ROW_BYTES_MAX,
        };
        if !(1..=most).contains(&row) {
            return Err(format!("`row_bytes` must be 1 to {most}, not {row}"));
        }
        if row % size != 0 {
            return Err(format!(
                "`row_bytes` {row} is not a multiple of {size}, the size of {}",
                self.dtype.name()
            ));
        }
        if let Some(fixed) = self.dtype.fixed_row_bytes().filter(|&fixed| fixed != row) {
            return Err(format!(
                "rows of {} have {fixed} bytes, not {row}",
                self.dtype.name()
            ));
        }
        Ok(())
    }

    fn check_shard(&self, problems: &mut Vec<String>) {
        let Shard::Part { layers, heads } = self.shard else {
            return;
        };
        if layers.0 >= layers.1 || heads.0 >= heads.1 {
            problems.push("`shard` ranges are [first, end] with first < end".into());
        } else if self
            .planes
            .iter()
            .any(|plane| !(layers.0..layers.1).contains(&plane.layer))
        {
            problems.push(format!(
                "planes of a shard have layers {} to {}",
                layers.0,
                layers.1 - 1
            ));
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardPart {
    layers: (u32, u32),
    heads: (u32, u32),
}

#[derive(Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "`shard` is \"whole\" or {\"layers\": [first, end], \"heads\": [first, end]}"
)]
enum ShardJson {
    Name(String),
    Part(ShardPart),
}

impl Serialize for Shard {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Whole => serializer.serialize_str("whole"),
            Self::Part { layers, heads } => ShardPart { layers, heads }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Shard {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match ShardJson::deserialize(deserializer)? {
            ShardJson::Name(name) if name == "whole" => Ok(Self::Whole),
            ShardJson::Name(name) => Err(serde::de::Error::custom(format!(
                "`shard` is \"whole\" or an object with layers and heads, not {name:?}"
            ))),
            ShardJson::Part(ShardPart { layers, heads }) => Ok(Self::Part { layers, heads }),
        }
    }
}
