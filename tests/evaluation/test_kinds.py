"""Every kind of task and endpoint through the whole of `evaluate`: multiple choice, perplexity, chat, reasoning,
several seeds. Real lm-eval, in this process.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from canned import GSM8K_N, canned_answer, specs
from fake_server import FakeServer, fake_server, logprob_of

from workbench.errors import EvaluationError
from workbench.evaluation.run import evaluate
from workbench.evaluation.spec import task_spec
from workbench.records import Evaluation, Preflight, from_json, read_json, to_json

pytestmark = pytest.mark.usefixtures("in_process")

MMLU_MINI = task_spec(
    {"name": "mmlu_mini", "task": "mmlu", "data": "mini", "num_fewshot": 1, "limit": 8, "metric": "acc",
     "primary_filter": "none", "chance": 0.25}
)  # fmt: skip


def _run(server: FakeServer, out_dir: Path, **settings: Any) -> Evaluation:
    defaults: dict[str, Any] = {
        "arm": out_dir.name, "model": "m", "tokenizer": None, "concurrency": 4, "max_length": 8192,
        "tasks": specs()[:1],
    }  # fmt: skip
    return evaluate(base_url=server.url, out_dir=out_dir, **{**defaults, **settings})


def test_mmlu_scores_echoed_log_probabilities(tmp_path: Path, tokenizer_dir: Path) -> None:
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        evaluation = _run(server, tmp_path / "eval" / "a", tasks=(MMLU_MINI,), tokenizer=tokenizer_dir)
        assert len(server.payloads) == 8 * 4 + 1  # and the preflight's own question
        assert all(payload["echo"] and payload["logprobs"] == 1 for payload in server.payloads)
    (score,) = evaluation.scores
    rows = [json.loads(line) for line in (tmp_path / score.samples).read_text().splitlines()]
    # the choices are " A" to " D"; one byte is one token, and the endpoint's distribution is known
    ids = {letter: _byte_id(tokenizer_dir, letter) for letter in " ABCD"}
    best = max(range(4), key=lambda i: logprob_of(ids["ABCD"[i]], ids[" "]))
    assert score.value == sum(row["doc"]["answer"] == best for row in rows) / 8
    assert (score.n, score.metric, score.empty, score.invalid, score.truncated) == (8, "acc", 0, 0, 0)
    assert evaluation.panels == ()  # nothing was generated
    assert evaluation.transport is not None
    assert evaluation.transport.requests == 32


def _byte_id(folder: Path, character: str) -> int:
    from tokenizers import Tokenizer

    (found,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(character).ids
    return int(found)


def test_perplexity_is_exact_and_states_its_conventions(tmp_path: Path, tokenizer_dir: Path) -> None:
    pages = [f"page {i} = words" + " , and more" * (i % 4) for i in range(9)]
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    spec = task_spec(
        {"name": "wiki", "task": "wikitext", "data": {"test": str(path)}, "metric": "bits_per_byte",
         "primary_filter": "none"}
    )  # fmt: skip
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        server.logprob = lambda token, before: -0.5  # every token costs half a nat
        evaluation = _run(
            server, tmp_path / "eval" / "a", tasks=(spec,), tokenizer=tokenizer_dir, max_length=20, concurrency=2
        )
        assert max(len(payload["prompt"][0]) for payload in server.payloads) <= 20
    assert evaluation.scores == ()
    (found,) = evaluation.perplexities
    tokens = sum(len(page.replace(" , ", ", ")) for page in pages)  # lm-eval's detokenised text, one byte a token
    size = sum(map(len, pages))
    words = sum(len(page.split()) for page in pages)
    assert (found.documents, found.tokens, found.bytes, found.words) == (9, tokens, size, words)
    assert found.nll == pytest.approx(0.5 * tokens)
    assert found.token_perplexity == pytest.approx(math.exp(0.5))
    assert found.bits_per_byte == pytest.approx(0.5 * tokens / size / math.log(2))
    assert math.log(found.word_perplexity) * found.words == pytest.approx(math.log(found.byte_perplexity) * found.bytes)
    assert found.bits_per_byte_low < found.bits_per_byte < found.bits_per_byte_high
    assert found.conventions["window"].startswith("18 tokens; each token is scored once")
    assert found.conventions["first_token"] == "</eos>"
    again = from_json(Evaluation, to_json(evaluation))
    assert again.perplexities == evaluation.perplexities


@pytest.mark.skipif(not os.environ.get("WORKBENCH_SHARED_DATA"), reason="needs WORKBENCH_SHARED_DATA")
def test_wikitext_2_counts_are_those_of_its_test_split(tmp_path: Path, tokenizer_dir: Path) -> None:
    pages = Path(os.environ["WORKBENCH_SHARED_DATA"]) / "wikitext2" / "document_level_test.jsonl"
    spec = task_spec(
        {"name": "wiki", "task": "wikitext", "data": {"test": str(pages)}, "metric": "word_perplexity", "limit": 2,
         "primary_filter": "none"}
    )  # fmt: skip
    with fake_server(lambda prompt: "", lambda ids: "") as server:
        server.logprob = lambda token, before: -1.0
        evaluation = _run(server, tmp_path / "eval" / "a", tasks=(spec,), tokenizer=tokenizer_dir, max_length=2048)
    (found,) = evaluation.perplexities
    first = [json.loads(line)["page"] for line in pages.read_text().splitlines()[:2]]
    assert found.bytes == sum(len(page.encode()) for page in first)
    assert math.isnan(found.bits_per_byte_low)  # two documents give no interval


def test_chat_asks_messages_and_gives_the_same_scores(tmp_path: Path) -> None:
    with fake_server(lambda prompt: "2" if prompt == "1+1=" else canned_answer(prompt)) as server:
        bare = _run(server, tmp_path / "eval" / "bare")
        server.payloads.clear()
        chat = _run(server, tmp_path / "eval" / "chat", api="chat")
        assert len(server.payloads) == GSM8K_N + 1
        assert all("prompt" not in payload for payload in server.payloads)
        shots = [message["role"] for message in server.payloads[-1]["messages"]]
        assert shots == ["user", "assistant", "user", "assistant", "user"]
    assert [(s.filter, s.value, s.invalid) for s in chat.scores] == [
        (s.filter, s.value, s.invalid) for s in bare.scores
    ]
    assert chat.api == "chat"
    preflight = read_json(Preflight, tmp_path / "eval" / "chat" / "m" / "preflight.json")
    assert preflight.api == "chat"
    with fake_server(canned_answer) as server, pytest.raises(EvaluationError, match="no chat endpoint returns"):
        _run(server, tmp_path / "eval" / "x", api="chat", tasks=(MMLU_MINI,))


def test_an_answer_cut_within_its_thought_is_no_answer(tmp_path: Path) -> None:
    """The gold number stands in each thought; only half of the thoughts end."""
    count = 0

    def answer(prompt: str) -> tuple[str, str]:
        nonlocal count
        count += 1
        full = canned_answer(prompt)
        text = full if isinstance(full, str) else full[0]
        thought = f"Question: is it #### {text[-3:]}?"
        return (f"{thought}</think>\n{text}", "stop") if count % 2 else (f"{thought} #### {text[-3:]}", "length")

    with fake_server(answer) as server:
        evaluation = _run(
            server, tmp_path / "eval" / "a", thinking="</think>", thinking_budget=64, concurrency=1, max_length=8192
        )
        assert {payload["max_tokens"] for payload in server.payloads} == {96 + 64}
    (panel,) = evaluation.panels
    assert (panel.unfinished, panel.truncated, panel.finished, panel.think_leaks) == (6, 6, 6, 0)
    assert panel.accuracy_finished == pytest.approx(panel.accuracy_all * 2)
    requests = [json.loads(line) for line in (tmp_path / "eval/a/m/requests_gsm8k_mini.jsonl").read_text().splitlines()]
    assert {row["thinking"] for row in requests} == {"open", "closed"}
    assert all(row["raw"].startswith("Question: is it") for row in requests)


def test_several_seeds_count_problems_in_the_interval(tmp_path: Path) -> None:
    base = {
        "name": "g",
        "task": "gsm8k",
        "data": "mini",
        "num_fewshot": 0,
        "limit": 6,
        "primary_filter": "strict-match",
    }
    spec = task_spec({**base, "repeats": 4, "temperature": 0.6})
    with fake_server(lambda prompt: "#### 1") as server:
        evaluation = _run(server, tmp_path / "eval" / "a", tasks=(spec,), seed=100)
        assert len(server.payloads) == 24
        assert {payload["seed"] for payload in server.payloads} == {100, 101, 102, 103}
        assert {payload["temperature"] for payload in server.payloads} == {0.6}
    strict = evaluation.scores[0]
    assert (strict.n, strict.clusters, strict.value) == (24, 6, 0.0)
    # Wilson's upper limit of 0 of 6 (statsmodels 0.15.0, proportion_confint(0, 6, method="wilson")): 0.3903343
    assert strict.high == pytest.approx(0.3903343, abs=1e-6)


def test_one_request_that_never_works_fails_one_item(tmp_path: Path) -> None:
    with fake_server(lambda prompt: None if server.prompts[0] == prompt else canned_answer(prompt)) as server:
        evaluation = _run(server, tmp_path / "eval" / "a", concurrency=1, retries=0)
    assert [score.failed for score in evaluation.scores] == [1, 1]
    (panel,) = evaluation.panels
    assert (panel.failed, panel.n, panel.finished) == (1, GSM8K_N, GSM8K_N - 1)
    assert evaluation.transport is not None
    assert evaluation.transport.faults == {"http_500": 1}
    assert "no answer" in evaluation.transport.examples["http_500"]
