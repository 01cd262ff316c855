"""What the templates show, taken from the records: rows and figures, no new numbers.

    context = make_context(load_run(run_dir))
    context = make_context(files, detail=DETAILS[-1])     # as little as a page can hold

`weights` adds what concerns the analysis. `as_json` takes its figures from the same context.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any, TypeVar

from workbench.records import GateCheck, ServerRecord, TaskComparison, TaskScore

from .diff import diff_answers
from .load import RunFiles
from .weights import Drawings, gemm_arms, gemm_figures, make_pairs

T = TypeVar("T")
VERDICTS = {
    "pass": ("✓", "Pass"),
    "regression": ("✗", "Regression"),
    "inconclusive": ("?", "Inconclusive"),
    "invalid": ("!", "Invalid"),
    "failed": ("!", "Could not run"),
    "outdated": ("!", "Out of date"),
}


@dataclass(frozen=True, slots=True)
class Detail:
    """How much of what can be many a page holds. flips: in all; answer: characters compared of each; cells: of the heat
    map that needs no script; metrics: of the table of all matrices; config: characters."""

    flips: int
    answer: int
    cells: int
    metrics: int
    config: int


DETAILS = (  # the first that fits
    Detail(50, 1200, 600, 11, 30_000),
    Detail(50, 500, 400, 9, 10_000),
    Detail(50, 250, 200, 7, 4_000),
    Detail(10, 250, 100, 5, 2_000),
    Detail(0, 0, 0, 3, 0),
)
FORMAT_BITS = {  # stored bits a weight, scales included where a format fixes their block; those of workbench.formats
    "bf16": 16.0, "f32": 32.0, "nvfp4": 4.5, "mxfp4": 4.25, "nvfp4_w4a8": 4.25, "mxfp6_e2m3": 6.25,
    "mxfp6_e3m2": 6.25, "mxfp8_e4m3": 8.25, "mxfp8_e5m2": 8.25, "fp8_tensor": 8.0, "fp8_channel": 8.0,
    "fp8_block": 8.0, "int4_group": 4.0, "int4_channel": 4.0, "int8_channel": 8.0, "int8_group": 8.0,
    "int8_tensor": 8.0,
}  # fmt: skip
STAGE_FILES = {
    "gate": ("verdict.json",),
    "evaluate": ("eval",),
    "compare": ("comparison.json",),
    "analyze": ("analysis.json", "tensors.parquet", "gemm.parquet", "pooled.parquet", "fused.parquet"),
    "lint": ("lint",),
}


def make_context(files: RunFiles, *, detail: Detail = DETAILS[0], drawings: Drawings | None = None) -> dict[str, Any]:
    """Everything the templates name. drawings: keeps figures between calls of one run, for another `detail`."""
    from .figures import arm_colors, draw_scores
    from .weight_figures import draw_divergences, draw_losses

    arms = files.arms()
    colors = arm_colors(arms)
    draw = drawings if drawings is not None else Drawings()
    scores = [score for evaluation in files.evaluations.values() for score in evaluation.scores]
    scores.sort(key=lambda s: (not s.primary, s.task, s.filter, arms.index(s.arm) if s.arm in arms else 99))
    primary = list(dict.fromkeys((s.task, s.filter) for s in scores if s.primary))
    mark, word = VERDICTS.get(files.verdict.status, ("!", files.verdict.status)) if files.verdict else ("–", "")
    evaluations = _in_order(files.evaluations, arms)
    comparisons, sight = _comparisons(files), _sight(files)
    divergences = sorted(files.divergences.values(), key=lambda d: arms.index(d.arm) if d.arm in arms else 99)
    products = (files.analysis or {}).get("gemm", [])
    return {
        "files": files,
        "detail": detail,
        "damaged": {stage: ", ".join(files.damaged(*names)) for stage, names in STAGE_FILES.items()},
        "arms": [_arm_row(files, arm, scores) for arm in arms],
        "colors": colors,
        "verdict_mark": mark,
        "verdict_word": word,
        "sight": sight,
        "detectable": _detectable(sight),
        "losses_figure": draw("losses", lambda: draw_losses(sight, colors)),
        "check_groups": _check_groups(files),
        "primary_tasks": primary,
        "lint": _in_order(files.lint, arms),
        "cards": _in_order(files.numerics, arms),
        "serving_cost": files.serving_cost,
        "scores": scores,
        "scores_figure": draw("scores", lambda: draw_scores(scores, colors)),
        "perplexities": [p for e in evaluations.values() for p in e.perplexities],
        "panels": [panel for e in evaluations.values() for panel in e.panels],
        "preflights": _in_order(files.preflights, arms),
        "transports": {a: e.transport for a, e in evaluations.items() if e.transport},
        "comparisons": comparisons,
        "graded": list(files.comparison.graded) if files.comparison else [],
        "divergences": divergences,
        "divergences_figure": draw("divergences", lambda: draw_divergences(divergences, products, colors)),
        "noise": _noise(files),
        "flip_groups": _flip_groups(comparisons, detail),
        "pairs": make_pairs(files, cells=detail.cells, metrics=detail.metrics, draw=draw),
        "gemm_rows": products,
        "gemm_arms": gemm_arms(files, arms),
        "gemm_figures": gemm_figures(files, arms, colors, draw),
        "worst_blocks": (files.analysis or {}).get("worst_blocks", []),
        "faults": (files.analysis or {}).get("faults", []),
        "claims": (files.analysis or {}).get("claims", []),
        "stages": list(files.manifest.stage_seconds.items()) if files.manifest else [],
        "repeat": shlex.join(files.manifest.command) if files.manifest else "",
        "harness": {
            arm: e.plain_command or shlex.join(e.command)
            for arm, e in evaluations.items()
            if e.plain_command or e.command
        },
        "commands": {arm: shlex.join(s.command) for arm, s in _in_order(files.servers, arms).items() if s.command},
        "data_prints": _data_prints(files),
    }


def _arm_row(files: RunFiles, arm: str, scores: list[TaskScore]) -> dict[str, Any]:
    server = files.servers.get(arm)
    base = files.servers.get(files.comparison.baseline) if files.comparison else None
    share = None
    if server and base and server.weight_bytes and base.weight_bytes:
        share = server.weight_bytes / base.weight_bytes
    evaluation = files.evaluations.get(arm)
    primary = {(s.task, s.filter): s for s in scores if s.arm == arm and s.primary}
    compared = files.comparison.tasks if files.comparison else ()
    return {
        "name": arm,
        "server": server,
        "weight_share": share,
        "activation_scales": _activation_scales(server),
        "primary": primary,
        "recovery": {(c.task, c.filter): c for c in compared if c.candidate == arm},
        "baseline": bool(files.comparison and files.comparison.baseline == arm),
        "evaluation": evaluation,
        "bits": _bits(server.weight_format) if server else [],
        "speed": _speed(files, arm),
        "latency_s": evaluation.transport.latency_median_s if evaluation and evaluation.transport else None,
    }


def _bits(formats: str) -> list[float]:
    """Stored bits a weight of each format of "bf16+nvfp4"; none where one is not known."""
    bits = [FORMAT_BITS.get(name) for name in formats.split("+")]
    return [b for b in bits if b is not None] if None not in bits else []


def _speed(files: RunFiles, arm: str) -> tuple[str, float] | None:
    """(load, output tokens a second) of the first load that the serving cost was measured under."""
    cost = files.serving_cost
    for latency in cost.latencies if cost else ():
        if latency.arm == arm and "output_tokens_per_s" in latency.figures:
            return cost.loads[latency.load].name, latency.figures["output_tokens_per_s"]  # type: ignore[union-attr]
    return None


def _activation_scales(server: ServerRecord | None) -> str:
    """ "static (per expert)", or the mix in layers: "static 180, dynamic_per_token 12"."""
    if server is None:
        return ""
    counts: dict[str, int] = {}
    for layer in server.layers.values():
        mode = str(layer.get("activation_scale", ""))
        if mode and mode != "none":
            counts[mode] = counts.get(mode, 0) + 1
    if server.activation_scale == "mixed" and counts:
        return "mixed: " + ", ".join(f"{mode} {n}" for mode, n in sorted(counts.items()))
    return server.activation_scale


def _comparisons(files: RunFiles) -> list[TaskComparison]:
    if files.comparison is None:
        return []
    order = files.arms()
    tasks = list(files.comparison.tasks)
    tasks.sort(
        key=lambda c: (not c.primary, c.task, c.filter, order.index(c.candidate) if c.candidate in order else 99)
    )
    return tasks


def _noise(files: RunFiles) -> list[tuple[str, str, float]]:
    """(task, filter, discordance of the A/A arm), also where it is zero."""
    if files.comparison is None:
        return []
    split = [(key.partition("|"), value) for key, value in files.comparison.noise_floor.items()]
    return [(task, name, value) for (task, _, name), value in sorted(split)]


def _sight(files: RunFiles) -> list[dict[str, Any]]:
    """Per candidate and primary task: the paired loss, the gate's margin, and the noise floor beside it."""
    if files.comparison is None:
        return []
    checks = {(c.name, c.arm): c for c in files.verdict.checks} if files.verdict else {}
    return [
        {
            "comparison": c,
            "check": checks.get((f"accuracy {c.task} {c.filter}", c.candidate)),
            "noise": files.comparison.noise_floor.get(f"{c.task}|{c.filter}"),
        }
        for c in _comparisons(files)
        if c.primary and c.candidate != files.comparison.noise_arm
    ]


def _detectable(sight: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per primary task: the smallest losses that could be found, over arms, and the margin where all share it."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sight:
        found.setdefault((row["comparison"].task, row["comparison"].n), []).append(row)
    rows = []
    for (task, n), of_task in found.items():
        losses = [row["comparison"].mde_pp for row in of_task]
        margins = {row["check"].limit if row["check"] else None for row in of_task}
        margin = margins.pop() if len(margins) == 1 else None
        rows.append({"task": task, "n": n, "low": min(losses), "high": max(losses), "margin": margin})
    return rows


def _check_groups(files: RunFiles) -> list[tuple[str, list[GateCheck], bool]]:
    """(title, checks, shown open): what decided against first, then what passed, then what is only shown."""
    checks = files.verdict.checks if files.verdict else ()
    against = [c for c in checks if c.status not in ("pass", "reported")]
    return [
        ("Checks that did not pass", against, True),
        ("Checks that passed", [c for c in checks if c.status == "pass"], False),
        ("Reported, not gated", [c for c in checks if c.status == "reported"], False),
    ]


def _flip_groups(comparisons: list[TaskComparison], detail: Detail) -> list[dict[str, Any]]:
    """Flips of each comparison, `detail.flips` in all: every comparison gives in turn, lost answers first."""
    flipped = [c for c in comparisons if c.flips]
    queues = [sorted(c.flips, key=lambda f: f.direction != "lost") for c in flipped]
    taken, turn = [0] * len(flipped), 0
    while sum(taken) < detail.flips and any(n < len(q) for n, q in zip(taken, queues, strict=True)):
        place = turn % len(queues)
        taken[place] += taken[place] < len(queues[place])
        turn += 1
    return [
        {
            "comparison": c,
            "shown": [
                {
                    "flip": flip,
                    "diff": diff_answers(flip.baseline_answer, flip.candidate_answer, limit=detail.answer),
                    "anchor": f"flip-{slug(c.candidate)}-{slug(c.task)}-{slug(c.filter)}-{flip.doc_id}",
                }
                for flip in queue[:count]
            ],
            "left_out": len(queue) - count,
        }
        for c, queue, count in zip(flipped, queues, taken, strict=True)
    ]


def slug(text: str) -> str:
    """Text as part of an anchor: letters, digits and hyphens."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def _data_prints(files: RunFiles) -> list[dict[str, Any]]:
    """A row per task: fingerprints of its documents and prompts, each with the arms that were asked so."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for arm, preflight in _in_order(files.preflights, files.arms()).items():
        for task in preflight.tasks:
            rows.setdefault((task.task, task.data_fingerprint, task.prompt_fingerprint), []).append(arm)
    return [
        {"task": task, "data": data, "prompts": prompts, "arms": arms} for (task, data, prompts), arms in rows.items()
    ]


def _in_order(by_arm: dict[str, T], arms: list[str]) -> dict[str, T]:
    return dict(sorted(by_arm.items(), key=lambda item: arms.index(item[0]) if item[0] in arms else len(arms)))
