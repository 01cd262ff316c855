"""Run lm-eval over one arm's live endpoint and read back what it wrote.

    evaluation = evaluate(
        arm="nvfp4", base_url="http://127.0.0.1:8000", model="mini-kimi", tokenizer=Path("ckpt"), tasks=specs,
        out_dir=run / "eval" / "nvfp4", concurrency=8, request_order="forward", max_length=2048, seed=1234,
        fingerprint=server.fingerprint, keep=lambda found: write_json(run / "eval" / "nvfp4" / "scores.json", found),
    )

One child process runs all tasks of the arm. It works in `out_dir/.partial` and its files move to `out_dir/<model>/`,
lm-eval's own layout, only when they are complete. `keep` stores the record as `scores.json`: that marks the arm as
done. Until then the folder is locked, so that what lies in it is of one evaluation. `out_dir` is `<run>/eval/<arm>`;
generated documents go to `<run>/data`. Answers are journalled as they arrive, so an evaluation that was killed
continues where it stopped, if the same endpoint (`fingerprint`) is asked; with greedy decoding the result is that of
an uninterrupted run wherever the engine's answer does not depend on what else is in the batch.

Imports neither lm_eval nor torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.errors import EvaluationError, OutputError
from workbench.evaluation._process import harness_environment, run_harness
from workbench.evaluation.panel import build_panels
from workbench.evaluation.scores import read_perplexities, read_samples, read_scores
from workbench.evaluation.spec import TaskSpec, check_tasks, dump_spec
from workbench.records import Evaluation, Transport, hold_lock, write_text

FORWARD, REVERSED = "forward", "reversed"
COMPLETIONS, CHAT = "completions", "chat"
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
    add_bos_token: bool | None = None,
    api: str = COMPLETIONS,
    chat_template: bool = False,
    thinking: str = "",
    thinking_budget: int = 0,
    probe: bool = False,
    baseline_dir: Path | None = None,
    retries: int = 4,
    replace: bool = True,
    keep: Callable[[Evaluation], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[], None] | None = None,
    failed: Callable[[int, str], None] | None = None,
) -> Evaluation:
    """Evaluate `tasks` on the endpoint and return the scores.

    base_url: the server, with or without /v1 (/completions). model: the name it serves. tokenizer: a folder; prompts
    are sent as its token ids, and refused if they do not fit `max_length` tokens with their answer. None sends text,
    lengths unchecked. request_order: "forward" or "reversed" (same requests, sent last first). fingerprint: what the
    endpoint serves; answers of an interrupted evaluation are taken over only under the same one, never under "".
    add_bos_token: whether prompts begin with the tokenizer's BOS token; None: as the tokenizer itself does. timeout_s:
    seconds for one answer; retries: further sends of a request that failed.
    api: "completions", or "chat" (messages, the server's template). chat_template: on completions, lay prompts out
    with the tokenizer's own template. thinking: the tag that ends a reasoning model's think block, e.g. "</think>";
    thinking_budget: tokens for the block, on top of each task's max_gen_toks. probe: time a few short answers first and
    state the expected time. baseline_dir: `eval/<arm>` of the baseline, to compare answer lengths with.
    replace: False refuses an `out_dir` that holds an evaluation, as `check_unfinished` does, once the folder is this
    call's own. keep(evaluation) writes what belongs to the arm, while `out_dir` is locked still.
    progress(done, total) counts answers; failed(count, message) is told of every request that is given up; watch() is
    called once a second and may raise, which ends the evaluation (a server that died).

    Raises EvaluationError naming the task, file or endpoint; settings, the tokenizer's folder and whether anything
    answers at `base_url` are checked before a file is written or a process started, and the plan (preflight.json)
    before a token is generated. ConfigError while another process evaluates into `out_dir`, OutputError where it cannot
    be made. An evaluation that lies in `out_dir` is replaced once the new one is complete.
    The child process never outlives the call, nor the parent.
    """
    check_settings(request_order, concurrency, api, chat_template, tokenizer, thinking_budget, thinking)
    check_tasks(tasks)
    if tokenizer is not None and not tokenizer.is_dir():
        raise EvaluationError(f"tokenizer folder {tokenizer} does not exist", fix="name the served checkpoint's folder")
    _check_endpoint(base_url)
    url = chat_url(base_url) if api == CHAT else completions_url(base_url)
    model_args: dict[str, Any] = {
        "model": model,
        "base_url": url,
        "num_concurrent": concurrency,
        "timeout": int(timeout_s),
        "max_length": max_length,
        "seed": seed,
    }
    if api == CHAT:
        model_args.update(tokenizer_backend=None, tokenized_requests=False)
    elif tokenizer is None:
        model_args.update(tokenizer_backend=None, tokenized_requests=False, add_bos_token=bool(add_bos_token))
    else:
        model_args.update(
            tokenizer=str(tokenizer), tokenizer_backend="huggingface", tokenized_requests=True,
            add_bos_token=add_bos_token,
        )  # fmt: skip
    partial, journal = out_dir / ".partial", out_dir / ".journal.jsonl"
    request = {
        "arm": arm,
        "api": api,
        "tasks": [dump_spec(spec) for spec in tasks],
        "model_args": model_args,
        "client": {
            "journal": str(journal),
            "identity": _identity(url, model, fingerprint),
            "request_order": request_order,
            "thinking": thinking,
            "thinking_budget": thinking_budget,
            "retries": retries,
        },
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "templated": api == CHAT or chat_template,
        "known": bool(fingerprint),
        "probe": probe,
        "seed": seed,
        "output_dir": str(partial / "output"),
        "out_dir": str(out_dir),
        "data_dir": str(out_dir.parent.parent / "data"),
    }
    request_file = out_dir / "request.json"
    command = (sys.executable, "-m", "workbench.evaluation._harness", str(request_file))
    with hold_lock(out_dir / ".lock", f"another process is evaluating into {out_dir}"):
        if not replace:
            check_unfinished(out_dir)  # the one before may have ended since the caller looked
        started = time.monotonic()
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            log = out_dir / "harness.log"
            log.touch()
        except OSError as error:
            raise OutputError.of(error.filename or out_dir, error) from error
        write_text(request_file, json.dumps(request, indent=2) + "\n")
        try:
            result = run_harness(command, harness_environment(tasks, partial), log, arm, progress, watch, failed)
        except BaseException:
            shutil.rmtree(partial / "cache", ignore_errors=True)  # it may have filled the disk, and is made anew
            raise

        folder = _single_folder(partial / "output", arm)
        seconds = time.monotonic() - started
        final = out_dir / folder.name
        place = final.relative_to(out_dir.parent.parent)
        samples = read_samples(folder, arm=arm, specs=tasks, result=result)  # complete, or an error
        evaluation = Evaluation(
            arm=arm,
            scores=read_scores(samples, arm=arm, specs=tasks, result=result, seconds=seconds, place=place),
            command=command,
            harness=result["harness"],
            request_order=request_order,
            concurrency=concurrency,
            seconds=seconds,
            task_fingerprints={
                spec.name: _join_hashes([result["task_hashes"][leaf] for leaf in result["leaves"][spec.name]])
                for spec in tasks
            },
            api=api,
            plain_command=result["plain_command"],
            perplexities=read_perplexities(samples, arm=arm, specs=tasks, result=result, place=place),
            panels=build_panels(
                samples,
                folder,
                arm=arm,
                specs=tasks,
                result=result,
                thinking_budget=thinking_budget,
                baseline=baseline_dir,
            ),
            transport=Transport(**result["transport"]),
        )
        try:
            (partial / "preflight.json").replace(folder / "preflight.json")
            (out_dir / "scores.json").unlink(missing_ok=True)  # it names files that go now
            for earlier in {final, *_result_folders(out_dir)}:
                shutil.rmtree(earlier, ignore_errors=True)
            folder.rename(final)
            shutil.rmtree(partial, ignore_errors=True)
            journal.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError.of(error.filename or out_dir, error) from error
        if keep is not None:
            keep(evaluation)
        return evaluation


def check_unfinished(out_dir: Path) -> None:
    """Refuse a folder that holds a finished evaluation, or results of another client. Raises EvaluationError."""
    scores = out_dir / "scores.json"
    held = _result_folders(out_dir)
    if not scores.exists() and (not held or (out_dir / "request.json").exists()):
        return
    tasks = sorted(
        {path.name.split("_", 1)[1].rpartition("_")[0] for at in held for path in at.glob("samples_*.jsonl")}
    )
    raise EvaluationError(
        f"{out_dir} holds an evaluation already" + (f", of {', '.join(tasks)}" if tasks else ""),
        fix="choose another --out or --arm; several tasks go into one evaluation with --task A --task B; "
        "--replace drops what lies there",
    )


def _result_folders(out_dir: Path) -> set[Path]:
    return {path.parent for path in out_dir.glob("*/results_*.json") if path.parent.name != ".partial"}


def completions_url(base_url: str) -> str:
    """The completions endpoint of a server given with or without its path."""
    return f"{_root(base_url)}/completions"


def chat_url(base_url: str) -> str:
    """The chat endpoint of a server given with or without its path."""
    return f"{_root(base_url)}/chat/completions"


def _root(base_url: str) -> str:
    url = base_url.rstrip("/")
    for path in ("/chat/completions", "/completions"):
        if url.endswith(path):
            return url.removesuffix(path)
    return url if url.endswith("/v1") else f"{url}/v1"


def check_settings(
    request_order: str,
    concurrency: int,
    api: str,
    chat_template: bool,
    tokenizer: Path | None,
    thinking_budget: int = 0,
    thinking: str = "",
) -> None:
    """Refuse how an endpoint is to be asked before anything is started. Raises EvaluationError naming the setting."""
    if request_order not in (FORWARD, REVERSED):
        raise EvaluationError(f"request_order={request_order!r}", fix=f"use {FORWARD!r} or {REVERSED!r}")
    if concurrency < 1:
        raise EvaluationError(f"concurrency={concurrency}", fix="at least one request at once")
    if api not in (COMPLETIONS, CHAT):
        raise EvaluationError(f"api={api!r}", fix=f"use {COMPLETIONS!r} or {CHAT!r}")
    if chat_template and tokenizer is None:
        raise EvaluationError("chat_template=true needs a tokenizer", fix="name its folder, or use api=chat")
    if thinking_budget < 0:
        raise EvaluationError(f"thinking_budget={thinking_budget}", fix="a number of tokens, 0 or more")
    if thinking and not thinking.strip():
        raise EvaluationError(f"thinking={thinking!r} is blank", fix="the tag that ends a think block, e.g. </think>")


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
    models = f"{_root(base_url)}/models"
    try:
        httpx.get(models, timeout=_ANSWER_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvaluationError(
            f"no answer from {models}: {error or type(error).__name__}",
            fix="check the URL, and that the server runs",
        ) from error


def _single_folder(output: Path, arm: str) -> Path:
    folders = [path for path in output.glob("*") if path.is_dir()]
    if len(folders) != 1:
        raise EvaluationError(
            f"arm {arm!r}: lm-eval left {len(folders)} result folders in {output}, expected one",
            fix="lm-eval only warns when it cannot save: see harness.log; free space in the output folder",
        )
    return folders[0]


def _identity(url: str, model: str, fingerprint: str) -> str:
    """Who is asked, for the journal. A server of this machine has another port at every start: it is left out."""
    if not fingerprint:
        return f"unknown {time.time_ns()}"  # nobody can say that it is the endpoint asked before
    parts = urlsplit(url)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    return json.dumps(["localhost" if local else parts.netloc, parts.path, model, fingerprint])


def _join_hashes(hashes: list[str]) -> str:
    return hashes[0][:16] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
