"""Checks on the weights: a matrix that no longer resembles the source's is a fault, however few items noticed.

A four-bit format holds ordinary weights at 15 to 21 dB. A global scale off by a factor of two, swapped nibbles or a
zeroed expert leave a matrix near 0 dB or below; in a model of hundreds of experts a short evaluation may miss it. An
optional second check compares each matrix with the median of its arm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from workbench.gating.policy import Policy
from workbench.records import GateCheck

# For a row of tensors.parquet: which arm's weights a column speaks of.
_COLUMNS = (("first_arm", "sqnr_first_db"), ("second_arm", "sqnr_total_db"))
NAMED = 3
"""Tensors named in a reason; the rest are counted."""


def check_weights(rules: Policy, rows: list[Mapping[str, Any]]) -> list[GateCheck]:
    """One check for each gated or reported arm that has rows; none where the policy sets no limit."""
    if rules.min_sqnr_db is None and rules.max_below_median_db is None:
        return []
    found = _sqnr_by_arm(rows)
    checks = []
    for arm in (*rules.gated, *rules.reported):
        values = found.get(arm)
        if values:
            checks += _check_arm(rules, arm, values)
    return checks


def _sqnr_by_arm(rows: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """arm -> tensor name -> SQNR against the source in dB; the lowest, if several rows speak of one tensor."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for arm_column, value_column in _COLUMNS:
            arm, value = row.get(arm_column), row.get(value_column)
            if not arm or arm == row.get("source_arm"):
                continue
            sqnr = math.nan if value is None else float(value)
            of_arm = found.setdefault(str(arm), {})
            known = of_arm.get(row["name"])
            if known is None or math.isnan(sqnr) or sqnr < known:
                of_arm[row["name"]] = sqnr
    return found


def _check_arm(rules: Policy, arm: str, values: dict[str, float]) -> list[GateCheck]:
    gated = arm in rules.gated
    finite = [value for value in values.values() if math.isfinite(value)]
    median = statistics.median(finite) if finite else math.nan
    lowest = min(-math.inf if math.isnan(value) else value for value in values.values())
    checks = []
    if rules.min_sqnr_db is not None:
        bad = {name: value for name, value in values.items() if not value >= rules.min_sqnr_db}
        if bad:
            reason = (
                f"{len(bad)} of {len(values)} matrices are below {rules.min_sqnr_db:g} dB SQNR against the source: "
                f"{_name(bad)}. The arm's median is {median:.1f} dB."
            )
        else:
            reason = (
                f"all {len(values)} matrices are at {rules.min_sqnr_db:g} dB SQNR or better (lowest {lowest:.1f} dB)."
            )
        checks.append(_check("weights sqnr", arm, bad, gated, reason, lowest, rules.min_sqnr_db))
    if rules.max_below_median_db is not None and math.isfinite(median):
        limit = median - rules.max_below_median_db
        bad = {name: value for name, value in values.items() if not value >= limit}
        if bad:
            reason = (
                f"{len(bad)} of {len(values)} matrices are more than {rules.max_below_median_db:g} dB below the arm's "
                f"median of {median:.1f} dB: {_name(bad)}."
            )
        else:
            reason = (
                f"no matrix is more than {rules.max_below_median_db:g} dB below the arm's median of {median:.1f} dB."
            )
        checks.append(_check("weights outlier", arm, bad, gated, reason, lowest, limit))
    return checks


def _check(
    name: str, arm: str, bad: dict[str, float], gated: bool, reason: str, lowest: float, limit: float
) -> GateCheck:
    status = ("fail" if bad else "pass") if gated else "reported"
    return GateCheck(name=name, arm=arm, status=status, reason=reason, value=lowest, limit=limit, unit="dB")


def _name(bad: dict[str, float]) -> str:
    """The worst few by name and value; a NaN is worst."""
    order = sorted(bad.items(), key=lambda item: -math.inf if math.isnan(item[1]) else item[1])
    listed = ", ".join(f"{name} ({value:.1f} dB)" for name, value in order[:NAMED])
    return listed + (f" and {len(order) - NAMED} more" if len(order) > NAMED else "")
