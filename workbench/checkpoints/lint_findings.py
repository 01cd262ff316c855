"""Making a finding: one an id and cause, with the number and the names of all it is found in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from workbench.records import LintFinding

from .files import Problem
from .open import Entry


def entry_finding(check: str, severity: str, message: str, entries: Sequence[Entry], fix: str) -> LintFinding:
    """A finding about `entries`; `message` is about the first."""
    return LintFinding(
        check=check,
        severity=severity,
        message=message + more(len(entries)),
        tensor=entries[0].name,
        file=entries[0].file,
        fix=fix,
        count=len(entries),
        tensors=tuple(e.name for e in entries),
    )


def problem_findings(problems: Iterable[Problem]) -> Iterator[LintFinding]:
    """What opening found: problems whose messages differ in names and numbers only are one finding."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for p in problems:
        groups.setdefault((p.check, p.severity, p.fix, _without_names(p)), []).append(p)
    for group in groups.values():
        first = group[0]
        yield LintFinding(
            check=first.check,
            severity=first.severity,
            message=first.message + more(len(group)),
            tensor=first.tensor,
            file=first.file,
            fix=first.fix,
            count=len(group),
            tensors=tuple(p.tensor for p in group if p.tensor),
        )


def more(count: int, what: str = "tensors") -> str:
    """The number of a finding's tensors, for the end of its message; nothing for one."""
    return f" ({count} such {what})" if count > 1 else ""


def _without_names(problem: Problem) -> str:
    """A message without what differs between tensors: words with a dot, a digit or a bracket in them."""
    return " ".join(w for w in problem.message.split() if not any(c.isdigit() or c in ".[]" for c in w.strip(".,;:")))
