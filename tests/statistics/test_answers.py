"""Records of the paired statistics: by hand, against scipy and numpy, and against published definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.statistics import (
    accuracy_bounds,
    bootstrap_loss,
    clustered_loss,
    discordance_above_noise,
    graded_loss,
    holm,
    loss_interval,
    loss_upper_bound,
    more_items_needed,
    noninferiority_pvalue,
    paired_loss,
    paired_loss_of_counts,
    power_of_mcnemar,
    power_of_noninferiority,
    stratified_loss,
    threshold_power,
    trend,
)


def test_example_by_hand() -> None:
    """Ten items: five both right, three lost, one gained, one neither."""
    baseline = [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    candidate = [1, 1, 1, 1, 1, 0, 0, 0, 1, 0]
    result = paired_loss(baseline, candidate)
    assert (result.n, result.both, result.lost, result.gained, result.neither) == (10, 5, 3, 1, 1)
    assert result.loss == pytest.approx(0.2)
    assert result.discordance == pytest.approx(0.4)
    assert result.p_loss == pytest.approx((4 + 1) / 16)  # P(X >= 3 | 4, 1/2)
    assert result.p_two_sided == pytest.approx(2 * (4 + 1) / 16)
    assert result.recovery == pytest.approx(6 / 8)
    # Tango: the bounds solve (b - c - n d)^2 = z^2 n (2 q + d - d^2), q the restricted maximum-likelihood rate
    for bound in (result.low, result.high):
        b = -4 + (20 - 2) * bound
        q = (math.sqrt(b * b + 8 * 10 * 1 * bound * (1 - bound)) - b) / 40
        assert (2 - 10 * bound) ** 2 == pytest.approx(1.959963984540054**2 * 10 * (2 * q + bound - bound**2), rel=1e-6)
    assert (result.bootstrap_low, result.bootstrap_high) == (pytest.approx(-0.2), pytest.approx(0.6))
    assert result == paired_loss_of_counts(both=5, lost=3, gained=1, neither=1)


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [([1, 0], [1], "2 items, candidate 1"), ([0.5], [1], "graded_loss"), ([], [], "shape"), ([[1]], [[1]], "shape")],
)
def test_answers_that_do_not_pair(baseline: list[float], candidate: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_loss(baseline, candidate)


def test_bound_and_pvalue_are_one_test() -> None:
    for lost, gained, n in ((0, 0, 60), (3, 1, 100), (13, 13, 1319), (30, 18, 400)):
        upper = loss_upper_bound(lost, gained, n)
        assert (
            noninferiority_pvalue(lost, gained, n, upper + 1e-4)
            < 0.05
            < noninferiority_pvalue(lost, gained, n, upper - 1e-4)
        )
    assert loss_upper_bound(3, 1, 100, confidence=0.99) > loss_upper_bound(3, 1, 100)
    with pytest.raises(ValueError, match="confidence"):
        loss_upper_bound(3, 1, 100, confidence=0.99999)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.floats(0.001, 0.9))
def test_ordering_of_the_bound_rises_with_the_losses(n: int, loss: float) -> None:
    from workbench.statistics.upper_bound import _ordering

    for gained in range(n):
        lost = np.arange(n - gained + 1)
        assert np.all(np.diff(_ordering(lost, np.full(lost.shape, gained), n, loss)) > -1e-9)


def test_holm_by_hand_and_against_its_definition() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5]) == [0.5]
    assert holm([]) == []
    # sorted: 5 x 0.001, 4 x 0.013, 3 x 0.04, 2 x 0.2, 1 x 0.9
    assert holm([0.001, 0.2, 0.013, 0.04, 0.9]) == pytest.approx([0.005, 0.4, 0.052, 0.12, 0.9])
    with pytest.raises(ValueError, match="p-values"):
        holm([1.2])


def test_noise_floor_counts_only_what_one_arm_flips() -> None:
    noise = [1, 1, 0, 0, 0, 0, 0, 0]
    candidate = [1, 0, 1, 1, 1, 1, 1, 0]
    assert discordance_above_noise(noise, candidate) == pytest.approx((6 + 1) / 64)  # 5 of 6 or more
    assert discordance_above_noise(noise, noise) == 1.0


def test_bootstrap_agrees_with_the_score_interval_and_with_drawing_items() -> None:
    low, high = bootstrap_loss(60, 30, 1319)
    score_low, score_high = loss_interval(60, 30, 1319)
    assert (low, high) == (pytest.approx(score_low, abs=0.0015), pytest.approx(score_high, abs=0.0015))
    rng = np.random.default_rng(3)
    difference = np.repeat([1.0, -1.0, 0.0], [60, 30, 1229])
    drawn = difference[rng.integers(0, 1319, (2000, 1319))].mean(axis=1)
    assert (low, high) == (
        pytest.approx(np.quantile(drawn, 0.025), abs=0.0015),
        pytest.approx(np.quantile(drawn, 0.975), abs=0.0015),
    )


def test_strata_pool_by_items_and_find_the_one_that_loses() -> None:
    alike = {f"s{i}": (100, 6, 5) for i in range(14)}
    result = stratified_loss(alike)
    assert (result.n, result.lost, result.gained) == (1400, 84, 70)
    assert result.loss == pytest.approx(0.01) == pytest.approx(result.macro)
    assert result.p_differ > 0.9
    low, high = loss_interval(84, 70, 1400)
    assert (result.low, result.high) == (pytest.approx(low, abs=0.002), pytest.approx(high, abs=0.002))
    assert stratified_loss({**alike, "s3": (100, 40, 0)}).p_differ < 0.01
    unequal = stratified_loss({"large": (900, 9, 0), "small": (100, 11, 0)})
    assert unequal.loss == pytest.approx(0.02)
    assert unequal.macro == pytest.approx((0.01 + 0.11) / 2)
    assert unequal.p_differ == 1.0
    assert math.isnan(stratified_loss({"one": (50, 3, 1)}).p_differ)
    with pytest.raises(ValueError, match="no strata"):
        stratified_loss({})


def test_strata_p_is_fishers_for_two() -> None:
    from scipy.stats import fisher_exact

    result = stratified_loss({"a": (200, 12, 3), "b": (200, 5, 9)}, resamples=20_000)
    # both order tables of fixed margins; here the order by chi-squared is Fisher's
    assert result.p_differ == pytest.approx(fisher_exact([[12, 3], [5, 9]]).pvalue, abs=0.006)


def test_clusters_take_the_problem_as_the_unit() -> None:
    base = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 1, 0]])
    other = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0]])
    result = clustered_loss(base, other)
    differences = np.array([0.25, 0.0, 0.25, 0.25, 0.0])
    error = differences.std(ddof=1) / math.sqrt(5)
    assert result.loss == pytest.approx(0.15)
    assert (result.low, result.high) == (
        pytest.approx(0.15 - 2.7764451052 * error),  # t, 4 degrees of freedom
        pytest.approx(0.15 + 2.7764451052 * error),
    )
    assert result.upper == pytest.approx(0.15 + 2.1318467863 * error)
    assert result.p_loss == pytest.approx(1 / 8)  # three nonzero differences, all positive
    assert result.p_two_sided == pytest.approx(2 / 8)
    assert result.recovery == pytest.approx(9.0 / 12.0)
    assert result.recovery_low < 0.75 < result.recovery_high <= 1.0
    # one answer a problem: the same test as for items
    single = clustered_loss(base[:, :1], other[:, :1])
    assert single.loss == pytest.approx(paired_loss(base[:, 0], other[:, 0]).loss)


def test_clusters_without_change_claim_no_certainty_and_seeds_may_differ_in_number() -> None:
    base = np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    same = clustered_loss(base, np.array([[1.0, np.nan], [0.0, np.nan], [0.5, np.nan]]))
    assert same.loss == 0.0
    assert same.upper == pytest.approx(loss_upper_bound(0, 0, 3))
    assert (same.answers_baseline, same.answers_candidate) == (6, 3)
    with pytest.raises(ValueError, match="no answer"):
        clustered_loss(base, np.full((3, 2), np.nan))
    with pytest.raises(ValueError, match="expected the same"):
        clustered_loss(base, base[:2])


def test_graded_scores_by_enumeration() -> None:
    baseline, candidate = [0.9, 0.8, 0.7, 0.4], [0.5, 0.7, 0.9, 0.1]
    result = graded_loss(baseline, candidate)
    differences = [0.4, 0.1, -0.2, 0.3]
    means = [
        sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in itertools.product((1, -1), repeat=4)
    ]
    assert result.p_loss == pytest.approx(sum(mean >= 0.6 - 1e-12 for mean in means) / 16)
    assert (result.worse, result.better) == (3, 1)
    assert result.loss == pytest.approx(0.15)
    assert math.isnan(result.upper)  # too few for the bootstrap
    same = graded_loss(baseline, baseline)
    assert (same.loss, same.p_loss, same.p_two_sided) == (0.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="finite"):
        graded_loss([math.nan], [1.0])


def test_sign_permutation_is_scipys() -> None:
    from scipy.stats import permutation_test

    difference = np.random.default_rng(6).normal(0.1, 1.0, 12)
    difference[3] = 0.0
    result = graded_loss(difference, np.zeros(12))
    for alternative, p in (("greater", result.p_loss), ("two-sided", result.p_two_sided)):
        reference = permutation_test(
            (difference,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative=alternative
        )
        assert p == pytest.approx(reference.pvalue, rel=1e-12)


def test_graded_scores_sampled_agree_with_student() -> None:
    from scipy.stats import ttest_rel

    rng = np.random.default_rng(5)
    a = rng.normal(0.6, 0.2, 400)
    b = a - rng.normal(0.01, 0.1, 400)
    result = graded_loss(a, b)
    reference = ttest_rel(a, b, alternative="greater")
    interval = ttest_rel(a, b).confidence_interval(0.95)
    assert result.p_loss == pytest.approx(reference.pvalue, abs=0.01)
    assert (result.low, result.high) == (
        pytest.approx(interval.low, abs=0.001),
        pytest.approx(interval.high, abs=0.001),
    )
    assert result.low < result.loss < result.upper < result.high


def test_power_of_noninferiority_is_near_the_exact_sums() -> None:
    # exact: docs/statistics.md
    for discordance, passes in ((0.01, 0.953), (0.02, 0.794), (0.04, 0.553), (0.08, 0.354), (0.16, 0.229)):
        assert power_of_noninferiority(1319, discordance, 0.0, 0.01) == pytest.approx(passes, abs=0.03)
    assert power_of_noninferiority(1319, 0.04, 0.01, 0.01) == pytest.approx(0.05, abs=0.002)


def test_items_needed_decide() -> None:
    lost, gained, n, margin = 30, 28, 1319, 0.01
    needed = more_items_needed(lost, gained, n, margin)
    total = int(n + needed)
    assert needed > 0
    assert power_of_noninferiority(total, 58 / n, 2 / n, margin) == pytest.approx(0.8, abs=0.01)
    toward_fail = more_items_needed(14, 3, 300, 0.01)
    assert power_of_mcnemar(int(300 + toward_fail), 17 / 300, 11 / 300) > 0.75
    assert more_items_needed(2, 1, 100, 0.01) == math.inf
    assert more_items_needed(0, 0, 5000, 0.01) == 0.0


def test_fixed_thresholds_see_little() -> None:
    # 8 % relative of 0.755, true 0.705, 1,000 questions; binomial sum
    assert threshold_power(value=0.755, tolerance=0.08 * 0.755, n=1000).passes_loss(0.05) == pytest.approx(
        0.767, abs=0.001
    )
    power = threshold_power(value=0.89, tolerance=0.08, n=1319)
    assert power.passes_loss(0.05) > 0.998
    assert 1 - power.passes_loss(power.detectable_loss) == pytest.approx(0.8, abs=0.02)
    # by hand: at least 9 of 10 at accuracy 0.8
    assert threshold_power(value=0.9, tolerance=0.0, n=10).passes_loss(0.1) == pytest.approx(
        0.8**10 + 10 * 0.8**9 * 0.2
    )
    assert threshold_power(value=0.05, tolerance=0.08, n=10).detectable_loss == math.inf


def test_exact_bounds_of_an_accuracy() -> None:
    low, high = accuracy_bounds(10, 10)
    assert (low, high) == (pytest.approx(0.05 ** (1 / 10)), 1.0)
    low, high = accuracy_bounds(0, 10)
    assert (low, high) == (0.0, pytest.approx(1 - 0.05 ** (1 / 10)))


def test_trend() -> None:
    rising = trend([0.1, 0.2, 0.15, 0.3, 0.4])
    assert rising.p_rising == pytest.approx(5 / 120)  # 5 orders of 120 have at most one inversion
    assert rising.low <= rising.slope <= rising.high
    assert rising.slope == pytest.approx((0.2 / 3 + 0.075) / 2)  # median of the ten pairwise slopes
    assert trend([1.0] * 6).p_rising == 1.0
    assert math.isnan(trend([1.0, 2.0, 3.0, 4.0]).slope)
    assert trend([math.nan, 1.0]).n == 1
