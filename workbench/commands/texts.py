"""What a model is asked, and the text it is run on: tasks by name, windows of a text.

    add_text_options(parser, tokens=256, windows=16)
    windows = cut_text(arguments, arguments.source)

Several commands share them: an evaluation has tasks, a measurement of divergences has a text, and a capture has the
prompts of both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.arguments import MOST, MOST_TOKENS, to_path, whole
from workbench.commands.paths import read_text
from workbench.errors import ConfigError


def add_text_options(parser: argparse.ArgumentParser, *, tokens: int, windows: int) -> None:
    """The text that a model is run on."""
    parser.add_argument("--text", type=to_path, metavar="FILE", help="default: the mini tasks' training prompts")
    parser.add_argument("--tokens", type=whole(2, MOST_TOKENS), default=tokens, help="of a window")
    parser.add_argument("--windows", type=whole(1, MOST), default=windows)
    parser.add_argument("--skip", type=whole(0, MOST), default=0, metavar="N", help="leave out the first N windows")


def cut_text(arguments: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of --text, or of the mini tasks' training prompts: --windows of --tokens, after the first --skip."""
    import tempfile

    from workbench.checkpoints.open import resolve_path
    from workbench.evaluation.kld import cut_windows
    from workbench.evaluation.prompts import training_prompts

    count = arguments.skip + arguments.windows
    if arguments.text:
        text = read_text(arguments.text)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tasks = tasks_named(["gsm8k_mini", "mmlu_pro_mini"])
            prompts = training_prompts(tasks, 2 + arguments.tokens * count // 256, scratch=Path(scratch))
        text = "\n\n".join(prompts)
    windows = cut_windows(text, resolve_path(tokenizer), tokens=arguments.tokens, count=count)
    return windows[arguments.skip :]


def tasks_named(names: list[str], **changes: Any) -> tuple[Any, ...]:
    """Tasks of conf/eval by name, with what is not None changed. Raises ConfigError naming the choices."""
    from omegaconf import OmegaConf

    from workbench.composition import compose, group_choices
    from workbench.evaluation.spec import task_spec

    choices = group_choices("eval")
    for name in names:
        if name not in choices:
            raise ConfigError(f"there is no task {name!r}", fix=f"choose among {', '.join(choices)}")
    composed = compose([f"eval=[{','.join(names)}]"]).eval
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(
            f"--task {','.join(names)} needs {', '.join(missing)}, which is no flag here",
            fix=f"run it as an experiment: python -m workbench.run … eval=[{','.join(names)}] {missing[0]}=FILE",
        )
    tasks = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(tasks, dict)
    wanted = {key: value for key, value in changes.items() if value is not None}
    return tuple(task_spec({"name": name, **task, **wanted}) for name, task in tasks.items())
