"""Real answers through the importer: two published models' solutions of GSM8K as lm-eval output folders.

The answers stand after "A:" there, not after "####"; lm-eval's gsm8k filter would find none in any of them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from lm_eval_output import row, write_samples

from workbench.comparison import compare_folders
from workbench.gating import gate

FILE = Path(os.environ.get("WORKBENCH_SHARED_DATA", "/nonexistent")) / "gsm8k" / "example_model_solutions.jsonl"


def _answer(text: str) -> str | None:
    """None for the eleven solutions that end without an answer: never right, whatever the question's is."""
    found = re.findall(r"A: *([^\n]*)$", text.strip())
    return str(found[-1]).replace(",", "").strip() if found else None


@pytest.mark.skipif(not FILE.is_file(), reason="WORKBENCH_SHARED_DATA has no gsm8k/ folder")
def test_the_fine_tuned_model_loses_to_the_verified_one(tmp_path: Path) -> None:
    solutions = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    for model in ("175b_verification", "175b_finetuning"):
        rows = [
            row(
                i,
                float(_answer(item[model]["solution"]) == (_answer(item["ground_truth"]) or "none")),
                doc={"question": item["question"]},
                resps=[[item[model]["solution"]]],
            )
            for i, item in enumerate(solutions)
        ]
        write_samples(tmp_path / model, "gsm8k", rows)
    comparison = compare_folders(tmp_path / "175b_verification", tmp_path / "175b_finetuning")
    (task,) = comparison.tasks
    assert (task.n, task.both, task.lost, task.gained, task.neither) == (1319, 382, 360, 76, 501)
    assert (len(task.flips), task.flips[0].direction) == (50, "lost")
    verdict = gate({"name": "default", "margin_pp": 1.0, "gated": ["175b_finetuning"]}, comparison=comparison)
    assert (verdict.status, verdict.exit_code) == ("regression", 1)
    back = compare_folders(tmp_path / "175b_finetuning", tmp_path / "175b_verification")
    verdict = gate({"name": "default", "margin_pp": 1.0, "gated": ["175b_verification"]}, comparison=back)
    assert (verdict.status, verdict.exit_code) == ("pass", 0)
