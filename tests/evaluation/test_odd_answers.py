"""Answers that are whole JSON and yet odd are judged, counted and named; what cannot be asked is refused plainly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from canned import GSM8K_N, canned_answer, specs
from fake_server import fake_server
from workbench.mini_models import model_path

from workbench import cli
from workbench.errors import ConfigError, EvaluationError, OutputError
from workbench.evaluation._journal import Answer, Journal, encode_payload
from workbench.evaluation._read import read_completion
from workbench.evaluation._transport import Transport, _retry_after_s
from workbench.evaluation.run import check_unfinished, evaluate
from workbench.records import Evaluation, hold_lock, read_json, write_json


def _run(server: Any, out_dir: Path, **settings: Any) -> Evaluation:
    defaults = {"arm": "a", "model": "m", "tokenizer": None, "concurrency": 2, "max_length": 4096}
    tasks = settings.pop("tasks", specs()[:1])
    return evaluate(base_url=server.url, tasks=tasks, out_dir=out_dir, **{**defaults, **settings})


@pytest.mark.usefixtures("in_process")
def test_a_lone_surrogate_is_stored_escaped_and_judged_like_any_text(tmp_path: Path) -> None:
    def answer(prompt: str) -> Any:
        found = canned_answer(prompt)
        return f"\ud800{found}" if isinstance(found, str) else found

    out = tmp_path / "eval" / "a"
    with fake_server(answer) as server:
        evaluation = _run(server, out)
    values = {score.filter: score.value for score in evaluation.scores}
    assert values == {"strict-match": 0.5, "flexible-extract": 0.75}  # those of the answers without it
    (samples,) = (out / "m").glob("samples_gsm8k_mini_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert all(row["resps"][0][0].startswith("\\ud800") for row in rows)


def test_the_journal_gives_a_lone_surrogate_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "who")
    for key, text in (("a", "\ud800 #### 4"), ("b", "naïve 四")):
        journal.add(Answer(key=key, text=text, reasoning=text))
    journal.close()
    again = Journal(tmp_path / "j", "who")
    assert again.answers == journal.answers
    again.close()
    assert "四" in (tmp_path / "j").read_text(encoding="utf-8")
    assert json.loads(encode_payload({"prompt": "\udfff"})) == {"prompt": "\udfff"}


@pytest.mark.parametrize(
    ("choice", "rest", "kind", "message"),
    [
        ({"finish_reason": 3}, {}, "odd_finish", "the finish reason is 3"),
        ({"finish_reason": ["stop"]}, {}, "odd_finish", r'the finish reason is \["stop"\]'),
        ({"finish_reason": None}, {}, "odd_finish", "the finish reason is null"),
        ({}, {}, "odd_finish", "the finish reason is missing"),
        ({"finish_reason": "stop"}, {"usage": [1]}, "odd_usage", r"usage is \[1\]"),
        ({"finish_reason": "stop"}, {"usage": {"completion_tokens": 10**400}}, "odd_usage", "usage is"),
        ({"finish_reason": "stop"}, {"usage": {"prompt_tokens": "x", "completion_tokens": -5}}, "odd_usage", "'x'"),
        ({"finish_reason": "stop"}, {"model": "other"}, "other_model", "from model 'other', asked was 'm'"),
        ({"finish_reason": "stop", "token_ids": "ab", "reasoning_content": 5}, {}, "", ""),
    ],
)
def test_each_oddity_has_its_own_kind_and_message(choice: Any, rest: Any, kind: str, message: str) -> None:
    answer = {"choices": [{"text": "x", **choice}], **rest}
    found = read_completion(answer, "completions", model="m")
    assert list(found["odd"]) == ([kind] if kind else [])
    assert re.search(message, found["odd"].get(kind, ""))
    assert found["completion_tokens"] is None
    assert (found["first_ids"], found["reasoning"]) == ((), "")


@pytest.mark.usefixtures("in_process")
def test_an_odd_finish_is_not_finished_and_the_panel_names_it(tmp_path: Path) -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["choices"][0]["finish_reason"] = 3
        answer["usage"] = {"completion_tokens": "many"}

    with fake_server(canned_answer) as server:
        server.change = change
        evaluation = _run(server, tmp_path / "eval" / "a")
    (panel,) = evaluation.panels
    assert (panel.odd_finish, panel.finished, panel.truncated) == ({"3": GSM8K_N}, 0, 0)
    assert panel.length_median_tokens is None
    assert evaluation.transport is not None
    assert evaluation.transport.faults == {"odd_finish": GSM8K_N, "odd_usage": GSM8K_N}
    assert evaluation.transport.failed == 0


@pytest.mark.usefixtures("in_process")
def test_an_endpoint_that_hangs_fails_one_item_and_one_100_times_slower_none(tmp_path: Path) -> None:
    hung: set[str] = set()

    def hangs(n: int) -> str | None:
        hung.update(server.prompts[:1])
        return "hang" if server.prompts[n] in hung else None

    with fake_server(canned_answer) as server:
        server.fault = hangs
        waited = _run(server, tmp_path / "eval" / "hangs", timeout_s=1, concurrency=1)
    assert waited.transport is not None
    assert waited.panels[0].failed == waited.transport.failed == 1
    assert waited.transport.faults == {"timeout": 2}
    assert "did not answer within 1 s" in waited.transport.examples["timeout"]
    with fake_server(canned_answer) as server:
        server.latency_s = 0.003
        server.fault = lambda n: "slow" if n >= GSM8K_N - 2 else None
        slow = _run(server, tmp_path / "eval" / "slow", concurrency=1)
    assert slow.transport is not None
    assert (slow.transport.failed, slow.panels[0].failed, slow.transport.slow) == (0, 0, 2)
    assert slow.transport.latency_max_s > 0.3 > 10 * slow.transport.latency_median_s
    assert [score.value for score in slow.scores] != [score.value for score in waited.scores]


@pytest.mark.usefixtures("in_process")
def test_failures_are_told_and_are_no_answers(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    told: list[tuple[int, str]] = []
    notes = {"progress": lambda done, total: seen.append((done, total)), "failed": lambda *event: told.append(event)}
    with fake_server(lambda prompt: None) as server, pytest.raises(EvaluationError, match="3 of 12 requests failed"):
        _run(server, tmp_path / "eval" / "a", retries=0, concurrency=1)
    with fake_server(canned_answer) as server:
        server.fault = lambda n: "400" if n == 0 else None
        evaluation = _run(server, tmp_path / "eval" / "b", arm="b", retries=0, **notes)
    assert seen[-1] == (GSM8K_N - 1, GSM8K_N)
    assert [count for count, _ in told] == [1]
    assert "HTTP 400" in told[0][1]
    assert evaluation.transport is not None
    assert evaluation.transport.failed == 1


@pytest.mark.usefixtures("in_process")
def test_more_shots_than_training_documents_are_refused_by_name(tmp_path: Path) -> None:
    with (
        fake_server(canned_answer) as server,
        pytest.raises(EvaluationError, match=r"'gsm8k_mini': num_fewshot is 100000, but gsm8k_mini has \d+ training"),
    ):
        _run(server, tmp_path / "eval" / "a", tasks=specs(num_fewshot=100000)[:1])


def _evaluate(server: Any, out: Path, *more: str) -> int:
    flags = ["--model", "m", "--tokenizer", str(out / "tokenizer"), "--task", "gsm8k_mini", "--limit", "2"]
    return cli.main(["evaluate", server.url, *flags, "--out", str(out), *more])


def test_a_finished_evaluation_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm = tmp_path / "eval" / "arm"
    (arm / "m").mkdir(parents=True)
    check_unfinished(arm)
    (arm / "m" / "samples_gsm8k_mini_2026-01-01T00.jsonl").write_text("{}\n")
    (arm / "m" / "results_2026.json").write_text("{}")
    with pytest.raises(EvaluationError, match="holds an evaluation already, of gsm8k_mini"):
        check_unfinished(arm)  # another client's
    (arm / "request.json").write_text("{}")
    check_unfinished(arm)  # killed before scores.json: it goes on
    (arm / "scores.json").write_text("{}")
    with fake_server(canned_answer) as server:
        assert _evaluate(server, tmp_path) == 3
        said = capsys.readouterr().err
        assert "holds an evaluation already, of gsm8k_mini" in said
        assert "--replace" in said
        assert _evaluate(server, tmp_path, "--replace") == 3
    assert "tokenizer" in capsys.readouterr().err  # past that check, to the next
    assert (arm / "scores.json").exists()


@pytest.mark.usefixtures("in_process")
def test_replacing_leaves_one_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "eval" / "a"
    with fake_server(canned_answer) as server:
        for model in ("m", "n"):
            write_json(out / "scores.json", _run(server, out, model=model))
    assert {path.name for path in out.iterdir()} == {"n", "scores.json", "request.json", "harness.log"}


@pytest.mark.usefixtures("in_process")
def test_one_arm_is_evaluated_once_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "eval" / "a"
    with fake_server(canned_answer) as server:
        with hold_lock(out / ".lock", "held"), pytest.raises(ConfigError, match="another process is evaluating into"):
            _run(server, out)
        assert not server.payloads
        _run(server, out)


@pytest.mark.usefixtures("in_process")
def test_the_folder_is_locked_until_the_scores_are_written(tmp_path: Path) -> None:
    out = tmp_path / "eval" / "a"

    def keep(evaluation: Evaluation) -> None:
        assert (out / "m").is_dir()  # the answers lie in their place
        with pytest.raises(ConfigError, match="another process is evaluating into"):
            _run(server, out, model="n")
        write_json(out / "scores.json", evaluation)

    with fake_server(canned_answer) as server:
        evaluation = _run(server, out, keep=keep)
    assert read_json(Evaluation, out / "scores.json").scores == evaluation.scores
    assert {path.name for path in out.iterdir()} == {"m", "scores.json", "request.json", "harness.log"}


@pytest.mark.usefixtures("in_process")
def test_the_command_writes_the_scores_before_it_gives_the_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = []

    def write(path: Path, record: Any) -> None:
        with pytest.raises(ConfigError, match="held"), hold_lock(path.parent / ".lock", "held"):
            pass
        locked.append(path.name)
        write_json(path, record)

    monkeypatch.setattr("workbench.records.write_json", write)
    words = ["--model", "m", "--tokenizer", str(model_path()), "--task", "gsm8k_mini", "--limit", "4", "--api", "chat"]
    with fake_server(lambda prompt: "2" if prompt == "1+1=" else canned_answer(prompt)) as server:
        assert cli.main(["evaluate", server.url, *words, "--out", str(tmp_path)]) == 0
    assert locked == ["scores.json"]
    assert (tmp_path / "eval" / "arm" / "scores.json").is_file()


@pytest.mark.usefixtures("in_process")
def test_an_evaluation_that_ended_in_the_meantime_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Another may have ended between the caller's own look and the lock."""
    out = tmp_path / "eval" / "a"
    out.mkdir(parents=True)
    (out / "scores.json").write_text("{}")
    with fake_server(canned_answer) as server:
        with pytest.raises(EvaluationError, match="holds an evaluation already"):
            _run(server, out, replace=False)
        assert not server.payloads
    assert {path.name for path in out.iterdir()} == {"scores.json"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with fake_server(canned_answer) as server, pytest.raises(OutputError, match="/proc/x"):
        _run(server, Path("/proc/x/eval/a"))


def test_an_empty_thinking_tag_is_refused(tmp_path: Path) -> None:
    with fake_server(canned_answer) as server:
        assert _evaluate(server, tmp_path, "--thinking", "") == 3
        with pytest.raises(EvaluationError, match="blank"):
            _run(server, tmp_path, thinking="  ")


def test_a_redirect_ends_the_run_and_names_where_to() -> None:
    with fake_server(lambda prompt: "x") as server:
        server.fault = lambda n: "redirect"
        transport = Transport(server.url, concurrency=1, timeout_s=5.0, backoff_s=0.01)
        with pytest.raises(EvaluationError, match=r"redirects \(HTTP 302\) to http://127.0.0.1:9/"):
            transport.ask([b'{"prompt": "Question: x"}'], lambda i, answer: answer, lambda *kept: None)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("nan", 0.0), ("-5", 0.0), ("x", 0.0), ("", 0.0), ("7", 7.0), ("1e400", float("inf")),
     ("Mon, 01 Jan 99999 00:00:00 GMT", 0.0), ("Mon, 01 Jan 0001 00:00:00 +2359", 0.0)],
)  # fmt: skip
def test_any_retry_after_is_a_wait_or_none(header: str, seconds: float) -> None:
    assert _retry_after_s(header) == seconds


@pytest.mark.parametrize("text", [b"[" * 99999, b'{"choices": ' + b"9" * 5000 + b"}", b"null"])
def test_json_that_python_cannot_hold_is_a_broken_answer(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(lambda prompt: "x") as server:
        monkeypatch.setattr("fake_server.json.dumps", lambda *given, **settings: text.decode())
        transport = Transport(server.url, concurrency=1, timeout_s=5.0, retries=0, backoff_s=0.01)
        with pytest.raises(EvaluationError, match="1 of 1 requests failed"):
            transport.ask([b'{"prompt": "p"}'], lambda i, answer: answer, lambda *kept: None)
