"""Ray's side of a pass, in a process of its own: Ray ends the process that it is connected from, without a word, when
the servers that it needs are gone.

`ray_process.DriverProcess` starts it and asks; a request is a tuple and has one answer, after any number of WAITING:

    ("connect", address, options of ray.init, processors and tries of a task, poll_s, gone_s)
        -> ("connected", most processors of a node, slots) or ("unreachable", why) or ("no ray", why)
    ("submit", bytes of `packed`) -> ("submitted", slots)
    ("take",) -> of the task that was submitted first:
        ("taken", bytes of its result), ("raised", a WorkbenchError), ("unimportable", why), ("bug", traceback),
        ("gave up", Ray's exception, why) or ("gone", which server)

What is measured passes as bytes, so neither torch nor the checkpoints are loaded here. It ends with the connection.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from workbench.errors import WorkbenchError

WAITING = ("waiting",)
CONNECT_S = 2.0
HEAD, NODE = "head", "node"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def packed(task: Callable[..., Any], *arguments: Any) -> bytes:
    """A call, for `measured`."""
    return pickle.dumps((task, arguments))


def measured(call: bytes) -> bytes:
    """What a worker runs."""
    task, arguments = pickle.loads(call)
    return pickle.dumps(task(*arguments))


def takes_connections(address: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def main(descriptor: int) -> None:
    """Answer what is asked through this socket, until it closes."""
    os.set_inheritable(descriptor, False)  # Ray's servers would hold it open
    asked = Connection(descriptor)
    try:
        serve(asked)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pass is over, or its process is
    finally:
        asked.close()


def serve(asked: Connection) -> None:
    _, address, options, cpus, tries, poll_s, gone_s = asked.recv()
    os.environ.setdefault("RAY_task_oom_retries", str(tries))  # by default Ray tries for ever
    try:
        import ray
    except ImportError as error:
        asked.send(("no ray", str(error)))
        return
    asked.send(WAITING)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # of servers that do not start in time it raises just that
        asked.send(("unreachable", first_line(error)))
        return
    try:
        most = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        asked.send(("connected", most, _slots(ray, cpus)))
        task = ray.remote(measured).options(name="workbench analyze", num_cpus=cpus, max_retries=tries)
        waiting: deque[Any] = deque()
        while True:
            what, *arguments = asked.recv()
            if what == "submit":
                waiting.append(task.remote(*arguments))
                asked.send(("submitted", _slots(ray, cpus)))
            else:
                asked.send(take(ray, waiting.popleft(), lambda: asked.send(WAITING), poll_s, gone_s))
    finally:
        ray.shutdown()


def take(ray: Any, reference: Any, still: Callable[[], object], poll_s: float, gone_s: float) -> tuple[Any, ...]:
    """What became of a task, once it is known; `still` is called while it is not."""
    answered = time.monotonic()
    while True:
        try:
            return "taken", ray.get(reference, timeout=poll_s)
        except ray.exceptions.GetTimeoutError:
            still()
            if (missing := _missing(ray)) is None:
                answered = time.monotonic()
            elif time.monotonic() - answered > gone_s:
                return "gone", missing
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WorkbenchError):
                return "raised", error.cause
            if isinstance(error.cause, ImportError):
                return "unimportable", str(error.cause)
            return "bug", _COLOUR.sub("", str(error))
        except ray.exceptions.LocalRayletDiedError:
            return "gone", NODE
        except ray.exceptions.RayError as error:
            return "gave up", type(error).__name__, first_line(error)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _missing(ray: Any) -> str | None:
    """The server without which no task ends: the cluster's head, or that of the node that this process is on. Ray goes
    on waiting for the second one."""
    context = ray.get_runtime_context()
    if not takes_connections(context.gcs_address):
        return HEAD
    here = context.get_node_id()
    return NODE if any(node["NodeID"] == here and not node["Alive"] for node in ray.nodes()) else None


def _slots(ray: Any, cpus: int) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1.0) // cpus))
