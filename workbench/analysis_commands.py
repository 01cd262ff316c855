"""What the commands about weights do: `analyze`, `sensitivity`, `plan`, `whatif`.

code = analysis_commands.analyze(arguments)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands import SHOWN_NAMES, check_file, check_folder, check_input, read_text, tasks_named
from workbench.errors import ConfigError


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
        "windows": _windows(arguments, arguments.source),
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
    _print_faults(found.faults)
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


def _windows(arguments: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
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


def _print_faults(faults: Any) -> None:
    from workbench.analysis.faults import KINDS, count_faults

    for kind, count in count_faults(faults).items():
        print(f"{kind}: {count} matrices or formats of them: {KINDS[kind]}")
        for fault in [fault for fault in faults if fault.kind == kind][:SHOWN_NAMES]:
            print(f"  {fault.tensor} {fault.message}")


def plan(arguments: argparse.Namespace) -> int:
    """0: planned; 2: planned, but some matrices could not have every format (they are named)."""
    from workbench import records
    from workbench.analysis.plan import plan_bits, write_recipe
    from workbench.progress import Progress

    check_file("--out", arguments.out, arguments.source, arguments.activations, arguments.sensitivity)
    if arguments.json:
        check_file("--json", arguments.json, arguments.source, arguments.activations, arguments.out)
    check_input("--activations", arguments.activations)
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
    _print_faults(found.faults)
    print(f"wrote {arguments.out}")
    return 2 if found.faults else 0


def whatif(arguments: argparse.Namespace) -> int:
    """0: every matrix was rounded every way; 2: some could not be (they are named)."""
    from workbench.analysis.tensors import write_frame
    from workbench.analysis.whatif import rank, steering_verdict, what_if
    from workbench.progress import Progress

    if arguments.out:
        check_file("--out", arguments.out, arguments.source, arguments.first)
    if arguments.verify and not (arguments.verify_out and arguments.text):
        raise ConfigError("--verify serves choices on a text", fix="add --text FILE and --verify-out FOLDER")
    if arguments.verify:
        check_folder("--verify-out", arguments.verify_out, arguments.source, arguments.first)
        windows = _windows(arguments, arguments.source)  # before the long part
    found = what_if(
        source=arguments.source,
        first=arguments.first,
        sample=arguments.sample,
        select=arguments.select,
        exclude=tuple(arguments.exclude),
        seed=arguments.seed,
        progress=Progress().timed,
    )
    table = found.table
    if arguments.out:
        write_frame(arguments.out, table)
    print(f"{'first':22}{'second':8}{'rule':9}{'block':>6}{'bits':>7}{'SQNR dB':>9}")
    for row in rank(table).itertuples():
        print(f"{row.first:22}{row.second:8}{row.rule:9}{row.block:6}{row.bits:7.3f}{row.sqnr_db:9.2f}")
    if (table["rule"] == "steered").any():
        verdict = steering_verdict(table, seed=arguments.seed)
        print(
            f"steered requantization {verdict.verdict}: {verdict.gain_db:+.3f} dB over plain "
            f"({verdict.gain_low_db:+.3f} to {verdict.gain_high_db:+.3f}, {verdict.matrices} matrices), "
            f"{verdict.span_db:+.3f} dB over each matrix's worst multiplier"
        )
    _print_faults(found.faults)
    if arguments.verify:
        _verify(arguments, found, windows)
    return 2 if found.faults else 0


def _verify(arguments: argparse.Namespace, predicted: Any, windows: list[list[int]]) -> None:
    """Serve the best choices one after the other, weights only as the lattice has them, and hold the divergence of
    their answers from the source's against what was predicted."""
    from workbench import records
    from workbench.analysis.whatif import servable, verify
    from workbench.evaluation.kld import kl_divergence

    out = arguments.verify_out
    choices = servable(predicted.table, arguments.verify)
    exclude = _unmeasured(arguments.source, predicted.names)
    reference = out / "source.jsonl"
    _collect(arguments, windows, reference, arguments.source, backend="reference")
    divergences = []
    for place, row in enumerate(choices.itertuples(), start=1):
        path = out / f"choice_{place}.jsonl"
        checkpoint = _first_of(arguments, row.first, exclude)
        _collect(
            arguments, windows, path, checkpoint,
            backend="requant", format=row.second, rule=row.rule, activations="none", exclude=exclude,
        )  # fmt: skip
        divergences.append(kl_divergence(reference, path))
    found = verify(arguments.source, choices, divergences)
    records.write_json(out / "verification.json", found)
    print(f"{'first':22}{'second':8}{'rule':9}{'predicted SQNR dB':>20}  measured KL, nats, top {arguments.top_k}")
    for choice in found.choices:
        mean = choice.divergence.mean
        print(
            f"{choice.first:22}{choice.second:8}{choice.rule:9}{choice.sqnr_db:20.2f}  at least {mean.lower:.4g}"
            f" ({mean.lower_ci_low:.4g} to {mean.lower_ci_high:.4g})"
        )
    if len(found.choices) >= 3:
        print(f"rank correlation of predicted noise and measured divergence: {found.rank_correlation:+.2f}")
    print(f"wrote verification.json in {out}")


def _unmeasured(source: Path, names: frozenset[str]) -> tuple[str, ...]:
    """Linear modules that the lattice is not about, so that they are left alone when it is served."""
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.selection import linear_weights

    with open_checkpoint(source) as checkpoint:
        return tuple(entry.module for entry in linear_weights(checkpoint) if entry.name not in names)


def _first_of(arguments: argparse.Namespace, first: str, exclude: tuple[str, ...]) -> Path:
    """The checkpoint that a choice's second quantization starts from; a first that is not stored is written."""
    from workbench.checkpoints.convert import quantize_checkpoint

    if first == "none":
        return Path(arguments.source)
    if first == "stored":
        return Path(arguments.first)
    path: Path = arguments.verify_out / first.replace(" ", "_")
    rule = first.partition(" ")[2] or None
    quantize_checkpoint(
        arguments.source, path, format="nvfp4", rule=rule, dialect="compressed_tensors",
        exclude=exclude, weight_only=True, shared_globals=False, overwrite=True,
    )  # fmt: skip
    return path


def _collect(
    arguments: argparse.Namespace, windows: list[list[int]], path: Path, checkpoint: Path, **serving: Any
) -> None:
    """Start an engine, write the log-probabilities it gives, and stop it."""
    from workbench.evaluation.kld import collect_logprobs
    from workbench.progress import Progress
    from workbench.serving.endpoint import start
    from workbench.serving.spec import EngineSpec, ServeSpec

    engine = EngineSpec(max_model_len=arguments.tokens + 8, args={"max_logprobs": arguments.top_k})
    spec = ServeSpec(arm=path.stem, checkpoint=checkpoint, engine=engine, **serving)
    with start(spec, path.with_suffix(".log")) as endpoint:
        collect_logprobs(
            base_url=endpoint.base_url,
            model=endpoint.model,
            windows=windows,
            k=arguments.top_k,
            path=path,
            name=path.stem,
            progress=Progress().counter(path.stem),
        )
