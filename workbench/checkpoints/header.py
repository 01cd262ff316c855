"""A safetensors file's header: which tensors lie where. Parsed here because a fault must be told by file and tensor.

Nothing in a header is trusted: lengths, offsets, shapes and names are checked before anything is allocated or read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
FIRST_READ_BYTES = 1 << 17  # one read holds most headers: a header has some 130 bytes a tensor
MAX_NAME_LENGTH = 1000
MAX_DIMENSIONS = 32
MAX_COUNT = 2**63  # of bytes or elements: no file is larger

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

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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


def read_header(
    file: str, place: str, size: int, read: Callable[[int, int], bytes]
) -> tuple[bytes, list[StoredTensor]]:
    """The raw header of a safetensors file of `size` bytes, and its rows.

    file: its name; place: where it lies, for messages; read(position, count): bytes of it.
    Raises CheckpointError for anything but a whole, consistent safetensors file.
    """
    start = read(0, min(size, FIRST_READ_BYTES))
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{place} is a Git LFS pointer, not the weights", fix="run `git lfs pull` there")
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            f"{place} is no whole safetensors file: {size} bytes, header says {length} bytes",
            fix="the shard is truncated or of another format; copy or download it again",
        )
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += read(8 + len(raw), length - len(raw))
    try:
        table = parse_json(raw, standard=True)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}")
        metadata = table.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        ):
            raise ValueError("its __metadata__ is no table of strings")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{place}: its safetensors header is no valid JSON table ({str(error)[:200]})",
            fix="copy or download the shard again",
        ) from error
    rows = [_parse_row(file, place, name, row, 8 + length) for name, row in table.items()]
    for row in rows:
        _check_row(place, row, size)
    data_end = _check_order(place, rows, 8 + length)
    if data_end != size:
        raise CheckpointError(
            f"{place} holds {size} bytes, its header describes {data_end}: surplus bytes", fix="write the shard again"
        )
    return raw, rows


def parse_json(raw: bytes, *, standard: bool = False) -> Any:
    """JSON in UTF-8. standard: as the safetensors library reads it, so no key twice in an object and no NaN or Infinity
    (which configs do hold). Raises ValueError; also for half a character (`\\ud800` alone), which nothing can print."""
    options: dict[str, Any] = {"object_pairs_hook": _without_duplicates, "parse_constant": _refuse_constant}
    value = json.loads(raw.decode("utf-8"), **(options if standard else {}))
    if _SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def is_usable_name(name: str) -> bool:
    """Whether a tensor's or a file's name can be printed, written and parsed: valid Unicode without control characters,
    neither empty nor longer than `MAX_NAME_LENGTH`."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"it has {name[:100]} twice")
            seen.add(name)
    return table


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it has {name}, which JSON does not")


def _parse_row(file: str, place: str, name: str, row: Any, data_start: int) -> StoredTensor:
    def are_counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(v) is int and 0 <= v < MAX_COUNT for v in value)

    def fault(key: str, expected: str) -> CheckpointError:
        found = repr(row.get(key))[:80] if isinstance(row, dict) else repr(row)[:80]
        return CheckpointError(
            f"{place}: tensor {name} has {key} {found}, expected {expected}", fix="copy or download the shard again"
        )

    if not is_usable_name(name):
        raise CheckpointError(
            f"{place}: a tensor is called {ascii(name)[:100]}, expected 1 to {MAX_NAME_LENGTH} printable characters",
            fix="write the shard again under ordinary names",
        )
    if not isinstance(row, dict) or not isinstance(row.get("dtype"), str):
        raise fault("dtype", "a dtype's name")
    shape: Any = row.get("shape")
    if not are_counts(shape):
        raise fault("shape", "a list of whole numbers, none negative")
    if len(shape) > MAX_DIMENSIONS or math.prod(max(d, 1) for d in shape) * 8 >= MAX_COUNT:
        raise fault("shape", f"at most {MAX_DIMENSIONS} dimensions, of a size that a file can hold")
    offsets: Any = row.get("data_offsets")
    if not are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault("data_offsets", "two ascending whole numbers, none negative")
    return StoredTensor(name, file, row["dtype"], tuple(shape), *(data_start + o for o in offsets))


def _check_order(place: str, rows: list[StoredTensor], position: int) -> int:
    """The end of the last tensor. Raises CheckpointError for tensors that overlap or leave a gap."""
    before = "the header"
    for row in sorted(rows, key=lambda r: (r.begin, r.end)):
        if row.begin != position:
            what = "overlaps" if row.begin < position else "leaves unused bytes after"
            raise CheckpointError(f"{place}: tensor {row.name} {what} {before}", fix="write the shard again")
        position, before = row.end, row.name
    return position


def _check_row(place: str, row: StoredTensor, size: int) -> None:
    if row.dtype not in DTYPES:
        raise CheckpointError(
            f"{place}: tensor {row.name} has dtype {ascii(row.dtype)[:40]}", fix=f"known dtypes: {', '.join(DTYPES)}"
        )
    expected = math.prod(row.shape) * DTYPES[row.dtype].itemsize
    if row.nbytes != expected:
        raise CheckpointError(
            f"{place}: tensor {row.name} {row.dtype} {list(row.shape)} needs {expected} bytes, its offsets give"
            f" {row.nbytes}",
            fix="write the shard again",
        )
    if row.end > size:
        raise CheckpointError(
            f"{place} is truncated: tensor {row.name} ends at byte {row.end}, the file has {size}",
            fix="copy or download the shard again",
        )
