"""The formats the workbench knows, a row each. A new format is one entry here plus its kernels.

    spec = get_format("fp8_block")
    codes, scales, *_ = spec.quantize(w_nk, spec.rule("amax"), (128, 128), None)

docs/formats.md describes each format and each of its scale rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.kernels import cpu, elements, mx, nvfp4, reference, scaled, triton_dispatch
from workbench.kernels.tables import E4M3_MAX, MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule

SCALE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "e4m3": (torch.float8_e4m3fn,),
    "e8m0": (torch.uint8,),
    "float": (torch.float32, torch.uint8),  # uint8: E8M0 bytes, where a producer keeps powers of two
}
PACKED_FORMATS = ("nvfp4", "mxfp4")
"""What the engine's packed layers hold and decode at GEMM time, rounding their inputs; a layer in another format is
decoded as it loads."""
VARIABLE = -1  # of a block's rows or columns: the tensor says how many
LARGEST_BLOCK = 1 << 30
WHOLE = 0  # of a block's rows or columns: all of them share a scale


class Parts(NamedTuple):
    """What quantizing gives: the tensors of a QuantizedTensor."""

    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor | None = None
    zero_points: Tensor | None = None


Block = tuple[int, int]
Quantize = Callable[[Tensor, ScaleRule, Block, Tensor | None], Parts]
Dequantize = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One number format: elements of `element` (a row of `kernels.elements`), scaled by blocks.

    block, rows: elements of K, and rows of N, that share a scale (WHOLE, VARIABLE). default_block: (rows, columns)
    where they are VARIABLE and none are given. partial_blocks: whether a last block may have fewer columns. scale: a
    key of SCALE_DTYPES. has_global: whether a decode multiplier goes with the block scales. zero_points: whether a
    tensor may have them. bits: stored bits a weight, scales included (of the elements alone where the block is VARIABLE
    or WHOLE). rules: scale rules, the default first.
    quantize(w, rule, block, global_scale) -> Parts. shared_scale(rule, amax): the multiplier that tensors fused at
    serving share (the global scale, or an 8-bit tensor's only one); None: there is none.
    dequantize is the inverse of quantize in float32, and dequantize_cpu(..., dtype) the same bits from the faster CPU
    kernels, cast once; both None: the generic decoder of `tensor.py`.
    qdq_activation(x, rule, input_scale) rounds activations `[M, K]` through the format; None: it is no activation
    format. input_scale: a static decode multiplier; None: dynamic, by token.
    """

    name: str
    element: str
    block: int
    rows: int = 1
    default_block: Block | None = None
    partial_blocks: bool = False
    scale: str
    bits: float
    has_global: bool = False
    zero_points: bool = False
    rules: tuple[ScaleRule, ...]
    quantize: Quantize
    shared_scale: Callable[[ScaleRule, Tensor], Tensor] | None = None
    dequantize: Dequantize | None = None
    dequantize_cpu: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor] | None = None
    qdq_activation: Callable[[Tensor, ScaleRule, Tensor | None], Tensor] | None = None

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

    def resolve_block(self, block: Block | None) -> Block:
        """(rows, columns) that share a scale: `block`, or the format's own or default one for None.

        Raises FormatError for a block that the format cannot have.
        """
        own = (self.rows, self.block)
        if block is None:
            return own if VARIABLE not in own else self.default_block or own
        wrong = [
            b
            for b, fixed in zip(block, own, strict=True)
            if (not 1 <= b <= LARGEST_BLOCK if fixed == VARIABLE else b != fixed)
        ]
        if wrong:
            names = {VARIABLE: f"1 to {LARGEST_BLOCK}", WHOLE: "0 (all)"}
            rows, columns = (names.get(b, str(b)) for b in own)
            raise FormatError(
                f"{self.name} has no blocks of {block[0]} x {block[1]}",
                fix=f"give block=(rows, columns) with rows = {rows}, columns = {columns}",
            )
        return block

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
    return cpu if x.device.type == "cpu" else triton_dispatch


def _decoder(codes: Tensor) -> Any:
    return triton_dispatch if codes.device.type == "cuda" else reference


def _required(global_scale: Tensor | None) -> Tensor:
    if global_scale is None:
        raise FormatError("a quantized tensor without its global scale", fix="give the decode multiplier (float32)")
    return global_scale


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


def _nvfp4_quantize(w: Tensor, rule: ScaleRule, block: Block, global_scale: Tensor | None) -> Parts:
    if rule is ScaleRule.AMAX:
        return Parts(*_fastest(w).nvfp4_quantize(w, global_scale))
    return Parts(*nvfp4.quantize(w, rule, global_scale))


def _nvfp4_dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
    return _decoder(codes).nvfp4_dequantize(codes, scales, _required(global_scale))


def _nvfp4_dequantize_cpu(codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return cpu.nvfp4_dequantize(codes, scales, _required(global_scale), dtype)


def _int4_after_fp8_dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
    """(code * row's scale) * global, in Quark's order of products: another order differs in the last bit."""
    return elements.decode(codes, "int4") * scales.float() * _required(global_scale)


def _w4a8_global(rule: ScaleRule, amax: Tensor) -> Tensor:
    return reference.nvfp4_global_scale(amax, E4M3_MAX)


def _w4a8_quantize(w: Tensor, rule: ScaleRule, block: Block, global_scale: Tensor | None) -> Parts:
    if global_scale is None:
        global_scale = _w4a8_global(rule, w.abs().amax())
    return Parts(*nvfp4.quantize(w, rule, global_scale, block[1]))


# ---- MX --------------------------------------------------------------------------------------------------------------

_MX_RULES = (ScaleRule.EVEN, ScaleRule.FLOOR, ScaleRule.RCEIL, ScaleRule.CEIL, ScaleRule.MSE, ScaleRule.MICROXCALING)


def _mxfp4_quantize(w: Tensor, rule: ScaleRule, block: Block, global_scale: Tensor | None) -> Parts:
    if rule in MXFP4_RULES:
        return Parts(*_fastest(w).mxfp4_quantize(w, rule))
    return Parts(*mx.quantize(w, "e2m1", rule, block))


def _mxfp4_qdq_activation(x: Tensor, rule: ScaleRule, input_scale: Tensor | None) -> Tensor:
    if rule in MXFP4_RULES:
        return _fastest(x).mxfp4_qdq_activation(x, rule)
    return mx.qdq_activation(x, "e2m1", rule)


def _mx_quantize(element: str) -> Quantize:
    return lambda w, rule, block, global_scale: Parts(*mx.quantize(w, element, rule, block))


def _mx_format(
    name: str, element: str, bits: float, producers: tuple[ScaleRule, ...], *, default: ScaleRule, rows: int = 1
) -> Format:
    return Format(
        name=name,
        element=element,
        block=MXFP4_BLOCK,
        rows=rows,
        default_block=(1, MXFP4_BLOCK) if rows == VARIABLE else None,
        scale="e8m0",
        bits=bits,
        rules=(default, *(r for r in _MX_RULES if r is not default), *producers),
        quantize=_mx_quantize(element),
        qdq_activation=lambda x, rule, input_scale: mx.qdq_activation(x, element, rule),
    )


# ---- float scales ----------------------------------------------------------------------------------------------------

_CT, _MODELOPT, _TORCHAO = ScaleRule.LLM_COMPRESSOR, ScaleRule.MODELOPT, ScaleRule.TORCHAO
_QUARKS = (ScaleRule.QUARK, ScaleRule.QUARK_F2F)
_FP8_RULES = (ScaleRule.AMAX, _MODELOPT, _CT, *_QUARKS)
_INT_RULES = (ScaleRule.AMAX, ScaleRule.MINMAX, _CT, ScaleRule.LLM_COMPRESSOR_ASYM, *_QUARKS)


def _scaled_quantize(element: str) -> Quantize:
    def quantize(w: Tensor, rule: ScaleRule, block: Block, shared: Tensor | None) -> Parts:
        parts = scaled.quantize(w, element, rule, block, None if shared is None else shared.float().reshape(1, 1))
        return Parts(parts.codes, parts.scales, None, parts.zero_points)

    return quantize


def _int4_after_fp8(w: Tensor, rule: ScaleRule, block: Block, global_scale: Tensor | None) -> Parts:
    return Parts(*scaled.quantize_int4_after_fp8(w, rule, global_scale))


def _fp8_activation(group: int = 0) -> Callable[[Tensor, ScaleRule, Tensor | None], Tensor]:
    return lambda x, rule, input_scale: scaled.qdq_activation(x, "e4m3", input_scale, group)


def _int8_activation(x: Tensor, rule: ScaleRule, input_scale: Tensor | None) -> Tensor:
    return scaled.qdq_activation(x, "int8", input_scale)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="nvfp4",
            element="e2m1",
            block=NVFP4_BLOCK,
            scale="e4m3",
            bits=4.5,
            has_global=True,
            rules=tuple(nvfp4.RULES),
            quantize=_nvfp4_quantize,
            shared_scale=lambda rule, amax: nvfp4.get_rule(rule).global_scale(amax),
            dequantize=_nvfp4_dequantize,
            dequantize_cpu=_nvfp4_dequantize_cpu,
            qdq_activation=lambda x, rule, input_scale: _fastest(x).nvfp4_qdq_activation(x, input_scale),
        ),
        Format(
            name="mxfp4",
            element="e2m1",
            block=MXFP4_BLOCK,
            scale="e8m0",
            bits=4.25,
            rules=(*_MX_RULES, _MODELOPT, _CT, ScaleRule.QUARK, _TORCHAO),
            quantize=_mxfp4_quantize,
            dequantize=lambda codes, scales, g: _decoder(codes).mxfp4_dequantize(codes, scales),
            dequantize_cpu=lambda codes, scales, g, dtype: cpu.mxfp4_dequantize(codes, scales, dtype),
            qdq_activation=_mxfp4_qdq_activation,
        ),
        # ModelOpt's W4A8: E2M1 with E4M3 scales a block of 32, global scale amax / 448; its activations are FP8.
        Format(
            name="nvfp4_w4a8",
            element="e2m1",
            block=32,
            scale="e4m3",
            bits=4.25,
            has_global=True,
            rules=(ScaleRule.AMAX, ScaleRule.MODELOPT, ScaleRule.MSE),
            quantize=_w4a8_quantize,
            shared_scale=_w4a8_global,
            qdq_activation=_fp8_activation(),
        ),
        _mx_format("mxfp6_e2m3", "e2m3", 6.25, (ScaleRule.QUARK, _TORCHAO), default=ScaleRule.EVEN),
        _mx_format("mxfp6_e3m2", "e3m2", 6.25, (ScaleRule.QUARK, _TORCHAO), default=ScaleRule.EVEN),
        _mx_format("mxfp8_e4m3", "e4m3", 8.25, (_MODELOPT, _CT, _TORCHAO), default=ScaleRule.RCEIL, rows=VARIABLE),
        _mx_format("mxfp8_e5m2", "e5m2", 8.25, (_TORCHAO,), default=ScaleRule.RCEIL, rows=VARIABLE),
        Format(
            name="fp8_tensor",
            element="e4m3",
            block=WHOLE,
            rows=WHOLE,
            scale="float",
            bits=8.0,
            rules=_FP8_RULES,
            quantize=_scaled_quantize("e4m3"),
            shared_scale=lambda rule, amax: scaled.only_scale(amax, "e4m3", rule),
            qdq_activation=_fp8_activation(),
        ),
        Format(
            name="fp8_channel",
            element="e4m3",
            block=WHOLE,
            scale="float",
            bits=8.0,
            rules=_FP8_RULES,
            quantize=_scaled_quantize("e4m3"),
            qdq_activation=_fp8_activation(),
        ),
        Format(
            name="fp8_block",
            element="e4m3",
            block=VARIABLE,
            rows=VARIABLE,
            default_block=(128, 128),
            partial_blocks=True,
            scale="float",
            bits=8.0,
            rules=(ScaleRule.AMAX, ScaleRule.RCEIL, _MODELOPT, _CT),
            quantize=_scaled_quantize("e4m3"),
            qdq_activation=_fp8_activation(128),
        ),
        # AMD Quark's int4_fp8: INT4 with a float scale a row, and one global multiplier (that of the FP8 step before).
        Format(
            name="int4_channel",
            element="int4",
            block=WHOLE,
            scale="float",
            bits=4.0,
            has_global=True,
            rules=(ScaleRule.QUARK_F2F,),
            quantize=_int4_after_fp8,
            dequantize=_int4_after_fp8_dequantize,
            shared_scale=lambda rule, amax: scaled.fp8_global_scale(amax),
        ),
        Format(
            name="int4_group",
            element="int4",
            block=VARIABLE,
            default_block=(1, 128),
            scale="float",
            bits=4.0,
            zero_points=True,
            rules=(*_INT_RULES, _MODELOPT),
            quantize=_scaled_quantize("int4"),
        ),
        Format(
            name="int8_group",
            element="int8",
            block=VARIABLE,
            default_block=(1, 128),
            scale="float",
            bits=8.0,
            zero_points=True,
            rules=_INT_RULES,
            quantize=_scaled_quantize("int8"),
        ),
        Format(
            name="int8_tensor",
            element="int8",
            block=WHOLE,
            rows=WHOLE,
            scale="float",
            bits=8.0,
            zero_points=True,
            rules=(ScaleRule.AMAX, ScaleRule.MINMAX),
            quantize=_scaled_quantize("int8"),
            qdq_activation=_int8_activation,
        ),
        Format(
            name="int8_channel",
            element="int8",
            block=WHOLE,
            scale="float",
            bits=8.0,
            zero_points=True,
            rules=(*_INT_RULES, _MODELOPT),
            quantize=_scaled_quantize("int8"),
            qdq_activation=_int8_activation,
        ),
    )
}


def get_format(name: str) -> Format:
    """The format called `name`. Raises FormatError naming the choices."""
    if name not in FORMATS:
        raise FormatError(f"unknown number format {name!r}", fix=f"choose one of: {', '.join(FORMATS)}")
    return FORMATS[name]


def global_scale(format: str, rule: str | None, amax: Tensor) -> Tensor:
    """The decode multiplier that `rule` gives a tensor, or tensors fused at serving, whose largest magnitude is `amax`.

    amax: scalar. Returns what `quantize(..., global_scale=)` takes: float32 (float64 for a rule whose tool stores a
    divisor). Raises FormatError for a format whose tensors share no scale.
    """
    spec = get_format(format)
    chosen = spec.rule(rule)
    if spec.shared_scale is None:
        raise FormatError(f"{format} has no scale that a whole tensor shares", fix="leave the global scale out")
    return spec.shared_scale(chosen, amax)


def element_dtype(format: str) -> torch.dtype:
    """The dtype of a format's packed codes."""
    return elements.ELEMENTS[get_format(format).element].dtype
