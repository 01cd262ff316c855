"""Resampling: the paired bootstrap of right/wrong answers, and graded scores by permutation.

    low, high = bootstrap_loss(lost=9, gained=2, n=400)
    result = graded_loss(baseline_f1, candidate_f1)

The bootstrap is a cross-check, not the interval of record: with no flip it has no width. Graded scores (F1, BLEU, a
judge's mark) have no table of flips; their test permutes the sign of each item's difference, which is exact where the
arms are exchangeable, and samples the permutations where they are too many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 9_999
MOST_BCA = 2_000
"""Items up to which the bootstrap is BCa: its jackknife is quadratic, and its correction of a mean fades as 1 / n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedLoss:
    """Paired comparison of graded scores, in the score's own unit.

    loss = mean(baseline - candidate), positive = worse (scores where higher is better). low, high: two-sided 95 %,
    upper: one-sided 95 %, both of the bootstrap over items (BCa, percentile above 2,000 items); NaN with fewer than 10
    items, too few for it, or where all differences are equal. p_loss: one-sided, p_two_sided: permutation of the
    differences' signs. worse, better: items whose score fell or rose.
    """

    n: int
    baseline: float
    candidate: float
    loss: float
    low: float
    high: float
    upper: float
    p_loss: float
    p_two_sided: float
    worse: int
    better: int


def bootstrap_loss(
    lost: int, gained: int, n: int, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the loss (a proportion) when items are drawn again with replacement.

    Drawing n items with replacement makes the counts of (lost, gained, unchanged) multinomial, so counts are drawn.
    """
    draws = np.random.default_rng(seed).multinomial(n, [lost / n, gained / n, (n - lost - gained) / n], size=resamples)
    losses = (draws[:, 0] - draws[:, 1]) / n
    low, high = np.quantile(losses, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return float(low), float(high)


def graded_loss(
    baseline: ArrayLike, candidate: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, batch: int = 100
) -> GradedLoss:
    """Compare graded scores of the same items. baseline, candidate: shape (items,), finite.

    All sign patterns are enumerated where there are at most `resamples` (13 items), else sampled with `seed`. Raises
    ValueError for scores that do not pair.
    """
    from scipy.stats import bootstrap

    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or a.size == 0:
        raise ValueError(f"baseline has shape {a.shape}, candidate {b.shape}, expected the same (items,)")
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        raise ValueError("scores must be finite")
    difference = a - b
    p_loss, p_two_sided = sign_permutation(difference, resamples=resamples, seed=seed)
    low = high = upper = float("nan")
    if a.size >= 10 and np.ptp(difference) > 1e-9 * np.max(np.abs(difference)):
        drawn = bootstrap(
            (difference,),
            np.mean,
            n_resamples=resamples,
            batch=batch,
            method="BCa" if a.size <= MOST_BCA else "percentile",
            rng=np.random.default_rng(seed),
        )
        low, high = map(float, drawn.confidence_interval)
        again = bootstrap(
            (difference,),
            np.mean,
            n_resamples=0,
            bootstrap_result=drawn,
            batch=batch,
            alternative="less",
            method="BCa" if a.size <= MOST_BCA else "percentile",
        )
        upper = float(again.confidence_interval.high)
    return GradedLoss(
        n=a.size,
        baseline=float(a.mean()),
        candidate=float(b.mean()),
        loss=float(difference.mean()),
        low=low,
        high=high,
        upper=upper,
        p_loss=p_loss,
        p_two_sided=p_two_sided,
        worse=int(np.sum(difference > 0.0)),
        better=int(np.sum(difference < 0.0)),
    )


def sign_permutation(
    difference: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0, batch: int = 250
) -> tuple[float, float]:
    """(one-sided, two-sided) p-value of "the mean difference is 0", H1: positive. difference: shape (units,), finite.

    If the arms are exchangeable, each unit's difference may as well have the other sign. All patterns of signs are
    enumerated where there are at most `resamples`, else sampled with `seed` (the data count as one of the samples). As
    scipy.stats.permutation_test(permutation_type="samples"), with both tails from one pass.
    """
    changed = difference[difference != 0.0]  # the others have no sign
    if changed.size == 0:
        return 1.0, 1.0
    exact = changed.size < 63 and 2**changed.size <= resamples
    total = 2**changed.size if exact else resamples
    rng = np.random.default_rng(seed)
    observed, slack = float(changed.sum()), 1e-12 * float(np.abs(changed).sum())
    above = below = 0
    for first in range(0, total, batch):
        count = min(batch, total - first)
        if exact:
            kept = (np.arange(first, first + count)[:, None] >> np.arange(changed.size)) & 1
        else:
            kept = rng.integers(0, 2, (count, changed.size), dtype=np.int8)
        sums = 2.0 * (kept.astype(np.float64) @ changed) - observed
        above += int(np.sum(sums >= observed - slack))
        below += int(np.sum(sums <= observed + slack))
    extra = 0 if exact else 1
    one_sided, other_side = (above + extra) / (total + extra), (below + extra) / (total + extra)
    return one_sided, min(1.0, 2.0 * min(one_sided, other_side))
