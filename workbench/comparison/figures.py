"""The figures of one paired comparison: items of two arms in, a TaskComparison or GradedComparison out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from workbench.comparison.samples import Item, Key
from workbench.errors import ComparisonError
from workbench.records import Flip, GradedComparison, Stratum, TaskComparison, TaskScore
from workbench.statistics import (
    clustered_loss,
    discordance_above_noise,
    graded_loss,
    holm,
    loss_interval,
    mcnemar_exact,
    paired_loss,
    stratified_loss,
)

MAX_FLIPS = 50
"""Flips kept in the record per (candidate, task, filter), losses and gains each taking up to half if both exceed it."""
MAX_CHARACTERS = 2000
"""Longest answer kept in a flip; a longer one loses its middle, since the answer stands at its end. The sample files
have it whole.
"""
Items = Mapping[Key, Item]


def compare_items(
    base: TaskScore, base_items: Items, other: TaskScore, other_items: Items, noise_items: Items | None = None
) -> TaskComparison:
    """Compare right and wrong answers. noise_items: the A/A arm's, which the flips are held against.

    Raises ComparisonError where the items do not pair.
    """
    check_paired(base, base_items, other, other_items)
    keys = sorted(base_items)
    pairs = [(key, base_items[key], other_items[key]) for key in keys]
    right = np.array([a.correct for _, a, _ in pairs])
    kept = np.array([b.correct for _, _, b in pairs])
    result = paired_loss(right, kept)
    above_noise = math.nan
    if noise_items is not None:
        again = np.array([noise_items[key].correct for key in keys])
        above_noise = discordance_above_noise(right != again, right != kept)
    comparison = TaskComparison(
        task=base.task,
        filter=base.filter,
        metric=base.metric,
        baseline=base.arm,
        candidate=other.arm,
        n=result.n,
        both=result.both,
        lost=result.lost,
        gained=result.gained,
        neither=result.neither,
        baseline_value=(result.both + result.lost) / result.n,
        candidate_value=(result.both + result.gained) / result.n,
        p_two_sided=result.p_two_sided,
        p_loss=result.p_loss,
        discordance=result.discordance,
        primary=base.primary,
        flips=_flips(base, pairs),
        p_above_noise=above_noise,
        loss_pp=100.0 * result.loss,
        loss_low_pp=100.0 * result.low,
        loss_high_pp=100.0 * result.high,
        loss_upper95_pp=100.0 * result.upper,
        recovery_percent=100.0 * result.recovery,
        recovery_low_percent=100.0 * result.recovery_low,
        recovery_high_percent=100.0 * result.recovery_high,
        mde_pp=100.0 * result.mde,
        bootstrap_low_pp=100.0 * result.bootstrap_low,
        bootstrap_high_pp=100.0 * result.bootstrap_high,
    )
    return _with_strata(_with_clusters(comparison, pairs), pairs)


def compare_right(baseline: str, right: Sequence[bool], other: TaskScore, other_items: Items) -> TaskComparison:
    """Compare with stored answers of the same items. right: in the order of the items' keys; no answers' texts are
    known, so there are no flips to show.
    """
    keys = sorted(other_items)
    stored = {
        key: dataclasses.replace(other_items[key], value=float(was), answer="")
        for key, was in zip(keys, right, strict=True)
    }
    comparison = compare_items(dataclasses.replace(other, arm=baseline), stored, other, other_items)
    return dataclasses.replace(comparison, flips=())


def compare_graded(base: TaskScore, base_items: Items, other: TaskScore, other_items: Items) -> GradedComparison:
    """Compare graded scores of the same items. Raises ComparisonError where the items do not pair."""
    check_paired(base, base_items, other, other_items)
    keys = sorted(base_items)
    result = graded_loss([base_items[key].value for key in keys], [other_items[key].value for key in keys])
    return GradedComparison(
        task=base.task,
        filter=base.filter,
        metric=base.metric,
        baseline=base.arm,
        candidate=other.arm,
        n=result.n,
        baseline_value=result.baseline,
        candidate_value=result.candidate,
        loss=result.loss,
        low=result.low,
        high=result.high,
        upper95=result.upper,
        p_loss=result.p_loss,
        p_two_sided=result.p_two_sided,
        worse=result.worse,
        better=result.better,
    )


def kept_flips(lost: int, gained: int) -> tuple[int, int]:
    """How many of a row's losses and gains its record keeps, MAX_FLIPS in all."""
    kept = min(lost, max(MAX_FLIPS // 2, MAX_FLIPS - gained))
    return kept, min(gained, MAX_FLIPS - kept)


def check_paired(base: TaskScore, base_items: Items, other: TaskScore, other_items: Items) -> None:
    """Both arms answered the same documents, asked in the same way. Raises ComparisonError naming the first that
    differs.
    """
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
            if left != right and left and right:
                raise ComparisonError(
                    f"{where}, document {key[1]} of {key[0]}: the {what} of {base.arm!r} and {other.arm!r} differ "
                    f"({left[:60]} and {right[:60]})",
                    fix="evaluate both arms with the same data, shots, limits and harness",
                )


def _with_clusters(comparison: TaskComparison, pairs: list[tuple[Key, Item, Item]]) -> TaskComparison:
    """Problems asked several times: the problem is the unit of every figure but the counts."""
    problems: dict[tuple[str, int], list[tuple[Item, Item]]] = {}
    for key, a, b in pairs:
        if a.problem < 0:
            return comparison
        problems.setdefault((key[0], a.problem), []).append((a, b))
    if len(problems) == len(pairs):
        return comparison
    longest = max(map(len, problems.values()))
    scores = np.full((2, len(problems), longest), np.nan)
    for place, answers in enumerate(problems.values()):
        for repeat, (a, b) in enumerate(answers):
            scores[:, place, repeat] = a.value, b.value
    result = clustered_loss(scores[0], scores[1])
    return dataclasses.replace(
        comparison,
        clusters=result.clusters,
        baseline_value=result.baseline,
        candidate_value=result.candidate,
        loss_pp=100.0 * result.loss,
        loss_low_pp=100.0 * result.low,
        loss_high_pp=100.0 * result.high,
        loss_upper95_pp=100.0 * result.upper,
        p_loss=result.p_loss,
        p_two_sided=result.p_two_sided,
        recovery_percent=100.0 * result.recovery,
        recovery_low_percent=100.0 * result.recovery_low,
        recovery_high_percent=100.0 * result.recovery_high,
        mde_pp=100.0 * result.mde,
        bootstrap_low_pp=math.nan,
        bootstrap_high_pp=math.nan,
        p_above_noise=math.nan,
    )


def _with_strata(comparison: TaskComparison, pairs: list[tuple[Key, Item, Item]]) -> TaskComparison:
    """A group's subtasks, or the subjects that the documents name, where there are at least two."""
    leaves = {key[0] for key, _, _ in pairs}
    counts: dict[str, list[int]] = {}
    for key, a, b in pairs:
        name = key[0] if len(leaves) > 1 else a.stratum
        if not name:
            return comparison
        of_name = counts.setdefault(name, [0, 0, 0])
        of_name[0] += 1
        of_name[1] += a.correct and not b.correct
        of_name[2] += b.correct and not a.correct
    if len(counts) < 2:
        return comparison
    names = sorted(counts)
    strata = {name: (counts[name][0], counts[name][1], counts[name][2]) for name in names}
    result = stratified_loss(strata)
    adjusted = holm([mcnemar_exact(lost, gained, "greater") for _, lost, gained in strata.values()])
    intervals = {name: loss_interval(lost, gained, n) for name, (n, lost, gained) in strata.items()}
    return dataclasses.replace(
        comparison,
        strata=tuple(
            Stratum(
                name=name,
                n=n,
                lost=lost,
                gained=gained,
                loss_pp=100.0 * (lost - gained) / n,
                loss_low_pp=100.0 * intervals[name][0],
                loss_high_pp=100.0 * intervals[name][1],
                p_loss_holm=p,
            )
            for (name, (n, lost, gained)), p in zip(strata.items(), adjusted, strict=True)
        ),
        macro_loss_pp=100.0 * result.macro,
        macro_low_pp=100.0 * result.macro_low,
        macro_high_pp=100.0 * result.macro_high,
        p_strata_differ=result.p_differ,
    )


def _flips(base: TaskScore, pairs: list[tuple[Key, Item, Item]]) -> tuple[Flip, ...]:
    """At most MAX_FLIPS, lost ones first; neither direction crowds the other out."""
    lost = [pair for pair in pairs if pair[1].correct and not pair[2].correct]
    gained = [pair for pair in pairs if pair[2].correct and not pair[1].correct]
    kept_lost, kept_gained = kept_flips(len(lost), len(gained))
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
        for direction, chosen in (("lost", lost[:kept_lost]), ("gained", gained[:kept_gained]))
        for key, a, b in chosen
    )


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
