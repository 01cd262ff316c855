"""A committed baseline: stored whole, paired item by item, and never changed but on request."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from test_compare_arms import _row, _table, _write

from workbench.comparison import compare_arms, compare_with_baseline, make_baseline, read_baseline, write_baseline
from workbench.errors import ComparisonError
from workbench.records import Evaluation, read_json, write_json


def test_a_later_run_is_paired_with_it_as_two_arms_are(tmp_path: Path) -> None:
    then, now = _table(37, 5, 2, 9)
    _write(tmp_path / "old", "nvfp4", then)
    _write(tmp_path / "new", "nvfp4", now)
    _write(tmp_path / "new", "added", now)
    write_baseline(tmp_path / "baseline.json", make_baseline(tmp_path / "old", ["nvfp4"]))
    comparison = compare_with_baseline(tmp_path / "new", read_baseline(tmp_path / "baseline.json"))
    (task,) = comparison.tasks
    assert (comparison.baseline, task.baseline, task.candidate) == ("committed", "committed", "nvfp4")
    assert (task.n, task.both, task.lost, task.gained, task.neither) == (53, 37, 5, 2, 9)
    assert comparison.notes == ("arm 'added' is not in the baseline",)
    # the same figures as two arms of one run
    _write(tmp_path / "both", "then", then)
    _write(tmp_path / "both", "now", now)
    (direct,) = compare_arms(tmp_path / "both", baseline="then", candidates=["now"]).tasks
    assert (task.loss_upper95_pp, task.p_loss) == (direct.loss_upper95_pp, direct.p_loss)
    assert len((tmp_path / "baseline.json").read_text()) < 600


def test_every_bit_survives(tmp_path: Path) -> None:
    for n in (1, 3, 4, 5, 64, 129):
        rows = [_row(i, i % 3 == 0) for i in range(n)]
        _write(tmp_path / str(n), "arm", rows)
        write_baseline(tmp_path / "b.json", make_baseline(tmp_path / str(n), ["arm"]))
        (task,) = compare_with_baseline(tmp_path / str(n), read_baseline(tmp_path / "b.json")).tasks
        assert (task.n, task.lost, task.gained, task.both) == (n, 0, 0, (n + 2) // 3)


def test_other_items_need_a_new_baseline(tmp_path: Path) -> None:
    then, now = _table(6, 1, 0, 1)
    _write(tmp_path / "old", "nvfp4", then)
    baseline = make_baseline(tmp_path / "old", ["nvfp4"])
    now[2] = {**now[2], "prompt_hash": "other"}
    _write(tmp_path / "new", "nvfp4", now)
    with pytest.raises(ComparisonError, match=r"(?s)its 8 items are not this run's 8.*--update-baseline"):
        compare_with_baseline(tmp_path / "new", baseline)
    _write(tmp_path / "new", "nvfp4", then[:5])
    with pytest.raises(ComparisonError, match="its 8 items are not this run's 5"):
        compare_with_baseline(tmp_path / "new", baseline)
    _write(tmp_path / "new", "nvfp4", then, harness="lm-eval 0.4.9")
    with pytest.raises(ComparisonError, match=r"scored by lm-eval 0\.4\.13"):
        compare_with_baseline(tmp_path / "new", baseline)
    (tmp_path / "damaged.json").write_text("{}")
    with pytest.raises(ComparisonError, match="is no baseline"):
        read_baseline(tmp_path / "damaged.json")
    with pytest.raises(ComparisonError, match=r"(?s)there is no baseline.*--update-baseline"):
        read_baseline(tmp_path / "absent.json")


@pytest.mark.parametrize("right", ["zz", "", "f", "f" * 20, "-f8", "F8", "fc", "f 8", "ff"])
def test_bits_are_one_an_item_and_nothing_else(tmp_path: Path, right: str) -> None:
    _write(tmp_path / "old", "nvfp4", [_row(i, True) for i in range(5)])
    path = tmp_path / "baseline.json"
    write_baseline(path, make_baseline(tmp_path / "old", ["nvfp4"]))
    stored = json.loads(path.read_text())
    assert stored["arms"]["nvfp4"][0]["right"] == "f8"
    assert read_baseline(path).arms["nvfp4"][0].n == 5
    stored["arms"]["nvfp4"][0]["right"] = right
    path.write_text(json.dumps(stored))
    with pytest.raises(ComparisonError, match="arm 'nvfp4', task 'task': `right` is no 5 bits as 2 hexadecimal digits"):
        read_baseline(path)


def test_two_metrics_of_one_filter_are_paired_each_with_itself(tmp_path: Path) -> None:
    for run, acc in (("old", 9), ("new", 6)):
        rows = [{**_row(i, i < acc), "other": float(i < 8)} for i in range(10)]
        _write(tmp_path / run, "nvfp4", rows)
        path = tmp_path / run / "eval" / "nvfp4" / "scores.json"
        evaluation = read_json(Evaluation, path)
        other = dataclasses.replace(evaluation.scores[0], metric="other", value=0.8, primary=False)
        write_json(path, dataclasses.replace(evaluation, scores=(evaluation.scores[0], other)))
    baseline = make_baseline(tmp_path / "old", ["nvfp4"])
    tasks = compare_with_baseline(tmp_path / "new", baseline).tasks
    assert [(task.metric, task.lost, task.gained) for task in tasks] == [("exact_match", 3, 0), ("other", 0, 0)]
