"""Device functions that the Triton kernels share: E2M1 elements, E4M3 and E8M0 scales, exactly `reference.py`'s.

    codes = e2m1_codes(q, x, limit, "even", "signed")    # inside a kernel

Rounding to E2M1 takes no comparison: the magnitude code is the smallest of three lines, 2q, q + 2 and q / 2 + 4, each
rounded to an integer by adding 2**23 (ties to the even code, as E2M1 has them). The division by a step that is no power
of two is one reciprocal a block and four multiplications an element; `divide` says why that is exact. All is float32
with subnormal numbers kept, which Triton does on both vendors unless it is told otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTEGERS = tl.constexpr(8388608.0)  # 2**23: float32 from here on has no fraction
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def float_bits(x):
    """float32 to its bits, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """int32 bits to the float32 that has them."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """amax along `axis`; a NaN with no sign, whose bits are above infinity's, where there is one."""
    return tl.reduce(tl.abs(x), axis, larger)


@triton.jit
def larger(a, b):
    """The larger of two values; NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widened(x):
    """A value as it is stored (float32, bfloat16, float16) to float32."""
    if x.dtype == tl.bfloat16:
        value = bits_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif x.dtype == tl.float16:  # a conversion may drop the sign of NaN, which its code keeps
        sign = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16) & -2147483648
        value = bits_float((float_bits(x.to(tl.float32)) & _MAGNITUDE) | sign)
    else:
        value = x.to(tl.float32)
    return value


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """float32 to `dtype`, nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:  # the interpreter's own conversion loses subnormal numbers
        bits = float_bits(x)
        bits = tl.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        value = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        value = x.to(dtype)
    return value


@triton.jit
def dot_operand(x):
    """`x`, in float32 where the interpreter would multiply bfloat16 as integers."""
    return widened(x) if _INTERPRETED else x


# ---- elements --------------------------------------------------------------------------------------------------------


@triton.jit
def e2m1_magnitude_codes(q, TIES: tl.constexpr):
    """Magnitude codes 0..7 (int32) of float32 `q`; NaN gets 7."""
    a = tl.abs(q)
    if TIES == "even":
        t = tl.minimum(tl.fma(a, 2.0, _INTEGERS), a + (_INTEGERS + 2.0))
        t = tl.minimum(t, tl.fma(a, 0.5, _INTEGERS + 4.0))
        code = tl.minimum(t.to(tl.uint32, bitcast=True) - 0x4B000000, 7).to(tl.int32, bitcast=True)
    elif TIES == "zero":
        code = (a > 0.25).to(tl.int32) + (a > 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a > 1.75).to(tl.int32)
        code += (a > 2.5).to(tl.int32) + (a > 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
        code = tl.where(a != a, 7, code)
    else:
        code = (a >= 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a >= 1.25).to(tl.int32)
        code += (a >= 1.75).to(tl.int32) + (a >= 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a >= 5.0).to(tl.int32)
        code = tl.where(a != a, 7, code)
    return code


@triton.jit
def sign_limit(invalid):
    """Per block, what the bits of an element must exceed, as uint32, for its sign to be kept.

    Any set sign bit in a valid block; in one without a valid scale only those of NaN (the quotient of any other element
    is a NaN with no sign).
    """
    return tl.where(invalid, 0xFF800000, 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def e2m1_codes(q, x, limit, TIES: tl.constexpr, ZEROS: tl.constexpr):
    """Codes 0..15 (int32) of the quotients `q` of the elements `x`; limit: `sign_limit`'s, broadcastable."""
    code = e2m1_magnitude_codes(q, TIES)
    if ZEROS == "value":
        negative = q < 0
    elif ZEROS == "negative":
        negative = q <= 0
    else:
        negative = x.to(tl.uint32, bitcast=True) > limit
    if ZEROS == "positive":
        negative = negative & (code > 0)
    return code + tl.where(negative, 8, 0)


@triton.jit
def e2m1_values(codes):
    """Codes 0..15 (int32) to float32; code 8 is -0.0.

    Three bits moved to float32's exponent are the magnitude times 2**-126.
    """
    bits = (codes << 28) & -2147483648 | (codes << 22) & 0x01C00000
    return bits_float(bits) * 8.507059173023462e37  # 2**126


@triton.jit
def e2m1_rounded(q):
    """Float32 `q` to the nearest E2M1 value, saturating, with its sign. NaN becomes 6."""
    code = e2m1_magnitude_codes(q, "even")
    return e2m1_values(code | ((float_bits(q) >> 28) & 8))


@triton.jit
def nearest_e2m1(q):
    """The E2M1 value nearest to `q`: adding 1.5 * 2**(22 + exponent) leaves one bit of mantissa, ties to even."""
    q = tl.minimum(tl.maximum(q, -6.0), 6.0)
    exponent = tl.maximum(float_bits(q) & 0x7F800000, 0x3F800000)  # below 1 the spacing is that of 1
    large = bits_float((exponent + (22 << 23)) | 0x400000)
    return (q + large) - large


@triton.jit
def pack_words(codes):
    """Codes `[ROWS, 8]` to words `[ROWS]` (int32), the first column in the lowest nibble."""
    return tl.sum(codes << (4 * tl.arange(0, 8))[None, :], 1)


@triton.jit
def unpack_codes(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes `[ROWS, COLUMNS / 2]` to codes `[ROWS, COLUMNS]` (int32)."""
    byte = packed.to(tl.int32)
    return tl.reshape(tl.join(byte & 0xF, byte >> 4), [ROWS, COLUMNS])


# ---- scales ----------------------------------------------------------------------------------------------------------


@triton.jit
def e4m3_bytes(x):
    """Float32 to E4M3 bytes (int32): nearest even, saturating at 448; NaN is 0x7F. `x` is not negative."""
    bits = float_bits(x)
    m = tl.minimum(bits, 0x43E00000)  # 448
    # Adding 2**23 rounds to an integer, here of the subnormals' unit 2**-9; above, to three bits of mantissa.
    subnormal = float_bits(tl.fma(bits_float(m), 512.0, _INTEGERS)) - 0x4B000000
    normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(bits > _INFINITY, 0x7F, tl.where(m < (121 << 23), subnormal, normal))


@triton.jit
def e4m3_values(byte):
    """E4M3 bytes (int32, 0..255) to float32, without a conversion instruction that older cards lack."""
    m = byte & 0x7F
    value = tl.where(m < 8, m.to(tl.float32) * 0.001953125, bits_float((m << 20) + (120 << 23)))
    value = tl.where(m == 0x7F, float("nan"), value)
    return bits_float(float_bits(value) | ((byte & 0x80) << 24))


@triton.jit
def e5m2_values(byte):
    """E5M2 bytes (int32, 0..255) to float32: the upper half of a float16."""
    return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e8m0_values(byte):
    """E8M0 bytes (int32) to float32: byte 0 is the subnormal 2**-127, byte 255 NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return bits_float(tl.where(byte == 255, 0x7FC00000, bits))


@triton.jit
def e8m0_inverses(byte):
    """2**(127 - byte), a normal number for the bytes 0..253; NaN for byte 255."""
    return bits_float(tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23))


# ---- division --------------------------------------------------------------------------------------------------------


@triton.jit
def divisor(d):
    """What `divide` needs of a divisor `d` >= 0: its significand m, 1 / m, and the power of two s with m = d * s.

    A dividend is multiplied by s first: x / d = (x * s) / m.
    """
    exponent = float_bits(d) >> 23
    scale = bits_float(tl.minimum(tl.maximum(254 - exponent, 1), 254) << 23)
    infinite = d == float("inf")  # x / inf is 0, also where infinity's own significand would give NaN
    m = tl.where(infinite, 1.0, d * scale)
    return m, tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m), tl.where(infinite, 0.0, scale)


@triton.jit
def divide(y, m, inverse):
    """y / m, near enough to the float32 quotient that E2M1 rounds both alike. inverse: 1 / m, rounded to nearest.

    The product with the reciprocal is within two units in the last place; its remainder, taken by one fused
    multiply-add, corrects it. Where the result could still differ from the quotient, which matters only at E2M1's seven
    midpoints, it was compared for all 2**23 significands; the GPU check repeats that.
    """
    q = y * inverse
    return tl.fma(tl.fma(q, -m, y), inverse, q)  # a change of sign of q would be an instruction a value
