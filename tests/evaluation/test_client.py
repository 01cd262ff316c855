"""The client in process: order, journal, refusals. lm-eval's Instance objects are stood in for by their two
attributes.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import fake_server

from workbench.errors import EvaluationError

SETTINGS = {"until": ["Question:"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8}


def _requests(contexts: list[str], settings: dict[str, Any] = SETTINGS) -> list[Any]:
    return [SimpleNamespace(args=(c, dict(settings)), task_name="t", doc_id=i) for i, c in enumerate(contexts)]


def _client(server: Any, journal: Path, identity: str = "x", **settings: Any) -> Any:
    from workbench.evaluation._client import CompletionsClient

    defaults = {"tokenizer_backend": None, "tokenized_requests": False, "num_concurrent": 1, "max_length": 64}
    arguments = {**defaults, "model": "m", "base_url": f"{server.url}/v1/completions", "max_retries": 1, **settings}
    return CompletionsClient(journal=str(journal), identity=identity, **arguments)


def test_answers_stay_with_their_requests_in_any_order(tmp_path: Path) -> None:
    contexts = ["bb", "a", "dddd", "ccc"]
    for order, expected in (("forward", ["dddd", "ccc", "bb", "a"]), ("reversed", ["a", "bb", "ccc", "dddd"])):
        with fake_server(lambda prompt: prompt.upper()) as server:
            client = _client(server, tmp_path / order, request_order=order)
            assert client.generate_until(_requests(contexts)) == ["BB", "A", "DDDD", "CCC"]
            assert server.prompts == expected


def test_groups_of_settings_are_sent_apart_and_reversed_too(tmp_path: Path) -> None:
    other = {**SETTINGS, "max_gen_toks": 9}
    requests = _requests(["a", "bb"]) + _requests(["c", "dd"], other)
    with fake_server(lambda prompt: prompt) as server:
        assert _client(server, tmp_path / "j").generate_until(requests) == ["a", "bb", "c", "dd"]
        _client(server, tmp_path / "k", request_order="reversed").generate_until(requests)
        assert server.prompts == ["bb", "a", "dd", "c", "c", "dd", "a", "bb"]
        assert [payload["max_tokens"] for payload in server.payloads] == [8, 8, 9, 9, 9, 9, 8, 8]


def test_journal_serves_only_the_endpoint_it_was_written_for(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with fake_server(lambda prompt: ("18", "length")) as server:
        _client(server, journal, "first").generate_until(_requests(["a", "b"]))
    with fake_server(lambda prompt: "19") as server:
        assert _client(server, journal, "first").generate_until(_requests(["a", "b"])) == ["18", "18"]
        assert not server.payloads
        client = _client(server, journal, "second")
        assert client.generate_until(_requests(["a", "b"])) == ["19", "19"]
        assert {entry["finish_reason"] for entry in client.journal.answers.values()} == {"stop"}


def test_journal_drops_a_line_torn_by_a_kill(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with fake_server(lambda prompt: prompt) as server:
        _client(server, journal).generate_until(_requests(["a", "b", "c"]))
        text = journal.read_text()
        journal.write_text(text[:-7])
        server.prompts.clear()
        assert _client(server, journal).generate_until(_requests(["a", "b", "c"])) == ["a", "b", "c"]
        assert len(server.prompts) == 1
        assert journal.read_text() == text
        assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_equal_prompts_are_asked_once(tmp_path: Path) -> None:
    with fake_server(lambda prompt: prompt) as server:
        assert _client(server, tmp_path / "j").generate_until(_requests(["a", "a", "b"])) == ["a", "a", "b"]
        assert sorted(server.prompts) == ["a", "b"]


def test_prompt_that_does_not_fit_is_refused_before_any_request(tmp_path: Path, tokenizer_dir: Path) -> None:
    settings = {"tokenizer": str(tokenizer_dir), "tokenizer_backend": "huggingface", "tokenized_requests": True}
    with fake_server(lambda prompt: "x", lambda ids: "") as server:
        client = _client(server, tmp_path / "j", **settings)
        client.generate_until(_requests(["p" * 56]))  # 56 + 8 = max_length
        with pytest.raises(EvaluationError, match=r"'t', document 1.*57 tokens.*may have 8.*max_length is 64"):
            client.generate_until(_requests(["p", "p" * 57]))
        assert len(server.payloads) == 1


def test_null_text_counts_as_an_empty_answer(tmp_path: Path) -> None:
    with fake_server(lambda prompt: "") as server:
        assert _client(server, tmp_path / "j").generate_until(_requests(["a"])) == [""]


def test_loglikelihoods_follow_the_order_and_stay_with_their_requests(tmp_path: Path) -> None:
    requests = [(("c", "x"), [1] * n, [2]) for n in (3, 1, 2)]
    with fake_server(lambda prompt: "") as server:
        for order, expected in (("forward", [4, 3, 2]), ("reversed", [2, 3, 4])):
            client, sent = _client(server, tmp_path / order, request_order=order), []

            async def answer(inputs: list[list[int]], *args: Any, sent: list[int] = sent, **kwargs: Any) -> Any:
                sent.extend(map(len, inputs))
                return [[(-float(len(tokens)), True)] for tokens in inputs]

            client.get_batched_requests = answer
            assert client._loglikelihood_tokens(requests) == [(-4.0, True), (-2.0, True), (-3.0, True)]
            assert sent == expected
        with pytest.raises(EvaluationError, match="65 tokens"):
            client._loglikelihood_tokens([(("c", "x"), [1] * 64, [2])])
