"""The process that holds a pass's connection to Ray (`ray_driver.py`), from the side that asks it.

    with DriverProcess() as driver:
        answer = driver.ask("take")     # ComputeError where the process ended, or no longer answers

Ray exits, aborts or waits for ever in the process that is connected to it. Here that costs a pass and nothing else: the
error says how the process ended and what it and Ray's log said last.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from workbench.errors import ComputeError

from .ray_driver import WAITING

SILENT_S = 120.0  # at work it says every few seconds that it waits; Ray gives a cluster half a minute to start
ENDING_S = 30.0
SAID_LINES, LOG_LINES, TAIL_BYTES = 8, 3, 1 << 16
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from workbench.analysis.ray_driver import main
main(int(sys.argv[1]))
"""
_SEVERE = re.compile(r"^\[[^\]]* [WEFC] \d+ \d+\]")


class DriverProcess:
    """A context: entering starts the process, leaving ends it. again: what to do after it ended on its own."""

    def __init__(self, again: str) -> None:
        self._again = again

    def __enter__(self) -> DriverProcess:
        self._socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C is for the asking process, which ends this one
            )
        self._asking = Connection(os.dup(self._socket.fileno()))
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # tells the process to end
        try:
            self._ended(ENDING_S)
        finally:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the listener
            self._listener.join()
            for held in (self._asking, self._socket, self._said):
                held.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *request: Any) -> Any:
        """The answer to a request. Raises ComputeError."""
        with contextlib.suppress(OSError):  # the listener says that it ended
            self._asking.send(request)
        while True:
            try:
                answer = self._answers.get(timeout=SILENT_S)
            except queue.Empty:
                self._process.kill()
                raise self._error(f"has not answered for {SILENT_S:g} s") from None
            if answer is None:
                raise self._error(self._how())
            if answer != WAITING:
                return answer

    def _listen(self) -> None:
        """In a thread: a process that stops within an answer would hold up whoever reads it."""
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._answers.put(self._asking.recv())
        finally:
            self._answers.put(None)

    def _ended(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _how(self) -> str:
        code = self._ended(ENDING_S)
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def _error(self, how: str) -> ComputeError:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").splitlines()
        lines = [line.strip() for line in said if line.strip()][-SAID_LINES:]
        log = _driver_log(self.pid)
        if log is not None:
            found = _last_severe(log)
            lines += [f"{log}{':' if found else ''}", *found, *_last_severe(log.with_name("raylet.out"))]
        return ComputeError("\n    ".join([f"the process that is connected to Ray {how}", *lines]), fix=self._again)


def _driver_log(pid: int) -> Path | None:
    """The log that Ray writes for a process that is connected to it."""
    root = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray")
    with contextlib.suppress(OSError):
        return max(root.glob(f"session_2*/logs/python-core-driver-*_{pid}.log"), key=os.path.getmtime, default=None)
    return None


def _last_severe(log: Path) -> list[str]:
    """The last warnings and errors of a log of Ray's."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if _SEVERE.match(line)][-LOG_LINES:]
