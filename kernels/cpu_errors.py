"""The sums of the error algebra on a CPU, in one read of the values; compiled by Numba, two threads need no more code.

    units = error_sums(w, a, b, d, unit=1024)                  # float64 [units, len(SUMS)]
    parts = attribute(w, a, step_of_block, block=16)           # float64 [len(PARTS)]

w = source, a = first(w), b = second(a), d = second(w) ("direct"), flat arrays of one length; e1 = a - w, e2 = b - a,
e = b - w, ed = d - w. Every difference, product and sum is float64, whatever the values' dtype. Sums are reassociated
(vector lanes, fused multiply-add): the order is the compiler's, so two kinds of CPU may differ in the last bits, while
one repeats to the bit. The loops release Python's lock; callers hand each thread its own part. `analysis.algebra` makes
figures of the sums, and tests compare them with plain numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .reference import e8m0_values

SUMS = (
    "w", "e1", "e2", "e", "ed",
    "w_w", "e1_e1", "e2_e2", "e_e", "ed_ed",
    "w_e1", "w_e", "w_ed", "e1_e2",
    "e2_e2_e2", "e2_e2_e2_e2",
)  # fmt: skip
PARTS = ("saturation", "underflow", "element", "total", "saturated", "underflowed")
E2M1_CODES = 16

F = np.float32
_TILE = 1024  # elements of scratch memory, in the first-level cache


def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder for the cache can be written: every process compiles for itself
        return numba.njit(function, **options)


def error_sums(w: Tensor, a: Tensor, b: Tensor, d: Tensor | None, *, unit: int) -> NDArray[np.float64]:
    """SUMS over runs of `unit` consecutive elements (the last may be shorter), `[ceil(n / unit), 16]` float64.

    w, a, b, d: float32 or float64, contiguous, equally many elements. d None: its sums are 0.
    """
    n = w.numel()
    out = np.zeros((-(-n // unit), len(SUMS)), np.float64)
    flat = [_flat(t) for t in (w, a, b)]
    if d is None:
        _sums(*flat, unit, out)
    else:
        _sums(*flat, unit, out)
        _direct_sums(flat[0], _flat(d), unit, out)
    return out


def block_energies(w: Tensor, b: Tensor, *, block: int) -> NDArray[np.float64]:
    """Sum of (b - w) squared over each run of `block` elements, float64 `[ceil(n / block)]`."""
    out = np.zeros(-(-w.numel() // block), np.float64)
    _energies(_flat(w), _flat(b), block, out)
    return out


def attribute(x: Tensor, x_hat: Tensor, steps: Tensor, *, block: int, largest: float = 6.0) -> NDArray[np.float64]:
    """PARTS of the error of rounding `x` to E2M1 blocks: sums of squares, and two counts.

    x, x_hat: float32, n elements; steps: float32 `[n / block]`, what one unit of a block's codes decodes to (block
    scale times global), of either sign. saturation: all of the squared error of elements beyond `largest` steps;
    underflow: of elements that are not zero and became zero; element: of the others, the error that E2M1 would have
    made with the block's unrounded scale, amax / `largest`; total: of all. What is left, total - the three, is due to
    rounding the scale.
    Only E2M1 is compiled; `analysis.attribution` has the same definition for any element.
    """
    out = np.zeros(len(PARTS), np.float64)
    _attribute(_flat(x), _flat(x_hat), _flat(steps), block, F(largest), out)
    return out


def code_sums(a: Tensor, b: Tensor, steps: Tensor, *, block: int) -> NDArray[np.float64]:
    """For each E2M1 code of b: how many, and the sums of e2 = b - a and of its square, float64 `[16, 3]`.

    a, b: float32, n elements; steps: float32 `[n / block]`. Values 0 and -0 share code 0; code 8 stays empty.
    """
    out = np.zeros((E2M1_CODES, 3), np.float64)
    _code_sums(_flat(a), _flat(b), _flat(steps), block, out)
    return out


def scale_values(scales: Tensor) -> Tensor:
    """Block scales as float32: E4M3 values and E8M0 bytes (uint8) by table, which a cast is many times slower than on
    a CPU."""
    if not scales.is_cpu:
        return e8m0_values(scales) if scales.dtype == torch.uint8 else scales.float()
    if scales.dtype == torch.uint8:
        return torch.from_numpy(_e8m0_values()[scales.numpy()])
    if scales.dtype == torch.float8_e4m3fn:
        return torch.from_numpy(_e4m3_values()[scales.view(torch.uint8).numpy()])
    return scales.float()


@functools.cache
def _e4m3_values() -> Any:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@functools.cache
def _e8m0_values() -> Any:
    return e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8)).numpy()


def _flat(t: Tensor) -> Any:
    t = t.detach().contiguous().view(-1)
    return t.numpy() if t.dtype in (torch.float32, torch.float64) else t.float().numpy()


# ---- loops -----------------------------------------------------------------------------------------------------------


@_compiled
def _sums(w, a, b, unit, out):  # type: ignore[no-untyped-def]
    n = len(w)
    for u in range(len(out)):
        first = u * unit
        last = min(n, first + unit)
        ws, as_, bs = w[first:last], a[first:last], b[first:last]
        s_w = s_e1 = s_e2 = s_e = 0.0
        ww = e1e1 = e2e2 = ee = we1 = we = e1e2 = cubes = fourths = 0.0
        for i in range(len(ws)):
            x = np.float64(ws[i])
            y = np.float64(as_[i])
            z = np.float64(bs[i])
            e1 = y - x
            e2 = z - y
            e = z - x
            square = e2 * e2
            s_w += x
            s_e1 += e1
            s_e2 += e2
            s_e += e
            ww += x * x
            e1e1 += e1 * e1
            e2e2 += square
            ee += e * e
            we1 += x * e1
            we += x * e
            e1e2 += e1 * e2
            cubes += square * e2
            fourths += square * square
        row = out[u]
        row[0], row[1], row[2], row[3] = s_w, s_e1, s_e2, s_e
        row[5], row[6], row[7], row[8] = ww, e1e1, e2e2, ee
        row[10], row[11], row[13] = we1, we, e1e2
        row[14], row[15] = cubes, fourths


@_compiled
def _direct_sums(w, d, unit, out):  # type: ignore[no-untyped-def]
    n = len(w)
    for u in range(len(out)):
        first = u * unit
        last = min(n, first + unit)
        ws, ds = w[first:last], d[first:last]
        total = squares = products = 0.0
        for i in range(len(ws)):
            x = np.float64(ws[i])
            e = np.float64(ds[i]) - x
            total += e
            squares += e * e
            products += x * e
        out[u, 4], out[u, 9], out[u, 12] = total, squares, products


@_compiled
def _energies(w, b, block, out):  # type: ignore[no-untyped-def]
    n = len(w)
    for k in range(len(out)):
        first = k * block
        last = min(n, first + block)
        ws, bs = w[first:last], b[first:last]
        total = 0.0
        for i in range(len(ws)):
            e = np.float64(bs[i]) - np.float64(ws[i])
            total += e * e
        out[k] = total


@_compiled
def _e2m1_magnitude(m):  # type: ignore[no-untyped-def]
    """The E2M1 magnitude nearest to m >= 0; ties to the even code."""
    half = np.int32(m > F(0.25)) + np.int32(m >= F(0.75)) + np.int32(m > F(1.25)) + np.int32(m >= F(1.75))
    one = np.int32(m > F(2.5)) + np.int32(m >= F(3.5))
    return F(half) * F(0.5) + F(one) + F(np.int32(m > F(5.0))) * F(2.0)


@_compiled
def _maxima(x, block, maxima):  # type: ignore[no-untyped-def]
    """The largest magnitude of each block, by its bits: integers have no NaN, so that the loop is a vector one."""
    bits, largest = x.view(np.uint32), maxima.view(np.uint32)
    for k in range(len(largest)):
        most = np.uint32(0)
        for value in bits[k * block : (k + 1) * block]:
            most = max(most, np.uint32(value & np.uint32(0x7FFFFFFF)))
        largest[k] = most


@_compiled
def _attribute(x, x_hat, steps, block, largest, out):  # type: ignore[no-untyped-def]
    """A tile of blocks at a time: what needs the block's scales goes to scratch memory, so that the sums are long."""
    blocks = max(1, _TILE // block)
    maxima = np.empty(blocks, np.float32)
    limits, ideals = np.empty(blocks * block, np.float64), np.empty(blocks * block, np.float32)
    saturation = underflow = element = total = saturated = underflowed = 0.0
    for first in range(0, len(steps), blocks):
        n = min(blocks, len(steps) - first)
        xs, hats = x[first * block : (first + n) * block], x_hat[first * block : (first + n) * block]
        _maxima(xs, block, maxima[:n])
        for k in range(n):
            limit = np.float64(largest) * abs(np.float64(steps[first + k]))
            exact = maxima[k] / largest
            exact = F(1.0) if exact == F(0.0) else exact
            part, over, other = xs[k * block : (k + 1) * block], limits[k * block :], ideals[k * block :]
            for i in range(len(part)):
                over[i] = limit
                other[i] = _e2m1_magnitude(abs(part[i]) / exact) * exact
        for i in range(n * block):
            value, rounded = xs[i], hats[i]
            magnitude = abs(value)
            error = np.float64(rounded) - np.float64(value)
            error = error * error
            other = np.float64(ideals[i]) - np.float64(magnitude)
            beyond = np.float64(magnitude) > limits[i]
            lost = (rounded == F(0.0)) & (magnitude > F(0.0)) & (not beyond)
            total += error
            saturation += error if beyond else 0.0
            underflow += error if lost else 0.0
            element += 0.0 if (beyond | lost) else other * other
            saturated += 1.0 if beyond else 0.0
            underflowed += 1.0 if lost else 0.0
    out[0], out[1], out[2], out[3], out[4], out[5] = saturation, underflow, element, total, saturated, underflowed


@_compiled
def _code_sums(a, b, steps, block, out):  # type: ignore[no-untyped-def]
    for k in range(len(steps)):
        step = steps[k]
        inverse = F(0.0) if step == F(0.0) else F(1.0) / step
        for i in range(k * block, (k + 1) * block):
            value = b[i]
            m = abs(value) * inverse
            code = int(m > F(0.25)) + int(m > F(0.75)) + int(m > F(1.25)) + int(m > F(1.75))
            code += int(m > F(2.5)) + int(m > F(3.5)) + int(m > F(5.0))
            code += 8 if (value < F(0.0) and code > 0) else 0
            e2 = np.float64(value) - np.float64(a[i])
            out[code, 0] += 1.0
            out[code, 1] += e2
            out[code, 2] += e2 * e2
