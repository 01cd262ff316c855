"""Lint: does a checkpoint keep its own promises? Seconds from headers, config and scales, before anything is served.

    report = lint_checkpoint("nvidia--Kimi-K2.6-NVFP4", allow=("exclude-conflict",))

Reads every block scale and global scale; packed codes only in samples, and whole where a sample or a zero scale calls
for it. One tensor's scales are in memory at a time. What bytes alone cannot show: a consistently wrong packing (swapped
nibbles decode to plausible weights) or one wrong scale that stays in its neighbours' range; those need the source
weights (`workbench analyze`). A checkpoint that cannot be opened at all raises CheckpointError.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from workbench.errors import ConfigError
from workbench.records import LintReport

from .lint_config import (
    check_config_conflict,
    check_exclude_conflict,
    check_expert_suffix_sets,
    check_missing_tensor,
    found_while_opening,
)
from .lint_facts import read_facts
from .lint_scales import (
    check_dead_tensor,
    check_global_scale_mismatch,
    check_global_scale_range,
    check_input_scale,
    check_scale_nan,
    check_scale_outlier,
    check_scale_sign,
    check_scale_subnormal,
)
from .open import open_checkpoint

# id -> what it looks for. The order is the report's.
CHECKS: dict[str, str] = {
    "index-vs-files": "the index names what the shards hold, and nothing else lies there",
    "missing-companion": "every packed weight has its scales, and every scale its weight",
    "scale-shape": "scales have the shape and dtype that the format prescribes",
    "k-divisible": "K is a multiple of the format's block",
    "scale-nan": "no block scale is NaN (E4M3 0x7F, 0xFF; E8M0 255)",
    "scale-zero-or-negative": "no block scale is negative, or zero where its codes are not",
    "scale-subnormal": "block scales use E4M3's normal range (some kernels misread subnormals)",
    "global-scale-range": "global scales are finite, positive decode multipliers of a plausible size",
    "global-scale-mismatch": "projections that servers fuse (gate/up, q/k/v, q_a/kv_a) share one global scale",
    "input-scale-missing": "if activations have static scales, every quantized module has a usable one",
    "expert-suffix-sets": "all experts of a layer are stored alike",
    "missing-tensor": "every layer and every expert that the config counts is there",
    "exclude-conflict": "config and tensors agree on what is quantized, and every exclude pattern matches something",
    "config-conflict": "the config files agree with each other and with the tensors' format",
    "dead-tensor": "no matrix is all zeros",
    "scale-outlier": "no layer's or expert's weights are far larger or smaller than its peers'",
}


def lint_checkpoint(path: str | Path, *, allow: Iterable[str] = ()) -> LintReport:
    """Run every check on the checkpoint at `path`.

    allow: ids of checks whose findings are kept with severity "allowed" instead of failing. Raises ConfigError for an
    unknown id, CheckpointError for a checkpoint that cannot be opened.
    """
    allow = tuple(allow)
    unknown = [check for check in allow if check not in CHECKS]
    if unknown:
        raise ConfigError(f"lint.allow names an unknown check {unknown[0]!r}", fix=f"known: {', '.join(CHECKS)}")
    started = time.perf_counter()
    with open_checkpoint(path, strict=False) as checkpoint:
        facts = read_facts(checkpoint)
        findings = [
            *found_while_opening(checkpoint),
            *check_config_conflict(checkpoint),
            *check_exclude_conflict(checkpoint),
            *check_missing_tensor(checkpoint),
            *check_expert_suffix_sets(checkpoint),
            *check_scale_nan(facts),
            *check_scale_sign(facts),
            *check_scale_subnormal(facts),
            *check_global_scale_range(facts),
            *check_global_scale_mismatch(facts),
            *check_input_scale(facts, checkpoint),
            *check_dead_tensor(facts),
            *check_scale_outlier(facts),
        ]
        entries = checkpoint.entries()
        order = list(CHECKS)
        findings.sort(key=lambda f: (f.severity != "error", order.index(f.check)))
        return LintReport(
            checkpoint=str(checkpoint.path),
            dialect=checkpoint.dialect,
            checks=tuple(CHECKS),
            findings=tuple(replace(f, severity="allowed") if f.check in allow else f for f in findings),
            quantized_tensors=sum(e.quantized for e in entries),
            tensors=len(entries),
            seconds=time.perf_counter() - started,
        )
