"""`workbench bench kernels` and `workbench bench serve`: the kernels measured, and what serving costs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.commands.arguments import (
    MOST,
    MOST_TOKENS,
    Commands,
    Parser,
    add_command,
    to_pair,
    to_path,
    to_text,
    whole,
)
from workbench.commands.paths import check_file, check_folder
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.records import ServingCost, ServingLoad
    from workbench.serving.spec import EngineSpec, ServeSpec

OFFLINE, REQUANT = "offline", "requant"
_DIALECTS = {"mxfp4": "quark", "nvfp4": "modelopt"}  # what is written for the engine to read back
_ARM_KEYS = ("backend", "format", "rule", "activations", "url")


def add_commands(commands: Commands) -> None:
    add_command(commands, "bench", lambda _: 0, _bench_options, "measure the kernels, or what serving costs")


def _bench_options(parser: Parser) -> None:
    what = parser.add_subparsers(required=True, metavar="WHAT")
    add_command(
        what,
        "kernels",
        kernels,
        _kernels_options,
        "the kernels against the reference, the producers' own code and a copy",
        "Measure the kernels against the reference, the producers' own code, vLLM's, and a copy.",
    )
    add_command(
        what,
        "serve",
        serve,
        _serve_options,
        "load time, memory and latency of one or several arms, and their ratios",
        "Measure load time, memory and latency of arms on vLLM, through its own benchmark client.",
    )


def _kernels_options(parser: Parser) -> None:
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, help="cpu: default 2048")
    parser.add_argument("--columns", type=int, help="cpu: default 7168")
    parser.add_argument("--threads", type=int, help="cpu: default torch's own number")
    parser.add_argument("--repeats", type=int, help="cpu: default 5")
    parser.add_argument(
        "--only", action="append", choices=["streams", "linear", "experts"], help="cuda: this table; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="cuda: fewer sizes")
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write every number as JSON")
    parser.add_argument("--markdown", type=to_path, metavar="FILE", help="cuda: also write the tables as Markdown")


def kernels(arguments: argparse.Namespace) -> int:
    if arguments.json:
        check_file("--json", arguments.json)
    return _bench_cuda(arguments) if arguments.device == "cuda" else _bench_cpu(arguments)


def _bench_cpu(arguments: argparse.Namespace) -> int:
    import torch

    from workbench import records
    from workbench.bench.kernels import bench_kernels, table

    if arguments.only or arguments.quick or arguments.markdown:
        raise ConfigError("--only, --quick and --markdown belong to --device cuda", fix="leave them out")
    cores = os.cpu_count() or 1
    if arguments.threads is not None and arguments.threads > cores:
        raise ConfigError(f"--threads {arguments.threads}: this machine has {cores} cores", fix=f"at most {cores}")
    result = bench_kernels(
        rows=2048 if arguments.rows is None else arguments.rows,
        columns=7168 if arguments.columns is None else arguments.columns,
        threads=torch.get_num_threads() if arguments.threads is None else arguments.threads,
        repeats=5 if arguments.repeats is None else arguments.repeats,
    )
    if arguments.json:
        records.write_json(arguments.json, result)
    print(table(result))
    return 0


def _bench_cuda(arguments: argparse.Namespace) -> int:
    import torch

    from workbench import records
    from workbench.bench.cuda import SECTIONS, bench_cuda
    from workbench.bench.cuda_table import CudaBench, as_json, markdown

    if any(value is not None for value in (arguments.rows, arguments.columns, arguments.threads, arguments.repeats)):
        raise ConfigError(
            "--rows, --columns, --threads and --repeats belong to --device cpu",
            fix="leave them out: on a card the shapes are those of the bars, and --quick takes fewer",
        )
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA card", fix="use --device cpu, or a machine with a card and its driver")
    if arguments.markdown:
        check_file("--markdown", arguments.markdown)

    def save(result: CudaBench) -> None:
        if arguments.json:
            records.write_json(arguments.json, as_json(result))
        if arguments.markdown:
            records.write_text(arguments.markdown, markdown(result))

    bench_cuda([s for s in SECTIONS if s in (arguments.only or SECTIONS)], quick=arguments.quick, save=save)
    return 0


def _serve_options(parser: Parser) -> None:
    parser.add_argument(
        "--arm",
        action="append",
        type=to_pair,
        default=[],
        metavar="NAME=CHECKPOINT[,backend=…,format=…,rule=…,activations=…,url=…]",
        help="the first is the baseline, unless --requant is given",
    )
    parser.add_argument(
        "--requant", type=to_text, metavar="CHECKPOINT", help="its requantization at load against the same file to file"
    )
    parser.add_argument("--format", default="mxfp4", choices=["mxfp4", "nvfp4"], help="of --requant")
    parser.add_argument("--rule", help="scale rule of --requant")
    parser.add_argument(
        "--exclude", action="append", type=to_text, default=[], metavar="GLOB", help="of --requant: stays as it is"
    )
    parser.add_argument("--preset", default="small", choices=["small", "published", "requant"])
    tokens, count = whole(1, MOST_TOKENS), whole(1, MOST)
    own = "a load of one's own, all four; several: as many numbers, or one for all"
    parser.add_argument("--input", type=tokens, nargs="+", metavar="TOKENS", help=own)
    parser.add_argument("--output", type=tokens, nargs="+", metavar="TOKENS")
    parser.add_argument("--concurrency", type=count, nargs="+", metavar="N")
    parser.add_argument("--prompts", type=count, nargs="+", metavar="N")
    parser.add_argument("--repeat", type=whole(1, MOST), default=10, help="after one warm-up, which is dropped")
    parser.add_argument("--margin", type=float, default=0.01, help="of equivalence, as a proportion")
    parser.add_argument("--one-at-a-time", action="store_true", help="where memory holds one server: start each anew")
    parser.add_argument("--tokenizer", type=to_path, help="default: the first arm's checkpoint")
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs")
    parser.add_argument("--max-model-len", type=whole(0, MOST_TOKENS), default=0, help="0: what the load needs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tensor-parallel-size", type=whole(1, MOST), default=1)
    parser.add_argument("--engine-arg", action="append", type=to_pair, default=[], metavar="KEY=VALUE")
    parser.add_argument("--engine-env", action="append", type=to_pair, default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=to_path, required=True, metavar="FOLDER", help="serving_cost.json; a run's, too")


def serve(arguments: argparse.Namespace) -> int:
    from workbench.bench.serve import PRESETS, bench_serve
    from workbench.bench.serve_table import table
    from workbench.checkpoints.open import resolve_path
    from workbench.interrupt import terminable
    from workbench.records import write_json

    read = [text.split(",")[0] for _, text in arguments.arm]
    check_folder("--out", arguments.out, arguments.requant, *read)
    loads, preset = _own_loads(arguments), "own"
    if not loads:
        loads, preset = PRESETS[arguments.preset], arguments.preset
    engine = _engine(arguments)
    specs = _requant_arms(arguments, engine) if arguments.requant is not None else []
    specs += _named_arms(arguments.arm, engine)
    if not specs:
        raise ConfigError("no arm is named", fix="--requant CHECKPOINT, or --arm NAME=CHECKPOINT,backend=BACKEND")
    record = arguments.out / "serving_cost.json"
    kept = 0  # repeats

    def save(cost: ServingCost) -> None:
        nonlocal kept
        write_json(record, cost)
        kept = cost.measured

    try:
        with terminable():
            cost = bench_serve(
                specs,
                loads,
                tokenizer=arguments.tokenizer or resolve_path(specs[0].checkpoint).absolute(),
                out=arguments.out / "serving_cost",
                preset=preset,
                repeats=arguments.repeat,
                margin=arguments.margin,
                together=not arguments.one_at_a_time,
                same_layers=(OFFLINE, REQUANT) if arguments.requant is not None else (),
                say=lambda line: print(line, flush=True),
                save=save,
            )
    except BaseException:
        if kept:
            print(f"stopped: {record} holds {kept} of {arguments.repeat} repeats", file=sys.stderr)
        raise
    print(f"\n{table(cost)}\n\nwrote {record}")
    return 0


def _own_loads(arguments: argparse.Namespace) -> tuple[ServingLoad, ...]:
    """The loads of --input, --output, --concurrency and --prompts; none where the preset is meant."""
    from workbench.records import ServingLoad

    own: dict[str, list[int]] = {
        "input_tokens": arguments.input or [],
        "output_tokens": arguments.output or [],
        "concurrency": arguments.concurrency or [],
        "prompts": arguments.prompts or [],
    }
    loads = max(len(values) for values in own.values())
    if not loads:
        return ()
    if missing := [name for name, values in own.items() if not values]:
        raise ConfigError(
            f"a load of one's own lacks {', '.join(missing)}",
            fix="give --input, --output, --concurrency and --prompts, or none of them",
        )
    if unequal := [name for name, values in own.items() if len(values) not in (1, loads)]:
        counts = ", ".join(f"{len(values)} of {name}" for name, values in own.items())
        raise ConfigError(
            f"loads of one's own differ in number: {counts}",
            fix=f"give {' and '.join(unequal)} once, or {loads} times",
        )
    each = {name: values * (loads if len(values) == 1 else 1) for name, values in own.items()}
    return tuple(ServingLoad(**{name: values[i] for name, values in each.items()}) for i in range(loads))


def _engine(arguments: argparse.Namespace) -> EngineSpec:
    from workbench.serving.spec import EngineSpec

    return EngineSpec(
        max_model_len=arguments.max_model_len,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enforce_eager=not arguments.compiled,
        args=dict(arguments.engine_arg),
        env=dict(arguments.engine_env),
    )


def _named_arms(texts: list[tuple[str, str]], engine: EngineSpec) -> list[ServeSpec]:
    """`NAME=CHECKPOINT,backend=…`: each an arm."""
    import dataclasses

    from workbench.serving.spec import ServeSpec
    from workbench.settings import check_arm_name

    specs = []
    for name, text in texts:
        check_arm_name("--arm", name)
        checkpoint, *rest = text.split(",")
        options: dict[str, Any] = dict(part.partition("=")[::2] for part in rest)
        if unknown := [key for key in options if key not in _ARM_KEYS]:
            raise ConfigError(f"--arm {name}: unknown {unknown[0]!r}", fix=f"choose among {', '.join(_ARM_KEYS)}")
        url = options.pop("url", "")
        own = dataclasses.replace(engine, kind="external", base_url=url) if url else engine
        specs.append(ServeSpec(arm=name, checkpoint=_checkpoint(checkpoint), engine=own, **options))
    return specs


def _requant_arms(arguments: argparse.Namespace, engine: EngineSpec) -> list[ServeSpec]:
    """The checkpoint converted file to file, as the baseline, and the same conversion made at load.

    Requantization at load converts what a quantized source quantizes, so the files must leave out the rest as well.
    """
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.convert import quantize_checkpoint
    from workbench.progress import Progress
    from workbench.serving.spec import ServeSpec

    source = _checkpoint(arguments.requant)
    target = arguments.out / "serving_cost" / "offline_checkpoint"
    exclude = tuple(arguments.exclude)
    with open_checkpoint(source) as checkpoint:
        matrices = [entry for entry in checkpoint.entries() if entry.projection]
    plain = [entry.module for entry in matrices if not entry.quantized]
    kept = tuple(plain) if len(plain) < len(matrices) else ()
    say = Progress()
    say.note(f"{OFFLINE}: {arguments.format} in {_DIALECTS[arguments.format]}'s dialect from {source}")
    quantize_checkpoint(
        source,
        target,
        format=arguments.format,
        dialect=_DIALECTS[arguments.format],
        rule=arguments.rule,
        exclude=(*kept, *exclude),
        overwrite=True,
        progress=say.counter("tensors"),
    )
    return [
        ServeSpec(arm=OFFLINE, checkpoint=target, backend="emulation", exclude=exclude, engine=engine),
        ServeSpec(
            arm=REQUANT,
            checkpoint=source,
            backend="requant",
            format=arguments.format,
            rule=arguments.rule,
            exclude=exclude,
            engine=engine,
        ),
    ]


def _checkpoint(text: str) -> Path | str:
    return text if text.startswith("hf:") else Path(text)
