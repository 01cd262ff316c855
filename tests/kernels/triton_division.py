"""Kernels that round quotients by the short divisions of the Triton kernels and by an exact one."""

from __future__ import annotations

import triton
import triton.language as tl
from workbench.kernels.triton_elements import divide, divisor, e2m1_magnitude_codes, e4m3_bytes
from workbench.kernels.triton_pairs import reciprocal, rounded_e4m3
from workbench.kernels.triton_quantize_pairs import divide_or_overflow


@triton.jit
def both_codes(x_ptr, d_ptr, short_ptr, exact_ptr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at)
    d = tl.load(d_ptr + at)
    m, inverse, power = divisor(d)
    tl.store(short_ptr + at, e2m1_magnitude_codes(divide(x * power, m, inverse), "even"))
    tl.store(exact_ptr + at, e2m1_magnitude_codes(tl.div_rn(x, d), "even"))


@triton.jit
def both_codes_unscaled(x_ptr, d_ptr, short_ptr, exact_ptr, TILE: tl.constexpr):
    """E2M1 by the card's own approximate reciprocal, refined once."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at)
    d = tl.load(d_ptr + at)
    tl.store(short_ptr + at, e2m1_magnitude_codes(divide(x, d, reciprocal(d, True)), "even"))
    tl.store(exact_ptr + at, e2m1_magnitude_codes(tl.div_rn(x, d), "even"))


@triton.jit
def both_scales(x_ptr, d_ptr, short_ptr, exact_ptr, TILE: tl.constexpr):
    """E4M3 bytes, by the card's own conversion."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at)
    d = tl.load(d_ptr + at)
    byte, _value = rounded_e4m3(divide_or_overflow(x, d, True), True)
    tl.store(short_ptr + at, byte)
    tl.store(exact_ptr + at, e4m3_bytes(tl.div_rn(x, d)))
