"""SiLU-gated experts with packed FP4 weights in Triton: only the experts that tokens were sent to are decoded.

    y_th = triton_moe.packed_moe(x_th, w13, w13_scale, w13_global, w2, w2_scale, w2_global, weights, ids, ...)

The tokens of an expert are cut into groups; a program multiplies a group with a tile of its expert's rows, decoding
them as it goes, under the expert's own global scales, the gate's and the up projection's apart. Which group belongs to
whom is found on the card: nothing reaches the host, so a CUDA graph can hold the call, and its cost follows the number
of groups. Numbers as in `triton_gemm`; an expert's output is weighted and summed over the top k in float32, in the
order of the top k, so a token's result does not depend on which tokens share its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_configs, triton_tuning
from .triton_elements import rounded_to, widened
from .triton_gemm import fp4_product, round_activation
from .triton_gemm_sum import sum_parts
from .triton_launch import bytes_of, split_steps
from .triton_routes import experts_key, experts_plans, gluon_kernels, gluon_module, gluon_routes, multiplied
from .triton_tuning import Plan

ALONE = 128  # at most so many assignments are multiplied each alone


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
    round_hidden: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    """Experts of `x` `[T, H]`: w13 `[E, 2I, H/2]` (gate rows, then up rows), w2 `[E, H, I/2]`: `[T, H]`.

    w13_global: float32 `[E, 2]` (gate, up); w2_global: `[E]`. w13_input_scale: `[1]` for all experts (the input is then
    rounded once a token), `[E]`, or `[E, 2]` where the gate's and the up projection's differ (rounded twice);
    w2_input_scale: `[1]` or `[E]`; NaN or None: each token's own. topk_ids `[T, k]`: -1 marks an expert of another
    rank. round_hidden(h `[A, I]`, its scale) replaces the rounding of w2's input, for ranks that split I and must agree
    on a token's scale. Returns the routed output alone, a fresh tensor.
    """
    tokens, k = topk_ids.shape
    experts, inner = w13.shape[0], w2.shape[-1] * 2
    if not tokens:
        return torch.zeros_like(x)
    ids = topk_ids.reshape(-1).int()
    rows, per_row = _input_rows(x, topk_weights, topk_ids, w13_input_scale, activation_format, weight_on_input)
    fused, wide = (
        (inner % 128 == 0 or rows.shape[0] == 1)  # a tile of rows lies in one shard
        and all(
            gluon_kernels(name, rows.device, rows.dtype, 2 * w.shape[-1], w, scale) is not None
            for w, scale in ((w13, w13_scale), (w2, w2_scale))
        )
        for name in ("registers", "wgmma")
    )
    groups, size = _grouping(ids, experts, fused, wide)
    gate_up = torch.ops.workbench_kernels.grouped_linear(
        rows, w13, w13_scale.view(torch.uint8), w13_global, groups, size, per_row, tokens * k, weight_format
    )
    hidden = torch.ops.workbench_kernels.gated(gate_up)
    scale = None if w2_input_scale is None else _of_assignment(w2_input_scale, topk_ids)
    if round_hidden is None:
        hidden = round_activation(hidden, activation_format, scale)
    else:
        hidden = round_hidden(hidden, scale)
    y = torch.ops.workbench_kernels.grouped_linear(
        hidden.unsqueeze(0),
        w2,
        w2_scale.view(torch.uint8),
        None if w2_global is None else w2_global.reshape(experts, 1),
        groups,
        size,
        1,
        tokens * k,
        weight_format,
    )
    return torch.ops.workbench_kernels.combined(y, None if weight_on_input else topk_weights, ids.view(tokens, k))


def group_by_expert(ids: Tensor, experts: int, size: int) -> list[Tensor]:
    """Assignments of experts `ids` (int32 `[A]`) in groups of at most `size` that share an expert; those of -1 in none.

    Returns int32 tensors: the assignments sorted by expert `[A]`, and of each group its expert (-1: no such group) and
    its part of them, first and stop. Their lengths depend on shapes alone.
    """
    a = ids.numel()
    count = min(a, a // size + experts)
    ranks, order = torch.empty_like(ids), torch.empty_like(ids)
    counts, starts, ends = (ids.new_empty(experts) for _ in range(3))
    expert, first, stop = (ids.new_empty(count) for _ in range(3))
    padded = triton.next_power_of_2(experts)
    _rank_kernel[(experts,)](ids, ranks, counts, a, TILE=1024, num_warps=4)
    _starts_kernel[(1,)](counts, starts, ends, experts, size, EXPERTS=padded, num_warps=4)
    _order_kernel[(triton.cdiv(max(a, count), 256),)](
        ids, ranks, counts, starts, ends, order, expert, first, stop, a, count, experts, size, TILE=256, num_warps=4
    )
    return [order, expert, first, stop]


def _grouping(ids: Tensor, experts: int, fused: bool, wide: bool) -> tuple[list[Tensor], int]:
    """What `grouped_linear` takes for assignments of the experts `ids`: tensors and the size of a group.

    fused: `triton_gemm_registers` multiplies groups of up to 32; wide: `triton_gemm_wgmma` those of 32 and more.
    """
    if fused and ids.numel() <= ALONE:
        return [ids], 0
    each = triton.next_power_of_2(triton.cdiv(ids.numel(), max(experts, 1)))
    if wide and each >= 16:
        size = min(128, max(32, each))
    else:
        size = min(32, max(8, each)) if fused else min(64, max(16, each))
    return group_by_expert(ids, experts, size), size


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
    if input_scale is not None and input_scale.numel() == 1:
        input_scale = input_scale.reshape(1, 1)
    one_scale = input_scale is None or input_scale.numel() == 1
    if not weight_on_input and (activation_format == "none" or one_scale):
        return round_activation(x, activation_format, input_scale).unsqueeze(0), k
    rows = x.repeat_interleave(k, 0)
    if weight_on_input:
        rows = rows * topk_weights.reshape(-1, 1).to(x.dtype)
    if activation_format == "none" or input_scale is None or one_scale:
        return round_activation(rows, activation_format, input_scale).unsqueeze(0), 1
    columns = input_scale.reshape(input_scale.shape[0], -1).unbind(1)
    rounded = [round_activation(rows, activation_format, _of_assignment(c, topk_ids)) for c in columns]
    return torch.stack(rounded), 1


def _of_assignment(per_expert: Tensor, topk_ids: Tensor) -> Tensor:
    """One value an expert `[E]` to one an assignment `[A, 1]`; another rank's get some expert's. `[1]`: for all."""
    if per_expert.numel() == 1:
        return per_expert.reshape(1, 1)
    return per_expert[topk_ids.reshape(-1).long().clamp(min=0)].unsqueeze(-1)


# ---- launch ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::grouped_linear", mutates_args=())
def _grouped_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    groups: list[Tensor],
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
) -> Tensor:
    """`[A, N]`: of each assignment, its row of `rows` `[S, R, K]` times its expert of `codes` `[E, N, K/2]`; anything
    for another rank's. groups: `group_by_expert`'s for `size`, or, for size 0, the experts alone. g `[E, shards]`:
    decode multipliers of equal parts of the N rows."""
    k = rows.shape[-1]
    routes = gluon_routes(rows, codes, scales)

    def multiply(plan: Plan) -> Tensor:
        return _grouped_as(plan, rows, codes, scales, g, groups, size, per_row, assignments, weight_format)

    tuner = triton_tuning.tuner(rows.device)
    if tuner is None:
        return multiply(experts_plans(size, k, routes)[0])
    key = experts_key(codes, k, assignments, size, rows.shape[0], weight_format, rows.dtype)
    return multiply(tuner.plan(key, lambda: experts_plans(size, k, routes), multiply, lambda y: y[multiplied(groups)]))


@_grouped_linear.register_fake
def _(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    groups: list[Tensor],
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
) -> Tensor:
    return rows.new_empty((assignments, codes.shape[1]))


def _grouped_as(
    plan: Plan,
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    groups: list[Tensor],
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
) -> Tensor:
    """`grouped_linear` as `plan` says."""
    k, numbers = rows.shape[-1], plan.numbers
    if plan.route == "portable":
        tile = triton_configs.Tile(*numbers) if numbers else triton_configs.TILES[size]
        return _portable(rows, codes, scales, g, groups, size, per_row, assignments, weight_format, tile)
    kernels = gluon_module(plan.route)
    assert kernels is not None
    if plan.route == "wgmma":
        wide = triton_configs.WideConfig(*numbers) if numbers else triton_configs.wgmma_experts(size, k)
        rows = kernels.order_tokens(rows)
        return kernels.grouped(rows, codes, scales, g, groups, assignments, per_row, weight_format, wide)
    if numbers:
        config = triton_configs.Config(*numbers)
    else:
        count = groups[1].numel() if size else assignments
        config = triton_configs.registers(rows.device, codes.shape[1], count, k, size or 8)
    return kernels.grouped(rows, codes, scales, g, groups, size, assignments, per_row, weight_format, config)


def _portable(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    groups: list[Tensor],
    size: int,
    per_row: int,
    assignments: int,
    weight_format: str,
    tile: triton_configs.Tile,
) -> Tensor:
    """`grouped_linear` in plain Triton."""
    order, expert, first, stop = groups
    rows, n, k = rows.contiguous(), codes.shape[1], rows.shape[-1]
    shards = max(rows.shape[0], 1 if g is None else g.shape[1])
    tile_rows, columns, warps, stages, parts = tile
    tiles = triton.cdiv(n // shards, tile_rows)
    programs = max(1, expert.numel() * tiles * shards)
    split, steps_each = split_steps(triton.cdiv(k, columns), programs, rows.device, parts)
    out = rows.new_empty((split, assignments, n), dtype=torch.float32 if split > 1 else rows.dtype)
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
    return sum_parts(out, rows.dtype)


@torch.library.custom_op("workbench_kernels::gated", mutates_args=())
def _gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[A, 2 * I]`, rounded to its dtype after each of the two: `[A, I]`."""
    a, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((a, inner))
    tile = min(1024, triton.next_power_of_2(inner))
    _gated_kernel[(a, triton.cdiv(inner, tile))](gate_up.contiguous(), out, inner, TILE=tile, num_warps=4)
    return out


@_gated.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@torch.library.custom_op("workbench_kernels::combined", mutates_args=())
def _combined(y: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
    """Rows `y` `[T * k, H]` weighted and added over each token's k, in order and in float32: `[T, H]`."""
    (tokens, k), hidden = ids.shape, y.shape[1]
    out = y.new_empty((tokens, hidden))
    tile = 1024
    _combined_kernel[(tokens, triton.cdiv(hidden, tile))](
        y,
        y if weights is None else weights.contiguous(),
        ids,
        out,
        hidden,
        WEIGHTED=weights is not None,
        K=k,
        TILE=tile,
        num_warps=4,
    )
    return out


@_combined.register_fake
def _(y: Tensor, weights: Tensor | None, ids: Tensor) -> Tensor:
    return y.new_empty((ids.shape[0], y.shape[1]))


# ---- kernels ---------------------------------------------------------------------------------------------------------


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


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, inner, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = at < inner
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = widened(tl.load(gate_up_ptr + row * 2 * inner + at, mask=here, other=0.0))
    up = widened(tl.load(gate_up_ptr + row * 2 * inner + inner + at, mask=here, other=0.0))
    gate = widened(rounded_to(gate / (1.0 + tl.exp(-gate)), dtype))
    tl.store(out_ptr + row * inner + at, rounded_to(gate * up, dtype), mask=here)


@triton.jit
def _combined_kernel(
    y_ptr, weights_ptr, ids_ptr, out_ptr, hidden, WEIGHTED: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = at < hidden
    total = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(K):
        assignment = token * K + i
        known = tl.load(ids_ptr + assignment) >= 0
        stop = tl.where(known, hidden, 0)  # another rank's rows were not written
        y = widened(tl.load(y_ptr + assignment * hidden + at, mask=at < stop, other=0.0))
        if WEIGHTED:
            y *= tl.where(known, tl.load(weights_ptr + assignment).to(tl.float32), 0.0)
        total += y
    tl.store(out_ptr + token * hidden + at, rounded_to(total, out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _rank_kernel(ids_ptr, ranks_ptr, counts_ptr, a, TILE: tl.constexpr):
    """How many assignments each expert (a program) has, and the place of each among them."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, a, TILE):
        at = start + tl.arange(0, TILE)
        match = (tl.load(ids_ptr + at, mask=at < a, other=-1) == expert).to(tl.int32)
        tl.store(ranks_ptr + at, count + tl.cumsum(match, 0) - 1, mask=match > 0)
        count += tl.sum(match, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _starts_kernel(counts_ptr, starts_ptr, ends_ptr, experts, size, EXPERTS: tl.constexpr):
    """Each expert's first assignment in the order by expert, and the group after its last."""
    expert = tl.arange(0, EXPERTS)
    here = expert < experts
    counts = tl.load(counts_ptr + expert, mask=here, other=0)
    tl.store(starts_ptr + expert, tl.cumsum(counts, 0) - counts, mask=here)
    tl.store(ends_ptr + expert, tl.cumsum((counts + size - 1) // size, 0), mask=here)


@triton.jit
def _order_kernel(
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    starts_ptr,
    ends_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    stop_ptr,
    a,
    groups,
    experts,
    size,
    TILE: tl.constexpr,
):
    """Assignments in order of their experts, and the expert and the part of that order of each group."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = tl.load(ids_ptr + at, mask=at < a, other=-1)
    here = known >= 0
    place = tl.load(starts_ptr + known, mask=here, other=0) + tl.load(ranks_ptr + at, mask=here, other=0)
    tl.store(order_ptr + place, at, mask=here)
    # The expert of a group: how many experts' groups end at or before it, by bisection.
    low = tl.zeros([TILE], tl.int32)
    high = low + experts
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        open_ = low < high
        before = open_ & (tl.load(ends_ptr + middle, mask=open_, other=0) <= at)
        low = tl.where(before, middle + 1, low)
        high = tl.where(open_ & ~before, middle, high)
    here = (at < groups) & (low < experts)
    counts = tl.load(counts_ptr + low, mask=here, other=0)
    first_group = tl.load(ends_ptr + low, mask=here, other=0) - (counts + size - 1) // size
    start = tl.load(starts_ptr + low, mask=here, other=0)
    tl.store(expert_ptr + at, tl.where(here, low, -1), mask=at < groups)
    tl.store(first_ptr + at, start + (at - first_group) * size, mask=at < groups)
    tl.store(stop_ptr + at, start + counts, mask=at < groups)
