"""Many tokens times packed FP4 weights on Hopper: weights are decoded in registers, tokens come from shared memory.

    x_ordered = triton_gemm_wgmma.order_tokens(x_mk)
    y_an = triton_gemm_wgmma.grouped(x_ordered, ...)

A warpgroup multiplies 64 rows of the weight with up to 256 tokens at the full rate of the matrix units (wgmma), whose
left operand may lie in registers. The right one must lie in shared memory, so the values of x are first laid in the
order in which codes are multiplied (`triton_gemm_decode`), by a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_configs import WideConfig
from .triton_gemm_decode import (
    QUICK_BYTE,
    aligned,
    block_steps,
    code_layout,
    codes_of,
    decoded_pairs,
    matrix_ends,
    multiplied,
    multiplier_strides,
    scale_layout,
    spread_steps,
    stored_scale_layout,
    word_layout,
)
from .triton_gemm_sum import sum_parts
from .triton_launch import bytes_of

__all__ = ["aligned", "grouped", "linear", "order_tokens", "supports"]

# Newer versions of Triton name these otherwise.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


def supports(device: torch.device, dtype: torch.dtype, k: int) -> bool:
    """Whether these kernels run on `device` for inputs of `dtype` with K of `k`."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and dtype in (torch.bfloat16, torch.float16) and k % 128 == 0


def order_tokens(x: Tensor) -> Tensor:
    """x `[.., K]` with the 128 values of each chunk of K in the order in which the kernel multiplies them."""
    x = x.contiguous()
    out, count = torch.empty_like(x), x.numel()
    if count:
        _order_kernel[(triton.cdiv(count, 4096),)](
            x.view(torch.int16), out.view(torch.int16), count, TILE=4096, num_warps=4
        )
    return out


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    widths: list[int],
    weight_format: str,
    config: WideConfig,
) -> Tensor:
    """Ordered x `[M, K]` times codes `[N, K/2]`: `[M, N]`; the rest as `triton_gemm_registers.linear` has it."""
    (m, k), n = x.shape, codes.shape[0]
    config = config._replace(split=triton.cdiv(k // 128, triton.cdiv(k // 128, config.split)))  # no part is empty
    out = x.new_empty((config.split, m, n), dtype=torch.float32 if config.split > 1 else x.dtype)
    _launch(
        triton.cdiv(m, config.tokens),
        False,
        x.unsqueeze(0),
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
    assignments: int,
    per_row: int,
    weight_format: str,
    config: WideConfig,
) -> Tensor:
    """Of each assignment, its row of ordered x `[S, R, K]` times its expert of codes `[E, N, K/2]`: `[A, N]`.

    groups: `triton_moe.group_by_expert`'s for config.tokens; the rest as `triton_gemm_registers.grouped` has it.
    """
    n = codes.shape[1]
    shards = max(x.shape[0], 1 if g is None else g.shape[1])
    out = x.new_empty((1, assignments, n))
    _launch(
        groups[1].numel(),
        True,
        x,
        (codes, scales, g),
        matrix_ends([n // shards] * shards),
        (0 if g is None else g.shape[1], int(g is not None and g.shape[1] > 1), 0),
        tuple(groups),
        assignments,
        per_row,
        out,
        weight_format,
        config,
    )
    return out[0]


def _launch(
    count: int,
    is_grouped: bool,
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor | None],
    ends: list[int],
    g_strides: tuple[int, int, int],
    places: tuple[Tensor, ...],
    m: int,
    per_row: int,
    out: Tensor,
    weight_format: str,
    config: WideConfig,
) -> None:
    codes, scales, g = weight
    tokens, warpgroups, split, stages = config
    n, k = codes.shape[-2], x.shape[-1]
    _wgmma_kernel[(triton.cdiv(n, 64 * warpgroups), count, split)](
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
        triton.cdiv(k // 128, split),
        GROUPED=is_grouped,
        FORMAT=weight_format,
        TOKENS=tokens,
        WARPGROUPS=warpgroups,
        STAGES=stages,
        num_warps=4 * warpgroups,
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _order_kernel(x_ptr, out_ptr, count, TILE: tl.constexpr):
    """Value (j, s, t, b) of a chunk is the value (t, s, b, j) of x: of 4, 4, 4 and 2."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = at & 127
    source = (((here >> 1) & 3) << 5) | (((here >> 3) & 3) << 3) | ((here & 1) << 2) | (here >> 5)
    x = tl.load(x_ptr + (at - here + source), mask=at < count, other=0)
    tl.store(out_ptr + at, x, mask=at < count)


@gluon.jit
def _wgmma_kernel(
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
    GROUPED: gl.constexpr,
    FORMAT: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    WARPS: gl.constexpr = 4 * WARPGROUPS
    ROWS: gl.constexpr = 64 * WARPGROUPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    words_at: gl.constexpr = word_layout(1, WARPS, ROWS)
    scales_at: gl.constexpr = stored_scale_layout(1, WARPS, ROWS)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty

    # Which expert, and which rows of x and of out.
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, copied))
    token_out = gl.arange(0, TOKENS, gl.SliceLayout(0, accumulator))
    if GROUPED:
        expert = gl.load(expert_ptr + gl.program_id(1))
        if expert < 0:
            return
        first = gl.load(first_ptr + gl.program_id(1))
        stop = gl.load(stop_ptr + gl.program_id(1))
        here = token < stop - first
        here_out = token_out < stop - first
        token = gl.load(order_ptr + first + token, mask=here, other=0)
        token_out = gl.load(order_ptr + first + token_out, mask=here_out, other=0)
        row_base = expert.to(gl.int64) * n
    else:
        expert = 0
        token += gl.program_id(1) * TOKENS
        token_out += gl.program_id(1) * TOKENS
        here = token < m
        here_out = token_out < m
        row_base = 0

    # Rows of the weight, their steps and the values of K.
    row_0 = gl.program_id(0) * ROWS
    shard_0 = (row_0 >= end_0).to(gl.int32) + (row_0 >= end_1).to(gl.int32) + (row_0 >= end_2).to(gl.int32)
    row_codes = row_0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, words_at)))[None, :, None]
    at_codes = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, words_at)))[None, None, :]
    row_scales = row_0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, scales_at)))[None, :, None]
    at_scales = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, scales_at)))[None, None, :]
    chunk = gl.program_id(2) * steps
    chunks = gl.minimum(steps, k // 128 - chunk)
    # Rows past the last read the last: their results are not stored.
    code_ptrs = codes_ptr + (row_base + gl.minimum(row_codes, n - 1)).to(gl.int64) * code_stride
    code_ptrs += chunk * 16 + at_codes
    scale_ptrs = scales_ptr + (row_base + gl.minimum(row_scales, n - 1)).to(gl.int64) * scale_stride
    scale_ptrs += chunk * 4 + at_scales
    x_rows = x_ptr + shard_0.to(gl.int64) * x_shard_stride + (token // per_row).to(gl.int64) * k + chunk * 128
    x_ptrs = x_rows[:, None] + gl.arange(0, 128, gl.SliceLayout(0, copied))[None, :]
    x_shared = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, 128], shared)
    inputs = (x_shared, x_ptrs, here, code_ptrs, scale_ptrs, chunks)
    total, largest = _sums(*inputs, FORMAT, TOKENS, WARPGROUPS, STAGES, True)
    if FORMAT == "mxfp4":  # noqa: SIM102 (the inner one is the card's)
        if largest > QUICK_BYTE:  # a scale above 2, or NaN: once more, the general way
            total, largest = _sums(*inputs, FORMAT, TOKENS, WARPGROUPS, STAGES, False)

    row_out = row_0 + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator))
    if FORMAT == "nvfp4":
        shard = (row_out >= end_0).to(gl.int32) + (row_out >= end_1).to(gl.int32) + (row_out >= end_2).to(gl.int32)
        g_row = expert * g_expert_stride + shard * g_step + gl.minimum(row_out, n - 1) * g_row_step
        total = multiplied(total, gl.load(g_ptr + g_row)[:, None], dtype)
    out_ptrs = out_ptr + ((gl.program_id(2) * m + token_out).to(gl.int64) * n)[None, :] + row_out[:, None]
    gl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=here_out[None, :] & (row_out < n)[:, None])


@gluon.jit
def _sums(
    x_shared,
    x_ptrs,
    here,
    code_ptrs,
    scale_ptrs,
    chunks,
    FORMAT: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    QUICK: gl.constexpr,
):
    """Rows times tokens over `chunks` chunks of K: float32 `[ROWS, TOKENS]`; and the largest E8M0 scale (mxfp4)."""
    BLOCK: gl.constexpr = 16 if FORMAT == "nvfp4" else 32
    WARPS: gl.constexpr = 4 * WARPGROUPS
    ROWS: gl.constexpr = 64 * WARPGROUPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, TOKENS, 16]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    codes_at: gl.constexpr = code_layout(1, WARPS, ROWS)
    scales_spread: gl.constexpr = scale_layout(1, WARPS, ROWS, BLOCK)
    steps_at: gl.constexpr = gl.SliceLayout(3, scales_spread)
    dtype: gl.constexpr = x_ptrs.dtype.element_ty
    for stage in gl.static_range(STAGES - 1):
        _copy_tokens(x_shared, x_ptrs, here, stage, stage, chunks)
    total = gl.zeros([ROWS, TOKENS], gl.float32, accumulator)
    codes = gl.load(code_ptrs)
    scales = gl.load(scale_ptrs)
    largest = scales.to(gl.int32)
    for step in range(chunks):
        spread = spread_steps(block_steps(scales, 1, ROWS, FORMAT, steps_at), 1, ROWS, BLOCK, codes_at, scales_spread)
        w0, w1, w2, w3 = decoded_pairs(codes_of(codes, 1, ROWS, codes_at), spread, FORMAT, dtype, QUICK)
        w = _left(gl.join(gl.join(w0, w2), gl.join(w1, w3)), ROWS, left)
        # The next codes are on their way while these are multiplied; the last step reads its own once more.
        ahead = gl.where(step + 1 < chunks, 1, 0)
        code_ptrs += ahead * 16
        scale_ptrs += ahead * 4
        codes = gl.load(code_ptrs)
        scales = gl.load(scale_ptrs)
        if FORMAT == "mxfp4":
            largest = gl.maximum(largest, scales.to(gl.int32))
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # each thread's own copies, before all threads meet: the matrix unit reads past the cache
        _barrier()
        product = warpgroup_mma(w, x_shared.index(step % STAGES).permute((1, 0)), total, is_async=True)
        ahead = step + STAGES - 1
        _copy_tokens(x_shared, x_ptrs, here, ahead, ahead % STAGES, chunks)
        # The assembler takes w's registers to be free once the product has started, and would decode the next weights
        # into them: the product must end before that. Meanwhile the multiprocessor's other programs decode.
        total = warpgroup_mma_wait(0, deps=(product,))
    async_copy.wait_group(0)
    if FORMAT == "mxfp4":
        most = gl.max(gl.reshape(largest, [ROWS * 4]), 0)
    else:
        most = 0
    return total, most


@gluon.jit
def _left(w, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pairs `[1, ROWS, 32, 2, 2]` of `decoded_pairs` as the left operand, with `order_tokens`' order of columns."""
    w = gl.permute(gl.reshape(w, [ROWS, 4, 2, 2, 2, 2, 2]), [0, 5, 6, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(w, [ROWS, 128]), LAYOUT, assert_trivial=True)


@gluon.jit
def _copy_tokens(x_shared, x_ptrs, here, chunk, stage, chunks):
    """Starts the copy of a chunk of the tokens, as one group of copies, which past the last chunk is empty."""
    _copy(x_shared.index(stage), x_ptrs + chunk * 128, here[:, None] & (chunk < chunks))
    async_copy.commit_group()
