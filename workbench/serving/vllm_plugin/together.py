"""Several NVFP4 matrices to MXFP4 in one launch: one by one, a GPU's launches and waits cost more than the conversion.

for batch in batches(entries, lambda e: can_join(e), at_most=64): ...
packed = requantize_together(stored, rule, meter)      # {place: QuantizedTensor}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.kernels import triton_dispatch
from workbench.kernels.tables import MXFP4_BLOCK, MXFP4_RULES, ScaleRule

from .meter import LoadMeter

AT_MOST = 64  # matrices that lie on the GPU twice at once


def batches(entries: Iterable[Any], joins: Callable[[Any], bool], at_most: int) -> Iterator[list[Any]]:
    """`entries` in their order, in lists: up to `at_most` consecutive ones of one layer that join, else one alone."""
    batch: list[Any] = []
    for entry in entries:
        if batch and not (joins(entry) and entry.layer == batch[0].layer and len(batch) < at_most):
            yield batch
            batch = []
        batch.append(entry)
        if not joins(entry):
            yield batch
            batch = []
    if batch:
        yield batch


def requantize_together(stored: Mapping[str, Any], rule: ScaleRule, meter: LoadMeter, *, name: str) -> dict[str, Any]:
    """MXFP4 of those of `stored` (by name) that can go together, on the meter's device; the bytes of one by one.

    Left out: what is alone in its shape, what is no NVFP4 matrix of one float32 global scale, and every member of a
    group whose scales are not all finite (one by one, the culprit is named). name: says the layer.
    """
    from workbench.formats import QuantizedTensor

    groups: dict[torch.Size, list[str]] = defaultdict(list)
    for key, q in stored.items():
        if not isinstance(q, Tensor) and _can_go(q, rule):
            groups[q.codes.shape].append(key)
    found: dict[str, Any] = {}
    for keys in groups.values():
        if len(keys) < 2:
            continue
        members = [stored[key] for key in keys]
        with meter.reading():
            codes = torch.stack([q.codes for q in members]).to(meter.device)
            scales = torch.stack([q.block_scales.view(torch.uint8) for q in members]).to(meter.device)
            scales = scales.view(torch.float8_e4m3fn)
            g = torch.stack([q.global_scale.reshape(()) for q in members]).to(meter.device)[:, None, None]
        with meter.converting(name, count=len(keys)):
            if not bool((scales.float() * (6.0 * g)).isfinite().all()):
                continue
            out, scale_bytes = triton_dispatch.nvfp4_to_mxfp4(codes, scales, g, rule)
            meter.holds(codes, scales, out, scale_bytes)
        for place, key in enumerate(keys):
            found[key] = QuantizedTensor(
                format="mxfp4", codes=out[place], block_scales=scale_bytes[place], global_scale=None,
                shape=members[place].shape,
            )  # fmt: skip
    return found


def _can_go(q: Any, rule: ScaleRule) -> bool:
    return (
        q.format == "nvfp4"
        and rule in MXFP4_RULES
        and q.pre_quant_scale is None
        and q.codes.dim() == 2
        and q.shape[-1] % MXFP4_BLOCK == 0
        and q.global_scale.dtype == torch.float32
        and q.global_scale.numel() == 1
    )
