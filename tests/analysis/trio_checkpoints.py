"""A tiny model as three checkpoints: bfloat16, ModelOpt NVFP4, Quark MXFP4; and captured activations for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from workbench.formats import quantize
from workbench.formats.activations import write_activations

N, K, EXPERTS = 32, 64, 3
MODULES = [
    *(f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")),
    *(f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(EXPERTS) for p in ("gate", "up")),
    "model.layers.1.mlp.shared_experts.gate_proj",
]
INPUT_SCALE = 0.0021


@dataclass(frozen=True)
class Trio:
    source: Path
    nvfp4: Path
    mxfp4: Path
    activations: Path
    weights: dict[str, Tensor]


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    root = tmp_path_factory.mktemp("trio")
    generator = torch.Generator().manual_seed(7)
    weights = {f"{m}.weight": (0.05 * torch.randn(N, K, generator=generator)).bfloat16() for m in MODULES}
    dense = {"model.embed_tokens.weight": torch.randn(8, K, generator=generator).bfloat16()}
    write_checkpoint(root / "source", dense | weights)
    nvfp4: dict[str, Tensor] = dict(dense)
    mxfp4: dict[str, Tensor] = dict(dense)
    for name, w in weights.items():
        q = quantize(w, "nvfp4")
        assert q.global_scale is not None
        scales = {"_scale": q.block_scales, "_scale_2": q.global_scale.reshape(())}
        nvfp4 |= {name: q.codes} | {name + suffix: t.clone() for suffix, t in scales.items()}
        nvfp4[name.removesuffix("weight") + "input_scale"] = torch.tensor(INPUT_SCALE)
        q = quantize(w, "mxfp4", "even")
        mxfp4 |= {name: q.codes, name + "_scale": q.block_scales}
    write_checkpoint(root / "nvfp4", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    spec = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "scale_format": "e8m0"}
    write_checkpoint(
        root / "mxfp4",
        mxfp4,
        {"quant_method": "quark", "global_quant_config": {"weight": spec}, "exclude": []},
    )
    activations = write_captured(root / "activations.safetensors", generator)
    return Trio(root / "source", root / "nvfp4", root / "mxfp4", activations, weights)


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], quantization: dict | None = None) -> None:
    folder.mkdir(parents=True)
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantization} if quantization else {}))
    )
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def write_captured(path: Path, generator: torch.Generator) -> Path:
    """gate_proj inputs with `up_proj` an alias; expert 1 saw 5 tokens, expert 2 none."""
    inputs, aliases = {}, {}
    for module in MODULES:
        if module.endswith("up_proj"):
            aliases[module] = module.replace("up_proj", "gate_proj")
            continue
        tokens = {"experts.1.": 5, "experts.2.": 0}
        count = next((n for part, n in tokens.items() if part in module), 40)
        inputs[module] = torch.randn(count, K, generator=generator).bfloat16()
    write_activations(
        path,
        inputs=inputs,
        amax={m: float(x.abs().max()) if len(x) else 0.0 for m, x in inputs.items()},
        tokens_seen={m: 10 * len(x) for m, x in inputs.items()},
        aliases=aliases,
    )
    return path
