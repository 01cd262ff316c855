"""What lint reads: each quantized tensor's scales once, and codes where a sample or a zero scale calls for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from workbench.formats import QuantizedTensor, get_format
from workbench.kernels.tables import E8M0_BIAS, E8M0_NAN

from .open import Checkpoint, Entry

SAMPLE_BYTES = 4096  # codes read from the middle of a tensor to see whether it is alive


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleFacts:
    """What one matrix's scales look like.

    nan, negative: block scales. zero_live: blocks with scale zero and a non-zero code. largest: largest block scale
    (NaN excluded). level_log2: mean log2 of the positive block scales times the global scale; NaN when there is none.
    dead: every code decodes to zero, or every scale is zero. global_scale, input_scale: None where not stored.
    """

    entry: Entry
    blocks: int
    nan: int
    negative: int
    zero_live: int
    largest: float
    level_log2: float
    dead: bool
    global_scale: float | None
    input_scale: float | None


def read_facts(checkpoint: Checkpoint) -> list[ScaleFacts]:
    """Facts on every quantized matrix, in layer order; and on plain matrices only whether they are dead."""
    return [
        _quantized_facts(checkpoint, e) if e.quantized else _plain_facts(checkpoint, e)
        for e in checkpoint.entries()
        if e.quantized or (e.projection and len(e.shape) == 2 and e.layer >= 0)
    ]


def _quantized_facts(checkpoint: Checkpoint, entry: Entry) -> ScaleFacts:
    parts = checkpoint.parts(entry.name)
    load = checkpoint.folder.load
    scale_bytes = load(parts["block_scales"].name).view(torch.uint8).numpy().reshape(-1)
    counts = np.bincount(scale_bytes, minlength=256)
    has_global = get_format(entry.format).has_global
    values = _E4M3_VALUES if has_global else _E8M0_VALUES
    global_scale = float(load(parts["global_scale"].name).float()) if "global_scale" in parts else None
    positive = (values > 0) & (counts > 0)
    nan = int(counts[np.isnan(values)].sum())
    zero = int(counts[values == 0].sum()) if has_global else 0
    factor = global_scale if global_scale is not None else 1.0
    level = math.nan
    if positive.any() and 0 < factor < math.inf:
        level = float((counts[positive] * np.log2(values[positive])).sum() / counts[positive].sum() + math.log2(factor))
    all_zero_scales = not positive.any() and nan == 0
    return ScaleFacts(
        entry=entry,
        blocks=scale_bytes.size,
        nan=nan,
        negative=int(counts[0x80:0xFF].sum()) if has_global else 0,
        zero_live=_live_blocks(checkpoint, entry, scale_bytes) if zero else 0,
        largest=float(values[positive].max()) if positive.any() else 0.0,
        level_log2=level,
        dead=all_zero_scales or _is_zero(checkpoint, entry, 0x77),
        global_scale=global_scale,
        input_scale=float(load(parts["input_scale"].name).float()) if "input_scale" in parts else None,
    )


def _plain_facts(checkpoint: Checkpoint, entry: Entry) -> ScaleFacts:
    return ScaleFacts(
        entry=entry,
        blocks=0,
        nan=0,
        negative=0,
        zero_live=0,
        largest=0.0,
        level_log2=math.nan,
        dead=_is_zero(checkpoint, entry, None),
        global_scale=None,
        input_scale=None,
    )


def _is_zero(checkpoint: Checkpoint, entry: Entry, mask: int | None) -> bool:
    """Whether all values are +-0. A sample decides for a live tensor; the whole is read only when the sample is zero.

    mask: bits of a byte that make a value non-zero (0x77 for two FP4 codes); None: compare as floats.
    """
    info = checkpoint.parts(entry.name)["values"]
    if info.nbytes == 0:
        return False
    if mask is None:
        count = min(SAMPLE_BYTES, info.nbytes)
        sample = np.frombuffer(checkpoint.folder.load_bytes(info, (info.nbytes - count) // 16 * 8, count), np.uint8)
        if np.count_nonzero(sample & 0x7F):
            return False
        return not bool(torch.count_nonzero(checkpoint.folder.load(info.name)))
    count = min(SAMPLE_BYTES, info.nbytes)
    sample = np.frombuffer(checkpoint.folder.load_bytes(info, (info.nbytes - count) // 2, count), np.uint8)
    if np.count_nonzero(sample & mask):
        return False
    return not np.count_nonzero(checkpoint.folder.load(info.name).view(torch.uint8).numpy() & mask)


def _live_blocks(checkpoint: Checkpoint, entry: Entry, scale_bytes: np.ndarray) -> int:
    """Blocks whose E4M3 scale is +-0 while a code is not."""
    q = checkpoint.read(entry.name)
    assert isinstance(q, QuantizedTensor)
    codes = q.codes.numpy().reshape(scale_bytes.size, -1)
    zero = (scale_bytes & 0x7F) == 0
    return int(((codes[zero] & 0x77) != 0).any(axis=1).sum())


_E4M3_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
_E8M0_VALUES = np.where(np.arange(256) == E8M0_NAN, np.nan, 2.0 ** (np.arange(256.0) - E8M0_BIAS))
