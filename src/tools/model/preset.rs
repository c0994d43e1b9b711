//! Well-known models by name.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::hf_config::HfModel;
use crate::format::{DType, Space, SpaceError};

/// A well-known model.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preset {
    pub name: String,
    /// As the hub has it.
    pub model: String,
    /// Of the KV, where it is not the weights'.
    dtype: Option<DType>,
    /// The part of its config.json that says what its layers keep.
    config: Value,
}

/// In the order in which `kvgate size` lists them: the first is the demo's.
pub static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("presets.json")).expect("a test reads each of presets.json")
});

impl Preset {
    /// `dtype`: of the KV, in place of the preset's.
    pub fn kinds(&self, dtype: Option<DType>) -> Result<HfModel, String> {
        HfModel::of(&self.config, dtype.or(self.dtype))
    }

    /// A space for each kind of KV, for weights of this revision.
    pub fn spaces(&self, revision: &str, chunk_tokens: u32) -> Result<Vec<Space>, SpaceError> {
        let model = self.kinds(None).expect("a test reads each of presets.json");
        model.spaces(&self.model, revision, chunk_tokens)
    }

    pub fn find(name: &str) -> Option<&'static Self> {
        PRESETS
            .iter()
            .find(|preset| preset.name.eq_ignore_ascii_case(name))
    }

    /// The names of all, for a message.
    pub fn names() -> Vec<&'static str> {
        PRESETS.iter().map(|preset| preset.name.as_str()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_the_sizes_that_are_published() {
        let kib = |name: &str| {
            let spaces = Preset::find(name).unwrap().spaces("0123abcd", 256).unwrap();
            let kib = spaces
                .iter()
                .map(|space| (space.kind().to_string(), space.layout().payload_len() / 1024));
            kib.collect::<Vec<_>>()
        };
        let full = |kib: usize| ("full".to_owned(), kib);
        assert_eq!(kib("llama-3-8b"), [full(32 << 10)]);
        assert_eq!(kib("llama-3-70b"), [full(80 << 10)]);
        assert_eq!(kib("qwen3-32b"), [full(64 << 10)]);
        assert_eq!(kib("deepseek-v3"), [full(61 * 288)]);
        assert_eq!(kib("deepseek-v3-fp8"), [full(61 * 164)]);
        assert_eq!(kib("deepseek-v3.2"), [full(61 * 288), full(61 * 33)]);
        // 48 KiB a token at full length, half of it in windows.
        assert_eq!(kib("gpt-oss-20b"), [full(6144), ("window 128".into(), 6144)]);
        assert_eq!(kib("command-r7b")[1].0, "window 4097");
        assert_eq!(kib("llama-4-scout")[1], ("chunked 8192".into(), 36 << 10));
        // Ten layers, two rows of 2,048 elements each.
        assert_eq!(kib("lfm2-1.2b"), [full(6 * 512), ("state".into(), 80)]);
    }

    #[test]
    fn a_chunk_takes_as_many_gets_as_it_has_parts() {
        let gets = |space: &Space, part_bytes: usize| {
            let sections = space.layout().sections(part_bytes);
            let bytes = sections.iter().map(|section| section.bytes.len());
            let (least, most) = (bytes.clone().min().unwrap(), bytes.max().unwrap());
            // Planes are about 1 MiB.
            assert!(
                most - least <= 2 << 20,
                "{}: {least} to {most} bytes",
                space.model()
            );
            sections.len()
        };
        // In a load, and in a large one.
        let of_space = |space: &Space| (gets(space, 16 << 20), gets(space, 32 << 20));
        let of = |name| of_space(&Preset::find(name).unwrap().spaces("0123abcd", 256).unwrap()[0]);
        assert_eq!(of("llama-3-8b"), (2, 1));
        assert_eq!(of("llama-3-70b"), (5, 2));
        assert_eq!(of("qwen3-32b"), (4, 2));
        let config = serde_json::json!({
            "num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"
        });
        let small = HfModel::of(&config, None).unwrap();
        let small = small.spaces("Qwen/Qwen3-0.6B", "0123abcd", 256).unwrap();
        assert_eq!(of_space(&small[0]), (2, 1));
        assert_eq!(of("deepseek-v3"), (1, 1));
        assert_eq!(of("deepseek-v3-fp8"), (1, 1));
    }

    #[test]
    fn all_kinds_of_every_preset_are_spaces_of_one_model() {
        for preset in PRESETS.iter() {
            let spaces = preset.spaces("0123abcd", 256).unwrap();
            assert!(
                spaces
                    .windows(2)
                    .all(|pair| pair[0].model_id() == pair[1].model_id() && pair[0] != pair[1]),
                "{}",
                preset.name
            );
            assert!(!spaces.is_empty(), "{}", preset.name);
        }
        assert!(Preset::find("gpt-9").is_none());
        assert!(Preset::find("GPT-OSS-20B").is_some());
    }
}
