"""lm-eval's own files -> `TaskScore` records: every filter of every task, with its interval and its artefacts.

    samples = read_samples(folder, arm="nvfp4", specs=specs, result=result)
    scores = read_scores(samples, arm="nvfp4", specs=specs, result=result, seconds=93.1, place=Path("eval/nvfp4/m"))

lm-eval turns errors of writing into warnings, so nothing is taken from its memory: what counts is what stands in the
files, and files that are missing or short are an error here. Works on paths and dictionaries; imports neither lm_eval
nor torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation._intervals import accuracy_interval, ratio_interval
from workbench.evaluation.spec import TaskSpec
from workbench.records import Perplexity, TaskScore

INVALID = "[invalid]"
"""What lm-eval's regex filters return when an answer holds nothing to extract."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """One lm-eval task's samples_*.jsonl: its name and its rows, read once."""

    name: str
    rows: list[dict[str, Any]]


Samples = Mapping[str, SampleFile]
"""By lm-eval task."""


def read_samples(
    folder: Path, *, arm: str, specs: tuple[TaskSpec, ...], result: dict[str, Any]
) -> dict[str, SampleFile]:
    """Every sample file of the specs' tasks in `folder`, after checking that each is complete.

    result: what the harness reported (its tasks of each spec and the number of documents of each). Raises
    EvaluationError naming task and file.
    """
    if not list(folder.glob("results_*.json")):
        raise EvaluationError(f"arm {arm!r}: lm-eval left no results_*.json in {folder}", fix=_SPACE)
    samples = {}
    for spec in specs:
        for leaf in result["leaves"][spec.name]:
            path = find_sample_file(folder, leaf, arm)
            samples[leaf] = SampleFile(path.name, _complete_rows(path, leaf, arm, result["documents"][leaf]))
    return samples


def read_scores(
    samples: Samples, *, arm: str, specs: tuple[TaskSpec, ...], result: dict[str, Any], seconds: float, place: Path
) -> tuple[TaskScore, ...]:
    """Scores of all filters of all specs. place: the files' folder relative to the run folder, for
    `TaskScore.samples`; a group's several files are joined by ";". Raises EvaluationError naming the task.
    """
    scores: list[TaskScore] = []
    for spec in specs:
        if spec.perplexity:
            continue
        rows, names = _rows_of(samples, spec, result, place)
        filters = list(dict.fromkeys(row["filter"] for row in rows))
        if spec.primary_filter not in filters:
            raise EvaluationError(
                f"task {spec.name!r} has no filter {spec.primary_filter!r}",
                fix=f"primary_filter: {' or '.join(filters)}",
            )
        leaves = result["leaves"][spec.name]
        for name in filters:
            scores.append(
                _score(
                    [row for row in rows if row["filter"] == name],
                    arm=arm,
                    spec=spec,
                    filter_name=name,
                    num_fewshot=result["num_fewshot"][leaves[0]],
                    samples=names,
                    truncated=sum(result["truncated"].get(leaf, 0) for leaf in leaves),
                    failed=sum(result.get("failed", {}).get(leaf, 0) for leaf in leaves),
                    seconds=seconds,
                )
            )
    return tuple(scores)


def read_perplexities(
    samples: Samples, *, arm: str, specs: tuple[TaskSpec, ...], result: dict[str, Any], place: Path
) -> tuple[Perplexity, ...]:
    """Perplexities of the specs that have one; arguments as of `read_scores`."""
    found = []
    for spec in specs:
        if spec.perplexity:
            rows, names = _rows_of(samples, spec, result, place)
            tokens = sum(sum(result["scored_tokens"].get(leaf, {}).values()) for leaf in result["leaves"][spec.name])
            found.append(_perplexity(rows, arm, spec, tokens, names, result.get("conventions", {})))
    return tuple(found)


def is_right(row: dict[str, Any], spec: TaskSpec) -> bool:
    """Whether a document was answered right. Raises EvaluationError if the metric is not 0 or 1."""
    value = row.get(spec.metric)
    if value not in (0, 1):
        raise EvaluationError(
            f"task {spec.name!r}, filter {row['filter']!r}: metric {spec.metric!r} of document {row['doc_id']} is "
            f"{value!r}, expected 0 or 1",
            fix=f"choose a metric that is right or wrong for each document; there are {', '.join(row['metrics'])}",
        )
    return bool(value)


def problems_of(rows: list[dict[str, Any]]) -> list[int]:
    """Which problem each row answers: the `repeat_of` of a repeated document, else a number of its own."""
    return [
        int(row["doc"]["repeat_of"]) if isinstance(row.get("doc"), dict) and "repeat" in row["doc"] else place
        for place, row in enumerate(rows)
    ]


def find_sample_file(folder: Path, leaf: str, arm: str) -> Path:
    """The newest samples_<leaf>_<time>.jsonl. Raises EvaluationError."""
    found = sorted(path for path in folder.glob("samples_*.jsonl") if _task_of(path) == leaf)
    if not found:
        raise EvaluationError(f"arm {arm!r}: lm-eval left no samples_{leaf}_*.jsonl in {folder}", fix=_SPACE)
    return found[-1]


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


def _rows_of(samples: Samples, spec: TaskSpec, result: dict[str, Any], place: Path) -> tuple[list[dict[str, Any]], str]:
    """All rows of a spec, and the files they stand in."""
    found = [samples[leaf] for leaf in result["leaves"][spec.name]]
    return [row for file in found for row in file.rows], ";".join(str(place / file.name) for file in found)


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
    failed: int,
    seconds: float,
) -> TaskScore:
    right = [is_right(row, spec) for row in rows]
    problems = problems_of(rows)
    low, high = accuracy_interval(right, problems)
    return TaskScore(
        arm=arm,
        task=spec.name,
        filter=filter_name,
        metric=spec.metric,
        n=len(rows),
        value=sum(right) / len(rows),
        low=low,
        high=high,
        num_fewshot=num_fewshot,
        samples=samples,
        primary=filter_name == spec.primary_filter,
        empty=sum(_is_empty(row) for row in rows),
        invalid=sum(row["filtered_resps"][:1] == [INVALID] for row in rows),
        truncated=truncated,
        failed=failed,
        clusters=len(set(problems)) if len(set(problems)) < len(rows) else 0,
        seconds=seconds,
    )


def _perplexity(
    rows: list[dict[str, Any]], arm: str, spec: TaskSpec, tokens: int, samples: str, conventions: dict[str, str]
) -> Perplexity:
    """lm-eval's rows hold (log-likelihood, words) and (log-likelihood, bytes) of each document."""
    if any("word_perplexity" not in row or "byte_perplexity" not in row for row in rows):
        raise EvaluationError(
            f"task {spec.name!r} reports no word_perplexity and byte_perplexity", fix="choose a metric that it reports"
        )
    nll = [-float(row["word_perplexity"][0]) for row in rows]
    sizes = [int(row["byte_perplexity"][1]) for row in rows]
    words, total = sum(int(row["word_perplexity"][1]) for row in rows), sum(nll)
    low, high = ratio_interval(nll, [size * math.log(2) for size in sizes])
    return Perplexity(
        arm=arm,
        task=spec.name,
        documents=len(rows),
        tokens=tokens,
        words=words,
        bytes=sum(sizes),
        nll=total,
        token_perplexity=_exp(total / tokens) if tokens else math.nan,
        word_perplexity=_exp(total / words),
        byte_perplexity=_exp(total / sum(sizes)),
        bits_per_byte=total / sum(sizes) / math.log(2),
        bits_per_byte_low=low,
        bits_per_byte_high=high,
        samples=samples,
        conventions=conventions,
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


def _is_empty(row: dict[str, Any]) -> bool:
    answer = row["resps"][0][0] if row["resps"] and row["resps"][0] else ""
    return isinstance(answer, str) and not answer.strip()
