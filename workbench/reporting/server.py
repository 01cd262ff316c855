"""`serve(pages, port)`: the workbench's own pages at http://127.0.0.1:PORT/, for this machine alone.

    serve(pages_of_runs([run]), port=0, open_browser=False)      # prints the address; returns on Ctrl-C

A request is looked up in a table of pages by its exact path: nothing else of the disk can be asked for, whatever the
path says, and no folder is listed. Pages carry the content-security policy that they were written with as a header too.
Requests for another host name are refused, so that a web page elsewhere cannot read these through a name of its own.
"""

from __future__ import annotations

import contextlib
import errno
import html
import http.server
import re
import socketserver
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from workbench.errors import ConfigError, WorkbenchError

from .build import build_report
from .index import find_runs, render_index
from .load import load_run
from .side_by_side import render_comparison

HOST = "127.0.0.1"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
}
WRITTEN = ("report.html", "summary.md", "report.json", "flips.jsonl")  # by build_report, into the run folder
_NO_SCRIPT = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

Page = Callable[[], str | bytes]
Lookup = Callable[[str], Page | None]


def pages_of_runs(runs: Sequence[Path]) -> Lookup:
    """One run: its report as it is on disk (made where it is not). Several: their comparison, and the report of each.

    Raises as `load_run` and `render_comparison` do, before anything is served.
    """
    if len(runs) == 1:
        load_run(runs[0], tables=False)
        written = _written(runs[0], "/")
        return {"/": written["/report.html"], **written}.get
    comparison, _ = render_comparison(runs, lambda index: f"{index}/report.html")
    pages: dict[str, Page] = {"/": lambda: comparison}
    for index, run in enumerate(runs):
        pages.update(_written(run, f"/{index}/"))
    return pages.get


def pages_of_folder(root: Path) -> Lookup:
    """The index of all runs below `root`, as they are when it is asked for, and the report of each."""
    render_index(root, _link(root))

    def lookup(path: str) -> Page | None:
        if path == "/":
            return lambda: render_index(root, _link(root))
        for run in find_runs(root):
            page = _written(run, _base(root, run)).get(path)
            if page is not None:
                return page
        return None

    return lookup


class Server(http.server.ThreadingHTTPServer):
    """Serves the pages that `lookup` knows. Raises ConfigError where the port cannot be had."""

    daemon_threads = True

    def __init__(self, lookup: Lookup, port: int) -> None:
        self.lookup, self.rendering = lookup, threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OverflowError as error:
            raise ConfigError(f"{port} is no port", fix="give one from 0 (any free one) to 65535") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} of {HOST} is in use"
            elif error.errno in (errno.EACCES, errno.EPERM):
                why = f"port {port} may not be opened"
            else:
                raise
            raise ConfigError(why, fix="choose another with --port, or --port 0 for any free one") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Without the base class's reverse look-up of the host's name, which may wait for a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news."""


def serve(lookup: Lookup, port: int, *, open_browser: bool, say: Callable[[str], None] | None = None) -> None:
    """Serve until Ctrl-C (or SIGTERM), and return then. say: gets the address once it answers; default: print it."""
    from workbench.interrupt import Interrupted

    with Server(lookup, port) as server:
        (say or _print)(f"{server.url}  (Ctrl-C ends it)")
        if open_browser:
            import webbrowser

            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt, Interrupted):
            server.serve_forever()
        server.rendering.acquire()  # a page that is being drawn is finished, and no other is begun: libraries that draw
        #                             have threads of their own, which must not be cut off by the process's end


# ---- pages -----------------------------------------------------------------------------------------------------------


def _print(line: str) -> None:
    print(line, flush=True)


def _base(root: Path, run: Path) -> str:
    relative = run.relative_to(root).as_posix()
    return "/run/" if relative == "." else f"/run/{relative}/"


def _link(root: Path) -> Callable[[Path], str]:
    return lambda run: quote(_base(root, run).lstrip("/")) + "report.html"


def _written(run: Path, base: str) -> dict[str, Page]:
    """What `build_report` writes, where it is there; the report itself is made where it is not."""
    pages = {f"{base}{name}": _file(run / name) for name in WRITTEN if (run / name).is_file()}

    def report() -> bytes:
        return (run / "report.html" if (run / "report.html").is_file() else build_report(run)).read_bytes()

    return {**pages, f"{base}report.html": report}


def _file(path: Path) -> Page:
    return path.read_bytes


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "workbench", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        status, body, kind = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"{_policy(body, kind)}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    do_HEAD = do_GET

    def _answer(self) -> tuple[HTTPStatus, bytes, str]:
        port = self.server.server_address[1]
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return _message(HTTPStatus.FORBIDDEN, f"Ask for {self.server.url}.")
        path = unquote(urlsplit(self.path).path)
        with self.server.rendering:  # pages are drawn one at a time: matplotlib's settings are the process's
            try:
                page = self.server.lookup(path)
                content = page() if page is not None else None
            except (WorkbenchError, OSError) as error:
                return _message(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        if content is None:
            return _message(HTTPStatus.NOT_FOUND, "There is no such page.")
        kind = TYPES[Path(path).suffix or ".html"]
        return HTTPStatus.OK, content.encode() if isinstance(content, str) else content, kind

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address alone."""


def _message(status: HTTPStatus, text: str) -> tuple[HTTPStatus, bytes, str]:
    body = f"<!DOCTYPE html><title>{status.phrase}</title><p>{html.escape(text)} <a href='/'>Start</a></p>"
    return status, body.encode(), TYPES[".html"]


def _policy(body: bytes, kind: str) -> str:
    """The page's own policy: its head names it."""
    if kind == TYPES[".html"]:
        found = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', body[:4000])
        if found is not None:
            return html.unescape(found.group(1).decode())
    return _NO_SCRIPT
