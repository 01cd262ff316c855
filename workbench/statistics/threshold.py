"""What a fixed accuracy threshold can see: the power of "measured >= value - tolerance".

    threshold_power(value=0.755, tolerance=0.0604, n=1000).passes_loss(0.05)      # 0.76

Such rules stand in many test suites. They compare one noisy figure with a constant, so how often they miss a loss
follows from the number of questions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ThresholdPower:
    """value: expected accuracy, limit: lowest accuracy that passes, both proportions; n: questions.

    detectable_loss: smallest true loss against `value` that fails in 80 % of runs (inf: none does).
    """

    value: float
    limit: float
    n: int
    detectable_loss: float

    def passes_loss(self, loss: float) -> float:
        """Probability that an arm whose true accuracy is `value - loss` passes."""
        return _passes(self.limit, self.n, self.value - loss)


def threshold_power(*, value: float, tolerance: float, n: int, power: float = 0.8) -> ThresholdPower:
    """Exact binomial power of a threshold. tolerance: a proportion below `value`. Raises ValueError outside [0, 1]."""
    from scipy.optimize import brentq

    if not 0.0 <= value <= 1.0 or tolerance < 0.0 or n < 1:
        raise ValueError(f"value={value}, tolerance={tolerance}, n={n}")
    limit = value - tolerance

    def excess(loss: float) -> float:
        return _passes(limit, n, value - loss) - (1.0 - power)

    if limit <= 0.0:
        detectable = math.inf
    elif excess(0.0) <= 0.0:
        detectable = 0.0
    else:
        detectable = float(brentq(excess, 0.0, value, xtol=1e-7))
    return ThresholdPower(value=value, limit=limit, n=n, detectable_loss=detectable)


def _passes(limit: float, n: int, accuracy: float) -> float:
    from scipy.stats import binom

    least = math.ceil(limit * n - 1e-9)  # 0.1 * 30 is 3.0000000000000004
    return float(binom.sf(least - 1, n, min(1.0, max(0.0, accuracy))))
