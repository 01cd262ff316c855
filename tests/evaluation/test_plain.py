"""The plain command line in the record asks the same: lm-eval's own client, started by it, gets equal answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from canned import canned_answer, specs
from fake_server import fake_server

from workbench.evaluation.run import evaluate
from workbench.evaluation.spec import task_spec

pytestmark = pytest.mark.usefixtures("in_process")


def _answer(prompt: str) -> Any:
    return "2" if prompt == "1+1=" else canned_answer(prompt)


def _run_plain(command: str, output: Path) -> None:
    """What the `lm_eval` program does with its arguments, in this process."""
    from lm_eval.__main__ import cli_evaluate

    words = shlex.split(command)
    assert words[:2] == ["lm_eval", "run"]
    words[words.index("lm_eval_output")] = str(output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", words)
        cli_evaluate()


def _rows(folder: Path, task: str) -> dict[str, tuple[Any, ...]]:
    """(prompt, answers, scores) of each document and filter."""
    found = {}
    for path in folder.rglob(f"samples_{task}*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = json.dumps([row["doc"].get("question"), row["doc"].get("options"), row["filter"]])
            metric = row["metrics"][0]
            found[key] = (row["prompt_hash"], row["resps"], row["filtered_resps"], row[metric])
    return found


@pytest.mark.parametrize(("api", "tasks"), [("completions", 2), ("chat", 1)])
def test_lm_evals_own_client_gets_the_same_answers(
    tmp_path: Path, tokenizer_dir: Path, decode: Any, api: str, tasks: int
) -> None:
    with fake_server(_answer, decode if api == "completions" else None) as server:
        evaluation = evaluate(
            arm="a", base_url=server.url, model="m", tokenizer=tokenizer_dir, tasks=specs(limit=8)[:tasks],
            out_dir=tmp_path / "eval" / "a", concurrency=4, max_length=8192, api=api,
        )  # fmt: skip
        ours = {json.dumps(payload, sort_keys=True) for payload in server.payloads}
        commands = evaluation.plain_command.splitlines()
        assert len(commands) == tasks
        server.payloads.clear()
        for command in commands:
            _run_plain(command, tmp_path / "plain")
        theirs = {json.dumps(payload, sort_keys=True) for payload in server.payloads}
    probe = {payload for payload in ours if "1+1=" in payload and '"max_tokens": 1' in payload}
    assert theirs == ours - probe  # byte for byte: prompt, stop list, seed, budget
    for task, rows in (("gsm8k_mini", 16), ("mmlu_pro_mini", 8))[:tasks]:
        mine = _rows(tmp_path / "eval" / "a", task)
        assert len(mine) == rows
        assert _rows(tmp_path / "plain", task) == mine


def test_hub_tasks_are_named_as_lm_eval_names_them(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from workbench.evaluation._plain import plain_command
    from workbench.evaluation.tasks import BuiltTask

    client = SimpleNamespace(api="completions", thinking="</think>")
    model_args = {"model": "m", "base_url": "u", "num_concurrent": 1, "timeout": 9, "max_length": 4096, "seed": 0}
    request = {"model_args": model_args, "templated": False, "seed": 0}
    gpqa = {"name": "g", "task": "gpqa_diamond", "primary_filter": "flexible-extract", "temperature": 0.6, "repeats": 2}
    command = plain_command(
        [BuiltTask(task_spec(gpqa), ()), BuiltTask(task_spec({"name": "p", "task": "mmlu_pro", "limit": 14,
         "primary_filter": "custom-extract"}), ())],
        client, request, tmp_path, tmp_path,
    )  # fmt: skip
    lines = command.splitlines()
    assert "--tasks gpqa_diamond_cot_zeroshot" in command
    assert "num_concurrent=2" in command  # one at a time, lm-eval sends another stop list
    assert "temperature=0.6,do_sample=True" in command
    assert sum("2 seeds" in line for line in lines if line.startswith("#")) == 1
    assert sum("documents of every subject" in line for line in lines if line.startswith("#")) == 1
    assert sum("may end a think block" in line for line in lines if line.startswith("#")) == 2
