"""Everything one paired comparison of right and wrong answers has to say, as one record.

result = paired_loss(baseline_right, candidate_right)      # two arrays of 0/1, one item a place
result.loss, result.low, result.high, result.upper, result.p_loss
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from workbench.statistics.paired import check_counts, loss_interval, mcnemar_exact, recovery_interval
from workbench.statistics.power import minimum_detectable_loss
from workbench.statistics.proportion import wilson_interval
from workbench.statistics.resampling import bootstrap_loss
from workbench.statistics.upper_bound import loss_upper_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedLoss:
    """Proportions, not percent. both, lost, gained, neither: the 2x2 table of n items.

    loss = baseline - candidate, low, high: two-sided 95 %; upper: exact one-sided 95 %; p_loss: exact one-sided
    McNemar (H1: the candidate is worse), p_two_sided: exact two-sided. recovery = candidate / baseline with its 95 %
    interval (NaN when the baseline has none right). discordance: share of items that flipped, with its 95 % interval.
    mde: smallest loss that n items detect at that discordance (80 % power, one-sided 5 %). bootstrap_low,
    bootstrap_high: paired percentile bootstrap, 95 %, a cross-check of low and high.
    """

    n: int
    both: int
    lost: int
    gained: int
    neither: int
    loss: float
    low: float
    high: float
    upper: float
    p_loss: float
    p_two_sided: float
    recovery: float
    recovery_low: float
    recovery_high: float
    discordance: float
    discordance_low: float
    discordance_high: float
    mde: float
    bootstrap_low: float
    bootstrap_high: float


def paired_loss(baseline: ArrayLike, candidate: ArrayLike) -> PairedLoss:
    """Compare two arms. baseline, candidate: shape (items,), 1 = right, 0 = wrong, in the same order.

    Raises ValueError for arrays that do not pair or hold something else.
    """
    a, b = _right(baseline, "baseline"), _right(candidate, "candidate")
    if a.shape != b.shape:
        raise ValueError(f"baseline has {a.size} items, candidate {b.size}")
    both, lost, gained = int(np.sum(a & b)), int(np.sum(a & ~b)), int(np.sum(~a & b))
    return paired_loss_of_counts(both=both, lost=lost, gained=gained, neither=a.size - both - lost - gained)


def paired_loss_of_counts(*, both: int, lost: int, gained: int, neither: int) -> PairedLoss:
    """The same from a 2x2 table. Raises ValueError for negative counts or no items."""
    n = both + lost + gained + neither
    if both < 0 or neither < 0:
        raise ValueError(f"both {both}, neither {neither}")
    check_counts(lost, gained, n, least=1)
    low, high = loss_interval(lost, gained, n)
    recovery, recovery_low, recovery_high = recovery_interval(both + lost, both + gained, lost, n)
    discordance_low, discordance_high = wilson_interval(lost + gained, n)
    bootstrap_low, bootstrap_high = bootstrap_loss(lost, gained, n)
    return PairedLoss(
        n=n,
        both=both,
        lost=lost,
        gained=gained,
        neither=neither,
        loss=(lost - gained) / n,
        low=low,
        high=high,
        upper=loss_upper_bound(lost, gained, n),
        p_loss=mcnemar_exact(lost, gained, "greater"),
        p_two_sided=mcnemar_exact(lost, gained),
        recovery=recovery,
        recovery_low=recovery_low,
        recovery_high=recovery_high,
        discordance=(lost + gained) / n,
        discordance_low=discordance_low,
        discordance_high=discordance_high,
        mde=minimum_detectable_loss(n, (lost + gained) / n),
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
    )


def discordance_above_noise(noise_flips: ArrayLike, candidate_flips: ArrayLike) -> float:
    """p-value of "the candidate flips no more items than the baseline does against itself", exact one-sided McNemar.

    noise_flips, candidate_flips: shape (items,), 1 where the A/A arm's (the candidate's) correctness differs from the
    baseline's. Both arms share the baseline's answers, so the items that only one of them flips decide.
    """
    noise, candidate = _right(noise_flips, "noise_flips"), _right(candidate_flips, "candidate_flips")
    if noise.shape != candidate.shape:
        raise ValueError(f"noise_flips has {noise.size} items, candidate_flips {candidate.size}")
    return mcnemar_exact(int(np.sum(candidate & ~noise)), int(np.sum(noise & ~candidate)), "greater")


def _right(values: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}, expected (items,)")
    if not np.all((array == 0) | (array == 1)):
        raise ValueError(f"{name} holds values other than 0 and 1; graded scores: graded_loss")
    return array.astype(bool)
