"""Power of the exact McNemar test, against direct enumeration and the figures of the normal approximation."""

from __future__ import annotations

import math

import pytest

from workbench.statistics import mcnemar_exact, minimum_detectable_loss, power_of_mcnemar


def test_power_equals_direct_enumeration() -> None:
    n, discordance, loss = 30, 0.3, 0.2
    p_lost, p_gained = (discordance + loss) / 2, (discordance - loss) / 2
    expected = sum(
        math.comb(n, b) * math.comb(n - b, c) * p_lost**b * p_gained**c * (1 - discordance) ** (n - b - c)
        for b in range(n + 1)
        for c in range(n + 1 - b)
        if mcnemar_exact(b, c, "greater") <= 0.05
    )
    assert power_of_mcnemar(n, discordance, loss) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "discordance", "approximate_pp"),
    # (z.95 + z.80) sqrt(discordance / n): 1.37 pp and 0.72 pp; the exact test needs a little more
    [(1319, 0.04, 1.37), (12032, 0.10, 0.717)],
)
def test_detectable_loss_is_just_above_the_normal_approximation(
    n: int, discordance: float, approximate_pp: float
) -> None:
    found = 100 * minimum_detectable_loss(n, discordance)
    assert approximate_pp < found < 1.06 * approximate_pp
    assert power_of_mcnemar(n, discordance, found / 100) == pytest.approx(0.8, abs=1e-4)


def test_without_flips_one_item_is_assumed_and_all_flips_are_losses() -> None:
    # five losses and no gain are the least that is significant: P(Bin(100, loss) >= 5) = 0.8
    from scipy.stats import binom

    loss = minimum_detectable_loss(100, 0.0)
    assert binom.sf(4, 100, loss) == pytest.approx(0.8, abs=1e-4)


def test_more_items_detect_less_and_four_detect_nothing() -> None:
    found = [minimum_detectable_loss(n, 0.05) for n in (50, 100, 200, 400, 1000, 4000)]
    assert found == sorted(found, reverse=True)
    assert minimum_detectable_loss(4, 0.5) == math.inf
    assert minimum_detectable_loss(5, 0.0) < 1.0


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="loss"):
        power_of_mcnemar(100, 0.1, 0.2)
    with pytest.raises(ValueError, match="discordance"):
        minimum_detectable_loss(100, 1.5)
