//! Each family of models by a shortened `config.json`: what its layers keep.

use std::collections::BTreeSet;

use super::*;

/// Kind, layers, and bytes a token or a snapshot.
fn groups(config: &Value) -> Vec<(Kind, usize, u64)> {
    let group = |kv: &KvKind| {
        let bytes = kv.planes.iter().map(|plane| plane.bytes(1)).sum();
        let layers: BTreeSet<u32> = kv.planes.iter().map(|plane| plane.layer).collect();
        (kv.kind, layers.len(), bytes)
    };
    let model = HfModel::of(config, None).unwrap();
    model.kinds.iter().map(group).collect()
}

fn full(layers: usize, bytes: u64) -> (Kind, usize, u64) {
    (Kind::Full, layers, bytes)
}

fn window(tokens: u32, layers: usize, bytes: u64) -> (Kind, usize, u64) {
    (Kind::Window(tokens), layers, bytes)
}

fn state(layers: usize, bytes: u64) -> (Kind, usize, u64) {
    (Kind::State, layers, bytes)
}

#[test]
fn plain_models_keep_every_token() {
    let qwen3_32b = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
        "sliding_window": null, "use_sliding_window": false, "max_window_layers": 64,
    });
    assert_eq!(groups(&qwen3_32b), [full(64, 64 * 8 * 256 * 2)]);
    // Without head_dim and num_key_value_heads.
    let old =
        json!({ "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "dtype": "float32" });
    assert_eq!(groups(&old), [full(2, 2 * 8 * 128 * 4)]);
}

#[test]
fn windows_by_types_by_pattern_and_in_all_layers() {
    let gpt_oss_20b = json!({
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "sliding_window": 128, "dtype": "bfloat16",
        "layer_types": (["sliding_attention", "full_attention"].repeat(12)),
    });
    assert_eq!(
        groups(&gpt_oss_20b),
        [full(12, 12 * 2048), window(128, 12, 12 * 2048)]
    );
    let gemma_3_12b = json!({ "model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "sliding_window": 1024, "torch_dtype": "bfloat16",
    }});
    assert_eq!(
        groups(&gemma_3_12b),
        [full(8, 8 * 8192), window(1024, 40, 40 * 8192)]
    );
    let mistral = json!({
        "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "sliding_window": 4096, "torch_dtype": "bfloat16",
    });
    assert_eq!(groups(&mistral), [window(4096, 32, 32 * 4096)]);
    let scout = json!({ "model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "attention_chunk_size": 8192, "torch_dtype": "bfloat16",
    }});
    let chunked = (Kind::Chunked(8192), 36, 36 * 4096);
    assert_eq!(groups(&scout), [full(12, 12 * 4096), chunked]);
}

#[test]
fn latents_and_the_indexers_cache() {
    let mut deepseek = json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
    });
    assert_eq!(groups(&deepseek), [full(61, 61 * 1152)]);
    let packed = HfModel::of(&deepseek, Some(DType::Fp8DsMla)).unwrap();
    assert_eq!(packed.kinds[0].planes[60].row_bytes, 656);
    deepseek["index_head_dim"] = 128.into();
    assert_eq!(groups(&deepseek), [full(61, 61 * 1152), full(61, 61 * 132)]);
    assert!(HfModel::of(&deepseek, None).unwrap().kinds[1].is_indexer);
}

/// The figures are those of vLLM 0.32's specs for these very configurations.
#[test]
fn states_are_as_large_as_vllms() {
    let common = json!({
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256,
        "torch_dtype": "float32",
    });
    let with = |more: Value| {
        let (mut config, Value::Object(more)) = (common.clone(), more) else {
            panic!()
        };
        config.as_object_mut().unwrap().extend(more);
        config
    };
    let lfm2 = with(json!({
        "model_type": "lfm2", "conv_L_cache": 3, "conv_dim": 256,
        "layer_types": ["conv", "conv", "conv", "full_attention"],
    }));
    assert_eq!(groups(&lfm2), [full(1, 1024), state(3, 3 * 2048)]);
    let granite = with(json!({
        "model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_d_conv": 4,
    }));
    assert_eq!(groups(&granite), [full(1, 1024), state(3, 3 * 138_752)]);
    let nemotron = with(json!({
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-M-*-", "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32",
    }));
    let of_nemotron = (3 * 768 + 8 * 64 * 64) * 4;
    assert_eq!(groups(&nemotron), [full(1, 1024), state(2, 2 * of_nemotron)]);
    let mut qwen3_next = with(json!({
        "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    }));
    qwen3_next["torch_dtype"] = "bfloat16".into();
    assert_eq!(groups(&qwen3_next), [full(1, 512), state(3, 3 * 68_608)]);
    let falcon = with(json!({
        "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
        "mamba_n_groups": 1, "mamba_d_conv": 4,
    }));
    assert_eq!(groups(&falcon), [full(2, 2048), state(2, 2 * 138_752)]);
}

/// As the connector has them, so that objects are as long as told: `tests/engines/test_states.py`.
#[test]
fn each_part_of_a_state_is_a_plane() {
    let planes = |config: Value| {
        let model = HfModel::of(&config, None).unwrap();
        let state = model.kinds.into_iter().find(|kv| kv.kind == Kind::State);
        let planes = state.unwrap().planes.into_iter();
        planes
            .map(|plane| (plane.name, plane.heads, plane.row_bytes))
            .collect::<Vec<_>>()
    };
    let told = |planes: &[(&str, u32, u32)]| {
        let told = planes
            .iter()
            .map(|&(name, heads, row)| (name.to_owned(), heads, row));
        told.collect::<Vec<_>>()
    };
    let granite = json!({
        "model_type": "granitemoehybrid", "num_hidden_layers": 1, "layer_types": ["mamba"], "mamba_n_heads": 8,
        "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4, "torch_dtype": "bfloat16",
    });
    assert_eq!(
        planes(granite),
        told(&[
            ("conv.x", 8, 3 * 64 * 2),
            ("conv.b", 1, 3 * 32 * 2),
            ("conv.c", 1, 3 * 32 * 2),
            ("state", 8, 64 * 32 * 2)
        ])
    );
    let qwen3_next = json!({
        "model_type": "qwen3_next", "num_hidden_layers": 1, "layer_types": ["linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    });
    let of_keys = 3 * 64 * 2;
    assert_eq!(
        planes(qwen3_next),
        told(&[
            ("conv.q", 2, of_keys),
            ("conv.k", 2, of_keys),
            ("conv.v", 4, 3 * 32 * 2),
            ("state", 4, 64 * 32 * 4)
        ])
    );
    let lfm2 = json!({
        "model_type": "lfm2", "num_hidden_layers": 1, "layer_types": ["conv"], "conv_L_cache": 3, "conv_dim": 2048,
    });
    assert_eq!(planes(lfm2), told(&[("conv", 64, 2 * 32 * 2)]));
}

#[test]
fn an_unknown_kind_of_layer_is_named() {
    for (config, told) in [
        (json!({}), "num_hidden_layers is missing or too large"),
        (
            json!({ "num_hidden_layers": 1 }),
            "num_key_value_heads is missing or too large",
        ),
        (
            json!({ "num_hidden_layers": 1, "layer_types": ["dream"] }),
            "\"dream\"",
        ),
        (
            json!({ "num_hidden_layers": 1, "torch_dtype": "float4" }),
            "float4: give --dtype",
        ),
    ] {
        let error = HfModel::of(&config, None).unwrap_err();
        assert!(error.contains(told), "{error}");
    }
}
