"""The verdict: a policy and the records of a run in, one status and the checks behind it out.

    verdict = gate(policy, comparison=comparison, lint=reports, tensors=frame, evaluations=evaluations)
    sys.exit(verdict.exit_code)

The rule for the answers is `workbench.statistics.judge_loss`, on every gated arm and every task's primary filter with
its margin in percentage points (pp): pass where the data exclude a loss of the margin, fail where a loss is significant
and above it, else inconclusive.

All critical checks must pass for "pass". So an arm that truly loses the margin on any one task passes in at most 5 % of
runs, however many tasks there are, and no correction for several tests is needed on that side; on the other, Holm's
keeps a lossless arm's chance to fail at 5 %. A supporting check can fail a run but leaves a pass standing while it is
inconclusive; an advisory one is only reported. Beside the answers stand the weights (a matrix that lost its meaning
fails the run, also where few items cannot see it), serving costs, fixed thresholds, a committed baseline, and the
evidence (lint errors, missing or empty evaluations, a baseline with no room to fall: "invalid", since such a run shows
nothing either way). Invalid outranks regression outranks inconclusive outranks pass. Exit codes: 0 pass, 1 regression,
2 inconclusive or invalid.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from workbench.errors import ConfigError
from workbench.gating.answers import check_answers, check_named, check_since_baseline
from workbench.gating.attribution import attribute
from workbench.gating.evidence import check_compared, check_evaluations, check_lint, check_room
from workbench.gating.layers import Evidence
from workbench.gating.numerics import check_numerics
from workbench.gating.policy import Policy, read_policy
from workbench.gating.promised import Promised, check_tasks
from workbench.gating.serving import check_serving
from workbench.gating.thresholds import check_thresholds
from workbench.gating.weights import UNQUANTIZED, check_equality, check_unquantized, check_weights
from workbench.records import (
    Comparison,
    Evaluation,
    GateCheck,
    LintReport,
    NumericsCard,
    Preflight,
    ServerRecord,
    ServingCost,
    TensorEquality,
    Verdict,
)
from workbench.records.judged import EXIT_CODES, counts, status_of


def gate(
    policy: Mapping[str, Any] | Policy,
    *,
    comparison: Comparison | None,
    lint: Mapping[str, LintReport] | None = None,
    tensors: Any = None,
    evaluations: Mapping[str, Evaluation] | None = None,
    servers: Mapping[str, ServerRecord] | None = None,
    equality: Mapping[str, TensorEquality] | None = None,
    numerics: Mapping[str, NumericsCard] | None = None,
    preflights: Mapping[str, Preflight] | None = None,
    serving_cost: ServingCost | None = None,
    since: Comparison | None = None,
    judged: Mapping[str, str] | None = None,
    policy_from: str = "",
    roles: Mapping[str, str] | None = None,
    promised: Promised | None = None,
) -> Verdict:
    """Judge a run. tensors: rows of tensors.parquet (mappings with the keys of `TensorRecord`, or a DataFrame).

    lint or tensors empty: the run has none, which is said of gated arms; None: only answers are spoken of.
    comparison None: no answers were compared (a run that stopped at a lint error); then nothing can pass. evaluations,
    servers, equality, numerics, preflights: by arm, as far as there are any; the last two also help to say what made an
    arm lose (`Verdict.attributions`). evaluations None: they are not known; else a compared arm that they lack is
    invalid. since: the run's arms against themselves in the committed baseline. judged: digests of the files that all
    this was read from, for `Verdict.judged`; policy_from: where the policy was written, for `Verdict.policy_from`.
    roles: by arm, "baseline", "noise" or its backend's kind, as far as they are known beside the comparison. promised:
    what the run set out to measure; None: not known. Raises ConfigError for a policy that is not understood, or that
    judges no answers beside such a baseline.
    """
    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    evaluated, evaluations = evaluations is not None, evaluations or {}
    baseline = comparison.baseline if comparison is not None else ""
    roles = dict(roles or {})
    if comparison is not None:
        roles |= {comparison.noise_arm: "noise", comparison.baseline: "baseline"}
    rows = _rows(tensors)
    promised = promised or Promised()
    checks: list[GateCheck] = []
    checks += check_lint(rules, lint, promised.lint, servers)
    checks += check_weights(rules, None if tensors is None else rows, promised.weights)
    checks += check_equality(rules, equality or {})
    original = baseline or next((arm for arm, role in roles.items() if role == "baseline"), "")
    checks += check_unquantized(rules, original, roles, lint or {}, servers or {}, equality or {})
    checks += check_thresholds(rules, evaluations)
    checks += check_evaluations(rules, baseline, evaluations)
    if since is not None and not rules.margin_pp:
        raise ConfigError(
            f"the policy {rules.name} has no margin_pp: the committed baseline would judge nothing",
            fix="give the policy a margin_pp, or leave the baseline out",
        )
    if rules.margin_pp:
        checks += check_compared(rules, comparison, evaluations if evaluated else None)
        if comparison is not None:
            checks += check_room(rules, comparison)
            checks += check_answers(rules, comparison)
            checks += check_named(rules, comparison)
        if since is not None:
            checks += check_since_baseline(rules, since, comparison, baseline)
    checks += check_serving(rules, baseline, servers or {}, evaluations, serving_cost)
    checks += check_numerics(rules, numerics or {}, promised.numerics)
    if lint is not None:  # there is a run to speak of
        checks += check_tasks(rules, promised, comparison)
    status = status_of(checks)
    return Verdict(
        status=status,
        exit_code=EXIT_CODES[status],
        headline=_headline(status, rules, checks) + _unquantized(rules, checks, original),
        policy=rules.name,
        policy_note=rules.whole_note,
        checks=tuple(checks),
        attributions=attribute(
            rules,
            Evidence(
                comparison=comparison,
                lint=lint or {},
                rows=rows,
                equality=equality or {},
                evaluations=evaluations,
                servers=servers or {},
                numerics=numerics or {},
                preflights=preflights or {},
            ),
        ),
        judged=dict(judged or {}),
        policy_from=policy_from,
        policy_sha256=hashlib.sha256(json.dumps(dataclasses.asdict(rules), sort_keys=True).encode()).hexdigest(),
    )


def _headline(status: str, rules: Policy, checks: list[GateCheck]) -> str:
    if status == "pass":
        return _passing(rules, checks)
    wanted = {"regression": "fail"}.get(status, status)
    causes = [check for check in checks if check.status == wanted and counts(check)]
    word = {"regression": "Regression", "inconclusive": "Inconclusive", "invalid": "Invalid"}[status]
    if not causes:
        return f"{word}: nothing was judged."
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    about = f"{causes[0].arm}: " if causes[0].arm else ""
    return f"{word}: {about}{causes[0].name}{more}. {causes[0].reason}"


def _unquantized(rules: Policy, checks: list[GateCheck], baseline: str) -> str:
    """What the headline adds where a gated arm is the baseline under another name."""
    arms = ", ".join(check.arm for check in checks if check.name == UNQUANTIZED and check.arm in rules.gated)
    return f" Nothing was quantized in {arms}: the weights are those of {baseline}." if arms else ""


def _passing(rules: Policy, checks: list[GateCheck]) -> str:
    judged = [check for check in checks if check.status == "pass" and check.name.startswith("accuracy ")]
    arms = ", ".join(rules.gated)
    unmeasured = [check.arm for check in checks if check.name == "weights" and check.arm in rules.gated]
    blind = f" Weights were not measured: {', '.join(unmeasured)}." if unmeasured else ""
    if not judged:
        passes = "passes" if len(rules.gated) == 1 else "pass"
        return f"Pass: {arms} {passes} every check of the policy that could be applied.{blind}"
    undecided = sum(not counts(check) for check in checks)
    aside = f"; {undecided} supporting checks are undecided" if undecided else ""
    every = "every critical task" if undecided else "every task"
    worst = max(judged, key=lambda check: check.value - check.limit)
    loses = "loses" if len(rules.gated) == 1 else "lose"
    return (
        f"Pass: {arms} {loses} less than the margin on {every} "
        f"(closest: {worst.arm} on {worst.name.split()[1]}, at most {worst.value:.2f} of {worst.limit:g} pp)"
        f"{aside}.{blind}"
    )


def _rows(tensors: Any) -> list[Mapping[str, Any]]:
    if tensors is None:
        return []
    if hasattr(tensors, "to_dict"):
        return list(tensors.to_dict("records"))
    return list(tensors)
