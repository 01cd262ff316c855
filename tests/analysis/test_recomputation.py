"""Every statistic of mini-kimi's rows against an independent numpy recomputation, and the golden bands of three
distributions under three rules."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from workbench.kernels.reference import nvfp4_global_scale
from workbench.mini_models import model_path

from workbench.analysis.algebra import Sides, measure_matrix, measure_sides
from workbench.analysis.pooling import CAUSES, pool_rows
from workbench.analysis.sides import DenseSide, RoundedSide, StoredSide
from workbench.analysis.tensors import ArmPair, analyze_weights
from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.formats import quantize
from workbench.records import TensorRecord

from . import numpy_algebra as plain

SELECTED = "model.layers.[02].*"


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini") / "nvfp4"
    quantize_checkpoint(model_path(), folder, format="nvfp4", dialect="modelopt", shared_globals=False)
    return folder


@pytest.fixture(scope="module")
def frame(mini: Path):  # type: ignore[no-untyped-def]
    pair = ArmPair(first=mini, first_arm="nvfp4", second_arm="requant")
    return analyze_weights(source=model_path(), pairs=[pair], select=SELECTED)


def test_every_statistic_equals_an_independent_recomputation(mini: Path, frame) -> None:  # type: ignore[no-untyped-def]
    assert len(frame) == 64
    checked: set[str] = set()
    with open_checkpoint(model_path()) as source, open_checkpoint(mini) as first:
        for _, row in frame.iloc[::3].iterrows():
            w = source.read_dense(row["name"]).double().numpy()
            stored = {role: first.folder.load(t.name) for role, t in first.parts(row["name"]).items()}
            multiplier = float(stored["global_scale"])
            a, step1 = plain.decode_nvfp4(
                stored["values"].numpy(), stored["block_scales"].view(torch.uint8).numpy(), multiplier
            )
            b, step2 = plain.encode_mxfp4(a)
            d, _ = plain.encode_mxfp4(w)
            want = plain.figures(w, a, b, d)
            want |= {f"first_{k}": v for k, v in plain.attribution(w, a, step1).items()}
            want |= {f"second_{k}": v for k, v in plain.attribution(a, b, step2).items()}
            want |= {"scale_phase": math.log2(multiplier) % 1, "first_global_scale": multiplier, "sample_weight": 1.0}
            want["e2_code_asymmetry"] = plain.code_asymmetry(a, b, step2)
            for key, value in want.items():
                scale = plain.natural_scale(key, want)
                if "_error_" in key:
                    scale = want["power_e1" if key.startswith("first") else "power_e2"]
                assert row[key] == pytest.approx(float(value), rel=1e-6, abs=1e-5 * scale), (row["name"], key)
            blocks = ((b - w) ** 2).reshape(-1, 32).sum(-1)
            worst = int(blocks.argmax())
            assert (row["rows"], row["columns"]) == w.shape
            assert (row["worst_block_row"], row["worst_block_column"]) == divmod(32 * worst, w.shape[1])
            assert row["worst_block_share"] == pytest.approx(blocks[worst] / blocks.sum(), rel=1e-9)
            assert row["worst_block_excess"] == pytest.approx(blocks[worst] / blocks.mean(), rel=1e-9)
            assert row["worst_block_sqnr_db"] == pytest.approx(
                10 * np.log10((w.reshape(-1, 32)[worst] ** 2).sum() / blocks[worst]), abs=1e-6
            )
            checked |= want.keys()
    fields = {f.name for f in dataclasses.fields(TensorRecord)}
    numbers = {n for n in fields if frame[n].dtype.kind == "f"} - {n for n in fields if n.endswith(("_low", "_high"))}
    assert numbers - checked == {"worst_block_share", "worst_block_excess", "worst_block_sqnr_db"}
    words = fields - numbers - {n for n in fields if n.endswith(("_low", "_high"))}
    assert words == {
        "name", "layer", "expert", "projection", "shared_expert", "rows", "columns", "source_arm", "first_arm",
        "second_arm", "source_format", "first_format", "second_format", "second_rule", "worst_block_row",
        "worst_block_column", "missing", "interval_doubtful", "direct_arm",
    }  # fmt: skip
    for word, want_ in {
        "source_arm": "source", "first_arm": "nvfp4", "second_arm": "requant", "source_format": "bf16",
        "first_format": "nvfp4", "second_format": "mxfp4", "second_rule": "even", "missing": "",
    }.items():  # fmt: skip
        assert set(frame[word]) == {want_}, word
    for _, row in frame.iterrows():
        parts = row["name"].split(".")
        assert (row["layer"], row["projection"]) == (int(parts[2]), parts[-2])
        assert row["expert"] == (int(parts[5]) if ".experts." in row["name"] else -1)
        assert row["shared_expert"] == ("shared_experts" in row["name"])


def test_intervals_equal_an_independent_recomputation(mini: Path, frame) -> None:  # type: ignore[no-untyped-def]
    """Leaving out a block moves a figure a little more than its derivative says: by 1 in the number of blocks."""
    with open_checkpoint(model_path()) as source, open_checkpoint(mini) as first:
        for _, row in frame.iloc[[0, -1]].iterrows():
            w, a = (c.read_dense(row["name"]).double().numpy()[:32] for c in (source, first))
            b, d = plain.encode_mxfp4(a)[0], plain.encode_mxfp4(w)[0]
            got = measure_matrix(*(torch.from_numpy(x) for x in (w, a, b, d)))
            for key, (low, high) in plain.intervals(w, a, b, d).items():
                assert got[f"{key}_low"] == pytest.approx(low, abs=0.02 * (high - low)), key
                assert got[f"{key}_high"] == pytest.approx(high, abs=0.02 * (high - low)), key


def test_causes_sum_to_the_error_and_intervals_hold_the_point(frame) -> None:  # type: ignore[no-untyped-def]
    for arm, power in (("first", "power_e1"), ("second", "power_e2")):
        parts = frame[[c for c in CAUSES if c.startswith(arm)]].sum(axis=1)
        np.testing.assert_allclose(parts, frame[power], rtol=1e-12)
    assert (frame["first_error_saturation"] >= 0).all()
    # A power of two reaches up to a third too far or falls short: MXFP4's scales cost more than NVFP4's.
    assert (frame["second_error_scale"] / frame["power_e2"]).mean() > (
        frame["first_error_scale"] / frame["power_e1"]
    ).mean()
    for key in ("sqnr_total_db", "corr_e1_e2", "cov_e1_e2_share", "gain_total_excess"):
        assert ((frame[f"{key}_low"] < frame[key]) & (frame[key] < frame[f"{key}_high"])).all(), key


def test_codes_of_trained_weights_are_symmetric(frame) -> None:  # type: ignore[no-untyped-def]
    """Weights have no sign, so neither has rounding: the largest of 7 scores stays where chance leaves it."""
    assert frame["e2_code_asymmetry"].median() < 3.0
    counts = np.array(frame.attrs["codes"]["nvfp4|requant|even"]["gate_proj"])
    gates = frame[frame["projection"] == "gate_proj"]
    assert counts[:, 0].sum() == (gates["rows"] * gates["columns"]).sum()
    np.testing.assert_allclose(counts[1:8, 0], counts[9:16, 0], rtol=0.05)


def test_pooled_figures_are_those_of_one_large_matrix(mini: Path, frame) -> None:  # type: ignore[no-untyped-def]
    pooled = pool_rows(frame)
    with open_checkpoint(model_path()) as source, open_checkpoint(mini) as first:
        for level, members in (
            ("model", frame),
            ("layer", frame[frame["layer"] == 2]),
            ("expert", frame[(frame["layer"] == 2) & (frame["expert"] == 3)]),
        ):
            row = pooled[pooled["level"] == level].iloc[0 if level == "model" else -1]
            if level == "expert":
                row = pooled[(pooled["level"] == level) & (pooled["expert"] == 3)].iloc[0]
            flat: list[list[np.ndarray]] = [[], [], [], []]
            for name in members["name"]:
                w, a = (c.read_dense(name).double().numpy() for c in (source, first))
                for list_, values in zip(flat, (w, a, plain.encode_mxfp4(a)[0], plain.encode_mxfp4(w)[0]), strict=True):
                    list_.append(values.ravel())
            want = plain.figures(*(np.concatenate(part)[None] for part in flat))
            assert row["matrices"] == len(members)
            for key, value in want.items():
                tolerance = 1e-5 * plain.natural_scale(key, want)
                assert row[key] == pytest.approx(float(value), rel=1e-6, abs=tolerance), (level, key)
    whole = pooled[pooled["level"] == "model"].iloc[0]
    assert whole["sqnr_total_db_low"] < whole["sqnr_total_db"] < whole["sqnr_total_db_high"]
    assert whole["first_error_element"] > 0
    layers = pooled[pooled["level"] == "layer"]
    assert list(layers["layer"]) == [0, 2]


# NVFP4 alone; rule -> direct, total, quadrature, corr(e1, e2), corr(e2, a). 2048 x 4096, sigma 0.02, from
# an independent numpy simulation; the simulation's "ceil" is ceil(log2(amax / 6)), which is rceil here.
GOLDEN = {
    "gaussian": (
        20.44,
        {
            "floor": (18.86, 16.83, 16.52, -0.071, -0.293),
            "even": (19.01, 17.00, 16.76, -0.054, -0.190),
            "rceil": (18.52, 16.64, 16.42, -0.049, -0.156),
        },
    ),
    "student5": (
        20.69,
        {
            "floor": (17.97, 16.31, 16.17, -0.033, -0.395),
            "even": (18.15, 16.38, 16.36, -0.005, -0.267),
            "rceil": (17.57, 15.86, 15.85, -0.001, -0.211),
        },
    ),
    "laplace": (
        20.66,
        {
            "floor": (17.99, 16.30, 16.03, -0.063, -0.278),
            "even": (18.16, 16.29, 16.23, -0.016, -0.061),
            "rceil": (17.57, 15.89, 15.85, -0.010, -0.037),
        },
    ),
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, torch.Tensor]:
    """The simulation's weights: one after the other from one generator, sigma (of the normal one) and scale 0.02."""
    rng, size = np.random.default_rng(0), (2048, 4096)
    values = {
        "gaussian": rng.standard_normal(size),
        "student5": rng.standard_t(5, size),
        "laplace": rng.laplace(size=size),
    }
    return {name: torch.from_numpy((0.02 * of).astype(np.float32)) for name, of in values.items()}


def measure(whole: torch.Tensor, rows: int, rules: list[str]) -> dict[str, dict[str, float]]:
    """Figures of the first rows under the whole matrix's global scale."""
    source = DenseSide(whole[:rows])
    scale = nvfp4_global_scale(whole.abs().amax())
    first = StoredSide(quantize(whole[:rows], "nvfp4", global_scale=scale))
    return {
        rule: measure_sides(
            Sides(
                source=source,
                first=first,
                second=RoundedSide(first, "mxfp4", rule, "golden"),
                direct=RoundedSide(source, "mxfp4", rule, "golden"),
            )
        ).figures
        for rule in rules
    }


@pytest.mark.parametrize("distribution", GOLDEN)
def test_golden_bands(distribution: str, drawn: dict[str, torch.Tensor]) -> None:
    alone, rules = GOLDEN[distribution]
    for rule, got in measure(drawn[distribution], 256, list(rules)).items():
        direct, total, quadrature, corr, corr_a = rules[rule]
        assert got["sqnr_first_db"] == pytest.approx(alone, abs=0.03)
        assert got["sqnr_direct_db"] == pytest.approx(direct, abs=0.04), rule
        assert got["sqnr_total_db"] == pytest.approx(total, abs=0.05), rule
        assert got["sqnr_total_predicted_quadrature_db"] == pytest.approx(quadrature, abs=0.05), rule
        assert got["corr_e1_e2"] == pytest.approx(corr, abs=0.006), rule
        assert got["corr_e2_a"] == pytest.approx(corr_a, abs=0.008), rule
        assert abs(got["e2_mean_over_std"]) < 4e-3


# distribution -> rule -> ranges of total and direct (None: not given) over an octave of sigma, same simulation.
OCTAVE = {
    "gaussian": {
        "floor": ((16.5, 17.0), (18.57, 18.92)),
        "even": ((16.36, 17.14), (18.93, 19.05)),
        "rceil": ((16.3, 16.8), (18.52, 18.76)),
    },
    "student5": {"floor": ((16.2, 16.5), None), "even": ((16.1, 16.7), None), "rceil": ((15.8, 16.1), None)},
}


@pytest.mark.slow
@pytest.mark.parametrize("distribution", OCTAVE)
def test_golden_bands_over_an_octave(distribution: str, drawn: dict[str, torch.Tensor]) -> None:
    """NVFP4 is constant, direct moves a little, the chain by more than half a dB: the scale phase decides."""
    rules = OCTAVE[distribution]
    found = [measure(drawn[distribution] * 2 ** (i / 8), 256, list(rules)) for i in range(8)]
    for rule, (total, direct) in rules.items():
        assert np.ptp([f[rule]["sqnr_first_db"] for f in found]) < 0.002
        for key, band in (("sqnr_total_db", total), ("sqnr_direct_db", direct)):
            if band is not None:
                values = [f[rule][key] for f in found]
                within = 0.1 if distribution == "student5" else 0.05  # that simulation's sampling, its last digit
                assert band[0] - within < min(values) < max(values) < band[1] + within, (rule, key)


def test_over_an_octave_gaussian_weights_stay_within_the_bands(drawn: dict[str, torch.Tensor]) -> None:
    """NVFP4 is constant, direct moves a little, the chain by more than half a dB: the scale phase decides."""
    found = [measure(drawn["gaussian"] * 2 ** (i / 16), 64, ["even", "floor"]) for i in range(16)]
    even, floor = ([f[rule] for f in found] for rule in ("even", "floor"))
    assert np.ptp([f["sqnr_first_db"] for f in even]) < 0.002
    assert 18.88 < min(f["sqnr_direct_db"] for f in even) <= max(f["sqnr_direct_db"] for f in even) < 19.10
    totals = [f["sqnr_total_db"] for f in even]
    assert min(totals) == pytest.approx(16.36, abs=0.06)
    assert max(totals) == pytest.approx(17.14, abs=0.06)
    assert 16.20 < min(f["sqnr_total_db"] for f in floor) <= max(f["sqnr_total_db"] for f in floor) < 17.05
    correlations = [f["corr_e1_e2"] for f in even]
    assert min(correlations) < -0.06
    assert max(correlations) > 0.03
