"""KL divergence between the next-token distributions of a reference and an arm, over any completions endpoint.

    windows = cut_windows(text, tokenizer_dir, tokens=512, count=64)
    collect_logprobs(base_url=url_a, model="m", windows=windows, k=20, path=run / "kld" / "source.jsonl")
    collect_logprobs(base_url=url_b, model="m", windows=windows, k=20, path=run / "kld" / "nvfp4.jsonl")
    record = kl_divergence(run / "kld" / "source.jsonl", run / "kld" / "nvfp4.jsonl")

One prefill a window and endpoint: minutes, where answering benchmarks takes hours. Every position counts, so far
smaller damage shows than in right and wrong answers; but what it means for answers, it does not say. The price of
asking an endpoint and not a model is that only the k most likely tokens (and the actual one) are told, so the
divergence of a position is known between two bounds.

The bounds. p: reference, q: arm. Tracked by both: S; by p only: A; p's mass elsewhere: P_rest = 1 - p(S) - p(A); q's
mass outside S: Q_out = 1 - q(S). Of a token of A, q is at most m_q, the arm's k-th largest probability.

Lower. Let the tokens of A keep their own terms and the rest be one term. By the log-sum inequality merging never adds:

    KL >= sum_S p log(p/q) + min { sum_A p log(p/q) + P_rest log(P_rest/Q_rest) },

the minimum over all q of A and Q_rest with sum_A q + Q_rest = Q_out and q <= m_q. It is reached at q = min(m_q, c p),
Q_rest = c P_rest (stationarity), found by fixing tokens at m_q until none exceeds it. Without A it is the tail taken as
one token, as others quote it.

Upper. From the k most likely tokens alone there is none: an untracked token of q = 0 makes the divergence infinite. It
takes a floor: no token that the reference gives any mass has q < exp(-F). Then, as an untracked p is at most
m = min(m_p, P_rest),

    KL <= sum_S p log(p/q) + sum_A p (log p + F) + P_rest (log m + F).

F = 149 ln 2 by default: the smallest positive float32 is 2^-149. The distance of the bounds is about F times the mass
outside S: raise k to close it, or state a tighter floor that you know of. A token that an engine reports with
probability 0 (-inf, or vLLM's -9999 for it) is taken at exp(-F), the floor's own claim; a smaller finite value that the
arm reports lowers the floor. What no softmax can give is refused before anything is judged (`_logprob_file`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError, OutputError, full_disk
from workbench.evaluation._intervals import LEAST, ratio_interval
from workbench.evaluation._journal import encode_payload
from workbench.evaluation._logprob_file import (
    ZERO_LOG,
    Position,
    check_pairs,
    finished_windows,
    header_line,
    read_echo,
    read_file,
    window_line,
)
from workbench.evaluation._transport import Transport
from workbench.evaluation.run import completions_url
from workbench.records import Bounded, Divergence, hold_lock, write_text

FLOAT32_FLOOR_NATS = 149 * math.log(2)
RESAMPLES = 500
SMALLEST = 1e-300
"""What a probability that underflowed is divided by."""
ROUNDING = 1e-6
"""What a sum of probabilities, each from a float32 logarithm, may be off by."""


def cut_windows(text: str, tokenizer: Path, *, tokens: int, count: int, fewer: bool = False) -> list[list[int]]:
    """The first `count` disjoint windows of `tokens` token ids each, no special tokens; with `fewer`, as many as a
    shorter text has. Raises EvaluationError."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(str(tokenizer))(text, add_special_tokens=False).input_ids
    if fewer:
        count = max(1, min(count, len(ids) // tokens))
    if len(ids) < tokens * count:
        raise EvaluationError(
            f"the text has {len(ids)} tokens, {count} windows of {tokens} need {tokens * count}",
            fix="give more text, or fewer or shorter windows",
        )
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]


def collect_logprobs(
    *,
    base_url: str,
    model: str,
    windows: Sequence[Sequence[int]],
    k: int,
    path: Path,
    name: str = "",
    fingerprint: str = "",
    concurrency: int = 8,
    timeout_s: float = 600.0,
    retries: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the endpoint's top-k log-probabilities of every token of `windows` (token ids) to `path`, JSON Lines.

    name: how the arm is called (default: the model). A window that `path` holds already, for the same endpoint
    (`fingerprint`), model, text and k, is not asked again; under fingerprint "" everything is asked. Raises
    EvaluationError if the endpoint does not echo k possible log-probabilities a token (vLLM: `--max-logprobs`), naming
    window, position and token; ConfigError while another process writes `path`.
    """
    settings = {"echo": True, "logprobs": k, "max_tokens": 1, "temperature": 0, "return_tokens_as_token_ids": True}
    bodies = [encode_payload({"model": model, "prompt": [list(window)], **settings}) for window in windows]
    header = header_line(
        name=name or model, model=model, fingerprint=fingerprint or f"unknown {time.time_ns()}", k=k, windows=windows
    )
    transport = Transport(completions_url(base_url), concurrency=concurrency, timeout_s=timeout_s, retries=retries)
    with hold_lock(path.parent / f".{path.name}.lock", f"another process is writing {path}"):
        done = finished_windows(path, header)
        if not done:
            write_text(path, header + "\n")
        todo = [i for i in range(len(bodies)) if i not in done]
        try:
            with path.open("a", encoding="utf-8") as stream:

                def keep(place: int, positions: list[Position], seconds: float, attempts: int) -> None:
                    done.add(todo[place])
                    stream.write(window_line(todo[place], positions))
                    stream.flush()
                    if progress is not None:
                        progress(len(done), len(bodies))

                def read(place: int, answer: dict[str, Any]) -> list[Position]:
                    return read_echo(answer, windows[todo[place]], k, todo[place])

                transport.ask([bodies[i] for i in todo], read, keep)
        except OSError as error:
            if full_disk(error) is None:
                raise
            raise OutputError.of(path, error) from error


def kl_divergence(reference: Path, arm: Path, *, floor_nats: float = FLOAT32_FLOOR_NATS) -> Divergence:
    """The divergence of two files of `collect_logprobs` on the same text.

    Raises EvaluationError, naming file, line, window, position and token, if a file is damaged or holds what no softmax
    gives, or if the two do not pair.
    floor_nats: F of the module's upper bound; a smaller log-probability that the arm reports itself raises it.
    """
    import numpy as np

    started = time.monotonic()
    (head_p, p_windows), (head_q, q_windows) = read_file(reference), read_file(arm)
    for key in ("text", "k"):
        if head_p[key] != head_q[key]:
            raise EvaluationError(
                f"{reference} and {arm} differ in {key}: {head_p[key]} and {head_q[key]}", fix="collect both alike"
            )
    check_pairs(reference, arm, p_windows, q_windows)
    order = sorted(p_windows)
    pairs = [list(zip(p_windows[i], q_windows[i], strict=True)) for i in order]
    told = (-value for window in pairs for _, (_, q) in window for value in q.values() if value > ZERO_LOG)
    floor = max(floor_nats, max(told, default=0.0))
    k = int(head_p["k"])
    rows = [np.array([_position(p, q, k, floor) for p, q in window]) for window in pairs]
    lower, upper = [window[:, 0] for window in rows], [window[:, 1] for window in rows]
    sizes = [len(window) for window in rows]
    total = sum(sizes)
    statistics = _statistics(lower, upper)
    top1 = [float(window[:, 4].sum()) for window in rows]
    change = [100.0 * float(window[:, 5].sum()) for window in rows]
    top1_interval, change_interval = ratio_interval(top1, sizes), ratio_interval(change, sizes)
    return Divergence(
        reference=head_p["name"],
        arm=head_q["name"],
        k=k,
        windows=len(rows),
        positions=total,
        mean=statistics["mean"],
        median=statistics["median"],
        p99=statistics["p99"],
        p999=statistics["p999"],
        floor_nats=floor,
        tail_mass_reference=sum(float(window[:, 2].sum()) for window in rows) / total,
        tail_mass_arm=sum(float(window[:, 3].sum()) for window in rows) / total,
        same_top1=sum(top1) / total,
        same_top1_low=top1_interval[0],
        same_top1_high=top1_interval[1],
        delta_p_mean_pp=sum(change) / total,
        delta_p_mean_low_pp=change_interval[0],
        delta_p_mean_high_pp=change_interval[1],
        text_fingerprint=head_p["text"],
        seconds=time.monotonic() - started,
    )


def position_bounds(
    p: dict[str, float], q: dict[str, float], *, k: int, floor_nats: float = FLOAT32_FLOOR_NATS
) -> tuple[float, float]:
    """(lower, upper) bound of KL(p || q) in nats, from the log-probabilities each side reports; derived in the module.

    k: how many most likely tokens each side reports (a further one is the actual token, of any rank).
    """
    p = {token: max(log, ZERO_LOG) for token, log in p.items()}
    q = {token: -floor_nats if log <= ZERO_LOG else log for token, log in q.items()}
    shared = p.keys() & q.keys()
    exact = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
    only = [(math.exp(p[token]), p[token]) for token in p.keys() - shared]
    rest = max(0.0, 1.0 - sum(math.exp(value) for value in p.values()))
    outside = max(0.0, 1.0 - sum(math.exp(q[token]) for token in shared)) + ROUNDING
    lower = exact + _least_outside([mass for mass, _ in only], rest, outside, _kth(q, k))
    upper = exact + sum(mass * (log + floor_nats) for mass, log in only)
    if rest > ROUNDING:
        upper += rest * (math.log(min(_kth(p, k) or 1.0, rest)) + floor_nats)
    return max(0.0, lower), max(0.0, lower, upper)


# ---- private


def _least_outside(only: list[float], rest: float, outside: float, most: float) -> float:
    """min of sum p log(p/q) over `only` plus rest log(rest/Q): sum q + Q = outside, q <= most."""
    waiting, fixed, value, room = sorted(only, reverse=True), 0, 0.0, outside
    most = max(most, SMALLEST)
    mass = sum(waiting) + rest
    while fixed < len(waiting) and mass > 0.0:
        scale = room / mass
        if scale * waiting[fixed] <= most or room <= most:
            break
        value += waiting[fixed] * math.log(waiting[fixed] / most)
        room, mass = room - most, max(0.0, mass - waiting[fixed])
        fixed += 1
    return value + (mass * math.log(mass / room) if mass > 0.0 else 0.0)


def _kth(reported: dict[str, float], k: int) -> float:
    """Probability that no untracked token exceeds; 1 if fewer than k tokens are told (some may have been left out)."""
    values = sorted(reported.values(), reverse=True)
    return math.exp(values[k - 1]) if len(values) >= k else 1.0


def _position(p: Position, q: Position, k: int, floor: float) -> tuple[float, ...]:
    """(lower, upper, reference's tail, arm's tail, same first token, change of the actual token's probability)."""
    (token, p_logs), (_, q_logs) = p, q
    lower, upper = position_bounds(p_logs, q_logs, k=k, floor_nats=floor)
    tails = [max(0.0, 1.0 - sum(map(math.exp, logs.values()))) for logs in (p_logs, q_logs)]
    same = max(p_logs, key=p_logs.__getitem__) == max(q_logs, key=q_logs.__getitem__)
    change = math.exp(q_logs[token]) - math.exp(p_logs[token]) if token in p_logs and token in q_logs else 0.0
    return lower, upper, *tails, float(same), change


def _statistics(lower: list[Any], upper: list[Any]) -> dict[str, Bounded]:
    """Mean and quantiles of both bounds over positions, with a bootstrap over windows (positions of one are alike)."""
    import numpy as np

    def of(windows: list[Any]) -> Any:
        values = np.concatenate(windows)
        return np.array([values.mean(), *np.quantile(values, [0.5, 0.99, 0.999])])

    rng = np.random.default_rng(0)
    values, limits = [of(lower), of(upper)], []
    for windows in (lower, upper):
        if len(windows) < LEAST:
            limits.append(np.full((2, 4), math.nan))
            continue
        drawn = [of([windows[i] for i in rng.integers(0, len(windows), len(windows))]) for _ in range(RESAMPLES)]
        limits.append(np.quantile(np.array(drawn), [0.025, 0.975], axis=0))
    return {
        name: Bounded(
            lower=float(values[0][i]),
            upper=float(values[1][i]),
            lower_ci_low=float(limits[0][0, i]),
            lower_ci_high=float(limits[0][1, i]),
            upper_ci_low=float(limits[1][0, i]),
            upper_ci_high=float(limits[1][1, i]),
        )
        for i, name in enumerate(("mean", "median", "p99", "p999"))
    }
