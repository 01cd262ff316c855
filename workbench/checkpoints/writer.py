"""Write a checkpoint folder that either appears whole or not at all, one tensor in memory at a time.

    with CheckpointWriter(dst) as writer:
        writer.add({"model.norm.weight": tensor})     # as many times as there are tensors
        writer.copy_file(src / "tokenizer.json", "tokenizer.json")
        writer.write_json("config.json", config)
    # leaving the block without an error renames the folder into place

Everything goes to a hidden sibling folder; a full disk, Ctrl-C or any other error removes it. Its name says whose it is
(host, process), so that what a killed process left is removed by the next one that writes there.

With `resume=True` the next one takes the finished shards over instead, and an error keeps them too. `writer.finished`
then holds the notes of every `add` that need not be repeated. What is written, from what (`request`), lies beside the
shards before the first of them; another request is refused, also when no shard was finished.

A tensor goes to disk as it is added. A safetensors file starts with its header and wants its tensors ordered by
alignment, and neither is known before a shard is full; so a shard's bytes are spooled to a file and copied into order
when it ends. The price is a second write of every byte; the gain is that no shard is ever held in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from workbench.errors import DISK_FULL, CheckpointError, OutputError, write_fix

from .files import INDEX_NAME, check_path, to_json_text
from .header import DTYPES

DEFAULT_SHARD_BYTES = 2 << 30
_COPY_BYTES = 8 << 20
_REQUEST_FILE = ".conversion.json"
_SPOOL = ".spool"
# The safetensors library's order of tensors in a file: by dtype, the widest first, then by name.
_DTYPE_ORDER = {
    name: rank
    for rank, name in enumerate(
        (
            *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16", "I32", "U32", "F32"),
            *("F64", "I64", "U64"),
        )
    )
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointWriter:
    """Collects tensors into shards of at most `max_shard_bytes` and builds `path` when the block ends without error.

    resume, request: see the module; request: what decides the written bytes, by a word for messages. finished: the
    notes of the adds that finished shards of an earlier attempt hold, in order; the caller goes on with the one after.
    Raises CheckpointError when `path` is a file or a non-empty folder (unless overwrite=True, which replaces it at the
    end) or what an earlier attempt left was another request's, naming what differs, OutputError when the disk is full
    or not writable.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        resume: bool = False,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self.resume = resume
        self.request = dict(request or {})
        self.finished: list[Any] = []
        self._notes: list[Any] = []
        self._rows: list[_Row] = []
        self._shards: list[tuple[str, list[str]]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        clear_leftovers(self.path, unfinished=not self.resume)
        check_destination(self.path, overwrite=self.overwrite)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            left = _find_unfinished(self.path, self.request) if self.resume else None
            self._build = _make_sibling(self.path, "new")
            if left is None:
                self.write_text(_REQUEST_FILE, json.dumps(self.request))
            else:
                self._build.rmdir()
                left.rename(self._build)
                self._take_over()
            self._spool = (self._build / _SPOOL).open("w+b", buffering=0)
        except OSError as error:
            raise _output_error(self.path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise _output_error(self.path, failure, kept=self.resume) from failure
        finally:
            self._spool.close()
            if not self.resume or kind is None:
                shutil.rmtree(self._build, ignore_errors=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors added so far, those of finished shards included."""
        return self._total_bytes

    def add(self, tensors: Mapping[str, torch.Tensor], note: Any = None) -> None:
        """Add tensors that belong together (a weight and its scales): they go to one shard. note: see `finished`."""
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        spooled = self._rows[-1].end if self._rows else 0
        if self._rows and spooled + size > self.max_shard_bytes:
            self._flush()
        for name, tensor in tensors.items():
            if name in self._names:
                raise CheckpointError(f"tensor {name} would be written twice", fix="report this as a bug")
            self._names.add(name)
            self._append(name, tensor)
        self._notes.append(note)
        self._total_bytes += size

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file of the checkpoint. Raises CheckpointError for a value that is none."""
        try:
            text = to_json_text(value)
            text.encode()
        except (RecursionError, ValueError) as error:
            raise CheckpointError(
                f"{name} cannot be written as JSON: {error}", fix="repair the source's file"
            ) from error
        self.write_text(name, text)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the checkpoint (UTF-8)."""
        try:
            (self._build / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _output_error(self.path, error, kept=self.resume) from error

    def copy_file(self, source: Path, name: str) -> None:
        """Copy a side file (tokenizer, chat template, ...) under its relative name."""
        try:
            (self._build / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self._build / name)
        except OSError as error:
            raise _output_error(self.path, error, kept=self.resume) from error

    def _append(self, name: str, tensor: torch.Tensor) -> None:
        begin = self._rows[-1].end if self._rows else 0
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        try:
            view = memoryview(flat.data)
            while view:
                view = view[self._spool.write(view[: 1 << 30]) :]
        except OSError as error:
            raise _output_error(self.path, error, kept=self.resume) from error
        self._rows.append(_Row(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), begin, begin + flat.nbytes))

    def _flush(self) -> None:
        """End the shard: its tensors in the safetensors library's order, then what an attempt to resume needs."""
        if not self._rows:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        temporary = self._build / f".{name}"
        rows = sorted(self._rows, key=lambda r: (-_DTYPE_ORDER[r.dtype], r.name))
        try:
            with temporary.open("wb") as stream:
                stream.write(_header(rows))
                for row in rows:
                    for begin in range(row.begin, row.end, _COPY_BYTES):
                        stream.write(os.pread(self._spool.fileno(), min(_COPY_BYTES, row.end - begin), begin))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.rename(self._build / name)
            self._spool.truncate(0)
            self._spool.seek(0)
        except OSError as error:
            raise _output_error(self.path, error, kept=self.resume) from error
        size = sum(r.end - r.begin for r in rows)
        names = [r.name for r in rows]
        entry = {"bytes": size, "names": names, "notes": self._notes}
        self.write_text(f"{name}.json", json.dumps(entry))  # one cut short is no JSON: its shard is made again
        self._shards.append((name, names))
        self._rows, self._notes = [], []

    def _take_over(self) -> None:
        """Count the finished shards of an earlier attempt as written; whatever else it left is removed."""
        for name, entry in _finished_shards(self._build):
            self._shards.append((name, entry["names"]))
            self._names.update(entry["names"])
            self._total_bytes += entry["bytes"]
            self.finished += entry["notes"]
        kept = {_REQUEST_FILE, *(name + end for name, _ in self._shards for end in ("", ".json"))}
        for path in self._build.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()

    def _finish(self) -> None:
        self._flush()
        self._spool.close()
        total = len(self._shards)
        weight_map = {}
        for number, (name, tensors) in enumerate(self._shards, start=1):
            final = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            (self._build / name).rename(self._build / final)
            weight_map.update(dict.fromkeys(tensors, final))
        if total > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            self.write_json(INDEX_NAME, index)
        for name, _ in self._shards:
            (self._build / f"{name}.json").unlink()
        for name in (_REQUEST_FILE, _SPOOL):
            (self._build / name).unlink()
        self._replace()

    def _replace(self) -> None:
        if not self.path.exists():
            self._build.rename(self.path)
            return
        old = _make_sibling(self.path, "old")
        try:
            self.path.rename(old / "previous")
            try:
                self._build.rename(self.path)
            except BaseException:
                (old / "previous").rename(self.path)
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor in the spool; begin, end: its bytes there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Refuse a destination that is a file, a folder with anything in it (without `overwrite`), or a folder that is no
    checkpoint (with it): only a checkpoint may be replaced."""
    check_path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is written into a folder", fix="choose another path")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise CheckpointError(
            f"{path} exists and is not empty", fix="choose another folder, or pass --overwrite to replace it"
        )
    if path.is_dir() and any(path.iterdir()) and not _is_checkpoint(path):
        raise CheckpointError(
            f"{path} is not empty and no checkpoint (a config.json and *.safetensors files); it is not replaced",
            fix="choose another folder, or remove this one yourself",
        )


def clear_leftovers(path: Path, *, unfinished: bool = True) -> None:
    """Remove what killed processes of this machine left beside `path`; a checkpoint moved aside and not yet replaced
    goes back to its place. unfinished=False leaves what can be resumed."""
    for kind, sibling in _leftovers(path):
        if kind == "old" and (sibling / "previous").is_dir() and not path.exists():
            with contextlib.suppress(OSError):
                (sibling / "previous").rename(path)
        if kind == "old" or unfinished:
            shutil.rmtree(sibling, ignore_errors=True)


def _leftovers(path: Path) -> Iterator[tuple[str, Path]]:
    """Kind ("new", "old") and folder of what dead processes of this machine left beside `path`."""
    pattern = re.compile(re.escape(f".{path.name}.") + rf"(new|old)-{_host()}-(\d+)-[0-9a-f]{{8}}")
    try:
        siblings = sorted(path.parent.iterdir())
    except OSError:
        return
    for sibling in siblings:
        match = pattern.fullmatch(sibling.name)
        if match and not sibling.is_symlink() and sibling.is_dir() and not _is_alive(int(match[2])):
            yield match[1], sibling


def _find_unfinished(path: Path, request: Mapping[str, Any]) -> Path | None:
    """The unfinished folder of an earlier attempt at `request`, the one with the most shards; the others are removed.

    Raises CheckpointError when every attempt was at another request. One that left neither a shard nor its request
    (killed at once) is none.
    """
    asked = json.loads(json.dumps(request))
    found = [sibling for kind, sibling in _leftovers(path) if kind == "new"]
    counts = {sibling: sum(1 for _ in _finished_shards(sibling)) for sibling in found}
    made = {sibling: _read_json(sibling / _REQUEST_FILE) for sibling in found}
    same = [sibling for sibling in found if made[sibling] == asked]
    other = next((sibling for sibling in found if made[sibling] or counts[sibling]), None)
    if not same and other is not None:
        raise CheckpointError(
            f"the unfinished conversion to {path} was made from another source or by another recipe:"
            f" {_differences(made[other], asked)}",
            fix="repeat the command that began it, or leave --resume out to start anew",
        )
    best = max(same, key=lambda sibling: counts[sibling], default=None)
    for sibling in found:
        if sibling != best:
            shutil.rmtree(sibling, ignore_errors=True)
    return best


def _differences(made: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What differs between two requests, in words. Of lists only what one of them has and the other has not."""
    if not made:
        return "it does not say how"
    parts = []
    for what in dict.fromkeys((*asked, *made)):
        before, now = made.get(what), asked.get(what)
        if before == now:
            continue
        if isinstance(before, list) and isinstance(now, list):
            only_before = [item for item in before if item not in now]
            only_now = [item for item in now if item not in before]
            if not only_before and not only_now:
                parts.append(f"{what} in another order")
                continue
            before, now = ("; ".join(items[:3]) or "nothing of it" for items in (only_before, only_now))
        parts.append(f"{what} was {str(before)[:200]}, now {str(now)[:200]}")
    return ", ".join(parts)


def _finished_shards(build: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and journal entry of every whole shard, in order; one that has its final name already gets the old back."""
    number = 0
    while True:
        name = f"shard-{number:05d}.safetensors"
        entry = _read_json(build / f"{name}.json")
        finals = [*build.glob(f"model-{number + 1:05d}-of-*.safetensors")]
        finals += [build / "model.safetensors"] if number == 0 else []
        for final in finals:
            if final.is_file() and not (build / name).exists():
                final.rename(build / name)
        if not {"bytes", "names", "notes"} <= set(entry) or not (build / name).is_file():
            return
        yield name, entry
        number += 1


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is missing or no whole one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _header(rows: list[_Row]) -> bytes:
    """A safetensors header for rows in file order, padded to 8 bytes: the same bytes as the library's."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for row in rows:
        size = row.end - row.begin
        table[row.name] = {"dtype": row.dtype, "shape": row.shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _make_sibling(path: Path, kind: str) -> Path:
    sibling = path.parent / f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    sibling.mkdir()
    return sibling


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _output_error(path: Path, error: OSError, *, kept: bool = False) -> OutputError:
    reason = error.strerror or str(error)
    if error.errno in DISK_FULL:
        with contextlib.suppress(OSError):
            reason += f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free)"
    left = "finished shards are kept for --resume" if kept else "nothing was left behind"
    return OutputError(f"could not write the checkpoint {path}: {reason}; {left}", fix=write_fix(error))
