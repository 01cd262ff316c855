"""Quantize-dequantize of activations in Triton, in one launch: NVFP4 (own, per-token or static global scale), MXFP4.

    x_hat_mk = triton_activation.nvfp4_qdq_activation(x_mk, input_scale)

A token whose global scale is its own largest magnitude is held by one program, or, where it is long, read twice, the
second time from the cache.
No value reaches the host, so a CUDA graph can hold the calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule
from .triton_elements import (
    bits_float,
    e2m1_rounded,
    e4m3_bytes,
    e4m3_values,
    e8m0_inverses,
    e8m0_values,
    float_bits,
    largest_magnitude,
    rounded_to,
    widened,
)
from .triton_launch import EXACT, flat_values, global_per_block, scale_shape, tile
from .triton_scales import mxfp4_scale_bytes

_TILE = tile(2048)  # values a program
_ROW_TILE = 2048  # values of a token at a time, where it has more than a program holds
_WHOLE_ROW = 8192  # values of a token that a program of 8 warps holds


def nvfp4_qdq_activation(x: Tensor, global_scale: Tensor | None = None, *, own_where_nan: bool = False) -> Tensor:
    """Quantize-dequantize `x` `[M, K]` through NVFP4; equals `reference.nvfp4_qdq_activation`, returns x's dtype.

    global_scale: decode multiplier, scalar or `[M, 1]`; None: each token's own. own_where_nan: a token whose given
    scale is NaN takes its own too (the reference gives NaN), so that "no static scale" needs no look at the value.
    """
    scale_shape(x.shape, NVFP4_BLOCK)
    return torch.ops.workbench_kernels.nvfp4_qdq(x, global_scale, own_where_nan or global_scale is None)


def mxfp4_qdq_activation(x: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> Tensor:
    """Quantize-dequantize `x` `[M, K]` through MXFP4; equals `reference.mxfp4_qdq_activation`, returns x's dtype.

    Raises ValueError for a rule that is not one of floor, even, rceil and ceil.
    """
    rule = ScaleRule(rule)
    if rule not in MXFP4_RULES:
        raise ValueError(f"no activation rounding under {rule.value!r}; choose one of: {', '.join(MXFP4_RULES)}")
    scale_shape(x.shape, MXFP4_BLOCK)
    return torch.ops.workbench_kernels.mxfp4_qdq(x, rule.value)


# ---- launches --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::nvfp4_qdq", mutates_args=())
def _nvfp4_qdq(x: Tensor, global_scale: Tensor | None, own: bool) -> Tensor:
    values = flat_values(x)
    out, k = torch.empty_like(values), x.shape[-1]
    rows = x.shape[:-1].numel()
    shared, g = True, values
    if global_scale is not None:
        g, per_global = global_per_block(global_scale, scale_shape(x.shape, NVFP4_BLOCK))
        shared = per_global == 0
    if not values.numel():
        return out.to(x.dtype)
    if own:
        whole = k <= _WHOLE_ROW
        width = triton.next_power_of_2(k) if whole else _ROW_TILE
        options = {"HAS_GLOBAL": global_scale is not None, "ONE_GLOBAL": shared, "BLOCKS": width // NVFP4_BLOCK}
        kernel = _nvfp4_whole_row_kernel if whole else _nvfp4_row_kernel
        kernel[(rows,)](values, g, out, k, **options, num_warps=min(max(width // 1024, 1), 8), **EXACT)
    else:
        blocks = values.numel() // NVFP4_BLOCK
        tiles = _TILE // NVFP4_BLOCK
        _nvfp4_flat_kernel[(triton.cdiv(blocks, tiles),)](
            values, g, out, blocks, max(k // NVFP4_BLOCK, 1), ONE_GLOBAL=shared, ROWS=tiles, num_warps=4, **EXACT
        )
    return out.to(x.dtype)


@_nvfp4_qdq.register_fake
def _(x: Tensor, global_scale: Tensor | None, own: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("workbench_kernels::mxfp4_qdq", mutates_args=())
def _mxfp4_qdq(x: Tensor, rule: str) -> Tensor:
    values = flat_values(x)
    out, blocks, tiles = torch.empty_like(values), values.numel() // MXFP4_BLOCK, _TILE // MXFP4_BLOCK
    if blocks:
        grid = (triton.cdiv(blocks, tiles),)
        _mxfp4_flat_kernel[grid](values, out, blocks, RULE=rule, ROWS=tiles, num_warps=4, **EXACT)
    return out.to(x.dtype)


@_mxfp4_qdq.register_fake
def _(x: Tensor, rule: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _nvfp4_flat_kernel(x_ptr, g_ptr, out_ptr, blocks, per_global, ONE_GLOBAL: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = widened(tl.load(x_ptr + at, mask=here[:, None], other=0.0))
    if ONE_GLOBAL:
        g = tl.load(g_ptr) + tl.zeros([ROWS], tl.float32)
    else:
        g = tl.load(g_ptr + block // per_global, mask=here, other=1.0)
    out = nvfp4_round_tile(x, g)
    tl.store(out_ptr + at, rounded_to(out, out_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def _nvfp4_row_kernel(
    x_ptr, g_ptr, out_ptr, k, HAS_GLOBAL: tl.constexpr, ONE_GLOBAL: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    largest = tl.zeros([BLOCKS], tl.int32)
    for start in range(0, k, BLOCKS * 16):
        x = widened(tl.load(x_ptr + row * k + start + at, mask=start + at < k, other=0.0))
        largest = tl.maximum(largest, float_bits(largest_magnitude(x, 1)))
    g = nvfp4_own_global(bits_float(tl.max(largest, 0)))
    if HAS_GLOBAL:
        given = tl.load(g_ptr) if ONE_GLOBAL else tl.load(g_ptr + row)
        g = tl.where(given == given, given, g)
    g = g + tl.zeros([BLOCKS], tl.float32)
    for start in range(0, k, BLOCKS * 16):
        here = start + at < k
        x = widened(tl.load(x_ptr + row * k + start + at, mask=here, other=0.0))
        out = nvfp4_round_tile(x, g)
        tl.store(out_ptr + row * k + start + at, rounded_to(out, out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _nvfp4_whole_row_kernel(
    x_ptr, g_ptr, out_ptr, k, HAS_GLOBAL: tl.constexpr, ONE_GLOBAL: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = widened(tl.load(x_ptr + row * k + at, mask=at < k, other=0.0))
    amax = largest_magnitude(x, 1)
    g = nvfp4_own_global(largest_magnitude(amax, 0))
    if HAS_GLOBAL:
        given = tl.load(g_ptr) if ONE_GLOBAL else tl.load(g_ptr + row)
        g = tl.where(given == given, given, g)
    out = nvfp4_round_tile(x, g + tl.zeros([BLOCKS], tl.float32))
    tl.store(out_ptr + row * k + at, rounded_to(out, out_ptr.dtype.element_ty), mask=at < k)


@triton.jit
def nvfp4_own_global(amax):
    """`reference.nvfp4_global_scale`: amax / 2688, at least 2**-118; 1 for 0."""
    g = tl.div_rn(amax, 2688.0)
    g = tl.where(g < 3.009265538105056e-36, 3.009265538105056e-36, g)
    return tl.where(amax == 0, 1.0, g)


@triton.jit
def nvfp4_round_tile(x, g):
    """`reference.nvfp4_qdq_activation` of blocks `x` `[ROWS, 16]` (float32) under decode multipliers `g` `[ROWS]`."""
    encode = tl.div_rn(tl.full(g.shape, 1.0, tl.float32), g)
    scale = e4m3_values(e4m3_bytes(encode * (largest_magnitude(x, 1) * 0.16666666666666666)))
    down = tl.where(scale == 0, 0.0, tl.div_rn(encode, scale))
    up = tl.div_rn(scale, encode)
    return e2m1_rounded(x * down[:, None]) * up[:, None]


@triton.jit
def _mxfp4_flat_kernel(x_ptr, out_ptr, blocks, RULE: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = widened(tl.load(x_ptr + at, mask=here[:, None], other=0.0))
    out = mxfp4_round_tile(x, RULE)
    tl.store(out_ptr + at, rounded_to(out, out_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def mxfp4_round_tile(x, RULE: tl.constexpr):
    """`reference.mxfp4_qdq_activation` of blocks `x` `[ROWS, 32]`, float32."""
    byte = mxfp4_scale_bytes(largest_magnitude(x, 1), RULE)
    return e2m1_rounded(x * e8m0_inverses(byte)[:, None]) * e8m0_values(byte)[:, None]
