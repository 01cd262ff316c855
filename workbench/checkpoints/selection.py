"""Which tensors of a checkpoint a conversion quantizes, and which it keeps, decodes or drops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from workbench.errors import CheckpointError, FormatError
from workbench.formats import FORMATS, get_format

from .match import matches, matches_any
from .names import fusion_group, is_embedding, is_lm_head, is_router, parse_name
from .open import Checkpoint, Entry

FLOAT_FORMATS = {"bf16", "f16", "f32", "f64"}
# KV-cache scales belong to the source's own KV quantization, which the written config does not declare.
KV_SCALES = {"k_scale", "v_scale", "kv_scale", "q_scale", "output_scale", "prob_output_scale"}


@dataclass(slots=True)
class Plan:
    """What becomes of each entry: quantize, copy (quantized in the target format already), drop; the rest stays dense.

    excluded_modules: what the written config lists as unquantized. warnings: what to tell the user.
    """

    quantize: list[Entry]
    copy: list[Entry]
    drop: list[Entry]
    excluded_modules: list[str]
    warnings: list[str] = field(default_factory=list)


def linear_weights(checkpoint: Checkpoint) -> list[Entry]:
    """The entries that quantization is about: 2-D `*.weight` of linear layers inside the model's layers.

    Not embeddings, lm_head, routers, nor anything outside `layers.<i>` (a vision tower, an MTP head).
    """
    return [
        e
        for e in checkpoint.entries()
        if e.layer >= 0
        and len(e.shape) == 2
        and parse_name(e.name).parameter == "weight"
        and not (is_embedding(e.module) or is_lm_head(e.module) or is_router(e.module) or "norm" in e.projection)
    ]


def fused_groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The matrices that servers run as one (gate/up, q/k/v, q_a/kv_a), group by group."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        group = fusion_group(entry.module) if entry.projection else None
        if group is not None:
            groups.setdefault(group, []).append(entry)
    return [members for members in groups.values() if len(members) > 1]


def make_plan(checkpoint: Checkpoint, format: str, exclude: tuple[str, ...]) -> Plan:
    """Decide for every entry. Raises CheckpointError when there is nothing to quantize or experts are fused stacks,
    FormatError for a weight that is empty, no float, or of a K that the format's block does not divide."""
    entries = checkpoint.entries()
    plan = Plan(quantize=[], copy=[], drop=[], excluded_modules=[])
    if format in FORMATS:
        _refuse_fused_experts(entries, exclude)
        scope = [e for e in linear_weights(checkpoint) if not matches_any(e.module, exclude)]
        plan.copy = [e for e in scope if e.format == format]
        plan.quantize = [e for e in scope if e.format != format]
        _check_quantizable(plan.quantize, format)
        if not scope:
            raise CheckpointError(
                f"nothing to quantize in {checkpoint.path}: "
                + ("every linear layer is excluded" if linear_weights(checkpoint) else "it has no linear layer"),
                fix="loosen the exclude patterns" if exclude else "expected 2-D weights named …layers.<i>.….weight",
            )
    plan.drop = [e for e in entries if parse_name(e.name).parameter in KV_SCALES]
    plan.excluded_modules = _excluded_modules(entries, {e.name for e in (*plan.quantize, *plan.copy)})
    plan.warnings = list(_warnings(checkpoint, plan, format, exclude))
    return plan


def _warnings(checkpoint: Checkpoint, plan: Plan, format: str, exclude: tuple[str, ...]) -> Iterator[str]:
    modules = {e.module for e in checkpoint.entries()}
    for pattern in exclude:
        if not any(matches(m, pattern) for m in modules):
            yield f"exclude pattern {pattern!r} matches no module of {checkpoint.path.name}"
    done = {e.name for e in (*plan.quantize, *plan.copy)}
    split = [
        group for group in fused_groups(checkpoint.entries()) if 0 < sum(e.name in done for e in group) < len(group)
    ]
    if split:
        yield (
            f"{len(split)} groups of projections that servers fuse are only partly quantized"
            f" (first: {', '.join(e.module for e in split[0])})"
        )
    if plan.copy:
        yield f"{len(plan.copy)} tensors are {format} already and were copied unchanged (first: {plan.copy[0].name})"
    if plan.drop:
        yield (
            f"{len(plan.drop)} KV-cache scales were left out: the written config declares no KV quantization"
            f" (first: {plan.drop[0].name})"
        )
    decoded = [e for e in checkpoint.entries() if e.quantized and e.name not in done]
    if decoded and format in FORMATS:
        yield (
            f"{len(decoded)} tensors are quantized in the source and excluded here: they were decoded to bf16"
            f" (first: {decoded[0].name})"
        )


def _check_quantizable(entries: list[Entry], format: str) -> None:
    block = get_format(format).block
    for entry in entries:
        if not entry.quantized and entry.format not in FLOAT_FORMATS:
            raise FormatError(
                f"{entry.name} is {entry.format} {list(entry.shape)}; only floating-point weights are quantized",
                fix=f"exclude it: --exclude '{entry.module}'",
            )
        if 0 in entry.shape:
            raise FormatError(
                f"{entry.name} is empty (shape {list(entry.shape)}); there is nothing to quantize",
                fix=f"exclude it: --exclude '{entry.module}'",
            )
        if entry.shape[-1] % block:
            raise FormatError(
                f"{entry.name}: K = {entry.shape[-1]} is not a multiple of {format}'s block of {block}"
                f" (shape {list(entry.shape)})",
                fix=f"exclude it: --exclude '{entry.module}'",
            )


def _excluded_modules(entries: list[Entry], quantized: set[str]) -> list[str]:
    """Modules to list as excluded: every unquantized matrix; a layer's experts by their container when all of them are.

    Plain names throughout: servers disagree on globs (vLLM's Quark reader knows none), not on names.
    """
    matrices = [e for e in entries if len(e.shape) == 2 and parse_name(e.name).parameter == "weight"]
    partly = {_container(e) for e in matrices if e.name in quantized}
    names = [
        e.module if e.expert < 0 or _container(e) in partly else _container(e)
        for e in matrices
        if e.name not in quantized
    ]
    return list(dict.fromkeys(names))


def _container(entry: Entry) -> str:
    return entry.module.partition(f".experts.{entry.expert}.")[0] + ".experts"


def _refuse_fused_experts(entries: list[Entry], exclude: tuple[str, ...]) -> None:
    for entry in entries:
        if len(entry.shape) == 3 and ".experts." in entry.name and not matches_any(entry.module, exclude):
            raise CheckpointError(
                f"{entry.name} is a fused 3-D expert stack {list(entry.shape)}; this version quantizes experts that are"
                " stored one by one",
                fix="split it into experts.<i>.{gate,up,down}_proj.weight, or exclude the layer and keep it dense",
            )
