"""Layer x expert heat maps as data for the template: small panels, one per projection, bounded in number of cells.

Rows are layers, columns experts (first "dense" and "shared" where a layer has them). A model with more cells than the
budget has neighbouring experts joined; a joined cell shows its worst matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

STEPS = 9  # colours, q0 (lowest) to q8, in style.css


@dataclass(frozen=True, slots=True)
class Cell:
    x: int
    y: int
    step: int
    label: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One projection. columns, rows: axis labels; joined: experts per cell."""

    projection: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[Cell, ...]
    joined: int


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Panels of one figure on one colour scale from `low` to `high` (dB)."""

    title: str
    low: float
    high: float
    panels: tuple[Panel, ...]


def make_heat_map(frame: pd.DataFrame, column: str, title: str, budget: int) -> HeatMap | None:
    """Panels of `column` (dB; higher is better) over the matrices of one pair. None when nothing is finite."""
    frame = frame[frame[column].map(math.isfinite)]
    if not len(frame):
        return None
    low, high = float(frame[column].min()), float(frame[column].max())
    cells = len(frame)
    joined = max(1, math.ceil(cells / budget))
    panels = tuple(
        _panel(str(projection), group, column, low, high, joined)
        for projection, group in sorted(frame.groupby("projection"), key=lambda item: _rank(str(item[0])))
    )
    return HeatMap(title, low, high, panels)


def _panel(projection: str, group: pd.DataFrame, column: str, low: float, high: float, joined: int) -> Panel:
    worst: dict[tuple[int, str], tuple[float, str, int]] = {}
    for name, layer, expert, shared, value in zip(
        group["name"], group["layer"], group["expert"], group["shared_expert"], group[column], strict=True
    ):
        place = (int(layer), _column_of(int(expert), bool(shared), joined))
        value_so_far, name_so_far, count = worst.get(place, (math.inf, "", 0))
        keep = (value, str(name)) if value < value_so_far else (value_so_far, name_so_far)
        worst[place] = (float(keep[0]), keep[1], count + 1)
    layers = sorted({layer for layer, _ in worst})
    columns = sorted({c for _, c in worst}, key=_column_rank)
    x_of, y_of = {c: i for i, c in enumerate(columns)}, {layer: i for i, layer in enumerate(layers)}
    cells = []
    for (layer, column_name), (value, name, count) in sorted(worst.items(), key=lambda i: (i[0][0], x_of[i[0][1]])):
        step = 0 if high == low else min(STEPS - 1, int((value - low) / (high - low) * STEPS))
        note = f" (worst of {count})" if count > 1 else ""
        cells.append(Cell(x_of[column_name], y_of[layer], step, f"{name}: {value:.2f} dB{note}"))
    labels = tuple(str(layer) if layer >= 0 else DASH_LAYER for layer in layers)
    return Panel(projection, tuple(columns), labels, tuple(cells), joined)


DASH_LAYER = "none"


def _column_of(expert: int, shared: bool, joined: int) -> str:
    if shared:
        return "shared"
    if expert < 0:
        return "dense"
    return str(expert // joined * joined)


def _column_rank(column: str) -> tuple[int, int]:
    return (0, ["dense", "shared"].index(column)) if not column.isdigit() else (1, int(column))


def _rank(projection: str) -> tuple[int, str]:
    usual = ["gate_proj", "up_proj", "down_proj"]
    return (usual.index(projection) if projection in usual else len(usual), projection)
