"""The config block: groups of targets with one scheme each, the `ignore` list, and which scheme a module has.

    plan = read_plan(folder)
    plan.scheme_of("model.layers.0.mlp.up_proj")     # Scheme(format="nvfp4", block=None, activations="nvfp4"), or None

A target is a module's exact name, `re:` and a regex matched from the start, or a class name ("Linear"). The most
specific one decides, as in the tool: names, then regexes in alphabetical order, then classes; what `ignore` matches has
no scheme. A name covers that module alone, not what lies below it, and it is not respelled: `match.py` is more lenient.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import CheckpointError
from workbench.formats.table import WHOLE

from ...files import Folder
from ...match import compile_regex
from ...names import is_embedding
from ..base import Declaration, config_table, find_config_block, string_list

PACKINGS = (
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "float-quantized",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
    "fakequant",
)
Block = tuple[int, int]

_REGEX = "re:"
_CLASS_NAME = re.compile(r"[A-Z]\w*")
# A block within text_config is about the language model only; these towers stand beside it.
_TOWERS = {
    "vision_tower",
    "visual",
    "vision_model",
    "audio_tower",
    "mm_projector",
    "multi_modal_projector",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """What one group says of its modules. format: canonical. block: (rows, columns) that share a scale, None where the
    format knows. activations: canonical format they are rounded to, "" none or unknown."""

    format: str
    block: Block | None = None
    activations: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A parsed config block. packing: the producer's word at the top. targets: target -> scheme, the most specific
    first. patterns: those of the targets that are regexes, compiled. ignored_names, ignored_patterns: `ignore`, split
    (there can be tens of thousands of names). prefix: of the language model's modules, where the block stands in
    text_config and names them without it. kv_cache: "" or a word like "FP8". conflicts: see `Declaration`."""

    where: str
    packing: str
    targets: Mapping[str, Scheme]
    patterns: Mapping[str, re.Pattern[str]]
    ignore: tuple[str, ...]
    ignored_names: frozenset[str]
    ignored_patterns: tuple[re.Pattern[str], ...]
    prefix: str = ""
    kv_cache: str = ""
    conflicts: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear layer or embedding; None where it has none, or is ignored."""
        if self.is_ignored(module):
            return None
        module = module.removeprefix(self.prefix)
        if module in self.targets:
            return self.targets[module]
        target = next((t for t, pattern in self.patterns.items() if pattern.match(module)), _class_of(module))
        return self.targets.get(target)

    def is_ignored(self, module: str) -> bool:
        names = {module, module.removeprefix(self.prefix)}
        return (
            not names.isdisjoint(self.ignored_names)
            or _class_of(module) in self.ignored_names
            or any(pattern.match(name) for pattern in self.ignored_patterns for name in names)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetDeclaration(Declaration):
    """A declaration that asks the plan: exact names, regexes, classes."""

    plan: Plan | None = field(default=None, repr=False)

    def expects_quantized(self, module: str) -> bool:
        return bool(self.format_of(module))

    def format_of(self, module: str) -> str:
        scheme = self.plan.scheme_of(module) if self.plan is not None else None
        return scheme.format if scheme is not None else ""


def read_plan(folder: Folder) -> Plan | None:
    """Parse the folder's config block; None when it has none.

    Raises CheckpointError for a block that is broken, a format, a number type or a strategy that is not read.
    """
    block = find_config_block(folder.config)
    if block is None:
        return None
    where = "config.json quantization_config"
    packing = _read_packing(block.get("format"), f"{where}.format", default="fakequant")
    _refuse_sparsity(block, where)
    groups = config_table(block, "config_groups", where, of="groups")
    schemes: dict[str, Scheme] = {}
    conflicts = []
    for name, group in groups.items():
        here = f"{where}.config_groups[{name!r}]"
        if not isinstance(group, dict):
            raise CheckpointError(
                f"{here} is {repr(group)[:80]}, expected a scheme with targets, weights and input_activations",
                fix="a preset's name alone is read while a model is made, not from a checkpoint: write the scheme out",
            )
        scheme = _read_scheme(group, packing, here)
        for target in string_list(group.get("targets"), f"{here}.targets"):
            if scheme is None:
                continue  # attention or KV cache only
            if schemes.get(target, scheme) != scheme:
                conflicts.append(f"{where}: two groups target {target!r}; the last one, {name}, is taken")
            schemes[target] = scheme
    ignore = string_list(block.get("ignore"), f"{where}.ignore") + _other_towers(folder)
    targets = {t: schemes[t] for t in sorted(schemes, key=_specificity)}
    return Plan(
        where=where,
        packing=packing,
        targets=targets,
        patterns={t: compile_regex(t, f"{where}.config_groups:") for t in targets if t.startswith(_REGEX)},
        ignore=ignore,
        ignored_names=frozenset(i for i in ignore if not i.startswith(_REGEX)),
        ignored_patterns=tuple(compile_regex(i, f"{where}.ignore:") for i in ignore if i.startswith(_REGEX)),
        prefix="language_model." if _stands_in_text_config(folder) else "",
        kv_cache=_read_kv_cache(block.get("kv_cache_scheme"), f"{where}.kv_cache_scheme"),
        conflicts=tuple(conflicts),
    )


def declare_plan(plan: Plan) -> TargetDeclaration:
    """The plan as the declaration that lint, conversion and servers ask."""
    schemes = list(plan.targets.values())
    formats = {s.format for s in schemes}
    activations = {s.activations for s in schemes}
    return TargetDeclaration(
        files=(plan.where,),
        algorithm=plan.packing if schemes else "",
        format=formats.pop() if len(formats) == 1 else "",
        excludes=plan.ignore,
        modules={target: s.format for target, s in plan.targets.items() if target != "Linear"},
        listed_only="Linear" not in plan.targets,
        weight_only=frozenset(target for target, s in plan.targets.items() if not s.activations),
        activations=activations.pop() if len(activations) == 1 else "",
        kv_cache=plan.kv_cache,
        conflicts=plan.conflicts,
        plan=plan,
    )


def _specificity(target: str) -> tuple[int, str]:
    if target.startswith(_REGEX):
        return 1, target
    return (2 if _CLASS_NAME.fullmatch(target) else 0), target


def _class_of(module: str) -> str:
    return "Embedding" if is_embedding(module) else "Linear"


def _read_packing(value: Any, where: str, default: str) -> str:
    packing = default if value is None else value
    if packing not in PACKINGS:
        raise CheckpointError(
            f"{where} is {repr(packing)[:80]}, which this version does not read",
            fix=f"known: {', '.join(PACKINGS)}; decompress the checkpoint with its own tool first",
        )
    return str(packing)


def _refuse_sparsity(block: Mapping[str, Any], where: str) -> None:
    kind = config_table(block, "sparsity_config", where, of="settings").get("format", "dense")
    if kind != "dense":
        raise CheckpointError(
            f"{where}.sparsity_config has the format {repr(kind)[:80]}: compressed zeros are not read",
            fix="decompress the checkpoint with compressed-tensors 0.14 or older",
        )


def _read_scheme(group: Mapping[str, Any], packing: str, where: str) -> Scheme | None:
    """A group's scheme; None for a group without weights."""
    own = _read_packing(group.get("format"), f"{where}.format", default=packing)
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        return None
    found = _canonical_format(weights, own, f"{where}.weights")
    if found is None:
        raise CheckpointError(
            f"{where}.weights is {_describe(weights)}: not read by this version",
            fix="read: float4 (groups of 16 or 32), float6 (groups of 32), float8, int4 and int8 weights",
        )
    known = None if inputs is None else _canonical_format(inputs, "", f"{where}.input_activations")
    return Scheme(format=found[0], block=found[1], activations=known[0] if known else "")


def _canonical_format(args: Any, packing: str, where: str) -> tuple[str, Block | None] | None:
    """Canonical format and block of quantization arguments; None for what is not known."""
    if not isinstance(args, dict):
        raise CheckpointError(f"{where} is {repr(args)[:80]}, expected quantization arguments", fix="repair the config")
    bits, block = args.get("num_bits", 8), _read_block(args, where)
    if type(bits) is not int or block is None:
        return None
    if str(args.get("type", "int")).lower() == "float":
        return _float_format(bits, block, args.get("scale_dtype"), packing)
    return _int_format(bits, block, packing)


def _describe(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {args.get(key)!r:.40}" for key in ("num_bits", "type", "strategy", "group_size"))


def _float_format(bits: int, block: Block, scale_dtype: Any, packing: str) -> tuple[str, Block | None] | None:
    fixed = {(4, (1, 16)): "nvfp4", (4, (1, 32)): "mxfp4", (6, (1, 32)): "mxfp6_e2m3"}.get((bits, block))
    if fixed is not None:
        return fixed, None
    if bits != 8:
        return None
    if block == (1, 32) and (packing == "mxfp8-quantized" or "uint8" in str(scale_dtype)):
        return "mxfp8_e4m3", block
    whole = {(WHOLE, WHOLE): "fp8_tensor", (1, WHOLE): "fp8_channel"}.get(block)
    return (whole, None) if whole else ("fp8_block", block)


def _int_format(bits: int, block: Block, packing: str) -> tuple[str, Block | None] | None:
    if bits == 4 and packing == "pack-quantized":
        return "int4_group", block
    # Naive int weights of fewer bits lie one a byte; pack-quantized ones of 1 to 7 bits straddle words.
    if not 1 <= bits <= 8 or (packing == "pack-quantized" and bits != 8):
        return None
    whole = {(WHOLE, WHOLE): "int8_tensor", (1, WHOLE): "int8_channel"}.get(block)
    return (whole, None) if whole else ("int8_group", block)


def _read_block(args: Mapping[str, Any], where: str) -> Block | None:
    """(rows, columns) that share a scale; None for a strategy that is not known."""
    size = args.get("group_size")
    strategy = args.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "tensor":
        return WHOLE, WHOLE
    if strategy in ("channel", "token"):
        return 1, WHOLE
    if strategy in ("group", "tensor_group"):
        if type(size) is not int or size <= 0:
            raise CheckpointError(
                f"{where}.group_size is {size!r}, expected a positive number", fix="repair the config"
            )
        return 1, size
    if strategy == "block":
        value = args.get("block_structure")
        sizes = value.split("x") if isinstance(value, str) else value
        try:
            rows, columns = (int(s) for s in sizes)  # type: ignore[union-attr]
        except (TypeError, ValueError, OverflowError):
            rows, columns = 0, 0
        if rows <= 0 or columns <= 0:
            raise CheckpointError(
                f"{where}.block_structure is {repr(value)[:80]}, expected [rows, columns]", fix="repair the config"
            )
        return rows, columns
    return None


def _read_kv_cache(scheme: Any, where: str) -> str:
    if scheme is None:
        return ""
    if not isinstance(scheme, dict):
        raise CheckpointError(
            f"{where} is {repr(scheme)[:80]}, expected quantization arguments", fix="repair the config"
        )
    kind = {"float": "FP", "int": "INT"}.get(str(scheme.get("type", "int")).lower(), "")
    return f"{kind}{scheme.get('num_bits', 8)}"


def _other_towers(folder: Folder) -> tuple[str, ...]:
    """What lies outside the language model, as regexes, where the block stands in text_config."""
    if not _stands_in_text_config(folder):
        return ()
    return tuple(f"{_REGEX}{re.escape(p)}\\." for p in sorted(set(_tower_prefixes(folder))))


def _stands_in_text_config(folder: Folder) -> bool:
    return all(folder.config.get(key) is None for key in ("quantization_config", "compression_config"))


def _tower_prefixes(folder: Folder) -> Iterator[str]:
    for name in folder.tensors:
        parts = name.split(".")
        for count, part in enumerate(parts, start=1):
            if part in _TOWERS:
                yield ".".join(parts[:count])
                break
