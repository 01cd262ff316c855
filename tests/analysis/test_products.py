"""Second moments against rows, the averaging claim, and runtimes that merge global scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.analysis.averaging import averaging_study
from workbench.analysis.fused import fused_view
from workbench.analysis.gemm import GemmArm, analyze_gemm
from workbench.analysis.moments import expected_power, second_moment
from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.formats import quantize
from workbench.formats.activations import read_activations, write_activations

from .trio_checkpoints import MODULES, Trio


def test_expected_noise_is_the_measured_noise_of_the_rows_it_comes_from(trio: Trio) -> None:
    arms = [GemmArm(arm="nvfp4", checkpoint=trio.nvfp4), GemmArm(arm="mxfp4", checkpoint=trio.mxfp4)]
    settings = {"source": trio.source, "arms": arms, "activations": trio.activations, "resamples": 2}
    measured = analyze_gemm(**settings)
    expected = analyze_gemm(**settings, moments=True)
    assert set(expected["activations"]) == {"moments (full)"}
    assert set(expected["kind"]) == {"weight"}
    both = expected.merge(measured[measured["kind"] == "weight"], on=["name", "arm"], suffixes=("", "_rows"))
    assert len(both) == 2 * len(MODULES)
    seen = both["tokens"] > 0
    np.testing.assert_allclose(both["sqnr_db"][seen], both["sqnr_db_rows"][seen], atol=2e-5)
    np.testing.assert_allclose(both["output_power"][seen], both["output_power_rows"][seen], rtol=1e-5)
    assert both["sqnr_db"][~seen].isna().all()


def test_without_a_file_inputs_are_white_and_nothing_is_gained(trio: Trio) -> None:
    frame = analyze_gemm(source=trio.source, arms=[GemmArm(arm="nvfp4", checkpoint=trio.nvfp4)], moments=True)
    assert set(frame["activations"]) == {"moments (white)"}
    np.testing.assert_allclose(frame["coherence_gain_db"], 0, atol=1e-9)


@pytest.mark.parametrize(
    ("whole", "rows", "said"),
    [(True, 20, "moments (full)"), (False, 0, "moments (diagonal)"), (False, 20, "moments (full)")],
)
def test_a_whole_moment_stands_before_the_sample_and_the_sample_before_a_diagonal(
    whole: bool, rows: int, said: str, trio: Trio, tmp_path: Path
) -> None:
    module, path = MODULES[0], tmp_path / "a.safetensors"
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 64)
    full = x.T @ x / len(x)
    stored = full if whole else full.diagonal().clone()
    write_activations(
        path, inputs={module: x[:rows]}, amax={module: 9.0}, tokens_seen={module: 500}, second_moments={module: stored}
    )
    assert torch.equal(read_activations(path).second_moment(module), stored)
    arm = GemmArm(arm="nvfp4", checkpoint=trio.nvfp4)
    frame = analyze_gemm(source=trio.source, arms=[arm], activations=path, moments=True)
    row = frame[frame["name"] == f"{module}.weight"].iloc[0]
    w = trio.weights[f"{module}.weight"].double()
    error = quantize(w.float(), "nvfp4").dequantize().double() - w
    m = full.double() if whole else x[:rows].double().T @ x[:rows].double() / rows if rows else stored.double().diag()
    want = 10 * torch.log10((w @ m * w).sum() / (error @ m * error).sum())
    assert row["sqnr_db"] == pytest.approx(float(want), abs=1e-4)
    assert row["activations"] == said


def test_full_moments_know_what_a_diagonal_cannot() -> None:
    """Inputs that all move together: the noise's sum matters, not its squares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, generator=generator) * torch.ones(1, 64)
    dw = torch.randn(16, 64, generator=generator)
    moment = second_moment(x)
    direct = (x.double() @ dw.double().T).square().sum(-1).mean()
    assert expected_power(dw, moment) == pytest.approx(float(direct), rel=1e-9)
    assert expected_power(dw, moment.diagonal()) == pytest.approx(
        float(dw.double().square().sum() * x.double().square().mean()), rel=1e-9
    )


def test_a_wide_product_averages_nothing_away_unless_signal_and_inputs_are_aligned() -> None:
    widths = (256, 1024, 4096, 16384)
    plain = averaging_study(widths)
    assert max(abs(point.coherence_gain_db) for point in plain) < 0.15
    assert plain[-1].claimed_gain_db - plain[0].claimed_gain_db == pytest.approx(9.03, abs=0.01)
    aligned = averaging_study(widths, inputs="aligned")
    assert all(point.coherence_gain_db > 9 for point in aligned)


def test_merged_globals_cost_what_decoding_under_them_costs(trio: Trio) -> None:
    pair = ArmPair(first=trio.nvfp4, first_arm="nvfp4", second_arm="requant")
    fused = fused_view(analyze_weights(source=trio.source, pairs=[pair]))
    assert set(fused["members"]) == {2}
    group = fused[fused["name"].str.contains("experts.0")]
    assert len(group) == 2
    tensors = {name: quantize(trio.weights[name].float(), "nvfp4") for name in group["name"]}
    multipliers = {name: float(q.global_scale) for name, q in tensors.items()}
    for _, row in group.iterrows():
        w, q = trio.weights[row["name"]].double(), tensors[row["name"]]
        for merged, column in (
            (max(multipliers.values()), "sqnr_merged_largest_db"),
            (multipliers[group["name"].iloc[0]], "sqnr_merged_first_db"),
        ):
            a = q.dequantize().double() * (merged / multipliers[row["name"]])
            want = 10 * np.log10(float(w.square().sum() / (a - w).square().sum()))
            assert row[column] == pytest.approx(want, abs=1e-6)
        assert max(row["ratio_largest"], 1.0) == row["ratio_largest"]
    assert (group["sqnr_merged_largest_db"] <= group["sqnr_first_db"] + 1e-9).any()
