"""Prompts to calibrate and to capture on: the tasks' own layout, with documents that are never scored.

    prompts = training_prompts(specs, 24, scratch=folder)

Each prompt is what the evaluation would send (description and shots) for a document of the task's training or
validation split, followed by that document's solution: prefill sees the tokens of questions and of answers.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.evaluation.spec import TaskSpec, check_tasks

FEWSHOT_SEED = 1234  # lm-eval's own default


def training_prompts(specs: tuple[TaskSpec, ...], count: int, *, scratch: Path) -> list[str]:
    """`count` prompts, shared evenly over the tasks in their order. scratch: folder for generated documents.

    Raises EvaluationError when a task has no training or validation documents, naming it.
    """
    check_tasks(specs)
    import datasets

    datasets.disable_progress_bars()
    from workbench.evaluation.tasks import build_tasks

    built = build_tasks(specs, scratch)
    prompts: list[str] = []
    for place, entry in enumerate(built):
        share = count // len(built) + (place < count % len(built))
        per_task = -(-share // len(entry.tasks))
        drawn = [prompt for task in entry.tasks for prompt in _of_task(entry.spec, task, per_task)]
        prompts.extend(drawn[:share])
    return prompts


def _of_task(spec: TaskSpec, task: Any, count: int) -> list[str]:
    documents = _unscored_documents(task)
    if documents is None:
        raise EvaluationError(
            f"task {spec.name!r} has no training or validation documents to capture on",
            fix="give prompts of your own: `workbench calibrate --prompts FILE`, or analysis.capture=false",
        )
    task.set_fewshot_seed(FEWSHOT_SEED)  # else every process draws other shots
    shots = spec.num_fewshot if spec.num_fewshot is not None else int(task.get_config("num_fewshot") or 0)
    prompts = []
    for document in islice(documents, count):
        context = task.fewshot_context(document, shots)
        target = task.doc_to_target(document)
        if isinstance(target, int) and task.get_config("doc_to_choice"):  # multiple choice names the place
            target = task.doc_to_choice(document)[target]
        answer = str(document.get("cot_content") or target).removeprefix("A: ")
        opening = "Let's think step by step."  # MMLU-Pro's prompt already ends with it
        prompts.append(f"{context} {answer.removeprefix(opening).strip() if context.endswith(opening) else answer}")
    return prompts


def _unscored_documents(task: Any) -> Any:
    """Documents of a split that is not the scored one; None if the task has no other."""
    names = ("training_split", "validation_split", "fewshot_split", "test_split")
    training, validation, shots, test = (task.get_config(name) for name in names)
    scored = test or validation
    if training and training != scored:
        return task.training_docs()
    if validation and validation != scored:
        return task.validation_docs()
    return task.fewshot_docs() if shots and shots != scored else None
