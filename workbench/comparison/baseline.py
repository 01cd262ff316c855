"""A committed baseline: what every item of an accepted run was, in a file small enough for a repository.

    write_baseline(path, make_baseline(run_dir, ["source", "nvfp4"]))       # explicit: workbench gate --update-baseline
    comparison = compare_with_baseline(run_dir, read_baseline(path))        # later runs, paired item by item

One bit an item, so that a later run is paired with it as two arms are: a baseline that holds scores alone would be
compared unpaired, and see losses half as well. It never updates itself: a gate whose baseline follows the runs passes
any number of small losses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.comparison.figures import compare_right
from workbench.comparison.samples import Item, Key, read_evaluation, read_items
from workbench.errors import ComparisonError
from workbench.records import Comparison, TaskComparison, TaskScore, read_json, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineTask:
    """One (task, filter, metric) of one arm. right: a bit an item in the order of (lm-eval task, doc_id), most
    significant first, as hexadecimal. items_sha256: over these keys with their documents, prompts, targets, settings.
    """

    task: str
    filter: str
    metric: str
    primary: bool
    n: int
    right: str
    items_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """run: the accepted run's folder name. harness: what scored it. arms: arm -> its tasks."""

    run: str
    harness: str
    arms: dict[str, tuple[BaselineTask, ...]]


def make_baseline(run_dir: Path, arms: list[str]) -> Baseline:
    """The answers of a run's arms. Raises ComparisonError for an arm that was not evaluated."""
    if not arms:
        raise ComparisonError("no arm was named for the baseline", fix="name the baseline and the gated arms")
    evaluations = {arm: read_evaluation(run_dir, arm) for arm in arms}
    return Baseline(
        run=run_dir.resolve().name,
        harness=next(iter(evaluations.values())).harness,
        arms={
            arm: tuple(_task(score, read_items(run_dir, score)) for score in evaluation.scores)
            for arm, evaluation in evaluations.items()
        },
    )


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write the file atomically. Raises OutputError."""
    write_json(path, baseline)


def read_baseline(path: Path) -> Baseline:
    """Raises ComparisonError for a file that is none, or holds other than one bit an item, naming arm and task."""
    if not path.is_file():
        raise ComparisonError(f"there is no baseline {path}", fix="make it from an accepted run: --update-baseline")
    try:
        baseline = read_json(Baseline, path)
        for arm, tasks in baseline.arms.items():
            for task in tasks:
                _check_bits(arm, task)
            if len({(task.task, task.filter, task.metric) for task in tasks}) < len(tasks):
                raise ValueError(f"arm {arm!r} holds one (task, filter, metric) twice")
        return baseline
    except (ValueError, TypeError, KeyError) as error:
        raise ComparisonError(f"{path} is no baseline: {error}", fix="restore it from version control") from error


def compare_with_baseline(run_dir: Path, baseline: Baseline) -> Comparison:
    """Pair every arm of the run that the baseline has with itself, then and now; others are noted.

    The record's baseline is called "committed". Raises ComparisonError where tasks, documents, prompts, targets or
    settings are not those of the baseline: then only a new baseline helps.
    """
    present = {path.parent.name for path in run_dir.glob("eval/*/scores.json")}
    tasks: list[TaskComparison] = []
    notes = [f"arm {arm!r} of the baseline is not in this run" for arm in baseline.arms if arm not in present]
    notes += [f"arm {arm!r} is not in the baseline" for arm in sorted(present - set(baseline.arms))]
    for arm, stored in baseline.arms.items():
        if arm not in present:
            continue
        evaluation = read_evaluation(run_dir, arm)
        if evaluation.harness != baseline.harness:
            raise _differs(f"it was scored by {baseline.harness}, this run by {evaluation.harness}", baseline)
        scores = {(score.task, score.filter, score.metric): score for score in evaluation.scores}
        for task in stored:
            score = scores.get((task.task, task.filter, task.metric))
            where = f"task {task.task!r}, filter {task.filter!r}, metric {task.metric!r}"
            if score is None:
                raise _differs(f"arm {arm!r} has no {where} any more", baseline)
            items = read_items(run_dir, score)
            if len(items) != task.n or _fingerprint(items) != task.items_sha256:
                raise _differs(
                    f"arm {arm!r}, {where}: its {task.n} items are not this run's "
                    f"{len(items)} (documents, prompts, targets or settings differ)",
                    baseline,
                )
            tasks.append(compare_right("committed", _bits(task), score, items))
    return Comparison(baseline="committed", noise_arm="", tasks=tuple(tasks), notes=tuple(notes))


def _differs(what: str, baseline: Baseline) -> ComparisonError:
    return ComparisonError(
        f"the baseline of run {baseline.run} cannot be compared: {what}",
        fix="undo the change, or accept this run as the new baseline: --update-baseline",
    )


def _task(score: TaskScore, items: Mapping[Key, Item]) -> BaselineTask:
    bits = "".join("1" if items[key].correct else "0" for key in sorted(items))
    width = -(-len(bits) // 4)
    return BaselineTask(
        task=score.task,
        filter=score.filter,
        metric=score.metric,
        primary=score.primary,
        n=len(items),
        right=f"{int(bits, 2) << (4 * width - len(bits)):0{width}x}",
        items_sha256=_fingerprint(items),
    )


def _check_bits(arm: str, task: BaselineTask) -> None:
    """Raise ValueError unless `right` is n bits, filled up with zeros to whole digits."""
    digits = -(-task.n // 4)
    sound = task.n > 0 and len(task.right) == digits and re.fullmatch("[0-9a-f]+", task.right)
    if not sound or int(task.right, 16) & ((1 << (4 * digits - task.n)) - 1):
        raise ValueError(
            f"arm {arm!r}, task {task.task!r}: `right` is no {task.n} bits as {digits} hexadecimal digits "
            f"({len(task.right)} characters, {task.right[:20]!r} …)"
        )


def _bits(task: BaselineTask) -> list[bool]:
    return [bit == "1" for bit in f"{int(task.right, 16):0{4 * len(task.right)}b}"[: task.n]]


def _fingerprint(items: Mapping[Key, Item]) -> str:
    digest = hashlib.sha256()
    for key in sorted(items):
        item = items[key]
        parts = (*map(str, key), item.document, item.prompt, item.target_hash, item.settings)
        digest.update("\x1f".join(parts).encode(errors="surrogatepass") + b"\x1e")
    return digest.hexdigest()
