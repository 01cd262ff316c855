"""lm-eval's own files -> `TaskScore` records: every filter of every task, with its interval and its artefacts.

    scores = read_scores(out_dir, arm="nvfp4", specs=specs, result=result, seconds=93.1)

lm-eval turns errors of writing into warnings, so nothing is taken from its memory: what counts is what stands in the
files, and files that are missing or short are an error here. Works on paths and dictionaries; imports neither lm_eval
nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation.spec import TaskSpec
from workbench.records import TaskScore
from workbench.statistics import wilson_interval

INVALID = "[invalid]"
"""What lm-eval's regex filters return when an answer holds nothing to extract."""


def read_scores(
    folder: Path, *, arm: str, specs: tuple[TaskSpec, ...], result: dict[str, Any], seconds: float, root: Path
) -> tuple[TaskScore, ...]:
    """Scores of all filters of all specs, from the sample files below `folder`, after checking that they are complete.

    result: what the harness reported (its tasks of each spec and the number of documents of each). root: the run
    folder that `TaskScore.samples` is relative to; a group's several files are joined by ";". Raises EvaluationError
    naming task and file.
    """
    if not list(folder.glob("results_*.json")):
        raise EvaluationError(f"arm {arm!r}: lm-eval left no results_*.json in {folder}", fix=_SPACE)
    scores: list[TaskScore] = []
    for spec in specs:
        leaves = result["leaves"][spec.name]
        files = {leaf: _sample_file(folder, leaf, arm) for leaf in leaves}
        rows = [row for leaf in leaves for row in _complete_rows(files[leaf], leaf, arm, result["documents"][leaf])]
        filters = list(dict.fromkeys(row["filter"] for row in rows))
        if spec.primary_filter not in filters:
            raise EvaluationError(
                f"task {spec.name!r} has no filter {spec.primary_filter!r}",
                fix=f"primary_filter: {' or '.join(filters)}",
            )
        for name in filters:
            of_filter = [row for row in rows if row["filter"] == name]
            scores.append(
                _score(
                    of_filter,
                    arm=arm,
                    spec=spec,
                    filter_name=name,
                    num_fewshot=result["num_fewshot"][leaves[0]],
                    samples=";".join(str(files[leaf].relative_to(root)) for leaf in leaves),
                    truncated=sum(result["truncated"].get(leaf, 0) for leaf in leaves),
                    seconds=seconds,
                )
            )
    return tuple(scores)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a samples_*.jsonl. Raises EvaluationError naming file and line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise EvaluationError(
                    f"{path}, line {number}: not JSON ({error})", fix="evaluate this arm again"
                ) from error


_SPACE = "lm-eval only warns when it cannot save: see harness.log; free space in the output folder"


def _sample_file(folder: Path, leaf: str, arm: str) -> Path:
    found = sorted(path for path in folder.glob("samples_*.jsonl") if _task_of(path) == leaf)
    if not found:
        raise EvaluationError(f"arm {arm!r}: lm-eval left no samples_{leaf}_*.jsonl in {folder}", fix=_SPACE)
    return found[-1]


def _task_of(path: Path) -> str:
    """`samples_<task>_<ISO time>.jsonl` -> task."""
    return path.stem.removeprefix("samples_").rpartition("_")[0]


def _complete_rows(path: Path, leaf: str, arm: str, documents: int) -> list[dict[str, Any]]:
    rows = list(read_rows(path))
    for name in dict.fromkeys(row["filter"] for row in rows) or [""]:
        ids = {row["doc_id"] for row in rows if row["filter"] == name}
        if len(ids) != documents:
            raise EvaluationError(
                f"arm {arm!r}, task {leaf!r}: {path.name} holds {len(ids)} of {documents} documents"
                + (f" (filter {name})" if name else ""),
                fix=_SPACE,
            )
    return rows


def _score(
    rows: list[dict[str, Any]],
    *,
    arm: str,
    spec: TaskSpec,
    filter_name: str,
    num_fewshot: int,
    samples: str,
    truncated: int,
    seconds: float,
) -> TaskScore:
    correct = 0
    for row in rows:
        value = row.get(spec.metric)
        if value not in (0, 1):
            raise EvaluationError(
                f"task {spec.name!r}, filter {filter_name!r}: metric {spec.metric!r} of document {row['doc_id']} is "
                f"{value!r}, expected 0 or 1",
                fix=f"choose a metric that is right or wrong for each document; there are {', '.join(row['metrics'])}",
            )
        correct += int(value)
    low, high = wilson_interval(correct, len(rows))
    return TaskScore(
        arm=arm,
        task=spec.name,
        filter=filter_name,
        metric=spec.metric,
        n=len(rows),
        value=correct / len(rows),
        low=low,
        high=high,
        num_fewshot=num_fewshot,
        samples=samples,
        primary=filter_name == spec.primary_filter,
        empty=sum(_is_empty(row) for row in rows),
        invalid=sum(row["filtered_resps"][:1] == [INVALID] for row in rows),
        truncated=truncated,
        seconds=seconds,
    )


def _is_empty(row: dict[str, Any]) -> bool:
    answer = row["resps"][0][0] if row["resps"] and row["resps"][0] else ""
    return isinstance(answer, str) and not answer.strip()
