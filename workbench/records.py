"""Every record the workbench writes, as frozen dataclasses; units stand in the field names and docstrings.

Rooms hand these on to each other: lint, analysis, serving and evaluation produce them, comparison and gating join
them, reporting renders them and computes nothing else. `to_json` / `write_json` store them with the schema version;
`write_text` and friends write to a temporary name first, so a killed run leaves no half file.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from workbench.errors import OutputError

SCHEMA_VERSION = 1
T = TypeVar("T")

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
    block scale can hide in the difference.
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

    @property
    def errors(self) -> tuple[LintFinding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")


# ---- analysis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """One row of tensors.parquet: what two quantizations did to one weight matrix.

    w = source, a = first(w), b = second(a); e1 = a - w, e2 = b - a, e = b - w; direct = second(w).
    name: the source checkpoint's tensor name, with `.weight`. layer, expert: indices, -1 where none.
    projection: last module name (gate_proj, up_proj, down_proj, q_proj, ...; shared experts have shared=True).
    source_arm, first_arm, second_arm: arm names ("" where the arm does not exist). second_rule: its scale rule.
    first_global_scale: float32 decode multiplier really used (NaN where the first format has none).
    sqnr_*_db = 10 log10(power(w) / power(error)); inf where the error is exactly zero. sqnr_second_db relates e2 to a.
    sqnr_total_db is the SQNR of b; *_predicted_quadrature: 10 log10(P(w) / (P(e1) + P(e2)));
    *_predicted_linear: additionally with the measured cross term 2 <e1, e2> (equals sqnr_total_db up to rounding).
    corr_*: Pearson correlation (NaN where one side is constant). gain_total: <w, b> / <w, w>.
    e2_mean_over_std: mean(e2) / std(e2). Intervals: 95 % block bootstrap over the matrix's scale blocks.
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
    first_global_scale: float
    power_source: float
    power_e1: float
    power_e2: float
    power_total: float
    power_direct: float
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
    corr_e1_e2: float
    corr_e1_e2_low: float
    corr_e1_e2_high: float
    corr_e2_a: float
    corr_e1_w: float
    gain_total: float
    e2_mean: float
    e2_std: float
    e2_mean_over_std: float


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


# ---- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One metric of one task on one arm, read from lm-eval's own files.

    value, low, high: proportion in [0, 1] with a 95 % Wilson interval. n: items. filter: lm-eval's filter name.
    samples: the samples_*.jsonl, relative to the run folder. empty, invalid, truncated: answers that are empty / hold
    nothing to extract / hit max_tokens (-1 where the harness does not tell). seconds: wall time of the arm.
    """

    arm: str
    task: str
    filter: str
    metric: str
    n: int
    value: float
    low: float
    high: float
    num_fewshot: int
    samples: str
    primary: bool
    empty: int = -1
    invalid: int = -1
    truncated: int = -1
    seconds: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """All scores of one arm; eval/<arm>/scores.json.

    request_order: "forward" or "reversed". concurrency: requests in flight at once.
    """

    arm: str
    scores: tuple[TaskScore, ...]
    command: tuple[str, ...]
    harness: str
    request_order: str
    concurrency: int
    seconds: float
    task_fingerprints: dict[str, str] = field(default_factory=dict)


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """One item whose correctness differs. direction: "lost" (baseline right, candidate wrong) or "gained"."""

    task: str
    filter: str
    doc_id: int
    direction: str
    question: str
    target: str
    baseline_answer: str
    candidate_answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskComparison:
    """Paired comparison of a candidate arm with the baseline on one (task, filter).

    both, lost, gained, neither: the 2x2 table (lost = baseline right, candidate wrong). loss_pp = 100 (baseline -
    candidate), positive = worse; loss_low_pp, loss_high_pp: two-sided 95 % interval; loss_upper95_pp: one-sided 95 %
    upper bound; p_loss: exact one-sided McNemar (H1: candidate worse); p_two_sided: exact McNemar.
    recovery_percent = 100 candidate / baseline (NaN when the baseline is 0), with a 95 % interval.
    mde_pp: smallest loss this n would detect (80 % power, one-sided 5 %) at the observed discordance (floor: 1 item).
    """

    task: str
    filter: str
    metric: str
    baseline: str
    candidate: str
    n: int
    both: int
    lost: int
    gained: int
    neither: int
    baseline_value: float
    candidate_value: float
    loss_pp: float
    loss_low_pp: float
    loss_high_pp: float
    loss_upper95_pp: float
    p_loss: float
    p_two_sided: float
    recovery_percent: float
    recovery_low_percent: float
    recovery_high_percent: float
    discordance: float
    mde_pp: float
    primary: bool
    flips: tuple[Flip, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """comparison.json: every candidate against the baseline.

    noise_floor: the A/A arm's discordance, a proportion, per "task|filter".
    """

    baseline: str
    noise_arm: str
    tasks: tuple[TaskComparison, ...]
    noise_floor: dict[str, float] = field(default_factory=dict)


# ---- gate ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCheck:
    """One judged line. status: "pass", "fail", "inconclusive", "invalid" or "reported" (shown, not gated)."""

    name: str
    arm: str
    status: str
    reason: str
    value: float = math.nan
    limit: float = math.nan
    unit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """verdict.json. status: "pass" 0, "regression" 1, "inconclusive" 2, "invalid" 2, "failed" 3 (could not run)."""

    status: str
    exit_code: int
    headline: str
    policy: str
    policy_note: str
    checks: tuple[GateCheck, ...]


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What was run, on what: manifest.json."""

    experiment: str
    started: str
    code_version: str
    code_commit: str
    command: tuple[str, ...]
    python: str
    platform: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpus: tuple[str, ...]
    packages: dict[str, str]
    checkpoints: dict[str, dict[str, str]]
    seeds: dict[str, int]
    stage_seconds: dict[str, float] = field(default_factory=dict)


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_json(record: Any) -> str:
    """A record as indented JSON with `schema_version`; NaN and infinities become null / "inf" / "-inf"."""
    payload = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(record)}
    return json.dumps(_plain(payload), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Read a record of dataclass `kind` back. Raises ValueError on another schema version or unknown keys."""
    payload = json.loads(text)
    if not isinstance(payload, dict):
        raise ValueError(f"it holds a {type(payload).__name__}, expected a {kind.__name__} as a JSON object")
    version = payload.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"{kind.__name__}: schema version {version}, this code reads {SCHEMA_VERSION}")
    return _build(kind, payload)


def write_json(path: Path, record: Any) -> None:
    """Write a record atomically. Raises OutputError naming the path."""
    write_text(path, to_json(record))


def read_json(kind: type[T], path: Path) -> T:
    return from_json(kind, path.read_text())


def write_text(path: Path, text: str) -> None:
    """Write `text` to a temporary name in the same folder, then rename. Raises OutputError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to a temporary name in the same folder, then rename. A link's target is written, not the link.

    Raises OutputError, also for a path that is there and no regular file (a device, a pipe, a folder).
    """
    temporary: str | None = None
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is there and no regular file", fix="give another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise OutputError(
            f"could not write {path}: {error.strerror or error}",
            fix="free space, or choose another output folder"
            if full
            else "choose an output folder that can be written",
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _build(kind: Any, value: Any) -> Any:
    import types
    import typing

    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"{kind.__name__}: unknown keys {sorted(unknown)}")
        return kind(**{key: _build(hints[key], item) for key, item in value.items()})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_build(args[0], item) for item in value)
    if origin is dict:
        return {key: _build(args[1], item) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _build(next(a for a in args if a is not type(None)), value)
    if kind is float:
        return math.nan if value is None else float(value)
    return value
