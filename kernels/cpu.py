"""Faster CPU versions of the reference's NVFP4 and MXFP4, equal to it bit for bit.

    codes, scales, global_scale = cpu.nvfp4_quantize(w_nk)
    w_hat_nk = cpu.nvfp4_dequantize(codes, scales, global_scale, torch.bfloat16)

The loops are `cpu_loops.py`'s: compiled by Numba on first use (about a second each, then cached on disk for the next
process), in as many threads as torch.get_num_threads() says; nothing but the results is allocated. Values are read in
their own dtype (float32, bfloat16, float16); another dtype, or a tensor that is not contiguous, is copied first. The
reference stays the definition; tests compare every byte. docs/performance.md has the measured speed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from . import reference
from .tables import MXFP4_BLOCK, NVFP4_BLOCK, ScaleRule

_PART = (
    1 << 18
)  # values that a thread takes at a time, a fraction of a millisecond; fewer are not worth a second thread
_STORED_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# What to add to a maximum's bits so that the exponent grows where the rule rounds up: from a significand of 1.75
# (even), above 1.5 (rceil), above 1 (ceil).
_CARRY = {ScaleRule.FLOOR: 0, ScaleRule.EVEN: 0x200000, ScaleRule.RCEIL: 0x3FFFFF, ScaleRule.CEIL: 0x7FFFFF}


def nvfp4_quantize(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w` `[..., K]` to NVFP4 by the amax rule; equals `reference.nvfp4_quantize(w, global_scale)`."""
    from . import cpu_loops as loops

    scale_shape = _scale_shape(w.shape, NVFP4_BLOCK)
    x = _stored(w)
    if global_scale is None:
        largest: list[int] = []
        _in_threads(lambda start, stop: largest.append(loops.largest_magnitude(x, start, stop)), len(x), 1)
        amax = torch.tensor(max(largest, default=0), dtype=torch.int32).view(torch.float32)
        global_scale = reference.nvfp4_global_scale(amax)
    global_scale = global_scale.float()
    codes = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8)
    scales = torch.empty(scale_shape, dtype=torch.float8_e4m3fn)
    shared, per_global = _per_block(global_scale, scale_shape)
    arrays = (x, shared, per_global, _e4m3_values(), _flat(codes), _flat(scales.view(torch.uint8)))
    _in_threads(lambda start, stop: loops.nvfp4_encode(*arrays, start, stop), scales.numel(), NVFP4_BLOCK)
    return codes, scales, global_scale


def nvfp4_dequantize(
    packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """NVFP4 `[..., K/2]` uint8 and scales `[..., K/16]` float8_e4m3fn to values `[..., K]` of `dtype`.

    `global_scale` (float32 decode multiplier) broadcasts against `scales`. Equals
    `reference.nvfp4_dequantize(packed, scales, global_scale).to(dtype)`.
    """
    return _decode(packed, scales, _e4m3_values(), global_scale.float(), NVFP4_BLOCK, dtype)


def nvfp4_qdq_activation(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Quantize-dequantize activations `[M, K]` through NVFP4; equals `reference.nvfp4_qdq_activation`."""
    from . import cpu_loops as loops

    blocks = _scale_shape(x.shape, NVFP4_BLOCK)[-1]
    out = torch.empty(x.shape, dtype=x.dtype if x.dtype in _STORED_BITS else torch.float32)
    shared = torch.empty(0, dtype=torch.float32) if global_scale is None else global_scale.float()
    if shared.numel() > 1:
        shared = shared.expand(*x.shape[:-1], 1)
    arrays = (_stored(x), _flat(shared), blocks, _e4m3_values(), _stored(out))
    _in_threads(lambda start, stop: loops.nvfp4_round(*arrays, start, stop), x.shape[:-1].numel(), x.shape[-1])
    return out.to(x.dtype)


def mxfp4_quantize(w: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> tuple[Tensor, Tensor]:
    """Quantize `w` `[..., K]` to MXFP4; equals `reference.mxfp4_quantize(w, rule)`.

    Raises ValueError for a rule that is not one of floor, even, rceil and ceil.
    """
    from . import cpu_loops as loops

    rule = ScaleRule(rule)
    if rule not in _CARRY:
        raise ValueError(f"no fast path for MXFP4's scale rule {rule.value!r}; choose one of: {', '.join(_CARRY)}")
    codes = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8)
    scale_bytes = torch.empty(_scale_shape(w.shape, MXFP4_BLOCK), dtype=torch.uint8)
    arrays = (_stored(w), _CARRY[rule], _flat(codes), _flat(scale_bytes))
    _in_threads(lambda start, stop: loops.mxfp4_encode(*arrays, start, stop), scale_bytes.numel(), MXFP4_BLOCK)
    return codes, scale_bytes


def mxfp4_dequantize(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 `[..., K/2]` uint8 and E8M0 bytes `[..., K/32]` uint8 to values `[..., K]` of `dtype`.

    Equals `reference.mxfp4_dequantize(packed, scale_bytes).to(dtype)`.
    """
    return _decode(packed, scale_bytes, _e8m0_values(), torch.ones((), dtype=torch.float32), MXFP4_BLOCK, dtype)


def mxfp4_qdq_activation(x: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> Tensor:
    """Quantize-dequantize activations `[M, K]` through MXFP4; equals `reference.mxfp4_qdq_activation`."""
    return mxfp4_dequantize(*mxfp4_quantize(x, rule), x.dtype)


def prepare(dtype: torch.dtype) -> None:
    """Compile, or load from the cache, what serving a model of `dtype` calls, so that no request waits for it."""
    x = torch.zeros(1, MXFP4_BLOCK, dtype=dtype)
    nvfp4_qdq_activation(x)
    mxfp4_qdq_activation(x)  # decodes as well, with the loop of both formats


def _decode(
    packed: Tensor, scale_bytes: Tensor, scale_values: Any, global_scale: Tensor, block: int, dtype: torch.dtype
) -> Tensor:
    from . import cpu_loops as loops

    packed, scale_bytes = packed.view(torch.uint8), scale_bytes.view(torch.uint8)
    shape = torch.Size((*packed.shape[:-1], 2 * packed.shape[-1]))
    if _scale_shape(shape, block) != scale_bytes.shape:
        raise ValueError(
            f"codes {tuple(packed.shape)} and block scales {tuple(scale_bytes.shape)} do not fit each other"
        )
    out = torch.empty(shape, dtype=dtype if dtype in _STORED_BITS else torch.float32)
    shared, per_global = _per_block(global_scale, scale_bytes.shape)
    arrays = (_flat(packed), _pairs(), _flat(scale_bytes), scale_values, shared, per_global, block, _stored(out))
    _in_threads(lambda start, stop: loops.decode(*arrays, start, stop), scale_bytes.numel(), block)
    return out.to(dtype)


# ---- tensors as flat arrays ------------------------------------------------------------------------------------------


def _flat(t: Tensor) -> Any:
    """A flat array over t's memory, or over a contiguous copy's."""
    return t.detach().contiguous().view(-1).numpy()


def _stored(t: Tensor) -> Any:
    """A flat array of the bits of t's values, float32's where the loops do not know the dtype."""
    t = t.detach().contiguous()
    t = t if t.dtype in _STORED_BITS else t.float()
    return _flat(t.view(_STORED_BITS[t.dtype]))


def _scale_shape(shape: torch.Size, block: int) -> torch.Size:
    """Shape of the block scales of values of `shape`. The loops check no index, so a partial block is refused here."""
    if not shape or shape[-1] % block:
        raise ValueError(f"the last dimension of {tuple(shape)} is not a multiple of the block of {block}")
    return torch.Size((*shape[:-1], shape[-1] // block))


def _per_block(global_scale: Tensor, shape: torch.Size) -> tuple[Any, int]:
    """Global scales as a flat array, and how many consecutive blocks of block scales of `shape` share one."""
    if global_scale.numel() == 1:
        return _flat(global_scale), max(1, shape.numel())
    if global_scale.shape[-1] == 1:
        return _flat(global_scale.expand(*shape[:-1], 1)), max(1, shape[-1])
    return _flat(global_scale.expand(shape)), 1


@functools.cache
def _pairs() -> Any:
    """A byte's two E2M1 values (low nibble first), seen as one uint64 so that one read moves both."""
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(-1)
    return _flat(reference.e2m1_values(reference.unpack_fp4(every_byte))).view("uint64")


@functools.cache
def _e4m3_values() -> Any:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@functools.cache
def _e8m0_values() -> Any:
    return reference.e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8)).numpy()


# ---- threads ---------------------------------------------------------------------------------------------------------


def _in_threads(loop: Callable[[int, int], object], count: int, values: int) -> None:
    """loop(start, stop) over 0 to count, in parts of about _PART values; `values`: of one item.

    Numba's own threads are not used: its portable layer ends the process when two threads call it at once, as a
    conversion's jobs do, and its OpenMP layer when a process forks, as vLLM's does.
    """
    part = max(1, _PART // max(1, values))
    starts = iter(range(0, count, part))  # shared: whoever is free takes the next part

    def work() -> None:
        for start in starts:
            loop(start, min(start + part, count))

    helpers = min(torch.get_num_threads(), -(-count // part)) - 1
    futures = [_pool(os.getpid()).submit(work) for _ in range(helpers)]
    work()
    for future in futures:
        if not future.cancel():  # one that never started has nothing left to do
            future.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child makes its own."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="workbench-kernels")
