"""What the page shows of the analysis: a section per (first, second, rule) and the matrix products.

    for section in make_pairs(files, cells=1200, metrics=11, draw=Drawings()):
        section["summary"], section["figures"], section["table"]

Rows are chosen and sorted here, figures drawn; none is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from workbench.records import TensorRecord

from .heatmap import make_heat_map
from .load import RunFiles
from .tensor_table import make_tensor_table

if TYPE_CHECKING:
    import pandas as pd

WORST_MATRICES = 12
WORST_FUSED = 8
_PAIR = ("first_arm", "second_arm", "second_rule")


class Drawings:
    """Figures of one run by name, drawn once however often the page is made."""

    def __init__(self) -> None:
        self._made: dict[str, Markup] = {}

    def __call__(self, name: str, draw: Callable[[], str]) -> Markup:
        if name not in self._made:
            self._made[name] = Markup(draw())
        return self._made[name]


def make_pairs(files: RunFiles, *, cells: int, metrics: int, draw: Drawings) -> list[dict[str, Any]]:
    """A section per pair of analysis.json. cells: of the heat maps that need no script; metrics: of the table."""
    shown = []
    summaries = (files.analysis or {}).get("pairs", [])
    tensors = _complete(files.tensors)
    gemm = _light(files.gemm)
    for index, pair in enumerate(summaries):
        label = f"{pair['first_arm'] or pair['source_arm']} to {pair['second_arm']}"
        rows, pooled, fused = (_rows_of(frame, pair) for frame in (tensors, _light(files.pooled), _light(files.fused)))
        section: dict[str, Any] = {
            "summary": pair, "label": label, "anchor": f"weights-{index}", "heat_map": None, "figures": [],
            "worst": [], "table": None,
        }  # fmt: skip
        section |= _pooled(pooled) | _fused(fused)
        if rows is not None:
            if cells:
                title = f"{pair['second_arm']}: SQNR of the weights after both quantizations"
                section["heat_map"] = make_heat_map(rows, "sqnr_total_db", title, cells // len(summaries))
            section["worst"] = rows.nsmallest(WORST_MATRICES, "sqnr_total_db").to_dict("records")
            section["table"] = make_tensor_table(rows, gemm, pair["second_arm"], most=metrics)
        section["figures"] = _figures(pair, rows, pooled, label, index, draw)
        shown.append(section)
    return shown


def gemm_arms(files: RunFiles, arms: list[str]) -> list[dict[str, Any]]:
    """A row per arm: its summaries by kind, and under "any" one of them for what they share."""
    rows: dict[str, dict[str, Any]] = {}
    for summary in (files.analysis or {}).get("gemm", []):
        rows.setdefault(summary["arm"], {"any": summary})[summary["kind"]] = summary
    return [rows[arm] for arm in sorted(rows, key=lambda arm: arms.index(arm) if arm in arms else len(arms))]


def gemm_figures(
    files: RunFiles, arms: list[str], colors: Mapping[str, str], draw: Drawings
) -> list[tuple[Markup, str]]:
    """(figure, caption) of the matrix products."""
    from .figures import draw_gemm
    from .weight_figures import draw_coherence

    gemm = _light(files.gemm)
    if gemm is None:
        return []
    figures = {
        "Output SQNR by layer: mean over a layer's matrices; the band is lowest to highest.": draw(
            "gemm", lambda: draw_gemm(gemm, arms)
        ),
        "Coherence gain, matrix by matrix: output SQNR minus the weights' own, activations exact. Zero: the product"
        " averages nothing away.": draw("coherence", lambda: draw_coherence(gemm, colors)),
    }
    return [(svg, caption) for caption, svg in figures.items() if svg]


# ---- one pair --------------------------------------------------------------------------------------------------------


def _figures(
    pair: dict[str, Any], rows: pd.DataFrame | None, pooled: pd.DataFrame | None, label: str, index: int, draw: Drawings
) -> dict[str, list[tuple[Markup, str]]]:
    """(figure, caption) by the question that it answers: how much, where, why."""
    from .figures import draw_correlations, draw_density, draw_phase
    from .weight_figures import draw_causes, draw_depth, draw_predicted

    made: dict[str, list[tuple[str, Callable[[], str], str]]] = {"where": [], "why": [], "wide": []}
    if rows is not None:
        made["where"] = [
            ("depth", lambda: draw_depth(rows, label),
             "SQNR by projection and depth: mean over a layer's matrices, the band from the lowest to the highest."),
        ]  # fmt: skip
        made["why"] = [
            ("predicted", lambda: draw_predicted(rows, label),
             "SQNR after both: measured against what both errors would give if they were uncorrelated. Below the line:"
             " they add up."),
            ("corr", lambda: draw_correlations(rows, label),
             "Correlation of e1 and e2, matrix by matrix; dashed: mean."),
            ("density", lambda: draw_density(pair.get("density"), label),
             "Joint density of both errors, pooled over matrices. A tilt would be correlation; at e2 = 0 lie values"
             " that the second format holds exactly."),
        ]  # fmt: skip
        made["wide"] = [
            ("phase", lambda: draw_phase(rows, label),
             "Scale phase: where the first format's global scale falls between two powers of two."),
        ]  # fmt: skip
    if pooled is not None:
        made["wide"].append(
            ("causes", lambda: draw_causes(pooled, label),
             "What makes both errors, by projection, in parts of each error's power. Scale: rounding the block's scale;"
             " left of zero it helped. Element: the number format with an unrounded scale.")
        )  # fmt: skip
    drawn = {
        group: [
            (draw(f"{name}-{index}", functools.partial(_numbered, make, name, index)), text)
            for name, make, text in entries
        ]
        for group, entries in made.items()
    }
    return {group: [(svg, caption) for svg, caption in entries if svg] for group, entries in drawn.items()}


def _pooled(pooled: pd.DataFrame | None) -> dict[str, Any]:
    """The model's row, a row per projection, and the experts with the lowest SQNR."""
    if pooled is None:
        return {"model": None, "projections": [], "experts": []}
    by_level = {str(level): group for level, group in pooled.groupby("level", sort=False)}
    experts = by_level.get("expert")
    return {
        "model": next(iter(by_level["model"].to_dict("records")), None) if "model" in by_level else None,
        "projections": by_level["projection"].to_dict("records") if "projection" in by_level else [],
        "experts": [] if experts is None else experts.nsmallest(WORST_FUSED, "sqnr_total_db").to_dict("records"),
    }


def _fused(fused: pd.DataFrame | None) -> dict[str, Any]:
    """Matrices that a runtime with one global scale per fused group would decode otherwise; the lowest SQNR first."""
    if fused is None:
        return {"fused": [], "fused_of": 0, "fused_changed": 0}
    changed = fused[(fused["sqnr_merged_largest_db"] != fused["sqnr_first_db"])
                    | (fused["sqnr_merged_first_db"] != fused["sqnr_first_db"])]  # fmt: skip
    changed = changed[changed["sqnr_merged_largest_db"].notna()]
    return {
        "fused": changed.nsmallest(WORST_FUSED, "sqnr_merged_largest_db").to_dict("records"),
        "fused_of": len(fused),
        "fused_changed": len(changed),
    }


def _rows_of(frame: pd.DataFrame | None, pair: dict[str, Any]) -> pd.DataFrame | None:
    if frame is None:
        return None
    chosen = frame
    for key in _PAIR:
        chosen = chosen[chosen[key] == pair[key]]
    return chosen if len(chosen) else None


def _complete(frame: pd.DataFrame | None) -> pd.DataFrame | None:
    """The table with every column of a TensorRecord: those that an older file lacks hold their defaults."""
    frame = _light(frame)
    if frame is None:
        return None
    absent = {f.name: f.default for f in dataclasses.fields(TensorRecord) if f.name not in frame.columns}
    return frame.assign(**{n: math.nan if isinstance(d, float) and math.isnan(d) else d for n, d in absent.items()})


def _light(frame: pd.DataFrame | None) -> pd.DataFrame | None:
    """The table without its metadata, which pandas would copy with every row."""
    if frame is None:
        return None
    frame = frame.copy(deep=False)
    frame.attrs = {}
    return frame


def _numbered(make: Callable[[], str], name: str, index: int) -> str:
    """The figure; those of the second pair need ids of their own."""
    svg = make()
    return svg if index == 0 else svg.replace(f'"{name}-', f'"{name}{index}-').replace(f"#{name}-", f"#{name}{index}-")
