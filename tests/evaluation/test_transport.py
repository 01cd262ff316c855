"""Every fault of an endpoint has its own message and figure, fails one request and not the run; and the server is kept
busy.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, fake_server

from workbench.errors import EvaluationError
from workbench.evaluation._read import read_completion, read_logprobs
from workbench.evaluation._transport import Transport, _retry_after_s

N = 40


def _ask(server: FakeServer, n: int = N, payload: Any = None, **settings: Any) -> tuple[Transport, dict, dict]:
    settings = {"concurrency": 4, "timeout_s": 5.0, "retries": 2, "backoff_s": 0.01, **settings}
    transport = Transport(f"{server.url}/v1/completions", **settings)
    answers: dict[int, Any] = {}
    failed: dict[int, str] = {}
    payload = payload or (lambda i: {"prompt": f"p{i}", "stop": []})
    transport.ask(
        [json.dumps(payload(i)).encode() for i in range(n)],
        lambda i, answer: read_completion(answer, "completions"),
        lambda i, value, seconds, attempts: answers.update({i: value["text"]}),
        lambda i, message: failed.update({i: message}),
    )
    return transport, answers, failed


def _always(prompts: set[str], kind: str, server: FakeServer) -> None:
    """Meet requests for `prompts` with a fault, however often they are sent."""
    server.fault = lambda n: kind if server.prompts[n] in prompts else None


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("429", "http_429", "HTTP 429.*as told"),
        ("400", "http_400", "HTTP 400.*as told"),
        ("hang", "timeout", r"did not answer within 0\.3 s"),
        ("reset", "reset", "closed the connection in place of an answer"),
        ("truncated", "truncated_json", "no whole JSON"),
        ("cut", "truncated_json", "broke off"),
        ("no_choices", "wrong_lengths", "0 choices where one was asked for"),
    ],
)
def test_a_fault_fails_its_own_request_with_its_own_message_and_figure(fault: str, kind: str, message: str) -> None:
    with fake_server(lambda prompt: prompt.upper()) as server:
        _always({"p7"}, fault, server)
        transport, answers, failed = _ask(server, timeout_s=0.3 if fault == "hang" else 5.0)
    assert answers == {i: f"P{i}" for i in range(N) if i != 7}
    assert list(failed) == [7]
    assert re.search(message, failed[7])
    sends = {"http_400": 1, "timeout": 2}.get(kind, 3)  # refused for good; long; else all retries
    assert transport.faults == {kind: sends}
    record = transport.record(requests=N, resumed=0, prompt=None, completion=None)
    assert (record.failed, record.retries, record.faults) == (1, sends - 1, {kind: sends})
    assert list(record.examples) == [kind]


def test_http_500_is_quoted_and_counted() -> None:
    with fake_server(lambda prompt: None if prompt == "p7" else "x") as server:
        transport, answers, failed = _ask(server)
    assert len(answers) == N - 1
    assert "HTTP 500" in failed[7]
    assert "no answer" in failed[7]
    assert transport.faults == {"http_500": 3}


def test_a_fault_that_passes_costs_nothing_but_a_retry() -> None:
    with fake_server(lambda prompt: prompt) as server:
        server.fault = lambda n: "reset" if n % 5 == 0 else None
        transport, answers, failed = _ask(server, retries=6)
    assert answers == {i: f"p{i}" for i in range(N)}
    assert not failed
    assert transport.resent == transport.faults["reset"] > 0


def test_echo_of_the_wrong_length_is_told() -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    payload = {"prompt": [[1, 2, 3]], "echo": True, "logprobs": 1}
    for fault, message in (("short", "token_logprobs has 2 entries for 3 prompt tokens"), (None, "")):
        with fake_server(lambda prompt: "", lambda ids: "") as server:
            server.fault = lambda n, fault=fault: fault  # type: ignore[misc]
            transport = Transport(server.url, concurrency=1, timeout_s=5.0, retries=1, backoff_s=0.01)
            failed: list[str] = []
            found: list[Any] = []
            ask = (
                [json.dumps(payload).encode()] * 3,
                lambda i, answer: read_logprobs(answer, 2, 3, LocalCompletionsAPI.parse_logprobs),
                lambda i, value, seconds, attempts, found=found: found.append(value["logprob"]),
                lambda i, text, failed=failed: failed.append(text),
            )
            if fault:
                with pytest.raises(EvaluationError, match=rf"3 of 3 requests failed.*wrong_lengths: 6.*{message}"):
                    transport.ask(*ask)
            else:
                transport.ask(*ask)
                assert len(found) == 3
                assert not failed


def test_a_server_without_echo_is_told() -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from workbench.evaluation._transport import BadAnswer

    with pytest.raises(BadAnswer, match="echo with logprobs is not supported"):
        read_logprobs({"choices": [{"text": "x"}]}, 2, 3, LocalCompletionsAPI.parse_logprobs)


def test_slowdown_has_its_own_figures() -> None:
    with fake_server(lambda prompt: prompt) as server:
        server.latency_s = 0.01
        server.fault = lambda n: "slow" if n >= 36 else None
        transport, answers, _ = _ask(server, concurrency=2)
    record = transport.record(requests=N, resumed=0, prompt=None, completion=None)
    assert len(answers) == N
    assert 4 <= record.slow < N / 2  # other work on the machine may make some of the others slow
    assert record.slowdown > 20
    assert record.latency_max_s > 0.3 > record.latency_median_s


def test_retry_after_is_honoured() -> None:
    with fake_server(lambda prompt: prompt) as server:
        server.retry_after = "0.5"
        server.fault = lambda n: "429" if n == 0 else None
        started = time.monotonic()
        _, answers, _ = _ask(server, n=1)
        assert time.monotonic() - started >= 0.5
        assert answers == {0: "p0"}
        server.retry_after = "4000"
        server.fault = lambda n: "429"
        with pytest.raises(EvaluationError, match=r"Retry-After: 4000 s, longer than the 300 s"):
            _ask(server, n=1)


def test_retry_after_is_read_as_number_or_date() -> None:
    assert _retry_after_s("7") == 7.0
    assert _retry_after_s("") == _retry_after_s("soon") == _retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert _retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9


def test_a_run_goes_on_only_while_that_has_a_point() -> None:
    with fake_server(lambda prompt: prompt) as server:
        server.fault = lambda n: "404"
        with pytest.raises(EvaluationError, match="HTTP 404"):
            _ask(server, concurrency=1)
        assert len(server.payloads) == 1  # every other would meet the same
    with fake_server(lambda prompt: prompt) as server:
        _always({f"p{i}" for i in range(0, N, 4)}, "400", server)
        with pytest.raises(EvaluationError, match=r"3 of 40 requests failed.*http_400: 3"):
            _ask(server, concurrency=1)
    with fake_server(lambda prompt: prompt) as server:
        server.die_after = 5
        with pytest.raises(EvaluationError, match=r"stopped answering"):
            _ask(server, concurrency=1)


def test_null_is_an_answer_and_is_counted(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from workbench.evaluation._client import CompletionsClient

    with fake_server(lambda prompt: "x") as server:
        server.fault = lambda n: "null" if n == 0 else None
        client = CompletionsClient(
            journal=str(tmp_path / "j"), identity="x", model="m", base_url=f"{server.url}/v1/completions",
            tokenizer_backend=None, tokenized_requests=False,
        )  # fmt: skip
        requests = [SimpleNamespace(args=(c, {}), task_name="t", doc_id=i) for i, c in enumerate(("aa", "b"))]
        assert client.generate_until(requests) == ["", "x"]
        assert len(server.payloads) == 2
        assert client.transport.faults == {"null_content": 1}
        assert "sent null" in client.transport.examples["null_content"]


def test_32_at_once_keep_a_server_busy() -> None:
    """Against a server that takes 1 s an answer. Other work on the machine can only add time: the best of four."""
    shares = []
    with fake_server(lambda prompt: "x") as server:
        server.latency_s = 1.0
        while len(shares) < 4 and max(shares, default=0.0) < 0.9:
            transport, answers, _ = _ask(server, n=32 * 5, concurrency=32)
            assert len(answers) == 32 * 5
            shares.append(5 * server.latency_s / transport.wall_s)
    assert max(shares) >= 0.9
    assert transport.record(requests=160, resumed=0, prompt=None, completion=None).busy >= 0.9


def test_a_request_costs_the_same_however_many_there_are() -> None:
    """Processor time a request, of 400 and of 1,600. Other work on the machine can only add to it: the least of four
    turns each. A cost that grew with the number of requests would be four times as high.
    """
    costs = {400: math.inf, 1600: math.inf}
    with fake_server(lambda prompt: "x") as server:
        for _ in range(4):
            for n in costs:
                used = time.process_time()
                _ask(server, n=n, concurrency=32)
                costs[n] = min(costs[n], (time.process_time() - used) / n)
            if costs[1600] < 1.5 * costs[400]:
                break
    assert costs[1600] < 1.5 * costs[400]
