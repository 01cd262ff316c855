"""95 % intervals of figures that are functions of sums over independent units, from each unit's influence.

    bounds = intervals(units, figures_of_units, keys)       # {key: Interval(low, high, effective)}

A unit's influence on a figure is the figure's derivative along that unit's sums: their spread is the figure's standard
error (the infinitesimal jackknife), and their skewness and kurtosis say how far the figure is from normal. Two
corrections keep 95 % at 95 % where a few blocks hold much of the error: Hall's cubic transformation for the skewness
(P. Hall, "On the removal of skewness by transformation", J. R. Stat. Soc. B 54, 1992), and Student's t for a standard
error that is itself uncertain, with Satterthwaite's degrees of freedom 2 n / (kurtosis - 1). Those are what `effective`
counts. No random numbers, and twenty evaluations of the figures where a bootstrap needs a thousand; what no unit shows
stays unknown to either. Coverage: docs/analysis.md, tests/analysis/simulate_intervals.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_UNITS = 8
"""With fewer units there is no interval: NaN. `bootstrap.py` has the same."""

MAX_UNITS = 1024
"""A matrix with more scale blocks uses runs of neighbouring blocks as units."""

FEW_EFFECTIVE = 16.0
"""Below so many effective units an interval is in doubt: it rests on a few units with most of the error, and units like
them may be missing from the sample. Simulated: docs/analysis.md."""

_STEP = 1e-4  # of a numeric derivative, in standard deviations of a column's sum


class Interval(NamedTuple):
    """low, high: of 95 %. effective: degrees of freedom of the standard error; of n normal influences, n."""

    low: float
    high: float
    effective: float


NONE = Interval(math.nan, math.nan, math.nan)

Figures = Callable[[NDArray[np.float64]], Mapping[str, NDArray[np.float64]]]


def intervals(units: NDArray[np.float64], figures: Figures) -> dict[str, Interval]:
    """Intervals of `figures(sums [r, columns])` -> {key: [r]}, smooth and unchanged when all sums are scaled alike.

    units: sums by unit, `[units, columns]`. An infinite figure (no error at all) has itself as both bounds; an
    undefined one, and fewer than MIN_UNITS units, have NaN.
    """
    n, columns = units.shape
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        total = units.sum(axis=0)
        steps = _STEP * np.sqrt((units * units).sum(axis=0))
        moved = np.where(steps > 0, steps, 1.0)  # a column of zeros stays where it is
        shifts = np.diag(steps)
        found = figures(np.concatenate((total[None], total + shifts, total - shifts)))
        bounds = {}
        for key, values in found.items():
            slopes = (values[1 : columns + 1] - values[columns + 1 :]) / (2 * moved)
            bounds[key] = _interval(float(values[0]), n * (units @ slopes)) if n >= MIN_UNITS else NONE
    return bounds


def _interval(value: float, influence: NDArray[np.float64]) -> Interval:
    """From the influence of every unit (their mean is zero up to rounding, since scaling all sums changes nothing)."""
    if not math.isfinite(value):
        return Interval(value, value, math.nan)
    from scipy.special import stdtrit

    n = len(influence)
    centred = influence - influence.mean()
    second = float(np.mean(centred**2))
    if second == 0:
        return Interval(value, value, math.inf)
    error = math.sqrt(second / (n - 1))
    skewness = float(np.mean(centred**3)) / second**1.5
    kurtosis = float(np.mean(centred**4)) / second**2
    effective = 2 * n / (kurtosis - 1) if kurtosis > 1 else math.inf
    quantile = float(stdtrit(min(effective, 1e9), 0.975))
    return Interval(
        value - error * _untransformed(quantile, skewness / math.sqrt(n)),
        value - error * _untransformed(-quantile, skewness / math.sqrt(n)),
        effective,
    )


def _untransformed(x: float, skew: float) -> float:
    """t with t + skew t^2 / 3 + skew^2 t^3 / 27 + skew / 6 = x: Hall's transformation, which is monotone, undone."""
    if abs(skew) < 1e-9:
        return x
    return float(3 / skew * (np.cbrt(1 + skew * (x - skew / 6)) - 1))
