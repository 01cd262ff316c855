"""`workbench calibrate`: a model's real layer inputs under vLLM, recorded for analysis and for input scales."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.arguments import MOST, MOST_TOKENS, Commands, Parser, add_command, to_path, to_text, whole
from workbench.commands.paths import check_file, read_text
from workbench.commands.serving import DEFAULT_MODEL_LEN, fitting_context
from workbench.commands.texts import tasks_named
from workbench.errors import ConfigError


def add_commands(commands: Commands) -> None:
    help = "record every layer's real inputs (amax, moments, a sample) under vLLM"
    add_command(commands, "calibrate", calibrate, _calibrate_options, help)


def _calibrate_options(parser: Parser) -> None:
    parser.add_argument("source", type=to_text)
    parser.add_argument("--out", type=to_path, required=True, metavar="FILE")
    parser.add_argument(
        "--second-moments",
        choices=["none", "diagonal", "full"],
        default="diagonal",
        help="E[x x^T] of each input over all its tokens, for `analyze --products moments`; full: K^2 numbers each",
    )
    parser.add_argument(
        "--second-moments-mb",
        type=whole(1, MOST),
        default=1024,
        metavar="MB",
        help="of all full ones; inputs beyond it keep their diagonal",
    )
    parser.add_argument(
        "--rows", type=whole(1, MOST), default=256, metavar="N", help="of each input, sampled from all its tokens"
    )
    add_capture_options(parser)


def calibrate(arguments: argparse.Namespace) -> int:
    from workbench.formats.activations import read_activations

    check_file("--out", arguments.out, arguments.source)
    out = capture(
        arguments,
        arguments.out,
        reservoir_rows=arguments.rows,
        second_moments=arguments.second_moments,
        second_moments_bytes=arguments.second_moments_mb << 20,
    )
    print(f"wrote {out}")
    notes = read_activations(out).metadata
    if cut := int(notes.get("second_moments_diagonal_only", "0")):
        print(f"{cut} inputs keep the diagonal of their second moment only: --second-moments-mb is spent")
    return 0


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """What `capture` reads, with `source`."""
    parser.add_argument(
        "--prompts", type=to_path, metavar="FILE", help="a prompt a line; default: the mini tasks' training prompts"
    )
    parser.add_argument("--max-model-len", type=whole(1, MOST_TOKENS), default=DEFAULT_MODEL_LEN)


def capture(arguments: argparse.Namespace, out: Path | None = None, **settings: Any) -> Path:
    """Record layer inputs of a checkpoint on the prompts file (a prompt a line) or on the shipped training prompts.

    settings: `capture_activations`'s; by default no second moments, which a calibration of scales does not need.
    """
    import tempfile

    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.open import resolve_path
    from workbench.evaluation.prompts import training_prompts
    from workbench.serving.capture import capture_activations
    from workbench.serving.spec import EngineSpec, ServeSpec

    with open_checkpoint(arguments.source):  # before an engine starts
        pass
    if arguments.prompts:
        text = read_text(arguments.prompts)
        prompts = [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise ConfigError(f"{arguments.prompts} holds no prompt", fix="one prompt a line")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tasks = tasks_named(["gsm8k_mini", "mmlu_pro_mini"])
            prompts = training_prompts(tasks, 24, scratch=Path(scratch))
    target = out or Path(tempfile.mkdtemp(prefix="workbench-")) / "activations.safetensors"
    spec = ServeSpec(
        arm="calibration",
        checkpoint=resolve_path(arguments.source),
        backend="reference",
        engine=EngineSpec(max_model_len=fitting_context(arguments, resolve_path(arguments.source))),
    )
    capture_activations(spec, prompts, target, **({"second_moments": "none"} | settings))
    return target
