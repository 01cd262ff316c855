"""Every record the workbench writes, as frozen dataclasses; units stand in the field names and docstrings.

Rooms hand these on to each other: lint, analysis, serving and evaluation produce them, comparison and gating join
them, reporting renders them and computes nothing else. `to_json` / `write_json` store them with the schema version;
`write_text` and friends write to a temporary name first, so a killed run leaves no half file.
"""

from __future__ import annotations

import dataclasses
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
    block scale can hide in the difference. value_bytes, value_bytes_read: the same of what can hold NaN, plain weights
    and FP8 codes (0 in reports of before they were counted).
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
    failed: requests that the endpoint never answered; they count as wrong here. clusters: distinct problems, where each
    was asked several times (the interval is then that of the effective number of items); 0: every item is its own.
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
    failed: int = 0
    clusters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """Perplexity of one task on one arm, with all that a reader needs to compare it with another.

    documents, tokens, words, bytes: what was scored; words and bytes are those of the original text. nll: summed
    negative log-likelihood in nats. token_perplexity = exp(nll / tokens), word_perplexity = exp(nll / words),
    byte_perplexity = exp(nll / bytes), bits_per_byte = nll / bytes / ln 2 (comparable across tokenizers); low, high:
    95 % bootstrap interval of bits_per_byte over documents (NaN with fewer than 8). conventions: window, stride,
    context of each window, first token, tokenizer, text form.
    """

    arm: str
    task: str
    documents: int
    tokens: int
    words: int
    bytes: int
    nll: float
    token_perplexity: float
    word_perplexity: float
    byte_perplexity: float
    bits_per_byte: float
    bits_per_byte_low: float
    bits_per_byte_high: float
    samples: str
    conventions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """How the endpoint behaved towards the client.

    requests: distinct requests of the evaluation; resumed: of them answered by the journal of an interrupted run.
    retries: repeated sends; failed: requests given up. faults: kind -> how often it was met (retried or not);
    examples: kind -> the first message of that kind. latency_*: of answered requests, one send each. slow: answers that
    took more than 10 times the median; slowdown: median latency of the last tenth of the answers over that of the first
    (NaN below 20 answers). busy: mean requests in flight over `concurrency` (1 = never idle). prompt_tokens,
    completion_tokens: as the endpoint counts them (None where it does not).
    """

    requests: int
    resumed: int
    retries: int
    failed: int
    faults: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    latency_median_s: float = math.nan
    latency_p99_s: float = math.nan
    latency_max_s: float = math.nan
    slow: int = 0
    slowdown: float = math.nan
    busy: float = math.nan
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthDrift:
    """Answers of one task against the baseline's on the same documents.

    n: documents that both answered. unit: "tokens" or "characters". ratio: summed length over the baseline's, with a
    95 % bootstrap interval over documents (NaN with fewer than 8). identical: answers equal character by character.
    """

    baseline: str
    n: int
    unit: str
    ratio: float
    ratio_low: float
    ratio_high: float
    identical: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactPanel:
    """What may move a task's score without any weight being wrong. Counts are of `n` answers; -1: cannot be told.

    truncated: ended at max_tokens. empty: no text but white space (null included). null: the endpoint sent null.
    failed: never answered. stopped: ended by a stop string, where the endpoint says so; stop_leaks: a stop string is in
    the answer (the server did not honour it). disagreements: strict and flexible extraction score differently.
    invalid: filter -> answers that hold nothing to extract. duplicates: answers whose whole text another document of
    the task also got. think_leaks: think tags in what was scored; unfinished: the think block never closed.
    length_*_tokens: of answers (None where the endpoint does not count). accuracy_all: of all n (failed and unfinished
    are wrong); accuracy_finished: of the `finished`, that is, neither cut, unfinished, null nor failed. Both with 95 %
    Wilson intervals, on the primary filter.
    """

    arm: str
    task: str
    filter: str
    n: int
    truncated: int
    empty: int
    null: int
    failed: int
    stopped: int
    stop_leaks: int
    disagreements: int
    invalid: dict[str, int]
    duplicates: int
    think_leaks: int
    unfinished: int
    length_median_tokens: float | None
    length_max_tokens: float | None
    accuracy_all: float
    accuracy_all_low: float
    accuracy_all_high: float
    finished: int
    accuracy_finished: float
    accuracy_finished_low: float
    accuracy_finished_high: float
    drift: LengthDrift | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightFinding:
    """level: "error" stops the evaluation; "warning" is shown; "info" states what could not be checked, and why."""

    id: str
    level: str
    message: str
    fix: str = ""
    task: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightTask:
    """What is about to be asked for one task.

    kind: lm-eval's request type. documents, requests: their numbers. longest_prompt_tokens, prompt_tokens (all
    requests): None without a tokenizer. answer_budget_tokens: what one answer may have. data_fingerprint: sha256 over
    the documents; prompt_fingerprint: over everything sent, shots and settings included. mde_pp: expected discordance
    (a share, as text) -> smallest loss found with 80 % power, one-sided 5 %.
    """

    task: str
    kind: str
    documents: int
    requests: int
    longest_prompt_tokens: int | None
    prompt_tokens: int | None
    answer_budget_tokens: int
    stops: tuple[str, ...]
    data_fingerprint: str
    prompt_fingerprint: str
    mde_pp: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """What was checked before the first request of an evaluation; eval/<arm>/<model>/preflight.json.

    server: what the endpoint says of itself. server_max_length: its context in tokens (None: it does not say).
    probe_s: seconds of the probe, NaN without one; estimate_s: expected seconds, each answer as long as a gold answer;
    estimate_high_s: if every answer used its whole budget. Both extrapolate the probe linearly: no interval is known.
    """

    arm: str
    endpoint: str
    api: str
    model: str
    harness: str
    max_length: int
    server_max_length: int | None
    server: dict[str, str]
    tasks: tuple[PreflightTask, ...]
    findings: tuple[PreflightFinding, ...]
    probe_s: float = math.nan
    estimate_s: float = math.nan
    estimate_high_s: float = math.nan

    @property
    def errors(self) -> tuple[PreflightFinding, ...]:
        return tuple(f for f in self.findings if f.level == "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounded:
    """A statistic known between two bounds, each with a 95 % bootstrap interval over windows (NaN below 8 windows)."""

    lower: float
    upper: float
    lower_ci_low: float
    lower_ci_high: float
    upper_ci_low: float
    upper_ci_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """KL(reference || arm) of next-token distributions on given text, in nats, from each side's top `k`.

    windows, positions: texts and predicted tokens. mean, median, p99, p999: over positions, bounds derived in
    workbench.evaluation.kld. floor_nats: no token is taken to be less likely than exp(-floor_nats) under the arm; the
    upper bounds rest on it. tail_mass_*: mean probability outside the tracked tokens. same_top1: share of positions
    where both put the same token first. delta_p_mean_pp: mean change of the actual token's probability. Intervals: 95 %
    bootstrap over windows (NaN below 8).
    """

    reference: str
    arm: str
    k: int
    windows: int
    positions: int
    mean: Bounded
    median: Bounded
    p99: Bounded
    p999: Bounded
    floor_nats: float
    tail_mass_reference: float
    tail_mass_arm: float
    same_top1: float
    same_top1_low: float
    same_top1_high: float
    delta_p_mean_pp: float
    delta_p_mean_low_pp: float
    delta_p_mean_high_pp: float
    text_fingerprint: str
    seconds: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """All scores of one arm; eval/<arm>/scores.json.

    request_order: "forward" or "reversed". concurrency: requests in flight at once. api: "completions" or "chat".
    plain_command: the lm_eval command line that asks the same with lm-eval's own client.
    """

    arm: str
    scores: tuple[TaskScore, ...]
    command: tuple[str, ...]
    harness: str
    request_order: str
    concurrency: int
    seconds: float
    task_fingerprints: dict[str, str] = field(default_factory=dict)
    api: str = "completions"
    plain_command: str = ""
    perplexities: tuple[Perplexity, ...] = ()
    panels: tuple[ArtefactPanel, ...] = ()
    transport: Transport | None = None


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
class Stratum:
    """One subtask of a group, such as a subject of MMLU-Pro: counts of items, and of those lost and gained.

    loss_pp = 100 (lost - gained) / n with its two-sided 95 % interval; p_loss_holm: exact one-sided McNemar, adjusted
    by Holm over the group's subtasks.
    """

    name: str
    n: int
    lost: int
    gained: int
    loss_pp: float
    loss_low_pp: float
    loss_high_pp: float
    p_loss_holm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskComparison:
    """Paired comparison of a candidate arm with the baseline on one (task, filter).

    both, lost, gained, neither: the 2x2 table (lost = baseline right, candidate wrong). loss_pp = 100 (baseline -
    candidate), positive = worse; loss_low_pp, loss_high_pp: two-sided 95 % interval; loss_upper95_pp: one-sided 95 %
    upper bound; p_loss: exact one-sided McNemar (H1: candidate worse); p_two_sided: exact McNemar.
    recovery_percent = 100 candidate / baseline (NaN when the baseline is 0), with a 95 % interval.
    mde_pp: smallest loss this n would detect (80 % power, one-sided 5 %) at the observed discordance (floor: 1 item).
    bootstrap_low_pp, bootstrap_high_pp: paired percentile bootstrap, 95 %, a cross-check of the interval.
    p_above_noise: exact one-sided McNemar of "flips no more items than the A/A arm" (NaN: no such arm).

    clusters: distinct problems, where each was asked several times (avg@k); then n counts answers, and loss, recovery,
    their intervals, p_* and mde_pp are of problems (0: every item is its own).

    A group (MMLU-Pro) is one row of all its items, and `strata` holds its subtasks. macro_loss_pp, with its 95 %
    interval: mean of their losses; p_strata_differ: do flips split into lost and gained alike in all of them?
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
    bootstrap_low_pp: float = math.nan
    bootstrap_high_pp: float = math.nan
    p_above_noise: float = math.nan
    clusters: int = 0
    strata: tuple[Stratum, ...] = ()
    macro_loss_pp: float = math.nan
    macro_low_pp: float = math.nan
    macro_high_pp: float = math.nan
    p_strata_differ: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedComparison:
    """Paired comparison of graded scores (F1, a judge's mark) on one (task, filter, metric), in the score's own unit.

    loss = mean(baseline - candidate) over items, positive = worse. low, high: two-sided, upper95: one-sided 95 %, of
    the bootstrap over items; p_loss, p_two_sided: permutation of the differences' signs. Shown, not gated: a margin in
    percentage points does not speak of them.
    """

    task: str
    filter: str
    metric: str
    baseline: str
    candidate: str
    n: int
    baseline_value: float
    candidate_value: float
    loss: float
    low: float
    high: float
    upper95: float
    p_loss: float
    p_two_sided: float
    worse: int
    better: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """comparison.json: every candidate against the baseline.

    noise_floor: the A/A arm's discordance, a proportion, per "task|filter". notes: what a reader should know of the
    files (another harness version, metrics that could not be paired).
    """

    baseline: str
    noise_arm: str
    tasks: tuple[TaskComparison, ...]
    noise_floor: dict[str, float] = field(default_factory=dict)
    graded: tuple[GradedComparison, ...] = ()
    notes: tuple[str, ...] = ()


# ---- gate ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCheck:
    """One judged line. status: "pass", "fail", "inconclusive", "invalid" or "reported" (shown, not gated).

    tier: "critical", or "supporting": such a check can fail a run, but does not hold back a pass while inconclusive.
    """

    name: str
    arm: str
    status: str
    reason: str
    value: float = math.nan
    limit: float = math.nan
    unit: str = ""
    tier: str = "critical"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEquality:
    """Are the tensors that an arm leaves unquantized the source's, byte for byte?

    compared: tensors whose bytes were compared; differing, missing: names (of the source's) that differ, or that the
    arm lacks.
    """

    arm: str
    compared: int
    differing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


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
    return json.dumps(plain(payload), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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
    """Write `text` to a temporary name in the same folder, then rename. Raises OutputError.

    What is no text (a file name that is not UTF-8) is written as \\udc.. escapes.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


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
        raise OutputError.of(path, error) from error


def plain(value: Any) -> Any:
    """Tuples as lists, NaN as None, infinities as "inf" and "-inf": what strict JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
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
