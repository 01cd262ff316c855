"""The artefact panel: what may move a score without any weight being wrong, counted for each task.

    samples = read_samples(folder, arm="nvfp4", specs=specs, result=result)
    panels = build_panels(samples, folder, arm="nvfp4", specs=specs, result=result, baseline=run / "eval" / "source")

Works on lm-eval's rows and the requests beside their files; asks nothing and imports no harness. A loss that stands in
accuracy_all and not in accuracy_finished is one of budgets, not of weights; many stop leaks or nulls point at the
serving path. Against a baseline it tells what became of each answer that was lost: `workbench.gating.attribution`
judges by that.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.evaluation._intervals import accuracy_interval, ratio_interval
from workbench.evaluation._read import CUT, ENDED
from workbench.evaluation._requests import read_requests
from workbench.evaluation.scores import INVALID, Samples, find_sample_file, is_right, problems_of, read_rows
from workbench.evaluation.spec import TaskSpec
from workbench.evaluation.thinking import leaks
from workbench.records import ArtefactPanel, LengthDrift, LostAnswers

Key = tuple[str, int]
"""(lm-eval task, doc_id)"""
DEFAULT_BUDGET = 256
"""Tokens of an answer where a task says nothing: lm-eval's max_gen_toks."""


@dataclass(slots=True)
class _Entry:
    """One document: the scored text, its request ({} where it was not kept), its rows by filter, its stop strings."""

    text: str
    request: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    budget: int = DEFAULT_BUDGET

    @property
    def cut(self) -> bool:
        return bool(self.request) and self.request["finish_reason"] == CUT

    @property
    def cut_early(self) -> bool:
        """Ended at a limit below the tokens that were asked for."""
        tokens = self.request.get("completion_tokens")
        return self.cut and tokens is not None and int(tokens) < self.budget

    @property
    def finished(self) -> bool:
        """Whether the model said all it wanted to say. Unknown requests count as finished."""
        if not self.request:
            return True
        open_thought = self.request["thinking"] == "open"
        return not (self.cut or open_thought or self.request["null"] or self.request["error"] or self.odd_finish)

    @property
    def odd_finish(self) -> str:
        """A finish reason that tells neither a whole answer nor a cut one; "" otherwise."""
        if not self.request or self.request["error"]:
            return ""
        reason = str(self.request["finish_reason"] or "missing")
        return "" if reason in (*ENDED, CUT) else reason


def build_panels(
    samples: Samples,
    folder: Path,
    *,
    arm: str,
    specs: tuple[TaskSpec, ...],
    result: dict[str, Any],
    thinking_budget: int = 0,
    baseline: Path | None = None,
) -> tuple[ArtefactPanel, ...]:
    """A panel for each spec whose answers are generated text.

    folder: where the samples' requests lie. thinking_budget: tokens that each answer was given on top of its task's.
    baseline: `eval/<arm>` of the arm to compare with; None, or one without such files, leaves `drift` and `lost` out.
    """
    panels = []
    for spec in specs:
        leaves = result["leaves"][spec.name]
        entries = {} if spec.perplexity else _entries({leaf: samples[leaf].rows for leaf in leaves}, folder)
        if entries:
            for entry in entries.values():
                entry.budget += thinking_budget
            theirs = {} if baseline is None else _baseline_entries(baseline, leaves)
            panels.append(_panel(entries, theirs, arm, spec, "" if baseline is None else baseline.name))
    return tuple(panels)


def _entries(rows: Mapping[str, Iterable[dict[str, Any]]], folder: Path) -> dict[Key, _Entry]:
    """Each document of these lm-eval tasks; empty if they do not generate."""
    found: dict[Key, _Entry] = {}
    for leaf, of_leaf in rows.items():
        requests = read_requests(folder, leaf)
        for row in of_leaf:
            text = row["resps"][0][0] if row["resps"] and row["resps"][0] else ""
            if not isinstance(text, str):
                return {}
            key = (leaf, int(row["doc_id"]))
            if key not in found:
                settings = row["arguments"].get("gen_args_0", {}).get("arg_1")
                settings = settings if isinstance(settings, dict) else {}
                until = settings.get("until") or ()
                found[key] = _Entry(
                    text=text,
                    request=next(iter(requests.get(key[1], [])), {}),
                    stops=(until,) if isinstance(until, str) else tuple(until),
                    budget=int(settings.get("max_tokens") or settings.get("max_gen_toks") or DEFAULT_BUDGET),
                )
            found[key].rows[row["filter"]] = row
    return found


def _baseline_entries(baseline: Path, leaves: list[str]) -> dict[Key, _Entry]:
    """The baseline's documents of the same tasks; empty where it has no such files."""
    folders = [path.parent for path in sorted(baseline.glob("*/results_*.json"))]
    if not folders or not all(list(folders[-1].glob(f"samples_{leaf}_*.jsonl")) for leaf in leaves):
        return {}
    rows = {leaf: read_rows(find_sample_file(folders[-1], leaf, baseline.name)) for leaf in leaves}
    return _entries(rows, folders[-1])


def _panel(
    answers: dict[Key, _Entry], theirs: dict[Key, _Entry], arm: str, spec: TaskSpec, baseline: str
) -> ArtefactPanel:
    entries = list(answers.values())
    requests = [entry.request for entry in entries]
    known = all(requests)
    lengths = [r["completion_tokens"] for r in requests if r and r["completion_tokens"] is not None]
    texts = Counter((key[0], entry.text.strip()) for key, entry in answers.items() if entry.text.strip())
    right = [is_right(entry.rows[spec.primary_filter], spec) for entry in entries]
    done = [entry.finished for entry in entries]
    problems = problems_of([entry.rows[spec.primary_filter] for entry in entries])
    finished = [correct for correct, ok in zip(right, done, strict=True) if ok]
    of_finished = [problem for problem, ok in zip(problems, done, strict=True) if ok]
    low, high = accuracy_interval(right, problems)
    f_low, f_high = accuracy_interval(finished, of_finished) if finished else (float("nan"), float("nan"))
    filters = entries[0].rows
    pairs = [(entry, theirs[key]) for key, entry in answers.items() if key in theirs]

    def count(name: str, value: Any) -> int:
        return sum(r[name] == value for r in requests) if known else -1

    return ArtefactPanel(
        arm=arm,
        task=spec.name,
        filter=spec.primary_filter,
        n=len(entries),
        truncated=count("finish_reason", "length"),
        empty=sum(not entry.text.strip() for entry in entries),
        null=count("null", True),
        failed=sum(bool(r["error"]) for r in requests) if known else -1,
        stopped=sum(bool(r["stop_reason"]) for r in requests) if any(r and r["stop_reason"] for r in requests) else -1,
        stop_leaks=sum(any(stop in entry.text for stop in entry.stops if stop) for entry in entries),
        disagreements=sum(len({is_right(row, spec) for row in e.rows.values()}) > 1 for e in entries)
        if len(filters) > 1
        else 0,
        invalid={name: sum(_invalid(entry.rows[name]) for entry in entries) for name in filters},
        duplicates=sum(times for times in texts.values() if times > 1),
        think_leaks=sum(leaks(entry.text) for entry in entries),
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
        drift=_drift(pairs, baseline),
        cut_early=sum(entry.cut_early for entry in entries) if known and lengths else -1,
        lost=_lost(pairs, spec, baseline),
        odd_finish=dict(Counter(entry.odd_finish for entry in entries if entry.odd_finish)),
    )


def _invalid(row: dict[str, Any]) -> bool:
    return bool(row["filtered_resps"][:1] == [INVALID])


def _drift(pairs: list[tuple[_Entry, _Entry]], baseline: str) -> LengthDrift | None:
    """Lengths against the baseline's, document by document."""
    counted = all(entry.request.get("completion_tokens") is not None for pair in pairs for entry in pair)

    def length(entry: _Entry) -> float:
        return float(entry.request["completion_tokens"] if counted else len(entry.text))

    answered = [pair for pair in pairs if not any(entry.request.get("error") for entry in pair)]
    ours, other = [length(entry) for entry, _ in answered], [length(entry) for _, entry in answered]
    if not sum(other):
        return None
    low, high = ratio_interval(ours, other)
    return LengthDrift(
        baseline=baseline,
        n=len(answered),
        unit="tokens" if counted else "characters",
        ratio=sum(ours) / sum(other),
        ratio_low=low,
        ratio_high=high,
        identical=sum(entry.text == their.text for entry, their in answered),
    )


_FATES: tuple[tuple[str, Callable[[_Entry], bool]], ...] = (
    ("failed", lambda entry: bool(entry.request["error"])),
    ("null", lambda entry: bool(entry.request["null"])),
    ("unfinished", lambda entry: entry.request["thinking"] == "open"),
    ("cut_early", lambda entry: entry.cut_early),
    ("cut", lambda entry: entry.cut),
    ("odd_finish", lambda entry: bool(entry.odd_finish)),
    ("empty", lambda entry: not entry.text.strip()),
)


def _lost(pairs: list[tuple[_Entry, _Entry]], spec: TaskSpec, baseline: str) -> LostAnswers | None:
    """What became of the answers that the baseline had right and this arm has wrong."""
    if not pairs or not all(entry.request for pair in pairs for entry in pair):
        return None
    fates: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for ours, other in pairs:
        right = [is_right(entry.rows[spec.primary_filter], spec) for entry in (ours, other)]
        change = {(False, True): "lost", (True, False): "gained"}.get((right[0], right[1]), "")
        if change == "lost":
            fates[_fate(ours, spec)] += 1
        totals[change] += 1
        if all(_fate(entry, spec) == "finished" for entry in (ours, other)):
            totals["clean_n"] += 1
            totals[f"clean_{change}"] += 1
        counts = [entry.request["prompt_tokens"] for entry in (ours, other)]
        totals["prompts_counted"] += None not in counts
        totals["prompts_differ"] += None not in counts and counts[0] != counts[1]
    names = [name for name, _ in _FATES] + ["unextracted", "finished"]
    sums = ("lost", "gained", "clean_n", "clean_lost", "clean_gained", "prompts_counted", "prompts_differ")
    return LostAnswers(
        baseline=baseline,
        n=len(pairs),
        **{name: fates[name] for name in names},
        **{name: totals[name] for name in sums},
    )


def _fate(entry: _Entry, spec: TaskSpec) -> str:
    """What an answer ended as: the first of `_FATES` that holds, "unextracted" where only another filter than the
    primary scores it right, else "finished".
    """
    for name, holds in _FATES:
        if holds(entry):
            return name
    primary = is_right(entry.rows[spec.primary_filter], spec)
    elsewhere = any(is_right(row, spec) for name, row in entry.rows.items() if name != spec.primary_filter)
    return "unextracted" if elsewhere and not primary else "finished"
