"""A safetensors file's header: which tensors lie where. Parsed here because a fault must be told by file and tensor."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One row of a safetensors header. dtype: the header's name ("BF16", "U8", ...); begin, end: bytes in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> tuple[bytes, list[StoredTensor]]:
    """The raw header and its rows. Raises CheckpointError for anything but a whole, consistent safetensors file."""
    if not is_regular_file(path):
        raise CheckpointError(f"cannot read {path}: it does not exist", fix="copy or download the shard again")
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little") if len(start) == 8 else 0
            if start.startswith(b"version "):
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights", fix="run `git lfs pull` in the checkpoint"
                )
            if len(start) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{path} is no whole safetensors file: {size} bytes, header says {length} bytes",
                    fix="the shard is truncated or of another format; copy or download it again",
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", fix="check permissions") from error
    try:
        table = json.loads(raw, object_pairs_hook=_without_duplicates)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its safetensors header is no valid JSON table ({error})", fix="copy or download the shard again"
        ) from error
    rows = [_parse_row(path, name, row, 8 + length) for name, row in table.items() if name != "__metadata__"]
    for row in rows:
        _check_row(path, row, size)
    data_end = _check_order(path, rows, 8 + length)
    if data_end != size:
        raise CheckpointError(
            f"{path} holds {size} bytes, its header describes {data_end}: surplus bytes", fix="write the shard again"
        )
    return raw, rows


def is_regular_file(path: Path) -> bool:
    """Whether `path` exists. Raises CheckpointError for a folder, pipe, socket or device, which must not be opened."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", fix="check the path and its permissions") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file", fix="put the checkpoint's own file there, or remove it")
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(n for n in table if names.count(n) > 1)} twice")
    return table


def _parse_row(path: Path, name: str, row: Any, data_start: int) -> StoredTensor:
    def whole_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)

    def fault(key: str, expected: str) -> CheckpointError:
        found = repr(row.get(key))[:80] if isinstance(row, dict) else repr(row)[:80]
        return CheckpointError(
            f"{path}: tensor {name} has {key} {found}, expected {expected}", fix="copy or download the shard again"
        )

    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        raise fault("dtype", "a dtype's name")
    if not whole_numbers(row.get("shape")):
        raise fault("shape", "a list of whole numbers, none negative")
    offsets = row.get("data_offsets")
    if not whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault("data_offsets", "two ascending whole numbers, none negative")
    return StoredTensor(name, path.name, row["dtype"], tuple(row["shape"]), *(data_start + o for o in offsets))


def _check_order(path: Path, rows: list[StoredTensor], position: int) -> int:
    """The end of the last tensor. Raises CheckpointError for tensors that overlap or leave a gap."""
    before = "the header"
    for row in sorted(rows, key=lambda r: (r.begin, r.end)):
        if row.begin != position:
            what = "overlaps" if row.begin < position else "leaves unused bytes after"
            raise CheckpointError(f"{path}: tensor {row.name} {what} {before}", fix="write the shard again")
        position, before = row.end, row.name
    return position


def _check_row(path: Path, row: StoredTensor, size: int) -> None:
    if row.dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {row.name} has dtype {row.dtype!r}", fix=f"known dtypes: {', '.join(DTYPES)}"
        )
    expected = math.prod(row.shape) * DTYPES[row.dtype].itemsize
    if row.nbytes != expected:
        raise CheckpointError(
            f"{path}: tensor {row.name} {row.dtype} {list(row.shape)} needs {expected} bytes, its offsets give"
            f" {row.nbytes}",
            fix="write the shard again",
        )
    if row.end > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {row.name} ends at byte {row.end}, the file has {size}",
            fix="copy or download the shard again",
        )
