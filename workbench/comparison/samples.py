"""Reading lm-eval's sample files for pairing: one `Item` per document of a task under a filter.

Files of other versions are read as well: where a row lacks one of lm-eval's hashes, it is computed as lm-eval does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ComparisonError
from workbench.records import Evaluation, TaskScore, read_json

_AGAIN = "evaluate this arm again, or judge another metric of the task"
Key = tuple[str, int]
"""(lm-eval task, doc_id): a group's tasks each count their documents from 0."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answered document. prompt, document, target_hash, settings: what must be equal in both arms for the answers
    to be comparable ("" where the file does not tell). value: 0 or 1 for right and wrong, else the graded score.
    stratum: subject, "" where the document names none; problem: what a repeated document (avg@k) asks, -1 where it is
    asked once.
    """

    value: float
    prompt: str
    document: str
    target_hash: str
    settings: str
    question: str
    target: str
    answer: str
    stratum: str = ""
    problem: int = -1

    @property
    def correct(self) -> bool:
        return self.value == 1.0


def read_evaluation(run_dir: Path, arm: str) -> Evaluation:
    """`eval/<arm>/scores.json`. Raises ComparisonError when it is missing, unreadable or another arm's."""
    path = run_dir / "eval" / arm / "scores.json"
    if not path.is_file():
        raise ComparisonError(f"arm {arm!r} has no evaluation: {path} does not exist", fix="evaluate this arm first")
    try:
        evaluation = read_json(Evaluation, path)
    except (ValueError, TypeError, KeyError) as error:
        raise ComparisonError(f"{path} is not an evaluation: {error}", fix="evaluate this arm again") from error
    check_arm(path, arm, evaluation)
    return evaluation


def check_arm(path: Path, arm: str, evaluation: Evaluation) -> None:
    """Refuse a scores.json that lies in one arm's folder and is another's, as a copied folder's is. Raises
    ComparisonError naming both.
    """
    for named in (evaluation.arm, *(score.arm for score in evaluation.scores)):
        if named != arm:
            raise ComparisonError(
                f"{path} names the arm {named!r}, and stands for {arm!r}: a copied or renamed folder",
                fix=f"evaluate {arm} again, or delete its folder",
            )


def digest(path: Path) -> str:
    """sha256 of a file. Raises ComparisonError where it is missing."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ComparisonError(
            f"{path} cannot be read: {error.strerror or error}", fix="evaluate this arm again"
        ) from error


def read_items(root: Path, score: TaskScore, *, graded: bool = False) -> dict[Key, Item]:
    """All documents of one (arm, task, filter). root: what `score.samples` is relative to; graded: any finite score is
    taken, not only 0 and 1. Raises ComparisonError naming file, line or document.
    """
    items: dict[Key, Item] = {}
    for name in score.samples.split(";"):
        path = root / name
        if not path.is_file():
            raise ComparisonError(
                f"arm {score.arm!r}, task {score.task!r}: sample file {path} does not exist",
                fix="evaluate this arm again",
            )
        leaf = task_of(path)
        for number, row in read_rows(path):
            if row["filter"] != score.filter:
                continue
            key = (leaf, int(row["doc_id"]))
            if key in items:
                raise ComparisonError(
                    f"{path}, line {number}: document {key[1]} of {leaf} appears twice",
                    fix="evaluate this arm again, into an empty folder",
                )
            items[key] = _item(row, score.metric, graded, f"{path}, line {number}")
    right = sum(item.value for item in items.values())
    if len(items) == score.n and not graded and not abs(score.value * score.n - right) < 0.5:
        raise ComparisonError(
            f"arm {score.arm!r}, task {score.task!r}, filter {score.filter}: the scores say {score.metric} "
            f"{score.value:.4f}, the sample files hold {right / score.n:.4f} ({right:.0f} of {score.n})",
            fix="evaluate this arm again",
        )
    if len(items) != score.n:
        raise ComparisonError(
            f"arm {score.arm!r}, task {score.task!r}, filter {score.filter}: the sample files hold {len(items)} "
            f"documents, the scores say {score.n}",
            fix="evaluate this arm again",
        )
    return items


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a samples_*.jsonl; every row has `filter`. Raises ComparisonError naming file and line."""
    if not path.is_file():
        raise ComparisonError(f"{path} is no regular file", fix="evaluate this arm again")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode())
                if not isinstance(row, dict) or type(row.get("doc_id")) is not int or "resps" not in row:
                    raise ValueError("not a row of lm-eval's sample files")
                if "prompt_hash" not in row and not row.get("arguments"):
                    raise ValueError("neither prompt_hash nor arguments: equal prompts cannot be checked")
                if not isinstance(row.get("filter", ""), str):
                    raise ValueError(f"filter is {row['filter']!r}, expected a name")
                _request(row.get("arguments"))
            except (ValueError, TypeError, RecursionError) as error:
                raise ComparisonError(f"{path}, line {number}: {error}", fix="evaluate this arm again") from error
            yield number, {"filter": "none", **row}


def task_of(path: Path) -> str:
    """`samples_<task>_<ISO time>.jsonl` -> task; the time is lm-eval's, with `-` for `:`."""
    return path.stem.removeprefix("samples_").rpartition("_")[0]


def finite_number(value: Any) -> float | None:
    """A score as a float; None for what is no number below 1e100."""
    if not isinstance(value, (bool, int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond float64
        return None
    return number if abs(number) < 1e100 else None


def is_empty(responses: Any) -> bool:
    """Whether a row's first answer is null, white space or not there; a log-likelihood is an answer."""
    first = responses
    while isinstance(first, list):
        if not first:
            return True
        first = first[0]
    return first is None or (isinstance(first, str) and not first.strip())


def _item(row: dict[str, Any], metric: str, graded: bool, where: str) -> Item:
    value = finite_number(row.get(metric))
    found = str(row.get(metric))[:40]
    if graded and value is None:
        raise ComparisonError(f"{where}: {metric} is {found}, expected a finite score", fix=_AGAIN)
    if not graded and value not in (0.0, 1.0):
        raise ComparisonError(
            f"{where}: {metric} is {found}, a paired comparison needs right (1) or wrong (0)", fix=_AGAIN
        )
    assert value is not None
    document = row["doc"] if isinstance(row.get("doc"), dict) else {}
    prompt, settings = _request(row.get("arguments"))
    repeated = "repeat" in document and type(document.get("problem")) is int
    return Item(
        value=value,
        prompt=str(row.get("prompt_hash") or _hash(prompt)),
        document=str(row.get("doc_hash") or (_hash_document(row["doc"]) if "doc" in row else "")),
        target_hash=str(row.get("target_hash") or (_hash(str(row["target"])) if "target" in row else "")),
        settings=settings,
        question=_question(document, prompt),
        target=_target(document, str(row.get("target", ""))),
        answer=_answer(row["resps"]),
        stratum=document["category"] if isinstance(document.get("category"), str) else "",
        problem=document["problem"] if repeated else -1,
    )


def _request(arguments: Any) -> tuple[str, str]:
    """(prompt, generation settings as JSON, "" for log-likelihoods) of a row's first request. Raises ValueError."""
    if isinstance(arguments, dict):
        first = arguments.get("gen_args_0", {})
        if not isinstance(first, dict):
            raise ValueError(f"arguments.gen_args_0 is {str(first)[:40]}, expected a mapping with arg_0 and arg_1")
        prompt, second = first.get("arg_0", ""), first.get("arg_1")
    elif isinstance(arguments, list) and arguments and isinstance(arguments[0], list):  # lm-eval before 0.4.3
        if not arguments[0]:
            raise ValueError("arguments holds an empty request, expected [prompt, settings]")
        prompt, second = arguments[0][0], arguments[0][1] if len(arguments[0]) > 1 else None
    else:
        return "", ""
    return str(prompt), json.dumps(second, sort_keys=True) if isinstance(second, dict) else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _hash_document(document: Any) -> str:
    return _hash(json.dumps(document, indent=2, ensure_ascii=False))


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


def _answer(responses: Any) -> str:
    first = responses[0] if isinstance(responses, list) and responses else ""
    first = first[0] if isinstance(first, list) and first else first
    return first if isinstance(first, str) else json.dumps(first)
