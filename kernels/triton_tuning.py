"""Which kernel multiplies a shape fastest on this card: measured at its first call, kept in a file, read from it after.

    tuner = triton_tuning.tuner(x.device)       # None where nothing is tuned: the defaults hold
    plan = tuner.plan(key, candidates, run)     # candidates()[0] is the default; run(plan) computes the result

`triton_configs` ships what was measured on an H200. On any other card the first call of each key (operation, N, K,
bucket of tokens, formats, dtype) runs the candidates of `triton_routes` on its own tensors, times them, and keeps the
fastest: also which route is taken, `triton_gemm_registers`, `triton_gemm_wgmma`, the portable kernel, or decoding and
the vendor's GEMM. They differ in the order of their float32 additions, and in whether a weight is rounded to x's dtype
first (portable and decode) or not (`triton_gemm`).

Nothing is measured while a CUDA graph is captured, under torch.compile or the interpreter, nor, outside `at_load`,
where several ranks run: those that compute the same must add in the same order. WORKBENCH_TUNE=0 switches tuning off, 1
on for the shipped card too. WORKBENCH_TUNE_CACHE names the file; else it lies in $XDG_CACHE_HOME (~/.cache).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

TIMING_S = 1.0  # no candidate of a key is started after so many seconds of timing
TOTAL_S = 60.0  # nor after so many with compilation
ROUTES = ("registers", "wgmma", "portable", "decode")
SHIPPED = (("NVIDIA H200", "sm_90"),)  # cards whose defaults were measured: name, architecture

_FORMAT = "workbench-kernel-plans-1"
_SCRATCH_BYTES = 64 << 20
_REPEATS, _WRITES = 7, 24
_log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """What multiplies: one of ROUTES, and its division of work (`triton_configs`); (): the route's default."""

    route: str
    numbers: tuple[int, ...] = ()


class Entry(NamedTuple):
    """A measured plan: microseconds of a call, and the default's (NaN where that did not run)."""

    plan: Plan
    us: float
    default_us: float


class Card(NamedTuple):
    """What a measurement holds for."""

    name: str
    architecture: str  # sm_90, gfx942
    multiprocessors: int
    triton: str  # major.minor

    @classmethod
    def of(cls, properties: Any, version: str, hip: bool = False) -> Card:
        """properties: `torch.cuda.get_device_properties`'; version: Triton's."""
        architecture = properties.gcnArchName.split(":")[0] if hip else f"sm_{10 * properties.major + properties.minor}"
        numbers = ".".join(version.split(".")[:2])
        return cls(properties.name, architecture, properties.multi_processor_count, numbers)

    @property
    def key(self) -> str:
        return f"{self.name} {self.architecture} x{self.multiprocessors}, triton {self.triton}"


def wanted(card: Card, mode: str) -> bool:
    """Whether calls on `card` are tuned. mode: the value of WORKBENCH_TUNE."""
    if mode not in ("", "0", "1"):
        _log.warning("WORKBENCH_TUNE=%s is neither 0 nor 1 and is ignored", mode)
    return mode == "1" or (mode != "0" and (card.name, card.architecture) not in SHIPPED)


def cache_path(environment: Mapping[str, str]) -> Path:
    """Where plans are kept."""
    if given := environment.get("WORKBENCH_TUNE_CACHE"):
        return Path(given)
    folder = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "quantization-workbench" / "kernel_plans.json"


def tuner(device: torch.device) -> Tuner | None:
    """The process' tuner of `device`; None where nothing is tuned there."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    return _tuner(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _tuner(index: int) -> Tuner | None:
    if triton.knobs.runtime.interpret:
        return None
    hip = torch.version.hip is not None
    card = Card.of(torch.cuda.get_device_properties(index), triton.__version__, hip)
    if not wanted(card, os.environ.get("WORKBENCH_TUNE", "")):
        return None
    return Tuner(Store(cache_path(os.environ), card), CudaTimer(torch.device("cuda", index)), may_tune)


# ---- the tuner -------------------------------------------------------------------------------------------------------


class Tuner:
    """One card's plans. timer: seconds of a call; may_tune: whether a call may be held up by measurements now."""

    def __init__(
        self,
        store: Store,
        timer: Callable[[Callable[[], object]], float],
        may_tune: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.tuned = store, 0  # keys measured by this process
        self._timer, self._may_tune, self._clock = timer, may_tune, clock
        self._plans: dict[str, Plan] = {}
        self._lock = threading.RLock()

    def plan(
        self,
        key: str,
        candidates: Callable[[], list[Plan]],
        run: Callable[[Plan], Tensor],
        compared: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> Plan:
        """The plan of `key`. candidates: those that can run, the default first; run: gives their result; compared: the
        part of it that is defined. A stored plan that is none of the candidates is not taken."""
        if (found := self._plans.get(key)) is not None:
            return found
        with self._lock:
            tried = list(dict.fromkeys(candidates()))
            stored = self.store.entries.get(key)
            if stored is not None and stored.plan in tried:
                self._plans[key] = stored.plan
                return stored.plan
            if len(tried) < 2 or not self._may_tune():
                return tried[0]
            entry = self._measured(key, tried, run, compared)
            self._plans[key] = entry.plan
            self.tuned += 1
            if entry.us == entry.us:
                self.store.add(key, entry)
            return entry.plan

    def adopt(self, entries: Mapping[str, Entry]) -> None:
        """Takes another rank's plans instead of this one's."""
        with self._lock:
            self._plans.clear()
            self.store.entries = dict(entries)

    def _measured(
        self,
        key: str,
        tried: list[Plan],
        run: Callable[[Plan], Tensor],
        compared: Callable[[Tensor], Tensor],
    ) -> Entry:
        found: dict[Plan, float] = {}
        expected, spent, start = None, 0.0, self._clock()
        for plan in tried:
            if found and (spent > TIMING_S or self._clock() - start > TOTAL_S):
                break
            try:
                y = compared(run(plan))  # compiles
                if expected is None:
                    expected = y  # the default's, where that runs
                elif not agree(y, expected):
                    _log.warning("%s: %s does not give the default's result on this card and is left out", key, plan)
                    continue
                timed = self._clock()
                found[plan] = self._timer(functools.partial(run, plan))
                spent += self._clock() - timed
            except Exception as error:  # does not compile, or needs more than the card has
                _log.debug("%s: %s cannot run: %s: %s", key, plan, type(error).__name__, error)
        if not found:
            return Entry(tried[0], float("nan"), float("nan"))
        best = min(found, key=found.__getitem__)  # of equals the first, which the default is
        entry = Entry(best, round(1e6 * found[best], 2), round(1e6 * found.get(tried[0], float("nan")), 2))
        _log.info("%s: %s, %.1f us (default %.1f)", key, entry.plan, entry.us, entry.default_us)
        return entry


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are one product, rounded apart. Tells wrong code; the tests hold the bands."""
    found, expected = found.float(), expected.float()
    size = expected.abs().nan_to_num(0, 0, 0).amax() if expected.numel() else expected.sum()
    close = (found - expected).abs() <= 2.0**-6 * expected.abs() + 1e-2 * size
    return bool((close | (found == expected) | ~expected.isfinite()).all())


_loading = threading.local()


@contextlib.contextmanager
def at_load() -> Iterator[None]:
    """Allows tuning where several ranks run; the caller sees to it that they end with the same plans (`adopt`)."""
    _loading.on = True
    try:
        yield
    finally:
        _loading.on = False


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def may_tune(
    capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing, ranks: Callable[[], int] = _ranks
) -> bool:
    """Whether a call may be measured now: no graph is captured, and no other rank waits or adds in another order."""
    return not capturing() and (getattr(_loading, "on", False) or ranks() == 1)


class CudaTimer:
    """Seconds of a call between two events, the median of a few. Before each, a scratch tensor larger than the
    second-level cache is written several times: weights come from memory, and the host is ahead of the card."""

    def __init__(self, device: torch.device) -> None:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self.device, self._bytes = device, max(_SCRATCH_BYTES, 2 * cache)

    def __call__(self, call: Callable[[], object]) -> float:
        found: list[float] = []
        with torch.cuda.device(self.device):
            scratch = torch.empty(self._bytes, dtype=torch.int8, device=self.device)
            call()
            for _ in range(_REPEATS):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(_WRITES):
                    scratch.zero_()
                start.record()
                call()
                stop.record()
                stop.synchronize()
                found.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(found)


# ---- the file --------------------------------------------------------------------------------------------------------


class Store:
    """The plans of one card, in a JSON file of all cards: {"format", "cards": {card: {key: [route, numbers, us,
    default us]}}}. A file that is not one of ours is left alone; then, and where nothing can be written, plans live as
    long as the process."""

    def __init__(self, path: Path, card: Card) -> None:
        self.path, self.card = path, card
        self._writable = True
        self.entries = self._of_card(self._read())

    def add(self, key: str, entry: Entry) -> None:
        """Keeps `entry`, and in the file all that other processes have written there."""
        self.entries[key] = entry
        if not self._writable:
            return
        cards = self._read()
        if not self._writable:
            return
        mine = cards.setdefault(self.card.key, {})
        mine[key] = [entry.plan.route, list(entry.plan.numbers), entry.us, entry.default_us]
        try:
            self._write({"format": _FORMAT, "cards": cards})
        except OSError as error:
            self._keep_in_memory(f"cannot be written ({error})")

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._keep_in_memory(f"cannot be read ({error})")
            return {}
        cards = content.get("cards") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        if not isinstance(cards, dict) or not all(isinstance(plans, dict) for plans in cards.values()):
            self._keep_in_memory("is not a file of kernel plans of this version")
            return {}
        return cards

    def _of_card(self, cards: dict[str, Any]) -> dict[str, Entry]:
        found = {}
        for key, value in cards.get(self.card.key, {}).items():
            try:
                route, numbers, us, default_us = value
                found[key] = Entry(Plan(str(route), tuple(int(i) for i in numbers)), float(us), float(default_us))
            except (TypeError, ValueError):
                _log.warning("%s: the plan of %s is damaged and is measured anew", self.path, key)
        return found

    def _write(self, content: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(content, indent=1), "utf-8")
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)

    def _keep_in_memory(self, why: str) -> None:
        self._writable = False
        _log.warning(
            "%s %s: kernel plans of this process are not kept. Remove it, or set WORKBENCH_TUNE_CACHE to another file",
            self.path,
            why,
        )
