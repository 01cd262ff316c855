"""Faster CPU versions of the reference's decoding and activation rounding, equal to it bit for bit.

    w_nk = cpu.nvfp4_dequantize(codes, scales, global_scale, torch.bfloat16)

One 256-entry table turns a byte into its two values, the product with the block's step is taken in float32 and cast
once, all over chunks that stay in the cache: about six times the reference's speed on two cores, with a few hundred
KiB of scratch memory beside the result. The reference stays the definition; tests compare every byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from .tables import E2M1_MAX, MXFP4_BLOCK, NVFP4_BLOCK, ScaleRule

_CHUNK = 1 << 18  # values decoded at a time; 1 MiB of float32


def nvfp4_dequantize(
    packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """NVFP4 `[..., K/2]` uint8 and scales `[..., K/16]` float8_e4m3fn to values `[..., K]` of `dtype`.

    `global_scale` (float32 decode multiplier) broadcasts against `scales`. Equals
    `reference.nvfp4_dequantize(packed, scales, global_scale).to(dtype)`.
    """
    # A gather is five times as fast as torch's cast from float8_e4m3fn.
    step = _e4m3_table().index_select(0, scales.view(torch.uint8).reshape(-1).int()).view(scales.shape)
    return _decode(packed, step * global_scale.float(), NVFP4_BLOCK, dtype)


def mxfp4_dequantize(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 `[..., K/2]` uint8 and E8M0 bytes `[..., K/32]` uint8 to values `[..., K]` of `dtype`.

    Equals `reference.mxfp4_dequantize(packed, scale_bytes).to(dtype)`.
    """
    step = _e8m0_table().index_select(0, scale_bytes.reshape(-1).int()).view(scale_bytes.shape)
    return _decode(packed, step, MXFP4_BLOCK, dtype)


def nvfp4_qdq_activation(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Quantize-dequantize activations `[M, K]` through NVFP4; equals `reference.nvfp4_qdq_activation`."""
    if global_scale is None:
        global_scale = reference.nvfp4_global_scale(x.abs().amax(-1, keepdim=True).float())
    encode = (1.0 / global_scale.float()).expand(*x.shape[:-1], 1) if global_scale.dim() else 1.0 / global_scale.float()

    def round_rows(rows: slice) -> Tensor:
        blocks = x[rows].float().unflatten(-1, (-1, NVFP4_BLOCK))
        g = encode[rows] if encode.dim() else encode
        scale = reference.e4m3_round(g * (blocks.abs().amax(-1) * (1.0 / E2M1_MAX))).float()
        inverse = (g / scale).masked_fill_(scale == 0, 0.0)
        scaled = (blocks * inverse.unsqueeze(-1)).clamp_(-E2M1_MAX, E2M1_MAX)
        return e2m1_nearest(scaled).mul_((scale / g).unsqueeze(-1)).flatten(-2)

    return _by_rows(x, round_rows)


def mxfp4_qdq_activation(x: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> Tensor:
    """Quantize-dequantize activations `[M, K]` through MXFP4; equals `reference.mxfp4_qdq_activation`."""

    def round_rows(rows: slice) -> Tensor:
        blocks = x[rows].float().unflatten(-1, (-1, MXFP4_BLOCK))
        scale_bytes = reference.mxfp4_scale_bytes(blocks.abs().amax(-1), rule)
        step = reference.e8m0_values(scale_bytes).unsqueeze(-1)
        # Division by a power of two is exact. The quotient is at most 8, and the clamp is E2M1's saturation.
        scaled = (blocks / step).clamp_(-E2M1_MAX, E2M1_MAX)
        return e2m1_nearest(scaled).mul_(step).flatten(-2)

    return _by_rows(x, round_rows)


def e2m1_nearest(x: Tensor) -> Tensor:
    """Nearest E2M1 value (ties to the even code) of float32 `x` with |x| <= 6; NaN stays NaN, -0.0 stays -0.0.

    The grid's step is 0.5 below 2, 1 below 4, 2 from there on; `round` takes ties to even multiples of the step, which
    are the even codes.
    """
    magnitude = x.abs()
    fine = (x * 2.0).round_().mul_(0.5)
    middle = x.round()
    coarse = (x * 0.5).round_().mul_(2.0)
    return torch.where(magnitude < 2.0, fine, torch.where(magnitude < 4.0, middle, coarse))


def _decode(packed: Tensor, step: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Values e2m1 * step in float32, then one cast. step: float32 `[..., K/block]`."""
    *lead, half = packed.shape
    out = torch.empty((*lead, 2 * half), dtype=dtype)
    codes, steps = packed.reshape(-1, half), step.reshape(-1, 2 * half // block)
    flat = out.view(-1, 2 * half)
    table = _byte_table()
    rows = max(1, _CHUNK // max(1, 2 * half))
    scratch = torch.empty(min(rows, flat.shape[0]) * half, dtype=torch.int64)
    for start in range(0, flat.shape[0], rows):
        part = codes[start : start + rows]
        index = part.reshape(-1).int()
        if dtype == torch.float32:
            values = flat[start : start + rows]
            torch.index_select(table, 0, index, out=values.view(-1).view(torch.int64))
            values.view(part.shape[0], -1, block).mul_(steps[start : start + rows].unsqueeze(-1))
        else:
            pairs = torch.index_select(table, 0, index, out=scratch[: index.numel()])
            values = pairs.view(torch.float32).view(part.shape[0], -1, block)
            values.mul_(steps[start : start + rows].unsqueeze(-1))
            flat[start : start + rows].copy_(values.flatten(-2))
    return out


@functools.cache
def _byte_table() -> Tensor:
    """256 entries: a byte's two float32 values (low nibble first), seen as one int64 so that one gather moves both."""
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(-1)
    return reference.e2m1_values(reference.unpack_fp4(every_byte)).contiguous().view(torch.int64).flatten()


@functools.cache
def _e4m3_table() -> Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


@functools.cache
def _e8m0_table() -> Tensor:
    return reference.e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8))


def _by_rows(x: Tensor, round_rows: Callable[[slice], Tensor]) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = max(1, _CHUNK // max(1, x.shape[-1]))
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        out[chunk] = round_rows(chunk)
    return out
