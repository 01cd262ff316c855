"""Anyone's lm-eval output, imported and compared: groups, several files, other versions' rows, graded metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval_output import row, table, write_results, write_samples, write_task
from test_compare_arms import _table, _write

from workbench.comparison import compare_folders, comparison_json, comparison_text, read_folder
from workbench.errors import ComparisonError
from workbench.gating import gate
from workbench.records import Comparison, from_json, to_json

GROUP = {"group_subtasks": {"subjects": ["law", "math"], "law": [], "math": []}, "lm_eval_version": "0.4.13"}


def _pair(tmp_path: Path, **results: Any) -> tuple[Path, Path]:
    """org/model in BF16 and NVFP4 on a group of two subtasks: 2 + 1 lost, 0 + 1 gained of 30 + 20."""
    folders = tmp_path / "a" / "org__model", tmp_path / "b" / "org__model-nvfp4"
    for folder, side in zip(folders, (0, 1), strict=True):
        write_task(folder, "law", table(20, 2, 0, 8)[side])
        write_task(folder, "math", table(10, 1, 1, 8)[side])
        if results:
            write_results(folder, **results)
    return tmp_path / "a", tmp_path / "b"


def test_a_group_is_one_row_of_whole_numbers(tmp_path: Path) -> None:
    comparison = compare_folders(*_pair(tmp_path, **GROUP))
    rows = {task.task: task for task in comparison.tasks}
    assert {name: (r.n, r.lost, r.gained, r.primary) for name, r in rows.items()} == {
        "subjects": (50, 3, 1, True),
        "law": (30, 2, 0, False),
        "math": (20, 1, 1, False),
    }
    group = rows["subjects"]
    assert [(s.name, s.n, s.lost, s.gained) for s in group.strata] == [("law", 30, 2, 0), ("math", 20, 1, 1)]
    assert group.macro_loss_pp == pytest.approx(100 * (2 / 30 + 0) / 2)
    assert group.loss_pp == pytest.approx(100 * 2 / 50)
    assert (comparison.baseline, group.candidate) == ("a", "b")
    assert from_json(Comparison, to_json(comparison)).tasks[0].strata == group.strata
    payload = json.loads(comparison_json(comparison, gate({"margin_pp": 1.0, "gated": ["b"]}, comparison=comparison)))
    first = payload["rows"][0]
    assert (first["kind"], first["task"], first["n_pairs"], first["lost"], first["gained"]) == (
        "group",
        "subjects",
        50,
        3,
        1,
    )
    assert all(isinstance(first[key], int) for key in ("n_pairs", "both", "lost", "gained", "neither"))
    assert [stratum["n_pairs"] for stratum in first["strata"]] == [30, 20]
    assert payload["verdict"]["status"] == "inconclusive"
    assert "b subjects none exact_match: 66.00 -> 62.00 %" in comparison_text(comparison)


@pytest.mark.parametrize(
    "results", [{}, {"results": {}}, {"git_hash": None, "task_hashes": {}, "group_subtasks": None}]
)
def test_missing_results_groups_and_hashes_stop_nothing(tmp_path: Path, results: dict[str, Any]) -> None:
    comparison = compare_folders(*_pair(tmp_path, **results))
    assert [(task.task, task.n, task.primary) for task in comparison.tasks] == [("law", 30, True), ("math", 20, True)]


def test_groups_in_groups_are_pooled_by_leaf_and_only_the_outer_one_is_judged(tmp_path: Path) -> None:
    members = {"all": ["humanities", "math"], "humanities": ["law", "history"]}
    for folder in (tmp_path / "a", tmp_path / "b"):
        for task in ("law", "history", "math"):
            write_task(folder, task, [True] * 5)
        write_results(folder, group_subtasks=members)
    found = {task.task: (task.n, task.primary) for task in compare_folders(tmp_path / "a", tmp_path / "b").tasks}
    assert found["all"] == (15, True)
    assert found["humanities"] == (10, False)
    assert found["law"] == (5, False)


def test_newest_samples_of_each_task_count(tmp_path: Path) -> None:
    a, b = _pair(tmp_path, **GROUP)
    later = "2026-03-02T03-04-05.000006"
    write_samples(b / "org__model-nvfp4", "law", [row(i, 1.0) for i in range(30)], later)
    write_results(b / "org__model-nvfp4", later, lm_eval_version="0.4.13")
    comparison = compare_folders(a, b)
    assert next(task for task in comparison.tasks if task.task == "law").gained == 8
    assert any("2 result files" in note for note in comparison.notes)
    # the group is still known from the older result file
    assert comparison.tasks[0].task == "subjects"


def test_filters_and_metrics_are_rows_and_the_first_is_judged(tmp_path: Path) -> None:
    for folder, flip in ((tmp_path / "a", False), (tmp_path / "b", True)):
        rows = [
            row(i, float(i != 3 or not flip), filter_name=name) for i in range(9) for name in ("strict", "flexible")
        ]
        rows = [{**item, "metrics": ["exact_match", "other"], "other": item["exact_match"]} for item in rows]
        write_samples(folder, "gsm8k", rows)
    found = compare_folders(tmp_path / "a", tmp_path / "b").tasks
    assert [(task.filter, task.metric, task.primary, task.lost) for task in found] == [
        ("strict", "exact_match", True, 1),
        ("strict", "other", False, 1),
        ("flexible", "exact_match", False, 1),
        ("flexible", "other", False, 1),
    ]


def test_graded_metrics_are_permuted_and_what_cannot_be_paired_is_noted(tmp_path: Path) -> None:
    for folder, shift in ((tmp_path / "a", 0.0), (tmp_path / "b", 0.05)):
        rows = [row(i, 0.5 + 0.01 * i - shift, metric="f1", bleu=[0, 1], ter=0.5) for i in range(20)]
        write_samples(folder, "qa", [{**item, "metrics": ["f1", "bleu", "ter"]} for item in rows])
        write_results(folder, higher_is_better={"qa": {"f1": True, "ter": False}})
    comparison = compare_folders(tmp_path / "a", tmp_path / "b")
    (graded,) = comparison.graded
    assert (graded.metric, graded.n, graded.worse, graded.better) == ("f1", 20, 20, 0)
    assert graded.loss == pytest.approx(0.05)
    assert graded.p_loss < 0.001
    assert comparison.tasks == ()
    assert any("bleu is not compared (not one number" in note for note in comparison.notes)
    assert any("ter is not compared (lower is better)" in note for note in comparison.notes)
    assert "b qa none f1 (graded, not judged)" in comparison_text(comparison)


def test_a_metric_that_happens_to_be_whole_in_one_arm_is_graded(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", "qa", [row(i, 1.0, metric="f1") for i in range(12)])
    write_samples(tmp_path / "b", "qa", [row(i, 0.5, metric="f1") for i in range(12)])
    for pair in ((tmp_path / "a", tmp_path / "b"), (tmp_path / "b", tmp_path / "a")):
        comparison = compare_folders(*pair)
        assert len(comparison.graded) == 1
        assert abs(comparison.graded[0].loss) == pytest.approx(0.5)


def test_rows_of_old_versions_are_hashed_as_lm_eval_does(tmp_path: Path) -> None:
    # lm-eval 0.4.13 with its dummy model on {"question": "a 0?", "answer": "0", "choices": ["x", "y"], "label": 0}
    new = row(
        0,
        1.0,
        doc={"question": "a 0?", "answer": "0", "choices": ["x", "y"], "label": 0},
        target="0",
        arguments={"gen_args_0": {"arg_0": "Q: a 0? A:", "arg_1": {"until": ["Q:"], "max_gen_toks": 8}}},
        doc_hash="6531afa9359e078702987f8eea872e6bb534dd3b23b82663b89c6f16ceef3173",
        prompt_hash="88c56058ff1247c6135bea3ea647f7c1c576e3b7ac842cc44b839bf080e66b4a",
        target_hash="5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9",
    )
    dropped = ("doc_hash", "prompt_hash", "target_hash", "filter", "metrics")
    old = {key: value for key, value in new.items() if key not in dropped}
    old["arguments"] = [["Q: a 0? A:", {"until": ["Q:"], "max_gen_toks": 8}]]
    write_samples(tmp_path / "a", "t", [new])
    write_samples(tmp_path / "b", "t", [old])
    (task,) = compare_folders(tmp_path / "a", tmp_path / "b").tasks
    assert (task.n, task.both) == (1, 1)
    old["arguments"][0][0] += " "
    write_samples(tmp_path / "b", "t", [old])
    with pytest.raises(ComparisonError, match="prompt"):
        compare_folders(tmp_path / "a", tmp_path / "b")


def test_another_version_or_task_is_a_note_where_folders_are_imported(tmp_path: Path) -> None:
    a, b = _pair(tmp_path, **GROUP)
    write_results(b / "org__model-nvfp4", **{**GROUP, "lm_eval_version": "0.4.9"})
    write_task(b / "org__model-nvfp4", "extra", [True])
    notes = " ".join(compare_folders(a, b).notes)
    assert "lm-eval 0.4.13" in notes
    assert "lm-eval 0.4.9" in notes
    assert "'a' has no result for task 'extra'" in notes


def test_equal_folder_names_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        write_task(tmp_path / parent / "out", "t", [True, False])
    comparison = compare_folders(tmp_path / "x" / "out", tmp_path / "y" / "out")
    assert (comparison.baseline, comparison.tasks[0].candidate) == ("x/out", "y/out")
    same = compare_folders(tmp_path / "x" / "out", tmp_path / "x" / "out")
    assert (same.baseline, same.tasks[0].candidate) == ("out (1)", "out (2)")


def test_the_noise_arm_is_held_against_the_flips(tmp_path: Path) -> None:
    for name, right in (("a", [1, 1, 1, 1, 1, 1]), ("again", [1, 1, 1, 1, 1, 0]), ("b", [0, 0, 0, 0, 0, 1])):
        write_task(tmp_path / name, "t", [bool(x) for x in right])
    comparison = compare_folders(tmp_path / "a", tmp_path / "b", tmp_path / "again")
    assert comparison.noise_floor == {"t|none": pytest.approx(1 / 6)}
    assert comparison.tasks[-1].p_above_noise == pytest.approx((6 + 1) / 64)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a, b = _pair(tmp_path, **GROUP)
    with pytest.raises(ComparisonError, match="there is no folder"):
        read_folder(tmp_path / "none", "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ComparisonError, match="holds neither an evaluated arm"):
        read_folder(tmp_path / "empty", "x")
    write_results(tmp_path / "scores_only", results={})
    with pytest.raises(ComparisonError, match=r"(?s)no samples_.*--log_samples"):
        read_folder(tmp_path / "scores_only", "x")
    shutil.copytree(b / "org__model-nvfp4", a / "org__model-nvfp4")
    with pytest.raises(ComparisonError, match="output of 2 models: org__model, org__model-nvfp4"):
        compare_folders(a, b)
    write_task(tmp_path / "other", "unknown", [True])
    with pytest.raises(ComparisonError, match="no task in common"):
        compare_folders(b, tmp_path / "other")
    (b / "org__model-nvfp4" / "results_z.json").write_text("{")
    with pytest.raises(ComparisonError, match=r"results_z.json is not JSON"):
        read_folder(b, "x")
    write_samples(tmp_path / "bad", "t", [{"doc_id": 0, "resps": [], "acc": 1.0}])
    with pytest.raises(ComparisonError, match="equal prompts cannot be checked"):
        read_folder(tmp_path / "bad", "x")


def test_repeated_problems_are_clusters(tmp_path: Path) -> None:
    """avg@4 on three problems: the loss is the problems', and the interval as wide as three problems make it."""
    for name, answers in (("a", ("1111", "1100", "1010")), ("b", ("1110", "1000", "1010"))):
        rows = [
            row(4 * problem + repeat, float(answer), doc={"question": "q", "problem": problem, "repeat": repeat})
            for problem, text in enumerate(answers)
            for repeat, answer in enumerate(text)
        ]
        write_samples(tmp_path / name, "aime", rows)
    (task,) = compare_folders(tmp_path / "a", tmp_path / "b").tasks
    assert (task.n, task.clusters, task.lost, task.gained) == (12, 3, 2, 0)
    assert task.loss_pp == pytest.approx(100 * (0.25 + 0.25 + 0) / 3)
    assert task.p_loss == pytest.approx(1 / 4)  # two problems changed, both for the worse
    assert task.loss_high_pp > 50.0


def test_subjects_that_documents_name_are_strata(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [row(i, 1.0, doc={"question": "q", "category": ("law", "math")[i % 2]}) for i in range(8)]
        write_samples(tmp_path / name, "mini", rows)
    (task,) = compare_folders(tmp_path / "a", tmp_path / "b").tasks
    assert [(stratum.name, stratum.n) for stratum in task.strata] == [("law", 4), ("math", 4)]


def test_runs_and_their_arms_are_folders_too(tmp_path: Path) -> None:
    base, other = _table(80, 9, 2, 9)
    _write(tmp_path / "one", "source", base)
    _write(tmp_path / "two", "source", base)
    _write(tmp_path / "two", "nvfp4", other)
    comparison = compare_folders(tmp_path / "one", tmp_path / "two" / "eval" / "nvfp4")
    (task,) = comparison.tasks
    assert (comparison.baseline, task.candidate, task.lost, task.gained) == ("one", "nvfp4", 9, 2)
    with pytest.raises(ComparisonError, match=r"(?s)holds 2 evaluated arms: nvfp4, source.*eval/nvfp4"):
        compare_folders(tmp_path / "one", tmp_path / "two")
