"""A verdict is shown only where it speaks of what lies in the run folder and agrees with itself."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.reporting import build_report
from workbench.reporting.index import build_index
from workbench.reporting.load import load_run
from workbench.reporting.side_by_side import build_comparison

GREEN = re.compile(r'class="(verdict|tag) pass"')


@pytest.fixture
def run(sample_run: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "reports" / "copied"
    shutil.copytree(sample_run, copy)
    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def in_place_of_pass(run: Path) -> None:
    """Make the sample's verdict a green one that its own checks give."""

    def change(verdict: dict[str, Any]) -> None:
        passed = [check for check in verdict["checks"] if check["status"] == "pass"]
        verdict.update(status="pass", exit_code=0, headline="Pass: all of it.", checks=passed)

    edit(run / "verdict.json", change)


def pages(run: Path) -> dict[str, str]:
    """Everything that is made of a run."""
    build_report(run)
    shown = {name: (run / name).read_text() for name in ("report.html", "summary.md", "report.json")}
    shown["index"] = build_index(run.parent).read_text()
    other = run.parent / "other"
    shutil.copytree(run, other)
    shown["side by side"] = build_comparison([run, other], run.parent.parent / "both.html").read_text()
    return shown


def verdict_of(page: str) -> str:
    return page[page.index('<section id="verdict"') : page.index("</section>", page.index('<section id="verdict"'))]


def test_a_copied_run_of_another_time_keeps_its_verdict(run: Path) -> None:
    in_place_of_pass(run)
    for path in run.rglob("*"):
        os.utime(path, (1, 1))
    shown = pages(run)
    assert json.loads(shown["report.json"])["verdict"]["status"] == "pass"
    assert 'class="verdict pass"' in shown["report.html"]
    assert not [name for name, text in shown.items() if "Out of date" in text]


def answers_again(run: Path) -> str:
    name = "eval/nvfp4/samples_gsm8k_mini.jsonl"
    (run / name).write_text("other answers\n")
    return name


def scores_again(run: Path) -> str:
    edit(run / "eval/nvfp4/scores.json", lambda scores: scores.update(seconds=1.0))
    return "eval/nvfp4/scores.json"


def compared_again(run: Path) -> str:
    edit(run / "comparison.json", lambda comparison: comparison.update(notes=["compared again"]))
    return "comparison.json"


def linted_since(run: Path) -> str:
    shutil.copy(run / "lint/nvfp4.json", run / "lint/nvfp4_to_mxfp4.json")
    return "lint/nvfp4_to_mxfp4.json"


def gone(name: str) -> Callable[[Path], str]:
    def remove(run: Path) -> str:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return name

    remove.__name__ = f"gone: {name}"
    return remove


def undigested(run: Path) -> str:
    edit(run / "verdict.json", lambda verdict: [verdict.pop(key) for key in ("judged", "policy_sha256")])
    return "it does not say what it judged"


def out_of_the_run(run: Path) -> str:
    edit(run / "verdict.json", lambda verdict: verdict["judged"].update({"../../elsewhere": "0" * 64}))
    return "../../elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        answers_again, scores_again, compared_again, linted_since, undigested, out_of_the_run,
        *map(gone, ("comparison.json", "eval", "eval/nvfp4/scores.json", "lint", "server", "tensors.parquet")),
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_a_verdict_of_what_has_changed_since_is_out_of_date_everywhere(
    run: Path, change: Callable[[Path], str]
) -> None:
    in_place_of_pass(run)
    name = change(run)
    shown = pages(run)
    verdict = json.loads(shown["report.json"])["verdict"]
    assert (verdict["status"], verdict["checks"], verdict["exit_code"]) == ("outdated", [], 2)
    assert name in verdict["headline"] or name.split("/")[0] in verdict["headline"]
    assert not GREEN.search(verdict_of(shown["report.html"]))
    for text in (shown["index"], shown["side by side"]):
        assert "Out of date" in text
        assert 'class="tag pass"' not in text
    assert ": Out of date" in shown["summary.md"]
    assert "| pass |" not in shown["summary.md"]
    assert not [name for name, text in shown.items() if "Pass: all of it." in text]
    assert not [row for row in json.loads(shown["report.json"])["detectable"] if row["status"]]


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": 1}, {"checks": []}, {"status": "fine"}, {"status": "regression", "exit_code": 1},
        {"checks": [{"name": "lint", "arm": "a", "status": "fail", "reason": "r"}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_verdict_that_contradicts_itself_is_damaged(run: Path, change: dict[str, Any]) -> None:
    in_place_of_pass(run)
    edit(run / "verdict.json", lambda verdict: verdict.update(change))
    files = load_run(run)
    assert files.verdict is None
    assert files.damaged("verdict.json") == ["verdict.json"]
    page = build_report(run).read_text()
    assert not GREEN.search(verdict_of(page))
    assert "verdict.json: status " in page
