"""Lint checks that compare matrices with each other: fused projections, experts of a layer, layers of a projection."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from workbench.formats import QuantizedTensor, get_format
from workbench.records import LintFinding

from .lint_facts import ScaleFacts
from .lint_findings import entry_finding
from .names import FUSED_PROJECTIONS, expert_peers, fusion_group
from .open import Checkpoint

OUTLIER_LOG2 = 0.7  # a doubled scale is 1.0
OUTLIER_SPREADS = 5.0
FEWEST_PEERS = 4
FEWEST_BLOCKS = 8  # fewer scales say little about a matrix: one large weight moves them
POWER_TOLERANCE = 0.15  # of a mean log2 from a whole number
GATES = {"gate_proj": "up_proj", "w1": "w3"}
_PLACE = {projection: place for group in FUSED_PROJECTIONS for place, projection in enumerate(group)}
_HALVED = {448.0 / 2**k for k in range(1, 9)}

T = TypeVar("T")


def check_global_scale_mismatch(facts: Sequence[ScaleFacts], checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """global-scale-mismatch: fused projections with different globals; many servers use one of them for all.

    Only formats with E4M3 block scales: servers that fuse others rescale them. The message says what one global costs
    the group with the largest ratio, computed from all of its codes.
    """
    groups: dict[str, list[ScaleFacts]] = defaultdict(list)
    for f in facts:
        key = fusion_group(f.entry.module) if f.entry.quantized else None
        usable = f.global_scale is not None and 0 < f.global_scale < math.inf
        if key is not None and usable and get_format(f.entry.format).scale == "e4m3":
            groups[key].append(f)
    for group in groups.values():
        group.sort(key=lambda f: _PLACE[f.entry.projection])
    unequal = sorted((g for g in groups.values() if len({f.global_scale for f in g}) > 1), key=_ratio, reverse=True)
    if not unequal:
        return
    worst = unequal[0]
    parts = ", ".join(f"{f.entry.projection} {f.global_scale:.6g}" for f in worst)
    costs = "; ".join(f"{policy} {_db(sqnr_db)}" for policy, sqnr_db in merge_errors(checkpoint, worst).items())
    yield replace(
        entry_finding(
            "global-scale-mismatch",
            "error",
            "",
            [f.entry for g in unequal for f in g],
            "quantize with shared globals (the default of `workbench quantize`), or serve with a runtime that keeps"
            " one global per projection and pass --allow global-scale-mismatch",
        ),
        message=f"projections that servers fuse have different global scales: {parts} (ratio {_ratio(worst):.4g});"
        f" {len(unequal)} of {len(groups)} fused groups differ. SQNR of this group's fused matrix, over all its codes,"
        f" if one global serves all: {costs}",
        count=len(unequal),
    )


def merge_errors(checkpoint: Checkpoint, group: Sequence[ScaleFacts]) -> dict[str, float]:
    """SQNR in dB of a fused group's matrix under one global, relative to what is stored, by policy; inf: exact.

    max-merge, min-merge and the first projection's global leave codes and block scales as they are, so a part decodes
    to (used / own) times its weights. "max with rescaled blocks" multiplies block scales by own / used and rounds them
    to E4M3 again. Sums in float64, over every code; one matrix in memory at a time.
    """
    scales = [f.global_scale or 0.0 for f in group]
    used = {"max-merge": max(scales), f"{group[0].entry.projection}-only": scales[0], "min-merge": min(scales)}
    errors = dict.fromkeys(used, 0.0)
    power, rescaled = 0.0, 0.0
    for f, own in zip(group, scales, strict=True):
        q = checkpoint.read(f.entry.name)
        assert isinstance(q, QuantizedTensor)
        w = q.dequantize()
        part = float(w.square().sum(dtype=torch.float64))
        power += part
        for policy, scale in used.items():
            errors[policy] += part * (scale / own - 1.0) ** 2
        blocks = (q.block_scales.float() * (own / max(scales))).to(torch.float8_e4m3fn)
        shared = replace(q, block_scales=blocks, global_scale=torch.tensor(max(scales), dtype=torch.float64))
        rescaled += float((shared.dequantize() - w).square().sum(dtype=torch.float64))
    errors["max with rescaled blocks"] = rescaled
    return {policy: _sqnr_db(power, error) for policy, error in errors.items()}


def check_power_of_two(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """power-of-two-factor: a factor 2^k that runs through the checkpoint: all gates against their ups, or all block
    scales below E4M3's range.

    A wrong exponent bias, FNUZ bytes read as FN, or a scale halved twice give it; no single matrix looks wrong.
    """
    facts = [f for f in facts if f.entry.quantized and not f.dead]
    by_module = {f.entry.module: f for f in facts}
    pairs: list[tuple[ScaleFacts, ScaleFacts, float]] = []
    for f in facts:
        parent, _, projection = f.entry.module.rpartition(".")
        twin = by_module.get(f"{parent}.{GATES[projection]}") if projection in GATES else None
        if twin is not None and twin.entry.format == f.entry.format and min(f.blocks, twin.blocks) >= FEWEST_BLOCKS:
            pairs.append((f, twin, f.level_log2 - twin.level_log2))
    pairs = [p for p in pairs if math.isfinite(p[2])]
    if len(pairs) >= FEWEST_PEERS:
        differences = np.array([d for _, _, d in pairs])
        k = round(float(np.median(differences)))
        hit = np.abs(differences - k) < POWER_TOLERANCE
        if k and hit.mean() > 0.9:
            larger = [gate if k > 0 else up for (gate, up, _), is_hit in zip(pairs, hit, strict=True) if is_hit]
            yield entry_finding(
                "power-of-two-factor",
                "warning",
                f"{larger[0].entry.projection} is 2^{abs(k)} times as large as its partner in"
                f" {len(larger)} of {len(pairs)} pairs",
                [f.entry for f in larger],
                "compare one matrix with the source's (`workbench analyze`): an exponent bias may be off",
            )
    yield from _unused_range([f for f in facts if get_format(f.entry.format).name == "nvfp4"])


def check_scale_outlier(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-outlier: a layer (or one expert of a layer) whose weights are much larger or smaller than its peers'.

    Compares mean log2 of block scale * global scale: each expert with the median of its layer's experts, each layer
    with the median over layers of the same projection and format. Far means more than 0.7 (a factor 1.6) and more than
    five times the peers' spread. It cannot tell a fault from a model that is like that, so it only warns.
    """
    facts = [f for f in facts if f.entry.quantized and f.blocks >= FEWEST_BLOCKS and math.isfinite(f.level_log2)]
    experts: dict[tuple[str, str], list[ScaleFacts]] = defaultdict(list)
    layers: dict[tuple[str, str, bool, bool], dict[int, list[ScaleFacts]]] = defaultdict(lambda: defaultdict(list))
    for f in facts:
        if f.entry.expert >= 0:
            experts[expert_peers(f.entry.module), f.entry.format].append(f)
        kind = (f.entry.projection, f.entry.format, f.entry.expert >= 0, f.entry.shared_expert)
        layers[kind][f.entry.layer].append(f)
    far = [(f, d) for group in experts.values() for f, d in _far([(f, f.level_log2) for f in group])]
    if far:
        yield _outlier(far, "its layer's other experts")
    far_layers = [
        (group[0], d)
        for by_layer in layers.values()
        for group, d in _far([(g, float(np.median([f.level_log2 for f in g]))) for g in by_layer.values()])
    ]
    if far_layers:
        yield _outlier(far_layers, "the same projection in the other layers")


def _unused_range(facts: list[ScaleFacts]) -> Iterator[LintFinding]:
    """Block scales whose largest is 448 / 2^k, the same k >= 1 in every group that shares a global scale."""
    largest: dict[tuple[str, float | None], float] = defaultdict(float)
    for f in facts:
        if f.scan.count < f.blocks:
            return  # the largest need not be in a sample
        key = fusion_group(f.entry.module) or f.entry.module, f.global_scale
        largest[key] = max(largest[key], f.scan.largest)
    values = list(largest.values())
    if len(values) >= FEWEST_PEERS and len(set(values)) == 1 and values[0] in _HALVED:
        yield entry_finding(
            "power-of-two-factor",
            "warning",
            f"the largest block scale is {values[0]:g} = 448 / {448 / values[0]:g} under every global scale: block or"
            " global scales are off by that factor, or it is left unused",
            [f.entry for f in facts],
            "compare one matrix with the source's (`workbench analyze`): E4M3FNUZ bytes read as E4M3 are half as large",
        )


def _sqnr_db(power: float, error: float) -> float:
    if error == 0.0:
        return math.inf
    return 10 * math.log10(power / error)


def _db(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def _ratio(group: Sequence[ScaleFacts]) -> float:
    values = [f.global_scale or 0.0 for f in group]
    return max(values) / min(values)


def _far(levels: Sequence[tuple[T, float]]) -> list[tuple[T, float]]:
    """Items whose level lies far from the median of at least four, with the difference."""
    if len(levels) < FEWEST_PEERS:
        return []
    values = np.array([level for _, level in levels])
    median = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - median)))
    limit = max(OUTLIER_LOG2, OUTLIER_SPREADS * spread)
    return [(item, level - median) for item, level in levels if abs(level - median) > limit]


def _outlier(far: list[tuple[ScaleFacts, float]], peers: str) -> LintFinding:
    worst = max(far, key=lambda pair: abs(pair[1]))
    return entry_finding(
        "scale-outlier",
        "warning",
        f"the weights are {2 ** worst[1]:.3g} times as large as those of {peers}",
        [worst[0].entry, *(f.entry for f, _ in far if f is not worst[0])],
        "compare with the source weights (`workbench analyze`): a global scale may be wrong",
    )
