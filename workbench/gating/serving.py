"""Checks on what serving an arm costs: load time, memory, size, the evaluation's wall time, and its latencies.

Load time, memory and size are one measurement of one start; nothing is known of their spread, so limits are compared as
they are and should leave room. Latencies are of serving_cost.json, repeated and paired: a limit on a ratio passes where
the whole 95 % interval lies at or below it and fails where the whole interval lies above. Every load must hold. What
was not measured (an endpoint that is not ours, no measured serving cost) is inconclusive, not passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from workbench.gating.policy import LATENCY_KEYS, Policy
from workbench.records import CostRatio, Evaluation, GateCheck, ServerRecord, ServingCost, speed_apart

_THROUGHPUT = "output_tokens_per_s"  # as measured; its inverse, seconds a token, is what a limit can cap


def check_serving(
    rules: Policy,
    baseline: str,
    servers: Mapping[str, ServerRecord],
    evaluations: Mapping[str, Evaluation],
    cost: ServingCost | None = None,
) -> list[GateCheck]:
    """One check an arm, gated or reported, and limit (and load, of latencies). baseline: what ratios are taken to."""
    checks = []
    urls = {name: server.base_url for name, server in servers.items() if server.engine == "external"}
    for arm in (*rules.gated, *rules.reported):
        for key, limit in rules.serving_ratio.items():
            if key in LATENCY_KEYS:
                checks += _latency_ratios(rules, arm, key, limit, baseline, cost)
                continue
            name, apart = f"serving {key} ratio", speed_apart(arm, baseline, urls) if key.endswith("_s") else ""
            if apart:
                reason = f"{key}: no ratio: {apart}."
                checks.append(_made(rules, arm, name, "inconclusive", math.nan, limit, "", reason))
                continue
            own, other = (_figure(key, each, servers, evaluations) for each in (arm, baseline))
            ratio = own / other if other > 0.0 else math.nan
            reason = f"{key}: {_amount(key, own)} against {_amount(key, other)} of {baseline}, ratio {ratio:.3g}"
            checks.append(_check(rules, arm, name, ratio, limit, "", reason))
        for key, limit in rules.serving_max.items():
            if key in LATENCY_KEYS:
                checks += _latencies(rules, arm, key, limit, cost)
                continue
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
    return _made(rules, arm, name, status, value, limit, unit, f"{reason}: {outcome} (one measurement, no interval).")


def _made(
    rules: Policy, arm: str, name: str, status: str, value: float, limit: float, unit: str, reason: str
) -> GateCheck:
    return GateCheck(
        name=name,
        arm=arm,
        status=rules.weigh(status, "serving") if arm in rules.gated else "reported",
        reason=reason,
        value=value,
        limit=limit,
        unit=unit,
        tier=rules.tier("serving"),
    )


# ---- latencies -------------------------------------------------------------------------------------------------------


def _latency_ratios(
    rules: Policy, arm: str, key: str, limit: float, baseline: str, cost: ServingCost | None
) -> list[GateCheck]:
    name = f"serving {key} ratio"
    figure = _THROUGHPUT if key == "s_per_output_token" else key
    found = [r for r in cost.ratios if r.arm == arm and r.figure == figure] if cost is not None else []
    if cost is None or cost.baseline != baseline or not found:
        why = _missing(cost, arm)
        if cost is not None and cost.baseline != baseline:
            why = f"it was measured against {cost.baseline}, not {baseline}"
        return [_made(rules, arm, name, "inconclusive", math.nan, limit, "", f"{key}: {why}.")]
    return [_judged(rules, name, key, limit, baseline, ratio, cost) for ratio in found]


def _judged(
    rules: Policy, name: str, key: str, limit: float, baseline: str, ratio: CostRatio, cost: ServingCost
) -> GateCheck:
    value, low, high = ratio.ratio, ratio.low, ratio.high
    if ratio.figure == _THROUGHPUT and key != _THROUGHPUT:
        value, low, high = 1 / value, 1 / high, 1 / low
    said = f"{key} at {cost.loads[ratio.load].name}: {value:.4f} times {baseline}'s"
    if ratio.left_out:
        status, outcome = "inconclusive", f"{ratio.left_out} repeats are left out: requests failed, or it is not there"
    elif math.isnan(low):
        status, outcome = "inconclusive", f"{ratio.repeats} repeats give no interval"
    elif high <= limit:
        status, outcome = "pass", f"interval {low:.4f} to {high:.4f} within the limit of {limit:g}"
    elif low > limit:
        status, outcome = "fail", f"interval {low:.4f} to {high:.4f} above the limit of {limit:g}"
    else:
        status, outcome = "inconclusive", f"interval {low:.4f} to {high:.4f} holds the limit of {limit:g}"
    return _made(rules, ratio.arm, name, status, value, limit, "", f"{said}, {ratio.repeats} repeats: {outcome}.")


def _latencies(rules: Policy, arm: str, key: str, limit: float, cost: ServingCost | None) -> list[GateCheck]:
    """The median over the repeats, a check a load."""
    name, unit = f"serving {key}", "ms" if key.endswith("_ms") else "s"
    if cost is None or arm not in cost.arms:
        return [_made(rules, arm, name, "inconclusive", math.nan, limit, unit, f"{key}: {_missing(cost, arm)}.")]
    checks = []
    for row in cost.latencies:
        if row.arm != arm:
            continue
        value = _value(row.figures, key)
        status = "inconclusive" if row.failed or math.isnan(value) else "fail" if value > limit else "pass"
        outcome = f"{row.failed} requests failed" if row.failed else f"limit {limit:g} {unit}"
        said = f"{key} at {cost.loads[row.load].name}: median {value:.3g} {unit} of {row.repeats} repeats"
        reason = f"{said}, {outcome}."
        checks.append(_made(rules, arm, name, status, value, limit, unit, reason))
    return checks


def _value(figures: Mapping[str, float], key: str) -> float:
    if key != "s_per_output_token":
        return figures.get(key, math.nan)
    per_second = figures.get(_THROUGHPUT, math.nan)
    return 1 / per_second if per_second else math.nan


def _missing(cost: ServingCost | None, arm: str) -> str:
    if cost is None:
        return "it was not measured (serving_cost=small or published does, or `workbench bench serve --out RUN`)"
    return cost.no_ratio(arm) or f"it was not measured of {arm}"


# ---- one start -------------------------------------------------------------------------------------------------------


def _figure(key: str, arm: str, servers: Mapping[str, ServerRecord], evaluations: Mapping[str, Evaluation]) -> float:
    if key == "evaluation_s":
        return evaluations[arm].seconds if arm in evaluations else math.nan
    value = getattr(servers[arm], key) if arm in servers else None
    return math.nan if value is None else float(value)


def _amount(key: str, value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.1f} s" if key.endswith("_s") else f"{value / 2**30:.2f} GiB"
