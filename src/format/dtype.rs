//! The element types of a KV cache.

use serde::{Deserialize, Serialize};

/// Element type of the KV cache: a closed list, because its name is part of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Float32,
    Float16,
    BFloat16,
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
    #[serde(rename = "fp8_e5m2")]
    Fp8E5m2,
    Int8,
    /// Several types side by side, or one that has no name here: `extra` of the space says which.
    Bytes,
    /// An engine's own pages, whole: a head has one row in a chunk. `extra` of the space says what the bytes mean.
    Pages,
    /// DeepSeek's packed latent: 512 fp8 values, 4 fp32 scales and 64 bf16 values in one row of 656 bytes.
    #[serde(rename = "fp8_ds_mla")]
    Fp8DsMla,
}

impl DType {
    /// Bytes an element; 1 for packed rows.
    pub fn size(self) -> u32 {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::BFloat16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::Int8 | Self::Bytes | Self::Pages | Self::Fp8DsMla => 1,
        }
    }

    /// The row length that the type itself dictates, in bytes.
    pub fn fixed_row_bytes(self) -> Option<u32> {
        (self == Self::Fp8DsMla).then_some(656)
    }

    /// The name in the space's JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Int8 => "int8",
            Self::Bytes => "bytes",
            Self::Pages => "pages",
            Self::Fp8DsMla => "fp8_ds_mla",
        }
    }
}
