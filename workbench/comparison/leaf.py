"""One sample file of lm-eval, summed up: which of its metrics can be compared, and whether the result file agrees.

leaf = read_leaf(path, {"ter": False})
check_results(leaf, {"exact_match,strict-match": 0.83}, {"effective": 1319})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.comparison.samples import finite_number, is_empty, read_rows, task_of
from workbench.errors import ComparisonError

_AGAIN = "evaluate this arm again"
_NO_METRIC = frozenset({"doc_id", "repeats", "num_fewshot"})
Place = tuple[str, str]
"""(filter, metric)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One (filter, metric) of a leaf task: its items and their sum. binary: all of them are 0 or 1."""

    n: int
    total: float
    binary: bool


@dataclass(slots=True)
class Leaf:
    """One sample file. documents: by filter. unusable: metrics that cannot be compared, and why. empty: answers without
    text (null and white space included) by filter; empty_right: of them marked 1, by filter and metric.
    """

    path: Path
    documents: dict[str, int] = field(default_factory=dict)
    columns: dict[Place, Column] = field(default_factory=dict)
    unusable: dict[Place, str] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    empty_right: dict[Place, int] = field(default_factory=dict)


def read_leaf(path: Path, higher_is_better: Mapping[str, Any]) -> Leaf:
    """Sums of every (filter, metric) of one sample file, in the order of the file. Raises ComparisonError for a file
    without documents, a metric that only some documents have, or a score that is no number among numbers.
    """
    leaf = Leaf(path)
    lines: dict[Place, list[int]] = {}
    values: dict[Place, list[float]] = {}
    damaged: dict[Place, tuple[int, Any]] = {}  # the first line of each that holds no number
    lines_of: dict[str, list[int]] = {}
    for line, row in read_rows(path):
        lines_of.setdefault(row["filter"], []).append(line)
        empty = is_empty(row["resps"])
        leaf.empty[row["filter"]] = leaf.empty.get(row["filter"], 0) + empty
        for metric in _metrics(row, f"{path}, line {line}"):
            place, value = (row["filter"], metric), finite_number(row[metric])
            lines.setdefault(place, []).append(line)
            leaf.empty_right[place] = leaf.empty_right.get(place, 0) + (empty and value == 1.0)
            values.setdefault(place, []).append(math.nan if value is None else value)
            if value is None:
                damaged.setdefault(place, (line, row[metric]))
    if not values:
        what = "its documents name no metric" if lines_of else "it holds no document"
        raise ComparisonError(f"{path}: {what}", fix=_AGAIN)
    leaf.documents = {name: len(found) for name, found in lines_of.items()}
    for place, column in values.items():
        without = sorted(set(lines_of[place[0]]) - set(lines[place]))
        if without:
            raise ComparisonError(
                f"{path}, line {without[0]}: {place[1]} is missing, which {len(column)} other documents have",
                fix=_AGAIN,
            )
        if place in damaged and not all(map(math.isnan, column)):  # a metric of numbers, some of which are damaged
            line, found = damaged[place]
            raise ComparisonError(
                f"{path}, line {line}: {place[1]} is {str(found)[:40]}, where other documents have numbers", fix=_AGAIN
            )
        if place in damaged:
            line, found = damaged[place]
            leaf.unusable[place] = f"not one number for each document: {path}, line {line} has {str(found)[:40]}"
        elif higher_is_better.get(place[1]) is False:
            leaf.unusable[place] = "lower is better"
        else:
            binary = all(value in (0.0, 1.0) for value in column)
            leaf.columns[place] = Column(n=len(column), total=sum(column), binary=binary)
    return leaf


def check_results(leaf: Leaf, results: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    """Hold a sample file against the newest result file that speaks of its task. results: "metric,filter" -> value;
    samples: lm-eval's `n-samples` of the task. Raises ComparisonError with both figures.
    """
    task = task_of(leaf.path)
    effective = samples.get("effective")
    for name, found in leaf.documents.items():
        if type(effective) is int and effective != found:
            raise ComparisonError(
                f"{leaf.path} holds {found} documents (filter {name}), the result file says {effective} of {task}",
                fix="give the folder of one whole evaluation, or evaluate this arm again",
            )
    for (name, metric), column in leaf.columns.items():
        said = finite_number(results.get(f"{metric},{name}"))
        if column.binary and said is not None and round(said * column.n) != round(column.total):
            raise ComparisonError(
                f"{leaf.path} holds {metric} {column.total / column.n:.4f} (filter {name}), the newest result file says"
                f" {said:.4f} of {task}: they are of two evaluations",
                fix="evaluate this arm again with --log_samples, or take the other evaluation's files away",
            )


def _metrics(row: dict[str, Any], where: str) -> list[str]:
    """Names of a row's metrics; lm-eval before 0.4.4 does not list them."""
    listed = row.get("metrics")
    if not isinstance(listed, list):
        return [key for key, value in row.items() if isinstance(value, (bool, int, float)) and key not in _NO_METRIC]
    if not all(isinstance(metric, str) for metric in listed):
        raise ComparisonError(f"{where}: metrics is {str(listed)[:40]}, expected a list of names", fix=_AGAIN)
    return [metric for metric in listed if metric in row]
