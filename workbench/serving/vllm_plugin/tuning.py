"""Measures the packed layers' shapes while the model loads, before vLLM captures its CUDA graphs.

    tune_layers(model, torch.bfloat16)

vLLM runs a model once, with its largest batch, before it captures graphs of the small ones, and nothing is measured in
a capture (`workbench.kernels.triton_tuning`). So the first of the ranks that share a model calls each distinct shape
once for each bucket of tokens, and all of them take its plans: what is computed on several ranks stays equal on them.
Does nothing where the kernels' defaults were measured for the card, and on a CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from . import ops
from .linear import PackedLinearMethod
from .moe import PackedMoEMethod

LIMIT_S = 180.0  # no call is started after so many seconds: the engine's start waits for this

logger = init_logger("vllm.workbench")


def tune_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Tunes the packed layers of a loaded `model` for inputs of `dtype`. Failures are logged, and the defaults hold."""
    device = next(model.parameters()).device
    if not ops.on_triton(torch.empty(0, device=device)):
        return
    from workbench.kernels import triton_tuning

    tuner = triton_tuning.tuner(device)
    if tuner is None:
        return
    ranks, start = get_tp_group(), time.perf_counter()
    if ranks.rank_in_group == 0:
        try:
            with triton_tuning.at_load(), torch.no_grad():
                for call in distinct_calls(model, dtype):
                    if time.perf_counter() - start > LIMIT_S:
                        logger.warning("tuning stopped after %.0f s; what is left is tuned at the next start", LIMIT_S)
                        break
                    call()
        except Exception as error:  # the other ranks wait for the plans
            logger.warning("tuning stopped: %s: %s; the rest runs by the defaults", type(error).__name__, error)
        logger.info(
            "tuned %d shapes for %s in %.1f s; plans in %s",
            tuner.tuned,
            tuner.store.card.name,
            time.perf_counter() - start,
            tuner.store.path,
        )
    if ranks.world_size > 1:
        tuner.adopt(ranks.broadcast_object(tuner.store.entries, src=0))


def distinct_calls(model: nn.Module, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """One call of each distinct packed layer with each bucket of tokens, random ones."""
    from workbench.kernels.triton_routes import BUCKETS

    seen: set[tuple[Any, ...]] = set()
    module: Any
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, PackedLinearMethod):
            shape: tuple[Any, ...] = (*module.weight.shape, *method.widths)
            call = _call_linear
        elif isinstance(method, PackedMoEMethod):
            shape = (*module.w13_weight.shape, *module.w2_weight.shape)
            call = _call_experts
        else:
            continue
        scales = [name for name, _ in module.named_parameters(recurse=False) if name.endswith("input_scale")]
        key = (*shape, method.plan.weight, method.plan.activation, *scales)
        if key not in seen:
            seen.add(key)
            for tokens in BUCKETS:
                yield functools.partial(call, module, tokens, dtype)


def _call_linear(layer: Any, tokens: int, dtype: torch.dtype) -> Tensor:
    """The layer's product as the kernels see it. Ranks that split K round the input before it."""
    from workbench.kernels import triton_gemm

    method, weight = layer.quant_method, layer.weight
    rounded = bool(method.ranks) and method.plan.activation == "nvfp4"
    return triton_gemm.packed_linear(
        torch.randn(tokens, 2 * weight.shape[1], device=weight.device, dtype=dtype),
        weight,
        layer.weight_scale,
        getattr(layer, "weight_scale_2", None),
        None if rounded else getattr(layer, "input_scale", None),
        None,
        method.widths,
        method.plan.weight,
        "none" if rounded else method.plan.activation,
    )


def _call_experts(layer: Any, tokens: int, dtype: torch.dtype) -> Tensor:
    """The layer's experts, tokens sent to random ones. Ranks that split K round the input of the second product with
    one another, which is left out here."""
    from workbench.kernels import triton_moe

    method, weight, config = layer.quant_method, layer.w13_weight, layer.moe_config
    chosen = torch.rand(tokens, config.num_experts, device=weight.device).topk(config.experts_per_token)
    return triton_moe.packed_moe(
        torch.randn(tokens, 2 * weight.shape[2], device=weight.device, dtype=dtype),
        weight,
        layer.w13_weight_scale,
        getattr(layer, "w13_weight_scale_2", None),
        layer.w2_weight,
        layer.w2_weight_scale,
        getattr(layer, "w2_weight_scale_2", None),
        chosen.values,
        method._local(layer, chosen.indices),
        getattr(layer, "w13_input_scale", None),
        getattr(layer, "w2_input_scale", None),
        method.plan.weight,
        method.plan.activation,
        layer.apply_router_weight_on_input,
        round_hidden=(lambda hidden, scale: hidden) if method.ranks else None,
    )
