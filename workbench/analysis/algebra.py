"""Error algebra of one matrix: what a first and a second quantization did to it.

    figures = measure_matrix(w_nk, a_nk, b_nk, d_nk)
    figures["sqnr_total_db"], figures["corr_e1_e2"]

w = source, a = first(w), b = second(a), d = second(w) (direct); e1 = a - w, e2 = b - a, e = b - w. All figures are
bilinear in (w, e1, e2, e, d - w, 1), so one 6 x 6 Gram matrix per scale block, accumulated in float64, holds them all,
and a bootstrap over blocks is a matrix product. Cost: about a fifth of quantizing the matrix by the reference kernels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import FormatError

from .bootstrap import MAX_UNITS, MIN_UNITS, draw_counts, interval

Sums = NDArray[np.float64] | float
RESAMPLES = 200
_CHUNK_ELEMENTS = 131072  # in flight: 6 float64 vectors of it = 6 MiB, stays in cache
_W, _E1, _E2, _E, _ED, _ONE, _A = range(7)
_SIDES = 6  # _A = w + e1 is no side of its own


def measure_matrix(
    w: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    direct: Tensor | None = None,
    *,
    block: int = 32,
    resamples: int = RESAMPLES,
    seed: int = 0,
    name: str = "tensor",
) -> dict[str, float]:
    """All figures of `records.TensorRecord` for one matrix (its keys from `power_source` on).

    w, first, second, direct: `[..., K]`, equal shapes, any float dtype (exact in float64). A side that is None leaves
    its figures NaN; with `first` None, e = second - w and e1, e2 are undefined. block: elements of K per bootstrap unit
    (the coarser scale block), K must be a multiple. Powers are means of squares. An error that is exactly zero has SQNR
    +inf; a correlation with a constant side is NaN; fewer than 8 blocks leave intervals NaN.
    Raises FormatError naming `name` for shapes that differ or do not divide into blocks.
    """
    _check_shapes(name, block, w=w, first=first, second=second, direct=direct)
    gram_units = _gram_per_unit(w, first, second, direct, block)
    total = gram_units.sum(axis=0)
    constant = _constant_sides(total, w.numel(), w, first, second)
    point = {key: value.item() for key, value in _figures_with_interval(total[None]).items()}
    point |= _other_figures(total, w.numel())
    bounds = _bounds(gram_units, resamples, seed)
    missing = {_E1: first is None, _E2: first is None or second is None, _E: second is None, _ED: direct is None}
    return _select(point, bounds, missing, constant)


def sqnr_db(power_signal: Sums, power_error: Sums) -> NDArray[np.float64]:
    """10 log10(signal / error): +inf for an error of exactly zero, NaN where both are zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10.0 * np.log10(np.asarray(power_signal, np.float64) / np.asarray(power_error, np.float64))


def error_density(
    w: Tensor, first: Tensor, second: Tensor, *, bins: int = 48, limit: float = 3.0, samples: int = 4096
) -> NDArray[np.int64]:
    """Counts `[bins, bins]` of (e1 / rms e1, e2 / rms e2) on [-limit, limit)^2; rows are e1, columns e2.

    About `samples` elements, at an odd stride so that every place in a block is seen; pairs beyond the limit are not
    counted. All zero where an error is identically zero.
    """
    stride = max(1, w.numel() // samples) | 1
    e1 = (first.reshape(-1)[::stride].double() - w.reshape(-1)[::stride].double()).numpy()
    e2 = (second.reshape(-1)[::stride].double() - first.reshape(-1)[::stride].double()).numpy()
    rms1, rms2 = math.sqrt(float(np.mean(e1**2))), math.sqrt(float(np.mean(e2**2)))
    if rms1 == 0 or rms2 == 0:
        return np.zeros((bins, bins), np.int64)
    edges = np.linspace(-limit, limit, bins + 1)
    counts, _, _ = np.histogram2d(e1 / rms1, e2 / rms2, bins=[edges, edges])
    return counts.astype(np.int64)


# ---- the Gram matrix -------------------------------------------------------------------------------------------------


def _gram_per_unit(
    w: Tensor, first: Tensor | None, second: Tensor | None, direct: Tensor | None, block: int
) -> NDArray[np.float64]:
    """Gram matrices `[units, 6, 6]` of (w, e1, e2, e, d - w, 1).

    A unit is a scale block, or a run of neighbouring ones where the matrix has more than MAX_UNITS; the last may be
    shorter.
    """
    elements = w.numel()
    unit = block * max(1, math.ceil(elements / block / MAX_UNITS))
    flat = [t.reshape(-1) if t is not None else None for t in (w, first, second, direct)]
    grams: list[NDArray[np.float64]] = []
    step = unit * max(1, _CHUNK_ELEMENTS // unit)
    whole = elements // unit * unit
    edges = [*range(0, whole, step), *([whole] if whole < elements else [])]
    for start in edges:
        stop = elements if start == whole else min(start + step, whole)
        shape = (-1, stop - start) if start == whole else (-1, unit)
        wc, ac, bc, dc = (t[start:stop].double().reshape(shape) if t is not None else None for t in flat)
        assert wc is not None
        zero = torch.zeros_like(wc)
        sides = torch.stack(
            (
                wc,
                zero if ac is None else ac - wc,
                zero if ac is None or bc is None else bc - ac,
                zero if bc is None else bc - wc,
                zero if dc is None else dc - wc,
                torch.ones_like(wc),
            ),
            dim=1,
        )  # [units in flight, 6, elements of a unit]
        grams.append(torch.bmm(sides, sides.transpose(1, 2)).numpy())
    return np.concatenate(grams)


def _constant_sides(
    gram: NDArray[np.float64], count: int, w: Tensor, first: Tensor | None, second: Tensor | None
) -> dict[int, bool]:
    """Which of w, a, e1, e2 are constant. The sums only rule it out; where they cannot, the elements decide."""

    def suspect(total: float, squares: float) -> bool:
        return squares / count - (total / count) ** 2 <= 1e-9 * squares / count

    def constant(t: Tensor) -> bool:
        return bool(t.min() == t.max())

    found = {_W: suspect(gram[_W, _ONE], gram[_W, _W]) and constant(w), _A: False, _E1: False, _E2: False}
    if first is not None:
        a_sum, a_squares = gram[_W, _ONE] + gram[_E1, _ONE], gram[_W, _W] + 2 * gram[_W, _E1] + gram[_E1, _E1]
        found[_A] = suspect(a_sum, a_squares) and constant(first)
        found[_E1] = suspect(gram[_E1, _ONE], gram[_E1, _E1]) and constant(first.double() - w.double())
    if first is not None and second is not None:
        found[_E2] = suspect(gram[_E2, _ONE], gram[_E2, _E2]) and constant(second.double() - first.double())
    return found


def _figures_with_interval(gram: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Figures with an interval, from Gram sums `[r, 6, 6]`."""
    signal = gram[:, _W, _W]
    return {
        "sqnr_first_db": sqnr_db(signal, gram[:, _E1, _E1]),
        "sqnr_total_db": sqnr_db(signal, gram[:, _E, _E]),
        "sqnr_direct_db": sqnr_db(signal, gram[:, _ED, _ED]),
        "corr_e1_e2": _correlation(
            gram[:, _E1, _E2],
            gram[:, _E1, _ONE],
            gram[:, _E2, _ONE],
            gram[:, _E1, _E1],
            gram[:, _E2, _E2],
            gram[:, _ONE, _ONE],
        ),
    }


def _other_figures(gram: NDArray[np.float64], count: int) -> dict[str, float]:
    """The remaining figures from the whole matrix's Gram sums `[6, 6]`. a = w + e1 and b = w + e by linearity."""
    ww, e1e1, e2e2, e1e2 = gram[_W, _W], gram[_E1, _E1], gram[_E2, _E2], gram[_E1, _E2]
    aa = ww + 2 * gram[_W, _E1] + e1e1
    a_sum = gram[_W, _ONE] + gram[_E1, _ONE]
    e2_mean = gram[_E2, _ONE] / count
    e2_std = float(np.sqrt(np.maximum(0.0, e2e2 / count - e2_mean**2)))
    return {
        "power_source": float(ww / count),
        "power_e1": float(e1e1 / count),
        "power_e2": float(e2e2 / count),
        "power_total": float(gram[_E, _E] / count),
        "power_direct": float(gram[_ED, _ED] / count),
        "sqnr_second_db": float(sqnr_db(aa, e2e2)),
        "sqnr_total_predicted_quadrature_db": float(sqnr_db(ww, e1e1 + e2e2)),
        "sqnr_total_predicted_linear_db": float(sqnr_db(ww, np.maximum(0.0, e1e1 + e2e2 + 2 * e1e2))),
        "corr_e2_a": float(_correlation(gram[_E2, _W] + gram[_E2, _E1], gram[_E2, _ONE], a_sum, e2e2, aa, count)),
        "corr_e1_w": float(_correlation(gram[_E1, _W], gram[_E1, _ONE], gram[_W, _ONE], e1e1, ww, count)),
        "gain_total": float((ww + gram[_W, _E]) / ww) if ww > 0 else math.nan,
        "e2_mean": float(e2_mean),
        "e2_std": e2_std,
        "e2_mean_over_std": float(e2_mean / e2_std) if e2_std > 0 else math.nan,
    }


def _correlation(xy: Sums, x: Sums, y: Sums, xx: Sums, yy: Sums, n: Sums) -> NDArray[np.float64]:
    """Pearson correlation from sums; NaN where a side has no variance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        covariance = xy - x * y / n
        spread = np.sqrt(np.maximum(xx - x * x / n, 0.0)) * np.sqrt(np.maximum(yy - y * y / n, 0.0))
        return np.clip(np.where(spread > 0, covariance / spread, np.nan), -1.0, 1.0)


def _bounds(gram: NDArray[np.float64], resamples: int, seed: int) -> dict[str, tuple[float, float]]:
    units = gram.shape[0]
    if units < MIN_UNITS or resamples < 2:
        return {}
    resampled = (draw_counts(units, resamples, seed) @ gram.reshape(units, -1)).reshape(-1, _SIDES, _SIDES)
    return {key: interval(values) for key, values in _figures_with_interval(resampled).items()}


# ---- which figures exist ---------------------------------------------------------------------------------------------

_NEEDS: dict[str, tuple[int, ...]] = {
    "power_source": (),
    "power_e1": (_E1,),
    "power_e2": (_E2,),
    "power_total": (_E,),
    "power_direct": (_ED,),
    "sqnr_first_db": (_E1,),
    "sqnr_second_db": (_E2,),
    "sqnr_total_db": (_E,),
    "sqnr_direct_db": (_ED,),
    "sqnr_total_predicted_quadrature_db": (_E1, _E2),
    "sqnr_total_predicted_linear_db": (_E1, _E2),
    "corr_e1_e2": (_E1, _E2),
    "corr_e2_a": (_E2,),
    "corr_e1_w": (_E1,),
    "gain_total": (_E,),
    "e2_mean": (_E2,),
    "e2_std": (_E2,),
    "e2_mean_over_std": (_E2,),
}
_WITH_INTERVAL = ("sqnr_first_db", "sqnr_total_db", "sqnr_direct_db", "corr_e1_e2")
_CONSTANT_MATTERS = {
    "corr_e1_e2": (_E1, _E2),
    "corr_e2_a": (_E2, _A),
    "corr_e1_w": (_E1, _W),
    "e2_mean_over_std": (_E2,),
}


def _select(
    point: dict[str, float],
    bounds: dict[str, tuple[float, float]],
    missing: dict[int, bool],
    constant: dict[int, bool],
) -> dict[str, float]:
    """Figures in the record's order; NaN where an arm is missing or a correlation's side is constant."""
    figures: dict[str, float] = {}
    for key, needs in _NEEDS.items():
        undefined = any(missing[side] for side in needs)
        undefined = undefined or any(constant[side] for side in _CONSTANT_MATTERS.get(key, ()))
        figures[key] = math.nan if undefined else point[key]
        if key in _WITH_INTERVAL:
            low, high = (math.nan, math.nan) if undefined else bounds.get(key, (math.nan, math.nan))
            figures[f"{key}_low"], figures[f"{key}_high"] = low, high
    if constant[_E2] and not missing[_E2]:
        figures["e2_std"] = 0.0
    return figures


def _check_shapes(name: str, block: int, **sides: Tensor | None) -> None:
    shape = tuple(sides["w"].shape)  # type: ignore[union-attr]
    for side, tensor in sides.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise FormatError(
                f"{name}: the {side} arm's matrix is {tuple(tensor.shape)}, the source's is {shape}",
                fix="the arms are not one model: check the checkpoints' paths, or re-export the arm that differs",
            )
    if not shape or shape[-1] % block:
        raise FormatError(
            f"{name}: K = {shape[-1] if shape else 0} is not a multiple of the block of {block} (shape {shape})",
            fix="exclude this tensor from the quantized arms",
        )
