"""Where the weights' pass computes: the processor, or one GPU that it keeps fed.

    device = Device("cuda:0")                    # ConfigError where it is not there
    arms = device.stage(arms)                    # of a reading thread: packed bytes to the GPU, through pinned memory
    measured = device.with_less(lambda elements: measure_sides(sides, elements=elements))

Matrices are copied packed, as they lie on disk, by the thread that reads them, on a stream of its own, while another
is measured; values exist on the GPU a chunk at a time. Where its memory does not suffice, chunks become smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.formats import QuantizedTensor

from . import chunks, sides

T = TypeVar("T")
_WORTH_PINNING = 1 << 16  # bytes
_SHRINK = 4


def check_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda, or cuda:N. Raises ConfigError for another, and for one that is not there."""
    fix = "use --device cpu (in an experiment analysis.device=cpu)"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (kind == "cpu" and number) or (":" in name and not number.isdecimal()):
        raise ConfigError(f"device {name!r} is none that is known: cpu, cuda, cuda:1", fix=fix)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: PyTorch sees no GPU here", fix=fix)
    if int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: PyTorch sees {torch.cuda.device_count()} GPUs, from cuda:0 on", fix=fix)
    return torch.device("cuda", int(number) if number else torch.cuda.current_device())


class Device:
    """One device of one pass. `workers`: matrices that are measured at once, so that a GPU has work while the figures
    of a measured one are put together."""

    def __init__(self, name: str = "cpu") -> None:
        self.name, self.torch = name, check_device(name)
        self.elements = sides.DEVICE_CHUNK_ELEMENTS
        self._gpu = self.torch.type == "cuda"
        self._stream = torch.cuda.Stream(self.torch) if self._gpu else None
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self.torch)

    @property
    def loops(self) -> bool:
        """Whether the compiled loops measure, a matrix at a time, its chunks shared by threads."""
        return chunks.on_loops(self.torch)

    @property
    def workers(self) -> int:
        return 3 if self._gpu else 1

    @property
    def key(self) -> dict[str, str]:
        """What of it the stored numbers depend on: another order of summation is other last bits, so a journal or a
        table of one is not continued on the other. Of the compiled loops, nothing; of two GPUs, neither."""
        return {} if self.loops else {"device": self.torch.type}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Launches of this thread go to it."""
        with torch.cuda.device(self.torch) if self._gpu else contextlib.nullcontext():
            yield

    def stage(self, arms: dict[str, QuantizedTensor | Tensor]) -> dict[str, QuantizedTensor | Tensor]:
        """The arms on the device once this returns. A GPU that has no room leaves them where they are: `place` them."""
        if self._stream is None:
            return arms
        with torch.cuda.device(self.torch), torch.cuda.stream(self._stream):
            try:
                staged = {path: self._moved(tensor, self._pinned_copy) for path, tensor in arms.items()}
            except torch.OutOfMemoryError:
                return arms
            finally:
                self._stream.synchronize()
        return staged

    def place(self, arms: dict[str, QuantizedTensor | Tensor]) -> dict[str, QuantizedTensor | Tensor]:
        """The arms on the device; those that are there already as they are."""
        if not self._gpu:
            return arms
        return {path: self._moved(tensor, lambda t: t.to(self.torch)) for path, tensor in arms.items()}

    def with_less(self, work: Callable[[int], T], name: str) -> T:
        """work(elements), again with fewer elements at once where a GPU runs out of memory. Raises ConfigError naming
        the matrix `name` where the smallest chunk is too large."""
        while True:
            elements = self.elements
            try:
                with self.current():
                    return work(elements)
            except torch.OutOfMemoryError as error:
                if elements <= sides.CHUNK_ELEMENTS:
                    free, total = torch.cuda.mem_get_info(self.torch)
                    raise ConfigError(
                        f"{name}: {self.name} has no memory for it ({free / 1e9:.1f} of {total / 1e9:.1f} GB free)",
                        fix="use --device cpu (in an experiment analysis.device=cpu), or a GPU that nothing else fills",
                    ) from error
            torch.cuda.empty_cache()
            self.elements = max(sides.CHUNK_ELEMENTS, min(self.elements, elements // _SHRINK))

    def peak_bytes(self) -> int:
        """The most memory of the GPU that tensors took; 0 for a processor."""
        return torch.cuda.max_memory_allocated(self.torch) if self._gpu else 0

    def _moved(self, tensor: QuantizedTensor | Tensor, move: Callable[[Tensor], Tensor]) -> QuantizedTensor | Tensor:
        if isinstance(tensor, Tensor):
            return move(tensor)
        return sides.with_parts(tensor, move)

    def _pinned_copy(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes >= _WORTH_PINNING:
            with contextlib.suppress(RuntimeError):  # what may be locked in memory is limited
                tensor = tensor.pin_memory()
        copy = tensor.to(self.torch, non_blocking=True)
        copy.record_stream(torch.cuda.default_stream(self.torch))
        return copy
