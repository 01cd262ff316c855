"""Intervals from influence: a mean's and a ratio's as in textbooks, under skewness, and where nothing is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from workbench.analysis.algebra import Sides, measure_sides
from workbench.analysis.influence import FEW_EFFECTIVE, intervals
from workbench.analysis.sides import DenseSide

from .test_algebra import gaussian


def mean_and_ratio(sums: np.ndarray) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"mean": sums[:, 0] / sums[:, 2], "db": 10 * np.log10(sums[:, 0] / sums[:, 1])}


def with_counts(*columns: np.ndarray) -> np.ndarray:
    return np.stack([*columns, np.ones_like(columns[0])], axis=1)


def test_the_mean_of_normal_values_has_student_s_interval() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(3, 1, 4000)
    got = intervals(with_counts(x, x * x), mean_and_ratio)["mean"]
    low, high = stats.t.interval(0.95, len(x) - 1, x.mean(), stats.sem(x))
    assert (got.low, got.high) == pytest.approx((low, high), abs=0.02 * (high - low))
    assert got.effective == pytest.approx(len(x), rel=0.15)  # a normal sample's kurtosis is 3


def test_influences_are_the_derivatives_of_a_log_ratio() -> None:
    rng = np.random.default_rng(1)
    signal, error = rng.gamma(40, size=500), rng.gamma(40, size=500)  # hardly skewed
    got = intervals(with_counts(signal, error), mean_and_ratio)["db"]
    influence = 500 * 10 / math.log(10) * (signal / signal.sum() - error / error.sum())
    spread = 1.96 * influence.std(ddof=1) / math.sqrt(500)
    value = 10 * math.log10(signal.sum() / error.sum())
    assert (got.low, got.high) == pytest.approx((value - spread, value + spread), abs=0.03 * spread)


def test_skewed_units_are_covered_where_a_normal_interval_is_not() -> None:
    """2,000 samples of 200 lognormal errors; one standard error of a share near 0.95 is 0.005."""
    rng = np.random.default_rng(2)
    true = 10 * math.log10(1 / math.exp(0.5 * 1.2**2))
    held, plain = 0, 0
    for _ in range(2000):
        error = rng.lognormal(sigma=1.2, size=200)
        got = intervals(with_counts(np.ones(200), error), mean_and_ratio)["db"]
        held += got.low <= true <= got.high
        spread = 1.96 * 10 / math.log(10) * error.std(ddof=1) / error.mean() / math.sqrt(200)
        plain += abs(10 * math.log10(1 / error.mean()) - true) <= spread
    assert 0.935 < held / 2000 < 0.965
    assert plain < held


def test_what_has_no_interval() -> None:
    ones = np.ones(20)
    none = intervals(with_counts(ones, 0 * ones), mean_and_ratio)
    assert (none["db"].low, none["db"].high) == (math.inf, math.inf)  # no error at all
    assert (none["mean"].low, none["mean"].high) == (1, 1)
    undefined = intervals(with_counts(0 * ones, 0 * ones), mean_and_ratio)["db"]
    assert math.isnan(undefined.low)
    few = intervals(with_counts(ones[:7], ones[:7]), mean_and_ratio)["db"]
    assert math.isnan(few.high)


def test_an_error_in_one_block_is_in_doubt() -> None:
    w = gaussian(64, 256)
    a = w + 1e-3 * gaussian(64, 256, seed=1, scale=1.0)
    even = measure_sides(Sides(source=DenseSide(w, block=32), first=DenseSide(a, block=32), second=None))
    assert even.doubtful == ()
    a[5, 40] += 1.0
    burst = measure_sides(Sides(source=DenseSide(w, block=32), first=DenseSide(a, block=32), second=None))
    assert burst.doubtful == ("sqnr_first_db",)
    value, low, high = (burst.figures[f"sqnr_first_db{end}"] for end in ("", "_low", "_high"))
    assert high - low > 10
    assert low < value < high
    assert FEW_EFFECTIVE < 512  # blocks in all
