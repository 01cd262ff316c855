"""The loops of `cpu.py`, compiled by Numba when they are first called and then cached on disk.

    loops.mxfp4_encode(x, 0x200000, codes, scale_bytes, 0, blocks)

All arrays are flat and contiguous. A loop works on the blocks (or rows) from `start` to `stop`, releases Python's lock
and starts no thread. A tile of blocks at a time passes through float32 scratch memory in the first-level cache, step by
step, so that each step is a plain loop that LLVM turns into vector instructions. No fast-math: every operation rounds
as IEEE 754 says, subnormal numbers included. Weights come as the bits of their dtype: uint32 (float32), uint16
(bfloat16) or int16 (float16). All code stays in this one file, because Numba's cache notices changes of a function's
own file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .tables import E2M1_MAX, E4M3_MAX, E4M3_MIN_SUBNORMAL, E8M0_NAN, MXFP4_MAX_SCALE_BYTE, NVFP4_MIN_GLOBAL

# Numba takes a bare number as 64 bits wide; these keep the loops at 32.
F, U = np.float32, np.uint32

_TILE = 64  # blocks at a time: 8 KiB of scratch memory
_NVFP4, _MXFP4 = 16, 32  # the block sizes, as constants of the loops
_MAGNITUDE, _INFINITY = U(0x7FFFFFFF), U(0x7F800000)


def _compiled(function: Callable[..., Any]) -> Any:
    options = {"nogil": True, "error_model": "numpy"}  # numpy: x / 0 is infinite, as in torch
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder for the cache can be written: every process compiles for itself
        return numba.njit(function, **options)


# ---- one value -------------------------------------------------------------------------------------------------------


@intrinsic
def _bits(context, value):  # type: ignore[no-untyped-def]
    """float32 to its bits, uint32."""
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(context, bits):  # type: ignore[no-untyped-def]
    """uint32 to the float32 of these bits."""
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


def _read(value: Any) -> Any:
    """A stored value as the bits of the float32 that equals it."""
    raise NotImplementedError


@overload(_read, inline="always")
def _read_any(value):  # type: ignore[no-untyped-def]
    if value == types.uint32:
        return lambda value: value
    if value == types.uint16:
        return lambda value: U(U(value) << U(16))
    return lambda value: _read_half(value)


def _rounded(value: Any, out: Any) -> Any:
    """float32 as an element of the array `out`: nearest, ties to even."""
    raise NotImplementedError


@overload(_rounded, inline="always")
def _rounded_any(value, out):  # type: ignore[no-untyped-def]
    if out.dtype == types.uint32:
        return lambda value, out: _bits(value)
    if out.dtype == types.uint16:
        return lambda value, out: _bfloat16(_bits(value))
    return lambda value, out: _half(_bits(value))


@_compiled
def _read_half(value):  # type: ignore[no-untyped-def]
    magnitude = U(value) & U(0x7FFF)
    bits = U(U(magnitude << U(13)) + U(112 << 23))  # the exponent's bias is 127, not 15
    bits = U(bits + U(112 << 23)) if magnitude >= U(0x7C00) else bits  # infinity and NaN
    bits = _bits(F(np.int32(magnitude)) * F(2.0**-24)) if magnitude < U(0x400) else bits  # subnormal
    return U(bits | U((U(value) & U(0x8000)) << U(16)))


@_compiled
def _bfloat16(bits):  # type: ignore[no-untyped-def]
    rounded = U(U(bits + U(0x7FFF)) + ((bits >> U(16)) & U(1))) >> U(16)
    return np.uint16(U(0x7FC0) if (bits & _MAGNITUDE) > _INFINITY else rounded)


@_compiled
def _half(bits):  # type: ignore[no-untyped-def]
    magnitude = bits & _MAGNITUDE
    normal = U(U(U(magnitude - U(112 << 23)) + U(0xFFF)) + ((magnitude >> U(13)) & U(1))) >> U(13)
    subnormal = U(_bits(_float(U(magnitude)) + F(0.5)) - U(0x3F000000))  # 0.5's unit in the last place is 2**-24
    half = subnormal if magnitude < U(113 << 23) else min(U(normal), U(0x7C00))
    half = U(0x7E00) if magnitude > _INFINITY else half
    return np.int16(np.uint16(half | ((bits >> U(16)) & U(0x8000))))


@_compiled
def _e2m1(value):  # type: ignore[no-untyped-def]
    """The code of the nearest E2M1 value: how many midpoints lie below; a tie goes to the even code, NaN to code 7."""
    bits = _bits(value)
    m = bits & _MAGNITUDE  # magnitudes order as their bits do
    code = U(m > U(0x3E800000)) + U(m >= U(0x3F400000)) + U(m > U(0x3FA00000)) + U(m >= U(0x3FE00000))
    code = code + U(m > U(0x40200000)) + U(m >= U(0x40600000)) + U(m > U(0x40A00000))
    return code | ((bits >> U(28)) & U(8))


@_compiled
def _e2m1_value(code):  # type: ignore[no-untyped-def]
    doubled = (U(0xC8643210) >> U((code & U(7)) << U(2))) & U(15)  # 12 8 6 4 3 2 1 0, a nibble each
    return _float(U(_bits(F(np.int32(doubled)) * F(0.5)) | U((code & U(8)) << U(28))))


@_compiled
def _e4m3(value):  # type: ignore[no-untyped-def]
    """The E4M3 byte nearest to `value`, saturating at +-448; ties to even."""
    bits = _bits(value)
    m = bits & _MAGNITUDE
    nan = m > _INFINITY
    m = min(U(m), U(0x43E00000))  # 448
    # Adding 2**23 rounds to an integer, here of the subnormals' unit 2**-9; above, to three bits of mantissa.
    subnormal = U(_bits(_float(m) * F(2.0**9) + F(2.0**23)) - U(0x4B000000))
    normal = U(U(U(U(m + U(0x7FFFF)) + ((m >> U(20)) & U(1))) >> U(20)) - U(120 << 3))
    byte = subnormal if m < U(121 << 23) else normal
    return np.uint8((U(0x7F) if nan else byte) | ((bits >> U(24)) & U(0x80)))


# ---- steps over a tile -----------------------------------------------------------------------------------------------


@_compiled
def _load(x, first, tile):  # type: ignore[no-untyped-def]
    part = x[first : first + len(tile)]
    for i in range(len(tile)):
        tile[i] = _float(_read(part[i]))


@_compiled
def _maxima(tile, block, maxima):  # type: ignore[no-untyped-def]
    """The largest magnitude of each block; NaN where it holds a NaN, whose bits are above infinity's."""
    for k in range(len(maxima)):
        largest = U(0)
        for value in tile[k * block : (k + 1) * block]:
            largest = max(largest, U(_bits(value) & _MAGNITUDE))
        maxima[k] = _float(largest)


@_compiled
def _multiply(tile, block, factors):  # type: ignore[no-untyped-def]
    for k in range(len(factors)):
        factor = factors[k]
        part = tile[k * block : (k + 1) * block]
        for i in range(len(part)):
            part[i] = part[i] * factor


@_compiled
def _divide(tile, block, steps):  # type: ignore[no-untyped-def]
    for k in range(len(steps)):
        step = steps[k]
        part = tile[k * block : (k + 1) * block]
        for i in range(len(part)):
            part[i] = part[i] / step


@_compiled
def _pack(tile, codes, first):  # type: ignore[no-untyped-def]
    """Round to E2M1; the even index in the low nibble."""
    part = codes[first : first + len(tile) // 2]
    for i in range(len(part)):
        part[i] = np.uint8(_e2m1(tile[2 * i]) | (_e2m1(tile[2 * i + 1]) << U(4)))


@_compiled
def _store(tile, out, first):  # type: ignore[no-untyped-def]
    part = out[first : first + len(tile)]
    for i in range(len(tile)):
        part[i] = _rounded(tile[i], out)


# ---- the loops -------------------------------------------------------------------------------------------------------


@_compiled
def largest_magnitude(x, start, stop):  # type: ignore[no-untyped-def]
    """Of the values x[start:stop], as float32 bits; a NaN's are larger than all others."""
    largest, part = U(0), x[start:stop]
    for i in range(len(part)):
        largest = max(largest, U(_read(part[i]) & _MAGNITUDE))
    return largest


@_compiled
def nvfp4_encode(x, global_scales, per_global, e4m3_values, codes, scales, start, stop):  # type: ignore[no-untyped-def]
    """`reference.nvfp4_quantize` of blocks. per_global: consecutive blocks that share a global scale."""
    tile, steps = np.empty(_TILE * _NVFP4, np.float32), np.empty(_TILE, np.float32)
    first = start
    while first < stop:
        row = first // per_global
        n = min(_TILE, stop - first, (row + 1) * per_global - first)
        values, parts, bytes_ = tile[: n * _NVFP4], steps[:n], scales[first : first + n]
        g = global_scales[row]
        _load(x, first * _NVFP4, values)
        _maxima(values, _NVFP4, parts)
        for k in range(n):
            scale = parts[k] / (F(E2M1_MAX) * g)
            scale = F(1) if scale == F(0) else scale
            scale = F(E4M3_MIN_SUBNORMAL) if scale < F(E4M3_MIN_SUBNORMAL) else scale
            byte = _e4m3(scale)
            bytes_[k] = byte
            parts[k] = e4m3_values[byte] * g
        _divide(values, _NVFP4, parts)
        _pack(values, codes, first * (_NVFP4 // 2))
        first += n


@_compiled
def mxfp4_encode(x, carry, codes, scale_bytes, start, stop):  # type: ignore[no-untyped-def]
    """`reference.mxfp4_quantize` of blocks. carry: the smallest number that, added to the bits of a maximum, raises its
    exponent where the rule rounds up."""
    tile, inverses = np.empty(_TILE * _MXFP4, np.float32), np.empty(_TILE, np.float32)
    carry = U(carry)
    for first in range(start, stop, _TILE):
        n = min(_TILE, stop - first)
        values, parts, bytes_ = tile[: n * _MXFP4], inverses[:n], scale_bytes[first : first + n]
        _load(x, first * _MXFP4, values)
        _maxima(values, _MXFP4, parts)
        for k in range(n):
            bits = _bits(parts[k])
            # Exponent k + 127 of amax / 4; a subnormal maximum's is negative under every rule, and becomes byte 0.
            byte = np.int32(U(bits + carry) >> U(23)) - np.int32(2)
            byte = min(max(byte, np.int32(0)), np.int32(MXFP4_MAX_SCALE_BYTE))
            bytes_[k] = np.uint8(byte if bits < _INFINITY else np.int32(E8M0_NAN))
            # 2**(127 - byte) is a normal number for every byte, so the product is the quotient.
            parts[k] = _float(U(U(U(254) - U(byte)) << U(23))) if bits < _INFINITY else F(1)
        _multiply(values, _MXFP4, parts)
        for k in range(n):
            if bytes_[k] == E8M0_NAN:  # all elements become NaN; those that were keep their sign
                for i in range(k * _MXFP4, (k + 1) * _MXFP4):
                    values[i] = values[i] if np.isnan(values[i]) else F(np.nan)
        _pack(values, codes, first * (_MXFP4 // 2))


@_compiled
def decode(codes, pairs, scales, scale_values, global_scales, per_global, block, out, start, stop):  # type: ignore[no-untyped-def]
    """e2m1 * (scale * global) of blocks, in float32, cast once. pairs: the two values of each byte, as 64 bits.
    scale_values: of each scale byte."""
    tile, steps = np.empty(_TILE * block, np.float32), np.empty(_TILE, np.float32)
    doubles = tile.view(np.uint64)
    first = start
    while first < stop:
        row = first // per_global
        n = min(_TILE, stop - first, (row + 1) * per_global - first)
        g = global_scales[row]
        packed, parts = codes[first * (block // 2) : (first + n) * (block // 2)], scales[first : first + n]
        for i in range(len(packed)):
            doubles[i] = pairs[packed[i]]
        for k in range(n):
            steps[k] = scale_values[parts[k]] * g
        _multiply(tile, block, steps[:n])
        _store(tile[: n * block], out, first * block)
        first += n


@_compiled
def nvfp4_round(x, global_scales, blocks, e4m3_values, out, start, stop):  # type: ignore[no-untyped-def]
    """`reference.nvfp4_qdq_activation` of rows. blocks: of a row. global_scales: one, one a row, or none: each row's
    own."""
    tile, down, up = np.empty(_TILE * _NVFP4, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    for row in range(start, stop):
        if len(global_scales) == 0:
            begin = row * blocks * _NVFP4
            largest = _float(largest_magnitude(x, begin, begin + blocks * _NVFP4))
            g = largest / F(E2M1_MAX * E4M3_MAX)
            g = F(NVFP4_MIN_GLOBAL) if g < F(NVFP4_MIN_GLOBAL) else g
            g = F(1) if largest == F(0) else g
        else:
            g = global_scales[row if len(global_scales) > 1 else 0]
        encode = F(1) / g
        for offset in range(0, blocks, _TILE):
            n = min(_TILE, blocks - offset)
            first = (row * blocks + offset) * _NVFP4
            values, inverses, steps = tile[: n * _NVFP4], down[:n], up[:n]
            _load(x, first, values)
            _maxima(values, _NVFP4, steps)
            for k in range(n):
                scale = e4m3_values[_e4m3(encode * (steps[k] * F(1.0 / E2M1_MAX)))]
                inverses[k] = F(0) if scale == F(0) else encode / scale
                steps[k] = scale / encode
            _multiply(values, _NVFP4, inverses)
            for i in range(len(values)):
                values[i] = _e2m1_value(U(_e2m1(values[i])))
            _multiply(values, _NVFP4, steps)
            _store(values, out, first)
