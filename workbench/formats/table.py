"""The formats the workbench knows, a row each. A new format is one entry here plus its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.kernels import cpu, elements, reference
from workbench.kernels.tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, NVFP4_RULES, ScaleRule

SCALE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "e4m3": (torch.float8_e4m3fn,),
    "e8m0": (torch.uint8,),
    "float": (torch.float32, torch.uint8),  # uint8: E8M0 bytes, where a producer keeps powers of two
}
VARIABLE = -1  # of a block's rows or columns: the tensor says how many
WHOLE = 0  # of a block's rows or columns: all of them share a scale

Quantize = Callable[[Tensor, ScaleRule, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]
Dequantize = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One number format: elements of `element` (a row of `kernels.elements`), scaled by blocks.

    block, rows: elements of K, and rows of N, that share a scale (WHOLE, VARIABLE). scale: a key of SCALE_DTYPES.
    has_global: whether a float32 decode multiplier goes with the block scales. zero_points: whether a tensor may have
    them. bits: stored bits a weight, scales included (of the elements alone where the block is VARIABLE or WHOLE).
    rules: scale rules, the default first; none: the format is read, not written.
    quantize(w, rule, global_scale) -> (codes, block_scales, global_scale). dequantize is its inverse in float32, and
    dequantize_cpu(..., dtype) the same bits from the faster CPU kernels, cast once; both None: the generic decoder of
    `tensor.py`. qdq_activation(x, rule, global_scale) rounds activations through the format; None: it is no activation
    format.
    """

    name: str
    element: str
    block: int
    rows: int = 1
    scale: str
    bits: float
    has_global: bool = False
    zero_points: bool = False
    rules: tuple[ScaleRule, ...] = ()
    quantize: Quantize | None = None
    dequantize: Dequantize | None = None
    dequantize_cpu: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    qdq_activation: Callable[[Tensor, ScaleRule, Tensor | None], Tensor] | None = None

    @property
    def default_rule(self) -> ScaleRule:
        return self.rules[0]

    def rule(self, name: str | None) -> ScaleRule:
        """The scale rule called `name` (None: the default). Raises FormatError naming the choices."""
        if not self.rules:
            raise FormatError(f"{self.name} is read, not written: it has no scale rule", fix="choose another format")
        if name is None:
            return self.default_rule
        for rule in self.rules:
            if rule.value == str(name):
                return rule
        choices = ", ".join(r.value for r in self.rules)
        raise FormatError(f"{self.name} has no scale rule {name!r}", fix=f"choose one of: {choices}")

    def scale_shape(self, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> tuple[int, ...]:
        """Shape of the block scales of a tensor of `shape` `[..., N, K]` (or `[K]`); partial last blocks count.

        block: (rows, columns), needed where the format's own are VARIABLE.
        """
        rows, columns = block or (self.rows, self.block)
        blocks = (rows, columns)[-len(shape) :]
        counts = (1 if b == WHOLE else -(-d // b) for d, b in zip(shape[-2:], blocks, strict=True))
        return (*shape[:-2], *counts)


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
            element="e2m1",
            block=NVFP4_BLOCK,
            scale="e4m3",
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
            element="e2m1",
            block=MXFP4_BLOCK,
            scale="e8m0",
            bits=4.25,
            rules=(ScaleRule.EVEN, *(r for r in MXFP4_RULES if r is not ScaleRule.EVEN)),
            quantize=_mxfp4_quantize,
            dequantize=lambda codes, scales, g: reference.mxfp4_dequantize(codes, scales),
            dequantize_cpu=lambda codes, scales, g, dtype: cpu.mxfp4_dequantize(codes, scales, dtype),
            qdq_activation=lambda x, rule, g: _fastest(x).mxfp4_qdq_activation(x, rule),
        ),
        # ModelOpt's W4A8: E2M1 with E4M3 scales a block of 32, global scale amax / 448.
        Format(name="nvfp4_w4a8", element="e2m1", block=32, scale="e4m3", bits=4.25, has_global=True),
        Format(name="mxfp6_e2m3", element="e2m3", block=32, scale="e8m0", bits=6.25),
        Format(name="mxfp6_e3m2", element="e3m2", block=32, scale="e8m0", bits=6.25),
        Format(name="mxfp8_e4m3", element="e4m3", block=32, rows=VARIABLE, scale="e8m0", bits=8.25),
        Format(name="mxfp8_e5m2", element="e5m2", block=32, rows=VARIABLE, scale="e8m0", bits=8.25),
        Format(name="fp8_tensor", element="e4m3", block=WHOLE, rows=WHOLE, scale="float", bits=8.0),
        Format(name="fp8_channel", element="e4m3", block=WHOLE, scale="float", bits=8.0),
        Format(name="fp8_block", element="e4m3", block=VARIABLE, rows=VARIABLE, scale="float", bits=8.0),
        # Quark's int4_fp8: int4 with a float scale a row, and one global multiplier (that of the FP8 step before).
        Format(name="int4_channel", element="int4", block=WHOLE, scale="float", bits=4.0, has_global=True),
        Format(name="int4_group", element="int4", block=VARIABLE, scale="float", bits=4.0, zero_points=True),
        Format(name="int8_group", element="int8", block=VARIABLE, scale="float", bits=8.0, zero_points=True),
        Format(name="int8_tensor", element="int8", block=WHOLE, rows=WHOLE, scale="float", bits=8.0, zero_points=True),
        Format(name="int8_channel", element="int8", block=WHOLE, scale="float", bits=8.0, zero_points=True),
    )
}


def get_format(name: str) -> Format:
    """The format called `name`. Raises FormatError naming the choices."""
    if name not in FORMATS:
        raise FormatError(f"unknown number format {name!r}", fix=f"choose one of: {', '.join(FORMATS)}")
    return FORMATS[name]


def element_dtype(format: str) -> torch.dtype:
    """The dtype of a format's packed codes."""
    return elements.ELEMENTS[get_format(format).element].dtype
