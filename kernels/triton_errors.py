"""The sums of the error algebra of NVFP4 and of MXFP4 made from it, in one read of the weights and of the codes.

    sums = triton_errors.error_sums(w_nk, codes, scales, global_scale, "even")
    sums[SUMS.index("e1_e2")]

w = source, a = the decoded NVFP4, b = MXFP4(a), d = MXFP4(w); e1 = a - w, e2 = b - a, e = b - w. Errors and products
are float32, a block's sum is float32, sums over blocks float64, added in a fixed order, so a result repeats to the bit.
Against `analysis.algebra`, which is float64 throughout, <x, y> differs by less than 2e-6 of sqrt(<x, x> <y, y>).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule
from .triton_elements import (
    e2m1_values,
    e4m3_values,
    e8m0_inverses,
    e8m0_values,
    largest_magnitude,
    nearest_e2m1,
    unpack_codes,
    widened,
)
from .triton_errors_pairs import error_pairs_kernel
from .triton_launch import (
    EXACT,
    bytes_of,
    check_scales,
    flat_values,
    global_per_block,
    has_packed_bfloat16,
    scale_shape,
    tile,
)
from .triton_pairs import SHIFT_LEFT_16
from .triton_requant import TABLE_WORTH, requant_tables, runs_of_globals
from .triton_scales import mxfp4_scale_bytes

SUMS = ("w_w", "e1_e1", "e2_e2", "e_e", "w_e1", "w_e2", "e1_e2", "w_b", "direct_direct")
_TILE = tile(2048)  # weights at a time
_TILES = 8  # that a program takes
PAIR_TILES = 16  # of bfloat16: what it adds up at its end is worth half a tile and more
_ROWS = tile(128)  # blocks of bfloat16 at a time: one a thread of 4 warps
# Of a thread, for bfloat16: left alone, the compiler takes up to twice as many for the same instructions.
_REGISTERS = 64
_MEASURED = 7  # the rest follows from them: e = e1 + e2, b = w + e1 + e2


def error_sums(
    w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: ScaleRule | str = ScaleRule.EVEN
) -> Tensor:
    """SUMS over all elements of `w` `[..., N, K]`, float64 `[9]`, on w's device.

    packed, scales, global_scale: w in NVFP4. rule: of MXFP4: floor, even, rceil or ceil. Raises ValueError for another
    rule, for shapes that do not fit, or for a K that is not a multiple of 32.
    """
    name = checked_rule(w, packed, scales, rule)
    return torch.ops.workbench_kernels.error_sums(w, packed, scales.view(torch.uint8), global_scale, name)


def checked_rule(w: Tensor, packed: Tensor, scales: Tensor, rule: ScaleRule | str) -> str:
    """The rule's name; raises ValueError for what `error_sums` refuses."""
    rule = ScaleRule(rule)
    if rule not in MXFP4_RULES:
        raise ValueError(f"no fused error pass under {rule.value!r}; choose one of: {', '.join(MXFP4_RULES)}")
    scale_shape(w.shape, MXFP4_BLOCK)
    if check_scales(packed, scales, NVFP4_BLOCK) != w.shape:
        raise ValueError(f"codes {tuple(packed.shape)} are not those of weights {tuple(w.shape)}")
    return rule.value


@torch.library.custom_op("workbench_kernels::error_sums", mutates_args=())
def _error_sums(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    words = w.dtype == torch.bfloat16
    blocks, rows = w.numel() // MXFP4_BLOCK, _ROWS if words else _TILE // MXFP4_BLOCK
    tiles = min(PAIR_TILES if words else _TILES, triton.next_power_of_2(triton.cdiv(blocks, rows)))
    programs = triton.cdiv(blocks, rows * max(tiles, 1))
    partial = torch.empty((programs, _MEASURED), dtype=torch.float64, device=w.device)
    sums = torch.empty((len(SUMS),), dtype=torch.float64, device=w.device)
    if blocks and words:
        launch_pairs(error_pairs_kernel, partial, w, packed, scales, global_scale, rule, tiles, _REGISTERS)
    elif blocks:
        g, per_global = global_per_block(global_scale, scales.shape)
        _error_kernel[(programs,)](
            flat_values(w),
            bytes_of(packed),
            scales.contiguous(),
            g,
            partial,
            blocks,
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            ROWS=rows,
            TILES=tiles,
            num_warps=4,
        )
    finish_kernel[(1,)](partial, sums, programs, MEASURED=_MEASURED, COLUMNS=8, PARTS=512, num_warps=8)
    return sums


def launch_pairs(
    kernel: Any,
    partial: Tensor,
    w: Tensor,
    packed: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    rule: str,
    tiles: int,
    registers: int | None,
) -> None:
    """Run a kernel on bfloat16 `w`: its sums of `tiles` times `_ROWS` blocks to each row of `partial`.

    registers: that a thread may have at most, on NVIDIA's cards; None: as many as the compiler likes.
    """
    blocks = w.numel() // MXFP4_BLOCK
    g, per_global = runs_of_globals(global_scale, scales.shape)
    tabled = scales.numel() < 1 << 31 and (per_global or scales.numel()) >= TABLE_WORTH
    exponents, values = requant_tables(g, rule, values=True) if tabled else (g, g)
    packs = has_packed_bfloat16(w.device)
    options = {"maxnreg": registers} if packs and registers is not None else {}
    kernel[(partial.shape[0],)](
        w.contiguous().view(torch.int32),
        bytes_of(packed).view(torch.int32),
        scales.contiguous(),
        g,
        exponents,
        values,
        partial,
        blocks,
        max(per_global, 1),
        SHIFT_LEFT_16,
        RULE=rule,
        ONE_GLOBAL=per_global == 0,
        TABLED=tabled,
        PACKED=packs,
        WHOLE=blocks % (_ROWS * tiles) == 0,
        ROWS=_ROWS,
        TILES=tiles,
        num_warps=4,
        **EXACT,
        **options,
    )


@_error_sums.register_fake
def _(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    return w.new_empty((len(SUMS),), dtype=torch.float64)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _error_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    g_ptr,
    partial_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    w_w = tl.zeros([ROWS], tl.float64)
    e1_e1 = w_w
    e2_e2 = w_w
    w_e1 = w_w
    w_e2 = w_w
    e1_e2 = w_w
    direct = w_w
    for i in range(TILES):
        block = (program * TILES + i) * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        w = widened(tl.load(x_ptr + at, mask=here[:, None], other=0.0))
        packed = tl.load(packed_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :], mask=here[:, None], other=0)
        half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        step = e4m3_values(tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32))
        if ONE_GLOBAL:
            step *= tl.load(g_ptr)
        else:
            step *= tl.load(g_ptr + half // per_global, mask=here[:, None], other=1.0)
        codes = tl.reshape(unpack_codes(packed, ROWS, 32), [ROWS, 2, 16])
        a = tl.reshape(e2m1_values(codes) * step[:, :, None], [ROWS, 32])
        e1 = a - w
        e2 = _rounding_error(a, RULE)
        e_direct = _rounding_error(w, RULE)
        w_w += tl.sum(w * w, 1).to(tl.float64)
        e1_e1 += tl.sum(e1 * e1, 1).to(tl.float64)
        e2_e2 += tl.sum(e2 * e2, 1).to(tl.float64)
        w_e1 += tl.sum(w * e1, 1).to(tl.float64)
        w_e2 += tl.sum(w * e2, 1).to(tl.float64)
        e1_e2 += tl.sum(e1 * e2, 1).to(tl.float64)
        direct += tl.sum(e_direct * e_direct, 1).to(tl.float64)
    out = partial_ptr + program * 7
    tl.store(out, tl.sum(w_w, 0))
    tl.store(out + 1, tl.sum(e1_e1, 0))
    tl.store(out + 2, tl.sum(e2_e2, 0))
    tl.store(out + 3, tl.sum(w_e1, 0))
    tl.store(out + 4, tl.sum(w_e2, 0))
    tl.store(out + 5, tl.sum(e1_e2, 0))
    tl.store(out + 6, tl.sum(direct, 0))


@triton.jit
def finish_kernel(partial_ptr, sums_ptr, programs, MEASURED: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """SUMS, and what was measured beside them, from the programs' parts `[programs, MEASURED]`."""
    total = tl.zeros([PARTS, COLUMNS], tl.float64)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, programs, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        here = (part < programs) & (column < MEASURED)
        total += tl.load(partial_ptr + part * MEASURED + column, mask=here, other=0.0)
    total = tl.sum(total, 0)
    measured = tl.arange(0, COLUMNS)
    w_w = tl.sum(tl.where(measured == 0, total, 0.0), 0)
    e1_e1 = tl.sum(tl.where(measured == 1, total, 0.0), 0)
    e2_e2 = tl.sum(tl.where(measured == 2, total, 0.0), 0)
    w_e1 = tl.sum(tl.where(measured == 3, total, 0.0), 0)
    w_e2 = tl.sum(tl.where(measured == 4, total, 0.0), 0)
    e1_e2 = tl.sum(tl.where(measured == 5, total, 0.0), 0)
    tl.store(sums_ptr, w_w)
    tl.store(sums_ptr + 1, e1_e1)
    tl.store(sums_ptr + 2, e2_e2)
    tl.store(sums_ptr + 3, e1_e1 + 2 * e1_e2 + e2_e2)
    tl.store(sums_ptr + 4, w_e1)
    tl.store(sums_ptr + 5, w_e2)
    tl.store(sums_ptr + 6, e1_e2)
    tl.store(sums_ptr + 7, w_w + w_e1 + w_e2)
    tl.store(sums_ptr + 2 + measured, total, mask=(measured >= 6) & (measured < MEASURED))


@triton.jit
def _rounding_error(x, RULE: tl.constexpr):
    """MXFP4(x) - x of blocks `x` `[ROWS, 32]`, float32."""
    byte = mxfp4_scale_bytes(largest_magnitude(x, 1), RULE)
    return nearest_e2m1(x * e8m0_inverses(byte)[:, None]) * e8m0_values(byte)[:, None] - x
