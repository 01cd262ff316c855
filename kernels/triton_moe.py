"""SiLU-gated experts with packed FP4 weights in Triton: only the experts that tokens were sent to are decoded.

    y_th = triton_moe.packed_moe(x_th, w13, w13_scale, w13_global, w2, w2_scale, w2_global, weights, ids, ...)

The tokens of an expert are cut into groups; a program multiplies a group with a tile of its expert's rows, decoding
them as it goes, under the expert's own global scales, the gate's and the up projection's apart. Which group belongs to
whom is found on the card: nothing reaches the host, so a CUDA graph can hold the call, and its cost follows the number
of groups. Numbers as in `triton_gemm`; an expert's output is weighted and summed over the top k in float32, in the
order of the top k, so a token's result does not depend on which tokens share its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_elements import rounded_to
from .triton_gemm import TILES, fp4_product, round_activation
from .triton_launch import bytes_of, split_steps


class Groups(NamedTuple):
    """Assignments (token * k + place in its top k) in groups of at most `size` that share an expert.

    order: assignments sorted by expert, int64 `[A]`. expert, first, stop: of each group, its expert (-1: no such group)
    and its part of `order`, int32.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    stop: Tensor
    size: int


def packed_moe(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_input_scale: Tensor | None,
    w2_input_scale: Tensor | None,
    weight_format: str,
    activation_format: str,
    weight_on_input: bool,
) -> Tensor:
    """Experts of `x` `[T, H]`: w13 `[E, 2I, H/2]` (gate rows, then up rows), w2 `[E, H, I/2]`: `[T, H]`.

    w13_global: float32 `[E, 2]` (gate, up); w2_global: `[E]`. w13_input_scale: `[E]`, or `[E, 2]` where the gate's and
    the up projection's differ (the input is then rounded twice); w2_input_scale: `[E]`; NaN or None: each token's own.
    topk_ids `[T, k]`: -1 marks an expert of another rank. Returns the routed output alone, a fresh tensor.
    """
    tokens, k = topk_ids.shape
    experts, inner = w13.shape[0], w2.shape[-1] * 2
    if not tokens:
        return torch.zeros_like(x)
    groups = group_by_expert(topk_ids, experts)
    rows, per_row = _input_rows(x, topk_weights, topk_ids, w13_input_scale, activation_format, weight_on_input)
    gate_up = torch.ops.workbench_kernels.grouped_linear(
        rows, w13, w13_scale.view(torch.uint8), w13_global, *groups[:4], groups.size, per_row, tokens * k, weight_format
    )
    hidden = torch.nn.functional.silu(gate_up[:, :inner].float()).to(x.dtype) * gate_up[:, inner:]
    scale = None if w2_input_scale is None else _of_assignment(w2_input_scale, topk_ids)
    hidden = round_activation(hidden, activation_format, scale)
    y = torch.ops.workbench_kernels.grouped_linear(
        hidden.unsqueeze(0),
        w2,
        w2_scale.view(torch.uint8),
        None if w2_global is None else w2_global.reshape(experts, 1),
        *groups[:4],
        groups.size,
        1,
        tokens * k,
        weight_format,
    ).float()
    if not weight_on_input:
        y = y * topk_weights.reshape(-1, 1).float()
    return y.view(tokens, k, -1).sum(dim=1).to(x.dtype)


def group_by_expert(topk_ids: Tensor, experts: int) -> Groups:
    """Groups of the assignments `topk_ids` `[T, k]`; those of -1 are in none. Their number depends on shapes alone."""
    ids = topk_ids.reshape(-1).long()
    size = min(64, max(16, triton.next_power_of_2(triton.cdiv(ids.numel(), max(experts, 1)))))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids + 1, torch.ones_like(ids))
    starts = (counts.cumsum(0) - counts)[1:]
    counts = counts[1:]
    groups = (counts + size - 1) // size
    ends = groups.cumsum(0)
    group = torch.arange(min(ids.numel(), ids.numel() // size + experts), device=ids.device)
    expert = torch.searchsorted(ends, group, right=True)
    known = expert.clamp(max=experts - 1)
    first = starts[known] + (group - (ends - groups)[known]) * size
    stop = starts[known] + counts[known]
    expert = torch.where(expert < experts, expert, -1)
    return Groups(torch.argsort(ids, stable=True), expert.int(), first.int(), stop.int(), size)


def _input_rows(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    input_scale: Tensor | None,
    activation_format: str,
    weight_on_input: bool,
) -> tuple[Tensor, int]:
    """Rounded inputs `[S, R, H]`, one a shard of the weight or one for all, and how many assignments share a row."""
    k = topk_ids.shape[1]
    if not weight_on_input and (activation_format == "none" or input_scale is None):
        return round_activation(x, activation_format, None).unsqueeze(0), k
    rows = x.repeat_interleave(k, 0)
    if weight_on_input:
        rows = rows * topk_weights.reshape(-1, 1).to(x.dtype)
    if activation_format == "none" or input_scale is None:
        return round_activation(rows, activation_format, None).unsqueeze(0), 1
    columns = input_scale.reshape(input_scale.shape[0], -1).unbind(1)
    rounded = [round_activation(rows, activation_format, _of_assignment(c, topk_ids)) for c in columns]
    return torch.stack(rounded), 1


def _of_assignment(per_expert: Tensor, topk_ids: Tensor) -> Tensor:
    """One value an expert `[E]` to one an assignment `[A, 1]`; another rank's get some expert's."""
    return per_expert[topk_ids.reshape(-1).long().clamp(min=0)].unsqueeze(-1)


# ---- launch ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::grouped_linear", mutates_args=())
def _grouped_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    order: Tensor,
    expert: Tensor,
    first: Tensor,
    stop: Tensor,
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
) -> Tensor:
    """`[A, N]`: of each assignment, its row of `rows` `[S, R, K]` times its expert of `codes` `[E, N, K/2]`; zeros for
    another rank's. g `[E, shards]`: decode multipliers of equal parts of the N rows."""
    rows, (_, n, _) = rows.contiguous(), codes.shape
    k = rows.shape[-1]
    shards = max(rows.shape[0], 1 if g is None else g.shape[1])
    tile_rows, columns, warps, stages = TILES[size]
    tiles = triton.cdiv(n // shards, tile_rows)
    steps = triton.cdiv(k, columns)
    programs = max(1, expert.numel() * tiles * shards)
    split, steps_each = split_steps(steps, programs, rows.device)
    out = rows.new_zeros((split, assignments, n), dtype=torch.float32 if split > 1 else rows.dtype)
    _grouped_kernel[(expert.numel(), tiles * shards, split)](
        rows,
        bytes_of(codes),
        scales.contiguous(),
        rows if g is None else g.float().contiguous(),
        order,
        expert,
        first,
        stop,
        out,
        n,
        k,
        codes.shape[2],
        scales.shape[2],
        rows.shape[1] * k if rows.shape[0] > 1 else 0,
        0 if g is None else g.shape[1],
        assignments,
        per_row,
        steps_each,
        SHARDS=shards,
        FORMAT=weight_format,
        TOKENS=size,
        ROWS=tile_rows,
        COLUMNS=columns,
        EVEN=k % columns == 0,
        num_warps=warps,
        num_stages=stages,
    )
    return out[0] if split == 1 else out.sum(0).to(rows.dtype)


@_grouped_linear.register_fake
def _(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    order: Tensor,
    expert: Tensor,
    first: Tensor,
    stop: Tensor,
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
) -> Tensor:
    return rows.new_empty((assignments, codes.shape[1]))


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _grouped_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    g_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    stop_ptr,
    out_ptr,
    n,
    k,
    code_stride,
    scale_stride,
    x_shard_stride,
    g_stride,
    assignments,
    per_row,
    steps,
    SHARDS: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    expert = tl.load(expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(first_ptr + tl.program_id(0)) + tl.arange(0, TOKENS)
    token_here = place < tl.load(stop_ptr + tl.program_id(0))
    assignment = tl.load(order_ptr + place, mask=token_here, other=0)
    shard_rows = n // SHARDS
    tiles = tl.cdiv(shard_rows, ROWS)
    shard = tl.program_id(1) // tiles
    in_shard = (tl.program_id(1) % tiles) * ROWS + tl.arange(0, ROWS)
    row_here = in_shard < shard_rows
    row = shard * shard_rows + in_shard
    part = tl.program_id(2)
    g = tl.zeros([ROWS], tl.float32)
    if FORMAT == "nvfp4":
        g += tl.load(g_ptr + expert * g_stride + tl.minimum(shard, g_stride - 1))
    product = fp4_product(
        x_ptr + shard.to(tl.int64) * x_shard_stride + (assignment // per_row) * k,
        token_here,
        tl.zeros([TOKENS], tl.float32),
        codes_ptr + (expert * n + row) * code_stride,
        scales_ptr + (expert * n + row) * scale_stride,
        row_here,
        g,
        part * steps * COLUMNS,
        tl.minimum((part + 1) * steps * COLUMNS, k),
        k,
        code_stride,
        scale_stride,
        FORMAT,
        "none",
        TOKENS,
        ROWS,
        COLUMNS,
        EVEN,
    )
    at = (part.to(tl.int64) * assignments + assignment[None, :]) * n + row[:, None]
    here = token_here[None, :] & row_here[:, None]
    tl.store(out_ptr + at, rounded_to(product, out_ptr.dtype.element_ty), mask=here)
