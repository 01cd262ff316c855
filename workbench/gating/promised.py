"""What a run set out to measure, from its configuration and the stages that ran: evidence that is gone is not evidence
that never was.

    promised = read_promised(settings, stages)
    promised.tasks, promised.lint, promised.weights, promised.numerics
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.gating.evidence import invalid
from workbench.gating.policy import Policy
from workbench.records import Comparison, GateCheck

_NO_TASKS = ("default", "weights", "serving", "numerics")  # words of `tiers` that are none
_UNPAIRED = ("perplexity", "bits_per_byte")  # ends of the metrics that no answers are paired by


@dataclass(frozen=True, kw_only=True)
class Promised:
    """tasks: planned, by name. lint, weights, numerics: arms that the run looked at in that way."""

    tasks: tuple[str, ...] = ()
    lint: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()
    numerics: frozenset[str] = frozenset()


def read_promised(settings: Mapping[str, Any], stages: Collection[str]) -> Promised:
    """settings: config.yaml as plain data, possibly none of ours. stages: those that ran to their end."""
    arms = _mapping(settings.get("arms"))
    engine = _mapping(settings.get("engine"))
    pairs = _mapping(settings.get("analysis")).get("pairs")
    measured = {
        str(pair[side])
        for pair in (pairs if isinstance(pairs, list) else ())
        if isinstance(pair, dict)
        for side in ("first", "second", "direct")
        if pair.get(side)
    }
    probed = engine.get("kind") == "vllm" and engine.get("numerics") is True and "evaluate" in stages
    tasks = [
        str(name)
        for name, task in _mapping(settings.get("eval")).items()
        if not str(_mapping(task).get("metric") or "").endswith(_UNPAIRED)
    ]
    return Promised(
        tasks=tuple(tasks) if "compare" in stages else (),
        lint=frozenset(arms) if "lint" in stages else frozenset(),
        weights=frozenset(measured & set(arms)) if "analyze" in stages else frozenset(),
        numerics=frozenset(arms) if probed else frozenset(),
    )


def check_tasks(rules: Policy, promised: Promised, comparison: Comparison | None) -> list[GateCheck]:
    """Tasks that the run or the policy names and that were not compared."""
    checks = []
    compared = [(row.candidate, row.task) for row in comparison.tasks] if comparison is not None else []
    compared += [(row.candidate, row.task) for row in comparison.graded] if comparison is not None else []
    for arm in rules.gated:
        named = {task for candidate, task in compared if candidate == arm}
        for task in promised.tasks if named else ():
            if not any(_is_of(name, task, promised.tasks) for name in named):
                reason = f"the run's eval names {task}, and no answers to it were compared."
                checks.append(invalid(f"evaluation {task}", arm, reason, rules=rules, task=task))
    return checks + _named_in_policy(rules, promised, {task for _, task in compared})


def _named_in_policy(rules: Policy, promised: Promised, compared: set[str]) -> list[GateCheck]:
    """Tasks of the policy's own tiers and margins. A critical one without answers is no pass; another is shown."""
    checks = []
    for task in dict.fromkeys([*rules.tiers, *rules.margin_pp]) if compared else ():
        if task in _NO_TASKS or task in promised.tasks or any(_is_of(name, task, (task,)) for name in compared):
            continue
        if rules.tiers.get(task) == "critical":
            checks.append(
                invalid(f"evaluation {task}", "", f"the policy calls {task} critical, and it was not compared.")
            )
        else:
            reason = f"the policy names {task}, which was not compared."
            checks.append(GateCheck(name=f"evaluation {task}", arm="", status="reported", reason=reason))
    return checks


def _is_of(name: str, task: str, others: Collection[str]) -> bool:
    """Whether a compared task is the planned one, or a subtask of its group."""
    return name == task or (name.startswith(f"{task}_") and name not in others)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
