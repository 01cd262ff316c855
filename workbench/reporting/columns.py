"""A large table as short text: columns of small integers, compressed; the page's script (and `unpack`) read it back.

    packed = pack({"sqnr_total_db": (values, 0.01)})     # {"columns": [...], "rows": 69303, "data": "eJy…"}
    unpack(packed)["sqnr_total_db"]                      # float64, within half of the step

A value is stored as a multiple of its column's step, which is the last digit that the page prints: what is shown is
what a rounded record shows. Where a column spans more steps than 16 bits hold, the step grows (1, 2, 5, 10, …) and the
column says so. NaN and both infinities have codes of their own. The price of the compression is the resolution: the
figures in full are in the run's parquet files.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NAN, PLUS_INFINITY, MINUS_INFINITY = 0, 1, 2  # counted down from the width's largest code
_SPECIAL = 3


def pack(columns: Mapping[str, tuple[Floats, float]]) -> dict[str, Any]:
    """Columns of equal length, each with the step that it wants, as plain data for JSON.

    A column is described by `name`, `step`, `first` (the smallest value in steps) and `width` (bytes a code). Low bytes
    of a column come before its high bytes, columns follow each other; all of it is one zlib stream in base64.
    """
    described, planes, rows = [], [], 0
    for name, (values, step) in columns.items():
        codes, step, first = quantize(values, step)
        width = codes.dtype.itemsize
        described.append({"name": name, "step": step, "first": first, "width": width})
        planes += [(codes >> (8 * byte) & 255).astype(np.uint8).tobytes() for byte in range(width)]
        rows = len(codes)
    data = base64.b64encode(zlib.compress(b"".join(planes), 9)).decode()
    return {"rows": rows, "columns": described, "data": data}


def unpack(packed: Mapping[str, Any]) -> dict[str, Floats]:
    """What `pack` kept, by column name."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    rows, at, columns = int(packed["rows"]), 0, {}
    for column in packed["columns"]:
        codes = np.zeros(rows, np.int64)
        for byte in range(column["width"]):
            codes |= raw[at : at + rows].astype(np.int64) << (8 * byte)
            at += rows
        columns[str(column["name"])] = _values(codes, column["width"], column["first"], column["step"])
    return columns


def quantize(values: Floats, step: float) -> tuple[NDArray[Any], float, int]:
    """Codes (uint8 where they fit, else uint16), the step that was needed, and the smallest value in steps."""
    finite = np.isfinite(values)
    low, high = (float(values[finite].min()), float(values[finite].max())) if finite.any() else (0.0, 0.0)
    room = 2**16 - 1 - _SPECIAL
    step = next(s for s in _steps(step) if round(high / s) - round(low / s) <= room)
    first = round(low / step)
    span = round(high / step) - first
    kind: Any = np.uint8 if span <= 2**8 - 1 - _SPECIAL else np.uint16
    top = int(np.iinfo(kind).max)
    codes = np.full(values.shape, top - NAN, kind)
    codes[finite] = np.rint(values[finite] / step - first).astype(kind)
    codes[values == math.inf] = top - PLUS_INFINITY
    codes[values == -math.inf] = top - MINUS_INFINITY
    return codes, step, first


def _steps(step: float) -> Any:
    """step, then 2, 5, 10, 20, … times it."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            yield float(f"{step * factor * power:.12g}")
        power *= 10


def _values(codes: NDArray[np.int64], width: int, first: int, step: float) -> Floats:
    top = 2 ** (8 * width) - 1
    values = np.asarray((codes + first) * step, np.float64)
    values[codes == top - NAN] = math.nan
    values[codes == top - PLUS_INFINITY] = math.inf
    values[codes == top - MINUS_INFINITY] = -math.inf
    return values
