//! A model's KV by the `config.json` that Hugging Face checkpoints have: which layers keep what, and how much of it.

use std::fmt;
use std::path::Path;

use serde_json::{Value, json};

use super::geometry::ANY_REVISION;
use crate::config::units::{ByteSize, MIB};
use crate::format::{DType, Plane, Space, SpaceInput};
use crate::tools::cli::error::CliError;
use crate::tools::cli::input;

/// The kinds of KV that a layer keeps of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kept {
    /// Every token.
    Full,
    /// The latest tokens.
    Window(u64),
    /// The tokens of the chunk that attention is in.
    Chunked(u64),
    /// One state, for a prompt of any length.
    State,
}

/// Layers that keep the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub kept: Kept,
    pub layers: u32,
    /// Bytes a token of all its layers; for states, bytes of one snapshot.
    pub bytes: u64,
}

/// A model as its configuration describes it.
#[derive(Debug)]
pub struct HfModel {
    name: String,
    dtype: DType,
    planes: Vec<(Kept, Plane)>,
    /// Bytes of each layer's state.
    states: Vec<u64>,
}

impl Kept {
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window(_) => "window",
            Self::Chunked(_) => "chunked",
            Self::State => "state",
        }
    }

    /// The tokens of a prompt of this length that the next token needs.
    pub fn needed(self, tokens: u64) -> u64 {
        match self {
            Self::Full => tokens,
            // The next token is one of the window.
            Self::Window(window) => tokens.min(window.saturating_sub(1)),
            Self::Chunked(chunk) => tokens % chunk.max(1),
            Self::State => 1,
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full attention"),
            Self::Window(window) => write!(f, "window of {window} tokens"),
            Self::Chunked(chunk) => write!(f, "chunks of {chunk} tokens"),
            Self::State => f.write_str("state"),
        }
    }
}

impl HfModel {
    /// From the file, or the folder that it is in. `dtype`: of the KV, where it is not the weights'.
    pub fn read(path: &Path, dtype: Option<DType>) -> Result<Self, CliError> {
        let file = match path.is_dir() {
            true => path.join("config.json"),
            false => path.to_owned(),
        };
        let shown = file.display().to_string();
        let text = input::read(&shown, ByteSize(16 * MIB))?;
        let usage = |what: String| CliError::usage(format!("{shown}: {what}"));
        let config: Value =
            serde_json::from_str(&text).map_err(|error| usage(format!("no JSON: {error}")))?;
        Self::of(&config, dtype).map_err(usage)
    }

    fn of(config: &Value, dtype: Option<DType>) -> Result<Self, String> {
        // A model with images or sounds has a part for text.
        let text = config
            .get("text_config")
            .filter(|text| text.get("num_hidden_layers").is_some());
        let config = Config(text.unwrap_or(config));
        let dtype = dtype.map_or_else(|| config.dtype(), Ok)?;
        let (mut planes, mut states) = (Vec::new(), Vec::new());
        for (layer, kept) in config.layers()?.into_iter().enumerate() {
            let layer = u32::try_from(layer).map_err(|_| "too many layers".to_owned())?;
            for kept in kept {
                match kept {
                    Kept::State => states.push(config.state_bytes(dtype)?),
                    _ => planes.extend(
                        config
                            .planes(layer, kept, dtype)?
                            .into_iter()
                            .map(|plane| (kept, plane)),
                    ),
                }
            }
        }
        Ok(Self {
            name: config.name(),
            dtype,
            planes,
            states,
        })
    }

    pub fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let mut add = |kept, layers, bytes| match groups.iter_mut().find(|group| group.kept == kept) {
            Some(group) => {
                group.layers += layers;
                group.bytes = group.bytes.saturating_add(bytes);
            }
            None => groups.push(Group { kept, layers, bytes }),
        };
        let mut last = None;
        for (kept, plane) in &self.planes {
            // A layer may have several planes.
            let is_new = last.replace((plane.layer, *kept)) != Some((plane.layer, *kept));
            add(*kept, u32::from(is_new), plane.bytes(1));
        }
        self.states.iter().for_each(|bytes| add(Kept::State, 1, *bytes));
        groups.sort_by_key(|group| group.kept);
        groups
    }

    /// The space of what is kept by token. None: the model keeps states alone.
    pub fn space(&self, chunk_tokens: u32) -> Result<Option<Space>, CliError> {
        if self.planes.is_empty() {
            return Ok(None);
        }
        let space = Space::new(SpaceInput {
            model: self.name.clone(),
            revision: ANY_REVISION.into(),
            dtype: Some(self.dtype),
            chunk_tokens: Some(chunk_tokens),
            planes: Some(self.planes.iter().map(|(_, plane)| plane.clone()).collect()),
            ..SpaceInput::default()
        })?;
        Ok(Some(space))
    }

    pub fn json(&self, contexts: &[u64]) -> Value {
        let group = |group: &Group| {
            let needed = |tokens: &u64| json!({ "tokens": tokens, "needed_bytes": group.kept.needed(*tokens).saturating_mul(group.bytes) });
            let (by_token, snapshot) = match group.kept {
                Kept::State => (Value::Null, json!(group.bytes)),
                _ => (json!(group.bytes), Value::Null),
            };
            let tokens = match group.kept {
                Kept::Window(tokens) | Kept::Chunked(tokens) => json!(tokens),
                Kept::Full | Kept::State => Value::Null,
            };
            json!({
                "kind": group.kept.word(),
                "tokens": tokens,
                "layers": group.layers,
                "token_bytes": by_token,
                "snapshot_bytes": snapshot,
                "contexts": contexts.iter().map(needed).collect::<Vec<_>>(),
            })
        };
        json!(self.groups().iter().map(group).collect::<Vec<_>>())
    }
}

/// The most layers, heads, elements and the like. Their products are numbers of bytes.
const MOST: u64 = 1 << 18;

/// The keys of a configuration, under the names that the families give them.
struct Config<'a>(&'a Value);

impl Config<'_> {
    /// None: it is missing, or more than any model has.
    fn maybe(&self, names: &[&str]) -> Option<u64> {
        let number = names.iter().find_map(|name| self.0.get(*name)?.as_u64());
        number.filter(|&number| number <= MOST)
    }

    fn number(&self, names: &[&str]) -> Result<u64, String> {
        self.maybe(names).ok_or_else(|| {
            format!(
                "{} is missing or too large, so the size of its KV is not known",
                names[0]
            )
        })
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.as_str()
    }

    fn name(&self) -> String {
        let architecture = self
            .0
            .get("architectures")
            .and_then(|names| names.get(0)?.as_str());
        let name = architecture.or_else(|| self.text("model_type"));
        name.unwrap_or("(no architecture)").to_owned()
    }

    fn dtype(&self) -> Result<DType, String> {
        let name = self
            .text("dtype")
            .or_else(|| self.text("torch_dtype"))
            .unwrap_or("bfloat16");
        dtype_of(name).ok_or_else(|| format!("its dtype is {name}: give --dtype"))
    }

    /// The KV that each layer keeps; some layers keep two kinds, and some none.
    fn layers(&self) -> Result<Vec<Vec<Kept>>, String> {
        if let Some(pattern) = self.text("hybrid_override_pattern") {
            let kept = |kind| match kind {
                'M' => Ok(vec![Kept::State]),
                '*' => Ok(vec![Kept::Full]),
                '-' | 'E' => Ok(Vec::new()),
                other => Err(format!(
                    "hybrid_override_pattern has a layer of kind {other:?}, which is not known"
                )),
            };
            return pattern.chars().map(kept).collect();
        }
        let types = self
            .0
            .get("layer_types")
            .or_else(|| self.0.get("layers_block_type"));
        if let Some(types) = types.and_then(Value::as_array) {
            return types
                .iter()
                .map(|kind| self.by_type(kind.as_str().unwrap_or_default()))
                .collect();
        }
        let layers = self.number(&["num_hidden_layers"])?;
        Ok((0..layers).map(|layer| self.by_rule(layer)).collect())
    }

    fn by_type(&self, kind: &str) -> Result<Vec<Kept>, String> {
        Ok(vec![match kind {
            "full_attention" | "attention" => Kept::Full,
            "sliding_attention" => Kept::Window(self.window().ok_or("sliding_window is missing")?),
            "chunked_attention" => Kept::Chunked(self.number(&["attention_chunk_size"])?),
            "linear_attention" | "mamba" | "mamba2" | "conv" => Kept::State,
            "mlp" | "moe" => return Ok(Vec::new()),
            other => return Err(format!("layer_types has {other:?}, which is not known")),
        }])
    }

    /// In tokens, the one that attends included.
    fn window(&self) -> Option<u64> {
        let window = self.maybe(&["sliding_window"])?;
        // vLLM has it so.
        let is_longer = self.text("model_type") == Some("cohere2");
        Some(window + u64::from(is_longer))
    }

    /// Where nothing lists the layers' kinds.
    fn by_rule(&self, layer: u64) -> Vec<Kept> {
        let model_type = self.text("model_type").unwrap_or_default();
        let is_each = |every: u64| (layer + 1).is_multiple_of(every.max(1));
        if model_type.starts_with("falcon_h1") {
            return vec![Kept::Full, Kept::State];
        }
        if let Some(linear) = self.0.get("linear_attn_config") {
            // Counted from 1.
            let full = linear.get("full_attn_layers").and_then(Value::as_array);
            let is_full = full.is_some_and(|layers| layers.iter().any(|one| one.as_u64() == Some(layer + 1)));
            return vec![if is_full { Kept::Full } else { Kept::State }];
        }
        if let Some(full) = self.0.get("attn_layer_indices").and_then(Value::as_array) {
            let is_full = full.iter().any(|one| one.as_u64() == Some(layer));
            return vec![if is_full { Kept::Full } else { Kept::State }];
        }
        if let Some(every) = self.maybe(&["full_attention_interval"]) {
            return vec![if is_each(every) { Kept::Full } else { Kept::State }];
        }
        if let Some(chunk) = self.maybe(&["attention_chunk_size"]) {
            let rope = self.0.get("no_rope_layers").and_then(|layers| {
                let at = usize::try_from(layer).ok()?;
                layers.get(at)?.as_u64()
            });
            let is_full = rope.map_or_else(
                || is_each(self.maybe(&["no_rope_layer_interval"]).unwrap_or(4)),
                |rope| rope == 0,
            );
            return vec![if is_full { Kept::Full } else { Kept::Chunked(chunk) }];
        }
        let is_off = self.0.get("use_sliding_window") == Some(&Value::Bool(false));
        let Some(window) = self.window().filter(|_| !is_off) else {
            return vec![Kept::Full];
        };
        let usual = match model_type {
            "gemma2" => Some(2),
            "cohere2" => Some(4),
            "gemma3_text" | "gemma3" => Some(6),
            _ => None,
        };
        let is_full = match (
            self.maybe(&["sliding_window_pattern"]).or(usual),
            self.maybe(&["max_window_layers"]),
        ) {
            (Some(every), _) => is_each(every),
            (None, Some(from)) => layer < from,
            (None, None) => false,
        };
        vec![if is_full { Kept::Full } else { Kept::Window(window) }]
    }

    /// The planes of a layer with attention.
    fn planes(&self, layer: u32, kept: Kept, dtype: DType) -> Result<Vec<Plane>, String> {
        let plane = |name: &str, heads: u64, row_bytes: u64| {
            Ok::<_, String>(Plane {
                name: name.to_owned(),
                layer,
                heads: u32::try_from(heads).map_err(|_| "too many KV heads".to_owned())?,
                row_bytes: u32::try_from(row_bytes).map_err(|_| "rows are too long".to_owned())?,
            })
        };
        let size = u64::from(dtype.size());
        if let Some(latent) = self.maybe(&["kv_lora_rank"]) {
            let elements = latent + self.number(&["qk_rope_head_dim"])?;
            let row_bytes = dtype.fixed_row_bytes().map_or(elements * size, u64::from);
            let mut planes = vec![plane("kv", 1, row_bytes)?];
            if let Some(index) = self.maybe(&["index_head_dim"]) {
                // Bytes with an fp32 scale for each 128 of them.
                planes.push(plane("indexer", 1, index + index.div_ceil(128) * 4)?);
            }
            return Ok(planes);
        }
        let heads = self.number(&["num_key_value_heads", "num_attention_heads"])?;
        let of_full = (kept == Kept::Full)
            .then(|| self.maybe(&["global_head_dim"]))
            .flatten();
        let head_dim = match of_full.or_else(|| self.maybe(&["head_dim"])) {
            Some(head_dim) => head_dim,
            None => self.number(&["hidden_size"])? / self.number(&["num_attention_heads"])?.max(1),
        };
        let v_head_dim = self.maybe(&["v_head_dim"]).unwrap_or(head_dim);
        Ok(vec![plane("kv", heads, (head_dim + v_head_dim) * size)?])
    }

    /// Bytes of one layer's state: the last inputs of its convolution, and its recurrent state.
    fn state_bytes(&self, dtype: DType) -> Result<u64, String> {
        let size = u64::from(dtype.size());
        let names = ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"];
        let recurrent = names.iter().find_map(|name| dtype_of(self.text(name)?));
        let recurrent = u64::from(recurrent.unwrap_or(dtype).size());
        if let Some(linear) = self.0.get("linear_attn_config") {
            let linear = Config(linear);
            let (heads, dim) = (linear.number(&["num_heads"])?, linear.number(&["head_dim"])?);
            let kernel = linear.number(&["short_conv_kernel_size"])?;
            // Queries, keys and values; the recurrent state is fp32.
            return Ok(3 * (kernel.max(1) - 1) * heads * dim * size + heads * dim * dim * 4);
        }
        if let Some(values) = self.maybe(&["linear_num_value_heads"]) {
            let (keys, key) = (
                self.number(&["linear_num_key_heads"])?,
                self.number(&["linear_key_head_dim"])?,
            );
            let value = self.number(&["linear_value_head_dim"])?;
            let kernel = self.number(&["linear_conv_kernel_dim"])?;
            let conv = (kernel.max(1) - 1) * (2 * keys * key + values * value);
            return Ok(conv * size + values * value * key * recurrent);
        }
        if let Some(heads) = self.maybe(&["mamba_n_heads", "mamba_num_heads"]) {
            let dim = match self.maybe(&["mamba_d_head", "mamba_head_dim"]) {
                Some(dim) => dim,
                None => {
                    self.number(&["hidden_size"])? * self.number(&["mamba_expand", "expand"])? / heads.max(1)
                }
            };
            let state = self.number(&["mamba_d_state", "ssm_state_size"])?;
            let groups = self.number(&["mamba_n_groups", "n_groups"])?;
            let kernel = self.number(&["mamba_d_conv", "conv_kernel"])?;
            let conv = (kernel.max(1) - 1) * (heads * dim + 2 * groups * state);
            return Ok(conv * size + heads * dim * state * recurrent);
        }
        let kernel = self.number(&["conv_L_cache"])?;
        Ok((kernel.max(1) - 1) * self.number(&["conv_dim", "hidden_size"])? * size)
    }
}

fn dtype_of(name: &str) -> Option<DType> {
    serde_json::from_value(json!(name)).ok()
}

#[cfg(test)]
mod tests;
