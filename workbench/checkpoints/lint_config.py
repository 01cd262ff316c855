"""Lint checks on the config's claims: formats, excludes, and how alike the experts are. No tensor is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from workbench.records import LintFinding

from .dialects.base import find_config_blocks
from .dialects.stacks import INNER_CONFIGS
from .lint_findings import entry_finding, more, problem_findings
from .match import is_plain_name, unmatched_patterns
from .names import expert_peers, is_embedding, is_lm_head, is_router, ties_embeddings
from .open import Checkpoint, Entry
from .selection import fused_groups, linear_weights

# Keys that count something: the least number, and whether families give a list of them, one a layer, too.
COUNTS: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size"), (1, False)),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts"), (0, False)),
    **dict.fromkeys(("num_experts_per_tok", "num_nextn_predict_layers", "kv_lora_rank"), (0, False)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "head_dim", "v_head_dim"), (0, True)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (0, True)),
}
PREDICTION_HEADS = {"mtp", "nextn"}
_OPEN_NUMBER = re.compile(r"(?:^|\.)(\d+)\*")


def found_while_opening(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """index-vs-files, missing-companion, scale-shape, k-divisible: what `open_checkpoint` would have refused."""
    return problem_findings(checkpoint.problems)


def check_config_values(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """config-conflict: a config.json that says no model, or counts in something else than whole numbers."""

    def finding(severity: str, message: str) -> LintFinding:
        return LintFinding(
            check="config-conflict",
            severity=severity,
            message=f"config.json: {message}",
            file="config.json",
            fix="restore the config.json that was exported with the tensors",
        )

    config = checkpoint.config
    classes = config.get("architectures")
    are_names = isinstance(classes, list) and all(isinstance(c, str) for c in classes)
    for key, fits, expected in (
        ("model_type", isinstance(config.get("model_type"), str), "a name"),
        ("architectures", are_names, "a list of names"),
        ("tie_word_embeddings", isinstance(config.get("tie_word_embeddings"), bool), "true or false"),
        *((key, isinstance(config.get(key), dict), "a JSON object") for key in INNER_CONFIGS),
    ):
        if config.get(key) is not None and not fits:
            yield finding("error", f"{key} is {repr(config[key])[:80]}, expected {expected}")
    if config.get("model_type") in (None, "") and not config.get("auto_map"):
        lacking = "model_type" if classes else "model_type and no architectures"
        yield finding("warning" if classes else "error", f"it has no {lacking}: which model this is cannot be told")
    inner_configs = ((f"{key}.", config[key]) for key in INNER_CONFIGS if isinstance(config.get(key), dict))
    for place, counts in (*inner_configs, ("", config)):
        for key, (least, by_layer) in COUNTS.items():
            value = counts.get(key)
            values = value if by_layer and isinstance(value, list) else [] if value is None else [value]
            if not all(type(v) is int and v >= least for v in values):
                yield finding("error", f"{place}{key} is {repr(value)[:80]}, expected a whole number, {least} or more")


def check_config_conflict(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """config-conflict: config files that contradict each other, or the tensors' format."""
    declared = checkpoint.declaration
    for conflict in declared.conflicts:
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=conflict,
            file="config.json",
            fix="servers read one file or the other: make both say what the tensors are",
        )
    first, *others = find_config_blocks(checkpoint.config).items() or [("", {})]
    for place, block in others:
        if block != first[1]:
            yield LintFinding(
                check="config-conflict",
                severity="warning",
                message=f"config.json has a {first[0]}, which is read, and another {place}",
                file="config.json",
                fix="keep the one that was exported with the tensors",
            )
    packed = [e for e in checkpoint.entries() if e.quantized]
    if declared.files and not declared.algorithm and packed:
        yield entry_finding(
            "config-conflict",
            "warning",
            f"{declared.files[0]} is read as {checkpoint.dialect}'s and declares no weight format, the tensor is"
            f" {packed[0].format}",
            packed,
            "quant_method may name the wrong producer: restore the config that was exported with the tensors",
        )
    if declared.files and not (declared.algorithm or declared.kv_cache or packed):
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=f"{declared.files[0]} is read as {checkpoint.dialect}'s and quantizes nothing, as no tensor is",
            file="config.json",
            fix="remove it, or restore the one that was exported with the tensors: servers refuse it, or differ",
        )
    if checkpoint.dialect != "modelopt" and (checkpoint.path / "hf_quant_config.json").is_file():
        yield LintFinding(
            check="config-conflict",
            severity="warning",
            message=f"config.json is read as {checkpoint.dialect}'s, but hf_quant_config.json, ModelOpt's, lies beside",
            file="hf_quant_config.json",
            fix="servers read one file or the other: keep the one that was exported with the tensors",
        )
    if checkpoint.dialect == "compressed_tensors":
        return  # its reader compares every scheme, block sizes included: a problem
    unlike: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in packed:
        wanted = declared.format_of(entry.module)
        if wanted and wanted != entry.format:
            unlike[wanted, entry.format].append(entry)
    for (wanted, stored), entries in unlike.items():
        yield entry_finding(
            "config-conflict",
            "error",
            f"{declared.files[0]} declares {wanted}, the tensor is {stored}",
            entries,
            "the tensors decide what is read here; make the config say what they are",
        )


def check_exclude_conflict(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """exclude-conflict: excluded but stored quantized, or the reverse; fused projections in two formats; patterns that
    match no module."""
    declared = checkpoint.declaration
    where = declared.files[0] if declared.files else "config.json"
    entries = checkpoint.entries()
    if declared.algorithm:
        packed = [e for e in entries if e.quantized and not declared.expects_quantized(e.module)]
        if packed:
            yield entry_finding(
                "exclude-conflict",
                "error",
                f"{where} says {packed[0].module} is not quantized, the tensor is {packed[0].format}",
                packed,
                "remove the name from the excludes, or store the tensor unquantized",
            )
        plain = [e for e in linear_weights(checkpoint) if not e.quantized and declared.expects_quantized(e.module)]
        if plain:
            yield entry_finding(
                "exclude-conflict",
                "error",
                f"{where} declares {declared.algorithm} for {plain[0].module}, the tensor is {plain[0].format}",
                plain,
                "add the module to the excludes: a server would build a quantized layer for it",
            )
        heads = [e for e in entries if _is_prediction_head(e) and declared.expects_quantized(e.module)]
        if heads:
            yield entry_finding(
                "exclude-conflict",
                "warning",
                f"{where} declares {declared.algorithm} for {heads[0].module}, the tensor is {heads[0].format}; it is"
                " a prediction head's, the model's own answers do not depend on it",
                heads,
                "add the module to the excludes: a server would load the head as garbage and accept no draft",
            )
    split = [group for group in fused_groups(entries) if len({e.format for e in group}) > 1]
    if split:
        kinds = ", ".join(f"{e.projection} ({e.format})" for e in split[0])
        yield LintFinding(
            check="exclude-conflict",
            severity="error",
            message=f"servers fuse {kinds} into one matrix, and they are not in one format{more(len(split), 'groups')}",
            tensor=split[0][0].name,
            file=split[0][0].file,
            fix="quantize or exclude all of them",
            count=len(split),
            tensors=tuple(e.name for group in split for e in group),
        )
    dead = _dead_patterns(checkpoint)
    if dead:
        yield LintFinding(
            check="exclude-conflict",
            severity="warning",
            message=f"the exclude pattern {dead[0]!r} of {where} matches no module{more(len(dead), 'patterns')}",
            file="config.json",
            fix="correct the name (a wrong prefix leaves a module quantized) or remove the pattern",
            count=len(dead),
            tensors=tuple(dead),
        )


def check_exclude_ambiguous(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """exclude-ambiguous: a pattern such as `model.layers.1*`, which also fits layers 10 to 19."""
    parts = {part for e in checkpoint.entries() for part in e.module.split(".") if part.isdigit()}
    wide = {}
    for pattern in checkpoint.declaration.excludes:
        match = None if pattern.startswith("re:") else _OPEN_NUMBER.search(pattern)
        longer = sorted(p for p in parts if match and p != match[1] and p.startswith(match[1]))
        if longer and match and match[1] in parts:
            wide[pattern] = f"{match[1]} and {', '.join(longer[:3])}" + (", ..." if longer[3:] else "")
    if wide:
        pattern, numbers = next(iter(wide.items()))
        yield LintFinding(
            check="exclude-ambiguous",
            severity="warning",
            message=f"the exclude pattern {pattern!r} fits the numbers {numbers}{more(len(wide), 'patterns')}",
            file="config.json",
            fix="write a dot before the star: `layers.1.*`",
            count=len(wide),
            tensors=tuple(wide),
        )


def check_expert_suffix_sets(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """expert-suffix-sets: the experts of one layer and projection differ in format or in the scales they have."""
    stored: dict[str, dict[tuple[str, ...], list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in checkpoint.entries():
        if entry.expert >= 0 and entry.projection:
            signature = (entry.format, *sorted(checkpoint.parts(entry.name)))
            stored[expert_peers(entry.module)][signature].append(entry)
    odd: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Entry]] = defaultdict(list)
    for kinds in stored.values():
        usual = max(kinds, key=lambda k: len(kinds[k]))
        for kind, entries in kinds.items():
            if kind != usual:
                odd[kind, usual] += entries
    for (kind, usual), entries in odd.items():
        lacking = sorted(set(usual) - set(kind))
        neutral = "; a pre_quant_scale of ones says the same" if lacking == ["pre_quant_scale"] else ""
        yield entry_finding(
            "expert-suffix-sets",
            "error",
            f"{entries[0].name} is stored as {' + '.join(kind)}, its sibling experts as {' + '.join(usual)}"
            + (f": it lacks {', '.join(lacking)}" if lacking else ""),
            entries,
            "export the checkpoint again: servers give a layer's experts one format" + neutral,
        )


def _is_prediction_head(entry: Entry) -> bool:
    """A plain linear layer of a multi-token-prediction head that has its own name."""
    return (
        not entry.quantized
        and entry.projection != ""
        and len(entry.shape) == 2
        and not PREDICTION_HEADS.isdisjoint(entry.module.split("."))
        and not (is_embedding(entry.module) or is_lm_head(entry.module) or is_router(entry.module))
        and "norm" not in entry.projection
    )


def _dead_patterns(checkpoint: Checkpoint) -> list[str]:
    """Exclude patterns that match no module; not a tied head's, which need not be stored."""
    modules = {e.module: e.expert for e in checkpoint.entries()}
    tied = ties_embeddings(checkpoint.config)
    excludes = [p for p in checkpoint.declaration.excludes if not (tied and is_plain_name(p) and is_lm_head(p))]
    few = [module for module, expert in modules.items() if expert <= 0]  # one expert stands for its peers
    return unmatched_patterns(unmatched_patterns(excludes, few), modules)
