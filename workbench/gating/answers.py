"""Checks on the answers: the paired comparison with the baseline, and with a committed one.

The rule, on every gated arm and every task's primary filter, is `workbench.statistics.judge_loss`; its p-value is
adjusted over the arm's tasks (Holm), since any one of them can fail it.
"""

from __future__ import annotations

import difflib
import math

from workbench.gating.evidence import invalid
from workbench.gating.policy import Policy
from workbench.records import Comparison, GateCheck, TaskComparison
from workbench.statistics import ALPHA, holm, judge_loss, more_items_needed


def check_answers(rules: Policy, comparison: Comparison) -> list[GateCheck]:
    """One check a (candidate, task, filter) of the gated and reported arms."""
    rows = [task for task in comparison.tasks if task.candidate in rules.gated + rules.reported]
    return _judge_all(rules, rows, gated=rules.gated, prefix="accuracy")


def check_since_baseline(
    rules: Policy, since: Comparison, comparison: Comparison | None, baseline_arm: str
) -> list[GateCheck]:
    """The same, of arms against themselves in the committed baseline. The run's own baseline arm counts as well: where
    it moved, the engine or the harness changed. A judged task of such an arm that the committed baseline lacks is
    invalid; its other notes are shown.
    """
    gated = tuple(arm for arm in (baseline_arm, *rules.gated) if arm)
    stored = {(row.candidate, row.task) for row in since.tasks if row.primary}
    judged = [row for row in (comparison.tasks if comparison is not None else ()) if row.primary]
    checks = []
    for arm in gated:
        tasks = dict.fromkeys(row.task for row in judged if arm in (row.candidate, baseline_arm))
        missing = [task for task in tasks if (arm, task) not in stored]
        for task in missing:
            reason = f"the committed baseline holds no judged result of {arm} for {task}: nothing says what it was."
            checks.append(invalid(f"since baseline {task}", arm, reason, rules=rules, task=task))
        if not tasks and not any(row.candidate == arm for row in since.tasks):
            checks.append(
                invalid("since baseline", arm, "the committed baseline was compared with no task of the arm.")
            )
    for note in since.notes:
        checks.append(GateCheck(name="since baseline", arm="", status="reported", reason=note))
    return checks + _judge_all(rules, list(since.tasks), gated=gated, prefix="since baseline")


def check_named(rules: Policy, comparison: Comparison) -> list[GateCheck]:
    """A margin under a name that was not compared but is almost one that was: a slip that the default would hide."""
    compared = sorted({row.task for row in comparison.tasks} | {row.task for row in comparison.graded})
    folded = {task.casefold(): task for task in compared}
    checks = []
    for task in rules.margin_pp:
        near = difflib.get_close_matches(task.casefold(), folded, n=1, cutoff=0.8)
        if task not in compared and task != "default" and near and folded[near[0]] not in rules.margin_pp:
            checks.append(
                GateCheck(
                    name=f"margin {task}",
                    arm="",
                    status=rules.weigh("inconclusive", folded[near[0]]),
                    reason=f"margin_pp names {task}, which was not compared; {folded[near[0]]} was.",
                    tier=rules.tier(folded[near[0]]),
                )
            )
    return checks


def _judge_all(rules: Policy, rows: list[TaskComparison], *, gated: tuple[str, ...], prefix: str) -> list[GateCheck]:
    families: dict[str, list[TaskComparison]] = {}
    for row in rows:
        if row.primary and rules.tier(row.task) != "advisory":
            families.setdefault(row.candidate, []).append(row)
    adjusted: dict[_Line, float] = {}
    for family in families.values():
        p_values = [row.p_loss for row in family]
        if rules.correction == "holm":
            p_values = holm(p_values)
        adjusted.update({_line(row): p for row, p in zip(family, p_values, strict=True)})
    metrics: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        metrics.setdefault((row.task, row.filter), set()).add(row.metric)
    checks = []
    for row in rows:
        several = len(metrics[row.task, row.filter]) > 1
        judged = _line(row) in adjusted
        checks.append(
            _judge(
                rules,
                row,
                name=f"{prefix} {row.task} {row.filter}{f' {row.metric}' if several else ''}",
                p_loss=adjusted.get(_line(row), row.p_loss),
                family=len(families[row.candidate]) if judged and rules.correction == "holm" else 1,
                counted=row.candidate in gated and row.primary,
            )
        )
    return checks


_Line = tuple[str, str, str, str]


def _line(row: TaskComparison) -> _Line:
    return row.candidate, row.task, row.filter, row.metric


def _judge(rules: Policy, row: TaskComparison, *, name: str, p_loss: float, family: int, counted: bool) -> GateCheck:
    margin = rules.margin(row.task)
    status = judge_loss(loss_pp=row.loss_pp, loss_upper95_pp=row.loss_upper95_pp, p_loss=p_loss, margin_pp=margin)
    return GateCheck(
        name=name,
        arm=row.candidate,
        status=rules.weigh(status, row.task) if counted else "reported",
        reason=_reason(row, margin, status, p_loss, family),
        value=row.loss_upper95_pp,
        limit=margin,
        unit="pp",
        tier=rules.tier(row.task),
    )


def _reason(row: TaskComparison, margin: float, status: str, p_loss: float, family: int) -> str:
    items = f"{row.n} answers to {row.clusters} problems" if row.clusters else f"{row.n} items"
    adjusted = f" ({p_loss:.2g} over {family} tasks, Holm)" if family > 1 else ""
    figures = (
        f"{row.baseline} {100 * row.baseline_value:.1f} %, {row.candidate} {100 * row.candidate_value:.1f} % of "
        f"{items} ({row.lost} lost, {row.gained} gained): loss {row.loss_pp:.2f} pp, 95 % upper bound "
        f"{row.loss_upper95_pp:.2f} pp, margin {margin:g} pp, p(no loss) = {row.p_loss:.2g}{adjusted}"
    )
    if status == "pass":
        return f"{figures}. A loss of {margin:g} pp or more is excluded."
    if status == "fail":
        return f"{figures}. The loss is significant and above the margin."
    doubt = (
        f"The loss is significant alone, but not as one of {family} tasks"
        if row.p_loss < ALPHA <= p_loss and row.loss_pp > margin
        else f"The data neither exclude a loss of {margin:g} pp nor show one"
    )
    seen = "" if math.isnan(row.mde_pp) else (f"; with {items} a loss of {row.mde_pp:.2f} pp is found in 80 % of runs")
    return f"{figures}. {doubt}{seen}. {_outlook(row, margin)}"


def _outlook(row: TaskComparison, margin: float) -> str:
    """How many more items would decide, as far as that can be said."""
    if row.clusters:
        return "More problems, not more answers to the same ones, would decide."
    needed = more_items_needed(row.lost, row.gained, row.n, margin / 100.0)
    if math.isinf(needed):
        return "The observed loss is the margin: no number of items decides if it is the true one."
    toward = "pass" if row.loss_pp < margin else "fail"
    return f"Needs about {max(1, int(needed))} more items to {toward} in 80 % of runs, if the rates stay as observed."
