"""What must agree before two figures of different runs may be set side by side, and what differs between runs.

    task_setting(files, score)      # data, prompts, shots, ...: of scores
    machine_setting(files, arm)     # processor, GPUs, engine and versions: of speed and resident memory
    weight_setting(files, pair)     # the source's checkpoint: of SQNR and correlation
    differing(runs)                 # settings, versions, machines, checkpoints and data that are not the same

A setting is {what: value}; None: not recorded. Two figures are comparable where their settings are equal and nothing of
them is unknown, or where one run measured both under settings that it recorded alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from workbench.records import TaskScore

from .load import RunFiles

Setting = dict[str, str | None]


def comparable(a: Setting, b: Setting, same_run: bool) -> bool:
    """Whether figures under the two settings may be compared."""
    return a == b and (same_run or None not in a.values())


def task_setting(files: RunFiles, score: TaskScore) -> Setting:
    """Of a score. Prompts: the harness' own hash over documents, prompts and answers of every document."""
    evaluation = files.evaluations.get(score.arm)
    preflight = files.preflights.get(score.arm)
    asked = [t for t in preflight.tasks if t.task == score.task] if preflight else []
    hashes = evaluation.task_fingerprints if evaluation else {}
    return {
        "data and prompts": hashes.get(score.task) or (asked[0].prompt_fingerprint if asked else None),
        "data": asked[0].data_fingerprint if asked else hashes.get(score.task),
        "shots": str(score.num_fewshot),
        "items": str(score.n),
        "metric": f"{score.metric}, {score.filter}",
        "answer budget": str(asked[0].answer_budget_tokens) if asked else None,
        "API": evaluation.api if evaluation else None,
        "harness": evaluation.harness if evaluation else None,
    }


def machine_setting(files: RunFiles, arm: str) -> Setting:
    """Of speed and resident memory: hardware, engine and versions. Of a server of others its host alone is known."""
    manifest, server = files.manifest, files.servers.get(arm)
    if server is not None and server.engine == "external":
        return {"processor": None, "GPUs": None, "engine's version": None, "host": urlsplit(server.base_url).hostname}
    return {
        "processor": (manifest.cpu or None) if manifest else None,
        "cores": str(manifest.cpu_count) if manifest else None,
        "GPUs": (", ".join(manifest.gpus) or "none") if manifest else None,
        "engine": (server.engine or None) if server else None,
        "engine's version": (server.engine_version or None) if server else None,
        "torch": manifest.packages.get("torch") if manifest else None,
        "workbench": manifest.code_version if manifest else None,
    }


def cost_setting(files: RunFiles, load: str, arm: str) -> Setting:
    """Of an arm's serving cost under a load."""
    cost, manifest = files.serving_cost, files.manifest
    if cost is not None and arm in cost.urls:
        unknown: Setting = {"machine": None, "GPUs": None, "engine's version": None}
        return {**unknown, "host": urlsplit(cost.urls[arm]).hostname, "load": load}
    return {
        "machine": (cost.machine or None) if cost else None,
        "cores": str(cost.cores) if cost else None,
        "GPUs": (", ".join(manifest.gpus) or "none") if manifest else None,
        "engine's version": (cost.engine_version or None) if cost else None,
        "workbench": manifest.code_version if manifest else None,
        "load": load,
        "servers": ("all up" if cost.together else "one at a time") if cost else None,
    }


def weight_setting(files: RunFiles, pair: dict[str, Any]) -> Setting:
    """Of the weights' figures: what they are relative to, and which matrices."""
    return {
        "source's checkpoint": fingerprint_of(files, str(pair["source_arm"])),
        "matrices": str(pair["matrices"]),
        "weights": str(pair["weights"]),
    }


def fingerprint_of(files: RunFiles, arm: str) -> str | None:
    """Of an arm's checkpoint: what its server loaded, or what the manifest says of a checkpoint of that name."""
    server = files.servers.get(arm)
    if server is not None and server.fingerprint:
        return server.fingerprint
    described = files.manifest.checkpoints.get(arm, {}) if files.manifest else {}
    return described.get("fingerprint")


def differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[tuple[str, list[str | None]]]]]:
    """(group, [(what, its value in each run)]) of what is not the same in all runs. None: the run does not say."""
    groups: dict[str, list[dict[str, Any]]] = {
        "Settings": [settings_of(files) for files in runs],
        "Code, versions and machine": [_versions(files) for files in runs],
        "Checkpoints": [_checkpoints(files) for files in runs],
        "Task data and prompts": [_task_data(files) for files in runs],
    }
    found = []
    for title, columns in groups.items():
        keys = list(dict.fromkeys(key for column in columns for key in column))
        empty = "" if title == "Settings" else None  # a setting may be an empty text; a record's says nothing
        rows = [(key, [column.get(key) or empty if key in column else None for column in columns]) for key in keys]
        rows = [(key, values) for key, values in rows if len(set(values)) > 1]
        if rows:
            found.append((title, rows))
    return found


def settings_of(files: RunFiles) -> dict[str, str]:
    """The resolved configuration, flat: {"engine.max_model_len": "2048", ...}."""
    flat: dict[str, str] = {}
    if files.settings:
        _flatten(files.settings, "", flat)
    return flat


def _flatten(value: Any, path: str, flat: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(item, f"{path}.{key}" if path else str(key), flat)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            _flatten(item, f"{path}[{index}]", flat)
    else:
        flat[path] = value if isinstance(value, str) else json.dumps(value, default=str)


def _versions(files: RunFiles) -> dict[str, str | None]:
    m = files.manifest
    if m is None:
        return {}
    return {
        "workbench": m.code_version,
        "commit": m.code_commit or None,
        "Python": m.python,
        "platform": m.platform,
        "processor": m.cpu,
        "cores": str(m.cpu_count),
        "memory, GiB": f"{m.memory_bytes / 2**30:.1f}",
        "GPUs": ", ".join(m.gpus) or "none",
        **{f"package {name}": version for name, version in sorted(m.packages.items())},
        **{f"engine of {arm}": f"{s.engine} {s.engine_version}".strip() for arm, s in sorted(files.servers.items())},
    }


def _checkpoints(files: RunFiles) -> dict[str, str | None]:
    described = files.manifest.checkpoints if files.manifest else {}
    found: dict[str, str | None] = {
        name: " ".join(part for part in (entry.get("fingerprint", ""), entry.get("dialect", "")) if part)
        for name, entry in described.items()
    }
    served = {f"served as {arm}": s.fingerprint or None for arm, s in sorted(files.servers.items())}
    return {**found, **served}


def _task_data(files: RunFiles) -> dict[str, str | None]:
    """By task; arms of one run that were asked different things are told apart."""
    found: dict[str, dict[str, None]] = {}
    for evaluation in files.evaluations.values():
        for task, value in evaluation.task_fingerprints.items():
            found.setdefault(task, {})[value] = None
    for preflight in files.preflights.values():
        for t in preflight.tasks:
            found.setdefault(f"{t.task}: data", {})[t.data_fingerprint] = None
            found.setdefault(f"{t.task}: prompts", {})[t.prompt_fingerprint] = None
    return {task: " / ".join(sorted(values)) for task, values in sorted(found.items())}
