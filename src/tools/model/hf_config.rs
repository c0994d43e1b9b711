//! A model's KV by the `config.json` that Hugging Face checkpoints have: which layers keep what, and how much of it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::format::{DType, Kind, Plane, Space, SpaceError, SpaceInput};

/// A model as its configuration describes it.
#[derive(Debug)]
pub struct HfModel {
    /// Its architecture.
    pub name: String,
    /// From the full attention on; within a kind in the order of their layers.
    pub kinds: Vec<KvKind>,
}

/// The layers that keep the same kind of KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvKind {
    pub kind: Kind,
    /// Whether sparse attention chooses tokens by it.
    pub is_indexer: bool,
    pub dtype: DType,
    /// One a layer; of a state one for each part of it, as vLLM's connector has them.
    pub planes: Vec<Plane>,
}

impl HfModel {
    /// `dtype`: of the KV, where it is not the weights'. An error says what is missing or not known.
    pub fn of(config: &Value, dtype: Option<DType>) -> Result<Self, String> {
        // A model with images or sounds has a part for text.
        let text = config
            .get("text_config")
            .filter(|text| text.get("num_hidden_layers").is_some());
        let config = Config(text.unwrap_or(config));
        let dtype = dtype.map_or_else(|| config.dtype(), Ok)?;
        let mut kinds: BTreeMap<(Kind, bool), Vec<Plane>> = BTreeMap::new();
        for (layer, kept) in config.layers()?.into_iter().enumerate() {
            let layer = u32::try_from(layer).map_err(|_| "too many layers".to_owned())?;
            for kind in kept {
                let planes = match kind {
                    Kind::State => config.state(layer, dtype)?,
                    _ => vec![config.attention(layer, kind, dtype)?],
                };
                kinds.entry((kind, false)).or_default().extend(planes);
                if kind != Kind::State
                    && let Some(indexer) = config.indexer(layer)?
                {
                    kinds.entry((kind, true)).or_default().push(indexer);
                }
            }
        }
        let of_kind = |((kind, is_indexer), planes): ((Kind, bool), Vec<Plane>)| KvKind {
            kind,
            is_indexer,
            dtype: if is_indexer || kind == Kind::State {
                DType::Bytes
            } else {
                dtype
            },
            planes,
        };
        Ok(Self {
            name: config.name(),
            kinds: kinds.into_iter().map(of_kind).collect(),
        })
    }

    /// A space for each kind.
    pub fn spaces(&self, model: &str, revision: &str, chunk_tokens: u32) -> Result<Vec<Space>, SpaceError> {
        let space = |kv: &KvKind| {
            let role = ("cache_role".to_owned(), "indexer".to_owned());
            Space::new(SpaceInput {
                model: model.into(),
                revision: revision.into(),
                dtype: Some(kv.dtype),
                chunk_tokens: Some(chunk_tokens),
                kind: Some(kv.kind),
                planes: Some(kv.planes.clone()),
                extra: kv.is_indexer.then(|| BTreeMap::from([role])),
                ..SpaceInput::default()
            })
        };
        self.kinds.iter().map(space).collect()
    }
}

fn plane(name: &str, layer: u32, heads: u64, row_bytes: u64) -> Result<Plane, String> {
    Ok(Plane {
        name: name.to_owned(),
        layer,
        heads: u32::try_from(heads).map_err(|_| "too many KV heads".to_owned())?,
        row_bytes: u32::try_from(row_bytes).map_err(|_| "rows are too long".to_owned())?,
    })
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
    fn layers(&self) -> Result<Vec<Vec<Kind>>, String> {
        if let Some(pattern) = self.text("hybrid_override_pattern") {
            let kept = |kind| match kind {
                'M' => Ok(vec![Kind::State]),
                '*' => Ok(vec![Kind::Full]),
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

    fn by_type(&self, kind: &str) -> Result<Vec<Kind>, String> {
        Ok(vec![match kind {
            "full_attention" | "attention" => Kind::Full,
            "sliding_attention" => Kind::Window(self.window().ok_or("sliding_window is missing")?),
            "chunked_attention" => Kind::Chunked(self.chunk().ok_or("attention_chunk_size is missing")?),
            "linear_attention" | "mamba" | "mamba2" | "conv" => Kind::State,
            "mlp" | "moe" => return Ok(Vec::new()),
            other => return Err(format!("layer_types has {other:?}, which is not known")),
        }])
    }

    /// In tokens, the one that attends included.
    fn window(&self) -> Option<u32> {
        let window = self.maybe(&["sliding_window"])?;
        // vLLM has it so.
        let is_longer = self.text("model_type") == Some("cohere2");
        u32::try_from(window + u64::from(is_longer)).ok()
    }

    /// Tokens that attend to each other only.
    fn chunk(&self) -> Option<u32> {
        u32::try_from(self.maybe(&["attention_chunk_size"])?).ok()
    }

    /// Where nothing lists the layers' kinds.
    fn by_rule(&self, layer: u64) -> Vec<Kind> {
        let model_type = self.text("model_type").unwrap_or_default();
        let is_each = |every: u64| (layer + 1).is_multiple_of(every.max(1));
        if model_type.starts_with("falcon_h1") {
            return vec![Kind::Full, Kind::State];
        }
        if let Some(linear) = self.0.get("linear_attn_config") {
            // Counted from 1.
            let full = linear.get("full_attn_layers").and_then(Value::as_array);
            let is_full = full.is_some_and(|layers| layers.iter().any(|one| one.as_u64() == Some(layer + 1)));
            return vec![if is_full { Kind::Full } else { Kind::State }];
        }
        if let Some(full) = self.0.get("attn_layer_indices").and_then(Value::as_array) {
            let is_full = full.iter().any(|one| one.as_u64() == Some(layer));
            return vec![if is_full { Kind::Full } else { Kind::State }];
        }
        if let Some(every) = self.maybe(&["full_attention_interval"]) {
            return vec![if is_each(every) { Kind::Full } else { Kind::State }];
        }
        if let Some(chunk) = self.chunk() {
            let rope = self.0.get("no_rope_layers").and_then(|layers| {
                let at = usize::try_from(layer).ok()?;
                layers.get(at)?.as_u64()
            });
            let is_full = rope.map_or_else(
                || is_each(self.maybe(&["no_rope_layer_interval"]).unwrap_or(4)),
                |rope| rope == 0,
            );
            return vec![if is_full { Kind::Full } else { Kind::Chunked(chunk) }];
        }
        let is_off = self.0.get("use_sliding_window") == Some(&Value::Bool(false));
        let Some(window) = self.window().filter(|_| !is_off) else {
            return vec![Kind::Full];
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
        vec![if is_full { Kind::Full } else { Kind::Window(window) }]
    }

    /// The plane of a layer with attention.
    fn attention(&self, layer: u32, kind: Kind, dtype: DType) -> Result<Plane, String> {
        let size = u64::from(dtype.size());
        if let Some(latent) = self.maybe(&["kv_lora_rank"]) {
            let elements = latent + self.number(&["qk_rope_head_dim"])?;
            let row_bytes = dtype.fixed_row_bytes().map_or(elements * size, u64::from);
            return plane("kv", layer, 1, row_bytes);
        }
        let heads = self.number(&["num_key_value_heads", "num_attention_heads"])?;
        let of_full = (kind == Kind::Full)
            .then(|| self.maybe(&["global_head_dim"]))
            .flatten();
        let head_dim = match of_full.or_else(|| self.maybe(&["head_dim"])) {
            Some(head_dim) => head_dim,
            None => self.number(&["hidden_size"])? / self.number(&["num_attention_heads"])?.max(1),
        };
        let v_head_dim = self.maybe(&["v_head_dim"]).unwrap_or(head_dim);
        plane("kv", layer, heads, (head_dim + v_head_dim) * size)
    }

    /// What a layer with sparse attention chooses tokens by: bytes with an fp32 scale for each 128 of them.
    fn indexer(&self, layer: u32) -> Result<Option<Plane>, String> {
        let index = self.maybe(&["index_head_dim"]);
        let of_layer = index.map(|index| plane("kv", layer, 1, index + index.div_ceil(128) * 4));
        of_layer.transpose()
    }

    /// One layer's state: the last inputs of its convolution, by their parts, and its recurrent state.
    fn state(&self, layer: u32, dtype: DType) -> Result<Vec<Plane>, String> {
        let size = u64::from(dtype.size());
        let names = ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"];
        let recurrent = names.iter().find_map(|name| dtype_of(self.text(name)?));
        let recurrent = u64::from(recurrent.unwrap_or(dtype).size());
        let planes = |kernel: u64, parts: &[(&str, u64, u64)], of_head: (u64, u64)| {
            let conv = parts.iter().map(|&(name, heads, channels)| {
                plane(name, layer, heads, (kernel.max(1) - 1) * channels * size)
            });
            let (heads, bytes) = of_head;
            conv.chain([plane("state", layer, heads, bytes)]).collect()
        };
        if let Some(linear) = self.0.get("linear_attn_config") {
            let linear = Config(linear);
            let (heads, dim) = (linear.number(&["num_heads"])?, linear.number(&["head_dim"])?);
            let kernel = linear.number(&["short_conv_kernel_size"])?;
            let parts = ["conv.q", "conv.k", "conv.v"].map(|name| (name, heads, dim));
            // The recurrent state is fp32.
            return planes(kernel, &parts, (heads, dim * dim * 4));
        }
        if let Some(values) = self.maybe(&["linear_num_value_heads"]) {
            let (keys, key) = (
                self.number(&["linear_num_key_heads"])?,
                self.number(&["linear_key_head_dim"])?,
            );
            let value = self.number(&["linear_value_head_dim"])?;
            let kernel = self.number(&["linear_conv_kernel_dim"])?;
            let parts = [
                ("conv.q", keys, key),
                ("conv.k", keys, key),
                ("conv.v", values, value),
            ];
            return planes(kernel, &parts, (values, value * key * recurrent));
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
            let parts = [
                ("conv.x", heads, dim),
                ("conv.b", groups, state),
                ("conv.c", groups, state),
            ];
            return planes(kernel, &parts, (heads, dim * state * recurrent));
        }
        let kernel = self.number(&["conv_L_cache"])?;
        let channels = self.number(&["conv_dim", "hidden_size"])?;
        // Channels have no heads: they are dealt into up to 64.
        let heads = 1 << channels.trailing_zeros().min(6);
        let row = (kernel.max(1) - 1) * (channels / heads) * size;
        Ok(vec![plane("conv", layer, heads, row)?])
    }
}

fn dtype_of(name: &str) -> Option<DType> {
    serde_json::from_value(json!(name)).ok()
}

#[cfg(test)]
mod tests;
