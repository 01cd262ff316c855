"""Two folders compared, whatever they are: a run, an arm of a run, or plain lm-eval output.

comparison = compare_folders(Path("runs/a/eval/source"), Path("lm_eval_out/org__model-nvfp4"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from workbench.comparison.lm_eval_folder import holds_lm_eval_output, read_lm_eval_folder
from workbench.comparison.pair import EvaluatedArm, compare_evaluated
from workbench.comparison.samples import read_evaluation, task_of
from workbench.comparison.summary import one_line
from workbench.errors import ComparisonError
from workbench.records import Comparison


def compare_folders(baseline: Path, candidate: Path, noise: Path | None = None) -> Comparison:
    """Pair the one arm in each folder. noise: the baseline evaluated again. Raises ComparisonError."""
    return compare_evaluations(read_folders(baseline, candidate, noise))


def read_folders(baseline: Path, candidate: Path, noise: Path | None = None) -> list[EvaluatedArm]:
    """The arms of two folders (or three): the baseline, its noise arm, the candidate. Raises ComparisonError."""
    folders = [baseline, *([noise] if noise else []), candidate]
    names = _names(folders)
    reference = read_folder(folders[0], names[0])
    groups = {
        score.task: tuple(task_of(Path(file)) for file in score.samples.split(";"))
        for score in (*reference.evaluation.scores, *reference.graded)
        if ";" in score.samples
    }
    others = [read_folder(folder, name, groups) for folder, name in zip(folders[1:], names[1:], strict=True)]
    return [reference, *others]


def compare_evaluations(arms: list[EvaluatedArm]) -> Comparison:
    """Compare what `read_folders` read. Raises ComparisonError."""
    reference, *others = arms
    return compare_evaluated(reference, others, noise_arm=others[0].name if len(others) > 1 else "")


def read_folder(folder: Path, name: str, groups: Mapping[str, tuple[str, ...]] | None = None) -> EvaluatedArm:
    """The one evaluated arm of a folder, called `name`. groups: the baseline's, for lm-eval's folders.

    Raises ComparisonError where there is none, or several.
    """
    if not folder.is_dir():
        raise ComparisonError(f"there is no folder {folder}", fix="give a run folder, or lm-eval's output folder")
    if (folder / "scores.json").is_file():
        return _of_run(folder.resolve().parents[1], folder.name, name)
    arms = sorted(path.parent.name for path in folder.glob("eval/*/scores.json"))
    if len(arms) > 1:
        raise ComparisonError(
            f"{folder} holds {len(arms)} evaluated arms: {', '.join(arms)}", fix=f"give one: {folder}/eval/{arms[0]}"
        )
    if arms:
        return _of_run(folder, arms[0], name)
    if holds_lm_eval_output(folder):
        return read_lm_eval_folder(folder, name, groups)
    raise ComparisonError(
        f"{folder} holds neither an evaluated arm (eval/<arm>/scores.json) nor lm-eval's files "
        "(results_*.json, samples_*.jsonl)",
        fix="give a run folder, RUN/eval/ARM, or lm-eval's --output_path",
    )


def _of_run(run: Path, arm: str, name: str) -> EvaluatedArm:
    evaluation = read_evaluation(run, arm)
    scores = tuple(dataclasses.replace(score, arm=name) for score in evaluation.scores)
    return EvaluatedArm(evaluation=dataclasses.replace(evaluation, arm=name, scores=scores), root=run)


def _names(folders: list[Path]) -> list[str]:
    """Each folder's shortest ending that no other has; equal folders are numbered."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = [one_line("/".join(part[-length:])) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [one_line(f"{folder.resolve().name} ({place})") for place, folder in enumerate(folders, 1)]
