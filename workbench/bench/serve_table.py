"""A `ServingCost` record as Markdown: what was loaded, how fast it answered, and the ratios with their intervals."""

from __future__ import annotations

import math

from workbench.records import CostRatio, Latency, ServingCost, Sourced

FIGURES = {
    "ttft": "time to first token, ms",
    "tpot": "time per output token, ms",
    "itl": "between tokens, ms",
    "e2el": "whole request, ms",
}


def table(cost: ServingCost) -> str:
    """Three tables, and below them what failed."""
    load = " to ".join(f"{value:.1f}" for value in cost.system_load)
    lines = [
        f"{cost.machine}, {cost.cores} cores, load {load}, {cost.engine_version}, {cost.date}; preset {cost.preset}, "
        f"{repeats_of(cost)} after a warm-up, arms in alternating order, "
        f"{'all servers up' if cost.together else 'one server at a time'}",
        "",
        *_starts(cost),
        "",
        *_latencies(cost),
    ]
    if cost.ratios:
        lines += ["", *_ratios(cost)]
    apart = {arm: cost.no_ratio(arm) for arm in cost.arms}
    if any(apart.values()):
        lines += ["", *(f"- no ratio of {arm} to {cost.baseline}: {why}" for arm, why in apart.items() if why)]
    if cost.failed:
        lines += ["", *_failures(cost)]
    return "\n".join(lines)


def repeats_of(cost: ServingCost) -> str:
    stopped = cost.measured < cost.repeats
    return f"stopped after {cost.measured} of {cost.repeats} repeats" if stopped else f"{cost.repeats} repeats"


def _starts(cost: ServingCost) -> list[str]:
    columns = ["arm", "ready, s", "load, s", "read", "convert", "rest", "peak", "after", "GPU peak", "GPU after"]
    lines = _header(columns)
    notes: dict[str, None] = {}
    for start in cost.starts:
        seconds = (start.ready_s, start.load_s, start.read_s, start.convert_s, start.rest_s)
        sizes = (start.peak_bytes, start.after_bytes, start.device_peak_bytes, start.device_after_bytes)
        lines.append(_row([start.arm, *(_seconds(s) for s in seconds), *(_gib(s) for s in sizes)]))
        for name, figure in zip(columns[1:], (*seconds, *sizes), strict=True):
            if math.isnan(figure.value):
                notes[f"{name.partition(',')[0]} of {start.arm}: {figure.source}"] = None
    return [*lines, *([""] if notes else []), *(f"- no {note}" for note in notes)]


def _latencies(cost: ServingCost) -> list[str]:
    lines = _header(["load", "arm", *(f"{name}: mean, median, p99" for name in FIGURES.values()), "output tokens/s"])
    for row in cost.latencies:
        cells = [", ".join(_figure(row, f"{name}_{kind}_ms") for kind in ("mean", "median", "p99")) for name in FIGURES]
        lines.append(_row([cost.loads[row.load].name, row.arm, *cells, _figure(row, "output_tokens_per_s")]))
    return [*lines, "", "Medians over the repeats."]


def _ratios(cost: ServingCost) -> list[str]:
    margin = f"{100 * cost.ratios[0].margin:g} %"
    lines = _header(["load", "arm", "figure", f"times {cost.baseline}", "95 % interval", f"within {margin}", "repeats"])
    for ratio in cost.ratios:
        interval = "-" if math.isnan(ratio.low) else f"{ratio.low:.4f} to {ratio.high:.4f}"
        value = "-" if math.isnan(ratio.ratio) else f"{ratio.ratio:.4f}"
        cells = [cost.loads[ratio.load].name, ratio.arm, ratio.figure, value, interval, said(ratio), str(ratio.repeats)]
        lines.append(_row(cells))
    return lines


def said(ratio: CostRatio) -> str:
    """The verdict, and what would decide an open one."""
    if ratio.left_out:
        return f"{ratio.verdict}: {ratio.left_out} repeats left out, with failed requests or without this figure"
    if ratio.repeats_needed is not None:
        return f"{ratio.verdict}: {ratio.repeats_needed} repeats would decide"
    if ratio.verdict == "inconclusive" and ratio.repeats > 1:
        return f"{ratio.verdict}: more than 10,000 repeats would decide"
    return ratio.verdict


def _failures(cost: ServingCost) -> list[str]:
    sent = sum(cost.loads[run.load].prompts for run in cost.runs)
    lines = [f"{cost.failed} of {sent} requests failed:"]
    for run in cost.runs:
        if run.failed:
            why = "; ".join(run.errors) or "the client says no reason"
            which = f"repeat {run.repeat}" if run.repeat else "the warm-up"
            lines.append(f"- {run.arm}, {cost.loads[run.load].name}, {which}: {run.failed} ({why})")
    return lines


def _header(columns: list[str]) -> list[str]:
    return [_row(columns), f"|{'---|' * len(columns)}"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _figure(row: Latency, figure: str) -> str:
    value = row.figures[figure]
    return "-" if math.isnan(value) else f"{value:.1f}"


def _seconds(figure: Sourced) -> str:
    return "-" if math.isnan(figure.value) else f"{figure.value:.2f}"


def _gib(figure: Sourced) -> str:
    return "-" if math.isnan(figure.value) else f"{figure.value / 2**30:.2f} GiB"
