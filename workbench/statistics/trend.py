"""The trend of a figure over a history of runs: Theil's slope with its interval, and Kendall's test.

    trend([0.2, 0.1, 0.4, 0.5, 0.7, 0.9])      # losses in the order of the runs; is it growing?

Both depend on the order of the figures alone and assume nothing of their spread. They see a drift, not a step in the
last run: that is the paired comparison's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 5
"""Runs below which no order of them is significant at 1 %, and nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """slope: median change per run in the figure's unit, low, high: its 95 % interval (Sen); p_rising: one-sided
    Kendall test of a rise, exact where no two figures are equal. All NaN with fewer than 5 runs.
    """

    n: int
    slope: float
    low: float
    high: float
    p_rising: float


def trend(values: Sequence[float]) -> Trend:
    """values: one a run, oldest first; not finite ones are left out."""
    from scipy.stats import kendalltau, theilslopes

    known = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    if len(known) < LEAST:
        return Trend(n=len(known), slope=math.nan, low=math.nan, high=math.nan, p_rising=math.nan)
    places, figures = [place for place, _ in known], [value for _, value in known]
    slope, _, low, high = theilslopes(figures, places, 0.95)
    constant = len(set(figures)) == 1
    p = 1.0 if constant else float(kendalltau(places, figures, alternative="greater").pvalue)
    return Trend(n=len(known), slope=float(slope), low=float(low), high=float(high), p_rising=p)
