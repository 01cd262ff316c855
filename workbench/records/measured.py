"""What is measured of a checkpoint, its weights, its products and its server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

# ---- lint ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFinding:
    """One fault of a checkpoint, and all that it is found in. check: the check's id.

    severity: "error" makes a run invalid; "warning" and "info" are shown; "allowed": an error that was let pass.
    message: about the first of them, with the number. tensor, file: the first's name and place. count: how many tensors
    (or modules, groups, patterns) have the fault; tensors: the names of all of them, where they have names.
    """

    check: str
    severity: str
    message: str
    tensor: str = ""
    file: str = ""
    fix: str = ""
    count: int = 1
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LintReport:
    """All findings on one checkpoint. checks: every check id that ran, also the clean ones.

    scale_bytes: stored size of all block scales; scale_bytes_read: of those that were looked at. A fault in a single
    block scale can hide in the difference. value_bytes, value_bytes_read: the same of what can hold NaN, plain weights
    and FP8 codes (0 in reports of before they were counted). weights: 16 hex digits over every stored tensor's name,
    dtype, shape and a sample of its bytes, by which two checkpoints of the same weights are known ("": not taken).
    """

    checkpoint: str
    dialect: str
    checks: tuple[str, ...]
    findings: tuple[LintFinding, ...]
    quantized_tensors: int
    tensors: int
    seconds: float
    scale_bytes: int = 0
    scale_bytes_read: int = 0
    value_bytes: int = 0
    value_bytes_read: int = 0
    weights: str = ""

    @property
    def errors(self) -> tuple[LintFinding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")


# ---- analysis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One row of tensors.parquet: what two quantizations did to one weight matrix.

    w = source, a = first(w), b = second(a), d = second(w) ("direct"); e1 = a - w, e2 = b - a, e = b - w, ed = d - w.
    name: the source checkpoint's tensor name, with `.weight`. layer, expert: indices, -1 where none.
    projection: last module name (gate_proj, up_proj, down_proj, q_proj, ...; shared experts have shared=True).
    source_arm, first_arm, second_arm: arm names ("" where the arm does not exist). second_rule: its scale rule.
    direct_arm: of the stored checkpoint that d is ("": d was made here, or is missing).
    first_global_scale: float32 decode multiplier really used (NaN where the first format has none); scale_phase: the
    fraction of its log2, in [0, 1). missing: arms that were not there, with commas; what needs them is NaN.
    sample_weight: how many matrices of its stratum this one stands for (1: all were measured).
    power_*: mean squares; power_first: of a. mean_*: of w, e1, e and ed; cross_x_y: mean of the product (source = w,
    total = e, direct = ed), so that rows pool exactly.
    sqnr_*_db = 10 log10(power(w) / power(error)); inf where the error is exactly zero. sqnr_second_db relates e2 to a.
    sqnr_total_db is the SQNR of b; *_predicted_quadrature: 10 log10(P(w) / (P(e1) + P(e2)));
    *_predicted_linear: additionally with the measured cross term 2 <e1, e2> (equals sqnr_total_db up to rounding).
    residual_*_db = sqnr_total_db - prediction. cov_e1_e2: covariance; cov_e1_e2_share = 2 cov / power(e).
    corr_*: Pearson correlation (NaN where one side is constant). gain_*: <w, x> / <w, w> of a, b and d.
    gain_total_excess = gain_total - (1 - power(e) / power(w)): 0 for a quantizer whose values are centroids.
    e2_mean_over_std: mean(e2) / std(e2); e2_skewness, e2_excess_kurtosis: of e2, 0 for a normal distribution.
    *_error_{scale,element,saturation,underflow}: parts of the mean square of e1 (second: of e2) by cause; they sum to
    it. *_saturated, *_underflowed: shares of elements. e2_code_asymmetry: largest |mean e2 at +m + mean e2 at -m| over
    its standard error, over the magnitudes m of the second's codes. Definitions: docs/analysis.md.
    worst_block_*: the scale block with the most total error: its first element, its share of the matrix's error, its
    mean square over the matrix's, its own SQNR (row -1: no block has an error).
    Intervals (_low, _high): 95 %, from the influence of each of the matrix's scale blocks. interval_doubtful: figures
    whose interval rests on few of them, with commas.
    """

    name: str
    layer: int
    expert: int
    projection: str
    shared_expert: bool
    rows: int
    columns: int
    source_arm: str
    first_arm: str
    second_arm: str
    source_format: str
    first_format: str
    second_format: str
    second_rule: str
    direct_arm: str = ""
    first_global_scale: float
    power_source: float
    power_first: float = math.nan
    power_e1: float
    power_e2: float
    power_total: float
    power_direct: float
    mean_source: float = math.nan
    mean_first: float = math.nan
    mean_e1: float = math.nan
    mean_total: float = math.nan
    mean_direct: float = math.nan
    cross_source_e1: float = math.nan
    cross_source_total: float = math.nan
    cross_source_direct: float = math.nan
    cross_e1_e2: float = math.nan
    cross_first_e2: float = math.nan
    sqnr_first_db: float
    sqnr_first_db_low: float
    sqnr_first_db_high: float
    sqnr_second_db: float
    sqnr_total_db: float
    sqnr_total_db_low: float
    sqnr_total_db_high: float
    sqnr_direct_db: float
    sqnr_direct_db_low: float
    sqnr_direct_db_high: float
    sqnr_total_predicted_quadrature_db: float
    sqnr_total_predicted_linear_db: float
    residual_quadrature_db: float = math.nan
    residual_linear_db: float = math.nan
    cov_e1_e2: float = math.nan
    cov_e1_e2_share: float = math.nan
    cov_e1_e2_share_low: float = math.nan
    cov_e1_e2_share_high: float = math.nan
    corr_e1_e2: float
    corr_e1_e2_low: float
    corr_e1_e2_high: float
    corr_e2_a: float
    corr_e1_w: float
    gain_first: float = math.nan
    gain_total: float
    gain_direct: float = math.nan
    gain_total_excess: float = math.nan
    gain_total_excess_low: float = math.nan
    gain_total_excess_high: float = math.nan
    e2_mean: float
    e2_std: float
    e2_mean_over_std: float
    e2_skewness: float = math.nan
    e2_excess_kurtosis: float = math.nan
    first_error_scale: float = math.nan
    first_error_element: float = math.nan
    first_error_saturation: float = math.nan
    first_error_underflow: float = math.nan
    first_saturated: float = math.nan
    first_underflowed: float = math.nan
    second_error_scale: float = math.nan
    second_error_element: float = math.nan
    second_error_saturation: float = math.nan
    second_error_underflow: float = math.nan
    second_saturated: float = math.nan
    second_underflowed: float = math.nan
    e2_code_asymmetry: float = math.nan
    worst_block_row: int = -1
    worst_block_column: int = -1
    worst_block_share: float = math.nan
    worst_block_excess: float = math.nan
    worst_block_sqnr_db: float = math.nan
    scale_phase: float = math.nan
    missing: str = ""
    sample_weight: float = 1.0
    interval_doubtful: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRecord:
    """One row of gemm.parquet: output noise of y = x W^T at one layer under one arm's numerics.

    kind: "weight" (quantized weights, exact activations), "activation" (exact weights, rounded activations), "both".
    arm: whose weights and activation rounding. tokens: activation rows used (an expert sees only its own tokens).
    tokens_seen: rows that reached the layer before the reservoir was cut. sqnr_db: 10 log10(|y|^2 / |y_hat - y|^2);
    interval: 95 % bootstrap over tokens (NaN, NaN with fewer than 8 tokens). weight_sqnr_db: the weights' own SQNR;
    coherence_gain_db = sqnr_db - weight_sqnr_db (kind "weight" only, else NaN). output_power: mean |y|^2 of a token.
    activations: "captured" or "gaussian".
    """

    name: str
    layer: int
    expert: int
    projection: str
    shared_expert: bool
    arm: str
    weight_format: str
    activation_format: str
    kind: str
    activations: str
    tokens: int
    tokens_seen: int
    sqnr_db: float
    sqnr_db_low: float
    sqnr_db_high: float
    weight_sqnr_db: float
    coherence_gain_db: float
    output_power: float = math.nan


# ---- serving ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRecord:
    """What one arm's endpoint was and cost; server/<arm>.json.

    activation_scale: "none", "static" (checkpoint's input_scale, per expert), "dynamic_per_token",
    "dynamic_per_block" (mxfp4) or "mixed"; layers says it per layer: {module name: {"weight": …, "activation": …,
    "activation_scale": …, "weight_bytes": …}}. ready_s: start to first healthy answer; load_s: weights only, as the
    engine measured (NaN when unknown). memory: bytes; NaN/None for an external endpoint (not ours to measure).
    args, env: what `engine.args` and `engine.env` passed, verbatim. command: the full command line.
    fingerprint: sha256 over the checkpoint's headers and config, first 16 hex digits.
    """

    arm: str
    engine: str
    base_url: str
    model: str
    checkpoint: str
    backend: str
    weight_format: str
    activation_format: str
    activation_scale: str
    kv_cache_dtype: str
    dtype: str
    command: tuple[str, ...] = ()
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    engine_version: str = ""
    fingerprint: str = ""
    ready_s: float = math.nan
    load_s: float = math.nan
    peak_rss_bytes: int | None = None
    weight_bytes: int | None = None
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: str = ""
