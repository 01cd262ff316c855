"""Fixed accuracy thresholds, as they stand in other projects' test suites, and what they can see.

    settings, warnings = import_policy(yaml_content, name="Qwen3-0.6B-FP8")

vLLM's two kinds of file are understood: `tests/evals/gsm8k/configs` (accuracy_threshold, num_questions, tolerance) and
`.buildkite/lm-eval-harness/configs` (tasks with metrics and values, limit, rtol). Their thresholds become a policy,
with a warning that states their power. The check itself compares bounds of the accuracy, not the accuracy, with the
threshold; it stays unpaired, and a paired margin sees losses that it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import ConfigError
from workbench.gating.policy import Policy, Threshold
from workbench.records import Evaluation, GateCheck, TaskScore
from workbench.statistics import accuracy_bounds, threshold_power

GSM8K_TOLERANCE = 0.08
"""vLLM's default `tolerance` of its gsm8k configurations, absolute."""
HARNESS_RTOL = 0.08
"""vLLM's default `rtol` of its lm-eval configurations, relative."""
GSM8K_QUESTIONS = 1319
LOSS_IN_QUESTION = 0.05
"""The warning says how often a loss of 5 percentage points passes."""
MOST_QUESTIONS = 10**9
# What such files hold beside the threshold says how to serve and to ask, and leaves the threshold alone.
_SERVED = ("model_name", "num_fewshot", "trust_remote_code", "max_model_len", "tensor_parallel_size", "env")
GSM8K_KEYS = (
    *_SERVED, "accuracy_threshold", "num_questions", "tolerance", "server_args", "startup_max_wait_seconds",
)  # fmt: skip
HARNESS_KEYS = (
    *_SERVED, "tasks", "limit", "rtol", "backend", "gen_kwargs", "apply_chat_template", "fewshot_as_multiturn",
    "add_bos_token", "batch_size", "enforce_eager", "enable_expert_parallel", "enable_thinking", "env_vars",
    "gpu_memory_utilization", "kv_cache_dtype", "load_format", "max_num_seqs", "moe_backend", "mm_processor_kwargs",
    "quantization", "dtype",
)  # fmt: skip


def is_foreign_policy(content: Mapping[str, Any]) -> bool:
    """Whether a YAML file is one of vLLM's, and no policy of ours."""
    return "accuracy_threshold" in content or ("model_name" in content and "tasks" in content)


def import_policy(content: Mapping[str, Any], *, name: str) -> tuple[dict[str, Any], list[str]]:
    """(settings for `read_policy`, with `gated` left to be named; warnings). Raises ConfigError naming the key, also
    one that is not of such a file: a margin beside a threshold would be left out without a word.
    """
    if "accuracy_threshold" in content:
        _known_keys(content, GSM8K_KEYS, name)
        n = _whole(content.get("num_questions", GSM8K_QUESTIONS), f"{name}: num_questions")
        value = _share(content["accuracy_threshold"], f"{name}: accuracy_threshold")
        tolerance = _share(content.get("tolerance", GSM8K_TOLERANCE), f"{name}: tolerance")
        found = [(Threshold(task="gsm8k", value=value, tolerance=tolerance), n)]
    elif isinstance(content.get("tasks"), list):
        _known_keys(content, HARNESS_KEYS, name)
        found = _harness_thresholds(content, name)
    else:
        raise ConfigError(
            f"{name} holds neither accuracy_threshold nor tasks with metrics",
            fix="give one of vLLM's gsm8k or lm-eval-harness configurations, or a policy like conf/gate/default.yaml",
        )
    for threshold, _ in found:
        if threshold.limit <= 0.0:
            limit = f"{threshold.value:g} less the tolerance of {threshold.tolerance:g}"
            raise ConfigError(
                f"{name}: {_where(threshold)}: {limit} is a limit of {100 * threshold.limit:g} %: every arm passes",
                fix="give a tolerance (rtol: below 1) that leaves a limit above 0 %",
            )
    warnings = [_warning(threshold, n) for threshold, n in found]
    settings = {
        "name": name,
        "note": " ".join(warnings),
        "thresholds": [
            {"task": t.task, "filter": t.filter, "metric": t.metric, "value": t.value, "tolerance": t.tolerance}
            for t, _ in found
        ],
        "evidence": {"min_items": min(n for _, n in found)},
    }
    return settings, warnings


def check_thresholds(rules: Policy, evaluations: Mapping[str, Evaluation]) -> list[GateCheck]:
    """pass: the one-sided 95 % lower bound of the accuracy is at least the limit; fail: the upper bound is below it."""
    return [
        _check(rules, arm, threshold, evaluations.get(arm))
        for arm in (*rules.gated, *rules.reported)
        for threshold in rules.thresholds
    ]


def _check(rules: Policy, arm: str, threshold: Threshold, evaluation: Evaluation | None) -> GateCheck:
    found = _scores(evaluation, threshold)
    score = found[0] if len(found) == 1 else None
    name = f"threshold {_where(threshold)}"
    value = math.nan
    if score is None:
        several = ", ".join(f"{score.filter} {score.metric}" for score in found)
        status = "invalid"
        reason = f"the arm has {'several results' if found else 'no result'} for {_where(threshold)}" + (
            f": {several}; name the metric." if found else "."
        )
    elif score.n < rules.min_items:
        status, reason = "invalid", f"{score.n} items were scored, the threshold is meant for {rules.min_items}."
    else:
        value = score.value
        low, high = accuracy_bounds(round(score.value * score.n), score.n)
        status = "pass" if low >= threshold.limit else ("fail" if high < threshold.limit else "inconclusive")
        power = threshold_power(value=threshold.value, tolerance=threshold.tolerance, n=score.n)
        reason = (
            f"{100 * value:.1f} % of {score.n} items (one-sided 95 % bounds {100 * low:.1f} and {100 * high:.1f} %), "
            f"limit {100 * threshold.limit:.1f} %. {_power_sentence(power.passes_loss(LOSS_IN_QUESTION))}"
        )
    return GateCheck(
        name=name,
        arm=arm,
        status=rules.weigh(status, threshold.task) if arm in rules.gated else "reported",
        reason=reason,
        value=100.0 * value,
        limit=100.0 * threshold.limit,
        unit="%",
        tier=rules.tier(threshold.task),
    )


def _scores(evaluation: Evaluation | None, threshold: Threshold) -> list[TaskScore]:
    """The results that a threshold speaks of: one, if it is to be judged."""
    found = [
        score
        for score in (evaluation.scores if evaluation is not None else ())
        if score.task == threshold.task
        and threshold.filter in ("", score.filter)
        and threshold.metric in ("", score.metric)
    ]
    return [score for score in found if score.primary][:1] or found


def _where(threshold: Threshold) -> str:
    return " ".join(part for part in (threshold.task, threshold.filter, threshold.metric) if part)


def _harness_thresholds(content: Mapping[str, Any], name: str) -> list[tuple[Threshold, int]]:
    rtol = _share(content.get("rtol", HARNESS_RTOL), f"{name}: rtol")
    n = _whole(content.get("limit") or GSM8K_QUESTIONS, f"{name}: limit")
    found = []
    for task in content["tasks"]:
        metrics = task.get("metrics") if isinstance(task, Mapping) else None
        if not isinstance(metrics, list) or not isinstance(task.get("name"), str):
            raise ConfigError(f"{name}: a task has no name or no metrics", fix="see vLLM's lm-eval-harness configs")
        for metric in metrics:
            said = metric.get("name") if isinstance(metric, Mapping) else None
            if not isinstance(said, str) or not said:
                raise ConfigError(
                    f"{name}: a metric of {task['name']} is {str(metric)[:40]}",
                    fix='give {name: "exact_match,strict-match", value: 0.75}',
                )
            value = _share(metric.get("value"), f"{name}: value of {said}")
            which, _, filter_name = said.partition(",")
            threshold = Threshold(
                task=task["name"], value=value, tolerance=rtol * value, filter=filter_name, metric=which
            )
            found.append((threshold, n))
    if not found:
        raise ConfigError(f"{name}: no metric has a value", fix="see vLLM's lm-eval-harness configs")
    return found


def _warning(threshold: Threshold, n: int) -> str:
    power = threshold_power(value=threshold.value, tolerance=threshold.tolerance, n=n)
    least = power.detectable_loss
    finds = (
        "it finds no loss in 80 % of runs"
        if math.isinf(least)
        else (f"a loss is found in 80 % of runs from {100 * least:.1f} pp on")
    )
    return (
        f"{_where(threshold)} >= {100 * threshold.limit:.1f} % of {n} questions is a fixed threshold. "
        f"{_power_sentence(power.passes_loss(LOSS_IN_QUESTION))}; {finds}. A paired margin sees more (docs/gating.md)."
    )


def _power_sentence(passes: float) -> str:
    return f"It alone passes an arm that truly lost {100 * LOSS_IN_QUESTION:g} pp in {100 * passes:.1f} % of runs"


def _known_keys(content: Mapping[str, Any], known: tuple[str, ...], name: str) -> None:
    unknown = [str(key) for key in content if key not in known]
    if unknown:
        raise ConfigError(
            f"{name} holds {', '.join(unknown)[:200]}, which is no key of vLLM's file with a threshold",
            fix="delete it; or write a policy like conf/gate/default.yaml, with the threshold under `thresholds`",
        )


def _share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{where} is {str(value)[:40]}", fix="a proportion from 0 to 1")
    return float(value)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_QUESTIONS:
        raise ConfigError(
            f"{where} is {str(value)[:40]!r}", fix=f"a whole number of questions, up to {MOST_QUESTIONS:,}"
        )
    return value
