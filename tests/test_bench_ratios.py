"""The ratio of paired repeats: known intervals, the error rate of the equivalence test, and the repeats it asks for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from workbench.bench.ratios import compare_paired


def test_ratio_and_interval_are_the_t_intervals_of_the_log_ratio() -> None:
    a, b = [1.0, 1.1, 0.9, 1.05], [1.02, 1.10, 0.95, 1.04]
    logs = np.log(b) - np.log(a)
    low, high = stats.t.interval(0.95, 3, logs.mean(), stats.sem(logs))
    found = compare_paired(a, b, 0.01)
    assert found.ratio == pytest.approx(math.exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    equal_low, equal_high = stats.t.interval(0.90, 3, logs.mean(), stats.sem(logs))
    assert (found.equal_low, found.equal_high) == pytest.approx((math.exp(equal_low), math.exp(equal_high)))
    back = compare_paired(b, a, 0.01)
    assert (back.ratio, back.low, back.high) == pytest.approx((1 / found.ratio, 1 / found.high, 1 / found.low))


def test_the_verdict_is_that_of_the_interval_and_the_margin() -> None:
    steady = [1.0, 1.001, 0.999, 1.0005]
    assert compare_paired([1.0] * 4, steady, 0.01).verdict == "equivalent"
    assert compare_paired([1.0] * 4, [1.05 * s for s in steady], 0.01).verdict == "different"
    assert compare_paired([1.0] * 4, [0.95 * s for s in steady], 0.01).verdict == "different"
    near = compare_paired([1.0] * 4, [1.01 * s for s in steady], 0.01)  # at the margin itself
    assert near.verdict == "inconclusive"
    assert compare_paired([1.0] * 4, [1.005, 1.005, 1.0051, 1.0049], 0.01).verdict == "equivalent"  # unequal, within it


def test_one_pair_shows_a_ratio_and_decides_nothing() -> None:
    found = compare_paired([2.0], [3.0], 0.01)
    assert (found.ratio, found.verdict, found.needed) == (1.5, "inconclusive", None)
    assert math.isnan(found.low)
    assert math.isnan(compare_paired([], [], 0.01).ratio)


def test_a_ratio_at_the_margin_is_called_equivalent_in_at_most_five_percent() -> None:
    rng = np.random.default_rng(0)
    studies = 2000
    called = sum(
        compare_paired([1.0] * 10, list(1.01 * np.exp(rng.normal(0, 0.005, 10))), 0.01).verdict == "equivalent"
        for _ in range(studies)
    )
    assert 0.035 * studies < called < 0.065 * studies


def test_the_repeats_asked_for_decide_in_about_eighty_percent() -> None:
    rng = np.random.default_rng(1)
    open_study = compare_paired([1.0, 1.0, 1.0], list(np.exp(0.03 * np.array([-1.0, 0.0, 1.0]))), 0.01)
    assert open_study.verdict == "inconclusive"
    assert open_study.needed is not None
    decided = sum(
        compare_paired([1.0] * open_study.needed, list(np.exp(rng.normal(0, 0.03, open_study.needed))), 0.01).verdict
        == "equivalent"
        for _ in range(500)
    )
    assert 0.74 * 500 < decided < 0.86 * 500


def test_figures_that_are_no_times_are_refused() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive"):
            compare_paired([1.0], [bad], 0.01)
    with pytest.raises(ValueError, match="margin"):
        compare_paired([1.0], [1.0], 0.0)
