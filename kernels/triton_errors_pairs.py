"""The kernel of `triton_errors` for bfloat16: a block of 32 weights a thread, weights in pairs, codes in eights.

Where the card can (PACKED), w is rounded two weights at once, exactly, in bfloat16; a is decoded, and b looked up from
a's codes (`triton_requant`'s tables), by byte permutation. The time goes to issuing instructions (23 a weight, of which
9 are the sums), so what can be had a block is not had a weight, and reads are under way before what they wait for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import bits_float, e8m0_inverses, e8m0_values, float_bits, nearest_e2m1
from .triton_pairs import e4m3_pair_values, four_words, larger_of_pair, larger_pairs, largest_pair, negative
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
    """As `triton_errors._error_kernel`, for bfloat16 in words of two and codes in words of eight."""
    program = tl.program_id(0).to(tl.int64)
    zero = tl.zeros([ROWS], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero)
    if ONE_GLOBAL:
        g = tl.load(g_ptr)
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
        most = larger_pairs(largest_pair(x0, x1, x2, x3, PACKED), largest_pair(x4, x5, x6, x7, PACKED), PACKED)
        rest = larger_pairs(largest_pair(x8, x9, x10, x11, PACKED), largest_pair(x12, x13, x14, x15, PACKED), PACKED)
        most = larger_pairs(most, rest, PACKED)
        own = direct_scale(most, RULE, PACKED)
        step = e4m3_pair_values(scale, PACKED) * (g if ONE_GLOBAL else tl.load(g_ptr + table))
        size = e8m0_values(byte)[:, None]  # of b, with the sign of the step of a
        size = bits_float((float_bits(size) & 0x7FFFFFFF) | (float_bits(step) & -2147483648))
        step, size = pair_units(step, PACKED), pair_units(size, PACKED)
        step0, step1 = tl.split(step)
        size0, size1 = tl.split(size)
        low0, low1 = tl.split(low)
        high0, high1 = tl.split(high)
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        sums = _eight_errors(sums, x0, x1, x2, x3, word0, low0, high0, step0, size0, own, by, RULE, PACKED)
        sums = _eight_errors(sums, x4, x5, x6, x7, word1, low0, high0, step0, size0, own, by, RULE, PACKED)
        sums = _eight_errors(sums, x8, x9, x10, x11, word2, low1, high1, step1, size1, own, by, RULE, PACKED)
        sums = _eight_errors(sums, x12, x13, x14, x15, word3, low1, high1, step1, size1, own, by, RULE, PACKED)
    out = partial_ptr + program * 7
    for j in tl.static_range(7):
        tl.store(out + j, tl.sum(sums[j].to(tl.float64), 0))


@triton.jit
def codes_and_scales(words_ptr, scales_ptr, block, here, WHOLE: tl.constexpr):
    """The words of codes of blocks, the first and the second of each half, and their scales: `[ROWS, 2]`, int32."""
    at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    if WHOLE:
        codes = tl.load(words_ptr + at)
        scale = tl.load(scales_ptr + half).to(tl.int32)
    else:
        codes = tl.load(words_ptr + at, mask=here[:, None], other=0)
        scale = tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32)
    even, odd = tl.split(tl.reshape(codes, [block.shape[0], 2, 2]))
    return even, odd, scale


@triton.jit
def read_first(x):
    """`x`, read before all that is read below: the compiler else puts its read off to where it is first used, and so
    each read waits for the answer of the one before."""
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _eight_errors(sums, x0, x1, x2, x3, word, low, high, step, size, own, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    """`sums` and those of eight weights: `x0` to `x3` bfloat16 pairs, `word` their codes.

    low, high: twice the magnitudes of b by a's magnitude codes, bytes; step, size: of a and b, as `eight_pair_values`
    needs them; own: `direct_scale`'s. by: 2**16.
    """
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = eight_pair_values(word, low, high, PACKED)
    sums = _pair_errors(sums, x0, a0, a1, b0, b1, step, size, own, by, RULE, PACKED)
    sums = _pair_errors(sums, x1, a2, a3, b2, b3, step, size, own, by, RULE, PACKED)
    sums = _pair_errors(sums, x2, a4, a5, b4, b5, step, size, own, by, RULE, PACKED)
    return _pair_errors(sums, x3, a6, a7, b6, b7, step, size, own, by, RULE, PACKED)


@triton.jit
def _pair_errors(sums, x, a0, a1, b0, b1, step, size, own, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    d0, d1 = direct_errors(x, own, by, RULE, PACKED)
    sums = _one_error(sums, bits_float(x * by), a0 * step, b0, size, d0, PACKED)
    return _one_error(sums, bits_float(x & -65536), a1 * step, b1, size, d1, PACKED)


@triton.jit
def _one_error(sums, w, a, b, size, d, PACKED: tl.constexpr):
    w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct = sums
    e1 = a - w
    e2 = tl.fma(b, size, negative(a, PACKED))  # the product is exact
    w_w, e1_e1, e2_e2 = tl.fma(w, w, w_w), tl.fma(e1, e1, e1_e1), tl.fma(e2, e2, e2_e2)
    w_e1, w_e2, e1_e2 = tl.fma(w, e1, w_e1), tl.fma(w, e2, w_e2), tl.fma(e1, e2, e1_e2)
    return w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, tl.fma(d, d, direct)


@triton.jit
def pair_units(step, PACKED: tl.constexpr):
    """What `eight_pair_values` are multiplied by to be values with the step `step`: the product rounds as theirs."""
    return step * (8388608.0 if PACKED else 0.5)


@triton.jit
def eight_pair_values(word, low, high, PACKED: tl.constexpr):
    """The eight codes' E2M1 values, and those through a table of bytes, twice magnitudes; all in `pair_units`, signed.

    PACKED: a byte and, above it, the sign are a subnormal float16, which is converted exactly.
    """
    if PACKED:
        a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, even, odd, a, b, p;
            .reg .b16 l, h;
            and.b32 s, $16, 0x77777777;
            shr.u32 t, s, 16;
            shl.b32 even, $16, 4;
            and.b32 even, even, 0x80808080;
            and.b32 odd, $16, 0x80808080;
            prmt.b32 a, 0x03020100, 0x0C080604, s;
            prmt.b32 b, $17, $18, s;
            prmt.b32 p, a, even, 0x5240;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $0, l;
            cvt.f32.f16 $2, h;
            prmt.b32 p, a, odd, 0x5341;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $1, l;
            cvt.f32.f16 $3, h;
            prmt.b32 p, b, even, 0x5240;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $8, l;
            cvt.f32.f16 $10, h;
            prmt.b32 p, b, odd, 0x5341;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $9, l;
            cvt.f32.f16 $11, h;
            prmt.b32 a, 0x03020100, 0x0C080604, t;
            prmt.b32 b, $17, $18, t;
            prmt.b32 p, a, even, 0x7260;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $4, l;
            cvt.f32.f16 $6, h;
            prmt.b32 p, a, odd, 0x7361;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $5, l;
            cvt.f32.f16 $7, h;
            prmt.b32 p, b, even, 0x7260;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $12, l;
            cvt.f32.f16 $14, h;
            prmt.b32 p, b, odd, 0x7361;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $13, l;
            cvt.f32.f16 $15, h;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r",
            [word, low, high],
            dtype=(tl.float32,) * 16,
            is_pure=True,
            pack=1,
        )
    else:
        a0, a1, a2, a3, a4, a5, a6, a7 = _signed_bytes(word, 0x03020100, 0x0C080604)
        b0, b1, b2, b3, b4, b5, b6, b7 = _signed_bytes(word, low, high)
    return a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def _signed_bytes(word, low, high):
    """The eight codes through a table of eight bytes by their magnitude codes, float32 with the codes' signs."""
    m0, m1 = _signed_byte(word, low, high), _signed_byte(word >> 4, low, high)
    m2, m3 = _signed_byte(word >> 8, low, high), _signed_byte(word >> 12, low, high)
    m4, m5 = _signed_byte(word >> 16, low, high), _signed_byte(word >> 20, low, high)
    m6, m7 = _signed_byte(word >> 24, low, high), _signed_byte(word >> 28, low, high)
    return m0, m1, m2, m3, m4, m5, m6, m7


@triton.jit
def _signed_byte(word, low, high):
    code = word & 7
    value = ((tl.where(code < 4, low, high) >> ((code & 3) << 3)) & 255).to(tl.float32)
    return bits_float(float_bits(value) | ((word & 8) << 28))


@triton.jit
def direct_scale(most, RULE: tl.constexpr, PACKED: tl.constexpr):
    """What `direct_errors` needs of a block whose largest magnitudes are `most`, a pair: its E8M0 byte.

    PACKED: 1.5 steps in bfloat16, twice; of at least 2**-126, as squares of errors below are 0. What is not finite
    needs no scale to err by NaN.
    """
    if PACKED:
        CARRY: tl.constexpr = 0x20 if RULE == "even" else 0x3F if RULE == "rceil" else 0x7F if RULE == "ceil" else 0
        bits = tl.maximum(most & 0xFFFF, most >> 16) + CARRY
        scale = tl.maximum(bits & 0x7F80, 0x180) - 0xC0
        scale |= scale << 16
    else:
        scale = mxfp4_scale_bytes(larger_of_pair(most), RULE)
    return scale


@triton.jit
def direct_errors(x, scale, by, RULE: tl.constexpr, PACKED: tl.constexpr):
    """MXFP4(x) - x of a pair, float32. scale: `direct_scale`'s; by: 2**16.

    PACKED: in bfloat16, of up to 2**121. With m the larger of |x| and 1.5 steps, x - 64 m is rounded to half x's binade
    (half a step below 2), the spacing of E2M1, because 64 m is a multiple of it; adding 64 m again gives MXFP4(x).
    Where |x - 64 m| is below the binade of 64 m, x is so near to a power of two that it goes there all the same.
    """
    if PACKED:
        if RULE == "floor":  # the only rule under which a quotient rounds to 8
            d0, d1 = tl.inline_asm_elementwise(
                """{
                .reg .b32 m, h;
                max.xorsign.abs.bf16x2 m, $2, $3;
                fma.rn.bf16x2 h, m, $4, $2;
                fma.rn.bf16x2 h, m, $5, h;
                min.NaN.xorsign.abs.bf16x2 h, h, $7;
                sub.rn.bf16x2 h, h, $2;
                mul.lo.u32 $0, h, $6;
                and.b32 $1, h, 0xFFFF0000;
                }""",
                "=&r,=&r,r,r,r,r,r,r",
                [x, scale, -0x3D7F3D80, 0x42804280, by, scale + 0x01000100],
                dtype=(tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            d0, d1 = tl.inline_asm_elementwise(
                """{
                .reg .b32 m, h;
                max.xorsign.abs.bf16x2 m, $2, $3;
                fma.rn.bf16x2 h, m, $4, $2;
                fma.rn.bf16x2 h, m, $5, h;
                sub.rn.bf16x2 h, h, $2;
                mul.lo.u32 $0, h, $6;
                and.b32 $1, h, 0xFFFF0000;
                }""",
                "=&r,=&r,r,r,r,r,r",
                [x, scale, -0x3D7F3D80, 0x42804280, by],
                dtype=(tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        d0, d1 = bits_float(d0), bits_float(d1)
    else:
        inverse, size = e8m0_inverses(scale), e8m0_values(scale)
        q0, q1 = bits_float(x << 16) * inverse, bits_float(x & -65536) * inverse
        d0, d1 = (nearest_e2m1(q0) - q0) * size, (nearest_e2m1(q1) - q1) * size
    return d0, d1
