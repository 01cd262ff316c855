"""Is comparison.json of the answers that lie in the run, and are its figures those of a paired table?

    check_sources(run_dir, comparison, evaluations)
    check_figures(run_dir, comparison, evaluations)

A gate believes a comparison only after both: a stale or a damaged one passes as easily as a good one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from workbench.comparison.figures import kept_flips
from workbench.comparison.pair import EvaluatedArm, check_apart
from workbench.comparison.samples import check_arm, digest
from workbench.errors import OutputError
from workbench.records import Comparison, Evaluation, TaskComparison
from workbench.statistics import loss_interval, loss_upper_bound, mcnemar_exact

_CLOSE = 1e-6
"""Largest difference between a stored figure and the one that its table gives (pp, or a proportion)."""
_BOUND_CLOSE_PP = 1e-3
"""The same for the loss's bounds, which are roots that a solver finds."""


def check_sources(run_dir: Path, comparison: Comparison, evaluations: Mapping[str, Evaluation]) -> None:
    """Refuse a comparison of other answers than those that the arms' scores.json name and that lie here.

    evaluations: the run's, by arm. A compared arm without one is the gate's to judge. Raises OutputError, and
    ComparisonError for two arms of one file and for an arm's scores.json that is another arm's.
    """
    for arm, evaluation in evaluations.items():
        check_arm(run_dir / "eval" / arm / "scores.json", arm, evaluation)
    again = _again(run_dir, comparison)
    record = run_dir / "comparison.json"
    compared = {arm: evaluations[arm] for arm in _arms(comparison) if arm in evaluations}
    check_apart([EvaluatedArm(evaluation=evaluation, root=run_dir) for evaluation in compared.values()])
    named = {
        name: arm
        for arm, evaluation in compared.items()
        for score in evaluation.scores
        for name in score.samples.split(";")
    }
    if named and not comparison.sources:
        raise OutputError(f"{record} does not say which answers it compares (`sources` is empty)", fix=again)
    for name, arm in named.items():
        if name not in comparison.sources:
            raise OutputError(f"{record} does not compare {name}, which {arm} was evaluated to since", fix=again)
    lost = [f"eval/{arm}/" for arm in _arms(comparison) if arm not in evaluations]
    for name, known in comparison.sources.items():
        if name not in named and not name.startswith(tuple(lost)):
            raise OutputError(f"{record} compares {name}, which no compared arm's scores.json names now", fix=again)
        if digest(run_dir / name) != known:
            raise OutputError(f"{record} compares other answers than {name} holds now", fix=again)


def check_figures(run_dir: Path, comparison: Comparison, evaluations: Mapping[str, Evaluation]) -> None:
    """Refuse figures that no paired table gives, or other ones than the row's flips and the arms' scores say, and a
    comparison that lacks a row of what was scored. Raises OutputError.
    """
    record = run_dir / "comparison.json"
    for lacking in _missing_rows(comparison, evaluations):
        raise OutputError(f"{record} is damaged: {lacking}", fix=_again(run_dir, comparison))
    for place, row in enumerate(comparison.tasks):
        for problem in (*_table_problems(row), *_score_problems(row, evaluations), *_flip_problems(row)):
            raise OutputError(
                f"{record} is damaged: tasks[{place}] ({row.candidate} {row.task} {row.filter} "
                f"{row.metric}): {problem}",
                fix=_again(run_dir, comparison),
            )


def _again(run_dir: Path, comparison: Comparison) -> str:
    noise = f" --noise-arm {comparison.noise_arm}" if comparison.noise_arm else ""
    return f"compare again: workbench compare {run_dir} --baseline {comparison.baseline}{noise}"


def _arms(comparison: Comparison) -> list[str]:
    candidates = [row.candidate for row in comparison.tasks] + [row.candidate for row in comparison.graded]
    named = [comparison.baseline, comparison.noise_arm, *comparison.unpaired, *candidates]
    return [arm for arm in dict.fromkeys(named) if arm]


def _table_problems(row: TaskComparison) -> Iterator[str]:
    counts = {name: getattr(row, name) for name in ("both", "lost", "gained", "neither")}
    table = ", ".join(f"{name} {count}" for name, count in counts.items())
    if row.n < 1 or min(counts.values()) < 0 or sum(counts.values()) != row.n:
        yield f"{table} do not add up to n {row.n}"
        return
    for name in ("baseline_value", "candidate_value", "p_loss", "p_two_sided"):
        if not 0.0 <= getattr(row, name) <= 1.0:
            yield f"{name} is {getattr(row, name)}, expected 0 to 1"
    for name in ("loss_pp", "loss_low_pp", "loss_high_pp", "loss_upper95_pp"):
        if not math.isfinite(value := getattr(row, name)) or abs(value) > 100.0 + _CLOSE:
            yield f"{name} is {value}, expected -100 to 100"
    if abs(row.loss_pp - 100.0 * (row.baseline_value - row.candidate_value)) > _CLOSE:
        yield f"loss_pp {row.loss_pp} is not the difference of {row.baseline_value} and {row.candidate_value}"
    if not row.loss_low_pp - _CLOSE <= row.loss_pp <= min(row.loss_high_pp, row.loss_upper95_pp) + _CLOSE:
        yield f"loss_pp {row.loss_pp} lies outside its own bounds"
    if row.clusters:
        return
    for name, right in (("baseline_value", row.both + row.lost), ("candidate_value", row.both + row.gained)):
        if abs(getattr(row, name) - right / row.n) > _CLOSE:
            yield f"{name} is {getattr(row, name)}, the table gives {right / row.n:.4f} ({table})"
    if abs(row.p_loss - (expected := mcnemar_exact(row.lost, row.gained, "greater"))) > _CLOSE:
        yield f"p_loss is {row.p_loss}, the table gives {expected:.3g} ({table})"
    low, high = loss_interval(row.lost, row.gained, row.n)
    upper = loss_upper_bound(row.lost, row.gained, row.n)
    for name, bound in (("loss_low_pp", low), ("loss_high_pp", high), ("loss_upper95_pp", upper)):
        if abs(getattr(row, name) - 100.0 * bound) > _BOUND_CLOSE_PP:
            yield f"{name} is {getattr(row, name)}, the table gives {100.0 * bound:.4f} ({table})"


def _score_problems(row: TaskComparison, evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    """The right answers of both sides against those of scores.json, which has them as a proportion."""
    sides = (("baseline", row.both + row.lost), ("candidate", row.both + row.gained))
    for side, right in sides:
        arm = getattr(row, side)
        for score in evaluations[arm].scores if arm in evaluations else ():
            if (score.task, score.filter, score.metric) != (row.task, row.filter, row.metric):
                continue
            if score.n != row.n:
                yield f"n is {row.n}, the scores of {arm} say {score.n}"
            elif not abs(score.value * score.n - right) < 0.5:
                yield (
                    f"{side}_value is {getattr(row, f'{side}_value'):.4f} ({right} of {row.n} right), the scores of "
                    f"{arm} say {score.value:.4f}"
                )


def _flip_problems(row: TaskComparison) -> Iterator[str]:
    """The counts of flips against the flips themselves; of many, a known number is kept."""
    for direction, kept in zip(("lost", "gained"), kept_flips(row.lost, row.gained), strict=True):
        count = getattr(row, direction)
        listed = sum(flip.direction == direction for flip in row.flips)
        if listed != kept:
            of_it = f", of which {kept} are kept" if kept != count else ""
            yield f"{direction} is {count}{of_it}, its flips hold {listed} {direction}"


def _missing_rows(comparison: Comparison, evaluations: Mapping[str, Evaluation]) -> Iterator[str]:
    """What a compared arm and the baseline were both scored on, and no row speaks of."""
    held = {(row.candidate, row.task, row.filter, row.metric) for row in comparison.tasks}
    held |= {(row.candidate, row.task, row.filter, row.metric) for row in comparison.graded}
    of_baseline = _lines(evaluations.get(comparison.baseline))
    for arm in _arms(comparison):
        for line in _lines(evaluations.get(arm)) if arm != comparison.baseline else ():
            if line in of_baseline and (arm, *line) not in held:
                yield f"it holds no row of {arm} {' '.join(line)}, which {comparison.baseline} and {arm} were scored on"


def _lines(evaluation: Evaluation | None) -> list[tuple[str, str, str]]:
    return [(score.task, score.filter, score.metric) for score in evaluation.scores] if evaluation else []
