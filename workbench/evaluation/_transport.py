"""Many requests to one endpoint, a fixed number in flight, and every way that an endpoint fails told apart.

    transport = Transport(url, concurrency=32, timeout_s=600)
    transport.ask(bodies, read, keep)          # read(i, payload) -> value, keep(i, value, seconds, attempts)

A fixed number of workers share one iterator, so a request costs the same however many there are, and the next one is
sent as soon as an answer is in. What is retried: HTTP 408, 409, 425, 429 and 5xx, resets, answers cut short or of the
wrong shape (`retries` times, waiting 1, 2, 4, … seconds or what Retry-After says), timeouts (once: they are long).
What is left then fails one request (`fail` is called), not the run. The run ends when going on is pointless: the server
is gone, it refuses the key, path or model, it redirects, or more than 2 % of the requests (at least 2) have failed.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.errors import EvaluationError
from workbench.records import Transport as TransportRecord

RETRIED_STATUS = {408, 409, 425, 429}
FATAL_STATUS = {401, 403, 404, 405}
LONGEST_WAIT_S = 300.0
FAILED_SHARE, FAILED_LEAST = 0.02, 2
SLOW_FACTOR = 10.0
_CONTINUE = "answers so far are kept, and the same command continues from them"


class BadAnswer(Exception):
    """The endpoint answered 200 with something else than what was asked. kind: as counted in `Transport.faults`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class _Fault(Exception):
    """One failed send. again: whether it is worth another; wait_s: what the server asked to wait."""

    def __init__(self, kind: str, message: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.message, self.again, self.wait_s = kind, message, again, wait_s


class Transport:
    """See the module. headers: sent with each request. retries: sends after the first; backoff_s: the first wait."""

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        retries: int = 4,
        backoff_s: float = 1.0,
        verify: bool = True,
    ) -> None:
        self.url, self.concurrency, self.timeout_s = url, max(1, concurrency), timeout_s
        self.headers = {"Content-Type": "application/json", **(headers or {})}
        self.retries, self.backoff_s, self.verify = retries, backoff_s, verify
        self.faults: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.latencies: list[float] = []  # of answered requests, in order of arrival
        self.resent = self.failed = 0
        self.wall_s = 0.0

    def ask(
        self,
        bodies: Sequence[bytes],
        read: Callable[[int, dict[str, Any]], Any],
        keep: Callable[[int, Any, float, int], None],
        fail: Callable[[int, str], None] | None = None,
    ) -> None:
        """Send `bodies` in order. read(i, payload) turns an answer into a value, or raises BadAnswer.

        keep(i, value, seconds, attempts) and fail(i, message) are called as answers arrive, one at a time; without
        `fail`, a request that fails ends the run. Raises EvaluationError when going on is pointless.
        """
        if bodies:
            asyncio.run(self._ask(bodies, read, keep, fail))

    def note(self, kind: str, message: str) -> None:
        """Count a fault that is no reason to send again (null content)."""
        self.faults[kind] += 1
        self.examples.setdefault(kind, message)

    def record(self, *, requests: int, resumed: int, prompt: int | None, completion: int | None) -> TransportRecord:
        """The figures so far. requests: distinct ones; prompt, completion: summed tokens, None if not told."""
        times = sorted(self.latencies)
        tenth = len(self.latencies) // 10
        slowdown = math.nan
        if tenth >= 2:
            slowdown = statistics.median(self.latencies[-tenth:]) / statistics.median(self.latencies[:tenth])
        median = statistics.median(times) if times else math.nan
        return TransportRecord(
            requests=requests,
            resumed=resumed,
            retries=self.resent,
            failed=self.failed,
            faults=dict(self.faults),
            examples=dict(self.examples),
            latency_median_s=median,
            latency_p99_s=times[math.ceil(0.99 * len(times)) - 1] if times else math.nan,
            latency_max_s=times[-1] if times else math.nan,
            slow=sum(seconds > SLOW_FACTOR * median for seconds in times),
            slowdown=slowdown,
            busy=sum(times) / (self.wall_s * self.concurrency) if self.wall_s else math.nan,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )

    # ---- private

    async def _ask(self, bodies: Sequence[bytes], read: Any, keep: Any, fail: Any) -> None:
        import aiohttp

        started = time.monotonic()
        queue = iter(range(len(bodies)))
        allowed = max(FAILED_LEAST, int(FAILED_SHARE * len(bodies)))
        failures: list[str] = []
        connector = aiohttp.TCPConnector(limit=self.concurrency, ssl=self.verify)
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)

        async def work(session: Any) -> None:
            for i in queue:
                try:
                    value, seconds, attempts = await self._send(session, bodies[i], partial(read, i))
                except _Fault as fault:
                    self.failed += 1
                    failures.append(fault.message)
                    if fail is None or len(failures) > allowed:
                        raise self._pointless(failures, len(bodies)) from fault
                    fail(i, fault.message)
                else:
                    self.latencies.append(seconds)
                    keep(i, value, seconds, attempts)

        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self.headers) as session:
            workers = [asyncio.create_task(work(session)) for _ in range(min(self.concurrency, len(bodies)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                self.wall_s += time.monotonic() - started
        if failures and len(failures) == len(bodies):
            raise self._pointless(failures, len(bodies))

    async def _send(self, session: Any, body: bytes, read: Callable[[dict[str, Any]], Any]) -> tuple[Any, float, int]:
        """(value, seconds of the answered send, sends). Raises _Fault when all sends failed."""
        attempt = 0
        while True:
            attempt += 1
            sent = time.monotonic()
            try:
                return read(await self._post(session, body)), time.monotonic() - sent, attempt
            except BadAnswer as bad:
                fault = _Fault(bad.kind, f"{self.url}: {bad.message}", again=True)
            except _Fault as met:
                fault = met
            self.note(fault.kind, fault.message)
            limit = 1 if fault.kind == "timeout" else self.retries
            if not fault.again or attempt > limit:
                if fault.kind == "unreachable":
                    raise EvaluationError(fault.message, fix=f"see the endpoint's own log; {_CONTINUE}") from fault
                raise fault
            self.resent += 1
            await asyncio.sleep(max(fault.wait_s, min(30.0, self.backoff_s * 2.0 ** (attempt - 1))))

    async def _post(self, session: Any, body: bytes) -> dict[str, Any]:
        import aiohttp

        try:
            async with session.post(self.url, data=body, allow_redirects=False) as response:
                status, text = response.status, (await response.read()).decode("utf-8", errors="replace")
                after = _retry_after_s(response.headers.get("Retry-After", ""))
                target = response.headers.get("Location", "")
        except TimeoutError as error:
            message = f"{self.url} did not answer within {self.timeout_s:g} s"
            raise _Fault("timeout", message, again=True) from error
        except aiohttp.ClientPayloadError as error:
            raise _Fault("truncated_json", f"{self.url}: the answer broke off ({error})", again=True) from error
        except aiohttp.ClientConnectorError as error:
            message = f"the endpoint {self.url} stopped answering ({type(error).__name__}: {error})"
            raise _Fault("unreachable", message, again=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            message = f"{self.url} closed the connection in place of an answer ({type(error).__name__}: {error})"
            raise _Fault("reset", message, again=True) from error
        if 300 <= status < 400:
            raise EvaluationError(
                f"{self.url} redirects (HTTP {status}) to {target or 'nowhere'}", fix="give that server's own address"
            )
        if status != 200:
            self._refuse(status, text, after)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            message = f"{self.url}: the answer is no whole JSON: {error}; it ends in {text[-80:]!r}"
            raise _Fault("truncated_json", message, again=True) from error
        if not isinstance(answer, dict):
            raise _Fault("malformed", f"{self.url}: the answer is a {type(answer).__name__}", again=True)
        return answer

    def _refuse(self, status: int, text: str, after: float) -> None:
        message = f"{self.url} refused a request: HTTP {status} {text[:500]}".strip()
        if status in FATAL_STATUS:
            raise EvaluationError(message, fix="check the path, the model's name and the key (OPENAI_API_KEY)")
        if after > LONGEST_WAIT_S:
            message = f"{message} (Retry-After: {after:.0f} s, longer than the {LONGEST_WAIT_S:.0f} s waited here)"
            raise _Fault(f"http_{status}", message, again=False)
        again = status in RETRIED_STATUS or status >= 500
        raise _Fault(f"http_{status}", message, again=again, wait_s=after)

    def _pointless(self, failures: list[str], asked: int) -> EvaluationError:
        counts = ", ".join(f"{kind}: {count}" for kind, count in self.faults.most_common())
        return EvaluationError(
            f"{len(failures)} of {asked} requests failed, also when sent again ({counts}); the last: {failures[-1]}",
            fix=f"see the endpoint's own log; {_CONTINUE}",
        )


def _retry_after_s(header: str) -> float:
    """Seconds that a Retry-After header asks for (a number or a date); 0 without one."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
