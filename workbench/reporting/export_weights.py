"""Figures for papers of weights and matrix products: SQNR, correlation, prediction, causes, output noise.

    for figure in draw_weights(files): ...

Drawn from the rows of tensors.parquet and gemm.parquet; a figure whose columns hold nothing finite is left out. Where
there are several pairs (first, second, rule), each has its own figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .export_style import COLORS, COLUMN, HATCHES, MANY, PAGE, PaperFigure, bar_legend, grid, legend, mark, page, slug
from .figures import bin_edges
from .load import RunFiles
from .text import real

if TYPE_CHECKING:
    import pandas as pd

_CAUSES = ("scale", "element", "saturation", "underflow")
_KINDS = {"weight": "weights rounded", "activation": "activations rounded", "both": "both rounded"}
_TENSORS = ("tensors.parquet",)
_GEMM = ("gemm.parquet",)


def draw_weights(files: RunFiles) -> Iterator[PaperFigure]:
    """What the run's analysis has to show."""
    if files.tensors is not None:
        groups = list(files.tensors.groupby(["first_arm", "second_arm", "second_rule"], sort=False))
        for (first, second, rule), rows in groups:
            pair = _Pair(rows, first, second, rule, f"-{slug(f'{first}-{second}-{rule}')}" if len(groups) > 1 else "")
            yield from _pair_figures(pair, _density_of(files, first, second, rule))
    if files.gemm is not None:
        frame = files.gemm[(files.gemm["tokens"] > 0) & np.isfinite(files.gemm["sqnr_db"])]
        arms = [arm for arm in files.arms() if (frame["arm"] == arm).any()] or list(frame["arm"].unique())
        if len(frame):
            yield _output_noise(frame, arms)
        gains = frame[(frame["kind"] == "weight") & np.isfinite(frame["coherence_gain_db"])]
        if len(gains):
            yield _coherence(gains, arms)


class _Pair:
    """The rows of one (first, second, rule). ending: of its figures' names."""

    def __init__(self, rows: pd.DataFrame, first: str, second: str, rule: str, ending: str) -> None:
        self.rows, self.ending, self.first = rows, ending, first
        chain = [name for name in (rows["source_arm"].iloc[0], first, second) if name]
        self.label = " → ".join(chain) + (f" (rule {rule})" if rule else "")
        formats = [rows[f"{which}_format"].mode().iloc[0] for which in ("first", "second")]
        names = {"first": f"after {first} ({formats[0]})", "total": f"after {second} ({formats[1]})",
                 "direct": f"{formats[1]} directly from the source"}  # fmt: skip
        self.sides = {which: name for which, name in names.items() if _some(rows[f"sqnr_{which}_db"])}


def _pair_figures(pair: _Pair, density: dict[str, Any] | None) -> Iterator[PaperFigure]:
    drawn = (
        _by_projection(pair), _by_depth(pair), _correlation(pair), _density(pair, density), _phase(pair),
        _predicted(pair), _attribution(pair),
    )  # fmt: skip
    yield from (figure for figure in drawn if figure is not None)


def _density_of(files: RunFiles, first: str, second: str, rule: str) -> dict[str, Any] | None:
    for summary in (files.analysis or {}).get("pairs", []):
        if (summary["first_arm"], summary["second_arm"], summary["second_rule"]) == (first, second, rule):
            return summary.get("density")
    return None


# ---- weights ---------------------------------------------------------------------------------------------------------


def _by_projection(pair: _Pair) -> PaperFigure | None:
    if not pair.sides:
        return None
    projections = [p for p, _ in sorted(pair.rows.groupby("projection"), key=lambda item: str(item[0]))]
    figure, (axes,) = page(PAGE, 0.9 + 0.24 * len(projections) * len(pair.sides))
    step = 0.8 / len(pair.sides)
    for index, which in enumerate(pair.sides):
        for y, projection in enumerate(projections):
            values = _finite(pair.rows[pair.rows["projection"] == projection][f"sqnr_{which}_db"])
            if len(values):
                box = axes.boxplot(
                    values, positions=[y + (index - (len(pair.sides) - 1) / 2) * step], widths=step * 0.8,
                    orientation="horizontal", whis=(0, 100), patch_artist=True, manage_ticks=False,
                    medianprops={"color": "black"}, boxprops={"lw": 0.7},
                )  # fmt: skip
                box["boxes"][0].set(facecolor=COLORS[index], hatch=HATCHES[index], alpha=0.75)
    counts = pair.rows["projection"].value_counts()
    axes.set_yticks(range(len(projections)), [f"{p}\nn = {counts[p]}" for p in projections])
    axes.invert_yaxis()
    axes.set_xlabel("SQNR of a weight matrix, dB")
    grid(axes)
    bar_legend(figure, list(pair.sides.values()), loc="outside upper center", ncols=len(pair.sides))
    return _figure(
        "sqnr_by_projection", "SQNR by projection", pair, figure,
        "SQNR against the source by kind of matrix: median, quartiles, and whiskers from the smallest to the largest;"
        " n: matrices.",
    )  # fmt: skip


def _by_depth(pair: _Pair) -> PaperFigure | None:
    rows = pair.rows[pair.rows["layer"] >= 0]
    if not pair.sides or not len(rows):
        return None
    figure, (axes,) = page(PAGE, 2.6)
    for index, which in enumerate(pair.sides):
        stats = rows[np.isfinite(rows[f"sqnr_{which}_db"])].groupby("layer")[f"sqnr_{which}_db"]
        table = stats.agg(["mean", "min", "max"])
        axes.fill_between(table.index, table["min"], table["max"], color=COLORS[index], alpha=0.18, lw=0)
        axes.plot(table.index, table["mean"], ms=3.5, lw=1.2, **mark(index))
    axes.set_xlabel(f"layer (n = {len(rows)} matrices)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("SQNR, dB")
    grid(axes, "y")
    styles = [{**mark(i), "ls": "-"} for i in range(len(pair.sides))]
    legend(figure, list(pair.sides.values()), styles, loc="outside upper center", ncols=len(pair.sides))
    return _figure(
        "sqnr_by_depth", "SQNR by depth", pair, figure,
        "SQNR against the source by layer: mean over the layer's matrices; band: from the smallest to the largest.",
    )  # fmt: skip


def _correlation(pair: _Pair) -> PaperFigure | None:
    values = _finite(pair.rows["corr_e1_e2"])
    if not len(values):
        return None
    figure, (axes,) = page(COLUMN, 2.4)
    axes.hist(values, bins=bin_edges(values), color=COLORS[0], edgecolor="white", lw=0.4)
    axes.axvline(0, color="black", lw=0.8, ls=":")
    axes.axvline(float(np.mean(values)), color=COLORS[1], lw=1.4, ls="--")
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(f"corr(e1, e2) (n = {len(values)} matrices)")
    axes.set_ylabel("matrices")
    return _figure(
        "correlation", "Correlation of both errors", pair, figure,
        "Pearson correlation of the first and the second error, matrix by matrix; dashed: their mean.",
    )  # fmt: skip


def _density(pair: _Pair, density: dict[str, Any] | None) -> PaperFigure | None:
    counts = np.array((density or {}).get("counts") or [[0]], dtype=np.float64)
    if counts.sum() == 0:
        return None
    from matplotlib.colors import LogNorm

    limit = real((density or {})["limit"])
    figure, (axes,) = page(COLUMN, 2.8)
    cells = np.where(counts.T > 0, counts.T, np.nan)
    image = axes.imshow(
        cells, origin="lower", extent=(-limit, limit, -limit, limit), interpolation="nearest", cmap="cividis",
        norm=LogNorm(vmin=1, vmax=max(2.0, counts.max())),
    )  # fmt: skip
    bar = figure.colorbar(image, ax=axes, shrink=0.8, format=lambda count, _: f"{count:g}")
    bar.set_label("weights in a bin")
    axes.set_xlabel(f"e1 / rms(e1) (n = {int(counts.sum()):,} weights)")
    axes.set_ylabel("e2 / rms(e2)")
    return _figure(
        "density", "Joint density of both errors", pair, figure,
        "Counts of weights over the first and the second error, each over its matrix's rms; a sample of each matrix's"
        " weights, summed over matrices. Colour is logarithmic; white: none.",
        sources=("analysis.json",),
    )  # fmt: skip


def _phase(pair: _Pair) -> PaperFigure | None:
    if "scale_phase" not in pair.rows:
        return None
    rows = pair.rows[np.isfinite(pair.rows["scale_phase"]) & np.isfinite(pair.rows["sqnr_total_db"])]
    sides = {which: name for which, name in pair.sides.items() if which in ("first", "total")}
    if not len(rows):
        return None
    figure, (axes,) = page(COLUMN, 2.8)
    for index, which in enumerate(pair.sides):
        if which in sides:
            axes.scatter(
                rows["scale_phase"], rows[f"sqnr_{which}_db"], s=9, lw=0, alpha=0.7, rasterized=len(rows) > MANY,
                **mark(index),
            )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"frac(log2(global scale)) (n = {len(rows)} matrices)")
    axes.set_ylabel("SQNR, dB")
    grid(axes, "y")
    styles = [mark(list(pair.sides).index(which)) for which in sides]
    legend(figure, list(sides.values()), styles, loc="outside upper center")
    return _figure(
        "scale_phase", "SQNR against scale phase", pair, figure,
        "SQNR of a matrix against where the first format's global scale falls between two powers of two.",
    )  # fmt: skip


def _predicted(pair: _Pair) -> PaperFigure | None:
    names = {"quadrature": "uncorrelated errors", "linear": "with the measured cross term"}
    rows = pair.rows[np.isfinite(pair.rows["sqnr_total_db"])]
    columns = {kind: f"sqnr_total_predicted_{kind}_db" for kind in names}
    columns = {kind: column for kind, column in columns.items() if _some(rows[column])}
    if not columns:
        return None
    figure, (axes,) = page(COLUMN, 2.9)
    for index, column in enumerate(columns.values()):
        axes.scatter(
            rows[column], rows["sqnr_total_db"], s=10, lw=0, alpha=0.7, rasterized=len(rows) > MANY, **mark(index)
        )
    ends = _finite(rows[["sqnr_total_db", *columns.values()]])
    axes.plot([ends.min(), ends.max()], [ends.min(), ends.max()], color="black", lw=0.8, ls=":")
    axes.set_xlabel("predicted SQNR, dB")
    axes.set_ylabel(f"measured SQNR, dB (n = {len(rows)} matrices)")
    grid(axes, "both")
    legend(
        figure, [names[kind] for kind in columns], [mark(i) for i in range(len(columns))], loc="outside upper center"
    )
    return _figure(
        "predicted", "Predicted against measured SQNR", pair, figure,
        "SQNR after both quantizations against two predictions from its parts: powers of both errors added, and with"
        " 2 mean(e1 e2) as well (exact up to rounding). Dotted: equality.",
    )  # fmt: skip


def _attribution(pair: _Pair) -> PaperFigure | None:
    """Shares of the error's power: the rows' parts and powers, each weighted by its matrix's size."""
    weights = pair.rows["rows"] * pair.rows["columns"] * pair.rows.get("sample_weight", 1.0)
    bars: dict[str, list[tuple[str, int, list[float]]]] = {}
    for which, power in (("first", "power_e1"), ("second", "power_e2" if pair.first else "power_total")):
        parts = [f"{which}_error_{cause}" for cause in _CAUSES]
        if not set(parts) <= set(pair.rows):
            continue
        known = np.isfinite(pair.rows[[*parts, power]]).all(axis=1)
        for projection, group in pair.rows[known].groupby("projection"):
            w = weights[group.index]
            total = float((group[power] * w).sum())
            if total > 0:
                shares = [100 * float((group[part] * w).sum()) / total for part in parts]
                bars.setdefault(which, []).append((str(projection), len(group), shares))
    if not bars:
        return None
    depth = max(len(rows) for rows in bars.values())
    figure, grid_axes = page(PAGE, 1.0 + 0.32 * depth, columns=len(bars), sharex=True)
    for axes, (which, rows) in zip(grid_axes, bars.items(), strict=True):
        for y, (_, _, shares) in enumerate(rows):
            right = left = 0.0
            for index, share in enumerate(shares):
                start = right if share >= 0 else left
                axes.barh(
                    y, share, left=start, height=0.62, color=COLORS[index], hatch=HATCHES[index], edgecolor="white",
                    lw=0.3,
                )  # fmt: skip
                right, left = (right + share, left) if share >= 0 else (right, left + share)
        axes.axvline(0, color="black", lw=0.7)
        axes.set_yticks(range(len(rows)), [f"{name}\nn = {n}" for name, n, _ in rows])
        axes.invert_yaxis()
        axes.set_title(f"{which} error")
        axes.set_xlabel("share of its power, %")
        grid(axes)
    bar_legend(figure, _CAUSES, loc="outside upper center", ncols=len(_CAUSES))
    return _figure(
        "attribution", "Causes of both errors", pair, figure,
        "Power of the first and the second error by cause, weighted by matrix size; n: matrices. Element: what the"
        " element format makes with an unrounded scale; scale: what rounding it adds, left of 0 where it helped.",
    )  # fmt: skip


# ---- matrix products -------------------------------------------------------------------------------------------------


def _output_noise(frame: pd.DataFrame, arms: list[str]) -> PaperFigure:
    kinds = [kind for kind in _KINDS if (frame["kind"] == kind).any()]
    figure, panels = page(max(COLUMN, min(PAGE, 0.8 + 2.1 * len(arms))), 2.7, columns=len(arms), sharey=True)
    for axes, arm in zip(panels, arms, strict=True):
        rows = frame[frame["arm"] == arm]
        for index, kind in enumerate(kinds):
            table = rows[rows["kind"] == kind].groupby("layer")["sqnr_db"].agg(["mean", "min", "max"])
            axes.fill_between(table.index, table["min"], table["max"], color=COLORS[index], alpha=0.15, lw=0)
            axes.plot(table.index, table["mean"], ms=3.2, lw=1.1, **mark(index))
        axes.set_title(arm)
        axes.set_xlabel(f"layer (n = {rows['name'].nunique()} matrices)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        grid(axes, "y")
    panels[0].set_ylabel("output SQNR, dB")
    styles = [{**mark(i), "ls": "-"} for i in range(len(kinds))]
    legend(figure, [_KINDS[kind] for kind in kinds], styles, loc="outside upper center", ncols=len(kinds))
    inputs = " and ".join(sorted(frame["activations"].unique()))
    return PaperFigure(
        "output_noise",
        "Output noise of matrix products",
        f"SQNR of y = x Wᵀ by layer, {inputs} inputs: mean over the layer's matrices; band: from the smallest to the"
        " largest.",
        _GEMM,
        figure,
    )


def _coherence(gains: pd.DataFrame, arms: list[str]) -> PaperFigure:
    arms = [arm for arm in arms if (gains["arm"] == arm).any()]
    figure, (axes,) = page(PAGE, 0.8 + 0.4 * len(arms))
    groups = [_finite(gains[gains["arm"] == arm]["coherence_gain_db"]) for arm in arms]
    boxes = axes.boxplot(
        groups, orientation="horizontal", whis=(0, 100), widths=0.55, patch_artist=True,
        medianprops={"color": "black"}, boxprops={"lw": 0.7},
    )  # fmt: skip
    for index, box in enumerate(boxes["boxes"]):
        box.set(facecolor=COLORS[index % len(COLORS)], hatch=HATCHES[index % len(HATCHES)], alpha=0.75)
    axes.axvline(0, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(1, len(arms) + 1), [f"{arm}\nn = {len(g)}" for arm, g in zip(arms, groups, strict=True)])
    axes.invert_yaxis()
    axes.set_xlabel("coherence gain: output SQNR - the weights' own SQNR, dB")
    grid(axes)
    return PaperFigure(
        "coherence_gain",
        "Coherence gain",
        "Output SQNR of a matrix product with quantized weights and exact inputs, minus the SQNR of the weights:"
        " median, quartiles, and whiskers from the smallest to the largest; n: matrices. 0: nothing is averaged away.",
        _GEMM,
        figure,
    )


def _figure(
    name: str, title: str, pair: _Pair, figure: Any, caption: str, sources: tuple[str, ...] = _TENSORS
) -> PaperFigure:
    return PaperFigure(name + pair.ending, title, f"{pair.label}. {caption}", sources, figure)


def _some(column: pd.Series) -> bool:
    return bool(np.isfinite(column.to_numpy(np.float64)).any())


def _finite(column: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = column.to_numpy(np.float64)
    return values[np.isfinite(values)]
