"""Scores are read from files, and files that lm-eval failed to write are errors, since lm-eval only warns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import EvaluationError
from workbench.evaluation.scores import read_samples, read_scores
from workbench.evaluation.spec import task_spec

TIME = "2026-01-02T03-04-05.000006"


def _row(
    doc_id: int, value: float = 1.0, filter_name: str = "f", answer: str = "x", extracted: str = "x"
) -> dict[str, Any]:
    return {
        "doc_id": doc_id,
        "filter": filter_name,
        "exact_match": value,
        "metrics": ["exact_match"],
        "resps": [[answer]],
        "filtered_resps": [extracted],
    }


def _read(folder: Path, rows: dict[str, list[dict[str, Any]]], documents: dict[str, int], **spec: Any) -> Any:
    (folder / f"results_{TIME}.json").write_text("{}")
    for leaf, content in rows.items():
        (folder / f"samples_{leaf}_{TIME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    settings = task_spec({"name": "t", "task": "t", "primary_filter": "f", **spec})
    result = {
        "leaves": {"t": list(documents)},
        "documents": documents,
        "num_fewshot": dict.fromkeys(documents, 5),
        "truncated": dict.fromkeys(documents, 1),
    }
    samples = read_samples(folder, arm="a", specs=(settings,), result=result)
    return read_scores(samples, arm="a", specs=(settings,), result=result, seconds=1.0, place=Path("eval/a/m"))


def test_group_is_pooled_over_its_tasks(tmp_path: Path) -> None:
    rows = {
        "t_one": [_row(0), _row(1, 0.0)],
        "t_two": [_row(0), _row(1), _row(2, 0.0, extracted="[invalid]", answer=" ")],
    }
    (score,) = _read(tmp_path, rows, {"t_one": 2, "t_two": 3})
    assert (score.value, score.n, score.invalid, score.empty, score.truncated) == (0.6, 5, 1, 1, 2)
    assert score.samples == f"eval/a/m/samples_t_one_{TIME}.jsonl;eval/a/m/samples_t_two_{TIME}.jsonl"


def test_task_names_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / f"samples_t_long_{TIME}.jsonl").write_text(json.dumps(_row(0, 0.0)) + "\n")
    (score,) = _read(tmp_path, {"t": [_row(0)]}, {"t": 1})
    assert score.value == 1.0


def test_missing_and_short_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"no samples_t_two_\*"):
        _read(tmp_path, {"t_one": [_row(0)]}, {"t_one": 1, "t_two": 1})
    with pytest.raises(EvaluationError, match="holds 1 of 2 documents"):
        _read(tmp_path, {"t": [_row(0)]}, {"t": 2})
    with pytest.raises(EvaluationError, match="holds 0 of 2 documents"):
        _read(tmp_path, {"t": []}, {"t": 2})
    with pytest.raises(EvaluationError, match=r"1 of 2 documents.*filter g"):
        _read(tmp_path, {"t": [_row(0), _row(1), _row(0, filter_name="g")]}, {"t": 2})
    (tmp_path / f"results_{TIME}.json").unlink()
    with pytest.raises(EvaluationError, match="no results_"):
        read_samples(tmp_path, arm="a", specs=(), result={})


def test_metric_must_be_right_or_wrong_and_filter_must_exist(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"document 0 is 0\.5, expected 0 or 1"):
        _read(tmp_path, {"t": [_row(0, 0.5)]}, {"t": 1})
    with pytest.raises(EvaluationError, match="'bleu' of document 0 is None"):
        _read(tmp_path, {"t": [_row(0)]}, {"t": 1}, metric="bleu")
    with pytest.raises(EvaluationError, match=r"(?s)no filter 'strict'.*f or g"):
        _read(tmp_path, {"t": [_row(0), _row(0, filter_name="g")]}, {"t": 1}, primary_filter="strict")
