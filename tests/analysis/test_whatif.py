"""The what-if lattice against quantizing for real, and the verdict on steering on trained weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.analysis.whatif import PHASES, rank, steering_verdict, what_if
from workbench.cli import main
from workbench.formats import quantize

from .trio_checkpoints import MODULES, Trio


def test_predictions_are_what_the_pass_measures(trio: Trio) -> None:
    table = what_if(source=trio.source, first=trio.nvfp4)
    assert table["name"].nunique() == len(MODULES)
    for rule in ("floor", "even", "rceil"):
        pair = ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant", second_rule=rule)
        measured = analyze_weights(source=trio.source, pairs=[pair], resamples=2).set_index("name")
        of = table[(table["second"] == "mxfp4") & (table["block"] == 32) & (table["rule"] == rule)]
        for first, column in (("stored", "sqnr_total_db"), ("none", "sqnr_direct_db")):
            predicted = of[of["first"] == first].set_index("name")["sqnr_db"]
            np.testing.assert_allclose(predicted, measured[column].loc[predicted.index], atol=1e-9)


def test_finer_blocks_and_searched_scales_are_not_worse(trio: Trio) -> None:
    table = what_if(source=trio.source)
    ranked = rank(table)
    at = {(r.first, r.second, r.rule, r.block): r.sqnr_db for r in ranked.itertuples()}
    assert at["none", "mxfp4", "even", 16] > at["none", "mxfp4", "even", 32] > at["none", "mxfp4", "even", 64]
    for block in (16, 32, 64):
        assert at["none", "mxfp4", "mse", block] >= max(
            at["none", "mxfp4", r, block] for r in ("floor", "even", "rceil")
        )
    assert at["none", "nvfp4", "amax", 16] > at["none", "mxfp4", "even", 16]  # finer scales at equal bits
    assert at["none", "mxfp4", "even", 32] > at["nvfp4", "mxfp4", "even", 32]  # the price of rounding twice
    bits = dict(zip(zip(ranked["second"], ranked["block"], strict=True), ranked["bits"], strict=True))
    assert bits["mxfp4", 32] == 4.25
    assert bits["nvfp4", 16] == 4.5


def test_steering_never_loses_and_its_verdict_is_measured(trio: Trio) -> None:
    table = what_if(source=trio.source, first=trio.nvfp4)
    verdict = steering_verdict(table)
    assert verdict.matrices == len(MODULES)
    assert 0 <= verdict.gain_low_db <= verdict.gain_db <= verdict.gain_high_db
    assert verdict.gain_db <= verdict.span_db
    name = MODULES[0] + ".weight"
    w = trio.weights[name].float()
    a = quantize(w, "nvfp4").dequantize()
    powers = []
    for phase in range(PHASES):
        c = 2.0 ** (phase / PHASES)
        powers.append(float((quantize(a * c, "mxfp4").dequantize() / c - w).double().square().mean()))
    row = table[(table["name"] == name) & (table["first"] == "stored") & (table["rule"] == "steered")].iloc[0]
    assert row["power_total"] == pytest.approx(min(powers))
    assert row["power_worst"] == pytest.approx(max(powers))
    assert row["multiplier"] == pytest.approx(2.0 ** (int(np.argmin(powers)) / PHASES))
    assert steering_verdict(table, worth_db=verdict.gain_high_db + 1).verdict == "does not gain"
    assert steering_verdict(table, worth_db=-1.0).verdict == "gains"
    few = table[table["name"].isin(sorted(table["name"].unique())[:3])]
    assert steering_verdict(few).verdict == "too few matrices"


def test_the_command_prints_the_lattice(trio: Trio, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "w.parquet"
    assert main(["whatif", str(trio.source), "--first", str(trio.nvfp4), "--sample", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "stored" in shown
    assert "steered requantization" in shown
    assert {"none", "stored", "nvfp4", "nvfp4 four_over_six"} == set(pd.read_parquet(out)["first"])
