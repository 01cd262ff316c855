"""Convert a checkpoint file to file: quantize, requantize or decode, one tensor in memory at a time.

    result = quantize_checkpoint("mini_kimi", "mini_kimi_nvfp4", format="nvfp4", dialect="modelopt",
                                 exclude=["*self_attn*"])

The source may be plain or quantized in any known dialect; a quantized source is decoded exactly in float32 and rounded
once more; tensors that are in the target format already are copied unchanged. What is quantized: the 2-D `*.weight` of
the layers' linear projections. What never is: embeddings, norms, biases, routers, lm_head, and whatever an exclude
pattern (`match.py`) covers; a quantized source tensor that is excluded is decoded to BF16 and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workbench.errors import CheckpointError, ConfigError, FormatError
from workbench.formats import FORMATS, QuantizedTensor, get_format, quantize
from workbench.kernels import reference
from workbench.kernels.tables import E8M0_NAN

from .calibration import resolve_input_scales
from .dialects import DIALECTS, Dialect, Written, get_dialect
from .files import check_path
from .names import fusion_group, parse_name
from .open import Checkpoint, Entry, open_checkpoint, resolve_path
from .selection import Plan, make_plan
from .writer import DEFAULT_SHARD_BYTES, CheckpointWriter, check_destination, clear_leftovers

DENSE_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
# Files of the source that are written anew or describe its shards.
NOT_COPIED = {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionResult:
    """What was written, by tensor name, and sentences to show the user (warnings).

    quantized: rounded to the format; copied: were in it already; decoded: quantized in the source, dense here;
    kept: dense in both.
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
    source_bytes: int
    written_bytes: int


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: str,
    dialect: str,
    exclude: Iterable[str] = (),
    rule: str | None = None,
    shared_globals: bool = True,
    input_amax: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> ConversionResult:
    """Write `src` to folder `dst` in `format` ("nvfp4", "mxfp4", "bf16", "f32") and `dialect`.

    dialect: "modelopt" for nvfp4, "quark" for mxfp4, "plain" for bf16 and f32. rule: scale rule (None: the format's
    default). shared_globals: gate/up, q/k/v and q_a/kv_a share one NVFP4 global scale, the largest amax's, as ModelOpt
    writes them (servers fuse them). input_amax: module -> largest activation magnitude; with it an `input_scale`
    (amax / 2688) is written for every quantized module, see `calibration.resolve_input_scales` for the modules without
    one. progress(done, total, name) is called after each tensor.

    Raises ConfigError for a combination that cannot be written, CheckpointError for the source or an occupied `dst`,
    FormatError naming the tensor that does not fit, OutputError when the disk is full. Nothing is left behind then.
    """
    writer_dialect = check_combination(format, dialect, rule, shared_globals=shared_globals)
    source, target = resolve_path(src), resolve_path(Path(dst))
    for path in (source, target):
        check_path(path)
    exclude = tuple(exclude)
    if exclude and format not in FORMATS:
        raise ConfigError(f"--format {format} decodes everything; nothing can be excluded", fix="leave --exclude out")
    _check_apart(source, target)
    clear_leftovers(target)
    check_destination(target, overwrite=overwrite)
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, format, exclude)
        input_scales: dict[str, float] = {}
        if input_amax is not None and format in FORMATS and get_format(format).has_global:
            modules = [e.module for e in (*plan.quantize, *plan.copy)]
            input_scales, notes = resolve_input_scales(modules, input_amax, shared=shared_globals)
            plan.warnings += notes
        with CheckpointWriter(target, overwrite=overwrite, max_shard_bytes=max_shard_bytes) as writer:
            job = _Conversion(
                checkpoint=checkpoint,
                format=format,
                dialect=writer_dialect,
                rule=rule,
                plan=plan,
                input_scales=input_scales,
                shared_scales=_SharedScales(checkpoint, plan.quantize if shared_globals else []),
            )
            return job.write(writer, progress)


def _check_apart(source: Path, target: Path) -> None:
    """Neither folder may be, or lie within, the other: copying or replacing would destroy the source."""
    one, other = source.resolve(), target.resolve()
    if one == other:
        raise CheckpointError(f"source and destination are the same folder: {target}", fix="choose another destination")
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise CheckpointError(f"{source} and {target} lie within each other", fix="choose a destination elsewhere")


def check_combination(format: str, dialect: str, rule: str | None, *, shared_globals: bool = True) -> Dialect:
    """The dialect that writes `format`. Raises ConfigError or FormatError for what cannot be combined."""
    chosen = get_dialect(dialect)
    writers = {f: d.name for d in DIALECTS.values() for f in d.writes}
    if format not in writers:
        raise ConfigError(f"unknown format {format!r}", fix=f"choose one of: {', '.join(writers)}")
    if format not in chosen.writes:
        raise ConfigError(
            f"the {dialect} dialect writes {', '.join(chosen.writes)}, not {format}",
            fix=f"use --dialect {writers[format]} for {format}",
        )
    if format in FORMATS:
        get_format(format).rule(rule)
    elif rule is not None:
        raise ConfigError(f"{format} has no scale rule, but rule={rule!r} was given", fix="leave the rule out")
    if not shared_globals and not (format in FORMATS and get_format(format).has_global):
        raise ConfigError(
            f"{format} has no global scales, but they were asked not to be shared",
            fix="leave --no-shared-globals (shared_globals=false) out",
        )
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversion:
    """One run: the open source, the decisions, and where scales come from."""

    checkpoint: Checkpoint
    format: str
    dialect: Dialect
    rule: str | None
    plan: Plan
    input_scales: Mapping[str, float]
    shared_scales: _SharedScales

    def write(self, writer: CheckpointWriter, progress: Progress | None) -> ConversionResult:
        """Every tensor in layer order, then the configs and side files."""
        names = {kind: {e.name for e in getattr(self.plan, kind)} for kind in ("quantize", "copy", "drop")}
        done: dict[str, list[str]] = {"quantized": [], "copied": [], "decoded": [], "kept": []}
        entries = [e for e in self.checkpoint.entries() if e.name not in names["drop"]]
        has_input_scale = False
        for number, entry in enumerate(entries, start=1):
            if entry.name in names["quantize"] or entry.name in names["copy"]:
                q = self._quantize(entry) if entry.name in names["quantize"] else self._copy(entry)
                has_input_scale |= q.input_scale is not None
                done["quantized" if entry.name in names["quantize"] else "copied"].append(entry.name)
                writer.add(self.dialect.disassemble(entry.name, q))
            else:
                done["decoded" if entry.quantized else "kept"].append(entry.name)
                writer.add({entry.name: self._dense(entry)})
            if progress is not None:
                progress(number, len(entries), entry.name)
        quantized = {parse_name(name).module: self.format for name in (*done["quantized"], *done["copied"])}
        written = Written(
            formats=quantized,
            excludes=tuple(self.plan.excluded_modules),
            static_activations=has_input_scale,
            dtype=self.format if self.format in DENSE_DTYPES else "bf16",
        )
        files = self.dialect.config_files(self.checkpoint.config, written)
        for name, content in files.items():
            writer.write_json(name, content)
        _copy_side_files(self.checkpoint.path, writer)
        return ConversionResult(
            path=writer.path,
            format=self.format,
            dialect=self.dialect.name,
            **{kind: tuple(found) for kind, found in done.items()},
            warnings=tuple(self.plan.warnings),
            source_bytes=self.checkpoint.total_bytes(),
            written_bytes=writer.total_bytes,
        )

    def _quantize(self, entry: Entry) -> QuantizedTensor:
        w_nk = self._decode(entry, torch.float32) if entry.quantized else self.checkpoint.read_dense(entry.name)
        shared = self.shared_scales.of(entry.module) if get_format(self.format).has_global else None
        q = quantize(w_nk, self.format, self.rule, global_scale=shared, name=entry.name)
        return replace(q, input_scale=self._input_scale(entry))

    def _copy(self, entry: Entry) -> QuantizedTensor:
        q = self.checkpoint.read(entry.name)
        assert isinstance(q, QuantizedTensor)
        _check_scales(entry, q)
        measured = self._input_scale(entry)
        return q if measured is None else replace(q, input_scale=measured)

    def _decode(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """The values of a quantized source tensor. Raises CheckpointError when they are not all finite."""
        q = self.checkpoint.read(entry.name)
        assert isinstance(q, QuantizedTensor)
        _check_scales(entry, q)
        values = q.effective(dtype)
        if not bool(values.isfinite().all()):
            raise CheckpointError(f"{entry.name} in {entry.file} decodes to NaN or infinite values", fix=_BROKEN_SCALES)
        return values

    def _input_scale(self, entry: Entry) -> torch.Tensor | None:
        value = self.input_scales.get(entry.module)
        return None if value is None else torch.tensor(value, dtype=torch.float32)

    def _dense(self, entry: Entry) -> torch.Tensor:
        """A tensor that stays unquantized. A decoding target casts matrices to its dtype; a float32 vector (a router's
        bias, a norm) stays float32 beside bf16 matrices, as model code expects it."""
        target = DENSE_DTYPES.get(self.format)
        if entry.quantized:
            return self._decode(entry, target or torch.bfloat16)
        value = self.checkpoint.read(entry.name)
        assert isinstance(value, torch.Tensor)
        if target is None or not value.is_floating_point():
            return value
        return value if value.dim() < 2 and value.dtype == torch.float32 else value.to(target)


_BROKEN_SCALES = "the source is broken (`workbench lint` lists what else is): export it again"


def _check_scales(entry: Entry, q: QuantizedTensor) -> None:
    """Refuse scales that no producer means: a global that is no positive finite number, NaN among the block scales."""
    scale = q.global_scale
    if scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(
            f"{entry.name} in {entry.file} has the global scale {scale.flatten()[0].item()}, expected a positive finite"
            " multiplier",
            fix=_BROKEN_SCALES,
        )
    nan = q.block_scales == E8M0_NAN if q.block_scales.dtype == torch.uint8 else q.block_scales.float().isnan()
    if bool(nan.any()):
        raise CheckpointError(
            f"{entry.name} in {entry.file} has {int(nan.sum())} NaN among its {nan.numel()} block scales",
            fix=_BROKEN_SCALES,
        )


class _SharedScales:
    """NVFP4 global scales shared over a fusion group: the largest amax of its members, read once a group."""

    def __init__(self, checkpoint: Checkpoint, entries: list[Entry]) -> None:
        self._checkpoint = checkpoint
        self._members: dict[str, list[str]] = {}
        self._scales: dict[str, torch.Tensor] = {}
        for entry in entries:
            group = fusion_group(entry.module)
            if group is not None:
                self._members.setdefault(group, []).append(entry.name)

    def of(self, module: str) -> torch.Tensor | None:
        """The shared decode multiplier, None for a module that stands alone. Raises FormatError for a NaN weight."""
        group = fusion_group(module)
        if group is None or len(self._members.get(group, ())) < 2:
            return None
        if group not in self._scales:
            amax = torch.stack([self._amax(name) for name in self._members[group]]).amax()
            self._scales[group] = reference.nvfp4_global_scale(amax)
        return self._scales[group]

    def _amax(self, name: str) -> torch.Tensor:
        amax = self._checkpoint.read_dense(name).abs().amax()
        if not bool(amax.isfinite()):
            raise FormatError(
                f"{name} holds NaN or infinite values; no FP4 code represents them",
                fix="repair the source checkpoint, or exclude this tensor (--exclude)",
            )
        return amax


def _copy_side_files(source: Path, writer: CheckpointWriter) -> None:
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and str(relative) not in NOT_COPIED and path.suffix not in WEIGHT_SUFFIXES:
            if path.name.endswith(".safetensors.index.json"):
                continue
            writer.copy_file(path, str(relative))
