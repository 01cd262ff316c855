"""What the figures for papers share: a figure with its caption, a white page, colours and markers apart for everyone.

    figure, axes = page(width=COLUMN, height=2.4)
    axes.plot(x, y, **mark(0))
    PaperFigure("scores", "Scores", "What is shown.", ("eval/*/scores.json",), figure)

Colours are those of Okabe and Ito, which readers with any colour vision tell apart; markers and hatches repeat what the
colours say, so a grey print reads as well. `STYLE` belongs around drawing and saving: matplotlib reads it at both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0  # inches: one column of a two-column paper, and its page
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HATCHES = ("", "////", "\\\\\\\\", "xxxx")
GRID, BAND = "#B0B0B0", "#E6E6E6"
MANY = 3000  # points: more are drawn as an image within the SVG, which else would be of megabytes
STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5,
    "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "axes.linewidth": 0.7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "workbench", "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
    "text.parse_math": False, "hatch.linewidth": 0.6, "figure.max_open_warning": 0,
}  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """name: of its files, without ending. sources: the records it was drawn from, relative to the run folder."""

    name: str
    title: str
    caption: str
    sources: tuple[str, ...]
    figure: Figure


def page(width: float, height: float, rows: int = 1, columns: int = 1, **sharing: Any) -> tuple[Figure, list[Any]]:
    """A figure of so many inches, and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **sharing)
    return figure, [axes for row in grid for axes in row]


def mark(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th arm (or kind)."""
    return {"color": COLORS[index % len(COLORS)], "marker": _MARKERS[index % len(_MARKERS)]}


def legend(where: Any, labels: Sequence[str], styles: Sequence[dict[str, Any]], **place: Any) -> None:
    """A legend of `labels`, on axes or on a figure; styles: of matplotlib's Line2D."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **{"ls": "", "ms": 4, **style}) for style in styles]
    where.legend(handles=handles, labels=list(labels), **place)


def bar_legend(where: Any, labels: Sequence[str], **place: Any) -> None:
    """A legend of bars or boxes, in the order of COLORS and HATCHES."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=COLORS[i % len(COLORS)], hatch=HATCHES[i % len(HATCHES)], edgecolor="white", lw=0)
        for i in range(len(labels))
    ]
    where.legend(handles=handles, labels=list(labels), **place)


def whisker(axes: Any, x: float, y: float, low: float, high: float, index: int) -> None:
    """A value with its interval, lying; without an interval where it is not known."""
    import math

    known = math.isfinite(low) and math.isfinite(high)
    xerr = [[max(0.0, x - low)], [max(0.0, high - x)]] if known else None
    axes.errorbar(x, y, xerr=xerr, ms=3.8, lw=1.2, capsize=2.2, ls="", **mark(index))


def grid(axes: Any, axis: str = "x") -> None:
    axes.grid(axis=axis, color=GRID, alpha=0.5, lw=0.5)


def slug(text: str) -> str:
    """A part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "figure"
