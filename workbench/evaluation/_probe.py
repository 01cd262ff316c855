"""The few questions that a preflight asks the endpoint itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation._journal import encode_payload
from workbench.evaluation._read import read_completion, read_logprobs
from workbench.evaluation._transport import Transport
from workbench.records import PreflightFinding

PROBE_TOKENS = 16
_SAYS = ("id", "root", "owned_by", "max_model_len")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What GET /v1/models says. models: None if the server does not list them."""

    models: tuple[str, ...] | None = None
    max_length: int | None = None
    says: dict[str, str] = field(default_factory=dict)


def server_facts(url: str, model: str, headers: dict[str, str]) -> ServerFacts:
    """Ask a completions or chat URL's server for its models. Whatever is no list of models counts as no answer."""
    import httpx

    root = url.removesuffix("/chat/completions").removesuffix("/completions")
    try:
        answer = httpx.get(f"{root}/models", timeout=15.0, trust_env=False, headers=headers)
        entries = {str(entry["id"]): entry for entry in answer.json()["data"]} if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        entries = {}
    if not entries:
        return ServerFacts()
    own = entries.get(model, {})
    length = own.get("max_model_len")
    return ServerFacts(
        models=tuple(entries),
        max_length=length if isinstance(length, int) else None,
        says={key: str(own[key]) for key in _SAYS if own.get(key) is not None},
    )


def echo_problem(client: Any, tokens: list[int]) -> str:
    """Why log-probabilities of a prompt cannot be had from the endpoint; "" if they can."""
    context = max(1, len(tokens) - 1)
    transport = _once(client)
    try:
        transport.ask(
            [encode_payload(client.logprob_payload(tokens))],
            lambda i, answer: read_logprobs(answer, context, len(tokens), client.parse_logprobs),
            lambda *kept: None,
        )
    except EvaluationError as error:
        return next(reversed(transport.examples.values()), error.message)
    return ""


def try_chat(client: Any) -> list[PreflightFinding]:
    """One token from the chat endpoint: it answers, so the model has a chat template."""
    payload = {"model": client.model, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 1}
    transport = _once(client)
    try:
        transport.ask([encode_payload(payload)], lambda i, answer: read_completion(answer, "chat"), lambda *kept: None)
    except EvaluationError as error:
        message = next(reversed(transport.examples.values()), error.message)
        fix = "give the server a chat template, or use api=completions for a base model"
        return [PreflightFinding(id="chat", level="error", message=f"no chat answer: {message}", fix=fix)]
    return []


def time_probe(client: Any, plan: Any) -> tuple[float, float, int]:
    """(seconds, mean answer tokens, requests) of up to `num_concurrent` planned prompts asked at once, answers of at
    most 16 tokens. The prompts are spread over the plan, so that their lengths are those of the task.
    """
    batch = [plan.examples[i % len(plan.examples)] for i in range(min(client.transport.concurrency, plan.requests))]
    generate = plan.kind == "generate_until"
    bodies = []
    for context, settings in batch:
        if generate:
            prompt = client._prompts([context])[0]
            bodies.append(encode_payload({**client.generation_payload(prompt, settings), "max_tokens": PROBE_TOKENS}))
        else:
            bodies.append(encode_payload(client.logprob_payload(client.tok_encode(context)[-client.max_length :])))
    counts: list[int] = []

    def keep(i: int, value: dict[str, Any], seconds: float, attempts: int) -> None:
        counts.append(value["completion_tokens"] or PROBE_TOKENS)

    transport = Transport(
        client.base_url, concurrency=len(bodies), timeout_s=client.timeout, headers=client.transport.headers
    )
    started = time.monotonic()
    read = read_completion if generate else (lambda answer, api: {"completion_tokens": 1})
    transport.ask(bodies, lambda i, answer: read(answer, client.api), keep)
    return time.monotonic() - started, sum(counts) / len(counts), len(bodies)


def _once(client: Any) -> Transport:
    return Transport(
        client.base_url, concurrency=1, timeout_s=client.timeout, headers=client.transport.headers, retries=1,
        backoff_s=client.transport.backoff_s, verify=client.verify_certificate,
    )  # fmt: skip
