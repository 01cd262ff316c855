"""A run folder of a model with a trillion parameters: the tables of 69,303 matrices, drawn at random.

make_large_run(Path("run"))

61 layers, the first dense, then 384 routed experts and a shared one, as in Kimi-K2. Figures are seeded noise around
what NVFP4 and MXFP4 really do; one expert is far worse.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.analysis.summary import summarize
from workbench.records import write_json, write_text

LAYERS, EXPERTS = 61, 384
MATRICES = 3 + 60 * (3 * EXPERTS + 3)
BROKEN = "model.layers.7.mlp.experts.300.up_proj.weight"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def make_large_run(run_dir: Path) -> None:
    """tensors.parquet, gemm.parquet, analysis.json and config.yaml of one pair."""
    run_dir.mkdir(parents=True)
    tensors = _tensors()
    gemm = _gemm(tensors)
    tensors.to_parquet(run_dir / "tensors.parquet")
    gemm.to_parquet(run_dir / "gemm.parquet")
    write_json(run_dir / "analysis.json", summarize(tensors, gemm))
    write_text(run_dir / "config.yaml", "name: large\narms:\n  source: {}\n  nvfp4: {}\n  nvfp4_to_mxfp4: {}\n")


def _tensors() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = [(f"model.layers.0.mlp.{p}.weight", 0, -1, p, False) for p in _PROJECTIONS]
    for layer in range(1, LAYERS):
        block = f"model.layers.{layer}.mlp"
        rows += [(f"{block}.experts.{e}.{p}.weight", layer, e, p, False) for e in range(EXPERTS) for p in _PROJECTIONS]
        rows += [(f"{block}.shared_experts.{p}.weight", layer, -1, p, True) for p in _PROJECTIONS]
    frame = pd.DataFrame(rows, columns=["name", "layer", "expert", "projection", "shared_expert"])
    n = len(frame)
    assert n == MATRICES
    phase = rng.random(n)
    first = 20.45 + 0.12 * rng.standard_normal(n)
    corr = 0.06 * np.cos(2 * math.pi * phase) + 0.01 * rng.standard_normal(n)
    total = 16.75 - 7 * corr + 0.1 * rng.standard_normal(n)
    first[0], corr[1], total[2] = math.inf, math.nan, -math.inf
    total[frame["name"] == BROKEN] = 2.5
    noise = {key: 1e-4 * (1 + rng.random(n)) for key in ("power_source", "power_e1", "power_e2", "power_total")}
    return frame.assign(
        rows=2048, columns=7168, source_arm="source", first_arm="nvfp4", second_arm="nvfp4_to_mxfp4",
        source_format="bf16", first_format="nvfp4", second_format="mxfp4", second_rule="even",
        first_global_scale=2.0 ** (phase - 16), scale_phase=phase, **noise, power_direct=noise["power_total"] * 0.6,
        sqnr_first_db=first, sqnr_first_db_low=first - 0.02, sqnr_first_db_high=first + 0.02,
        sqnr_second_db=19.2 + 0.1 * rng.standard_normal(n), sqnr_total_db=total, sqnr_total_db_low=total - 0.02,
        sqnr_total_db_high=total + 0.02, sqnr_direct_db=19.0 + 0.1 * rng.standard_normal(n), sqnr_direct_db_low=18.9,
        sqnr_direct_db_high=19.1, sqnr_total_predicted_quadrature_db=total + 7 * corr,
        sqnr_total_predicted_linear_db=total, residual_quadrature_db=-7 * corr, corr_e1_e2=corr,
        corr_e1_e2_low=corr - 0.01, corr_e1_e2_high=corr + 0.01, corr_e2_a=0.03, corr_e1_w=-0.01,
        gain_total=1 + 0.01 * rng.standard_normal(n), gain_total_excess=0.02 + 0.005 * rng.standard_normal(n),
        e2_mean=0.0, e2_std=0.002, e2_mean_over_std=0.001 * rng.standard_normal(n),
        e2_code_asymmetry=rng.chisquare(3, n), worst_block_row=5, worst_block_column=32, worst_block_share=0.001,
        worst_block_excess=3 + rng.chisquare(3, n), worst_block_sqnr_db=13.0, missing="", sample_weight=1.0,
    )  # fmt: skip


def _gemm(tensors: pd.DataFrame) -> pd.DataFrame:
    rng = np.random.default_rng(4)
    place = tensors[["name", "layer", "expert", "projection", "shared_expert"]]
    parts = []
    for kind, loss in (("weight", 0.0), ("both", 2.0)):
        gain = 0.05 * rng.standard_normal(len(place))
        parts.append(
            place.assign(
                arm="nvfp4_to_mxfp4", weight_format="mxfp4", activation_format="mxfp4", kind=kind,
                activations="captured", tokens=64, tokens_seen=640, sqnr_db=16.75 - loss + gain,
                sqnr_db_low=16.5 - loss, sqnr_db_high=17.0 - loss, weight_sqnr_db=16.75,
                coherence_gain_db=gain if kind == "weight" else math.nan, output_power=1.0,
            )
        )  # fmt: skip
    return pd.concat(parts, ignore_index=True)


if __name__ == "__main__":
    make_large_run(Path(sys.argv[1]))
