"""Figures of paired losses, of errors by depth and cause, of predictions and of coherence gain; as in `figures`.

Every function takes rows of a record's table (or records) and returns an SVG string, "" where there is nothing to draw.
Lines are means over a layer's matrices, bands go from the lowest to the highest: display only, no figure of a record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import ARM_COLORS, INK, MAX_POINTS, MUTED, as_label, new_figure, new_handle, to_svg

if TYPE_CHECKING:
    import pandas as pd

STAGES = {  # column of tensors.parquet: (label, colour, line)
    "sqnr_first_db": ("first alone", "#228833", "-"),
    "sqnr_direct_db": ("second directly", "#b8860b", "--"),
    "sqnr_total_db": ("after both", "#4f86c6", "-"),
}
CAUSES = {"element": "#4f86c6", "scale": "#ee6677", "saturation": "#b8860b", "underflow": "#66ccee"}
_USUAL = ("gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj")
_MOST_PANELS = 12


def draw_losses(sight: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> str:
    """Each arm's paired loss with its 95 % interval, the one-sided upper bound as a tick, and the margin it is held to.

    sight: rows of the context's `sight` (comparison, check).
    """
    if not sight:
        return ""
    figure, axes = new_figure(7.4, 0.75 + 0.3 * len(sight))
    labels = []
    for y, row in enumerate(sight):
        c, check = row["comparison"], row["check"]
        color = colors.get(c.candidate, ARM_COLORS[0])
        labels.append(as_label(f"{c.candidate}, {c.task}"))
        if math.isfinite(c.loss_low_pp) and math.isfinite(c.loss_high_pp):
            axes.plot([c.loss_low_pp, c.loss_high_pp], [y, y], color=color, lw=2.2, solid_capstyle="butt")
        axes.plot([c.loss_pp], [y], "o", ms=5.5, color=color)
        axes.plot([c.loss_upper95_pp], [y], "|", ms=11, mew=1.6, color=color)
        if check is not None and math.isfinite(check.limit):
            axes.plot([check.limit] * 2, [y - 0.42, y + 0.42], color=INK, lw=1.3, ls=(0, (2, 1.4)))
    axes.axvline(0, color=MUTED, lw=0.9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("loss in percentage points; to the right is worse")
    axes.grid(axis="x", color=MUTED, alpha=0.25, lw=0.6)
    return to_svg(figure, "Paired loss of every judged arm with its interval and margin", "losses")


def draw_divergences(divergences: Sequence[Any], gemm: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> str:
    """Measured KL divergence of every arm (lower bound of the mean) against what its matrix products predict.

    divergences: `Divergence` records. gemm: rows of analysis.json. The prediction: in proportion to the products' mean
    relative noise, through the arm with the least of it.
    """
    noise: dict[str, float] = {}
    for kind in ("weight", "both"):  # the latter where inputs are rounded too
        noise |= {row["arm"]: 10 ** (-row["sqnr_db"]["mean"] / 10) for row in gemm if row["kind"] == kind}
    shown = [d for d in divergences if math.isfinite(noise.get(d.arm, math.nan)) and d.mean.lower > 0]
    if len(shown) < 2:
        return ""
    figure, axes = new_figure(4.6, 3.0)
    least = min(shown, key=lambda d: noise[d.arm])
    slope, end = least.mean.lower / noise[least.arm], 1.1 * max(noise[d.arm] for d in shown)
    axes.plot([0, 100 * end], [0, slope * end], color=MUTED, lw=1.0, ls="--")
    for d in shown:
        low, high = d.mean.lower_ci_low, d.mean.lower_ci_high
        color = colors.get(d.arm, ARM_COLORS[0])
        if math.isfinite(low) and math.isfinite(high):
            axes.plot([100 * noise[d.arm]] * 2, [low, high], color=color, lw=1.6)
        axes.plot(100 * noise[d.arm], d.mean.lower, "o", ms=5, color=color)
        axes.annotate(
            as_label(d.arm),
            (100 * noise[d.arm], d.mean.lower),
            (6, -9),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    axes.set_xlim(0, 100 * end * 1.25)
    axes.set_ylim(0)
    axes.set_xlabel("output noise of the matrix products, % of their power")
    axes.set_ylabel("KL divergence, nats")
    return to_svg(figure, "Measured KL divergence against the matrix products' noise", "divergences")


def draw_depth(rows: pd.DataFrame, label: str) -> str:
    """SQNR by layer, a panel per projection on one scale."""
    shown = {key: stage for key, stage in STAGES.items() if np.isfinite(rows[key]).any()}
    rows = rows[rows["layer"] >= 0]
    if not shown or not len(rows):
        return ""
    panels = sorted(rows.groupby(["projection", "shared_expert"]), key=lambda item: _rank(*item[0]))[:_MOST_PANELS]
    columns = min(3, len(panels))
    figure, grid = new_figure(
        1.0 + 2.3 * columns, 0.6 + 1.75 * math.ceil(len(panels) / columns), columns, math.ceil(len(panels) / columns)
    )
    for axes, ((projection, shared), group) in zip(grid, panels, strict=False):
        for key, (_, color, line) in shown.items():
            finite = group[np.isfinite(group[key])]
            stats = finite.groupby("layer")[key].agg(["mean", "min", "max"])
            if key == "sqnr_total_db":
                axes.fill_between(stats.index, stats["min"], stats["max"], color=color, alpha=0.18, lw=0)
            marker = "o" if len(stats) <= 12 else ""
            axes.plot(stats.index, stats["mean"], color=color, ls=line, lw=1.4, marker=marker, ms=2.6)
        axes.set_title(as_label(f"{projection}{' (shared)' if shared else ''}"), fontsize=8.5, color=INK)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color=MUTED, alpha=0.25, lw=0.6)
        axes.set_xlabel("layer")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("SQNR, dB")
    figure.legend(
        handles=[new_handle(color, line) for _, color, line in shown.values()],
        labels=[name for name, _, _ in shown.values()], loc="outside upper center", ncols=3, frameon=False,
        fontsize=8, labelcolor=INK,
    )  # fmt: skip
    return to_svg(figure, f"SQNR by projection and depth, {label}", "depth")


def draw_predicted(rows: pd.DataFrame, label: str) -> str:
    """SQNR after both, measured against the prediction from both errors as if they were uncorrelated."""
    x, y = (rows[f"sqnr_total_{what}db"].to_numpy(np.float64) for what in ("predicted_quadrature_", ""))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if not len(x):
        return ""
    x, y = (values[:: math.ceil(len(x) / MAX_POINTS)] for values in (x, y))
    figure, axes = new_figure(3.5, 3.3)
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    pad = 0.04 * (high - low) or 0.1
    axes.plot([low - pad, high + pad], [low - pad, high + pad], color=MUTED, lw=0.9)
    axes.scatter(x, y, s=9, color=ARM_COLORS[0], alpha=0.75, lw=0)
    axes.set_xlabel("predicted (quadrature), dB")
    axes.set_ylabel("measured, dB")
    axes.locator_params(nbins=5)
    return to_svg(figure, f"Measured SQNR against the prediction, {label}", "predicted")


def draw_causes(pooled: pd.DataFrame, label: str) -> str:
    """Parts of both errors' power by cause, a bar per projection and error; as shares of that power."""
    groups = pooled[pooled["level"] == "projection"]
    bars = []
    for row in sorted(groups.to_dict("records"), key=lambda r: _rank(r["projection"], bool(r["shared_expert"]))):
        name = as_label(f"{row['projection']}{' (shared)' if row['shared_expert'] else ''}")
        for arm, power in (("first", "power_e1"), ("second", "power_e2")):
            parts = [row[f"{arm}_error_{cause}"] for cause in CAUSES]
            if all(map(math.isfinite, parts)) and row[power] > 0:
                bars.append((f"{name}, {'e1' if arm == 'first' else 'e2'}", [100 * p / row[power] for p in parts]))
    bars = bars[: 2 * _MOST_PANELS]
    if not bars:
        return ""
    figure, axes = new_figure(7.4, 0.85 + 0.22 * len(bars))
    for y, (_, parts) in enumerate(bars):
        right = left = 0.0  # a scale that rounding helped is a part below zero
        for part, color in zip(parts, CAUSES.values(), strict=True):
            axes.barh(y, part, left=right if part >= 0 else left, height=0.72, color=color, lw=0)
            right, left = (right + part, left) if part >= 0 else (right, left + part)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("share of the error's power, %")
    figure.legend(
        handles=[new_handle(color, marker="s") for color in CAUSES.values()], labels=list(CAUSES),
        loc="outside upper center", ncols=4, frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip
    return to_svg(figure, f"Causes of both errors by projection, {label}", "causes")


def draw_coherence(gemm: pd.DataFrame, colors: Mapping[str, str]) -> str:
    """Coherence gain of every matrix product by layer, a colour per arm; zero: the product averages nothing away."""
    rows = gemm[(gemm["kind"] == "weight") & np.isfinite(gemm["coherence_gain_db"])]
    arms = [arm for arm in colors if (rows["arm"] == arm).any()]
    if not arms:
        return ""
    figure, axes = new_figure(7.4, 2.7)
    for place, arm in enumerate(arms):
        chosen = rows[rows["arm"] == arm]
        chosen = chosen.iloc[:: math.ceil(len(chosen) / MAX_POINTS)]
        shift = 0.22 * (place - (len(arms) - 1) / 2)  # arms beside each other within a layer
        axes.scatter(
            chosen["layer"] + shift, chosen["coherence_gain_db"], s=9, color=colors[arm], alpha=0.75, lw=0, label=arm
        )
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xlabel("layer")
    axes.set_ylabel("coherence gain, dB")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(
        handles=[new_handle(colors[arm], marker="o") for arm in arms], labels=[as_label(arm) for arm in arms],
        loc="outside upper center",
        ncols=min(4, len(arms)), frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip
    return to_svg(figure, "Coherence gain of the matrix products by layer", "coherence")


def _rank(projection: str, shared: bool) -> tuple[bool, int, str]:
    return shared, _USUAL.index(projection) if projection in _USUAL else len(_USUAL), projection
