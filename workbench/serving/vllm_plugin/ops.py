"""The GEMMs of the packed methods, as ops that torch.compile does not look into.

`torch.ops.workbench.packed_linear` and `torch.ops.workbench.packed_moe` decode packed weights, round activations,
multiply, and leave nothing behind: no dense copy of a packed weight exists between two calls. Both run on any device
(plain torch); on a CPU the decoding uses the faster kernels of `workbench.kernels`. The expert loop depends on
the data, so on a GPU it cannot be captured in a CUDA graph: run with --enforce-eager.

Numbers: weights are decoded exactly in float32 and cast once to the activations' dtype; activations pass the format's
quantize-dequantize (a static global scale where one is given, NaN or None = each token's own); products are the
dtype's GEMM; an expert's output is weighted and summed over the top k in float32, in the order of the top k, so a
token's result does not depend on which tokens share its batch (beyond what the GEMM itself does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import cpu, reference

DecodeExperts: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]  # expert numbers [e] to dense w13 and w2

# Experts are decoded in groups of at most this many weights, so that a large layer needs a bounded dense buffer.
DECODE_GROUP_WEIGHTS = 1 << 26


def decode(codes: Tensor, scales: Tensor, global_scale: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    """Packed `[..., N, K/2]` to dense `[..., N, K]` in `dtype`; `global_scale` broadcasts against `scales`."""
    if codes.device.type == "cpu":
        if format == "nvfp4":
            return cpu.nvfp4_dequantize(codes, scales, global_scale, dtype)
        return cpu.mxfp4_dequantize(codes, scales, dtype)
    if format == "nvfp4":
        return reference.nvfp4_dequantize(codes, scales, global_scale).to(dtype)
    return reference.mxfp4_dequantize(codes, scales).to(dtype)


def round_activation(x: Tensor, format: str, global_scale: Tensor | None, ranks: str = "") -> Tensor:
    """`x` `[M, K]` through the format's quantize-dequantize. `global_scale`: scalar or `[M, 1]`, NaN = per token.

    ranks: the process group over which K is split, "" where `x` holds all of it. A token's own scale is that of the
    whole token, so that two ranks compute what one does.
    """
    if format == "none":
        return x
    kernels = cpu if x.device.type == "cpu" else reference
    if format == "mxfp4":
        return kernels.mxfp4_qdq_activation(x)
    if ranks or (global_scale is not None and bool(global_scale.isnan().any())):
        own = reference.nvfp4_global_scale(_over_ranks(x.float().abs().amax(-1, keepdim=True), ranks))
        global_scale = own if global_scale is None else torch.where(global_scale.isnan(), own, global_scale)
    return kernels.nvfp4_qdq_activation(x, global_scale)


def split_over() -> str:
    """The name of the tensor-parallel process group, for `ranks`."""
    from vllm.distributed import get_tp_group

    return get_tp_group().unique_name


def _over_ranks(amax: Tensor, ranks: str) -> Tensor:
    """The largest `amax` of a group's ranks; `amax` itself without one."""
    if ranks:
        from vllm.distributed import parallel_state

        group = parallel_state._groups[ranks]()
        assert group is not None, f"the process group {ranks} is gone"
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group.device_group)
    return amax


# ---- linear ----------------------------------------------------------------------------------------------------------


def packed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    globals_: Tensor | None,
    input_scales: Tensor | None,
    bias: Tensor | None,
    widths: list[int],
    weight_format: str,
    activation_format: str,
    ranks: str = "",
) -> Tensor:
    """`[..., K]` times a packed `[N, K]`: `[..., N]`. The N rows are `len(widths)` matrices that share an input.

    globals_ and input_scales: one float32 decode multiplier a matrix. Where the input scales differ, each matrix sees
    the input rounded with its own. ranks: of `round_activation`.
    """
    x_mk = x.reshape(-1, x.shape[-1])
    weight_nk = decode(codes, scales, _per_row(globals_, widths), weight_format, x.dtype)
    if input_scales is None or len(widths) == 1 or bool((input_scales == input_scales[0]).all()):
        shared = None if input_scales is None else input_scales[0]
        y = F.linear(round_activation(x_mk, activation_format, shared, ranks), weight_nk, bias)
    else:
        parts = []
        for i, part_nk in enumerate(weight_nk.split(widths)):
            rounded_mk = round_activation(x_mk, activation_format, input_scales[i], ranks)
            parts.append(F.linear(rounded_mk, part_nk))
        y = torch.cat(parts, dim=-1)
        if bias is not None:
            y = y + bias
    return y.reshape(*x.shape[:-1], codes.shape[0])


def _packed_linear_fake(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    globals_: Tensor | None,
    input_scales: Tensor | None,
    bias: Tensor | None,
    widths: list[int],
    weight_format: str,
    activation_format: str,
    ranks: str = "",
) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _per_row(globals_: Tensor | None, widths: list[int]) -> Tensor | None:
    if globals_ is None:
        return None
    if len(widths) == 1:
        return globals_[0]
    counts = torch.tensor(widths, device=globals_.device)
    return globals_.repeat_interleave(counts, output_size=sum(widths)).unsqueeze(-1)


# ---- experts ---------------------------------------------------------------------------------------------------------


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
    ranks: str = "",
) -> Tensor:
    """SiLU-gated experts: x `[T, H]`, w13 `[E, 2I, H/2]` (gate rows, then up rows), w2 `[E, H, I/2]`: `[T, H]`.

    w13_global, w13_input_scale: float32 `[E, 2]` (gate, up); w2_global, w2_input_scale: `[E]`. topk_ids `[T, k]`: -1
    marks an expert of another rank. Returns the routed output alone, a fresh tensor.
    """

    def decode_experts(experts: Tensor) -> tuple[Tensor, Tensor]:
        everything = experts.numel() == w13.shape[0]

        def pick(t: Tensor) -> Tensor:
            return t if everything else t[experts]

        half = w13.shape[1] // 2
        g13 = (
            None if w13_global is None else pick(w13_global).repeat_interleave(half, dim=1).unsqueeze(-1)
        )  # [e, 2I, 1]
        g2 = None if w2_global is None else pick(w2_global)[:, None, None]
        return (
            decode(pick(w13), pick(w13_scale), g13, weight_format, x.dtype),
            decode(pick(w2), pick(w2_scale), g2, weight_format, x.dtype),
        )

    if activation_format == "none":
        fused = _vllm_cpu_moe(x, decode_experts, w13, topk_weights, topk_ids, weight_on_input)
        if fused is not None:
            return fused
    return expert_loop(
        x,
        topk_weights,
        topk_ids,
        decode_experts=decode_experts,
        experts=w13.shape[0],
        weights_per_expert=2 * (w13[0].numel() + w2[0].numel()),
        activation_format=activation_format,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
        weight_on_input=weight_on_input,
        ranks=ranks,
    )


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
    ranks: str = "",
    observe: Callable[..., None] | None = None,
) -> Tensor:
    """Run the experts that have tokens, group by group.

    `decode_experts(ids)` gives their dense weights: w13 `[e, 2I, H]`, w2 `[e, H, I]`.
    `observe(expert, x_mh, h_mi)`, when given, sees each expert's own rows: its input and its true intermediate.
    """
    tokens, k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1).long()
    flat_weights = topk_weights.reshape(-1).float()
    order = torch.argsort(flat_ids, stable=True)  # rows sorted by expert; -1 (another rank's) first
    counts = torch.bincount(flat_ids + 1, minlength=experts + 1).tolist()
    order, counts = order[counts[0] :], counts[1:]
    hit = [e for e, n in enumerate(counts) if n]
    token_of_row, expert_of_row = order // k, flat_ids[order]

    differ = w13_input_scale is not None and not torch.equal(
        w13_input_scale[:, 0].nan_to_num(), w13_input_scale[:, 1].nan_to_num()
    )
    if weight_on_input:
        rows = x[token_of_row] * flat_weights[order].unsqueeze(-1).to(x.dtype)
    elif activation_format != "none" and w13_input_scale is None:
        rows = round_activation(x, activation_format, None)[token_of_row]  # once a token, not once an expert
    else:
        rows = x[token_of_row]
    up_rows = None
    if activation_format != "none" and (weight_on_input or w13_input_scale is not None):
        raw = rows
        rows = round_activation(raw, activation_format, _row_scale(w13_input_scale, expert_of_row, 0))
        if differ:
            up_rows = round_activation(raw, activation_format, _row_scale(w13_input_scale, expert_of_row, 1))

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
        scale = _row_scale(w2_input_scale, expert_of_row[begin:start], None)
        hidden = round_activation(hidden, activation_format, scale, ranks)
        for i, (a, b) in enumerate(spans):
            y_rows[a:b] = F.linear(hidden[a - begin : b - begin], w2_e[i])

    y = torch.zeros(tokens * k, x.shape[1], dtype=torch.float32, device=x.device)
    y[order] = y_rows.float()
    if not weight_on_input:
        y = y * flat_weights.unsqueeze(-1)
    return y.view(tokens, k, -1).sum(dim=1).to(x.dtype)


def _row_scale(scales: Tensor | None, expert_of_row: Tensor, column: int | None) -> Tensor | None:
    if scales is None:
        return None
    return (scales if column is None else scales[:, column])[expert_of_row].unsqueeze(-1)


def _vllm_cpu_moe(
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


def _packed_moe_fake(
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
    ranks: str = "",
) -> Tensor:
    return torch.empty_like(x)


# ---- registration ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("workbench", "FRAGMENT")


def _register(name: str, op: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    from torch.library import infer_schema

    if not hasattr(torch.ops.workbench, name):
        _LIBRARY.define(name + infer_schema(op, mutates_args=[]))
        _LIBRARY.impl(name, op, "CompositeExplicitAutograd")
        torch.library.register_fake(f"workbench::{name}", fake, lib=_LIBRARY)


_register("packed_linear", packed_linear, _packed_linear_fake)
_register("packed_moe", packed_moe, _packed_moe_fake)
