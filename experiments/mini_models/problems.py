"""Seeded word problems in the layouts of GSM8K and MMLU-Pro: an evaluation that needs no download.

    from workbench.mini_models.problems import gsm8k_problems, mmlu_pro_problems
    gsm8k_problems(1000, split="test")       # [{"question", "answer"}, ...]
    mmlu_pro_problems(1000, split="test")    # [{"question_id", "question", "options", "answer", ...}, ...]

Every problem is drawn from a template, so its answer is right by construction, and every calculator step
`<<expr=value>>` can be recomputed. The split of a problem is a hash of its own text (`split_of`), never of the order in
which it was drawn: a training set of any seed and size shares no problem with any test set. What it costs: the wording
repeats, so a score here says whether a model computes and looks up as well after quantization as before, and nothing
about open-ended skill.

Pure standard library. `random.Random` seeded with a string gives the same sequence on every machine; the shipped sets'
SHA-256 fingerprints are in `FINGERPRINTS`.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Problem = dict[str, Any]

LETTERS = "ABCDEFGHIJ"
SPLITS = ("train", "validation", "test")

NAMES = (
    *("Ava", "Ben", "Carla", "Dev", "Elena", "Femi", "Grace", "Hugo", "Ines", "Jamal"),
    *("Kira", "Liam", "Mona", "Nico", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tara"),
)
ITEMS = (
    *("apples", "pencils", "marbles", "stickers", "books", "coins"),
    *("cards", "cookies", "shells", "beads", "ribbons", "stamps"),
)
PLACES = ("school", "the market", "the library", "the park", "a farm", "the fair")
MULTIPLES = {2: "doubles", 3: "triples", 4: "quadruples", 5: "quintuples"}

# SHA-256 of the files that `write_tasks_data` writes.
FINGERPRINTS: dict[str, str] = {
    "gsm8k_mini_test.jsonl": "eefd317301127189598fa2e793c197631a80dd8ac7ecc622c6118c65b6da45c6",
    "gsm8k_mini_train.jsonl": "994a6ec219b698b7c0655e56f7b3b03c0401341887622065427664506f41b7da",
    "mmlu_pro_mini_test.jsonl": "433097ab783ce936d36d5679fa7e16eae7e02c514fda9e06b85e7cd82f513c3e",
    "mmlu_pro_mini_validation.jsonl": "8d25ed6ec4e10e715f167f7613ba7d4b204e00ea33e03c29fce43ab2610cf9f7",
}


# ------------------------------------------------------------------------------------------------------------- the sets


def gsm8k_problems(n: int, *, split: str, seed: int = 0) -> list[Problem]:
    """`n` different problems in GSM8K's layout, from one split.

    Keys: `question`, and `answer` (one `<<expr=value>>` step a line, then `#### value`). The first k of n problems are
    the k problems of the same split and seed. The test split is harder than the others: chains of four or five events
    only, with factors a little beyond those of the other splits. Raises ValueError for an unknown split.
    """
    draw = _draw_hard_gsm8k if split == "test" else draw_gsm8k
    return list(islice(_of_split(split, lambda i, r: draw(r), f"gsm8k/{split}/{seed}"), n))


def mmlu_pro_problems(n: int, *, split: str, seed: int = 0) -> list[Problem]:
    """`n` different ten-option problems in MMLU-Pro's layout, from one split, cycling through `CATEGORIES`.

    Keys are MMLU-Pro's own: `question_id` (position in this list), `question`, `options` (ten), `answer` (letter),
    `answer_index`, `cot_content`, `category`, `src`. "validation" is the few-shot pool: its first 5 * len(CATEGORIES)
    hold five shots for every category. `cot_content` is filled in every split (MMLU-Pro's own test split leaves it
    empty); no prompt of a question shows it. Raises ValueError for an unknown split.
    """
    categories = list(CATEGORIES)
    stream = _of_split(
        split, lambda i, r: draw_mmlu_pro(r, categories[i % len(categories)]), f"mmlu_pro/{split}/{seed}"
    )
    return [{"question_id": i, **problem} for i, problem in enumerate(islice(stream, n))]


def split_of(problem: Problem) -> str:
    """The split a problem belongs to: of ten hash values, 0 to 7 are train, 8 is validation, 9 is test."""
    text = "\n".join([problem["question"], *problem.get("options", ())])
    bucket = hashlib.sha256(text.encode()).digest()[0] * 10 // 256
    return "train" if bucket < 8 else SPLITS[bucket - 7]


def write_tasks_data(folder: Path) -> dict[str, Path]:
    """Write the shipped evaluation sets as JSON Lines into `folder`; returns file name -> path.

    gsm8k_mini: 1,000 test problems, 20 train problems as the few-shot pool. mmlu_pro_mini: 1,000 test problems, 5
    validation shots a category. The bytes are the same on every machine (`FINGERPRINTS`).
    """
    sets = {
        "gsm8k_mini_test.jsonl": gsm8k_problems(1000, split="test"),
        "gsm8k_mini_train.jsonl": gsm8k_problems(20, split="train"),
        "mmlu_pro_mini_test.jsonl": mmlu_pro_problems(1000, split="test"),
        "mmlu_pro_mini_validation.jsonl": mmlu_pro_problems(5 * len(CATEGORIES), split="validation"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in sets.items():
        (folder / name).write_bytes("".join(json.dumps(p) + "\n" for p in problems).encode())
    return {name: folder / name for name in sets}


def fingerprint(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ----------------------------------------------------------------------------- the prompts, as lm-eval 0.4 renders them


def gsm8k_prompt(problem: Problem, shots: list[Problem]) -> str:
    """The prompt of lm-eval's task `gsm8k`: solved shots, a blank line after each, then the open question."""
    return "".join(gsm8k_solved(shot) for shot in shots) + f"Question: {problem['question']}\nAnswer:"


def gsm8k_solved(problem: Problem) -> str:
    """One solved problem as it stands in a few-shot prompt, with the blank line that follows it."""
    return f"Question: {problem['question']}\nAnswer: {problem['answer']}\n\n"


def gsm8k_answer(problem: Problem) -> str:
    """The number after `####`."""
    return str(problem["answer"]).rsplit("#### ", 1)[1]


def mmlu_pro_prompt(problem: Problem, shots: list[Problem]) -> str:
    """The prompt of lm-eval's task `mmlu_pro_<category>`: the description, solved shots, then the open question."""
    solved = "".join(mmlu_pro_solved(shot) for shot in shots)
    return mmlu_pro_description(problem["category"]) + solved + _mmlu_pro_question(problem)


def mmlu_pro_solved(problem: Problem) -> str:
    """One solved problem as it stands in a few-shot prompt, with the blank line that follows it."""
    reasoning = problem["cot_content"].removeprefix("A: Let's think step by step.")
    return _mmlu_pro_question(problem) + reasoning + "\n\n"


def mmlu_pro_description(category: str) -> str:
    """The line with which lm-eval's mmlu_pro prompts begin."""
    return (
        f"The following are multiple choice questions (with answers) about {category}. Think step by step and then "
        'finish your answer with "the answer is (X)" where X is the correct letter choice.\n'
    )


def mmlu_pro_shots(category: str, n: int = 5, seed: int = 0) -> list[Problem]:
    """The first `n` validation problems of a category: the shots that lm-eval's `first_n` sampler takes."""
    pool = mmlu_pro_problems(n * len(CATEGORIES), split="validation", seed=seed)
    return [problem for problem in pool if problem["category"] == category]


def _mmlu_pro_question(problem: Problem) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, problem["options"], strict=True))
    return f"Question:\n{problem['question']}\nOptions:\n{options}Answer: Let's think step by step."


def _of_split(split: str, draw: Callable[[int, random.Random], Problem], seed: str) -> Iterator[Problem]:
    """Endless stream of different problems of one split; `draw` is told how many came before."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    rng, seen, count = random.Random(seed), set[str](), 0
    while True:
        problem = draw(count, rng)
        key = json.dumps([problem["question"], problem.get("options")])
        if key not in seen and split_of(problem) == split:
            seen.add(key)
            count += 1
            yield problem


# ------------------------------------------------------------------------------------------------ GSM8K-style templates
# A template returns (question, steps, answer). `_step` writes one calculator step the way GSM8K does.

Worked = tuple[str, list[str], int]


def draw_gsm8k(rng: random.Random) -> Problem:
    """One problem of any split: every other one is a chain of three to five events, the hardest kind."""
    return _gsm8k(rng.choice(_GSM8K_TEMPLATES)(rng))


def _draw_hard_gsm8k(rng: random.Random) -> Problem:
    return _gsm8k(_chain(rng, events=(4, 5), bags=(3, 16), each=(11, 47)))


def _gsm8k(worked: Worked) -> Problem:
    question, steps, answer = worked
    return {"question": question, "answer": "\n".join(steps) + f"\n#### {answer}"}


def _step(expression: str, value: int) -> str:
    return f"{expression} = <<{expression}={value}>>{value}"


def _chain(
    r: random.Random,
    *,
    events: tuple[int, int] = (3, 5),
    bags: tuple[int, int] = (2, 14),
    each: tuple[int, int] = (5, 36),
) -> Worked:
    (name, other), item, have, bagged = r.sample(NAMES, 2), r.choice(ITEMS), r.randint(20, 300), 0
    question, steps = f"{name} starts with {have} {item}.", []
    for _ in range(r.randint(*events)):
        possible = {"buy": True, "give": have > 20, "multiply": have < 400, "halve": have % 2 == 0, "bags": bagged < 2}
        event = r.choice([kind for kind, is_possible in possible.items() if is_possible])
        if event == "buy":
            more = r.randint(5, 300)
            question += f" {name} buys {more} more."
            steps.append(f"{name} has {_step(f'{have}+{more}', have + more)} {item}.")
            have += more
        elif event == "give":
            less = r.randint(3, have - 5)
            question += f" {name} gives {less} to {other}."
            steps.append(f"{name} has {_step(f'{have}-{less}', have - less)} {item}.")
            have -= less
        elif event == "multiply":
            times = r.randint(2, 5)
            question += f" Then {name} {MULTIPLES[times]} the number."
            steps.append(f"{name} has {_step(f'{have}*{times}', have * times)} {item}.")
            have *= times
        elif event == "halve":
            question += f" {name} loses half of them."
            steps.append(f"{name} has {_step(f'{have}/2', have // 2)} {item}.")
            have //= 2
        else:
            count, size = r.randint(*bags), r.randint(*each)
            question += f" {name} gets {count} bags of {size} each."
            steps.append(f"The bags hold {_step(f'{count}*{size}', count * size)} {item}.")
            steps.append(f"{name} has {_step(f'{have}+{count * size}', have + count * size)} {item}.")
            have, bagged = have + count * size, bagged + 1
    return f"{question} How many {item} does {name} have in the end?", steps, have


def _change(r: random.Random) -> Worked:
    name, item, count, price = r.choice(NAMES), r.choice(ITEMS), r.randint(2, 12), r.randint(2, 12)
    cost = count * price
    paid = cost + r.randint(1, 60)
    question = f"{name} buys {count} {item} at ${price} each and pays with ${paid}. How much change does {name} get?"
    steps = [
        f"The {item} cost {_step(f'{count}*{price}', cost)} dollars.",
        f"The change is {_step(f'{paid}-{cost}', paid - cost)} dollars.",
    ]
    return question, steps, paid - cost


def _give(r: random.Random) -> Worked:
    (name, other), item, have = r.sample(NAMES, 2), r.choice(ITEMS), r.randint(20, 99)
    given, found = r.randint(2, have - 10), r.randint(2, 60)
    left = have - given
    question = f"{name} has {have} {item}. {name} gives {given} {item} to {other} and then finds {found} more."
    steps = [
        f"After giving, {name} has {_step(f'{have}-{given}', left)} {item}.",
        f"Then {name} has {_step(f'{left}+{found}', left + found)} {item}.",
    ]
    return f"{question} How many {item} does {name} have now?", steps, left + found


def _boxes(r: random.Random) -> Worked:
    item, place, boxes, each, broken = (
        r.choice(ITEMS),
        r.choice(PLACES),
        r.randint(2, 12),
        r.randint(5, 15),
        r.randint(2, 9),
    )
    total = boxes * each
    question = f"There are {boxes} boxes of {item} at {place}. Each box holds {each} {item}."
    steps = [
        f"There are {_step(f'{boxes}*{each}', total)} {item}.",
        f"Not broken are {_step(f'{total}-{broken}', total - broken)} {item}.",
    ]
    return f"{question} If {broken} {item} are broken in total, how many {item} are not broken?", steps, total - broken


def _share(r: random.Random) -> Worked:
    name, item, friends, each = r.choice(NAMES), r.choice(ITEMS), r.randint(2, 9), r.randint(2, 15)
    total = friends * each
    bought = r.randint(1, total - 1)
    question = f"{name} has {total - bought} {item} and buys {bought} more."
    question += f" {name} shares all of them equally among {friends} friends."
    steps = [
        f"{name} has {_step(f'{total - bought}+{bought}', total)} {item}.",
        f"Each friend gets {_step(f'{total}/{friends}', each)} {item}.",
    ]
    return f"{question} How many {item} does each friend get?", steps, each


def _three_people(r: random.Random) -> Worked:
    (first, second, third), item = r.sample(NAMES, 3), r.choice(ITEMS)
    a, times, more = r.randint(3, 30), r.randint(2, 4), r.randint(1, 20)
    b = times * a
    c = b + more
    as_many = {2: "twice", 3: "three times", 4: "four times"}[times]
    question = f"{first} has {a} {item}. {second} has {as_many} as many {item} as {first}."
    question += f" {third} has {more} more {item} than {second}."
    steps = [
        f"{second} has {_step(f'{times}*{a}', b)} {item}.",
        f"{third} has {_step(f'{b}+{more}', c)} {item}.",
        f"{first} and {second} have {_step(f'{a}+{b}', a + b)} {item}.",
        f"Altogether they have {_step(f'{a + b}+{c}', a + b + c)} {item}.",
    ]
    return f"{question} How many {item} do they have altogether?", steps, a + b + c


def _wages(r: random.Random) -> Worked:
    name, hours, wage, days, spent = (
        r.choice(NAMES),
        r.randint(2, 9),
        r.randint(6, 15),
        r.randint(2, 5),
        r.randint(5, 23),
    )
    total, earned = hours * days, hours * days * wage
    question = (
        f"{name} works {hours} hours a day for {days} days and earns ${wage} an hour. {name} then spends ${spent}."
    )
    steps = [
        f"{name} works {_step(f'{hours}*{days}', total)} hours.",
        f"{name} earns {_step(f'{total}*{wage}', earned)} dollars.",
        f"The money left is {_step(f'{earned}-{spent}', earned - spent)} dollars.",
    ]
    return f"{question} How much money is left?", steps, earned - spent


def _trip(r: random.Random) -> Worked:
    name, speed, hours, walked = r.choice(NAMES), r.randint(3, 15), r.randint(2, 9), r.randint(2, 50)
    ridden = speed * hours
    question = f"{name} rides {speed} miles every hour for {hours} hours, then walks {walked} more miles."
    steps = [
        f"{name} rides {_step(f'{speed}*{hours}', ridden)} miles.",
        f"In total {name} travels {_step(f'{ridden}+{walked}', ridden + walked)} miles.",
    ]
    return f"{question} How many miles does {name} travel?", steps, ridden + walked


def _half(r: random.Random) -> Worked:
    (name, other), item, june = r.sample(NAMES, 2), r.choice(ITEMS), r.randint(4, 60)
    may, given = 2 * june, r.randint(1, june - 1)
    kept = june - given
    question = f"{name} collects {may} {item} in May and half as many in June."
    question += f" {name} gives {given} of the June {item} to {other}."
    steps = [
        f"In June {name} collects {_step(f'{may}/2', june)} {item}.",
        f"{name} keeps {_step(f'{june}-{given}', kept)} of them.",
        f"In total {name} has {_step(f'{may}+{kept}', may + kept)} {item}.",
    ]
    return f"{question} How many {item} does {name} have in total?", steps, may + kept


_GSM8K_TEMPLATES: tuple[Callable[[random.Random], Worked], ...] = (
    *([_chain] * 8),
    *(_change, _give, _boxes, _share, _three_people, _wages, _trip, _half),
)


# --------------------------------------------------------------------------------------------- MMLU-Pro-style templates
# A template returns (question, reasoning, right option, wrong candidates). The reasoning ends with the right option;
# then the options are walked through until the one that equals it. Looking the letter up without that walk is out of
# reach for a model of ten million parameters. Facts (history, other) are about invented lands: only training can
# teach them.

Choice = tuple[str, str, str, list[str]]


def draw_mmlu_pro(rng: random.Random, category: str) -> Problem:
    """One problem of any split in one of `CATEGORIES`, without `question_id`."""
    question, reasoning, right, candidates = CATEGORIES[category](rng)
    wrong = [option for option in dict.fromkeys(candidates) if option != right]
    options = [right, *rng.sample(wrong, 9)]
    rng.shuffle(options)
    index = options.index(right)
    letter = LETTERS[index]
    walk = "\n".join(f"{LETTERS[i]}. {option}" for i, option in enumerate(options[: index + 1]))
    return {
        "question": question,
        "options": options,
        "answer": letter,
        "answer_index": index,
        "cot_content": f"A: Let's think step by step. {reasoning}\n{walk}. The answer is ({letter}).",
        "category": category,
        "src": f"mini-{category.replace(' ', '_')}",
    }


def _number(question: str, reasoning: str, value: int) -> Choice:
    """Wrong candidates of a number: its neighbours, none below zero."""
    low = max(0, value - 12)
    return question, reasoning, str(value), [str(low + i) for i in range(25)]


def _math(r: random.Random) -> Choice:
    a, b = r.randint(11, 99), r.randint(3, 39)
    reasoning = f"{a}*{b} = {a * b} and {a * b}-{a} = {a * b - a}."
    return _number(f"What is {a} times {b} minus {a}?", reasoning, a * b - a)


def _physics(r: random.Random) -> Choice:
    speed, seconds, more = r.randint(2, 15), r.randint(2, 12), r.randint(1, 40)
    far = speed * seconds
    reasoning = f"{speed}*{seconds} = {far} and {far}+{more} = {far + more}."
    question = (
        f"A body moves at {speed} m/s for {seconds} s and then {more} m more. What distance does it cover, in metres?"
    )
    return _number(question, reasoning, far + more)


def _chemistry(r: random.Random) -> Choice:
    a, mass, b = r.randint(2, 12), r.randint(2, 9), r.randint(2, 9)
    light, heavy = a * mass, b * 12
    reasoning = f"{a}*{mass} = {light}, {b}*12 = {heavy} and {light}+{heavy} = {light + heavy}."
    question = f"A molecule has {a} atoms of mass {mass} and {b} atoms of mass 12. What is its mass?"
    return _number(question, reasoning, light + heavy)


def _business(r: random.Random) -> Choice:
    count, price = r.randint(3, 60), r.randint(4, 25)
    sales = count * price
    costs = r.randint(1, min(200, sales))
    reasoning = f"{count}*{price} = {sales} and {sales}-{costs} = {sales - costs}."
    question = (
        f"A shop sells {count} items at ${price} each with total costs of ${costs}. What is the profit, in dollars?"
    )
    return _number(question, reasoning, sales - costs)


def _engineering(r: random.Random) -> Choice:
    amps, ohms, extra = r.randint(2, 29), r.randint(2, 49), r.randint(2, 90)
    reasoning = f"{amps}*{ohms} = {amps * ohms} and {amps * ohms}+{extra} = {amps * ohms + extra}."
    question = f"A current of {amps} A flows through {ohms} ohms, in series with a source of {extra} V."
    question += " What is the total, in volts?"
    return _number(question, reasoning, amps * ohms + extra)


def _computer_science(r: random.Random) -> Choice:
    value = r.randint(16, 127)
    powers = [1 << bit for bit in reversed(range(value.bit_length())) if value >> bit & 1]
    reasoning, total = str(powers[0]), powers[0]
    for power in powers[1:]:
        total += power
        reasoning += f" + {power} = {total}"
    return _number(f"What is the binary number {value:b} in decimal?", f"{reasoning}.", value)


def _history(r: random.Random) -> Choice:
    land = r.choice(list(LANDS))
    year = LANDS[land][1]
    others = [str(other) for _, other in LANDS.values()]
    return f"In which year was {land} founded?", f"{land} was founded in {year}.", str(year), others


def _other(r: random.Random) -> Choice:
    land = r.choice(list(LANDS))
    capital = LANDS[land][0]
    others = [other for other, _ in LANDS.values()]
    return f"What is the capital of {land}?", f"The capital of {land} is {capital}.", capital, others


def _invent_lands(count: int) -> dict[str, tuple[str, int]]:
    """Invented land -> (capital, year founded); all names and all years differ."""
    r = random.Random("lands")
    syllables = ["ba", "ro", "ki", "mu", "ten", "dal", "vor", "sha", "lin", "gor", "pex", "ula", "zin", "mar"]
    syllables += ["tor", "eli"]
    names: dict[str, None] = {}
    while len(names) < 2 * count:
        names["".join(r.choices(syllables, k=3)).capitalize()] = None
    lands, capitals, years = list(names)[:count], list(names)[count:], r.sample(range(1000, 2000), count)
    return {land: (capital, year) for land, capital, year in zip(lands, capitals, years, strict=True)}


LANDS = _invent_lands(64)

CATEGORIES: dict[str, Callable[[random.Random], Choice]] = {
    "math": _math,
    "physics": _physics,
    "chemistry": _chemistry,
    "business": _business,
    "engineering": _engineering,
    "computer science": _computer_science,
    "history": _history,
    "other": _other,
}
