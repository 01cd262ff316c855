"""`workbench serve` and `workbench numerics`: an endpoint of a checkpoint, and what its layers really run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.commands.arguments import Commands, Parser, add_command, to_pair, to_path, to_text
from workbench.commands.paths import check_file

if TYPE_CHECKING:
    from workbench.serving.spec import ServeSpec

DEFAULT_MODEL_LEN = 2048  # tokens, where the model holds as many


def add_commands(commands: Commands) -> None:
    add_command(commands, "serve", serve, _serve_options, "serve a checkpoint through a backend on vLLM until Ctrl-C")
    add_command(
        commands,
        "numerics",
        numerics,
        _numerics_options,
        "start a server and tell what every layer of it really runs; 1: not as asked",
    )


def _serve_options(parser: Parser) -> None:
    _add_serving(parser, port=8000, log=Path("workbench-parser.log"))
    parser.add_argument("--numerics", type=to_path, metavar="FILE", help="probe what runs; write the card there")


def serve(arguments: argparse.Namespace) -> int:
    from workbench.serving.serve import serve_forever

    check_file("--log", arguments.log, arguments.path)
    if arguments.numerics:
        check_file("--numerics", arguments.numerics, arguments.path)
    serve_forever(_serve_spec(arguments, numerics=bool(arguments.numerics)), arguments.log, numerics=arguments.numerics)
    return 0


def _numerics_options(parser: Parser) -> None:
    _add_serving(parser, port=0, log=Path("workbench-parser.log"))
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write the card as JSON")


def numerics(arguments: argparse.Namespace) -> int:
    """0: every layer runs as asked; 1: some do not. Raises EngineError where no card could be taken."""
    from workbench import records
    from workbench.errors import EngineError
    from workbench.serving.numerics import table
    from workbench.serving.serve import take_card

    check_file("--log", arguments.log, arguments.path)
    if arguments.json:
        check_file("--json", arguments.json, arguments.path)
    card = take_card(_serve_spec(arguments, numerics=True), arguments.log)
    if card.error:
        raise EngineError(f"no numerics card: {card.error}", fix=f"read the log, {arguments.log}")
    if arguments.json:
        records.write_json(arguments.json, card)
    print(table(card))
    return 0 if card.as_asked else 1


def _add_serving(parser: argparse.ArgumentParser, *, port: int, log: Path) -> None:
    """What to serve, and how."""
    parser.add_argument("path", type=to_path)
    parser.add_argument(
        "--backend",
        default="emulation",
        choices=["reference", "emulation", "requant", "stock"],
        help="stock: vLLM's own path, without our plugin",
    )
    parser.add_argument("--format", choices=["nvfp4", "mxfp4"], help="target of requant")
    parser.add_argument("--rule", help="scale rule of requant")
    parser.add_argument("--activations", default="auto", choices=["auto", "none"], help="none: weight-only")
    parser.add_argument(
        "--compat", default="none", choices=["none", "vllm"], help="vllm: scales combined as its own NVFP4 methods do"
    )
    parser.add_argument("--exclude", action="append", type=to_text, default=[], metavar="GLOB")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--host", type=to_text, default="127.0.0.1")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--max-model-len", type=int, default=DEFAULT_MODEL_LEN, help="0: the model's own")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--name", type=to_text, help="the model name it answers to")
    parser.add_argument("--log", type=to_path, metavar="FILE", default=log, help="the engine's own output")
    parser.add_argument(
        "--engine-arg",
        action="append",
        type=to_pair,
        default=[],
        metavar="KEY=VALUE",
        help="any vLLM flag, verbatim",
    )
    parser.add_argument("--engine-env", action="append", type=to_pair, default=[], metavar="KEY=VALUE")


def _serve_spec(arguments: argparse.Namespace, *, numerics: bool) -> ServeSpec:
    from workbench.serving.spec import EngineSpec, ServeSpec

    return ServeSpec(
        arm=arguments.name or arguments.path.resolve().name,
        checkpoint=arguments.path,
        backend=arguments.backend,
        format=arguments.format,
        rule=arguments.rule,
        activations=arguments.activations,
        compat=arguments.compat,
        exclude=tuple(arguments.exclude),
        kv_cache_dtype=arguments.kv_cache_dtype,
        engine=EngineSpec(
            host=arguments.host,
            port=arguments.port,
            max_model_len=fitting_context(arguments, arguments.path),
            dtype=arguments.dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            args=dict(arguments.engine_arg),
            env=dict(arguments.engine_env),
            numerics=numerics,
        ),
    )


def fitting_context(arguments: argparse.Namespace, checkpoint: Path) -> int:
    from workbench.checkpoints.context import fit_context

    asked = int(arguments.max_model_len)
    return fit_context(asked, [checkpoint], default=DEFAULT_MODEL_LEN, key="--max-model-len {}")
