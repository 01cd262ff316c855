"""Real lm-eval against a loopback server with canned answers: exact scores, files, order, and every way to fail."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from canned import GSM8K_N, MMLU_N, canned_answer, specs
from fake_server import fake_server

from workbench.comparison import compare_arms
from workbench.errors import EngineError, EvaluationError
from workbench.evaluation.run import chat_url, completions_url, evaluate
from workbench.evaluation.spec import task_spec
from workbench.gating import gate
from workbench.records import Evaluation, read_json


def _rows(run_dir: Path, arm: str, task: str) -> list[dict[str, Any]]:
    (path,) = (run_dir / "eval" / arm / "org__mini").glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run(server: Any, out_dir: Path, **settings: Any) -> Evaluation:
    tasks = settings.pop("tasks", specs())
    defaults = {"arm": "a", "model": "m", "tokenizer": None, "concurrency": 2, "max_length": 4096}
    return evaluate(base_url=server.url, tasks=tasks, out_dir=out_dir, **{**defaults, **settings})


def test_scores_are_exactly_those_of_the_canned_answers(finished_run: dict[str, Any]) -> None:
    scores = {(s.task, s.filter): s for s in finished_run["source"]["evaluation"].scores}
    strict, flexible = scores["gsm8k_mini", "strict-match"], scores["gsm8k_mini", "flexible-extract"]
    letters = scores["mmlu_pro_mini", "custom-extract"]
    # of each four answers: two with ####, one with the number alone, one empty
    assert (strict.value, flexible.value) == (0.5, 0.75)
    assert (strict.n, strict.empty, strict.invalid, strict.truncated) == (GSM8K_N, 3, 6, 0)
    assert (flexible.empty, flexible.invalid) == (3, 3)
    assert (letters.value, letters.n, letters.empty, letters.invalid, letters.truncated) == (0.5, MMLU_N, 0, 4, 4)
    assert strict.primary
    assert letters.primary
    assert not flexible.primary
    # Wilson interval of 6 of 12: statsmodels 0.15.0, proportion_confint(6, 12, method="wilson") = 0.2537816, 0.7462184
    assert (strict.low, strict.high) == (pytest.approx(0.2537816, abs=1e-6), pytest.approx(0.7462184, abs=1e-6))


def test_files_are_in_the_harness_layout_and_complete(finished_run: dict[str, Any]) -> None:
    run_dir, evaluation = finished_run["run_dir"], finished_run["source"]["evaluation"]
    folder = run_dir / "eval" / "source"
    (results,) = (folder / "org__mini").glob("results_*.json")
    content = json.loads(results.read_text())
    assert content["results"]["gsm8k_mini"]["exact_match,strict-match"] == 0.5
    assert content["results"]["mmlu_pro_mini"]["exact_match,custom-extract"] == 0.5
    assert content["n-samples"]["gsm8k_mini"]["effective"] == GSM8K_N
    assert {path.name for path in folder.iterdir()} == {"org__mini", "scores.json", "request.json", "harness.log"}
    assert read_json(Evaluation, folder / "scores.json") == evaluation
    for score in evaluation.scores:
        assert (run_dir / score.samples).is_file()
        assert score.num_fewshot == 2
    assert evaluation.harness == "lm-eval 0.4.13"
    for path in json.loads((folder / "request.json").read_text())["tasks"]:
        assert path["limit"] in (GSM8K_N, MMLU_N)


def test_requests_are_greedy_tokens_with_the_tasks_own_stop_list(finished_run: dict[str, Any]) -> None:
    for arm in ("source", "source_again"):  # four at once and one at a time ask the same
        payloads = finished_run[arm]["server"].payloads
        assert len(payloads) == GSM8K_N + MMLU_N
        assert {payload["temperature"] for payload in payloads} == {0.0}
        assert {payload["max_tokens"] for payload in payloads} == {96}
        assert {tuple(payload["stop"]) for payload in payloads} == {
            ("Question:", "</s>", "<|im_end|>"),
            ("Question:",),
        }
        assert all(isinstance(payload["prompt"][0][0], int) for payload in payloads)


def test_reversed_order_sends_last_first_and_changes_nothing_else(finished_run: dict[str, Any]) -> None:
    forward, again = finished_run["source"]["server"].prompts, finished_run["source_again"]["server"].prompts
    assert sorted(forward) == sorted(again)
    lengths = [len(prompt) for prompt in again]
    mmlu_first = [prompt.startswith("The following") for prompt in again]
    assert mmlu_first == sorted(mmlu_first, reverse=True)  # lm-eval's order is gsm8k first, each longest first
    assert lengths[:MMLU_N] == sorted(lengths[:MMLU_N])
    assert lengths[MMLU_N:] == sorted(lengths[MMLU_N:])
    for task in ("gsm8k_mini", "mmlu_pro_mini"):
        assert _rows(finished_run["run_dir"], "source", task) == _rows(finished_run["run_dir"], "source_again", task)
    assert finished_run["source_again"]["evaluation"].request_order == "reversed"


def test_progress_counts_every_answer_once(finished_run: dict[str, Any]) -> None:
    total = GSM8K_N + MMLU_N
    assert finished_run["source"]["progress"] == [(done, total) for done in range(total + 1)]


def test_dying_server_is_named_and_the_next_run_continues(tmp_path: Path, finished_run: dict[str, Any]) -> None:
    out_dir = tmp_path / "eval" / "a"
    with fake_server(canned_answer) as server:
        server.die_after = 9
        with pytest.raises(EvaluationError, match=f"(?s)'a'.*{server.url}.*(stopped answering|refused a request)"):
            _run(server, out_dir, concurrency=1, fingerprint="f0", retries=1)
    assert not list(out_dir.glob("*/results_*"))
    with fake_server(canned_answer) as server:
        evaluation = _run(server, out_dir, concurrency=1, fingerprint="f0")
        assert len(server.payloads) == GSM8K_N + MMLU_N - 9
    expected = finished_run["source"]["evaluation"]
    figures = [(s.task, s.filter, s.value, s.empty, s.invalid, s.truncated) for s in evaluation.scores]
    assert figures == [(s.task, s.filter, s.value, s.empty, s.invalid, s.truncated) for s in expected.scores]
    assert evaluation.task_fingerprints == expected.task_fingerprints
    for task in ("gsm8k_mini", "mmlu_pro_mini"):
        (path,) = (out_dir / "m").glob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == _rows(finished_run["run_dir"], "source", task)
    assert {path.name for path in out_dir.iterdir()} == {"m", "request.json", "harness.log"}


def test_a_killed_harness_continues_and_repeats_no_answered_request(
    tmp_path: Path, finished_run: dict[str, Any]
) -> None:
    out_dir = tmp_path / "eval" / "a"

    def kill_at_five(done: int, total: int) -> None:
        if done == 5:
            (harness,) = (c for c in psutil.Process().children() if "workbench.evaluation._harness" in c.cmdline())
            harness.kill()

    with fake_server(canned_answer) as server, pytest.raises(EvaluationError, match="ended with status -9"):
        _run(server, out_dir, fingerprint="f0", concurrency=3, progress=kill_at_five)
    answered = {json.loads(line)["key"] for line in (out_dir / ".journal.jsonl").read_text().split("\n")[1:-1]}
    assert len(answered) >= 5
    with fake_server(canned_answer) as server:
        evaluation = _run(server, out_dir, fingerprint="f0", concurrency=3)
        sent = {hashlib.sha256(body).hexdigest() for body in server.bodies}
    assert not sent & answered
    assert len(sent) == GSM8K_N + MMLU_N - len(answered)
    assert evaluation.transport is not None
    assert evaluation.transport.resumed == len(answered)
    for task in ("gsm8k_mini", "mmlu_pro_mini"):
        (path,) = (out_dir / "m").glob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == _rows(finished_run["run_dir"], "source", task)


def test_watch_ends_the_evaluation_and_leaves_no_process(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        time.sleep(30)
        return ""

    def watch() -> None:
        raise EngineError("the server died")

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with fake_server(answer) as server, pytest.raises(EngineError, match="the server died"):
        _run(server, tmp_path / "eval" / "a", watch=watch)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    "url",
    ["", "no url", "ftp://host:1", "http://", "http://h:70000", "http://h:x", "http://h:0", "http://127.0.0.1:9/v1"],
)
def test_an_endpoint_that_cannot_answer_is_refused_before_anything_is_made(tmp_path: Path, url: str) -> None:
    out_dir = tmp_path / "eval" / "a"
    settings = {"arm": "a", "model": "m", "tokenizer": None, "concurrency": 1, "max_length": 64}
    with pytest.raises(EvaluationError, match=r"base_url|no answer from http://127\.0\.0\.1:9/v1/models"):
        evaluate(base_url=url, tasks=specs(), out_dir=out_dir, **settings)  # type: ignore[arg-type]
    with pytest.raises(EvaluationError, match="missing"):
        evaluate(base_url=url, tasks=specs(), out_dir=out_dir, **{**settings, "tokenizer": tmp_path / "missing"})  # type: ignore[arg-type]
    assert not out_dir.exists()


def test_harness_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    started = tmp_path / "eval" / "a" / "harness.log"
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from canned import specs\n"
        "from fake_server import fake_server\n"
        "from workbench.evaluation.run import evaluate\n"
        "with fake_server(lambda prompt: '') as server:\n"
        "    evaluate(arm='a', base_url=server.url, model='m', tokenizer=None, tasks=specs(),\n"
        "             out_dir=Path(sys.argv[2]), concurrency=1, max_length=4096)\n"
    )
    arguments = [str(Path(__file__).parent), str(started.parent)]
    parent = subprocess.Popen([sys.executable, "-c", program, *arguments])
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children()
    while not children and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(parent.pid).children()
    time.sleep(2.0)  # long enough to be importing; the watcher thread starts before anything heavy
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert children
    assert not alive, gone


def test_finished_arms_compare_and_pass_the_gate(finished_run: dict[str, Any]) -> None:
    comparison = compare_arms(finished_run["run_dir"], baseline="source", candidates=["source_again"])
    tables = {(t.task, t.filter): (t.n, t.both, t.lost, t.gained, t.neither) for t in comparison.tasks}
    assert tables == {
        ("gsm8k_mini", "strict-match"): (12, 6, 0, 0, 6),
        ("gsm8k_mini", "flexible-extract"): (12, 9, 0, 0, 3),
        ("mmlu_pro_mini", "custom-extract"): (16, 8, 0, 0, 8),
    }
    policy = {"name": "p", "margin_pp": 24.0, "gated": ["source_again"]}
    assert gate(policy, comparison=comparison).status == "pass"  # rule of three: 22.1 pp at 12 items
    assert gate({**policy, "margin_pp": 20.0}, comparison=comparison).status == "inconclusive"


def test_refusal_of_the_endpoint_is_quoted(tmp_path: Path) -> None:
    with fake_server(lambda prompt: None) as server, pytest.raises(EvaluationError, match=r"HTTP 500.*no answer"):
        _run(server, tmp_path / "eval" / "a", tasks=specs(limit=1)[:1], retries=1)


def test_missing_and_empty_data_files_are_named(tmp_path: Path) -> None:
    missing = {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl")}
    spec = task_spec({"name": "gsm8k", "task": "gsm8k", "data": missing, "primary_filter": "strict-match"})
    with fake_server(canned_answer) as server:
        with pytest.raises(EvaluationError, match=r"'gsm8k'.*train\.jsonl.*does not exist"):
            _run(server, tmp_path / "a", tasks=(spec,))
        (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
        (tmp_path / "test.jsonl").write_text("\n")
        with pytest.raises(EvaluationError, match=r"test\.jsonl.*holds no document"):
            _run(server, tmp_path / "a", tasks=(spec,))
        with pytest.raises(EvaluationError, match="no task"):
            _run(server, tmp_path / "a", tasks=())
        assert not server.payloads


def test_limit_beyond_the_data_is_refused_before_any_request(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n' * 3)
    data = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    settings = {"name": "tiny", "task": "gsm8k", "data": data, "primary_filter": "strict-match", "num_fewshot": 0}
    with fake_server(canned_answer) as server:
        with pytest.raises(EvaluationError, match=r"'tiny'.*limit is 4.*3 documents"):
            _run(server, tmp_path / "eval" / "a", tasks=(task_spec({**settings, "limit": 4}),))
        assert not server.payloads


def test_urls_with_and_without_path() -> None:
    for given in (
        "http://h:1",
        "http://h:1/",
        "http://h:1/v1",
        "http://h:1/v1/completions",
        "http://h:1/v1/chat/completions",
    ):
        assert completions_url(given) == "http://h:1/v1/completions"
        assert chat_url(given) == "http://h:1/v1/chat/completions"


def test_room_imports_no_torch_and_no_harness() -> None:
    program = (
        "import sys, workbench.evaluation.run, workbench.statistics, workbench.comparison, workbench.gating\n"
        "print([m for m in ('torch', 'lm_eval', 'datasets', 'transformers', 'scipy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
