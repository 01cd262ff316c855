"""What is asked of an arm: one `TaskSpec` per task, fixed before the first request is sent.

    mini = {"name": "gsm8k_mini", "task": "gsm8k", "data": "mini", "limit": 200, "primary_filter": "strict-match"}
    spec = task_spec(mini)
    spec = task_spec({"name": "gsm8k", "data": {"train": "train.jsonl", "test": "test.jsonl"}, ...})

`task` names the lm-eval task whose prompts, filters and metrics are used; `data` only says where the documents come
from. That is why a number from the shipped problems and one from the hub's differ in the documents alone. A limit
always means the first n documents (MMLU-Pro's are first interleaved over the categories), so a smaller run is a
subset of a larger one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, EvaluationError

MINI = "mini"
"""Value of `data` for the seeded problems of `workbench.mini_models.problems`."""

PERPLEXITY_METRICS = ("bits_per_byte", "byte_perplexity", "word_perplexity")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """One task of an evaluation.

    name: how files and the report call it. task: an lm-eval task or group (`gsm8k`, `mmlu_pro`, or any registered
    name), or the path of a task file (.yaml) in lm-eval's own format. num_fewshot: None keeps lm-eval's own. limit:
    the first n documents (of every subtask, if `task` is a group); None = all. primary_filter, metric: the line that
    is gated, as lm-eval names them; the metric must be 0 or 1 for each document, or one of `PERPLEXITY_METRICS`.
    max_gen_toks: tokens an answer may have; None keeps lm-eval's own (256 unless the task says otherwise). data: None =
    the hub's data set as lm-eval names it; "mini" = seeded problems; {split: path of a .jsonl file} = local files in
    the hub's layout (`workbench.evaluation.tasks.BASES` names the splits). chance: the score of a guesser. repeats:
    answers drawn for each document, each with its own seed (avg@k; the score's interval then counts problems, not
    answers); it needs a temperature. temperature, top_p: None keeps the task's own (greedy).
    """

    name: str
    task: str
    primary_filter: str
    metric: str = "exact_match"
    num_fewshot: int | None = None
    limit: int | None = None
    max_gen_toks: int | None = None
    data: str | dict[str, str] | None = None
    chance: float = 0.0
    repeats: int = 1
    temperature: float | None = None
    top_p: float | None = None

    @property
    def perplexity(self) -> bool:
        """True if documents are not right or wrong, but more or less likely."""
        return self.metric in PERPLEXITY_METRICS

    @property
    def offline(self) -> bool:
        """True if the documents need no network."""
        return self.data is not None


def task_spec(settings: Mapping[str, Any]) -> TaskSpec:
    """Build a TaskSpec from a configuration node. Raises ConfigError for an unknown, missing or impossible setting."""
    known = [f.name for f in fields(TaskSpec)]
    name = settings.get("name", "?")
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"eval task {name!r}: unknown setting {key!r}", fix=f"{hint}known settings: {', '.join(known)}"
            )
    for key in ("name", "task", "primary_filter"):
        if not settings.get(key):
            raise ConfigError(
                f"eval task {name!r}: setting {key!r} is missing", fix=f"set {key} in conf/eval/{name}.yaml"
            )
    values = dict(settings)
    if isinstance(values.get("data"), Mapping):
        values["data"] = {str(split): str(path) for split, path in values["data"].items()}
    spec = TaskSpec(**values)
    _check_values(spec)
    return spec


def check_tasks(tasks: tuple[TaskSpec, ...]) -> None:
    """Refuse what cannot be run before anything is started. Raises EvaluationError naming the task or file."""
    if not tasks:
        raise EvaluationError("no task to evaluate", fix="choose at least one, e.g. eval=[gsm8k_mini]")
    names = [spec.name for spec in tasks]
    for name in names:
        if names.count(name) > 1:
            raise EvaluationError(f"task {name!r} is listed {names.count(name)} times", fix="list every task once")
    for spec in tasks:
        if spec.task.endswith((".yaml", ".yml")) and not Path(spec.task).is_file():
            raise EvaluationError(
                f"task {spec.name!r}: task file {spec.task} does not exist",
                fix="correct its path, or name lm-eval's task",
            )
        if isinstance(spec.data, dict):
            for split, path in spec.data.items():
                _check_jsonl(spec, split, Path(path))


def load_spec(payload: Mapping[str, Any]) -> TaskSpec:
    """The inverse of `dump_spec`."""
    return TaskSpec(**payload)


def dump_spec(spec: TaskSpec) -> dict[str, Any]:
    """A TaskSpec as plain JSON values."""
    return asdict(spec)


def _check_values(spec: TaskSpec) -> None:
    for key in ("task", "metric", "primary_filter"):
        value = getattr(spec, key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"eval task {spec.name!r}: {key}={value!r}", fix="a name, as lm-eval has it")
    if spec.data is not None and not isinstance(spec.data, (str, dict)):
        raise ConfigError(
            f"eval task {spec.name!r}: data={spec.data!r}",
            fix=f"use null (the hub), {MINI!r}, or a mapping of splits to .jsonl files",
        )
    for key, least in (("limit", 1), ("num_fewshot", 0), ("max_gen_toks", 1), ("repeats", 1)):
        value = getattr(spec, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(
                f"eval task {spec.name!r}: {key}={value!r}", fix=f"a whole number of at least {least}, or null"
            )
    if isinstance(spec.data, str) and spec.data != MINI:
        raise ConfigError(
            f"eval task {spec.name!r}: data={spec.data!r} is not known",
            fix=f"use null (the hub), {MINI!r}, or a mapping of splits to .jsonl files",
        )
    for key, value, most in (("temperature", spec.temperature, 10.0), ("top_p", spec.top_p, 1.0)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value <= most):
            raise ConfigError(f"eval task {spec.name!r}: {key}={value!r}", fix=f"a number from 0 to {most:g}, or null")
    if spec.repeats > 1 and not spec.temperature:
        raise ConfigError(
            f"eval task {spec.name!r}: repeats={spec.repeats} at temperature 0 draws the same answer again",
            fix="set temperature (the model card names one), or repeats=1",
        )
    if isinstance(spec.chance, bool) or not isinstance(spec.chance, (int, float)) or not 0.0 <= spec.chance < 1.0:
        raise ConfigError(f"eval task {spec.name!r}: chance={spec.chance!r}", fix="a proportion from 0 to below 1")


def _check_jsonl(spec: TaskSpec, split: str, path: Path) -> None:
    fix = f"correct data.{split} of task {spec.name!r}"
    if not path.is_file():
        raise EvaluationError(f"task {spec.name!r}: data file {path} (split {split!r}) does not exist", fix=fix)
    with path.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    if not first:
        raise EvaluationError(f"task {spec.name!r}: data file {path} (split {split!r}) holds no document", fix=fix)
    try:
        document = json.loads(first)
    except ValueError as error:
        raise EvaluationError(f"task {spec.name!r}: {path} is not JSON Lines: {error}", fix=fix) from error
    if not isinstance(document, dict):
        raise EvaluationError(f"task {spec.name!r}: {path} holds {type(document).__name__}, expected objects", fix=fix)
