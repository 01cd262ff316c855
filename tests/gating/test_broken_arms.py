"""Checkpoints broken on purpose, through the real lint, analysis, gate and report: which layer catches each."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import broken
from workbench import experiment, records
from workbench.analysis.study import analyze_pairs
from workbench.checkpoints.lint import lint_checkpoint
from workbench.reporting import build_report

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))

from sample_run import make_sample_checkpoints


@dataclass(frozen=True)
class _Pair:
    first: str
    second: str
    direct: str | None = None


@dataclass(frozen=True)
class _Format:
    name: str
    rule: str | None = None


POLICY: dict[str, Any] = {
    "name": "p", "margin_pp": 10.0, "gated": ["nvfp4", "nvfp4_to_mxfp4"],
    "weights": {"min_sqnr_db": 10.0, "max_below_median_db": 6.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_sample_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def judged(run: Path, checkpoints: dict[str, Path], damage: Callable[[dict[str, Any]], None]) -> records.Verdict:
    """A run of the stages lint, analyze, gate and report with a damaged NVFP4 checkpoint, and no answers."""
    folder = broken.edit_tensors(broken.copy_of(checkpoints["nvfp4"], run / "broken"), damage)
    (run / "lint").mkdir(parents=True)
    for arm, path in {"source": checkpoints["source"], "nvfp4": folder, "nvfp4_to_mxfp4": folder}.items():
        records.write_json(run / "lint" / f"{arm}.json", lint_checkpoint(path))
    arms = {
        "source": (checkpoints["source"], None, "none"),
        "nvfp4": (folder, None, "none"),
        "nvfp4_to_mxfp4": (folder, _Format("mxfp4", "even"), "none"),
    }
    pairs = [_Pair("nvfp4", "nvfp4_to_mxfp4")]
    try:
        analyze_pairs(out=run, source_arm="source", pairs=pairs, arms=arms, activations=None, bootstrap=2)
    except Exception:
        if not any(record.errors for record in map(_lint, (run / "lint").glob("*.json"))):
            raise  # only what lint stops before may be too broken to measure
    verdict = experiment.judge(run, POLICY)
    shutil.rmtree(run / "broken")
    build_report(run)
    return verdict


def _lint(path: Path) -> records.LintReport:
    return records.read_json(records.LintReport, path)


@pytest.mark.parametrize(
    ("damage", "layer", "named"),
    [
        (broken.double_layer_scale, "tensors", "model.layers.2."),
        (broken.swap_nibbles, "tensors", "model.layers.2."),
        (broken.zero_expert, "lint", "model.layers.2.mlp.experts.5."),
        (broken.nan_expert, "lint", "model.layers.2.mlp.experts.5."),
    ],
    ids=["wrong global scale", "swapped nibbles", "dead expert", "NaN expert"],
)
def test_each_broken_arm_is_caught_and_the_report_says_by_what(
    damage: Callable[[dict[str, Any]], None], layer: str, named: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    verdict = judged(tmp_path / "run", checkpoints, damage)
    assert verdict.exit_code != 0
    for found in verdict.attributions:  # the second arm is made from the first's checkpoint
        assert found.cause == "quantization"
        assert layer in found.caught_by
        (seen,) = [finding for finding in found.layers if finding.layer == layer]
        assert named in seen.reason
    assert {found.arm for found in verdict.attributions} == {"nvfp4", "nvfp4_to_mxfp4"}
    for page in ("report.html", "summary.md"):
        text = (tmp_path / "run" / page).read_text()
        assert f"caught by {', '.join(verdict.attributions[0].caught_by)}" in text
        assert named in text


def test_an_intact_arm_is_caught_by_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    verdict = judged(tmp_path / "run", checkpoints, lambda tensors: None)
    for found in verdict.attributions:
        assert (found.cause, found.caught_by) == ("none", ())
        assert {finding.layer: finding.status for finding in found.layers}["tensors"] == "clean"
    assert "no fault seen" in (tmp_path / "run" / "report.html").read_text()
