"""Matrices measured as tasks of a Ray cluster: a task takes some matrices that follow one another.

    compute = RayCompute("10.0.0.1:6379", cpus=2)
    with closing(compute.results(matrices, names)) as results: ...

A worker opens the checkpoints itself, under the same paths and only if they are the same (by fingerprint), reads one
matrix ahead of the one it measures, and hands back rows, never weights. At most two tasks a slot of the cluster are
submitted and not yet taken, so the driver holds few results. Results are taken in the order of names; a task behind a
slow one waits. Ray sends a task of a worker that died to another one; one that fails every time ends the pass with its
matrices' names. What was taken before is in the journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError, ComputeError, ConfigError, WorkbenchError

from .choice import Chosen
from .device import Device
from .inputs import OpenCheckpoints
from .matrices import ArmPair, MatrixPass, Result

TASK_MATRICES, TASK_WEIGHTS = 32, 1 << 28
"""Of a task, at most: some seconds of work on a few cores, which is what a dead worker loses."""
RETRIES = 3
SHOWN_NAMES = 5
_PACKAGES = ("quantization-workbench", "torch", "numpy", "numba")
_STORE_BYTES = 128 << 20  # of a cluster that is started here: results are small
_POLL_S = 2.0
_GONE_S = 20.0  # without a head that answers: Ray ends the process, with exit code 1, after 60
_HERE = "or --compute local (in an experiment compute=local)"
_START = (
    "start one (`ray start --head`) and give its address, --ray-address HOST:PORT (where it wants a token, with"
    f" RAY_AUTH_MODE=token), {_HERE}"
)
_AGAIN = "the same command goes on after the matrices that are done"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a worker needs to know of a pass, whatever its matrices. fingerprints: path and fingerprint of every
    checkpoint. folder: what relative paths start from. packages: versions that figures may depend on."""

    source: str | Path | None
    source_arm: str
    pairs: tuple[ArmPair, ...]
    fingerprints: tuple[tuple[str, str], ...]
    folder: str
    packages: tuple[tuple[str, str], ...]
    cpus: int


class RayCompute:
    """address: the cluster's "HOST:PORT"; None: what RAY_ADDRESS says, else a cluster of this machine's processors is
    started and ended with the pass. cpus: processors, and threads, of a task.

    Raises ConfigError where Ray is not installed and for an address that is none, ComputeError where nothing answers.
    """

    def __init__(self, address: str | None = None, cpus: int = 1) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.cpus = cpus
        _import_ray()
        self._check_address()

    def results(self, matrices: MatrixPass, names: Sequence[str]) -> Generator[Result]:
        """The result of each name, in their order. Raises ComputeError for a cluster that cannot be reached or has no
        node of `cpus` processors, and for a task whose workers all died; CheckpointError naming path and host where a
        worker sees no checkpoint, or another one; and what measuring raises.
        """
        if not names:
            return
        ray = _import_ray()
        shared = ray.is_initialized()
        with _own_environment(), self._connected(ray):
            self._check_nodes(ray)
            orders = self._orders(matrices)
            task = ray.remote(measure_part).options(name="workbench analyze", num_cpus=self.cpus, max_retries=RETRIES)
            waiting: deque[tuple[Chosen, Any]] = deque()
            try:
                for part in _parts(matrices, names):
                    waiting.append((part, task.remote(orders, part)))
                    if len(waiting) >= 2 * self._slots(ray):
                        yield from _take(ray, *waiting[0])
                        waiting.popleft()
                while waiting:
                    yield from _take(ray, *waiting[0])
                    waiting.popleft()
            finally:
                for _, reference in waiting if shared else ():  # else they end with the connection
                    ray.cancel(reference)

    def _check_address(self) -> None:
        """Ray itself would try for many minutes."""
        if self.address == "local":
            return
        if not re.fullmatch(r"[^/\s]+:[0-9]{1,5}", self.address):
            raise ConfigError(
                f"{self.address!r} is no address of a Ray cluster",
                fix="give HOST:PORT as `ray start --head` prints it, e.g. --ray-address 10.0.0.1:6379",
            )
        if not _answers(self.address):
            raise ComputeError(f"nothing answers at {self.address}, the address of the Ray cluster", fix=_START)

    @contextlib.contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        """Connected to the cluster, or to the one that the calling program uses already."""
        if ray.is_initialized():
            yield
            return
        local = self.address == "local"
        os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # by default Ray tries for ever
        self._check_address()
        start = {"num_cpus": _processors(), "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        try:
            with _own_signals():
                ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **(start if local else {}))
        except (OSError, RuntimeError, ValueError, ImportError, TimeoutError, ray.exceptions.RayError) as error:
            what = "no Ray cluster could be started here" if local else f"no Ray cluster at {self.address}"
            raise ComputeError(f"{what}: {_first_line(error)}", fix=_START) from error
        try:
            yield
        finally:
            with _own_signals():
                ray.shutdown()

    def _check_nodes(self, ray: Any) -> None:
        most = max((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
        if most < self.cpus:
            raise ComputeError(
                f"no node of the Ray cluster at {self.address} has {self.cpus} processors; the largest has {most:g}",
                fix="give a task fewer: --ray-cpus 1 (in an experiment compute.cpus=1)",
            )

    def _slots(self, ray: Any) -> int:
        return max(1, int(ray.cluster_resources().get("CPU", 1.0) // self.cpus))

    def _orders(self, matrices: MatrixPass) -> Orders:
        return Orders(
            source=matrices.source,
            source_arm=matrices.source_arm,
            pairs=tuple(matrices.pairs),
            fingerprints=tuple(matrices.checkpoints.fingerprints().items()),
            folder=str(Path.cwd()),
            packages=_packages(),
            cpus=self.cpus,
        )


# ---- of a worker -----------------------------------------------------------------------------------------------------


def measure_part(orders: Orders, part: Chosen) -> list[Result]:
    """The task: every matrix of `part`, with as many threads as it was given processors."""
    torch.set_num_threads(orders.cpus)
    matrices = dataclasses.replace(_opened(orders), chosen=part)
    return list(matrices.results(part.names, orders.cpus))


@functools.lru_cache(maxsize=1)
def _opened(orders: Orders) -> MatrixPass:
    """The pass on this worker; its checkpoints stay open until the process ends, with the job."""
    host = socket.gethostname()
    if (here := _packages()) != orders.packages:
        differing = [f"{name} {version}, not {dict(orders.packages)[name]}" for name, version in here
                     if dict(orders.packages)[name] != version]  # fmt: skip
        raise ComputeError(
            f"the Ray worker {host} has {', '.join(differing)}: its figures may differ",
            fix=f"install the same packages on every node, {_HERE}",
        )
    with contextlib.suppress(OSError):  # a path that then leads nowhere is named below
        os.chdir(orders.folder)
    checkpoints = OpenCheckpoints(ExitStack())
    for path, fingerprint in orders.fingerprints:
        try:
            found = checkpoints.open(path).fingerprint()
        except CheckpointError as error:
            raise CheckpointError(
                f"the Ray worker {host} cannot open {path}: {error.message}",
                fix=f"keep it where every node sees it, under the same path (a shared file system, hf://…), {_HERE}",
            ) from error
        if found != fingerprint:
            raise CheckpointError(
                f"{path} on the Ray worker {host} is another checkpoint than here (fingerprint {found}, {fingerprint})",
                fix=f"keep one copy where every node sees it, {_HERE}",
            )
    return MatrixPass(
        source=orders.source,
        source_arm=orders.source_arm,
        pairs=orders.pairs,
        chosen=Chosen([], {}, {}, 0),
        checkpoints=checkpoints,
        device=Device(),
    )


# ---- of the driver ---------------------------------------------------------------------------------------------------


def _parts(matrices: MatrixPass, names: Sequence[str]) -> Iterator[Chosen]:
    """The names in runs of a task each, with what is known of them."""
    part: list[str] = []
    weights = 0
    for name in names:
        size = math.prod(matrices.leading.entry(name).shape)
        if part and (len(part) == TASK_MATRICES or weights + size > TASK_WEIGHTS):
            yield matrices.chosen.part(part)
            part, weights = [], 0
        part.append(name)
        weights += size
    if part:
        yield matrices.chosen.part(part)


def _take(ray: Any, part: Chosen, reference: Any) -> list[Result]:
    """A task's results, once they are there."""
    answered = time.monotonic()
    while True:
        try:
            found: list[Result] = ray.get(reference, timeout=_POLL_S)
            return found
        except ray.exceptions.GetTimeoutError:
            if _answers(ray.get_runtime_context().gcs_address):
                answered = time.monotonic()
            elif time.monotonic() - answered > _GONE_S:
                raise ComputeError(
                    "the Ray cluster's head no longer answers", fix=f"{_AGAIN}; start the cluster again, {_HERE}"
                ) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, WorkbenchError):
                raise error.cause from None
            if isinstance(error.cause, ImportError):
                raise ComputeError(
                    f"a Ray worker cannot import the workbench: {error.cause}",
                    fix=f"install the same packages on every node, {_HERE}",
                ) from error
            raise
        except ray.exceptions.RayError as error:
            raise ComputeError(
                f"Ray gave up on {_named(part.names)} (a task is tried {RETRIES + 1} times):"
                f" {type(error).__name__}: {_first_line(error)}",
                fix=f"{_AGAIN}; look for memory that ran out (fewer tasks at once: more --ray-cpus), {_HERE}",
            ) from error


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _answers(address: str) -> bool:
    """Whether the cluster's head takes connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_POLL_S).close()
    except OSError:
        return False
    return True


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"compute=ray: Ray cannot be imported ({error})",
            fix=f"pip install 'quantization-workbench[ray]', {_HERE}",
        ) from error
    return ray


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts its own SIGTERM handler in place, which exits with 15; afterwards the caller's is back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """What Ray sets for itself (RAY_AUTH_MODE) ends with it: a server that is started later would take it over."""
    before = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
    try:
        yield
    finally:
        for key in [key for key in os.environ if key.startswith("RAY_")]:
            del os.environ[key]
        os.environ.update(before)


def _packages() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in _PACKAGES)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
