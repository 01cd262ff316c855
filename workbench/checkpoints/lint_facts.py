"""What lint knows of each matrix: its scales, and as much of its codes as a doubt calls for.

    facts = read_facts(checkpoint)
    facts.matrices[0].scan.nan, facts.matrices[0].global_scale

Every single value (global and input scales, scales of a whole matrix) is read, and every expert's share of a stack.
Block scales are read whole until they exceed a budget for the checkpoint; then each matrix gives a sample of the same
size. Of codes and plain weights `lint_values.py` reads what can be NaN, and what a doubt calls for. From the Hub, where
each read is a request, block scales beyond the budget are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from workbench.formats import QuantizedTensor, get_format

from .files import Folder
from .header import DTYPES, StoredTensor
from .lint_reads import Scan, is_remote, read_runs, read_windows, scan_scales, scan_tensor, to_doubles
from .lint_values import Values
from .open import Checkpoint, Entry

SCALE_BUDGET = 1 << 30  # bytes of block scales that are read at all, if not asked for all
REMOTE_SCALE_BUDGET = 1 << 26
SCALAR_BYTES = 2048  # what is no larger is read in any case
MULTIPLIERS = ("global_scale", "input_scale")
DIVISORS = {"global_divisor": "global_scale", "input_divisor": "input_scale"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleFacts:
    """What one matrix's scales look like.

    scan: of its block scales, or of a sample of them (scan.count < blocks). blocks: how many there are. zero_live: zero
    scales over codes that are not all zero; None where the codes were not read. dead: every value is zero. nan_values:
    a value that was looked at is NaN or infinite without its scales. global_scale, input_scale: decode multipliers,
    None where there is none; 0.0 for a stored divisor of 0, inf for one that is infinitely small.
    """

    entry: Entry
    scan: Scan
    blocks: int = 0
    zero_live: int | None = 0
    dead: bool = False
    nan_values: bool = False
    global_scale: float | None = None
    input_scale: float | None = None

    @property
    def level_log2(self) -> float:
        """Mean log2 of the positive block scales times the global scale; NaN when there is none."""
        factor = 1.0 if self.global_scale is None else self.global_scale
        return self.scan.mean_log2 + math.log2(factor) if 0 < factor < math.inf else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """matrices: quantized ones, and plain ones inside the layers, in layer order. nonfinite: all other tensors
    (embeddings, norms, biases, ...) with a value that is NaN or infinite. scale_bytes: of all block scales,
    value_bytes: of plain weights and FP8 codes; ..._read: of those that were looked at."""

    matrices: list[ScaleFacts] = field(default_factory=list)
    nonfinite: list[Entry] = field(default_factory=list)
    scale_bytes: int = 0
    scale_bytes_read: int = 0
    value_bytes: int = 0
    value_bytes_read: int = 0


def read_facts(checkpoint: Checkpoint, *, all_scales: bool = False, all_values: bool = False) -> Facts:
    """Facts on every quantized matrix and, without scales, on plain ones. all_scales, all_values: read block scales, or
    plain weights and FP8 codes, beyond the budget too. Raises CheckpointError."""
    entries = [
        e
        for e in checkpoint.entries()
        if e.quantized or (e.projection and len(e.shape) == 2 and e.layer >= 0 and 0 not in e.shape)
    ]
    values = Values(checkpoint, all_values=all_values)
    values.sample(entries)
    reader = _Reader(checkpoint, entries, values, all_scales)
    matrices = {e.name for e in entries}
    return Facts(
        matrices=[reader.facts(e) for e in entries],
        nonfinite=[e for e in checkpoint.entries() if e.name not in matrices and values.nonfinite(e)],
        scale_bytes=reader.scale_bytes,
        scale_bytes_read=reader.scale_bytes_read,
        value_bytes=values.bytes,
        value_bytes_read=values.bytes_read,
    )


def without_codes(checkpoint: Checkpoint, known: Mapping[str, bytes] | None = None) -> Checkpoint:
    """The checkpoint with codes that have a shape but no memory (device "meta"), scales as they are.

    Every dialect thus cuts its scales out of stacks and tiles as it does when it reads, and no code is read. known:
    bytes of stored tensors that were read before.
    """
    values = {checkpoint.parts(e.name)["values"].name for e in checkpoint.entries() if e.quantized}
    return replace(checkpoint, folder=_WithoutCodes(checkpoint.folder, values, known or {}))


class _WithoutCodes(Folder):
    """A folder that hands out the tensors `values` without reading them, and those of `known` without reading them
    again."""

    def __init__(self, folder: Folder, values: set[str], known: Mapping[str, bytes]) -> None:
        for attribute in ("path", "tensors", "config", "files", "headers", "problems", "_source"):
            setattr(self, attribute, getattr(folder, attribute))
        self._values, self._known = values, known

    def load(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        info = self.tensors[name]
        if name in self._values:
            shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
            return torch.empty(shape, dtype=DTYPES[info.dtype], device="meta")
        if name not in self._known:
            return super().load(name, rows)
        whole = torch.frombuffer(bytearray(self._known[name]), dtype=DTYPES[info.dtype]).reshape(info.shape)
        return whole if rows is None else whole[rows[0] : rows[1]]


class _Reader:
    """Reads what the facts need of scales in two passes over the files, each in the order of the bytes."""

    def __init__(self, checkpoint: Checkpoint, entries: list[Entry], values: Values, all_scales: bool) -> None:
        self.checkpoint, self.folder, self.values = checkpoint, checkpoint.folder, values
        self.remote = is_remote(self.folder)
        self.scale_bytes = self.scale_bytes_read = 0
        parts = {e.name: checkpoint.parts(e.name) for e in entries}
        self.parts = parts
        small = {
            info.name: info
            for roles in parts.values()
            for role, info in roles.items()
            if role != "values" and 0 < info.nbytes <= SCALAR_BYTES
        }
        self.small = {info.name: bytes(data) for info, data in read_runs(self.folder, small.values())}
        self.scales_only = without_codes(checkpoint, self.small)
        self.scans = self._scan_blocks(entries, all_scales)

    def facts(self, entry: Entry) -> ScaleFacts:
        nan = self.values.nonfinite(entry)
        if not entry.quantized:
            dead, nan_too = self.values.is_dead(entry)
            return ScaleFacts(entry=entry, scan=Scan(), dead=dead, nan_values=nan or nan_too)
        scalars = self._scalars(entry)
        scan, blocks = self._scan_of(entry)
        uniform = scan.count > 0 and scan.smallest == scan.largest  # as a matrix has that is all zero
        dead, nan_too = self.values.is_dead(entry, doubt=uniform)
        nan = nan or nan_too
        dead = dead or (scan.zero == scan.count == blocks > 0 and not nan)
        zero_live: int | None = 0
        if scan.zero and not dead and get_format(entry.format).scale != "e8m0":
            zero_live, nan_too = self.values.live_zero_blocks(entry)
            nan = nan or nan_too
        return ScaleFacts(
            entry=entry,
            scan=scan,
            blocks=blocks,
            zero_live=zero_live,
            dead=dead,
            nan_values=nan,
            global_scale=scalars.get("global_scale"),
            input_scale=scalars.get("input_scale"),
        )

    def _scan_blocks(self, entries: list[Entry], all_scales: bool) -> dict[str, Scan]:
        """Scans of the stored block scales that belong to one entry as they are, by stored name."""
        infos = {}
        for entry in entries:
            info = self.parts[entry.name].get("block_scales")
            if entry.quantized and info is not None and _is_whole(entry, info):
                infos[info.name] = info
        self.scale_bytes = sum(info.nbytes for info in infos.values())
        budget = REMOTE_SCALE_BUDGET if self.remote else SCALE_BUDGET
        share = budget // max(len(infos), 1)
        everything = all_scales or self.scale_bytes <= budget
        scans: dict[str, Scan] = {}
        whole = []
        for info in infos.values():
            if info.name in self.small:
                scans[info.name] = scan_scales(self.small[info.name], info.dtype)
                self.scale_bytes_read += info.nbytes
            elif everything or info.nbytes <= share:
                whole.append(info)
        for info, data in read_runs(self.folder, whole):
            scans[info.name] = scan_scales(data, info.dtype)
            self.scale_bytes_read += info.nbytes
        rest = [info for name, info in infos.items() if name not in scans and info.nbytes]
        for info in () if self.remote else sorted(rest, key=lambda i: (i.file, i.begin)):
            sample = read_windows(self.folder, info, share)
            scans[info.name] = scan_scales(sample, info.dtype)
            self.scale_bytes_read += len(sample)
        return scans

    def _scan_of(self, entry: Entry) -> tuple[Scan, int]:
        """The scan of an entry's block scales, and how many there are."""
        info = self.parts[entry.name].get("block_scales")
        if info is not None and _is_whole(entry, info):
            return self.scans.get(info.name, Scan()), math.prod(info.shape)
        if info is None:  # scales among the codes
            tensor = self.checkpoint.read(entry.name)
        else:
            tensor = self.scales_only.read(entry.name)
        assert isinstance(tensor, QuantizedTensor)
        nbytes = tensor.block_scales.numel() * tensor.block_scales.element_size()
        self.scale_bytes += nbytes
        self.scale_bytes_read += nbytes
        return scan_tensor(tensor.block_scales), tensor.block_scales.numel()

    def _scalars(self, entry: Entry) -> dict[str, float]:
        """Global and input scale as decode multipliers."""
        parts = self.parts[entry.name]
        if entry.shared and any(role in parts for role in MULTIPLIERS):
            q = self.scales_only.read(entry.name)
            return {role: float(v) for role in MULTIPLIERS if (v := getattr(q, role)) is not None}
        scalars = {}
        for role, info in parts.items():
            if role in MULTIPLIERS or role in DIVISORS:
                value = float(to_doubles(self.small[info.name], info.dtype)[0])
                scalars[DIVISORS.get(role, role)] = _invert(value) if role in DIVISORS else value
        return scalars


def _is_whole(entry: Entry, info: StoredTensor) -> bool:
    """Whether a stored scale tensor holds this entry's block scales and nothing else (no expert beside it, no padding
    to tiles)."""
    block = get_format(entry.format).block
    n, k = entry.shape
    return not entry.shared and (block <= 0 or math.prod(info.shape) <= n * -(-k // block))


def _invert(divisor: float) -> float:
    """A stored divisor as a multiplier; 0 stays 0: a dead module's, never infinity."""
    return 1.0 / divisor if divisor else 0.0
