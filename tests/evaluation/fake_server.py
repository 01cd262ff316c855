"""A loopback OpenAI completions server with canned answers, for tests of what is asked and of what becomes of the
answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str], "str | tuple[str, str] | None"]


class FakeServer:
    """payloads: the requests in order of arrival. answer(prompt) -> text, (text, finish_reason), or None for HTTP
    500.
    """

    def __init__(self, answer: Answer, decode: Callable[[list[int]], str] | None = None) -> None:
        self.answer = answer
        self.decode = decode
        self.payloads: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self.die_after: int | None = None
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = outer._respond(payload)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _respond(self, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = payload["prompt"][0] if isinstance(payload["prompt"], list) else payload["prompt"]
        text = self.decode(prompt) if self.decode is not None else prompt
        with self._lock:
            if self.die_after is not None and len(self.payloads) >= self.die_after:
                self.http.socket.close()  # later connections are refused
                return 500, {"error": "out of memory"}
            self.payloads.append(payload)
            self.prompts.append(text)
        found = self.answer(text)
        if found is None:
            return 500, {"error": "no answer"}
        answer, reason = found if isinstance(found, tuple) else (found, "stop")
        for stop in payload["stop"]:
            answer = answer.split(stop)[0]
        return 200, {"choices": [{"index": 0, "text": answer, "finish_reason": reason}]}


@contextmanager
def fake_server(answer: Answer, decode: Callable[[list[int]], str] | None = None) -> Iterator[FakeServer]:
    server = FakeServer(answer, decode)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
