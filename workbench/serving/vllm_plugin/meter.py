"""What loading costs: seconds of reading and of conversion, and the bytes a conversion needs beside its result.

    meter = LoadMeter(device)
    with meter.reading():
        stored = checkpoint.read(name)
    with meter.converting("model.layers.3.mlp.down_proj.weight"):
        packed = convert(stored)
        meter.holds(stored, packed)
    record = meter.record()

On a GPU each conversion is waited for, so that its seconds are its own, and its bytes are the allocator's high water
above what was there before the layer. On a CPU, whose allocators tell no high water, they are those of the tensors that
the conversion said it holds at once.

What the first conversion would pay once a process, its kernels' loading, may run beside the reading (`preparation`).
The first conversion waits for the rest, and these seconds are its own.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .preparation import Preparation

_LAYER = re.compile(r"^(.*?\blayers\.\d+)\.")


@dataclass
class _Layer:
    conversions: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


class LoadMeter:
    """Counts for one load. device: where the weights go; a CUDA device's allocator is asked for its high water, unless
    another meter does (watch_memory). preparation: what the first conversion waits for."""

    def __init__(
        self, device: torch.device, preparation: Preparation | None = None, *, watch_memory: bool = True
    ) -> None:
        self.device = device
        self.preparation = preparation
        self.read_s = 0.0
        self.convert_s = 0.0
        self._waited_s: float | None = None
        self._watched = watch_memory and device.type == "cuda"
        self._layers: dict[str, _Layer] = {}
        self._current = ""
        self._before = 0
        self._device_peak = 0
        if self._watched:
            self._note_device_peak()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reading from disk, and copying what is converted to the device."""
        started = time.perf_counter()
        yield
        self._wait()
        self.read_s += time.perf_counter() - started

    @contextlib.contextmanager
    def converting(self, name: str, count: int = 1) -> Iterator[None]:
        """The conversion of one tensor, or of `count` at once; `name` says their layer."""
        started = time.perf_counter()
        self._wait_for_preparation()
        layer = self._enter(layer_of(name))
        yield
        self._wait()
        seconds = time.perf_counter() - started
        layer.seconds += seconds
        layer.conversions += count
        self.convert_s += seconds

    def holds(self, *tensors: Any) -> None:
        """What the conversion in progress holds at once: tensors, or anything with `nbytes`."""
        if not self._watched:
            layer = self._layers[self._current]
            layer.peak_bytes = max(layer.peak_bytes, sum(_nbytes(t) for t in tensors))

    def finish(self) -> None:
        """After the last tensor."""
        if self.preparation is not None and self._waited_s is None:
            self.preparation.wait()  # nothing was converted, so that no conversion waited
        if self._watched:
            self._leave()

    def record(self) -> dict[str, Any]:
        """{"read_s", "convert_s", "prepare_s", "prepare_waited_s" (of it waited for, part of convert_s; both 0 where
        nothing was prepared), "prepare_error" (what it raised, "" where nothing), "convert_peak_bytes",
        "convert_peak_from", "device_peak_bytes" (null on a CPU), "converted": {layer: {"conversions", "seconds",
        "peak_bytes"}}}."""
        layers = {
            name: {"conversions": c.conversions, "seconds": round(c.seconds, 6), "peak_bytes": c.peak_bytes}
            for name, c in self._layers.items()
            if c.conversions
        }
        return {
            "read_s": round(self.read_s, 3),
            "convert_s": round(self.convert_s, 3),
            "prepare_s": round(self.preparation.seconds if self.preparation else 0.0, 3),
            "prepare_waited_s": round(self._waited_s or 0.0, 3),
            "prepare_error": self.preparation.error if self.preparation else "",
            "convert_peak_bytes": max((c["peak_bytes"] for c in layers.values()), default=0),
            "convert_peak_from": "device allocator" if self._watched else "tensors held",
            "device_peak_bytes": self._device_peak if self._watched else None,
            "converted": layers,
        }

    # ---- private

    def _wait_for_preparation(self) -> None:
        if self.preparation is None or self._waited_s is not None:
            return
        started = time.perf_counter()
        self.preparation.wait()
        self._waited_s = time.perf_counter() - started

    def _enter(self, name: str) -> _Layer:
        if name != self._current or name not in self._layers:
            if self._watched:
                self._leave()
            self._current = name
            self._layers.setdefault(name, _Layer())
            if self._watched:
                torch.cuda.reset_peak_memory_stats(self.device)
                self._before = torch.cuda.memory_allocated(self.device)
        return self._layers[name]

    def _leave(self) -> None:
        peak = self._note_device_peak()
        layer = self._layers.get(self._current)
        if layer is not None:
            layer.peak_bytes = max(layer.peak_bytes, peak - self._before)

    def _note_device_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        self._device_peak = max(self._device_peak, peak)
        return peak

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def layer_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.down_proj.weight`; "other" outside the layers."""
    found = _LAYER.match(name)
    return found[1] if found else "other"


def _nbytes(thing: Any) -> int:
    if thing is None:
        return 0
    return thing.numel() * thing.element_size() if isinstance(thing, Tensor) else int(thing.nbytes)
