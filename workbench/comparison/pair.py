"""Paired comparison of arms, item by item, from the files of their evaluations.

    comparison = compare_arms(run_dir, baseline="source", candidates=["nvfp4", "requant"], noise_arm="source_again")
    comparison = compare_folders(Path("runs/bf16"), Path("runs/nvfp4"))       # run folders, or anyone's lm-eval output

Items pair on (task, document, filter). Two answers are comparable only if they answer the same thing: a document,
prompt, target or generation setting that differs is refused by name, and so is a document that one arm lacks. The
noise arm is the baseline's own checkpoint evaluated again; its discordance with the baseline is the noise floor,
reported also when it is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from workbench.comparison.figures import compare_graded, compare_items
from workbench.comparison.samples import Item, Key, digest, read_evaluation, read_items, task_of
from workbench.errors import ComparisonError
from workbench.records import Comparison, Evaluation, GradedComparison, TaskComparison, TaskScore

Line = tuple[str, str, str]
"""(task, filter, metric)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedArm:
    """One arm's evaluation and where its sample files lie. root: what `TaskScore.samples` is relative to.

    graded: scores of metrics that are not right or wrong (value: their mean). unusable: what cannot be compared, and
    why. imported: found as plain lm-eval output, so what it lacks is a note and no error.
    """

    evaluation: Evaluation
    root: Path
    graded: tuple[TaskScore, ...] = ()
    notes: tuple[str, ...] = ()
    unusable: Mapping[Line, str] = field(default_factory=dict)
    imported: bool = False

    @property
    def name(self) -> str:
        return self.evaluation.arm


@dataclass(slots=True)
class _Collected:
    tasks: list[TaskComparison] = field(default_factory=list)
    graded: list[GradedComparison] = field(default_factory=list)


def compare_arms(run_dir: Path, *, baseline: str, candidates: list[str], noise_arm: str = "") -> Comparison:
    """Compare every candidate (and the noise arm, if there is one) with the baseline on every (task, filter).

    Reads `run_dir/eval/<arm>/scores.json` and the sample files that it names. Raises ComparisonError naming arm, task
    and document.
    """
    arms = list(dict.fromkeys([*([noise_arm] if noise_arm else []), *candidates]))
    if baseline in arms:
        raise ComparisonError(
            f"arm {baseline!r} is the baseline and cannot be compared with itself", fix="name another arm"
        )
    reference, *others = (
        EvaluatedArm(evaluation=read_evaluation(run_dir, arm), root=run_dir) for arm in (baseline, *arms)
    )
    check_apart([reference, *others])
    comparison = compare_evaluated(reference, others, noise_arm=noise_arm)
    return replace(comparison, sources=_sample_digests(run_dir, [reference, *others]))


def check_apart(arms: list[EvaluatedArm]) -> None:
    """Refuse two arms that are read from one sample file, by whatever names: it loses nothing to itself.

    Raises ComparisonError naming the file.
    """
    seen: dict[tuple[int, int], str] = {}
    for arm in arms:
        scores = (*arm.evaluation.scores, *arm.graded)
        for path in {arm.root / name for score in scores for name in score.samples.split(";")}:
            if not path.is_file():
                continue
            status = path.stat()
            other = seen.setdefault((status.st_dev, status.st_ino), arm.name)
            if other != arm.name:
                raise ComparisonError(
                    f"{path} is one file for {other!r} and {arm.name!r}: the arm would be compared with itself",
                    fix="give the folders of two evaluations",
                )


def _sample_digests(run_dir: Path, arms: list[EvaluatedArm]) -> dict[str, str]:
    """sha256 of the arms' sample files, by their paths in the run: `Comparison.sources`."""
    names = {name for arm in arms for score in arm.evaluation.scores for name in score.samples.split(";")}
    return {name: digest(run_dir / name) for name in sorted(names)}


def compare_evaluated(reference: EvaluatedArm, others: list[EvaluatedArm], noise_arm: str = "") -> Comparison:
    """Compare arms that lie anywhere with a reference. Raises ComparisonError where answers do not pair."""
    notes = [*reference.notes]
    for other in others:
        notes += [*other.notes, *_check_same_lines(reference, other)]
        if _hold_one_evaluation(reference, other):
            notes.append(
                f"{reference.name}, {other.name}: the two sides' samples are byte for byte the same files: a copy, or "
                "one run compared with itself"
            )
    found = _Collected()
    arms = [other.name for other in others]
    for score in reference.evaluation.scores:
        base_items = read_items(reference.root, score)
        noise_items: dict[Key, Item] | None = None
        for other in others:  # the noise arm comes first
            matching = _find(other.evaluation.scores, score)
            if matching is None:
                continue
            items = read_items(other.root, matching)
            held_against = noise_items if other.name != noise_arm else None
            found.tasks.append(compare_items(score, base_items, matching, items, held_against))
            if other.name == noise_arm:
                noise_items = items
    for score in reference.graded + reference.evaluation.scores:
        for other in others:
            matching = _find(other.graded, score) or (
                _find(other.evaluation.scores, score) if score in reference.graded else None
            )
            if matching is not None:
                base_items, items = (
                    read_items(root, of, graded=True) for root, of in ((reference.root, score), (other.root, matching))
                )
                found.graded.append(compare_graded(score, base_items, matching, items))
    if not found.tasks and not found.graded:
        why = "; ".join(
            f"{arm.name} {line[0]} {line[2]}: {what}"
            for arm in (reference, *others)
            for line, what in arm.unusable.items()
        )
        raise ComparisonError(
            f"{reference.name!r} and {', '.join(map(repr, arms)) or 'no arm'} have no task in common"
            + (f" ({why[:600]})" if why else ""),
            fix="evaluate both on the same tasks, with the samples written (lm-eval: --log_samples)",
        )
    found.tasks.sort(key=lambda task: arms.index(task.candidate))  # stable: tasks stay in the evaluation's order
    noise = {
        f"{task.task}|{task.filter}": task.discordance
        for task in found.tasks
        if noise_arm and task.candidate == noise_arm
    }
    return Comparison(
        baseline=reference.name,
        noise_arm=noise_arm,
        tasks=tuple(found.tasks),
        noise_floor=noise,
        graded=tuple(found.graded),
        notes=tuple(dict.fromkeys(notes)),
        unpaired={other.name: missing for other in others if (missing := _unpaired(reference, other))},
    )


def _hold_one_evaluation(a: EvaluatedArm, b: EvaluatedArm) -> bool:
    """Whether both sides' samples are the same bytes and nothing beside them tells two evaluations apart.

    A model that answers the same twice leaves equal samples too, but another result file and journal, and another time
    in the names where there is neither.
    """
    ours, theirs = _sample_files(a), _sample_files(b)
    if not ours or not all(path.is_file() for path in (*ours, *theirs)):
        return False
    if not _same_bytes({task_of(path): path for path in ours}, {task_of(path): path for path in theirs}):
        return False
    ours_beside, theirs_beside = ({digest(path) for path in _files_beside(files)} for files in (ours, theirs))
    if ours_beside and theirs_beside:
        return ours_beside == theirs_beside
    return {path.name for path in ours} == {path.name for path in theirs}


def _sample_files(arm: EvaluatedArm) -> list[Path]:
    names = {name for score in (*arm.evaluation.scores, *arm.graded) for name in score.samples.split(";")}
    return [arm.root / name for name in sorted(names)]


def _files_beside(samples: list[Path]) -> list[Path]:
    """lm-eval's result files, which hold times, and our own journals of requests, which hold latencies."""
    folders = {path.parent for path in samples}
    names = ("results_*.json", "requests_*.jsonl")
    return [path for folder in folders for name in names for path in folder.glob(name) if path.is_file()]


def _same_bytes(ours: Mapping[str, Path], theirs: Mapping[str, Path]) -> bool:
    return ours.keys() == theirs.keys() and all(
        path.stat().st_size == theirs[key].stat().st_size and digest(path) == digest(theirs[key])
        for key, path in ours.items()
    )


def _unpaired(reference: EvaluatedArm, other: EvaluatedArm) -> tuple[str, ...]:
    """Judged tasks of the reference that the other lacks, or does not score as right or wrong; and the reverse, of
    tasks that both have (where the reference's scores may be damaged). A task that only the other has says nothing
    about the reference's."""
    here, there = reference.evaluation.scores, other.evaluation.scores
    missing = [score.task for score in here if score.primary and _find(there, score) is None]
    tasks = {score.task for score in (*here, *reference.graded)} | {task for task, _, _ in reference.unusable}
    missing += [s.task for s in there if s.primary and s.task in tasks and _find(here, s) is None]
    return tuple(dict.fromkeys(missing))


def _check_same_lines(reference: EvaluatedArm, other: EvaluatedArm) -> list[str]:
    """Differences between two arms' tasks and harness: errors in a run, notes where a folder was imported."""
    lenient = reference.imported or other.imported
    notes = []
    here, there = _lines(reference), _lines(other)
    for missing, where in ((here - there, other.name), (there - here, reference.name)):
        for task, name, metric in sorted(missing):
            what = f"arm {where!r} has no result for task {task!r}, filter {name!r}"
            if not lenient:
                raise ComparisonError(what, fix="evaluate both arms on the same tasks")
            notes.append(f"{what}, metric {metric!r}: not compared")
    a, b = reference.evaluation, other.evaluation
    if a.api != b.api:
        raise ComparisonError(
            f"{a.arm!r} was asked over {a.api}, {b.arm!r} over {b.api}: the prompts are not the same",
            fix="evaluate both over one API",
        )
    if a.harness != b.harness:
        what = f"{a.arm!r} was evaluated with {a.harness}, {b.arm!r} with {b.harness}"
        if not lenient:
            raise ComparisonError(what, fix="evaluate both with one version: prompts and filters are part of a score")
        notes.append(f"{what}: prompts and targets are checked item by item, but filters may score differently")
    return notes


def _lines(arm: EvaluatedArm) -> set[Line]:
    return {(score.task, score.filter, score.metric) for score in (*arm.evaluation.scores, *arm.graded)}


def _find(scores: tuple[TaskScore, ...], score: TaskScore) -> TaskScore | None:
    wanted = (score.task, score.filter, score.metric)
    return next((s for s in scores if (s.task, s.filter, s.metric) == wanted), None)
