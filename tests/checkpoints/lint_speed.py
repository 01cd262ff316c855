"""Measure lint on a checkpoint of a trillion parameters: `python tests/checkpoints/lint_speed.py FOLDER [nvfp4|mxfp4]`.

Writes, if FOLDER is empty, the tensors of a Kimi-K2-sized model (61 layers, 384 experts of [2048, 7168]) with real
names and shapes as sparse files: what lint reads holds random bytes, the rest is a hole, so that some 600 GB take a few
on disk. Then prints seconds and peak memory of linting it.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 7168, 2048, 61, 384
PATCH = 1 << 14  # random bytes at the start, the middle and the end of scales, and in the middle of codes
SIZES = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2}

Tensors = list[tuple[str, str, tuple[int, ...]]]


def main() -> None:
    folder, format = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "nvfp4"
    if not folder.exists():
        write_checkpoint(folder, format)
    from workbench.checkpoints.lint import lint_checkpoint

    started, processor = time.perf_counter(), time.process_time()
    report = lint_checkpoint(folder)
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{format}: {report.quantized_tensors} quantized of {report.tensors} tensors, {report.scale_bytes / 1e9:.1f} GB"
        f" of block scales ({report.scale_bytes_read / 1e9:.2f} GB read), {report.value_bytes / 1e9:.1f} GB of plain"
        f" weights ({report.value_bytes_read / 1e9:.2f} GB read): {seconds:.1f} s,"
        f" {processor_seconds:.1f} s of processor time, peak {peak:.2f} GiB"
    )
    for finding in report.findings:
        print(f"  {finding.severity} {finding.check}: {finding.message}")


def write_checkpoint(folder: Path, format: str) -> None:
    """One shard a layer; tensors in the order in which safetensors writes them, by dtype size and name."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    head = [("model.embed_tokens.weight", "BF16", (64, HIDDEN)), ("lm_head.weight", "BF16", (64, HIDDEN))]
    weight_map = {}
    for layer in range(LAYERS):
        tensors = [*(head if layer == 0 else []), *_layer(layer, format)]
        tensors.sort(key=lambda t: (-SIZES[t[1]], t[0]))
        file = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"
        _write_shard(folder / file, tensors, random)
        weight_map.update({name: file for name, _, _ in tensors})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*", "*mlp.gate"]}
        if format == "nvfp4"
        else {
            "quant_method": "quark",
            "exclude": ["lm_head", "*self_attn*", "*mlp.gate"],
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
            },
        }
    )
    config = {"model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS}
    config |= {"hidden_size": HIDDEN, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def _layer(layer: int, format: str) -> Tensors:
    base = f"model.layers.{layer}."
    tensors: Tensors = [
        (base + "input_layernorm.weight", "BF16", (HIDDEN,)),
        (base + "self_attn.o_proj.weight", "BF16", (HIDDEN, 8192)),
    ]
    modules = ["mlp."] if layer == 0 else [f"mlp.experts.{e}." for e in range(EXPERTS)] + ["mlp.shared_experts."]
    if layer:
        tensors.append((base + "mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)))
    for module in modules:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            n, k = (HIDDEN, INTERMEDIATE) if projection == "down_proj" else (INTERMEDIATE, HIDDEN)
            name = f"{base}{module}{projection}."
            tensors.append((name + "weight", "U8", (n, k // 2)))
            if format == "nvfp4":
                tensors.append((name + "weight_scale", "F8_E4M3", (n, k // 16)))
                tensors += [(name + "weight_scale_2", "F32", ()), (name + "input_scale", "F32", ())]
            else:
                tensors.append((name + "weight_scale", "U8", (n, k // 32)))
    return tensors


def _write_shard(path: Path, tensors: Tensors, random: np.random.Generator) -> None:
    header, offset = {}, 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + offset)
        for name, dtype, _ in tensors:
            begin, end = (8 + len(raw) + o for o in header[name]["data_offsets"])
            for position, data in _patches(name, dtype, begin, end, random):
                stream.seek(position)
                stream.write(data)


def _patches(name: str, dtype: str, begin: int, end: int, random: np.random.Generator) -> list[tuple[int, bytes]]:
    if dtype == "F32":
        return [(begin, np.float32(3e-5 if name.endswith("_2") else 2e-3).tobytes())]
    width = min(PATCH, end - begin)
    middle = begin + (end - begin - width) // 2
    if dtype == "BF16":
        return [(middle, np.full(width // 2, 0x3C80, np.uint16).tobytes())]
    if not name.endswith("_scale"):
        return [(middle, random.integers(0, 256, width, np.uint8).tobytes())]
    low, high = (0x60, 0x7F) if dtype == "F8_E4M3" else (115, 123)
    return [(p, random.integers(low, high, width, np.uint8).tobytes()) for p in (begin, middle, end - width)]


if __name__ == "__main__":
    main()
