"""Counts of errors: the joint density of e1 and e2, and e2 by code; of one matrix, and pooled over many.

counts = error_density(w, a, b)                  # [48, 48]
extra = extra_of(density, codes, power_e2)       # what a journal keeps of a matrix
pool_density(log, names, key), pool_codes(log, names, key, checkpoint)
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .journal import Journal

DENSITY_BINS, DENSITY_LIMIT, DENSITY_SAMPLES = 48, 3.0, 4096


def error_density(
    w: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    bins: int = DENSITY_BINS,
    limit: float = DENSITY_LIMIT,
    samples: int = DENSITY_SAMPLES,
) -> NDArray[np.int64]:
    """Counts `[bins, bins]` of (e1 / rms e1, e2 / rms e2) on [-limit, limit)^2; rows are e1, columns e2.

    About `samples` elements, at an odd stride so that every place in a block is seen; pairs beyond the limit are not
    counted. All zero where an error is identically zero.
    """
    stride = max(1, w.numel() // samples) | 1
    source, a, b = (t.reshape(-1)[::stride].double().numpy() for t in (w, first, second))
    return count_density(a - source, b - a, bins, limit)


def count_density(
    e1: NDArray[np.float64], e2: NDArray[np.float64], bins: int = DENSITY_BINS, limit: float = DENSITY_LIMIT
) -> NDArray[np.int64]:
    """The same from errors side by side, `[samples]` each."""
    rms1, rms2 = math.sqrt(float(np.mean(e1**2))), math.sqrt(float(np.mean(e2**2)))
    if not (0 < rms1 < math.inf and 0 < rms2 < math.inf):
        return np.zeros((bins, bins), np.int64)
    edges = np.linspace(-limit, limit, bins + 1)
    counts, _, _ = np.histogram2d(e1 / rms1, e2 / rms2, bins=[edges, edges])
    return counts.astype(np.int64)


def code_asymmetry(codes: NDArray[np.float64] | None) -> float:
    """Largest |mean e2 at +m plus mean e2 at -m| over its standard error, over the magnitudes m of the codes.

    Below about 3: as symmetric as chance has it. NaN where no magnitude has both signs at least 8 times.
    """
    if codes is None:
        return math.nan
    found = []
    for plus, minus in zip(codes[1:8], codes[9:16], strict=True):
        if min(plus[0], minus[0]) < 8:
            continue
        means = [side[1] / side[0] for side in (plus, minus)]
        variances = [
            max(0.0, side[2] / side[0] - m * m) / side[0] for side, m in zip((plus, minus), means, strict=True)
        ]
        if sum(variances) > 0:
            found.append(abs(sum(means)) / math.sqrt(sum(variances)))
    return max(found, default=math.nan)


def extra_of(density: NDArray[np.int64] | None, codes: NDArray[np.float64] | None, power_e2: float) -> dict[str, Any]:
    """What the journal keeps of one matrix's counts: `density`, packed, and `codes`, relative to the rms of e2."""
    extra: dict[str, Any] = {}
    if density is not None:
        extra["density"] = _pack(density)
    if codes is not None and (rms := math.sqrt(power_e2)) > 0:
        extra["codes"] = (codes / np.array([1.0, rms, rms * rms])).tolist()
    return extra


def pool_density(log: Journal, names: Iterable[str], key: str) -> dict[str, Any]:
    """Counts summed over matrices: {"limit", "counts"} with counts[e1 bin][e2 bin]."""
    total = np.zeros((DENSITY_BINS, DENSITY_BINS), np.int64)
    for name in names:
        packed = log.extra(name).get(key, {}).get("density")
        if packed:
            total += np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<u2").reshape(total.shape).astype(int)
    return {"limit": DENSITY_LIMIT, "counts": total.tolist()}


def pool_codes(log: Journal, names: Iterable[str], key: str, original: Any) -> dict[str, list[list[float]]]:
    """Code sums over matrices by projection."""
    total: dict[str, NDArray[np.float64]] = {}
    for name in names:
        codes = log.extra(name).get(key, {}).get("codes")
        if codes:
            projection = original.entry(name).projection
            total[projection] = total.get(projection, 0.0) + np.asarray(codes)
    return {projection: codes.tolist() for projection, codes in sorted(total.items())}


def _pack(counts: NDArray[np.int64]) -> str:
    return base64.b64encode(zlib.compress(counts.astype("<u2").tobytes(), 9)).decode()
