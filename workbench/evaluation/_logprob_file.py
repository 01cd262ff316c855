"""Files of top-k log-probabilities: one header line, then one line a window; and what such numbers can be.

    header, windows = read_file(path)      # {"name", …, "k", "text"}, {window: [(token, {token: log}), …]}

Nothing is judged that no softmax can give. `fault_of` says what is impossible about one position; both the endpoint's
answer (`read_echo`) and a file pass it. A log-probability of minus infinity is honest: a masked token, or one that
underflowed. vLLM writes it as -9999, and so do these files, which keeps them strict JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation._read import ROUNDED, log_problem
from workbench.evaluation._transport import BadAnswer

ZERO_LOG = -9999.0
"""A log-probability that stands for probability 0 (vLLM: `max(logprob, -9999.0)` in its completions endpoint)."""
Position = tuple[str, dict[str, float]]
"""(the actual token, {token: log-probability in nats}) at one place of a window"""
_ID = re.compile(r"token_id:(\d+)")
_AGAIN = "collect this file again: delete it and run `workbench logprobs`"


def fault_of(token: Any, logs: Any, k: int) -> str:
    """What is impossible about one position's k most likely tokens and the actual one; "" if nothing is."""
    if not isinstance(token, str) or not isinstance(logs, dict) or not logs:
        return "no token with a map of log-probabilities"
    for name, value in logs.items():
        problem = log_problem(value)
        if problem:
            return f"token {name!r}: the log-probability {repr(value)[:40]} {problem}"
    told = sorted(map(float, logs.values()), reverse=True)
    mass = sum(map(math.exp, told))
    if mass > 1.0 + ROUNDED:
        return f"token {token!r}: the probabilities add up to {mass:.6g}, above 1"
    whole = mass >= 1.0 - ROUNDED  # then every token that is not told has probability 0
    if not whole and told[min(k, len(told)) - 1] <= ZERO_LOG:
        return f"token {token!r}: one of the {k} most likely has probability 0, but all told have only {mass:.6g}"
    if _ID.fullmatch(token):  # named by their text, several tokens share one name
        if token not in logs:
            return f"token {token!r}: its own log-probability is missing"
        if len(logs) < k and not whole:
            return f"token {token!r}: {len(logs)} tokens are told where k is {k}"
    return ""


def read_echo(answer: dict[str, Any], window: Sequence[int], k: int, place: int) -> list[Position]:
    """The echoed positions of one window; the first token has no distribution, the generated one is left out.

    window: the token ids that were sent; place: its number, for messages. Raises BadAnswer.
    """
    choices, size = answer.get("choices"), len(window)
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("top_logprobs"), list):
        raise BadAnswer("no_echo_logprobs", "no log-probabilities of the prompt (echo with logprobs is not supported)")
    names, top, own = (logprobs.get(key) for key in ("tokens", "top_logprobs", "token_logprobs"))
    if not isinstance(names, list) or len(top) != size + 1 or len(names) != size + 1:  # type: ignore[arg-type]
        raise BadAnswer("wrong_lengths", f"{len(top)} positions for {size} prompt tokens and one generated")  # type: ignore[arg-type]
    positions: list[Position] = []
    for i in range(size):
        asked, where = f"token_id:{window[i]}", f"window {place}, position {i}"
        if isinstance(names[i], str) and _ID.fullmatch(names[i]) and names[i] != asked:
            raise BadAnswer("other_tokens", f"{where}: the token is {names[i]!r}, but {asked!r} was sent")
        if not i:
            continue
        logs = dict(top[i]) if isinstance(top[i], dict) else top[i]  # type: ignore[index]
        if isinstance(logs, dict) and isinstance(names[i], str) and isinstance(own, list) and len(own) > i:
            logs.setdefault(names[i], own[i])
        if problem := fault_of(names[i], logs, k):
            raise BadAnswer("impossible_logprobs", f"{where}: {problem}")
        # where tokens are named by their text, several share the replacement character
        told = {key: max(float(value), ZERO_LOG) for key, value in logs.items() if "�" not in key}
        if not told:
            raise BadAnswer("impossible_logprobs", f"{where}: no token is told whose text is whole")
        positions.append((names[i], told))
    if size > 1 and not _ID.fullmatch(names[1]) and max(map(len, top[1:size])) < k:  # type: ignore[index]
        raise BadAnswer("wrong_lengths", f"window {place}: no position tells {k} tokens, as was asked for")
    return positions


def header_line(*, name: str, model: str, fingerprint: str, k: int, windows: Sequence[Sequence[int]]) -> str:
    """The first line of a file, without its line end."""
    text = hashlib.sha256(json.dumps([list(window) for window in windows]).encode()).hexdigest()[:16]
    return json.dumps({"name": name, "model": model, "fingerprint": fingerprint, "k": k, "text": text})


def window_line(place: int, positions: list[Position]) -> str:
    return json.dumps({"window": place, "positions": positions}, allow_nan=False) + "\n"


def finished_windows(path: Path, header: str) -> set[int]:
    """Windows that `path` holds for this header; a torn last line is cut off. Raises EvaluationError on damage."""
    if not path.is_file():
        return set()
    content = path.read_bytes()
    if content.split(b"\n", 1)[0] != header.encode():
        return set()
    whole = content[: content.rfind(b"\n") + 1]
    with path.open("r+b") as stream:
        stream.truncate(len(whole))
    return set(read_file(path)[1])


def read_file(path: Path) -> tuple[dict[str, Any], dict[int, list[Position]]]:
    """(header, windows) of a file of `collect_logprobs`. Raises EvaluationError naming file, line, window, position."""
    if not path.is_file():
        raise EvaluationError(f"{path} does not exist", fix="collect this endpoint's log-probabilities first")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is no text: {error}", fix="give a file of `workbench logprobs`") from error
    header = _object(path, 1, lines[0])
    wanted = (("name", str), ("model", str), ("text", str), ("k", int))
    wrong = [key for key, kind in wanted if not isinstance(header.get(key), kind) or isinstance(header[key], bool)]
    if wrong or header["k"] < 1:
        raise EvaluationError(
            f"{path}, line 1: no header of log-probabilities: {' and '.join(wrong or ['k'])} is missing or impossible",
            fix="give a file of `workbench logprobs`",
        )
    windows: dict[int, list[Position]] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line and number == len(lines):
            break  # after the last line's end
        row = _object(path, number, line)
        place, positions = row.get("window"), row.get("positions")
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise EvaluationError(f"{path}, line {number}: the window is {repr(place)[:40]}, no number", fix=_AGAIN)
        if place in windows:
            raise EvaluationError(f"{path}, line {number}: window {place} stands there twice", fix=_AGAIN)
        if not isinstance(positions, list) or not positions:
            raise EvaluationError(f"{path}, line {number}: window {place} holds no list of positions", fix=_AGAIN)
        windows[place] = [
            _position(entry, header["k"], f"{path}, line {number}: window {place}, position {i}")
            for i, entry in enumerate(positions, 1)
        ]
    return header, windows


def check_pairs(
    reference: Path, arm: Path, p_windows: dict[int, list[Position]], q_windows: dict[int, list[Position]]
) -> None:
    """Refuse two files whose windows or actual tokens differ. Raises EvaluationError naming the first difference."""
    if not p_windows:
        raise EvaluationError(f"{reference} holds no window", fix="run the same `workbench logprobs` command again")
    alone = [
        f"only {path} has {_named(found)}"
        for path, found in ((reference, set(p_windows) - set(q_windows)), (arm, set(q_windows) - set(p_windows)))
        if found
    ]
    if alone:
        raise EvaluationError(
            f"{reference} holds {len(p_windows)} windows and {arm} {len(q_windows)}: {'; '.join(alone)}",
            fix="run the same two `workbench logprobs` commands again: each asks what its file lacks",
        )
    for place in sorted(p_windows):
        ours, theirs = p_windows[place], q_windows[place]
        if len(ours) != len(theirs):
            raise EvaluationError(
                f"window {place} has {len(ours)} positions in {reference} and {len(theirs)} in {arm}", fix=_AGAIN
            )
        for i, ((token, _), (other, _)) in enumerate(zip(ours, theirs, strict=True), 1):
            if token != other:
                raise EvaluationError(
                    f"window {place}, position {i}: the token is {token!r} in {reference} and {other!r} in {arm}",
                    fix="collect both on the same text with the same tokenizer",
                )


# ---- private


def _position(entry: Any, k: int, where: str) -> Position:
    token, logs = entry if isinstance(entry, list) and len(entry) == 2 else ("", {})
    if problem := fault_of(token, logs, k):
        raise EvaluationError(f"{where}: {problem}", fix=_AGAIN)
    return token, {name: max(float(value), ZERO_LOG) for name, value in logs.items()}


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"no whole JSON ({error})"
        raise EvaluationError(
            f"{path}, line {number}: {what}", fix=_AGAIN if number > 1 else "give a file of `workbench logprobs`"
        ) from error
    if not isinstance(found, dict):
        raise EvaluationError(f"{path}, line {number}: a {type(found).__name__}, expected an object", fix=_AGAIN)
    return found


def _named(places: set[int]) -> str:
    shown = ", ".join(map(str, sorted(places)[:5]))
    return f"window{'s' if len(places) > 1 else ''} {shown}" + (" and others" if len(places) > 5 else "")
