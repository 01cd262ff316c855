"""The one-sided upper bound of the loss, which a gate compares with its margin.

    upper = loss_upper_bound(lost=9, gained=2, n=400)                     # one-sided 95 %
    p = noninferiority_pvalue(lost=9, gained=2, n=400, margin=0.01)       # H0: the true loss is the margin or more

Exact unconditional (Chan and Zhang 1999, Biometrics 55:1202): the probability, at the worst rate of gains, of data at
least as favourable as observed. So a true loss at the margin passes in at most 5 % of experiments, whatever the
discordance: 3.0 / n for no flip in n items, the "rule of three". Two refinements keep it from being needlessly wide.
Tables are ordered by the score statistic with its skewness removed, so that the tail hardly depends on the rate of
gains; and that rate is searched only where the observed gains leave it plausible (Berger and Boos 1994, JASA 89:1012),
at a cost of 0.0001 of p. docs/statistics.md has its size and power beside those of approximate bounds.
"""

from __future__ import annotations

import math

import numpy as np

from workbench.statistics.paired import check_counts, falling_root, restricted_gain_rate, score_statistic

GAMMA = 1e-4
"""Probability, added to p, that the true rate of gains lies outside the searched interval."""
RATES = 41
"""Rates of gains searched, equally spaced in their square root (equal steps of standard deviation)."""


def loss_upper_bound(lost: int, gained: int, n: int, confidence: float = 0.95) -> float:
    """One-sided exact upper bound of the loss (a proportion): the largest loss not rejected at 1 - confidence.

    confidence: at most 0.999. Raises ValueError for impossible counts.
    """
    check_counts(lost, gained, n, least=1)
    if not 0.5 <= confidence <= 0.999:
        raise ValueError(f"confidence {confidence}, expected 0.5 to 0.999")
    if lost - gained == n:
        return 1.0
    alpha = 1.0 - confidence
    return falling_root(lambda loss: noninferiority_pvalue(lost, gained, n, loss) - alpha, (lost - gained) / n, 1.0)


def noninferiority_pvalue(lost: int, gained: int, n: int, margin: float) -> float:
    """Exact p-value of "the true loss is `margin` or more" against "it is less"; margin a proportion in (-1, 1)."""
    from scipy.stats import binom

    check_counts(lost, gained, n, least=1)
    observed = float(_ordering(np.asarray(lost), np.asarray(gained), n, margin)) + 1e-9
    rates = _plausible_rates(gained, n, margin)
    low, high = float(rates[0]), float(rates[-1])
    first = max(0, int(n * low - 9.0 * math.sqrt(n * low) - 12.0))
    last = min(n, int(n * high + 9.0 * math.sqrt(n * high * (1.0 - high)) + 12.0))
    counts = np.arange(first, last + 1)
    thresholds = _largest_loss_count(counts, n, margin, observed)
    share = np.clip((rates + margin) / (1.0 - rates), 0.0, 1.0)  # of losses among the items that are no gain
    weights = binom.pmf(counts[None, :], n, rates[:, None])
    tails = binom.cdf(thresholds[None, :], (n - counts)[None, :], share[:, None])  # 0 where the threshold is -1
    return min(1.0, float(np.max(np.sum(weights * tails, axis=1))) + GAMMA)


def _plausible_rates(gained: int, n: int, margin: float) -> np.ndarray:
    """Clopper-Pearson interval of the rate of gains at confidence 1 - GAMMA, inside what the margin allows."""
    from scipy.stats import beta

    least, most = max(0.0, -margin), (1.0 - margin) / 2.0  # both rates and their sum lie in [0, 1]
    low = float(beta.ppf(GAMMA / 2.0, gained, n - gained + 1)) if gained else 0.0
    high = float(beta.ppf(1.0 - GAMMA / 2.0, gained + 1, n - gained)) if gained < n else 1.0
    low, high = min(max(low, least), most), min(max(high, least), most)
    return np.asarray(np.linspace(math.sqrt(low), math.sqrt(high), RATES) ** 2)


def _ordering(lost: np.ndarray, gained: np.ndarray, n: int, loss: float) -> np.ndarray:
    """The score statistic less its skewness, T - g (T^2 - 1) / 6: which of two tables speaks more against `loss`.

    g: skewness of the sum of n differences at the restricted rates, cut to [0, 1] so that the order of tables stays
    that of their number of losses. Validity does not depend on the ordering, only the width of the bound does.
    """
    statistic = score_statistic(lost, gained, n, loss)
    q = restricted_gain_rate(lost, gained, n, loss)
    variance = 2.0 * q + loss * (1.0 - loss)
    third = (q + loss) * (1.0 - loss) ** 3 - q * (1.0 + loss) ** 3 - (1.0 - 2.0 * q - loss) * loss**3
    usable = (variance > 1e-15) & (statistic < 1.0)
    skewness = np.where(usable, third / np.sqrt(n * np.maximum(variance, 1e-15) ** 3), 0.0)
    skewness = np.clip(skewness, 0.0, 1.0)
    finite = np.where(np.isfinite(statistic), statistic, 0.0)
    return np.asarray(statistic - skewness * (finite * finite - 1.0) / 6.0)


def _largest_loss_count(gained: np.ndarray, n: int, loss: float, observed: float) -> np.ndarray:
    """For every count of gains, the largest count of losses whose statistic is at most `observed`; -1 where none is."""
    low, high = np.full(gained.shape, -1), n - gained
    while np.any(low < high):
        middle = (low + high + 1) // 2
        inside = _ordering(middle, gained, n, loss) <= observed
        low, high = np.where(inside, middle, low), np.where(inside, high, middle - 1)
    return low
