"""The artefact panel on rows made by hand: each count has its own document, and the baseline's lengths are paired."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import EvaluationError
from workbench.evaluation._intervals import accuracy_interval, ratio_interval
from workbench.evaluation._journal import Answer
from workbench.evaluation._requests import request_rows, write_requests
from workbench.evaluation.panel import build_panels
from workbench.evaluation.scores import read_samples
from workbench.evaluation.spec import task_spec
from workbench.evaluation.thinking import cut_at_stops, split_thinking
from workbench.records import ArtefactPanel, LostAnswers, from_json, to_json
from workbench.statistics import wilson_interval

TIME = "2026-01-02T03-04-05.000006"
BUDGET = 40
SPEC = task_spec({"name": "t", "task": "t", "primary_filter": "strict"})
# (text, strict, flexible, answer as journalled)
DOCUMENTS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("#### 1", 1, 1, {"finish_reason": "stop"}),
    ("#### 1", 1, 1, {"finish_reason": "stop", "stop_reason": "Question:"}),  # the same text as the one above
    ("cut off", 0, 0, {"finish_reason": "length"}),
    ("  ", 0, 0, {"finish_reason": "stop"}),
    ("", 0, 0, {"text": None}),
    ("it is 1", 0, 1, {"finish_reason": "stop"}),  # strict and flexible disagree
    ("a Question: b", 0, 0, {"finish_reason": "stop"}),  # the server did not honour the stop string
    ("<think>1</think> 2", 0, 0, {"finish_reason": "stop"}),
]


def _write(folder: Path, documents: list[tuple[str, int, int, dict[str, Any]]], tokens: float = 10) -> None:
    folder.mkdir(parents=True)
    (folder / f"results_{TIME}.json").write_text("{}")
    answers, asked, rows = {}, [], []
    for i, (text, strict, flexible, fields) in enumerate(documents):
        answers[str(i)] = Answer(key=str(i), **{"completion_tokens": int(tokens * (i + 1)), "text": text, **fields})
        asked.append(("t", i, 0, str(i)))
        for name, value in (("strict", strict), ("flexible", flexible)):
            row = {"doc_id": i, "doc": {}, "filter": name, "metrics": ["exact_match"], "exact_match": value}
            extracted = "1" if value else "[invalid]"
            arguments = {"gen_args_0": {"arg_0": "p", "arg_1": {"until": ["Question:"], "max_gen_toks": BUDGET}}}
            rows.append({**row, "resps": [[text]], "filtered_resps": [extracted], "arguments": arguments})
    (folder / f"samples_t_{TIME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_requests(folder, request_rows(asked, answers, {}, ""))


def _panel(folder: Path, baseline: Path | None = None) -> ArtefactPanel:
    (panel,) = build_panels(
        read_samples(folder, arm="a", specs=(SPEC,), result=_result(folder)), folder, arm="a", specs=(SPEC,),
        result=_result(folder), baseline=baseline,
    )  # fmt: skip
    return panel


def _result(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in next(folder.glob("samples_t_*")).read_text().splitlines()]
    return {"leaves": {"t": ["t"]}, "documents": {"t": len({row["doc_id"] for row in rows})}}


def test_every_artefact_is_counted_once(tmp_path: Path) -> None:
    _write(tmp_path / "m", DOCUMENTS)
    panel = _panel(tmp_path / "m")
    assert (panel.n, panel.truncated, panel.empty, panel.null, panel.failed) == (8, 1, 2, 1, 0)
    assert (panel.stopped, panel.stop_leaks, panel.disagreements, panel.duplicates) == (1, 1, 1, 2)
    assert (panel.think_leaks, panel.unfinished) == (1, 0)
    assert panel.invalid == {"strict": 6, "flexible": 5}
    assert (panel.length_median_tokens, panel.length_max_tokens) == (45.0, 80.0)
    assert (panel.accuracy_all, panel.finished, panel.accuracy_finished) == (2 / 8, 6, 2 / 6)
    assert (panel.accuracy_all_low, panel.accuracy_all_high) == wilson_interval(2, 8)
    assert (panel.accuracy_finished_low, panel.accuracy_finished_high) == wilson_interval(2, 6)
    assert panel.drift is None
    assert from_json(ArtefactPanel, to_json(panel)) == panel


FATES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("#### 1", 1, 1, {"finish_reason": "stop"}),  # right in both arms
    ("cut", 0, 0, {"finish_reason": "length", "completion_tokens": BUDGET}),
    ("cut", 0, 0, {"finish_reason": "length", "completion_tokens": BUDGET - 1}),  # below what was asked for
    ("", 0, 0, {"text": None}),
    (" ", 0, 0, {"finish_reason": "stop"}),
    ("it is 1", 0, 1, {"finish_reason": "stop"}),
    ("#### 2", 0, 0, {"finish_reason": "stop", "prompt_tokens": 31}),  # another prompt than the baseline's
    ("#### 2", 0, 0, {"finish_reason": "content_filter"}),
    ("#### 1", 1, 1, {"finish_reason": "stop"}),  # the baseline has it wrong
]


def test_every_lost_answer_has_one_fate(tmp_path: Path) -> None:
    right = {"finish_reason": "stop", "prompt_tokens": 30}
    theirs = [("#### 1", int(i < 8), int(i < 8), right) for i in range(9)]
    _write(tmp_path / "eval" / "source" / "m", theirs)
    ours = [(text, s, f, {"prompt_tokens": 30, **fields}) for text, s, f, fields in FATES]
    _write(tmp_path / "eval" / "a" / "m", ours)
    panel = _panel(tmp_path / "eval" / "a" / "m", tmp_path / "eval" / "source")
    assert panel.lost == LostAnswers(
        baseline="source", n=9, lost=7, gained=1, failed=0, null=1, unfinished=0, cut_early=1, cut=1, empty=1,
        unextracted=1, finished=1, clean_n=3, clean_lost=1, clean_gained=1, prompts_counted=9, prompts_differ=1,
        odd_finish=1,
    )  # fmt: skip
    assert (panel.truncated, panel.cut_early) == (2, 1)
    assert from_json(ArtefactPanel, to_json(panel)) == panel
    (tmp_path / "eval" / "source" / "m" / "requests_t.jsonl").unlink()
    assert _panel(tmp_path / "eval" / "a" / "m", tmp_path / "eval" / "source").lost is None


def test_what_is_not_known_is_not_zero(tmp_path: Path) -> None:
    """The folder of a client that keeps no requests: plain lm-eval's own."""
    _write(tmp_path / "m", DOCUMENTS)
    (tmp_path / "m" / "requests_t.jsonl").unlink()
    panel = _panel(tmp_path / "m")
    assert (panel.truncated, panel.null, panel.failed, panel.stopped, panel.unfinished) == (-1, -1, -1, -1, -1)
    assert (panel.empty, panel.stop_leaks, panel.length_median_tokens) == (2, 1, None)
    assert panel.finished == panel.n


def test_lengths_are_compared_document_by_document(tmp_path: Path) -> None:
    _write(tmp_path / "eval" / "source" / "m", DOCUMENTS, tokens=10)
    _write(tmp_path / "eval" / "a" / "m", [(t + "!" * (i > 3), *r) for i, (t, *r) in enumerate(DOCUMENTS)], tokens=15)  # type: ignore[misc]
    drift = _panel(tmp_path / "eval" / "a" / "m", tmp_path / "eval" / "source").drift
    assert drift is not None
    assert (drift.baseline, drift.n, drift.unit, drift.identical) == ("source", 8, "tokens", 4)
    assert (drift.ratio, drift.ratio_low, drift.ratio_high) == (1.5, 1.5, 1.5)
    for arm in ("a", "source"):
        (tmp_path / "eval" / arm / "m" / "requests_t.jsonl").unlink()
    drift = _panel(tmp_path / "eval" / "a" / "m", tmp_path / "eval" / "source").drift
    assert drift is not None
    characters = sum(len(text) for text, *_ in DOCUMENTS)
    assert (drift.unit, drift.ratio) == ("characters", (characters + 4) / characters)
    assert drift.ratio_low <= drift.ratio <= drift.ratio_high
    assert _panel(tmp_path / "eval" / "a" / "m", tmp_path / "eval" / "none").drift is None


@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "answer", "state"),
    [
        ("<think>16-7=9</think> 18", "stop", "", "18", "closed"),
        ("16-7=9</think>18", "stop", "", "18", "closed"),  # the prompt opened it
        ("<think> 16-3-4=9 ... 9*2=18, wait", "stop", "", "", "open"),
        ("16-3-4=9 ... 9*2=18, wait", "length", "", "", "open"),
        ("18", "stop", "", "18", "none"),
        ("a</think>b</think>c", "stop", "", "c", "closed"),
        ("18", "stop", "so", "18", "closed"),  # the server's own parser
        ("", "length", "so", "", "open"),
        ("1", "length", "so", "1", "closed"),  # the answer itself was cut
    ],
)
def test_think_blocks(text: str, finish: str, reasoning: str, answer: str, state: str) -> None:
    thought = split_thinking(text, finish, end="</think>", reasoning=reasoning)
    assert (thought.answer, thought.state) == (answer, state)


def test_stops_cut_at_the_first() -> None:
    assert cut_at_stops("a Question: b </s>", ("</s>", "Question:", "")) == "a "
    assert cut_at_stops("plain", ("x",)) == "plain"


def test_repeated_answers_count_as_what_they_tell() -> None:
    """Design effects by hand: alike answers of a problem count once, independent ones count each."""
    alike = [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4
    problems = [i // 4 for i in range(16)]
    assert accuracy_interval(alike, problems) == pytest.approx(wilson_interval(2, 4))
    mixed = [True, False, True, False] * 4  # each problem half right: nothing between problems
    assert accuracy_interval(mixed, problems) == pytest.approx(wilson_interval(8, 16))
    assert accuracy_interval(mixed) == wilson_interval(8, 16)
    assert accuracy_interval([True] * 16, problems) == pytest.approx(wilson_interval(4, 4))


def test_ratio_interval_covers_and_needs_units() -> None:
    assert all(math.isnan(limit) for limit in ratio_interval([1.0] * 7, [1.0] * 7))
    low, high = ratio_interval([float(i) for i in range(1, 40)], [2.0] * 39)
    assert low < sum(range(1, 40)) / 78 < high
    # the normal interval of the mean, 10 +- 1.96 * 5.627 / sqrt(39), within the bootstrap's own noise
    assert (low, high) == (pytest.approx(8.23, abs=0.2), pytest.approx(11.77, abs=0.2))


def test_a_metric_that_is_not_right_or_wrong_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "m", DOCUMENTS[:1])
    bleu = (task_spec({"name": "t", "task": "t", "primary_filter": "strict", "metric": "bleu"}),)
    result = _result(tmp_path / "m")
    samples = read_samples(tmp_path / "m", arm="a", specs=bleu, result=result)
    with pytest.raises(EvaluationError, match="'bleu' of document 0"):
        build_panels(samples, tmp_path / "m", arm="a", specs=bleu, result=result)
