"""Think blocks of reasoning models: taken off before an answer is scored, and told apart when they never ended.

    split_thinking("<think>16-7=9</think> 18", "stop", end="</think>")     # Thought("16-7=9", "18", "closed")

lm-eval takes what follows the end tag, and the whole text where there is none: then a number from the middle of a
thought is scored as the answer. Here an answer whose thought was cut is "open", and scored as no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

TAGS = ("<think>", "</think>", "<thinking>", "</thinking>", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷")
"""Tags of known reasoning models; what is looked for in answers that were not expected to hold any."""


@dataclass(frozen=True, slots=True)
class Thought:
    """state: "none" (no think block), "closed", or "open": it began, or was cut, and never ended."""

    thinking: str
    answer: str
    state: str


def split_thinking(text: str, finish_reason: str, *, end: str, reasoning: str = "") -> Thought:
    """Separate an answer's think block. end: the tag that closes it, e.g. "</think>".

    reasoning: what the server's own parser took out already; then an empty `text` that ended at max_tokens is "open".
    A prompt may end in the opening tag, so the answer need not hold it: an answer cut at max_tokens without an end tag
    counts as open.
    """
    if reasoning:
        state = "open" if not text.strip() and finish_reason == "length" else "closed"
        return Thought(reasoning, text.lstrip(), state)
    head, found, tail = text.rpartition(end)
    if found:
        return Thought(head, tail.lstrip(), "closed")
    opening = end.replace("/", "", 1)
    if finish_reason == "length" or (opening != end and opening in text):
        return Thought(text, "", "open")
    return Thought("", text, "none")


def cut_at_stops(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the first of `stops`, as a server would have ended it."""
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else text


def leaks(text: str) -> bool:
    """Whether a scored text holds a think tag."""
    return any(tag in text for tag in TAGS)
