"""The problems: right answers, disjoint splits, the same bytes everywhere, and lm-eval's own prompts."""

import ast
import importlib
import json
import operator
import re
from pathlib import Path

import pytest
from workbench.mini_models import corpus, problems
from workbench.mini_models.problems import LETTERS, gsm8k_problems, mmlu_pro_problems

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
# MMLU-Pro's own category names.
MMLU_PRO_CATEGORIES = {
    *("biology", "business", "chemistry", "computer science", "economics", "engineering", "health"),
    *("history", "law", "math", "other", "philosophy", "physics", "psychology"),
}


def compute(expression: str) -> float:
    node = ast.parse(expression, mode="eval").body
    assert isinstance(node, ast.BinOp)
    assert isinstance(node.left, ast.Constant)
    assert isinstance(node.right, ast.Constant)
    return OPERATIONS[type(node.op)](node.left.value, node.right.value)


def test_every_gsm8k_step_recomputes_and_the_last_is_the_answer() -> None:
    for problem in gsm8k_problems(1000, split="test"):
        steps = re.findall(r"(\S+) = <<([^=]+)=(\d+)>>(\d+)", problem["answer"])
        assert len(steps) == problem["answer"].count("\n")
        for shown, expression, value, repeated in steps:
            assert shown == expression
            assert compute(expression) == int(value) == int(repeated)
        assert re.search(r"\n#### (\d+)$", problem["answer"])
        assert problems.gsm8k_answer(problem) == steps[-1][2]


def test_every_mmlu_pro_calculation_is_right() -> None:
    for problem in mmlu_pro_problems(1000, split="test"):
        for expression, value in re.findall(r"(\d+[*+-]\d+) = (\d+)", problem["cot_content"]):
            assert compute(expression) == int(value)
        binary = re.search(r"binary number ([01]+)", problem["question"])
        if binary:
            assert problem["options"][problem["answer_index"]] == str(int(binary[1], 2))


def test_mmlu_pro_fields() -> None:
    items = mmlu_pro_problems(400, split="validation")
    for i, problem in enumerate(items):
        assert list(problem) == [
            *("question_id", "question", "options", "answer", "answer_index", "cot_content", "category", "src")
        ]
        assert problem["question_id"] == i
        assert len(set(problem["options"])) == 10
        assert problem["answer"] == LETTERS[problem["answer_index"]]
        assert problem["cot_content"].startswith("A: Let's think step by step. ")
        assert problem["cot_content"].endswith(f"The answer is ({problem['answer']}).")
        assert f"{problem['answer']}. {problem['options'][problem['answer_index']]}. The" in problem["cot_content"]
        assert problem["category"] in MMLU_PRO_CATEGORIES
    assert [p["category"] for p in items[:8]] == list(problems.CATEGORIES)


def test_letters_are_balanced() -> None:
    answers = [p["answer"] for p in mmlu_pro_problems(1000, split="test")]
    assert all(70 <= answers.count(letter) <= 130 for letter in LETTERS)


@pytest.mark.parametrize("make", [gsm8k_problems, mmlu_pro_problems])
def test_splits_share_no_problem_and_a_prefix_is_stable(make) -> None:
    keys = {}
    for split in problems.SPLITS:
        items = make(600, split=split, seed=3)
        assert items[:50] == make(50, split=split, seed=3)
        assert {problems.split_of(p) for p in items} == {split}
        keys[split] = {json.dumps([p["question"], p.get("options")]) for p in items}
        assert len(keys[split]) == 600
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]
    assert make(20, split="test", seed=3) != make(20, split="test", seed=4)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        gsm8k_problems(1, split="dev")


def test_shipped_sets_have_the_golden_fingerprints(tmp_path: Path) -> None:
    files = problems.write_tasks_data(tmp_path)
    assert {name: problems.fingerprint(path) for name, path in files.items()} == problems.FINGERPRINTS
    assert [len(path.read_text().splitlines()) for path in files.values()] == [1000, 20, 1000, 40]


def test_training_documents_hold_no_held_out_problem() -> None:
    held_out = {p["question"] for p in gsm8k_problems(2000, split="test")}
    for number in range(400):
        questions = re.findall(r"Question: (.*?)\nAnswer:", corpus.problem_document(number), flags=re.S)
        assert not held_out & set(questions)


def test_documents_are_a_function_of_their_number() -> None:
    assert corpus.problem_document(11) == corpus.problem_document(11)
    assert corpus.drill_document(11) == corpus.drill_document(11)


def test_drill_walks_end_at_the_wanted_option() -> None:
    walks = re.findall(
        r"\n(\S+)\.\n(?:[A-J]\. \S+\n)*([A-J])\. (\S+)\. The answer is \((.)\)", corpus.drill_document(5)
    )
    assert walks
    assert all(wanted == found and letter == answer for wanted, letter, found, answer in walks)


# ------------------------------------------------------------------------------ against lm-eval's own renderers


def test_mmlu_pro_question_is_lm_evals() -> None:
    utils = importlib.import_module("lm_eval.tasks.mmlu_pro.utils")
    problem, shot = mmlu_pro_problems(1, split="test")[0], mmlu_pro_problems(1, split="validation")[0]
    assert problems.mmlu_pro_solved(shot) == utils.format_cot_example(shot, including_answer=True)
    rendered = f"{utils.fewshot_to_text(shot)} {utils.fewshot_to_target(shot)}\n\n{utils.doc_to_text(problem)}"
    assert problems.mmlu_pro_prompt(problem, [shot]) == problems.mmlu_pro_description("math") + rendered


@pytest.fixture(scope="module")
def lm_eval_tasks(tmp_path_factory: pytest.TempPathFactory):
    """lm-eval's own gsm8k and mmlu_pro_math, reading the shipped sets."""
    tasks = pytest.importorskip("lm_eval.tasks")
    folder = tmp_path_factory.mktemp("tasks")
    problems.write_tasks_data(folder)
    root = Path(tasks.__file__).parent
    files = "dataset_path: json\ndataset_name: null\ndataset_kwargs:\n  data_files:\n"
    (folder / "g.yaml").write_text(
        f"include: {root}/gsm8k/gsm8k.yaml\ntask: mini_gsm8k\ntag: null\n{files}"
        f"    train: {folder}/gsm8k_mini_train.jsonl\n    test: {folder}/gsm8k_mini_test.jsonl\n"
    )
    (folder / "m.yaml").write_text(
        f"include: {root}/mmlu_pro/mmlu_pro_math.yaml\ntask: mini_math\n{files}"
        f"    validation: {folder}/mmlu_pro_mini_validation.jsonl\n    test: {folder}/mmlu_pro_mini_test.jsonl\n"
    )
    return tasks.TaskManager(include_path=str(folder), include_defaults=False).load(["mini_gsm8k", "mini_math"])[
        "tasks"
    ]


def test_gsm8k_prompt_is_lm_evals(lm_eval_tasks) -> None:
    task = lm_eval_tasks["mini_gsm8k"]
    doc = next(iter(task.test_docs()))
    context = task.fewshot_context(doc, 5)
    pool = gsm8k_problems(20, split="train")
    shots = sorted((p for p in pool if p["question"] in context), key=lambda p: context.index(p["question"]))
    assert len(shots) == 5
    assert context == problems.gsm8k_prompt(doc, shots)


def test_mmlu_pro_prompt_is_lm_evals(lm_eval_tasks) -> None:
    task = lm_eval_tasks["mini_math"]
    doc = next(iter(task.test_docs()))
    assert task.fewshot_context(doc, 5) == problems.mmlu_pro_prompt(doc, problems.mmlu_pro_shots("math"))
