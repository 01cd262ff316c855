"""Fixed strata, such as the 14 subjects of MMLU-Pro: the pooled loss, the mean over strata, and whether they differ.

    result = stratified_loss({"law": (1101, 40, 22), "math": (1351, 20, 19)})     # name: (n, lost, gained)

Strata are no clusters: the subjects are all there are, not a sample of subjects, so the variation between them is no
error of the loss. Treating them as clusters would ask another question and give intervals several times as wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.statistics.paired import check_counts, normal_quantile

RESAMPLES = 9_999


@dataclass(frozen=True, kw_only=True, slots=True)
class StratifiedLoss:
    """Proportions. loss, low, high: pooled over items (each stratum weighs as its items), two-sided 95 % interval.

    macro, macro_low, macro_high: mean over strata, each weighing the same. p_differ: do flips split into lost and
    gained alike in all strata? Chi-squared of the table strata x (lost, gained), permuted with both margins fixed
    (NaN: fewer than two strata have a flip). A small value says that the loss sits in some of them.
    """

    n: int
    lost: int
    gained: int
    loss: float
    low: float
    high: float
    macro: float
    macro_low: float
    macro_high: float
    p_differ: float


def stratified_loss(
    strata: Mapping[str, tuple[int, int, int]], confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> StratifiedLoss:
    """strata: name -> (items, lost, gained). Raises ValueError for none, or for impossible counts.

    A stratum's variance is estimated from a table with half a flip more in each direction: a stratum without flips
    would otherwise claim certainty.
    """
    if not strata:
        raise ValueError("no strata")
    for items, losses, gains in strata.values():
        check_counts(losses, gains, items, least=1)
    n, lost, gained = (np.array(column, dtype=np.float64) for column in zip(*strata.values(), strict=True))
    loss = (lost - gained) / n
    rate = (lost + gained + 1.0) / (n + 2.0)
    variance = np.maximum(rate - loss**2, 0.0) / n
    z = normal_quantile(0.5 + confidence / 2.0)

    def weighted(weights: np.ndarray) -> tuple[float, float, float]:
        estimate, error = float(weights @ loss), math.sqrt(float(weights**2 @ variance))
        return estimate, max(-1.0, estimate - z * error), min(1.0, estimate + z * error)

    pooled, low, high = weighted(n / n.sum())
    macro, macro_low, macro_high = weighted(np.full(n.size, 1.0 / n.size))
    return StratifiedLoss(
        n=int(n.sum()),
        lost=int(lost.sum()),
        gained=int(gained.sum()),
        loss=pooled,
        low=low,
        high=high,
        macro=macro,
        macro_low=macro_low,
        macro_high=macro_high,
        p_differ=_p_differ(lost, gained, resamples, seed),
    )


def _p_differ(lost: np.ndarray, gained: np.ndarray, resamples: int, seed: int) -> float:
    from scipy.stats import random_table

    flips = lost + gained
    lost, flips = lost[flips > 0], flips[flips > 0]
    if flips.size < 2:
        return math.nan
    total = float(flips.sum())
    if lost.sum() in (0.0, total):
        return 1.0  # all flips go one way everywhere
    expected = flips * lost.sum() / total
    observed = float(np.sum((lost - expected) ** 2 / flips))
    tables = random_table(flips.astype(int), [int(lost.sum()), int(total - lost.sum())])
    drawn = tables.rvs(size=resamples, random_state=np.random.default_rng(seed))[:, :, 0]
    statistics = np.sum((drawn - expected) ** 2 / flips, axis=1)
    return float((1 + np.sum(statistics >= observed - 1e-12)) / (resamples + 1))
