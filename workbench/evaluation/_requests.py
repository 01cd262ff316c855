"""Which answer belongs to which document: `requests_<task>.jsonl`, beside lm-eval's sample files.

One line for each request of a document, with what lm-eval's own rows lack. Written by the harness process, read by
scores and panels; works on dictionaries and imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.evaluation._journal import Answer
from workbench.evaluation.thinking import leaks, split_thinking
from workbench.records import json_text, write_text


def request_rows(
    asked: Iterable[Any], answers: dict[str, Answer], failures: dict[str, str], thinking: str
) -> dict[str, list[dict[str, Any]]]:
    """task -> rows, in the order asked. asked: the client's list; thinking: the tag that ends a think block, or ""."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for task, doc_id, idx, key in asked:
        answer = answers.get(key, Answer(key=key, error=failures.get(key, "")))
        state = "none"
        if thinking and answer.text is not None:
            state = split_thinking(answer.text, answer.finish_reason, end=thinking, reasoning=answer.reasoning).state
        elif thinking and answer.reasoning:
            state = "open"
        rows.setdefault(task, []).append(
            {
                "doc_id": doc_id,
                "idx": idx,
                "payload": key,
                "null": answer.text is None and not answer.error,
                "characters": len(answer.text or ""),
                "leak": not thinking and leaks(answer.text or ""),
                "thinking": state,
                "raw": answer.text if thinking else None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "prompt_ids": list(answer.prompt_ids),
                "first_ids": list(answer.first_ids),
                "seconds": answer.seconds,
                "attempts": answer.attempts,
                "error": answer.error,
            }
        )
    return rows


def requests_path(folder: Path, task: str) -> Path:
    """Where the requests of an lm-eval task are kept."""
    return folder / f"requests_{task}.jsonl"


def write_requests(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """One file a task, in the order of documents."""
    for task, found in rows.items():
        ordered = sorted(found, key=lambda row: (row["doc_id"], row["idx"]))
        text = "".join(json_text(row) + "\n" for row in ordered)
        write_text(requests_path(folder, task), text)


def read_requests(folder: Path, task: str) -> dict[int, list[dict[str, Any]]]:
    """doc_id -> its requests; empty for a folder that another client wrote."""
    path = requests_path(folder, task)
    found: dict[int, list[dict[str, Any]]] = {}
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                found.setdefault(row["doc_id"], []).append(row)
    return found
