"""Pairing of sample files: exact tables from hand-made ones, refusals by name, flips, the noise floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.comparison import compare_arms
from workbench.comparison.figures import MAX_FLIPS
from workbench.errors import ComparisonError
from workbench.records import Evaluation, TaskScore, write_json

TIME = "2026-01-02T03-04-05.000006"


def _row(doc_id: int, right: bool, filter_name: str = "strict", **changes: Any) -> dict[str, Any]:
    row = {
        "doc_id": doc_id,
        "doc": {"question": f"Question {doc_id}?", "answer": f"It is {doc_id}\n#### {doc_id}"},
        "target": f"It is {doc_id}\n#### {doc_id}",
        "arguments": {"gen_args_0": {"arg_0": f"prompt {doc_id}", "arg_1": {"until": ["Q"], "max_gen_toks": 8}}},
        "resps": [[f"answer {doc_id} {'right' if right else 'wrong'}"]],
        "filtered_resps": ["x"],
        "filter": filter_name,
        "metrics": ["exact_match"],
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": f"t{doc_id}",
        "exact_match": float(right),
    }
    return {**row, **changes}


def _write(
    run_dir: Path, arm: str, rows: list[dict[str, Any]], harness: str = "lm-eval 0.4.13", leaf: str = "task"
) -> None:
    """One task; its filters are those of the rows."""
    folder = run_dir / "eval" / arm / "model"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples_{leaf}_{TIME}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = []
    for name in dict.fromkeys(row["filter"] for row in rows):
        chosen = [row for row in rows if row["filter"] == name]
        value = sum(row["exact_match"] for row in chosen) / len(chosen)
        scores.append(
            TaskScore(
                arm=arm,
                task="task",
                filter=name,
                metric="exact_match",
                n=len(chosen),
                value=value,
                low=0.0,
                high=1.0,
                num_fewshot=0,
                samples=str(path.relative_to(run_dir)),
                primary=name == "strict",
            )
        )
    evaluation = Evaluation(
        arm=arm,
        scores=tuple(scores),
        command=(),
        harness=harness,
        request_order="forward",
        concurrency=1,
        seconds=1.0,
    )
    write_json(run_dir / "eval" / arm / "scores.json", evaluation)


def _table(both: int, lost: int, gained: int, neither: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    pairs = [(True, True)] * both + [(True, False)] * lost + [(False, True)] * gained + [(False, False)] * neither
    return [_row(i, a) for i, (a, _) in enumerate(pairs)], [_row(i, b) for i, (_, b) in enumerate(pairs)]


def test_two_by_two_table_and_its_figures(tmp_path: Path) -> None:
    base, other = _table(80, 9, 2, 9)
    _write(tmp_path, "source", base)
    _write(tmp_path, "nvfp4", list(reversed(other)))  # the order of rows does not matter
    comparison = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    (task,) = comparison.tasks
    assert (task.n, task.both, task.lost, task.gained, task.neither) == (100, 80, 9, 2, 9)
    assert (task.baseline_value, task.candidate_value, task.discordance) == (0.89, 0.82, 0.11)
    assert task.loss_pp == pytest.approx(7.0)
    assert task.loss_low_pp < 7.0 < task.loss_upper95_pp < task.loss_high_pp
    assert task.p_loss == pytest.approx(67 / 2048)
    assert task.p_two_sided == pytest.approx(0.0654296875)  # statsmodels 0.15.0, exact
    assert task.recovery_percent == pytest.approx(100 * 82 / 89)
    assert task.recovery_low_percent < task.recovery_percent < task.recovery_high_percent < 100
    assert task.primary
    assert comparison.noise_floor == {}


def test_flips_hold_both_answers_in_both_directions(tmp_path: Path) -> None:
    base, other = _table(1, 1, 1, 0)
    _write(tmp_path, "source", base)
    _write(tmp_path, "nvfp4", other)
    lost, gained = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"]).tasks[0].flips
    assert (lost.direction, lost.doc_id, lost.baseline_answer) == ("lost", 1, "answer 1 right")
    assert (lost.candidate_answer, lost.question, lost.target) == ("answer 1 wrong", "Question 1?", "1")
    assert (gained.direction, gained.doc_id, gained.candidate_answer) == ("gained", 2, "answer 2 right")


@pytest.mark.parametrize(
    ("lost", "gained", "kept"), [(90, 3, (47, 3)), (3, 90, (3, 47)), (60, 60, (25, 25)), (20, 20, (20, 20))]
)
def test_flips_are_capped_without_losing_a_direction(
    tmp_path: Path, lost: int, gained: int, kept: tuple[int, int]
) -> None:
    base, other = _table(0, lost, gained, 0)
    _write(tmp_path, "source", base)
    _write(tmp_path, "nvfp4", other)
    (task,) = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"]).tasks
    directions = [flip.direction for flip in task.flips]
    assert (directions.count("lost"), directions.count("gained")) == kept
    assert len(directions) <= MAX_FLIPS
    assert (task.lost, task.gained) == (lost, gained)


def test_noise_arm_gives_the_floor_even_when_it_is_zero(tmp_path: Path) -> None:
    base, other = _table(8, 1, 1, 0)
    _write(tmp_path, "source", base)
    _write(tmp_path, "source_again", base)
    _write(tmp_path, "nvfp4", other)
    comparison = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"], noise_arm="source_again")
    assert comparison.noise_floor == {"task|strict": 0.0}
    assert [task.candidate for task in comparison.tasks] == ["source_again", "nvfp4"]
    assert comparison.tasks[0].loss_pp == 0.0
    assert comparison.tasks[0].loss_high_pp > 0.0


def test_filters_are_compared_apart(tmp_path: Path) -> None:
    rows = [_row(0, True), _row(0, True, "flexible")]
    _write(tmp_path, "source", rows)
    _write(tmp_path, "nvfp4", [_row(0, False), _row(0, True, "flexible")])
    strict, flexible = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"]).tasks
    assert (strict.filter, strict.lost, strict.primary) == ("strict", 1, True)
    assert (flexible.filter, flexible.lost, flexible.primary) == ("flexible", 0, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_hash": "other"}, r"document 1 of task.*prompt \(prompt_hash\) of 'source' and 'nvfp4' differ"),
        ({"doc_hash": "other"}, r"document 1 of task.*document \(doc_hash\)"),
        ({"target_hash": "other"}, r"document 1 of task.*target \(target_hash\)"),
        (
            {"arguments": {"gen_args_0": {"arg_0": "p", "arg_1": {"max_gen_toks": 9}}}},
            "document 1.*generation settings",
        ),
        ({"exact_match": 0.5}, "line 2: exact_match is 0.5"),
        ({"doc_id": 0}, "line 2: document 0 of task appears twice"),
        ({"doc_id": 7}, "'nvfp4' lacks document 1"),
    ],
)
def test_answers_to_different_questions_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    base, other = _table(3, 0, 0, 0)
    other[1] = {**other[1], **change}
    _write(tmp_path, "source", base)
    _write(tmp_path, "nvfp4", other)
    with pytest.raises(ComparisonError, match=message):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])


def test_missing_documents_files_arms_and_filters_are_named(tmp_path: Path) -> None:
    base, other = _table(3, 0, 0, 0)
    _write(tmp_path, "source", base)
    with pytest.raises(ComparisonError, match=r"'nvfp4' has no evaluation.*scores\.json"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    _write(tmp_path, "nvfp4", other[:2])
    with pytest.raises(ComparisonError, match="'nvfp4' lacks document 2"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    _write(tmp_path, "nvfp4", [*other, _row(0, True, "flexible")])
    with pytest.raises(ComparisonError, match=r"'source' has no result for task 'task', filter 'flexible'"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    _write(tmp_path, "nvfp4", other, harness="lm-eval 0.4.9")
    with pytest.raises(ComparisonError, match=r"lm-eval 0\.4\.13.*lm-eval 0\.4\.9"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    _write(tmp_path, "nvfp4", other)
    with pytest.raises(ComparisonError, match="cannot be compared with itself"):
        compare_arms(tmp_path, baseline="source", candidates=["source"])
    samples = next((tmp_path / "eval" / "nvfp4" / "model").glob("samples_*"))
    samples.write_text(samples.read_text()[:-30])
    with pytest.raises(ComparisonError, match=r"samples_task.*line 3"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])
    samples.unlink()
    with pytest.raises(ComparisonError, match=r"samples_task.*does not exist"):
        compare_arms(tmp_path, baseline="source", candidates=["nvfp4"])


def test_long_answers_keep_their_end(tmp_path: Path) -> None:
    long = "a" * 5000 + " #### 7"
    _write(tmp_path, "source", [_row(0, True)])
    _write(tmp_path, "nvfp4", [_row(0, False, resps=[[long]])])
    (flip,) = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"]).tasks[0].flips
    assert flip.candidate_answer.endswith("#### 7")
    assert "3007 characters" in flip.candidate_answer


def test_multiple_choice_flips_show_the_options(tmp_path: Path) -> None:
    doc = {"question": "Which?", "options": ["one", "two"]}
    _write(tmp_path, "source", [_row(0, True, doc=doc, target="B")])
    _write(tmp_path, "nvfp4", [_row(0, False, doc=doc, target="B")])
    (flip,) = compare_arms(tmp_path, baseline="source", candidates=["nvfp4"]).tasks[0].flips
    assert flip.question == "Which?\nA. one\nB. two"
    assert flip.target == "B"
