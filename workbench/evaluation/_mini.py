"""The shipped mini tasks: seeded problems in the layout of a published data set, written as JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import EvaluationError
from workbench.records import write_text

DOCUMENTS = 1000
SPLITS = {"gsm8k": ("train", "test"), "mmlu_pro": ("validation", "test"), "mmlu": ("dev", "test")}
SHOTS = {"gsm8k": 20, "mmlu_pro": 40, "mmlu": 40}
CHOICES = 4


def write_mini_documents(task: str, folder: Path) -> dict[str, str]:
    """Write the seeded problems in the layout of `task`; returns split -> path. Raises EvaluationError."""
    if task not in SPLITS:
        raise EvaluationError(
            f"task {task!r} has no mini twin", fix=f"data='mini' is for {', '.join(SPLITS)}; else null or local files"
        )
    shots_split, test_split = SPLITS[task]
    paths = {}
    for split, count in ((shots_split, SHOTS[task]), (test_split, DOCUMENTS)):
        path = folder / f"{task}_mini_{split}.jsonl"
        write_text(path, "".join(json.dumps(problem) + "\n" for problem in _problems(task, count, split)))
        paths[split] = str(path)
    return paths


def _problems(task: str, count: int, split: str) -> list[dict[str, Any]]:
    from workbench.mini_models.problems import gsm8k_problems, mmlu_pro_problems

    if task == "gsm8k":
        return list(gsm8k_problems(count, split=split))
    if task == "mmlu_pro":
        return list(mmlu_pro_problems(count, split=split))
    return [_four_choices(problem) for problem in mmlu_pro_problems(count, split=split.replace("dev", "validation"))]


def _four_choices(problem: dict[str, Any]) -> dict[str, Any]:
    """A ten-option question as MMLU has it: the right option and the next three, at a place that goes round."""
    right, options = problem["answer_index"], problem["options"]
    place = problem["question_id"] // 8 % CHOICES  # eight subjects take turns
    others = [options[(right + step) % len(options)] for step in range(1, CHOICES)]
    return {
        "question": problem["question"],
        "subject": problem["category"].replace(" ", "_"),
        "choices": [*others[:place], options[right], *others[place:]],
        "answer": place,
    }
