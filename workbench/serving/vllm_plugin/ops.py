"""The GEMMs of the packed methods, as ops that torch.compile does not look into.

`torch.ops.workbench.packed_linear` and `torch.ops.workbench.packed_moe` decode packed weights, round activations,
multiply, and leave nothing behind: no dense copy of a packed weight exists between two calls. On a GPU they are the
kernels of `workbench.kernels.triton_gemm` and `triton_moe`: no value reaches the host and no shape depends on data, so
CUDA graphs hold them. Elsewhere they are `plain`'s torch, which on a CPU decodes with `workbench.kernels.cpu`.

Numbers: weights are decoded exactly in float32 and cast once to the activations' dtype (NVIDIA's kernels in Gluon
multiply them uncast, see `triton_gemm`); activations pass the format's quantize-dequantize (a static global scale
where one is given, NaN or None = each token's own); products are the dtype's GEMM; an expert's output is weighted and
summed over the top k in float32, in the order of the top k, so a token's result does not depend on which tokens share
its batch (beyond what the GEMM itself does).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import reference

from . import plain


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

    codes uint8 `[N, K/2]`; scales `[N, K/block]`, float8_e4m3fn (nvfp4) or E8M0 bytes (mxfp4). globals_: float32 decode
    multipliers (nvfp4), one for all, one a matrix, or one a row. input_scales: one for all, or one a matrix, which then
    sees the input rounded with its own; None or NaN: each token's own. ranks: the process group over which K is split
    (one matrix), "" where `x` holds all of it; a token's own scale is that of the whole token, so that two ranks
    compute what one does.
    """
    x_mk = x.reshape(-1, x.shape[-1])
    if ranks and activation_format == "nvfp4":
        x_mk = round_split(x_mk, input_scales, ranks)
        input_scales, activation_format = None, "none"
    if on_triton(x):
        from workbench.kernels import triton_gemm

        y = triton_gemm.packed_linear(
            x_mk, codes, scales, globals_, input_scales, bias, widths, weight_format, activation_format
        )
        return y.reshape(*x.shape[:-1], codes.shape[0])
    weight_nk = plain.decode(codes, scales, plain.global_of_rows(globals_, widths), weight_format, x.dtype)
    if input_scales is None or input_scales.numel() == 1:
        shared = None if input_scales is None else input_scales.reshape(())
        y = F.linear(plain.round_activation(x_mk, activation_format, shared), weight_nk, bias)
    else:
        parts = [
            F.linear(plain.round_activation(x_mk, activation_format, input_scales[i]), part_nk)
            for i, part_nk in enumerate(weight_nk.split(widths))
        ]
        y = torch.cat(parts, dim=-1)
        y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], codes.shape[0])


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

    w13_global: float32 `[E, 2]` (gate, up); w2_global: `[E]`. w13_input_scale: `[1]` for all experts, `[E]`, or
    `[E, 2]` where gate and up see the input rounded apart; w2_input_scale: `[1]` or `[E]`; None or NaN: each token's
    own. topk_ids `[T, k]`: -1 marks an expert of another rank. ranks: the process group over which I is split. Returns
    the routed output alone, a fresh tensor.
    """
    round_hidden = None
    if ranks and activation_format == "nvfp4":
        round_hidden = functools.partial(round_split, ranks=ranks)
    if on_triton(x):
        from workbench.kernels import triton_moe

        return triton_moe.packed_moe(
            x,
            w13,
            w13_scale,
            w13_global,
            w2,
            w2_scale,
            w2_global,
            topk_weights,
            topk_ids,
            w13_input_scale,
            w2_input_scale,
            weight_format,
            activation_format,
            weight_on_input,
            round_hidden=round_hidden,
        )

    def decode_experts(experts: Tensor) -> tuple[Tensor, Tensor]:
        everything = experts.numel() == w13.shape[0]

        def pick(t: Tensor) -> Tensor:
            return t if everything else t[experts]

        half = w13.shape[1] // 2
        g13 = None
        if w13_global is not None:
            g13 = pick(w13_global).repeat_interleave(half, dim=1).unsqueeze(-1)  # [e, 2I, 1]
        g2 = None if w2_global is None else pick(w2_global)[:, None, None]
        return (
            plain.decode(pick(w13), pick(w13_scale), g13, weight_format, x.dtype),
            plain.decode(pick(w2), pick(w2_scale), g2, weight_format, x.dtype),
        )

    if activation_format == "none":
        fused = plain.vllm_cpu_moe(x, decode_experts, w13, topk_weights, topk_ids, weight_on_input)
        if fused is not None:
            return fused
    return plain.expert_loop(
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
        round_hidden=round_hidden,
    )


def on_triton(t: Tensor) -> bool:
    """Whether `t` lies on a GPU whose Triton runs the kernels."""
    return t.device.type == "cuda" and _has_triton()


# ---- input scales, at load -------------------------------------------------------------------------------------------


def joined_input_scale(scale: Tensor) -> Tensor | None:
    """Input scales as the ops take them, with nothing left to compare at a call. Looks at the values: at load only.

    scale: float32 `[S]`, one a matrix, or `[E]`, `[E, 2]` of experts; NaN where there is none. Returns None where all
    are NaN, `[1]` where all are equal, `[E]` where every expert's gate and up agree, else `scale`.
    """
    missing = scale.isnan()
    if bool(missing.all()):
        return None
    same = scale.nan_to_num(nan=-1.0)  # a scale is positive
    if bool((same == same.flatten()[0]).all()):
        return scale.flatten()[:1].clone()
    if scale.dim() == 2 and bool((same == same[:, :1]).all()):
        return scale[:, 0].contiguous()
    return scale


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def split_over() -> str:
    """The name of the tensor-parallel process group, for `ranks`."""
    from vllm.distributed import get_tp_group

    return str(get_tp_group().unique_name)


def round_split(x: Tensor, global_scale: Tensor | None, ranks: str) -> Tensor:
    """`x` `[M, K / ranks]` through NVFP4, each token under one scale on all ranks: the given one (scalar or `[M, 1]`),
    or where that is None or NaN the whole token's own. Raises nothing and waits for nothing: a CUDA graph can hold
    it."""
    own = reference.nvfp4_global_scale(_largest_of_ranks(x.abs().amax(-1, keepdim=True).float(), ranks))
    if global_scale is not None:
        own = torch.where(global_scale.isnan(), own, global_scale)
    if on_triton(x):
        from workbench.kernels import triton_gemm

        return triton_gemm.round_activation(x, "nvfp4", own)
    return plain.round_activation(x, "nvfp4", own)


def _largest_of_ranks(amax: Tensor, ranks: str) -> Tensor:
    """The largest `amax` of a group's ranks."""
    from vllm.distributed import parallel_state

    group = parallel_state._groups[ranks]()
    assert group is not None, f"the process group {ranks} is gone"
    # vLLM captures CUDA graphs with its own NCCL communicator; torch's watchdog thread may not be in a capture.
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        return nccl.all_reduce(amax, op=torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group.device_group)
    return amax


# ---- registration ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("workbench", "FRAGMENT")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _linear_shape(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _moe_shape(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _register(name: str, op: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    from torch.library import infer_schema

    if not hasattr(torch.ops.workbench, name):
        _LIBRARY.define(name + infer_schema(op, mutates_args=[]))
        _LIBRARY.impl(name, op, "CompositeExplicitAutograd")
        torch.library.register_fake(f"workbench::{name}", fake, lib=_LIBRARY)


_register("packed_linear", packed_linear, _linear_shape)
_register("packed_moe", packed_moe, _moe_shape)
