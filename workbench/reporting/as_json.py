"""report.json: the figures of the page as plain data, from the context that the page and summary.md are made of.

    write_text(run_dir / "report.json", report_json(context))

Records keep their own field names and units; NaN is null, infinities are "inf" and "-inf". Flips are in flips.jsonl,
matrices in tensors.parquet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from workbench.records import SCHEMA_VERSION, TaskComparison, plain


def report_json(context: dict[str, Any]) -> str:
    """The page's figures as indented JSON."""
    files = context["files"]
    content = {
        "schema_version": SCHEMA_VERSION,
        "experiment": files.manifest.experiment if files.manifest else files.run_dir.name,
        "unreadable": files.problems,
        "verdict": files.verdict,
        "detectable": [_sight_row(row) for row in context["sight"]],
        "noise_floor": [{"task": t, "filter": f, "discordance": v} for t, f, v in context["noise"]],
        "arms": [_arm_row(row) for row in context["arms"]],
        "numerics": context["cards"],
        "serving_cost": context["serving_cost"],
        "scores": context["scores"],
        "perplexities": context["perplexities"],
        "comparisons": [_without(c, "flips") for c in context["comparisons"]],
        "graded": context["graded"],
        "preflights": context["preflights"],
        "artefacts": context["panels"],
        "transports": context["transports"],
        "divergences": context["divergences"],
        "weights": [_pair(section) for section in context["pairs"]],
        "products": context["gemm_rows"],
        "worst_blocks": context["worst_blocks"],
        "faults": context["faults"],
        "claims": context["claims"],
        "lint": context["lint"],
        "run": files.manifest,
        "repeat": context["repeat"],
        "server_commands": context["commands"],
        "harness_commands": context["harness"],
        "data": context["data_prints"],
    }
    return json.dumps(plain(_data(content)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def flip_lines(comparisons: Iterable[TaskComparison]) -> str:
    """flips.jsonl: a line per item whose correctness changed, with both arms, the question and both whole answers."""
    lines = [
        json.dumps({"baseline": c.baseline, "candidate": c.candidate, **dataclasses.asdict(flip)}, ensure_ascii=False)
        for c in comparisons
        for flip in c.flips
    ]
    return "".join(f"{line.translate(_LINE_ENDS)}\n" for line in lines)


_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # some readers would end a line there


def _data(value: Any) -> Any:
    """Records and numpy scalars as plain Python."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_data(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _without(record: Any, *left_out: str) -> dict[str, Any]:
    return {k: v for k, v in _data(record).items() if k not in left_out}


def _sight_row(row: dict[str, Any]) -> dict[str, Any]:
    c, check = row["comparison"], row["check"]
    return {
        "task": c.task, "filter": c.filter, "arm": c.candidate, "n": c.n, "loss_pp": c.loss_pp,
        "loss_low_pp": c.loss_low_pp, "loss_high_pp": c.loss_high_pp, "loss_upper95_pp": c.loss_upper95_pp,
        "mde_pp": c.mde_pp, "margin_pp": check.limit if check else None, "status": check.status if check else None,
        "noise": row["noise"],
    }  # fmt: skip


def _arm_row(row: dict[str, Any]) -> dict[str, Any]:
    server = row["server"]
    return {
        "arm": row["name"],
        "baseline": row["baseline"],
        "bits": row["bits"],
        "weight_share": row["weight_share"],
        "server": _without(server, "layers", "log") if server else None,
        "speed": row["speed"] and {"load": row["speed"][0], "output_tokens_per_s": row["speed"][1]},
        "latency_median_s": row["latency_s"],
        "scores": [{"task": s.task, "filter": s.filter, "value": s.value, "low": s.low, "high": s.high}
                   for s in row["primary"].values()],
        "recovery": [
            {"task": c.task, "filter": c.filter, "percent": c.recovery_percent, "low": c.recovery_low_percent,
             "high": c.recovery_high_percent}
            for c in row["recovery"].values()
        ],
    }  # fmt: skip


def _pair(section: dict[str, Any]) -> dict[str, Any]:
    return {
        **{k: v for k, v in section["summary"].items() if k != "density"},
        "pooled": {
            "model": section["model"],
            "projections": section["projections"],
            "worst_experts": section["experts"],
        },
        "worst_matrices": section["worst"],
        "fused": {"of": section["fused_of"], "changed": section["fused_changed"], "worst": section["fused"]},
    }
