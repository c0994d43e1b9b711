//! The space as people write it: defaults may be left out, and `mha` or `mla` stand for planes.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use super::dtype::DType;
use super::hash::HashScheme;
use super::kind::Kind;
use super::layout::Plane;
use super::protection::Protection;
use super::space::Shard;

/// A space before its shorthands are expanded and its values checked: [`Space::new`](super::Space::new) does both.
/// Unknown members and nulls are refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpaceInput {
    #[serde(default, deserialize_with = "given")]
    pub format: Option<u32>,
    pub model: String,
    pub revision: String,
    #[serde(default, deserialize_with = "given")]
    pub dtype: Option<DType>,
    #[serde(default, deserialize_with = "given")]
    pub chunk_tokens: Option<u32>,
    #[serde(default, deserialize_with = "given")]
    pub tenant: Option<String>,
    #[serde(default, deserialize_with = "given")]
    pub hash: Option<HashScheme>,
    #[serde(default, deserialize_with = "given")]
    pub kind: Option<Kind>,
    #[serde(default, deserialize_with = "given")]
    pub draft: Option<String>,
    #[serde(default, deserialize_with = "given")]
    pub planes: Option<Vec<Plane>>,
    #[serde(default, deserialize_with = "given")]
    pub mha: Option<Mha>,
    #[serde(default, deserialize_with = "given")]
    pub mla: Option<Mla>,
    #[serde(default, deserialize_with = "given")]
    pub shard: Option<Shard>,
    #[serde(default, deserialize_with = "given")]
    pub extra: Option<BTreeMap<String, String>>,
    #[serde(default, deserialize_with = "given")]
    pub protection: Option<Protection>,
}

/// Attention whose layers all have the same KV heads (MHA, GQA, MQA): one plane a layer, K then V in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mha {
    pub layers: u32,
    /// KV heads, not query heads.
    pub heads: u32,
    pub head_dim: u32,
    /// Of V where it differs from K's.
    #[serde(default, deserialize_with = "given")]
    pub v_head_dim: Option<u32>,
}

/// Multi-head latent attention: one plane a layer with one "head", the latent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mla {
    pub layers: u32,
    /// Elements a token, the rotary part included (DeepSeek: 512 + 64). Ignored for dtypes with fixed rows.
    pub latent_dim: u32,
}

impl Mha {
    pub(super) fn planes(self, dtype: DType) -> Option<Vec<Plane>> {
        let elements = self
            .head_dim
            .checked_add(self.v_head_dim.unwrap_or(self.head_dim))?;
        let row_bytes = elements.checked_mul(dtype.size())?;
        Some(planes("kv", self.layers, self.heads, row_bytes))
    }
}

impl Mla {
    pub(super) fn planes(self, dtype: DType) -> Option<Vec<Plane>> {
        let row_bytes = match dtype.fixed_row_bytes() {
            Some(bytes) => bytes,
            None => self.latent_dim.checked_mul(dtype.size())?,
        };
        Some(planes("latent", self.layers, 1, row_bytes))
    }
}

fn planes(name: &str, layers: u32, heads: u32, row_bytes: u32) -> Vec<Plane> {
    // One more than a space may have, so that a huge number is refused without being built.
    let layers = layers.min(super::space::PLANES_MAX + 1);
    (0..layers)
        .map(|layer| Plane {
            name: name.into(),
            layer,
            heads,
            row_bytes,
        })
        .collect()
}

/// A member that may be left out, but not be null.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}
