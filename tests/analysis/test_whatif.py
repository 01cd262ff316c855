"""The what-if lattice against quantizing for real, and the verdict on steering on trained weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from workbench.kernels import mx, nvfp4
from workbench.kernels.reference import e2m1_values, unpack_fp4

from workbench.analysis import whatif as lattice
from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.analysis.whatif import PHASES, rank, servable, steering_verdict, verify, what_if
from workbench.cli import main
from workbench.formats import quantize
from workbench.records import Bounded, Divergence

from .trio_checkpoints import MODULES, Trio, write_checkpoint


def test_predictions_are_what_the_pass_measures(trio: Trio) -> None:
    table = what_if(source=trio.source, first=trio.nvfp4).table
    assert table["name"].nunique() == len(MODULES)
    for rule in ("floor", "even", "rceil"):
        pair = ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant", second_rule=rule)
        measured = analyze_weights(source=trio.source, pairs=[pair]).set_index("name")
        of = table[(table["second"] == "mxfp4") & (table["block"] == 32) & (table["rule"] == rule)]
        for first, column in (("stored", "sqnr_total_db"), ("none", "sqnr_direct_db")):
            predicted = of[of["first"] == first].set_index("name")["sqnr_db"]
            np.testing.assert_allclose(predicted, measured[column].loc[predicted.index], atol=1e-9)


def test_finer_blocks_and_searched_scales_are_not_worse(trio: Trio) -> None:
    table = what_if(source=trio.source).table
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
    table = what_if(source=trio.source, first=trio.nvfp4).table
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


def test_every_choice_is_what_rounding_for_real_gives() -> None:
    """Against the formats' own quantize, dequantize; blocks of another size against the kernels' reference."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(24, 192, generator=generator).mul(torch.rand(24, 1, generator=generator)).bfloat16().float()
    w[3] = 0
    stored = quantize(w, "nvfp4").dequantize()
    rows = {tuple(row[c] for c in ("first", "second", "rule", "block")): row | {"power": errors.sum() / w.numel()}
            for row, errors in lattice._combinations(w, stored, torch.arange(len(w)))}  # fmt: skip
    firsts = {
        "none": w,
        "stored": stored,
        "nvfp4": stored,
        "nvfp4 four_over_six": quantize(w, "nvfp4", "four_over_six").dequantize(),
    }
    for (first, second, rule, block), row in rows.items():
        a = firsts[first]
        if rule == "steered":
            continue
        if second == "mxfp4":
            rounded = mx.dequantize(*mx.quantize(a, "e2m1", rule, (1, block)), "e2m1", (1, block))
        else:
            codes, scales, shared = nvfp4.quantize(a, "amax", None, block)
            values = e2m1_values(unpack_fp4(codes)).unflatten(-1, (-1, block))
            rounded = (values * (scales.float() * shared)[..., None]).flatten(-2)
        expected = float((rounded.double() - w.double()).square().mean())
        assert row["power"] == pytest.approx(expected, rel=1e-6), (first, second, rule, block)
    assert len(rows) == 4 * 14 + 1


def test_a_large_matrix_is_sampled_and_its_interval_holds_the_whole(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = what_if(source=trio.source).table
    assert (whole["sqnr_low_db"] == whole["sqnr_db"]).all()
    monkeypatch.setattr(lattice, "ROWS_ABOVE", 16 * 64)  # half of each matrix's rows
    sampled = what_if(source=trio.source).table
    assert set(sampled["rows"]) == {16}
    inside = (sampled["sqnr_low_db"] <= whole["sqnr_db"]) & (whole["sqnr_db"] <= sampled["sqnr_high_db"])
    assert inside.mean() > 0.8
    assert (sampled["sqnr_high_db"] - sampled["sqnr_low_db"]).between(0.01, 2).all()


def test_odd_matrices_are_named_and_the_rest_is_predicted(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    rows = {
        "model.layers.0.mlp.down_proj": torch.randn(16, 48),  # blocks of 16 only
        "model.layers.0.self_attn.o_proj": torch.full((16, 64), float("nan")),
        "model.layers.0.self_attn.q_proj": torch.zeros(0, 64),
        "model.layers.1.mlp.down_proj": torch.randn(16, 64),
    }
    write_checkpoint(tmp_path / "odd", {f"{m}.weight": w.bfloat16() for m, w in rows.items()})
    found = what_if(source=tmp_path / "odd")
    assert [(f.tensor.split(".")[-2], f.kind) for f in found.faults] == [
        ("down_proj", "format"), ("o_proj", "non-finite"), ("q_proj", "format"),
    ]  # fmt: skip
    blocks = found.table.groupby("name")["block"].unique().map(set)
    assert blocks["model.layers.0.mlp.down_proj.weight"] == {16}
    assert blocks["model.layers.1.mlp.down_proj.weight"] == {16, 32, 64}
    assert main(["whatif", str(tmp_path / "odd")]) == 2
    assert "non-finite: 1" in capsys.readouterr().out
    assert main(["whatif", str(tmp_path / "odd"), "--exclude", "*layers.0*"]) == 0


def test_choices_that_can_be_served_are_ranked_against_what_was_measured(trio: Trio) -> None:
    table = what_if(source=trio.source, first=trio.nvfp4).table
    choices = servable(table, 5)
    assert len(choices) == 5
    assert choices["sqnr_db"].is_monotonic_decreasing
    assert set(choices["rule"]) <= {"amax", "floor", "even", "rceil", "mse"}
    assert not ((choices["second"] == "nvfp4") & (choices["first"] != "none")).any()
    mean = Bounded(lower=0, upper=1, lower_ci_low=0, lower_ci_high=0, upper_ci_low=1, upper_ci_high=1)
    plain = {f.name: 0 for f in dataclasses.fields(Divergence)}
    plain |= dict.fromkeys(("mean", "median", "p99", "p999"), mean) | {"reference": "a", "arm": "b"}
    measured = [Divergence(**plain | {"mean": dataclasses.replace(mean, lower=x)}) for x in (1.0, 2.0, 3.0, 5.0, 4.0)]
    found = verify("m", choices, measured)  # type: ignore[arg-type]
    assert found.rank_correlation == pytest.approx(0.9)
    assert [c.sqnr_db for c in found.choices] == list(choices["sqnr_db"])


@pytest.mark.parametrize("flag", ["--text", "--verify-out"])
def test_verification_needs_a_text_and_a_place(trio: Trio, tmp_path: Path, flag: str) -> None:
    assert main(["whatif", str(trio.source), "--verify", "2", flag, str(tmp_path / "x")]) == 3


def test_the_command_prints_the_lattice(trio: Trio, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "w.parquet"
    assert main(["whatif", str(trio.source), "--first", str(trio.nvfp4), "--sample", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "stored" in shown
    assert "steered requantization" in shown
    assert {"none", "stored", "nvfp4", "nvfp4 four_over_six"} == set(pd.read_parquet(out)["first"])
