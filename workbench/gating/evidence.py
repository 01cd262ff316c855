"""Checks on the evidence: is what lies here fit to judge an arm by? What is not makes the run invalid, never a pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePath

from workbench.gating.policy import Policy
from workbench.records import Comparison, Evaluation, GateCheck, LintReport, ServerRecord, TaskComparison, TaskScore
from workbench.statistics import wilson_interval


def check_lint(
    rules: Policy,
    lint: Mapping[str, LintReport] | None,
    promised: Collection[str] = (),
    servers: Mapping[str, ServerRecord] | None = None,
) -> list[GateCheck]:
    """Lint errors of any arm that are not in `lint.allow` make the run invalid: its figures are about a faulty
    checkpoint.

    An arm that is only reported has its errors shown. lint empty: no checkpoint of the run was linted, which is said of
    every gated arm; None: there is no run to speak of, but answers. A gated arm's report that the run made (promised)
    and that is gone, is empty, or is about another checkpoint than its server had, makes it invalid too.
    """
    checks = []
    for arm, report in (lint or {}).items():
        errors = [finding for finding in report.errors if finding.check not in rules.lint_allow]
        allowed = len(report.errors) - len(errors)
        accepted = f" {allowed} more allowed by the policy." if allowed else ""
        if errors:
            first = errors[0]
            ids = ", ".join(dict.fromkeys(finding.check for finding in errors))
            where = f" ({first.tensor})" if first.tensor and first.tensor not in first.message else ""
            reason = f"{len(errors)} lint errors ({ids}): {first.message}{where}.{accepted}"
            status = "reported" if arm in rules.reported else "invalid"
        else:
            reason = f"no lint errors in {report.tensors} tensors, {len(report.checks)} checks.{accepted}"
            status = "pass" if arm not in rules.reported else "reported"
        checks.append(
            GateCheck(
                name="lint", arm=arm, status=status, reason=reason, value=float(len(errors)), limit=0.0, unit="errors"
            )
        )
    unlinted = [arm for arm in rules.gated if lint and arm not in lint]
    checks += [invalid("lint", arm, "its checkpoint was not linted, though others were.") for arm in unlinted]
    if lint is not None and not lint:
        reason = "not linted: errors of its checkpoint are not known. `workbench lint CHECKPOINT` looks for them."
        checks += [GateCheck(name="lint", arm=arm, status="reported", reason=reason) for arm in rules.gated]
        reason = "the run linted its checkpoints, but the reports are gone: run its lint stage again."
        checks += [invalid("lint", arm, reason) for arm in rules.gated if arm in promised]
    for arm in rules.gated:
        own, server = (lint or {}).get(arm), (servers or {}).get(arm)
        if own is not None and not (own.checks and own.tensors):
            found = f"{own.tensors} tensors, {len(own.checks)} checks"
            checks.append(invalid("lint", arm, f"its report is empty ({found}): nothing was looked at."))
        elif own is not None and server is not None and _others(own.checkpoint, server.checkpoint):
            reason = f"its report is about {own.checkpoint}, its server had {server.checkpoint}."
            checks.append(invalid("lint", arm, reason))
    return checks


def _others(linted: str, served: str) -> bool:
    """Whether two checkpoints are not the same, as far as their last names tell: paths are written in several ways."""
    return bool(linted and served) and PurePath(linted).name != PurePath(served).name


def check_compared(
    rules: Policy, comparison: Comparison | None, evaluations: Mapping[str, Evaluation] | None
) -> list[GateCheck]:
    """Every gated arm must have been compared, on at least `min_items` items a task, and its scores be there still."""
    if comparison is None:
        return [invalid("evaluation", arm, "no answers were compared with the baseline's.") for arm in rules.gated]
    checks = [
        invalid("evaluation", arm, "its answers were compared, but its scores.json is gone: evaluate it again.")
        for arm in (comparison.baseline, *rules.gated)
        if evaluations is not None
        and arm not in evaluations
        and any(arm in (task.baseline, task.candidate) for task in comparison.tasks)
    ]
    primary = [task for task in comparison.tasks if task.primary]
    known = [task for task in dict.fromkeys(task.task for task in primary) if rules.tier(task) != "advisory"]
    for arm in rules.gated:
        judged = [task for task in primary if task.candidate == arm]
        missing = [name for name in known if name not in {task.task for task in judged}]
        if not judged:
            checks.append(
                invalid("evaluation", arm, f"the arm has no evaluation to compare with {comparison.baseline}.")
            )
        elif missing:
            checks.append(invalid("evaluation", arm, f"the arm has no result for {', '.join(missing)}."))
        for name in comparison.unpaired.get(arm, ()):
            if name not in missing:
                reason = (
                    f"{arm} lacks this task, or scores it otherwise than {comparison.baseline}: it was not compared. "
                    f"(A policy may say that it does not count: tiers: {{{name}: advisory}}.)"
                )
                checks.append(invalid(f"evaluation {name}", arm, reason, rules=rules, task=name))
        for task in judged:
            if task.n < rules.min_items:
                reason = f"{task.n} items were scored, the policy asks for {rules.min_items}."
                checks.append(
                    invalid(f"items {task.task}", arm, reason, task.n, rules.min_items, "items", rules, task.task)
                )
    return checks


def check_evaluations(rules: Policy, baseline: str, evaluations: Mapping[str, Evaluation]) -> list[GateCheck]:
    """What the baseline's, the gated and the reported arms answered: real answers, within the policy's limits."""
    checks = []
    for arm, evaluation in evaluations.items():
        if arm == baseline or arm in rules.gated + rules.reported:
            for score in evaluation.scores:
                if score.primary:
                    checks += _check_answers(rules, baseline, arm, score)
    return checks


def check_room(rules: Policy, comparison: Comparison) -> list[GateCheck]:
    """A baseline at the level of guessing cannot lose the margin: no arm could fail, so a pass would say nothing.

    Needed: the lower end of the baseline's 95 % interval lies more than the margin above chance.
    """
    checks = []
    seen: dict[str, TaskComparison] = {}
    for task in comparison.tasks:
        if task.primary:
            seen.setdefault(task.task, task)
    for name, task in seen.items():
        if task.n == 0:
            continue
        chance = rules.chance.get(name, 0.0)
        units = task.clusters or task.n  # answers to one problem are no independent evidence
        low, _ = wilson_interval(round(task.baseline_value * units), units)
        room_pp = 100.0 * (low - chance)
        if room_pp <= rules.margin(name):
            reason = (
                f"{comparison.baseline} has {100 * task.baseline_value:.1f} % right ({task.n} items, 95 % from "
                f"{100 * low:.1f} %), chance is {100 * chance:.1f} %: no room to lose the margin of "
                f"{rules.margin(name):g} pp."
            )
            checks.append(
                invalid(
                    f"room to fall {name}", comparison.baseline, reason, room_pp, rules.margin(name), "pp", rules, name
                )
            )
    return checks


def _check_answers(rules: Policy, baseline: str, arm: str, score: TaskScore) -> list[GateCheck]:
    """Empty, cut and failed answers are usually the server's or the harness's doing; more than the policy allows is not
    passed over.
    """
    checks = []
    for what, count, limit in (
        ("empty", score.empty, rules.max_empty_share),
        ("truncated", score.truncated, rules.max_truncated_share),
        ("failed", score.failed, rules.max_failed_share),
    ):
        if limit is None or count < 0 or score.n == 0 or count <= limit * score.n:
            continue
        share = count / score.n
        reason = (
            f"{count} of {score.n} answers are {what} ({100 * share:.1f} %, the policy allows {100 * limit:g} %): "
            "look at the server's log and at max_gen_toks before believing this score."
        )
        status = "invalid" if arm == baseline else ("inconclusive" if arm in rules.gated else "reported")
        checks.append(
            GateCheck(
                name=f"{what} answers {score.task}",
                arm=arm,
                status=rules.weigh(status, score.task),
                reason=reason,
                value=100.0 * share,
                limit=100.0 * limit,
                unit="%",
                tier=rules.tier(score.task),
            )
        )
    return checks


def invalid(
    name: str,
    arm: str,
    reason: str,
    value: float = float("nan"),
    limit: float = float("nan"),
    unit: str = "",
    rules: Policy | None = None,
    task: str = "",
) -> GateCheck:
    """A check that found the evidence wanting. rules, task: where it is about one task, whose tier then counts."""
    return GateCheck(
        name=name,
        arm=arm,
        status=rules.weigh("invalid", task) if rules else "invalid",
        reason=reason,
        value=float(value),
        limit=float(limit),
        unit=unit,
        tier=rules.tier(task) if rules else "critical",
    )
