"""The harness process: `python -m workbench.evaluation._harness request.json` runs lm-eval over one arm's endpoint.

A process of its own, because lm-eval, datasets and transformers cost seconds to import and keep global state, and
because it must be possible to stop it at any moment. Started by `workbench.evaluation.run`; started by hand it does
the same and prints its events, one JSON object a line: `{"progress": [done, total]}`, then `{"result": …}` or
`{"error": …, "fix": …}`. With `--with-parent` it ends itself as soon as its standard input closes, that is, when the
parent is gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import EvaluationError, WorkbenchError, full_disk, write_fix
from workbench.evaluation._requests import request_rows, write_requests
from workbench.evaluation.spec import load_spec
from workbench.records import Transport, write_json


def main(arguments: list[str]) -> int:
    """Run the request named on the command line; returns the exit status (0 done, 1 an error that was reported)."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to the log, not between the events
    if "--with-parent" in arguments:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _emit(events, {"result": evaluate_request(json.loads(Path(arguments[0]).read_text()), events)})
    except WorkbenchError as error:
        _emit(events, {"error": error.message, "fix": error.fix})
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        if (full := full_disk(error)) is not None:
            where = getattr(full, "filename", None) or Path(arguments[0]).parent
            message = f"lm-eval could not write to {where}: the disk is full"
            _emit(events, {"error": message, "fix": write_fix(full)})
            return 1
        message = f"lm-eval failed: {type(error).__name__}: {error}"
        _emit(events, {"error": message, "fix": "the traceback stands in harness.log"})
        return 1
    return 0


def evaluate_request(request: dict[str, Any], events: TextIO) -> dict[str, Any]:
    """Ask everything that `request` (see `workbench.evaluation.run`) names, and write lm-eval's files.

    Returns what lm-eval's files do not say. Raises WorkbenchError.
    """
    import lm_eval
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from workbench.evaluation._client import ChatClient, CompletionsClient
    from workbench.evaluation._plain import plain_command
    from workbench.evaluation.tasks import build_tasks

    built = build_tasks(tuple(load_spec(spec) for spec in request["tasks"]), Path(request["data_dir"]))
    for entry in built:
        for task in entry.tasks:
            _check_shots(entry.spec, task)
    counts = {task.task_name: _count_documents(entry.spec, task) for entry in built for task in entry.tasks}
    limited = {task.task_name for entry in built if entry.spec.limit is not None for task in entry.tasks}

    counter = _load_tokenizer(request["tokenizer"])
    model_args = dict(request["model_args"])
    if request["api"] == "completions" and counter is not None and model_args["add_bos_token"] is None:
        model_args["add_bos_token"] = _tokenizer_adds_bos(counter) and not request["templated"]
    request["model_args"] = model_args
    client = (ChatClient if request["api"] == "chat" else CompletionsClient)(**request["client"], **model_args)
    client.on_progress = lambda done, total: _emit(events, {"progress": [done, total]})
    client.on_failure = lambda count, message: _emit(events, {"failed": [count, message]})
    client.before_first = lambda: _preflight(built, client, counter, request)
    tracker = EvaluationTracker(output_path=request["output_dir"])
    try:
        results = lm_eval.simple_evaluate(
            model=client,
            model_args=model_args,
            tasks=[task for entry in built for task in entry.tasks],
            samples={name: list(range(counts[name])) for name in limited} or None,
            log_samples=True,
            evaluation_tracker=tracker,
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=request["templated"],
            random_seed=request["seed"],
            numpy_random_seed=request["seed"],
            torch_random_seed=request["seed"],
            fewshot_random_seed=DEFAULT_OTHER_SEED,  # lm-eval's own: shots are part of the prompt, and so of the number
        )
    finally:
        client.journal.close()
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name, found in samples.items():
        tracker.save_results_samples(task_name=name, samples=found)
    rows = request_rows(client.asked, client.journal.answers, client.failures, client.thinking)
    plain = ""
    for folder in Path(request["output_dir"]).glob("*/"):  # one; none if lm-eval could not save
        write_requests(folder, rows)
        plain = plain_command(built, client, request, folder, Path(request["out_dir"]) / folder.name)
    return {
        "harness": f"lm-eval {lm_eval.__version__}",
        "leaves": {entry.spec.name: [task.task_name for task in entry.tasks] for entry in built},
        "documents": counts,
        "num_fewshot": {task.task_name: task.get_config("num_fewshot") or 0 for entry in built for task in entry.tasks},
        "truncated": {task: sum(row["finish_reason"] == "length" for row in found) for task, found in rows.items()},
        "failed": {task: sum(bool(row["error"]) for row in found) for task, found in rows.items()},
        "scored_tokens": _by_task(client.scored_tokens),
        "conventions": _conventions(client),
        "transport": dataclasses.asdict(_transport_record(client)),
        "task_hashes": results["task_hashes"],
        "plain_command": plain,
    }


def _preflight(built: list[Any], client: Any, counter: Any, request: dict[str, Any]) -> None:
    """Check the plan, write preflight.json, and raise EvaluationError if the plan is unsound."""
    import lm_eval

    from workbench.evaluation._plan import plan_task
    from workbench.evaluation._probe import server_facts
    from workbench.evaluation.preflight import check_plan

    record = check_plan(
        [plan_task(entry.spec, task, client, counter) for entry in built for task in entry.tasks],
        client=client,
        arm=request["arm"],
        harness=f"lm-eval {lm_eval.__version__}",
        server=server_facts(client.base_url, client.model, client.headers),
        counter=counter,
        templated=request["templated"],
        known=request["known"],
        probe=request["probe"],
    )
    write_json(Path(request["output_dir"]).parent / "preflight.json", record)
    for finding in record.findings:
        print(f"preflight: {finding.level}: {finding.message}", file=sys.stderr)
    if record.errors:
        raise EvaluationError(
            "; ".join(finding.message for finding in record.errors),
            fix="; ".join(dict.fromkeys(finding.fix for finding in record.errors)),
        )


def _transport_record(client: Any) -> Transport:
    keys = {asked.key for asked in client.asked}
    answers = [client.journal.answers[key] for key in keys if key in client.journal.answers]

    def total(name: str) -> int | None:
        counts = [getattr(answer, name) for answer in answers]
        return None if not counts or None in counts else sum(counts)

    record: Transport = client.transport.record(
        requests=len(keys),
        resumed=client.resumed,
        prompt=total("prompt_tokens"),
        completion=total("completion_tokens"),
    )
    return record


def _conventions(client: Any) -> dict[str, str]:
    """What a perplexity depends on, besides the model and the text."""
    window = client.max_length - 1
    return {
        "window": f"{window} tokens; each token is scored once, the first of a full window on one token of context, "
        "the last window's on all that fits before it",
        "first_token": "" if client.tokenizer is None else str(client.tokenizer.decode([client.prefix_token_id])),
        "tokenizer": str(getattr(client.tokenizer, "name_or_path", "")),
        "text": "the task's own detokenised page; words and bytes are those of the original page",
        "words": "split at white space",
    }


def _by_task(tokens: dict[tuple[str, int], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (task, document), count in tokens.items():
        found.setdefault(task, {})[str(document)] = count
    return found


def _load_tokenizer(folder: str | None) -> Any:
    if folder is None:
        return None
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def _tokenizer_adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def _count_documents(spec: Any, task: Any) -> int:
    available = len(task.eval_docs)
    if available == 0:
        raise EvaluationError(f"task {spec.name!r}: {task.task_name} has no document", fix="check its data files")
    if spec.limit is None:
        return available
    distinct = available // spec.repeats
    if spec.limit > distinct:
        raise EvaluationError(
            f"task {spec.name!r}: limit is {spec.limit}, but {task.task_name} has {distinct} documents",
            fix=f"lower limit to {distinct}, or set it to null for all",
        )
    return int(spec.limit * spec.repeats)


def _check_shots(spec: Any, task: Any) -> None:
    """Refuse more shots than the task has documents to take them from (its own document is never one)."""
    wanted = task.get_config("num_fewshot") or 0
    if not wanted:
        return
    available = len(list(task.fewshot_docs()))
    own = task.fewshot_cfg.split is not None and task.fewshot_cfg.split == task.config.test_split
    if wanted > available - own:
        raise EvaluationError(
            f"task {spec.name!r}: num_fewshot is {wanted}, but {task.task_name} has {available} training documents to "
            f"take shots from{', the one that is asked included' if own else ''}",
            fix=f"lower num_fewshot to {max(0, available - own)} or less",
        )


def _emit(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _end_with_parent() -> None:
    while os.read(0, 1):  # unbuffered: a lock held here would trouble the interpreter's own end
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
