"""The kernel of `triton_error_details` for bfloat16: `triton_errors_pairs` with moments and attributions.

Beside what that kernel does, an element takes two roundings in units of its block's unrounded scale. Those are two
multiply-adds and an addition each: with m the larger of q and 1.5, q - 2**22 m is rounded to half q's binade, E2M1's
spacing, and its distance from q - 2**22 m is E2M1's error. Near a midpoint either neighbour errs alike, so q need not
be the quotient to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import bits_float, e2m1_values, e8m0_values, float_bits
from .triton_errors_pairs import (
    codes_and_scales,
    direct_errors,
    direct_scale,
    eight_pair_values,
    pair_units,
    read_first,
)
from .triton_pairs import e4m3_pair_values, four_words, larger_of_pair, larger_pairs, largest_pair, negative, reciprocal
from .triton_requant import global_number, largest_code, requant_block


@triton.jit
def detail_pairs_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    g_ptr,
    exponents_ptr,
    values_ptr,
    partial_ptr,
    blocks,
    per_global,
    by,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    TABLED: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """As `triton_error_details._details_kernel`, for bfloat16 in words of two and codes in words of eight."""
    program = tl.program_id(0).to(tl.int64)
    zero = tl.zeros([ROWS], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    sums += (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for i in range(TILES):
        tile = program * TILES + i
        block = tile * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        x0, x1, x2, x3 = four_words(x_ptr, block * 16, here, WHOLE)
        x4, x5, x6, x7 = four_words(x_ptr, block * 16 + 4, here, WHOLE)
        if PACKED:
            x7 = read_first(x7)
        even, odd, scale = codes_and_scales(words_ptr, scales_ptr, block, here, WHOLE)
        table = global_number(block, tile, ROWS, here, per_global, ONE_GLOBAL, TABLED)
        byte, low, high = requant_block(
            even, odd, scale, g_ptr, table, exponents_ptr, values_ptr, RULE, TABLED, PACKED, True
        )
        x8, x9, x10, x11 = four_words(x_ptr, block * 16 + 8, here, WHOLE)
        x12, x13, x14, x15 = four_words(x_ptr, block * 16 + 12, here, WHOLE)
        step = e4m3_pair_values(scale, PACKED) * tl.load(g_ptr + table)
        a_amax = tl.max(tl.abs(e2m1_values(largest_code(even, odd, PACKED)) * step), 1)
        positive = e8m0_values(byte)
        size = bits_float(float_bits(positive)[:, None] | (float_bits(step) & -2147483648))
        step0, step1 = tl.split(step)
        size0, size1 = tl.split(size)
        low0, low1 = tl.split(low)
        high0, high1 = tl.split(high)
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        most0 = larger_pairs(largest_pair(x0, x1, x2, x3, PACKED), largest_pair(x4, x5, x6, x7, PACKED), PACKED)
        most1 = larger_pairs(largest_pair(x8, x9, x10, x11, PACKED), largest_pair(x12, x13, x14, x15, PACKED), PACKED)
        own = direct_scale(larger_pairs(most0, most1, PACKED), RULE, PACKED)
        second = _ideal(positive * 6.0, a_amax, PACKED)
        first = _ideal(_below_six(step0), larger_of_pair(most0), PACKED)
        units = (pair_units(step0, PACKED), pair_units(size0, PACKED))
        found = sums
        found += (zero, zero)
        found = _eight_details(found, x0, x1, x2, x3, word0, low0, high0, units, first, second, own, by, RULE, PACKED)
        found = _eight_details(found, x4, x5, x6, x7, word1, low0, high0, units, first, second, own, by, RULE, PACKED)
        sums = _scaled(found, first, second)
        first = _ideal(_below_six(step1), larger_of_pair(most1), PACKED)
        units = (pair_units(step1, PACKED), pair_units(size1, PACKED))
        found = sums
        found += (zero, zero)
        found = _eight_details(found, x8, x9, x10, x11, word2, low1, high1, units, first, second, own, by, RULE, PACKED)
        found = _eight_details(
            found, x12, x13, x14, x15, word3, low1, high1, units, first, second, own, by, RULE, PACKED
        )
        sums = _scaled(found, first, second)
    out = partial_ptr + program * 22
    for j in tl.static_range(22):
        value = sums[j]
        if j == 12:
            value = sums[1] - value
        elif j == 17:
            value = sums[2] - value
        elif (j == 15) | (j == 20):
            value = 32.0 * TILES - value
        tl.store(out + j, tl.sum(value.to(tl.float64), 0))


@triton.jit
def _below_six(step):
    """The largest float32 not above six steps: a weight is beyond them where it is beyond this."""
    step = tl.abs(step)
    six = step * 6.0
    return bits_float(float_bits(six) - (tl.fma(step, -6.0, six) > 0).to(tl.int32))


@triton.jit
def _ideal(limit, amax, PACKED: tl.constexpr):
    """`limit`; a block's unrounded scale, amax / 6, squared; its inverse, 0 where squares are lost anyway."""
    inverse = tl.where(amax < 7.888609052210118e-31, 0.0, reciprocal(amax, PACKED) * 6.0)  # 2**-100
    ideal = amax * 0.16666666666666666
    return limit, ideal * ideal, inverse


@triton.jit
def _scaled(found, first, second):
    """The 22 sums, with those of sixteen elements' roundings, which come last, in units of their scales."""
    sums = ()
    for j in tl.static_range(22):
        if j == 14:
            sums += (tl.fma(found[22], first[1], found[j]),)
        elif j == 19:
            sums += (tl.fma(found[23], second[1], found[j]),)
        else:
            sums += (found[j],)
    return sums


@triton.jit
def _eight_details(
    sums, x0, x1, x2, x3, word, low, high, units, first, second, own, by, RULE: tl.constexpr, PACKED: tl.constexpr
):
    """`sums` and those of eight weights; as `triton_errors_pairs._eight_errors`.

    units: the steps of a and of b; first, second: of e1 and e2, beyond what an element saturates, and `_ideal`'s.
    """
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = eight_pair_values(word, low, high, PACKED)
    sums = _pair_details(sums, x0, a0, a1, b0, b1, units, first, second, own, by, RULE, PACKED)
    sums = _pair_details(sums, x1, a2, a3, b2, b3, units, first, second, own, by, RULE, PACKED)
    sums = _pair_details(sums, x2, a4, a5, b4, b5, units, first, second, own, by, RULE, PACKED)
    return _pair_details(sums, x3, a6, a7, b6, b7, units, first, second, own, by, RULE, PACKED)


@triton.jit
def _pair_details(sums, x, a0, a1, b0, b1, units, first, second, own, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    d0, d1 = direct_errors(x, own, by, RULE, PACKED)
    sums = _one_detail(sums, bits_float(x * by), a0 * units[0], b0, units[1], d0, first, second, PACKED)
    return _one_detail(sums, bits_float(x & -65536), a1 * units[0], b1, units[1], d1, first, second, PACKED)


@triton.jit
def _one_detail(sums, w, a, b, size, d, first, second, PACKED: tl.constexpr):
    e1 = a - w
    e2 = tl.fma(b, size, negative(a, PACKED))  # the product is exact
    square = e2 * e2
    core = (tl.fma(w, w, sums[0]), tl.fma(e1, e1, sums[1]), tl.fma(e2, e2, sums[2]), tl.fma(w, e1, sums[3]))
    core += (tl.fma(w, e2, sums[4]), tl.fma(e1, e2, sums[5]), tl.fma(d, d, sums[6]))
    core += (sums[7] + w, sums[8] + e1, sums[9] + e2)
    core += (tl.fma(square, e2, sums[10]), tl.fma(square, square, sums[11]))
    found1 = (sums[12], sums[13], sums[15], sums[16], sums[22])
    found2 = (sums[17], sums[18], sums[20], sums[21], sums[23])
    zero = is_zero(a, PACKED)
    found1 = attributed(found1, w, zero, is_zero(w, PACKED) * zero, e1, first[0], first[2], PACKED)
    found2 = attributed(found2, a, is_zero(b, PACKED), zero, e2, second[0], second[2], PACKED)
    core += (found1[0], found1[1], sums[14], found1[2], found1[3])
    core += (found2[0], found2[1], sums[19], found2[2], found2[3])
    core += (found1[4], found2[4])
    return core


@triton.jit
def is_zero(x, PACKED: tl.constexpr):
    """1.0 where `x` is 0, else 0.0: a factor, as predicates are few and selections as many again."""
    if PACKED:
        zero = tl.inline_asm_elementwise(
            "set.eq.f32.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        zero = tl.where(x == 0, 1.0, 0.0)
    return zero


@triton.jit
def attributed(sums, x, became, was, error, limit, inverse, PACKED: tl.constexpr):
    """`cpu_errors.attribute` of an element: the squared error where it does not saturate and where it underflows, how
    often each is so, and the element's error squared in units of its scale.

    became, was: whether it became zero, and whether it was and did. inverse: of its scale.
    """
    within, underflow, inside, underflowed, element = sums
    if PACKED:
        n, q, m = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            abs.f32 t, $3;
            set.leu.f32.f32 $0, t, $4;
            mul.rn.f32 $1, t, $5;
            max.f32 $2, $1, 0f3FC00000;
            }""",
            "=&f,=&f,=&f,f,f,f",
            [x, limit, inverse],
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        n = tl.where(tl.abs(x) > limit, 0.0, 1.0)
        q = tl.abs(x) * inverse
        m = tl.maximum(q, 1.5)
    other = tl.fma(m, 4194304.0, tl.fma(m, -4194304.0, q)) - q
    # An element that was zero is within the limit and has no error; only its count matters.
    lost = tl.fma(n, became, negative(was, PACKED))
    within = tl.fma(n * error, error, within)
    underflow = tl.fma(lost * error, error, underflow)
    inside += n
    underflowed += lost
    element = tl.fma((n - lost) * other, other, element)
    return within, underflow, inside, underflowed, element
