"""FP8 and INT with float scales: a tensor, a row, a group of a row, or a 2-D block that share one.

    parts = quantize(w_nk, "e4m3", ScaleRule.AMAX, block=(128, 128))
    parts.codes, parts.scales, parts.zero_points

A rule is a row of RULES: the scale's divisor, the number type it is computed in, what a zero block gets, and how
elements are divided. block = (rows, columns); 0 stands for all. The producers' rows repeat their tools byte for byte,
but for all-zero FP8 tensors, which never get a zero scale or NaN codes here; docs/formats.md names versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .blocks import BLOCK_DIMS, join_blocks, narrow, per_element, split_blocks
from .elements import ELEMENTS, decode, encode, pack
from .reference import e8m0_values, exact_quotient, mx_exponents
from .tables import E8M0_BIAS, ScaleRule

_EPS = torch.finfo(torch.float32).eps
_WHOLE = (0, 0)


class Scaled(NamedTuple):
    """codes: packed, `[..., N, C]`. scales: one a block, float32, or E8M0 bytes (uint8). zero_points: int32 or None."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledRule:
    """half_range: integers divide amax by half their range (7.5, 127.5) instead of by their largest value (7, 127).

    asymmetric: integers span smallest to largest value, 0 included, and have a zero point. narrow_scale: whose scales
    are computed in the checkpoint's dtype. zero: the scale of a zero block; None: epsilon of the scale's dtype.
    minimum: the smallest scale of integers. reciprocal: integers are multiplied by 1 / scale. narrow_quotient: where
    x / scale is rounded to the checkpoint's dtype before the element. narrow_divisor: so is a scale that floats are
    divided by, if it is not the tensor's only one. unsigned_zero: -0.0 becomes 0.0, as by adding a zero point of 0.
    power_of_two: scales are E8M0 bytes, ceil(log2(amax / max)).
    """

    half_range: bool = False
    asymmetric: bool = False
    narrow_scale: Literal["never", "integers", "always"] = "never"
    zero: float | None = 1.0
    minimum: float = 0.0
    reciprocal: bool = False
    narrow_quotient: Literal["never", "only floats", "only tensor", "always"] = "never"
    narrow_divisor: bool = False
    unsigned_zero: bool = False
    power_of_two: bool = False


def quantize(
    w: Tensor, element: str, rule: ScaleRule | str, block: tuple[int, int], scales: Tensor | None = None
) -> Scaled:
    """Quantize `w` `[..., N, K]` (any float dtype) to elements of `element` ("e4m3", "e5m2", "int4", "int8").

    block: (rows, columns) that share a scale, 0 for all; partial last blocks are allowed. scales: given ones instead of
    the rule's. Raises ValueError for a rule that has no row.
    """
    return _quantize(narrow(w), element, _rule(rule), block, scales)


def quantize_int4_after_fp8(
    w: Tensor, rule: ScaleRule | str, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """AMD Quark's progressive INT4: `w` `[..., N, K]` to FP8 under one scale (the global one), then those values to
    INT4 under a scale a row.

    Returns packed codes, float32 scales `[..., N, 1]` and the global scale; value = code * scale * global.
    """
    if global_scale is None:
        global_scale = fp8_global_scale(w.abs().amax() if w.numel() else w.new_zeros(()))
    fp8 = _quantize(narrow(w), "e4m3", _rule(rule), _WHOLE, global_scale.float().reshape(1, 1))
    int4 = _quantize(fp8.codes.float(), "int4", _rule(rule), (1, 0))
    return int4.codes, int4.scales, global_scale


def only_scale(amax: Tensor, element: str, rule: ScaleRule | str) -> Tensor:
    """The scale of a float tensor that has one only, from its largest magnitude (scalar), float32."""
    scales, _ = _scales(narrow(amax).reshape(1, 1, 1, 1), element, _rule(rule))
    return scales.reshape(())


def fp8_global_scale(amax: Tensor) -> Tensor:
    """amax / 448, float32: the FP8 step's scale; float32's epsilon for zero, as AMD Quark has it."""
    scale = exact_quotient(amax.float(), ELEMENTS["e4m3"].max)
    return torch.where(scale == 0, _EPS, scale)


def qdq_activation(x: Tensor, element: str, scale: Tensor | None = None, group: int = 0) -> Tensor:
    """Quantize-dequantize activations `x` `[M, K]` through FP8 (or INT8); returns x's dtype.

    scale: static float32 multiplier for the whole tensor; None: each row's own amax / max, or that of each `group` of
    columns of a row, so that a token's result does not depend on its batch.
    """
    if scale is None:
        parts = quantize(x.float(), element, ScaleRule.AMAX, (1, group))
        blocks = split_blocks(decode(parts.codes, element), (1, group))
        return join_blocks(blocks * per_element(parts.scales), x.shape).to(x.dtype)
    codes = encode(x.float() / scale.float(), element)
    return (decode(pack(codes, element), element) * scale.float()).to(x.dtype)


def _quantize(
    w: Tensor, element: str, rule: ScaledRule, block: tuple[int, int], scales: Tensor | None = None
) -> Scaled:
    """`quantize` of a `w` whose dtype is the one to compute in."""
    blocks = split_blocks(w, block)
    zero_points = None
    if scales is None:
        scales, zero_points = _scales(blocks, element, rule)
    step = e8m0_values(scales) if scales.dtype == torch.uint8 else scales.float()
    codes = _round(blocks, per_element(step), zero_points, element, rule, only=block == _WHOLE)
    shape = (*w.shape[:-2], *codes.shape[-4::2][-w.dim() :])  # one scale a block; a vector's have no row
    return Scaled(
        pack(join_blocks(codes, w.shape), element),
        scales.expand(codes.shape[:-4] + codes.shape[-4::2]).reshape(shape),
        None if zero_points is None else zero_points.int().reshape(shape),
    )


def _scales(blocks: Tensor, element: str, rule: ScaledRule) -> tuple[Tensor, Tensor | None]:
    """Scales (float32 values or E8M0 bytes) and zero points (float32) of `split_blocks`' blocks."""
    spec = ELEMENTS[element]
    integer = not spec.mantissa_bits
    narrowed = rule.narrow_scale == "always" or (rule.narrow_scale == "integers" and integer)
    blocks = blocks if narrowed else blocks.float()
    amax = blocks.abs().amax(BLOCK_DIMS)
    if rule.power_of_two:
        k = mx_exponents(amax, ScaleRule.RCEIL, emax=spec.emax, largest=spec.max)
        k = torch.where(amax == 0, -E8M0_BIAS, k.clamp(-E8M0_BIAS, E8M0_BIAS - spec.emax))
        return (k + E8M0_BIAS).to(torch.uint8), None
    zero = torch.finfo(blocks.dtype).eps if rule.zero is None else rule.zero
    if integer and rule.asymmetric:
        low, high = blocks.amin(BLOCK_DIMS).clamp(max=0), blocks.amax(BLOCK_DIMS).clamp(min=0)
        scales = exact_quotient(high - low, 2 * spec.max - 1)
        zero_points = (-spec.max - low / scales).clamp(-spec.max, spec.max - 1).nan_to_num(0.0).round().float()
    else:
        divisor = spec.max - (0.5 if rule.half_range else 1.0) if integer else spec.max
        scales, zero_points = exact_quotient(amax, divisor), None
    scales = torch.where(scales == 0, zero, scales)
    return scales.float().clamp(min=rule.minimum if integer else 0.0), zero_points


def _round(
    blocks: Tensor, step: Tensor, zero_points: Tensor | None, element: str, rule: ScaledRule, *, only: bool
) -> Tensor:
    """Codes of `split_blocks`' blocks. step: float32, broadcastable. only: it is the tensor's only one."""
    integer = not ELEMENTS[element].mantissa_bits
    if rule.narrow_divisor and not integer and not only:
        step = step.to(blocks.dtype).float()
    quotient = blocks.float() * (1.0 / step) if rule.reciprocal and integer else blocks.float() / step
    rounded = {
        "never": False,
        "only floats": not integer,
        "only tensor": not integer and only,
        "always": True,
    }[rule.narrow_quotient]
    if rounded:
        quotient = quotient.to(blocks.dtype)
    if zero_points is not None:
        quotient = quotient + per_element(zero_points).to(quotient.dtype)
    elif rule.unsigned_zero:
        quotient = quotient + 0.0
    return encode(quotient.float(), element)


_LLM_COMPRESSOR = ScaledRule(
    half_range=True, narrow_scale="always", zero=None, narrow_quotient="always", unsigned_zero=True
)
_QUARK = ScaledRule(
    half_range=True,
    narrow_scale="always",
    zero=_EPS,
    minimum=_EPS,
    reciprocal=True,
    narrow_quotient="only floats",
)

RULES: dict[ScaleRule, ScaledRule] = {
    ScaleRule.AMAX: ScaledRule(),
    ScaleRule.MINMAX: ScaledRule(asymmetric=True),
    ScaleRule.RCEIL: ScaledRule(power_of_two=True),
    ScaleRule.MODELOPT: ScaledRule(narrow_quotient="only tensor"),
    ScaleRule.LLM_COMPRESSOR: _LLM_COMPRESSOR,
    ScaleRule.LLM_COMPRESSOR_ASYM: replace(_LLM_COMPRESSOR, asymmetric=True),
    ScaleRule.QUARK: _QUARK,
    ScaleRule.QUARK_F2F: replace(_QUARK, narrow_scale="integers", narrow_divisor=True),
}


def _rule(rule: ScaleRule | str) -> ScaledRule:
    rule = ScaleRule(rule)
    if rule not in RULES:
        raise ValueError(f"float scales have no rule {rule.value!r}; choose one of: {', '.join(RULES)}")
    return RULES[rule]
