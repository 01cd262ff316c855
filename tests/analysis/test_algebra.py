"""Error algebra against plain numpy float64, its edge cases, and the golden bands of Gaussian weights."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from workbench.kernels.reference import nvfp4_global_scale

from workbench.analysis.algebra import measure_matrix
from workbench.analysis.histograms import error_density
from workbench.errors import FormatError
from workbench.formats import quantize
from workbench.records import TensorRecord


def chain(w: torch.Tensor, rule: str = "even") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a = quantize(w, "nvfp4").dequantize()
    return a, quantize(a, "mxfp4", rule).dequantize(), quantize(w, "mxfp4", rule).dequantize()


def gaussian(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_figures_equal_a_direct_float64_computation(offset: float) -> None:
    w = gaussian(48, 160) + offset  # an offset makes the means matter in the correlations
    a, b, d = chain(w)
    got = measure_matrix(w, a, b, d)

    w64, a64, b64, d64 = (t.double().numpy().ravel() for t in (w, a, b, d))
    e1, e2, e = a64 - w64, b64 - a64, b64 - w64

    def db(signal: np.ndarray, error: np.ndarray) -> float:
        return float(10 * np.log10(np.mean(signal**2) / np.mean(error**2)))

    def corr(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x, y)[0, 1])

    power = np.mean(w64**2)
    want = {
        "power_source": power,
        "power_e1": np.mean(e1**2),
        "power_e2": np.mean(e2**2),
        "power_total": np.mean(e**2),
        "power_direct": np.mean((d64 - w64) ** 2),
        "sqnr_first_db": db(w64, e1),
        "sqnr_second_db": db(a64, e2),
        "sqnr_total_db": db(w64, e),
        "sqnr_direct_db": db(w64, d64 - w64),
        "sqnr_total_predicted_quadrature_db": 10 * np.log10(power / (np.mean(e1**2) + np.mean(e2**2))),
        "sqnr_total_predicted_linear_db": db(w64, e),
        "corr_e1_e2": corr(e1, e2),
        "corr_e2_a": corr(e2, a64),
        "corr_e1_w": corr(e1, w64),
        "gain_total": np.dot(w64, b64) / np.dot(w64, w64),
        "e2_mean": np.mean(e2),
        "e2_std": np.std(e2),
        "e2_mean_over_std": np.mean(e2) / np.std(e2),
    }
    for key, value in want.items():
        assert got[key] == pytest.approx(float(value), rel=1e-10, abs=1e-15), key
    fields = [f.name for f in dataclasses.fields(TensorRecord)]
    made = fields[fields.index("power_source") : fields.index("worst_block_row")]
    assert set(got) == set(made)


def test_no_error_is_infinite_sqnr_and_an_undefined_correlation() -> None:
    w = gaussian(16, 64)
    got = measure_matrix(w, w, w, w)
    for key in ("sqnr_first_db", "sqnr_second_db", "sqnr_total_db", "sqnr_direct_db", "sqnr_total_db_low"):
        assert got[key] == math.inf, key
    assert math.isnan(got["corr_e1_e2"])
    assert math.isnan(got["corr_e1_e2_low"])
    assert got["power_e1"] == 0
    assert got["gain_total"] == 1


def test_constant_errors_have_no_correlation() -> None:
    w = gaussian(16, 64).double()
    a = w + 0.0078125  # exact in float64
    got = measure_matrix(w, a, a + 0.0078125)
    assert math.isnan(got["corr_e1_e2"])
    assert math.isnan(got["corr_e2_a"])
    assert math.isnan(got["corr_e1_w"])
    assert got["e2_mean"] == pytest.approx(0.0078125, rel=1e-12)
    assert got["e2_std"] == 0
    assert math.isnan(got["e2_mean_over_std"])


def test_all_zero_matrix() -> None:
    zero = torch.zeros(16, 64)
    got = measure_matrix(zero, zero, zero, zero)
    assert math.isnan(got["sqnr_total_db"])
    assert math.isnan(got["gain_total"])


def test_a_second_quantization_that_undoes_the_first_has_no_total_error() -> None:
    w = gaussian(16, 64)
    got = measure_matrix(w, quantize(w, "nvfp4").dequantize(), w)
    assert got["sqnr_total_db"] == math.inf
    assert math.isfinite(got["sqnr_first_db"])
    assert got["corr_e1_e2"] == pytest.approx(-1)


def test_a_nan_in_an_arm_is_nan_in_its_figures() -> None:
    w = gaussian(16, 64)
    b = quantize(w, "mxfp4").dequantize()
    b[3, 5] = math.nan
    got = measure_matrix(w, w.clone(), b, w)
    for key in ("sqnr_total_db", "sqnr_total_predicted_linear_db", "corr_e1_e2", "e2_std", "gain_total"):
        assert math.isnan(got[key]), key
    assert got["sqnr_direct_db"] == math.inf


def test_a_zeroed_matrix_has_no_signal_left() -> None:
    w, zero = gaussian(16, 64), torch.zeros(16, 64)
    got = measure_matrix(w, zero, zero)
    assert got["sqnr_first_db"] == 0
    assert got["sqnr_total_db"] == 0
    assert got["gain_total"] == 0
    assert math.isnan(got["corr_e1_e2"])


def test_missing_arms_leave_their_figures_undefined() -> None:
    w = gaussian(16, 64)
    b = quantize(w, "mxfp4").dequantize()
    got = measure_matrix(w, None, b, None)
    assert math.isfinite(got["sqnr_total_db"])
    for key in ("sqnr_first_db", "power_e1", "power_e2", "corr_e1_e2", "sqnr_direct_db", "sqnr_direct_db_low"):
        assert math.isnan(got[key]), key


def test_golden_bands_of_gaussian_weights() -> None:
    """2048 x 4096, sigma 0.02, numpy seed 0: 20.44 / 17.00 / 19.01 dB, quadrature 16.76, corr(e1,e2) -0.054, corr(e2,a)
    -0.190, from an independent numpy simulation. The first 256 rows under the whole matrix's global scale."""
    whole = torch.from_numpy((0.02 * np.random.default_rng(0).standard_normal((2048, 4096))).astype(np.float32))
    w = whole[:256]
    a = quantize(w, "nvfp4", global_scale=nvfp4_global_scale(whole.abs().amax())).dequantize()
    got = measure_matrix(w, a, quantize(a, "mxfp4").dequantize(), quantize(w, "mxfp4").dequantize())
    assert got["sqnr_first_db"] == pytest.approx(20.44, abs=0.02)
    assert got["sqnr_total_db"] == pytest.approx(17.00, abs=0.04)
    assert got["sqnr_direct_db"] == pytest.approx(19.01, abs=0.02)
    assert got["sqnr_total_predicted_quadrature_db"] == pytest.approx(16.76, abs=0.04)
    assert got["corr_e1_e2"] == pytest.approx(-0.054, abs=0.005)
    assert got["corr_e2_a"] == pytest.approx(-0.190, abs=0.006)
    assert abs(got["e2_mean_over_std"]) < 4e-3


def test_intervals_are_the_same_each_time_and_hold_the_point() -> None:
    w = gaussian(64, 256)
    a, b, d = chain(w)
    once = measure_matrix(w, a, b, d)
    assert once == measure_matrix(w, a, b, d)
    for key in ("sqnr_first_db", "sqnr_total_db", "sqnr_direct_db", "corr_e1_e2"):
        assert once[f"{key}_low"] < once[key] < once[f"{key}_high"], key


def test_interval_covers_fresh_matrices() -> None:
    """The width is right: the spread over 60 matrices of one distribution matches the intervals'."""
    values, widths = [], []
    for seed in range(60):
        w = gaussian(32, 128, seed=seed)
        b = quantize(w, "mxfp4").dequantize()
        got = measure_matrix(w, None, b)
        values.append(got["sqnr_total_db"])
        widths.append(got["sqnr_total_db_high"] - got["sqnr_total_db_low"])
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.std(values), rel=0.3)


def test_large_matrices_group_blocks_and_keep_the_figures() -> None:
    w = gaussian(300, 2080)  # 19,500 blocks of 32: units of 5 blocks, the last unit whole or not
    w = torch.cat((w, gaussian(1, 2080, seed=1)))
    b = quantize(w, "mxfp4").dequantize()
    got = measure_matrix(w, None, b)
    error = (b.double() - w.double()).square().sum()
    assert got["sqnr_total_db"] == pytest.approx(float(10 * torch.log10(w.double().square().sum() / error)), abs=1e-9)


def test_shapes_that_differ_are_named() -> None:
    w = gaussian(16, 64)
    with pytest.raises(FormatError, match=r"q_proj.*second.*\(16, 32\).*\(16, 64\)"):
        measure_matrix(w, w, w[:, :32], name="q_proj")
    with pytest.raises(FormatError, match="K = 40 is not a multiple"):
        measure_matrix(w[:, :40], None, w[:, :40], name="q_proj")


def test_density_counts_pairs_of_normalised_errors() -> None:
    w = gaussian(64, 256)
    a, b, _ = chain(w)
    counts = error_density(w, a, b, samples=10**6)
    assert counts.shape == (48, 48)
    assert 0.97 * w.numel() <= counts.sum() <= w.numel()
    assert error_density(w, w, b).sum() == 0
