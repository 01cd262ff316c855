"""The kernel of `triton_errors` for bfloat16: a block of 32 weights a thread, weights in pairs, codes in eights.

Where the card can (PACKED), w is rounded two weights at once, exactly, in bfloat16; a is decoded, and b looked up from
a's codes (`triton_requant`'s tables), by byte permutation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import bits_float, e5m2_values, e8m0_inverses, e8m0_values, float_bits, nearest_e2m1
from .triton_pairs import e4m3_pair_values, four_words, larger_of_pair, larger_pairs, largest_pair
from .triton_requant import global_number, requant_block
from .triton_scales import mxfp4_scale_bytes


@triton.jit
def error_pairs_kernel(
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
    """As `triton_errors._error_kernel`, for bfloat16 in words of two and codes in words of eight.

    All of an element's numbers are taken times the sign of its code, which no sum notices.
    """
    program = tl.program_id(0).to(tl.int64)
    zero = tl.zeros([ROWS], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero)
    direct = tl.zeros([ROWS], tl.float64)
    for i in range(TILES):
        tile = program * TILES + i
        block = tile * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        if WHOLE:
            codes = tl.load(words_ptr + at)
            scale = tl.load(scales_ptr + half).to(tl.int32)
        else:
            codes = tl.load(words_ptr + at, mask=here[:, None], other=0)
            scale = tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32)
        codes = tl.reshape(codes, [ROWS, 2, 2])
        table = global_number(block, tile, ROWS, here, per_global, ONE_GLOBAL, TABLED)
        even, odd = tl.split(codes)
        byte, low, high = requant_block(
            even, odd, scale, g_ptr, table, exponents_ptr, values_ptr, RULE, TABLED, PACKED, True
        )
        step = e4m3_pair_values(scale, PACKED) * tl.load(g_ptr + table)
        size = e8m0_values(byte)[:, None]  # of b, with the sign of the step of a
        size = bits_float((float_bits(size) & 0x7FFFFFFF) | (float_bits(step) & -2147483648))
        step0, step1 = tl.split(step)
        size0, size1 = tl.split(size)
        low0, low1 = tl.split(low)
        high0, high1 = tl.split(high)
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        x0, x1, x2, x3 = four_words(x_ptr, block * 16, here, WHOLE)
        x4, x5, x6, x7 = four_words(x_ptr, block * 16 + 4, here, WHOLE)
        x8, x9, x10, x11 = four_words(x_ptr, block * 16 + 8, here, WHOLE)
        x12, x13, x14, x15 = four_words(x_ptr, block * 16 + 12, here, WHOLE)
        most = larger_pairs(largest_pair(x0, x1, x2, x3, PACKED), largest_pair(x4, x5, x6, x7, PACKED), PACKED)
        rest = larger_pairs(largest_pair(x8, x9, x10, x11, PACKED), largest_pair(x12, x13, x14, x15, PACKED), PACKED)
        most = larger_pairs(most, rest, PACKED)
        own = mxfp4_scale_bytes(larger_of_pair(most), RULE)
        w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2 = sums
        found = (w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, tl.zeros([ROWS], tl.float32))
        found = _eight_errors(found, x0, x1, x2, x3, word0, low0, high0, step0, size0, own, by, RULE, PACKED)
        found = _eight_errors(found, x4, x5, x6, x7, word1, low0, high0, step0, size0, own, by, RULE, PACKED)
        found = _eight_errors(found, x8, x9, x10, x11, word2, low1, high1, step1, size1, own, by, RULE, PACKED)
        w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, square = _eight_errors(
            found, x12, x13, x14, x15, word3, low1, high1, step1, size1, own, by, RULE, PACKED
        )
        sums = (w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2)
        unit = e8m0_values(own).to(tl.float64)
        square = square.to(tl.float64) * unit * unit
        direct += square if WHOLE else tl.where(here, square, 0.0)
    out = partial_ptr + program * 7
    tl.store(out, tl.sum(sums[0].to(tl.float64), 0))
    tl.store(out + 1, tl.sum(sums[1].to(tl.float64), 0))
    tl.store(out + 2, tl.sum(sums[2].to(tl.float64), 0))
    tl.store(out + 3, tl.sum(sums[3].to(tl.float64), 0))
    tl.store(out + 4, tl.sum(sums[4].to(tl.float64), 0))
    tl.store(out + 5, tl.sum(sums[5].to(tl.float64), 0))
    tl.store(out + 6, tl.sum(direct, 0))


@triton.jit
def _eight_errors(sums, x0, x1, x2, x3, word, low, high, step, size, own, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    """`sums` and those of eight weights: `x0` to `x3` bfloat16 pairs, `word` their codes.

    low, high: values of b by a's magnitude codes, E5M2; step, size: the steps of a and b; own: the E8M0 byte of d.
    by: 2**16.
    """
    if PACKED:
        a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = _packed_magnitudes(word, low, high)
        # A byte under the exponent of 2**23 is 2**23 and twice the magnitude; a multiply-add takes the 2**23 off again,
        # and what it rounds is the product alone.
        by_half = step * 0.5
        off = by_half * -8388608.0
        a0, a1 = tl.fma(bits_float(a0), by_half, off), tl.fma(bits_float(a1), by_half, off)
        a2, a3 = tl.fma(bits_float(a2), by_half, off), tl.fma(bits_float(a3), by_half, off)
        a4, a5 = tl.fma(bits_float(a4), by_half, off), tl.fma(bits_float(a5), by_half, off)
        a6, a7 = tl.fma(bits_float(a6), by_half, off), tl.fma(bits_float(a7), by_half, off)
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = _magnitudes(word, 0x3E3C3800, 0x46444240)
        a0, a1, a2, a3 = a0 * step, a1 * step, a2 * step, a3 * step
        a4, a5, a6, a7 = a4 * step, a5 * step, a6 * step, a7 * step
        b0, b1, b2, b3, b4, b5, b6, b7 = _magnitudes(word, low, high)
    s0, s1, s2, s3 = _signs(word, PACKED)
    sums = _pair_errors(sums, x0, s0, a0, a1, b0, b1, size, own, by, RULE, PACKED)
    sums = _pair_errors(sums, x1, s1, a2, a3, b2, b3, size, own, by, RULE, PACKED)
    sums = _pair_errors(sums, x2, s2, a4, a5, b4, b5, size, own, by, RULE, PACKED)
    return _pair_errors(sums, x3, s3, a6, a7, b6, b7, size, own, by, RULE, PACKED)


@triton.jit
def _pair_errors(sums, x, signs, a0, a1, b0, b1, size, own, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    d0, d1 = _direct_errors(x, own, by, RULE, PACKED)
    x = x ^ (signs & -2147450880)  # 0x80008000
    w0, w1 = bits_float(x * by), bits_float(x & -65536)
    sums = _one_error(sums, w0, a0, b0 * size, d0)
    return _one_error(sums, w1, a1, b1 * size, d1)


@triton.jit
def _one_error(sums, w, a, b, d):
    w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct = sums
    e1 = a - w
    e2 = b - a
    w_w += w * w
    e1_e1 += e1 * e1
    e2_e2 += e2 * e2
    w_e1 += w * e1
    w_e2 += w * e2
    e1_e2 += e1 * e2
    direct += d * d
    return w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct


@triton.jit
def _signs(word, PACKED: tl.constexpr):
    """Four words whose bits 15 and 31 are the signs of two of the eight codes each."""
    if PACKED:
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shl.b32 t, $4, 4;
            prmt.b32 $0, $4, t, 0x0040;
            prmt.b32 $1, $4, t, 0x1050;
            prmt.b32 $2, $4, t, 0x2060;
            prmt.b32 $3, $4, t, 0x3070;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        s0 = ((word << 12) & 0x8000) | ((word << 24) & -2147483648)
        s1 = ((word << 4) & 0x8000) | ((word << 16) & -2147483648)
        s2 = ((word >> 4) & 0x8000) | ((word << 8) & -2147483648)
        s3 = ((word >> 12) & 0x8000) | (word & -2147483648)
    return s0, s1, s2, s3


@triton.jit
def _packed_magnitudes(word, low, high):
    """The eight codes as 2**23 plus twice their E2M1 magnitudes (bits), and through a table of E5M2 bytes (float32)."""
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = tl.inline_asm_elementwise(
        """{
        .reg .b32 s, t, a, p;
        .reg .b16 l, h;
        and.b32 s, $16, 0x77777777;
        shr.u32 t, s, 16;
        prmt.b32 a, 0x03020100, 0x0C080604, s;
        prmt.b32 $0, a, 0x4B000000, 0x7440;
        prmt.b32 $1, a, 0x4B000000, 0x7441;
        prmt.b32 $2, a, 0x4B000000, 0x7442;
        prmt.b32 $3, a, 0x4B000000, 0x7443;
        prmt.b32 a, 0x03020100, 0x0C080604, t;
        prmt.b32 $4, a, 0x4B000000, 0x7440;
        prmt.b32 $5, a, 0x4B000000, 0x7441;
        prmt.b32 $6, a, 0x4B000000, 0x7442;
        prmt.b32 $7, a, 0x4B000000, 0x7443;
        prmt.b32 a, $17, $18, s;
        prmt.b32 p, a, 0, 0x1404;
        mov.b32 {l, h}, p;
        cvt.f32.f16 $8, l;
        cvt.f32.f16 $9, h;
        prmt.b32 p, a, 0, 0x3424;
        mov.b32 {l, h}, p;
        cvt.f32.f16 $10, l;
        cvt.f32.f16 $11, h;
        prmt.b32 a, $17, $18, t;
        prmt.b32 p, a, 0, 0x1404;
        mov.b32 {l, h}, p;
        cvt.f32.f16 $12, l;
        cvt.f32.f16 $13, h;
        prmt.b32 p, a, 0, 0x3424;
        mov.b32 {l, h}, p;
        cvt.f32.f16 $14, l;
        cvt.f32.f16 $15, h;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r",
        [word, low, high],
        dtype=(
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.float32,
            tl.float32,
            tl.float32,
            tl.float32,
            tl.float32,
            tl.float32,
            tl.float32,
            tl.float32,
        ),
        is_pure=True,
        pack=1,
    )
    return a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def _magnitudes(word, low, high):
    """The eight codes' magnitudes, float32, through a table of eight E5M2 bytes."""
    m0, m1 = _magnitude(word, low, high), _magnitude(word >> 4, low, high)
    m2, m3 = _magnitude(word >> 8, low, high), _magnitude(word >> 12, low, high)
    m4, m5 = _magnitude(word >> 16, low, high), _magnitude(word >> 20, low, high)
    m6, m7 = _magnitude(word >> 24, low, high), _magnitude(word >> 28, low, high)
    return m0, m1, m2, m3, m4, m5, m6, m7


@triton.jit
def _magnitude(word, low, high):
    code = word & 7
    return e5m2_values((tl.where(code < 4, low, high) >> ((code & 3) << 3)) & 255)


@triton.jit
def _direct_errors(x, byte, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    """MXFP4(x) - x of a pair, whatever its sign, in units of the E8M0 scale `byte`, float32.

    A quotient's binade m times 96 added and taken off again leaves one bit of mantissa. by: 2**16.
    """
    if PACKED:  # the quotient, its rounding and the error are all exact in bfloat16; `_nearest` for two
        inverse = tl.where(byte == 255, 0x7FC0, (254 - byte) << 7)
        inverse |= inverse << 16
        if RULE == "floor":  # the only rule under which a quotient rounds to 8
            d0, d1 = tl.inline_asm_elementwise(
                """{
                .reg .b32 q, m, h;
                abs.bf16x2 q, $2;
                mul.rn.bf16x2 q, q, $3;
                and.b32 m, q, 0x7F807F80;
                max.u16x2 m, m, $4;
                fma.rn.bf16x2 h, m, $5, q;
                fma.rn.bf16x2 h, m, $6, h;
                min.bf16x2 h, h, $8;
                sub.rn.bf16x2 h, h, q;
                mul.lo.u32 $0, h, $7;
                and.b32 $1, h, 0xFFFF0000;
                }""",
                "=&r,=&r,r,r,r,r,r,r,r",
                [x, inverse, 0x3F803F80, 0x42C042C0, -0x3D3F3D40, by, 0x40C040C0],
                dtype=(tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            d0, d1 = tl.inline_asm_elementwise(
                """{
                .reg .b32 q, m, h;
                mul.rn.bf16x2 q, $2, $3;
                and.b32 m, q, 0x7F807F80;
                max.u16x2 m, m, $4;
                fma.rn.bf16x2 h, m, $5, q;
                fma.rn.bf16x2 h, m, $6, h;
                sub.rn.bf16x2 h, h, q;
                mul.lo.u32 $0, h, $7;
                and.b32 $1, h, 0xFFFF0000;
                }""",
                "=&r,=&r,r,r,r,r,r,r",
                [x, inverse, 0x3F803F80, 0x42C042C0, -0x3D3F3D40, by],
                dtype=(tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        d0, d1 = bits_float(d0), bits_float(d1)
    else:
        q0 = tl.abs(bits_float(x << 16)) * e8m0_inverses(byte)
        q1 = tl.abs(bits_float(x & -65536)) * e8m0_inverses(byte)
        d0, d1 = nearest_e2m1(q0) - q0, nearest_e2m1(q1) - q1
    return d0, d1
