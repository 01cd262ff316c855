"""Figures for papers of answers and serving: scores, paired losses, load time, ratios of latency.

    for figure in draw_answers(files): ...

A figure whose records the run does not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from workbench.records import TaskComparison, TaskScore

from .export_style import BAND, COLORS, HATCHES, PAGE, PaperFigure, bar_legend, grid, legend, mark, page, whisker
from .load import RunFiles

_PARTS = {"read_s": "read", "convert_s": "convert", "rest_s": "rest"}


def draw_answers(files: RunFiles) -> Iterator[PaperFigure]:
    """What the run's evaluations, comparison and serving cost have to show."""
    for draw in (_scores, _losses, _load_time, _latency):
        figure = draw(files)
        if figure is not None:
            yield figure


def _scores(files: RunFiles) -> PaperFigure | None:
    scores = [s for evaluation in files.evaluations.values() for s in evaluation.scores if math.isfinite(s.value)]
    if not scores:
        return None
    arms = [arm for arm in files.arms() if any(s.arm == arm for s in scores)]
    groups = sorted({(not s.primary, s.task, s.filter, s.metric) for s in scores})
    figure, (axes,) = page(PAGE, 0.7 + len(groups) * (0.17 * len(arms) + 0.2))
    ticks, y = [], 0.0
    for secondary, task, name, metric in groups:
        found = [s for s in scores if (s.task, s.filter, s.metric, not s.primary) == (task, name, metric, secondary)]
        start = y
        for s in sorted(found, key=lambda s: arms.index(s.arm)):
            whisker(axes, 100 * s.value, y, 100 * s.low, 100 * s.high, arms.index(s.arm))
            y += 1.0
        ticks.append(((start + y - 1.0) / 2, f"{task}\n{name}, {metric}\n{_n(found)}"))
        y += 1.0
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel("score, % (95 % Wilson interval)")
    grid(axes)
    legend(axes, arms, [mark(i) for i in range(len(arms))], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return PaperFigure(
        "scores",
        "Scores",
        "Scores of every arm with 95 % Wilson intervals, by task and answer filter; n: items.",
        tuple(f"eval/{arm}/scores.json" for arm in arms),
        figure,
    )


def _n(scores: list[TaskScore] | list[TaskComparison]) -> str:
    """ "n = 100", or the range where arms differ; problems beside answers where each was asked several times."""
    counts = sorted({s.n for s in scores})
    shown = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    clusters = {s.clusters for s in scores if s.clusters}
    return f"{shown} of {max(clusters)} problems" if clusters else shown


def _losses(files: RunFiles) -> PaperFigure | None:
    comparison = files.comparison
    tasks = [c for c in comparison.tasks if math.isfinite(c.loss_pp)] if comparison else []
    if comparison is None or not tasks:
        return None
    arms = files.arms() or list(dict.fromkeys(c.candidate for c in tasks))
    candidates = [arm for arm in arms if any(c.candidate == arm for c in tasks)]
    checks = files.verdict.checks if files.verdict else ()
    limits = {(c.name, c.arm): c.limit for c in checks if c.unit == "pp" and math.isfinite(c.limit)}
    groups = sorted({(not c.primary, c.task, c.filter, c.metric) for c in tasks})
    figure, (axes,) = page(PAGE, 0.8 + len(groups) * (0.17 * len(candidates) + 0.2))
    ticks, y, margins = [], 0.0, False
    for _, task, name, metric in groups:
        found = [c for c in tasks if (c.task, c.filter, c.metric) == (task, name, metric)]
        start = y
        for c in sorted(found, key=lambda c: candidates.index(c.candidate)):
            whisker(axes, c.loss_pp, y, c.loss_low_pp, c.loss_high_pp, arms.index(c.candidate))
            limit = limits.get((f"accuracy {task} {name}", c.candidate))
            if limit is not None:
                axes.plot([limit, limit], [y - 0.45, y + 0.45], color="black", lw=1.4)
                margins = True
            y += 1.0
        ticks.append(((start + y - 1.0) / 2, f"{task}\n{name}, {metric}\n{_n(found)}"))
        y += 1.0
    axes.axvline(0, color="black", lw=0.7, ls=":")
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.invert_yaxis()
    axes.set_xlabel(f"loss against {comparison.baseline}, percentage points (right is worse; 95 % interval)")
    grid(axes)
    styles = [mark(arms.index(arm)) for arm in candidates]
    if margins:
        styles.append({"color": "black", "marker": "|", "ms": 9, "mew": 1.4})
    legend(axes, [*candidates, *(["margin"] if margins else [])], styles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    policy = f" (policy {files.verdict.policy})" if margins and files.verdict else ""
    margin = f" Bars: the margin that the arm was judged by{policy}." if margins else ""
    noise = f" {comparison.noise_arm} is {comparison.baseline} again." if comparison.noise_arm else ""
    return PaperFigure(
        "losses",
        "Paired losses",
        f"Loss of every arm against {comparison.baseline} on the same items, with two-sided 95 % intervals of the"
        f" paired difference; n: items of a pair.{margin}{noise}",
        ("comparison.json", *(["verdict.json"] if margins else [])),
        figure,
    )


def _load_time(files: RunFiles) -> PaperFigure | None:
    cost = files.serving_cost
    known = [s for s in cost.starts if all(math.isfinite(getattr(s, part).value) for part in _PARTS)] if cost else []
    arms = list(dict.fromkeys(s.arm for s in known))
    if cost is None or not arms:
        return None
    figure, (axes,) = page(PAGE, 0.8 + 0.34 * len(arms))
    for y, arm in enumerate(arms):
        starts = [s for s in known if s.arm == arm]
        left = 0.0
        for index, part in enumerate(_PARTS):
            value = sum(getattr(s, part).value for s in starts) / len(starts)
            axes.barh(y, value, left=left, height=0.6, color=COLORS[index], hatch=HATCHES[index], edgecolor="white")
            left += value
    axes.set_yticks(range(len(arms)), [f"{arm}\nn = {sum(s.arm == arm for s in known)} starts" for arm in arms])
    axes.invert_yaxis()
    axes.set_xlabel("time to load, s")
    grid(axes)
    bar_legend(axes, list(_PARTS.values()), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return PaperFigure(
        "load_time",
        "Load time",
        "Time to load an arm's model, split into reading from disk, converting number formats and the rest; the mean of"
        f" its starts. {cost.machine}, {cost.cores} cores, {cost.engine_version}.",
        ("serving_cost.json",),
        figure,
    )


def _latency(files: RunFiles) -> PaperFigure | None:
    cost = files.serving_cost
    ratios = [r for r in cost.ratios if math.isfinite(r.ratio)] if cost else []
    if cost is None or not ratios:
        return None
    arms = list(dict.fromkeys(r.arm for r in ratios))
    figure, (axes,) = page(PAGE, 0.9 + 0.2 * len(ratios))
    rows = sorted(ratios, key=lambda r: (r.load, r.figure, arms.index(r.arm)))
    for y, r in enumerate(rows):
        whisker(axes, r.ratio, y, r.low, r.high, arms.index(r.arm))
    margin = rows[0].margin
    if all(r.margin == margin for r in rows):
        axes.axvspan(1 - margin, 1 + margin, color=BAND, lw=0)
    axes.axvline(1, color="black", lw=0.7, ls=":")
    axes.set_yticks(range(len(rows)), [f"{r.figure}, {cost.loads[r.load].name}, n = {r.repeats}" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"times {cost.baseline} (95 % interval; n repeats)")
    grid(axes)
    legend(axes, arms, [mark(i) for i in range(len(arms))], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return PaperFigure(
        "latency",
        "Serving cost",
        f"Latency and throughput over those of {cost.baseline}, paired by repeat: geometric mean with its 95 %"
        f" interval; band: the margin of equivalence. {cost.machine}, {cost.cores} cores, {cost.engine_version}.",
        ("serving_cost.json",),
        figure,
    )
