"""How lint reads scales: single values of a whole checkpoint in few reads, block scales whole or in samples.

    for info, data in read_runs(folder, infos):      # neighbours in a file come in one read
        scan = scan_scales(data, info.dtype)         # how many are NaN, zero, negative; the largest; their mean log2
    scan_floats(data, "BF16").nonfinite          # whether a value is NaN or infinite

A checkpoint of 1 T parameters has hundreds of thousands of scalars, which lie side by side, and some 30 to 60 GB of
block scales, which do not: the first are always read, the second up to a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.kernels.tables import E8M0_BIAS, E8M0_NAN

from .files import Folder
from .header import StoredTensor

MOST_GAP = 1 << 14  # bytes between two tensors that one read skips over
MOST_REMOTE_GAP = 1 << 18  # a request to the Hub costs as much as these
MOST_RUN = 1 << 23
WINDOWS = 3  # of a sample: the start, the middle, the end
_WIDE = 1 << 16  # bytes from which two of them are counted at a time

# Of stored floats: the unsigned integer of their size, its bits but the sign, and the least of those that is no number.
FLOATS: dict[str, tuple[str, int, int]] = {
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F8_E4M3": ("u1", 0x7F, 0x7F),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
}


@dataclass(frozen=True, slots=True)
class Scan:
    """What some block scales are. count: how many were looked at; nan, infinite, negative, zero: how many of them (-0
    counts as negative and zero). smallest, largest: of the positive finite ones, 0.0 without any. mean_log2: of the
    same, NaN without any."""

    count: int = 0
    nan: int = 0
    infinite: int = 0
    negative: int = 0
    zero: int = 0
    smallest: float = 0.0
    largest: float = 0.0
    mean_log2: float = float("nan")


def read_runs(folder: Folder, infos: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, memoryview]]:
    """Every tensor's bytes, in the files' order; tensors that lie close together come in one read of at most
    `MOST_RUN` bytes (or of one tensor). Raises CheckpointError."""
    most_gap = MOST_REMOTE_GAP if is_remote(folder) else MOST_GAP
    run: list[StoredTensor] = []
    for info in sorted(infos, key=lambda i: (i.file, i.begin)):
        if run and (
            info.file != run[0].file or info.begin - run[-1].end > most_gap or info.end - run[0].begin > MOST_RUN
        ):
            yield from _read_run(folder, run)
            run = []
        run.append(info)
    if run:
        yield from _read_run(folder, run)


def read_pieces(folder: Folder, infos: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, bytes | memoryview]]:
    """`read_runs`, and of a tensor larger than `MOST_RUN` one piece of that size after the other."""
    large = [info for info in infos if info.nbytes > MOST_RUN]
    yield from read_runs(folder, (info for info in infos if info.nbytes <= MOST_RUN))
    for info in sorted(large, key=lambda i: (i.file, i.begin)):
        for offset in range(0, info.nbytes, MOST_RUN):
            yield info, folder.load_bytes(info, offset, min(MOST_RUN, info.nbytes - offset))


def read_windows(folder: Folder, info: StoredTensor, count: int) -> bytes:
    """About `count` bytes of a tensor: its start, its middle and its end."""
    width = max(count // WINDOWS // 8 * 8, 8)
    last = (info.nbytes - width) // 8 * 8
    return b"".join(folder.load_bytes(info, last * i // (WINDOWS - 1) // 8 * 8, width) for i in range(WINDOWS))


def is_remote(folder: Folder) -> bool:
    """Whether bytes come from the Hub, a request each read."""
    return folder.name.startswith("hf:")


@dataclass(frozen=True, slots=True)
class ValueScan:
    """What some values are. alive: one is not zero. nonfinite: one is NaN or infinite."""

    alive: bool
    nonfinite: bool

    def __or__(self, other: ValueScan) -> ValueScan:
        return ValueScan(self.alive or other.alive, self.nonfinite or other.nonfinite)


def scan_floats(data: bytes | memoryview, kind: str) -> ValueScan:
    """Scan values stored as `kind` (a key of FLOATS); a cut-off last one is left out."""
    integer, magnitude, first = FLOATS[kind]
    size = np.dtype(integer).itemsize
    largest = int((np.frombuffer(data, integer, len(data) // size) & magnitude).max(initial=0))
    return ValueScan(alive=largest > 0, nonfinite=largest >= first)


def scan_scales(data: bytes | memoryview, dtype: str) -> Scan:
    """Scan scales stored as `dtype` (a header's name): E4M3, E8M0 (also as U8), or floats."""
    if dtype in _TABLES:
        return _scan_counts(_count_bytes(np.frombuffer(data, np.uint8)), _TABLES[dtype])
    return scan_values(to_doubles(data, dtype))


def scan_tensor(scales: torch.Tensor) -> Scan:
    """Scan scales in canonical form: E4M3, E8M0 bytes, or floats."""
    if scales.element_size() == 1:
        table = _TABLES["F8_E4M3" if scales.dtype == torch.float8_e4m3fn else "U8"]
        return _scan_counts(_count_bytes(scales.contiguous().view(torch.uint8).numpy().reshape(-1)), table)
    return scan_values(scales.double().numpy().reshape(-1))


def scan_values(values: NDArray[np.float64]) -> Scan:
    positive = values[(values > 0) & (values < np.inf)]
    return Scan(
        count=values.size,
        nan=int(np.isnan(values).sum()),
        infinite=int(np.isinf(values).sum()),
        negative=int((values < 0).sum()),
        zero=int((values == 0).sum()),
        smallest=float(positive.min()) if positive.size else 0.0,
        largest=float(positive.max()) if positive.size else 0.0,
        mean_log2=float(np.log2(positive).mean()) if positive.size else float("nan"),
    )


def to_doubles(data: bytes | memoryview, dtype: str) -> NDArray[np.float64]:
    """Stored floats, E4M3 or E8M0 bytes as float64."""
    if dtype in _TABLES:
        return _TABLES[dtype].values[np.frombuffer(data, np.uint8)]
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float64)


class _Table:
    """The values of one-byte scales, and what each byte adds to a scan."""

    def __init__(self, values: NDArray[np.float64], negative: NDArray[np.bool_]) -> None:
        self.values = values
        self.positive = values > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(self.positive, np.log2(values), 0.0)
        self.sums = np.stack([np.isnan(values), negative, values == 0, self.positive, logs], axis=1).astype(np.float64)


def _read_run(folder: Folder, run: list[StoredTensor]) -> Iterator[tuple[StoredTensor, memoryview]]:
    data = memoryview(folder.load_bytes(run[0], 0, run[-1].end - run[0].begin))
    for info in run:
        yield info, data[info.begin - run[0].begin : info.end - run[0].begin]


def _count_bytes(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each byte occurs."""
    if data.size < _WIDE:
        return np.bincount(data, minlength=256)
    even = data[: data.size // 2 * 2].view(np.uint16)  # half as many steps
    pairs = np.bincount(even, minlength=1 << 16).reshape(256, 256)
    counts = pairs.sum(0) + pairs.sum(1)
    if data.size % 2:
        counts[data[-1]] += 1
    return counts


def _scan_counts(counts: NDArray[np.int64], table: _Table) -> Scan:
    nan, negative, zero, positive, logs = counts @ table.sums
    present = np.flatnonzero(counts.astype(bool) & table.positive)  # larger bytes are larger scales
    return Scan(
        count=int(counts.sum()),
        nan=int(nan),
        negative=int(negative),
        zero=int(zero),
        smallest=float(table.values[present[0]]) if positive else 0.0,
        largest=float(table.values[present[-1]]) if positive else 0.0,
        mean_log2=float(logs / positive) if positive else float("nan"),
    )


_BYTES = np.arange(256)
_E4M3 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
_E8M0 = np.where(_BYTES == E8M0_NAN, np.nan, 2.0 ** (_BYTES - float(E8M0_BIAS)))
_POWERS = _Table(_E8M0, np.zeros(256, dtype=bool))
_TABLES = {"F8_E4M3": _Table(_E4M3, (_BYTES >= 0x80) & (_BYTES < 0xFF)), "F8_E8M0": _POWERS, "U8": _POWERS}
