"""Task objects for the harness: lm-eval's own configurations, with other documents put in where a spec says so.

    built = build_tasks(specs, data_dir)      # inside the harness process: imports lm_eval and datasets

Nothing of a prompt, filter or metric is written down here: each configuration is read from the installed lm-eval, and
only the data source, the shots, the answer length, the sampling and the name are replaced. `mmlu_pro` and `mmlu` are
the exceptions in form: lm-eval has a task for each subject, which differ in the description and in their shots. Here
each is one task whose description and shots follow the document's subject, so that it is scored, paired and limited as
one. The prompts are the same, character by character (tests/evaluation/test_tasks.py). Their documents are interleaved
over the subjects, so that the first n are balanced.

A task with `repeats` has each document several times in a row, marked `repeat_of` (its place) and `repeat`: every
answer is a row of its own, paired and shown like any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError, OutputError, WorkbenchError, full_disk, write_fix
from workbench.evaluation._mini import write_mini_documents
from workbench.evaluation.spec import MINI, TaskSpec

SHUFFLE_SEED = 0
"""lm-eval's default random seed: GPQA's options are shuffled as its plain command line shuffles them."""


@dataclass(frozen=True)
class Base:
    """A task whose documents can be replaced. file: lm-eval's configuration, relative to lm_eval/tasks (its index takes
    6 s). splits: those that local data must give. by: the field that description and shots follow; description:
    (what lm-eval's file of one subject says, what is said here). config: the hub's data set configuration, if another.
    shuffled: its documents are shuffled with the global random state.
    """

    file: str
    splits: tuple[str, ...]
    by: str = ""
    description: tuple[str, str] = ("", "")
    config: str = ""
    shuffled: bool = False


BASES = {
    "gsm8k": Base("gsm8k/gsm8k.yaml", ("train", "test")),
    "gsm8k_platinum": Base("gsm8k_platinum/gsm8k-platinum.yaml", ("test",)),
    "mmlu_pro": Base(
        "mmlu_pro/mmlu_pro_biology.yaml",
        ("validation", "test"),
        by="category",
        description=("about biology.", "about {{category}}."),
    ),
    "mmlu": Base(
        "mmlu/default/mmlu_virology.yaml",
        ("dev", "test"),
        by="subject",
        description=("about virology.", "about {{subject.replace('_', ' ')}}."),
        config="all",
    ),
    "gpqa_diamond": Base("gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml", ("train",), shuffled=True),
    "aime25": Base("aime/aime25.yaml", ("test",)),
    "wikitext": Base("wikitext/wikitext.yaml", ("test",)),
}


@dataclass(frozen=True)
class BuiltTask:
    """A spec and the lm-eval tasks it stands for (more than one only for a group)."""

    spec: TaskSpec
    tasks: tuple[Any, ...]


def build_tasks(specs: tuple[TaskSpec, ...], data_dir: Path) -> list[BuiltTask]:
    """lm-eval Task objects for `specs`; generated documents are written to `data_dir`. Raises EvaluationError."""
    return [BuiltTask(spec, tuple(_build(spec, data_dir))) for spec in specs]


def base_file(task: str) -> Path:
    """lm-eval's own configuration file of a task of `BASES`."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / BASES[task].file


def describe(task: str, subject: str) -> str:
    """What lm-eval's task of one subject says before its shots."""
    from lm_eval.tasks._yaml_loader import load_yaml

    description = str(load_yaml(base_file(task))["description"])
    return description.replace(BASES[task].description[0], f"about {subject.replace('_', ' ')}.")


def _build(spec: TaskSpec, data_dir: Path) -> list[Any]:
    if spec.task not in BASES and not spec.task.endswith((".yaml", ".yml")):
        return _registered_tasks(spec)
    config = _own_config(spec, data_dir)
    try:
        return [_task(config, spec)]
    except WorkbenchError:
        raise
    except Exception as error:
        raise _unloadable(spec, config.get("dataset_path"), error) from error


def _own_config(spec: TaskSpec, data_dir: Path) -> dict[str, Any]:
    """lm-eval's configuration of the task, or that of a file, with the spec's settings."""
    from lm_eval.tasks._yaml_loader import load_yaml

    base = BASES.get(spec.task)
    config = dict(load_yaml(base_file(spec.task) if base else Path(spec.task)))
    for key in ("tag", "task_alias"):
        config.pop(key, None)
    if base is not None:
        _adapt(config, base, spec, data_dir)
    elif spec.data is not None:
        raise EvaluationError(
            f"task {spec.name!r}: a task file names its own data", fix="set data to null, or edit dataset_kwargs there"
        )
    config["task"] = spec.name
    if spec.num_fewshot is not None:
        config["num_fewshot"] = spec.num_fewshot
    if config.get("output_type") == "generate_until":
        config["generation_kwargs"] = {**(config.get("generation_kwargs") or {}), **_generation(spec)}
    return config


def _adapt(config: dict[str, Any], base: Base, spec: TaskSpec, data_dir: Path) -> None:
    """Put in one subject for all, the shuffling's seed, and local data."""
    if base.by:
        config["description"] = config["description"].replace(*base.description)
        config["process_docs"] = _interleaver(base.by)
    if base.config:
        config["dataset_name"] = base.config
    if base.shuffled:
        config["process_docs"] = _seeded(config["process_docs"])
    data = spec.data if isinstance(spec.data, dict) else None
    if spec.data == MINI:
        data = write_mini_documents(spec.task, data_dir)
    if data is None:
        return
    missing = [split for split in base.splits if split not in data]
    if missing:
        raise EvaluationError(
            f"task {spec.name!r}: data has no split {missing[0]!r}",
            fix=f"give {' and '.join(base.splits)} .jsonl files, as lm-eval's {spec.task} has them",
        )
    config.update(dataset_path="json", dataset_name=None, dataset_kwargs={"data_files": dict(data)})
    for key in ("training_split", "validation_split", "fewshot_split"):
        if config.get(key) not in (None, *data):
            config.pop(key)


def _generation(spec: TaskSpec) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if spec.max_gen_toks is not None:
        settings["max_gen_toks"] = spec.max_gen_toks
    if spec.temperature is not None:
        settings.update(temperature=spec.temperature, do_sample=spec.temperature > 0)
    if spec.top_p is not None:
        settings["top_p"] = spec.top_p
    return settings


def _registered_tasks(spec: TaskSpec) -> list[Any]:
    """Any other task or group of lm-eval's index, with its own data."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if spec.task not in manager.all_tasks:
        raise EvaluationError(
            f"task {spec.name!r}: lm-eval has no task {spec.task!r}", fix="`lm-eval ls tasks` lists the names it knows"
        )
    if spec.data is not None or spec.repeats > 1:
        raise EvaluationError(
            f"task {spec.name!r}: data and repeats can be set for {', '.join(BASES)} only",
            fix="set data to null and repeats to 1, or give a task file",
        )
    try:
        tasks = list(manager.load([spec.task])["tasks"].values())
    except Exception as error:
        raise _unloadable(spec, spec.task, error) from error
    for task in tasks:
        if spec.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=spec.num_fewshot)
        if _generation(spec) and task.get_config("generation_kwargs"):
            task.set_config(key="generation_kwargs", value=_generation(spec), update=True)
    return tasks


def _task(config: dict[str, Any], spec: TaskSpec) -> Any:
    from lm_eval.api.samplers import FirstNSampler
    from lm_eval.api.task import ConfigurableTask

    by = BASES[spec.task].by if spec.task in BASES else ""

    class Task(ConfigurableTask):
        """A task whose shots are those of the document's own subject, and whose documents may be repeated."""

        _last_context: Any = None

        @property
        def eval_docs(self) -> Any:
            documents, times = super().eval_docs, spec.repeats
            if times == 1:
                return documents
            problems = [i for i in range(len(documents)) for _ in range(times)]
            documents = documents.select(problems).add_column("repeat_of", problems)
            return documents.add_column("repeat", [place % times for place in range(len(problems))])

        def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, **kwargs: Any) -> Any:
            if by:
                shots = [shot for shot in self._all_shots if shot[by] == doc[by]]
                if len(shots) < num_fewshot:
                    raise EvaluationError(
                        f"task {spec.name!r}: {by} {doc[by]!r} has {len(shots)} documents to take shots from, "
                        f"{num_fewshot} are needed",
                        fix="lower num_fewshot, or complete the file of shots",
                    )
                self.sampler = FirstNSampler(shots)
            if doc.get("repeat"):  # the prompt of its first time: shots are drawn anew for every document
                return self._last_context
            self._last_context = super().fewshot_context(doc, num_fewshot, **kwargs)
            return self._last_context

        @property
        def _all_shots(self) -> list[dict[str, Any]]:
            if self._fewshot_docs is None:
                self._fewshot_docs: list[dict[str, Any]] | None = list(self.fewshot_docs())
            return self._fewshot_docs or []

    return Task(config=config)


def _interleaver(field: str) -> Callable[[Any], Any]:
    def interleave(dataset: Any) -> Any:
        """Documents in rounds, one of each subject in order of first appearance; a subject's own order is kept."""
        places: dict[str, list[int]] = {}
        for index, subject in enumerate(dataset[field]):
            places.setdefault(subject, []).append(index)
        rounds = max(map(len, places.values()), default=0)
        return dataset.select([where[i] for i in range(rounds) for where in places.values() if i < len(where)])

    return interleave


def _seeded(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def process_seeded(dataset: Any) -> Any:
        """The same shuffle in every process and at every call: it is part of the prompt."""
        state = random.getstate()
        random.seed(SHUFFLE_SEED)
        try:
            return process(dataset)
        finally:
            random.setstate(state)

    return process_seeded


def _unloadable(spec: TaskSpec, source: Any, error: Exception) -> WorkbenchError:
    if (full := full_disk(error)) is not None:
        import datasets

        where = getattr(full, "filename", None) or datasets.config.HF_DATASETS_CACHE
        return OutputError(
            f"task {spec.name!r}: its documents could not be written to {where}: the disk is full", fix=write_fix(full)
        )
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return EvaluationError(
        f"task {spec.name!r}: its documents could not be loaded from {source!r} ({reason})",
        fix="check the network and the Hugging Face cache, or set `data` to local .jsonl files",
    )
