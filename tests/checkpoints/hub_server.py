"""A local server that speaks as much of the Hub's HTTP as huggingface_hub needs: repository info, files, ranges.

    with HubServer({"org/tiny": folder}) as server:
        server.url, server.log

Faults are set as attributes. Every request is logged, so that a test can say what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: tuple[int, int] | None  # first and last byte
    token: str


class HubServer:
    """repos: repository name -> folder. Revisions: main, v1 and COMMIT are one commit; others do not exist."""

    def __init__(self, repos: dict[str, Path]) -> None:
        self.repos = repos
        self.log: list[Request] = []
        self.ignores_range = False
        self.gated: set[str] = set()
        self.breaks = 0  # how many ranged answers end after half of their bytes
        self.truncated: dict[str, int] = {}  # file -> bytes that are left of it
        self.shift = 0  # answers another range than the one asked for
        self.redirects_to = ""  # another server's URL, as the Hub sends clients to its CDN
        self.answers: dict[str, bytes] = {}  # path -> a body that is no Hub answer
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def ranges(self, file: str) -> list[tuple[int, int] | None]:
        """What was read of a file, in order."""
        return [r.range for r in self.log if r.method == "GET" and r.path.endswith("/" + file)]

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart; nobody should wait for the acknowledgement

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        wanted = (int(match[1]), int(match[2])) if match else None
        token = self.headers.get("Authorization", "")
        self.hub.log.append(Request(self.command, path, wanted, token))
        if path in self.hub.answers:
            return self._send(200, self.hub.answers[path], {"Content-Type": "application/json"})
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = info or file
        if found is None or found[1] not in self.hub.repos:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if found[2] not in (None, "main", "v1", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = self.hub.repos[found[1]]
        if info:
            answer = _tree(folder) if "/tree/" in path else _info(found[1], folder)
            return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        if found[1] in self.hub.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if not (folder / found[3]).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.hub.redirects_to and wanted:
            return self._send(302, b"", {"Location": self.hub.redirects_to + self.path})
        self._send_file(folder / found[3], wanted)

    def _send_file(self, path: Path, wanted: tuple[int, int] | None) -> None:
        content = path.read_bytes()[: self.hub.truncated.get(path.name)]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if wanted is None or self.hub.ignores_range:
            return self._send(200, content, headers)
        first, last = (p + self.hub.shift for p in wanted)
        if first >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        last = min(last, len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], headers, breaks=self.hub.breaks > 0)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, breaks: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks:
            self.hub.breaks -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)


def _tree(folder: Path) -> list[dict[str, object]]:
    """Every file as the Hub's API lists it."""
    rows = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        row = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": size, "oid": digest[:40]}
        if path.suffix == ".safetensors":
            row["lfs"] = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 130}
        rows.append(row)
    return rows


def _info(name: str, folder: Path) -> dict[str, object]:
    siblings = [{**row, "rfilename": row["path"], "blobId": row["oid"]} for row in _tree(folder)]
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
