"""The harness process: `python -m workbench.evaluation._harness request.json` runs lm-eval over one arm's endpoint.

A process of its own, because lm-eval, datasets and transformers cost seconds to import and keep global state, and
because it must be possible to stop it at any moment. Started by `workbench.evaluation.run`; started by hand it does
the same and prints its events, one JSON object a line: `{"progress": [done, total]}`, then `{"result": …}` or
`{"error": …, "fix": …}`. With `--with-parent` it ends itself as soon as its standard input closes, that is, when the
parent is gone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import EvaluationError, WorkbenchError
from workbench.evaluation.spec import load_spec


def main(arguments: list[str]) -> int:
    """Run the request named on the command line; returns the exit status (0 done, 1 an error that was reported)."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to the log, not between the events
    if "--with-parent" in arguments:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    request = json.loads(Path(arguments[0]).read_text())
    refusals = _Refusals()
    logging.getLogger("lm_eval.models.api_models").addHandler(refusals)
    try:
        _emit(events, {"result": _evaluate(request, events)})
    except WorkbenchError as error:
        _emit(events, {"error": error.message, "fix": error.fix})
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        _emit(events, _explain(error, request, refusals.last))
        return 1
    return 0


def _evaluate(request: dict[str, Any], events: TextIO) -> dict[str, Any]:
    import lm_eval
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from workbench.evaluation._client import CompletionsClient
    from workbench.evaluation.tasks import build_tasks

    built = build_tasks(tuple(load_spec(spec) for spec in request["tasks"]), Path(request["data_dir"]))
    chosen: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    for entry in built:
        for task in entry.tasks:
            counts[task.task_name] = _count_documents(entry.spec, task)
            if entry.spec.limit is not None:
                chosen[task.task_name] = list(range(counts[task.task_name]))

    model_args = request["model_args"]
    client = CompletionsClient(
        journal=request["journal"], identity=request["identity"], request_order=request["request_order"], **model_args
    )
    client.on_progress = lambda done, total: _emit(events, {"progress": [done, total]})
    tracker = EvaluationTracker(output_path=request["output_dir"])
    results = lm_eval.simple_evaluate(
        model=client,
        model_args=model_args,
        tasks=[task for entry in built for task in entry.tasks],
        samples=chosen or None,
        log_samples=True,
        evaluation_tracker=tracker,
        task_manager=TaskManager(include_defaults=False),
        random_seed=request["seed"],
        numpy_random_seed=request["seed"],
        torch_random_seed=request["seed"],
        fewshot_random_seed=DEFAULT_OTHER_SEED,  # lm-eval's own: the shots are part of the prompt, and so of the number
    )
    samples = results.pop("samples")
    truncated = {
        name: sum(_was_cut(client.journal.answers, row) for row in _first_filter(rows))
        for name, rows in samples.items()
    }
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    return {
        "harness": f"lm-eval {lm_eval.__version__}",
        "leaves": {entry.spec.name: [task.task_name for task in entry.tasks] for entry in built},
        "documents": counts,
        "num_fewshot": {task.task_name: task.get_config("num_fewshot") or 0 for entry in built for task in entry.tasks},
        "truncated": truncated,
        "task_hashes": results["task_hashes"],
    }


def _count_documents(spec: Any, task: Any) -> int:
    available = len(task.eval_docs)
    if available == 0:
        raise EvaluationError(f"task {spec.name!r}: {task.task_name} has no document", fix="check its data files")
    if spec.limit is None:
        return available
    if spec.limit > available:
        raise EvaluationError(
            f"task {spec.name!r}: limit is {spec.limit}, but {task.task_name} has {available} documents",
            fix=f"lower limit to {available}, or set it to null for all",
        )
    return int(spec.limit)


def _first_filter(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["filter"] == rows[0]["filter"]]


def _was_cut(answers: dict[str, dict[str, Any]], row: dict[str, Any]) -> bool:
    """True if the answer ended at max_gen_toks, as the endpoint's finish_reason says."""
    from workbench.evaluation._client import request_key

    context, settings = row["arguments"][0][:2]
    if not isinstance(settings, dict):
        return False
    return answers.get(request_key(context, settings), {}).get("finish_reason") == "length"


def _explain(error: Exception, request: dict[str, Any], refusal: str) -> dict[str, str]:
    import aiohttp

    url = request["model_args"]["base_url"]
    if isinstance(error, aiohttp.ClientResponseError):
        return {
            "error": f"{url} refused a request: HTTP {error.status} {error.message}. {refusal}".strip(),
            "fix": "see the endpoint's own log; answers so far are kept, and the same command continues from them",
        }
    if isinstance(error, (aiohttp.ClientError, ConnectionError, TimeoutError)):
        kind = "did not answer in time" if isinstance(error, TimeoutError) else "stopped answering"
        return {
            "error": f"the endpoint {url} {kind} ({type(error).__name__}: {error})".strip(),
            "fix": "the endpoint's log says why; answers so far are kept, and the same command continues from them",
        }
    return {"error": f"lm-eval failed: {type(error).__name__}: {error}", "fix": "the traceback stands in harness.log"}


class _Refusals(logging.Handler):
    """Keeps what the endpoint last answered in place of a completion; lm-eval's exception does not carry it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        _, found, text = record.getMessage().partition("Response text: ")
        if found:
            self.last = text.removesuffix(". Retrying...")[:500]


def _emit(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _end_with_parent() -> None:
    while os.read(0, 1):  # unbuffered: a lock held here would trouble the interpreter's own end
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
