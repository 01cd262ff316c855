"""A loopback OpenAI server with canned answers, for tests of what is asked and of what becomes of the answers: text,
chat, echoed log-probabilities, and every way to fail.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str], "str | tuple[str, str] | None"]
VOCABULARY = 300
HANG_S = 60.0


def logprob_of(token: int, before: int) -> float:
    """The endpoint's distribution over VOCABULARY tokens after `before`: fixed, and uneven."""
    shift = before * 3 % 11
    return -((token * 7 + shift) % 11) - _log_sum(shift)


@functools.cache
def _log_sum(shift: int) -> float:
    return math.log(sum(math.exp(-((token * 7 + shift) % 11)) for token in range(VOCABULARY)))


class FakeServer:
    """payloads: the requests in order of arrival. answer(prompt) -> text, (text, finish_reason), or None for HTTP
    500. fault(n) -> what request number n (from 0, in order of arrival) meets: None, "429", "404", "hang", "reset",
    "null", "truncated", "no_choices", "short" (too few log-probabilities), "slow", "redirect". latency_s: of every
    answer. change(answer): alters the JSON of an answer in place. template: text that the server's own chat
    template adds, counted with the prompt; most_tokens: a limit of its own.
    """

    def __init__(self, answer: Answer, decode: Callable[[list[int]], str] | None = None) -> None:
        self.answer = answer
        self.decode = decode
        self.payloads: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.prompts: list[str] = []
        self.die_after: int | None = None
        self.fault: Callable[[int], str | None] = lambda n: None
        self.latency_s = 0.0
        self.template = ""
        self.most_tokens: int | None = None
        self.retry_after = "0"
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: None
        self.models: list[dict[str, Any]] | None = None
        self.echo = True
        self.logprob: Callable[[int, int], float] = logprob_of
        self.closing = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections stay open, as a real server's do
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                if outer.models is None:
                    self._send(501, b"{}")
                else:
                    self._send(200, json.dumps({"object": "list", "data": outer.models}).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                number = len(outer.payloads)
                status, answer = outer._respond(body)
                outer.change(answer)
                if outer.latency_s:
                    time.sleep(outer.latency_s)
                self._misbehave(outer.fault(number) if status == 200 else None, status, answer)

            def _misbehave(self, fault: str | None, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                if fault in ("429", "404", "400"):
                    self._send(int(fault), b'{"error": "as told"}', {"Retry-After": outer.retry_after})
                elif fault == "redirect":
                    self._send(302, b"", {"Location": "http://127.0.0.1:9/"})
                elif fault == "hang":
                    outer.closing.wait(HANG_S)
                    self.close_connection = True
                elif fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                elif fault == "cut":  # the connection ends within the body
                    self._send(status, data[:-9], length=len(data))
                    self.close_connection = True
                else:
                    if fault == "truncated":
                        data = data[:-9]
                    if fault == "slow":
                        outer.closing.wait(100 * max(outer.latency_s, 0.002))
                    self._send(status, data)

            def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, length: int = -1) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(length if length >= 0 else len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = self.close_connection or outer.closing.is_set()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:  # a client that left is no news
                pass

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _respond(self, body: bytes) -> tuple[int, dict[str, Any]]:
        payload = json.loads(body)
        text = self._text(payload)
        with self._lock:
            if self.die_after is not None and len(self.payloads) >= self.die_after:
                self.closing.set()  # open connections end, later ones are refused
                self.http.socket.close()
                return 500, {"error": "out of memory"}
            number = len(self.payloads)
            self.payloads.append(payload)
            self.bodies.append(body)
            self.prompts.append(text)
        fault = self.fault(number)
        usage = {"prompt_tokens": len(text) + len(self.template), "completion_tokens": 1}
        if payload.get("echo"):
            choice = self._echo(payload, fault) if self.echo else {"index": 0, "text": "x", "finish_reason": "length"}
            return 200, {"choices": [choice], "usage": usage}
        found = self.answer(text)
        if found is None:
            return 500, {"error": "no answer"}
        answer, reason = found if isinstance(found, tuple) else (found, "stop")
        for stop in payload.get("stop") or ():
            answer = answer.split(stop)[0]
        if self.most_tokens is not None and len(answer) > self.most_tokens:
            answer, reason = answer[: self.most_tokens], "length"
        usage["completion_tokens"] = len(answer)
        content = None if fault == "null" else answer
        choice = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": content}} if "messages" in payload else {"text": content}
        return 200, {"choices": [] if fault == "no_choices" else [choice], "usage": usage}

    def _text(self, payload: dict[str, Any]) -> str:
        if "messages" in payload:
            return str(payload["messages"][-1]["content"])
        prompt = payload["prompt"]
        if isinstance(prompt, list):
            prompt = prompt[0] if isinstance(prompt[0], (list, str)) else prompt
        return self.decode(prompt) if self.decode is not None else str(prompt)

    def _echo(self, payload: dict[str, Any], fault: str | None) -> dict[str, Any]:
        """The `logprobs` most likely tokens at each place of the prompt, the actual one, and one generated token."""
        tokens = payload["prompt"][0] if isinstance(payload["prompt"][0], list) else payload["prompt"]
        name = "token_id:{}" if payload.get("return_tokens_as_token_ids") else "t{}"
        first = {b: self._most_likely(b, payload["logprobs"]) for b in set(tokens)}
        logprobs: list[float | None] = [None]
        top: list[Any] = [None]
        for before, token in itertools.pairwise(tokens):
            logprobs.append(self.logprob(token, before))
            top.append({name.format(t): self.logprob(t, before) for t in dict.fromkeys([token, *first[before]])})
        cut = -2 if fault == "short" else None
        return {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "logprobs": {
                "tokens": [*map(name.format, tokens), "x"][:cut],
                "token_logprobs": [*logprobs, -1.0][:cut],
                "top_logprobs": [*top, {"x": -1.0}][:cut],
            },
        }

    def _most_likely(self, before: int, k: int) -> list[int]:
        return heapq.nlargest(k, range(VOCABULARY), key=lambda token: self.logprob(token, before))


@contextmanager
def fake_server(answer: Answer, decode: Callable[[list[int]], str] | None = None) -> Iterator[FakeServer]:
    server = FakeServer(answer, decode)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.http.shutdown()
        server.http.server_close()
