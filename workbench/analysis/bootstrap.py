"""Bootstrap intervals of ratios of sums: draw units with replacement, as counts, and multiply.

    low, high = interval(sqnr_db(*(draw_counts(n, resamples, seed) @ sums_per_unit).T))

The statistic is evaluated on sums over units (tokens of a layer, matrices of a model), so a resample is one row of a
matrix product. The same seed gives the same draws for every layer of one size. A matrix's own intervals are made
without resamples: `influence.py`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
"""By default: with 200, the 5th and 195th of them bound an interval that covers 94 %, not 95."""

MIN_UNITS = 8
"""With fewer units the percentiles of a bootstrap mean little: the interval is NaN."""


@functools.lru_cache(maxsize=8)
def draw_counts(units: int, resamples: int, seed: int) -> NDArray[np.float64]:
    """How often each unit is drawn, `[resamples, units]` float64; every row sums to `units`."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(units, np.full(units, 1.0 / units), size=resamples).astype(np.float64)
    counts.setflags(write=False)
    return counts


def interval(values: NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of resampled values. NaNs (an undefined resample) are left out; all NaN gives NaN, NaN.

    Order statistics, not interpolated, so that infinite SQNRs (a resample without error) stay infinite.
    """
    defined = values[~np.isnan(values)]
    if defined.size == 0:
        return float("nan"), float("nan")
    n = defined.size
    below = max(1, math.floor((n + 1) * (1.0 - level) / 2.0))  # of n exchangeable values and one more, `level` between
    ordered = np.sort(defined)
    return float(ordered[below - 1]), float(ordered[n - below])
