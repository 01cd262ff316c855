"""The model card of a converted checkpoint: what it is, what it was made from, by which recipe, and how exactly.

    writer.write_text("README.md", write_card(card))

The errors are those of the conversion itself: sums over every value, gathered while it ran. The interval is a bootstrap
over the matrices (resampled whole, 95 %, seeded): how much the figure hangs on which matrices a model has. Nothing in
the text depends on the time, the machine or the number of jobs, so a resumed conversion writes the same card.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import workbench
from workbench.formats import FORMATS, get_format

from .calibration import FALLBACK_AMAX
from .dialects import Written
from .recipe import Recipe, Rule
from .transform import Outcome

_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """All that a model card says. source: a Hub address, or the source folder's name. source_readme: its own card.
    calibration: the words of the command that give it its input scales again.
    """

    name: str
    source: str
    source_readme: str | None
    source_dialect: str
    fingerprint: str
    dialect: str
    format: str | None
    recipe: Recipe
    written: Written
    shared_globals: bool
    calibration: tuple[str, ...]
    source_bytes: int
    written_bytes: int
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """SQNR of one kind of projection in dB (inf: exact), its 95 % interval over matrices, and the worst matrix's."""

    kind: str
    matrices: int
    sqnr_db: float
    low_db: float
    high_db: float
    worst_db: float
    worst: str


def measure_errors(outcomes: Sequence[Outcome]) -> list[ErrorRow]:
    """SQNR = 10 log10(sum w^2 / sum (w - stored)^2) by kind of projection, then over all quantized matrices."""
    quantized = [o for o in outcomes if o.action == "quantize"]
    kinds = dict.fromkeys(o.kind for o in quantized)
    rows = [_error_row(kind, [o for o in quantized if o.kind == kind]) for kind in kinds]
    return rows + ([_error_row("all", quantized)] if len(rows) > 1 else [])


def write_card(card: Card) -> str:
    """The card as Markdown with the Hub's front matter."""
    return "\n".join((*_front_matter(card), *_summary(card), *_errors(card), *_notes(card), *_repeat(card))) + "\n"


def _error_row(kind: str, outcomes: Sequence[Outcome]) -> ErrorRow:
    power, error = (np.array([getattr(o, what) for o in outcomes]) for what in ("power", "error"))
    draws = np.random.default_rng(0).integers(len(outcomes), size=(_RESAMPLES, len(outcomes)))
    resampled = sorted(_sqnr_db(power[draw].sum(), error[draw].sum()) for draw in draws)
    own = [_sqnr_db(o.power, o.error) for o in outcomes]
    worst = min(range(len(own)), key=own.__getitem__)
    low, high = resampled[round(0.025 * (_RESAMPLES - 1))], resampled[round(0.975 * (_RESAMPLES - 1))]
    return ErrorRow(kind, len(own), _sqnr_db(power.sum(), error.sum()), low, high, own[worst], outcomes[worst].name)


def _sqnr_db(power: float, error: float) -> float:
    if error == 0:
        return math.inf
    return 10 * math.log10(power / error) if power > 0 else -math.inf


def _front_matter(card: Card) -> Iterator[str]:
    yield "---"
    if card.source.startswith("hf:/"):
        yield f"base_model: {card.source.removeprefix('hf:').lstrip('/').partition('@')[0]}"
        yield "base_model_relation: quantized"
    yield from _licence(card.source_readme or "")
    yield "tags:"
    for tag in (*dict.fromkeys(card.written.formats.values()), card.dialect, "quantization-workbench"):
        yield f"- {tag}"
    yield "---"


def _licence(readme: str) -> Iterator[str]:
    """The licence lines of the source card's front matter: they bind the copy as well."""
    lines = readme.splitlines()
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return
    yield from (line for line in lines[1 : lines.index("---", 1)] if line.startswith("license"))


def _summary(card: Card) -> Iterator[str]:
    counts = {"quantize": "quantized", "copy": "copied in their format", "decode": "decoded", "keep": "kept"}
    actions = [o.action for o in card.outcomes]
    written = ", ".join(f"{actions.count(a)} {word}" for a, word in counts.items() if actions.count(a))
    yield f"\n# {card.name}\n"
    yield (
        f"Made from `{card.source}` ({card.source_dialect} dialect, fingerprint `{card.fingerprint}`) by"
        f" quantization-workbench {workbench.__version__}.\n"
    )
    yield "| | |"
    yield "|---|---|"
    yield f"| tensors | {written} |"
    yield f"| size | {card.source_bytes / 1e9:.3f} GB -> {card.written_bytes / 1e9:.3f} GB |"
    yield f"| dialect | {card.dialect} |"
    formats = list(card.written.formats.values())
    for format in dict.fromkeys(formats):
        yield f"| {format} | {formats.count(format)} matrices{_describe(card, format)} |"
    if any(FORMATS[f].has_global for f in formats):
        yield f"| global scales | {'shared by' if card.shared_globals else 'apart for'} fused projections |"
    if card.written.formats:
        yield f"| activations | {_activations(card)} |"
    if card.recipe.name:
        yield f"| recipe | {card.recipe.name} |"
    if any(r.where != "--format" for r in card.recipe.rules):
        yield "\nRules, the first that covers a module decides:\n"
        yield "| modules | format | scale rule | block |"
        yield "|---|---|---|---|"
        for rule in card.recipe.rules:
            block = "" if rule.block is None else f"{rule.block[0]} x {rule.block[1]}"
            yield f"| `{rule.match}` | {rule.format or 'unquantized'} | {_rule_name(rule)} | {block} |"


def _describe(card: Card, format: str) -> str:
    parts = []
    if format in card.written.rules:
        parts.append(f"scale rule {card.written.rules[format]}")
    if format in card.written.blocks:
        parts.append("blocks of {} x {}".format(*card.written.blocks[format]))
    return "".join(f", {part}" for part in parts)


def _rule_name(rule: Rule) -> str:
    return get_format(rule.format).rule(rule.rule).value if rule.quantizes else ""


def _activations(card: Card) -> str:
    if card.written.weight_only:
        return "not quantized (weight-only)"
    if not card.written.static_activations:
        return "no input scales are stored"
    return (
        "input scales from a calibration; an expert that saw no token has the largest amax of its layer's other"
        f" experts, or {FALLBACK_AMAX} where none saw one"
    )


def _errors(card: Card) -> Iterator[str]:
    rows = measure_errors(card.outcomes)
    if not rows:
        return
    yield "\n## Measured error\n"
    yield (
        "Signal to quantization noise of the weights, against the source as it decodes, over every value;"
        f" interval: 95 %, {_RESAMPLES} resamplings of the matrices.\n"
    )
    yield "| projection | matrices | SQNR, dB | 95 % | worst matrix |"
    yield "|---|---|---|---|---|"
    for row in rows:
        interval = f"{_decibel(row.low_db)} to {_decibel(row.high_db)}" if row.matrices > 1 else "one matrix"
        yield (
            f"| {row.kind} | {row.matrices} | {_decibel(row.sqnr_db)} | {interval} |"
            f" {_decibel(row.worst_db)} `{row.worst}` |"
        )


def _decibel(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.2f}"


def _notes(card: Card) -> Iterator[str]:
    if card.warnings:
        yield "\n## Notes\n"
        yield from (f"- {warning}" for warning in card.warnings)


def _repeat(card: Card) -> Iterator[str]:
    words = ["workbench", "quantize", card.source, card.name, "--dialect", card.dialect]
    own = [r for r in card.recipe.rules if r.where == "--format"]
    if card.format is not None:
        words += ["--format", card.format]
        words += ["--scale-rule", own[0].rule] if own[0].rule is not None else []
        words += ["--block", "{}x{}".format(*own[0].block)] if own[0].block is not None else []
    if any(r.where not in ("--format", "--exclude") for r in card.recipe.rules):
        words += ["--recipe", card.recipe.name or "RECIPE.yaml"]
    for rule in card.recipe.rules:
        if rule.where == "--exclude":
            words += ["--exclude", rule.match]
        elif rule.where == "--format" and rule.match != "*":
            words += ["--include", rule.match]
    words += ["--weight-only"] if card.written.weight_only else []
    words += [] if card.shared_globals else ["--no-shared-globals"]
    words += card.calibration if card.written.static_activations else []
    yield "\n## Repeat\n"
    yield f"```\n{shlex.join(words)}\n```"
    if card.source_readme is not None:
        yield "\nThe source's own card is kept beside this one as `README.source*.md`."
