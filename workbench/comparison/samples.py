"""Reading lm-eval's sample files for pairing: one `Item` per document of a task under a filter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ComparisonError
from workbench.records import Evaluation, TaskScore, read_json

Key = tuple[str, int]
"""(lm-eval task, doc_id): a group's tasks each count their documents from 0."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answered document. prompt, document, settings: what must be equal in both arms for the answers to be
    comparable.
    """

    correct: bool
    prompt: str
    document: str
    target_hash: str
    settings: str
    question: str
    target: str
    answer: str


def read_evaluation(run_dir: Path, arm: str) -> Evaluation:
    """`eval/<arm>/scores.json`. Raises ComparisonError when it is missing or unreadable."""
    path = run_dir / "eval" / arm / "scores.json"
    if not path.is_file():
        raise ComparisonError(f"arm {arm!r} has no evaluation: {path} does not exist", fix="evaluate this arm first")
    try:
        return read_json(Evaluation, path)
    except (ValueError, TypeError, KeyError) as error:
        raise ComparisonError(f"{path} is not an evaluation: {error}", fix="evaluate this arm again") from error


def read_items(run_dir: Path, score: TaskScore) -> dict[Key, Item]:
    """All documents of one (arm, task, filter). Raises ComparisonError naming file, line or document."""
    items: dict[Key, Item] = {}
    for name in score.samples.split(";"):
        path = run_dir / name
        if not path.is_file():
            raise ComparisonError(
                f"arm {score.arm!r}, task {score.task!r}: sample file {path} does not exist",
                fix="evaluate this arm again",
            )
        leaf = path.stem.removeprefix("samples_").rpartition("_")[0]
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _parse(line, path, number)
                if row["filter"] != score.filter:
                    continue
                key = (leaf, int(row["doc_id"]))
                if key in items:
                    raise ComparisonError(f"{path}, line {number}: document {key[1]} of {leaf} appears twice")
                items[key] = _item(row, score, path, number)
    if len(items) != score.n:
        raise ComparisonError(
            f"arm {score.arm!r}, task {score.task!r}, filter {score.filter}: the sample files hold {len(items)} "
            f"documents, the scores say {score.n}",
            fix="evaluate this arm again",
        )
    return items


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not {"doc_id", "filter", "doc_hash", "prompt_hash", "target_hash", "resps", "arguments"} <= set(row):
            raise ValueError("not a row of lm-eval's sample files")
        return dict(row)
    except (ValueError, TypeError) as error:
        raise ComparisonError(f"{path}, line {number}: {error}", fix="evaluate this arm again") from error


def _item(row: dict[str, Any], score: TaskScore, path: Path, number: int) -> Item:
    value = row.get(score.metric)
    if value not in (0, 1):
        raise ComparisonError(
            f"{path}, line {number}: {score.metric} is {value!r}, a paired comparison needs right (1) or wrong (0)"
        )
    document = row["doc"] if isinstance(row.get("doc"), dict) else {}
    request = row["arguments"].get("gen_args_0", {})
    return Item(
        correct=bool(value),
        prompt=row["prompt_hash"],
        document=row["doc_hash"],
        target_hash=row["target_hash"],
        settings=json.dumps(request.get("arg_1"), sort_keys=True) if isinstance(request.get("arg_1"), dict) else "",
        question=_question(document, str(request.get("arg_0", ""))),
        target=_target(document, str(row.get("target", ""))),
        answer=_answer(row["resps"]),
    )


def _question(document: dict[str, Any], prompt: str) -> str:
    for field in ("question", "query", "problem", "prompt", "input"):
        if isinstance(document.get(field), str):
            options = document.get("options")
            lines = (
                [f"{chr(65 + i)}. {option}" for i, option in enumerate(options)] if isinstance(options, list) else []
            )
            return "\n".join([document[field], *lines])
    return prompt[-1000:]


def _target(document: dict[str, Any], target: str) -> str:
    """The target as a reader wants it: a worked solution is cut to what follows `####`."""
    return target.rpartition("####")[2].strip() if "####" in target else target


def _answer(responses: list[Any]) -> str:
    first = responses[0][0] if responses and responses[0] else ""
    return first if isinstance(first, str) else json.dumps(first)
