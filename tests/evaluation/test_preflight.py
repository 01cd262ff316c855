"""What a preflight finds, each in the smallest evaluation that has it, and that it stops before a token is spent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from canned import canned_answer, specs
from fake_server import FakeServer, fake_server

from workbench.errors import EvaluationError
from workbench.evaluation.run import evaluate
from workbench.evaluation.spec import task_spec
from workbench.records import Preflight, PreflightFinding, read_json

pytestmark = pytest.mark.usefixtures("in_process")
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def _answer(prompt: str) -> Any:
    return "2" if prompt == "1+1=" else canned_answer(prompt)


def _check(server: FakeServer, folder: Path, **settings: Any) -> tuple[Preflight, str]:
    """(the record, the refusal or "")."""
    defaults: dict[str, Any] = {
        "arm": "a", "model": "m", "tokenizer": None, "concurrency": 2, "max_length": 8192, "tasks": specs(limit=2)[:1],
    }  # fmt: skip
    out_dir = folder / "eval" / "a"
    try:
        evaluate(base_url=server.url, out_dir=out_dir, **{**defaults, **settings})
        return read_json(Preflight, out_dir / "m" / "preflight.json"), ""
    except EvaluationError as error:
        return read_json(Preflight, out_dir / ".partial" / "preflight.json"), error.message


def _found(record: Preflight, id: str) -> PreflightFinding | None:
    return next((finding for finding in record.findings if finding.id == id), None)


def _tokenizer(source: Path, folder: Path, *, adds_bos: bool = False, **config: Any) -> Path:
    """The byte tokenizer with a BOS token that it may add, and what else a tokenizer_config says."""
    from tokenizers import Tokenizer, processors

    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<s>", **config}))
    return folder


def test_a_sound_plan_is_recorded_with_what_it_can_see(tmp_path: Path, tokenizer_dir: Path, decode: Any) -> None:
    with fake_server(_answer, decode) as server:
        server.models = [{"id": "m", "root": "/models/m", "max_model_len": 8192, "created": 1}]
        record, refusal = _check(server, tmp_path, tokenizer=tokenizer_dir, fingerprint="f", tasks=specs())
        sent = [payload["prompt"][0] for payload in server.payloads]  # at once, so in any order
        prompts = [len(ids) for ids in sent if "Options:" not in decode(ids)]
    assert (len(prompts), len(sent)) == (12, 28)
    assert refusal == ""
    assert record.findings == ()
    assert record.server == {"id": "m", "root": "/models/m", "max_model_len": "8192"}
    assert (record.max_length, record.server_max_length, record.model, record.api) == (8192, 8192, "m", "completions")
    gsm8k, mmlu = record.tasks
    assert (gsm8k.task, gsm8k.kind, gsm8k.documents, gsm8k.requests) == ("gsm8k_mini", "generate_until", 12, 12)
    assert (gsm8k.longest_prompt_tokens, gsm8k.prompt_tokens) == (max(prompts), sum(prompts))
    assert (gsm8k.answer_budget_tokens, gsm8k.stops) == (96, ("Question:", "</s>", "<|im_end|>"))
    assert len({gsm8k.data_fingerprint, gsm8k.prompt_fingerprint, mmlu.data_fingerprint, mmlu.prompt_fingerprint}) == 4
    assert all(10 < loss <= 100 for loss in mmlu.mde_pp.values())  # 16 items see nothing small
    assert math.isnan(record.estimate_s)  # nobody asked for a probe


def test_fingerprints_follow_documents_and_shots(tmp_path: Path) -> None:
    found = []
    with fake_server(_answer) as server:
        for place, settings in enumerate(({}, {}, {"num_fewshot": 1}, {"limit": 1})):
            tasks = specs(**{"limit": 2, **settings})[:1]
            record, _ = _check(server, tmp_path / str(place), tasks=tasks)
            found.append((record.tasks[0].data_fingerprint, record.tasks[0].prompt_fingerprint))
    assert found[0] == found[1]
    assert found[2][0] == found[0][0]
    assert found[2][1] != found[0][1]
    assert found[3][0] != found[0][0]


def test_an_endpoint_that_serves_something_else_is_refused(tmp_path: Path) -> None:
    with fake_server(_answer) as server:
        server.models = [{"id": "other", "max_model_len": 4096}]
        record, refusal = _check(server, tmp_path)
        assert "does not serve 'm'; it lists other" in refusal
        server.models = [{"id": "m", "max_model_len": 4096}]
        _, refusal = _check(server, tmp_path / "b")
        assert "max_length is 8192, but the server's context is 4096 tokens" in refusal
        assert not server.payloads
    assert [finding.id for finding in record.errors] == ["endpoint-model"]


def test_prompts_and_answers_must_fit(tmp_path: Path, tokenizer_dir: Path, decode: Any) -> None:
    with fake_server(_answer, decode) as server:
        record, refusal = _check(server, tmp_path, tokenizer=tokenizer_dir, max_length=512)
        assert not server.payloads
    longest = record.tasks[0].longest_prompt_tokens
    assert f"the longest prompt has {longest} tokens and its answer may have 96, but max_length is 512" in refusal
    finding = _found(record, "prompt-length")
    assert finding is not None
    assert f"at least {longest + 96} tokens" in finding.fix


def test_exactly_one_bos(tmp_path: Path, tokenizer_dir: Path) -> None:
    adds = _tokenizer(tokenizer_dir, tmp_path / "adds", adds_bos=True)
    never = _tokenizer(tokenizer_dir, tmp_path / "never")
    with_template = _tokenizer(tokenizer_dir, tmp_path / "template", adds_bos=True, chat_template=BOS_TEMPLATE)
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(adds / "tokenizer.json")).decode
    cases: tuple[tuple[Path, dict[str, bool], int, str, str], ...] = (
        (adds, {}, 1, "", ""),  # as the tokenizer does by itself
        (adds, {"add_bos_token": False}, 0, "bos-missing", "2 of 2 prompts begin without the BOS token"),
        (never, {}, 0, "", ""),
        (with_template, {"chat_template": True}, 1, "", ""),
        (with_template, {"chat_template": True, "add_bos_token": True}, 2, "bos-double", "begin with two BOS tokens"),
    )
    for place, (folder, settings, count, id, message) in enumerate(cases):
        with fake_server(lambda prompt: "x", decode) as server:
            record, refusal = _check(server, tmp_path / f"run{place}", tokenizer=folder, **settings)
            assert [finding.id for finding in record.errors] == [id] * bool(id)
            assert message in refusal
            bos = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<s>")
            assert {payload["prompt"][0].count(bos) for payload in server.payloads} == (set() if id else {count})


def test_bare_prompts_to_a_chat_model_are_told(tmp_path: Path, tokenizer_dir: Path, decode: Any) -> None:
    chat = _tokenizer(tokenizer_dir, tmp_path / "chat", chat_template="{{ messages }}<think>")
    harmony = _tokenizer(tokenizer_dir, tmp_path / "harmony", chat_template="<|channel|>{{ messages }}")
    with fake_server(_answer, decode) as server:
        record, refusal = _check(server, tmp_path / "a", tokenizer=chat)
        finding = _found(record, "bare-prompts")
        assert refusal == ""
        assert finding is not None
        assert finding.level == "warning"
        server.payloads.clear()
        _, refusal = _check(server, tmp_path / "b", tokenizer=harmony)
        assert "answers in channels" in refusal
        assert not server.payloads
    with fake_server(_answer) as server:
        record, _ = _check(server, tmp_path / "c", tokenizer=chat, api="chat")
        assert _found(record, "bare-prompts") is None
        assert _found(record, "thinking-unset") is not None
        assert record.tasks[0].longest_prompt_tokens is not None  # counted with the model's own template
        record, _ = _check(server, tmp_path / "d", tokenizer=chat, api="chat", thinking="</think>")
        assert _found(record, "thinking-unset") is None
        assert _found(record, "thinking-budget") is not None


def test_stop_strings_that_the_shots_use_are_refused(tmp_path: Path) -> None:
    documents = [{"question": f"q{i}", "answer": "first\n\nthen\n#### 1"} for i in range(4)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'docs.jsonl'}, train: {tmp_path / 'docs.jsonl'}}}}}\n"
        "training_split: train\nfewshot_split: train\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\nmetric_list: [{metric: exact_match}]\n"
        'generation_kwargs: {until: ["\\n\\n"]}\n'
    )
    spec = {"name": "own", "task": str(tmp_path / "own.yaml"), "primary_filter": "none"}
    with fake_server(lambda prompt: "x") as server:
        record, refusal = _check(server, tmp_path / "a", tasks=(task_spec({**spec, "num_fewshot": 2}),))
        assert r"the stop string '\n\n' stands in 4 of 4 shots" in refusal
        assert not server.payloads
        record, refusal = _check(server, tmp_path / "b", tasks=(task_spec({**spec, "num_fewshot": 0}),))
        assert refusal == ""
        finding = _found(record, "stop-list")
        assert finding is not None
        assert (finding.level, "4 of 4 gold answers" in finding.message) == ("warning", True)


def test_incomplete_echo_refuses_log_likelihood_tasks(tmp_path: Path, tokenizer_dir: Path) -> None:
    mmlu = task_spec(
        {"name": "mmlu_mini", "task": "mmlu", "data": "mini", "num_fewshot": 0, "limit": 2, "metric": "acc",
         "primary_filter": "none"}
    )  # fmt: skip
    for place, (echo, fault, message) in enumerate(
        ((False, None, "echo with logprobs is not supported"), (True, "short", "token_logprobs has 63 entries for 64"))
    ):
        with fake_server(lambda prompt: "", lambda ids: "") as server:
            server.echo = echo
            server.fault = lambda n, fault=fault: fault  # type: ignore[misc]
            record, refusal = _check(server, tmp_path / str(place), tasks=(mmlu,), tokenizer=tokenizer_dir)
            assert message in refusal
            assert [finding.id for finding in record.errors] == ["echo"]
            assert len(server.payloads) == 2  # asked twice, then nothing more


def test_a_chat_endpoint_without_template_is_refused(tmp_path: Path) -> None:
    with fake_server(_answer) as server:
        server.fault = lambda n: "400"
        record, refusal = _check(server, tmp_path, api="chat")
    assert "no chat answer" in refusal
    assert "HTTP 400" in refusal
    assert [finding.id for finding in record.errors] == ["chat"]


def test_a_probe_states_the_expected_time(tmp_path: Path, tokenizer_dir: Path, decode: Any) -> None:
    with fake_server(_answer, decode) as server:
        server.latency_s = 0.05
        record, _ = _check(
            server, tmp_path, tokenizer=tokenizer_dir, probe=True, concurrency=4, tasks=specs(limit=8)[:1]
        )
        assert len(server.payloads) == 4 + 8
        assert {payload["max_tokens"] for payload in server.payloads[:4]} == {16}
    assert 0.05 <= record.probe_s < 2.0
    # two rounds of four; gold answers are longer than what the probe allows, budgets (96) longer still
    assert 2 * record.probe_s <= record.estimate_s <= record.estimate_high_s <= 2 * record.probe_s * 96
