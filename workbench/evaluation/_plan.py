"""What is about to be asked, read from lm-eval's task objects once their requests are built: lengths, stop lists,
expected answers and fingerprints. Inside the harness process.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

from workbench.evaluation._client import stop_list
from workbench.evaluation.spec import TaskSpec
from workbench.records import json_text

TARGETS = 200
"""Shots and gold answers looked at per task, each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One lm-eval task as planned. lengths: tokens of each distinct prompt ([] without a tokenizer; rolling texts: one
    window); edges: (first two ids, last id) of prompts that are sent as token ids. shots, golds: expected answers as
    text. examples: (prompt, settings) to probe with.
    """

    spec: TaskSpec
    task: str
    kind: str
    documents: int
    requests: int
    lengths: list[int]
    sent_tokens: int | None
    edges: list[tuple[tuple[int, ...], int]]
    budget: int
    stops: tuple[str, ...]
    shots: list[str]
    golds: list[str]
    data_fingerprint: str
    prompt_fingerprint: str
    examples: list[tuple[Any, dict[str, Any]]]


def plan_task(spec: TaskSpec, task: Any, client: Any, counter: Any) -> Plan:
    """The plan of one task whose requests are built. counter: a tokenizer to count text and messages with, or None."""
    instances = list(task.instances)
    kind = instances[0].request_type
    settings = instances[0].args[1] if kind == "generate_until" else {}
    contexts = list(dict.fromkeys(instance.args[0] for instance in instances))
    sent, lengths = _lengths(contexts, client, counter)
    if kind == "loglikelihood" and lengths:
        longest = max(len(client.tok_encode(c)) for c in {instance.args[1] for instance in islice(instances, 400)})
        lengths = [length + longest for length in lengths]
    if kind == "loglikelihood_rolling":
        lengths = [min(length, client.max_length) for length in lengths]
    per_prompt = len(instances) / len(contexts)
    return Plan(
        spec=spec,
        task=task.task_name,
        kind=kind,
        documents=len({instance.doc_id for instance in instances}),
        requests=len(instances),
        lengths=lengths,
        sent_tokens=round(sum(lengths) * per_prompt) if lengths else None,
        edges=[(tuple(ids[:2]), ids[-1]) for ids in sent if ids],
        budget=client.answer_budget(settings) if kind == "generate_until" else 0,
        stops=stop_list(settings),
        shots=_shots(task) if kind == "generate_until" else [],
        golds=[_text(task.doc_to_target(i.doc)) for i in islice(instances, TARGETS)]
        if kind == "generate_until"
        else [],
        data_fingerprint=_fingerprint(instance.doc for instance in instances if not instance.idx),
        prompt_fingerprint=_fingerprint(instance.args for instance in instances),
        examples=[(i.args[0], settings) for i in instances[:: max(1, len(instances) // 64)]],
    )


def _lengths(contexts: list[Any], client: Any, counter: Any) -> tuple[list[list[int]], list[int]]:
    """(token ids as sent, where they are; tokens of each context)."""
    if client.tokenized_requests:
        ids = client.tok_encode(contexts, add_special_tokens=client.add_bos_token)
        return ids, [len(found) for found in ids]
    if counter is None:
        return [], []
    if client.api == "chat":
        return [], [_chat_length(json.loads(context.prompt), counter) for context in contexts]
    return [], [len(found) for found in counter(contexts).input_ids]


def _chat_length(messages: list[dict[str, str]], counter: Any) -> int:
    if getattr(counter, "chat_template", None):
        text = counter.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(counter(text, add_special_tokens=False).input_ids)
    return sum(len(counter(message["content"]).input_ids) for message in messages)


def _shots(task: Any) -> list[str]:
    """Answers that the prompts show. [] for a task without shots."""
    if not task.get_config("num_fewshot"):
        return []
    return [
        _text(task.doc_to_target(document, task.fewshot_cfg.doc_to_target))
        for document in islice(task.fewshot_docs(), TARGETS)
    ]


def _text(target: Any) -> str:
    return "\n".join(map(str, target)) if isinstance(target, (list, tuple)) else str(target)


def _fingerprint(values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(json_text(value, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]
