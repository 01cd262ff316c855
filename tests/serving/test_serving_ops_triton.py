"""The ops' GPU route, its kernels interpreted on the CPU, computes what the CPU route does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from workbench.kernels import reference

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
pytest.importorskip("triton", minversion="3.9", reason="older interpreters round a fused multiply-add twice")
from triton_interpreter import interpreted

TOKENS, HIDDEN, INTER, EXPERTS, TOP = 5, 64, 32, 4, 2


def both_routes(op: str, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """An op of `ops` as a CPU runs it, and as a GPU does."""
    from workbench.serving.vllm_plugin import ops

    on_cpu = getattr(ops, op)(*arguments, **named)
    kept = ops.on_triton
    ops.on_triton = lambda t: True  # type: ignore[assignment]
    try:
        return on_cpu, getattr(ops, op)(*arguments, **named)
    finally:
        ops.on_triton = kept


def assert_near(routes: tuple[Tensor, Tensor]) -> None:
    """Equal but for the order of float32 sums."""
    cpu, gpu = routes
    assert (gpu.shape, gpu.dtype) == (cpu.shape, cpu.dtype)
    assert (gpu - cpu).abs().max() <= 1e-5 * cpu.abs().max()


def quantized(*shape: int, seed: int, globals_: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 codes and scales of `shape`, whose first dimensions `globals_` have multipliers of their own."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    g = torch.rand((*globals_, *[1] * (len(shape) - len(globals_))), generator=generator) * 1e-3 + 1e-3
    codes, scales, _ = reference.nvfp4_quantize(w, g)
    return codes, scales, g.reshape(globals_ or (1,))


@interpreted
def _linear_routes(scale: str, activation: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, HIDDEN, generator=g)
    codes, scales, globals_ = quantized(2, 16, HIDDEN, seed=1, globals_=(2,))
    given = {
        "none": None,
        "one": torch.tensor([0.002]),
        "nan": torch.tensor([torch.nan]),
        "each": torch.tensor([0.001, torch.nan]),
    }[scale]
    bias = torch.randn(32, generator=g)
    rows = globals_.repeat_interleave(16)
    for layout in (globals_, rows):
        assert_near(
            both_routes(
                "packed_linear",
                x,
                codes.flatten(0, 1),
                scales.flatten(0, 1),
                layout,
                given,
                bias,
                [16, 16],
                "nvfp4",
                activation,
            )
        )


@pytest.mark.parametrize("scale", ["none", "one", "nan", "each"])
def test_linear(scale: str) -> None:
    _linear_routes(scale=scale, activation="nvfp4")


def test_linear_weight_only() -> None:
    _linear_routes(scale="none", activation="none")


@interpreted
def _expert_routes(scale: str, ranks: str) -> None:
    from workbench.serving.vllm_plugin import ops

    g = torch.Generator().manual_seed(2)
    w13, w13_scale, w13_global = quantized(EXPERTS, 2, INTER, HIDDEN, seed=3, globals_=(EXPERTS, 2))
    w2, w2_scale, w2_global = quantized(EXPERTS, HIDDEN, INTER, seed=4, globals_=(EXPERTS,))
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP] for _ in range(TOKENS)])
    ids[0, 0] = -1
    each = torch.rand(EXPERTS, 2, generator=g) * 1e-3 + 1e-3
    each[1] = torch.nan
    given = {
        "none": (None, None),
        "one": (torch.tensor([0.002]), torch.tensor([0.02])),
        "expert": (each[:, 0].contiguous(), each[:, 1] * 10),
        "each": (each, each[:, 1] * 10),
    }[scale]
    if ranks:  # the other rank saw larger values
        ops._largest_of_ranks = lambda amax, ranks: amax * 1.5
    assert_near(
        both_routes(
            "packed_moe",
            torch.randn(TOKENS, HIDDEN, generator=g),
            w13.flatten(1, 2),
            w13_scale.flatten(1, 2),
            w13_global,
            w2,
            w2_scale,
            w2_global,
            torch.rand(TOKENS, TOP, generator=g),
            ids,
            *given,
            "nvfp4",
            "nvfp4",
            False,
            ranks,
        )
    )


@pytest.mark.parametrize(
    ("scale", "ranks"), [("none", ""), ("one", ""), ("expert", ""), ("each", ""), ("none", "tp:0")]
)
def test_experts(scale: str, ranks: str) -> None:
    _expert_routes(scale=scale, ranks=ranks)


@interpreted
def _split_linear() -> None:
    from workbench.serving.vllm_plugin import ops

    ops._largest_of_ranks = lambda amax, ranks: amax * 1.5
    codes, scales, globals_ = quantized(16, HIDDEN, seed=5)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(6))
    arguments = (codes, scales, globals_, None, None, [16], "nvfp4", "nvfp4")
    routes = both_routes("packed_linear", x, *arguments, ranks="tp:0")
    assert_near(routes)
    alone, _ = both_routes("packed_linear", x, *arguments)
    assert not torch.equal(alone, routes[0])  # the scale is the whole token's, not this rank's


def test_a_rank_takes_the_scale_of_the_whole_token() -> None:
    _split_linear()
