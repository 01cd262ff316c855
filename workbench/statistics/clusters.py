"""Clusters: answers that are not independent, such as one problem asked with several seeds (avg@k).

    result = clustered_loss(baseline, candidate)      # scores of shape (problems, seeds); seeds may differ in number

Thirty problems asked sixteen times are thirty problems, not 480. The unit is the problem: its mean over seeds is
compared, and the spread between problems gives the interval (Miller 2024, arXiv 2411.00640). `design_effect` says how
far the answers of one problem move together: 1 is independence, the number of seeds the whole of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from workbench.statistics.paired import loss_interval, normal_quantile
from workbench.statistics.resampling import RESAMPLES, sign_permutation
from workbench.statistics.upper_bound import loss_upper_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusteredLoss:
    """Proportions (or the score's unit). loss: mean over clusters of baseline - candidate, positive = worse.

    low, high: two-sided, upper: one-sided 95 %, Student's t over clusters (NaN with a single one; where no cluster
    changed, the bounds of as many unchanged items). p_loss: one-sided, p_two_sided: permutation of the clusters' signs.
    recovery = candidate / baseline, with the percentile interval of a bootstrap over clusters (NaN when the baseline is
    0). mde: smallest loss that as many clusters detect at the observed spread (80 % power, one-sided 5 %).
    design_effect: variance of the loss over what independent answers of the same number would have (NaN where nothing
    varies).
    """

    clusters: int
    answers_baseline: int
    answers_candidate: int
    baseline: float
    candidate: float
    loss: float
    low: float
    high: float
    upper: float
    p_loss: float
    p_two_sided: float
    recovery: float
    recovery_low: float
    recovery_high: float
    mde: float
    design_effect: float


def clustered_loss(
    baseline: ArrayLike, candidate: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> ClusteredLoss:
    """Compare two arms on the same clusters. baseline: shape (clusters, a), candidate: (clusters, b); NaN = no answer.

    Raises ValueError for arrays that do not pair, or a cluster without an answer.
    """
    from scipy.stats import t as student

    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b) or len(a) == 0:
        raise ValueError(f"baseline has shape {a.shape}, candidate {b.shape}, expected the same (clusters, answers)")
    for name, scores in (("baseline", a), ("candidate", b)):
        if np.any(np.all(np.isnan(scores), axis=1)):
            raise ValueError(f"{name}: a cluster has no answer")
    mean_a, mean_b = np.nanmean(a, axis=1), np.nanmean(b, axis=1)
    difference = mean_a - mean_b
    count = len(difference)
    loss = float(difference.mean())
    p_loss, p_two_sided = sign_permutation(difference, resamples=resamples, seed=seed)
    low = high = upper = math.nan
    error = math.nan
    if count > 1:
        error = float(difference.std(ddof=1)) / math.sqrt(count)
        half = float(student.ppf(0.5 + confidence / 2.0, count - 1)) * error
        low, high = loss - half, loss + half
        upper = loss + float(student.ppf(confidence, count - 1)) * error
    if not np.any(difference):  # no spread was seen, which does not mean that there is none
        low, high = loss_interval(0, 0, count, confidence)
        upper = loss_upper_bound(0, 0, count, confidence)
    recovery_low, recovery_high = _recovery_interval(mean_a, mean_b, confidence, resamples, seed)
    independent = _independent_variance(a) + _independent_variance(b)
    return ClusteredLoss(
        clusters=count,
        answers_baseline=int(np.sum(~np.isnan(a))),
        answers_candidate=int(np.sum(~np.isnan(b))),
        baseline=float(mean_a.mean()),
        candidate=float(mean_b.mean()),
        loss=loss,
        low=low,
        high=high,
        upper=upper,
        p_loss=p_loss,
        p_two_sided=p_two_sided,
        recovery=float(mean_b.mean() / mean_a.mean()) if mean_a.mean() > 0.0 else math.nan,
        recovery_low=recovery_low,
        recovery_high=recovery_high,
        mde=(normal_quantile(0.95) + normal_quantile(0.80)) * error if error > 0.0 else math.nan,
        design_effect=error**2 / independent if independent > 0.0 else math.nan,
    )


def _recovery_interval(
    baseline: np.ndarray, candidate: np.ndarray, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    if baseline.mean() <= 0.0:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, len(baseline), (resamples, len(baseline)))
    below, above = baseline[drawn].mean(axis=1), candidate[drawn].mean(axis=1)
    ratios = above[below > 0.0] / below[below > 0.0]
    low, high = np.quantile(ratios, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return float(low), float(high)


def _independent_variance(scores: np.ndarray) -> float:
    """Variance of the mean if all answers were independent draws."""
    known = scores[~np.isnan(scores)]
    return float(known.var()) / known.size
