"""A Llama with few parameters, seeded, in a folder: `make(folder)`. Prompts are token ids, so it needs no tokenizer.

python tests/engines/tiny_model.py FOLDER SEED [layers=8 hidden=512 ...]
"""

import json
import subprocess
import sys
from pathlib import Path

HEAD_DIM, VOCABULARY = 64, 32000
LAYERS, HIDDEN, HEADS, FEED_FORWARD = 4, 256, 4, 512


def make(folder, seed=1234):
    """In a process of its own: PyTorch's threads would not survive the fork of an engine's life."""
    subprocess.run([sys.executable, __file__, folder, str(seed)], check=True)
    return folder


def make_adapter(folder, seed):
    """A LoRA adapter of the model's K and V, in a folder."""
    subprocess.run([sys.executable, __file__, folder, str(seed), "adapter"], check=True)
    return folder


def write_adapter(folder, seed):
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, targets = 8, ["k_proj", "v_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "tiny"}))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for target in targets:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator) * 0.1
            weights[f"{name}.lora_B.weight"] = torch.randn(HEADS * HEAD_DIM, rank, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def write(folder, seed, layers=LAYERS, hidden=HIDDEN, heads=HEADS, feed_forward=FEED_FORWARD):
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, std=0.06):
        return torch.randn(*shape, generator=generator) * std

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(VOCABULARY, hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for projection in "qkv":
            weights[f"{name}self_attn.{projection}_proj.weight"] = random(heads * HEAD_DIM, hidden)
        weights[f"{name}self_attn.o_proj.weight"] = random(hidden, heads * HEAD_DIM)
        weights[f"{name}mlp.gate_proj.weight"] = random(feed_forward, hidden)
        weights[f"{name}mlp.up_proj.weight"] = random(feed_forward, hidden)
        weights[f"{name}mlp.down_proj.weight"] = random(hidden, feed_forward)
        weights[f"{name}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{name}post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    folder, seed, *more = sys.argv[1:]
    if more == ["adapter"]:
        write_adapter(folder, int(seed))
    else:
        sizes = (word.partition("=") for word in more)
        write(folder, int(seed), **{name: int(size) for name, _, size in sizes})
