"""What the commands about weights do: `analyze`, `plan`, `whatif`.

code = analysis_commands.analyze(arguments)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands import SHOWN_NAMES, check_file, check_folder, check_input
from workbench.errors import ConfigError


def analyze(arguments: argparse.Namespace) -> int:
    """0: every matrix was analyzed; 2: some could not be, or are in doubt (they are named)."""
    import dataclasses
    import time

    from workbench import records
    from workbench.analysis.faults import KINDS
    from workbench.analysis.study import analyze_checkpoints
    from workbench.progress import Progress
    from workbench.runfolder import command_line, describe

    check_folder("--out", arguments.out)
    source, first = _analyzed(arguments)
    check_input("--activations", arguments.activations)
    pair, arms = _pair_and_arms(arguments, first)
    start, reading = time.monotonic(), Progress().reading()
    summary = analyze_checkpoints(
        out=arguments.out,
        source=source,
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
    )
    paths = {"source": source, "first": first, "second": pair.second}
    manifest = describe(
        experiment="analyze",
        checkpoints={arm: {"path": str(path)} for arm, path in paths.items() if path is not None},
        seeds={"bootstrap": arguments.seed},
        command=command_line(),
    )
    seconds = {"analyze": round(time.monotonic() - start, 1)}
    records.write_json(arguments.out / "manifest.json", dataclasses.replace(manifest, stage_seconds=seconds))
    for found in summary.pairs:
        print(
            f"{found.matrices} matrices, SQNR pooled: first {found.sqnr_first_db.pooled:.2f} dB, "
            f"second {found.sqnr_total_db.pooled:.2f} dB, direct {found.sqnr_direct_db.pooled:.2f} dB, "
            f"corr(e1, e2) mean {found.corr_e1_e2.mean:+.3f}"
        )
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
        first_arm="first" if first is not None else "",
        second_arm="second",
        second=stored,
        second_format=arguments.second if target else "mxfp4",
        second_rule=rule,
    )
    if arguments.products == "none" or (arguments.products == "auto" and arguments.activations is None):
        return pair, []
    arms = [GemmArm(arm="first", checkpoint=first, activation_format="same")] if first is not None else []
    if stored is not None:
        arms.append(GemmArm(arm="second", checkpoint=stored, activation_format="same"))
    elif first is not None:
        arms.append(
            GemmArm(
                arm="second",
                checkpoint=first,
                requant_format=arguments.second,
                requant_rule=rule,
                activation_format="same",
            )
        )
    return pair, arms


def plan(arguments: argparse.Namespace) -> int:
    from workbench import records
    from workbench.analysis.plan import FORMATS, plan_bits, write_recipe
    from workbench.progress import Progress

    check_file("--out", arguments.out, arguments.source, arguments.activations)
    if arguments.json:
        check_file("--json", arguments.json, arguments.source, arguments.activations, arguments.out)
    check_input("--activations", arguments.activations)
    found = plan_bits(
        source=arguments.source,
        bits=arguments.bits,
        formats=tuple(dict.fromkeys(arguments.format or FORMATS)),
        activations=arguments.activations,
        granularity=arguments.granularity,
        progress=Progress().bar,
    )
    write_recipe(arguments.out, found)
    if arguments.json:
        records.write_json(arguments.json, found)
    for name, of in found.uniform.items():
        print(f"{name} alone: {of['bits']:.3f} bits a weight, output noise {of['noise']:.4g}")
    print(f"the plan: {found.bits:.3f} bits a weight, output noise {found.noise:.4g} ({found.activations} inputs)")
    counts: dict[str, int] = {}
    for choice in found.choices:
        counts[choice.format] = counts.get(choice.format, 0) + choice.weights
    print("weights by format: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print(f"wrote {arguments.out}")
    return 0


def whatif(arguments: argparse.Namespace) -> int:
    from workbench.analysis.tensors import write_frame
    from workbench.analysis.whatif import rank, steering_verdict, what_if
    from workbench.progress import Progress

    if arguments.out:
        check_file("--out", arguments.out, arguments.source, arguments.first)
    table = what_if(
        source=arguments.source,
        first=arguments.first,
        sample=arguments.sample,
        seed=arguments.seed,
        progress=Progress().bar,
    )
    if arguments.out:
        write_frame(arguments.out, table)
    print(f"{'first':22}{'second':8}{'rule':9}{'block':>6}{'bits':>7}{'SQNR dB':>9}")
    for row in rank(table).itertuples():
        print(f"{row.first:22}{row.second:8}{row.rule:9}{row.block:6}{row.bits:7.3f}{row.sqnr_db:9.2f}")
    verdict = steering_verdict(table, seed=arguments.seed)
    print(
        f"steered requantization {verdict.verdict}: {verdict.gain_db:+.3f} dB over plain "
        f"({verdict.gain_low_db:+.3f} to {verdict.gain_high_db:+.3f}, {verdict.matrices} matrices), "
        f"{verdict.span_db:+.3f} dB over each matrix's worst multiplier"
    )
    return 0
