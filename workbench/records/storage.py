"""Records to JSON and back, and files that are written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from workbench.errors import OutputError

SCHEMA_VERSION = 1
T = TypeVar("T")

# ---- writing ---------------------------------------------------------------------------------------------------------


def to_json(record: Any) -> str:
    """A record as indented JSON with `schema_version`; NaN and infinities become null / "inf" / "-inf"."""
    payload = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(record)}
    return json.dumps(plain(payload), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Read a record of dataclass `kind` back. Raises ValueError on what is no JSON object of its keys and version."""
    try:
        payload = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(payload, dict):
        raise ValueError(f"it holds a {type(payload).__name__}, expected a {kind.__name__} as a JSON object")
    version = payload.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"{kind.__name__}: schema version {version}, this code reads {SCHEMA_VERSION}")
    return _build(kind, payload)


def write_json(path: Path, record: Any) -> None:
    """Write a record atomically. Raises OutputError naming the path."""
    write_text(path, to_json(record))


def read_json(kind: type[T], path: Path) -> T:
    return from_json(kind, path.read_text())


def write_text(path: Path, text: str) -> None:
    """Write `text` to a temporary name in the same folder, then rename. Raises OutputError.

    What is no text (a file name that is not UTF-8) is written as \\udc.. escapes.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to a temporary name in the same folder, then rename. A link's target is written, not the link.

    Raises OutputError, also for a path that is there and no regular file (a device, a pipe, a folder).
    """
    temporary: str | None = None
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is there and no regular file", fix="give another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError.of(path, error) from error


def plain(value: Any) -> Any:
    """Tuples as lists, NaN as None, infinities as "inf" and "-inf": what strict JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _build(kind: Any, value: Any) -> Any:
    import types
    import typing

    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"{kind.__name__}: unknown keys {sorted(unknown)}")
        return kind(**{key: _build(hints[key], item) for key, item in value.items()})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return tuple(_build(args[0], item) for item in value)
    if origin is dict:
        return {key: _build(args[1], item) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return value if value is None else _build(next(a for a in args if a is not type(None)), value)
    if kind is float:
        return math.nan if value is None else float(value)
    return value
