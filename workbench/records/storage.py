"""Records to JSON and back, and files that are written whole or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from workbench.errors import OutputError

SCHEMA_VERSION = 1
T = TypeVar("T")
_LARGEST = int(sys.float_info.max)

# ---- writing ---------------------------------------------------------------------------------------------------------


def to_json(record: Any) -> str:
    """A record as indented JSON with `schema_version`; NaN and infinities become null / "inf" / "-inf"."""
    payload = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(record)}
    return json_text(plain(payload), indent=2, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Read a record of dataclass `kind` back. Raises ValueError on what is no JSON object of its keys, types
    and version, and on numbers beyond int64 and float64, naming the field."""
    payload = _parse(text)
    if not isinstance(payload, dict):
        raise ValueError(f"it holds a {type(payload).__name__}, expected a {kind.__name__} as a JSON object")
    version = payload.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(f"{kind.__name__}: schema version {version}, this code reads {SCHEMA_VERSION}")
    return _build(kind, payload, kind.__name__)


def parse_json(text: str) -> Any:
    """JSON as plain data. Raises ValueError, naming the key, where a number is beyond int64 (whole) or float64."""
    value = _parse(text)
    _check_numbers(value, "")
    return value


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


def json_text(value: Any, **settings: Any) -> str:
    """`value` as JSON that UTF-8 can hold: readable text, or, with a lone surrogate in it, everything beyond ASCII as
    \\u escapes. Both read back as `value`. settings: of json.dumps.
    """
    text = json.dumps(value, ensure_ascii=False, **settings)
    return text if _is_unicode(text) else json.dumps(value, ensure_ascii=True, **settings)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(value: Any) -> Any:
    """Tuples as lists, NaN as None, infinities as "inf" and "-inf": what strict JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class _Beyond:
    """A JSON number that float64 cannot hold: refused by whoever reads the key that it stands at."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        cut = len(self.text) > 24 and "…" not in self.text
        return f"{self.text[:8]}… ({len(self.text)} characters)" if cut else self.text


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_int=_whole, parse_float=_fraction)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(text: str) -> int | _Beyond:
    """Of no more digits than the largest float64 has: Python's own limit (4300) would not tell the key."""
    if len(text) < 19:
        return int(text)
    number = int(text) if len(text) <= 310 else None
    return _Beyond(text) if number is None or abs(number) > _LARGEST else number


def _fraction(text: str) -> float | _Beyond:
    number = float(text)
    return _Beyond(text) if math.isinf(number) else number


def _check_numbers(value: Any, where: str) -> None:
    """Raise ValueError where plain data holds a number beyond int64 or float64."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_numbers(item, f"{where}[{index}]")
    elif isinstance(value, _Beyond) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise ValueError(
            f"{where} is {value if isinstance(value, _Beyond) else _Beyond(str(value))}, a number beyond 64 bits"
        )


def _build(kind: Any, value: Any, where: str) -> Any:
    """A value of type `kind` from its JSON. Raises ValueError naming the field that holds something else."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        fields = _held(dict, value, where)
        hints = _hints(kind)
        unknown = set(fields) - set(hints)
        if unknown:
            raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
        return kind(**{key: _build(hints[key], item, f"{where}.{key}") for key, item in fields.items()})
    if origin is tuple:
        items = _held(list, value, where)
        return tuple(_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        entries = _held(dict, value, where)
        return {key: _build(arguments[1], item, f"{where}[{key!r}]") for key, item in entries.items()}
    if origin in (typing.Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _build(kinds[0], value, where)
    if kind is float:
        if value is None:
            return math.nan
        return float(value if value in ("inf", "-inf") else _held((int, float), value, where))
    if kind is int or kind is Any:
        _check_numbers(value, where)
    return value if kind is Any else _held(kind, value, where)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """A record's field types; looking them up anew for every record takes longer than the rest of reading it."""
    return typing.get_type_hints(kind)


def _held(kinds: Any, value: Any, where: str) -> Any:
    if isinstance(value, _Beyond):
        raise ValueError(f"{where} is {value}, a number beyond 64 bits")
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        expected = "a number" if kinds == (int, float) else kinds.__name__
        raise ValueError(f"{where} is {repr(value)[:80]}, expected {expected}")
    return value
