"""Convert the tensors of a checkpoint, unit by unit: what is in memory at once, and the work that threads share.

    transform = Transform(checkpoint=checkpoint, dialect=dialect, input_scales={}, shared_globals=True)
    for unit in make_units(plan.steps, dialect, shared=True):
        tensors, outcomes = transform.convert(unit)      # stored tensors by name; what became of each

A unit is one tensor, the projections that share a global scale (gate and up, q/k/v), or what the dialect stores as one
tensor (a layer's experts). Its sources are read once, in their stored form, and decoded one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from workbench.errors import CheckpointError, FormatError
from workbench.formats import QuantizedTensor, get_format, global_scale, mxfp4_to_nvfp4, quantize
from workbench.kernels.tables import E8M0_NAN, ScaleRule

from .dialects import Dialect
from .lint_scales import scale_doubt
from .names import fusion_group
from .open import Checkpoint, Entry
from .selection import Step

DENSE_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_BROKEN = "the source is broken (`workbench lint` lists what else is): export it again"
_CHUNK = 1 << 20  # values that are summed in float64 at a time
# Tools that give every matrix its own global scale. The others share one over the projections that servers fuse.
_UNSHARED_RULES = {ScaleRule.QUARK_F2F}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Steps that are converted together. groups: those that share a global scale, one after the other. bundle: the
    dialect's key where it stores all of them as one."""

    groups: tuple[tuple[Step, ...], ...]
    bundle: str | None = None

    @property
    def steps(self) -> list[Step]:
        return [step for group in self.groups for step in group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one tensor. action: a step's, after the fact (a copy may have had to be quantized anew).

    kind: its projection, for statistics. power, error: sums of w^2 and of (w - stored)^2 in float64, of a quantized
    tensor; changed: how many of its values differ. cast: carried from mxfp4 to nvfp4 instead of rounded. block: (rows,
    columns) where the format leaves them open. input_scale, zero_points: whether they are stored. fault: what was wrong
    with a source that was decoded, or kept, all the same. doubt: what lint will reject of its written scales.
    """

    name: str
    action: str
    format: str = ""
    kind: str = ""
    power: float = 0.0
    error: float = 0.0
    changed: int = 0
    cast: bool = False
    block: tuple[int, int] | None = None
    input_scale: bool = False
    zero_points: bool = False
    fault: str = ""
    doubt: str = ""


def make_units(steps: list[Step], dialect: Dialect, *, shared: bool) -> list[Unit]:
    """Steps in order, those that belong together at the place of the first."""
    units: dict[str, dict[str, list[Step]]] = {}
    for step in steps:
        name = step.entry.name
        bundle = dialect.bundle(name)
        group = fusion_group(step.entry.module) if shared and _shares_global(step) else None
        group_key = name if group is None else f"{group} {step.format} {step.rule}"
        unit_key = f"bundle {bundle}" if bundle is not None else group_key
        units.setdefault(unit_key, {}).setdefault(group_key, []).append(step)
    return [
        Unit(
            groups=tuple(tuple(group) for group in groups.values()),
            bundle=key.removeprefix("bundle ") if key.startswith("bundle ") else None,
        )
        for key, groups in units.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """How units are converted. input_scales: module -> decode multiplier of static activations.

    tolerant: decode what is not finite as it is, and say so in the outcome; otherwise it is refused. weight_only: input
    scales of copied tensors are left out.
    """

    checkpoint: Checkpoint
    dialect: Dialect
    input_scales: Mapping[str, float]
    shared_globals: bool = True
    tolerant: bool = False
    weight_only: bool = False

    def convert(self, unit: Unit) -> tuple[dict[str, torch.Tensor], list[Outcome]]:
        """Stored tensors by name, and an outcome a step. Raises CheckpointError, FormatError naming the tensor."""
        members: dict[str, QuantizedTensor | torch.Tensor] = {}
        outcomes = []
        for group in unit.groups:
            stored = {step.entry.name: self.checkpoint.read(step.entry.name) for step in group}
            cast = self._cast(group, stored)
            shared = None if cast else self._shared_scale(group, stored)
            for step in group:
                name = step.entry.name
                value, outcome = self._convert(step, stored.pop(name), shared, cast.get(name))
                members[step.entry.name] = value
                outcomes.append(outcome)
        if unit.bundle is not None:
            return self.dialect.disassemble_bundle(unit.bundle, members), outcomes
        tensors: dict[str, torch.Tensor] = {}
        for name, value in members.items():
            tensors |= self.dialect.disassemble(name, value) if isinstance(value, QuantizedTensor) else {name: value}
        return tensors, outcomes

    def _convert(
        self,
        step: Step,
        source: QuantizedTensor | torch.Tensor,
        shared: torch.Tensor | None,
        cast: QuantizedTensor | None,
    ) -> tuple[QuantizedTensor | torch.Tensor, Outcome]:
        entry = step.entry
        if step.action not in ("quantize", "copy"):
            value, fault = self._dense(step, source)
            return value, Outcome(name=entry.name, action=step.action, fault=fault)
        copied = step.action == "copy" and isinstance(source, QuantizedTensor) and self._is_portable(step, source)
        power = error = 0.0
        changed = 0
        if copied and isinstance(source, QuantizedTensor):
            check_scales(entry, source)
            q = source
        else:
            w_nk = self._decode(entry, source) if isinstance(source, QuantizedTensor) else source
            q = cast or quantize(w_nk, step.format, step.rule, block=step.block, global_scale=shared, name=entry.name)
            power, error, changed = _compare(w_nk, q)
        q = self._with_input_scale(entry, q)
        outcome = Outcome(
            name=entry.name,
            action="copy" if copied else "quantize",
            format=q.format,
            kind=projection_kind(entry),
            power=power,
            error=error,
            changed=changed,
            cast=cast is not None,
            block=q.block,
            input_scale=q.input_scale is not None,
            zero_points=q.zero_points is not None,
            doubt="" if copied else scale_doubt(q),
        )
        return q, outcome

    def _cast(
        self, group: tuple[Step, ...], stored: Mapping[str, QuantizedTensor | torch.Tensor]
    ) -> dict[str, QuantizedTensor]:
        """MXFP4 sources on their way to NVFP4 by the default rule: the same codes under other scales, of which fused
        projections share the global one. Empty for every other group."""
        sources: list[QuantizedTensor] = []
        for step in group:
            source = stored[step.entry.name]
            is_mxfp4 = isinstance(source, QuantizedTensor) and source.format == "mxfp4"
            if step.action != "quantize" or step.format != "nvfp4" or not is_mxfp4:
                return {}
            assert isinstance(source, QuantizedTensor)
            if step.rule not in (None, get_format("nvfp4").default_rule.value) or source.pre_quant_scale is not None:
                return {}
            check_scales(step.entry, source)
            sources.append(source)
        if len({q.shape[1] for q in sources}) > 1:
            return {}  # no server can fuse them: rounded one by one, as from any other source
        rows = [q.shape[0] for q in sources]
        together = QuantizedTensor(
            format="mxfp4",
            codes=torch.cat([q.codes for q in sources]),
            block_scales=torch.cat([q.block_scales for q in sources]),
            global_scale=None,
            shape=(sum(rows), sources[0].shape[1]),
        )
        cast, _ = mxfp4_to_nvfp4(together)
        codes, scales = torch.split(cast.codes, rows), torch.split(cast.block_scales, rows)
        return {
            step.entry.name: replace(cast, codes=codes[i], block_scales=scales[i], shape=sources[i].shape)
            for i, step in enumerate(group)
        }

    def _is_portable(self, step: Step, q: QuantizedTensor) -> bool:
        """Whether a tensor in the target format can be copied: in the block asked for, and holding nothing beside its
        scales that only its own dialect writes."""
        if step.block is not None and q.block not in (None, step.block):
            return False
        own = self.checkpoint.dialect == self.dialect.name
        return own or (q.group_index is None and q.pre_quant_scale is None)

    def _with_input_scale(self, entry: Entry, q: QuantizedTensor) -> QuantizedTensor:
        measured = self.input_scales.get(entry.module)
        if measured is not None:
            return replace(q, input_scale=torch.tensor(measured, dtype=torch.float32))
        if q.input_scale is None or self.weight_only:
            return replace(q, input_scale=None)
        if not bool((q.input_scale.isfinite() & (q.input_scale > 0)).all()):
            raise CheckpointError(
                f"{entry.name} in {entry.file} has the input scale {q.input_scale.flatten()[0].item()}, expected a"
                " positive finite multiplier",
                fix="calibrate (--calibrate, --activations), or leave input scales out (--weight-only)",
            )
        return q

    def _shared_scale(
        self, group: tuple[Step, ...], stored: Mapping[str, QuantizedTensor | torch.Tensor]
    ) -> torch.Tensor | None:
        """The global scale of a fused group: its largest amax's. None for a tensor that stands alone."""
        members = [step for step in group if step.action == "quantize" and _shares_global(step)]
        if len(members) < 2 or not self.shared_globals:
            return None
        amax = torch.stack([self._amax(step.entry, stored[step.entry.name]) for step in members]).amax()
        return global_scale(members[0].format, members[0].rule, amax)

    def _amax(self, entry: Entry, source: QuantizedTensor | torch.Tensor) -> torch.Tensor:
        values = self._decode(entry, source) if isinstance(source, QuantizedTensor) else source
        low, high = values.aminmax() if values.numel() else (values.new_zeros(()), values.new_zeros(()))
        amax = torch.maximum(-low, high).float()
        if not bool(amax.isfinite()):
            raise FormatError(
                f"{entry.name} holds NaN or infinite values; no low-bit code represents them",
                fix="repair the source checkpoint, or exclude this tensor (--exclude)",
            )
        return amax

    def _decode(self, entry: Entry, q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of a quantized source tensor. Raises CheckpointError when they are not all finite."""
        check_scales(entry, q)
        values = q.effective(dtype)
        bad = _count_nonfinite(values)
        if bad:
            raise CheckpointError(_nonfinite_fault(entry, bad, values), fix=_BROKEN)
        return values

    def _dense(self, step: Step, source: QuantizedTensor | torch.Tensor) -> tuple[torch.Tensor, str]:
        """A tensor that is written unquantized, and what was wrong with it. A decoding target casts matrices to its
        dtype; a float32 vector (a router's bias, a norm) stays float32 beside bf16 matrices, as model code expects."""
        target = DENSE_DTYPES.get(step.format)
        if isinstance(source, QuantizedTensor):
            if not self.tolerant:
                return self._decode(step.entry, source, target or torch.bfloat16), ""
            fault = find_scale_fault(step.entry, source)
            values = source.effective(target or torch.bfloat16)
            bad = _count_nonfinite(values)
            return values, fault or (_nonfinite_fault(step.entry, bad, values) if bad else "")
        if not source.is_floating_point():
            return source, ""
        vector = source.dim() < 2 and source.dtype == torch.float32
        values = source if target is None or vector else source.to(target)
        bad = _count_nonfinite(values)
        return values, _nonfinite_fault(step.entry, bad, values, "is written with") if bad else ""


def projection_kind(entry: Entry) -> str:
    """What a tensor's error is filed under: "experts.gate_proj", "shared_experts.up_proj", "q_proj"."""
    if entry.expert >= 0:
        return f"experts.{entry.projection}"
    return f"shared_experts.{entry.projection}" if entry.shared_expert else entry.projection


def check_scales(entry: Entry, q: QuantizedTensor) -> None:
    """Refuse scales that no producer means. Raises CheckpointError naming tensor and file."""
    fault = find_scale_fault(entry, q)
    if fault:
        raise CheckpointError(fault, fix=_BROKEN)


def find_scale_fault(entry: Entry, q: QuantizedTensor) -> str:
    """What is wrong with a tensor's scales: a global that is no positive finite number, NaN or infinite block scales;
    "" for none. Raises CheckpointError for a negative one: it would turn signs, and no producer writes it."""
    where = f"{entry.name} in {entry.file}"
    scale = q.global_scale
    negative = 0 if q.block_scales.dtype == torch.uint8 else int((q.block_scales.float() < 0).sum())
    if negative:
        raise CheckpointError(f"{where} has {negative} negative block scales of {q.block_scales.numel()}", fix=_BROKEN)
    if scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
        fault = f"{where} has the global scale {scale.flatten()[0].item()}, expected a positive finite multiplier"
        if bool((scale < 0).any()):
            raise CheckpointError(fault, fix=_BROKEN)
        return fault
    bytes_ = q.block_scales.dtype == torch.uint8
    bad = q.block_scales == E8M0_NAN if bytes_ else ~q.block_scales.float().isfinite()
    if bool(bad.any()):
        return f"{where} has {int(bad.sum())} NaN or infinite values among its {bad.numel()} block scales"
    return ""


def _shares_global(step: Step) -> bool:
    if step.action not in ("quantize", "copy") or not get_format(step.format).has_global:
        return False
    return get_format(step.format).rule(step.rule) not in _UNSHARED_RULES


def _count_nonfinite(values: torch.Tensor) -> int:
    """The sum of finite values is finite unless it overflows: counted only when it is not."""
    if bool(values.sum(dtype=torch.float64).isfinite()):
        return 0
    return int((~values.isfinite()).sum())


def _nonfinite_fault(entry: Entry, bad: int, values: torch.Tensor, verb: str = "decodes to") -> str:
    return f"{entry.name} in {entry.file} {verb} NaN or infinite values ({bad} of {values.numel()})"


def _compare(w_nk: torch.Tensor, q: QuantizedTensor) -> tuple[float, float, int]:
    """Sums of w^2 and (w - q)^2 in float64, the same for any number of threads, and how many values differ."""
    w, w_hat = w_nk.reshape(-1), q.dequantize().reshape(-1).numpy()
    power = error = 0.0
    changed = 0
    for start in range(0, len(w_hat), _CHUNK):
        part = w[start : start + _CHUNK].double().numpy()
        difference = part - w_hat[start : start + _CHUNK]
        power += float(np.square(part).sum())
        error += float(np.square(difference).sum())
        changed += int(np.count_nonzero(difference))
    return power, error, changed
