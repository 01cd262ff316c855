"""The numerics card of a server: what its workers wrote down, grouped, and set against what the arm asks for.

    env |= worker_environment(spec, facts)     # with --worker-cls WORKER, before the start (see command.py)
    card = read_card(spec, facts)                                         # once it answers
    print(card.verdict)                                                   # "runs as asked: 25 layers"

The facts are `numerics_worker.py`'s, taken from the loaded modules. What is asked is the arm's: the backend's plan for
every module of the checkpoint, or under backend "stock" what the checkpoint's producer declares. Imports no vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.records import NumericsCard, NumericsRow

from .spec import STOCK, ServeSpec
from .vllm_plugin.settings import DECODED_AT_LOAD, plan_modules

WORKER = "workbench.serving.numerics_worker.NumericsWorker"
JOB = "WORKBENCH_NUMERICS"  # numerics_worker.JOB, which cannot be imported without vLLM
_LAYER = re.compile(r"(?<=layers\.)(\d+)(?=\.)")
_WORST_LAST = ("exact", "fits", "rounded", "", "not", "scaled", "differs")


def worker_environment(spec: ServeSpec, facts: Path) -> dict[str, str]:
    """What tells the worker where to write, and which checkpoint to compare with."""
    from workbench.checkpoints.open import resolve_path

    job = {
        "path": str(facts.absolute()),
        "checkpoint": str(resolve_path(spec.checkpoint).absolute()),
        "format": spec.format or "",
        "rule": spec.rule or "",
    }
    return {JOB: json.dumps(job)}


def facts_path(audit: Path) -> Path:
    """Where the worker writes its facts, beside its audit: `<stem>.facts.json`."""
    return audit.with_name(f"{audit.name.removesuffix('.audit.json')}.facts.json")


def read_card(spec: ServeSpec, facts: Path) -> NumericsCard:
    """The card of a server that answers; `error` says why where no facts were written."""
    try:
        ranks = [json.loads(facts.read_text())]
        ranks += [json.loads(p.read_text()) for p in sorted(facts.parent.glob(f"{facts.name}.rank*"))]
    except (OSError, ValueError) as error:
        return no_card(spec.arm, spec.backend, f"the worker wrote no facts ({error})")
    first = ranks[0]
    if wrong := next((r["error"] for r in ranks if r["error"]), ""):
        return no_card(spec.arm, spec.backend, wrong, engine_version=first["engine_version"])
    asked = _asked(spec)
    layers = _over_ranks(ranks, asked)
    rows = group_rows([_row(layer, asked) for layer in layers])
    probed = sum(row.count for row in rows if not row.not_probed)
    findings = tuple(f"{row.where}: {row.finding}" for row in rows if row.finding)
    return NumericsCard(
        arm=spec.arm,
        backend=spec.backend,
        engine_version=first["engine_version"],
        device=first["device"],
        verdict=_verdict(rows),
        findings=findings,
        rows=tuple(rows),
        layers=len(layers),
        probed=probed,
        ranks=int(first["ranks"]),
        seconds=max(float(r["seconds"]) for r in ranks),
    )


def no_card(arm: str, backend: str, error: str, *, verdict: str = "no card", engine_version: str = "") -> NumericsCard:
    """A card that says why there is none."""
    return NumericsCard(
        arm=arm,
        backend=backend,
        engine_version=engine_version,
        device="",
        verdict=f"{verdict}: {error}",
        error=error,
    )


def group_rows(rows: Iterable[NumericsRow]) -> list[NumericsRow]:
    """Rows of the same facts as one, in order of first appearance, with the largest errors."""
    groups: dict[tuple[Any, ...], list[NumericsRow]] = {}
    for row in rows:
        key: tuple[Any, ...] = (
            row.modules,
            row.method,
            row.kernel,
            row.storage,
            row.weights,
            row.match.split(" by ")[0],
        )
        key += (row.activation, row.activation_scale, row.codes, row.not_probed, row.asked, row.finding, row.differing)
        groups.setdefault(key, []).append(row)
    return [_joined(group) for group in groups.values()]


def table(card: NumericsCard) -> str:
    """The card as text for a terminal: a line a row, then the findings and the verdict."""
    lines = []
    for row in card.rows:
        runs = f"weights {row.said_weights}; input {row.said_input}"
        lines.append(f"{'!' if row.finding else ' '} {row.count:4} x {row.where}")
        lines.append(f"         {row.runs_by} [{row.storage}]")
        lines.append(f"         {f'not probed: {row.not_probed}' if row.not_probed else runs}")
    lines += [f"! {finding}" for finding in card.findings]
    return "\n".join([*lines, f"{card.arm}: {card.verdict}"])


# ---- what is asked ---------------------------------------------------------------------------------------------------


def _asked(spec: ServeSpec) -> dict[str, tuple[str, str, str]]:
    """Checkpoint module -> (weights, activation, activation scale) that the arm says. A scale "" is left open."""
    from workbench.checkpoints import open_checkpoint

    from .command import plugin_settings

    with open_checkpoint(spec.checkpoint) as checkpoint:
        entries = [e for e in checkpoint.entries() if e.projection]
        asked = {e.module: (e.format, "none", "") for e in entries}
        if spec.backend == STOCK:
            declared = checkpoint.declaration
            for e in entries:
                if e.quantized and e.module not in declared.weight_only and declared.activations:
                    scale = "static" if e.has_input_scale else ""
                    asked[e.module] = (e.format, _family(declared.activations), scale)
            return asked
        settings = plugin_settings(spec)
        for plan in plan_modules(checkpoint, settings).values():
            weights = f"{plan.weight} at load" if plan.converts(settings) else plan.weight
            activation, scale = plan.activation, "static" if plan.static else ""
            if plan.activation == "nvfp4" and not plan.static:
                scale = "per token"
            if spec.compat != "none":
                scale = ""  # vLLM's own way to combine them
            if plan.module.endswith(DECODED_AT_LOAD):  # with its input as it is
                activation, scale = "none", ""
            asked[plan.module] = (weights, activation, scale)
    return asked


def _family(activations: str) -> str:
    """A declared activation format as the probe names it: fp8_tensor and its like are fp8."""
    return next((f for f in ("fp8", "int8") if activations.startswith(f)), activations)


def _finding(layer: dict[str, Any], wanted: set[tuple[str, str, str]]) -> str:
    """What of the asked numerics does not hold, in words."""
    if layer["not_probed"] or not wanted:
        return ""
    weights = {w for w, _, _ in wanted}
    found: list[str] = []
    if layer["match"] == "differs":
        found.append(
            f"its weights are none of the checkpoint's ({layer['weight_error']:.2g} relative error to"
            f" {layer['weights'] or 'it'})"
        )
    elif layer["match"].startswith("scaled"):
        found.append(f"{layer['weights']} weights come out {layer['match']}, as with another matrix's global scale")
    elif layer["weights"] and not set(layer["weights"].split("+")) <= weights:
        found.append(f"asked {_words(weights)} weights, runs {layer['weights']}")
    activations = {a for _, a, _ in wanted}
    if layer["activation"] == "unclear":
        found.append(f"the input's rounding is none of those known ({layer['differing'] or 'nothing fits'})")
    elif layer["activation"] and layer["activation"] not in activations:
        asked = _words(activations)
        runs = "not rounded (weight-only)" if layer["activation"] == "none" else f"rounded to {layer['activation']}"
        found.append(f"input asked {'as it is' if asked == 'none' else f'in {asked}'}, runs {runs}")
    else:
        scales = {s for _, _, s in wanted} - {""}
        if scales and not scales & set(layer["scale"].split(" or ")) and layer["activation"] != "none":
            found.append(f"asked {_words(scales)} input scales, runs {layer['scale'] or 'another'}")
    if layer["differing"] and layer["activation"] != "unclear":
        found.append(f"not alike: {layer['differing']}")
    by = " / ".join(filter(None, (layer["method"], layer["kernel"])))
    return f"{'; '.join(found)} [{by}]" if found else ""


def _wanted(layer: dict[str, Any], asked: dict[str, tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    return {asked[module] for module in layer["modules"] if module in asked}


def _words(values: set[str]) -> str:
    return " and ".join(sorted(values))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _over_ranks(ranks: list[dict[str, Any]], asked: dict[str, tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The layers of all ranks, once each; where ranks disagree, the worst with a word of it. Pipeline ranks have layers
    of their own."""
    by_name: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for facts in ranks:
        for layer in facts["layers"]:
            by_name.setdefault(layer["name"], []).append((facts["rank"], layer))
    merged = []
    for seen in by_name.values():
        rank, worst = max(seen, key=lambda item: (bool(_finding(item[1], _wanted(item[1], asked))), _badness(item[1])))
        kinds = {(s["weights"], s["match"].split(" by ")[0], s["activation"], s["method"]) for _, s in seen}
        layer = dict(worst)
        if len(kinds) > 1:
            layer["differing"] = "; ".join(filter(None, (worst["differing"], f"rank {rank} differs from others")))
        layer["sampled"] = sorted({e for _, s in seen for e in s["sampled"]})
        merged.append(layer)
    return merged


def _badness(layer: dict[str, Any]) -> int:
    return _WORST_LAST.index(layer["match"].split(" ")[0])


def _row(layer: dict[str, Any], asked: dict[str, tuple[str, str, str]]) -> NumericsRow:
    number = _LAYER.search(layer["name"])
    wanted = _wanted(layer, asked)
    in_words = {f"{w}, activations {a}{f' ({s})' if s else ''}" for w, a, s in wanted}
    return NumericsRow(
        modules=_LAYER.sub("*", layer["name"], count=1),
        layers=number[0] if number else "",
        count=1,
        kind=layer["kind"],
        method=layer["method"],
        kernel=layer["kernel"],
        storage=layer["storage"],
        weights=layer["weights"],
        match=layer["match"],
        weight_error=float(layer["weight_error"]),
        activation=layer["activation"],
        activation_scale=layer["scale"],
        residual=float(layer["residual"]),
        codes=layer["codes"],
        experts=", ".join(str(e) for e in layer["sampled"]),
        differing=layer["differing"],
        not_probed=layer["not_probed"],
        asked=_words(in_words),
        finding=_finding(layer, wanted),
    )


def _joined(rows: list[NumericsRow]) -> NumericsRow:
    import dataclasses

    experts = sorted({int(e) for row in rows for e in row.experts.split(", ") if e})
    worst = max(rows, key=lambda r: (r.weight_error == r.weight_error, r.weight_error))
    return dataclasses.replace(
        worst,
        layers=_ranges([int(row.layers) for row in rows if row.layers]),
        count=sum(row.count for row in rows),
        residual=max(rows, key=lambda r: (r.residual == r.residual, r.residual)).residual,
        experts=", ".join(map(str, experts)),
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _verdict(rows: list[NumericsRow]) -> str:
    computing = [row for row in rows if row.kind not in ("attention", "embedding")]
    total = sum(row.count for row in computing)
    unprobed = sum(row.count for row in computing if row.not_probed)
    aside = f"; {unprobed} could not be probed" if unprobed else ""
    wrong = [row for row in rows if row.finding]
    if not wrong:
        return f"runs as asked: {total - unprobed} layers{aside}"
    first = f"{wrong[0].where}: {wrong[0].finding}"
    more = f" (and {len(wrong) - 1} more kinds)" if len(wrong) > 1 else ""
    return f"{sum(row.count for row in wrong)} of {total} layers do not run as asked: {first}{more}{aside}"
