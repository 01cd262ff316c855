"""Checks on the weights: a matrix that no longer resembles the source's is a fault, however few items noticed.

A four-bit format holds ordinary weights at 15 to 21 dB. A global scale off by a factor of two, swapped nibbles or a
zeroed expert leave a matrix near 0 dB or below; in a model of hundreds of experts a short evaluation may miss it. An
optional second check compares each matrix with the median of its arm; two more look at correlations: of an arm's
weights with the source's, and of the two errors of a double quantization. Tensors that are not quantized can be
required to be the source's byte for byte.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from typing import Any

from workbench.gating.policy import Policy
from workbench.records import GateCheck, LintReport, ServerRecord, TensorEquality

NAMED = 3
"""Tensors named in a reason; the rest are counted."""
UNQUANTIZED = "weights unquantized"
Row = Mapping[str, Any]


def check_weights(rules: Policy, rows: list[Row] | None, promised: Collection[str] = ()) -> list[GateCheck]:
    """One check for each limit of the policy and each gated or reported arm that has rows; one that has none, or not
    all, is named. None: nothing is known of weights, and nothing said. promised: arms whose weights the run measured.
    """
    if rows is None:
        return []
    checks = []
    sqnr = _by_arm(
        rows,
        {
            "first_arm": lambda row: row["sqnr_first_db"],
            "second_arm": lambda row: row["sqnr_total_db"],
            "direct_arm": lambda row: row.get("sqnr_direct_db"),
        },
    )
    correlation = _by_arm(
        rows, {"first_arm": _correlation_first, "second_arm": _correlation_second, "direct_arm": _correlation_direct}
    )
    errors = _by_arm(rows, {"second_arm": lambda row: row.get("corr_e1_e2")}, worst=_largest_magnitude)
    measured = sorted({*sqnr, *correlation, *errors})
    for arm in (*rules.gated, *rules.reported):
        if asked := _unmeasured(rules, arm, sqnr, correlation, errors):
            checks.append(_not_measured(rules, arm, asked, measured, arm in promised))
        if rules.min_sqnr_db is not None and arm in sqnr:
            checks.append(_at_least(rules, "weights sqnr", arm, sqnr[arm], rules.min_sqnr_db, "dB", "SQNR"))
        if rules.max_below_median_db is not None and arm in sqnr:
            checks += _outliers(rules, arm, sqnr[arm], rules.max_below_median_db)
        if rules.min_correlation is not None and arm in correlation:
            least = rules.min_correlation
            checks.append(_at_least(rules, "weights correlation", arm, correlation[arm], least, "", "correlation"))
        if rules.max_error_correlation is not None and arm in errors:
            checks.append(_error_correlation(rules, arm, errors[arm], rules.max_error_correlation))
    return checks


def _unmeasured(
    rules: Policy, arm: str, sqnr: Mapping[str, Any], correlation: Mapping[str, Any], errors: Mapping[str, Any]
) -> list[str]:
    """Limits of the policy that nothing was measured for. An arm that is quantized once has no second error."""
    limits = (
        ("min_sqnr_db", rules.min_sqnr_db, sqnr),
        ("max_below_median_db", rules.max_below_median_db, sqnr),
        ("min_correlation", rules.min_correlation, correlation),
        ("max_error_correlation", rules.max_error_correlation, errors if arm not in sqnr else {arm: ()}),
    )
    return [name for name, limit, figures in limits if limit is not None and arm not in figures]


def _not_measured(rules: Policy, arm: str, asked: list[str], measured: list[str], promised: bool) -> GateCheck:
    """Where this or other arms were measured, or the policy's tiers name `weights`, an arm that was not is left open,
    by its tier; else the run has no weights to look at (an endpoint's answers alone), which is said.
    """
    others = f" (measured: {', '.join(measured)})" if measured else ""
    reason = (
        f"not measured for {arm}: {', '.join(asked)} could not be applied{others}. An experiment whose analysis.pairs "
        "name the arm measures them; weights: null in the policy asks for none."
    )
    if promised:
        reason = (
            f"the run measured the weights of {arm}, but {', '.join(asked)} could not be applied{others}: "
            "tensors.parquet is gone, or another's. Run its analyze stage again."
        )
    demanded = promised or bool(measured) or "weights" in rules.tiers
    status = rules.weigh("inconclusive", "weights") if arm in rules.gated and demanded else "reported"
    return GateCheck(name="weights", arm=arm, status=status, reason=reason, tier=rules.tier("weights"))


def check_equality(rules: Policy, equality: Mapping[str, TensorEquality]) -> list[GateCheck]:
    """Unquantized tensors against the source's bytes; an arm without a comparison is invalid, not passed over."""
    if not rules.equal_bytes:
        return []
    checks = []
    for arm in (*rules.gated, *rules.reported):
        found = equality.get(arm)
        bad: tuple[str, ...] = ()
        if found is None or found.compared + len(found.missing) == 0:
            status, reason = "invalid", "no tensor was compared with the source's bytes."
        else:
            bad = (*found.differing, *found.missing)
            status = "fail" if bad else "pass"
            reason = (
                f"{len(found.differing)} of {found.compared} unquantized tensors differ from the source's, "
                f"{len(found.missing)} are missing: {_listed(list(bad))}."
                if bad
                else f"all {found.compared} unquantized tensors are the source's, byte for byte."
            )
        checks.append(_check(rules, "weights equal bytes", arm, status, reason, float(len(bad)), 0.0, "tensors"))
    return checks


def check_unquantized(
    rules: Policy,
    baseline: str,
    roles: Mapping[str, str],
    lint: Mapping[str, LintReport],
    servers: Mapping[str, ServerRecord],
    equality: Mapping[str, TensorEquality],
) -> list[GateCheck]:
    """Arms whose checkpoint holds the baseline's own weights: told, never judged, since the numbers say what they say.

    roles: of an arm, "noise" or its backend's kind. The noise arm is to have the same weights, and requantization at
    load changes what it was given; neither is told.
    """
    checks = []
    for arm in (*rules.gated, *rules.reported):
        role = roles.get(arm) or (servers[arm].backend if arm in servers else "")
        compared = equality.get(arm)
        differs = compared is not None and bool(compared.differing or compared.missing)
        if (
            arm == baseline
            or role in ("noise", "requant")
            or differs
            or not _same_weights(arm, baseline, lint, servers)
        ):
            continue
        folders = {lint[of].checkpoint if of in lint else of for of in (arm, baseline)}
        if (compared is not None and compared.compared) or len(folders) == 1:
            reason = f"its checkpoint's weights are byte for byte those of {baseline}: nothing was quantized."
        else:
            reason = (
                f"its checkpoint's weights are those of {baseline}, every tensor with the same name, type and shape, "
                "and the same bytes where both were sampled: nothing was quantized."
            )
        tier = rules.tier("weights")
        checks.append(GateCheck(name=UNQUANTIZED, arm=arm, status="reported", reason=reason, tier=tier))
    return checks


def _same_weights(arm: str, other: str, lint: Mapping[str, LintReport], servers: Mapping[str, ServerRecord]) -> bool:
    """By the digests that lint took of the weights; where it took none, by the fingerprints of what was served."""
    linted = [lint[of].weights if of in lint else "" for of in (arm, other)]
    served = [servers[of].fingerprint if of in servers else "" for of in (arm, other)]
    mine, its = linted if all(linted) else served
    return bool(mine) and mine == its


def _largest_magnitude(a: float, b: float) -> float:
    return a if math.isnan(b) or abs(a) >= abs(b) else b


def _lowest(a: float, b: float) -> float:
    """The lower one; NaN is lowest: it says that the matrix is broken."""
    return a if math.isnan(a) or a <= b else b


def _by_arm(
    rows: list[Row],
    columns: Mapping[str, Callable[[Row], float | None]],
    worst: Callable[[float, float], float] = _lowest,
) -> dict[str, dict[str, float]]:
    """arm -> tensor name -> its figure; the worst, if several rows speak of one tensor. columns: which arm's weights a
    figure speaks of.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for arm_column, figure in columns.items():
            arm = row.get(arm_column)
            if not arm or arm == row.get("source_arm"):
                continue
            value = figure(row)
            number = math.nan if value is None else float(value)
            of_arm = found.setdefault(str(arm), {})
            of_arm[row["name"]] = worst(of_arm[row["name"]], number) if row["name"] in of_arm else number
    return found


def _correlation_first(row: Row) -> float | None:
    """Correlation of a = w + e1 with w, from the powers and corr(e1, w). Means are taken as 0, as weights' are."""
    w, e, corr = row.get("power_source"), row.get("power_e1"), row.get("corr_e1_w")
    if w is None or e is None or not w > 0.0:
        return None
    cross = (corr if corr is not None and not math.isnan(corr) else 0.0) * math.sqrt(w * e)
    return _ratio(w + cross, w * (w + 2.0 * cross + e))


def _correlation_second(row: Row) -> float | None:
    return _correlation_by_gain(row, "total")


def _correlation_direct(row: Row) -> float | None:
    return _correlation_by_gain(row, "direct")


def _correlation_by_gain(row: Row, side: str) -> float | None:
    """<w, b> / (|w| |b|) from gain = <w, b> / <w, w> and the power of b - w."""
    w, e, gain = row.get("power_source"), row.get(f"power_{side}"), row.get(f"gain_{side}")
    if w is None or e is None or gain is None or not w > 0.0:
        return None
    return _ratio(gain * w, w * (w * (2.0 * gain - 1.0) + e))


def _ratio(product: float, squares: float) -> float:
    return product / math.sqrt(squares) if squares > 0.0 else math.nan


def _at_least(
    rules: Policy, name: str, arm: str, values: dict[str, float], least: float, unit: str, what: str
) -> GateCheck:
    finite = [value for value in values.values() if math.isfinite(value)]
    median = statistics.median(finite) if finite else math.nan
    lowest = min(-math.inf if math.isnan(value) else value for value in values.values())
    bad = {tensor: value for tensor, value in values.items() if not value >= least}
    space = f" {unit}" if unit else ""
    digits = ".1f" if unit == "dB" else ".4f"
    if bad:
        reason = (
            f"{len(bad)} of {len(values)} matrices are below {least:g}{space} {what} against the source: "
            f"{name_worst(bad, digits, space)}. The arm's median is {median:{digits}}{space}."
        )
    else:
        reason = (
            f"all {len(values)} matrices are at {least:g}{space} {what} or better (lowest {lowest:{digits}}{space})."
        )
    return _check(rules, name, arm, "fail" if bad else "pass", reason, lowest, least, unit)


def _outliers(rules: Policy, arm: str, values: dict[str, float], distance: float) -> list[GateCheck]:
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return []
    median = statistics.median(finite)
    limit = median - distance
    lowest = min(-math.inf if math.isnan(value) else value for value in values.values())
    bad = {name: value for name, value in values.items() if not value >= limit}
    what = f"more than {distance:g} dB below the arm's median of {median:.1f} dB"
    if bad:
        reason = f"{len(bad)} of {len(values)} matrices are {what}: {name_worst(bad, '.1f', ' dB')}."
    else:
        reason = f"no matrix is {what}."
    return [_check(rules, "weights outlier", arm, "fail" if bad else "pass", reason, lowest, limit, "dB")]


def _error_correlation(rules: Policy, arm: str, values: dict[str, float], most: float) -> GateCheck:
    """corr(e1, e2) is undefined where one error is zero: such a matrix cannot exceed the limit."""
    bad = {name: value for name, value in values.items() if abs(value) > most}
    defined = [value for value in values.values() if not math.isnan(value)]
    largest = max(defined, key=abs) if defined else math.nan
    if bad:
        named = name_worst({name: -abs(value) for name, value in bad.items()}, ".3f", "").replace("(-", "(")
        reason = f"{len(bad)} of {len(values)} matrices have |corr(e1, e2)| above {most:g}: {named}."
    else:
        reason = f"no matrix of {len(values)} has |corr(e1, e2)| above {most:g} (largest {largest:+.3f})."
    return _check(rules, "weights error correlation", arm, "fail" if bad else "pass", reason, largest, most, "")


def _check(
    rules: Policy, name: str, arm: str, status: str, reason: str, value: float, limit: float, unit: str
) -> GateCheck:
    return GateCheck(
        name=name,
        arm=arm,
        status=rules.weigh(status, "weights") if arm in rules.gated else "reported",
        reason=reason,
        value=value,
        limit=limit,
        unit=unit,
        tier=rules.tier("weights"),
    )


def name_worst(bad: dict[str, float], digits: str, space: str) -> str:
    """The worst few by name and value; a NaN is worst."""
    order = sorted(bad.items(), key=lambda item: -math.inf if math.isnan(item[1]) else item[1])
    return _listed([f"{name} ({value:{digits}}{space})" for name, value in order])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
