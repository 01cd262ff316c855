"""Adds the parts of a product whose K was split over programs, in order: one launch, no intermediate.

y_mn = triton_gemm_sum.sum_parts(parts_smn, torch.bfloat16)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_elements import rounded_to

_TILE = 1024


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """`[split, M, N]` float32 to its sum `[M, N]` in `dtype`; one part is returned as it is."""
    if parts.shape[0] == 1:
        return parts[0]
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    count = out.numel()
    _sum_kernel[(triton.cdiv(count, _TILE),)](parts, out, count, PARTS=parts.shape[0], TILE=_TILE, num_warps=4)
    return out


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, count, PARTS: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = at < count
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * count + at, mask=here, other=0.0)
    tl.store(out_ptr + at, rounded_to(total, out_ptr.dtype.element_ty), mask=here)
