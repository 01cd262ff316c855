"""The evaluation's client against vLLM's own `bench serve`, on the same prompts, endpoint and concurrency.

    workbench serve CHECKPOINT --backend reference --port 8000 --name mini
    python tests/evaluation/client_throughput.py http://127.0.0.1:8000 --model mini --tokenizer CHECKPOINT

GSM8K-style prompts, greedy, with the task's own stop list. Both clients ask all of them, in turns (ours, theirs,
theirs, ours, …), after one unmeasured turn each. Ours is timed from the task's prompts to the last answer in the
journal, with tokenizing and payloads; theirs is the duration that it prints. The figure is the ratio of output tokens
a second, ours over theirs, with the t interval of its logarithm over the pairs of turns. Not collected by pytest: it
needs a server and minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The console script of some vLLM distributions fails on a look-up of its own version, so the module is called.
_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--num-fewshot", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        requests = make_requests(Path(scratch), settings)
        turns = {"ours": ask_ours, "theirs": ask_theirs}
        for ask in turns.values():
            ask(requests, Path(scratch), settings)
        speeds: dict[str, list[float]] = {name: [] for name in turns}
        for repeat in range(settings.repeats):
            for name in list(turns)[:: 1 if repeat % 2 == 0 else -1]:
                tokens, seconds = turns[name](requests, Path(scratch), settings)
                speeds[name].append(tokens / seconds)
                print(
                    f"{repeat + 1} {name:6} {tokens:6} tokens in {seconds:6.2f} s: {tokens / seconds:7.1f} tokens/s",
                    flush=True,
                )
    ratio, low, high = ratio_interval(speeds["ours"], speeds["theirs"])
    print(f"ours / theirs: {ratio:.3f} (95 % {low:.3f} to {high:.3f}), {settings.repeats} pairs of turns")
    if settings.json:
        settings.json.write_text(json.dumps({**speeds, "ratio": [ratio, low, high]}, indent=2) + "\n")


def make_requests(scratch: Path, settings: Any) -> list[Any]:
    """lm-eval's own requests of the mini task: (prompt, generation settings) of each document."""
    from workbench.evaluation.spec import task_spec
    from workbench.evaluation.tasks import build_tasks

    spec = task_spec(
        {"name": "gsm8k_mini", "task": "gsm8k", "data": "mini", "primary_filter": "strict-match",
         "num_fewshot": settings.num_fewshot, "max_gen_toks": settings.max_tokens}
    )  # fmt: skip
    (built,) = build_tasks((spec,), scratch)
    (task,) = built.tasks
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=settings.prompts)
    return [
        SimpleNamespace(args=instance.args, task_name=task.task_name, doc_id=instance.doc_id)
        for instance in task.instances
    ]


def ask_ours(requests: list[Any], scratch: Path, settings: Any) -> tuple[int, float]:
    """(output tokens, seconds) of one turn of the evaluation's client, with a journal of its own."""
    from workbench.evaluation._client import CompletionsClient

    journal = scratch / f"journal-{time.monotonic_ns()}.jsonl"
    client = CompletionsClient(
        journal=str(journal), identity="throughput", model=settings.model,
        base_url=f"{settings.url.rstrip('/')}/v1/completions", tokenizer=str(settings.tokenizer),
        tokenizer_backend="huggingface", tokenized_requests=True, num_concurrent=settings.concurrency, max_length=2048,
    )  # fmt: skip
    started = time.monotonic()
    answers = client.generate_until(requests)
    seconds = time.monotonic() - started
    if len(answers) != len(requests) or client.failures:
        raise SystemExit(f"{len(client.failures)} requests failed: {client.transport.examples}")
    asked = {asked.key for asked in client.asked}
    if len(asked) != len(requests):
        raise SystemExit("two prompts are equal: the clients would not ask the same number of requests")
    return sum(client.journal.answers[key].completion_tokens or 0 for key in asked), seconds


def ask_theirs(requests: list[Any], scratch: Path, settings: Any) -> tuple[int, float]:
    """(output tokens, seconds) of one turn of vLLM's client."""
    prompts, results = scratch / "prompts.jsonl", scratch / "bench.json"
    ordered = sorted((request.args[0] for request in requests), key=len, reverse=True)  # as ours sends them
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ordered))
    until = requests[0].args[1]["until"]
    command = [
        sys.executable, "-c", _BENCH, "--backend", "openai", "--base-url", settings.url.rstrip("/"),
        "--endpoint", "/v1/completions", "--model", settings.model, "--tokenizer", str(settings.tokenizer),
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle",
        "--custom-output-len", str(settings.max_tokens), "--num-prompts", str(len(requests)),
        "--max-concurrency", str(settings.concurrency), "--temperature", "0",
        "--extra-body", json.dumps({"stop": list(until)}), "--disable-tqdm", "--save-result",
        "--result-dir", str(scratch), "--result-filename", results.name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode or not results.exists():
        raise SystemExit(f"vLLM's client failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = json.loads(results.read_text())
    results.unlink()
    if found["completed"] != len(requests):
        raise SystemExit(f"vLLM's client completed {found['completed']} of {len(requests)} requests")
    return int(found["total_output_tokens"]), float(found["duration"])


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the paired ratios with its 95 % t interval (NaN limits below 2 pairs)."""
    from scipy.stats import t

    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.mean(logs)
    half = math.nan
    if len(logs) > 1:
        half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


if __name__ == "__main__":
    main()
