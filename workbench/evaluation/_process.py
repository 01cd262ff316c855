"""The harness as a child process: started, listened to, watched, and gone afterwards whatever happens."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation.spec import TaskSpec


def run_harness(
    command: tuple[str, ...],
    environment: dict[str, str],
    log: Path,
    arm: str,
    progress: Callable[[int, int], None] | None,
    watch: Callable[[], None] | None,
    failed: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Run the child to its result. Whatever happens here, it is gone afterwards."""
    with log.open("w", encoding="utf-8") as log_stream:
        child = subprocess.Popen(
            [*command, "--with-parent"],
            stdin=subprocess.PIPE,  # closes with this process, and with it the child ends itself
            stdout=subprocess.PIPE,
            stderr=log_stream,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
            text=True,
        )
        try:
            final: dict[str, Any] | None = None
            for event in _events(child, watch):
                if "progress" in event:
                    if progress is not None:
                        progress(*event["progress"])
                elif "failed" in event:
                    if failed is not None:
                        failed(*event["failed"])
                else:
                    final = event
            status = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
    if final is not None and "result" in final:
        return dict(final["result"])
    if final is not None:
        raise EvaluationError(f"arm {arm!r}: {final['error']}", fix=final["fix"])
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
    raise EvaluationError(
        f"arm {arm!r}: the harness process ended with status {status} and no result; the end of {log}:\n{tail}",
        fix="the same command continues from the answers so far",
    )


def _events(child: subprocess.Popen[str], watch: Callable[[], None] | None) -> Any:
    """Events of the child until it closes its output; `watch` is called about once a second meanwhile."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    watched = time.monotonic()
    while True:
        if watch is not None and time.monotonic() - watched >= 1.0:
            watch()
            watched = time.monotonic()
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            continue
        if line is None:
            return
        yield json.loads(line)


def harness_environment(tasks: tuple[TaskSpec, ...], partial: Path) -> dict[str, str]:
    """The child's environment: no network and caches of its own, unless a task's documents come from the hub."""
    environment = dict(os.environ)
    environment.update(TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1", HF_HUB_DISABLE_TELEMETRY="1")
    if all(spec.offline for spec in tasks):
        cache = partial / "cache"
        environment.update(
            HF_HOME=str(cache),
            HF_DATASETS_CACHE=str(cache / "datasets"),
            HF_HUB_OFFLINE="1",
            HF_DATASETS_OFFLINE="1",
            TRANSFORMERS_OFFLINE="1",
        )
    return environment
