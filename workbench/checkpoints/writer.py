"""Write a checkpoint folder that either appears whole or not at all.

    with CheckpointWriter(dst) as writer:
        writer.add({"model.norm.weight": tensor})     # as many times as there are tensors
        writer.copy_file(src / "tokenizer.json")
        writer.write_json("config.json", config)
    # leaving the block without an error renames the folder into place

Everything goes to a hidden sibling folder; a full disk, Ctrl-C or any other error removes it. Its name says whose it is
(host, process), so that what a killed process left is removed by the next one that writes there. One shard is held in
memory at a time (`max_shard_bytes`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.errors import CheckpointError, OutputError
from workbench.records import write_text

from .files import INDEX_NAME, check_path, to_json_text

DEFAULT_SHARD_BYTES = 2 << 30
_PLACE_FAULTS = {
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EBUSY),
        "something else lies in the way: choose another output folder",
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check permissions or choose another output folder"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "choose another output folder, with a shorter name"),
}


class CheckpointWriter:
    """Collects tensors into shards of at most `max_shard_bytes` and builds `path` when the block ends without error.

    Raises CheckpointError when `path` is a file or a non-empty folder (unless overwrite=True, which replaces it at the
    end), OutputError when the disk is full or not writable.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self.path = path
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, list[str]]] = []
        self._names: set[str] = set()
        self._total_bytes = 0

    def __enter__(self) -> CheckpointWriter:
        clear_leftovers(self.path)
        check_destination(self.path, overwrite=self.overwrite)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._build = _make_sibling(self.path, "new")
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
            raise _output_error(self.path, failure) from failure
        finally:
            shutil.rmtree(self._build, ignore_errors=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors added so far."""
        return self._total_bytes

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add tensors that belong together (a weight and its scales): they go to one shard."""
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        for name, tensor in tensors.items():
            if name in self._names:
                raise CheckpointError(f"tensor {name} would be written twice", fix="report this as a bug")
            self._names.add(name)
            self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        try:
            text = to_json_text(value)
            text.encode()
        except (RecursionError, ValueError) as error:
            raise CheckpointError(
                f"{name} cannot be written as JSON: {error}", fix="repair the source's file"
            ) from error
        write_text(self._build / name, text)

    def copy_file(self, source: Path, name: str) -> None:
        """Copy a side file (tokenizer, chat template, ...) under its relative name."""
        try:
            (self._build / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self._build / name)
        except OSError as error:
            raise _output_error(self.path, error) from error

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        temporary = self._build / f".{name}"
        try:
            save_file(self._pending, temporary, metadata={"format": "pt"})
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.rename(self._build / name)
        except (OSError, SafetensorError) as error:
            raise _output_error(self.path, error) from error
        self._shards.append((name, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._flush()
        total = len(self._shards)
        weight_map = {}
        for number, (name, tensors) in enumerate(self._shards, start=1):
            final = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            (self._build / name).rename(self._build / final)
            weight_map.update(dict.fromkeys(tensors, final))
        if total > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            self.write_json(INDEX_NAME, index)
        self._honour_umask()
        self._replace()

    def _honour_umask(self) -> None:
        """Give every file the mode that a plain `open` gives; the safetensors library makes its files 0600."""
        probe = self._build / ".mode"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
        probe.unlink()
        for path in self._build.rglob("*"):
            if path.is_file():
                path.chmod(mode)

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


def clear_leftovers(path: Path) -> None:
    """Remove what killed processes of this machine left beside `path`; a checkpoint moved aside and not yet replaced
    goes back to its place."""
    pattern = re.compile(re.escape(f".{path.name}.") + rf"(new|old)-{_host()}-(\d+)-[0-9a-f]{{8}}")
    with contextlib.suppress(OSError):
        for sibling in sorted(path.parent.iterdir()):
            match = pattern.fullmatch(sibling.name)
            if match is None or sibling.is_symlink() or not sibling.is_dir() or _is_alive(int(match[2])):
                continue
            if match[1] == "old" and (sibling / "previous").is_dir() and not path.exists():
                (sibling / "previous").rename(path)
            shutil.rmtree(sibling, ignore_errors=True)


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


def _output_error(path: Path, error: Exception) -> OutputError:
    reason = getattr(error, "strerror", None) or str(error)
    told = re.search(r"os error (\d+)", str(error))  # the safetensors library wraps the number into its text
    number = getattr(error, "errno", None) or (int(told[1]) if told else 0)
    if number in _PLACE_FAULTS:
        fix = _PLACE_FAULTS[number]
    else:
        fix = "free space or choose another output folder"
        with contextlib.suppress(OSError):
            reason += f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB free)"
    return OutputError(
        f"could not write the checkpoint {path}: {reason}; nothing was left behind",
        fix=fix,
    )
