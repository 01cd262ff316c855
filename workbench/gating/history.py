"""The history of a gate: one line a verdict, appended and never rewritten, and the trend in it.

    append_history(path, verdict, comparison, run="2026-01-02T03-04-05", when="2026-01-02T03:10:00+00:00")
    for line in trend_lines(read_history(path)): print(line)

A regression too small for any single run shows in many: a loss that creeps up by a tenth of a point each week passes
every gate that looks at one week. The trend is told, not judged: runs of a history share a baseline and often the
items, so that its p-value is a hint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import OutputError
from workbench.records import Comparison, Verdict, plain
from workbench.statistics import trend


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryFigure:
    """One judged (arm, task, filter): the loss against that run's baseline arm, percentage points."""

    arm: str
    task: str
    filter: str
    n: int
    lost: int
    gained: int
    baseline_value: float
    candidate_value: float
    loss_pp: float
    loss_upper95_pp: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """One line of the history. when: ISO 8601 time of the verdict; code: version or commit of what was judged."""

    when: str
    run: str
    policy: str
    status: str
    headline: str
    code: str = ""
    figures: tuple[HistoryFigure, ...] = ()


def append_history(
    path: Path, verdict: Verdict, comparison: Comparison | None, *, run: str, when: str, code: str = ""
) -> None:
    """Add one line (also after a last line that lacks its newline). Raises OutputError naming the path; nothing is
    written to a file that is no history.
    """
    read_history(path)
    rows = comparison.tasks if comparison is not None else ()
    names = [field.name for field in fields(HistoryFigure) if field.name != "arm"]
    entry = HistoryEntry(
        when=when,
        run=run,
        policy=verdict.policy,
        status=verdict.status,
        headline=verdict.headline,
        code=code,
        figures=tuple(
            HistoryFigure(arm=row.candidate, **{name: getattr(row, name) for name in names})
            for row in rows
            if row.primary
        ),
    )
    start = b"" if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n") else b"\n"
    line = json.dumps(plain(asdict(entry)), ensure_ascii=False, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(start + line.encode(errors="backslashreplace") + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OutputError(f"could not append to {path}: {error.strerror}", fix="give another --history file") from error


def read_history(path: Path) -> list[HistoryEntry]:
    """All entries, oldest first; none where there is no file. Raises OutputError naming the line that is damaged."""
    if not path.exists():
        return []
    if not path.is_file():
        raise OutputError(f"could not append to {path}: no regular file", fix="give another --history file")
    entries = []
    content = path.read_bytes()
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line.decode())
            figures = tuple(HistoryFigure(**_numbers(figure)) for figure in entry.pop("figures"))
            entries.append(HistoryEntry(**entry, figures=figures))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            torn = number == len(lines) and not content.endswith(b"\n")
            end = " (its end was never written)" if torn else ""
            raise OutputError(
                f"{path}, line {number} is no entry of a history{end}: {error}",
                fix="delete this last line: its run was stopped" if torn else "restore it from version control",
            ) from error
    return entries


def trend_lines(entries: list[HistoryEntry]) -> list[str]:
    """One sentence for every (arm, task, filter) of the newest entry, in its order."""
    lines = []
    for newest in entries[-1].figures if entries else ():
        key = (newest.arm, newest.task, newest.filter)
        losses = [
            figure.loss_pp
            for entry in entries
            for figure in entry.figures
            if (figure.arm, figure.task, figure.filter) == key
        ]
        found = trend(losses)
        about = f"{newest.arm} {newest.task} {newest.filter}: loss {newest.loss_pp:+.2f} pp"
        if math.isnan(found.slope):
            lines.append(f"{about}; {found.n} runs, too few for a trend (it takes 5)")
        else:
            lines.append(
                f"{about}; over {found.n} runs {found.slope:+.3f} pp a run ({found.low:+.3f} to {found.high:+.3f}), "
                f"p(not rising) = {found.p_rising:.2g}"
            )
    return lines


def _numbers(figure: Mapping[str, Any]) -> dict[str, Any]:
    """null stands for NaN in JSON."""
    return {key: math.nan if value is None else value for key, value in figure.items()}
