"""Config blocks as compressed-tensors writes them, for the tests of that dialect."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.checkpoints.dialects import choose_dialect
from workbench.checkpoints.files import Folder

M = "model.layers.0.mlp.up_proj"
PACKED = torch.zeros(4, 16, dtype=torch.uint8)
BYTES = torch.zeros(4, 1, dtype=torch.uint8)


def group(targets: list[str] | None = None, **weights: object) -> dict:
    return {"targets": targets or ["Linear"], "weights": weights, "input_activations": None}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = group(num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = group(num_bits=4, type="float", strategy="group", group_size=32)


def block(*groups: dict, format: str = "pack-quantized", **more: object) -> dict:
    named = {f"group_{i}": g for i, g in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": named, **more}


def declare(config: dict, tensors: dict | None = None):
    folder = Folder(path=Path("checkpoint"), tensors=tensors or {}, config=config, files=(), headers={})
    return choose_dialect(folder).declare(folder)
