"""Typed errors of the workbench.

Every message says what is wrong, where (tensor, file, key), why, and how to get out. The command line prints a
`WorkbenchError` without a traceback and exits 3; anything else is a bug and keeps its traceback (exit 3 as well).
"""

from __future__ import annotations

import errno
import os

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WAYS_OUT = {
    **dict.fromkeys(DISK_FULL, "free space or choose another output folder"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EBUSY),
        "something else lies in the way: choose another output folder",
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check permissions or choose another output folder"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "choose another output folder, with a shorter name"),
}


class WorkbenchError(Exception):
    """Base of every error a user can fix. `fix` is the way out, printed on its own line."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class ConfigError(WorkbenchError):
    """A setting is unknown, missing, or contradicts another."""


class CheckpointError(WorkbenchError):
    """A checkpoint folder, shard, index, config or tensor cannot be read as what it claims to be."""


class FormatError(WorkbenchError):
    """A tensor does not fit a number format (shape, dtype, non-finite value, unknown rule)."""


class EngineError(WorkbenchError):
    """An endpoint could not be started, reached, or kept alive."""


class EvaluationError(WorkbenchError):
    """A task could not be run against an endpoint, or its result files are unusable."""


class ComputeError(WorkbenchError):
    """A cluster that work is spread over cannot be reached, or its workers do not stay alive."""


class ComparisonError(WorkbenchError):
    """Two arms' answers cannot be paired."""


class OutputError(WorkbenchError):
    """A result could not be written (disk full, no permission)."""

    @classmethod
    def of(cls, path: object, error: Exception) -> OutputError:
        """The error of writing `path`, with the way out that its cause has."""
        reason = getattr(error, "strerror", None) or str(error)
        return cls(f"could not write {path}: {reason}", fix=write_fix(error))


def write_fix(error: BaseException) -> str:
    """What to do about a file that could not be written. safetensors has errors of its own, which end in the number."""
    number = getattr(error, "errno", None)
    if number is None and str(error).endswith(")"):
        number = int(digits) if (digits := str(error).rpartition("os error ")[2].rstrip(")")).isdecimal() else None
    return _WAYS_OUT.get(number or 0, "choose another output folder, where files can be written")


def full_disk(error: BaseException) -> BaseException | None:
    """The error that says a disk or quota is full: this one, or one that it was raised from; None where none does.
    Libraries wrap it in errors of their own, some without the number.
    """
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        text = str(found)
        if getattr(found, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)
        ):
            return found
        found = found.__cause__ or found.__context__
    return None
