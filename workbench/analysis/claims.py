"""The three published figures of requantizing NVFP4 to MXFP4, beside ours.

    claims = check_claims(pair_summary, gemm_frame, seed)

Every matrix counts once, as in the published means: pooled by power, the one layer with the largest outputs would speak
for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .spreads import spread_of

if TYPE_CHECKING:
    import pandas as pd

    from .summary import PairSummary

_SOURCE = "NVFP4 to MXFP4 requantization write-up (SGLang blog, 2026-09): Qwen3.5-397B-A17B expert weights"
Measured = tuple[float, float, float]
_UNMEASURED: Measured = (math.nan, math.nan, math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A published figure beside ours. holds: "yes" within `tolerance`, "only weight-only" (the weight-only figure is
    within it, the one with rounded activations is not), "no", or "not measured". `measured` is the figure for what a
    4-bit matrix product really computes (weights and activations rounded) where there is one, else the weights'."""

    claim: str
    source: str
    unit: str
    arm: str
    published: float
    tolerance: float
    measured: float
    measured_low: float
    measured_high: float
    measured_weight_only: float
    holds: str


def check_claims(pair: PairSummary, gemm: pd.DataFrame | None, seed: int) -> list[Claim]:
    """The three published figures of NVFP4 -> MXFP4. Tolerances: half a unit of what was printed, 0.05 for corr."""
    if pair.first_format != "nvfp4" or pair.second_format != "mxfp4":
        return []
    output, loss = _output_spread(gemm, pair, "both", seed), _loss_spread(gemm, pair, "both", seed)
    output_w, loss_w = _output_spread(gemm, pair, "weight", seed), _loss_spread(gemm, pair, "weight", seed)
    corr = pair.corr_e1_e2
    label = f"{pair.second_arm} ({pair.second_rule})"
    return [
        _claim("GEMM output SQNR after requantization: mean", "dB", label, 17.0, 0.5, output, output_w),
        _claim("GEMM output SQNR lost against NVFP4 alone: mean", "dB", label, 3.6, 0.5, loss, loss_w),
        _claim(
            "e1 and e2 nearly uncorrelated: mean correlation",
            "",
            label,
            -0.04,
            0.05,
            (corr.mean, corr.mean_low, corr.mean_high),
            None,
        ),
    ]


def _claim(
    claim: str, unit: str, arm: str, published: float, tolerance: float, measured: Measured, weight: Measured | None
) -> Claim:
    weight_only = math.nan if weight is None else weight[0]
    if math.isnan(measured[0]) and math.isnan(weight_only):
        holds = "not measured"
    elif abs(measured[0] - published) <= tolerance:
        holds = "yes"
    elif abs(weight_only - published) <= tolerance:
        holds = "only weight-only"
    else:
        holds = "no"
    return Claim(
        claim=claim,
        source=_SOURCE,
        unit=unit,
        arm=arm,
        published=published,
        tolerance=tolerance,
        measured=measured[0],
        measured_low=measured[1],
        measured_high=measured[2],
        measured_weight_only=weight_only,
        holds=holds,
    )


def _output_spread(gemm: pd.DataFrame | None, pair: PairSummary, kind: str, seed: int) -> Measured:
    rows = _rows(gemm, pair.second_arm, kind)
    return _UNMEASURED if rows is None else _mean_over_matrices(rows["sqnr_db"], seed)


def _loss_spread(gemm: pd.DataFrame | None, pair: PairSummary, kind: str, seed: int) -> Measured:
    first, second = _rows(gemm, pair.first_arm, kind), _rows(gemm, pair.second_arm, kind)
    if first is None or second is None:
        return _UNMEASURED
    both = first.merge(second, on="name", suffixes=("_first", "_second"))
    return _mean_over_matrices(both["sqnr_db_first"] - both["sqnr_db_second"], seed)


def _mean_over_matrices(values: pd.Series, seed: int) -> Measured:
    """Every matrix counts once: pooled by power, the one layer with the largest outputs would speak for all."""
    spread = spread_of(values.to_numpy(np.float64), None, seed)
    return spread.mean, spread.mean_low, spread.mean_high


def _rows(gemm: pd.DataFrame | None, arm: str, kind: str) -> pd.DataFrame | None:
    if gemm is None or not len(gemm):
        return None
    rows = gemm[(gemm["arm"] == arm) & (gemm["kind"] == kind) & (gemm["tokens"] > 0)]
    return rows if len(rows) else None
