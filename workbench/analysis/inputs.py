"""What an analysis starts from: its checkpoints (each folder opened once, all closed together) and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError

Progress = Callable[[Iterable[str], int, str], Iterable[str]]
"""progress(names, total, label) hands the names on, one by one, and shows how far it is."""


class OpenCheckpoints:
    """Folders opened through `workbench.checkpoints`, closed with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._opened: dict[str, Any] = {}
        self._converted: dict[str, set[str]] = {}

    def open(self, path: str | Path) -> Any:
        """The checkpoint at `path` (a folder, or hf://org/name). Raises CheckpointError as `open_checkpoint` does."""
        from workbench.checkpoints import open_checkpoint

        key = str(path)
        if key not in self._opened:
            self._opened[key] = self._stack.enter_context(open_checkpoint(path))
        return self._opened[key]

    def converts(self, path: str | Path, name: str) -> bool:
        """Whether requantization at load converts the matrix `name`: of an unquantized checkpoint, any."""
        from workbench.checkpoints.selection import converted_at_load

        key = str(path)
        if key not in self._converted:
            self._converted[key] = {entry.name for entry in converted_at_load(self.open(path).entries())}
        return not self._converted[key] or name in self._converted[key]

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint by path of everything opened so far."""
        return {path: checkpoint.fingerprint() for path, checkpoint in sorted(self._opened.items())}


def check_resamples(resamples: int) -> None:
    """Raises ConfigError for a bootstrap of fewer than one resample."""
    if resamples < 1:
        raise ConfigError(f"a bootstrap of {resamples} resamples", fix="use at least 1; 1000 is the usual choice")


def shown(names: list[str], label: str, progress: Progress | None) -> Iterable[str]:
    """`names`, through `progress` where there is one."""
    return names if progress is None else progress(names, len(names), label)
