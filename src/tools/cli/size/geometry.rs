//! The geometry that `kvgate size` computes with: from a known model, or from flags.

use serde_json::json;

use super::SizeArgs;
use crate::format::{DType, Mha, Mla, Space, SpaceInput};
use crate::tools::cli::args::find_preset;
use crate::tools::cli::error::CliError;

/// Geometry alone needs no revision, but a space has one.
pub const ANY_REVISION: &str = "0";

impl SizeArgs {
    pub fn space(&self) -> Result<Space, CliError> {
        let Some(model) = &self.model else {
            return self.geometry();
        };
        let space = find_preset(model)?.space(ANY_REVISION, self.chunk_tokens)?;
        match self.dtype {
            Some(dtype) if dtype != space.dtype() => retyped(&space, dtype),
            _ => Ok(space),
        }
    }

    fn geometry(&self) -> Result<Space, CliError> {
        let mut input = input(
            "(as given)",
            self.dtype.unwrap_or(DType::BFloat16),
            self.chunk_tokens,
        );
        match (self.layers, self.kv_heads, self.head_dim, self.latent_dim) {
            (Some(layers), None, None, Some(latent_dim)) => input.mla = Some(Mla { layers, latent_dim }),
            (Some(layers), Some(heads), Some(head_dim), None) => {
                input.mha = Some(Mha {
                    layers,
                    heads,
                    head_dim,
                    v_head_dim: self.v_head_dim,
                });
            }
            _ => {
                return Err(CliError::usage(
                    "the geometry is not complete: give --layers, --kv-heads and --head-dim, or --layers and \
                     --latent-dim for MLA, or --model PRESET",
                ));
            }
        }
        Ok(Space::new(input)?)
    }
}

fn input(model: &str, dtype: DType, chunk_tokens: u32) -> SpaceInput {
    SpaceInput {
        model: model.into(),
        revision: ANY_REVISION.into(),
        dtype: Some(dtype),
        chunk_tokens: Some(chunk_tokens),
        ..SpaceInput::default()
    }
}

/// The same elements in another type.
fn retyped(space: &Space, dtype: DType) -> Result<Space, CliError> {
    let from = space.dtype();
    if from.fixed_row_bytes().is_some() {
        return Err(CliError::usage(format!(
            "this preset's rows are {} by definition: take the preset without it, such as deepseek-v3, for --dtype {}",
            from.name(),
            dtype.name()
        )));
    }
    let mut planes = space.planes().to_vec();
    for plane in &mut planes {
        let elements = plane.row_bytes / from.size();
        plane.row_bytes = dtype.fixed_row_bytes().unwrap_or(elements * dtype.size());
    }
    let mut input = input(space.model(), dtype, space.chunk_tokens());
    input.planes = Some(planes);
    Ok(Space::new(input)?)
}

pub fn dtype(name: &str) -> Result<DType, String> {
    serde_json::from_value(json!(name.to_ascii_lowercase())).map_err(|_| {
        "it is none of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8, fp8_ds_mla".to_owned()
    })
}

/// `8192`, `8k` = 8192, `1m`.
pub fn tokens(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, factor) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        _ => (lower.as_str(), 1),
    };
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(factor))
        .filter(|&number| number > 0)
        .ok_or_else(|| "give a number of tokens such as 32768 or 128k".to_owned())
}
