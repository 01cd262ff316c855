"""A journal of finished rows, so that a killed analysis continues where it stopped and ends in the same table.

    journal = Journal.open(path, key={...})        # rows of an equal key are kept, of another are dropped
    if name not in journal: journal.add(name, rows, extra)

One JSON line per finished tensor, appended and flushed; a half-written last line is ignored. The first line holds the
key: everything that the rows depend on (fingerprints, rules, seed). `path` None keeps rows in memory only.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from workbench.errors import OutputError
from workbench.records import write_text


class Journal:
    """Rows by tensor name. Use `Journal.open`, and close it (or use `with`) when done."""

    def __init__(self, path: Path | None, entries: dict[str, dict[str, Any]], stream: IO[str] | None) -> None:
        self._path, self._entries, self._stream = path, entries, stream

    @classmethod
    def open(cls, path: Path | None, key: dict[str, Any]) -> Journal:
        """Continue the journal at `path` if it has this `key`, else start it anew. Raises OutputError."""
        if path is None:
            return cls(None, {}, None)
        header = json.dumps({"key": key}, sort_keys=True)
        lines = _complete_lines(path)
        kept = lines[1:] if lines and lines[0] == header else []
        entries = {}
        for line in kept:
            entry = json.loads(line)
            entries[entry["name"]] = entry
        write_text(path, "".join(line + "\n" for line in [header, *kept]))
        try:
            stream = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError.of(path, error) from error
        return cls(path, entries, stream)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, name: str, rows: list[list[Any]], extra: dict[str, Any] | None = None) -> None:
        """Record tensor `name` as finished. Raises OutputError when the disk refuses."""
        entry = {"name": name, "rows": rows, "extra": extra or {}}
        self._entries[name] = entry
        if self._stream is not None and self._path is not None:
            try:
                self._stream.write(json.dumps(entry) + "\n")
                self._stream.flush()
            except OSError as error:
                raise OutputError.of(self._path, error) from error

    def rows(self, name: str) -> list[list[Any]]:
        return self._entries[name]["rows"]

    def extra(self, name: str) -> dict[str, Any]:
        return self._entries[name]["extra"]

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _complete_lines(path: Path) -> list[str]:
    """Lines that end in a newline and parse; reading stops at the first that does not."""
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            json.loads(line)
        except ValueError:
            break
        if not line.endswith("\n"):
            break
        lines.append(line.rstrip("\n"))
    return lines
