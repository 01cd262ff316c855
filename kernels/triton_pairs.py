"""Device functions on bfloat16 in pairs: 32-bit words of two, the first in the lower half.

PACKED: with NVIDIA's instructions on pairs and its byte permutation (compute capability 9.0 and later); without, the
same bits by plain integer operations, on any card and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import bits_float, e4m3_bytes, e4m3_values

# Handed to kernels as a number, so that a shift by 16 is a multiplication, for which the card has units to spare.
SHIFT_LEFT_16 = 1 << 16


@triton.jit
def four_words(x_ptr, first, here, WHOLE: tl.constexpr):
    """Four words from `first` `[ROWS]` on: 16 bytes, one read of a thread. WHOLE: all rows are `here`."""
    at = first[:, None] + tl.arange(0, 4)[None, :]
    if WHOLE:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=here[:, None], other=0)
    x = tl.reshape(x, [here.shape[0], 2, 2])
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def largest_pair(x0, x1, x2, x3, PACKED: tl.constexpr):
    """Largest magnitudes, as bits, of the lower and of the upper halves of four words; above infinity's for NaN."""
    if PACKED:
        largest = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            max.NaN.xorsign.abs.bf16x2 a, $1, $2;
            max.NaN.xorsign.abs.bf16x2 b, $3, $4;
            max.NaN.xorsign.abs.bf16x2 a, a, b;
            and.b32 $0, a, 0x7FFF7FFF;
            }""",
            "=r,r,r,r,r",
            [x0, x1, x2, x3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        m: tl.constexpr = 0x7FFF7FFF
        largest = larger_pairs(larger_pairs(x0 & m, x1 & m, False), larger_pairs(x2 & m, x3 & m, False), False)
    return largest


@triton.jit
def larger_pairs(a, b, PACKED: tl.constexpr):
    """The larger of two magnitudes, as bits, in each half."""
    if PACKED:
        largest = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)
    else:
        largest = tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return largest


@triton.jit
def word_of_codes(c0, c1, c2, c3, c4, c5, c6, c7, by):
    """Eight codes to one word, the first in the lowest nibble, by multiplications. by: `SHIFT_LEFT_16`."""
    nibble, byte = by >> 12, by >> 8
    low = (c1 * nibble + c0) + (c3 * nibble + c2) * byte
    return ((c5 * nibble + c4) + (c7 * nibble + c6) * byte) * by + low


@triton.jit
def larger_of_pair(pair):
    """The larger of two magnitudes in a word, float32; a NaN where one is."""
    return bits_float(tl.maximum(pair & 0xFFFF, pair >> 16) << 16)


@triton.jit
def sign_words(x0, x1, x2, x3, x4, x5, x6, x7, invalid, PACKED: tl.constexpr):
    """Two words of eight codes that are signs alone, of the sixteen values in `x0` to `x7`.

    invalid: int32, not 0 where only NaN keeps its sign.
    """
    if PACKED:  # sign bytes by permutation; the rare invalid block branches
        word0, word1 = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t, u;
            .reg .pred p;
            prmt.b32 a, $2, $3, 0xFDB9;
            prmt.b32 b, $4, $5, 0xFDB9;
            prmt.b32 c, $6, $7, 0xFDB9;
            prmt.b32 d, $8, $9, 0xFDB9;
            setp.eq.u32 p, $10, 0;
            @p bra VALID;
            and.b32 t, $2, 0x7FFF7FFF;
            add.u32 t, t, 0x007F007F;
            and.b32 t, t, $2;
            and.b32 u, $3, 0x7FFF7FFF;
            add.u32 u, u, 0x007F007F;
            and.b32 u, u, $3;
            prmt.b32 a, t, u, 0xFDB9;
            and.b32 t, $4, 0x7FFF7FFF;
            add.u32 t, t, 0x007F007F;
            and.b32 t, t, $4;
            and.b32 u, $5, 0x7FFF7FFF;
            add.u32 u, u, 0x007F007F;
            and.b32 u, u, $5;
            prmt.b32 b, t, u, 0xFDB9;
            and.b32 t, $6, 0x7FFF7FFF;
            add.u32 t, t, 0x007F007F;
            and.b32 t, t, $6;
            and.b32 u, $7, 0x7FFF7FFF;
            add.u32 u, u, 0x007F007F;
            and.b32 u, u, $7;
            prmt.b32 c, t, u, 0xFDB9;
            and.b32 t, $8, 0x7FFF7FFF;
            add.u32 t, t, 0x007F007F;
            and.b32 t, t, $8;
            and.b32 u, $9, 0x7FFF7FFF;
            add.u32 u, u, 0x007F007F;
            and.b32 u, u, $9;
            prmt.b32 d, t, u, 0xFDB9;
            VALID:
            and.b32 a, a, 0x80088008;
            and.b32 b, b, 0x80088008;
            and.b32 c, c, 0x80088008;
            and.b32 d, d, 0x80088008;
            mad.hi.u32 a, a, 0x01000000, a;
            mad.hi.u32 b, b, 0x01000000, b;
            mad.hi.u32 c, c, 0x01000000, c;
            mad.hi.u32 d, d, 0x01000000, d;
            prmt.b32 $0, a, b, 0x6420;
            prmt.b32 $1, c, d, 0x6420;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [x0, x1, x2, x3, x4, x5, x6, x7, invalid],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        word0 = _two_signs(x0, invalid) | (_two_signs(x1, invalid) << 8)
        word0 |= (_two_signs(x2, invalid) << 16) | (_two_signs(x3, invalid) << 24)
        word1 = _two_signs(x4, invalid) | (_two_signs(x5, invalid) << 8)
        word1 |= (_two_signs(x6, invalid) << 16) | (_two_signs(x7, invalid) << 24)
    return word0, word1


@triton.jit
def _two_signs(x, invalid):
    nan = (x & 0x7FFF7FFF) + 0x007F007F  # bits 15 and 31 where a half is NaN
    kept = tl.where(invalid != 0, x & nan, x)
    return ((kept >> 12) & 8) | ((kept >> 24) & 128)


@triton.jit
def rounded_e4m3(x, PACKED: tl.constexpr):
    """Float32 `x` >= 0 to E4M3: the byte (int32) and its value; nearest even, saturating at 448, NaN kept."""
    if PACKED:
        byte, value = tl.inline_asm_elementwise(
            """{
            .reg .b16 h, l, u;
            .reg .b32 p;
            .reg .f32 z;
            mov.f32 z, 0f00000000;
            cvt.rn.satfinite.e4m3x2.f32 h, z, $2;
            cvt.u32.u16 $0, h;
            cvt.rn.f16x2.e4m3x2 p, h;
            mov.b32 {l, u}, p;
            cvt.f32.f16 $1, l;
            }""",
            "=&r,=&f,f",
            [x],
            dtype=(tl.int32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        byte = e4m3_bytes(x)
        value = e4m3_values(byte)
    return byte, value


@triton.jit
def e4m3_pair_values(byte, PACKED: tl.constexpr):
    """E4M3 bytes (int32) to float32."""
    if PACKED:
        value = tl.inline_asm_elementwise(
            """{
            .reg .b16 h, l, u;
            .reg .b32 p;
            cvt.u16.u32 h, $1;
            cvt.rn.f16x2.e4m3x2 p, h;
            mov.b32 {l, u}, p;
            cvt.f32.f16 $0, l;
            }""",
            "=f,r",
            [byte],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = e4m3_values(byte)
    return value


@triton.jit
def negative(x, PACKED: tl.constexpr):
    """-x, which is then part of what uses it; Triton itself subtracts from 0, an instruction a value."""
    if PACKED:
        value = tl.inline_asm_elementwise("neg.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        value = -x
    return value


@triton.jit
def reciprocal(d, PACKED: tl.constexpr):
    """1 / d of a normal `d` whose reciprocal is normal, to nearest or (PACKED) the last bit, as `divide` needs it."""
    if PACKED:
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, is_pure=True, pack=1)
        r = tl.fma(tl.fma(-d, r, 1.0), r, r)
    else:
        r = tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    return r
