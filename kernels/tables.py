"""Element grids and scale rules as data.

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
E8M0_BIAS = 127  # byte b means 2**(b - 127); 255 is NaN (OCP MX v1.0, 5.4.1)
E8M0_NAN = 255

NVFP4_BLOCK = 16
NVFP4_MIN_GLOBAL = 2.0**-118  # 1 / (2**-118 * 2**-9), the largest multiplier in use, is 2**127
MXFP4_BLOCK = 32
MXFP4_MAX_SCALE_BYTE = 252  # 6 * 2**125 is the largest product that float32 holds; 4 * 2**126 is infinite


class ScaleRule(StrEnum):
    """How a block's scale follows from the block's largest magnitude `a`.

    MXFP4 exponent k: floor: floor(log2 a) - 2 (OCP MX v1.0, 6.3); even: the same after rounding the mantissa up from
    1.75 (AMD Quark, aiter Triton, llm-compressor); ceil: ceil(log2 a) - 2; rceil: ceil(log2(a / 6)) (ModelOpt,
    flashinfer). NVFP4: amax: a / (6 * global) in E4M3 (ModelOpt).
    """

    AMAX = "amax"
    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"


MXFP4_RULES = (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.CEIL)
NVFP4_RULES = (ScaleRule.AMAX,)
