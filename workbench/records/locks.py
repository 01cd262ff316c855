"""One writer at a time: a lock file that is held while a folder or file is written, and gone afterwards."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from workbench.errors import ConfigError, OutputError


def take_lock(path: Path, busy: str, *, elsewhere: str = "choose another output folder") -> TextIO:
    """Lock `path`, made if missing, without waiting; a process that dies gives its lock back.

    busy: what is said if another process holds it. elsewhere: the way out where it cannot be made. Raises ConfigError
    (held) and OutputError (cannot be written, or the disk knows no locks).
    """
    while True:
        try:
            lock = open(path, "w")  # noqa: SIM115 - held until it is given back
        except OSError as error:
            raise OutputError(f"cannot write in {path.parent}: {error.strerror}", fix=elsewhere) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise OutputError(
                    f"cannot lock {path}: {error.strerror}", fix=f"write to a local disk: {elsewhere}"
                ) from error
            raise ConfigError(busy, fix="wait for it, or stop it first") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()  # its holder removed it between the two calls: this one locks nothing


def give_lock(lock: TextIO) -> None:
    """Remove a lock file and give the lock back."""
    Path(lock.name).unlink(missing_ok=True)
    lock.close()


@contextlib.contextmanager
def hold_lock(path: Path, busy: str) -> Iterator[None]:
    """`take_lock` for a block; its folder is made. Raises as it does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError.of(path.parent, error) from error
    lock = take_lock(path, busy)
    try:
        yield
    finally:
        give_lock(lock)
