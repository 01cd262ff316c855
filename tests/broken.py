"""Checkpoints broken on purpose, each in one way that has been seen in the field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Edit = Callable[[dict[str, torch.Tensor]], None]


def copy_of(source: Path, target: Path) -> Path:
    """A writable copy of a checkpoint folder."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def edit_tensors(folder: Path, edit: Edit) -> Path:
    """Apply `edit` to the tensors of every shard and write them back."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        edit(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def double_layer_scale(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.startswith("model.layers.2.") and name.endswith("weight_scale_2"):
            tensors[name] = tensor * 2


def swap_nibbles(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.startswith("model.layers.2.") and name.endswith(".weight") and tensor.dtype == torch.uint8:
            tensors[name] = (tensor << 4) | (tensor >> 4)


def zero_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if ".layers.2.mlp.experts.5." in name and name.endswith(".weight"):
            tensors[name] = torch.zeros_like(tensor)


def nan_expert(tensors: dict[str, torch.Tensor]) -> None:
    """Every block scale of one expert is E4M3's NaN, as after a calibration that saw infinity."""
    for name, tensor in tensors.items():
        if ".layers.2.mlp.experts.5." in name and name.endswith(".weight_scale"):
            tensor.view(torch.uint8).fill_(0x7F)


def nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale"
    if name in tensors:
        tensors[name].view(torch.uint8)[0, 0] = 0x7F


def misshape_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale"
    if name in tensors:
        tensors[name] = tensors[name][:, ::2].contiguous()


def truncate_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[-1]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size // 2)


def index_names_missing_file(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = sorted(index["weight_map"])[0]
    index["weight_map"][name] = "model-00009-of-00009.safetensors"
    path.write_text(json.dumps(index))


def unknown_quant_method(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "magic4"}
    path.write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
