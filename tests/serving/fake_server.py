"""Stands in for vLLM at the process border: understands --port and answers what an endpoint asks for.

Behaviour comes from the environment: FAKE_DIES (exit at once with a message), FAKE_HANGS (never answers), FAKE_CHILD
(starts a child that ignores SIGTERM; its process id is written to that file), FAKE_DEAF (ignores SIGTERM itself).
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def _answer(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer({"data": [{"id": "served"}]})
        elif self.path == "/health":
            self._answer({})
        else:
            self._answer({"error": "no such path"}, 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if os.environ.get("FAKE_REFUSES"):
            self._answer({"error": "the model has no vocabulary"}, 500)
        else:
            self._answer({"choices": [{"text": "2"}]})

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if os.environ.get("FAKE_DIES"):
        print(os.environ["FAKE_DIES"], flush=True)
        sys.exit(7)
    if os.environ.get("FAKE_DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if path := os.environ.get("FAKE_CHILD"):
        deaf = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        )
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        with open(path, "w") as stream:
            stream.write(str(child.pid))
    if os.environ.get("FAKE_HANGS"):
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
