"""Everything about an evaluation that can be found wrong before a token is spent; `preflight.json`.

    record = check_plan(plans, client=client, arm="nvfp4", …)       # inside the harness process
    record.errors                                                    # any of these stops the evaluation

Each check answers a way in which a harness, and not a weight, has moved a published score: prompts cut on the left
(lm-eval does so silently), a doubled or missing BOS, a stop string that the shots themselves use, a chat model asked
without its template, log-probabilities of half a prompt, an endpoint that serves something else. A check that cannot be
made says so as "info". Without `probe` nothing is generated; echo and chat are tried with one token if they are needed.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from workbench.evaluation._plan import Plan
from workbench.evaluation._probe import ServerFacts, echo_problem, time_probe, try_chat
from workbench.records import Preflight, PreflightFinding, PreflightTask

EXPECTED_DISCORDANCE = (0.02, 0.04, 0.08)
"""Shares of items that flip between two arms, from a light to a heavy quantization; the loss found depends on it."""
HARMONY = "<|channel|>"
ECHO_TOKENS = 64
"""Tokens of the prompt that the echo is tried with."""
THINK_MARKS = ("</think>", "<think>", "[/THINK]")


def check_plan(
    plans: list[Plan],
    *,
    client: Any,
    arm: str,
    harness: str,
    server: ServerFacts,
    counter: Any,
    templated: bool,
    known: bool,
    probe: bool,
) -> Preflight:
    """Run all checks. client: the model that lm-eval asks with. server: what the endpoint says of itself. counter: the
    model's tokenizer, or None. templated: prompts carry the chat template. known: the server's fingerprint is known.
    probe: also time a few short answers.
    """
    max_length = client.max_length + 1
    findings = [
        *_endpoint(client, server, max_length, known),
        *_lengths(plans, client, max_length),
        *_special_tokens(plans, client, counter, templated),
        *_stops(plans, client),
        *_kind(plans, client, counter, templated),
        *_thinking(client, counter),
    ]
    usable = not any(finding.level == "error" for finding in findings)
    if usable and client.api == "chat":
        findings += try_chat(client)
    if usable and any(plan.kind != "generate_until" for plan in plans):
        findings += _echo(plans, client)
    timing = (math.nan, math.nan, math.nan)
    if probe and not any(finding.level == "error" for finding in findings):
        timing = _estimate(plans, client, counter)
    return Preflight(
        arm=arm,
        endpoint=client.base_url,
        api=client.api,
        model=client.model,
        harness=harness,
        max_length=max_length,
        server_max_length=server.max_length,
        server=server.says,
        tasks=tuple(_task_record(plan) for plan in plans),
        findings=tuple(findings),
        probe_s=timing[0],
        estimate_s=timing[1],
        estimate_high_s=timing[2],
    )


def _task_record(plan: Plan) -> PreflightTask:
    from workbench.statistics import minimum_detectable_loss

    problems = plan.documents // plan.spec.repeats
    mde = {} if plan.spec.perplexity else {
        f"{share:g}": 100.0 * minimum_detectable_loss(problems, share) for share in EXPECTED_DISCORDANCE
    }  # fmt: skip
    return PreflightTask(
        task=plan.task,
        kind=plan.kind,
        documents=plan.documents,
        requests=plan.requests,
        longest_prompt_tokens=max(plan.lengths) if plan.lengths else None,
        prompt_tokens=plan.sent_tokens,
        answer_budget_tokens=plan.budget,
        stops=plan.stops,
        data_fingerprint=plan.data_fingerprint,
        prompt_fingerprint=plan.prompt_fingerprint,
        mde_pp=mde,
    )


def _endpoint(client: Any, server: ServerFacts, max_length: int, known: bool) -> list[PreflightFinding]:
    found = []
    if server.models is None:
        found.append(
            _info(
                "endpoint-model",
                f"{client.base_url} lists no models: that it serves {client.model!r} is taken on trust",
            )
        )
    elif client.model not in server.models:
        found.append(
            PreflightFinding(
                id="endpoint-model",
                level="error",
                message=f"{client.base_url} does not serve {client.model!r}; it lists {', '.join(server.models)}",
                fix="correct the model's name, or the arm's base_url",
            )
        )
    if server.max_length is not None and server.max_length < max_length:
        found.append(
            PreflightFinding(
                id="server-length",
                level="error",
                message=f"max_length is {max_length}, but the server's context is {server.max_length} tokens",
                fix=f"serve with a longer context, or set max_length={server.max_length}",
            )
        )
    if not known:
        found.append(_info("fingerprint", "what the endpoint serves is not known: an interrupted run starts anew"))
    return found


def _lengths(plans: list[Plan], client: Any, max_length: int) -> list[PreflightFinding]:
    found = []
    for plan in plans:
        longest = max(plan.lengths, default=0)
        if longest + plan.budget > max_length:
            found.append(
                PreflightFinding(
                    id="prompt-length",
                    level="error",
                    task=plan.task,
                    message=f"task {plan.task!r}: the longest prompt has {longest} tokens and its answer may have "
                    f"{plan.budget}, but max_length is {max_length}; "
                    f"{sum(n + plan.budget > max_length for n in plan.lengths)} prompts do not fit",
                    fix=f"serve with a context of at least {longest + plan.budget} tokens, or lower num_fewshot or "
                    "max_gen_toks",
                )
            )
    if any(not plan.lengths for plan in plans):
        found.append(
            _info("prompt-length", "prompts are sent as text and no tokenizer is given: lengths are unchecked")
        )
    return found


def _special_tokens(plans: list[Plan], client: Any, counter: Any, templated: bool) -> list[PreflightFinding]:
    """Exactly one BOS, or none if the tokenizer adds none; and no EOS at the end of a prompt."""
    if not client.tokenized_requests:
        where = "the server's template" if client.api == "chat" else "the server's tokenizer"
        return [_info("bos", f"prompts are sent as text: special tokens are left to {where}")]
    bos, eos = counter.bos_token_id, counter.eos_token_id
    own = counter("a").input_ids
    wanted = bos is not None and (own[:1] == [bos] or (templated and _template_has(counter, counter.bos_token)))
    found = []
    for plan in plans:
        double = sum(first == (bos, bos) for first, _ in plan.edges) if bos is not None else 0
        missing = sum(first[:1] != (bos,) for first, _ in plan.edges) if wanted else 0
        ended = sum(last == eos for _, last in plan.edges) if eos is not None and not templated else 0
        for count, id, what, fix in (
            (double, "bos-double", "begin with two BOS tokens", "set add_bos_token=false: the template has one"),
            (missing, "bos-missing", "begin without the BOS token that the tokenizer adds", "set add_bos_token=true"),
            (ended, "eos-at-end", "end in the EOS token", "set add_bos_token=false: the tokenizer adds both"),
        ):
            if count and plan.kind != "loglikelihood_rolling":
                message = f"task {plan.task!r}: {count} of {len(plan.edges)} prompts {what}"
                found.append(PreflightFinding(id=id, level="error", task=plan.task, message=message, fix=fix))
    return found


def _template_has(counter: Any, text: str | None) -> bool:
    template = getattr(counter, "chat_template", None)
    return text is not None and isinstance(template, str) and (text in template or "bos_token" in template)


def _stops(plans: list[Plan], client: Any) -> list[PreflightFinding]:
    found = []
    for plan in plans:
        for stop in filter(None, plan.stops):
            shots, golds = sum(stop in text for text in plan.shots), sum(stop in text for text in plan.golds)
            if shots or golds:
                where = f"{shots} of {len(plan.shots)} shots" if shots else f"{golds} of {len(plan.golds)} gold answers"
                found.append(
                    PreflightFinding(
                        id="stop-list",
                        level="error" if shots else "warning",
                        task=plan.task,
                        message=f"task {plan.task!r}: the stop string {stop!r} stands in {where}: an answer written "
                        "like them is cut",
                        fix="use a task file with another stop list (generation_kwargs.until)",
                    )
                )
        if client.api == "chat" and len(plan.stops) > 4 and not client.thinking:
            found.append(
                _info(
                    "stop-list",
                    f"task {plan.task!r}: 4 of {len(plan.stops)} stops are sent, the others applied to the answer",
                )
            )
    return found


def _kind(plans: list[Plan], client: Any, counter: Any, templated: bool) -> list[PreflightFinding]:
    scored = [plan.task for plan in plans if plan.kind != "generate_until"]
    if client.api == "chat":
        return [
            PreflightFinding(
                id="chat-logprobs",
                level="error",
                task=task,
                message=f"task {task!r} needs log-probabilities of given text, which no chat endpoint returns",
                fix="use api=completions for this task, or one that generates",
            )
            for task in scored
        ]
    template = getattr(counter, "chat_template", None)
    if templated or not isinstance(template, str) or len(scored) == len(plans):
        return []
    harmony = HARMONY in template
    return [
        PreflightFinding(
            id="bare-prompts",
            level="error" if harmony else "warning",
            message="the tokenizer has a chat template, but prompts are sent without it"
            + (": this model answers in channels, and bare prompts break it" if harmony else ""),
            fix="use api=chat (or chat_template=true) for an instruct model; bare prompts are right for a base model",
        )
    ]


def _thinking(client: Any, counter: Any) -> list[PreflightFinding]:
    template = getattr(counter, "chat_template", None)
    if client.thinking and not client.thinking_budget:
        fix = "set thinking_budget to what a thought may take, e.g. 16384"
        message = "think blocks are taken off, but thought and answer share the task's own budget of tokens"
        return [PreflightFinding(id="thinking-budget", level="warning", message=message, fix=fix)]
    if not client.thinking and client.api == "chat" and isinstance(template, str):
        for mark in THINK_MARKS:
            if mark in template:
                message = f"the chat template knows {mark!r}: answers may begin with a think block, scored as it stands"
                fix = "set thinking='</think>' and a thinking_budget, or serve with a reasoning parser"
                return [PreflightFinding(id="thinking-unset", level="warning", message=message, fix=fix)]
    return []


def _echo(plans: list[Plan], client: Any) -> list[PreflightFinding]:
    context = next(plan.examples[0][0] for plan in plans if plan.kind != "generate_until")
    problem = echo_problem(client, client.tok_encode(context)[: min(ECHO_TOKENS, client.max_length)])
    if not problem:
        return []
    message = f"{client.base_url} gives no complete log-probabilities of a prompt: {problem}"
    fix = "leave out perplexity and multiple-choice tasks, or use a server that echoes log-probabilities (vLLM does)"
    return [PreflightFinding(id="echo", level="error", message=message, fix=fix)]


def _estimate(plans: list[Plan], client: Any, counter: Any) -> tuple[float, float, float]:
    """(seconds of the probe, expected seconds, seconds if every answer used its budget)."""
    spent = expected = high = 0.0
    for plan in plans:
        batch_s, tokens, batch = time_probe(client, plan)
        spent += batch_s
        rounds = plan.requests / batch
        per_token = batch_s / max(1.0, tokens)
        if plan.kind == "generate_until":
            likely = min(plan.budget, _gold_tokens(plan, counter) or tokens) + client.thinking_budget
            expected += rounds * max(batch_s, per_token * likely)
            high += rounds * max(batch_s, per_token * plan.budget)
        else:
            expected += rounds * batch_s
            high += rounds * batch_s
    return spent, expected, high


def _gold_tokens(plan: Plan, counter: Any) -> float:
    answers = [text for text in (plan.shots or plan.golds) if text]
    if counter is None or not answers:
        return 0.0
    return statistics.mean(len(ids) for ids in counter(answers).input_ids)


def _info(id: str, message: str) -> PreflightFinding:
    return PreflightFinding(id=id, level="info", message=message)
