"""What a run says while it works: plain lines, and a counter for long loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from workbench.records import Evaluation, LintReport, Verdict

T = TypeVar("T")


class Progress:
    """Prints to stdout, each line with the time since the start."""

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

    def counter(self, what: str) -> Callable[..., None]:
        """A callback(done, total, ...) for a long loop: one rewritten line on a terminal, else a line every 15 s."""
        last = time.monotonic()
        terminal = sys.stdout.isatty()

        def count(done: int, total: int, *_: object) -> None:
            nonlocal last
            if terminal:
                ending = "\n" if done >= total else ""
                print(f"\r[{self._elapsed()}]   {what}: {done} of {total}{ending}", end="", flush=True)
            elif time.monotonic() - last > 15 and done < total:
                last = time.monotonic()
                self.note(f"{what}: {done} of {total}")

        return count

    def bar(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """Hand the items on, one by one, counting them as `counter` does."""
        count = self.counter(what)
        for done, item in enumerate(items):
            count(done, total)
            yield item
        count(total, total)

    def timed(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        """`bar`, which also says how long the rest will take if it goes on as so far."""
        start = last = time.monotonic()
        terminal = sys.stdout.isatty()
        for done, item in enumerate(items):
            if done and (terminal or time.monotonic() - last > 15):
                last = time.monotonic()
                left = int((last - start) / done * (total - done))
                text = f"[{self._elapsed()}]   {what}: {done} of {total}, {_clock(left)} left"
                print(f"{text}\r" if terminal else text, end="" if terminal else "\n", flush=True)
            yield item
        self.note(f"{what}: {total} of {total}")

    def reading(self) -> Reading:
        """A bar for a pass over files, which also says how fast it reads and how long it will take."""
        return Reading(self)

    def verdict(self, verdict: Verdict, report: Path) -> None:
        self._line("")
        self._line(f"verdict: {verdict.status.upper()} (exit code {verdict.exit_code})")
        self._line(verdict.headline)
        from workbench.records.judged import named

        for check in verdict.checks:
            if check.status != "pass":
                self._line(f"  {check.status}: {named(check)}: {check.reason}")
        for found in verdict.attributions:
            if found.cause != "none":
                self._line(f"  cause: {found.cause}, caught by {', '.join(found.caught_by)}. {found.summary}")
        if report.exists():
            self._line(f"report: {report}")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60:02d}:{seconds % 60:02d}"

    def _line(self, text: str) -> None:
        print(text, flush=True)


class Reading:
    """`bar` counts items; `add` takes the bytes of those that were read. Items that were done before cost no time, so
    the rest is estimated from those that were read."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bytes = self._read = 0
        self._start = time.monotonic()

    def add(self, count: int) -> None:
        self._bytes += count
        self._read += 1

    def bar(self, items: Iterable[T], total: int, what: str) -> Iterator[T]:
        self._bytes, self._read, self._start = 0, 0, time.monotonic()
        last, terminal = self._start, sys.stdout.isatty()
        for done, item in enumerate(items):
            if terminal:
                print(f"\r{self._line(what, done, total)}", end="", flush=True)
            elif time.monotonic() - last > 15:
                last = time.monotonic()
                print(self._line(what, done, total), flush=True)
            yield item
        print(("\r" if terminal else "") + self._line(what, total, total), flush=True)

    def _line(self, what: str, done: int, total: int) -> str:
        seconds = max(1e-9, time.monotonic() - self._start)
        text = f"[{self._progress._elapsed()}]   {what}: {done} of {total}"
        if self._read:
            text += f", {self._bytes / seconds / 1e9:.2f} GB/s"
            if done < total:
                left = int(seconds / self._read * (total - done))
                text += f", {_clock(left)} left"
        return text


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
