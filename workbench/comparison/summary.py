"""A comparison as text for a terminal, and as JSON for other programs."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from workbench.records import SCHEMA_VERSION, Comparison, GradedComparison, TaskComparison, Verdict, plain


def comparison_text(comparison: Comparison) -> str:
    """One line a (candidate, task, filter), groups with their subtasks below them, then the notes."""
    lines = []
    for task in comparison.tasks:
        lines.append(_task_line(task))
        if task.strata:
            lines.append(
                f"    mean over {len(task.strata)} subtasks {task.macro_loss_pp:+.2f} pp ({task.macro_low_pp:+.2f} to "
                f"{task.macro_high_pp:+.2f}), {_differ(task.p_strata_differ)}"
            )
    lines += [_graded_line(row) for row in comparison.graded]
    for key, share in comparison.noise_floor.items():
        lines.append(f"noise floor {key.replace('|', ' ')}: {100 * share:.2f} % of items flip without any change")
    lines += [f"note: {note}" for note in comparison.notes]
    return "\n".join(map(one_line, lines))


def one_line(text: str) -> str:
    """Text from files (task, arm and filter names, reasons) as one line: a control character becomes its escape, so
    that no name can print a line of its own.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def comparison_json(comparison: Comparison, verdict: Verdict | None = None) -> str:
    """rows: one a (candidate, task, filter, metric), with whole numbers n_pairs, both, lost, gained, neither; figures
    as in `TaskComparison`, answers of flipped items left out. verdict: with its checks, where there is one.
    """
    payload = {
        "schema_version": SCHEMA_VERSION,
        "baseline": comparison.baseline,
        "noise_arm": comparison.noise_arm,
        "noise_floor": comparison.noise_floor,
        "rows": [_row(task) for task in comparison.tasks],
        "graded": [dataclasses.asdict(row) for row in comparison.graded],
        "notes": comparison.notes,
        "verdict": dataclasses.asdict(verdict) if verdict is not None else None,
    }
    return json.dumps(plain(payload), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _row(task: TaskComparison) -> dict[str, Any]:
    row = dataclasses.asdict(dataclasses.replace(task, flips=()))
    del row["flips"]
    strata = [{"n_pairs": stratum.pop("n"), **stratum} for stratum in row.pop("strata")]
    return {"kind": "group" if len(strata) > 1 else "task", "n_pairs": row.pop("n"), **row, "strata": strata}


def _task_line(task: TaskComparison) -> str:
    mark = "" if task.primary else " (not judged)"
    flips = f"{task.lost} lost, {task.gained} gained of {task.n}"
    if task.clusters:
        flips += f" answers to {task.clusters} problems"
    noise = "" if math.isnan(task.p_above_noise) else f", p(no more flips than noise) = {task.p_above_noise:.2g}"
    return (
        f"{task.candidate} {task.task} {task.filter} {task.metric}{mark}: {100 * task.baseline_value:.2f} -> "
        f"{100 * task.candidate_value:.2f} %, loss {task.loss_pp:+.2f} pp ({task.loss_low_pp:+.2f} to "
        f"{task.loss_high_pp:+.2f}), {flips}, p(no loss) = {task.p_loss:.2g}{noise}"
    )


def _differ(p: float) -> str:
    return "too few flips to tell whether they differ" if math.isnan(p) else f"p(all alike) = {p:.2g}"


def _graded_line(row: GradedComparison) -> str:
    return (
        f"{row.candidate} {row.task} {row.filter} {row.metric} (graded, not judged): {row.baseline_value:.4f} -> "
        f"{row.candidate_value:.4f}, loss {row.loss:+.4f} ({row.low:+.4f} to {row.high:+.4f}) of {row.n} items, "
        f"p(no loss) = {row.p_loss:.2g}"
    )
