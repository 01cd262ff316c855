"""Peak memory of a conversion against the size of its checkpoint.

    python tests/checkpoints/conversion_memory.py 0.5 2 8 --format nvfp4 --dialect modelopt --jobs 1

Makes a checkpoint of each size (GB of BF16 zeros in 4096 x 4096 matrices and shards of 2 GB: sparse files that take no
space), converts it in a fresh process and prints that process's peak, the memory it started the first tensor with, and
the time. Needs a third of the largest size on the disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_CHILD = """
import json, resource, sys, time
from workbench.checkpoints.convert import quantize_checkpoint
peaks = []
def note(*_): peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
import torch, workbench.checkpoints.card
start, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.monotonic()
quantize_checkpoint(sys.argv[1], sys.argv[2], progress=note, **json.loads(sys.argv[3]))
note()
seconds = time.monotonic() - begin
print(json.dumps({"start_mib": start, "first_mib": peaks[0], "peak_mib": peaks[-1], "seconds": seconds}))
"""


def write_sparse_checkpoint(folder: Path, matrices: int, side: int, shard_matrices: int) -> Path:
    """`matrices` BF16 zero matrices [side, side] in shards whose bytes are holes in the file."""
    folder.mkdir(parents=True)
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(matrices)]
    shards = [names[i : i + shard_matrices] for i in range(0, matrices, shard_matrices)]
    weight_map = {}
    size = side * side * 2
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        rows = {
            name: {"dtype": "BF16", "shape": [side, side], "data_offsets": [i * size, (i + 1) * size]}
            for i, name in enumerate(shard)
        }
        header = json.dumps(rows).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + len(shard) * size)
        weight_map.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return folder


def measure(source: Path, target: Path, **options: Any) -> dict[str, float]:
    """Of one conversion in a fresh process: resident MiB at the start (start_mib), the peak up to the first tensor
    (first_mib) and in all (peak_mib), and seconds."""
    command = [sys.executable, "-c", _CHILD, str(source), str(target), json.dumps(options)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sizes_gb", type=float, nargs="+")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--dialect", default="modelopt")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    for size_gb in options.sizes_gb:
        with tempfile.TemporaryDirectory() as scratch:
            source = write_sparse_checkpoint(
                Path(scratch) / "source", round(size_gb * 1e9 / (4096 * 4096 * 2)), 4096, 64
            )
            found = measure(
                source, Path(scratch) / "target", format=options.format, dialect=options.dialect, jobs=options.jobs
            )
        print(f"{size_gb:5.1f} GB: peak {found['peak_mib']:.0f} MiB", end=" ")
        print(f"({found['start_mib']:.0f} before the first tensor), {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
