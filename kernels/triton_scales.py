"""Device functions of the scale rules: a block's largest magnitude to its E4M3 byte (NVFP4) or E8M0 byte (MXFP4)."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_elements import e4m3_bytes, float_bits


@triton.jit
def nvfp4_scale_bytes(amax, g, RULE: tl.constexpr):
    """E4M3 bytes (int32) of blocks with maxima `amax` under the decode multiplier `g`; as `nvfp4.RULES`."""
    if RULE == "quark":
        byte = e4m3_bytes(tl.div_rn(amax, g * 6.0))
        byte = tl.where(byte == 0, 0x38, byte)
    elif RULE == "quark_f2f":
        scale = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
        byte = e4m3_bytes(tl.div_rn(tl.where(scale == 0, 1.1920928955078125e-07, scale), g))
    elif RULE == "torchao":
        scale = tl.div_rn(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), g)
        byte = e4m3_bytes(tl.where(scale < 0.015625, 0.015625, scale))
    else:
        scale = tl.div_rn(amax, g * 6.0)
        scale = tl.where(scale == 0, 1.0, scale)
        byte = e4m3_bytes(tl.where(scale < 0.001953125, 0.001953125, scale))
    return byte


@triton.jit
def mxfp4_scale_bytes(amax, RULE: tl.constexpr):
    """E8M0 bytes (int32) of blocks with maxima `amax`: 0 for a zero block, 255 for NaN and infinity."""
    bits = float_bits(amax)
    if (RULE == "log2") | (RULE == "torchao"):
        # The logarithm rounded to float32, as these tools have it.
        quotient = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)), 5.877471754111438e-39)
        k = tl.ceil(tl.log2(quotient.to(tl.float64)).to(tl.float32))
        byte = tl.minimum(tl.maximum(k, -127.0), 125.0).to(tl.int32) + 127
    elif RULE == "floor_log2":
        k = tl.floor(tl.log2(tl.maximum(amax, 1.1754943508222875e-38).to(tl.float64)).to(tl.float32)) - 2.0
        byte = tl.minimum(tl.maximum(k, -127.0), 125.0).to(tl.int32) + 127
    else:
        # What to add to the bits so that the exponent grows where the rule rounds up: from a significand of 1.75
        # (even), above 1.5 (rceil), above 1 (ceil).
        CARRY: tl.constexpr = (
            0x200000 if RULE == "even" else 0x3FFFFF if RULE == "rceil" else 0x7FFFFF if RULE == "ceil" else 0
        )
        byte = tl.minimum(tl.maximum(((bits + CARRY) >> 23) - 2, 0), 252)
    byte = tl.where(bits == 0, 0, byte)
    return tl.where(bits >= 0x7F800000, 255, byte)
