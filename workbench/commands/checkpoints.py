"""`workbench lint` and `workbench quantize`: a checkpoint's bytes, looked at and converted."""

from __future__ import annotations

import argparse

from workbench.commands.arguments import Commands, Parser, add_command, to_block, to_path, to_text
from workbench.commands.calibration import add_capture_options, capture
from workbench.commands.paths import check_file, check_input
from workbench.errors import ConfigError

SHOWN_NAMES = 3  # of a finding's tensors; --json has all


def add_commands(commands: Commands) -> None:
    add_command(commands, "lint", lint, _lint_options, "check a checkpoint's bytes against its own claims")
    add_command(commands, "quantize", quantize, _quantize_options, "convert a checkpoint, shard by shard")


def _lint_options(parser: Parser) -> None:
    parser.add_argument("path", type=to_path)
    parser.add_argument(
        "--allow", action="append", default=[], metavar="CHECK", help="show, but do not fail on, a check"
    )
    parser.add_argument("--json", type=to_path, metavar="FILE", help="also write the findings as JSON, with all names")
    parser.add_argument(
        "--all-scales", action="store_true", help="read block scales beyond 1 GiB whole, not in samples"
    )
    parser.add_argument("--all-values", action="store_true", help="the same of plain weights and FP8 codes")
    parser.add_argument(
        "--tensor-parallel",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="a size it is to be served with: what does not split is an error",
    )


def lint(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.checkpoints.lint import lint_checkpoint

    if arguments.json:
        check_file("--json", arguments.json, arguments.path)
    report = lint_checkpoint(
        arguments.path,
        allow=tuple(arguments.allow),
        all_scales=arguments.all_scales,
        all_values=arguments.all_values,
        tensor_parallel=tuple(arguments.tensor_parallel),
    )
    if arguments.json:
        records.write_json(arguments.json, report)
    print(
        f"{report.checkpoint}: {report.dialect}, {report.tensors} tensors, {report.quantized_tensors} quantized, "
        f"{len(report.checks)} checks in {report.seconds:.1f} s"
    )
    if report.scale_bytes_read < report.scale_bytes:
        print(
            f"every global and input scale was read, and {report.scale_bytes_read / 1e9:.2f} of"
            f" {report.scale_bytes / 1e9:.2f} GB of block scales: a fault of single blocks may lie in the rest"
            " (--all-scales)"
        )
    if report.value_bytes_read < report.value_bytes:
        print(
            f"{report.value_bytes_read / 1e9:.2f} of {report.value_bytes / 1e9:.2f} GB of plain weights and FP8 codes"
            " were read: a NaN may lie in the rest (--all-values)"
        )
    for finding in report.findings:
        place = " ".join(part for part in (finding.tensor, finding.file) if part)
        print(f"{finding.severity}: {finding.check}: {place}: {finding.message}")
        others = [name for name in finding.tensors if name != finding.tensor]
        if others:
            print(f"  also: {', '.join(others[:SHOWN_NAMES])}{', ...' if others[SHOWN_NAMES:] else ''}")
        if finding.fix:
            print(f"  fix: {finding.fix}")
    if not report.findings:
        print("clean")
    if str(arguments.path).startswith("hf:"):
        from workbench.checkpoints.hub import TRAFFIC

        print(TRAFFIC)
    return 1 if report.errors else 0


def _quantize_options(parser: Parser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog_of = _written_formats
    parser.add_argument("source", type=to_text, help="a folder, or hf://org/name")
    parser.add_argument("destination", type=to_path)
    parser.add_argument("--format", help="a number format of the table below, bf16 or f32")
    parser.add_argument("--dialect", required=True, help="the producer's layout to write")
    parser.add_argument(
        "--scale-rule",
        "--rule",
        dest="rule",
        metavar="RULE",
        help="how scales are chosen; a format's first is its default",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--block", type=to_block, metavar="RxC", help="rows x columns that share a scale, e.g. 128x128")
    size.add_argument(
        "--group-size",
        type=lambda text: to_block(f"1x{text}"),
        dest="block",
        metavar="N",
        help="the same as --block 1xN",
    )
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="modules that stay unquantized")
    parser.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="quantize only these; a name may add lm_head"
    )
    parser.add_argument(
        "--recipe", type=to_text, metavar="NAME", help="rules by module: a name of conf/recipe, or a YAML file"
    )
    parser.add_argument("--weight-only", action="store_true", help="activations stay unquantized")
    parser.add_argument("--no-shared-globals", action="store_true", help="a global scale per matrix")
    parser.add_argument("--calibrate", action="store_true", help="run the source under vLLM and write input_scale")
    parser.add_argument("--activations", type=to_path, metavar="FILE", help="calibrate from a captured file instead")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tensors converted at once, in threads")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same conversion was killed; keep what is done if stopped"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing destination")
    add_capture_options(parser)


def quantize(arguments: argparse.Namespace) -> int:
    from workbench.checkpoints.convert import check_request, quantize_checkpoint
    from workbench.checkpoints.recipe import read_recipe
    from workbench.progress import Progress

    if arguments.prompts and not arguments.calibrate:
        raise ConfigError("--prompts is for --calibrate, which is not given", fix="add --calibrate, or drop --prompts")
    check_input("--activations", arguments.activations)
    recipe = read_recipe(arguments.recipe) if arguments.recipe else None
    shared_globals = not arguments.no_shared_globals
    check_request(  # before a calibration starts
        arguments.format,
        arguments.dialect,
        arguments.rule,
        recipe,
        shared_globals=shared_globals,
        block=arguments.block,
    )
    amax = None
    if arguments.calibrate or arguments.activations:
        from workbench.formats.activations import read_activations

        amax = read_activations(arguments.activations or capture(arguments)).input_amax()
    result = quantize_checkpoint(
        arguments.source,
        arguments.destination,
        format=arguments.format,
        dialect=arguments.dialect,
        exclude=tuple(arguments.exclude),
        include=tuple(arguments.include),
        rule=arguments.rule,
        block=arguments.block,
        recipe=recipe,
        weight_only=arguments.weight_only,
        shared_globals=shared_globals,
        input_amax=amax,
        calibration=_calibration(arguments),
        progress=Progress().counter("tensors"),
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        jobs=arguments.jobs,
    )
    for warning in result.warnings:
        print(f"warning: {warning}")
    counts = {
        "quantized": result.quantized,
        "copied": result.copied,
        "decoded": result.decoded,
        "kept": result.kept,
    }
    print(
        f"wrote {result.path}: {', '.join(f'{len(names)} {what}' for what, names in counts.items() if names)}, "
        f"{result.source_bytes / 1e6:.1f} MB -> {result.written_bytes / 1e6:.1f} MB (error and recipe: README.md)"
    )
    return 0


def _calibration(arguments: argparse.Namespace) -> list[str]:
    """The words of `quantize` that measure the input scales again; files by their names, as the card has the source."""
    if arguments.activations:
        return ["--activations", arguments.activations.name]
    words = ["--calibrate", "--max-model-len", str(arguments.max_model_len)]
    return words + (["--prompts", arguments.prompts.name] if arguments.prompts else [])


def _written_formats() -> str:
    """Dialects, the formats that each writes, and their scale rules, from the tables."""
    from workbench.checkpoints.dialects import DIALECTS
    from workbench.formats import FORMATS

    lines = ["dialect, format (scale rules):"]
    for dialect in DIALECTS.values():
        for name in dialect.writes:
            rules = ", ".join(rule.value for rule in FORMATS[name].rules) if name in FORMATS else "decodes"
            lines.append(f"  {dialect.name:20} {name} ({rules})")
    return "\n".join(lines)
