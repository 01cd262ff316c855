"""Lint checks on names, config and headers; no tensor is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from workbench.records import LintFinding

from .match import is_plain_name, matches, plain_name
from .names import expert_peers, parse_name
from .open import Checkpoint
from .selection import fused_groups, linear_weights


def found_while_opening(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """index-vs-files, missing-companion, scale-shape, k-divisible: what `open_checkpoint` would have refused."""
    for p in checkpoint.problems:
        yield LintFinding(
            check=p.check, severity=p.severity, message=p.message, tensor=p.tensor, file=p.file, fix=p.fix
        )


def check_config_conflict(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """config-conflict: config files that contradict each other, or the tensors' format."""
    for conflict in checkpoint.declaration.conflicts:
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=conflict,
            file="config.json",
            fix="servers read one file or the other: make both say what the tensors are",
        )
    declaration = checkpoint.declaration
    packed = [e for e in checkpoint.entries() if e.quantized]
    if declaration.files and not declaration.algorithm and packed:
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=f"{declaration.files[0]} is read as {checkpoint.dialect}'s and declares no weight format,"
            f" the tensor is {packed[0].format}{_more(packed)}",
            tensor=packed[0].name,
            file=packed[0].file,
            fix="quant_method may name the wrong producer: restore the config that was exported with the tensors",
        )
    if checkpoint.dialect != "modelopt" and (checkpoint.path / "hf_quant_config.json").is_file():
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=f"config.json is read as {checkpoint.dialect}'s, but hf_quant_config.json, ModelOpt's, lies beside",
            file="hf_quant_config.json",
            fix="servers read one file or the other: keep the one that was exported with the tensors",
        )
    declared = checkpoint.declaration.format
    other = [e for e in checkpoint.entries() if e.quantized and declared and e.format != declared]
    if other:
        yield LintFinding(
            check="config-conflict",
            severity="error",
            message=f"{checkpoint.declaration.files[0]} declares {declared}, the tensor is {other[0].format}"
            + _more(other),
            tensor=other[0].name,
            file=other[0].file,
            fix="the tensors decide what is read here; make the config say what they are",
        )


def check_exclude_conflict(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """exclude-conflict: excluded but stored quantized, or the reverse; fused projections in two formats; patterns that
    match no module."""
    declared = checkpoint.declaration
    where = declared.files[0] if declared.files else "config.json"
    if declared.algorithm:
        stored_packed = [e for e in checkpoint.entries() if e.quantized and not declared.expects_quantized(e.module)]
        if stored_packed:
            yield LintFinding(
                check="exclude-conflict",
                severity="error",
                message=f"{where} says {stored_packed[0].module} is not quantized, the tensor is"
                f" {stored_packed[0].format}{_more(stored_packed)}",
                tensor=stored_packed[0].name,
                file=stored_packed[0].file,
                fix="remove the name from the excludes, or store the tensor unquantized",
            )
        plain = [e for e in linear_weights(checkpoint) if not e.quantized and declared.expects_quantized(e.module)]
        if plain:
            yield LintFinding(
                check="exclude-conflict",
                severity="error",
                message=f"{where} declares {declared.algorithm} for {plain[0].module}, the tensor is"
                f" {plain[0].format}{_more(plain)}",
                tensor=plain[0].name,
                file=plain[0].file,
                fix="add the module to the excludes: a server would build a quantized layer for it",
            )
    split = [group for group in fused_groups(checkpoint.entries()) if len({e.format for e in group}) > 1]
    if split:
        yield LintFinding(
            check="exclude-conflict",
            severity="error",
            message="servers fuse "
            + ", ".join(f"{e.projection} ({e.format})" for e in split[0])
            + f" into one matrix, and they are not in one format{_more(split, 'groups')}",
            tensor=split[0][0].name,
            file=split[0][0].file,
            fix="quantize or exclude all of them",
        )
    modules = {e.module for e in checkpoint.entries()}
    containers = {parent for module in modules for parent in _parents(module)}
    dead = [p for p in declared.excludes if not _matches_something(p, modules, containers)]
    if dead:
        yield LintFinding(
            check="exclude-conflict",
            severity="warning",
            message=f"the exclude pattern {dead[0]!r} of {where} matches no module{_more(dead, 'patterns')}",
            file="config.json",
            fix="correct the name (a wrong prefix leaves a module quantized) or remove the pattern",
        )


def check_expert_suffix_sets(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """expert-suffix-sets: the experts of one layer and projection differ in format or in the scales they have."""
    stored: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for entry in checkpoint.entries():
        if entry.expert >= 0 and entry.projection:
            signature = (entry.format, *sorted(checkpoint.parts(entry.name)))
            stored[expert_peers(entry.module)][signature].append(entry.name)
    odd = []
    for kinds in stored.values():
        if len(kinds) > 1:
            usual = max(kinds, key=lambda k: len(kinds[k]))
            odd += [(name, kind, usual) for kind, names in kinds.items() if kind != usual for name in names]
    if odd:
        name, kind, usual = odd[0]
        lacking = sorted(set(usual) - set(kind))
        yield LintFinding(
            check="expert-suffix-sets",
            severity="error",
            message=f"{name} is stored as {' + '.join(kind)}, its sibling experts as {' + '.join(usual)}"
            + (f": it lacks {', '.join(lacking)}" if lacking else "")
            + _more(odd),
            tensor=name,
            file=checkpoint.entry(name).file,
            fix="export the checkpoint again: servers give a layer's experts one format",
        )


def check_missing_tensor(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """missing-tensor: layers or experts that the config counts have no tensor."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    names = checkpoint.folder.tensors
    parsed = [parse_name(name) for name in names]
    layers = {p.layer for p in parsed if p.layer >= 0}
    wanted = config.get("num_hidden_layers")
    if isinstance(wanted, int) and layers:
        missing = sorted(set(range(wanted)) - layers)
        if missing:
            yield _missing(
                f"config.json counts {wanted} layers, layer {missing[0]} has no tensor{_more(missing, 'layers')}"
            )
    experts: dict[int, set[int]] = defaultdict(set)
    for p in parsed:
        if p.expert >= 0 and p.layer >= 0:
            experts[p.layer].add(p.expert)
    counts = [
        config[k] for k in ("n_routed_experts", "num_local_experts", "num_experts") if isinstance(config.get(k), int)
    ]
    wanted_experts = counts[0] if counts else max((max(e) + 1 for e in experts.values()), default=0)
    absent = [
        (layer, e) for layer, found in sorted(experts.items()) for e in sorted(set(range(wanted_experts)) - found)
    ]
    if absent:
        yield _missing(
            f"each MoE layer has {wanted_experts} experts, expert {absent[0][1]} of layer {absent[0][0]} has no tensor"
            f"{_more(absent, 'experts')}"
        )


def _missing(message: str) -> LintFinding:
    return LintFinding(
        check="missing-tensor",
        severity="error",
        message=message,
        file="config.json",
        fix="copy or download the missing shards, or export the checkpoint again",
    )


def _more(items: Sequence[object], what: str = "tensors") -> str:
    return f" ({len(items)} such {what})" if len(items) > 1 else ""


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _matches_something(pattern: str, modules: set[str], containers: set[str]) -> bool:
    if is_plain_name(pattern):
        return plain_name(pattern) in modules or plain_name(pattern) in containers
    return any(matches(m, pattern) for m in modules) or any(matches(c, pattern) for c in containers)
