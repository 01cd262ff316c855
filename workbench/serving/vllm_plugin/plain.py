"""The packed GEMMs' parts in plain torch: what runs on a CPU, on a GPU without Triton, and while inputs are recorded.

Experts are decoded in groups that have tokens, so the loop looks at the data: it synchronizes, and no CUDA graph can
hold it. Where Triton runs, `ops` calls the kernels of `workbench.kernels` instead, whose numbers are these up to the
order of the GEMM's sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import reference
from workbench.kernels import triton_dispatch as kernels

DecodeExperts: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]  # expert numbers [e] to dense w13 and w2
RoundHidden: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]  # rows [m, I] and their scale to rounded rows

# Experts are decoded in groups of at most this many weights, so that a large layer needs a bounded dense buffer.
DECODE_GROUP_WEIGHTS = 1 << 26


def decode(codes: Tensor, scales: Tensor, global_scale: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    """Packed `[..., N, K/2]` to dense `[..., N, K]` in `dtype`; `global_scale` broadcasts against `scales`."""
    if format == "nvfp4":
        assert global_scale is not None
        return kernels.nvfp4_dequantize(codes, scales, global_scale, dtype)
    return kernels.mxfp4_dequantize(codes, scales, dtype)


def round_activation(x: Tensor, format: str, global_scale: Tensor | None) -> Tensor:
    """`x` `[M, K]` through the format's quantize-dequantize. `global_scale`: scalar or `[M, 1]`, NaN = per token."""
    if format == "none":
        return x
    if format == "mxfp4":
        return kernels.mxfp4_qdq_activation(x)
    if global_scale is not None and bool(global_scale.isnan().any()):
        own = reference.nvfp4_global_scale(x.float().abs().amax(-1, keepdim=True))
        global_scale = torch.where(global_scale.isnan(), own, global_scale)
    return kernels.nvfp4_qdq_activation(x, global_scale)


def global_of_rows(globals_: Tensor | None, widths: list[int]) -> Tensor | None:
    """One multiplier a row `[N, 1]` of the fused matrices, or a scalar for all rows. globals_: one, one a matrix, or
    one a row."""
    if globals_ is None:
        return None
    if globals_.numel() == 1:
        return globals_.reshape(())
    if globals_.numel() == sum(widths):
        return globals_.unsqueeze(-1)
    counts = torch.tensor(widths, device=globals_.device)
    return globals_.repeat_interleave(counts, output_size=sum(widths)).unsqueeze(-1)


def expert_loop(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    decode_experts: DecodeExperts,
    experts: int,
    weights_per_expert: int,
    activation_format: str = "none",
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
    weight_on_input: bool = False,
    round_hidden: RoundHidden | None = None,
    observe: Callable[..., None] | None = None,
) -> Tensor:
    """Run the experts that have tokens, group by group. Input scales as in `ops.packed_moe`.

    `decode_experts(ids)` gives their dense weights: w13 `[e, 2I, H]`, w2 `[e, H, I]`. `round_hidden` replaces the
    rounding of w2's input. `observe(expert, x_mh, h_mi)`, when given, sees each expert's own rows: its input and its
    true intermediate.
    """
    tokens, k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1).long()
    flat_weights = topk_weights.reshape(-1).float()
    order = torch.argsort(flat_ids, stable=True)  # rows sorted by expert; -1 (another rank's) first
    counts = torch.bincount(flat_ids + 1, minlength=experts + 1).tolist()
    order, counts = order[counts[0] :], counts[1:]
    hit = [e for e, n in enumerate(counts) if n]
    token_of_row, expert_of_row = order // k, flat_ids[order]

    one_scale = w13_input_scale is None or w13_input_scale.numel() == 1
    up_rows = None
    if weight_on_input:
        rows = x[token_of_row] * flat_weights[order].unsqueeze(-1).to(x.dtype)
        if one_scale:
            rows = round_activation(rows, activation_format, _scalar(w13_input_scale))
    elif one_scale:
        rows = round_activation(x, activation_format, _scalar(w13_input_scale))[token_of_row]  # once a token
    else:
        rows = x[token_of_row]
    if w13_input_scale is not None and not one_scale and activation_format != "none":
        raw, columns = rows, w13_input_scale.reshape(experts, -1).unbind(1)
        rows = round_activation(raw, activation_format, columns[0][expert_of_row].unsqueeze(-1))
        if len(columns) == 2:
            up_rows = round_activation(raw, activation_format, columns[1][expert_of_row].unsqueeze(-1))
    if round_hidden is None:

        def round_hidden(h: Tensor, scale: Tensor | None) -> Tensor:
            return round_activation(h, activation_format, scale)

    y_rows = torch.empty(rows.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    group = max(1, DECODE_GROUP_WEIGHTS // weights_per_expert)
    start = 0
    for first in range(0, len(hit), group):
        ids = hit[first : first + group]
        w13_e, w2_e = decode_experts(torch.tensor(ids, device=x.device))
        spans, begin = [], start
        for e in ids:
            spans.append((start, start + counts[e]))
            start += counts[e]
        inter = w2_e.shape[-1]
        gate_up = torch.empty(start - begin, 2 * inter, dtype=x.dtype, device=x.device)
        for i, (a, b) in enumerate(spans):
            if up_rows is None:
                gate_up[a - begin : b - begin] = F.linear(rows[a:b], w13_e[i])
            else:
                gate_up[a - begin : b - begin, :inter] = F.linear(rows[a:b], w13_e[i, :inter])
                gate_up[a - begin : b - begin, inter:] = F.linear(up_rows[a:b], w13_e[i, inter:])
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = F.silu(gate.float()).to(x.dtype) * up
        if observe is not None:
            for e, (a, b) in zip(ids, spans, strict=True):
                observe(e, rows[a:b], hidden[a - begin : b - begin])
        hidden = round_hidden(hidden, _of_rows(w2_input_scale, expert_of_row[begin:start]))
        for i, (a, b) in enumerate(spans):
            y_rows[a:b] = F.linear(hidden[a - begin : b - begin], w2_e[i])

    y = torch.zeros(tokens * k, x.shape[1], dtype=torch.float32, device=x.device)
    y[order] = y_rows.float()
    if not weight_on_input:
        y = y * flat_weights.unsqueeze(-1)
    return y.view(tokens, k, -1).sum(dim=1).to(x.dtype)


def vllm_cpu_moe(
    x: Tensor,
    decode_experts: DecodeExperts,
    w13: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weight_on_input: bool,
) -> Tensor | None:
    """Weight-only on a CPU: vLLM's own fused kernel on the decoded experts, so that the numbers are those of the same
    model stored decoded. None where that kernel does not apply."""
    experts, two_i, half_h = w13.shape
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or (two_i // 2) % 32 or (2 * half_h) % 32:
        return None
    if 3 * (two_i // 2) * 2 * half_h * experts > DECODE_GROUP_WEIGHTS or bool((topk_ids < 0).any()):
        return None
    try:
        from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    except ImportError:
        return None
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    dense13, dense2 = decode_experts(torch.arange(experts))
    out = torch.empty_like(x)
    cpu_fused_moe(
        out,
        x,
        cpu_prepack_moe_weight(dense13, isa),
        cpu_prepack_moe_weight(dense2, isa),
        None,
        None,
        topk_weights,
        topk_ids,
        "silu",
        isa,
        weight_on_input,
    )
    return out


def _scalar(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(())


def _of_rows(scales: Tensor | None, expert_of_row: Tensor) -> Tensor | None:
    """One scale an expert `[E]` (or one for all) to one a row `[m, 1]`."""
    if scales is None:
        return None
    return scales.reshape(1, 1) if scales.numel() == 1 else scales[expert_of_row].unsqueeze(-1)
