"""What an experiment of n paired items can see: the power of the exact one-sided McNemar test.

    minimum_detectable_loss(n=1319, discordance=0.04)     # 0.0145: a loss of 1.45 pp is found in 80 % of experiments

State it before the run: a gate whose margin lies below it will mostly answer "inconclusive". Exact sums over the
number of discordant pairs, no normal approximation: at few discordant pairs the exact test is far more conservative
than the formula (with four or fewer it can never reject).
"""

from __future__ import annotations

import math

import numpy as np


def power_of_mcnemar(n: int, discordance: float, loss: float, alpha: float = 0.05) -> float:
    """Probability that the exact one-sided McNemar test rejects "no loss".

    discordance: share of items whose correctness differs, at least `loss`. loss: true loss, a proportion.
    """
    from scipy.stats import binom

    if n < 1 or not 0.0 <= loss <= discordance <= 1.0:
        raise ValueError(f"n={n}, discordance={discordance}, loss={loss}")
    if discordance == 0.0:
        return 0.0
    spread = 9.0 * math.sqrt(n * discordance * (1.0 - discordance)) + 12.0
    pairs = np.arange(max(0, int(n * discordance - spread)), min(n, int(n * discordance + spread)) + 1)
    # smallest number of losses among `pairs` with P(at least that many | 1/2) <= alpha
    critical = binom.isf(alpha, pairs, 0.5) + 1.0
    share = 0.5 * (1.0 + loss / discordance)
    return float(np.sum(binom.pmf(pairs, n, discordance) * binom.sf(critical - 1.0, pairs, share)))


def minimum_detectable_loss(n: int, discordance: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest true loss (a proportion) that n items detect with `power`, one-sided `alpha`; inf if none is detected.

    discordance: expected share of discordant items; at least one item is assumed. A loss beyond it raises it: then
    all flips are losses.
    """
    from scipy.optimize import brentq

    if n < 1 or not 0.0 <= discordance <= 1.0:
        raise ValueError(f"n={n}, discordance={discordance}")
    expected = max(discordance, 1.0 / n)

    def missing(loss: float) -> float:
        return power_of_mcnemar(n, max(expected, loss), loss, alpha) - power

    if missing(1.0) < 0.0:
        return math.inf
    return float(brentq(missing, 0.0, 1.0, xtol=1e-7))
