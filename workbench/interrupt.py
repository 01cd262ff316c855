"""Termination signals as an exception, so that every `finally` runs: the entry points' one way to be stopped."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(BaseException):
    """A termination signal, raised where the main thread stands. Not an Exception: no handler swallows it."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Interrupted; afterwards the former handlers are back. Main thread only."""
    handlers = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number).name)
