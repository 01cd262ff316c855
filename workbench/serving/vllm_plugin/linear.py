"""Linear layers with packed weights, and the linear method that records inputs.

Parameters of a packed layer of N rows in S matrices (q, k, v; gate, up; q_a, kv_a; or one): `weight` uint8 [N, K/2],
`weight_scale` [N, K/block] (float8_e4m3fn or E8M0 bytes), for nvfp4 `weight_scale_2` float32 [S], and where the
checkpoint has static input scales `input_scale` float32 [S]. Each matrix keeps its own scales (`compat` says when not).

After loading, scales are laid out as the ops take them without looking at a value: input scales that are equal become
[1] (or none, where the checkpoint gave none), and on a GPU global scales become [1] or one a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from workbench.errors import CheckpointError, FormatError
from workbench.formats import get_format

from . import compat, ops, plain
from .settings import ModulePlan


def scale_dtype(format: str) -> torch.dtype:
    return torch.float8_e4m3fn if get_format(format).has_global else torch.uint8


def check_block(prefix: str, columns: int, ranks: int, format: str) -> None:
    """Raises FormatError when a rank's share of K does not hold whole blocks."""
    block = get_format(format).block
    if columns % block:
        raise FormatError(
            f"{prefix}: K per rank is {columns} (tensor parallel size {ranks}), not a multiple of {format}'s block of"
            f" {block}: a block would be split between ranks",
            fix="use a smaller tensor_parallel_size, or exclude this module",
        )


def scale_kind(activation: str, static: list[bool]) -> str:
    """`activation_scale` of the records for modules whose plans say `static`."""
    if activation == "none":
        return "none"
    if activation != "nvfp4":
        return "dynamic_per_block"
    if all(static):
        return "static"
    return "mixed" if any(static) else "dynamic_per_token"


def describe_plan(plan: ModulePlan, static: list[bool], *, as_vllm: bool) -> dict[str, Any]:
    """The audit's entry of a packed module, without the bytes."""
    kind = scale_kind(plan.activation, static)
    entry = {"weight": plan.weight, "activation": plan.activation, "activation_scale": kind}
    return {**entry, "compat": "vllm"} if as_vllm else entry


def scales_by_token(activation: str, static: list[bool]) -> bool:
    """Whether some input is scaled by its token's own amax, which ranks that split K must agree on."""
    return scale_kind(activation, static) in ("mixed", "dynamic_per_token")


def _fixed(data: Tensor) -> torch.nn.Parameter:
    """A parameter that is loaded no more: plain, not one of the engine's classes."""
    return torch.nn.Parameter(data.detach().as_subclass(Tensor), requires_grad=False)


# Which of its two loaders a linear layer uses is decided by the method's class name.
@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """Weights stay packed; each call decodes them, rounds the input, and multiplies. `static`: one flag a matrix.
    as_vllm: scales are combined as vLLM's own methods do (`compat`)."""

    def __init__(self, prefix: str, plan: ModulePlan, *, static: list[bool], as_vllm: bool = False) -> None:
        super().__init__()
        self.prefix, self.plan, self.static, self.as_vllm = prefix, plan, static, as_vllm
        self.ranks = ""  # the process group that K is split over, where tokens have scales of their own
        self.widths: list[int] = []  # rows of each fused matrix, once weights are created

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        spec = get_format(self.plan.weight)
        rows, columns, matrices = sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)
        check_block(self.prefix, columns, input_size // columns, self.plan.weight)
        loader = extra["weight_loader"]
        if input_size != columns and scales_by_token(self.plan.activation, self.static):
            self.ranks = ops.split_over()
        self.widths = list(output_partition_sizes)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=torch.empty(rows, columns // 2, dtype=torch.uint8),
                input_dim=1,
                output_dim=0,
                weight_loader=loader,
            ),
        )
        layer.register_parameter(
            "weight_scale",
            GroupQuantScaleParameter(
                data=torch.empty(rows, columns // spec.block, dtype=scale_dtype(spec.name)),
                input_dim=1,
                output_dim=0,
                weight_loader=loader,
            ),
        )
        scalars = (["weight_scale_2"] if spec.has_global else []) + (["input_scale"] if any(self.static) else [])
        for name in scalars:  # float32 spelled out: the default dtype here is the model's
            unset = torch.full((matrices,), float("nan"), dtype=torch.float32)
            layer.register_parameter(name, PerTensorScaleParameter(data=unset, weight_loader=loader))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        scale = getattr(layer, "weight_scale_2", None)
        if scale is not None and bool(scale.isnan().any()):
            raise CheckpointError(
                f"{self.prefix}: the checkpoint gave no (or a NaN) global scale for {int(scale.isnan().sum())} of"
                f" {scale.numel()} matrices",
                fix="run `workbench lint` on the checkpoint",
            )
        if scale is not None:
            layer.register_parameter("weight_scale_2", _fixed(self._laid_out(scale.data)))
        given = getattr(layer, "input_scale", None)
        if given is not None:
            joined = ops.joined_input_scale(compat.linear_scale(given.data) if self.as_vllm else given.data)
            layer.register_parameter("input_scale", None if joined is None else _fixed(joined))
        if hasattr(layer, "_use_min_latency_gemm"):
            # a DeepSeek layer with a GEMM of its own, which would bypass apply()
            layer._use_min_latency_gemm = False  # type: ignore[assignment]

    def _laid_out(self, globals_: Tensor) -> Tensor:
        """`[S]` as the kernels read it: on a GPU one for all, or one a row, so that no call has to spread them."""
        if self.as_vllm:
            globals_ = compat.linear_scale(globals_)
        if not ops.on_triton(globals_):
            return globals_
        if bool((globals_ == globals_[0]).all()):
            return globals_[:1].clone()
        rows = plain.global_of_rows(globals_, self.widths)
        assert rows is not None
        return rows.flatten()

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.workbench.packed_linear(
            x,
            layer.weight,
            layer.weight_scale,
            getattr(layer, "weight_scale_2", None),
            getattr(layer, "input_scale", None),
            bias,
            self.widths,
            self.plan.weight,
            self.plan.activation,
            self.ranks,
        )

    def describe(self) -> dict[str, Any]:
        """The audit's entry, without the bytes."""
        return describe_plan(self.plan, self.static, as_vllm=self.as_vllm)


@register_weight_loader_v2_supported_method
class CapturingLinearMethod(UnquantizedLinearMethod):
    """vLLM's own unquantized method, with the input shown to the recorder first."""

    def __init__(self, recorder: Any, shards: list[str]) -> None:
        super().__init__()
        self.recorder, self.shards = recorder, shards

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.recorder.record(self.shards, x)
        return super().apply(layer, x, bias)
