"""What an experiment of n paired items can see: the power of the exact one-sided McNemar test.

    minimum_detectable_loss(n=1319, discordance=0.04)     # 0.0142: a loss of 1.42 pp is found in 80 % of experiments

    more_items_needed(lost=9, gained=2, n=400, margin=0.02)    # after it: how many more would decide

State it before the run: a gate whose margin lies below it will mostly answer "inconclusive". Exact sums over the
number of discordant pairs, no normal approximation: at few discordant pairs the exact test is far more conservative
than the formula (with four or fewer it can never reject).
"""

from __future__ import annotations

import math

import numpy as np

from workbench.statistics.paired import check_counts


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


def power_of_noninferiority(n: int, discordance: float, loss: float, margin: float, alpha: float = 0.05) -> float:
    """Probability that n items pass a margin (the one-sided upper bound of the loss is below it) if the loss is `loss`.

    All proportions. Normal approximation: within 3 points of the exact bound at 1,319 items and 1 to 16 % discordance.
    """
    from scipy.special import ndtr, ndtri

    if n < 1 or not abs(loss) <= discordance <= 1.0:
        raise ValueError(f"n={n}, discordance={discordance}, loss={loss}")
    spread = math.sqrt(max(discordance - loss**2, 0.0))
    at_margin = math.sqrt(max(max(discordance, margin) - margin**2, 0.0))
    if spread == 0.0:
        return float(loss + float(ndtri(1.0 - alpha)) * at_margin / math.sqrt(n) < margin)
    return float(ndtr((math.sqrt(n) * (margin - loss) - float(ndtri(1.0 - alpha)) * at_margin) / spread))


def more_items_needed(lost: int, gained: int, n: int, margin: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """How many items beyond the n seen would decide with `power`, if loss and discordance stay as observed.

    Below the margin they decide for a pass, above it for a fail; inf where the observed loss is the margin. A planning
    figure by the normal approximation (at least one flip is assumed): it inherits the uncertainty of both rates and
    carries no interval of its own. margin: a proportion.
    """
    from scipy.special import ndtri

    check_counts(lost, gained, n, least=1)
    loss = (lost - gained) / n
    discordance = max(lost + gained, 1) / n
    z_alpha, z_power = float(ndtri(1.0 - alpha)), float(ndtri(power))
    spread = math.sqrt(max(discordance - loss**2, 0.0))
    if loss < margin:
        at_margin = math.sqrt(max(max(discordance, margin) - margin**2, 0.0))
        total = ((z_alpha * at_margin + z_power * spread) / (margin - loss)) ** 2
    elif loss > margin:
        significant = ((z_alpha * math.sqrt(discordance) + z_power * spread) / loss) ** 2
        total = max(significant, (z_power * spread / (loss - margin)) ** 2)
    else:
        return math.inf
    return float(max(0, math.ceil(total) - n))
