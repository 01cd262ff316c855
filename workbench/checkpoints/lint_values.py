"""What lint sees of values: NaN and infinity in plain weights and FP8 codes, and matrices that are all zero.

    values = Values(checkpoint, all_values=False)
    values.nonfinite(entry)         # whether a value of it is NaN or infinite, among those that were read
    values.is_dead(entry)           # whether every value is zero: read whole before that is said

Plain weights and FP8 codes can hold NaN, so they are read whole up to a budget for the checkpoint; beyond it each
tensor gives its start, middle and end, and `bytes` and `bytes_read` say how much that was. Codes that cannot hold NaN
(4 and 6 bits, integers) give a sample that tells whether they are alive. From the Hub, where each read is a request,
values are read on doubt only, if not all are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from workbench.formats import QuantizedTensor, get_format
from workbench.formats.table import WHOLE
from workbench.kernels.elements import decode

from .header import StoredTensor
from .lint_reads import FLOATS, ValueScan, is_remote, read_pieces, read_windows, scan_floats
from .names import parse_name
from .open import Checkpoint, Entry
from .selection import KV_SCALES

VALUE_BUDGET = 1 << 30  # bytes of plain weights and FP8 codes that are read at all, if not asked for all
CODE_BUDGET = 1 << 30  # bytes of codes that are read whole, on doubt
SAMPLE_BYTES = 4096  # of a matrix's codes, to see whether it is alive

_FP8 = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
_ALIVE = ValueScan(alive=True, nonfinite=False)


class Values:
    """Everything that can be NaN is read when this is made, in the order of the files; the rest when it is asked for.

    bytes: stored size of plain weights and FP8 codes; bytes_read: of those that were looked at. Raises CheckpointError.
    """

    def __init__(self, checkpoint: Checkpoint, *, all_values: bool = False) -> None:
        self.checkpoint, self.folder = checkpoint, checkpoint.folder
        self.remote = is_remote(self.folder)
        self.bytes = self.bytes_read = 0
        self._code_budget = CODE_BUDGET
        self._scans = self._scan_floats(all_values)
        self._nonfinite = {name for name, scan in self._scans.items() if scan.nonfinite}
        self._samples: dict[str, ValueScan] = {}

    def sample(self, entries: list[Entry]) -> None:
        """Look at a few codes of every entry whose values were not scanned, in the order of the files."""
        if self.remote:
            return
        places = [
            (e, window)
            for e in entries
            if e.shared or self._values(e).name not in self._scans
            for window in _windows(e, self._values(e))
        ]
        places.sort(key=lambda p: (p[1][0].file, p[1][0].begin + p[1][1]))
        for entry, (info, offset, count) in places:
            alive = _is_alive(self.folder.load_bytes(info, offset, count), info, entry)
            before = self._samples.get(entry.name, _ALIVE)
            self._samples[entry.name] = ValueScan(alive=before.alive and alive, nonfinite=False)

    def nonfinite(self, entry: Entry) -> bool:
        """Whether a value that was read is NaN or infinite, without its scales. Of a stored tensor that holds several
        entries, each is read to tell whose it is (all are named once the budget for that is spent)."""
        if not self._nonfinite:
            return False
        roles = {role for role, info in self.checkpoint.parts(entry.name).items() if info.name in self._nonfinite}
        if roles != {"values"} or not entry.shared:
            return bool(roles)
        return not self._may_read(entry) or not bool(self._read(entry).isfinite().all())

    def is_dead(self, entry: Entry, *, doubt: bool = False) -> tuple[bool, bool]:
        """Whether every value is zero, and whether one is NaN or infinite after all. What looks alive is not read
        again; what was not looked at is read on `doubt`."""
        seen = self._samples.get(entry.name) if entry.shared else self._scans.get(self._values(entry).name)
        alive = (seen or self._samples.get(entry.name) or ValueScan(alive=not doubt, nonfinite=False)).alive
        if alive or 0 in entry.shape or not self._may_read(entry):
            return False, False
        values = self._read(entry)
        return not bool(torch.count_nonzero(values)), not bool(values.isfinite().all())

    def live_zero_blocks(self, entry: Entry) -> tuple[int | None, bool]:
        """How many blocks have a zero scale and a code that is not, and whether such a code is NaN; None: not read."""
        if not self._may_read(entry):
            return None, False
        q = self.checkpoint.read(entry.name)
        assert isinstance(q, QuantizedTensor)
        zero = q.block_scales.float() == 0
        if q.group_index is not None:
            return int(zero.sum()), False  # blocks of scattered columns: taken as live
        values = _unscaled(q)
        block = q.block or (q.spec.rows, q.spec.block)
        live = _any_in_block(values != 0, block).reshape(zero.shape)
        nan = _any_in_block(values.isnan(), block).reshape(zero.shape)
        return int((zero & live).sum()), bool((zero & nan).any())

    def _scan_floats(self, all_values: bool) -> dict[str, ValueScan]:
        """Scans of the stored tensors that can hold NaN, by name."""
        kinds: dict[str, str] = {}
        for entry in self.checkpoint.entries():
            if not entry.quantized and parse_name(entry.name).parameter in KV_SCALES:
                continue  # a check of their own
            for role, info in self.checkpoint.parts(entry.name).items():
                kind = _float_kind(entry, info) if role == "values" else info.dtype if role == "pre_quant_scale" else ""
                if kind in FLOATS and info.nbytes:
                    kinds[info.name] = kind
        infos = [self.folder.tensors[name] for name in kinds]
        self.bytes = sum(info.nbytes for info in infos)
        if self.remote and not all_values:
            return {}
        share = max(VALUE_BUDGET // max(len(infos), 1), SAMPLE_BYTES)
        everything = all_values or self.bytes <= VALUE_BUDGET
        scans: dict[str, ValueScan] = {}

        def add(info: StoredTensor, data: bytes | memoryview) -> None:
            self.bytes_read += len(data)
            scan = scan_floats(data, kinds[info.name])
            scans[info.name] = scan | scans.get(info.name, scan)

        for info, data in read_pieces(self.folder, [i for i in infos if everything or i.nbytes <= share]):
            add(info, data)
        rest = [info for info in infos if info.name not in scans]
        for info in sorted(rest, key=lambda i: (i.file, i.begin)):
            add(info, read_windows(self.folder, info, share))
        return scans

    def _values(self, entry: Entry) -> StoredTensor:
        return self.checkpoint.parts(entry.name)["values"]

    def _read(self, entry: Entry) -> torch.Tensor:
        """Values without their scales."""
        tensor = self.checkpoint.read(entry.name)
        return _unscaled(tensor) if isinstance(tensor, QuantizedTensor) else tensor

    def _may_read(self, entry: Entry) -> bool:
        info = self._values(entry)
        nbytes = info.nbytes // info.shape[0] if entry.shared and entry.expert >= 0 and info.shape else info.nbytes
        if nbytes > self._code_budget:
            return False
        self._code_budget -= nbytes
        return True


def _float_kind(entry: Entry, info: StoredTensor) -> str:
    """How an entry's values are stored, if they can be NaN: a key of FLOATS."""
    return _FP8.get(get_format(entry.format).element, "") if entry.quantized else info.dtype


def _windows(entry: Entry, info: StoredTensor) -> Iterator[tuple[StoredTensor, int, int]]:
    """Places (tensor, offset, bytes) to look at. Of a stack: neighbouring rows of this expert at two heights, so that
    gate and up are both met, whether they lie one after the other or in turn."""
    if info.nbytes == 0:
        return
    if not entry.shared:
        count = min(SAMPLE_BYTES, info.nbytes)
        yield info, (info.nbytes - count) // 2 // 24 * 24, count  # a multiple of what any element is packed in
        return
    experts = info.shape[0] if len(info.shape) > 2 else 1
    part = info.nbytes // experts
    rows = info.shape[1] if len(info.shape) > 2 else info.shape[0]
    width = part // rows
    for row in dict.fromkeys((rows // 4, rows // 4 + 1, 3 * rows // 4, 3 * rows // 4 + 1)):
        if row < rows and width:
            yield info, max(entry.expert, 0) % experts * part + row * width, min(SAMPLE_BYTES // 4, width)


def _is_alive(data: bytes, info: StoredTensor, entry: Entry) -> bool:
    """Whether some stored bytes hold a value that is not zero. Integers are alive when not all bytes are equal: what
    zero is, their packing and zero points say."""
    kind = _float_kind(entry, info)
    if kind in FLOATS:
        return scan_floats(data, kind).alive
    element = get_format(entry.format).element if entry.quantized else "int"
    if element == "e2m1":
        return bool((np.frombuffer(data, np.uint8) & 0x77).any())
    if element in ("e2m3", "e3m2"):
        codes = torch.frombuffer(bytearray(data[: len(data) // 3 * 3]), dtype=torch.uint8)
        return bool(torch.count_nonzero(decode(codes, element)))
    return data.count(data[:1]) != len(data)


def _unscaled(q: QuantizedTensor) -> torch.Tensor:
    """Codes as values; with zero points as they decode, since there the zero code depends on the block."""
    return decode(q.codes, q.spec.element) if q.zero_points is None else q.dequantize()


def _any_in_block(flags_nk: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Whether any flag of a block is set, `[blocks of N, blocks of K]`."""
    n, k = flags_nk.shape
    rows, columns = (size if b == WHOLE else b for b, size in zip(block, (n, k), strict=True))
    padded = torch.nn.functional.pad(flags_nk, (0, -k % columns, 0, -n % rows))
    return padded.reshape(-(-n // rows), rows, -(-k // columns), columns).any(3).any(1)
