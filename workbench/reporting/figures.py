"""Figures as inline SVG that follow the page's colours: matplotlib draws, sentinel colours become CSS variables.

Every function returns an SVG string, or "" where there is nothing to draw. Output is deterministic (fixed ids, no
date), text stays text, and each figure stays within a few tens of KiB: dense data is drawn as a small embedded image.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .text import clip, real, visible

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.records import TaskScore

INK, MUTED = "#010203", "#040506"  # replaced by var(--ink) and var(--muted)
ARM_COLORS = ("#4f86c6", "#ee6677", "#228833", "#b8860b", "#66ccee", "#aa3377", "#888888")  # readable on light and dark
MAX_POINTS = 400
_LONGEST_LABEL = 60  # characters of a name in a figure


def arm_colors(arms: Sequence[str]) -> dict[str, str]:
    """A colour per arm, the same in every figure."""
    return {arm: ARM_COLORS[i % len(ARM_COLORS)] for i, arm in enumerate(arms)}


def draw_scores(scores: Sequence[TaskScore], colors: Mapping[str, str]) -> str:
    """Scores with their 95 % intervals: a group of whiskers per (task, filter), a whisker per arm."""
    groups = list(dict.fromkeys((s.task, s.filter) for s in scores))
    arms = [arm for arm in colors if any(s.arm == arm for s in scores)]
    if not groups:
        return ""
    height = 0.55 + sum(0.2 * len(arms) + 0.3 for _ in groups)
    figure, axes = new_figure(7.4, height)
    y, ticks = 0.0, []
    for task, name in groups:
        start = y
        for arm in arms:
            for s in (s for s in scores if (s.task, s.filter, s.arm) == (task, name, arm)):
                low, high = max(0.0, s.value - s.low), max(0.0, s.high - s.value)
                axes.errorbar(
                    100 * s.value, y, xerr=[[100 * low], [100 * high]], fmt="o", ms=4, lw=1.4, capsize=2.5,
                    color=colors[arm],
                )  # fmt: skip
            y += 1.0
        ticks.append(((start + y - 1.0) / 2, as_label(f"{task}\n{name}")))
        y += 1.2
    axes.set_yticks([t for t, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel("score in %, 95 % Wilson interval")
    axes.grid(axis="x", color=MUTED, alpha=0.25, lw=0.6)
    _legend(axes, {arm: colors[arm] for arm in arms}, marker="o")
    return to_svg(figure, "Scores of every arm with 95 % intervals", "scores")


def draw_density(density: Mapping[str, Any] | None, label: str) -> str:
    """The joint density of e1 and e2, each over its matrix's rms; stronger is denser."""
    counts = np.array((density or {}).get("counts") or [[0]], dtype=np.float64)
    if counts.sum() == 0:
        return ""
    limit = real((density or {})["limit"])
    figure, axes = new_figure(3.5, 3.3)
    shade = np.sqrt(counts.T / np.quantile(counts, 0.995)).clip(0, 1)
    image = np.zeros((*shade.shape, 4))
    image[..., :3] = (0x4F / 255, 0x86 / 255, 0xC6 / 255)
    image[..., 3] = shade
    axes.imshow(image, origin="lower", extent=(-limit, limit, -limit, limit), interpolation="nearest")
    axes.axhline(0, color=MUTED, lw=0.6)
    axes.axvline(0, color=MUTED, lw=0.6)
    axes.set_xlabel("e1 / rms(e1)")
    axes.set_ylabel("e2 / rms(e2)")
    return to_svg(figure, f"Joint density of the first and second error, {label}", "density")


def draw_correlations(frame: pd.DataFrame, label: str) -> str:
    """Histogram of corr(e1, e2) over matrices."""
    values = _finite(frame["corr_e1_e2"])
    if not len(values):
        return ""
    figure, axes = new_figure(3.5, 3.3)
    axes.hist(values, bins=bin_edges(values), color=ARM_COLORS[0], alpha=0.85)
    axes.axvline(0, color=INK, lw=0.8)
    axes.axvline(float(np.mean(values)), color=ARM_COLORS[1], lw=1.4, ls="--")
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("corr(e1, e2)")
    axes.set_ylabel("matrices")
    return to_svg(figure, f"Histogram of the correlation of e1 and e2, {label}", "corr")


def bin_edges(values: np.ndarray) -> np.ndarray:
    """Edges of a histogram of finite values, the root of their number in bins, 8 to 40.

    Values that differ by rounding alone (a correlation of -1 in every matrix) have no bins between them: one bar.
    """
    low, high = float(np.min(values)), float(np.max(values))
    nothing = 1e-6 * max(1.0, abs(low), abs(high))
    if high - low < nothing:
        middle = (low + high) / 2
        low, high = middle - 1e4 * nothing, middle + 1e4 * nothing
    return np.linspace(low, high, min(40, max(8, math.ceil(math.sqrt(len(values))))) + 1)


def draw_phase(frame: pd.DataFrame, label: str) -> str:
    """corr(e1, e2) and the SQNR after both against the octave phase of the first format's global scale."""
    rows = frame[np.isfinite(frame["scale_phase"]) & frame["corr_e1_e2"].notna()]
    if not len(rows):
        return ""
    rows = rows.iloc[:: math.ceil(len(rows) / MAX_POINTS)]
    figure, grid = new_figure(7.4, 2.9, columns=2, sharey=False)
    for axes, column, color in zip(grid, ("corr_e1_e2", "sqnr_total_db"), ARM_COLORS, strict=False):
        axes.scatter(rows["scale_phase"], rows[column], s=9, color=color, alpha=0.75, lw=0)
        axes.set_xlim(0, 1)
        axes.set_xlabel("scale phase: fractional part of log2(global scale)")
    grid[0].axhline(0, color=INK, lw=0.8)
    grid[0].set_ylabel("corr(e1, e2)")
    grid[1].set_ylabel("SQNR after both, dB")
    return to_svg(figure, f"Correlation of e1 and e2, and SQNR, against the global scale's phase, {label}", "phase")


def draw_gemm(frame: pd.DataFrame, arms: Sequence[str]) -> str:
    """Output SQNR per layer, a panel per arm: weight-only and weight + activation (mean, minimum to maximum)."""
    frame = frame[(frame["tokens"] > 0) & np.isfinite(frame["sqnr_db"])]
    arms = [arm for arm in arms if (frame["arm"] == arm).any()]
    if not arms:
        return ""
    figure, grid = new_figure(1.2 + 2.3 * len(arms), 2.9, columns=len(arms))
    kinds = {"weight": (ARM_COLORS[0], "o"), "both": (ARM_COLORS[1], "s")}
    for axes, arm in zip(grid, arms, strict=True):
        rows = frame[frame["arm"] == arm]
        for kind, (color, marker) in kinds.items():
            stats = rows[rows["kind"] == kind].groupby("layer")["sqnr_db"].agg(["mean", "min", "max"])
            axes.fill_between(stats.index, stats["min"], stats["max"], color=color, alpha=0.15, lw=0)
            axes.plot(stats.index, stats["mean"], color=color, marker=marker, ms=3.5, lw=1.3)
        weights = rows[rows["kind"] == "weight"]
        weights = weights[np.isfinite(weights["weight_sqnr_db"])].groupby("layer")["weight_sqnr_db"].mean()
        axes.plot(weights.index, weights, color=INK, lw=1.0, ls="--")
        axes.set_title(as_label(arm), fontsize=9, color=INK)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color=MUTED, alpha=0.25, lw=0.6)
    grid[0].set_ylabel("SQNR, dB")
    names = {"weights rounded": ARM_COLORS[0], "weights and activations": ARM_COLORS[1], "the weights' own SQNR": INK}
    figure.legend(
        handles=[new_handle(color, "--" if color == INK else "-") for color in names.values()],
        labels=list(names), loc="outside upper center", ncols=3, frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip
    return to_svg(figure, "Output SQNR of the matrix products by layer", "gemm")


# ---- matplotlib ------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float, columns: int = 0, rows: int = 1, sharey: bool = True) -> tuple[Any, Any]:
    """A figure and its axes (a list of axes where `columns` is given), in the page's colours.

    width, height: inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    grid = figure.subplots(rows, max(1, columns), sharey=sharey, squeeze=False).ravel()
    for axes in grid:
        axes.patch.set_alpha(0)
        axes.tick_params(colors=INK, labelsize=8)
        axes.xaxis.label.set(color=INK, size=8.5)
        axes.yaxis.label.set(color=INK, size=8.5)
        for side, spine in axes.spines.items():
            spine.set_color(MUTED)
            spine.set_visible(side in ("left", "bottom"))
    return figure, list(grid) if columns else grid[0]


def as_label(name: str) -> str:
    """A name of an arm, a task or a projection as text of a figure: short, nothing hidden in it, no formula."""
    return "\n".join(visible(clip(line, _LONGEST_LABEL)) for line in name.split("\n")).replace("$", "\\$")


def new_handle(color: str, style: str = "-", marker: str = "") -> Any:
    """A legend's line or marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, ls="" if marker else style, marker=marker, ms=4)


def _legend(axes: Axes, colors: Mapping[str, str], marker: str) -> None:
    axes.legend(
        handles=[new_handle(color, marker=marker) for color in colors.values()],
        labels=[as_label(name) for name in colors], frameon=False, fontsize=8, labelcolor=INK, loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip


def to_svg(figure: Figure, title: str, salt: str) -> str:
    """The figure as an <svg> element: themed, titled, scaled by its box, without a date."""
    import matplotlib
    from markupsafe import escape

    settings = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has the fonts
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width = float(re.search(r'width="([\d.]+)pt"', svg).group(1))  # type: ignore[union-attr]
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = svg.replace(INK, "var(--ink)").replace(MUTED, "var(--muted)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--sans)", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    svg = svg.replace("<svg ", f'<svg role="img" style="max-width:{width * 4 / 3:.0f}px" ', 1)
    svg = re.sub(r"(<svg [^>]*>)", lambda m: f"{m.group(1)}<title>{escape(visible(title))}</title>", svg, count=1)
    return _shorten(_unique_ids(svg, salt))


def _shorten(svg: str) -> str:
    """The same figure in a third of the text: coordinates to a tenth of a point, a style once for a run of markers."""
    svg = re.sub(r">\s+<", "><", svg).replace("xlink:href=", "href=")
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{2,}", _rounded, tag.group()), svg)
    marker = r'<use href="[^"]+" x="[^"]+" y="[^"]+"(?P<style> style="[^"]+")/>'
    run = re.compile(rf"{marker}(?:<use [^>]*(?P=style)/>)+")
    return run.sub(lambda m: f"<g{m['style']}>{m.group().replace(m['style'], '')}</g>", svg)


def _rounded(found: re.Match[str]) -> str:
    value = float(found.group())
    return f"{value:.1f}".removesuffix(".0") if value >= 2 else f"{value:.3f}".rstrip("0").removesuffix(".")


def _unique_ids(svg: str, prefix: str) -> str:
    """Ids of several figures in one page must not clash."""
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)


def _finite(column: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = column.to_numpy(np.float64)
    return values[np.isfinite(values)]
