"""Writes lm-eval output folders as lm-eval 0.4.13 does, from lists of right and wrong answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIME = "2026-01-02T03-04-05.000006"


def row(
    doc_id: int, value: Any, *, filter_name: str = "none", metric: str = "exact_match", **changes: Any
) -> dict[str, Any]:
    found = {
        "doc_id": doc_id,
        "doc": {"question": f"Question {doc_id}?"},
        "target": str(doc_id),
        "arguments": {"gen_args_0": {"arg_0": f"prompt {doc_id}", "arg_1": {"until": ["Q"], "max_gen_toks": 8}}},
        "resps": [[f"answer {doc_id}"]],
        "filtered_resps": [str(doc_id)],
        "filter": filter_name,
        "metrics": [metric],
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": f"t{doc_id}",
        metric: value,
    }
    return {**found, **changes}


def write_samples(folder: Path, task: str, rows: Sequence[dict[str, Any]], time: str = TIME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples_{task}_{time}.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows), encoding="utf-8")
    return path


def write_results(folder: Path, time: str = TIME, **content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"results_{time}.json").write_text(json.dumps(content), encoding="utf-8")


def table(both: int, lost: int, gained: int, neither: int) -> tuple[list[bool], list[bool]]:
    pairs = [(True, True)] * both + [(True, False)] * lost + [(False, True)] * gained + [(False, False)] * neither
    return [a for a, _ in pairs], [b for _, b in pairs]


def write_task(folder: Path, task: str, right: Sequence[bool], **changes: Any) -> None:
    write_samples(folder, task, [row(i, float(value), **changes) for i, value in enumerate(right)])
