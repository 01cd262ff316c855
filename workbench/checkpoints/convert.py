"""Convert a checkpoint file to file: quantize, requantize or decode, one tensor in memory at a time.

    result = quantize_checkpoint("mini_kimi", "mini_kimi_nvfp4", format="nvfp4", dialect="modelopt",
                                 exclude=["*self_attn*"])

The source may be plain or quantized in any known dialect; a quantized source is decoded exactly in float32 and rounded
once more; tensors that are in the target format already are copied unchanged. What is quantized: the 2-D `*.weight` of
the layers' linear projections, as the recipe (`recipe.py`) or one format for all decides. What never is, unless a rule
names it: embeddings, norms, biases, routers, lm_head; a quantized source tensor that is excluded is decoded to BF16 and
a warning says so. The folder gets a model card with the error measured on the way (`card.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench.errors import CheckpointError, ConfigError
from workbench.formats import FORMATS, get_format
from workbench.formats.table import VARIABLE

from .calibration import ACTIVATION_MAX, resolve_input_scales
from .card import Card, write_card
from .dialects import DIALECTS, Dialect, Written, get_dialect
from .files import CONFIG_FILES, check_path
from .lint import doubts
from .open import Checkpoint, open_checkpoint, resolve_path
from .recipe import DENSE_FORMATS, KEEP, Recipe, Rule, combine
from .selection import Plan, Step, make_plan
from .transform import Outcome, Transform, Unit, make_units
from .writer import DEFAULT_SHARD_BYTES, CheckpointWriter, check_destination, clear_leftovers

# Files of the source that are written anew, or declare its own quantization; an index of its shards is left out too.
NOT_COPIED = {*CONFIG_FILES, "README.md", "quant_config.json"}

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionResult:
    """What was written, by tensor name, and sentences to show the user (warnings).

    format: the one format in use, several joined by "+". quantized: rounded to a format; copied: were in it already;
    decoded: quantized in the source, dense here; kept: dense in both. outcomes: each tensor's, with its error.
    source_bytes, written_bytes: stored bytes of all tensors before and after.
    """

    path: Path
    format: str
    dialect: str
    quantized: tuple[str, ...]
    copied: tuple[str, ...]
    decoded: tuple[str, ...]
    kept: tuple[str, ...]
    warnings: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    source_bytes: int
    written_bytes: int


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: str | None = None,
    dialect: str,
    exclude: Iterable[str] = (),
    include: Iterable[str] = (),
    rule: str | None = None,
    block: tuple[int, int] | None = None,
    recipe: Recipe | None = None,
    weight_only: bool = False,
    shared_globals: bool = True,
    input_amax: Mapping[str, float] | None = None,
    calibration: Sequence[str] = ("--activations", "activations.safetensors"),
    progress: Progress | None = None,
    overwrite: bool = False,
    resume: bool = False,
    jobs: int = 1,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ConversionResult:
    """Write `src` to folder `dst` in `format` (a row of FORMATS, "bf16" or "f32") and `dialect`.

    rule: scale rule (None: the format's default). block: (rows, columns) that share a scale, where the format leaves
    them open. exclude, include: patterns (`match.py`) of modules that stay unquantized, and of the only ones that do
    not. recipe: rules that decide before `format` does, which then may be None. shared_globals: gate/up, q/k/v and
    q_a/kv_a share one global scale, the largest amax's (servers fuse them). input_amax: module -> largest activation
    magnitude; with it an `input_scale` is written for every module whose format scales activations statically, see
    `calibration.resolve_input_scales` for the modules without one. calibration: the words of `workbench quantize` that
    measure them again, for the card. weight_only: activations stay unquantized. progress(done, total, name) is called
    after each tensor.

    jobs: units converted at once, in threads; the bytes are the same for any number. resume: go on with what a killed
    conversion of the same source by the same recipe left, and keep finished shards when this one is interrupted.

    Raises ConfigError for a combination that cannot be written, CheckpointError for the source or an occupied `dst`,
    FormatError naming the tensor that does not fit, OutputError when the disk is full. Without `resume`, nothing is
    left behind then.
    """
    exclude, include = tuple(exclude), tuple(include)
    writer_dialect = check_request(format, dialect, rule, recipe, block=block, shared_globals=shared_globals)
    if str(dst).startswith("hf:"):
        raise ConfigError(f"the destination is {dst}", fix="give a folder; `hf upload` takes it from there")
    if "" in (*exclude, *include):
        raise ConfigError("an exclude or include pattern is empty", fix="leave it out, or give a name, glob or re:")
    target = resolve_path(Path(dst))
    check_path(target)
    if (exclude or include) and format in DENSE_FORMATS and recipe is None:
        raise ConfigError(
            f"--format {format} decodes everything; nothing can be excluded or included", fix="leave --exclude out"
        )
    whole = combine(recipe, format=format, rule=rule, block=block, exclude=exclude, include=include)
    _check_rules(whole, writer_dialect)
    if weight_only and input_amax is not None:
        raise ConfigError("weight-only leaves no use for input scales", fix="leave one of them out")
    for what, value in (("jobs", jobs), ("max_shard_bytes", max_shard_bytes)):
        if value < 1:
            raise ConfigError(f"{what} is {value}", fix="a whole number of at least 1")
    with open_checkpoint(src) as checkpoint:
        _check_apart(checkpoint.path, target)
        clear_leftovers(target, unfinished=not resume)
        check_destination(target, overwrite=overwrite)
        plan = make_plan(checkpoint, whole, writer_dialect)
        plan.warnings += doubts(checkpoint)
        input_scales: dict[str, float] = {}
        if input_amax is not None:
            input_scales, notes = resolve_input_scales(plan.quantized(), input_amax, shared=shared_globals)
            plan.warnings += notes
        job = _Conversion(
            source=str(src),
            checkpoint=checkpoint,
            dialect=writer_dialect,
            recipe=whole,
            format=format,
            calibration=tuple(calibration),
            plan=plan,
            transform=Transform(
                checkpoint=checkpoint,
                dialect=writer_dialect,
                input_scales=input_scales,
                shared_globals=shared_globals,
                tolerant=not plan.quantized(),
                weight_only=weight_only,
            ),
            fingerprint=checkpoint.fingerprint(),
            patterns=exclude + tuple(r.match for r in whole.rules if r.format in (KEEP, *DENSE_FORMATS)),
        )
        job.check_config()
        with CheckpointWriter(
            target,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
            resume=resume,
            request=job.request(max_shard_bytes),
        ) as writer:
            return job.write(writer, progress, jobs)


def check_combination(
    format: str,
    dialect: str,
    rule: str | None,
    *,
    block: tuple[int, int] | None = None,
    shared_globals: bool = True,
) -> Dialect:
    """The dialect that writes `format`. Raises ConfigError or FormatError for what cannot be combined."""
    chosen = get_dialect(dialect)
    writers: dict[str, list[str]] = {}
    for d in DIALECTS.values():
        for written in d.writes:
            writers.setdefault(written, []).append(d.name)
    if format not in writers:
        raise ConfigError(f"unknown format {format!r}", fix=f"choose one of: {', '.join(writers)}")
    if format not in chosen.writes:
        raise ConfigError(
            f"the {dialect} dialect writes {', '.join(chosen.writes) or 'nothing'}, not {format}",
            fix=f"use --dialect {' or '.join(writers[format])} for {format}",
        )
    if format in FORMATS:
        get_format(format).rule(rule)
        get_format(format).resolve_block(block)
    elif rule is not None:
        raise ConfigError(f"{format} has no scale rule, but rule={rule!r} was given", fix="leave the rule out")
    if not shared_globals and not (format in FORMATS and get_format(format).has_global):
        raise ConfigError(
            f"{format} has no global scales, but they were asked not to be shared",
            fix="leave --no-shared-globals (shared_globals=false) out",
        )
    return chosen


def check_request(
    format: str | None,
    dialect: str,
    rule: str | None,
    recipe: Recipe | None,
    *,
    block: tuple[int, int] | None = None,
    shared_globals: bool,
) -> Dialect:
    """The dialect that writes what a format and a recipe ask for. Raises ConfigError or FormatError."""
    if recipe is None and format is not None:
        return check_combination(format, dialect, rule, block=block, shared_globals=shared_globals)
    return get_dialect(dialect)


def _check_rules(recipe: Recipe, dialect: Dialect) -> None:
    """Every format that a rule asks for must be one that the dialect writes."""
    for rule in recipe.rules:
        if rule.quantizes and rule.format not in dialect.writes:
            raise ConfigError(
                f"{rule.where}: the {dialect.name} dialect writes {', '.join(dialect.writes) or 'nothing'}, not"
                f" {rule.format}",
                fix="choose another dialect, or another format for this rule",
            )


def _check_apart(source: Path, target: Path) -> None:
    """Neither folder may be, or lie within, the other: copying or replacing would destroy the source."""
    one, other = source.resolve(), target.resolve()
    if one == other:
        raise CheckpointError(f"source and destination are the same folder: {target}", fix="choose another destination")
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise CheckpointError(f"{source} and {target} lie within each other", fix="choose a destination elsewhere")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """One run: the open source and the decisions."""

    source: str
    checkpoint: Checkpoint
    dialect: Dialect
    recipe: Recipe
    format: str | None
    calibration: tuple[str, ...]
    plan: Plan
    transform: Transform
    fingerprint: str
    patterns: tuple[str, ...]

    def request(self, max_shard_bytes: int) -> dict[str, Any]:
        """All that decides the written bytes, by words for a message."""
        scales = json.dumps(sorted(self.transform.input_scales.items()))
        return {
            "source fingerprint": self.fingerprint,
            "dialect": self.dialect.name,
            "recipe": [_describe(rule) for rule in self.recipe.rules],
            "input scales": hashlib.sha256(scales.encode()).hexdigest()[:16] if self.transform.input_scales else "none",
            "shared global scales": self.transform.shared_globals,
            "weight-only": self.transform.weight_only,
            "shard size": max_shard_bytes,
            "workbench": workbench.__version__,
        }

    def check_config(self) -> None:
        """Refuse before the work what the dialect's config cannot say (several formats, say)."""
        self.dialect.config_files(self.checkpoint.config, self._written([]))

    def write(self, writer: CheckpointWriter, progress: Progress | None, jobs: int) -> ConversionResult:
        """Every tensor in layer order, then the configs, the card and the side files."""
        units = make_units(self.plan.steps, self.dialect, shared=self.transform.shared_globals)
        outcomes = [_read_outcome(row) for note in writer.finished for row in note]
        total = len(self.plan.steps)
        for tensors, made in _convert_all(self.transform, units[len(writer.finished) :], jobs):
            writer.add(tensors, note=[asdict(outcome) for outcome in made])
            del tensors
            for outcome in made:
                outcomes.append(outcome)
                if progress is not None:
                    progress(len(outcomes), total, outcome.name)
        written = self._written(outcomes)
        for name, content in self.dialect.config_files(self.checkpoint.config, written).items():
            writer.write_json(name, content)
        warnings = [*self.plan.warnings, *_outcome_warnings(outcomes)]
        writer.write_text("README.md", write_card(self._card(writer, written, outcomes, warnings)))
        _copy_side_files(self.checkpoint, writer)

        def names(action: str) -> tuple[str, ...]:
            return tuple(o.name for o in outcomes if o.action == action)

        return ConversionResult(
            path=writer.path,
            format="+".join(dict.fromkeys(written.formats.values())) or self._dense_format(),
            dialect=self.dialect.name,
            quantized=names("quantize"),
            copied=names("copy"),
            decoded=names("decode"),
            kept=names("keep"),
            warnings=tuple(warnings),
            outcomes=tuple(outcomes),
            source_bytes=self.checkpoint.total_bytes(),
            written_bytes=writer.total_bytes,
        )

    def _dense_format(self) -> str:
        return self.format if self.format in DENSE_FORMATS else "bf16"

    def _written(self, outcomes: Sequence[Outcome]) -> Written:
        """What the config is to say; before the work (no outcomes) as far as it is known."""
        formats = self.plan.quantized()
        chosen = {s.format: s for s in reversed(self.plan.steps) if s.action == "quantize"}
        sizes = [(o.name, o.format, o.block) for o in outcomes if o.block is not None]
        if not outcomes:
            open_blocks = [s for s in self.plan.steps if s.format in FORMATS and VARIABLE in _block_of(s)]
            sizes = [(s.entry.name, s.format, get_format(s.format).resolve_block(s.block)) for s in open_blocks]
        blocks: dict[str, tuple[int, int]] = {}
        for name, format, block in sizes:
            if blocks.setdefault(format, block) != block:
                raise CheckpointError(
                    f"{name} has {format} blocks of {block}, others have {blocks[format]}; a config says one size a"
                    " format",
                    fix="give the block (--block, --group-size), so that all are quantized alike",
                )
        static = any(o.input_scale for o in outcomes)
        if not outcomes:
            static = any(formats[m] in ACTIVATION_MAX for m in self.transform.input_scales)
        return Written(
            formats=formats,
            excludes=tuple(self.plan.excluded_modules),
            patterns=self.patterns,
            rules={f: get_format(f).rule(s.rule).value for f, s in chosen.items()},
            blocks=blocks,
            zero_points=frozenset(o.format for o in outcomes if o.zero_points),
            static_activations=static,
            weight_only=self.transform.weight_only,
            dtype=self._dense_format(),
        )

    def _card(
        self, writer: CheckpointWriter, written: Written, outcomes: Sequence[Outcome], warnings: Sequence[str]
    ) -> Card:
        return Card(
            name=writer.path.name,
            source=self.source if self.source.startswith("hf:/") else self.checkpoint.path.name,
            source_readme=self._source_readme(),
            source_dialect=self.checkpoint.dialect,
            fingerprint=self.fingerprint,
            dialect=self.dialect.name,
            format=self.format,
            recipe=self.recipe,
            written=written,
            shared_globals=self.transform.shared_globals,
            calibration=self.calibration,
            source_bytes=self.checkpoint.total_bytes(),
            written_bytes=writer.total_bytes,
            outcomes=tuple(outcomes),
            warnings=tuple(warnings),
        )

    def _source_readme(self) -> str | None:
        path = dict(self.checkpoint.folder.side_files()).get("README.md")
        return None if path is None else path.read_text(encoding="utf-8", errors="replace")


def _convert_all(
    transform: Transform, units: Sequence[Unit], jobs: int
) -> Iterator[tuple[dict[str, torch.Tensor], list[Outcome]]]:
    """Results in the order of the units; at most jobs + 1 units are in memory."""
    if jobs == 1:
        yield from map(transform.convert, units)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        pending: deque[Future[tuple[dict[str, torch.Tensor], list[Outcome]]]] = deque()
        try:
            for unit in units:
                pending.append(pool.submit(transform.convert, unit))
                if len(pending) > jobs:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _block_of(step: Step) -> tuple[int, int]:
    spec = get_format(step.format)
    return spec.rows, spec.block


def _describe(rule: Rule) -> str:
    """What a recipe's rule does, its format's default scale rule and block spelled out."""
    if not rule.quantizes:
        return f"{rule.match} {rule.format or 'unquantized'}"
    spec = get_format(rule.format)
    rows, columns = spec.resolve_block(rule.block)
    return f"{rule.match} {rule.format} (rule {spec.rule(rule.rule).value}, block {rows}x{columns})"


def _read_outcome(row: dict[str, Any]) -> Outcome:
    outcome = Outcome(**row)
    return outcome if outcome.block is None else replace(outcome, block=(outcome.block[0], outcome.block[1]))


def _outcome_warnings(outcomes: Sequence[Outcome]) -> Iterator[str]:
    faults = [o.fault for o in outcomes if o.fault]
    if faults:
        yield f"{len(faults)} broken tensors were written as they are (first: {faults[0]})"
    dead = [o for o in outcomes if o.action == "quantize" and 0 < o.power <= o.error]
    if dead:
        yield f"nothing is left of {len(dead)} tensors: their error is as large as they are (first: {dead[0].name})"
    doubted = [o for o in outcomes if o.doubt]
    if doubted:
        more = f", {doubted[1].name}" if len(doubted) > 1 else ""
        yield (
            f"lint will reject the scales of {len(doubted)} tensors (global-scale-range): {doubted[0].doubt}"
            f" ({doubted[0].name}{more}{', ...' if len(doubted) > 2 else ''})"
        )
    cast = [o for o in outcomes if o.cast]
    if cast:
        yield f"{len(cast)} tensors were carried from mxfp4 to nvfp4 by their codes, without rounding"
    lossy = [o for o in cast if o.changed]
    if lossy:
        yield (
            f"{len(lossy)} of them lose something: their block scales (those of fused projections together) span more"
            f" than 2**17 (first: {lossy[0].name}, {lossy[0].changed} values changed)"
        )


def _copy_side_files(checkpoint: Checkpoint, writer: CheckpointWriter) -> None:
    """Carry over what holds no weights; the source's README.md under the first free name of README.source.md, ..."""
    files = dict(checkpoint.folder.side_files())
    for name, path in files.items():
        if name not in NOT_COPIED and not name.endswith(".index.json"):
            writer.copy_file(path, name)
    if "README.md" in files:
        kept, number = "README.source.md", 1
        while kept in files:
            number += 1
            kept = f"README.source-{number}.md"
        writer.copy_file(files["README.md"], kept)
