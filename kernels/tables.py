"""Element grids and the names of scale rules and roundings, as data.

Sources: OCP Microscaling Formats (MX) v1.0, clauses 5.3.3 (E2M1), 5.4.1 (E8M0); OCP OFP8 v1.0 (E4M3); NVIDIA's NVFP4
(E2M1 elements, E4M3 scale per 16, float32 global scale).
"""

from __future__ import annotations

from enum import StrEnum

# E2M1 (OCP MX v1.0, 5.3.3): code = sign * 8 + magnitude index.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_EMAX = 2  # exponent of the largest power of two, 4.0
# Midpoints between neighbours; a tie goes to the even code (0, 2, 4, 6).
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
E4M3_MIN_NORMAL = 2.0**-6
E8M0_BIAS = 127  # byte b means 2**(b - 127); 255 is NaN (OCP MX v1.0, 5.4.1)
E8M0_NAN = 255

NVFP4_BLOCK = 16
NVFP4_MIN_GLOBAL = 2.0**-118  # 1 / (2**-118 * 2**-9), the largest multiplier in use, is 2**127
NVFP4_FOUR_OVER_SIX_MAX = 256.0  # largest block scale a tensor's amax gets: 1.5 times it is still in E4M3
MXFP4_BLOCK = 32
MXFP4_MAX_SCALE_BYTE = 252  # 6 * 2**125 is the largest product that float32 holds; 4 * 2**126 is infinite


class ScaleRule(StrEnum):
    """How the scales, and the rounding of the elements, follow from a block's largest magnitude `a`.

    By formula. MX exponent k, with 2**emax the element's largest power of two and `max` its largest value: floor:
    floor(log2 a) - emax (OCP MX v1.0, 6.3); even: the same after rounding `a` to the element's mantissa; ceil:
    ceil(log2 a) - emax; rceil: ceil(log2(a / max)). mse: the candidate with the smallest squared error. NVFP4: amax:
    a / (6 * global) in E4M3; four_over_six: a / 6 or a / 4, whichever errs less. FP8 and INT: amax: a / max; minmax:
    (largest - smallest) / steps, with a zero point.

    By producer: every byte as the tool writes it, its zero blocks, ties and number types included. quark: as AMD Quark
    quantizes a loaded model; quark_f2f: as it quantizes file to file, where that differs. llm_compressor_asym: its
    schemes with zero points. docs/formats.md has a line for each rule of each format.
    """

    AMAX = "amax"
    MINMAX = "minmax"
    FOUR_OVER_SIX = "four_over_six"
    MSE = "mse"
    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"
    MODELOPT = "modelopt"
    LLM_COMPRESSOR = "llm_compressor"
    LLM_COMPRESSOR_ASYM = "llm_compressor_asym"
    QUARK = "quark"
    QUARK_F2F = "quark_f2f"
    TORCHAO = "torchao"
    MICROXCALING = "microxcaling"


class Ties(StrEnum):
    """Where an element goes that lies halfway between two codes."""

    EVEN = "even"  # to the code whose last bit is 0
    ZERO = "zero"  # toward zero
    AWAY = "away"  # away from zero


class Zeros(StrEnum):
    """Which of the two zero codes an element gets that rounds to zero."""

    SIGNED = "signed"  # by the sign bit: also -0.0 stays negative
    VALUE = "value"  # negative for a negative value, positive for 0.0 and -0.0
    POSITIVE = "positive"  # always positive
    NEGATIVE = "negative"  # as VALUE, but 0.0 and -0.0 are negative


MXFP4_RULES = (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.CEIL)  # those that are an exponent alone
