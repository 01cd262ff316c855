"""What an evaluation found: scores, transport, artefacts, the checks before it, KL divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
class LostAnswers:
    """What became of the arm's answers to the documents that the baseline answered right and this arm wrong.

    n: documents that both were asked; lost, gained: of these. `lost` is split by the first that holds: failed (never
    answered), null, unfinished (the think block never closed), cut_early (ended at a limit below the tokens that were
    asked for), cut (at the tokens that were asked for), odd_finish (the reason tells neither a whole answer nor a cut
    one), empty, unextracted (another filter scores it right), finished (a whole answer, and wrong). clean_*: the pairs
    whose two answers are both whole, not empty, and read alike by every filter. prompts_differ: documents
    for which this arm's endpoint counted another number of prompt tokens than the baseline's, of the `prompts_counted`
    that both counted.
    """

    baseline: str
    n: int
    lost: int
    gained: int
    failed: int
    null: int
    unfinished: int
    cut_early: int
    cut: int
    empty: int
    unextracted: int
    finished: int
    clean_n: int
    clean_lost: int
    clean_gained: int
    prompts_counted: int
    prompts_differ: int
    odd_finish: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtefactPanel:
    """What may move a task's score without any weight being wrong. Counts are of `n` answers; -1: cannot be told.

    truncated: ended at max_tokens. empty: no text but white space (null included). null: the endpoint sent null.
    failed: never answered. stopped: ended by a stop string, where the endpoint says so; stop_leaks: a stop string is in
    the answer (the server did not honour it). disagreements: strict and flexible extraction score differently.
    invalid: filter -> answers that hold nothing to extract. duplicates: answers whose whole text another document of
    the task also got. think_leaks: think tags in what was scored; unfinished: the think block never closed.
    length_*_tokens: of answers (None where the endpoint does not count). accuracy_all: of all n (failed and unfinished
    are wrong); accuracy_finished: of the `finished`, that is, neither cut, unfinished, null, failed nor of an odd
    finish. Both with 95 % Wilson intervals, on the primary filter. odd_finish: finish reason that tells neither a whole
    answer nor a cut one -> answers.
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
    cut_early: int = -1
    lost: LostAnswers | None = None
    odd_finish: dict[str, int] = field(default_factory=dict)


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
