"""`build_comparison([run, run, ...], out)`: several runs on one self-contained page, with a baseline chosen there.

    build_comparison([Path("reports/kimi_requant/a"), Path("reports/kimi_requant/b")], Path("comparison.html"))

Every figure is a record's. The page's script sets each beside the chosen baseline's: the difference of the two figures
shown, or for speed their ratio, and says so; a paired loss with its interval where one run paired the two arms. Figures
that were not taken under the same settings are marked with what differs instead, speed of another machine, engine or
version as context. Without the script all figures and recorded pairings still show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, OutputError
from workbench.records import TaskScore, write_text

from .comparable import Setting, cost_setting, differing, machine_setting, task_setting, weight_setting
from .context import VERDICTS
from .fitting import draw_fitting
from .load import RunFiles, load_run
from .pages import relative_link, render_page
from .text import interval, number, percent, real, seconds, size

MOST_RUNS = 26
_SPEED = "ratio"


@dataclass(frozen=True, slots=True)
class Figure:
    """One cell. kind: what the script makes of it and the baseline's: "difference" or "ratio"; unit, digits: of that.

    scale: of the difference's value (100 for proportions in points). setting: index of its settings. low, high: of the
    interval that is drawn beside it (NaN: none is).
    """

    key: str
    text: str
    value: float
    setting: int
    kind: str = "difference"
    unit: str = ""
    digits: int = 2
    scale: float = 1.0
    note: str = ""
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, slots=True)
class Row:
    """An arm's line in a table. cells: in the table's order; None: the record has no such figure."""

    entry: str
    label: str
    arm: str
    texts: tuple[str, ...]
    cells: tuple[Figure | None, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """columns, texts: headings of a row's figures, and of its texts, which follow them."""

    id: str
    title: str
    note: str
    texts: tuple[str, ...]
    columns: tuple[str, ...]
    rows: list[Row]
    open: bool = True

    @property
    def span(self) -> tuple[float, float]:
        """What the drawn intervals reach over; (0, 0) where there is none."""
        drawn = [cell for row in self.rows for cell in row.cells if cell is not None and cell.low < cell.high]
        return min((c.low for c in drawn), default=0.0), max((c.high for c in drawn), default=0.0)


@dataclass(slots=True)
class _Page:
    """What is collected while tables are made: every distinct setting, and recorded pairings by their cells."""

    settings: list[Setting] = field(default_factory=list)
    paired: dict[str, str] = field(default_factory=dict)

    def setting(self, setting: Setting) -> int:
        if setting not in self.settings:
            self.settings.append(setting)
        return self.settings.index(setting)


def build_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page and return its path.

    Raises ConfigError for fewer than two runs, more than 26, the same twice, or what is no run folder; OutputError,
    also once the page is written where a file of a run cannot be read (the page names it).
    """
    html, runs = render_comparison(run_dirs, lambda index: relative_link(run_dirs[index] / "report.html", out))
    write_text(out, html)
    damaged = [f"{files.run_dir / problem}" for files in runs for problem in files.problems]
    if damaged:
        raise OutputError(
            "\n".join(f"damaged: {problem}" for problem in damaged), fix="run the stage that writes it again"
        )
    return out


def render_comparison(run_dirs: Sequence[Path], link_to: Callable[[int], str]) -> tuple[str, list[RunFiles]]:
    """The page's text, and what was read. link_to: the link to the report of the run of that index."""
    resolved = [path.resolve() for path in run_dirs]
    if len(resolved) < 2 or len(set(resolved)) < len(resolved):
        raise ConfigError("a comparison takes two runs or more, each once", fix="workbench report RUN RUN")
    if len(resolved) > MOST_RUNS:
        raise ConfigError(f"{len(resolved)} runs are more than a page holds ({MOST_RUNS})", fix="give fewer runs")
    runs = [draw_fitting(load_run(path, tables=False), _everything)[0] for path in run_dirs]
    return render_page("compare.html", make_comparison(runs, link_to)), runs


def _everything(files: RunFiles) -> Any:
    return make_comparison([files], lambda index: "")


def make_comparison(runs: Sequence[RunFiles], link_to: Callable[[int], str]) -> dict[str, Any]:
    """Everything that the template names."""
    labels = [chr(ord("A") + index) for index in range(len(runs))]
    page = _Page()
    lettered = list(zip(labels, runs, strict=True))
    tables = [
        *_score_tables(lettered, page),
        *_answer_tables(lettered, page),
        *_weight_tables(lettered, page),
        *_product_tables(lettered, page),
        *_cost_tables(lettered, page),
        *_latency_tables(lettered, page),
    ]
    entries = [(f"{label}.{arm}", f"{label} · {arm}") for label, files in lettered for arm in files.arms()]
    return {
        "runs": [_run_line(label, files, link_to(index)) for index, (label, files) in enumerate(lettered)],
        "tables": [table for table in tables if table.rows],
        "entries": entries,
        "baseline": _default_baseline(lettered[0][0], runs[0], entries),
        "differing": differing(runs),
        "labels": labels,
        "data": {"settings": page.settings, "paired": page.paired},
    }


def _default_baseline(label: str, files: RunFiles, entries: list[tuple[str, str]]) -> str:
    wanted = f"{label}.{files.comparison.baseline}" if files.comparison else ""
    return wanted if wanted in dict(entries) else entries[0][0] if entries else ""


def _run_line(label: str, files: RunFiles, link: str) -> dict[str, Any]:
    manifest = files.manifest
    mark, word = (
        VERDICTS.get(files.verdict.status, ("!", files.verdict.status)) if files.verdict else ("–", "Not judged")
    )
    return {
        "label": label,
        "files": files,
        "mark": mark,
        "word": word,
        "status": files.verdict.status if files.verdict else "",
        "experiment": manifest.experiment if manifest else files.run_dir.name,
        "folder": files.run_dir.resolve().name,
        "link": link if (files.run_dir / "report.html").is_file() else "",
        "duration_s": sum(manifest.stage_seconds.values()) if manifest else math.nan,
    }


# ---- tables ----------------------------------------------------------------------------------------------------------

_Lettered = list[tuple[str, RunFiles]]


def _score_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    """A table per (task, filter, metric), the primary ones first and open."""
    groups: dict[tuple[bool, str, str, str], list[Row]] = {}
    for label, files in runs:
        for arm in files.arms():
            scores = files.evaluations[arm].scores if arm in files.evaluations else ()
            for score in scores:
                key = (not score.primary, score.task, score.filter, score.metric)
                groups.setdefault(key, []).append(_score_row(label, files, score, page))
    for number_, (key, rows) in enumerate(sorted(groups.items(), key=lambda item: item[0])):
        secondary, task, name, metric = key
        yield Table(
            f"scores-{number_}", f"{task}: {name}",
            f"{metric}{', not the primary filter' if secondary else ''}. Paired: against the run's own baseline, on the"
            " same items; intervals of 95 %.",
            ("Items", "Paired loss in its run, pp", "Recovery, %"), ("Score",), rows, open=not secondary,
        )  # fmt: skip


def _score_row(label: str, files: RunFiles, score: TaskScore, page: _Page) -> Row:
    entry, key = f"{label}.{score.arm}", f"score|{score.task}|{score.filter}|{score.metric}"
    tasks = files.comparison.tasks if files.comparison else ()
    found = [
        c for c in tasks
        if (c.task, c.filter, c.metric, c.candidate) == (score.task, score.filter, score.metric, score.arm)
    ]  # fmt: skip
    loss = recovery = ""
    if found:
        c = found[0]
        limits = interval(c.loss_low_pp, c.loss_high_pp)
        loss = f"{number(c.loss_pp, 2, signed=True)} {limits}"
        recovery = f"{number(c.recovery_percent, 1)} {interval(c.recovery_low_percent, c.recovery_high_percent, 1)}"
        page.paired[f"{label}.{c.baseline}|{entry}|{key}"] = (
            f"{number(-c.loss_pp, 2, 'pp', signed=True)} {interval(-c.loss_high_pp, -c.loss_low_pp)}, paired"
        )
    figure = Figure(
        key, percent(score.value), score.value, page.setting(task_setting(files, score)), unit="pp", scale=100.0,
        note=interval(score.low, score.high, 1, 100), low=score.low, high=score.high,
    )  # fmt: skip
    return Row(entry, label, score.arm, (str(score.n), loss or "–", recovery or "–"), (figure,))


def _answer_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    """KL divergence from the reference, where a run has it."""
    rows = []
    for label, files in runs:
        for divergence in getattr(files, "divergences", {}).values():
            setting = page.setting(
                {"text": divergence.text_fingerprint, "reference": divergence.reference, "k": str(divergence.k)}
            )
            cells = [
                Figure(
                    f"kld-{name}", f"{number(bounds.lower, 4)} to {number(bounds.upper, 4)}", bounds.lower, setting,
                    unit="nats", digits=4,
                )
                for name, bounds in (("mean", divergence.mean), ("p99", divergence.p99))
            ]  # fmt: skip
            cells.append(
                Figure(
                    "kld-top1", percent(divergence.same_top1, 2), divergence.same_top1, setting, unit="pp", scale=100
                )
            )
            texts = (divergence.reference, str(divergence.positions))
            rows.append(Row(f"{label}.{divergence.arm}", label, divergence.arm, texts, tuple(cells)))
    yield Table(
        "divergence", "KL divergence of answers",
        "In nats, lower to upper bound: the upper supposes a floor for tokens outside the top k; a larger k closes it."
        " The difference is of the lower ones.",
        ("Reference", "Positions"), ("Mean", "99th percentile", "Same first token"), rows,
    )  # fmt: skip


def _weight_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    rows = []
    for label, files in runs:
        seen: set[str] = set()
        for pair in (files.analysis or {}).get("pairs", []):
            setting = page.setting(weight_setting(files, pair))
            first = str(pair["first_arm"])
            if first and first not in seen:
                seen.add(first)
                rows.append(_weight_row(label, first, f"{pair['source_format']} to {pair['first_format']}", pair, {
                    "sqnr": pair["sqnr_first_db"]}, setting))  # fmt: skip
            chain = [pair["source_format"], *([pair["first_format"]] if first else []), pair["second_format"]]
            rule = f", rule {pair['second_rule']}" if pair["second_rule"] else ""
            rows.append(_weight_row(label, str(pair["second_arm"]), " to ".join(chain) + rule, pair, {
                "sqnr": pair["sqnr_total_db"], "sqnr-direct": pair["sqnr_direct_db"], "corr": pair["corr_e1_e2"]},
                setting))  # fmt: skip
    yield Table(
        "weights", "Weights",
        "SQNR against the source, pooled over all matrices by power; correlation of both errors, mean over matrices;"
        " direct: the second format straight from the source.",
        ("Formats", "Matrices"), ("SQNR, dB", "Direct, dB", "corr(e1, e2)"), rows,
    )  # fmt: skip


def _weight_row(
    label: str, arm: str, what: str, pair: dict[str, Any], spreads: dict[str, dict[str, Any]], setting: int
) -> Row:
    def cell(key: str, field: str, digits: int) -> Figure | None:
        spread = spreads.get(key)
        if spread is None or math.isnan(real(spread[field])):
            return None
        note = interval(spread[f"{field}_low"], spread[f"{field}_high"], digits)
        value = real(spread[field])
        unit = "" if key == "corr" else "dB"
        return Figure(key, number(value, digits), value, setting, unit=unit, digits=digits, note=note)

    cells = (cell("sqnr", "pooled", 2), cell("sqnr-direct", "pooled", 2), cell("corr", "mean", 3))
    return Row(f"{label}.{arm}", label, arm, (what, str(pair["matrices"])), cells)


def _product_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    rows = []
    for label, files in runs:
        pairs = (files.analysis or {}).get("pairs", [])
        source = weight_setting(files, pairs[0]) if pairs else {}
        by_arm: dict[str, dict[str, Any]] = {}
        for summary in (files.analysis or {}).get("gemm", []):
            by_arm.setdefault(str(summary["arm"]), {})[str(summary["kind"])] = summary
        for arm, kinds in by_arm.items():
            any_kind = next(iter(kinds.values()))
            setting = page.setting({
                "source's checkpoint": source.get("source's checkpoint"), "inputs": str(any_kind["activations"]),
                "matrices": str(any_kind["sqnr_db"]["count"])})  # fmt: skip
            cells: list[Figure | None] = []
            for key, kind, column in (
                ("noise-weight", "weight", "sqnr_db"), ("noise-both", "both", "sqnr_db"),
                ("coherence", "weight", "coherence_gain_db"),
            ):  # fmt: skip
                spread = kinds.get(kind, {}).get(column)
                value = real(spread["mean"]) if spread else math.nan
                note = interval(spread["mean_low"], spread["mean_high"]) if spread else ""
                cells.append(
                    None if math.isnan(value) else Figure(key, number(value), value, setting, unit="dB", note=note)
                )
            formats = f"{any_kind['weight_format']} × {any_kind['activation_format'] or 'unrounded'}"
            rows.append(Row(f"{label}.{arm}", label, arm, (formats, str(any_kind["activations"])), tuple(cells)))
    yield Table(
        "products", "Matrix products", "Output SQNR, mean over matrices.", ("Weights × activations", "Inputs"),
        ("Weights rounded, dB", "Both rounded, dB", "Coherence gain, dB"), rows,
    )  # fmt: skip


def _cost_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    """Memory, load time and the speed of answering, of every arm that was served."""
    rows = []
    for label, files in runs:
        for arm in files.arms():
            server, evaluation = files.servers.get(arm), files.evaluations.get(arm)
            if server is None:
                continue
            machine = page.setting(machine_setting(files, arm))
            nothing = page.setting({})
            transport = evaluation.transport if evaluation else None
            answered = machine_setting(files, arm)
            if evaluation is not None:
                answered = {
                    **answered, "requests": str(transport.requests) if transport else None,
                    "at once": str(evaluation.concurrency),
                    "tasks": ", ".join(f"{t} {h}" for t, h in sorted(evaluation.task_fingerprints.items())) or None,
                }  # fmt: skip
            answering = page.setting(answered)
            measured = [
                ("weight-bytes", server.weight_bytes, size, nothing),
                ("peak", server.peak_rss_bytes, size, machine),
                ("load", server.load_s, seconds, machine),
                ("ready", server.ready_s, seconds, machine),
                ("latency", transport.latency_median_s if transport else None, seconds, answering),
                ("evaluation", evaluation.seconds if evaluation else None, seconds, answering),
            ]
            cells = tuple(
                None if math.isnan(real(value)) else Figure(key, show(value), real(value), setting, kind=_SPEED)
                for key, value, show, setting in measured
            )
            formats = f"{server.weight_format} × {server.activation_format}, {server.backend}"
            rows.append(Row(f"{label}.{arm}", label, arm, (formats,), cells))
    yield Table(
        "cost", "Memory, load time and speed",
        "Peak: resident memory of the server. Load: its weights, as the engine measured it; ready: start to first"
        " healthy answer. Latency: median of an evaluation's requests. Single measurements: no interval is known.",
        ("Formats",), ("Weights", "Peak memory", "Load", "Ready", "Latency", "Evaluation"), rows,
    )  # fmt: skip


def _latency_tables(runs: _Lettered, page: _Page) -> Iterator[Table]:
    """The serving cost's latencies, a table per load."""
    figures = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "itl": "ITL, ms", "e2el": "E2EL, ms"}
    keys = [f"{name}_mean_ms" for name in figures] + ["output_tokens_per_s"]
    tables: dict[str, list[Row]] = {}
    for label, files in runs:
        cost = files.serving_cost
        if cost is None:
            continue
        for r in cost.ratios:
            load = cost.loads[r.load].name
            page.paired[f"{label}.{cost.baseline}|{label}.{r.arm}|{load}|{r.figure}"] = (
                f"× {number(r.ratio, 3)} {interval(r.low, r.high, 3)}, paired by repeat, {r.verdict}"
            )
        for latency in cost.latencies:
            load = cost.loads[latency.load].name
            setting = page.setting(cost_setting(files, load, latency.arm))
            cells = tuple(
                None
                if math.isnan(real(latency.figures.get(key)))
                else Figure(
                    f"{load}|{key}", number(latency.figures[key], 1), latency.figures[key], setting, kind=_SPEED
                )
                for key in keys
            )
            row = Row(f"{label}.{latency.arm}", label, latency.arm, (str(latency.repeats), str(latency.failed)), cells)
            tables.setdefault(load, []).append(row)
    for index, (load, rows) in enumerate(tables.items()):
        yield Table(
            f"latency-{index}", f"Serving cost: {load}", "Means of a run of the client, medians of those over repeats.",
            ("Repeats", "Failed requests"), (*figures.values(), "Output tokens/s"), rows,
        )  # fmt: skip
