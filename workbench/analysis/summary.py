"""The run's figures in one record: pooled SQNRs, correlations, GEMM noise, and what was published beside them.

    summary = summarize(tensors_frame, gemm_frame)
    write_json(run_dir / "analysis.json", summary)

Pooled figures weigh by power: 10 log10(sum of signal power / sum of error power) over all elements. A figure's interval
is a 95 % bootstrap over matrices (1000 resamples; over runs of neighbours beyond 2048 matrices), which is what a claim
about "the model's experts" generalises over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .algebra import sqnr_db
from .bootstrap import MIN_UNITS, draw_counts, interval
from .faults import Fault, count_faults

if TYPE_CHECKING:
    import pandas as pd

_RESAMPLES = 1000
_MAX_UNITS = 2048
_WORST_BLOCKS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One figure over many matrices. pooled: power-weighted (NaN where pooling has no meaning), with its interval.

    mean, low, high of the mean: unweighted over matrices. minimum, maximum: over matrices. count: finite values.
    """

    pooled: float
    pooled_low: float
    pooled_high: float
    mean: float
    mean_low: float
    mean_high: float
    minimum: float
    maximum: float
    count: int


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
class AnalysisSummary:
    """analysis.json. missing: arms that were not given ("" : none); what needs them is NaN.

    worst_blocks: of all matrices, by how much their error exceeds their matrix's mean. faults: what could not be
    analyzed, or is in doubt; fault_counts: by kind. measured, of: matrices, and what a sample chose from.
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
    claims = [claim for pair in pairs for claim in _check_claims(pair, gemm, seed)]
    faults = tuple(Fault(**fault) for fault in tensors.attrs.get("faults", [])) if tensors is not None else ()
    measured = 0 if tensors is None else int(tensors["name"].nunique())
    of = 0.0 if tensors is None else float(tensors.drop_duplicates("name")["sample_weight"].sum())
    return AnalysisSummary(
        pairs=tuple(pairs),
        gemm=tuple(layers),
        claims=tuple(claims),
        missing="" if tensors is None or not len(tensors) else _distinct(tensors["missing"]),
        worst_blocks=() if tensors is None else _worst_blocks(tensors),
        faults=faults,
        fault_counts=count_faults(faults),
        measured=measured,
        of=round(of),
    )


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
        source_format=_distinct(group["source_format"]),
        first_format=_distinct(group["first_format"]),
        second_format=_distinct(group["second_format"]),
        matrices=len(group),
        weights=int(size.sum()),
        sqnr_first_db=_spread(first, ratio("source", "e1"), seed),
        sqnr_total_db=_spread(total, ratio("source", "total"), seed),
        sqnr_direct_db=_spread(direct, ratio("source", "direct"), seed),
        loss_to_first_db=_spread(losses[0], ratio("total", "e1"), seed),
        loss_to_direct_db=_spread(losses[1], ratio("total", "direct"), seed),
        corr_e1_e2=_spread(corr, None, seed),
        mean_abs_corr_e1_e2=_mean(np.abs(corr)),
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
        activations=_distinct(group["activations"]),
        weight_format=_distinct(group["weight_format"]),
        activation_format=_distinct(group["activation_format"]),
        sqnr_db=_spread(seen["sqnr_db"].to_numpy(np.float64), _pooled_gemm(seen), seed),
        weight_sqnr_db=_spread(seen["weight_sqnr_db"].to_numpy(np.float64), None, seed),
        coherence_gain_db=_spread(seen["coherence_gain_db"].to_numpy(np.float64), None, seed),
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


# ---- published claims ------------------------------------------------------------------------------------------------

_SOURCE = "NVFP4 to MXFP4 requantization write-up (SGLang blog, 2026-09): Qwen3.5-397B-A17B expert weights"


def _check_claims(pair: PairSummary, gemm: pd.DataFrame | None, seed: int) -> list[Claim]:
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


Measured = tuple[float, float, float]
_UNMEASURED: Measured = (math.nan, math.nan, math.nan)


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
    return _UNMEASURED if rows is None else _mean_of(rows["sqnr_db"], seed)


def _loss_spread(gemm: pd.DataFrame | None, pair: PairSummary, kind: str, seed: int) -> Measured:
    first, second = _rows(gemm, pair.first_arm, kind), _rows(gemm, pair.second_arm, kind)
    if first is None or second is None:
        return _UNMEASURED
    both = first.merge(second, on="name", suffixes=("_first", "_second"))
    return _mean_of(both["sqnr_db_first"] - both["sqnr_db_second"], seed)


def _mean_of(values: pd.Series, seed: int) -> Measured:
    """Every matrix counts once: pooled by power, the one layer with the largest outputs would speak for all."""
    spread = _spread(values.to_numpy(np.float64), None, seed)
    return spread.mean, spread.mean_low, spread.mean_high


def _rows(gemm: pd.DataFrame | None, arm: str, kind: str) -> pd.DataFrame | None:
    if gemm is None or not len(gemm):
        return None
    rows = gemm[(gemm["arm"] == arm) & (gemm["kind"] == kind) & (gemm["tokens"] > 0)]
    return rows if len(rows) else None


# ---- spreads ---------------------------------------------------------------------------------------------------------


class Pool(NamedTuple):
    """A pooled figure: columns with a value per matrix, and the figure of their sums `[resamples, columns]`."""

    columns: tuple[NDArray[np.float64], ...]
    of_sums: Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _spread(values: NDArray[np.float64], pool: Pool | None, seed: int) -> Spread:
    """values: one per matrix."""
    finite = values[np.isfinite(values)]
    pooled, bounds, mean_bounds = math.nan, (math.nan, math.nan), (math.nan, math.nan)
    if pool is not None and len(values):
        columns = np.stack(pool.columns, axis=1)
        pooled = float(pool.of_sums(columns.sum(axis=0, keepdims=True))[0])
        if len(values) >= MIN_UNITS:
            bounds = interval(pool.of_sums(_resampled_sums(columns, seed)))
    if len(finite) >= MIN_UNITS:
        sums = _resampled_sums(np.stack((finite, np.ones_like(finite)), axis=1), seed)
        mean_bounds = interval(sums[:, 0] / sums[:, 1])
    return Spread(
        pooled=pooled,
        pooled_low=bounds[0],
        pooled_high=bounds[1],
        mean=_mean(values),
        mean_low=mean_bounds[0],
        mean_high=mean_bounds[1],
        minimum=float(finite.min()) if len(finite) else math.nan,
        maximum=float(finite.max()) if len(finite) else math.nan,
        count=len(finite),
    )


def _resampled_sums(columns: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Column sums of each resample `[resamples, columns]`; more than _MAX_UNITS matrices are drawn as runs."""
    n = len(columns)
    if n > _MAX_UNITS:
        columns = np.add.reduceat(columns, np.arange(_MAX_UNITS) * n // _MAX_UNITS, axis=0)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite power: resamples without that matrix are NaN
        return draw_counts(len(columns), _RESAMPLES, seed) @ columns


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _distinct(column: Any) -> str:
    return ", ".join(str(v) for v in column.unique())
