"""Paired comparison of arms, item by item, from the files of their evaluations.

    comparison = compare_arms(run_dir, baseline="source", candidates=["nvfp4", "requant"], noise_arm="source_again")

Items pair on (task, document, filter). Two answers are comparable only if they answer the same thing: a document,
prompt, target or generation setting that differs is refused by name, and so is a document that one arm lacks. The
noise arm is the baseline's own checkpoint evaluated again; its discordance with the baseline is the noise floor,
reported also when it is zero.
"""

from __future__ import annotations

from pathlib import Path

from workbench.comparison.samples import Item, Key, read_evaluation, read_items
from workbench.errors import ComparisonError
from workbench.records import Comparison, Evaluation, Flip, TaskComparison, TaskScore
from workbench.statistics import (
    loss_interval,
    loss_upper_bound,
    mcnemar_exact,
    minimum_detectable_loss,
    recovery_interval,
)

MAX_FLIPS = 50
"""Flips kept in the record per (candidate, task, filter), losses and gains each taking up to half if both exceed it."""
MAX_CHARACTERS = 2000
"""Longest answer kept in a flip; a longer one loses its middle, since the answer stands at its end. The sample files
have it whole.
"""


def compare_arms(run_dir: Path, *, baseline: str, candidates: list[str], noise_arm: str = "") -> Comparison:
    """Compare every candidate (and the noise arm, if there is one) with the baseline on every (task, filter).

    Reads `run_dir/eval/<arm>/scores.json` and the sample files that it names. Raises ComparisonError naming arm, task
    and document.
    """
    reference = read_evaluation(run_dir, baseline)
    arms = list(dict.fromkeys([*([noise_arm] if noise_arm else []), *candidates]))
    if baseline in arms:
        raise ComparisonError(
            f"arm {baseline!r} is the baseline and cannot be compared with itself", fix="name another arm"
        )
    others = {arm: read_evaluation(run_dir, arm) for arm in arms}
    for arm, evaluation in others.items():
        _check_same_lines(reference, evaluation, arm)
    tasks: list[TaskComparison] = []
    for score in reference.scores:
        base_items = read_items(run_dir, score)
        for arm in arms:
            other = _find(others[arm], score)
            tasks.append(_compare(score, base_items, other, read_items(run_dir, other)))
    tasks.sort(key=lambda task: arms.index(task.candidate))  # stable: tasks stay in the evaluation's order
    noise = {
        f"{task.task}|{task.filter}": task.discordance for task in tasks if noise_arm and task.candidate == noise_arm
    }
    return Comparison(baseline=baseline, noise_arm=noise_arm, tasks=tuple(tasks), noise_floor=noise)


def _check_same_lines(reference: Evaluation, other: Evaluation, arm: str) -> None:
    here = {(score.task, score.filter) for score in reference.scores}
    there = {(score.task, score.filter) for score in other.scores}
    for missing, where in ((here - there, arm), (there - here, reference.arm)):
        for task, name in sorted(missing):
            raise ComparisonError(
                f"arm {where!r} has no result for task {task!r}, filter {name!r}",
                fix="evaluate both arms on the same tasks",
            )
    if reference.harness != other.harness:
        raise ComparisonError(
            f"{reference.arm!r} was evaluated with {reference.harness}, {arm!r} with {other.harness}",
            fix="evaluate both with one version: prompts and filters are part of a score",
        )


def _find(evaluation: Evaluation, score: TaskScore) -> TaskScore:
    return next(s for s in evaluation.scores if (s.task, s.filter) == (score.task, score.filter))


def _compare(
    base: TaskScore, base_items: dict[Key, Item], other: TaskScore, other_items: dict[Key, Item]
) -> TaskComparison:
    _check_paired(base, base_items, other, other_items)
    pairs = [(key, base_items[key], other_items[key]) for key in sorted(base_items)]
    both = sum(a.correct and b.correct for _, a, b in pairs)
    lost = sum(a.correct and not b.correct for _, a, b in pairs)
    gained = sum(b.correct and not a.correct for _, a, b in pairs)
    n = len(pairs)
    low, high = loss_interval(lost, gained, n)
    recovery, recovery_low, recovery_high = recovery_interval(both + lost, both + gained, lost, n)
    return TaskComparison(
        task=base.task,
        filter=base.filter,
        metric=base.metric,
        baseline=base.arm,
        candidate=other.arm,
        n=n,
        both=both,
        lost=lost,
        gained=gained,
        neither=n - both - lost - gained,
        baseline_value=(both + lost) / n,
        candidate_value=(both + gained) / n,
        loss_pp=100.0 * (lost - gained) / n,
        loss_low_pp=100.0 * low,
        loss_high_pp=100.0 * high,
        loss_upper95_pp=100.0 * loss_upper_bound(lost, gained, n),
        p_loss=mcnemar_exact(lost, gained, "greater"),
        p_two_sided=mcnemar_exact(lost, gained),
        recovery_percent=100.0 * recovery,
        recovery_low_percent=100.0 * recovery_low,
        recovery_high_percent=100.0 * recovery_high,
        discordance=(lost + gained) / n,
        mde_pp=100.0 * minimum_detectable_loss(n, (lost + gained) / n),
        primary=base.primary,
        flips=_flips(base, pairs),
    )


def _check_paired(base: TaskScore, base_items: dict[Key, Item], other: TaskScore, other_items: dict[Key, Item]) -> None:
    where = f"task {base.task!r}, filter {base.filter!r}"
    for key in sorted(base_items.keys() ^ other_items.keys()):
        arm = other.arm if key in base_items else base.arm
        raise ComparisonError(
            f"{where}: arm {arm!r} lacks document {key[1]} of {key[0]}", fix="evaluate both with one limit"
        )
    for key in sorted(base_items):
        a, b = base_items[key], other_items[key]
        for what, left, right in (
            ("document (doc_hash)", a.document, b.document),
            ("prompt (prompt_hash)", a.prompt, b.prompt),
            ("target (target_hash)", a.target_hash, b.target_hash),
            ("generation settings", a.settings, b.settings),
        ):
            if left != right:
                raise ComparisonError(
                    f"{where}, document {key[1]} of {key[0]}: the {what} of {base.arm!r} and {other.arm!r} differ "
                    f"({left[:60]} and {right[:60]})",
                    fix="evaluate both arms with the same data, shots, limits and harness",
                )


def _flips(base: TaskScore, pairs: list[tuple[Key, Item, Item]]) -> tuple[Flip, ...]:
    """At most MAX_FLIPS, lost ones first; neither direction crowds the other out."""
    lost = [pair for pair in pairs if pair[1].correct and not pair[2].correct]
    gained = [pair for pair in pairs if pair[2].correct and not pair[1].correct]
    kept_lost = max(MAX_FLIPS // 2, MAX_FLIPS - len(gained))
    lost = lost[:kept_lost]
    gained = gained[: MAX_FLIPS - len(lost)]
    return tuple(
        Flip(
            task=key[0],
            filter=base.filter,
            doc_id=key[1],
            direction=direction,
            question=_shorten(a.question),
            target=_shorten(a.target),
            baseline_answer=_shorten(a.answer),
            candidate_answer=_shorten(b.answer),
        )
        for direction, chosen in (("lost", lost), ("gained", gained))
        for key, a, b in chosen
    )


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
