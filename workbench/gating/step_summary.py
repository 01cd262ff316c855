"""A verdict as Markdown for the step summary of a CI system: the headline, what failed first, then every figure."""

from __future__ import annotations

import math
import os
from pathlib import Path

from workbench.errors import OutputError
from workbench.records import Comparison, GateCheck, Verdict

_ORDER = {"invalid": 0, "fail": 1, "inconclusive": 2, "pass": 3, "reported": 4}
_SIGN = {"invalid": "❌", "fail": "❌", "inconclusive": "⚠️", "pass": "✅", "reported": "ℹ️"}


def to_step_summary(verdict: Verdict, comparison: Comparison | None = None, trend: list[str] | None = None) -> str:
    """GitHub-flavoured Markdown. trend: the sentences of `trend_lines`."""
    lines = [f"## Gate `{verdict.policy}`: {verdict.status}", "", _cell(verdict.headline), ""]
    origin = f"Policy {verdict.policy}, from {verdict.policy_from}." if verdict.policy_from else ""
    if note := " ".join(part for part in (origin, verdict.policy_note) if part):
        lines += [f"> {_cell(note)}", ""]
    lines += ["| | arm | check | tier | value | limit |", "|---|---|---|---|--:|--:|"]
    checks = sorted(verdict.checks, key=lambda check: _ORDER.get(check.status, 9))
    for check in checks:
        lines.append(
            f"| {_SIGN.get(check.status, '')} {check.status} | {_cell(check.arm)} | {_cell(check.name)} | {check.tier} "
            f"| {_figure(check.value, check.unit)} | {_figure(check.limit, check.unit)} |"
        )
    if comparison is not None and comparison.tasks:
        lines += ["", "| arm | task | baseline | arm | loss, pp (95 %) | lost / gained / n | detectable loss, pp |"]
        lines.append("|---|---|--:|--:|--:|--:|--:|")
        for row in comparison.tasks:
            if row.primary:
                lines.append(
                    f"| {_cell(row.candidate)} | {_cell(row.task)} {_cell(row.filter)} "
                    f"| {100 * row.baseline_value:.1f} % | {100 * row.candidate_value:.1f} % "
                    f"| {row.loss_pp:+.2f} ({row.loss_low_pp:+.2f} to {row.loss_high_pp:+.2f}) "
                    f"| {row.lost} / {row.gained} / {row.n} | {_figure(row.mde_pp, '')} |"
                )
    if verdict.attributions:
        lines += ["", "| arm | cause | caught by | |", "|---|---|---|---|"]
        for found in verdict.attributions:
            caught = ", ".join(found.caught_by) or "–"
            lines.append(f"| {_cell(found.arm)} | {found.cause} | {caught} | {_cell(found.summary)} |")
    lines += _details("Reasons", [_reason(check) for check in checks])
    lines += _details("Trend", [f"- {_cell(line)}" for line in trend or []])
    lines += _details("Notes", [f"- {_cell(note)}" for note in comparison.notes] if comparison is not None else [])
    return "\n".join(lines) + "\n"


def append_step_summary(text: str, path: Path | None = None) -> bool:
    """Append to `path`, or to the file that $GITHUB_STEP_SUMMARY names; False where there is neither. Raises
    OutputError.
    """
    named = os.environ.get("GITHUB_STEP_SUMMARY")
    target = path or (Path(named) if named else None)
    if target is None:
        return False
    try:
        with target.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise OutputError(f"could not append to {target}: {error.strerror}", fix="give another file") from error
    return True


def _reason(check: GateCheck) -> str:
    about = f"{_cell(check.arm)}: " if check.arm else ""
    return f"- **{check.status}** {about}{_cell(check.name)}. {_cell(check.reason)}"


def _details(title: str, lines: list[str]) -> list[str]:
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"] if lines else []


def _figure(value: float, unit: str) -> str:
    if math.isnan(value):
        return ""
    digits = f"{value:.0f}" if unit in ("items", "errors", "tensors", "bytes") else f"{value:.2f}"
    return f"{digits} {unit}".rstrip()


def _cell(text: str) -> str:
    """Text that neither ends a table's cell nor starts an HTML tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")
