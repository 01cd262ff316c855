"""Answers as they arrive, one JSON line each, so that an evaluation killed at any moment asks nothing twice.

The first line names who was asked (endpoint, model, server fingerprint); a journal of anyone else is replaced. Every
other line is an `Answer`, keyed by the sha256 of the bytes that were sent. So an answer is reused only for the very
same payload, asked of the very same server: never for another arm, another seed or another stop list.

Every line is flushed, which survives the death of this process; it is forced to disk (fsync) at most once a second and
on close, so a power cut costs the answers of the last second. A last line torn by a kill is dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import OutputError
from workbench.records import json_text, write_text

FSYNC_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the endpoint answered to one payload.

    key: sha256 of the payload in hex; of a scored text also ":" and where its continuation begins, in tokens. text:
    None where it sent null. reasoning: a reasoning parser's separate text ("" without one). stop_reason: the stop
    string that ended the answer, where the server tells ("" if not). logprob, greedy: summed log-probability of the
    continuation, and whether it is the most likely one (loglikelihood requests). prompt_tokens, completion_tokens: as
    the server counts them. prompt_ids, first_ids: first token ids of prompt and answer, where known. seconds: of the
    send that was answered; attempts: sends. error: why there is no answer ("" if there is one).
    """

    key: str
    text: str | None = None
    reasoning: str = ""
    finish_reason: str = ""
    stop_reason: str = ""
    logprob: float | None = None
    greedy: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: tuple[int, ...] = ()
    first_ids: tuple[int, ...] = ()
    seconds: float = 0.0
    attempts: int = 1
    error: str = ""


def encode_payload(payload: dict[str, Any]) -> bytes:
    """The bytes that are sent: JSON with sorted keys, so that equal payloads are equal bytes."""
    return json_text(payload, sort_keys=True, separators=(",", ":")).encode()


def payload_key(body: bytes) -> str:
    """sha256 of what is sent, in hex."""
    return hashlib.sha256(body).hexdigest()


class Journal:
    """See the module. answers: by payload key, those of an interrupted evaluation included."""

    def __init__(self, path: Path, identity: str) -> None:
        header = json.dumps({"identity": identity})
        self.answers: dict[str, Answer] = {}
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a torn last line may end within a character
        lines = whole.decode("utf-8").split("\n")[:-1]
        if lines and lines[0] == header:
            for line in lines[1:]:
                answer = _read(line)
                self.answers[answer.key] = answer
            os.truncate(path, len(whole))  # in place: a kill here loses nothing
        else:
            write_text(path, header + "\n")
        self._path, self._stream = path, path.open("a", encoding="utf-8")
        self._synced = time.monotonic()

    def add(self, answer: Answer) -> None:
        """Append one answer. Constant cost, however many there are. Raises OutputError naming the file."""
        self.answers[answer.key] = answer
        try:
            self._stream.write(json_text(dataclasses.asdict(answer)) + "\n")
            self._stream.flush()
            if time.monotonic() - self._synced >= FSYNC_S:
                self._sync()
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def close(self) -> None:
        """Force all lines to disk. The journal takes no more answers afterwards. Raises OutputError naming the file."""
        if self._stream.closed:
            return
        try:
            with self._stream:
                self._sync()
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def _sync(self) -> None:
        os.fsync(self._stream.fileno())
        self._synced = time.monotonic()


def _read(line: str) -> Answer:
    entry = json.loads(line)
    for name in ("prompt_ids", "first_ids"):
        entry[name] = tuple(entry[name])
    return Answer(**entry)
