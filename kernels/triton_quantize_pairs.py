"""The kernel of `triton_quantize` for bfloat16 under NVFP4's rule `amax`: a block a thread, values in pairs.

Where the card can (PACKED), magnitudes and signs are found for two and four values at once, and E4M3 scales and
reciprocals by the card's own instructions; `tests/kernels/gpu_check.py` compares every case in which these could differ
from exact divisions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import bits_float, divide, divisor, e2m1_magnitude_codes, e4m3_values
from .triton_pairs import (
    four_words,
    larger_of_pair,
    larger_pairs,
    largest_pair,
    reciprocal,
    rounded_e4m3,
    sign_words,
    word_of_codes,
)
from .triton_scales import nvfp4_scale_bytes


@triton.jit
def nvfp4_pairs_kernel(
    x_ptr,
    g_ptr,
    words_ptr,
    scales_ptr,
    blocks,
    per_global,
    by,
    ONE_GLOBAL: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`_nvfp4_kernel` of bfloat16 under the rule `amax`, with what can be done for two values at once."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    x0, x1, x2, x3 = four_words(x_ptr, block * 8, here, WHOLE)
    x4, x5, x6, x7 = four_words(x_ptr, block * 8 + 4, here, WHOLE)
    pair = larger_pairs(largest_pair(x0, x1, x2, x3, PACKED), largest_pair(x4, x5, x6, x7, PACKED), PACKED)
    amax = larger_of_pair(pair)
    plain = False
    if ONE_GLOBAL:  # steps, E4M3's subnormal scales included, that need no scaling to be divided by
        one = tl.load(g_ptr)
        g = one + tl.zeros([ROWS], tl.float32)
        plain = (one > 8.271806125530277e-25) & (one < 1.2089258196146292e24)  # 2**-80, 2**80
    else:
        g = tl.load(g_ptr + block // per_global, mask=here, other=1.0)
    if plain:
        scale = divide_or_overflow(amax, g * 6.0, PACKED)
        scale = tl.where(scale == 0, 1.0, scale)
        byte, value = rounded_e4m3(tl.where(scale < 0.001953125, 0.001953125, scale), PACKED)
        step = value * g
        inverse = reciprocal(step, PACKED)
        word0 = _quotient_codes(x0, x1, x2, x3, step, inverse, step, by, False)
        word1 = _quotient_codes(x4, x5, x6, x7, step, inverse, step, by, False)
    else:
        byte = nvfp4_scale_bytes(amax, g, "amax")
        step = e4m3_values(byte) * g
        m, inverse, power = divisor(step)
        word0 = _quotient_codes(x0, x1, x2, x3, m, inverse, power, by, True)
        word1 = _quotient_codes(x4, x5, x6, x7, m, inverse, power, by, True)
    sign0, sign1 = sign_words(x0, x1, x2, x3, x4, x5, x6, x7, (step != step).to(tl.int32), PACKED)
    word0 |= sign0
    word1 |= sign1
    at = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    if WHOLE:
        tl.store(words_ptr + at, tl.join(word0, word1))
        tl.store(scales_ptr + block, byte.to(tl.uint8))
    else:
        tl.store(words_ptr + at, tl.join(word0, word1), mask=here[:, None])
        tl.store(scales_ptr + block, byte.to(tl.uint8), mask=here)


@triton.jit
def divide_or_overflow(x, d, PACKED: tl.constexpr):
    """x / d >= 0, near enough to the quotient that E4M3 rounds both alike; `d` and its reciprocal are normal.

    As for `divide`, this was compared for all 2**23 significands at each of E4M3's midpoints.
    """
    if PACKED:
        inverse = reciprocal(d, PACKED)
        q = x * inverse
        q = tl.where(q < 1024.0, divide(x, d, inverse), q)  # infinity has no remainder
    else:
        q = tl.div_rn(x, d)
    return q


@triton.jit
def _quotient_codes(x0, x1, x2, x3, m, inverse, power, by, SCALED: tl.constexpr):
    """A word of the magnitude codes of eight values divided by a step: whole, or as `divisor` gives it (SCALED)."""
    c0, c1 = _two_codes(x0, m, inverse, power, by, SCALED)
    c2, c3 = _two_codes(x1, m, inverse, power, by, SCALED)
    c4, c5 = _two_codes(x2, m, inverse, power, by, SCALED)
    c6, c7 = _two_codes(x3, m, inverse, power, by, SCALED)
    return word_of_codes(c0, c1, c2, c3, c4, c5, c6, c7, by)


@triton.jit
def _two_codes(x, m, inverse, power, by, SCALED: tl.constexpr):
    x0, x1 = bits_float(x * by), bits_float(x & -65536)
    if SCALED:
        x0, x1 = x0 * power, x1 * power
    q0, q1 = divide(x0, m, inverse), divide(x1, m, inverse)
    return e2m1_magnitude_codes(q0, "even"), e2m1_magnitude_codes(q1, "even")
