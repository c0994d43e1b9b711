"""Tiny models of the families that people serve, seeded, in folders: `make(folder, family)`.

Each is Transformers' own model with its matrices drawn anew, wider than its own, so that tokens depend on all of the context.

python tests/engines/families.py FOLDER FAMILY
"""

import json
import subprocess
import sys
from pathlib import Path

SEED = 1234
COMMON = {
    "vocab_size": 32000,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16384}
FAMILIES = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        # vLLM wants all of them.
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "tie_word_embeddings": True,
    },
    "mellum": {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] * 4,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256,
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "head_dim": None,
        "block_dim": 256,
        "block_ff_dim": 512,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "conv_dim": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "layer_types": ["conv"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "granite_hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "head_dim": None,
        "intermediate_size": 256,
        "shared_intermediate_size": 512,
        "layer_types": ["mamba"] * 3 + ["attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        **MAMBA2,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.125,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "rms_norm_eps": 1e-5,
        "normalization_function": "rmsnorm",
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M-M-*-",
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp"],
        "ssm_state_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 64,
        "mlp_hidden_act": "relu2",
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "mamba_ssm_cache_dtype": "float32",
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 512,
        **MAMBA2,
        "mamba_rms_norm": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    # Its layers add little to a token's embedding, so that a draft of one layer guesses right at times.
    "llama_shallow": {
        "layers_add": 0.1,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    # The CPU's kernel is compiled for a latent of 512 + 64 only.
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": None,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            **YARN,
            "rope_theta": 10000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


# On a CPU vLLM runs stages only where each of them has attention.
FAMILIES["lfm2_stages"] = {**FAMILIES["lfm2"], "layer_types": ["conv", "full_attention"] * 2}
FAMILIES["nemotron_h_stages"] = {
    **FAMILIES["nemotron_h"],
    "hybrid_override_pattern": "M-*M-*",
    "layers_block_type": ["mamba", "mlp", "attention"] * 2,
}
FAMILIES["deepseek_mtp"] = {
    **FAMILIES["deepseek_v3"],
    "layers_add": 0.1,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
}


def make_draft(folder, target):
    """EAGLE's draft of a Llama, out of its first layer, so that its drafts are accepted at times: random ones never are."""
    subprocess.run([sys.executable, __file__, folder, "--draft", target], check=True)
    return folder


def make(folder, family):
    """In a process of its own: PyTorch's threads would not survive the fork of an engine's life."""
    subprocess.run([sys.executable, __file__, folder, family], check=True)
    return folder


def write(folder, family):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in {**COMMON, **FAMILIES[family]}.items() if value is not None}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1)
    (folder / "config.json").write_text(text)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    # By Transformers, so that names and stacked experts are a checkpoint's.
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "config.json").write_text(text)
    generator = torch.Generator().manual_seed(SEED)
    weights = load_file(folder / "model.safetensors")
    drawn = {name: draw(name, tensor, generator, config) for name, tensor in sorted(weights.items())}
    if config.get("num_nextn_predict_layers"):
        drawn |= mtp_layer(drawn, config)
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})


def mtp_layer(weights, config):
    """DeepSeek's: out of the model's last layer, so that its drafts are accepted at times."""
    import torch

    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    before, layer = f"model.layers.{last}.", f"model.layers.{last + 1}."
    mtp = {name.replace(before, layer): tensor.clone() for name, tensor in weights.items() if name.startswith(before)}
    mtp |= {f"{layer}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    mtp[f"{layer}eh_proj.weight"] = joined(hidden)
    mtp[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    mtp[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return mtp


def joined(hidden):
    """The token's embedding as it is, and little of what the model made of the tokens before."""
    import torch

    return torch.cat([torch.eye(hidden), 0.02 * torch.eye(hidden)], dim=1)


# LFM2's attention is weak otherwise, against its convolutions.
STRONGER = {"self_attn.q_layernorm": 4.0, "self_attn.out_proj": 4.0, "conv.out_proj": 0.3, "feed_forward.w2": 0.3}


def write_draft(folder, target):
    from safetensors.torch import load_file, save_file

    config = json.loads((Path(target) / "config.json").read_text())
    weights, hidden = load_file(Path(target) / "model.safetensors"), config["hidden_size"]
    first = "model.layers.0."
    layer = {
        name.replace(first, "layers.0."): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file({"fc.weight": joined(hidden), **layer}, Path(folder) / "model.safetensors", {"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def draw(name, tensor, generator, config):
    import torch

    stronger = next((scale for part, scale in STRONGER.items() if part in name), 1.0)
    if "o_proj" in name or "down_proj" in name:
        stronger *= config.get("layers_add", 1.0)
    if tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.clone() * stronger if stronger != 1.0 else tensor.clone()
    scale = stronger * 1.5 / tensor.shape[-1] ** 0.5
    if "embed" in name:
        # Wide ones that are tied only repeat the last token; Gemma widens them by itself.
        exponent = 1.0 if "gemma" in config["model_type"] else 0.5
        scale = 0.3 / config["hidden_size"] ** exponent if config["tie_word_embeddings"] else 1.0
    return torch.randn(tensor.shape, generator=generator) * scale


if __name__ == "__main__":
    if sys.argv[2] == "--draft":
        write_draft(sys.argv[1], sys.argv[3])
    else:
        write(*sys.argv[1:])
