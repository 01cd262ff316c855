"""The paths that a command reads and writes, checked before it works.

check_file("--json", arguments.json, arguments.path)   # OutputError where it cannot be written
"""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import ConfigError, OutputError


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix="give an existing UTF-8 text file") from error


def check_input(flag: str, path: Path | None) -> None:
    """Refuse a file that is not there. Raises ConfigError."""
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{flag} {path} {what}", fix="give the file that `workbench calibrate` wrote")


def check_file(flag: str, path: Path, *inputs: Path | str | None) -> None:
    """Refuse a file that cannot be written, or that is part of an input, before the work that leads to it.

    inputs: files, folders or hf:// references that the command reads; None is skipped. Raises OutputError.
    """
    if path.is_dir():
        raise OutputError(f"{flag} {path} is a folder", fix="give the file's own name within it")
    _check_apart(flag, path, inputs)
    check_folder(flag, path.parent)


def check_folder(flag: str, path: Path, *inputs: Path | str | None) -> None:
    """Refuse a folder that cannot be made or written into, or that lies in an input. Raises OutputError."""
    present = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not present.is_dir():
        raise OutputError(f"{flag} {path}: {present} is no folder", fix="choose another path")
    if not os.access(present, os.W_OK | os.X_OK):
        raise OutputError(f"{flag} {path}: {present} may not be written", fix="choose another path")
    _check_apart(flag, path, inputs)


def _check_apart(flag: str, path: Path, inputs: tuple[Path | str | None, ...]) -> None:
    for given in inputs:
        if given is not None and os.path.exists(given) and path.resolve().is_relative_to(Path(given).resolve()):
            where = "is" if path.resolve() == Path(given).resolve() else "lies within"
            raise OutputError(
                f"{flag} {path} {where} {given}, which the command reads", fix=f"write elsewhere{_beside(path, given)}"
            )


def _beside(path: Path, given: Path | str) -> str:
    """A place outside of a folder that is read, as an example."""
    folder = Path(given).resolve()
    return f", such as {folder.parent / path.name}" if folder.is_dir() and path.resolve() != folder else ""
