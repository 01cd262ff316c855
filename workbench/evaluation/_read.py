"""An endpoint's JSON -> the fields of an `Answer`; anything that is not what was asked for is a `BadAnswer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.evaluation._transport import BadAnswer

FIRST_IDS = 8


def read_completion(answer: dict[str, Any], api: str) -> dict[str, Any]:
    """Fields of one generated answer. api: "completions" or "chat". A null text stays None: it is an answer."""
    choice = _only_choice(answer)
    if api == "chat":
        message = choice.get("message")
        if not isinstance(message, dict) or "content" not in message:
            raise BadAnswer("malformed", "the choice has no message with content")
        text = message["content"]
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    else:
        if "text" not in choice:
            raise BadAnswer("malformed", "the choice has no text")
        text, reasoning = choice["text"], choice.get("reasoning_content") or ""
    if text is not None and not isinstance(text, str):
        raise BadAnswer("malformed", f"the text is a {type(text).__name__}")
    stop = choice.get("stop_reason")
    return {
        "text": text,
        "reasoning": reasoning,
        "finish_reason": str(choice.get("finish_reason") or ""),
        "stop_reason": stop if isinstance(stop, str) else "",
        **_tokens(answer, choice),
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
        found = len(logprobs.get(name) or [])
        if found != tokens + 1:
            raise BadAnswer("wrong_lengths", f"{name} has {found} entries for {tokens} prompt tokens and one generated")
    if any(value is None for value in logprobs["token_logprobs"][1:]):
        raise BadAnswer("wrong_lengths", "token_logprobs holds null after the first token")
    ((logprob, greedy),) = parse([answer], ctxlens=[context])
    return {"text": "", "logprob": float(logprob), "greedy": bool(greedy), **_tokens(answer, choice)}


def _only_choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer("malformed", f"no choices in the answer: {str(answer)[:200]}")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer("wrong_lengths", f"{len(choices)} choices where one was asked for")
    choices[0].setdefault("index", 0)
    return choices[0]


def _tokens(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    usage = answer.get("usage") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "prompt_ids": tuple((choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or ())[:FIRST_IDS]),
        "first_ids": tuple((choice.get("token_ids") or ())[:FIRST_IDS]),
    }
