"""Run lm-eval over one arm's live endpoint and read back what it wrote.

    evaluation = evaluate(
        arm="nvfp4", base_url="http://127.0.0.1:8000", model="mini-kimi", tokenizer=Path("ckpt"), tasks=specs,
        out_dir=run / "eval" / "nvfp4", concurrency=8, request_order="forward", max_length=2048, seed=1234,
        fingerprint=server.fingerprint,
    )

One child process runs all tasks of the arm. It works in `out_dir/.partial` and its files move to `out_dir/<model>/`,
lm-eval's own layout, only when they are complete. The caller stores the record as `scores.json`: that marks the arm
as done. `out_dir` is `<run>/eval/<arm>`; generated documents go to `<run>/data`. Answers are journalled as they
arrive, so an evaluation that was killed continues where it stopped, if the same endpoint (`fingerprint`) is asked;
with greedy decoding the result is that of an uninterrupted run wherever the engine's answer does not depend on what
else is in the batch.

Imports neither lm_eval nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.errors import EvaluationError
from workbench.evaluation.scores import read_scores
from workbench.evaluation.spec import TaskSpec, check_tasks, dump_spec
from workbench.records import Evaluation, write_text

FORWARD, REVERSED = "forward", "reversed"
_ANSWER_S = 10.0  # to wait for the endpoint's first answer, before anything is started


def evaluate(
    *,
    arm: str,
    base_url: str,
    model: str,
    tokenizer: Path | None,
    tasks: tuple[TaskSpec, ...],
    out_dir: Path,
    concurrency: int,
    request_order: str = FORWARD,
    max_length: int,
    seed: int = 1234,
    fingerprint: str = "",
    timeout_s: float = 600.0,
    add_bos_token: bool = False,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[], None] | None = None,
) -> Evaluation:
    """Evaluate `tasks` greedily on the endpoint and return the scores.

    base_url: the server, with or without /v1 (/completions). model: the name it serves. tokenizer: a folder; prompts
    are sent as its token ids, and refused if they do not fit `max_length` tokens with their answer. None sends text,
    lengths unchecked. request_order: "forward" or "reversed" (same requests, sent last first). fingerprint: what the
    endpoint serves; answers of an interrupted evaluation are taken over only under the same one, never under "".
    add_bos_token: let the tokenizer add its special tokens (lm-eval's own default: no). progress(done, total) counts
    answers; watch() is called once a second and may raise, which ends the evaluation (a server that died). timeout_s:
    seconds for one answer.

    Raises EvaluationError naming the task, file or endpoint; settings, the tokenizer's folder and whether anything
    answers at `base_url` are checked before a file is written or a process started.
    The child process never outlives the call, nor the parent.
    """
    if request_order not in (FORWARD, REVERSED):
        raise EvaluationError(f"request_order={request_order!r}", fix=f"use {FORWARD!r} or {REVERSED!r}")
    if concurrency < 1:
        raise EvaluationError(f"concurrency={concurrency}", fix="at least one request at once")
    check_tasks(tasks)
    if tokenizer is not None and not tokenizer.is_dir():
        raise EvaluationError(f"tokenizer folder {tokenizer} does not exist", fix="name the served checkpoint's folder")
    _check_endpoint(base_url)

    started = time.monotonic()
    partial, journal = out_dir / ".partial", out_dir / ".journal.jsonl"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model_args: dict[str, Any] = {
        "model": model,
        "base_url": completions_url(base_url),
        "num_concurrent": concurrency,
        "max_retries": 3,
        "timeout": int(timeout_s),
        "max_length": max_length,
        "seed": seed,
        "add_bos_token": add_bos_token,
    }
    if tokenizer is None:
        model_args.update(tokenizer_backend=None, tokenized_requests=False)
    else:
        model_args.update(tokenizer=str(tokenizer), tokenizer_backend="huggingface", tokenized_requests=True)
    request = {
        "arm": arm,
        "tasks": [dump_spec(spec) for spec in tasks],
        "model_args": model_args,
        "request_order": request_order,
        "seed": seed,
        "output_dir": str(partial / "output"),
        "data_dir": str(out_dir.parent.parent / "data"),
        "journal": str(journal),
        "identity": _identity(arm, model, fingerprint, seed, add_bos_token, tokenizer),
    }
    request_file = out_dir / "request.json"
    write_text(request_file, json.dumps(request, indent=2) + "\n")
    command = (sys.executable, "-m", "workbench.evaluation._harness", str(request_file))
    result = _run_harness(command, _environment(tasks, partial), out_dir / "harness.log", arm, progress, watch)

    folder = _single_folder(partial / "output", arm)
    seconds = time.monotonic() - started
    read_scores(folder, arm=arm, specs=tasks, result=result, seconds=seconds, root=out_dir)  # complete, or an error
    final = out_dir / folder.name
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    scores = read_scores(final, arm=arm, specs=tasks, result=result, seconds=seconds, root=out_dir.parent.parent)
    evaluation = Evaluation(
        arm=arm,
        scores=scores,
        command=command,
        harness=result["harness"],
        request_order=request_order,
        concurrency=concurrency,
        seconds=seconds,
        task_fingerprints={
            spec.name: _join_hashes([result["task_hashes"][leaf] for leaf in result["leaves"][spec.name]])
            for spec in tasks
        },
    )
    shutil.rmtree(partial, ignore_errors=True)
    journal.unlink(missing_ok=True)
    return evaluation


def completions_url(base_url: str) -> str:
    """The completions endpoint of a server given with or without its path."""
    url = base_url.rstrip("/")
    if url.endswith("/completions"):
        return url
    return f"{url}/completions" if url.endswith("/v1") else f"{url}/v1/completions"


def _check_endpoint(base_url: str) -> None:
    """Raise EvaluationError unless `base_url` is an http(s) URL where something answers (with whatever status)."""
    import httpx

    fix = "give the server as http://HOST:PORT or http://HOST:PORT/v1"
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise EvaluationError(f"base_url={base_url!r} is no URL: {error}", fix=fix) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or any(c.isspace() for c in base_url):
        raise EvaluationError(f"base_url={base_url!r} is no http URL with a host and a port", fix=fix)
    models = f"{completions_url(base_url).removesuffix('/completions')}/models"
    try:
        httpx.get(models, timeout=_ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvaluationError(
            f"no answer from {models}: {error or type(error).__name__}",
            fix="check the URL, and that the server runs",
        ) from error


def _run_harness(
    command: tuple[str, ...],
    environment: dict[str, str],
    log: Path,
    arm: str,
    progress: Callable[[int, int], None] | None,
    watch: Callable[[], None] | None,
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


def _environment(tasks: tuple[TaskSpec, ...], partial: Path) -> dict[str, str]:
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


def _single_folder(output: Path, arm: str) -> Path:
    folders = [path for path in output.glob("*") if path.is_dir()]
    if len(folders) != 1:
        raise EvaluationError(
            f"arm {arm!r}: lm-eval left {len(folders)} result folders in {output}, expected one",
            fix="lm-eval only warns when it cannot save: see harness.log; free space in the output folder",
        )
    return folders[0]


def _identity(arm: str, model: str, fingerprint: str, seed: int, add_bos_token: bool, tokenizer: Path | None) -> str:
    if not fingerprint:
        return f"unknown {time.time_ns()}"  # nobody can say that it is the endpoint asked before
    return json.dumps([arm, model, fingerprint, seed, add_bos_token, str(tokenizer)])


def _join_hashes(hashes: list[str]) -> str:
    return hashes[0][:16] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
