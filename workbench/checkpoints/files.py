"""A checkpoint's files: safetensors headers, the index, tensor bytes on demand.

    folder = read_folder(Path("checkpoint"))
    folder.tensors["model.embed_tokens.weight"]     # StoredTensor(file=..., dtype="BF16", shape=(2048, 256), ...)
    folder.load("model.embed_tokens.weight")        # torch.Tensor, one read of exactly those bytes
    folder.load("...experts.gate_up_proj_blocks", rows=(3, 4))  # one expert of a stack

Where the bytes come from is a `Source`: a local folder (`LocalFiles`, here) or a repository on the Hub (`hub.py`).
Bytes are read with positioned reads into memory of their own, not through a mapping: what was read can be freed again,
a tensor is always aligned, and a file cut short while it is open raises instead of killing the process. Only regular
files that lie in the folder are opened: no device, no pipe, no link that leads elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import torch

from workbench.errors import CheckpointError

from .header import DTYPES, StoredTensor, parse_json, read_header
from .index import INDEX_NAME, Problem, choose_files, compare_with_headers, parse_index

__all__ = [
    "CONFIG_FILES",
    "INDEX_NAME",
    "Folder",
    "LocalFiles",
    "Problem",
    "Source",
    "check_path",
    "read_folder",
    "read_json_object",
    "read_source",
    "to_json_text",
]

# What says how tensors are meant. A remote folder's are fetched at once; all count in a fingerprint.
CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
MAX_JSON_BYTES = 256_000_000  # the index of a checkpoint of a trillion parameters has some 30 MB
# Weights in any container: never side files. Those of the pickle kind are never opened at all.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx")


class Source(Protocol):
    """Where a checkpoint's bytes come from. Names are relative to the checkpoint, with `/`."""

    name: str  # for messages
    parallel: int  # how many headers are read at a time

    @property
    def path(self) -> Path:
        """A local folder that holds the config files."""

    def names(self) -> list[str]:
        """Every file of the checkpoint, folders within it included, sorted."""

    def shards(self) -> list[str]:
        """The *.safetensors files at the top, sorted."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when it does not exist. Raises CheckpointError for what must not be opened."""

    def fetch(self, name: str) -> Path | None:
        """A whole file as a local one; None when it does not exist. Raises CheckpointError."""

    def read_into(self, name: str, view: memoryview, position: int, what: str) -> None:
        """Fill `view` with a file's bytes from `position` on. Raises CheckpointError naming the file and `what`."""

    def content_hash(self, name: str) -> str:
        """A hash of a file's content where it is known without reading it; "" otherwise."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Folder:
    """All tensors of a checkpoint folder by name, its config.json and side files, and what was wrong with them.

    path: a local folder that holds the config files (of a remote checkpoint: its snapshot in the Hub cache).
    source: where bytes are read; by default `path`.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    config: dict[str, Any]
    files: tuple[str, ...]
    headers: dict[str, bytes]
    problems: list[Problem] = field(default_factory=list)
    source: InitVar[Source | None] = None
    _source: Source = field(init=False)

    def __post_init__(self, source: Source | None) -> None:
        self._source = source or LocalFiles(self.path)

    @property
    def name(self) -> str:
        """What to call it: the path, or `hf://org/name@commit`."""
        return self._source.name

    def load(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one stored tensor, or its rows [first, last) along dimension 0 (one expert of a stack, say).

        Raises CheckpointError naming tensor and file, IndexError for rows that it does not have.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"no tensor {name!r} in {self.name}", fix="check the name (`workbench lint` lists)")
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
        self._source.read_into(info.file, memoryview(buffer.data), begin, f"tensor {name}")
        return torch.from_numpy(buffer).view(DTYPES[info.dtype]).reshape(shape)

    def load_bytes(self, info: StoredTensor, offset: int, count: int) -> bytes:
        """`count` bytes of a tensor from `offset` on."""
        buffer = bytearray(count)
        self._source.read_into(info.file, memoryview(buffer), info.begin + offset, f"tensor {info.name}")
        return bytes(buffer)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A side file as a JSON object; None when it does not exist. Raises CheckpointError when it is broken."""
        path = self._source.fetch(name)
        return None if path is None else read_json_object(path)

    def side_files(self) -> list[tuple[str, Path]]:
        """Every file that holds no weights (tokenizer, template, code, ...), by relative name: what a conversion
        carries over, the config files and the index included. Hidden files are left out; a remote file is downloaded.

        Raises CheckpointError for what is no regular file within the folder.
        """
        found = []
        for name in self._source.names():
            hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
            if hidden or name.endswith(WEIGHT_SUFFIXES):
                continue
            path = self._source.fetch(name)
            if path is not None:
                found.append((name, path))
        return found

    def content_hashes(self) -> dict[str, str]:
        """Hashes of the shards by file, where all are known without reading them (the Hub lists them); else empty."""
        hashes = {file: self._source.content_hash(file) for file in self.files}
        return hashes if all(hashes.values()) else {}

    def close(self) -> None:
        self._source.close()


class LocalFiles:
    """A folder on this machine."""

    parallel = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()  # a conversion reads in several threads

    def names(self) -> list[str]:
        try:
            return sorted(p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if not p.is_dir())
        except OSError as error:
            raise CheckpointError(f"cannot list {self.path}: {error}", fix="check its permissions") from error

    def shards(self) -> list[str]:
        return sorted(p.name for p in self.path.glob("*.safetensors"))

    def size(self, name: str) -> int | None:
        path = self.fetch(name)
        return None if path is None else path.stat().st_size

    def fetch(self, name: str) -> Path | None:
        path = self.path / name
        if not is_regular_file(path):
            return None
        _check_inside(self.path, path)
        return path

    def read_into(self, name: str, view: memoryview, position: int, what: str) -> None:
        try:
            with self._lock:
                if name not in self._handles:
                    self._handles[name] = os.open(self.path / name, os.O_RDONLY)
                handle = self._handles[name]
            done = 0
            while done < len(view):
                count = os.preadv(handle, [view[done : done + (1 << 30)]], position + done)
                if count == 0:
                    raise CheckpointError(
                        f"{name} ended inside {what}: it was cut short while being read",
                        fix="copy or download the shard again",
                    )
                done += count
        except OSError as error:
            raise CheckpointError(
                f"cannot read {what} from {self.path / name}: {error.strerror or error}",
                fix="check the file and its permissions",
            ) from error

    def content_hash(self, name: str) -> str:
        return ""

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def read_folder(path: Path) -> Folder:
    """Parse config.json, the index and every safetensors header of a local checkpoint folder.

    Raises CheckpointError for a missing folder or config.json, no shard at all, broken JSON, a truncated shard and a
    tensor that two shards hold. What an index gets wrong becomes a problem, see `index.py`.
    """
    check_path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the folder does not exist", fix="check the path")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder", fix="give the folder that holds it")
    return read_source(LocalFiles(path))


def read_source(source: Source) -> Folder:
    """`read_folder` for any source; closes it when that raises."""
    try:
        return _read_source(source)
    except BaseException:
        source.close()
        raise


def check_path(path: Path) -> None:
    """Refuse a path that no file system call takes: too long, with a NUL, a loop of links, in a closed folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"unusable path {str(path)[:200]!r}: {reason}", fix="give another path") from error


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


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file, line and column of a fault."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes; more than {MAX_JSON_BYTES} are no config", fix="put the producer's file back"
            )
        value = parse_json(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", fix="check the file") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is broken JSON: {error.msg} at line {error.lineno}, column {error.colno}", fix="repair the file"
        ) from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is broken JSON: nested too deeply", fix="repair the file") from error
    except ValueError as error:  # a number of thousands of digits, half a character
        raise CheckpointError(f"{path} is broken JSON: {error}", fix="repair the file") from error
    if not isinstance(value, dict):
        found = {"list": "a list", "str": "a string", "NoneType": "null", "bool": "true or false"}
        kind = found.get(type(value).__name__, "a number")
        raise CheckpointError(f"{path} holds {kind}, expected a JSON object", fix="repair the file")
    return value


def to_json_text(value: dict[str, Any]) -> str:
    """JSON as the Hub's files are: indented, keys in the given order, newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_source(source: Source) -> Folder:
    config_path = source.fetch("config.json")
    if config_path is None:
        raise CheckpointError(f"{source.name} has no config.json", fix="give a Hugging Face checkpoint folder")
    config = read_json_object(config_path)
    for name in CONFIG_FILES[1:]:
        source.fetch(name)
    index_path = source.fetch(INDEX_NAME)
    index = None if index_path is None else parse_index(read_json_object(index_path), source.name)
    problems: list[Problem] = []
    files = choose_files(source.name, source.shards(), index, problems)
    tensors: dict[str, StoredTensor] = {}
    headers: dict[str, bytes] = {}
    with ThreadPoolExecutor(source.parallel) as pool:
        try:
            for file, (raw, rows) in zip(files, pool.map(lambda f: _read_header(source, f), files), strict=True):
                headers[file] = raw
                _add(tensors, rows)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if index is not None:
        compare_with_headers(index, tensors, files, problems)
    return Folder(
        path=source.path,
        tensors=tensors,
        config=config,
        files=files,
        headers=headers,
        problems=problems,
        source=source,
    )


def _read_header(source: Source, file: str) -> tuple[bytes, list[StoredTensor]]:
    def read(position: int, count: int) -> bytes:
        buffer = bytearray(count)
        source.read_into(file, memoryview(buffer), position, "its header")
        return bytes(buffer)

    place = f"{source.name}/{file}"
    size = source.size(file)
    if size is None:
        raise CheckpointError(f"cannot read {place}: it does not exist", fix="copy or download the shard again")
    return read_header(file, place, size, read)


def _add(tensors: dict[str, StoredTensor], rows: list[StoredTensor]) -> None:
    for row in rows:
        if row.name in tensors:
            raise CheckpointError(
                f"tensor {row.name} is stored twice, in {tensors[row.name].file} and in {row.file}",
                fix="remove the duplicate shard; which of the two is meant cannot be told",
            )
        tensors[row.name] = row


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leaves the folder: what is read could be shown, converted or carried over to another place.

    A snapshot of the Hub cache is a folder of links into the `blobs` beside it; those are its own files.
    """
    root, real = folder.resolve(), path.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append((root.parent.parent / "blobs").resolve())
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{path} is a link that leaves the checkpoint folder (to {real})",
            fix="put the file itself there (`cp -L`), or give the folder that it lies in",
        )
