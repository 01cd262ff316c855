"""An endpoint's JSON -> the fields of an `Answer`; anything that is not what was asked for is a `BadAnswer`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from workbench.evaluation._transport import BadAnswer

FIRST_IDS = 8
ENDED, CUT = ("stop", "eos", "eos_token", "stop_sequence"), "length"
"""Finish reasons of a whole answer (OpenAI's API reference, and what other servers say for it), and of a cut one."""
MOST_TOKENS = 2**31
_COUNTS = ("prompt_tokens", "completion_tokens")
ROUNDED = 1e-3
"""What one log-probability may exceed 0 by, or a sum of told probabilities 1: some engines round to three decimals."""


def read_completion(answer: dict[str, Any], api: str, *, model: str = "") -> dict[str, Any]:
    """Fields of one generated answer. api: "completions" or "chat". A null text stays None: it is an answer.

    model: who was asked ("": not compared). odd: what is no reason to ask again but is counted, kind -> message.
    """
    choice = _only_choice(answer)
    if api == "chat":
        message = choice.get("message")
        if not isinstance(message, dict) or "content" not in message:
            raise BadAnswer("malformed", "the choice has no message with content")
        text = message["content"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
    else:
        if "text" not in choice:
            raise BadAnswer("malformed", "the choice has no text")
        text, reasoning = choice["text"], choice.get("reasoning_content")
    if text is not None and not isinstance(text, str):
        raise BadAnswer("malformed", f"the text is a {type(text).__name__}")
    stop, reason = choice.get("stop_reason"), choice.get("finish_reason", "")
    reason = reason if isinstance(reason, str) else json.dumps(reason)[:80]
    odd = {}
    if text is None:
        odd["null_content"] = "sent null in place of a text"
    if reason not in (*ENDED, CUT):
        odd["odd_finish"] = f"the finish reason is {reason or 'missing'}: it is unknown whether the answer is whole"
    if model and answer.get("model", model) != model:
        odd["other_model"] = f"the answer says it is from model {str(answer['model'])[:80]!r}, asked was {model!r}"
    tokens = _tokens(answer, choice, odd)
    return {
        "text": text,
        "reasoning": reasoning if isinstance(reasoning, str) else "",
        "finish_reason": reason,
        "stop_reason": stop if isinstance(stop, str) else "",
        **tokens,
        "odd": odd,
    }


def read_logprobs(answer: dict[str, Any], context: int, tokens: int, parse: Callable[..., Any]) -> dict[str, Any]:
    """Fields of one scored text. context, tokens: token counts of the context and of all that was sent; parse:
    lm-eval's `parse_logprobs`. The endpoint echoes the prompt and adds one token, so tokens + 1 entries are due.
    """
    choice = _only_choice(answer)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("token_logprobs"), list):
        raise BadAnswer("no_echo_logprobs", "no log-probabilities of the prompt (echo with logprobs is not supported)")
    for name in ("token_logprobs", "top_logprobs"):
        found = len(logprobs[name]) if isinstance(logprobs.get(name), list) else 0
        if found != tokens + 1:
            raise BadAnswer("wrong_lengths", f"{name} has {found} entries for {tokens} prompt tokens and one generated")
    if any(value is None for value in logprobs["token_logprobs"][1:]):
        raise BadAnswer("wrong_lengths", "token_logprobs holds null after the first token")
    for place, (value, top) in enumerate(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)):
        if place and (problem := log_problem(value)):
            message = f"position {place}: the log-probability {repr(value)[:40]} {problem}"
            raise BadAnswer("impossible_logprobs", message)
        if place and (not isinstance(top, dict) or not top or any(map(log_problem, top.values()))):
            raise BadAnswer("impossible_logprobs", f"position {place}: top_logprobs holds {repr(top)[:80]}")
    ((logprob, greedy),) = parse([answer], ctxlens=[context])
    odd: dict[str, str] = {}
    tokens_told = _tokens(answer, choice, odd)
    return {"text": "", "logprob": float(logprob), "greedy": bool(greedy), **tokens_told, "odd": odd}


def log_problem(value: Any) -> str:
    """Why a value is no log-probability; "" if it is one. Minus infinity is: of a masked token."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "is no number"
    try:
        number = float(value)
    except OverflowError:
        return "is no number that a computer holds"
    if math.isnan(number) or number == math.inf:
        return "is not finite"
    return "is above 0" if number > ROUNDED else ""


def _only_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer("malformed", f"no choices in the answer: {str(answer)[:200]}")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer("wrong_lengths", f"{len(choices)} choices where one was asked for")
    choices[0].setdefault("index", 0)
    return choices[0]


def _tokens(answer: dict[str, Any], choice: dict[str, Any], odd: dict[str, str]) -> dict[str, Any]:
    usage = answer.get("usage")
    counts = {name: usage.get(name) if isinstance(usage, dict) else None for name in _COUNTS}
    wrong = [name for name, count in counts.items() if count is not None and not _is_count(count)]
    if wrong or not (usage is None or isinstance(usage, dict)):
        odd["odd_usage"] = f"no usable token counts: usage is {repr(usage)[:120]}"
    return {
        **{name: None if name in wrong else count for name, count in counts.items()},
        "prompt_ids": _ids(choice.get("prompt_token_ids") or answer.get("prompt_token_ids")),
        "first_ids": _ids(choice.get("token_ids")),
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS


def _ids(value: Any) -> tuple[int, ...]:
    found = value[:FIRST_IDS] if isinstance(value, list) else []
    return tuple(found) if all(map(_is_count, found)) else ()
