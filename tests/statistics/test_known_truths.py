"""Real answers: the model solutions that were published with GSM8K, compared pair by pair.

Four models (6B and 175B, fine-tuned, and with a verifier) on the 1,319 test questions, each answer marked right or
wrong in the file. The expected counts were taken from the file with a few lines of plain Python.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from workbench.statistics import PairedLoss, holm, judge_loss, loss_interval, paired_loss, stratified_loss

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
FILE = Path(os.environ.get("WORKBENCH_SHARED_DATA", "/nonexistent")) / "gsm8k" / "example_model_solutions.jsonl"
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="WORKBENCH_SHARED_DATA has no gsm8k/ folder")


@pytest.fixture(scope="module")
def right() -> dict[str, np.ndarray]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {model: np.array([row[model]["is_correct"] for row in rows]) for model in MODELS}


@pytest.fixture(scope="module")
def compared(right: dict[str, np.ndarray]) -> dict[tuple[str, str], PairedLoss]:
    pairs = [*itertools.combinations(reversed(MODELS), 2), ("6b_finetuning", "175b_verification")]
    return {(a, b): paired_loss(right[a], right[b]) for a, b in pairs}


def test_every_pair_against_scipy(right: dict[str, np.ndarray], compared: dict[tuple[str, str], PairedLoss]) -> None:
    from scipy.stats import binom, binomtest

    for (a, b), result in compared.items():
        lost, gained = int(np.sum(right[a] & ~right[b])), int(np.sum(~right[a] & right[b]))
        assert (result.n, result.lost, result.gained) == (1319, lost, gained)
        assert result.loss == pytest.approx(right[a].mean() - right[b].mean())
        assert result.p_two_sided == pytest.approx(binomtest(lost, lost + gained).pvalue, rel=1e-9)
        assert result.p_loss == pytest.approx(binom.sf(lost - 1, lost + gained, 0.5), rel=1e-9)
        # at hundreds of flips the normal approximation is right to a hundredth of a point
        error = np.std(right[a].astype(float) - right[b], ddof=0) / np.sqrt(1319)
        assert result.upper == pytest.approx(result.loss + 1.6449 * error, abs=7e-4)
        assert (result.low, result.high) == (
            pytest.approx(result.loss - 1.96 * error, abs=7e-4),
            pytest.approx(result.loss + 1.96 * error, abs=7e-4),
        )
        assert (result.bootstrap_low, result.bootstrap_high) == (
            pytest.approx(result.low, abs=2e-3),
            pytest.approx(result.high, abs=2e-3),
        )


def test_the_opposite_pair_mirrors(compared: dict[tuple[str, str], PairedLoss]) -> None:
    a, b = "6b_finetuning", "175b_verification"
    there, back = compared[a, b], compared[b, a]
    assert (there.lost, there.gained) == (back.gained, back.lost)
    assert there.loss == -back.loss
    assert (there.low, there.high) == (pytest.approx(-back.high, abs=1e-8), pytest.approx(-back.low, abs=1e-8))
    assert there.recovery == pytest.approx(1 / back.recovery)


def test_known_counts_and_verdicts(compared: dict[tuple[str, str], PairedLoss]) -> None:
    counts = {pair: (result.both, result.lost, result.gained) for pair, result in compared.items()}
    assert counts["175b_verification", "175b_finetuning"] == (382, 360, 76)
    assert counts["175b_finetuning", "6b_verification"] == (306, 152, 209)
    verdicts = {
        pair: judge_loss(
            loss_pp=100 * result.loss, loss_upper95_pp=100 * result.upper, p_loss=result.p_loss, margin_pp=1.0
        )
        for pair, result in compared.items()
    }
    assert verdicts["175b_verification", "6b_finetuning"] == "fail"
    assert verdicts["6b_finetuning", "175b_verification"] == "pass"
    assert holm([compared["175b_verification", b].p_loss for b in MODELS[:3]])[0] < 1e-30


def test_strata_of_real_answers_pool_to_the_whole(right: dict[str, np.ndarray]) -> None:
    a, b = right["175b_verification"], right["6b_verification"]
    parts = np.array_split(np.arange(1319), 14)
    strata = {
        f"part {i}": (len(part), int(np.sum(a[part] & ~b[part])), int(np.sum(~a[part] & b[part])))
        for i, part in enumerate(parts)
    }
    result = stratified_loss(strata)
    whole = paired_loss(a, b)
    assert (result.lost, result.gained, result.loss) == (whole.lost, whole.gained, pytest.approx(whole.loss))
    low, high = loss_interval(whole.lost, whole.gained, 1319)
    assert (result.low, result.high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))
    assert result.p_differ > 0.01  # the file's order is no subject
