"""Two answers beside each other, with the words marked that differ.

    shown = diff_answers("There are 3 * 4 = 12 jars", "There are 3 * 4 = 15 jars")
    shown.baseline      # (("same", "There are 3 * 4 = "), ("gone", "12"), ("same", " jars"))

Long answers are cut before they are compared: what both begin with is shortened to its end, and what follows is
compared for `limit` characters. The cut says how much it left out; both answers are whole in flips.jsonl.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from itertools import takewhile

Pieces = tuple[tuple[str, str], ...]
_WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")  # spaces go with their word: alone they would match everywhere
_LEAD = 240  # characters of what both begin with
_LONGEST_WORD = 80  # of what is compared: a run without spaces is taken in parts
_MOST_WORDS = 200  # comparing takes up to the cube of it


@dataclass(frozen=True, slots=True)
class Diff:
    """Pieces of both answers in order: ("same" | "gone" | "new" | "cut", text). cut: how much was left out."""

    baseline: Pieces
    candidate: Pieces


def diff_answers(baseline: str, candidate: str, *, limit: int = 1200) -> Diff:
    """A word-level diff of both answers; at most about `limit` characters of each after what they share."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(baseline, candidate, strict=False)))
    if max(len(baseline), len(candidate)) > common:  # at a word's start, so that whole words are marked
        common = _word_start(baseline, common)
    lead, skipped = baseline[max(0, common - _LEAD) : common], max(0, common - _LEAD)
    rests = (baseline[common : common + limit], candidate[common : common + limit])
    one, two = ([w for word in _WORD.findall(rest) for w in _parts(word)][:_MOST_WORDS] for rest in rests)
    matcher = difflib.SequenceMatcher(None, one, two, autojunk=False)
    left: list[tuple[str, str]] = []
    right: list[tuple[str, str]] = []
    for pieces in (left, right):
        pieces += [("cut", _left_out(skipped))] if skipped else []
        pieces += [("same", lead)] if lead else []
    for _, i, i_end, j, j_end in matcher.get_opcodes():
        same = one[i:i_end] == two[j:j_end]
        _add(left, "same" if same else "gone", "".join(one[i:i_end]))
        _add(right, "same" if same else "new", "".join(two[j:j_end]))
    for pieces, text, words in ((left, baseline, one), (right, candidate, two)):
        rest = len(text) - common - sum(map(len, words))
        pieces += [("cut", _left_out(rest))] if rest > 0 else []
    return Diff(tuple(left), tuple(right))


def _add(pieces: list[tuple[str, str]], kind: str, text: str) -> None:
    """Append, joined with a piece of the same kind before it."""
    if not text:
        return
    if pieces and pieces[-1][0] == kind:
        pieces[-1] = (kind, pieces[-1][1] + text)
    else:
        pieces.append((kind, text))


def _word_start(text: str, at: int) -> int:
    while at > 0 and at - 1 < len(text) and re.match(r"\w", text[at - 1]):
        at -= 1
    return at


def _parts(word: str) -> list[str]:
    return [word[i : i + _LONGEST_WORD] for i in range(0, len(word), _LONGEST_WORD)]


def _left_out(characters: int) -> str:
    return f"[…{characters:,} characters left out…]"
