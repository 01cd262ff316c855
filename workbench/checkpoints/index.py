"""The shards of a checkpoint and its index: which files are read, and where index and headers disagree.

Headers decide. An index chooses the shards, as it does for transformers and vLLM, which then load every tensor that
those shards hold. So an index that places a tensor in the wrong shard, or omits one, is a warning: all is found. What
may mean that weights are lost is an error: a shard that is not there, a tensor that no shard holds. Nothing falls back
to reading whatever lies in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.errors import CheckpointError

from .header import StoredTensor, is_usable_name

INDEX_NAME = "model.safetensors.index.json"
_REWRITE = "write the index again from the shards' headers"


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault found while reading headers and config. severity "error": `open_checkpoint` refuses, lint reports."""

    check: str
    severity: str
    message: str
    tensor: str = ""
    file: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """An index as read. weight_map: tensor name -> file; total_size: its own count of bytes, where it has one."""

    weight_map: dict[str, str]
    total_size: int | None


def parse_index(content: dict[str, Any], place: str) -> Index:
    """An index from its JSON. Raises CheckpointError for one without tensors and files, or with a file name that is a
    path: shards lie in the checkpoint folder itself."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise CheckpointError(f"{place}/{INDEX_NAME} has no `weight_map` of tensor names to files", fix=_REWRITE)
    for file in sorted(set(weight_map.values())):
        if not is_usable_name(file) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{place}/{INDEX_NAME} names the file {ascii(file)[:200]}, expected the name of a *.safetensors file in"
                " the checkpoint folder",
                fix=_REWRITE,
            )
    for name in weight_map:
        if not is_usable_name(name):
            raise CheckpointError(f"{place}/{INDEX_NAME} has a tensor called {ascii(name)[:200]}", fix=_REWRITE)
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weight_map, total_size if type(total_size) is int else None)


def choose_files(place: str, present: list[str], index: Index | None, problems: list[Problem]) -> tuple[str, ...]:
    """The shards to read: those that the index names, or all. present: the folder's *.safetensors, sorted.

    Raises CheckpointError when there is none, and for a numbered series with gaps and no index to tell what is missing.
    """
    if not present:
        raise CheckpointError(f"{place} holds no *.safetensors file", fix="give a safetensors checkpoint")
    if index is None:
        missing = list(_missing_of_series(present))
        if missing:
            raise CheckpointError(
                f"{place} lacks the shard {missing[0]}"
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
    named = sorted(set(index.weight_map.values()))
    for file in sorted(set(named) - set(present)):
        keys = [k for k, v in index.weight_map.items() if v == file]
        problems.append(
            Problem(
                "index-vs-files",
                "error",
                f"{INDEX_NAME} names {file}, which does not exist ({_count(keys)})",
                file=file,
                fix="copy or download the missing shard, or write the index again",
            )
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
    return tuple(file for file in named if file in present)


def compare_with_headers(
    index: Index, tensors: dict[str, StoredTensor], files: tuple[str, ...], problems: list[Problem]
) -> None:
    """Add what the index says wrongly about the shards that were read, one problem a kind."""

    def add(severity: str, names: list[str], message: str) -> None:
        if names:
            stale = f"{INDEX_NAME} is stale: {message} ({_count(names)})"
            problems.append(Problem("index-vs-files", severity, stale, tensor=names[0], file=INDEX_NAME, fix=_REWRITE))

    read = set(files)
    gone = [k for k, file in index.weight_map.items() if file in read and k not in tensors]
    moved = [k for k, file in index.weight_map.items() if k in tensors and tensors[k].file != file]
    add("error", gone, "no shard holds what it lists")
    add("warning", moved, "it places tensors in another shard than the one that holds them")
    add("warning", [k for k in tensors if k not in index.weight_map], "it does not list what the shards hold")
    stored = sum(info.nbytes for info in tensors.values())
    if index.total_size is not None and index.total_size != stored and read >= set(index.weight_map.values()):
        problems.append(
            Problem(
                "index-vs-files",
                "warning",
                f"{INDEX_NAME} says total_size {index.total_size}, the shards hold {stored} bytes of tensors",
                file=INDEX_NAME,
                fix=_REWRITE,
            )
        )


def _count(names: list[str]) -> str:
    return f"{len(names)} tensors, first {names[0]}" if len(names) > 1 else names[0]


def _missing_of_series(present: list[str]) -> Iterator[str]:
    names = set(present)
    series = [m for m in (re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name) for name in present) if m]
    for stem, total, end in sorted({(m[1], m[3], m[4]) for m in series}):
        for number in range(1, int(total) + 1):
            name = f"{stem}{number:05d}-of-{total}{end}"
            if name not in names:
                yield name
