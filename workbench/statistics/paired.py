"""Two arms on the same items: the exact test, the interval of the loss, the interval of the recovery.

    p = mcnemar_exact(lost=9, gained=2, alternative="greater")      # is the candidate worse?
    low, high = loss_interval(lost=9, gained=2, n=400)              # two-sided 95 %

The interval is the score interval of Tango (1998, Statistics in Medicine 17:891): it inverts a test whose variance is
estimated under the hypothesis, so it has a width when nothing flipped (z^2 / (n + z^2) on either side), where the
Wald interval claims certainty. docs/statistics.md compares its coverage with the alternatives'. One-sided it dips at
few discordant pairs; what a gate compares with its margin is the exact bound of `upper_bound.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np

Alternative = Literal["greater", "less", "two-sided"]


def mcnemar_exact(lost: int, gained: int, alternative: Alternative = "two-sided") -> float:
    """p-value of McNemar's exact test: given lost + gained discordant pairs, lost is Binomial(1/2) if the arms are
    equal.

    alternative "greater": the candidate is worse. 1.0 when no pair is discordant.
    """
    from scipy.stats import binomtest

    check_counts(lost, gained, lost + gained)
    if lost + gained == 0:
        return 1.0
    return float(binomtest(lost, lost + gained, 0.5, alternative=alternative).pvalue)


def loss_interval(lost: int, gained: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Tango's two-sided score interval of the loss (lost - gained) / n, as proportions in [-1, 1]."""
    check_counts(lost, gained, n, least=1)
    z = normal_quantile(0.5 + confidence / 2)
    estimate = (lost - gained) / n

    def statistic(loss: float) -> float:
        return float(score_statistic(np.asarray(lost), np.asarray(gained), n, loss))

    low = -1.0 if lost - gained == -n else falling_root(lambda loss: statistic(loss) - z, -1.0, estimate)
    high = 1.0 if lost - gained == n else falling_root(lambda loss: statistic(loss) + z, estimate, 1.0)
    return low, high


def recovery_interval(
    baseline: int, candidate: int, lost: int, n: int, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(estimate, low, high) of candidate accuracy / baseline accuracy on paired items; NaN if the baseline has none
    right.

    baseline, candidate: items each has right. Score interval of the ratio of paired proportions (Nam and Blackwelder
    2002, Statistics in Medicine 21:689), of the same family as `loss_interval`: unlike the log-ratio and the
    bootstrap it has a width when nothing flipped, and unlike Fieller's it is always an interval.
    """
    gained = candidate - (baseline - lost)
    check_counts(lost, gained, n, least=1)
    if not 0 <= lost <= baseline <= n or candidate > n:
        raise ValueError(f"baseline {baseline}, candidate {candidate}, lost {lost} of {n} items do not fit together")
    if baseline == 0:
        return math.nan, math.nan, math.nan
    z = normal_quantile(0.5 + confidence / 2)
    estimate = candidate / baseline

    def statistic(log_ratio: float) -> float:
        return _nam_blackwelder(baseline, candidate, lost, gained, n, math.exp(log_ratio))

    widest = 2.0 * math.log(n + 10.0) + 10.0
    center = math.log(estimate) if candidate else -widest
    low = 0.0 if candidate == 0 else math.exp(falling_root(lambda x: statistic(x) - z, -widest, center))
    high = math.exp(falling_root(lambda x: statistic(x) + z, center, widest))
    return estimate, low, high


def check_counts(lost: int, gained: int, n: int, least: int = 0) -> None:
    if lost < 0 or gained < 0 or lost + gained > n or n < least:
        raise ValueError(f"{lost} lost and {gained} gained of {n} items")


def normal_quantile(probability: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(probability))


def falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Root of a decreasing function between two points of the open interval (low, high)."""
    from scipy.optimize import brentq

    edge = 1e-12 * max(1.0, abs(high - low))
    a, b = low + edge, high - edge
    if a >= b or function(a) <= 0.0:
        return low
    if function(b) >= 0.0:
        return high
    return float(brentq(function, a, b, xtol=1e-10))


def restricted_gain_rate(lost: np.ndarray, gained: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Maximum-likelihood rate of gains if the true loss is `loss`; the rate of losses is it plus `loss`.

    The larger root of 2n q^2 + (-lost - gained + (2n - lost + gained) loss) q - gained loss (1 - loss) = 0.
    """
    b = -lost - gained + (2.0 * n - lost + gained) * loss
    c = -gained * loss * (1.0 - loss)
    return (np.sqrt(np.maximum(b * b - 8.0 * n * c, 0.0)) - b) / (4.0 * n)


def score_statistic(lost: np.ndarray, gained: np.ndarray, n: int, loss: float) -> np.ndarray:
    """Tango's score statistic of the hypothesis "the true loss is `loss`"; decreasing in `loss`. Arrays of counts in,
    array out.

    The variance uses the rate of gains under the hypothesis.
    """
    q = restricted_gain_rate(lost, gained, n, loss)
    difference = lost - gained - n * loss
    variance = n * np.maximum(2.0 * q + loss * (1.0 - loss), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = difference / np.sqrt(variance)
    return np.where(difference == 0.0, 0.0, value)


def _nam_blackwelder(baseline: int, candidate: int, lost: int, gained: int, n: int, ratio: float) -> float:
    """Score statistic of "candidate rate = ratio * baseline rate"; decreasing in `ratio`.

    The rates of losses and gains in the variance are the maximum-likelihood ones under the hypothesis.
    """
    p_base, p_cand, p_lost, p_gained = baseline / n, candidate / n, lost / n, gained / n
    square = ratio * ratio
    root = math.sqrt((p_cand - square * p_base) ** 2 + 4.0 * square * p_lost * p_gained)
    rate_lost = (-p_cand + square * (p_base + 2.0 * p_gained) + root) / (2.0 * ratio * (ratio + 1.0))
    rate_gained = ratio * rate_lost - (ratio - 1.0) * (p_base + p_gained)
    variance = ratio * (rate_lost + rate_gained)
    difference = p_cand - ratio * p_base
    if variance <= 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    return math.sqrt(n) * difference / math.sqrt(variance)
