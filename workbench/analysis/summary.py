"""The run's figures in one record: pooled SQNRs, correlations, GEMM noise, and what was published beside them.

    summary = summarize(tensors_frame, gemm_frame)
    write_json(run_dir / "analysis.json", summary)

Pooled figures weigh by power: 10 log10(sum of signal power / sum of error power) over all elements. Intervals are over
matrices (`spreads.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .claims import Claim, check_claims
from .faults import Fault, count_faults
from .figures import WITH_INTERVAL, sqnr_db
from .spreads import Pool, Spread, distinct, mean_of, spread_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AnalysisSummary",
    "Claim",
    "ErrorDensity",
    "GemmSummary",
    "PairSummary",
    "Spread",
    "WorstBlockRecord",
    "summarize",
]

_WORST_BLOCKS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorDensity:
    """Counts over (e1 / rms e1, e2 / rms e2), pooled over matrices; counts[i][j]: e1 in bin i, e2 in bin j of
    equal bins on [-limit, limit)."""

    limit: float
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSummary:
    """All matrices of one (first, second, rule). SQNRs and losses (positive = worse) in dB."""

    source_arm: str
    first_arm: str
    second_arm: str
    second_rule: str
    source_format: str
    first_format: str
    second_format: str
    matrices: int
    weights: int
    sqnr_first_db: Spread
    sqnr_total_db: Spread
    sqnr_direct_db: Spread
    loss_to_first_db: Spread
    loss_to_direct_db: Spread
    corr_e1_e2: Spread
    mean_abs_corr_e1_e2: float
    e2_mean: float
    e2_std: float
    e2_mean_over_std: float
    max_abs_e2_mean_over_std: float
    density: ErrorDensity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSummary:
    """Output SQNR of one arm and kind over all layers that saw a token. without_tokens: matrices left out for that."""

    arm: str
    kind: str
    activations: str
    weight_format: str
    activation_format: str
    sqnr_db: Spread
    weight_sqnr_db: Spread
    coherence_gain_db: Spread
    without_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstBlockRecord:
    """A scale block far worse than its matrix. row, column: its first element; share: of the matrix's error; excess:
    its mean squared error over the matrix's; sqnr_db: its own."""

    tensor: str
    second_arm: str
    row: int
    column: int
    share: float
    excess: float
    sqnr_db: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Matrices that one stored arm of a pair quantizes and the other does not; examples: the first of their names."""

    arm: str
    other: str
    matrices: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisSummary:
    """analysis.json. missing: arms that were not given ("" : none); what needs them is NaN.

    worst_blocks: of all matrices, by how much their error exceeds their matrix's mean. faults: what could not be
    analyzed, or is in doubt; fault_counts: by kind. measured, of: matrices, and what a sample chose from.
    doubtful: by figure, matrices whose interval rests on few blocks. alone: what one arm of a pair quantizes alone.
    """

    pairs: tuple[PairSummary, ...]
    gemm: tuple[GemmSummary, ...]
    claims: tuple[Claim, ...]
    missing: str = ""
    worst_blocks: tuple[WorstBlockRecord, ...] = ()
    faults: tuple[Fault, ...] = ()
    fault_counts: dict[str, int] = field(default_factory=dict)
    measured: int = 0
    of: int = 0
    doubtful: dict[str, int] = field(default_factory=dict)
    alone: tuple[Alone, ...] = ()


def summarize(tensors: pd.DataFrame | None, gemm: pd.DataFrame | None = None, *, seed: int = 0) -> AnalysisSummary:
    """Summarize the tables of `analyze_weights` and `analyze_gemm` (either may be None or empty)."""
    pairs: list[PairSummary] = []
    if tensors is not None and len(tensors):
        densities = tensors.attrs.get("error_density", {})
        for key, group in tensors.groupby(["first_arm", "second_arm", "second_rule"], sort=False):
            pairs.append(_summarize_pair(group, densities.get("|".join(key)), seed))
    layers: list[GemmSummary] = []
    if gemm is not None and len(gemm):
        for _, group in gemm.groupby(["arm", "kind"], sort=False):
            layers.append(_summarize_gemm(group, seed))
    claims = [claim for pair in pairs for claim in check_claims(pair, gemm, seed)]
    faults = tuple(Fault(**fault) for fault in tensors.attrs.get("faults", [])) if tensors is not None else ()
    measured = 0 if tensors is None else int(tensors["name"].nunique())
    of = 0.0 if tensors is None else float(tensors.drop_duplicates("name")["sample_weight"].sum())
    return AnalysisSummary(
        pairs=tuple(pairs),
        gemm=tuple(layers),
        claims=tuple(claims),
        missing="" if tensors is None or not len(tensors) else distinct(tensors["missing"]),
        worst_blocks=() if tensors is None else _worst_blocks(tensors),
        faults=faults,
        fault_counts=count_faults(faults),
        measured=measured,
        of=round(of),
        doubtful={} if tensors is None else _doubtful(tensors),
        alone=() if tensors is None else _alone(tensors),
    )


def _alone(tensors: pd.DataFrame) -> tuple[Alone, ...]:
    found = tensors.attrs.get("alone", [])  # none in a table of before
    return tuple(Alone(**{**of, "examples": tuple(of["examples"])}) for of in found)


def _doubtful(tensors: pd.DataFrame) -> dict[str, int]:
    if "interval_doubtful" not in tensors:  # a table of before
        return {}
    counts = tensors["interval_doubtful"].str.get_dummies(",").sum()
    return {key: int(counts[key]) for key in WITH_INTERVAL if key in counts}


def _worst_blocks(tensors: pd.DataFrame) -> tuple[WorstBlockRecord, ...]:
    found = tensors[tensors["worst_block_row"] >= 0].nlargest(_WORST_BLOCKS, "worst_block_excess")
    return tuple(
        WorstBlockRecord(
            tensor=row["name"],
            second_arm=row["second_arm"],
            row=int(row["worst_block_row"]),
            column=int(row["worst_block_column"]),
            share=float(row["worst_block_share"]),
            excess=float(row["worst_block_excess"]),
            sqnr_db=float(row["worst_block_sqnr_db"]),
        )
        for _, row in found.iterrows()
    )


# ---- weights ---------------------------------------------------------------------------------------------------------


def _summarize_pair(group: pd.DataFrame, density: dict[str, Any] | None, seed: int) -> PairSummary:
    size = (group["rows"] * group["columns"] * group["sample_weight"]).to_numpy(np.float64)
    power = {k: group[f"power_{k}"].to_numpy(np.float64) * size for k in ("source", "e1", "e2", "total", "direct")}

    def ratio(signal: str, error: str) -> Pool:
        return Pool((power[signal], power[error]), lambda sums: sqnr_db(sums[:, 0], sums[:, 1]))

    total = group["sqnr_total_db"].to_numpy(np.float64)
    first, direct = (group[f"sqnr_{k}_db"].to_numpy(np.float64) for k in ("first", "direct"))
    corr = group["corr_e1_e2"].to_numpy(np.float64)
    with np.errstate(invalid="ignore"):  # both infinite: no error at all
        losses = first - total, direct - total
    e2_mean = float(np.sum(group["e2_mean"] * size) / size.sum())
    e2_std = float(np.sqrt(np.maximum(0.0, power["e2"].sum() / size.sum() - e2_mean**2)))
    largest_ratio = group["e2_mean_over_std"].abs().max()
    row = group.iloc[0]
    return PairSummary(
        source_arm=row["source_arm"],
        first_arm=row["first_arm"],
        second_arm=row["second_arm"],
        second_rule=row["second_rule"],
        source_format=distinct(group["source_format"]),
        first_format=distinct(group["first_format"]),
        second_format=distinct(group["second_format"]),
        matrices=len(group),
        weights=int(size.sum()),
        sqnr_first_db=spread_of(first, ratio("source", "e1"), seed),
        sqnr_total_db=spread_of(total, ratio("source", "total"), seed),
        sqnr_direct_db=spread_of(direct, ratio("source", "direct"), seed),
        loss_to_first_db=spread_of(losses[0], ratio("total", "e1"), seed),
        loss_to_direct_db=spread_of(losses[1], ratio("total", "direct"), seed),
        corr_e1_e2=spread_of(corr, None, seed),
        mean_abs_corr_e1_e2=mean_of(np.abs(corr)),
        e2_mean=e2_mean,
        e2_std=e2_std,
        e2_mean_over_std=e2_mean / e2_std if e2_std else math.nan,
        max_abs_e2_mean_over_std=float(largest_ratio),
        density=None
        if not density
        else ErrorDensity(limit=float(density["limit"]), counts=tuple(tuple(map(int, r)) for r in density["counts"])),
    )


# ---- GEMM ------------------------------------------------------------------------------------------------------------


def _summarize_gemm(group: pd.DataFrame, seed: int) -> GemmSummary:
    seen = group[group["tokens"] > 0]
    row = group.iloc[0]
    return GemmSummary(
        arm=row["arm"],
        kind=row["kind"],
        activations=distinct(group["activations"]),
        weight_format=distinct(group["weight_format"]),
        activation_format=distinct(group["activation_format"]),
        sqnr_db=spread_of(seen["sqnr_db"].to_numpy(np.float64), _pooled_gemm(seen), seed),
        weight_sqnr_db=spread_of(seen["weight_sqnr_db"].to_numpy(np.float64), None, seed),
        coherence_gain_db=spread_of(seen["coherence_gain_db"].to_numpy(np.float64), None, seed),
        without_tokens=int((group["tokens"] == 0).sum()),
    )


def _pooled_gemm(seen: pd.DataFrame) -> Pool:
    """Power over all tokens that reached each layer: mean output power x tokens_seen."""
    signal = (seen["output_power"] * seen["tokens_seen"]).to_numpy(np.float64)
    sqnr = seen["sqnr_db"].to_numpy(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # -inf (no output, but an error) or infinite power: NaN
        error = signal * 10.0 ** (-sqnr / 10.0)
    error[(signal == 0) & np.isnan(sqnr)] = 0.0  # no output and no error
    return Pool((signal, error), lambda sums: sqnr_db(sums[:, 0], sums[:, 1]))
