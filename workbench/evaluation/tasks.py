"""Task objects for the harness: lm-eval's own configurations, with other documents put in where a spec says so.

    built = build_tasks(specs, data_dir)      # inside the harness process: imports lm_eval and datasets

Nothing of a prompt, filter or metric is written down here: each configuration is read from the installed lm-eval, and
only the data source, the shots, the answer length and the name are replaced. `mmlu_pro` is the one exception in form:
lm-eval has fourteen tasks, one a subject, that differ in one word of the description and in their shots. Here it is
one task whose description and shots follow each document's `category`, so that it is scored, paired and limited as
one. The prompts are the same, character by character (tests/evaluation/test_tasks.py). Its documents are interleaved
over the categories, so that the first n are balanced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation.spec import MINI, TaskSpec
from workbench.records import write_text

# lm-eval's own files of the tasks whose data can be replaced, relative to lm_eval/tasks. (Its index takes 6 s.)
BASE_FILES = {"gsm8k": "gsm8k/gsm8k.yaml", "mmlu_pro": "mmlu_pro/mmlu_pro_biology.yaml"}
SPLITS = {"gsm8k": ("train", "test"), "mmlu_pro": ("validation", "test")}
MINI_DOCUMENTS = 1000
MINI_SHOTS = {"gsm8k": 20, "mmlu_pro": 40}


@dataclass(frozen=True)
class BuiltTask:
    """A spec and the lm-eval tasks it stands for (more than one only for a group)."""

    spec: TaskSpec
    tasks: tuple[Any, ...]


def build_tasks(specs: tuple[TaskSpec, ...], data_dir: Path) -> list[BuiltTask]:
    """lm-eval Task objects for `specs`; generated documents are written to `data_dir`. Raises EvaluationError."""
    return [BuiltTask(spec, tuple(_build(spec, data_dir))) for spec in specs]


def write_mini_documents(task: str, folder: Path) -> dict[str, str]:
    """Write the seeded problems in the layout of `task` as JSON Lines; returns split -> path."""
    from workbench.mini_models.problems import gsm8k_problems, mmlu_pro_problems

    draw: Callable[..., list[dict[str, Any]]] = {"gsm8k": gsm8k_problems, "mmlu_pro": mmlu_pro_problems}[task]
    shots_split, test_split = SPLITS[task]
    paths = {}
    for split, count in ((shots_split, MINI_SHOTS[task]), (test_split, MINI_DOCUMENTS)):
        path = folder / f"{task}_mini_{split}.jsonl"
        write_text(path, "".join(json.dumps(problem) + "\n" for problem in draw(count, split=split)))
        paths[split] = str(path)
    return paths


def interleave_categories(dataset: Any) -> Any:
    """Documents in rounds, one of each category in order of first appearance; the order within a category is kept."""
    places: dict[str, list[int]] = {}
    for index, category in enumerate(dataset["category"]):
        places.setdefault(category, []).append(index)
    rounds = max(map(len, places.values()), default=0)
    return dataset.select([where[i] for i in range(rounds) for where in places.values() if i < len(where)])


def _build(spec: TaskSpec, data_dir: Path) -> list[Any]:
    if spec.task not in BASE_FILES:
        return _registered_tasks(spec)
    from lm_eval.api.task import ConfigurableTask

    config = _own_config(spec, data_dir)
    try:
        if spec.task == "mmlu_pro":
            return [_category_task(config, spec)]
        return [ConfigurableTask(config=config)]
    except EvaluationError:
        raise
    except Exception as error:
        raise _unloadable(spec, config.get("dataset_path"), error) from error


def _own_config(spec: TaskSpec, data_dir: Path) -> dict[str, Any]:
    """lm-eval's configuration of the task, with the spec's settings."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.tasks.__file__).parent / BASE_FILES[spec.task])
    for key in ("tag", "task_alias"):
        config.pop(key, None)
    if spec.task == "mmlu_pro":
        config["description"] = config["description"].replace("about biology.", "about {{category}}.")
        config["process_docs"] = interleave_categories
    data = spec.data if isinstance(spec.data, dict) else None
    if spec.data == MINI:
        data = write_mini_documents(spec.task, data_dir)
    if data is not None:
        missing = [split for split in SPLITS[spec.task] if split not in data]
        if missing:
            raise EvaluationError(
                f"task {spec.name!r}: data has no split {missing[0]!r}",
                fix=f"give {' and '.join(SPLITS[spec.task])} .jsonl files, as lm-eval's {spec.task} has them",
            )
        config.update(dataset_path="json", dataset_name=None, dataset_kwargs={"data_files": dict(data)})
    config["task"] = spec.name
    return _with_settings(config, spec)


def _with_settings(config: dict[str, Any], spec: TaskSpec) -> dict[str, Any]:
    if spec.num_fewshot is not None:
        config["num_fewshot"] = spec.num_fewshot
    if spec.max_gen_toks is not None:
        config["generation_kwargs"] = {**(config.get("generation_kwargs") or {}), "max_gen_toks": spec.max_gen_toks}
    return config


def _registered_tasks(spec: TaskSpec) -> list[Any]:
    """Any other task or group of lm-eval's index, with its own data."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if spec.task not in manager.all_tasks:
        raise EvaluationError(
            f"task {spec.name!r}: lm-eval has no task {spec.task!r}", fix="`lm-eval ls tasks` lists the names it knows"
        )
    if spec.data is not None:
        raise EvaluationError(
            f"task {spec.name!r}: data can be replaced for {', '.join(BASE_FILES)} only", fix="set data to null"
        )
    try:
        tasks = list(manager.load([spec.task])["tasks"].values())
    except Exception as error:
        raise _unloadable(spec, spec.task, error) from error
    for task in tasks:
        if spec.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=spec.num_fewshot)
        if spec.max_gen_toks is not None and task.get_config("generation_kwargs"):
            task.set_config(key="generation_kwargs", value={"max_gen_toks": spec.max_gen_toks}, update=True)
    return tasks


def _category_task(config: dict[str, Any], spec: TaskSpec) -> Any:
    from lm_eval.api.samplers import FirstNSampler
    from lm_eval.api.task import ConfigurableTask

    class CategoryTask(ConfigurableTask):  # type: ignore[misc]
        """A task whose shots are those of the document's own category."""

        def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, **kwargs: Any) -> Any:
            shots = [shot for shot in self._all_shots if shot["category"] == doc["category"]]
            if len(shots) < num_fewshot:
                raise EvaluationError(
                    f"task {spec.name!r}: category {doc['category']!r} has {len(shots)} documents to take shots from, "
                    f"{num_fewshot} are needed",
                    fix="lower num_fewshot, or complete the validation file",
                )
            self.sampler = FirstNSampler(shots)
            return super().fewshot_context(doc, num_fewshot, **kwargs)

        @property
        def _all_shots(self) -> list[dict[str, Any]]:
            if self._fewshot_docs is None:
                self._fewshot_docs: list[dict[str, Any]] | None = list(self.fewshot_docs())
            return self._fewshot_docs or []

    return CategoryTask(config=config)


def _unloadable(spec: TaskSpec, source: Any, error: Exception) -> EvaluationError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return EvaluationError(
        f"task {spec.name!r}: its documents could not be loaded from {source!r} ({reason})",
        fix="check the network and the Hugging Face cache, or set `data` to local .jsonl files",
    )
