"""Output noise of matrix products against plain numpy, expert tokens, and the summary with published figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from workbench.kernels.reference import mxfp4_qdq_activation, nvfp4_qdq_activation

from workbench.analysis.gemm import GemmArm, analyze_gemm
from workbench.analysis.summary import AnalysisSummary, summarize
from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.errors import CheckpointError
from workbench.formats import quantize
from workbench.formats.activations import read_activations, write_activations
from workbench.records import from_json, to_json

from .trio_checkpoints import INPUT_SCALE, MODULES, Trio


def arms(trio: Trio) -> list[GemmArm]:
    return [
        GemmArm(arm="nvfp4", checkpoint=trio.nvfp4, activation_format="same"),
        GemmArm(arm="nvfp4_to_mxfp4", checkpoint=trio.nvfp4, requant_format="mxfp4", activation_format="same"),
        GemmArm(arm="mxfp4_direct", checkpoint=trio.mxfp4),
    ]


def row_of(frame, name: str, arm: str, kind: str):  # type: ignore[no-untyped-def]
    return frame[(frame["name"] == name) & (frame["arm"] == arm) & (frame["kind"] == kind)].iloc[0]


def test_noise_equals_plain_matrix_products(trio: Trio) -> None:
    frame = analyze_gemm(source=trio.source, arms=arms(trio), activations=trio.activations)
    assert len(frame) == 3 * 3 * len(MODULES)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"  # its input is an alias of the gate's
    w = trio.weights[name].float()
    x = read_activations(trio.activations).input(name.removesuffix(".weight")).float()
    w_first = quantize(w, "nvfp4").dequantize()
    rounded = {
        "nvfp4": (w_first, nvfp4_qdq_activation(x, torch.tensor(INPUT_SCALE))),
        "nvfp4_to_mxfp4": (quantize(w_first, "mxfp4").dequantize(), mxfp4_qdq_activation(x)),
        "mxfp4_direct": (quantize(w, "mxfp4").dequantize(), x),
    }
    y = x.double().numpy() @ w.double().numpy().T
    for arm, (w_hat, x_hat) in rounded.items():
        for kind, (xs, ws) in {"weight": (x, w_hat), "activation": (x_hat, w), "both": (x_hat, w_hat)}.items():
            error = xs.double().numpy() @ ws.double().numpy().T - y
            row = row_of(frame, name, arm, kind)
            with np.errstate(divide="ignore"):
                want = 10 * np.log10((y**2).sum() / (error**2).sum())
            assert row["sqnr_db"] == pytest.approx(want, abs=1e-4), (arm, kind)
            assert row["weight_sqnr_db"] == pytest.approx(
                float(10 * torch.log10(w.square().sum() / (w_hat - w).square().sum())), abs=1e-3
            )
            assert row["output_power"] == pytest.approx((y**2).sum(axis=1).mean(), rel=1e-5)
    weight = row_of(frame, name, "nvfp4", "weight")
    assert weight["coherence_gain_db"] == pytest.approx(weight["sqnr_db"] - weight["weight_sqnr_db"])
    assert math.isnan(row_of(frame, name, "nvfp4", "both")["coherence_gain_db"])
    assert row_of(frame, name, "mxfp4_direct", "activation")["sqnr_db"] == math.inf


def test_experts_see_only_their_own_tokens(trio: Trio) -> None:
    frame = analyze_gemm(source=trio.source, arms=arms(trio), activations=trio.activations)
    many, few, none = (
        row_of(frame, f"model.layers.1.mlp.experts.{e}.gate_proj.weight", "nvfp4", "both") for e in range(3)
    )
    assert (many["tokens"], many["tokens_seen"]) == (40, 400)
    assert many["sqnr_db_low"] < many["sqnr_db"] < many["sqnr_db_high"]
    assert (few["tokens"], few["tokens_seen"]) == (5, 50)
    assert math.isfinite(few["sqnr_db"])
    assert math.isnan(few["sqnr_db_low"])
    assert none["tokens"] == 0
    assert math.isnan(none["sqnr_db"])
    assert math.isfinite(none["weight_sqnr_db"])


def test_gaussian_rows_need_no_file_and_are_seeded(trio: Trio) -> None:
    once = analyze_gemm(source=trio.source, arms=arms(trio), gaussian_tokens=64, seed=1)
    again = analyze_gemm(source=trio.source, arms=arms(trio), gaussian_tokens=64, seed=1)
    assert once.equals(again)
    assert set(once["activations"]) == {"gaussian"}
    weight = once[once["kind"] == "weight"]
    # Zero-mean incoherent rows: the output's SQNR is the weights', no "averaging over K".
    assert weight["coherence_gain_db"].abs().max() < 1.0
    assert abs(weight["coherence_gain_db"].mean()) < 0.15


def test_rows_of_another_width_are_an_error_that_names_the_tensor(trio: Trio, tmp_path) -> None:  # type: ignore[no-untyped-def]
    module = MODULES[0]
    path = tmp_path / "a.safetensors"
    write_activations(path, inputs={module: torch.ones(9, 32)}, amax={module: 1.0}, tokens_seen={module: 9})
    with pytest.raises(CheckpointError, match=f"{module}.weight takes 64 inputs"):
        analyze_gemm(source=trio.source, arms=arms(trio), activations=path)


def test_modules_that_were_not_captured_keep_a_row(trio: Trio, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.safetensors"
    write_activations(path, inputs={"other": torch.ones(9, 64)}, amax={"other": 1.0}, tokens_seen={"other": 9})
    frame = analyze_gemm(source=trio.source, arms=arms(trio), activations=path)
    assert len(frame) == 3 * 3 * len(MODULES)
    assert (frame["tokens"] == 0).all()


def test_summary_pools_by_power_and_sets_published_figures_beside_ours(trio: Trio) -> None:
    pair = ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="nvfp4_to_mxfp4")
    tensors = analyze_weights(source=trio.source, pairs=[pair])
    gemm = analyze_gemm(source=trio.source, arms=arms(trio), activations=trio.activations)
    summary = summarize(tensors, gemm)
    (got,) = summary.pairs
    size = tensors["rows"] * tensors["columns"]
    want = 10 * np.log10((tensors["power_source"] * size).sum() / (tensors["power_total"] * size).sum())
    assert got.sqnr_total_db.pooled == pytest.approx(want)
    assert got.sqnr_total_db.mean == pytest.approx(tensors["sqnr_total_db"].mean())
    assert got.sqnr_total_db.minimum == tensors["sqnr_total_db"].min()
    assert got.loss_to_first_db.pooled == pytest.approx(got.sqnr_first_db.pooled - got.sqnr_total_db.pooled)
    assert got.mean_abs_corr_e1_e2 == pytest.approx(tensors["corr_e1_e2"].abs().mean())
    assert got.matrices == len(MODULES)
    by_kind = {(g.arm, g.kind): g for g in summary.gemm}
    assert by_kind["nvfp4", "both"].without_tokens == 2  # both matrices of the expert without a token
    rows = gemm[(gemm["arm"] == "nvfp4") & (gemm["kind"] == "both") & (gemm["tokens"] > 0)]
    signal = rows["output_power"] * rows["tokens_seen"]
    noise = signal * 10 ** (-rows["sqnr_db"] / 10)
    assert by_kind["nvfp4", "both"].sqnr_db.pooled == pytest.approx(10 * np.log10(signal.sum() / noise.sum()))
    claims = {c.claim: c for c in summary.claims}
    output = claims["GEMM output SQNR after requantization: mean"]
    assert output.published == 17.0
    assert output.measured == pytest.approx(by_kind["nvfp4_to_mxfp4", "both"].sqnr_db.mean)
    assert output.measured_weight_only == pytest.approx(by_kind["nvfp4_to_mxfp4", "weight"].sqnr_db.mean)
    assert output.holds == "only weight-only"  # rounded activations cost about 2 dB more
    assert from_json(AnalysisSummary, to_json(summary)).pairs[0].density == got.density


def test_summary_without_products_says_not_measured(trio: Trio) -> None:
    pair = ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="nvfp4_to_mxfp4")
    summary = summarize(analyze_weights(source=trio.source, pairs=[pair]), None)
    assert [c.holds for c in summary.claims][:2] == ["not measured", "not measured"]
    assert summarize(None, None) == AnalysisSummary(pairs=(), gemm=(), claims=())
