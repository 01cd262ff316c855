"""lm-eval folders that are damaged, disagree with themselves or are the baseline's own: refused, never a pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval_output import row, table, write_results, write_samples, write_task

from workbench import cli
from workbench.comparison import compare_folders

LATER = "2026-05-02T03-04-05.000006"
N = 1319


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two lossless arms, and a task `arc` on which b loses 30 pp."""
    for name, fine, lossy in zip("ab", table(1200, 3, 4, 112), table(500, 300, 0, 100), strict=True):
        write_task(tmp_path / name, "gsm8k", fine)
        write_task(tmp_path / name, "arc", lossy)
    return tmp_path / "a", tmp_path / "b"


def compare(a: Path, b: Path) -> int:
    return cli.main(["compare", str(a), str(b)])


def rewrite(folder: Path, task: str, change: Callable[[int, dict[str, Any]], None]) -> Path:
    (path,) = folder.glob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, item in enumerate(rows):
        change(number, item)
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


def test_a_damaged_baseline_task_is_no_pass(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = folders
    assert compare(a, b) == 1
    rewrite(a, "arc", lambda number, item: item.update(exact_match=None))
    assert (compare(a, b), compare(b, a)) == (2, 2)
    assert "evaluation arc" in capsys.readouterr().out
    next(a.glob("samples_arc*")).write_text("")
    assert (compare(a, b), compare(b, a)) == (3, 3)
    assert "it holds no document" in capsys.readouterr().err


def test_lower_is_better_in_one_arm_alone_is_no_pass(folders: tuple[Path, Path]) -> None:
    a, b = folders
    write_results(a, higher_is_better={"arc": {"exact_match": False}})
    assert (compare(a, b), compare(b, a)) == (2, 2)


def test_a_group_is_pooled_in_both_where_one_result_file_is_missing(tmp_path: Path) -> None:
    for name, right in zip("ab", table(1200, 3, 4, 112), strict=True):
        for task in ("law", "math"):
            write_task(tmp_path / name, task, right)
    write_results(tmp_path / "a", group_subtasks={"all": ["law", "math"]})
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    rows = {row.task: (row.n, row.primary) for row in compare_folders(tmp_path / "a", tmp_path / "b").tasks}
    assert rows == {"all": (2 * N, True), "law": (N, False), "math": (N, False)}
    assert compare(tmp_path / "b", tmp_path / "a") == 0


def test_a_group_that_cannot_be_pooled_is_judged_by_its_subtasks(tmp_path: Path) -> None:
    for name, right in zip("ab", table(500, 300, 0, 100), strict=True):
        write_task(tmp_path / name, "law", [True] * N)
        write_task(tmp_path / name, "math", right, filter_name="strict")
        write_results(tmp_path / name, group_subtasks={"all": ["law", "math"]})
    assert compare(tmp_path / "a", tmp_path / "b") == 1


@pytest.mark.parametrize(
    ("time", "content", "message"),
    [
        (LATER, {"results": {"gsm8k": {"exact_match,none": 0.2}}}, "0.9128 (filter none), the newest result file says"),
        (LATER, {"n-samples": {"gsm8k": {"effective": 700}}}, "1319 documents (filter none), the result file says 7"),
        (LATER, {"results": {"gsm8k": {"exact_match,none": 1204 / N}}, "n-samples": {"gsm8k": {"effective": N}}}, ""),
        ("2025-01-01T00-00-00.0", {"results": {"gsm8k": {"exact_match,none": 0.2}}}, ""),  # of samples that are gone
        (LATER, {"results": {"gsm8k": {"exact_match,none": "N/A"}, "other": {}}, "n-samples": 3}, ""),
    ],
)  # fmt: skip
def test_result_files_are_held_against_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], time: str, content: dict[str, Any], message: str
) -> None:
    for name, right in zip("ab", table(1200, 3, 4, 112), strict=True):
        write_task(tmp_path / name, "gsm8k", right)
    write_results(tmp_path / "b", time, **content)
    assert compare(tmp_path / "a", tmp_path / "b") == (3 if message else 0)
    assert message in capsys.readouterr().err


def test_links_to_the_baselines_own_files_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, link in (("c", "symlink_to"), ("d", "hardlink_to")):
        (tmp_path / name).mkdir()
        for path in folders[0].iterdir():
            getattr(tmp_path / name / path.name, link)(path)
        assert compare(folders[0], tmp_path / name) == 3
        assert f"is one file for 'a' and '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"gen_args_0": ["x"]}}, "line 1: arguments.gen_args_0 is ['x']"),
        ({"arguments": {"gen_args_0": None}}, "line 1: arguments.gen_args_0 is None"),
        ({"arguments": [[]]}, "line 1: arguments holds an empty request"),
        ({"metrics": [["x"]]}, "line 1: metrics is [['x']], expected a list of names"),
        ({"metrics": [{}]}, "line 1: metrics is [{}], expected a list of names"),
        ({"metrics": []}, "line 1: exact_match is missing, which 1318 other documents have"),
        ({"doc_id": True}, "line 1: not a row"),
    ],
)
def test_one_damaged_row_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    for name in "ab":
        write_task(tmp_path / name, "gsm8k", [True] * N)
    path = rewrite(tmp_path / "b", "gsm8k", lambda number, item: item.update(changes) if number == 0 else None)
    assert compare(tmp_path / "a", tmp_path / "b") == 3
    printed = capsys.readouterr().err
    assert f"{path}, {message}" in printed
    assert "Traceback" not in printed


def test_scores_that_are_no_numbers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        write_task(tmp_path / name, "gsm8k", [True] * 300)
    path = rewrite(tmp_path / "b", "gsm8k", lambda number, item: item.update(exact_match="yes"))
    assert compare(tmp_path / "a", tmp_path / "b") == 3
    assert f"b gsm8k exact_match: not one number for each document: {path}, line 1 has yes" in capsys.readouterr().err


def test_a_problem_is_a_whole_number(tmp_path: Path) -> None:
    for problem, clusters in ((True, 0), (0, 1)):
        for name in "ab":
            doc = {"question": "q", "repeat": 1, "problem": problem}
            write_samples(tmp_path / str(clusters) / name, "t", [row(i, 1.0, doc=doc) for i in range(12)])
        found = compare_folders(tmp_path / str(clusters) / "a", tmp_path / str(clusters) / "b").tasks[0]
        assert found.clusters == clusters


def test_what_is_no_text_is_hashed_all_the_same(tmp_path: Path) -> None:
    """Lone surrogates in document, prompt and target, without lm-eval's hashes."""
    changes = {
        "doc": {"question": "\ud800"}, "target": "\ud801", "arguments": {"gen_args_0": {"arg_0": "\ud802"}},
    }  # fmt: skip
    for name, last in (("a", "\ud801"), ("b", "\ud801"), ("c", "\ud803")):
        rows = [{**row(i, 1.0), **changes, "target": last} for i in range(N)]
        for item in rows:
            del item["doc_hash"], item["prompt_hash"], item["target_hash"]
        write_samples(tmp_path / name, "t", rows)
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    assert compare(tmp_path / "a", tmp_path / "c") == 3


def test_a_time_of_400_digits_is_unknown(tmp_path: Path) -> None:
    for name in "ab":
        write_task(tmp_path / name, "t", [True] * N)
    for seconds in (10**400, "1" * 400, "x", [1]):
        write_results(tmp_path / "b", total_evaluation_time_seconds=seconds)
        assert compare(tmp_path / "a", tmp_path / "b") == 0


SAME = "note: a, b: the two sides' samples are byte for byte the same files: a copy, or one run compared with itself"


def test_a_copy_of_the_baseline_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> bool:
        out = tmp_path / "out.json"
        assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out)]) == 0
        noted = SAME.removeprefix("note: ") in json.loads(out.read_text())["notes"]
        assert noted == (SAME in capsys.readouterr().out)
        return noted

    right = table(1200, 0, 0, 119)[0]
    for name in "ab":
        write_task(tmp_path / name, "gsm8k", right)
    assert said()
    for name, seconds in (("a", "1.5"), ("b", "1.5")):
        write_results(tmp_path / name, total_evaluation_time_seconds=seconds)
    assert said()
    write_results(tmp_path / "b", total_evaluation_time_seconds="1.6")  # evaluated twice, with equal answers
    assert not said()
    for path in tmp_path.glob("?/results_*"):
        path.unlink()
    (sample,) = (tmp_path / "b").glob("samples_*")
    sample.rename(sample.with_name(f"samples_gsm8k_{LATER}.jsonl"))
    assert not said()
    for name, seconds in (("a", "1.5"), ("b", "1.5")):
        write_results(tmp_path / name, total_evaluation_time_seconds=seconds)
    assert said()  # a copy whose file was renamed
    rewrite(tmp_path / "b", "gsm8k", lambda number, item: item.update(resps=[["other"]]) if number == 0 else None)
    assert not said()


@pytest.mark.parametrize("empty", [[[""]], [[" \n"]], [[None]], [None], [], None])
def test_empty_answers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: Any) -> None:
    for name, right in zip("ab", table(1200, 3, 4, 112), strict=True):
        write_task(tmp_path / name, "gsm8k", right)
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    assert "empty" not in capsys.readouterr().out
    rewrite(tmp_path / "b", "gsm8k", lambda number, item: item.update(resps=empty))
    compare(tmp_path / "a", tmp_path / "b")
    said = (
        "note: b: gsm8k: all 1319 answers are empty or null (none, exact_match), though 1204 of them are marked right"
    )
    assert said in capsys.readouterr().out
    rewrite(tmp_path / "b", "gsm8k", lambda number, item: item.update(resps=[["x"]] if item["exact_match"] else empty))
    compare(tmp_path / "a", tmp_path / "b")
    assert "note: b: gsm8k: 115 of 1319 answers are empty or null (none, exact_match)\n" in capsys.readouterr().out


def test_log_likelihoods_are_no_empty_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        write_samples(
            tmp_path / name, "t", [row(i, 1.0, resps=[[["-1.5", "False"]], [[-2.5, True]]]) for i in range(N)]
        )
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    assert "empty" not in capsys.readouterr().out


def test_no_name_prints_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, right in zip("ab", table(500, 300, 0, 100), strict=True):
        write_task(tmp_path / name, "x\nverdict: PASS", right)
    assert compare(tmp_path / "a", tmp_path / "b") == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("verdict")] == [
        "verdict: REGRESSION (exit code 1, policy default)"
    ]
