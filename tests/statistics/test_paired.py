"""Exact tests against published and recomputed values, score intervals against brute force, bounds against their own
promise.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.statistics import loss_interval, loss_upper_bound, mcnemar_exact, recovery_interval, wilson_interval
from workbench.statistics.paired import _nam_blackwelder, score_statistic


@pytest.mark.parametrize(
    ("lost", "gained", "two_sided"),
    # statsmodels 0.15.0, mcnemar([[50, lost], [gained, 20]], exact=True); 86/150 is Agresti's approval survey
    [
        (9, 2, 0.0654296875),
        (10, 0, 0.001953125),
        (0, 0, 1.0),
        (86, 150, 3.7159361395713866e-05),
        (3, 3, 1.0),
        (40, 13, 0.0002685401188191605),
        (5, 0, 0.0625),
    ],
)
def test_mcnemar_two_sided(lost: int, gained: int, two_sided: float) -> None:
    assert mcnemar_exact(lost, gained) == pytest.approx(two_sided, rel=1e-12)
    assert mcnemar_exact(gained, lost) == pytest.approx(two_sided, rel=1e-12)


def test_mcnemar_one_sided_by_hand() -> None:
    assert mcnemar_exact(5, 0, "greater") == pytest.approx(1 / 32)
    assert mcnemar_exact(0, 5, "greater") == 1.0
    # P(X >= 9 | 11, 1/2) = (55 + 11 + 1) / 2048
    assert mcnemar_exact(9, 2, "greater") == pytest.approx(67 / 2048)
    assert mcnemar_exact(0, 0, "greater") == 1.0
    assert mcnemar_exact(9, 2, "less") == pytest.approx(1 - 12 / 2048)


def test_a_tie_of_flips_is_no_evidence() -> None:
    # an A/A pair: 1,319 items, 12 flips each way
    assert mcnemar_exact(12, 12) == 1.0
    low, high = loss_interval(12, 12, 1319)
    assert low == pytest.approx(-high)
    z = 1.959963984540054
    assert high == pytest.approx(z * math.sqrt(24 + z * z) / 1319, rel=0.01)  # solved for a tie and a small loss


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    # statsmodels 0.15.0, proportion_confint(k, n, method="wilson")
    [
        (0, 10, 0.0, 0.27753279986288926),
        (6, 12, 0.253781597633706, 0.746218402366294),
        (855, 1000, 0.8318179377037748, 0.875465063771481),
        (1319, 1319, 0.9970960550146962, 1.0),
    ],
)
def test_wilson(k: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(k, n) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))


def test_tango_statistic_is_the_score_at_the_restricted_maximum() -> None:
    from scipy.optimize import minimize_scalar

    for (lost, gained, n), loss in itertools.product(
        [(9, 2, 60), (0, 0, 30), (7, 0, 25), (3, 3, 40)], (-0.1, 0.02, 0.3)
    ):

        def cost(q: float, lost: int = lost, gained: int = gained, n: int = n, loss: float = loss) -> float:
            cells = ((lost, q + loss), (gained, q), (n - lost - gained, 1 - 2 * q - loss))
            return -sum(k * math.log(max(p, 1e-300)) for k, p in cells if k)

        bounds = (max(0.0, -loss), (1 - loss) / 2)
        q = minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-13}).x
        expected = (lost - gained - n * loss) / math.sqrt(n * (2 * q + loss - loss * loss))
        assert float(score_statistic(lost, gained, n, loss)) == pytest.approx(expected, rel=2e-4)


def test_recovery_statistic_is_the_score_at_the_restricted_maximum() -> None:
    from scipy.optimize import minimize

    for (both, lost, gained, neither), ratio in itertools.product([(60, 9, 2, 29), (30, 5, 5, 10)], (0.8, 0.97, 1.1)):
        n = both + lost + gained + neither

        def rates(x: list[float], ratio: float = ratio) -> tuple[float, float, float, float]:
            p11, p10 = x
            p01 = (ratio - 1) * p11 + ratio * p10
            return p11, p10, p01, 1 - p11 - p10 - p01

        def cost(x: list[float], counts: tuple[int, ...] = (both, lost, gained, neither)) -> float:
            return -sum(k * math.log(p) if p > 0 else -1e9 for k, p in zip(counts, rates(x), strict=True))

        start = [both / n, max(lost / n, (1 - ratio) * both / n / ratio + 0.02)]
        found = minimize(cost, start, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 5000})
        p11, p10, p01, _ = rates(found.x)
        # variance of 1{candidate right} - ratio 1{baseline right}, whose mean is 0 under the hypothesis
        variance = p01 + ratio**2 * p10 + (1 - ratio) ** 2 * p11
        expected = ((both + gained) / n - ratio * (both + lost) / n) / math.sqrt(variance / n)
        assert _nam_blackwelder(both + lost, both + gained, lost, gained, n, ratio) == pytest.approx(expected, rel=1e-4)


def test_intervals_have_a_width_when_nothing_flipped() -> None:
    z2 = 1.959963984540054**2
    assert loss_interval(0, 0, 400) == (pytest.approx(-z2 / (400 + z2)), pytest.approx(z2 / (400 + z2)))
    # exact: (1 - loss)^n = 0.05, the "rule of three"
    assert loss_upper_bound(0, 0, 400) == pytest.approx(1 - 0.05 ** (1 / 400), rel=1e-3)
    estimate, low, high = recovery_interval(300, 300, 0, 400)
    assert estimate == 1.0
    assert (low, high) == (pytest.approx(300 / (300 + z2), rel=1e-6), pytest.approx((300 + z2) / 300, rel=1e-6))


def test_edges() -> None:
    assert loss_upper_bound(7, 0, 7) == 1.0
    assert loss_interval(7, 0, 7)[1] == 1.0
    assert loss_interval(0, 7, 7)[0] == -1.0
    assert all(map(math.isnan, recovery_interval(0, 3, 0, 10)))
    assert recovery_interval(10, 0, 10, 20)[:2] == (0.0, 0.0)
    assert 0.0 < recovery_interval(10, 0, 10, 20)[2] < 0.5
    for bad in ((-1, 0, 5), (3, 3, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="lost"):
            loss_interval(*bad)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.data())
def test_bounds_hold_the_estimate_and_order(n: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    both = data.draw(st.integers(0, n - lost - gained))
    low, high = loss_interval(lost, gained, n)
    mirrored = loss_interval(gained, lost, n)
    estimate = (lost - gained) / n
    assert -1.0 <= low <= estimate <= high <= 1.0
    assert (low, high) == (pytest.approx(-mirrored[1], abs=1e-8), pytest.approx(-mirrored[0], abs=1e-8))
    if both + lost:
        ratio, ratio_low, ratio_high = recovery_interval(both + lost, both + gained, lost, n)
        assert 0.0 <= ratio_low <= ratio <= ratio_high
        if lost == gained == 0:
            assert ratio_low < 1.0 < ratio_high


@settings(max_examples=12, deadline=None)
@given(st.integers(5, 150), st.data())
def test_upper_bound_is_never_below_the_estimate_nor_much_below_the_score_bound(n: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    upper = loss_upper_bound(lost, gained, n)
    assert (lost - gained) / n <= upper <= 1.0
    assert upper > loss_interval(lost, gained, n, confidence=0.80)[1] - 1e-9


def _multinomial(n: int, lost: int, gained: int, p_lost: float, p_gained: float) -> float:
    from scipy.special import gammaln, xlogy

    rest = n - lost - gained
    log = gammaln(n + 1) - gammaln(lost + 1) - gammaln(gained + 1) - gammaln(rest + 1)
    return float(math.exp(log + xlogy(lost, p_lost) + xlogy(gained, p_gained) + xlogy(rest, 1 - p_lost - p_gained)))


def test_upper_bound_covers_in_at_least_95_percent_of_all_tables() -> None:
    n = 10
    tables = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    bounds = {table: loss_upper_bound(*table, n) for table in tables}
    shares = (0.0, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4)
    worst = 1.0
    for p_lost, p_gained in itertools.product(shares, shares):
        true = p_lost - p_gained
        covered = sum(_multinomial(n, *table, p_lost, p_gained) for table in tables if bounds[table] >= true - 1e-9)
        worst = min(worst, covered)
    assert 0.949 <= worst < 0.98  # kept, and not by being useless


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.010, 0.0), (0.0135, 0.0), (0.0154, 0.0001)])
def test_upper_bound_covers_at_few_discordant_pairs(p_lost: float, p_gained: float) -> None:
    """At 200 items: the score bound alone covers 93.4 % at a loss of 1.35 pp without gains."""
    n, true = 200, p_lost - p_gained
    missed = 0.0
    for gained in range(8):
        for lost in range(16):  # the bound grows with `lost`: stop at the first that covers
            if _multinomial(n, lost, gained, p_lost, p_gained) < 1e-7:
                continue
            if loss_upper_bound(lost, gained, n) >= true - 1e-9:
                break
            missed += _multinomial(n, lost, gained, p_lost, p_gained)
    assert missed <= 0.0501


def test_two_sided_score_interval_covers_about_95_percent() -> None:
    n = 40
    tables = [(b, c) for b in range(16) for c in range(16)]
    intervals = {table: loss_interval(*table, n) for table in tables}
    found = []
    for p_lost, p_gained in itertools.product((0.0, 0.01, 0.03, 0.06, 0.1), repeat=2):
        true = p_lost - p_gained
        found.append(
            sum(
                _multinomial(n, *table, p_lost, p_gained)
                for table, (low, high) in intervals.items()
                if low - 1e-9 <= true <= high + 1e-9
            )
        )
    assert min(found) > 0.92
    assert sum(found) / len(found) > 0.95
