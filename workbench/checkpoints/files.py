"""A checkpoint folder's files: safetensors headers, the index, tensor bytes on demand.

    folder = read_folder(Path("checkpoint"))
    folder.tensors["model.embed_tokens.weight"]     # StoredTensor(file=..., dtype="BF16", shape=(2048, 256), ...)
    folder.load("model.embed_tokens.weight")        # torch.Tensor, one read of exactly those bytes

Bytes are read with positioned reads into memory of their own, not through a mapping: what was read can be freed again,
a tensor is always aligned, and a file cut short while it is open raises instead of killing the process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.errors import CheckpointError

from .header import DTYPES, StoredTensor, is_regular_file, read_header

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault found while reading headers and config. severity "error": `open_checkpoint` refuses, lint reports."""

    check: str
    severity: str
    message: str
    tensor: str = ""
    file: str = ""
    fix: str = ""


@dataclass(slots=True)
class Folder:
    """All tensors of a checkpoint folder by name, its config.json and side files, and what was wrong with them."""

    path: Path
    tensors: dict[str, StoredTensor]
    config: dict[str, Any]
    files: tuple[str, ...]
    headers: dict[str, bytes]
    problems: list[Problem] = field(default_factory=list)
    _handles: dict[str, int] = field(default_factory=dict)

    def load(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one stored tensor, or its rows [first, last) along dimension 0 (one expert of a stack, say).

        Raises CheckpointError naming tensor and file, IndexError for rows that it does not have.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"no tensor {name!r} in {self.path}", fix="check the name (`workbench lint` lists)")
        shape, begin, nbytes = info.shape, info.begin, info.nbytes
        if rows is not None:
            first, last = rows
            if not shape or not 0 <= first <= last <= shape[0]:
                raise IndexError(f"{name} has shape {list(shape)}; no rows {first} to {last}")
            row_bytes = nbytes // shape[0] if shape[0] else 0
            shape, begin, nbytes = (last - first, *shape[1:]), begin + first * row_bytes, (last - first) * row_bytes
        if nbytes == 0:
            return torch.empty(shape, dtype=DTYPES[info.dtype])
        buffer = np.empty(nbytes, dtype=np.uint8)
        self._read_into(info, memoryview(buffer.data), begin)
        return torch.from_numpy(buffer).view(DTYPES[info.dtype]).reshape(shape)

    def load_bytes(self, info: StoredTensor, offset: int, count: int) -> bytes:
        """`count` bytes of a tensor from `offset` on."""
        buffer = bytearray(count)
        self._read_into(info, memoryview(buffer), info.begin + offset)
        return bytes(buffer)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A side file as a JSON object; None when it does not exist. Raises CheckpointError when it is broken."""
        return read_json_object(self.path / name) if is_regular_file(self.path / name) else None

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _read_into(self, info: StoredTensor, view: memoryview, position: int) -> None:
        try:
            if info.file not in self._handles:
                self._handles[info.file] = os.open(self.path / info.file, os.O_RDONLY)
            done = 0
            while done < len(view):
                count = os.preadv(self._handles[info.file], [view[done : done + (1 << 30)]], position + done)
                if count == 0:
                    raise CheckpointError(
                        f"{info.file} ended inside tensor {info.name}: it was cut short while being read",
                        fix="copy or download the shard again",
                    )
                done += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read tensor {info.name} from {self.path / info.file}: {error.strerror or error}",
                fix="check the file and its permissions",
            ) from error


def read_folder(path: Path) -> Folder:
    """Parse config.json, the index and every safetensors header of a checkpoint folder.

    Raises CheckpointError for a missing folder, config.json or shard, broken JSON, a truncated shard and a tensor that
    two shards hold. An index that contradicts the headers becomes a problem of severity "error".
    """
    check_path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the folder does not exist", fix="check the path")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder", fix="give the folder that holds it")
    if not is_regular_file(path / "config.json"):
        raise CheckpointError(f"{path} has no config.json", fix="give a Hugging Face checkpoint folder")
    config = read_json_object(path / "config.json")
    is_regular_file(path / "hf_quant_config.json")
    weight_map = _read_index(path)
    problems: list[Problem] = []
    files = _choose_files(path, weight_map, problems)
    tensors: dict[str, StoredTensor] = {}
    headers: dict[str, bytes] = {}
    for file in files:
        raw, rows = read_header(path / file)
        headers[file] = raw
        for row in rows:
            if row.name in tensors:
                raise CheckpointError(
                    f"tensor {row.name} is stored twice, in {tensors[row.name].file} and in {file}",
                    fix="remove the duplicate shard; which of the two is meant cannot be told",
                )
            tensors[row.name] = row
    if weight_map is not None:
        _compare_with_index(tensors, weight_map, problems)
    return Folder(path=path, tensors=tensors, config=config, files=files, headers=headers, problems=problems)


def check_path(path: Path) -> None:
    """Refuse a path that no file system call takes: too long, with a NUL, a loop of links, in a closed folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"unusable path {str(path)[:200]!r}: {reason}", fix="give another path") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file, line and column of a fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", fix="check the file") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is broken JSON: {error.msg} at line {error.lineno}, column {error.colno}", fix="repair the file"
        ) from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is broken JSON: nested too deeply", fix="repair the file") from error
    except ValueError as error:  # a number of thousands of digits
        raise CheckpointError(f"{path} is broken JSON: {error}", fix="repair the file") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object", fix="repair the file")
    return value


def to_json_text(value: dict[str, Any]) -> str:
    """JSON as the Hub's files are: indented, keys in the given order, newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_index(path: Path) -> dict[str, str] | None:
    if not is_regular_file(path / INDEX_NAME):
        return None
    weight_map = read_json_object(path / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(
            f"{path / INDEX_NAME} has no `weight_map` of tensor names to files", fix="write the index again"
        )
    return weight_map


def _choose_files(path: Path, weight_map: dict[str, str] | None, problems: list[Problem]) -> tuple[str, ...]:
    present = sorted(p.name for p in path.glob("*.safetensors"))
    if weight_map is None:
        if not present:
            raise CheckpointError(f"{path} holds no *.safetensors file", fix="give a safetensors checkpoint")
        missing = list(_missing_of_series(present))
        if missing:
            raise CheckpointError(
                f"{path} lacks the shard {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + f", and there is no {INDEX_NAME}",
                fix="copy or download the missing shards",
            )
        if len(present) > 1:
            problems.append(
                Problem(
                    "index-vs-files",
                    "warning",
                    f"{len(present)} shards and no {INDEX_NAME}; all of them were read",
                    fix="write an index beside the shards",
                )
            )
        return tuple(present)
    named = sorted(set(weight_map.values()))
    for file in named:
        if not is_regular_file(path / file):
            keys = [k for k, v in weight_map.items() if v == file]
            raise CheckpointError(
                f"{path / INDEX_NAME} names {file}, which does not exist ({len(keys)} tensors, first {keys[0]})",
                fix="copy or download the missing shard, or write the index again",
            )
    for file in sorted(set(present) - set(named)):
        problems.append(
            Problem(
                "index-vs-files",
                "warning",
                f"{file} lies in the folder but {INDEX_NAME} does not name it; it was not read",
                file=file,
                fix="remove the file, or write the index again",
            )
        )
    return tuple(named)


def _missing_of_series(present: list[str]) -> Iterator[str]:
    series = [m for m in (re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name) for name in present) if m]
    for stem, total, end in sorted({(m[1], m[3], m[4]) for m in series}):
        for number in range(1, int(total) + 1):
            name = f"{stem}{number:05d}-of-{total}{end}"
            if name not in present:
                yield name


def _compare_with_index(tensors: dict[str, StoredTensor], weight_map: dict[str, str], problems: list[Problem]) -> None:
    absent = [k for k, file in weight_map.items() if k not in tensors or tensors[k].file != file]
    unlisted = [k for k in tensors if k not in weight_map]
    fix = "write the index again from the shards' headers"
    if absent:
        problems.append(
            Problem(
                "index-vs-files",
                "error",
                f"{INDEX_NAME} is stale: it places {absent[0]} in {weight_map[absent[0]]}, whose header lacks it"
                + (f" ({len(absent)} such tensors)" if len(absent) > 1 else ""),
                tensor=absent[0],
                file=INDEX_NAME,
                fix=fix,
            )
        )
    if unlisted:
        problems.append(
            Problem(
                "index-vs-files",
                "error",
                f"{INDEX_NAME} is stale: it does not list {unlisted[0]}, which {tensors[unlisted[0]].file} holds"
                + (f" ({len(unlisted)} such tensors)" if len(unlisted) > 1 else ""),
                tensor=unlisted[0],
                file=INDEX_NAME,
                fix=fix,
            )
        )
