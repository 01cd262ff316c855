"""Seconds of a call on a CUDA card, and the card's own copy bandwidth and bfloat16 matrix rate.

    timed = measure([lambda: work(w) for w in rotated])  # CUDA graph replays; events where none is captured
    card = card_rates()                                  # both ways of copying, and the better of them

A time is a median over repeats, a call. Give as many calls as it takes inputs to leave the second-level cache between
two uses of the same one (`rotations`). Needs torch and Triton alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], object]

GRAPH, EVENTS = "graph", "events"
_REPEATS = 7
_EVENT_CALLS = 8  # at least so many between two events: launching is then hidden behind the calls before
_CACHE_BYTES = 60e6  # the largest second-level cache of the cards measured (H100, H200: 50 MiB and a margin)
_CACHES = 4
_COPY_BYTES = 4 << 30
_COPY_TILE = 4096
_MATRIX = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds a call, and how they were taken (graph or events); None: not measured, and why."""

    seconds: float | None = None
    how: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What was measured, on what. Bytes a second count those read and those written; matrix_flops: bfloat16 cuBLAS."""

    name: str
    torch: str
    triton: str
    copy_call: float  # Tensor.copy_, timed by events
    copy_kernel: float  # a Triton kernel, timed by a graph
    matrix_flops: float

    @property
    def copy(self) -> float:
        """The card's copy bandwidth: the better of the two."""
        return max(self.copy_call, self.copy_kernel)


def measure(calls: Sequence[Call], *, capture: bool = True) -> Timed:
    """Median seconds a call. Whatever a call raises comes back as the reason: a table has a row for it.

    capture: False for what is known to wait for the device or to copy to it, and cannot be part of a graph.
    """
    try:
        for call in calls:
            call()  # compiled and tuned before time is taken, and outside the capture
        torch.cuda.synchronize()
        if capture:
            try:
                return Timed(seconds=graph_seconds(calls), how=GRAPH)
            except Exception:  # something in it waits for the device
                torch.cuda.synchronize()
        return Timed(seconds=event_seconds(calls), how=EVENTS)
    except Exception as error:
        return Timed(why=reason(error))


def measure_made(make: Callable[[], Sequence[Call]], *, capture: bool = True) -> Timed:
    """`measure` of what `make` returns; a rival that is not installed, or refuses the input, comes back as a reason."""
    try:
        calls = make()
    except Exception as error:
        return Timed(why=reason(error))
    return measure(calls, capture=capture)


def reason(error: Exception) -> str:
    """One line: the error's type and the first line of what it says."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__


def graph_seconds(calls: Sequence[Call]) -> float:
    """Over replays of one graph of all calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(_between_events(graph.replay) / len(calls) for _ in range(_REPEATS))


def event_seconds(calls: Sequence[Call]) -> float:
    """Over rounds of all calls, launched one by one."""
    rounds = math.ceil(_EVENT_CALLS / len(calls))

    def several() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return statistics.median(_between_events(several) / rounds / len(calls) for _ in range(_REPEATS))


def _between_events(work: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def rotations(nbytes: float) -> int:
    """How many inputs of `nbytes` each make more than four times the second-level cache; at least 3."""
    return max(3, math.ceil(_CACHES * _CACHE_BYTES / nbytes) + 1)


def card_rates() -> Card:
    """Measures the card. Raises what CUDA raises: without these figures there is no table."""
    by_call, by_kernel = _copy_rates()
    return Card(
        name=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        copy_call=by_call,
        copy_kernel=by_kernel,
        matrix_flops=_matrix_rate(),
    )


def _copy_rates() -> tuple[float, float]:
    """Bytes a second of Tensor.copy_ and of the kernel. In a graph the former is a memcpy node, and slower."""
    source = torch.empty(_COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy_with_kernel(source, target)
    if not torch.equal(source, target):
        raise RuntimeError("the copy kernel did not copy")
    moved = 2 * source.nbytes
    by_call = event_seconds([partial(target.copy_, source)])
    return moved / by_call, moved / graph_seconds([partial(copy_with_kernel, source, target)] * 2)


def _matrix_rate() -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16() for _ in range(2))
    torch.mm(a, b)
    return 2 * _MATRIX**3 / graph_seconds([partial(torch.mm, a, b)] * 3)


def copy_with_kernel(source: Tensor, target: Tensor) -> None:
    """`target` becomes `source`, both contiguous int32 of one size, by an elementwise kernel."""
    grid = (triton.cdiv(source.numel(), _COPY_TILE),)
    _copy_kernel[grid](source, target, source.numel(), TILE=_COPY_TILE, num_warps=8)


@triton.jit
def _copy_kernel(source_ptr, target_ptr, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)
