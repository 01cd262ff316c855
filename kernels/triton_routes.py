"""Which kernels can multiply packed weights on a card, which does unless measured, and what is worth measuring.

routes = triton_routes.linear_routes(x_mk, codes, scales, globals_, [n])
plans = triton_routes.linear_plans(m, routes)      # the default first; for `triton_tuning.Tuner.plan`
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import triton
from torch import Tensor

from . import triton_configs
from .triton_tuning import Plan

BUCKETS = (8, 16, 32, 64, 128, 256, 512)  # of tokens; more are not tuned
FUSED_TOKENS = 64  # at most so many tokens take the portable kernel
MATRICES = 4  # at most so many matrices in one weight take the kernels in Gluon
_MOST_ASSIGNMENTS = 8192  # of which more are tuned as one


def bucket(tokens: int) -> int | None:
    """The smallest of BUCKETS that holds `tokens`; None: those are not tuned."""
    return next((b for b in BUCKETS if tokens <= b), None)


def gluon_kernels(name: str, device: torch.device, dtype: torch.dtype, k: int, *weight: Tensor) -> ModuleType | None:
    """`triton_gemm_{name}` where it multiplies `weight` with inputs of `dtype` and K of `k` on `device`."""
    kernels = gluon_module(name) if device.type == "cuda" else None
    fits = kernels is not None and kernels.supports(device, dtype, k) and kernels.aligned(*weight)
    return kernels if fits else None


@functools.cache
def gluon_module(name: str) -> ModuleType | None:
    """None where Triton has no Gluon or interprets."""
    if torch.version.hip is not None or triton.knobs.runtime.interpret:
        return None
    try:
        return importlib.import_module(f".triton_gemm_{name}", __package__)
    except ImportError:
        return None


def linear_routes(x: Tensor, codes: Tensor, scales: Tensor, g: Tensor | None, widths: list[int]) -> tuple[str, ...]:
    """Which of registers and wgmma can multiply here."""
    if g is not None and g.numel() not in (1, codes.shape[0]) and len(widths) > MATRICES:
        return ()
    return gluon_routes(x, codes, scales)


def gluon_routes(x: Tensor, *weight: Tensor) -> tuple[str, ...]:
    """Which of registers and wgmma multiply `weight` with `x` `[.., K]`."""
    names = ("registers", "wgmma")
    return tuple(n for n in names if gluon_kernels(n, x.device, x.dtype, x.shape[-1], *weight) is not None)


def default_route(m: int, routes: tuple[str, ...]) -> str:
    """What multiplies M tokens: registers, wgmma, portable (plain Triton) or decode (and the vendor's GEMM)."""
    wide = "wgmma" in routes
    if "registers" in routes and m <= (triton_configs.REGISTER_TOKENS if wide else FUSED_TOKENS):
        return "registers"
    if wide and m <= triton_configs.WGMMA_TOKENS:
        return "wgmma"
    return "portable" if m <= FUSED_TOKENS else "decode"


def linear_key(n: int, k: int, tokens: int, weight_format: str, activation_format: str, dtype: torch.dtype) -> str:
    """What a plan of `packed_linear` holds for. tokens: of BUCKETS."""
    return f"linear N={n} K={k} M<={tokens} {weight_format} {activation_format} {str(dtype).removeprefix('torch.')}"


def linear_plans(m: int, routes: tuple[str, ...]) -> list[Plan]:
    """What may multiply `m` tokens, of BUCKETS, the default first. routes: `linear_routes`'."""
    plans = [Plan(default_route(m, routes))]
    if "registers" in routes and m <= FUSED_TOKENS:
        table = triton_configs.REGISTER_CANDIDATES[triton_configs.tokens_tile(m)]
        plans += [Plan("registers"), *(Plan("registers", c) for c in table)]
    if "wgmma" in routes and m > 8:
        fitting = [c for c in triton_configs.WIDE_CANDIDATES if c.tokens <= max(32, 2 * m)]
        plans += [Plan("wgmma"), *(Plan("wgmma", c) for c in fitting)]
    if m > 16:
        plans.append(Plan("decode"))
    if not routes and m <= 256:
        plans += [Plan("portable"), *(Plan("portable", c) for c in triton_configs.TILE_CANDIDATES)]
    elif "wgmma" not in routes and m <= FUSED_TOKENS:
        plans.append(Plan("portable"))
    return list(dict.fromkeys(plans))


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_key(
    codes: Tensor, k: int, assignments: int, size: int, shards: int, weight_format: str, dtype: torch.dtype
) -> str:
    """What a plan of `triton_moe`'s grouped product holds for. codes `[E, N, K/2]`; size: of a group, 0: none."""
    many = min(_MOST_ASSIGNMENTS, triton.next_power_of_2(assignments))
    return (
        f"experts E={codes.shape[0]} N={codes.shape[1]} K={k} A~{many} groups of {size} x{shards} {weight_format}"
        f" {str(dtype).removeprefix('torch.')}"
    )


def experts_plans(size: int, k: int, routes: tuple[str, ...]) -> list[Plan]:
    """What may multiply groups of `size` with K of `k`, the default first. routes: `gluon_routes`'."""
    plans: list[Plan] = []
    if "wgmma" in routes and size >= 32:
        fitting = [c for c in triton_configs.WIDE_EXPERT_CANDIDATES if c.tokens == size]
        plans += [Plan("wgmma"), *(Plan("wgmma", c) for c in fitting)]
    if "registers" in routes and size <= 32:
        table = triton_configs.DOWN_CANDIDATES if k < 1024 else triton_configs.UP_CANDIDATES
        plans += [Plan("registers"), *(Plan("registers", c) for c in table[32 if size > 8 else 8])]
    if not plans:
        plans += [Plan("portable"), *(Plan("portable", c) for c in triton_configs.TILE_CANDIDATES)]
    return plans


def multiplied(groups: list[Tensor]) -> Tensor:
    """Which assignments a grouped product multiplies: those of this rank's experts. Looks at values."""
    if len(groups) == 1:
        return groups[0] >= 0
    order, expert, _, stop = groups
    return order[: int(torch.where(expert >= 0, stop, 0).max())].long()
