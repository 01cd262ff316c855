"""A journal of finished rows, so that a killed analysis continues where it stopped and ends in the same table.

    journal = Journal.open(path, key={...})        # rows of an equal key are kept, of another are dropped
    if name not in journal: journal.add(name, rows, extra)

One JSON line per finished tensor, appended and flushed; a half-written last line is ignored. The first line holds the
key: everything that the rows depend on (fingerprints, rules, seed). `path` None keeps rows in memory only.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from workbench.errors import OutputError


class Journal:
    """Rows by tensor name. Use `Journal.open`, and close it (or use `with`) when done.

    With a path, memory holds a place in the file for each tensor, not its rows: a checkpoint of a trillion parameters
    has some 70,000 tensors.
    """

    def __init__(self, path: Path | None, stream: IO[bytes] | None) -> None:
        self._path, self._stream = path, stream
        self._kept: dict[str, dict[str, Any]] = {}  # without a path
        self._places: dict[str, tuple[int, int]] = {}  # offset and length of a tensor's line
        self._last: tuple[str, dict[str, Any]] = ("", {})

    @classmethod
    def open(cls, path: Path | None, key: dict[str, Any]) -> Journal:
        """Continue the journal at `path` if it has this `key`, else start it anew. Raises OutputError."""
        if path is None:
            return cls(None, None)
        header = json.dumps({"key": key}, sort_keys=True).encode() + b"\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("a+b")
            journal = cls(path, stream)
            stream.seek(0)
            end = journal._read(stream) if stream.readline() == header else 0
            stream.truncate(end)  # of another key: all; else a line that was cut short
            if end == 0:
                stream.write(header)
            stream.flush()
        except OSError as error:
            raise OutputError.of(path, error) from error
        return journal

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._kept

    def __len__(self) -> int:
        return len(self._places) + len(self._kept)

    def add(self, name: str, rows: list[list[Any]], extra: dict[str, Any] | None = None) -> None:
        """Record tensor `name` as finished. Raises OutputError when the disk refuses."""
        entry = {"name": name, "rows": rows, "extra": extra or {}}
        if self._stream is None or self._path is None:
            self._kept[name] = entry
            return
        line = json.dumps(entry).encode() + b"\n"
        try:
            place = self._stream.seek(0, 2)
            self._stream.write(line)
            self._stream.flush()
        except OSError as error:
            raise OutputError.of(self._path, error) from error
        self._places[name] = (place, len(line))

    def rows(self, name: str) -> list[list[Any]]:
        return self._entry(name)["rows"]

    def extra(self, name: str) -> dict[str, Any]:
        return self._entry(name)["extra"]

    def close(self) -> None:
        """Raises OutputError where what is still buffered cannot be written."""
        if self._stream is None:
            return
        try:
            self._stream.close()
        except OSError as error:
            raise OutputError.of(self._path, error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*() if value is None else (OutputError,)):  # the first error says more
            self.close()

    def _entry(self, name: str) -> dict[str, Any]:
        if name in self._kept:
            return self._kept[name]
        if self._last[0] != name:
            assert self._stream is not None
            place, length = self._places[name]
            self._stream.seek(place)
            self._last = (name, json.loads(self._stream.read(length)))
        return self._last[1]

    def _read(self, stream: IO[bytes]) -> int:
        """Note where each finished tensor's line lies; returns where the last whole one ends."""
        end = stream.tell()
        for line in iter(stream.readline, b""):
            try:
                name = json.loads(line)["name"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                name = None
            if not isinstance(name, str):
                break
            self._places[name] = (end, len(line))
            end += len(line)
        return end
