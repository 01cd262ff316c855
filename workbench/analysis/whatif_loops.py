"""The inner loop of the what-if lattice: E2M1 under many candidate steps, in one pass over the values.

    errors = rounding_errors(a, w, steps, block=32)          # [2, candidates, blocks]
    errors = steered_errors(a, w, exponents, multipliers)    # [multipliers]

Nothing but sums is kept, so a rule costs a look-up among candidates' sums instead of a tensor of its own. Values are
those of `workbench.kernels.reference` bit for bit (x / step in float32, ties to even, times step); their differences
are taken in float64. Compiled by Numba on first use, then cached on disk; threads are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

F = np.float32


def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder for the cache can be written: every process compiles for itself
        return numba.njit(function, **options)


def rounding_errors(a: Tensor, w: Tensor, steps: Tensor, *, block: int) -> NDArray[np.float64]:
    """Sums over each block of (a_hat - a)^2 and (a_hat - w)^2, `[2, candidates, blocks]`.

    a, w: float32 `[N, K]`, contiguous; steps: float32 `[candidates, N * K / block]`, what an element's unit is worth.
    """
    out = np.zeros((2, *steps.shape), np.float64)
    _rounding_errors(a.reshape(-1).numpy(), w.reshape(-1).numpy(), steps.contiguous().numpy(), block, out)
    return out


def round_blocks(a: Tensor, steps: Tensor, *, block: int) -> Tensor:
    """a_hat under one step a block, float32 in a's shape."""
    out = a.new_empty(a.shape)
    _round_blocks(a.reshape(-1).numpy(), steps.reshape(-1).contiguous().numpy(), block, out.reshape(-1).numpy())
    return out


def steered_errors(a: Tensor, w: Tensor, multipliers: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum of (mxfp4_even(a * m) / m - w)^2 for every multiplier m, `[rows, multipliers]`: blocks of 32, a float32
    `[N, K]` as above."""
    out = np.zeros((a.shape[0], len(multipliers)), np.float64)
    _steered_errors(a.numpy(), w.numpy(), multipliers, out)
    return out


@_compiled
def _e2m1(x):  # type: ignore[no-untyped-def]
    """To the nearest E2M1 value, ties to even; the steps between values are 1/2 below 2, 1 below 4, then 2."""
    m = abs(x)
    if m < F(2):
        m = np.rint(m * F(2)) * F(0.5)
    elif m < F(4):
        m = np.rint(m)
    elif m < F(6):
        m = np.rint(m * F(0.5)) * F(2)
    else:
        m = F(6)
    return m if x >= F(0) else -m


@_compiled
def _rounding_errors(a, w, steps, block, out):  # type: ignore[no-untyped-def]
    for b in range(steps.shape[1]):
        first = b * block
        for c in range(steps.shape[0]):
            step = steps[c, b]
            own = total = 0.0
            for i in range(first, first + block):
                q = _e2m1(a[i] / step) * step
                e = np.float64(q) - np.float64(a[i])
                own += e * e
                e = np.float64(q) - np.float64(w[i])
                total += e * e
            out[0, c, b] = own
            out[1, c, b] = total


@_compiled
def _round_blocks(a, steps, block, out):  # type: ignore[no-untyped-def]
    for b in range(len(steps)):
        step = steps[b]
        for i in range(b * block, (b + 1) * block):
            out[i] = _e2m1(a[i] / step) * step


@_compiled
def _steered_errors(a, w, multipliers, out):  # type: ignore[no-untyped-def]
    scaled = np.empty(32, F)
    for n in range(a.shape[0]):
        for first in range(0, a.shape[1], 32):
            for c in range(len(multipliers)):
                m = multipliers[c]
                largest = F(0)
                for i in range(32):
                    scaled[i] = a[n, first + i] * m
                    largest = max(largest, abs(scaled[i]))
                if largest == F(0):
                    step = F(math.ldexp(1.0, -127))
                else:
                    mantissa, exponent = math.frexp(np.float64(largest))
                    k = exponent - 3 + (1 if mantissa >= 0.875 else 0)
                    step = F(math.ldexp(1.0, max(-127, min(125, k))))
                total = 0.0
                for i in range(32):
                    e = np.float64(_e2m1(scaled[i] / step) * step / m) - np.float64(w[n, first + i])
                    total += e * e
                out[n, c] += total
