"""Linear layers with packed weights, and the linear method that records inputs.

Parameters of a packed layer of N rows in S matrices (q, k, v; gate, up; q_a, kv_a; or one): `weight` uint8 [N, K/2],
`weight_scale` [N, K/block] (float8_e4m3fn or E8M0 bytes), for nvfp4 `weight_scale_2` float32 [S], and where the
checkpoint has static input scales `input_scale` float32 [S]. Each matrix keeps its own scales.
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

from . import ops
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


def scales_by_token(activation: str, static: list[bool]) -> bool:
    """Whether some input is scaled by its token's own amax, which ranks that split K must agree on."""
    return scale_kind(activation, static) in ("mixed", "dynamic_per_token")


# Which of its two loaders a linear layer uses is decided by the method's class name.
@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """Weights stay packed; each call decodes them, rounds the input, and multiplies. `static`: one flag a matrix."""

    def __init__(self, prefix: str, plan: ModulePlan, *, static: list[bool]) -> None:
        super().__init__()
        self.prefix, self.plan, self.static = prefix, plan, static
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
        if hasattr(layer, "_use_min_latency_gemm"):
            # a DeepSeek layer with a GEMM of its own, which would bypass apply()
            layer._use_min_latency_gemm = False  # type: ignore[assignment]

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
        return {
            "weight": self.plan.weight,
            "activation": self.plan.activation,
            "activation_scale": scale_kind(self.plan.activation, self.static),
        }


@register_weight_loader_v2_supported_method
class CapturingLinearMethod(UnquantizedLinearMethod):
    """vLLM's own unquantized method, with the input shown to the recorder first."""

    def __init__(self, recorder: Any, shards: list[str]) -> None:
        super().__init__()
        self.recorder, self.shards = recorder, shards

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.recorder.record(self.shards, x)
        return super().apply(layer, x, bias)
