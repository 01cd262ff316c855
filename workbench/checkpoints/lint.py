"""Lint: does a checkpoint keep its own promises? Seconds from headers, config and scales, before anything is served.

    report = lint_checkpoint("nvidia--Kimi-K2.6-NVFP4", allow=("exclude-conflict",))

Every global and input scale is read. Block scales, and what can hold NaN (plain weights, FP8 codes), are read whole up
to 1 GiB a checkpoint each, beyond that in a sample of each matrix (`all_scales`, `all_values` read them all), and the
report says how much was read. Other codes are read in small samples, and whole where a sample or a scale is all zero.
One tensor's scales are in memory at a time. What bytes alone cannot show: a consistently wrong packing (swapped nibbles
decode to plausible weights) or one wrong scale that stays in its neighbours' range; those need the source weights
(`workbench analyze`). docs/lint.md explains every check. A checkpoint that cannot be opened at all raises
CheckpointError.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.errors import ConfigError
from workbench.records import LintFinding, LintReport

from .lint_config import (
    check_config_conflict,
    check_config_values,
    check_exclude_ambiguous,
    check_exclude_conflict,
    check_expert_suffix_sets,
    found_while_opening,
)
from .lint_facts import Facts, read_facts
from .lint_model import (
    check_duplicate_module,
    check_kv_scale,
    check_missing_tensor,
    check_surplus_tensor,
    check_tensor_parallel,
    check_tied_embeddings,
)
from .lint_peers import check_global_scale_mismatch, check_power_of_two, check_scale_outlier
from .lint_scales import (
    check_dead_tensor,
    check_global_scale_range,
    check_input_scale,
    check_nan_values,
    check_scale_nan,
    check_scale_sign,
    check_scale_subnormal,
)
from .lint_shapes import check_shape_conflict
from .open import Checkpoint, open_checkpoint

# id -> what it looks for. The order is the report's.
CHECKS: dict[str, str] = {
    "index-vs-files": "the index names what the shards hold, and nothing else lies there",
    "missing-companion": "every packed weight has its scales, and every scale its weight",
    "scale-shape": "scales have the shape and dtype that the format prescribes",
    "k-divisible": "K is a multiple of the format's block",
    "shape-conflict": "weights have the sizes that their neighbours and the config give them, none of them zero",
    "scale-nan": "no block scale is NaN (E4M3 0x7F, 0xFF; E8M0 255) or infinite",
    "scale-zero-or-negative": "no block scale is negative, or zero where its codes are not",
    "scale-subnormal": "block scales use E4M3's normal range (some kernels misread subnormals)",
    "global-scale-range": "global scales are finite, positive decode multipliers of a plausible size",
    "global-scale-mismatch": "projections that servers fuse (gate/up, q/k/v, q_a/kv_a) share one global scale",
    "input-scale-missing": "if activations have static scales, every quantized module has a usable one",
    "expert-suffix-sets": "all experts of a layer are stored alike",
    "missing-tensor": "every layer and every expert that the config counts is there",
    "exclude-conflict": "config and tensors agree on what is quantized, and every exclude pattern matches something",
    "config-conflict": "the config files agree with each other and with the tensors, and count in whole numbers",
    "dead-tensor": "no matrix is all zeros",
    "scale-outlier": "no layer's or expert's weights are far larger or smaller than its peers'",
    "nan-values": "no FP8 code or plain weight is NaN or infinite, where they are looked at",
    "global-scale-reciprocal": "no global scale is a divisor where a multiplier belongs",
    "power-of-two-factor": "no factor 2^k runs through all gates, or all block scales",
    "exclude-ambiguous": "no exclude pattern such as layers.1* means layers 10 to 19 as well",
    "duplicate-module": "no module is stored under two prefixes",
    "tied-embeddings": "an output head that config.json ties to the embeddings is them",
    "kv-scale": "scales of the KV cache are usable, calibrated, and there if the config declares one",
    "tensor-parallel": "quantized matrices split into whole blocks over some (or the asked) tensor-parallel size",
}
SEVERITIES = ("error", "warning", "info")


def lint_checkpoint(
    path: str | Path,
    *,
    allow: Iterable[str] = (),
    all_scales: bool = False,
    all_values: bool = False,
    tensor_parallel: Sequence[int] = (),
) -> LintReport:
    """Run every check on the checkpoint at `path`.

    allow: ids of checks whose findings are kept with severity "allowed" instead of failing. all_scales: read every
    block scale, whatever it takes; all_values: every plain weight and FP8 code. tensor_parallel: sizes that the
    checkpoint is to be served with; a matrix that one of them does not divide is an error. Raises ConfigError for an
    unknown id, CheckpointError for a checkpoint that cannot be opened.
    """
    allow = tuple(allow)
    unknown = [check for check in allow if check not in CHECKS]
    if unknown:
        raise ConfigError(f"lint.allow names an unknown check {unknown[0]!r}", fix=f"known: {', '.join(CHECKS)}")
    if any(size < 1 for size in tensor_parallel):
        raise ConfigError(f"tensor-parallel size {min(tensor_parallel)}", fix="give a number of devices, 1 or more")
    started = time.perf_counter()
    with open_checkpoint(path, strict=False) as checkpoint:
        facts = read_facts(checkpoint, all_scales=all_scales, all_values=all_values)
        findings = [*_check_structure(checkpoint, tensor_parallel), *_check_scales(checkpoint, facts)]
        entries = checkpoint.entries()
        order = list(CHECKS)
        findings.sort(key=lambda f: (SEVERITIES.index(f.severity), order.index(f.check)))
        return LintReport(
            checkpoint=checkpoint.folder.name,
            dialect=checkpoint.dialect,
            checks=tuple(CHECKS),
            findings=tuple(replace(f, severity="allowed") if f.check in allow else f for f in findings),
            quantized_tensors=sum(e.quantized for e in entries),
            tensors=len(entries),
            seconds=time.perf_counter() - started,
            scale_bytes=facts.scale_bytes,
            scale_bytes_read=facts.scale_bytes_read,
            value_bytes=facts.value_bytes,
            value_bytes_read=facts.value_bytes_read,
            weights=checkpoint.weights_digest(),
        )


def doubts(checkpoint: Checkpoint) -> list[str]:
    """Errors that config and shapes alone show, in a sentence each, for whoever is about to convert the checkpoint."""
    found = [*check_config_values(checkpoint), *check_shape_conflict(checkpoint)]
    return [f"lint rejects the source: {f.check}: {f.message}" for f in found if f.severity == "error"]


def _check_structure(checkpoint: Checkpoint, tensor_parallel: Sequence[int]) -> Iterator[LintFinding]:
    yield from found_while_opening(checkpoint)
    yield from check_config_values(checkpoint)
    yield from check_config_conflict(checkpoint)
    yield from check_exclude_conflict(checkpoint)
    yield from check_exclude_ambiguous(checkpoint)
    yield from check_shape_conflict(checkpoint)
    yield from check_missing_tensor(checkpoint)
    yield from check_surplus_tensor(checkpoint)
    yield from check_expert_suffix_sets(checkpoint)
    yield from check_duplicate_module(checkpoint)
    yield from check_tied_embeddings(checkpoint)
    yield from check_kv_scale(checkpoint)
    yield from check_tensor_parallel(checkpoint, tensor_parallel)


def _check_scales(checkpoint: Checkpoint, facts: Facts) -> Iterator[LintFinding]:
    matrices = facts.matrices
    yield from check_scale_nan(matrices)
    yield from check_nan_values(facts)
    yield from check_scale_sign(matrices)
    yield from check_scale_subnormal(matrices)
    yield from check_global_scale_range(matrices)
    yield from check_global_scale_mismatch(matrices, checkpoint)
    yield from check_input_scale(matrices, checkpoint)
    yield from check_dead_tensor(matrices)
    yield from check_power_of_two(matrices)
    yield from check_scale_outlier(matrices)
