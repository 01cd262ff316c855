"""`workbench whatif`: formats, rules and block sizes predicted from the weights, and the best of them served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.commands.arguments import MOST, Commands, Parser, add_command, to_path, to_text, whole
from workbench.commands.mixed_precision import print_faults
from workbench.commands.paths import check_file, check_folder
from workbench.commands.texts import add_text_options, cut_text
from workbench.errors import ConfigError


def add_commands(commands: Commands) -> None:
    help = "predict formats, rules and block sizes from the weights alone"
    add_command(commands, "whatif", whatif, _whatif_options, help)


def _whatif_options(parser: Parser) -> None:
    parser.add_argument("source", type=to_path)
    parser.add_argument("--first", type=to_path, metavar="FIRST", help="a quantized checkpoint of it, as stored")
    parser.add_argument("--sample", type=whole(1, MOST), metavar="N", help="about N matrices, of every kind")
    parser.add_argument("--select", type=to_text, metavar="GLOB", help="only matrices of these names")
    parser.add_argument("--exclude", action="append", type=to_text, default=[], metavar="GLOB")
    parser.add_argument("--seed", type=whole(0, MOST), default=0)
    parser.add_argument("--out", type=to_path, metavar="FILE", help="also write every matrix's figures as parquet")
    parser.add_argument("--verify", type=whole(1, MOST), metavar="N", help="serve the N best, one by one; measure KL")
    parser.add_argument(
        "--verify-out", type=to_path, metavar="FOLDER", help="log-probabilities, logs, verification.json"
    )
    parser.add_argument("--top-k", type=whole(1, MOST), default=20, help="of --verify")
    add_text_options(parser, tokens=512, windows=64)


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
        windows = cut_text(arguments, arguments.source)  # before the long part
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
    print_faults(found.faults)
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
