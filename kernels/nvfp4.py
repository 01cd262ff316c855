"""NVFP4 under every scale rule: E2M1 elements, E4M3 block scales, one global scale.

    codes, scales, global_scale = quantize(w_nk, ScaleRule.FOUR_OVER_SIX)
    w_hat_nk = reference.nvfp4_dequantize(codes, scales, global_scale)

A rule is a row of RULES: how the global scale follows from the tensor's largest magnitude, which scales a block may
get, and how its elements are scaled and rounded. Among several block scales the one of the smallest squared error is
taken. `amax` gives what `reference.nvfp4_quantize` gives. The producers' rows repeat their tools byte for byte, but for
an all-zero matrix, which never gets a NaN scale here; docs/formats.md names versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import narrow
from .elements import encode
from .reference import e2m1_values, e4m3_round, exact_quotient, nvfp4_block_scales, nvfp4_global_scale, pack_fp4
from .tables import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    NVFP4_BLOCK,
    NVFP4_FOUR_OVER_SIX_MAX,
    ScaleRule,
    Zeros,
)

_EPS = torch.finfo(torch.float32).eps
_SEARCHED = 1 << 16  # blocks whose candidates are compared at a time


def _divide(blocks: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    return blocks / (scales * global_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvfp4Rule:
    """global_scale(amax): decode multiplier of a tensor, or a fused group, whose largest magnitude is amax.

    candidates(amax_blocks, global_scale): block scales to choose from, float32 on E4M3's grid; the first is kept where
    others are no better. scale(blocks, scales, global_scale): elements in units of their step. zeros: of the elements.
    stored(scales, global_scale): the scales as they are written. narrow: maxima are taken in the checkpoint's dtype.
    """

    candidates: Callable[[Tensor, Tensor], Sequence[Tensor]]
    global_scale: Callable[[Tensor], Tensor] = nvfp4_global_scale
    scale: Callable[[Tensor, Tensor, Tensor], Tensor] = _divide
    stored: Callable[[Tensor, Tensor], Tensor] = lambda scales, global_scale: scales
    zeros: Zeros = Zeros.SIGNED
    narrow: bool = False


def quantize(
    w: Tensor, rule: ScaleRule | str, global_scale: Tensor | None = None, block: int = NVFP4_BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w` `[..., K]` (any float dtype, K divisible by `block`).

    global_scale: decode multiplier, broadcastable to `[..., K/block]`; None: the rule's own for the whole tensor.
    Returns packed codes `[..., K/2]` uint8, block scales `[..., K/block]` float8_e4m3fn and the global scale (float32;
    float64 for llm_compressor, whose tool stores a divisor). Raises ValueError for a rule that NVFP4 does not have.
    """
    chosen = get_rule(rule)
    blocks = (narrow(w) if chosen.narrow else w.float()).unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1)
    if global_scale is None:
        global_scale = chosen.global_scale(amax.amax() if amax.numel() else amax.new_zeros(()))
    if not chosen.narrow:
        global_scale = global_scale.float()
    scales, codes = _choose(blocks.float(), amax, global_scale, chosen)
    stored = e4m3_round(chosen.stored(scales, global_scale))
    return pack_fp4(codes.flatten(-2)), stored, global_scale


def get_rule(rule: ScaleRule | str) -> Nvfp4Rule:
    """The row of RULES. Raises ValueError naming the choices."""
    rule = ScaleRule(rule)
    if rule not in RULES:
        raise ValueError(f"NVFP4 has no scale rule {rule.value!r}; choose one of: {', '.join(RULES)}")
    return RULES[rule]


def _choose(blocks: Tensor, amax: Tensor, global_scale: Tensor, rule: Nvfp4Rule) -> tuple[Tensor, Tensor]:
    """Scales (float32) and codes of the candidate with the least squared error, a part of the blocks at a time."""
    flat, maxima = blocks.reshape(-1, blocks.shape[-1]), amax.reshape(-1)
    g = global_scale.expand(amax.shape).reshape(-1)
    scales, codes = torch.empty_like(flat[:, 0]), torch.empty_like(flat, dtype=torch.uint8)
    for start in range(0, len(flat), _SEARCHED):
        part = slice(start, start + _SEARCHED)
        x, g_part = flat[part], g[part].unsqueeze(-1)
        first, *others = (c.unsqueeze(-1) for c in rule.candidates(maxima[part], g[part]))
        chosen, best = first, encode(rule.scale(x, first, g_part), "e2m1", zeros=rule.zeros)
        least = _squared_error(best, chosen * g_part, x) if others else first
        for other in others:
            found = encode(rule.scale(x, other, g_part), "e2m1", zeros=rule.zeros)
            error = _squared_error(found, other * g_part, x)
            better = error < least
            chosen, best = torch.where(better, other, chosen), torch.where(better, found, best)
            least = torch.minimum(error, least)
        scales[part], codes[part] = chosen.squeeze(-1), best
    return scales.reshape(amax.shape), codes.reshape(blocks.shape)


def _squared_error(codes: Tensor, step: Tensor, blocks: Tensor) -> Tensor:
    return (e2m1_values(codes).double() * step - blocks).square().sum(-1, keepdim=True)


# ---- global scales ---------------------------------------------------------------------------------------------------


def _four_over_six_global(amax: Tensor) -> Tensor:
    return nvfp4_global_scale(amax, E2M1_MAX * NVFP4_FOUR_OVER_SIX_MAX)


def _llm_compressor_global(amax: Tensor) -> Tensor:
    """compressed-tensors' divisor 2688 / amax, rounded to the checkpoint's dtype. Its reciprocal in float64, so that
    the divisor comes back exactly, and scale * (1 / divisor) rounds as scale / divisor."""
    amax = narrow(amax)
    divisor = (E2M1_MAX * E4M3_MAX / amax.clamp(min=torch.finfo(amax.dtype).tiny)).nan_to_num(posinf=1.0)
    return 1.0 / divisor.double()


def _quark_global(amax: Tensor) -> Tensor:
    scale = exact_quotient(amax.float(), E2M1_MAX * E4M3_MAX)
    return torch.where(scale == 0, _EPS, scale)


# ---- block scales ----------------------------------------------------------------------------------------------------


def _amax(amax: Tensor, g: Tensor) -> list[Tensor]:
    return [nvfp4_block_scales(amax, g).float()]


def _four_over_six(amax: Tensor, g: Tensor) -> list[Tensor]:
    """The largest magnitude as 6, or as 4 (a scale 1.5 times as large)."""
    return [nvfp4_block_scales(amax, g).float(), nvfp4_block_scales(amax * 1.5, g).float()]


def _every_scale(amax: Tensor, g: Tensor) -> list[Tensor]:
    """amax's scale, then the E4M3 values around it: the best of them is the best of all 126.

    Half of amax's scale, eight codes down, clips the largest element by more than finer steps can gain elsewhere; with
    a scale 26 times as large, 38 codes up, every element rounds to zero.
    """
    (first,) = _amax(amax, g)
    code = first.to(torch.float8_e4m3fn).view(torch.uint8).int()
    codes = ((code + offset).clamp(1, 126).to(torch.uint8) for offset in range(-8, 39) if offset)
    return [first, *(c.view(torch.float8_e4m3fn).float() for c in codes)]


def _llm_compressor(amax: Tensor, g: Tensor) -> list[Tensor]:
    """amax / 6 in the checkpoint's dtype, times the divisor; 0 becomes 0.125."""
    scale = e4m3_round(exact_quotient(amax, E2M1_MAX).float() * _divisor(g)).float()
    return [torch.where(scale == 0, 0.125, scale)]


def _quark(amax: Tensor, g: Tensor) -> list[Tensor]:
    """amax / (6 * global); what E4M3 rounds to 0 becomes 1.0, with which all elements round to 0."""
    scale = e4m3_round(amax / (g * E2M1_MAX)).float()
    return [torch.where(scale == 0, 1.0, scale)]


def _quark_f2f(amax: Tensor, g: Tensor) -> list[Tensor]:
    """Two divisions, and a zero block's amax / 6 becomes float32's epsilon."""
    scale = exact_quotient(amax, E2M1_MAX)
    return [e4m3_round(torch.where(scale == 0, _EPS, scale) / g).float()]


def _torchao(amax: Tensor, g: Tensor) -> list[Tensor]:
    """Two divisions; nothing below E4M3's smallest normal."""
    return [e4m3_round((exact_quotient(amax, E2M1_MAX) / g).clamp(min=E4M3_MIN_NORMAL)).float()]


# ---- elements in units of their step ---------------------------------------------------------------------------------


def _divisor(g: Tensor) -> Tensor:
    return (1.0 / g.double()).float()


def _llm_compressor_scale(blocks: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    return blocks / (scales / _divisor(g))


def _quark_f2f_scale(blocks: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    step = scales * g
    return blocks / torch.where(step == 0, _EPS, step)


def _torchao_scale(blocks: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    return blocks * ((1.0 / g) / scales)


RULES: dict[ScaleRule, Nvfp4Rule] = {
    ScaleRule.AMAX: Nvfp4Rule(candidates=_amax),
    ScaleRule.FOUR_OVER_SIX: Nvfp4Rule(candidates=_four_over_six, global_scale=_four_over_six_global),
    ScaleRule.MSE: Nvfp4Rule(candidates=_every_scale),
    ScaleRule.MODELOPT: Nvfp4Rule(candidates=_amax, zeros=Zeros.VALUE),
    ScaleRule.LLM_COMPRESSOR: Nvfp4Rule(
        candidates=_llm_compressor,
        global_scale=_llm_compressor_global,
        scale=_llm_compressor_scale,
        zeros=Zeros.VALUE,
        narrow=True,
    ),
    ScaleRule.QUARK: Nvfp4Rule(candidates=_quark, global_scale=_quark_global, zeros=Zeros.POSITIVE),
    ScaleRule.QUARK_F2F: Nvfp4Rule(
        candidates=_quark_f2f,
        global_scale=_quark_global,
        scale=_quark_f2f_scale,
        stored=lambda scales, g: scales * g / g,
        zeros=Zeros.POSITIVE,
    ),
    ScaleRule.TORCHAO: Nvfp4Rule(candidates=_torchao, scale=_torchao_scale),
}
