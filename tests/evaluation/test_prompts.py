"""Calibration prompts: the tasks' layout, the same in every process, and never a scored document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workbench.mini_models.problems import gsm8k_problems

from workbench.errors import EvaluationError
from workbench.evaluation.prompts import training_prompts
from workbench.evaluation.spec import task_spec

SCRIPT = """
import json, sys
from pathlib import Path
from workbench.evaluation.prompts import training_prompts
from workbench.evaluation.spec import task_spec
specs = tuple(task_spec({"name": n, "task": t, "data": "mini", "num_fewshot": 2, "primary_filter": f}) for n, t, f in
              (("gsm8k_mini", "gsm8k", "strict-match"), ("mmlu_pro_mini", "mmlu_pro", "custom-extract")))
print(json.dumps(training_prompts(specs, 6, scratch=Path(sys.argv[1]))))
"""


def prompts(folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=True)
    drawn: list[str] = json.loads(done.stdout.splitlines()[-1])
    return drawn


def test_two_processes_draw_the_same_prompts_of_both_tasks(tmp_path: Path) -> None:
    first, second = prompts(tmp_path / "a"), prompts(tmp_path / "b")
    assert first == second
    assert len(first) == 6
    assert sum(prompt.startswith("Question: ") for prompt in first) == 3
    assert sum("multiple choice" in prompt for prompt in first) == 3
    assert all(prompt.count("Let's think step by step. Let's think") == 0 for prompt in first)
    scored = {problem["question"] for problem in gsm8k_problems(1000, split="test")}
    assert not any(question in prompt for prompt in first for question in scored)


def test_scored_documents_are_never_drawn(tmp_path: Path) -> None:
    (tmp_path / "aime.jsonl").write_text('{"problem": "p", "answer": "1", "id": "0"}\n')
    data = {"test": str(tmp_path / "aime.jsonl")}
    aime = task_spec({"name": "aime", "task": "aime25", "data": data, "primary_filter": "none"})
    with pytest.raises(EvaluationError, match="'aime' has no training or validation documents"):
        training_prompts((aime,), 1, scratch=tmp_path)
    mmlu = {"name": "mmlu", "task": "mmlu", "data": "mini", "metric": "acc", "primary_filter": "none", "num_fewshot": 1}
    (prompt,) = training_prompts((task_spec(mmlu),), 1, scratch=tmp_path)
    assert prompt[-2:] in (" A", " B", " C", " D")
