"""Canned answers with known scores, and the specs of the two tasks that they answer."""

from __future__ import annotations

from typing import Any

from workbench.mini_models.problems import gsm8k_problems, mmlu_pro_problems

from workbench.evaluation.spec import task_spec

GSM8K_N, MMLU_N = 12, 16
GSM8K = gsm8k_problems(GSM8K_N, split="test")
MMLU = mmlu_pro_problems(MMLU_N, split="test")


def canned_answer(prompt: str) -> str | tuple[str, str]:
    """GSM8K: of each four documents two right, one right by its last number only, one empty. MMLU-Pro: every fourth
    not a letter, every fourth wrong and cut, the others right."""
    question = prompt.rsplit("Question:", 1)[1]
    for i, problem in enumerate(GSM8K):
        if question == f" {problem['question']}\nAnswer:":
            value = problem["answer"].rsplit("#### ")[1]
            return (f" So it is\n#### {value}", f" #### {value}\n\nQuestion: no", f" It is {value}", "")[i % 4]
    for i, problem in enumerate(MMLU):
        if question.startswith(f"\n{problem['question']}\nOptions:"):
            right, wrong = problem["answer"], "B" if problem["answer"] == "A" else "A"
            letters = (f" the answer is ({right}).", "I do not know.", (f"the answer is {wrong}", "length"))
            return (*letters, f" the answer is {right}")[i % 4]
    raise AssertionError(f"asked something else: {question}")


def specs(**settings: Any) -> tuple[Any, ...]:
    gsm8k = {"name": "gsm8k_mini", "task": "gsm8k", "data": "mini", "limit": GSM8K_N, "primary_filter": "strict-match"}
    mmlu = {
        "name": "mmlu_pro_mini",
        "task": "mmlu_pro",
        "data": "mini",
        "limit": MMLU_N,
        "primary_filter": "custom-extract",
    }
    shared = {"num_fewshot": 2, "max_gen_toks": 96, **settings}
    return tuple(task_spec({**task, **shared}) for task in (gsm8k, mmlu))
