"""What a run says while it works: plain lines, and a bar on a terminal for long loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from workbench.records import Evaluation, LintReport, Verdict

T = TypeVar("T")


class Progress:
    """Prints to stdout; a bar (rich) replaces repeated lines where stdout is a terminal."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def title(self, what: str, where: str) -> None:
        self._line(f"{what}\nrun folder: {where}")

    def stage(self, name: str) -> None:
        self._line(f"[{self._elapsed()}] {name}")

    def note(self, text: str) -> None:
        self._line(f"[{self._elapsed()}]   {text}")

    def arm(self, name: str, backend: str) -> None:
        self.note(f"{name}: starting its endpoint ({backend})")

    def lint(self, name: str, report: LintReport) -> None:
        found = f"{len(report.findings)} findings" if report.findings else "clean"
        self.note(f"{name}: {report.dialect}, {report.quantized_tensors} quantized tensors, {found}")
        for finding in report.findings:
            where = f" {finding.tensor}" if finding.tensor else ""
            self.note(f"  {finding.severity} {finding.check}{where}: {finding.message}")

    def scores(self, result: Evaluation) -> None:
        for score in result.scores:
            self.note(
                f"{result.arm}: {score.task} {score.filter} {100 * score.value:.1f} % "
                f"({100 * score.low:.1f} to {100 * score.high:.1f}, n = {score.n})"
            )

    def bar(self, items: Iterable[T], total: int | None = None, label: str = "") -> Iterator[T]:
        """Iterate with progress: a bar on a terminal, else a line every 15 seconds."""
        if sys.stdout.isatty():
            from rich.progress import track

            yield from track(items, total=total, description=label, transient=True)
            return
        last = time.monotonic()
        for done, item in enumerate(items):
            if time.monotonic() - last > 15:
                last = time.monotonic()
                self.note(f"{label}: {done}" + (f" of {total}" if total else ""))
            yield item

    def verdict(self, verdict: Verdict, report: Path) -> None:
        self._line("")
        self._line(f"verdict: {verdict.status.upper()} (exit code {verdict.exit_code})")
        self._line(verdict.headline)
        for check in verdict.checks:
            if check.status != "pass":
                self._line(f"  {check.status}: {check.name}: {check.reason}")
        if report.exists():
            self._line(f"report: {report}")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"

    def _line(self, text: str) -> None:
        print(text, flush=True)
