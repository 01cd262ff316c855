"""`workbench analyze --sample` on a checkpoint with the names and shapes of Kimi-K2's 69,303 feed-forward matrices, and
the size of a whole pass's result; docs/analysis.md has the figures.

    python tests/analysis/analysis_model.py --folder /scratch --sample 500

The files are as large as the model (2 TB of bfloat16, 0.6 TB of NVFP4) and mostly holes: only the matrices that the
sample will choose are written. The table of all matrices is then really built: a row each, the sample's rows repeated,
every figure changed by a random 0.1 % so that nothing is smaller than it would be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from workbench.analysis.choice import choose_matrices
from workbench.analysis.fused import fused_view
from workbench.analysis.inputs import OpenCheckpoints
from workbench.analysis.pooling import pool_rows
from workbench.analysis.summary import summarize
from workbench.analysis.tensors import ArmPair, read_frame, write_frame
from workbench.formats import quantize
from workbench.records import write_json

try:
    from .analysis_memory import peak
except ImportError:  # run as a script
    from analysis_memory import peak

HIDDEN, EXPERT, DENSE, EXPERTS = 7168, 2048, 18432, 384
SIZES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}


def modules(layer: int) -> dict[str, tuple[int, int]]:
    """Modules of a layer and their shapes [N, K]; layer 0 is dense."""
    prefix = f"model.layers.{layer}.mlp"
    parts = {prefix: DENSE} if layer == 0 else {f"{prefix}.experts.{e}": EXPERT for e in range(EXPERTS)}
    if layer:
        parts[f"{prefix}.shared_experts"] = EXPERT
    shapes = {}
    for module, width in parts.items():
        shapes |= {f"{module}.gate_proj": (width, HIDDEN), f"{module}.up_proj": (width, HIDDEN)}
        shapes[f"{module}.down_proj"] = (HIDDEN, width)
    return shapes


def stored(module: str, n: int, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a module, name -> (dtype, shape), in the source and in the first."""
    first = {
        f"{module}.weight": ("U8", [n, k // 2]),
        f"{module}.weight_scale": ("F8_E4M3", [n, k // 16]),
        f"{module}.weight_scale_2": ("F32", []),
    }
    return {f"{module}.weight": ("BF16", [n, k])}, first


def lay_out(path: Path, tensors: dict[str, Any]) -> dict[str, int]:
    """A safetensors file of holes; returns where each tensor's bytes begin."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return {name: 8 + len(text) + of["data_offsets"][0] for name, of in header.items()}


def generate(folder: Path, layers: int, sample: int) -> tuple[Path, Path, int, int]:
    """Source and first, with values in the matrices that a sample of this size chooses; how many there are to choose
    from, and how many were chosen."""
    source, first = folder / "source", folder / "nvfp4"
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16"}
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
    for path, extra in ((source, {}), (first, {"quantization_config": quantization})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | extra))
    places: dict[tuple[Path, str], tuple[Path, int]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        both: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for module, shape in modules(layer).items():
            shapes[f"{module}.weight"] = shape
            for side, found in zip(both, stored(module, *shape), strict=True):
                side.update(found)
        for path, tensors in zip((source, first), both, strict=True):
            shard = path / f"model-{layer:05d}.safetensors"
            places |= {(path, name): (shard, at) for name, at in lay_out(shard, tensors).items()}
    pair = ArmPair(first=first, first_arm="first", second_arm="second")
    with ExitStack() as stack:
        opened = OpenCheckpoints(stack)
        chosen = choose_matrices([pair], opened.open(source), opened, has_source=True, sample=sample)
    values: dict[tuple[int, int], tuple[bytes, ...]] = {}
    for name in chosen.names:
        shape = shapes[name]
        if shape not in values:
            w = (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).bfloat16()
            q = quantize(w, "nvfp4")
            assert q.global_scale is not None
            parts = (w, q.codes, q.block_scales, q.global_scale.reshape(1))
            values[shape] = tuple(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
        targets = ((source, name), (first, name), (first, f"{name}_scale"), (first, f"{name}_scale_2"))
        for target, data in zip(targets, values[shape], strict=True):
            shard, at = places[target]
            with shard.open("r+b") as file:
                file.seek(at)
                file.write(data)
    return source, first, chosen.of, len(chosen.names)


def whole_table(sampled: Path, source: Path, out: Path) -> int:
    """Write the result of a pass over all matrices into `out`, from the sample's rows; returns how many rows."""
    frame = read_frame(sampled / "tensors.parquet")
    with ExitStack() as stack:
        entries = OpenCheckpoints(stack).open(source).entries()
    rng = np.random.default_rng(0)
    table = pd.concat([frame] * (len(entries) // len(frame) + 1), ignore_index=True)[: len(entries)].copy()
    for column in table.columns[table.dtypes == np.float64]:
        table[column] *= 1 + 1e-3 * rng.standard_normal(len(table))
    table["sample_weight"] = 1.0
    for column in ("name", "layer", "expert", "projection", "shared_expert"):
        table[column] = [getattr(entry, column) for entry in entries]
    table.attrs = frame.attrs
    write_frame(out / "tensors.parquet", table)
    write_frame(out / "pooled.parquet", pool_rows(table))
    write_frame(out / "fused.parquet", fused_view(table))
    write_json(out / "analysis.json", summarize(table))
    return len(table)


def sizes(folder: Path) -> str:
    found = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in found.items()) + (
        f"; {sum(found.values()) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--layers", type=int, default=61)
    arguments = parser.parse_args()
    folder = arguments.folder / "generated-model"
    try:
        begin = time.monotonic()
        source, first, matrices, chosen = generate(folder, arguments.layers, arguments.sample)
        print(f"{matrices} matrices, {chosen} with values, {time.monotonic() - begin:.0f} s to generate", flush=True)
        found, seconds, code = peak(source, first, folder / "out", "--sample", str(arguments.sample))
        print(f"sample: peak {found / 1e6:.0f} MB, {seconds:.0f} s, exit {code}; {sizes(folder / 'out')}", flush=True)
        begin = time.monotonic()
        rows = whole_table(folder / "out", source, folder / "whole")
        print(f"{rows} rows: {sizes(folder / 'whole')}; {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
