"""Intervals of what an evaluation reports: an accuracy of repeated answers, and a ratio of sums over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.statistics import wilson_interval

RESAMPLES = 2000
LEAST = 8
"""Below this many units a bootstrap interval says nothing: NaN."""
_Z = 1.959963984540054  # the normal 97.5 % quantile


def accuracy_interval(right: Sequence[bool], problems: Sequence[int] | None = None) -> tuple[float, float]:
    """95 % interval of the share of right answers. problems: which problem each answer is of, if any has several.

    Wilson's. Answers of one problem are alike, so n answers count as n / deff items, with the design effect deff = 1 +
    (k - 1) rho (Kish 1965; k: answers a problem; rho: the intraclass correlation, analysis of variance). Where rho
    cannot be estimated (all right or all wrong, or one problem) it is taken as 1: then problems count, not answers.
    """
    n = len(right)
    if problems is None or len(set(problems)) == n:
        return wilson_interval(sum(right), n)
    share, effective = sum(right) / n, n / _design_effect(right, problems)
    middle = (share + _Z**2 / (2 * effective)) / (1 + _Z**2 / effective)
    spread = _Z / (1 + _Z**2 / effective) * math.sqrt(share * (1 - share) / effective + _Z**2 / (4 * effective**2))
    return max(0.0, middle - spread), min(1.0, middle + spread)


def _design_effect(right: Sequence[bool], problems: Sequence[int]) -> float:
    groups: dict[int, list[bool]] = {}
    for problem, correct in zip(problems, right, strict=True):
        groups.setdefault(problem, []).append(correct)
    n, count = len(right), len(groups)
    size = n / count
    share = sum(right) / n
    if count < 2 or share in (0.0, 1.0) or n == count:
        return size
    means = [(len(g), sum(g) / len(g)) for g in groups.values()]
    between = sum(k * (m - share) ** 2 for k, m in means) / (count - 1)
    within = sum(k * m * (1 - m) for k, m in means) / (n - count)
    rho = (between - within) / (between + (size - 1) * within)
    return 1.0 + (size - 1) * min(1.0, max(0.0, rho))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of sum(above) / sum(below), over units. (NaN, NaN) with fewer than 8 units."""
    import numpy as np

    if len(above) < LEAST:
        return math.nan, math.nan
    pairs = np.array([above, below], dtype=np.float64)
    rng = np.random.default_rng(0)
    drawn = [pairs[:, rng.integers(0, len(above), size=len(above))].sum(axis=1) for _ in range(RESAMPLES)]
    ratios = np.array([top / bottom for top, bottom in drawn if bottom])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
