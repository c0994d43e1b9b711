//! The spaces that `kvgate size` computes with: of a config.json, of a known model, or from flags.

use serde_json::json;

use super::SizeArgs;
use crate::config::units::{ByteSize, MIB};
use crate::format::{DType, Mha, Mla, Space, SpaceInput};
use crate::tools::cli::args::find_preset;
use crate::tools::cli::error::CliError;
use crate::tools::cli::input;
use crate::tools::model::{HfModel, Preset};

/// Geometry alone needs no revision, but a space has one.
const ANY_REVISION: &str = "0";

impl SizeArgs {
    pub fn spaces(&self) -> Result<Vec<Space>, CliError> {
        if let Some(path) = &self.config {
            let file = match path.is_dir() {
                true => path.join("config.json"),
                false => path.clone(),
            };
            let shown = file.display().to_string();
            let text = input::read(&shown, ByteSize(16 * MIB))?;
            let usage = |what: String| CliError::usage(format!("{shown}: {what}"));
            let config = serde_json::from_str(&text).map_err(|error| usage(format!("no JSON: {error}")))?;
            let model = HfModel::of(&config, self.dtype).map_err(usage)?;
            return Ok(model.spaces(&model.name, ANY_REVISION, self.chunk_tokens)?);
        }
        match &self.model {
            Some(model) => self.of_preset(find_preset(model)?),
            None => self.geometry().map(|space| vec![space]),
        }
    }

    pub fn of_preset(&self, preset: &Preset) -> Result<Vec<Space>, CliError> {
        let kinds = preset.kinds(self.dtype).map_err(CliError::usage)?;
        Ok(kinds.spaces(&preset.model, ANY_REVISION, self.chunk_tokens)?)
    }

    fn geometry(&self) -> Result<Space, CliError> {
        let mut input = SpaceInput {
            model: "(as given)".into(),
            revision: ANY_REVISION.into(),
            dtype: Some(self.dtype.unwrap_or(DType::BFloat16)),
            chunk_tokens: Some(self.chunk_tokens),
            ..SpaceInput::default()
        };
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
