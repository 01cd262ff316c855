"""A tiny seeded MoE checkpoint in the Kimi-K2 manner: names and shapes only, 3 layers, 4 experts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 64, 32, 4, 3


def tiny_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Layer 0 dense, layers 1 and 2 with 4 experts and a shared one; BF16, std 0.02."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=generator) * 0.02).bfloat16()

    tensors = {"model.embed_tokens.weight": matrix(128, HIDDEN), "lm_head.weight": matrix(128, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        tensors[base + "input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{base}self_attn.{projection}.weight"] = matrix(HIDDEN, HIDDEN)
        blocks = ["mlp."] if layer == 0 else [f"mlp.experts.{e}." for e in range(EXPERTS)] + ["mlp.shared_experts."]
        if layer:
            tensors[base + "mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
            tensors[base + "mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        for block in blocks:
            tensors[base + block + "gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[base + block + "up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
            tensors[base + block + "down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return tensors


def write_checkpoint(path: Path, tensors: dict[str, torch.Tensor], *, shards: int = 2, **config: object) -> Path:
    """Save tensors over `shards` files with an index, alternately, so that neighbours lie in different shards."""
    path.mkdir(parents=True)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = {n: tensors[n] for n in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    base = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
    }
    (path / "config.json").write_text(json.dumps({**base, **config}))
    (path / "tokenizer.json").write_text("{}")
    return path
