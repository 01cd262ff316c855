"""Matrices measured as tasks of a Ray cluster: a task takes some matrices that follow one another.

    compute = RayCompute("10.0.0.1:6379", cpus=2)
    with closing(compute.results(matrices, names)) as results: ...

A worker opens the checkpoints itself, under the same paths and only if they are the same (by fingerprint), reads one
matrix ahead of the one it measures, and hands back rows, never weights. At most two tasks a slot of the cluster are
submitted and not yet taken, so few results are held. Results are taken in the order of names; a task behind a slow one
waits. Ray sends a task of a worker that died to another one; one that fails every time ends the pass with its matrices'
names. What was taken before is in the journal. Only a process of its own is connected to Ray (`ray_process.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import math
import os
import pickle
import re
import socket
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from workbench.errors import CheckpointError, ComputeError, ConfigError

from .choice import Chosen
from .device import Device
from .inputs import OpenCheckpoints
from .matrices import ArmPair, MatrixPass, Result
from .ray_driver import HEAD, packed, takes_connections
from .ray_process import DriverProcess

TASK_MATRICES, TASK_WEIGHTS = 32, 1 << 28
"""Of a task, at most: some seconds of work on a few cores, which is what a dead worker loses."""
RETRIES = 3
SHOWN_NAMES = 5
_PACKAGES = ("quantization-workbench", "torch", "numpy", "numba")
_STORE_BYTES = 128 << 20  # of a cluster that is started here: results are small
_POLL_S = 2.0
_GONE_S = 20.0  # without a head that answers; after 60 Ray would end the process that is connected
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
        if importlib.util.find_spec("ray") is None:
            raise _no_ray("no module named ray")
        self._check_address()

    def results(self, matrices: MatrixPass, names: Sequence[str]) -> Generator[Result]:
        """The result of each name, in their order. Raises ComputeError for a cluster that cannot be reached or has no
        node of `cpus` processors, for a task whose workers all died, and where the process that is connected to Ray
        ended or hangs; CheckpointError naming path and host where a worker sees no checkpoint, or another one; and what
        measuring raises.
        """
        if not names:
            return
        self._check_address()
        orders = self._orders(matrices)
        with DriverProcess(f"{_AGAIN}; {_HERE}") as driver:
            self._connect(driver)
            waiting: deque[Chosen] = deque()
            for part in _parts(matrices, names):
                _, slots = driver.ask("submit", packed(measure_part, orders, part))
                waiting.append(part)
                if len(waiting) >= 2 * slots:
                    yield from _take(driver, waiting.popleft())
            while waiting:
                yield from _take(driver, waiting.popleft())

    def _check_address(self) -> None:
        """Ray itself would try for many minutes."""
        if self.address == "local":
            return
        if not re.fullmatch(r"[^/\s]+:[0-9]{1,5}", self.address):
            raise ConfigError(
                f"{self.address!r} is no address of a Ray cluster",
                fix="give HOST:PORT as `ray start --head` prints it, e.g. --ray-address 10.0.0.1:6379",
            )
        if not takes_connections(self.address):
            raise ComputeError(f"nothing answers at {self.address}, the address of the Ray cluster", fix=_START)

    def _connect(self, driver: DriverProcess) -> None:
        local = self.address == "local"
        start = {"num_cpus": _processors(), "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        options = start if local else {}
        what, *found = driver.ask("connect", self.address, options, self.cpus, RETRIES, _POLL_S, _GONE_S)
        if what == "no ray":
            raise _no_ray(found[0])
        if what == "unreachable":
            where = "no Ray cluster could be started here" if local else f"no Ray cluster at {self.address}"
            raise ComputeError(f"{where}: {found[0]}", fix=_START)
        if (most := found[0]) < self.cpus:
            raise ComputeError(
                f"no node of the Ray cluster at {self.address} has {self.cpus} processors; the largest has {most:g}",
                fix="give a task fewer: --ray-cpus 1 (in an experiment compute.cpus=1)",
            )

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


# ---- of the pass -----------------------------------------------------------------------------------------------------


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


def _take(driver: DriverProcess, part: Chosen) -> list[Result]:
    """The results of the task that was submitted first, once they are there."""
    what, *found = driver.ask("take")
    if what == "taken":
        results: list[Result] = pickle.loads(found[0])
        return results
    if what == "raised":
        raise found[0]
    if what == "unimportable":
        raise ComputeError(
            f"a Ray worker cannot import the workbench: {found[0]}",
            fix=f"install the same packages on every node, {_HERE}",
        )
    if what == "gone":
        server = "the Ray cluster's head" if found[0] == HEAD else "Ray's server on this node (raylet)"
        raise ComputeError(f"{server} no longer answers", fix=f"{_AGAIN}; start the cluster again, {_HERE}")
    if what == "gave up":
        raise ComputeError(
            f"Ray gave up on {_named(part.names)} (a task is tried {RETRIES + 1} times): {': '.join(found)}",
            fix=f"{_AGAIN}; look for memory that ran out (fewer tasks at once: more --ray-cpus), {_HERE}",
        )
    raise RuntimeError(f"in a task of the Ray cluster:\n{found[0]}")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _no_ray(why: str) -> ConfigError:
    return ConfigError(
        f"compute=ray: Ray cannot be imported ({why})", fix=f"pip install 'quantization-workbench[ray]', {_HERE}"
    )


def _packages() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in _PACKAGES)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
