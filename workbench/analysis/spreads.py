"""One figure over many matrices: pooled by power, its mean, and 95 % intervals over matrices.

    spread = spread_of(values, Pool((signal, error), lambda sums: sqnr_db(sums[:, 0], sums[:, 1])), seed)

A figure's interval is a bootstrap over matrices (1000 resamples; over runs of neighbours beyond 2048 matrices), which
is what a claim about "the model's experts" generalises over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bootstrap import MIN_UNITS, RESAMPLES, draw_counts, interval

_MAX_UNITS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One figure over many matrices. pooled: power-weighted (NaN where pooling has no meaning), with its interval.

    mean, low, high of the mean: unweighted over matrices. minimum, maximum: over matrices. count: finite values.
    """

    pooled: float
    pooled_low: float
    pooled_high: float
    mean: float
    mean_low: float
    mean_high: float
    minimum: float
    maximum: float
    count: int


class Pool(NamedTuple):
    """A pooled figure: columns with a value per matrix, and the figure of their sums `[resamples, columns]`."""

    columns: tuple[NDArray[np.float64], ...]
    of_sums: Callable[[NDArray[np.float64]], NDArray[np.float64]]


def spread_of(values: NDArray[np.float64], pool: Pool | None, seed: int) -> Spread:
    """values: one per matrix. pool: the same figure of all of them as one; None: it has no meaning."""
    finite = values[np.isfinite(values)]
    pooled, bounds, mean_bounds = math.nan, (math.nan, math.nan), (math.nan, math.nan)
    if pool is not None and len(values):
        columns = np.stack(pool.columns, axis=1)
        pooled = float(pool.of_sums(columns.sum(axis=0, keepdims=True))[0])
        if len(values) >= MIN_UNITS:
            bounds = interval(pool.of_sums(_resampled_sums(columns, seed)))
    if len(finite) >= MIN_UNITS:
        sums = _resampled_sums(np.stack((finite, np.ones_like(finite)), axis=1), seed)
        mean_bounds = interval(sums[:, 0] / sums[:, 1])
    return Spread(
        pooled=pooled,
        pooled_low=bounds[0],
        pooled_high=bounds[1],
        mean=mean_of(values),
        mean_low=mean_bounds[0],
        mean_high=mean_bounds[1],
        minimum=float(finite.min()) if len(finite) else math.nan,
        maximum=float(finite.max()) if len(finite) else math.nan,
        count=len(finite),
    )


def mean_of(values: NDArray[np.float64]) -> float:
    """Mean of the finite ones; NaN where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def distinct(column: Any) -> str:
    """A column's different values, with commas."""
    return ", ".join(str(v) for v in column.unique())


def _resampled_sums(columns: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Column sums of each resample `[resamples, columns]`; more than _MAX_UNITS matrices are drawn as runs."""
    n = len(columns)
    if n > _MAX_UNITS:
        columns = np.add.reduceat(columns, np.arange(_MAX_UNITS) * n // _MAX_UNITS, axis=0)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite power: resamples without that matrix are NaN
        return draw_counts(len(columns), RESAMPLES, seed) @ columns
