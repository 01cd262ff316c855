"""The formats the workbench knows, a row each. A new format is one entry here plus its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.kernels import cpu, reference
from workbench.kernels.tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, NVFP4_RULES, ScaleRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One number format.

    block: elements of K that share a scale. bits: stored bits a weight, scales included. rules: scale rules, the
    default first. has_global: whether a float32 decode multiplier goes with the block scales.
    quantize(w, rule, global_scale) -> (codes, block_scales, global_scale); dequantize is its inverse in float32, and
    dequantize_cpu(..., dtype) the same bits from the faster CPU kernels, cast once;
    qdq_activation(x, rule, global_scale) rounds activations through the format.
    """

    name: str
    block: int
    bits: float
    rules: tuple[ScaleRule, ...]
    has_global: bool
    quantize: Callable[[Tensor, ScaleRule, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]
    dequantize: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    dequantize_cpu: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    qdq_activation: Callable[[Tensor, ScaleRule, Tensor | None], Tensor]

    @property
    def default_rule(self) -> ScaleRule:
        return self.rules[0]

    def rule(self, name: str | None) -> ScaleRule:
        """The scale rule called `name` (None: the default). Raises FormatError naming the choices."""
        if name is None:
            return self.default_rule
        for rule in self.rules:
            if rule.value == str(name):
                return rule
        choices = ", ".join(r.value for r in self.rules)
        raise FormatError(f"{self.name} has no scale rule {name!r}", fix=f"choose one of: {choices}")


def _fastest(x: Tensor) -> Any:
    """The kernels for x's device; every implementation gives the reference's bits."""
    return cpu if x.device.type == "cpu" else reference


def _nvfp4_dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
    return reference.nvfp4_dequantize(codes, scales, _required(global_scale))


def _nvfp4_dequantize_cpu(codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return cpu.nvfp4_dequantize(codes, scales, _required(global_scale), dtype)


def _required(global_scale: Tensor | None) -> Tensor:
    if global_scale is None:
        raise FormatError("an NVFP4 tensor without its global scale", fix="give the decode multiplier (float32)")
    return global_scale


def _mxfp4_quantize(w: Tensor, rule: ScaleRule, global_scale: Tensor | None) -> tuple[Tensor, Tensor, None]:
    codes, scales = reference.mxfp4_quantize(w, rule)
    return codes, scales, None


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="nvfp4",
            block=NVFP4_BLOCK,
            bits=4.5,
            rules=NVFP4_RULES,
            has_global=True,
            quantize=lambda w, rule, g: reference.nvfp4_quantize(w, g),
            dequantize=_nvfp4_dequantize,
            dequantize_cpu=_nvfp4_dequantize_cpu,
            qdq_activation=lambda x, rule, g: _fastest(x).nvfp4_qdq_activation(x, g),
        ),
        Format(
            name="mxfp4",
            block=MXFP4_BLOCK,
            bits=4.25,
            rules=(ScaleRule.EVEN, *(r for r in MXFP4_RULES if r is not ScaleRule.EVEN)),
            has_global=False,
            quantize=_mxfp4_quantize,
            dequantize=lambda codes, scales, g: reference.mxfp4_dequantize(codes, scales),
            dequantize_cpu=lambda codes, scales, g, dtype: cpu.mxfp4_dequantize(codes, scales, dtype),
            qdq_activation=lambda x, rule, g: _fastest(x).mxfp4_qdq_activation(x, rule),
        ),
    )
}


def get_format(name: str) -> Format:
    """The format called `name`. Raises FormatError naming the choices."""
    if name not in FORMATS:
        raise FormatError(f"unknown number format {name!r}", fix=f"choose one of: {', '.join(FORMATS)}")
    return FORMATS[name]
