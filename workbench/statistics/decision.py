"""The rule of the gate on one task, and its control over several tasks.

    judge_loss(loss_pp=0.3, loss_upper95_pp=0.8, p_loss=0.2, margin_pp=1.0)     # "pass"
    holm([0.01, 0.04, 0.03])                                                    # [0.03, 0.06, 0.06]

- **pass**: the one-sided 95 % upper bound of the loss is below the margin. (No loss shown is not enough: the data
  must exclude one.)
- **fail**: the loss is significantly above zero (one-sided 5 %) *and* as large as observed above the margin.
- **inconclusive**: anything else. More items would decide.

Several tasks: "pass" needs every task to pass, and a set of tests that must all reject keeps its level without a
correction (the intersection-union principle). "Fail" needs one task, so there the chance of a false alarm grows with
their number; Holm's step-down p-values keep it at 5 % for the family, whatever the dependence between tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ALPHA = 0.05


def judge_loss(*, loss_pp: float, loss_upper95_pp: float, p_loss: float, margin_pp: float) -> str:
    """ "pass", "fail" or "inconclusive", on figures in percentage points. p_loss: adjusted, where there are several."""
    if loss_upper95_pp < margin_pp:
        return "pass"
    if p_loss < ALPHA and loss_pp > margin_pp:
        return "fail"
    return "inconclusive"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979), in the order given: compare each with the family's level.

    Raises ValueError for a value outside [0, 1].
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.size and not (np.all(p >= 0.0) and np.all(p <= 1.0)):
        raise ValueError(f"p-values {list(p_values)}, expected numbers from 0 to 1")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(value) for value in adjusted]
