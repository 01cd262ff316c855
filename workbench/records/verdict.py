"""What is concluded: comparisons of two arms, the gate's checks and verdict, and what a run was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
    files (another harness version, metrics that could not be paired). unpaired: by candidate, the judged tasks that
    could not be compared, since it lacks them or scores them otherwise. sources: sha256 of every sample file that was
    read, by its path in the run (empty for folders outside one).
    """

    baseline: str
    noise_arm: str
    tasks: tuple[TaskComparison, ...]
    noise_floor: dict[str, float] = field(default_factory=dict)
    graded: tuple[GradedComparison, ...] = ()
    notes: tuple[str, ...] = ()
    unpaired: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


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
class LayerFinding:
    """What one layer of checks saw of an arm.

    layer: "lint", "bytes" (unquantized tensors against the source's), "tensors" (SQNR against what the format allows),
    "numerics" (what the server ran), "preflight", "transport", "artefacts", "noise" (the A/A arm) or "answers".
    status: "caught", "warned" (seen, and not enough to blame), "clean" or "not run". cause: what a caught finding
    speaks for, "quantization", "harness" or "serving path" ("": for none of them by itself). kind: of a layer that
    tells several faults apart, which: a field of `LostAnswers` ("cut", "null", …), "prompts", "stop_leaks" or "failed".
    """

    layer: str
    status: str
    reason: str
    cause: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Which of three made an arm lose: its weights, the harness, or the path that serves it. docs/gating.md: the rules.

    cause: "none" (nothing lost, nothing found), "quantization", "harness", "serving path", "mixed" (causes names them)
    or "undecided". summary: one sentence. caught_by: layers that caught something. would_tell: what would decide it,
    where it cannot be told.
    """

    arm: str
    cause: str
    summary: str
    causes: tuple[str, ...] = ()
    caught_by: tuple[str, ...] = ()
    layers: tuple[LayerFinding, ...] = ()
    would_tell: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """verdict.json. status: "pass" 0, "regression" 1, "inconclusive" 2, "invalid" 2, "failed" 3 (could not run).

    attributions: for each gated or reported arm, what made it lose and which checks saw it; they do not move `status`.
    judged: sha256 of every file that was read, by its path in the run (empty where no run was judged, but records):
    `workbench.records.judged` holds them against what lies there now. policy_sha256: of the policy as it was applied;
    policy_from: where its limits were written ("config.yaml": the run's own; "": it does not say).
    "outdated" 2 is what a reader puts in place of a verdict whose files have changed since.
    """

    status: str
    exit_code: int
    headline: str
    policy: str
    policy_note: str
    checks: tuple[GateCheck, ...]
    attributions: tuple[Attribution, ...] = ()
    judged: dict[str, str] = field(default_factory=dict)
    policy_sha256: str = ""
    policy_from: str = ""


# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What was run, on what: manifest.json.

    device: of the weights' pass (cpu, cuda, cuda:1). device_peak_bytes: the most GPU memory it took; 0 on a CPU.
    """

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
    device: str = "cpu"
    device_peak_bytes: int = 0
