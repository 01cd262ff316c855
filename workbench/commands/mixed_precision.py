"""`workbench sensitivity` and `workbench plan`: which format each unit of a model can bear, and a recipe of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.arguments import MOST, Commands, Parser, add_command, to_bits, to_path, to_text, whole
from workbench.commands.checkpoints import SHOWN_NAMES
from workbench.commands.paths import check_file, check_folder, check_input
from workbench.commands.texts import add_text_options, cut_text
from workbench.errors import ConfigError


def add_commands(commands: Commands) -> None:
    help = "round one unit at a time, run the model, measure its answers"
    add_command(commands, "sensitivity", sensitivity, _sensitivity_options, help)
    add_command(commands, "plan", plan, _plan_options, "a mixed-precision recipe within a budget of bits")


def _sensitivity_options(parser: Parser) -> None:
    parser.add_argument("source", type=to_path)
    parser.add_argument("--format", action="append", metavar="NAME", help="default: mxfp4, nvfp4, fp8_channel")
    parser.add_argument("--granularity", choices=["layer", "expert"], help="what is rounded at once")
    parser.add_argument("--round-activations", action="store_true", help="the inputs pass the format as well")
    parser.add_argument("--subsets", type=whole(0, MOST), metavar="N", help="random choices of units; default 8")
    parser.add_argument(
        "--recipe", action="append", type=to_text, metavar="NAME", help="measure recipes or formats, not units"
    )
    parser.add_argument("--select", type=to_text, metavar="GLOB", help="only matrices of these names")
    parser.add_argument("--exclude", action="append", type=to_text, default=[], metavar="GLOB")
    parser.add_argument("--device", type=to_text, default="cpu", help="cpu, or cuda for one GPU")
    parser.add_argument("--seed", type=whole(0, MOST), default=0)
    parser.add_argument("--out", type=to_path, required=True, metavar="FOLDER")
    add_text_options(parser, tokens=256, windows=16)


def sensitivity(arguments: argparse.Namespace) -> int:
    """0: every unit took every format; 2: some could not (they are named)."""
    from workbench.analysis.sensitivity import DEFAULT_FORMATS, measure_recipes, measure_sensitivity
    from workbench.formats import FORMATS
    from workbench.progress import Progress

    check_folder("--out", arguments.out, arguments.source)
    units = ("format", "granularity", "subsets", "select")
    if arguments.recipe and any(getattr(arguments, name) is not None for name in units):
        raise ConfigError(f"--recipe goes without --{', --'.join(units)}", fix="measure units and recipes apart")
    settings: dict[str, Any] = {
        "source": arguments.source,
        "windows": cut_text(arguments, arguments.source),
        "out": arguments.out,
        "activations": arguments.round_activations,
        "exclude": tuple(arguments.exclude),
        "seed": arguments.seed,
        "device": arguments.device,
        "progress": Progress().timed,
    }
    if arguments.recipe:
        recipes = {of if of in FORMATS else Path(of).stem: of for of in arguments.recipe}
        if len(recipes) < len(arguments.recipe):
            raise ConfigError("two recipes of one name", fix="rename one of the files")
        found = measure_recipes(recipes=recipes, **settings)
    else:
        found = measure_sensitivity(
            formats=tuple(dict.fromkeys(arguments.format or DEFAULT_FORMATS)),
            granularity=arguments.granularity or "layer",
            subsets=8 if arguments.subsets is None else arguments.subsets,
            select=arguments.select,
            **settings,
        )
    print(
        f"KL divergence from the source, nats, over all {found.vocabulary} tokens of the vocabulary,"
        f" {found.windows} windows of {found.tokens} tokens, activations {found.activations}"
    )
    _print_cases(arguments.out)
    for of in found.differences:
        print(
            f"{of.first} ({of.first_bits:.3f} bits) - {of.second} ({of.second_bits:.3f} bits):"
            f" {of.mean:+.4g} ({of.low:+.4g} to {of.high:+.4g})"
        )
    print_faults(found.faults)
    print(f"wrote sensitivity.parquet, sensitivity.json in {arguments.out}")
    return 2 if found.faults else 0


def _print_cases(folder: Path) -> None:
    """The ten units with the largest divergence of each format, and every case of several units."""
    from workbench.analysis.sensitivity import TABLE
    from workbench.analysis.tensors import read_frame

    frame = read_frame(folder / TABLE)
    units = frame[frame["kind"] == "unit"]
    for format, of in units.groupby("format", sort=False):
        print(f"{format}: {len(of)} units, alone; noise over signal at the sublayer, its layer's end, the last layer's")
        for row in of.sort_values("kl", ascending=False).head(10).itertuples():
            noise = f"{row.noise_block:.3g} {row.noise_residual:.3g} {row.noise_last:.3g}"
            print(f"  {row.kl:.4g} ({row.kl_low:.3g} to {row.kl_high:.3g})  {noise}  {row.unit}")
    for row in frame[frame["kind"] != "unit"].itertuples():
        bits = (
            f", {row.bits / row.weights:.3f} bits" if row.kind == "recipe" else f", sum of units {row.kl_predicted:.4g}"
        )
        print(f"{row.case}: {row.kl:.4g} ({row.kl_low:.4g} to {row.kl_high:.4g}){bits}")


def _plan_options(parser: Parser) -> None:
    parser.add_argument("source", type=to_path)
    parser.add_argument("--bits", type=to_bits, required=True, help="stored bits a weight, scales included")
    parser.add_argument("--format", action="append", metavar="NAME", help="to choose among; default: mxfp4, nvfp4, ...")
    parser.add_argument("--sensitivity", type=to_path, metavar="FOLDER", help="decide by what `sensitivity` measured")
    parser.add_argument("--activations", type=to_path, metavar="FILE", help="a file that `workbench calibrate` wrote")
    parser.add_argument("--granularity", choices=["layer", "expert"], help="what shares a format; default: layer")
    parser.add_argument("--select", type=to_text, metavar="GLOB", help="only matrices of these names")
    parser.add_argument(
        "--exclude", action="append", type=to_text, default=[], metavar="GLOB", help="these stay as they are"
    )
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write every choice as JSON")
    parser.add_argument(
        "--out", type=to_path, required=True, metavar="RECIPE", help="the recipe, for `quantize --recipe`"
    )


def plan(arguments: argparse.Namespace) -> int:
    """0: planned; 2: planned, but some matrices could not have every format (they are named)."""
    from workbench import records
    from workbench.analysis.plan import plan_bits, write_recipe
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.lint import doubts
    from workbench.progress import Progress

    check_file("--out", arguments.out, arguments.source, arguments.activations, arguments.sensitivity)
    if arguments.json:
        check_file("--json", arguments.json, arguments.source, arguments.activations, arguments.out)
    check_input("--activations", arguments.activations)
    with open_checkpoint(arguments.source) as checkpoint:
        for warning in doubts(checkpoint):
            print(f"warning: {warning}", flush=True)  # before the minutes that planning takes
    found = plan_bits(
        source=arguments.source,
        bits=arguments.bits,
        formats=tuple(dict.fromkeys(arguments.format)) if arguments.format else None,
        activations=arguments.activations,
        sensitivity=arguments.sensitivity,
        granularity=arguments.granularity,
        select=arguments.select,
        exclude=tuple(arguments.exclude),
        progress=Progress().bar,
    )
    write_recipe(arguments.out, found)
    if arguments.json:
        records.write_json(arguments.json, found)
    for name, of in found.uniform.items():
        print(f"{name} alone: {of['bits']:.3f} bits a weight, {found.measure} {of['noise']:.4g}")
    print(f"the plan: {found.bits:.3f} bits a weight, {found.measure} {found.noise:.4g} ({found.activations} inputs)")
    counts: dict[str, int] = {}
    for choice in found.choices:
        counts[choice.format] = counts.get(choice.format, 0) + choice.weights
    print("weights by format: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print_faults(found.faults)
    if found.faults:
        print("what shares a format with them has only the formats that all of it takes, or stays as it is")
    print(f"wrote {arguments.out}")
    return 2 if found.faults else 0


def print_faults(faults: Any) -> None:
    from workbench.analysis.faults import KINDS, count_faults

    for kind, count in count_faults(faults).items():
        print(f"{kind}: {count} matrices or formats of them: {KINDS[kind]}")
        for fault in [fault for fault in faults if fault.kind == kind][:SHOWN_NAMES]:
            print(f"  {fault.tensor} {fault.message}")
