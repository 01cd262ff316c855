"""The plain `lm_eval` command line that asks the same: lm-eval's own client, prompts, filters and metrics.

Whoever doubts this adapter runs it and gets the same answers (tests/evaluation/test_plain.py). Tasks whose documents
come from files are written beside the results as task files of lm-eval's own format, one a subject where lm-eval has
one a subject, holding exactly the planned documents.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from workbench.evaluation.spec import TaskSpec
from workbench.evaluation.tasks import BASES, BuiltTask, base_file, describe
from workbench.records import write_text

OWN_NAMES = {"gpqa_diamond": "gpqa_diamond_cot_zeroshot"}


def plain_command(built: list[BuiltTask], client: Any, request: dict[str, Any], folder: Path, final: Path) -> str:
    """One command a task, joined by newlines. folder: where task files are written now; final: where they will lie.

    What has no plain equivalent is said in a line that begins with "#".
    """
    return "\n".join(_command(entry, client, request, folder, final) for entry in built)


def _command(entry: BuiltTask, client: Any, request: dict[str, Any], folder: Path, final: Path) -> str:
    spec = entry.spec
    names, include = _task_names(entry, folder, final)
    args = request["model_args"]
    model_args = {
        "model": args["model"],
        "base_url": args["base_url"],
        "num_concurrent": max(2, args["num_concurrent"]),  # with 1, lm-eval takes another path, with another stop list
        "max_retries": 5,
        "timeout": args["timeout"],
        "max_length": args["max_length"],
        "seed": args["seed"],
    }
    if client.api == "completions":
        keys = ("tokenizer_backend", "tokenizer", "tokenized_requests", "add_bos_token")
        model_args.update({key: args[key] for key in keys if key in args})
    elif client.thinking:
        model_args["think_end_token"] = client.thinking
    words = ["lm_eval", "run", "--model"]
    words += ["local-chat-completions" if client.api == "chat" else "local-completions"]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    words += ["--tasks", ",".join(names)]
    if include:
        words += ["--include_path", str(final / include)]
    if spec.num_fewshot is not None:
        words += ["--num_fewshot", str(spec.num_fewshot)]
    if spec.limit is not None and not (include and _by(spec)):
        words += ["--limit", str(spec.limit)]
    generation = _generation(spec)
    if generation:
        words += ["--gen_kwargs", ",".join(f"{key}={value}" for key, value in generation.items())]
    if request["templated"]:
        words += ["--apply_chat_template"]
    words += ["--seed", f"{request['seed']},{request['seed']},{request['seed']},1234"]
    words += ["--log_samples", "--output_path", "lm_eval_output"]
    return "\n".join([*_differences(spec, client, include), shlex.join(words)])


def _differences(spec: TaskSpec, client: Any, include: str) -> list[str]:
    notes = []
    if _by(spec) and spec.limit is not None and not include:
        notes.append("# --limit counts documents of every subject; here it counts documents over all subjects")
    if spec.repeats > 1:
        notes.append(f"# asks each document once; here it is asked with {spec.repeats} seeds")
    if client.thinking:
        notes.append("# sends the stop list, which may end a think block; here it is applied after the block")
    return notes


def _by(spec: TaskSpec) -> str:
    return BASES[spec.task].by if spec.task in BASES else ""


def _generation(spec: TaskSpec) -> dict[str, Any]:
    pairs = (("max_gen_toks", spec.max_gen_toks), ("temperature", spec.temperature), ("top_p", spec.top_p))
    found = {key: value for key, value in pairs if value is not None}
    if spec.temperature:
        found["do_sample"] = True
    return found


def _task_names(entry: BuiltTask, folder: Path, final: Path) -> tuple[list[str], str]:
    """(tasks to name, folder of task files relative to the results, "" for lm-eval's own index)."""
    spec = entry.spec
    if spec.task.endswith((".yaml", ".yml")):
        return [str(Path(spec.task).resolve())], ""
    if spec.data is None:
        return [OWN_NAMES.get(spec.task, spec.task)], ""
    base, (task,) = BASES[spec.task], entry.tasks
    inside = f"plain/{spec.name}"
    where = folder / inside
    if not base.by:
        files = task.config.dataset_kwargs["data_files"]
        _write_task(where, spec.name, base_file(spec.task), {"dataset_kwargs": {"data_files": files}})
        return [spec.name], inside
    documents = list(task.eval_docs)[: spec.limit]
    shots = task._all_shots
    names = []
    for subject in dict.fromkeys(document[base.by] for document in documents):
        name = f"{spec.name}_{subject.replace(' ', '_')}"
        data = {base.splits[0]: shots, base.splits[1]: documents}
        files = {}
        for split, content in data.items():
            path = where / f"{name}_{split}.jsonl"
            write_text(path, "".join(json.dumps(d) + "\n" for d in content if d[base.by] == subject))
            files[split] = str(final / inside / path.name)  # lm-eval takes them relative to where it is started
        changes = {
            "description": describe(spec.task, subject),
            "process_docs": None,
            "task_alias": name,
            "dataset_kwargs": {"data_files": files},
        }
        _write_task(where, name, base_file(spec.task), changes)
        names.append(name)
    return names, inside


def _write_task(where: Path, name: str, include: Path, changes: dict[str, Any]) -> None:
    config = {"include": str(include), "task": name, "dataset_path": "json", "dataset_name": None, **changes}
    write_text(where / f"{name}.yaml", json.dumps(config, indent=2) + "\n")  # YAML holds JSON
