"""Checks on what serving an arm costs: load time, memory, size, the evaluation's wall time.

Each figure is one measurement of one start; nothing is known of its spread, so limits are compared as they are and
should leave room. A figure that was not measured (an endpoint that is not ours) is inconclusive, not passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.gating.policy import Policy
from workbench.records import Evaluation, GateCheck, ServerRecord


def check_serving(
    rules: Policy, baseline: str, servers: Mapping[str, ServerRecord], evaluations: Mapping[str, Evaluation]
) -> list[GateCheck]:
    """One check for each gated or reported arm and limit. baseline: the arm that ratios are taken to."""
    checks = []
    for arm in (*rules.gated, *rules.reported):
        for key, limit in rules.serving_ratio.items():
            own, other = (_figure(key, name, servers, evaluations) for name in (arm, baseline))
            ratio = own / other if other > 0.0 else math.nan
            reason = f"{key}: {_amount(key, own)} against {_amount(key, other)} of {baseline}, ratio {ratio:.3g}"
            checks.append(_check(rules, arm, f"serving {key} ratio", ratio, limit, "", reason))
        for key, limit in rules.serving_max.items():
            own = _figure(key, arm, servers, evaluations)
            unit = "s" if key.endswith("_s") else "bytes"
            checks.append(_check(rules, arm, f"serving {key}", own, limit, unit, f"{key}: {_amount(key, own)}"))
    return checks


def _check(rules: Policy, arm: str, name: str, value: float, limit: float, unit: str, reason: str) -> GateCheck:
    if math.isnan(value):
        status, outcome = "inconclusive", "it was not measured"
    elif value > limit:
        status, outcome = "fail", f"above the limit of {limit:g}"
    else:
        status, outcome = "pass", f"within the limit of {limit:g}"
    return GateCheck(
        name=name,
        arm=arm,
        status=rules.weigh(status, "serving") if arm in rules.gated else "reported",
        reason=f"{reason}: {outcome} (one measurement, no interval).",
        value=value,
        limit=limit,
        unit=unit,
        tier=rules.tier("serving"),
    )


def _figure(key: str, arm: str, servers: Mapping[str, ServerRecord], evaluations: Mapping[str, Evaluation]) -> float:
    if key == "evaluation_s":
        return evaluations[arm].seconds if arm in evaluations else math.nan
    value = getattr(servers[arm], key) if arm in servers else None
    return math.nan if value is None else float(value)


def _amount(key: str, value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.1f} s" if key.endswith("_s") else f"{value / 2**30:.2f} GiB"
