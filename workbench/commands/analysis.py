"""`workbench analyze`: the weight error of one or two quantizations, matrix by matrix."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.arguments import MOST, Commands, Parser, add_command, to_path, to_text, whole
from workbench.commands.checkpoints import SHOWN_NAMES
from workbench.commands.paths import check_folder, check_input
from workbench.errors import ConfigError


def add_commands(commands: Commands) -> None:
    help = "weight error of one or two quantizations, matrix by matrix"
    add_command(commands, "analyze", analyze, _analyze_options, help)


def _analyze_options(parser: Parser) -> None:
    from workbench.settings import COMPUTE

    parser.add_argument("source_path", type=to_path, nargs="?", metavar="SOURCE", help="the producer's original")
    parser.add_argument("first_path", type=to_path, nargs="?", metavar="FIRST", help="the quantized checkpoint")
    parser.add_argument("--source", type=to_path, metavar="SOURCE", help="the same; without one, what needs no source")
    parser.add_argument("--first", type=to_path, metavar="FIRST", help="the same; without one, source to --second")
    parser.add_argument(
        "--second", type=to_text, default="mxfp4", help="format to requantize to, or a checkpoint's folder"
    )
    for of in ("source", "first", "second"):
        parser.add_argument(f"--{of}-arm", default=of, metavar="ARM", help=f"its name in a run; default: {of}")
    parser.add_argument("--rule", help="scale rule of the second quantization")
    parser.add_argument("--select", type=to_text, metavar="GLOB", help="only matrices of these names")
    parser.add_argument("--sample", type=whole(1, MOST), metavar="N", help="about N matrices, of every kind")
    parser.add_argument("--activations", type=to_path, metavar="FILE", help="a file that `workbench calibrate` wrote")
    parser.add_argument(
        "--products",
        choices=["auto", "gaussian", "moments", "none"],
        default="auto",
        help="output noise of matrix products; auto: with --activations only; moments: expected, weights only",
    )
    parser.add_argument(
        "--bootstrap", type=whole(1, MOST), default=1000, help="resamples of matrix products' intervals"
    )
    parser.add_argument("--device", type=to_text, default="cpu", help="cpu, or cuda (cuda:1) for one GPU: the weights")
    parser.add_argument("--compute", choices=COMPUTE, default="local", help="ray: weights as tasks of a cluster")
    parser.add_argument(
        "--ray-address", type=to_text, metavar="HOST:PORT", help="default: $RAY_ADDRESS, else started here"
    )
    parser.add_argument("--ray-cpus", type=whole(1, MOST), metavar="N", help="processors of a task; default 1")
    parser.add_argument("--seed", type=whole(0, MOST), default=0)
    parser.add_argument("--out", type=to_path, required=True, metavar="FOLDER")


def analyze(arguments: argparse.Namespace) -> int:
    """0: every matrix was analyzed; 2: some could not be, or are in doubt (they are named)."""
    import dataclasses
    import time

    from workbench import records
    from workbench.analysis.compute import choose_compute
    from workbench.analysis.device import Device
    from workbench.analysis.faults import KINDS
    from workbench.analysis.study import analyze_checkpoints
    from workbench.progress import Progress
    from workbench.runfolder import command_line, describe

    check_folder("--out", arguments.out)
    source, first = _analyzed(arguments)
    _check_arms(arguments)
    check_input("--activations", arguments.activations)
    if arguments.compute == "local" and (arguments.ray_address or arguments.ray_cpus):
        raise ConfigError("--ray-address and --ray-cpus belong to --compute ray", fix="add it, or leave them out")
    compute = choose_compute(
        arguments.compute, address=arguments.ray_address, cpus=arguments.ray_cpus or 1, device=arguments.device
    )
    device = Device(arguments.device)
    pair, arms = _pair_and_arms(arguments, first)
    start, reading = time.monotonic(), Progress().reading()
    summary = analyze_checkpoints(
        out=arguments.out,
        source=source,
        source_arm=arguments.source_arm,
        pair=pair,
        arms=arms,
        activations=arguments.activations,
        bootstrap=arguments.bootstrap,
        seed=arguments.seed,
        select=arguments.select,
        sample=arguments.sample,
        progress=reading.bar,
        read_bytes=reading.add,
        moments=arguments.products == "moments",
        device=device,
        compute=compute,
    )
    paths = {arguments.source_arm: source, arguments.first_arm: first, arguments.second_arm: pair.second}
    manifest = describe(
        experiment="analyze",
        checkpoints={arm: {"path": str(path)} for arm, path in paths.items() if path is not None},
        seeds={"bootstrap": arguments.seed},
        command=command_line(),
    )
    manifest = dataclasses.replace(
        manifest,
        stage_seconds={"analyze": round(time.monotonic() - start, 1)},
        device=device.name,
        device_peak_bytes=device.peak_bytes(),
    )
    records.write_json(arguments.out / "manifest.json", manifest)
    for found in summary.pairs:
        print(
            f"{found.matrices} matrices, SQNR pooled: first {found.sqnr_first_db.pooled:.2f} dB, "
            f"second {found.sqnr_total_db.pooled:.2f} dB, direct {found.sqnr_direct_db.pooled:.2f} dB, "
            f"corr(e1, e2) mean {found.corr_e1_e2.mean:+.3f}"
        )
    for figure, count in summary.doubtful.items():
        print(f"the interval of {figure} is in doubt for {count} matrices: a few blocks hold most of the error")
    for of in summary.alone:
        shown = ", ".join(of.examples[:SHOWN_NAMES]) + (", ..." if of.matrices > SHOWN_NAMES else "")
        measured = "not measured" if of.arm == arguments.second_arm else f"measured against {of.other} as it stands"
        print(f"quantized in {of.arm} and not in {of.other}, {measured}: {of.matrices} ({shown})")
    if summary.missing:
        print(f"not given: {summary.missing}; figures that need it are missing")
    for kind, count in summary.fault_counts.items():
        examples = [fault for fault in summary.faults if fault.kind == kind]
        print(f"{kind}: {count} matrices: {KINDS[kind]}")
        for fault in examples[:SHOWN_NAMES]:
            print(f"  {fault.tensor} {fault.message}")
    print(f"wrote {', '.join(sorted(p.name for p in arguments.out.iterdir() if p.name[0] != '.'))} in {arguments.out}")
    return 2 if summary.faults else 0


def _analyzed(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The source and the first checkpoint, each given by place or by flag."""
    found = []
    for name in ("source", "first"):
        flag, place = getattr(arguments, name), getattr(arguments, f"{name}_path")
        if flag is not None and place is not None:
            raise ConfigError(f"the {name} is given twice: {place} and --{name} {flag}", fix="give it once")
        path = place if flag is None else flag
        local = path is not None and not str(path).startswith("hf:")
        if local and arguments.out.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"--out {arguments.out} lies within the checkpoint {path}", fix="write elsewhere")
        found.append(path)
    if found == [None, None]:
        raise ConfigError("nothing to analyze", fix="give --source and --first, or one of them")
    if arguments.source_path is not None and found[1] is None:
        raise ConfigError("only one checkpoint is given", fix="workbench analyze SOURCE FIRST, or --source, --first")
    return found[0], found[1]


def _check_arms(arguments: argparse.Namespace) -> None:
    from workbench.settings import check_arm_name

    named = {f"--{of}-arm": getattr(arguments, f"{of}_arm") for of in ("source", "first", "second")}
    for flag, name in named.items():
        check_arm_name(flag, name)
    if len(set(named.values())) < len(named):
        raise ConfigError(
            f"two arms have one name: {', '.join(f'{flag} {name}' for flag, name in named.items())}",
            fix="give each a name of its own",
        )


def _pair_and_arms(arguments: argparse.Namespace, first: Path | None) -> tuple[Any, list[Any]]:
    """What to compare, and whose matrix products to measure."""
    from workbench.analysis.gemm import GemmArm
    from workbench.analysis.tensors import ArmPair
    from workbench.formats import FORMATS, get_format

    target = arguments.second in FORMATS
    if arguments.rule and not target:
        raise ConfigError("--rule belongs to a second format, not to a stored checkpoint", fix="drop --rule")
    if not target and not arguments.second.startswith("hf:") and not Path(arguments.second).is_dir():
        raise ConfigError(
            f"--second {arguments.second} is neither a format nor a checkpoint's folder",
            fix=f"give {', '.join(FORMATS)}, or a folder that exists",
        )
    rule = get_format(arguments.second).rule(arguments.rule).value if target else ""
    stored = None if target else Path(arguments.second)
    pair = ArmPair(
        first=first,
        first_arm=arguments.first_arm if first is not None else "",
        second_arm=arguments.second_arm,
        second=stored,
        second_format=arguments.second if target else "mxfp4",
        second_rule=rule,
    )
    if arguments.products == "none" or (arguments.products == "auto" and arguments.activations is None):
        return pair, []
    arms = [GemmArm(arm=arguments.first_arm, checkpoint=first, activation_format="same")] if first is not None else []
    if stored is not None:
        arms.append(GemmArm(arm=arguments.second_arm, checkpoint=stored, activation_format="same"))
    elif first is not None:
        arms.append(
            GemmArm(
                arm=arguments.second_arm,
                checkpoint=first,
                requant_format=arguments.second,
                requant_rule=rule,
                activation_format="same",
            )
        )
    return pair, arms
