"""The client in process: order, journal, refusals. lm-eval's Instance objects are stood in for by their two
attributes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import fake_server, logprob_of

from workbench.errors import EvaluationError

SETTINGS = {"until": ["Question:"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8}


def _requests(contexts: list[str], settings: dict[str, Any] = SETTINGS) -> list[Any]:
    return [SimpleNamespace(args=(c, dict(settings)), task_name="t", doc_id=i) for i, c in enumerate(contexts)]


def _client(server: Any, journal: Path, identity: str = "x", **settings: Any) -> Any:
    from workbench.evaluation._client import CompletionsClient

    defaults = {"tokenizer_backend": None, "tokenized_requests": False, "num_concurrent": 1, "max_length": 64}
    arguments = {**defaults, "model": "m", "base_url": f"{server.url}/v1/completions", "backoff_s": 0.01, **settings}
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
        assert {entry.finish_reason for entry in client.journal.answers.values()} == {"stop"}


def test_journal_drops_a_line_torn_by_a_kill(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with fake_server(lambda prompt: prompt) as server:
        _client(server, journal).generate_until(_requests(["a", "b", "c"]))
        text = journal.read_text()
        journal.write_text(text[:-7])
        server.prompts.clear()
        assert _client(server, journal).generate_until(_requests(["a", "b", "c"])) == ["a", "b", "c"]
        assert len(server.prompts) == 1
        before, after = ([_untimed(line) for line in content.splitlines()] for content in (text, journal.read_text()))
        assert after == before


def _untimed(line: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(line).items() if key != "seconds"}


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


def test_loglikelihoods_follow_the_order_and_stay_with_their_requests(tmp_path: Path, tokenizer_dir: Path) -> None:
    settings = {"tokenizer": str(tokenizer_dir), "tokenizer_backend": "huggingface", "tokenized_requests": True}
    words = ["abc", "a", "ab"]
    requests = [SimpleNamespace(args=(w, "x"), task_name="t", doc_id=i, idx=0) for i, w in enumerate(words)]
    with fake_server(lambda prompt: "", lambda ids: "".join(map(chr, ids))) as server:
        for order, expected in (("forward", [4, 3, 2]), ("reversed", [2, 3, 4])):
            server.payloads.clear()
            client = _client(server, tmp_path / order, request_order=order, **settings)
            found = client.loglikelihood(requests)
            assert [len(payload["prompt"][0]) for payload in server.payloads] == expected
            ids = [client.tok_encode(word + "x") for word in words]
            assert [logprob for logprob, _ in found] == [pytest.approx(logprob_of(i[-1], i[-2])) for i in ids]
        too_long = [SimpleNamespace(args=("a" * 64, "x"), task_name="t", doc_id=0, idx=0)]
        with pytest.raises(EvaluationError, match="65 tokens"):
            client.loglikelihood(too_long)


def test_journal_keeps_what_lm_eval_drops_under_the_hash_of_what_was_sent(tmp_path: Path) -> None:
    with fake_server(lambda prompt: ("four", "length")) as server:
        client = _client(server, tmp_path / "j")
        client.generate_until(_requests(["abc"]))
        ((key, answer),) = client.journal.answers.items()
        assert key == hashlib.sha256(server.bodies[0]).hexdigest()
        assert (answer.text, answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
            "four", "length", 3, 4,
        )  # fmt: skip
        assert 0.0 < answer.seconds < 5.0
        assert client.asked == [("t", 0, 0, key)]


class Killed(BaseException):
    """Stands in for the process's end: nothing catches it."""


@pytest.mark.parametrize("concurrency", [1, 3])
def test_killed_at_any_answer_and_resumed_asks_only_what_is_missing(tmp_path: Path, concurrency: int) -> None:
    contexts = [f"{i:02d}" for i in range(7)]
    for killed_at in range(len(contexts)):
        journal = tmp_path / f"{killed_at}.jsonl"
        with fake_server(lambda prompt: f"<{prompt}>") as server:
            client = _client(server, journal, num_concurrent=concurrency)

            def count(done: int, total: int, killed_at: int = killed_at) -> None:
                if done > killed_at:
                    raise Killed

            client.on_progress = count
            with pytest.raises(Killed):
                client.generate_until(_requests(contexts))
            assert concurrency > 1 or len(server.bodies) == killed_at + 1
        with fake_server(lambda prompt: f"<{prompt}>") as server:  # requests in flight at the kill reach the first one
            again = _client(server, journal, num_concurrent=concurrency)
            kept = set(again.journal.answers)
            assert len(kept) > killed_at
            assert again.generate_until(_requests(contexts)) == [f"<{c}>" for c in contexts]
            sent = {hashlib.sha256(body).hexdigest() for body in server.bodies}
            assert len(sent) == len(server.bodies) == len(contexts) - len(kept)
            assert not kept & sent


def test_other_settings_seed_or_model_are_other_requests(tmp_path: Path) -> None:
    with fake_server(lambda prompt: prompt) as server:
        for changes in ({}, {"seed": 7}, {"model": "other"}, {}):
            _client(server, tmp_path / "j", **changes).generate_until(_requests(["a"]))
        _client(server, tmp_path / "j").generate_until(_requests(["a"], {**SETTINGS, "until": ["x"]}))
        assert len(server.payloads) == 4


def test_repeats_of_a_document_are_asked_with_their_own_seeds(tmp_path: Path) -> None:
    requests = [
        SimpleNamespace(args=("a", SETTINGS), task_name="t", doc_id=r, idx=0, doc={"repeat": r}) for r in (0, 1)
    ]
    with fake_server(lambda prompt: prompt) as server:
        _client(server, tmp_path / "j", seed=5).generate_until(requests)
        assert sorted(payload["seed"] for payload in server.payloads) == [5, 6]


def test_stop_list_is_the_same_at_any_concurrency(tmp_path: Path, tokenizer_dir: Path) -> None:
    settings = {"tokenizer": str(tokenizer_dir), "tokenizer_backend": "huggingface", "tokenized_requests": True}
    sent = []
    for concurrency in (1, 4):
        with fake_server(lambda prompt: "x", lambda ids: "") as server:
            client = _client(server, tmp_path / str(concurrency), num_concurrent=concurrency, **settings)
            client.generate_until(_requests(["a", "b"]))
            sent.append(set(server.bodies))
    assert sent[0] == sent[1]


def test_chat_sends_four_stops_and_applies_the_others_here(tmp_path: Path) -> None:
    from lm_eval.models.api_models import JsonChatStr

    from workbench.evaluation._client import ChatClient

    stops = ["1", "2", "3", "4", "5"]
    message = JsonChatStr(json.dumps([{"role": "user", "content": "hi"}]))
    with fake_server(lambda prompt: f"{prompt} five 5 six") as server:
        client = ChatClient(
            journal=str(tmp_path / "j"), identity="x", model="m", base_url=f"{server.url}/v1/chat/completions"
        )
        request = SimpleNamespace(args=(message, {"until": stops, "max_gen_toks": 8}), task_name="t", doc_id=0)
        assert client.generate_until([request]) == ["hi five "]
        assert server.payloads[0]["stop"] == stops[:4]
        assert server.payloads[0]["messages"] == [{"role": "user", "content": "hi"}]
        with pytest.raises(EvaluationError, match="no chat endpoint returns"):
            client.loglikelihood([request])


def test_think_blocks_are_taken_off_and_open_ones_are_no_answer(tmp_path: Path) -> None:
    answers = {
        "a": ("<think>Question: 9</think> 18 Question: no", "stop"),
        "b": ("16-7=9, and 9*2=18", "length"),
        "c": ("18", "stop"),
    }
    with fake_server(lambda prompt: answers[prompt]) as server:
        client = _client(server, tmp_path / "j", thinking="</think>", thinking_budget=100, max_length=4096)
        assert client.generate_until(_requests(["a", "b", "c"])) == ["18 ", "", "18"]
        assert {tuple(payload["stop"]) for payload in server.payloads} == {()}  # they would fire within the thought
        assert {payload["max_tokens"] for payload in server.payloads} == {108}


def test_both_clients_are_registered_with_lm_eval() -> None:
    from lm_eval.api.registry import get_model

    from workbench.evaluation._client import ChatClient, CompletionsClient

    assert get_model("workbench-completions") is CompletionsClient
    assert get_model("workbench-chat-completions") is ChatClient


def test_one_text_split_at_two_places_is_two_questions(tmp_path: Path, tokenizer_dir: Path) -> None:
    settings = {"tokenizer": str(tokenizer_dir), "tokenizer_backend": "huggingface", "tokenized_requests": True}
    splits = [("ab", "cd"), ("abc", "d"), ("ab", "cd")]
    requests = [SimpleNamespace(args=split, task_name="t", doc_id=i, idx=0) for i, split in enumerate(splits)]
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        client = _client(server, tmp_path / "j", **settings)
        _, b, c, d = client.tok_encode("abcd")
        both, one = logprob_of(c, b) + logprob_of(d, c), logprob_of(d, c)
        assert [logprob for logprob, _ in client.loglikelihood(requests)] == pytest.approx([both, one, both])
        assert len(server.payloads) == 2
        again = _client(server, tmp_path / "j", **settings)
        assert [logprob for logprob, _ in again.loglikelihood(requests)] == pytest.approx([both, one, both])
        assert len(server.payloads) == 2
