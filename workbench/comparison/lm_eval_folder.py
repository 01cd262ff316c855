"""Anyone's lm-eval output folder as an evaluated arm: results_*.json and samples_*.jsonl, nothing else is needed.

    arm = read_lm_eval_folder(Path("out/meta-llama__Llama-3.1-8B"), name="bf16")

What counts are the sample files (`lm_eval … --log_samples`); of several for one task the newest is taken. The result
files add what they have: the harness version, shots, which subtasks make a group, which metric is better when lower.
A missing git_hash, task_hashes, groups or a missing result file stops nothing; one that gives another accuracy or
another number of documents than the samples do is refused. A group becomes one row of all its subtasks' items; of it,
and of a task outside groups, the first filter and metric are primary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.comparison.leaf import Column, Leaf, check_results, read_leaf
from workbench.comparison.pair import EvaluatedArm
from workbench.comparison.samples import finite_number, task_of
from workbench.errors import ComparisonError
from workbench.records import Evaluation, TaskScore
from workbench.statistics import wilson_interval

UNKNOWN_HARNESS = "lm-eval of an unknown version"


def holds_lm_eval_output(folder: Path) -> bool:
    """Whether the folder, or a folder directly in it, has lm-eval's files."""
    return bool(_sample_folders(folder) or list(folder.glob("results_*.json")))


def read_lm_eval_folder(
    folder: Path, name: str, groups_of_baseline: Mapping[str, tuple[str, ...]] | None = None
) -> EvaluatedArm:
    """Read one model's output. folder: lm-eval's --output_path, or the model's folder in it. groups_of_baseline: what
    the baseline pools is pooled here as well, whatever the result files tell.

    Raises ComparisonError for a folder of several models, without sample files, or with damaged ones.
    """
    place = _single_folder(folder)
    results = _results(place)
    merged = _merge(content for _, content in results)
    leaves = {
        leaf: read_leaf(path, _mapping(merged, "higher_is_better", leaf))
        for leaf, path in _newest_samples(place).items()
    }
    for leaf, found in leaves.items():
        stamp = _time(found.path)  # a result file older than the samples speaks of others
        told = _merge(content for time, content in results if time >= stamp or not stamp[:1].isdigit())
        check_results(found, _mapping(told, "results", leaf), _mapping(told, "n-samples", leaf))
    groups = _groups(merged, set(leaves)) | _known(groups_of_baseline or {}, set(leaves))
    unusable = {(leaf, *key): why for leaf, found in leaves.items() for key, why in found.unusable.items()}
    for group, members in groups.items():
        for key in {key for member in members for key in leaves[member].unusable}:
            unusable.setdefault(
                (group, *key),
                "; ".join(
                    f"{member}: {leaves[member].unusable[key]}" for member in members if key in leaves[member].unusable
                ),
            )
    # what cannot be pooled is judged by its subtasks
    groups = {group: members for group, members in groups.items() if _pooled([leaves[m].columns for m in members])}
    grouped = {leaf for members in groups.values() for leaf in members}
    notes = [
        f"{name}: {leaf}: {key[1]} is not compared ({why})"
        for leaf, found in leaves.items()
        for key, why in found.unusable.items()
    ]
    notes += [f"{name}: {leaf}: {what}" for leaf, found in leaves.items() for what in _empty_answers(found)]
    if len(results) > 1:
        notes.append(f"{name}: {len(results)} result files; of each task the newest samples are used")
    scores: list[TaskScore] = []
    graded: list[TaskScore] = []
    outer = {group for group, members in groups.items() if not any(_within(members, m) for m in groups.values())}
    for task, members in [*groups.items(), *((leaf, (leaf,)) for leaf in leaves)]:
        primary = task in outer if task in groups else task not in grouped
        for (filter_name, metric), columns in _pooled([leaves[leaf].columns for leaf in members]).items():
            binary = all(column.binary for column in columns)
            n, total = sum(column.n for column in columns), sum(column.total for column in columns)
            low, high = wilson_interval(round(total), n) if binary else (math.nan, math.nan)
            score = TaskScore(
                arm=name,
                task=task,
                filter=filter_name,
                metric=metric,
                n=n,
                value=total / n,
                low=low,
                high=high,
                num_fewshot=_shots(merged, members[0]),
                samples=";".join(leaves[leaf].path.name for leaf in members),
                primary=primary and binary,
            )
            primary = primary and not binary  # the first that is right or wrong, and no other
            (scores if binary else graded).append(score)
    harness = merged.get("lm_eval_version")
    return EvaluatedArm(
        evaluation=Evaluation(
            arm=name,
            scores=tuple(scores),
            command=(),
            harness=f"lm-eval {harness}" if isinstance(harness, str) else UNKNOWN_HARNESS,
            request_order="forward",
            concurrency=0,
            seconds=_seconds(merged),
        ),
        root=place,
        graded=tuple(graded),
        notes=tuple(notes),
        unusable=unusable,
        imported=True,
    )


def _empty_answers(leaf: Leaf) -> Iterator[str]:
    """What to say of answers without text: a note, since nobody tells here why they are empty."""
    for place in leaf.columns:
        if count := leaf.empty[place[0]]:
            n, right = leaf.documents[place[0]], leaf.empty_right[place]
            marked = f", though {right} of them are marked right" if right else ""
            which = f"all {n}" if count == n else f"{count} of {n}"
            yield f"{which} answers are empty or null ({place[0]}, {place[1]}){marked}"


def _single_folder(folder: Path) -> Path:
    found = _sample_folders(folder)
    if len(found) > 1:
        raise ComparisonError(
            f"{folder} holds the output of {len(found)} models: {', '.join(sorted(path.name for path in found))}",
            fix="give one model's folder",
        )
    if not found:
        raise ComparisonError(
            f"{folder} has no samples_*.jsonl: without every item's answer, nothing can be paired",
            fix="run lm_eval again with --log_samples and --output_path",
        )
    return found[0]


def _sample_folders(folder: Path) -> list[Path]:
    if any(folder.glob("samples_*.jsonl")):
        return [folder]
    return sorted({path.parent for path in folder.glob("*/samples_*.jsonl")})


def _newest_samples(folder: Path) -> dict[str, Path]:
    """leaf task -> its newest sample file. The time in a name sorts as text."""
    return {task_of(path): path for path in sorted(folder.glob("samples_*.jsonl"), key=lambda p: (_time(p), p.name))}


def _time(path: Path) -> str:
    return path.stem.rpartition("_")[2]


def _results(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """(time, content) of the result files, oldest first."""
    found = []
    for path in sorted(folder.glob("results_*.json"), key=_time):
        try:
            if not path.is_file():
                raise ValueError("no regular file")
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ComparisonError(
                f"{path} is not JSON: {error}", fix="delete it: only the sample files are needed"
            ) from error
        if isinstance(content, dict):
            found.append((_time(path), content))
    return found


def _merge(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One mapping of all result files; what speaks of a task comes from the newest that has it."""
    merged: dict[str, Any] = {}
    for content in results:
        for key, value in content.items():
            old = merged.get(key)
            merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _groups(merged: dict[str, Any], leaves: set[str]) -> dict[str, tuple[str, ...]]:
    """group -> its leaf tasks that have samples, for groups of at least two; groups in groups are followed."""
    members = merged.get("group_subtasks")
    if not isinstance(members, dict):
        return {}

    def below(name: str, seen: frozenset[str]) -> list[str]:
        inner = members.get(name) or []
        if name in leaves or name in seen or not isinstance(inner, list):
            return [name] if name in leaves else []
        return [leaf for child in inner for leaf in below(str(child), seen | {name})]

    found = {str(group): tuple(dict.fromkeys(below(str(group), frozenset()))) for group in members}
    return {group: tasks for group, tasks in found.items() if len(tasks) > 1 and group not in leaves}


def _known(groups: Mapping[str, tuple[str, ...]], leaves: set[str]) -> dict[str, tuple[str, ...]]:
    """Groups of another arm, as far as their subtasks have samples here."""
    found = {group: tuple(leaf for leaf in members if leaf in leaves) for group, members in groups.items()}
    return {group: members for group, members in found.items() if len(members) > 1 and group not in leaves}


def _within(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return set(inner) < set(outer)


def _pooled(parts: list[dict[tuple[str, str], Column]]) -> dict[tuple[str, str], list[Column]]:
    """(filter, metric) that all parts have, in the order of the first."""
    return {key: [part[key] for part in parts] for key in parts[0] if all(key in part for part in parts)}


def _shots(merged: dict[str, Any], leaf: str) -> int:
    shots = merged.get("n-shot")
    value = shots.get(leaf) if isinstance(shots, dict) else None
    return value if isinstance(value, int) else -1


def _mapping(merged: dict[str, Any], key: str, leaf: str) -> dict[str, Any]:
    outer = merged.get(key)
    inner = outer.get(leaf) if isinstance(outer, dict) else None
    return inner if isinstance(inner, dict) else {}


def _seconds(merged: dict[str, Any]) -> float:
    found = merged.get("total_evaluation_time_seconds")
    try:
        seconds = float(found) if isinstance(found, str) else finite_number(found)  # lm-eval writes it as text
    except ValueError:
        seconds = None
    return math.nan if seconds is None else seconds
