"""Peak memory of `workbench analyze` on generated checkpoints of growing size; docs/analysis.md has the table.

    python tests/analysis/analysis_memory.py --folder /scratch --gb 1 4 16

The checkpoints have Kimi-K2's names and shapes (experts of 2048 x 7168) for as many experts as the size asks for, every
matrix the same few values: what is in a matrix does not change what is held of it. They are removed again.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch

from workbench.formats import quantize

SHARD_MATRICES = 96
EXPERTS = 384


def module(index: int) -> str:
    layer, rest = divmod(index, 3 * EXPERTS)
    expert, projection = divmod(rest, 3)
    return f"model.layers.{layer + 1}.mlp.experts.{expert}.{('gate', 'up', 'down')[projection]}_proj"


def write_shard(path: Path, parts: list[tuple[str, str, list[int], bytes]]) -> None:
    """A safetensors file of (name, dtype, shape, bytes), one buffer after the other, never all in memory."""
    header, offset = {}, 0
    for name, dtype, shape, data in parts:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for *_, data in parts:
            file.write(data)


def generate(folder: Path, source_bytes: int, rows: int = 2048, columns: int = 7168) -> tuple[Path, Path, int]:
    """Source (bfloat16) and first (ModelOpt NVFP4) of about `source_bytes`; down projections are transposed."""
    values = {}
    for down in (False, True):
        shape = (columns, rows) if down else (rows, columns)
        w = (0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(int(down)))).bfloat16()
        q = quantize(w, "nvfp4")
        assert q.global_scale is not None
        values[down] = (
            shape,
            w.view(torch.uint8).numpy().tobytes(),
            q.codes.numpy().tobytes(),
            q.block_scales.view(torch.uint8).numpy().tobytes(),
            q.global_scale.reshape(1).numpy().tobytes(),
        )
    count = max(1, round(source_bytes / (2 * rows * columns)))
    source, first = folder / "source", folder / "nvfp4"
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16"}
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
    for path, extra in ((source, {}), (first, {"quantization_config": quantization})):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | extra))
    for number, start in enumerate(range(0, count, SHARD_MATRICES)):
        dense, packed = [], []
        for index in range(start, min(count, start + SHARD_MATRICES)):
            name = module(index)
            shape, w, codes, scales, multiplier = values[name.endswith("down_proj")]
            n, k = shape
            dense.append((f"{name}.weight", "BF16", [n, k], w))
            packed.append((f"{name}.weight", "U8", [n, k // 2], codes))
            packed.append((f"{name}.weight_scale", "F8_E4M3", [n, k // 16], scales))
            packed.append((f"{name}.weight_scale_2", "F32", [], multiplier))
        write_shard(source / f"model-{number:05d}.safetensors", dense)
        write_shard(first / f"model-{number:05d}.safetensors", packed)
    return source, first, count


def peak(source: Path, first: Path, out: Path, *more: str) -> tuple[int, float, int]:
    """Peak resident bytes, seconds and exit code of the command in a process of its own."""
    program = (
        "import resource, sys; from workbench.cli import main; code = main(sys.argv[1:]);"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True); sys.exit(code)"
    )
    start = time.monotonic()
    command = ["analyze", "--source", str(source), "--first", str(first), "--out", str(out), *more]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    if "peak" not in done.stdout:
        raise SystemExit(done.stdout + done.stderr)
    return int(done.stdout.rsplit("peak", 1)[1].split()[0]), time.monotonic() - start, done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for gigabytes in arguments.gb:
        folder = arguments.folder / f"generated-{gigabytes:g}"
        source, first, count = generate(folder, int(gigabytes * 1e9))
        try:
            found, seconds, code = peak(source, first, folder / "out")
            print(
                f"{gigabytes:g} GB, {count} matrices: peak {found / 1e6:.0f} MB, {seconds:.0f} s, exit {code}",
                flush=True,
            )
        finally:
            shutil.rmtree(folder)
