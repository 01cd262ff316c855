"""The rows of `workbench bench kernels --device cuda`, as text, Markdown and JSON; bars beside their figures."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.bench.cuda_timing import EVENTS, Card, Timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A ratio, what it must reach (None: reported without a bar), and why it is missing or how it was taken."""

    value: float | None
    needed: float | None = None
    why: str = ""
    how: str = ""

    @property
    def met(self) -> bool | None:
        """None where there is no bar, or no figure to hold against it."""
        return None if self.needed is None or self.value is None else self.value >= self.needed

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.2f}" if self.value < 9.995 else f"{self.value:.1f}"
        value += "*" if self.how == EVENTS else ""
        if self.needed is None:
            return value
        return (
            f"{value} (>= {self.needed:g} {'not measured' if self.met is None else 'met' if self.met else 'NOT MET'})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case: how long the workbench's kernel takes, and its figures by name."""

    case: str
    ours: Timed
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table: what was measured in it, on what shapes."""

    name: str
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaBench:
    date: str
    card: Card
    sections: tuple[Section, ...]


def times(ours: Timed, rival: Timed, needed: float | None = None) -> Figure:
    """How many times as long the rival takes."""
    if ours.seconds is None or rival.seconds is None:
        return Figure(value=None, needed=needed, why=rival.why or f"ours: {ours.why}")
    return Figure(value=rival.seconds / ours.seconds, needed=needed, how=rival.how)


def of_copy(ours: Timed, nbytes: float, card: Card, needed: float | None = None) -> Figure:
    """`nbytes` read and written a call, as a fraction of what the card copies in that time."""
    if ours.seconds is None:
        return Figure(value=None, needed=needed, why=f"ours: {ours.why}")
    return Figure(value=nbytes / ours.seconds / card.copy, needed=needed)


def of_rate(ours: Timed, flops: float, card: Card) -> Figure:
    """The same of the card's bfloat16 matrix rate."""
    return Figure(value=None if ours.seconds is None else flops / ours.seconds / card.matrix_flops)


def card_line(card: Card) -> str:
    return (
        f"{card.name}, torch {card.torch}, triton {card.triton}: copy {card.copy / 1e12:.2f} TB/s "
        f"(Tensor.copy_ {card.copy_call / 1e12:.2f}, a Triton kernel {card.copy_kernel / 1e12:.2f}), "
        f"bfloat16 products {card.matrix_flops / 1e12:.0f} TFLOP/s"
    )


def text(section: Section) -> str:
    """Columns for a terminal; below them, once each, why a figure is missing."""
    header, rows = _cells(section)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
    return "\n".join([section.title, *(f"  {line}" for line in lines), *(f"  {note}" for note in _notes(section))])


def markdown(result: CudaBench) -> str:
    lines = [f"{card_line(result.card)}, {result.date}.", ""]
    for section in result.sections:
        header, rows = _cells(section)
        lines += [f"{section.title}:", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *(f"- {note}" for note in _notes(section)), ""]
    return "\n".join([*lines, summary(result.sections)])


def summary(sections: Iterable[Section]) -> str:
    """How many bars were met, and the names of the others."""
    barred = [
        (f"{row.case} {name}", figure.met)
        for section in sections
        for row in section.rows
        for name, figure in row.figures.items()
        if figure.needed is not None
    ]
    if not barred:
        return "no bar in what was measured"
    line = f"{sum(met is True for _, met in barred)} of {len(barred)} bars met"
    for met, word in ((False, "not met"), (None, "not measured")):
        names = [name for name, found in barred if found is met]
        line += f"; {word}: {', '.join(names)}" if names else ""
    return line


def as_json(result: CudaBench) -> dict[str, Any]:
    """Everything; `met` beside every figure that has a bar."""
    data = asdict(result)
    data["card"]["copy"] = result.card.copy
    for section, found in zip(data["sections"], result.sections, strict=True):
        for row, source in zip(section["rows"], found.rows, strict=True):
            for name, figure in source.figures.items():
                row["figures"][name]["met"] = figure.met
    return data


def today() -> str:
    return time.strftime("%Y-%m-%d")


def _cells(section: Section) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for row in section.rows for name in row.figures))
    rows = []
    for row in section.rows:
        taken = "-" if row.ours.seconds is None else f"{row.ours.seconds * 1e6:.1f}"
        taken += "*" if row.ours.how == EVENTS else ""
        rows.append([row.case, taken, *(str(row.figures[name]) if name in row.figures else "" for name in names)])
    return ["case", "us", *names], rows


def _notes(section: Section) -> list[str]:
    """Why figures are missing: a reason once, with the first case that gave it."""
    seen: dict[str, str] = {}
    for row in section.rows:
        if row.ours.why:
            seen.setdefault(row.ours.why, f"{row.case}: {row.ours.why}")
        for name, figure in row.figures.items():
            if figure.why and not figure.why.startswith("ours: "):
                seen.setdefault(f"{name}{figure.why}", f"{name}, {row.case}: {figure.why}")
    starred = any(
        how == EVENTS for row in section.rows for how in (row.ours.how, *(f.how for f in row.figures.values()))
    )
    return [
        *seen.values(),
        *(["* could not be captured in a CUDA graph: launched and timed one by one"] if starred else []),
    ]
