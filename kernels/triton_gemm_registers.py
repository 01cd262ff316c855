"""Few tokens times packed FP4 weights on NVIDIA's cards: every code goes from memory straight to the matrix unit.

    y_an = triton_gemm_registers.product(x_srk, codes, scales, g, Rows(...), "nvfp4", config)

The weight is the left operand, so that 8 tokens fill an instruction. The warps of a program take the chunks of K in
turn and add up at the end, so that no partial result leaves the program; where the rows alone do not fill the card, K
is also split over programs, whose parts a second kernel adds in order. Results are deterministic.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .triton_configs import Config, tokens_tile
from .triton_gemm_decode import (
    QUICK_BYTE,
    aligned,
    block_steps,
    code_layout,
    codes_of,
    decoded_pairs,
    left_operand,
    matrix_ends,
    multiplied,
    multiplier_strides,
    right_operands,
    row_groups,
    scale_layout,
    spread_steps,
    stored_scale_layout,
    supports,
    token_layout,
    word_layout,
)
from .triton_gemm_sum import sum_parts
from .triton_launch import bytes_of

__all__ = ["aligned", "grouped", "linear", "supports", "tokens_tile"]


def linear(
    x: Tensor, codes: Tensor, scales: Tensor, g: Tensor | None, widths: list[int], weight_format: str, config: Config
) -> Tensor:
    """x `[M, K]` (bfloat16, float16) times codes `[N, K/2]`: `[M, N]`. The N rows are `widths` rows of up to 4
    matrices; g: float32 decode multipliers, one for all, one a matrix or one a row (nvfp4)."""
    m, n = x.shape[0], codes.shape[0]
    size = tokens_tile(m)
    out = x.new_empty((config.split, m, n), dtype=torch.float32 if config.split > 1 else x.dtype)
    _launch(
        (triton.cdiv(m, size), "tokens", size),
        x.contiguous().unsqueeze(0),
        (codes, scales, g),
        matrix_ends(widths),
        multiplier_strides(g, n),
        (x, x, x, x),
        m,
        1,
        out,
        weight_format,
        config,
    )
    return sum_parts(out, x.dtype)


def grouped(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    groups: list[Tensor],
    size: int,
    assignments: int,
    per_row: int,
    weight_format: str,
    config: Config,
) -> Tensor:
    """Of each assignment, its row of x `[S, R, K]` times its expert of codes `[E, N, K/2]`: `[A, N]`.

    groups: the assignments in groups of at most `size` (`triton_moe.group_by_expert`), or, for size 0, their experts
    alone (int `[A]`, -1: another rank's), each then multiplied by itself.
    per_row: assignments that share a row of x. g `[E, shards]`: decode multipliers of equal parts of the N rows
    (nvfp4); S is 1 or shards. Rows of another rank's assignments are not written.
    """
    n = codes.shape[1]
    shards = max(x.shape[0], 1 if g is None else g.shape[1])
    out = x.new_empty((config.split, assignments, n), dtype=torch.float32 if config.split > 1 else x.dtype)
    launch = (groups[1].numel(), "groups", size) if size else (assignments, "assignments", 8)
    _launch(
        launch,
        x.contiguous(),
        (codes, scales, g),
        matrix_ends([n // shards] * shards),
        (0 if g is None else g.shape[1], int(g is not None and g.shape[1] > 1), 0),
        tuple(groups) if size else (groups[0],) * 4,
        assignments,
        per_row,
        out,
        weight_format,
        config,
    )
    return sum_parts(out, x.dtype)


# ---- launches --------------------------------------------------------------------------------------------------------


def _launch(
    launch: tuple[int, str, int],
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor | None],
    ends: list[int],
    g_strides: tuple[int, int, int],
    places: tuple[Tensor, ...],
    m: int,
    per_row: int,
    out: Tensor,
    weight_format: str,
    config: Config,
) -> None:
    codes, scales, g = weight
    count, mode, tokens = launch
    n, k = codes.shape[-2], x.shape[-1]
    slices, row_warps, groups, split, registers = config
    steps = triton.cdiv(triton.cdiv(k, 128), slices * split)
    _product_kernel[(triton.cdiv(n, 16 * row_warps * groups), count, split)](
        x,
        bytes_of(codes).view(torch.int32),
        bytes_of(scales).view(torch.int16 if weight_format == "nvfp4" else torch.uint8),
        x if g is None else g.float().contiguous(),
        *places,
        out,
        m,
        n,
        k,
        codes.shape[-1] // 4,
        scales.shape[-1] // (2 if weight_format == "nvfp4" else 1),
        x.shape[1] * k if x.shape[0] > 1 else 0,
        *ends,
        *g_strides,
        per_row,
        steps,
        MODE=mode,
        FORMAT=weight_format,
        SLICES=slices,
        ROW_WARPS=row_warps,
        GROUPS=groups,
        TOKENS=tokens,
        EVEN=k == 128 * steps * slices * split,
        num_warps=slices * row_warps,
        maxnreg=registers,
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _product_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    g_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    stop_ptr,
    out_ptr,
    m,
    n,
    k,
    code_stride,
    scale_stride,
    x_shard_stride,
    end_0,
    end_1,
    end_2,
    g_expert_stride,
    g_step,
    g_row_step,
    per_row,
    steps,
    MODE: gl.constexpr,
    FORMAT: gl.constexpr,
    SLICES: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    EVEN: gl.constexpr,
):
    GROUP: gl.constexpr = 16 * ROW_WARPS
    ROWS: gl.constexpr = GROUP * GROUPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SLICES, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    words_at: gl.constexpr = word_layout(SLICES, ROW_WARPS, ROWS)
    scales_at: gl.constexpr = stored_scale_layout(SLICES, ROW_WARPS, ROWS)
    tokens_at: gl.constexpr = token_layout(SLICES, ROW_WARPS, TOKENS)
    out_at: gl.constexpr = gl.SliceLayout(0, accumulator)

    # Which expert, and which rows of x and of out.
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, tokens_at)))[None, :, None]
    token_out = gl.arange(0, TOKENS, gl.SliceLayout(0, out_at))[None, :]
    if MODE == "tokens":
        expert = 0
        token += gl.program_id(1) * TOKENS
        token_out += gl.program_id(1) * TOKENS
        here = token < m
        here_out = token_out < m
    elif MODE == "assignments":
        expert = gl.load(expert_ptr + gl.program_id(1)).to(gl.int32)
        if expert < 0:
            return
        here = token < 1
        here_out = token_out < 1
        token += gl.program_id(1)
        token_out += gl.program_id(1)
    else:
        expert = gl.load(expert_ptr + gl.program_id(1))
        if expert < 0:
            return
        first = gl.load(first_ptr + gl.program_id(1))
        stop = gl.load(stop_ptr + gl.program_id(1))
        here = token < stop - first
        here_out = token_out < stop - first
        token = gl.load(order_ptr + first + token, mask=here, other=0)
        token_out = gl.load(order_ptr + first + token_out, mask=here_out, other=0)

    # Rows of the weight, their steps and the values of K.
    row_0 = gl.program_id(0) * ROWS
    shard_0 = (row_0 >= end_0).to(gl.int32) + (row_0 >= end_1).to(gl.int32) + (row_0 >= end_2).to(gl.int32)
    slice_codes = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, words_at)))[:, None, None]
    row_codes = row_0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, words_at)))[None, :, None]
    at_codes = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, words_at)))[None, None, :]
    slice_scales = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, scales_at)))[:, None, None]
    row_scales = row_0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, scales_at)))[None, :, None]
    at_scales = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, scales_at)))[None, None, :]
    slice_tokens = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, tokens_at)))[:, None, None]
    at_tokens = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, tokens_at)))[None, None, :]
    chunk = gl.program_id(2) * steps * SLICES
    at_codes += (chunk + slice_codes) * 16
    at_scales += (chunk + slice_scales) * 4
    at_tokens += (chunk + slice_tokens) * 128
    row_base = expert.to(gl.int64) * n if MODE != "tokens" else 0
    # Rows past the last read the last: their results are not stored.
    code_rows = codes_ptr + (row_base + gl.minimum(row_codes, n - 1)).to(gl.int64) * code_stride
    scale_rows = scales_ptr + (row_base + gl.minimum(row_scales, n - 1)).to(gl.int64) * scale_stride
    x_rows = x_ptr + shard_0.to(gl.int64) * x_shard_stride + (token // per_row).to(gl.int64) * k
    inputs = (x_rows, at_tokens, here, code_rows, at_codes, scale_rows, at_scales, k, code_stride, scale_stride, steps)
    out, largest = _sums(*inputs, FORMAT, SLICES, ROW_WARPS, GROUPS, TOKENS, EVEN, True)
    if FORMAT == "mxfp4":  # noqa: SIM102 (the inner one is the card's)
        if largest > QUICK_BYTE:  # a scale above 2, or NaN: once more, the general way
            out, largest = _sums(*inputs, FORMAT, SLICES, ROW_WARPS, GROUPS, TOKENS, EVEN, False)

    row_out = gl.arange(0, GROUP, gl.SliceLayout(1, out_at))[:, None]
    rows_out = out_ptr + (gl.program_id(2) * m + token_out).to(gl.int64) * n
    for i in gl.static_range(GROUPS):
        row = row_0 + i * GROUP + row_out
        total = gl.sum(out[i], 0)
        if FORMAT == "nvfp4":
            shard = (row >= end_0).to(gl.int32) + (row >= end_1).to(gl.int32) + (row >= end_2).to(gl.int32)
            g_row = expert * g_expert_stride + shard * g_step + gl.minimum(row, n - 1) * g_row_step
            total = multiplied(total, gl.load(g_ptr + g_row), x_ptr.dtype.element_ty)
        gl.store(rows_out + row, total.to(out_ptr.dtype.element_ty), mask=here_out & (row < n))


@gluon.jit
def _sums(
    x_rows,
    at_tokens,
    here,
    code_rows,
    at_codes,
    scale_rows,
    at_scales,
    k,
    code_stride,
    scale_stride,
    steps,
    FORMAT: gl.constexpr,
    SLICES: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    GROUPS: gl.constexpr,
    TOKENS: gl.constexpr,
    EVEN: gl.constexpr,
    QUICK: gl.constexpr,
):
    """Rows times tokens over this program's part of K: GROUPS tensors of float32 `[SLICES, GROUP, TOKENS]`; and the
    largest E8M0 scale (mxfp4)."""
    BLOCK: gl.constexpr = 16 if FORMAT == "nvfp4" else 32
    GROUP: gl.constexpr = 16 * ROW_WARPS
    ROWS: gl.constexpr = GROUP * GROUPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SLICES, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, accumulator, 4)
    codes_at: gl.constexpr = code_layout(SLICES, ROW_WARPS, ROWS)
    scales_spread: gl.constexpr = scale_layout(SLICES, ROW_WARPS, ROWS, BLOCK)
    steps_at: gl.constexpr = gl.SliceLayout(3, scales_spread)
    dtype: gl.constexpr = x_rows.dtype.element_ty
    out = (gl.zeros([SLICES, GROUP, TOKENS], gl.float32, accumulator),) * GROUPS
    codes = _loaded(code_rows, at_codes, code_stride, EVEN)
    scales = _loaded(scale_rows, at_scales, scale_stride, EVEN)
    largest = scales.to(gl.int32)
    for step in range(steps):
        # The next codes are on their way while these are multiplied; the last step reads its own once more.
        ahead = SLICES * gl.where(step + 1 < steps, 1, 0)
        x = gl.load(x_rows + at_tokens, mask=here if EVEN else here & (at_tokens < k), other=0.0)
        at_codes += ahead * 16
        at_scales += ahead * 4
        at_tokens += ahead * 128
        next_codes = _loaded(code_rows, at_codes, code_stride, EVEN)
        next_scales = _loaded(scale_rows, at_scales, scale_stride, EVEN)
        x0, x1, x2, x3 = right_operands(x, SLICES, TOKENS, right)
        steps_spread = spread_steps(
            block_steps(scales, SLICES, ROWS, FORMAT, steps_at), SLICES, ROWS, BLOCK, codes_at, scales_spread
        )
        code_groups = row_groups(
            gl.reshape(codes_of(codes, SLICES, ROWS, codes_at), [SLICES, GROUPS, GROUP, 32]), GROUPS
        )
        step_groups = row_groups(gl.reshape(steps_spread, [SLICES, GROUPS, GROUP, 32]), GROUPS)
        sums = ()
        for i in gl.static_range(GROUPS):
            w0, w1, w2, w3 = decoded_pairs(code_groups[i], step_groups[i], FORMAT, dtype, QUICK)
            total = mma_v2(left_operand(w0, SLICES, GROUP, left), x0, out[i])
            total = mma_v2(left_operand(w1, SLICES, GROUP, left), x1, total)
            total = mma_v2(left_operand(w2, SLICES, GROUP, left), x2, total)
            total = mma_v2(left_operand(w3, SLICES, GROUP, left), x3, total)
            sums = sums + (total,)  # noqa: RUF005 (Triton's language has no unpacking)
        out = sums
        codes = next_codes
        scales = next_scales
        if FORMAT == "mxfp4":
            largest = gl.maximum(largest, scales.to(gl.int32))
    if FORMAT == "mxfp4":
        most = gl.max(gl.reshape(largest, [SLICES * ROWS * 4]), 0)
    else:
        most = 0
    return out, most


@gluon.jit
def _loaded(rows, at, stop, EVEN: gl.constexpr):
    if EVEN:
        value = gl.load(rows + at)
    else:
        value = gl.load(rows + at, mask=at < stop, other=0.0)
    return value
