"""Training documents: prompts as an evaluation sends them, chats, and option drills, all from the train split.

    problem_document(7)    # one to six solved problems in lm-eval's layout, or a chat
    drill_document(7)      # lists of ten options, walked through until a wanted value

A document is a function of its number, so any number of processes makes the same corpus. The drills are the curriculum
for the option letter: they practise nothing but the walk to the right option.
"""

import random

from . import problems
from .problems import LETTERS, Problem, mmlu_pro_description, split_of

MAX_SHOTS = 5
CHAT_SHARE = 0.08


def problem_document(number: int) -> str:
    """One to `MAX_SHOTS` + 1 solved problems: GSM8K-style in half of the documents, MMLU-Pro-style in the others."""
    rng = random.Random(f"document/{number}")
    shots = rng.randint(0, MAX_SHOTS)
    chat = rng.random() < CHAT_SHARE
    if rng.random() < 0.5:
        solved = [_train_problem(rng) for _ in range(shots + 1)]
        if chat:
            return _chat("", problems.gsm8k_prompt(solved[-1], solved[:-1]), solved[-1]["answer"])
        return "".join(map(problems.gsm8k_solved, solved))
    category = rng.choice(list(problems.CATEGORIES))
    solved = [_train_problem(rng, category) for _ in range(shots + 1)]
    description = mmlu_pro_description(category)
    if chat:
        prompt = problems.mmlu_pro_prompt(solved[-1], solved[:-1]).removeprefix(description)
        return _chat(description, prompt, solved[-1]["cot_content"].removeprefix("A: Let's think step by step. "))
    return description + "".join(map(problems.mmlu_pro_solved, solved))


def drill_document(number: int) -> str:
    """Two option lists, each walked through for four of its values."""
    rng = random.Random(f"drill/{number}")
    text = ""
    for _ in range(2):
        options = _options(rng)
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
        text += "Options:\n" + "\n".join(lines) + "\n"
        for wanted in rng.sample(range(len(options)), 4):
            walk = "\n".join(lines[: wanted + 1])
            text += f"{options[wanted]}.\n{walk}. The answer is ({LETTERS[wanted]}).\n"
        text += "\n"
    return text


def _options(rng: random.Random) -> list[str]:
    """Ten options as problems have them, or ten numbers from anywhere: the easier comparison first."""
    if rng.random() < 0.7:
        return list(_train_problem(rng, rng.choice(list(problems.CATEGORIES)))["options"])
    top = rng.choice((10, 100, 1000, 2000))
    return [str(n) for n in rng.sample(range(top), len(LETTERS))]


def _train_problem(rng: random.Random, category: str = "") -> Problem:
    """A problem of the train split: of `category`, or GSM8K-style. Held-out ones are drawn again."""
    while True:
        problem = problems.draw_mmlu_pro(rng, category) if category else problems.draw_gsm8k(rng)
        if split_of(problem) == "train":
            return problem


def _chat(system: str, user: str, assistant: str) -> str:
    """One exchange, as the tokenizer's chat template renders it."""
    head = f"<|im_system|>system<|im_middle|>{system}<|im_end|>" if system else ""
    user_turn = f"<|im_user|>user<|im_middle|>{user}<|im_end|>"
    return f"{head}{user_turn}<|im_assistant|>assistant<|im_middle|>{assistant}<|im_end|>"
