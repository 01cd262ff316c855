"""Endpoints broken on purpose, through real lm-eval, the comparison and the gate: the report says what caught each."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from canned import canned_answer, specs
from fake_server import FakeServer, fake_server

from workbench import experiment
from workbench.comparison import compare_arms
from workbench.evaluation.run import evaluate
from workbench.records import Attribution, TensorRecord, write_json
from workbench.reporting import build_report

pytestmark = pytest.mark.usefixtures("in_process")


def answer(prompt: str) -> str | tuple[str, str] | None:
    """Canned answers, and one to the preflight's own question."""
    return canned_answer(prompt) if "Question:" in prompt else "2"


def own_limit(server: FakeServer) -> None:
    """The server ends every answer at 5 tokens, whatever max_tokens it is sent."""
    server.most_tokens = 5


def wrong_template(server: FakeServer) -> None:
    """Another model's chat template: the prompt grows by its marks, and the model rambles."""
    server.template = "[INST] You are a pirate. [/INST]"
    server.answer = lambda prompt: " Arr, that be a fine question."


def task_budget(server: FakeServer) -> None:
    """The model talks until its budget of 96 tokens is used up: the harness gave it too few."""
    server.answer = lambda prompt: ("so " * 32, "length")


def attributed(run: Path, break_it: Callable[[FakeServer], None], weights: bool) -> Attribution:
    """Of an arm whose server is broken, against a sound one, both asked over chat. weights: whether they were measured
    and found to be what NVFP4 allows.
    """
    for arm, change in (("source", lambda server: None), ("nvfp4", break_it)):
        out = run / "eval" / arm
        theirs = run / "eval" / "source" if arm != "source" else None
        with fake_server(answer) as server:
            change(server)
            evaluation = evaluate(
                arm=arm, base_url=server.url, model="m", tokenizer=None, tasks=specs()[:1], out_dir=out, concurrency=4,
                max_length=8192, api="chat", baseline_dir=theirs,
            )  # fmt: skip
        write_json(out / "scores.json", evaluation)
    write_json(run / "comparison.json", compare_arms(run, baseline="source", candidates=["nvfp4"]))
    if weights:
        write_tensors(run)
    policy: dict[str, Any] = {"name": "p", "margin_pp": 10.0, "gated": ["nvfp4"], "weights": {"min_sqnr_db": 10.0}}
    verdict = experiment.judge(run, policy)
    assert verdict.exit_code == 1
    build_report(run)
    (found,) = verdict.attributions
    for page in ("report.html", "summary.md"):
        assert f"caught by {', '.join(found.caught_by)}" in (run / page).read_text()
    return found


def write_tensors(run: Path) -> None:
    """One matrix in tensors.parquet, at NVFP4's own SQNR."""
    blank = {int: 0, float: 20.6, str: "", bool: False}
    row = {name: blank[kind] for name, kind in typing.get_type_hints(TensorRecord).items()}
    row |= {"name": "m.weight", "source_arm": "source", "first_arm": "nvfp4", "first_format": "nvfp4"}
    pd.DataFrame([row]).to_parquet(run / "tensors.parquet")


def test_a_server_with_a_limit_of_its_own_is_the_serving_path(tmp_path: Path) -> None:
    found = attributed(tmp_path / "run", own_limit, weights=False)
    assert (found.cause, found.caught_by) == ("serving path", ("artefacts", "answers"))
    assert "were cut below the tokens asked for" in found.summary


def test_a_wrong_chat_template_is_the_serving_path(tmp_path: Path) -> None:
    found = attributed(tmp_path / "run", wrong_template, weights=False)
    assert (found.cause, found.caught_by) == ("serving path", ("transport", "answers"))
    assert "12 of 12 prompts" in found.summary


def test_a_budget_that_is_too_small_is_the_harness_once_the_weights_are_known(tmp_path: Path) -> None:
    found = attributed(tmp_path / "run", task_budget, weights=True)
    assert (found.cause, found.caught_by) == ("harness", ("artefacts", "answers"))
    assert "used up their tokens" in found.summary
