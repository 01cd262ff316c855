"""Tasks whose documents come from the hub, on a few rows in the columns that the hub's data sets have: the prompt, the
gold answer and the scoring of each. The rows are made up; the columns are those of the data sets' own cards.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_server import fake_server

from workbench.evaluation._intervals import accuracy_interval
from workbench.evaluation.run import evaluate
from workbench.evaluation.spec import task_spec
from workbench.evaluation.tasks import build_tasks

# Idavidrein/gpqa, configuration gpqa_diamond, one split "train" (of its 60 columns those that say something here)
GPQA = [
    {"Pre-Revision Question": "Which gas, at first?", "Question": "Which gas do plants take up?",
     "Correct Answer": " Carbon dioxide\n", "Incorrect Answer 1": "Neon", "Incorrect Answer 2": "Argon  gas",
     "Incorrect Answer 3": "Helium [title]rare", "Explanation": "Photosynthesis.", "Writer's Difficulty Estimate": None,
     "Subdomain": "Botany", "High-level domain": "Biology", "Record ID": "rec0"},
    {"Pre-Revision Question": "", "Question": "What is 2 + 2?", "Correct Answer": "4", "Incorrect Answer 1": "3",
     "Incorrect Answer 2": "5", "Incorrect Answer 3": "22", "Explanation": "Counting.",
     "Writer's Difficulty Estimate": "Easy", "Subdomain": "Algebra", "High-level domain": "Physics",
     "Record ID": "rec1"},
]  # fmt: skip
# madrylab/gsm8k-platinum, configuration main, one split "test"
PLATINUM = [
    {"question": f"Ann has {n} pens and buys 2. How many has she?",
     "answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
     "cleaning_status": ("consensus", "verified", "revised")[n % 3]}
    for n in range(1, 8)
]  # fmt: skip
# cais/mmlu, configuration all, splits "dev" and "test": answer is a class label, 0 to 3
MMLU = {
    "test": [
        {"question": "Is it? ", "subject": "elementary_mathematics", "choices": ["1", "2", "3", "5"], "answer": 1},
        {"question": "Who is it?", "subject": "world_religions", "choices": ["Ann", "Ben", "Cy", "Di"], "answer": 3},
    ],
    "dev": [
        {"question": f"Shot {n} of {subject}?", "subject": subject, "choices": ["w", "x", "y", "z"], "answer": n % 4}
        for subject in ("elementary_mathematics", "world_religions")
        for n in range(5)
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def build(folder: Path, task: str, data: dict[str, list[dict[str, Any]]], **settings: Any) -> Any:
    files = {}
    for split, rows in data.items():
        files[split] = str(folder / f"{task}-{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = task_spec({"name": task, "task": task, "data": files, "primary_filter": "none", **settings})
    (built,) = build_tasks((spec,), folder)
    (found,) = built.tasks
    found.set_fewshot_seed(1234)
    found.build_all_requests()
    return found


def scores(task: Any, answers: list[str]) -> dict[str, list[float]]:
    """Filter -> the metric of each document, were the model to answer so."""
    for instance, answer in zip(task.instances, answers, strict=True):
        instance.resps = [answer]
    task.apply_filters()
    return {
        name: [task.process_results(i.doc, [i.filtered_resps[name]])["exact_match"] for i in task.instances]
        for name in task.instances[0].filtered_resps
    }


def test_gpqa_diamond(tmp_path: Path) -> None:
    task = build(tmp_path, "gpqa_diamond", {"train": GPQA}, primary_filter="flexible-extract")
    golds = []
    for instance, row in zip(task.instances, GPQA, strict=True):
        document = instance.doc
        choices = [document[f"choice{n}"] for n in (1, 2, 3, 4)]
        right = str(row["Correct Answer"]).strip()
        assert sorted(choices) == sorted([right, *(_clean(str(row[f"Incorrect Answer {n}"])) for n in (1, 2, 3))])
        golds.append(f"({'ABCD'[choices.index(right)]})")
        assert task.doc_to_target(document) == golds[-1]
        listed = "".join(f"({letter}) {choice}\n" for letter, choice in zip("ABCD", choices, strict=True))
        assert instance.args[0] == (
            f"What is the correct answer to this question:{row['Question']}\nChoices:\n{listed}"
            "Let's think step by step: "
        )
    wrong = "(A)" if golds[1] != "(A)" else "(B)"
    found = scores(task, [f"It is not (Z). The answer is {golds[0]}.", f"so {golds[1]}, no, {wrong}"])
    assert found == {"strict-match": [1.0, 0.0], "flexible-extract": [1.0, 0.0]}  # the last letter in brackets counts
    task = build(tmp_path, "gpqa_diamond", {"train": GPQA}, primary_filter="flexible-extract")
    found = scores(task, [f"I choose {golds[0]}", f"therefore {golds[1].lower()}"])
    assert found == {"strict-match": [0.0, 0.0], "flexible-extract": [1.0, 0.0]}  # a small letter is no letter


def _clean(text: str) -> str:
    """As lm-eval cleans an option: titles become sentences, double blanks single ones."""
    return text.strip().replace(" [title]", ". ").replace("  ", " ")


def test_gsm8k_platinum(tmp_path: Path) -> None:
    task = build(tmp_path, "gsm8k_platinum", {"test": PLATINUM}, primary_filter="strict-match", num_fewshot=3)
    for instance, row in zip(task.instances, PLATINUM, strict=True):
        prompt = instance.args[0]
        *shots, asked = prompt.split("\n\n")
        assert asked == f"Question: {row['question']}\nAnswer:"
        others = {f"Question: {other['question']}\nAnswer: {other['answer']}" for other in PLATINUM if other != row}
        assert len(shots) == 3
        assert set(shots) <= others  # from the scored split, never the document that is asked
        assert task.doc_to_target(instance.doc) == row["answer"]
    golds = [row["answer"].rsplit("#### ")[1] for row in PLATINUM]
    answers = [f" 1\n#### {gold}" for gold in golds]
    answers[1], answers[2], answers[3] = f" It is {golds[1]}", " #### 99", f" #### {golds[3]}.\n\nQuestion"
    found = scores(task, answers)
    assert found["strict-match"] == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert found["flexible-extract"] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_mmlu(tmp_path: Path) -> None:
    task = build(tmp_path, "mmlu", MMLU, metric="acc", num_fewshot=5)
    assert len(task.instances) == 2 * 4
    for row, place in zip(MMLU["test"], (0, 4), strict=True):
        subject = str(row["subject"]).replace("_", " ")
        prompt, letter = task.instances[place].args
        assert letter == " A"
        assert prompt.startswith(f"The following are multiple choice questions (with answers) about {subject}.\n\n")
        assert prompt.count(f"Shot 0 of {row['subject']}?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n") == 1
        assert prompt.count("Shot ") == 5
        listed = "".join(f"\n{name}. {choice}" for name, choice in zip("ABCD", row["choices"], strict=True))  # type: ignore[call-overload]
        assert prompt.endswith(f"\n\n{str(row['question']).strip()}{listed}\nAnswer:")
        document = task.instances[place].doc
        assert task.doc_to_target(document) == row["answer"]
        for best in range(4):
            likelihoods = [(-1.0 if choice == best else -2.0, False) for choice in range(4)]
            assert task.process_results(document, likelihoods)["acc"] == float(best == row["answer"])


@pytest.mark.usefixtures("in_process")
@pytest.mark.skipif(not os.environ.get("WORKBENCH_SHARED_DATA"), reason="needs WORKBENCH_SHARED_DATA")
def test_aime25_is_the_mean_over_seeds_with_the_interval_of_its_problems(tmp_path: Path) -> None:
    file = Path(os.environ["WORKBENCH_SHARED_DATA"]) / "aime25" / "aime25_lm_eval.jsonl"
    problems = [json.loads(line) for line in file.read_text().splitlines()][:6]
    settings = {"repeats": 4, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 64, "num_fewshot": 0, "limit": 6}
    spec = task_spec(
        {"name": "aime25", "task": "aime25", "data": {"test": str(file)}, "primary_filter": "none", **settings}
    )

    def knows(place: int, repeat: int) -> bool:
        """Problem 0 is always solved, 1 never, 2 in one of four, …"""
        return (4, 0, 1, 2, 3, 4)[place] > repeat

    with fake_server(lambda prompt: "") as server:

        def answer(prompt: str) -> str:
            place = next(i for i, row in enumerate(problems) if prompt == f"Question: {row['problem']}\nAnswer:")
            repeat = server.payloads[-1]["seed"] - 1234
            return f" so $\\boxed{{{problems[place]['answer'] if knows(place, repeat) else 1000}}}$"

        server.answer = answer
        evaluation = evaluate(
            arm="a", base_url=server.url, model="m", tokenizer=None, tasks=(spec,), out_dir=tmp_path / "eval" / "a",
            concurrency=1, max_length=8192,
        )  # fmt: skip
        assert sorted(payload["seed"] for payload in server.payloads) == sorted([1234, 1235, 1236, 1237] * 6)
        assert {(p["temperature"], p["top_p"], p["max_tokens"]) for p in server.payloads} == {(0.6, 0.95, 64)}
    (score,) = evaluation.scores
    right = [knows(place, repeat) for place in range(6) for repeat in range(4)]
    assert (score.n, score.clusters, score.value) == (24, 6, 14 / 24)
    assert (score.low, score.high) == pytest.approx(accuracy_interval(right, [i // 4 for i in range(24)]))
    assert score.high - score.low > 0.5  # six problems, not twenty-four
