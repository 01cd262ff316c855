"""Typed errors of the workbench.

Every message says what is wrong, where (tensor, file, key), why, and how to get out. The command line prints a
`WorkbenchError` without a traceback and exits 3; anything else is a bug and keeps its traceback (exit 3 as well).
"""

from __future__ import annotations


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


class ComparisonError(WorkbenchError):
    """Two arms' answers cannot be paired."""


class OutputError(WorkbenchError):
    """A result could not be written (disk full, no permission)."""
