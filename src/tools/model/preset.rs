//! KV geometries of known models.

use super::dtype::DType;
use super::space::{Space, SpaceError};
use super::space_input::{Mha, Mla, SpaceInput};

/// The KV geometry of a known model.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    pub name: &'static str,
    pub model: &'static str,
    pub attention: Attention,
    pub dtype: DType,
}

#[derive(Debug, Clone, Copy)]
pub enum Attention {
    Mha(Mha),
    Mla(Mla),
}

const fn gqa(name: &'static str, model: &'static str, layers: u32) -> Preset {
    let attention = Attention::Mha(Mha {
        layers,
        heads: 8,
        head_dim: 128,
        v_head_dim: None,
    });
    Preset {
        name,
        model,
        attention,
        dtype: DType::BFloat16,
    }
}

const DEEPSEEK: Attention = Attention::Mla(Mla {
    layers: 61,
    latent_dim: 512 + 64,
});

/// From the models' own config.json: num_hidden_layers, num_key_value_heads, head_dim; kv_lora_rank + qk_rope_head_dim.
pub const PRESETS: [Preset; 5] = [
    gqa("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32),
    gqa("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80),
    gqa("qwen3-32b", "Qwen/Qwen3-32B", 64),
    Preset {
        name: "deepseek-v3",
        model: "deepseek-ai/DeepSeek-V3",
        attention: DEEPSEEK,
        dtype: DType::BFloat16,
    },
    Preset {
        name: "deepseek-v3-fp8",
        model: "deepseek-ai/DeepSeek-V3",
        attention: DEEPSEEK,
        dtype: DType::Fp8DsMla,
    },
];

impl Preset {
    pub fn find(name: &str) -> Option<&'static Self> {
        PRESETS
            .iter()
            .find(|preset| preset.name.eq_ignore_ascii_case(name))
    }

    /// The preset's space for weights of this revision.
    pub fn space(&self, revision: &str, chunk_tokens: u32) -> Result<Space, SpaceError> {
        let (mha, mla) = match self.attention {
            Attention::Mha(mha) => (Some(mha), None),
            Attention::Mla(mla) => (None, Some(mla)),
        };
        Space::new(SpaceInput {
            model: self.model.into(),
            revision: revision.into(),
            dtype: Some(self.dtype),
            chunk_tokens: Some(chunk_tokens),
            mha,
            mla,
            ..SpaceInput::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_the_sizes_that_are_published() {
        let mib = |name: &str| {
            let space = Preset::find(name).unwrap().space("0123abcd", 256).unwrap();
            space.layout().payload_len() as f64 / f64::from(1 << 20)
        };
        assert_eq!(mib("llama-3-8b"), 32.0);
        assert_eq!(mib("llama-3-70b"), 80.0);
        assert_eq!(mib("qwen3-32b"), 64.0);
        assert_eq!(mib("deepseek-v3") * 1024.0, 61.0 * 256.0 * 1152.0 / 1024.0);
        assert_eq!(mib("deepseek-v3-fp8") * 1024.0, 61.0 * 256.0 * 656.0 / 1024.0);
        assert!(Preset::find("gpt-9").is_none());
    }
}
