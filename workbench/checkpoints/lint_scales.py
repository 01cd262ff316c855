"""Lint checks on scale values, from the facts that `lint_facts.read_facts` gathered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from workbench.kernels.tables import E2M1_MAX
from workbench.records import LintFinding

from .lint_facts import ScaleFacts
from .names import expert_peers, fusion_group
from .open import Checkpoint

PLAUSIBLE_AMAX = (1e-6, 1e3)  # of a weight matrix
E4M3_MIN_NORMAL = 2.0**-6
OUTLIER_LOG2 = 0.7  # a doubled scale is 1.0
OUTLIER_SPREADS = 5.0

T = TypeVar("T")


def check_scale_nan(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-nan: NaN bytes among the block scales."""
    bad = [f for f in facts if f.nan]
    if bad:
        yield _finding(
            "scale-nan",
            "error",
            f"{bad[0].nan} of {bad[0].blocks} block scales are NaN",
            bad,
            "the blocks decode to NaN: export again (producers must clamp scales to 448 before the E4M3 cast)",
        )


def check_scale_sign(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-zero-or-negative: negative block scales; zero scales that erase non-zero codes."""
    facts = list(facts)
    negative = [f for f in facts if f.negative]
    if negative:
        yield _finding(
            "scale-zero-or-negative",
            "error",
            f"{negative[0].negative} of {negative[0].blocks} block scales are negative",
            negative,
            "a scale has no sign: the bytes are not what the format says; export again",
        )
    zero = [f for f in facts if f.zero_live and not f.dead]
    if zero:
        yield _finding(
            "scale-zero-or-negative",
            "warning",
            f"{zero[0].zero_live} of {zero[0].blocks} block scales are zero, their codes are not: they underflowed",
            zero,
            "export again with a producer that clamps block scales to 2^-9, or accept that these blocks are zero",
        )


def check_scale_subnormal(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-subnormal: all of a tensor's E4M3 scales are below 2^-6, which some kernels misread."""
    small = [f for f in facts if f.global_scale is not None and not f.dead and 0 < f.largest < E4M3_MIN_NORMAL]
    if small:
        yield _finding(
            "scale-subnormal",
            "warning",
            f"the largest block scale is {small[0].largest:.3g}, below E4M3's smallest normal 2^-6",
            small,
            "legal, but backend-sensitive; a global scale of amax / 2688 uses the full range",
        )


def check_global_scale_range(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """global-scale-range: zero, negative or non-finite globals; globals that imply impossible weights."""
    facts = [f for f in facts if f.entry.quantized]
    bad = [f for f in facts if f.global_scale is not None and not (0 < f.global_scale < math.inf)]
    if bad:
        yield _finding(
            "global-scale-range",
            "error",
            f"the global scale is {bad[0].global_scale}",
            bad,
            "the matrix decodes to zeros, infinities or NaN; export it again (all-zero matrices: exclude them)",
        )
    usable = [f for f in facts if f.global_scale is None or 0 < f.global_scale < math.inf]
    huge = [f for f in usable if _implied_amax(f) > PLAUSIBLE_AMAX[1]]
    if huge:
        yield _finding(
            "global-scale-range",
            "error",
            f"the scales imply weights up to {_implied_amax(huge[0]):.3g}"
            + (f" (global scale {huge[0].global_scale:.6g})" if huge[0].global_scale is not None else ""),
            huge,
            "the global scale may be stored as a divisor (compressed-tensors' convention); it must be a multiplier",
        )
    tiny = [f for f in usable if not f.dead and 0 < _implied_amax(f) < PLAUSIBLE_AMAX[0]]
    if tiny:
        yield _finding(
            "global-scale-range",
            "warning",
            f"the scales imply weights of at most {_implied_amax(tiny[0]):.3g}",
            tiny,
            "compare with the source weights",
        )


def check_global_scale_mismatch(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """global-scale-mismatch: fused projections with different globals; many servers use one of them for all."""
    groups: dict[str, list[ScaleFacts]] = defaultdict(list)
    for f in facts:
        group = fusion_group(f.entry.module)
        if group is not None and f.global_scale is not None and 0 < f.global_scale < math.inf:
            groups[group].append(f)
    unequal = [g for g in groups.values() if len({f.global_scale for f in g}) > 1]
    if unequal:
        worst = max(unequal, key=_ratio)
        parts = ", ".join(f"{f.entry.projection} {f.global_scale:.6g}" for f in worst)
        yield _finding(
            "global-scale-mismatch",
            "error",
            f"projections that servers fuse have different global scales: {parts} (ratio {_ratio(worst):.4g});"
            f" {len(unequal)} of {len(groups)} fused groups differ",
            worst[:1],
            "quantize with shared globals (the default of `workbench quantize`), or serve with a runtime that keeps"
            " one global per projection and pass --allow global-scale-mismatch",
        )


def check_input_scale(facts: Iterable[ScaleFacts], checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """input-scale-missing: some modules have a static activation scale and others do not, or an unusable one."""
    nvfp4 = [f for f in facts if f.global_scale is not None]
    having = [f for f in nvfp4 if f.input_scale is not None]
    weight_only = checkpoint.declaration.weight_only
    lacking = [f for f in nvfp4 if f.input_scale is None and weight_only.isdisjoint(_self_and_parents(f.entry.module))]
    if having and lacking:
        yield _finding(
            "input-scale-missing",
            "error",
            "input_scale is missing, while other modules have one; servers fill in zero, and 1 / 0 is infinite",
            lacking,
            "calibrate again; experts without tokens take their siblings' largest amax (`workbench calibrate`)",
        )
    if nvfp4 and not having and checkpoint.declaration.algorithm == "NVFP4" and checkpoint.dialect == "modelopt":
        yield LintFinding(
            check="input-scale-missing",
            severity="warning",
            message="the config declares NVFP4 activations (quant_algo NVFP4), but no module has an input_scale",
            file="config.json",
            fix="calibrate, or declare W4A16_NVFP4",
        )
    unusable = [f for f in having if not (0 < (f.input_scale or 0.0) < math.inf)]
    if unusable:
        yield _finding(
            "input-scale-missing",
            "error",
            f"input_scale is {unusable[0].input_scale}",
            unusable,
            "calibrate again: a zero, negative or non-finite activation scale gives NaN outputs",
        )


def check_dead_tensor(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """dead-tensor: a matrix whose every value is zero."""
    dead = [f for f in facts if f.dead]
    if dead:
        yield _finding(
            "dead-tensor",
            "error",
            "every value of the matrix is zero",
            dead,
            "restore it from the source checkpoint; if the source is zero there too, pass --allow dead-tensor",
        )


def check_scale_outlier(facts: Iterable[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-outlier: a layer (or one expert of a layer) whose weights are much larger or smaller than its peers'.

    Compares mean log2 of block scale * global scale: each expert with the median of its layer's experts, each layer
    with the median over layers of the same projection. Far means more than 0.7 (a factor 1.6) and more than five
    times the peers' spread. It cannot tell a fault from a model that is like that, so it only warns.
    """
    facts = [f for f in facts if f.entry.quantized and math.isfinite(f.level_log2)]
    experts: dict[str, list[ScaleFacts]] = defaultdict(list)
    layers: dict[tuple[str, bool, bool], dict[int, list[ScaleFacts]]] = defaultdict(lambda: defaultdict(list))
    for f in facts:
        if f.entry.expert >= 0:
            experts[expert_peers(f.entry.module)].append(f)
        kind = (f.entry.projection, f.entry.expert >= 0, f.entry.shared_expert)
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


def _implied_amax(f: ScaleFacts) -> float:
    return float(E2M1_MAX * f.largest * (f.global_scale if f.global_scale is not None else 1.0))


def _self_and_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _ratio(group: list[ScaleFacts]) -> float:
    values = [abs(f.global_scale or 0.0) for f in group]
    return max(values) / min(values) if min(values) > 0 else math.inf


def _far(levels: list[tuple[T, float]]) -> list[tuple[T, float]]:
    """Items whose level lies far from the median of at least four, with the difference."""
    if len(levels) < 4:
        return []
    values = np.array([level for _, level in levels])
    median = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - median)))
    limit = max(OUTLIER_LOG2, OUTLIER_SPREADS * spread)
    return [(item, level - median) for item, level in levels if abs(level - median) > limit]


def _outlier(far: list[tuple[ScaleFacts, float]], peers: str) -> LintFinding:
    worst = max(far, key=lambda pair: abs(pair[1]))
    return _finding(
        "scale-outlier",
        "warning",
        f"the weights are {2 ** worst[1]:.3g} times as large as those of {peers}",
        [worst[0], *(f for f, _ in far if f is not worst[0])],
        "compare with the source weights (`workbench analyze`): a global scale may be wrong",
    )


def _finding(check: str, severity: str, message: str, bad: list[ScaleFacts], fix: str) -> LintFinding:
    first = bad[0].entry
    more = f" ({len(bad)} such tensors)" if len(bad) > 1 else ""
    return LintFinding(
        check=check, severity=severity, message=message + more, tensor=first.name, file=first.file, fix=fix
    )
