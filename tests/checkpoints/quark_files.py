"""Quark checkpoints and configs, for the tests of that dialect."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from workbench.kernels.elements import ELEMENTS, packed_columns

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import Declaration, Written, get_dialect
from workbench.checkpoints.files import Folder
from workbench.formats import QuantizedTensor, get_format

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_quark.json").read_text())
QUARK = get_dialect("quark")
MODULE = "model.layers.0.mlp.up_proj"
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}
BLOCK = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}
MXFP8_ROWS = {**BLOCK, "block_size": [4, 32], "scale_type": "float8_e8m0fnu"}


def quark_config(weight: Any, **block: Any) -> dict[str, Any]:
    block = {"exclude": [], "export": {"pack_method": "reorder"}, **block}
    return {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": weight}, **block}}


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def declare(config: dict[str, Any], path: Path = Path()) -> Declaration:
    return QUARK.declare(Folder(path=path, tensors={}, config=config, files=(), headers={}))


def sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def make_weight(format: str, seed: int = 0, n: int = 16, k: int = 64) -> QuantizedTensor:
    """Random codes and scales, without a quantizer."""
    generator = torch.Generator().manual_seed(seed)
    spec = get_format(format)
    block = {"mxfp8_e4m3": (1, 32), "fp8_block": (8, 32), "int4_group": (1, 32)}.get(format)
    shape = spec.scale_shape((n, k), block)
    if spec.scale == "e8m0":
        scales = torch.randint(100, 140, shape, generator=generator).to(torch.uint8)
    else:
        scales = torch.rand(shape, generator=generator) + 0.5
        scales = scales.to(torch.float8_e4m3fn) if spec.scale == "e4m3" else scales
    codes = torch.randint(0, 0x7E, (n, packed_columns(spec.element, k)), generator=generator).to(torch.uint8)
    return QuantizedTensor(
        format=format,
        codes=codes.view(ELEMENTS[spec.element].dtype),
        block_scales=scales,
        global_scale=torch.tensor(0.25) if spec.has_global else None,
        shape=(n, k),
        block=block,
        input_scale=torch.tensor(0.125) if format in ("nvfp4", "fp8_tensor") else None,
    )


def write_with_dialect(path: Path, tensors: dict[str, QuantizedTensor], **written: Any) -> Path:
    """Canonical tensors as a Quark checkpoint, with the config that goes with them."""
    blocks = {q.format: q.block for q in tensors.values() if q.block is not None}
    formats = {name: q.format for name, q in tensors.items()}
    stored: dict[str, torch.Tensor] = {}
    for module, q in tensors.items():
        stored.update(QUARK.disassemble(f"{module}.weight", q))
    files = QUARK.config_files({"model_type": "llama"}, Written(formats=formats, blocks=blocks, **written))
    return write(path, stored, files["config.json"])


def read_all(path: Path) -> dict[str, QuantizedTensor]:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.problems == ()
        for entry in checkpoint.entries():
            assert checkpoint.declaration.format_of(entry.module) == entry.format
        return {e.module: checkpoint.read(e.name) for e in checkpoint.entries()}


def assert_equal(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.format, a.shape, a.block) == (b.format, b.shape, b.block)
    for field in ("codes", "block_scales", "global_scale", "zero_points", "input_scale"):
        one, other = getattr(a, field), getattr(b, field)
        assert (one is None) == (other is None), field
        if one is not None:
            assert one.dtype == other.dtype, field
            assert torch.equal(one.float(), other.float()), field
