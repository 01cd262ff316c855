"""A kernel that rounds quotients to E2M1 by the short division of `triton_elements` and by an exact one."""

from __future__ import annotations

import triton
import triton.language as tl
from workbench.kernels.triton_elements import divide, divisor, e2m1_magnitude_codes


@triton.jit
def both_codes(x_ptr, d_ptr, short_ptr, exact_ptr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at)
    d = tl.load(d_ptr + at)
    m, inverse, power = divisor(d)
    tl.store(short_ptr + at, e2m1_magnitude_codes(divide(x * power, m, inverse), "even"))
    tl.store(exact_ptr + at, e2m1_magnitude_codes(tl.div_rn(x, d), "even"))
