"""`build_index(Path("reports"))`: a page that lists all runs below a folder, with trends of their key figures.

    path = build_index(Path("reports"))              # reports/index.html

Damaged and unfinished runs are listed as such. A trend joins runs of one experiment and model, arm by arm, in the order
of their start; the line breaks where two neighbours were not taken under the same settings (task data, machine, engine,
source checkpoint). Tables of single matrices are not read, so that a folder of many runs is listed in seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from workbench.errors import ConfigError
from workbench.records import write_text

from .comparable import (
    Setting,
    comparable,
    machine_setting,
    settings_of,
    task_setting,
    weight_setting,
)
from .context import VERDICTS
from .fitting import draw_fitting
from .load import RunFiles, is_run, load_run
from .pages import relative_link, render_page, when
from .text import interval, number, percent, real, seconds

INDEX = "index.html"
DEEPEST = 5  # folders below the root
_CONFIGS = ("config.yaml", "manifest.json", "verdict.json", "comparison.json", "analysis.json")
_WIDTH, _HEIGHT, _EDGE = 120, 28, 4
_LAST = ' class="last"'


@dataclass(frozen=True, slots=True)
class Point:
    """One run's value of a trend. note: its interval, as text."""

    run: int
    value: float
    text: str
    setting: Setting
    note: str = ""


@dataclass(slots=True)
class Trend:
    """One figure of one arm over the runs of an experiment, oldest first. breaks: before which points the line ends."""

    arm: str
    figure: str
    points: list[Point] = field(default_factory=list)

    @property
    def breaks(self) -> list[int]:
        pairs = enumerate(pairwise(self.points), start=1)
        return [i for i, (a, b) in pairs if not comparable(a.setting, b.setting, same_run=False)]

    @property
    def sparkline(self) -> Markup:
        return draw_sparkline([p.value for p in self.points], self.breaks, f"{self.figure} of {self.arm}")


@dataclass(frozen=True, slots=True)
class Line:
    """One run in the list. state: "finished", "unfinished" or "damaged", and why. figures: by arm."""

    folder: str
    link: str
    experiment: str
    model: str
    started: str
    duration_s: float
    status: str
    mark: str
    word: str
    headline: str
    state: str
    why: str
    figures: dict[str, list[str]]


def build_index(root: Path, out: Path | None = None) -> Path:
    """Write the page (default: root/index.html) and return its path.

    Raises ConfigError when `root` is no folder, or none that may be read; OutputError when the page cannot be written.
    """
    out = root / INDEX if out is None else out
    write_text(out, render_index(root, lambda run: _beside(run / "report.html", out)))
    return out


def _beside(report: Path, out: Path) -> str:
    return relative_link(report, out) if report.is_file() else ""


def render_index(root: Path, link_to: Any) -> str:
    """The page's text. link_to(run folder): the link to its report ("": there is none)."""
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder", fix="give the folder that the runs lie in, e.g. reports")
    runs = [draw_fitting(load_run(folder, tables=False), _everything)[0] for folder in find_runs(root)]
    runs.sort(key=lambda files: (_started(files), str(files.run_dir)))
    return render_page("index.html", make_index(runs, root, link_to))


def _everything(files: RunFiles) -> Any:
    return _line(files, files.run_dir, lambda run: ""), list(_figures(0, files))


def find_runs(root: Path) -> list[Path]:
    """Run folders at and below `root`, at most 5 deep. Links are not followed, and no run is looked for in a run."""
    found: list[Path] = []
    for place, folders, _ in os.walk(root):
        folder = Path(place)
        deep = len(folder.relative_to(root).parts)
        if _is_listed(folder, root):
            found.append(folder)
            folders.clear()
        elif deep >= DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def _is_listed(folder: Path, root: Path) -> bool:
    """A run. The root itself needs more than a folder of a run's name in it; what may not be looked into is none."""
    try:
        return is_run(folder) and (folder != root or any((folder / name).is_file() for name in _CONFIGS))
    except OSError:
        return False


def make_index(runs: Sequence[RunFiles], root: Path, link_to: Any) -> dict[str, Any]:
    """Everything that the template names. runs: oldest first."""
    lines = [_line(files, root, link_to) for files in runs]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, line in enumerate(lines):
        groups.setdefault((line.experiment, line.model), []).append(index)
    experiments = [
        {"experiment": experiment, "model": model, "runs": len(indices),
         "trends": _trends([(i, runs[i]) for i in indices])}
        for (experiment, model), indices in sorted(groups.items())
    ]  # fmt: skip
    return {
        "root": root.resolve().name,
        "lines": list(reversed(lines)),
        "experiments": [group for group in experiments if group["trends"]],
        "counts": {state: sum(line.state == state for line in lines) for state in ("unfinished", "damaged")},
    }


def draw_sparkline(values: Sequence[float], breaks: Sequence[int], label: str) -> Markup:
    """An inline SVG of the values in their order; a line joins neighbours except before an index of `breaks`."""
    low, high = min(values), max(values)
    step = (_WIDTH - 2 * _EDGE) / max(1, len(values) - 1)

    def place(index: int) -> tuple[str, str]:
        share = 0.5 if high == low else (values[index] - low) / (high - low)
        return f"{_EDGE + index * step:.1f}", f"{_HEIGHT - _EDGE - share * (_HEIGHT - 2 * _EDGE):.1f}"

    edges = [0, *breaks, len(values)]
    lines = [
        f'<polyline points="{" ".join(",".join(place(i)) for i in range(start, end))}"/>'
        for start, end in pairwise(edges)
        if end - start > 1
    ]
    dots = [
        f'<circle cx="{x}" cy="{y}" r="{2.4 if last else 1.4}"{_LAST if last else ""}/>'
        for i in range(len(values))
        for (x, y), last in [(place(i), i == len(values) - 1)]
    ]
    title = Markup('<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}: {} runs">').format(
        _WIDTH, _HEIGHT, label, len(values)
    )
    return Markup(f"{title}{''.join(lines)}{''.join(dots)}</svg>")


# ---- one run ---------------------------------------------------------------------------------------------------------


def _line(files: RunFiles, root: Path, link_to: Any) -> Line:
    manifest, verdict = files.manifest, files.verdict
    mark, word = VERDICTS.get(verdict.status, ("!", verdict.status)) if verdict else ("–", "Not judged")
    state, why = _state(files)
    settings = settings_of(files)
    relative = files.run_dir.relative_to(root)
    figures: dict[str, list[str]] = {}
    for arm, figure, point in _figures(0, files, gated=True):
        figures.setdefault(arm, []).append(f"{figure} {point.text}")
    return Line(
        folder=str(relative) if relative.parts else root.resolve().name,
        link=link_to(files.run_dir),
        experiment=_experiment(files, settings),
        model=settings.get("model.name", ""),
        started=when(_started(files)),
        duration_s=sum(manifest.stage_seconds.values()) if manifest else math.nan,
        status=verdict.status if verdict else "",
        mark=mark,
        word=word,
        headline=verdict.headline if verdict else "",
        state=state,
        why=why,
        figures=figures,
    )


def _experiment(files: RunFiles, settings: dict[str, str]) -> str:
    if files.manifest:
        return files.manifest.experiment
    return settings.get("name") or files.run_dir.resolve().parent.name


def _started(files: RunFiles) -> str:
    """ISO time; of a run without a manifest "" (it sorts first)."""
    return files.manifest.started if files.manifest else ""


def _state(files: RunFiles) -> tuple[str, str]:
    if files.problems:
        more = f" (and {len(files.problems) - 1} more)" if len(files.problems) > 1 else ""
        return "damaged", files.problems[0] + more
    stages = _stages(files)
    done = list(files.manifest.stage_seconds) if files.manifest else []
    missing = [
        stage for stage, file in (("gate", "verdict.json"), ("report", "report.html"))
        if stage in stages and not (files.run_dir / file).is_file()
    ]  # fmt: skip
    if missing:
        so_far = f"; {', '.join(done)} done" if done else ""
        return "unfinished", f"{' and '.join(missing)} not run{so_far}"
    return "finished", ""


def _stages(files: RunFiles) -> list[str]:
    stages = files.settings.get("stages")
    return [str(stage) for stage in stages] if isinstance(stages, list) else []


def _figures(run: int, files: RunFiles, gated: bool = False) -> Iterator[tuple[str, str, Point]]:
    """(arm, figure, value) of a run. gated: only arms that the verdict is about, where it says so."""
    about = {c.arm for c in files.verdict.checks if c.status != "reported"} if gated and files.verdict else set()
    comparison = files.comparison
    for c in comparison.tasks if comparison else ():
        if not c.primary or c.candidate == (comparison.noise_arm if comparison else ""):
            continue
        scores = files.evaluations[c.candidate].scores if c.candidate in files.evaluations else ()
        same = [s for s in scores if (s.task, s.filter, s.metric) == (c.task, c.filter, c.metric)]
        setting: Setting = task_setting(files, same[0]) if same else {"score": None}
        if not math.isnan(c.recovery_percent) and (not about or c.candidate in about):
            note = interval(c.recovery_low_percent, c.recovery_high_percent, 1)
            text = number(c.recovery_percent, 1, "%")
            yield c.candidate, f"recovery, {c.task}", Point(run, c.recovery_percent, text, setting, note)
    for evaluation in files.evaluations.values() if not gated else ():
        for s in evaluation.scores:
            if s.primary and not math.isnan(s.value):
                note = interval(s.low, s.high, 1, 100)
                yield s.arm, f"score, {s.task}", Point(run, s.value, percent(s.value), task_setting(files, s), note)
    for pair in (files.analysis or {}).get("pairs", []):
        value, arm = real(pair["sqnr_total_db"]["pooled"]), str(pair["second_arm"])
        if math.isfinite(value) and (not about or arm in about):
            spread = pair["sqnr_total_db"]
            rule = f", {pair['second_rule']}" if pair["second_rule"] else ""
            note = interval(spread["pooled_low"], spread["pooled_high"])
            point = Point(run, value, number(value, 2, "dB"), weight_setting(files, pair), note)
            yield arm, f"SQNR{rule}", point
    for arm, server in files.servers.items() if not gated else ():
        if math.isfinite(server.load_s):
            yield arm, "load time", Point(run, server.load_s, seconds(server.load_s), machine_setting(files, arm))


def _trends(runs: Sequence[tuple[int, RunFiles]]) -> list[Trend]:
    """Trends of the figures that two runs or more have, in the order of the newest run's arms."""
    found: dict[tuple[str, str], Trend] = {}
    for index, files in runs:
        for arm, figure, point in _figures(index, files):
            trend = found.setdefault((arm, figure), Trend(arm, figure))
            if not trend.points or trend.points[-1].run != index:  # the first of a run, where it has several
                trend.points.append(point)
    arms = list(dict.fromkeys(arm for _, files in reversed(runs) for arm in files.arms()))
    trends = [trend for trend in found.values() if len(trend.points) > 1]
    trends.sort(key=lambda t: (arms.index(t.arm) if t.arm in arms else len(arms), t.figure))
    return trends
