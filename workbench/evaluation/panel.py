"""The artefact panel: what may move a score without any weight being wrong, counted for each task.

    panels = build_panels(folder, arm="nvfp4", specs=specs, result=result, baseline=run / "eval" / "source")

Reads lm-eval's sample files and the requests beside them; asks nothing and imports no harness. A loss that stands in
accuracy_all and not in accuracy_finished is one of budgets, not of weights; many stop leaks or nulls point at the
serving path.
"""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from workbench.evaluation._intervals import accuracy_interval, ratio_interval
from workbench.evaluation._requests import read_requests
from workbench.evaluation.scores import INVALID, find_sample_file, is_right, problems_of, read_rows
from workbench.evaluation.spec import TaskSpec
from workbench.evaluation.thinking import leaks
from workbench.records import ArtefactPanel, LengthDrift

Key = tuple[str, int]
"""(lm-eval task, doc_id)"""


def build_panels(
    folder: Path, *, arm: str, specs: tuple[TaskSpec, ...], result: dict[str, Any], baseline: Path | None = None
) -> tuple[ArtefactPanel, ...]:
    """A panel for each spec whose answers are generated text. baseline: `eval/<arm>` of the arm to compare lengths
    with; None, or one without such files, leaves `drift` out.
    """
    panels = []
    for spec in specs:
        answers = {} if spec.perplexity else _answers(folder, result["leaves"][spec.name], arm)
        if answers:
            panels.append(_panel(answers, arm, spec, _drift(answers, baseline, result["leaves"][spec.name])))
    return tuple(panels)


def _answers(folder: Path, leaves: list[str], arm: str) -> dict[Key, dict[str, Any]]:
    """Each document's text, request, and rows by filter; empty if the task does not generate."""
    found: dict[Key, dict[str, Any]] = {}
    for leaf in leaves:
        requests = read_requests(folder, leaf)
        for row in read_rows(find_sample_file(folder, leaf, arm)):
            text = row["resps"][0][0] if row["resps"] and row["resps"][0] else ""
            if not isinstance(text, str):
                return {}
            key = (leaf, int(row["doc_id"]))
            entry = found.setdefault(key, {"text": text, "filters": {}, "request": {}, "stops": ()})
            entry["filters"][row["filter"]] = row
            entry["request"] = next(iter(requests.get(key[1], [])), {})
            settings = row["arguments"].get("gen_args_0", {}).get("arg_1")
            until = settings.get("until") or () if isinstance(settings, dict) else ()
            entry["stops"] = (until,) if isinstance(until, str) else tuple(until)
    return found


def _panel(answers: dict[Key, dict[str, Any]], arm: str, spec: TaskSpec, drift: LengthDrift | None) -> ArtefactPanel:
    entries = list(answers.values())
    requests = [entry["request"] for entry in entries]
    known = all(requests)
    lengths = [r["completion_tokens"] for r in requests if r and r["completion_tokens"] is not None]
    texts = Counter((key[0], entry["text"].strip()) for key, entry in answers.items() if entry["text"].strip())
    right = [is_right(entry["filters"][spec.primary_filter], spec) for entry in entries]
    done = [_finished(request) for request in requests]
    problems = problems_of([entry["filters"][spec.primary_filter] for entry in entries])
    finished = [correct for correct, ok in zip(right, done, strict=True) if ok]
    of_finished = [problem for problem, ok in zip(problems, done, strict=True) if ok]
    low, high = accuracy_interval(right, problems)
    f_low, f_high = accuracy_interval(finished, of_finished) if finished else (float("nan"), float("nan"))
    filters = entries[0]["filters"]

    def count(name: str, value: Any) -> int:
        return sum(r[name] == value for r in requests) if known else -1

    return ArtefactPanel(
        arm=arm,
        task=spec.name,
        filter=spec.primary_filter,
        n=len(entries),
        truncated=count("finish_reason", "length"),
        empty=sum(not entry["text"].strip() for entry in entries),
        null=count("null", True),
        failed=sum(bool(r["error"]) for r in requests) if known else -1,
        stopped=sum(bool(r["stop_reason"]) for r in requests) if any(r and r["stop_reason"] for r in requests) else -1,
        stop_leaks=sum(any(stop in entry["text"] for stop in entry["stops"] if stop) for entry in entries),
        disagreements=sum(len({is_right(row, spec) for row in e["filters"].values()}) > 1 for e in entries)
        if len(filters) > 1
        else 0,
        invalid={name: sum(_invalid(entry["filters"][name]) for entry in entries) for name in filters},
        duplicates=sum(times for times in texts.values() if times > 1),
        think_leaks=sum(leaks(entry["text"]) for entry in entries),
        unfinished=count("thinking", "open"),
        length_median_tokens=float(statistics.median(lengths)) if lengths else None,
        length_max_tokens=float(max(lengths)) if lengths else None,
        accuracy_all=sum(right) / len(right),
        accuracy_all_low=low,
        accuracy_all_high=high,
        finished=len(finished),
        accuracy_finished=sum(finished) / len(finished) if finished else float("nan"),
        accuracy_finished_low=f_low,
        accuracy_finished_high=f_high,
        drift=drift,
    )


def _finished(request: dict[str, Any]) -> bool:
    """Whether the model said all it wanted to say. Unknown requests count as finished."""
    if not request:
        return True
    cut = request["finish_reason"] == "length" or request["thinking"] == "open"
    return not (cut or request["null"] or request["error"])


def _invalid(row: dict[str, Any]) -> bool:
    return bool(row["filtered_resps"][:1] == [INVALID])


def _drift(answers: dict[Key, dict[str, Any]], baseline: Path | None, leaves: list[str]) -> LengthDrift | None:
    """Lengths against the baseline's, document by document."""
    folders = [path.parent for path in sorted(baseline.glob("*/results_*.json"))] if baseline is not None else []
    if not folders:
        return None
    assert baseline is not None
    pairs: list[tuple[float, float, bool]] = []
    theirs: dict[Key, tuple[str, dict[str, Any]]] = {}
    for leaf in leaves:
        if not list(folders[-1].glob(f"samples_{leaf}_*.jsonl")):
            return None
        requests = read_requests(folders[-1], leaf)
        for row in read_rows(find_sample_file(folders[-1], leaf, baseline.name)):
            request = next(iter(requests.get(row["doc_id"], [])), {})
            theirs[leaf, int(row["doc_id"])] = (row["resps"][0][0], request)
    both = [(answers[key], theirs[key]) for key in answers if key in theirs]
    counted = all(
        ours["request"].get("completion_tokens") is not None and other.get("completion_tokens") is not None
        for ours, (_, other) in both
    )
    for ours, (text, other) in both:
        if ours["request"].get("error") or other.get("error"):
            continue
        if counted:
            lengths = (float(ours["request"]["completion_tokens"]), float(other["completion_tokens"]))
        else:
            lengths = (float(len(ours["text"])), float(len(text)))
        pairs.append((*lengths, ours["text"] == text))
    if not pairs or not sum(pair[1] for pair in pairs):
        return None
    low, high = ratio_interval([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return LengthDrift(
        baseline=baseline.name,
        n=len(pairs),
        unit="tokens" if counted else "characters",
        ratio=sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs),
        ratio_low=low,
        ratio_high=high,
        identical=sum(pair[2] for pair in pairs),
    )
