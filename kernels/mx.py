"""MX formats: elements of any float kind with a shared power of two, under every scale rule.

    codes, scale_bytes = quantize(w_nk, "e2m1", ScaleRule.MODELOPT)
    w_hat_nk = dequantize(codes, scale_bytes, "e2m1")

A rule is a row of RULES: which exponents a block may get, and how its elements round. Among several exponents the one
of the smallest squared error is taken. For E2M1 and a plain rule the result is that of `reference.mxfp4_quantize`. The
producers' rows repeat their tools byte for byte; docs/formats.md names versions and the few exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import BLOCK_DIMS, join_blocks, per_element, split_blocks, spread
from .elements import ELEMENTS, Element, decode, encode, pack
from .reference import e8m0_values, exact_quotient, mx_exponents
from .tables import E8M0_BIAS, E8M0_NAN, MXFP4_BLOCK, ScaleRule, Ties, Zeros

_BLOCK = (1, MXFP4_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class MxRule:
    """exponents(amax, element): the candidates for k, int32; the first is kept where others are no better.

    ties, zeros: of the elements. divisor(k): the exponent that elements are divided by. min_byte: the smallest scale
    byte stored. Where a block is so small that these are not k, the tool's codes and scale do not fit each other; they
    are repeated all the same.
    """

    exponents: Callable[[Tensor, Element], tuple[Tensor, ...]]
    ties: Ties = Ties.EVEN
    zeros: Zeros = Zeros.SIGNED
    divisor: Callable[[Tensor], Tensor] = lambda k: k
    min_byte: int = 0


def quantize(w: Tensor, element: str, rule: ScaleRule | str, block: tuple[int, int] = _BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize `w` `[..., N, K]` (any float dtype) to packed codes and E8M0 scale bytes (uint8), one a block.

    block: (rows, columns) that share a scale; columns divide K. A zero block gets the smallest byte, one with NaN or
    infinity byte 255. Raises ValueError for a rule that MX formats do not have.
    """
    chosen, spec = _rule(rule, element), ELEMENTS[element]
    blocks = split_blocks(w.float(), block)
    amax = blocks.abs().amax(BLOCK_DIMS)
    # At most so large that the largest element, below 2**(emax + 1) * 2**k, is finite in float32.
    first, *others = (
        torch.where(amax == 0, -E8M0_BIAS, k.clamp(-E8M0_BIAS, E8M0_BIAS - spec.emax))
        for k in chosen.exponents(amax, spec)
    )
    k, codes = first, _round(blocks, first, element, chosen)
    least = _squared_error(codes, k, blocks, element) if others else amax
    for other in others:
        found = _round(blocks, other, element, chosen)
        error = _squared_error(found, other, blocks, element)
        better = error < least
        codes = torch.where(per_element(better), found.view(torch.uint8), codes.view(torch.uint8)).view(spec.dtype)
        k, least = torch.where(better, other, k), torch.minimum(error, least)
    scale_bytes = torch.where(amax.isfinite(), (k + E8M0_BIAS).clamp(min=chosen.min_byte), E8M0_NAN).to(torch.uint8)
    scale_shape = (*w.shape[:-2], *scale_bytes.shape[-2:][-w.dim() :])  # a vector's scales have no row
    return pack(join_blocks(codes, w.shape), element), scale_bytes.reshape(scale_shape)


def dequantize(codes: Tensor, scale_bytes: Tensor, element: str, block: tuple[int, int] = _BLOCK) -> Tensor:
    """Packed codes and E8M0 bytes to float32 `[..., N, K]`: element * 2**(byte - 127); byte 255 gives NaN."""
    values = decode(codes, element)
    return values * spread(e8m0_values(scale_bytes), block, values.shape)


def qdq_activation(x: Tensor, element: str, rule: ScaleRule | str) -> Tensor:
    """Quantize-dequantize activations `x` `[M, K]` (dynamic, per block of 32 along K); returns x's dtype."""
    return dequantize(*quantize(x, element, rule), element).to(x.dtype)


def _round(blocks: Tensor, k: Tensor, element: str, rule: MxRule) -> Tensor:
    """Codes of blocks / 2**k. In float64: 2**-127 is no normal float32, and some CPUs flush what is not."""
    step = per_element(torch.exp2(rule.divisor(k).double()))
    return encode((blocks.double() / step).float(), element, rule.ties, rule.zeros)


def _squared_error(codes: Tensor, k: Tensor, blocks: Tensor, element: str) -> Tensor:
    values = decode(pack(codes, element), element) * per_element(torch.exp2(k.double()))
    return (values - blocks).square().sum(BLOCK_DIMS)


# ---- exponents -------------------------------------------------------------------------------------------------------


def _plain(rule: ScaleRule) -> Callable[[Tensor, Element], tuple[Tensor, ...]]:
    return lambda amax, e: (mx_exponents(amax, rule, emax=e.emax, largest=e.max, mantissa_bits=e.mantissa_bits),)


def _nearby(amax: Tensor, element: Element) -> tuple[Tensor, ...]:
    """floor's exponent, the next and the one before: among them are those of all plain rules."""
    floor = mx_exponents(amax, ScaleRule.FLOOR, emax=element.emax)
    return floor, floor + 1, floor - 1


def _even_as_e2m1(amax: Tensor, element: Element) -> tuple[Tensor, ...]:
    """compressed-tensors rounds every block's maximum to E2M1's one mantissa bit, whatever the element."""
    return (mx_exponents(amax, ScaleRule.EVEN, emax=element.emax),)


def _rceil_by_log2(amax: Tensor, element: Element) -> tuple[Tensor, ...]:
    """ceil(log2(amax / max)) with the logarithm rounded to float32, as ModelOpt and torchao do: a maximum a few units
    in the last place above max * 2**k still gets k."""
    ratio = exact_quotient(amax, element.max).clamp(min=2.0**-E8M0_BIAS)
    return (torch.log2(ratio.double()).float().ceil().nan_to_num(posinf=E8M0_BIAS).int(),)


def _floor_by_log2(amax: Tensor, element: Element) -> tuple[Tensor, ...]:
    """floor with the logarithm rounded to float32, as microxcaling does: a maximum a few units in the last place below
    2**k already counts as 2**k."""
    exponent = torch.log2(amax.double().clamp(min=2.0**-126)).float().floor()
    return (exponent.nan_to_num(posinf=E8M0_BIAS).int() - element.emax,)


RULES: dict[ScaleRule, MxRule] = {
    ScaleRule.FLOOR: MxRule(exponents=_plain(ScaleRule.FLOOR)),
    ScaleRule.EVEN: MxRule(exponents=_plain(ScaleRule.EVEN)),
    ScaleRule.CEIL: MxRule(exponents=_plain(ScaleRule.CEIL)),
    ScaleRule.RCEIL: MxRule(exponents=_plain(ScaleRule.RCEIL)),
    ScaleRule.MSE: MxRule(exponents=_nearby),
    ScaleRule.MODELOPT: MxRule(exponents=_rceil_by_log2),
    ScaleRule.LLM_COMPRESSOR: MxRule(exponents=_even_as_e2m1, zeros=Zeros.VALUE),
    ScaleRule.QUARK: MxRule(exponents=_plain(ScaleRule.EVEN), zeros=Zeros.POSITIVE, min_byte=1),
    ScaleRule.TORCHAO: MxRule(exponents=_rceil_by_log2, divisor=lambda k: torch.where(k == -E8M0_BIAS, 0, k)),
    ScaleRule.MICROXCALING: MxRule(exponents=_floor_by_log2, ties=Ties.AWAY),
}
# ModelOpt counts midpoints strictly exceeded, and its sign formula makes a zero negative; its MXFP8 is a plain cast.
_MODELOPT_E2M1 = MxRule(exponents=_rceil_by_log2, ties=Ties.ZERO, zeros=Zeros.NEGATIVE)


def _rule(rule: ScaleRule | str, element: str) -> MxRule:
    rule = ScaleRule(rule)
    if rule is ScaleRule.MODELOPT and element == "e2m1":
        return _MODELOPT_E2M1
    if rule not in RULES:
        raise ValueError(f"MX formats have no scale rule {rule.value!r}; choose one of: {', '.join(RULES)}")
    return RULES[rule]
