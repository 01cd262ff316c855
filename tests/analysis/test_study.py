"""An experiment's analysis end to end on files: three outputs, skipped when there, refused when arms do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import cli
from workbench.analysis.gemm import GemmArm, _sqnr_with_interval, analyze_gemm
from workbench.analysis.study import Arm, analyze_pairs
from workbench.analysis.summary import AnalysisSummary, summarize
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.errors import CheckpointError, ConfigError
from workbench.formats.activations import Activations, read_activations
from workbench.records import read_json

from .trio_checkpoints import MODULES, Trio


@dataclass(frozen=True)
class Pair:
    first: str
    second: str
    direct: str | None = None


@dataclass(frozen=True)
class Target:
    name: str
    rule: str | None = None


def arms_of(trio: Trio) -> dict[str, Arm]:
    return {
        "source": (trio.source, None, "none"),
        "nvfp4": (trio.nvfp4, None, "auto"),
        "nvfp4_to_mxfp4": (trio.nvfp4, Target("mxfp4"), "auto"),
        "mxfp4_direct": (trio.mxfp4, None, "none"),
    }


def run(trio: Trio, out: Path, pair: Pair, **changes: object) -> AnalysisSummary:
    settings = {"source_arm": "source", "arms": arms_of(trio), "activations": trio.activations, "bootstrap": 50}
    return analyze_pairs(out=out, pairs=[pair], **(settings | changes))  # type: ignore[arg-type]


def test_five_files_and_nothing_else(trio: Trio, tmp_path: Path) -> None:
    labels = []

    def noted(names, total, label):  # type: ignore[no-untyped-def]
        labels.append((label, total))
        return names

    summary = run(trio, tmp_path, Pair("nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct"), progress=noted)
    written = {"analysis.json", "fused.parquet", "gemm.parquet", "pooled.parquet", "tensors.parquet"}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert labels == [("weights", len(MODULES)), ("matrix products", len(MODULES))]
    tensors, gemm = pd.read_parquet(tmp_path / "tensors.parquet"), pd.read_parquet(tmp_path / "gemm.parquet")
    assert set(tensors["second_rule"]) == {"even"}  # the format's default, by name
    assert set(tensors["direct_arm"]) == {"mxfp4_direct"}
    assert set(gemm["arm"]) == {"nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct"}
    formats = dict(zip(gemm["arm"], gemm["activation_format"], strict=True))
    assert formats == {"nvfp4": "nvfp4", "nvfp4_to_mxfp4": "mxfp4", "mxfp4_direct": ""}
    stored = read_json(AnalysisSummary, tmp_path / "analysis.json")
    assert stored.pairs[0].sqnr_total_db == summary.pairs[0].sqnr_total_db
    assert {c.claim for c in stored.claims} == {c.claim for c in summary.claims}


def test_tables_that_are_there_are_not_made_again(trio: Trio, tmp_path: Path) -> None:
    pair = Pair("nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct")
    run(trio, tmp_path, pair)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def forbidden(names, total, label):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{label} measured again")

    run(trio, tmp_path, pair, progress=forbidden)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_two_stored_arms_are_a_pair_too(trio: Trio, tmp_path: Path) -> None:
    summary = run(trio, tmp_path, Pair("nvfp4", "mxfp4_direct"))
    frame = pd.read_parquet(tmp_path / "tensors.parquet")
    assert set(frame["second_rule"]) == {""}
    assert set(frame["direct_arm"]) == {""}  # made here, not an arm
    np.testing.assert_allclose(frame["sqnr_total_db"], frame["sqnr_direct_db"])  # the stored one is the direct one
    assert summary.pairs[0].second_arm == "mxfp4_direct"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair("nvfp4_to_mxfp4", "mxfp4_direct"), "converted as it loads; a first arm must be stored"),
        (Pair("mxfp4_direct", "nvfp4_to_mxfp4"), "not the checkpoint of 'mxfp4_direct'"),
        (Pair("nvfp4", "missing"), "the arm 'missing', which does not exist"),
    ],
)
def test_pairs_that_make_no_chain_are_refused(trio: Trio, tmp_path: Path, pair: Pair, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(trio, tmp_path, pair)


def test_a_summary_of_a_model_with_seventy_thousand_matrices_stays_small(trio: Trio, tmp_path: Path) -> None:
    run(trio, tmp_path, Pair("nvfp4", "nvfp4_to_mxfp4"))
    frame = pd.read_parquet(tmp_path / "tensors.parquet")
    large = pd.concat([frame] * (69_303 // len(frame) + 1), ignore_index=True)[:69_303]
    got = summarize(large, None).pairs[0]
    assert got.matrices == 69_303
    assert got.sqnr_total_db.pooled_low < got.sqnr_total_db.pooled < got.sqnr_total_db.pooled_high
    assert got.sqnr_total_db.pooled_high - got.sqnr_total_db.pooled_low < 0.02


def test_wrong_settings_are_refused_before_anything_is_measured(trio: Trio, tmp_path: Path) -> None:
    pair = Pair("nvfp4", "nvfp4_to_mxfp4")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"x")
    out = tmp_path / "out"
    for bootstrap in (0, -1):
        with pytest.raises(ConfigError, match="resamples"):
            run(trio, out, pair, bootstrap=bootstrap)
        with pytest.raises(ConfigError, match="resamples"):
            analyze_gemm(source=trio.source, arms=[], resamples=bootstrap)
    for file in (tmp_path / "none.safetensors", damaged):
        with pytest.raises(CheckpointError, match=file.name):
            run(trio, out, pair, activations=file)
    assert not out.exists()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_command_names_its_arms_as_the_run_does(
    trio: Trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["analyze", str(trio.source), str(trio.nvfp4), "--products", "gaussian", "--bootstrap", "5"]
    names = ["--source-arm", "bf16", "--first-arm", "nvfp4", "--second-arm", "online"]
    assert cli.main([*words, *names, "--out", str(tmp_path / "out")]) == 0
    tensors = pd.read_parquet(tmp_path / "out" / "tensors.parquet")
    assert set(tensors[["source_arm", "first_arm", "second_arm"]].itertuples(index=False, name=None)) == {
        ("bf16", "nvfp4", "online")
    }
    assert set(pd.read_parquet(tmp_path / "out" / "gemm.parquet")["arm"]) == {"nvfp4", "online"}
    assert cli.main([*words, *names, "--out", str(tmp_path / "out")]) == 0  # the same again: what is there is kept
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 3
    assert "other checkpoints or settings" in capsys.readouterr().err
    for wrong, said in ((["--first-arm", "second"], "two arms"), (["--first-arm", "a/b"], "--first-arm is 'a/b'")):
        assert cli.main([*words, *wrong, "--out", str(tmp_path / "other")]) == 3
        assert said in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_one_checkpoint_alone_quantizes_is_said_and_recorded(
    trio: Trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = MODULES[0], MODULES[1:3]
    quantize_checkpoint(trio.source, tmp_path / "a", format="nvfp4", dialect="modelopt", exclude=other)
    quantize_checkpoint(trio.source, tmp_path / "b", format="mxfp4", dialect="quark", exclude=[one])
    words = ["analyze", str(trio.source), str(tmp_path / "a"), "--second", str(tmp_path / "b")]
    cli.main([*words, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert f"quantized in first and not in second, measured against second as it stands: 1 ({one}.weight)" in said
    assert "quantized in second and not in first, not measured: 2 (" in said
    alone = read_json(AnalysisSummary, tmp_path / "out" / "analysis.json").alone
    assert [(of.arm, of.other, of.matrices) for of in alone] == [("first", "second", 1), ("second", "first", 2)]
    assert alone[0].examples == (f"{one}.weight",)
    assert set(alone[1].examples) == {f"{name}.weight" for name in other}


@pytest.mark.parametrize("products", ["auto", "gaussian", "none"])
def test_inputs_that_cannot_be_read_are_refused_before_a_weight_is_and_leave_nothing(
    products: str, trio: Trio, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (bad := tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    monkeypatch.setattr("workbench.analysis.study.analyze_weights", lambda **_: pytest.fail("weights were read"))
    words = ["analyze", str(trio.source), str(trio.nvfp4), "--activations", str(bad), "--products", products]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 3
    assert str(bad) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_activations_file_is_opened_once_and_gives_what_its_path_gives(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def noted(path: Path) -> Activations:
        opened.append(path)
        return read_activations(path)

    for module in ("study", "gemm"):
        monkeypatch.setattr(f"workbench.analysis.{module}.read_activations", noted)
    run(trio, tmp_path / "run", Pair("nvfp4", "nvfp4_to_mxfp4"))
    assert opened == [trio.activations]
    words = ["analyze", str(trio.source), str(trio.nvfp4), "--activations", str(trio.activations), "--bootstrap", "5"]
    assert cli.main([*words, "--out", str(tmp_path / "command")]) == 0
    assert opened == [trio.activations] * 2
    arms = [GemmArm(arm="nvfp4", checkpoint=trio.nvfp4)]
    by_path = analyze_gemm(source=trio.source, arms=arms, activations=trio.activations, resamples=5)
    handed_on = analyze_gemm(source=trio.source, arms=arms, activations=read_activations(trio.activations), resamples=5)
    pd.testing.assert_frame_equal(by_path, handed_on, check_exact=True)
    assert by_path.attrs == handed_on.attrs


def test_dead_and_huge_layers_raise_no_warning(trio: Trio) -> None:
    gemm = analyze_gemm(
        source=trio.source,
        arms=[GemmArm(arm="nvfp4", checkpoint=trio.nvfp4)],
        activations=trio.activations,
        resamples=9,
    )
    clean = summarize(None, gemm).gemm[0].sqnr_db.pooled
    for power, sqnr, pooled_is_nan in ((0.0, np.nan, False), (0.0, -np.inf, True), (np.inf, 20.0, True)):
        rows = pd.concat([gemm, gemm[gemm["tokens"] > 0].head(3).assign(output_power=power, sqnr_db=sqnr)])
        pooled = summarize(None, rows).gemm[0].sqnr_db.pooled
        assert np.isnan(pooled) if pooled_is_nan else pooled == pytest.approx(clean)
    huge = np.r_[np.inf, np.ones(9)]
    assert np.isnan(_sqnr_with_interval(huge, huge, 100, 0)[0])
    assert np.isnan(_sqnr_with_interval(np.zeros(9), np.zeros(9), 100, 0)[1])
