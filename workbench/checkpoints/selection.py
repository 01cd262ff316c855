"""What a conversion does with each tensor of a checkpoint: quantize, copy, decode, keep or drop it.

    plan = make_plan(checkpoint, recipe, dialect)      # recipe.py
    for step in plan.steps:
        print(step.entry.name, step.action, step.format)

Decided from headers alone, so that what cannot be written is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from workbench.errors import CheckpointError, FormatError
from workbench.formats import get_format
from workbench.kernels.elements import ELEMENTS

from .dialects import Dialect
from .match import unmatched_patterns
from .names import fusion_group, is_embedding, is_lm_head, is_router, parse_name
from .open import Checkpoint, Entry
from .recipe import DENSE_FORMATS, KEEP, Recipe, Rule

FLOAT_FORMATS = {"bf16", "f16", "f32", "f64"}
WIDEST_PADDING = 4096  # of a block over a smaller matrix; readers take no larger ones either
# KV-cache scales belong to the source's own KV quantization, which the written config does not declare.
KV_SCALES = {"k_scale", "v_scale", "kv_scale", "q_scale", "output_scale", "prob_output_scale"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What becomes of one entry. action: "quantize"; "copy": quantized in `format` already; "decode": quantized in the
    source, dense here; "keep": dense in both. format: of what is written ("" : a kept tensor's own dtype). rule, block:
    of a quantization, None: the format's default."""

    entry: Entry
    action: str
    format: str = ""
    rule: str | None = None
    block: tuple[int, int] | None = None


@dataclass(kw_only=True, slots=True)
class Plan:
    """A step for every entry that is written, in layer order. dropped: entries that are not.

    excluded_modules: what the written config lists as unquantized. warnings: what to tell the user.
    """

    steps: list[Step]
    dropped: list[Entry]
    excluded_modules: list[str]
    warnings: list[str] = field(default_factory=list)

    def quantized(self) -> dict[str, str]:
        """Module -> format of everything that is written quantized, in layer order."""
        return {s.entry.module: s.format for s in self.steps if s.action in ("quantize", "copy")}


def linear_weights(checkpoint: Checkpoint) -> list[Entry]:
    """The entries that quantization is about: 2-D `*.weight` of linear layers inside the model's layers.

    Not embeddings, lm_head, routers, nor anything outside `layers.<i>` (a vision tower, an MTP head).
    """
    return [
        e
        for e in checkpoint.entries()
        if e.layer >= 0
        and _is_matrix(e)
        and not (is_embedding(e.module) or is_lm_head(e.module) or is_router(e.module) or "norm" in e.projection)
    ]


def converted_at_load(entries: Iterable[Entry]) -> list[Entry]:
    """The quantized matrices of linear layers that requantization converts as a checkpoint loads: all, but in mixed
    precision only the four-bit ones, as published pipelines do; the others are decoded."""
    quantized = [e for e in entries if e.quantized and e.projection]
    return [e for e in quantized if ELEMENTS[get_format(e.format).element].bits == 4] or quantized


def fused_groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The matrices that servers run as one (gate/up, q/k/v, q_a/kv_a), group by group."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        group = fusion_group(entry.module) if entry.projection else None
        if group is not None:
            groups.setdefault(group, []).append(entry)
    return [members for members in groups.values() if len(members) > 1]


def make_plan(checkpoint: Checkpoint, recipe: Recipe, dialect: Dialect) -> Plan:
    """Decide for every entry. Raises CheckpointError when there is nothing to quantize or experts are fused stacks,
    FormatError for a weight that is empty, no float, or of a K that the format's block does not divide."""
    if recipe.formats():
        plan = _plan_quantization(checkpoint, recipe, dialect)
    else:  # decode everything
        format = recipe.rules[-1].format
        steps = [_dense_step(e, format) for e in checkpoint.entries()]
        plan = Plan(steps=steps, dropped=[], excluded_modules=[])
    plan.dropped = [s.entry for s in plan.steps if parse_name(s.entry.name).parameter in KV_SCALES]
    plan.steps = [s for s in plan.steps if parse_name(s.entry.name).parameter not in KV_SCALES]
    plan.excluded_modules = _excluded_modules(plan.steps)
    plan.warnings = list(_warnings(checkpoint, plan, recipe))
    return plan


def _plan_quantization(checkpoint: Checkpoint, recipe: Recipe, dialect: Dialect) -> Plan:
    entries = checkpoint.entries()
    scope = {e.name for e in linear_weights(checkpoint)}
    named = recipe.named_modules()
    scope |= {e.name for e in entries if e.module in named and _is_matrix(e)}
    choices = {e.name: recipe.choose(e.module) for e in entries}
    _refuse_fused_experts([e for e in entries if _may_quantize(choices[e.name])])
    steps = [_step(e, choices[e.name] if e.name in scope else None, dialect) for e in entries]
    if not any(s.action in ("quantize", "copy") for s in steps):
        raise CheckpointError(
            f"nothing to quantize in {checkpoint.path}: "
            + ("every linear layer is excluded" if scope else "it has no linear layer"),
            fix="loosen the exclude patterns" if scope else "expected 2-D weights named …layers.<i>.….weight",
        )
    return Plan(steps=steps, dropped=[], excluded_modules=[])


def _step(entry: Entry, rule: Rule | None, dialect: Dialect) -> Step:
    if rule is None or rule.format == "":
        return _dense_step(entry, "")
    if rule.format in DENSE_FORMATS:
        return _dense_step(entry, rule.format)
    if rule.format == KEEP:
        if entry.quantized and entry.format in dialect.writes:
            return Step(entry=entry, action="copy", format=entry.format)
        return _dense_step(entry, "")
    _check_block(entry, rule)
    if entry.format == rule.format:
        return Step(entry=entry, action="copy", format=rule.format, rule=rule.rule, block=rule.block)
    _check_quantizable(entry, rule)
    return Step(entry=entry, action="quantize", format=rule.format, rule=rule.rule, block=rule.block)


def _dense_step(entry: Entry, format: str) -> Step:
    return Step(entry=entry, action="decode" if entry.quantized else "keep", format=format)


def _warnings(checkpoint: Checkpoint, plan: Plan, recipe: Recipe) -> Iterator[str]:
    modules = {s.entry.module for s in plan.steps}
    unmatched = set(unmatched_patterns([r.match for r in recipe.rules if r.match != "*"], modules))
    for rule in recipe.rules:
        if rule.match in unmatched:
            kind = "exclude pattern" if not rule.format else f"{rule.where}: pattern"
            yield f"{kind} {rule.match!r} matches no module of {checkpoint.path.name}"
    formats = plan.quantized()
    entries = [s.entry for s in plan.steps]
    split = [g for g in fused_groups(entries) if len({formats.get(e.module, "") for e in g}) > 1]
    if split:
        yield (
            f"{len(split)} groups of projections that servers fuse are only partly quantized, or in several formats"
            f" (first: {', '.join(e.module for e in split[0])})"
        )
    copied = [s for s in plan.steps if s.action == "copy"]
    if copied:
        kinds = ", ".join(dict.fromkeys(s.format for s in copied))
        yield f"{len(copied)} tensors are {kinds} already and were copied unchanged (first: {copied[0].entry.name})"
    if plan.dropped:
        yield (
            f"{len(plan.dropped)} KV-cache scales were left out: the written config declares no KV quantization"
            f" (first: {plan.dropped[0].name})"
        )
    decoded = [s for s in plan.steps if s.action == "decode"]
    if decoded and formats:
        yield (
            f"{len(decoded)} tensors are quantized in the source and excluded here: they were decoded to bf16"
            f" (first: {decoded[0].entry.name})"
        )


def _check_quantizable(entry: Entry, rule: Rule) -> None:
    exclude = f"exclude it: --exclude '{entry.module}'"
    if not entry.quantized and entry.format not in FLOAT_FORMATS:
        raise FormatError(
            f"{entry.name} is {entry.format} {list(entry.shape)}; only floating-point weights are quantized",
            fix=exclude,
        )
    if 0 in entry.shape:
        raise FormatError(
            f"{entry.name} is empty (shape {list(entry.shape)}); there is nothing to quantize", fix=exclude
        )
    spec = get_format(rule.format)
    columns = spec.resolve_block(rule.block)[1]
    if columns and not spec.partial_blocks and entry.shape[-1] % columns:
        raise FormatError(
            f"{entry.name}: K = {entry.shape[-1]} is not a multiple of {rule.format}'s block of {columns}"
            f" (shape {list(entry.shape)})",
            fix=exclude,
        )


def _check_block(entry: Entry, rule: Rule) -> None:
    """Refuse a block that is far larger than the matrix: it would be filled up with zeros to whole blocks first."""
    rows, columns = get_format(rule.format).resolve_block(rule.block)
    for size, block, axis in zip(entry.shape, (rows, columns), "NK", strict=True):
        if block > max(size, WIDEST_PADDING):
            raise FormatError(
                f"{entry.name} is {list(entry.shape)}; blocks of {rows} x {columns} ({rule.format}) are larger than its"
                f" {axis} = {size}",
                fix=f"give blocks of at most {max(size, WIDEST_PADDING)}, or exclude it: --exclude '{entry.module}'",
            )


def _excluded_modules(steps: list[Step]) -> list[str]:
    """Modules to list as excluded: every unquantized matrix; a layer's experts by their container when all of them are.

    Plain names throughout: servers disagree on globs (vLLM's Quark reader knows none), not on names.
    """
    matrices = [s for s in steps if _is_matrix(s.entry)]
    partly = {_container(s.entry) for s in matrices if s.action in ("quantize", "copy")}
    names = [
        s.entry.module if s.entry.expert < 0 or _container(s.entry) in partly else _container(s.entry)
        for s in matrices
        if s.action in ("keep", "decode")
    ]
    return list(dict.fromkeys(names))


def _is_matrix(entry: Entry) -> bool:
    return len(entry.shape) == 2 and parse_name(entry.name).parameter == "weight"


def _container(entry: Entry) -> str:
    return entry.module.partition(f".experts.{entry.expert}.")[0] + ".experts"


def _may_quantize(rule: Rule | None) -> bool:
    return rule is not None and rule.quantizes


def _refuse_fused_experts(entries: list[Entry]) -> None:
    for entry in entries:
        if len(entry.shape) == 3 and ".experts." in entry.name:
            raise CheckpointError(
                f"{entry.name} is a fused 3-D expert stack {list(entry.shape)}; experts are quantized one by one",
                fix="split it into experts.<i>.{gate,up,down}_proj.weight, or exclude the layer and keep it dense",
            )
