"""Intervals of one proportion."""

from __future__ import annotations


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Wilson score interval of successes / n (Wilson 1927), without continuity correction.

    Chosen over the normal interval because it stays inside [0, 1] and has a width at 0 and at n. Raises ValueError
    for counts that are none.
    """
    from scipy.stats import binomtest

    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n}")
    interval = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(interval.low), float(interval.high)


def accuracy_bounds(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact one-sided bounds (Clopper and Pearson 1934), a lower and an upper, each at `confidence`."""
    from scipy.stats import binomtest

    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n}")
    low = binomtest(successes, n, alternative="greater").proportion_ci(confidence_level=confidence, method="exact").low
    high = binomtest(successes, n, alternative="less").proportion_ci(confidence_level=confidence, method="exact").high
    return float(low), float(high)
