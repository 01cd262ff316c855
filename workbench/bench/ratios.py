"""Is a server as fast as another? The ratio of paired repeats with its interval, and a test of equivalence.

    ratio = compare_paired([1.00, 1.02, …], [1.01, 1.01, …], margin=0.01)
    ratio.verdict      # equivalent, different, inconclusive

Two one-sided t tests on the log ratio (Schuirmann 1987), each at 5 %: equivalent where the 90 % interval lies within
[1 / (1 + margin), 1 + margin]. A confidence interval that merely contains 1 shows nothing.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ALPHA = 0.05
_POWER = 0.80
_MOST_REPEATS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """b over a: geometric mean, 95 % and 90 % t intervals (NaN with fewer than two pairs), and the verdict."""

    ratio: float
    low: float
    high: float
    equal_low: float
    equal_high: float
    verdict: str
    needed: int | None


def compare_paired(a: Sequence[float], b: Sequence[float], margin: float) -> Ratio:
    """b over a, pair by pair. margin: 0.01 for 1 %. Figures that are not positive raise ValueError."""
    if not 0 < margin < 1:
        raise ValueError(f"margin {margin} is not between 0 and 1")
    if any(not (value > 0 and math.isfinite(value)) for value in (*a, *b)):
        raise ValueError("a figure is not positive")
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(logs) < 2:
        nan = math.nan
        return Ratio(
            ratio=math.exp(logs[0]) if logs else nan, low=nan, high=nan, equal_low=nan, equal_high=nan,
            verdict="inconclusive", needed=None,
        )  # fmt: skip
    mean, spread, bound = statistics.mean(logs), statistics.stdev(logs), math.log1p(margin)
    half, equal_half = (_quantile(p, len(logs)) * spread / math.sqrt(len(logs)) for p in (1 - _ALPHA / 2, 1 - _ALPHA))
    if abs(mean) + equal_half < bound:
        verdict = "equivalent"
    elif abs(mean) - half > bound:
        verdict = "different"
    else:
        verdict = "inconclusive"
    return Ratio(
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        equal_low=math.exp(mean - equal_half),
        equal_high=math.exp(mean + equal_half),
        verdict=verdict,
        needed=_repeats_needed(mean, spread, bound) if verdict == "inconclusive" else None,
    )


def _repeats_needed(mean: float, spread: float, bound: float) -> int | None:
    """Smallest number that decides with a probability of 80 %, were mean and spread the truth; None: more than 10,000.

    Beyond the margin that is for "different". At no bias both tests must succeed, so each may miss half as often.
    """
    distance = abs(abs(mean) - bound)
    within = abs(mean) < bound
    miss = (1 - _POWER) / 2 if within and abs(mean) < spread / 10 else 1 - _POWER
    alpha = _ALPHA if within else _ALPHA / 2
    low, high = 2, _MOST_REPEATS
    if not _enough(high, distance, spread, alpha, miss):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, distance, spread, alpha, miss) else (middle + 1, high)
    return low


def _enough(n: int, distance: float, spread: float, alpha: float, miss: float) -> bool:
    return (_quantile(1 - alpha, n) + _quantile(1 - miss, n)) * spread / math.sqrt(n) <= distance


@functools.cache
def _quantile(probability: float, n: int) -> float:
    from scipy.stats import t

    return float(t.ppf(probability, n - 1))
