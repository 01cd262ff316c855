"""Lint checks on the whole model: what is missing or there twice, KV scales, and what tensor parallelism needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from workbench.formats import QuantizedTensor, get_format
from workbench.formats.table import VARIABLE, WHOLE
from workbench.kernels.elements import ELEMENTS
from workbench.records import LintFinding

from .dialects.stacks import language_configs
from .lint_facts import SCALAR_BYTES, without_codes
from .lint_findings import entry_finding, more
from .lint_reads import read_runs, to_doubles
from .names import LANGUAGE_MODEL, in_language_model, is_embedding, is_lm_head, parse_name, ties_embeddings
from .open import Checkpoint, Entry
from .selection import KV_SCALES

EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
PREDICTION_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")  # numbered on, in some
MOST_PARTS = 10_000  # layers of a model, experts of a layer: a config or a name may say any number
PARALLEL_SIZES = range(2, 17)
USUAL_SIZES = (2, 4, 8)  # no finding while one of them divides
FEWEST_WEIGHTS = 1 << 16  # nobody splits a smaller matrix
SPLITS_ROWS = {"q_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj", "qkv_proj", "gate_up_proj"}
SPLITS_COLUMNS = {"o_proj", "down_proj", "w2", "out_proj"}
COMPARED_BYTES = 1 << 16  # of a tied head, at each of so many places
COMPARED_PLACES = 16


def check_missing_tensor(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """missing-tensor: layers, experts or an output head that the config counts have no tensor."""
    places = [(e.layer, e.expert) for e in checkpoint.entries()]
    faulty = (parse_name(p.tensor) for p in checkpoint.problems if p.tensor)
    places += [(p.layer, p.expert) for p in faulty]  # there, though nothing can be read
    layers = {layer for layer, _ in places if layer >= 0}
    wanted = _first_count(checkpoint, ("num_hidden_layers",)) or 0
    numbered = any(part.isdecimal() for e in checkpoint.entries() for part in e.name.split("."))
    if wanted and (layers or not numbered):  # other families number their layers under another name
        missing = sorted(set(range(min(wanted, MOST_PARTS))) - layers)
        if missing:
            yield _missing(
                f"config.json counts {wanted} layers, layer {missing[0]} has no tensor{more(len(missing), 'layers')}",
                len(missing),
            )
    experts: dict[int, set[int]] = defaultdict(set)
    for layer, expert in places:
        if expert >= 0 and layer >= 0:
            experts[layer].add(expert)
    counted = _first_count(checkpoint, EXPERT_COUNTS)
    wanted = counted or max((max(e) + 1 for e in experts.values()), default=0)
    absent = [
        (layer, e)
        for layer, found in sorted(experts.items())
        for e in sorted(set(range(min(wanted, MOST_PARTS))) - found)
    ]
    if absent:
        layer, expert = absent[0]
        yield _missing(
            f"each MoE layer has {wanted} experts, expert {expert} of layer {layer} has no"
            f" tensor{more(len(absent), 'experts')}",
            len(absent),
        )
    said = [c["tie_word_embeddings"] for c in (*language_configs(checkpoint.config),) if "tie_word_embeddings" in c]
    embedded = any(is_embedding(e.module) for e in checkpoint.entries())
    if False in said and True not in said and embedded and not any(is_lm_head(e.module) for e in checkpoint.entries()):
        yield _missing("config.json says tie_word_embeddings false, and no output head (lm_head) is stored", 1)


def check_surplus_tensor(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """config-conflict: layers or experts beyond those that config.json counts."""
    entries = [e for e in checkpoint.entries() if e.layer >= 0 and in_language_model(e.name)]
    layers = _first_count(checkpoint, ("num_hidden_layers",)) or None  # 0 is a fault of its own
    experts = _first_count(checkpoint, EXPERT_COUNTS)
    if experts is not None:
        experts += _first_count(checkpoint, ("zero_expert_num",)) or 0  # LongCat's, that pass their input on
    predicting = _first_count(checkpoint, PREDICTION_COUNTS) or 0
    for count, what, surplus in (
        (layers, "layers", [e for e in entries if layers is not None and e.layer >= layers + predicting]),
        (experts, "experts", [e for e in entries if experts is not None and e.expert >= experts]),
    ):
        if surplus:
            yield entry_finding(
                "config-conflict",
                "warning",
                f"config.json counts {count} {what}, and {surplus[0].name} is stored",
                surplus,
                "restore the config.json of this model; servers ignore what is not counted, or refuse it",
            )


def check_duplicate_module(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """duplicate-module: one module under two prefixes that differ in repeated or optional parts only."""
    seen: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in checkpoint.entries():
        parts = entry.name.split(".")
        once = [p for i, p in enumerate(parts) if p not in LANGUAGE_MODEL and (i == 0 or p != parts[i - 1])]
        seen[tuple(once)].append(entry)
    twice = [group for group in seen.values() if len(group) > 1]
    if twice:
        surplus = [e for group in twice for e in group[1:]]
        first = twice[0]
        yield entry_finding(
            "duplicate-module",
            "error",
            f"{first[1].name} ({first[1].format}) is {first[0].name} ({first[0].format}) once more, under another"
            " prefix",
            surplus,
            "remove one of the two: sizes and bits per weight count it twice, and servers load either",
        )


def check_tied_embeddings(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """tied-embeddings: a head that config.json ties to the embeddings, stored with other values, or once more."""
    if not ties_embeddings(checkpoint.config):
        return
    entries = checkpoint.entries()
    embedding = next((e for e in entries if is_embedding(e.module) and len(e.shape) == 2), None)
    head = next((e for e in entries if is_lm_head(e.module) and e.name.endswith(".weight")), None)
    if embedding is None or head is None:
        return
    if _stores_the_same(checkpoint, embedding, head):
        yield entry_finding(
            "tied-embeddings",
            "info",
            f"{head.name} repeats {embedding.name}, to which config.json ties it ({COMPARED_PLACES} places compared)",
            [head],
            "nothing to do; leaving it out saves its size",
        )
    else:
        yield entry_finding(
            "tied-embeddings",
            "error",
            f"config.json ties {head.name} to {embedding.name}, but they differ ({head.format} {list(head.shape)} and"
            f" {embedding.format} {list(embedding.shape)})",
            [head],
            "set tie_word_embeddings to false, or remove the head: servers that tie ignore it",
        )


def check_kv_scale(checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """kv-scale: scales of the KV cache that are unusable, exactly 1, or not there although the config declares one."""
    stored = [e for e in checkpoint.entries() if parse_name(e.name).parameter in KV_SCALES and math.prod(e.shape) == 1]
    infos = {info.name: e for e in stored if (info := checkpoint.parts(e.name)["values"]).nbytes <= SCALAR_BYTES}
    tensors = [checkpoint.folder.tensors[name] for name in infos]
    values = {info.name: float(to_doubles(data, info.dtype)[0]) for info, data in read_runs(checkpoint.folder, tensors)}
    entries = {name: infos[name] for name in values}
    bad = [entries[name] for name, v in values.items() if not 0 < v < math.inf]
    if bad:
        yield entry_finding(
            "kv-scale", "error", f"{bad[0].name} is {values[bad[0].name]}", bad, "calibrate the KV cache again"
        )
    unit = [entries[name] for name, v in values.items() if v == 1.0]
    if unit and len(unit) == len(values):
        yield entry_finding(
            "kv-scale",
            "warning",
            "every scale of the KV cache is exactly 1: uncalibrated",
            unit,
            "calibrate, or serve with --kv-cache-dtype auto; an evaluation should hold the KV cache's dtype fixed",
        )
    declared = checkpoint.declaration
    if declared.kv_cache.upper().startswith("FP8") and not values and not _is_latent(checkpoint):
        yield LintFinding(
            check="kv-scale",
            severity="info",
            message=f"{declared.files[0]} declares an {declared.kv_cache} KV cache, and no scale of it is stored:"
            " servers take 1.0",
            file="config.json",
            fix="calibrate, or serve with --kv-cache-dtype auto, if its error matters",
        )


def check_tensor_parallel(checkpoint: Checkpoint, sizes: Sequence[int]) -> Iterator[LintFinding]:
    """tensor-parallel: quantized matrices that whole blocks do not let split evenly: over any of 2, 4, 8 ranks, or over
    one of `sizes`."""
    kinds: dict[tuple[bool, str, tuple[int, ...]], list[Entry]] = defaultdict(list)
    for e in checkpoint.entries():
        if e.quantized and e.projection in SPLITS_ROWS | SPLITS_COLUMNS and math.prod(e.shape) >= FEWEST_WEIGHTS:
            kinds[e.projection in SPLITS_ROWS, e.format, e.shape].append(e)
    scales_only = without_codes(checkpoint)
    for (by_rows, format, shape), entries in kinds.items():
        axis, size, unit = "NK"[not by_rows], shape[not by_rows], _block_size(scales_only, entries[0])[not by_rows]
        fits = [ranks for ranks in PARALLEL_SIZES if size % (ranks * unit) == 0]
        failing = [ranks for ranks in sizes if ranks > 1 and size % (ranks * unit)]
        if failing or not set(USUAL_SIZES) & set(fits):
            blocks = f"{size / unit:g} blocks of {unit}" if unit > 1 else f"{size}"
            yield entry_finding(
                "tensor-parallel",
                "error" if failing else "info",
                f"{entries[0].projection} {list(shape)} is {format} with {axis} = {blocks}; tensor-parallel sizes up to"
                f" {PARALLEL_SIZES[-1]} that divide it: {', '.join(map(str, fits)) or 'none'}"
                + (f", but not {failing[0]}" if failing else ""),
                entries,
                "serve it on one of those sizes, with expert parallelism, or exclude the projection",
            )


def _block_size(scales_only: Checkpoint, entry: Entry) -> tuple[int, int]:
    """Rows and columns of a matrix that a rank cannot share with another: a block's, or those of one stored word."""
    spec = get_format(entry.format)
    if spec.block == VARIABLE and spec.rows == 1 and not entry.shared:  # a scale for each row and group
        groups = math.prod(scales_only.parts(entry.name)["block_scales"].shape) // entry.shape[0]
        return 1, -(-entry.shape[1] // max(groups, 1))
    rows, columns = spec.rows, spec.block
    if VARIABLE in (rows, columns):
        q = scales_only.read(entry.name)
        assert isinstance(q, QuantizedTensor)
        rows, columns = q.block or (rows, columns)
    return (1 if rows == WHOLE else rows), (max(8 // ELEMENTS[spec.element].bits, 1) if columns == WHOLE else columns)


def _first_count(checkpoint: Checkpoint, keys: Sequence[str]) -> int | None:
    """The first of these numbers that a config of the language model has; None for none."""
    counts = (c[key] for c in language_configs(checkpoint.config) for key in keys if type(c.get(key)) is int)
    return next((count for count in counts if count >= 0), None)


def _missing(message: str, count: int) -> LintFinding:
    return LintFinding(
        check="missing-tensor",
        severity="error",
        message=message,
        file="config.json",
        fix="copy or download the missing shards, or export the checkpoint again",
        count=count,
    )


def _stores_the_same(checkpoint: Checkpoint, a: Entry, b: Entry) -> bool:
    """Whether two plain tensors have the same bytes, at `COMPARED_PLACES` places."""
    first, second = (checkpoint.parts(e.name)["values"] for e in (a, b))
    if a.quantized or b.quantized or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    count = min(COMPARED_BYTES, first.nbytes)
    offsets = {(first.nbytes - count) * i // (COMPARED_PLACES - 1) for i in range(COMPARED_PLACES)}
    load = checkpoint.folder.load_bytes
    return all(load(first, offset, count) == load(second, offset, count) for offset in sorted(offsets))


def _is_latent(checkpoint: Checkpoint) -> bool:
    """Whether attention keeps a latent (MLA), whose cache has one scale that few exports store."""
    return any(type(c.get("kv_lora_rank")) is int for c in language_configs(checkpoint.config))
