"""What the templates show, taken from the records: rows and figures, no new numbers."""

from __future__ import annotations

import shlex
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup

from workbench.records import Flip, GateCheck, ServerRecord, TaskComparison, TaskScore

from .heatmap import HeatMap, make_heat_map
from .load import RunFiles

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
VERDICTS = {
    "pass": ("✓", "Pass"),
    "regression": ("✗", "Regression"),
    "inconclusive": ("?", "Inconclusive"),
    "invalid": ("!", "Invalid"),
    "failed": ("!", "Could not run"),
}
WORST_MATRICES = 12
STAGE_FILES = {
    "gate": ("verdict.json",),
    "evaluate": ("eval",),
    "compare": ("comparison.json",),
    "analyze": ("analysis.json", "tensors.parquet", "gemm.parquet"),
    "lint": ("lint",),
}


def make_context(files: RunFiles, *, flips: int = 30, cells: int = 4000) -> dict[str, Any]:
    """Everything the templates name. flips: shown per task and direction; cells: of all heat maps together."""
    from .figures import arm_colors, draw_gemm, draw_scores

    arms = files.arms()
    colors = arm_colors(arms)
    scores = [score for evaluation in files.evaluations.values() for score in evaluation.scores]
    scores.sort(key=lambda s: (not s.primary, s.task, s.filter, arms.index(s.arm) if s.arm in arms else 99))
    primary = list(dict.fromkeys((s.task, s.filter) for s in scores if s.primary))
    mark, word = VERDICTS.get(files.verdict.status, ("!", files.verdict.status)) if files.verdict else ("–", "")
    return {
        "files": files,
        "damaged": {stage: ", ".join(files.damaged(*names)) for stage, names in STAGE_FILES.items()},
        "arms": [_arm_row(files, arm, scores) for arm in arms],
        "colors": colors,
        "verdict_mark": mark,
        "verdict_word": word,
        "sight": _sight(files),
        "check_groups": _check_groups(files),
        "primary_tasks": primary,
        "lint": _in_order(files.lint, arms),
        "cards": _in_order(files.numerics, arms),
        "serving_cost": files.serving_cost,
        "scores": scores,
        "scores_figure": Markup(draw_scores(scores, colors)),
        "panels": [panel for e in _in_order(files.evaluations, arms).values() for panel in e.panels],
        "preflights": _in_order(files.preflights, arms),
        "transports": {a: e.transport for a, e in _in_order(files.evaluations, arms).items() if e.transport},
        "comparisons": _comparisons(files),
        "noise": _noise(files),
        "flip_groups": [_flip_group(c) for c in _comparisons(files) if c.flips],
        "flips_shown": flips,
        "pairs": _pairs(files, cells),
        "gemm_rows": (files.analysis or {}).get("gemm", []),
        "gemm_arms": _gemm_arms(files, arms),
        "gemm_figure": Markup(draw_gemm(files.gemm, arms)) if files.gemm is not None else "",
        "claims": (files.analysis or {}).get("claims", []),
        "stages": _stages(files),
        "repeat": shlex.join(files.manifest.command) if files.manifest else "",
        "harness": {
            arm: e.plain_command or shlex.join(e.command)
            for arm, e in _in_order(files.evaluations, arms).items()
            if e.plain_command or e.command
        },
        "commands": {arm: shlex.join(s.command) for arm, s in _in_order(files.servers, arms).items() if s.command},
    }


def _arm_row(files: RunFiles, arm: str, scores: list[TaskScore]) -> dict[str, Any]:
    server = files.servers.get(arm)
    base = files.servers.get(files.comparison.baseline) if files.comparison else None
    share = None
    if server and base and server.weight_bytes and base.weight_bytes:
        share = server.weight_bytes / base.weight_bytes
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
        "evaluation": files.evaluations.get(arm),
    }


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


def _check_groups(files: RunFiles) -> list[tuple[str, list[GateCheck], bool]]:
    """(title, checks, shown open): what decided against first, then what passed, then what is only shown."""
    checks = files.verdict.checks if files.verdict else ()
    against = [c for c in checks if c.status not in ("pass", "reported")]
    return [
        ("Checks that did not pass", against, True),
        ("Checks that passed", [c for c in checks if c.status == "pass"], False),
        ("Reported, not gated", [c for c in checks if c.status == "reported"], False),
    ]


def _flip_group(comparison: TaskComparison) -> dict[str, Any]:
    directions: dict[str, list[dict[str, Any]]] = {"lost": [], "gained": []}
    for flip in comparison.flips:
        directions.setdefault(flip.direction, []).append(_split_answers(flip))
    return {"comparison": comparison, "directions": directions}


def _split_answers(flip: Flip) -> dict[str, Any]:
    """A flip with both answers cut where they part."""
    pairs = zip(flip.baseline_answer, flip.candidate_answer, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    common = flip.baseline_answer.rfind(" ", 0, common) + 1  # at a word's start
    return {
        "flip": flip,
        "common": flip.baseline_answer[:common],
        "baseline_rest": flip.baseline_answer[common:],
        "candidate_rest": flip.candidate_answer[common:],
    }


# ---- analysis --------------------------------------------------------------------------------------------------------


def _pairs(files: RunFiles, cells: int) -> list[dict[str, Any]]:
    """A section per (first, second, rule): its summary, heat maps, figures and worst matrices."""
    from .figures import draw_correlations, draw_density, draw_phase

    shown = []
    summaries = (files.analysis or {}).get("pairs", [])
    for index, pair in enumerate(summaries):
        label = f"{pair['first_arm'] or pair['source_arm']} to {pair['second_arm']}"
        rows = _rows_of(files.tensors, pair)
        section: dict[str, Any] = {"summary": pair, "label": label, "heat_maps": [], "figures": [], "worst": []}
        if rows is not None:
            section["heat_maps"] = _heat_maps(rows, pair, cells // len(summaries))
            drawn = {
                "Joint density of both errors, pooled over matrices. A tilt would be correlation; at e2 = 0 lie values"
                " that the second format holds exactly.": draw_density(pair.get("density"), label),
                "Correlation of e1 and e2, matrix by matrix; dashed: mean.": draw_correlations(rows, label),
                "The same against where the first format's global scale falls between two powers of two.": draw_phase(
                    rows, label
                ),
            }
            section["figures"] = [(Markup(_numbered(svg, index)), caption) for caption, svg in drawn.items() if svg]
            worst = rows.nsmallest(WORST_MATRICES, "sqnr_total_db")
            section["worst"] = worst.to_dict("records")
        shown.append(section)
    return shown


def _gemm_arms(files: RunFiles, arms: list[str]) -> list[dict[str, Any]]:
    """A row per arm: its summaries by kind, and under "any" one of them for what they share."""
    rows: dict[str, dict[str, Any]] = {}
    for summary in (files.analysis or {}).get("gemm", []):
        rows.setdefault(summary["arm"], {"any": summary})[summary["kind"]] = summary
    return list(_in_order(rows, arms).values())


def _heat_maps(rows: pd.DataFrame, pair: dict[str, Any], budget: int) -> list[HeatMap]:
    shares = [
        ("sqnr_total_db", f"{pair['second_arm']}: SQNR of the weights after both quantizations", 0.7),
        ("sqnr_first_db", f"{pair['first_arm']}: SQNR after the first quantization alone", 0.15),
        ("sqnr_direct_db", f"{pair['second_format']} directly from the source", 0.15),
    ]
    maps = [make_heat_map(rows, column, title, int(budget * share)) for column, title, share in shares]
    return [heat_map for heat_map in maps if heat_map is not None]


def _rows_of(frame: pd.DataFrame | None, pair: dict[str, Any]) -> pd.DataFrame | None:
    if frame is None:
        return None
    keys = ("first_arm", "second_arm", "second_rule")
    chosen = frame
    for key in keys:
        chosen = chosen[chosen[key] == pair[key]]
    return chosen if len(chosen) else None


def _numbered(svg: str, index: int) -> str:
    """Figures of the second pair need ids of their own."""
    if index == 0:
        return svg
    for name in ("density", "corr", "phase"):
        svg = svg.replace(f'"{name}-', f'"{name}{index}-').replace(f"#{name}-", f"#{name}{index}-")
    return svg


def _in_order(by_arm: dict[str, T], arms: list[str]) -> dict[str, T]:
    return dict(sorted(by_arm.items(), key=lambda item: arms.index(item[0]) if item[0] in arms else len(arms)))


def _stages(files: RunFiles) -> list[tuple[str, float]]:
    return list(files.manifest.stage_seconds.items()) if files.manifest else []
