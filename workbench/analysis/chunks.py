"""One chunk of a matrix's rows measured: what its sums, parts, codes, worst blocks and samples add to the matrix.

    job = Job.of(sides, shape, block)
    parts = [job.measure(chunk) for chunk in job.chunks]

Two implementations of one definition: the loops that Numba compiles, a few rows at a time in a processor's cache
(`kernels.cpu_errors`), and plain torch on whatever device the values lie, many of those chunks at once
(`kernels.torch_errors`). A GPU's values take the latter. What is counted (units, codes, samples, worst blocks) is laid
out by the small chunks in both, so the size of a chunk changes the order of float64 sums and nothing else.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.kernels import cpu_errors, torch_errors

from .attribution import part_sums
from .histograms import DENSITY_SAMPLES
from .influence import MAX_UNITS
from .sides import CHUNK_ELEMENTS, DEVICE_CHUNK_ELEMENTS, Side, chunk_rows

WORST_BLOCKS = 3
CODE_ELEMENTS = 1 << 18
"""Codes are counted on about so many elements of a large matrix: whole chunks, evenly spread."""

Top = list[tuple[float, int, float]]


def on_loops(device: torch.device) -> bool:
    """Whether values there are measured by the compiled loops; else by torch."""
    return device.type == "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The arms of one matrix, `[N, K]` each. source or first may be missing, not both; second may be."""

    source: Side | None
    first: Side | None
    second: Side | None
    direct: Side | None = None

    def present(self) -> dict[str, Side]:
        named = {"source": self.source, "first": self.first, "second": self.second, "direct": self.direct}
        return {name: side for name, side in named.items() if side is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one chunk adds. units: [u, sums + count]. first, second: `cpu_errors.PARTS`. top: the blocks with the most
    error, its sum, the block's index in the chunk, the sum of squares of w in it. samples: e1, e2, `[2, s]`."""

    units: NDArray[np.float64]
    first: NDArray[np.float64] | None
    second: NDArray[np.float64] | None
    codes: NDArray[np.float64] | None
    top: Top
    samples: NDArray[np.float64]
    bad: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """chunks: [start, stop) of rows, whole multiples of `step` rows but the last. loops: by the compiled ones."""

    sides: Sides
    shape: tuple[int, ...]
    block: int
    unit: int
    stride: int
    counted: int  # every so manieth run of `step` rows has its codes counted
    step: int
    chunks: list[tuple[int, int]]
    loops: bool
    piece: int

    @classmethod
    def of(cls, sides: Sides, shape: tuple[int, ...], block: int, elements: int | None = None) -> Job:
        """elements: values of a chunk on a device that torch serves; None: DEVICE_CHUNK_ELEMENTS."""
        present = sides.present().values()
        loops = all(on_loops(side.device) for side in present)
        multiple = math.lcm(*(side.row_multiple for side in present))
        small = chunk_rows(shape, multiple)
        count, most = math.prod(shape), elements or DEVICE_CHUNK_ELEMENTS
        step = small[0][1] - small[0][0]
        return cls(
            sides=sides,
            shape=shape,
            block=block,
            unit=block * max(1, math.ceil(count / block / MAX_UNITS)),
            stride=max(1, count // DENSITY_SAMPLES) | 1,
            counted=max(1, min(len(small), count // max(CODE_ELEMENTS, CHUNK_ELEMENTS))),
            step=step,
            chunks=small if loops else chunk_rows(shape, step, most),
            loops=loops,
            piece=most,
        )

    def values(self, chunk: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        """Values and steps of every arm's rows. What is missing stands for its neighbour, its error being zero."""
        sides, found, steps = self.sides, {}, {}
        if sides.source is not None:
            found["source"], steps["source"] = sides.source.rows(*chunk, None)
        if sides.first is not None:
            found["first"], steps["first"] = sides.first.rows(*chunk, found.get("source"))
        if sides.second is not None:
            found["second"], steps["second"] = sides.second.rows(*chunk, found.get("first", found.get("source")))
        if sides.direct is not None:
            found["direct"], steps["direct"] = sides.direct.rows(*chunk, found.get("source"))
        return found, steps

    def measure(self, chunk: tuple[int, int]) -> Part:
        found, steps = self.values(chunk)
        sides = self.sides
        w = found.get("source", found.get("first"))
        assert w is not None  # one of them is there
        a = found.get("first", w)
        b = found.get("second", a)
        sums = self._sums(w, a, b, found.get("direct"))
        first_step, second_step = steps.get("first"), steps.get("second")
        first = second = codes = None
        if sides.first is not None and first_step is not None and "source" in found:
            first = part_sums(w, a, first_step, sides.first.block, sides.first.element, self.loops, self.piece)
        if sides.second is not None and second_step is not None:
            second = part_sums(a, b, second_step, sides.second.block, sides.second.element, self.loops, self.piece)
            if sides.second.element == "e2m1" and "first" in found:
                codes = self._codes(chunk, a, b, second_step, sides.second.block)
        return Part(
            units=np.concatenate((sums, self._counts(w.numel())), axis=1),
            first=first,
            second=second,
            codes=codes,
            top=self._top_blocks(w, b),
            samples=self._samples(chunk, w, a, b),
            bad=_bad_arms(found, sums),
        )

    def _sums(self, w: Tensor, a: Tensor, b: Tensor, d: Tensor | None) -> NDArray[np.float64]:
        if self.loops:
            return cpu_errors.error_sums(w, a, b, d, unit=self.unit)
        run = self.step * self.shape[-1]
        return _numpy(torch_errors.error_sums(w, a, b, d, unit=self.unit, run=run, piece=self.piece))

    def _counts(self, elements: int) -> NDArray[np.float64]:
        """Elements of each unit; units begin anew with every `step` rows."""
        counts = []
        run = self.step * self.shape[-1]
        for start in range(0, elements, run):
            length = min(run, elements - start)
            of = np.full(-(-length // self.unit), self.unit, np.float64)
            of[-1] = length - self.unit * (len(of) - 1)
            counts.append(of)
        return np.concatenate(counts)[:, None]

    def _codes(self, chunk: tuple[int, int], a: Tensor, b: Tensor, steps: Tensor, block: int) -> NDArray[np.float64]:
        """`code_sums` of every `counted`th run of `step` rows."""
        total = np.zeros((cpu_errors.E2M1_CODES, 3))
        k = self.shape[-1]
        a, b, columns = a.reshape(-1, k), b.reshape(-1, k), block or k
        steps = steps.reshape(len(a), -1)
        for start in range(*chunk, self.step):
            if start // self.step % self.counted:
                continue
            rows = slice(start - chunk[0], min(start + self.step, chunk[1]) - chunk[0])
            part = (a[rows].float(), b[rows], steps[rows].reshape(-1))
            if self.loops:
                total += cpu_errors.code_sums(*part, block=columns)
            else:
                total += _numpy(torch_errors.code_sums(*part, block=columns))
        return total

    def _top_blocks(self, w: Tensor, b: Tensor) -> Top:
        """Of blocks with equal errors the first."""
        if self.loops:
            energies = torch.from_numpy(cpu_errors.block_energies(w, b, block=self.block))
        else:
            energies = torch_errors.block_energies(w, b, block=self.block, piece=self.piece)
        places, largest = [], []
        for _ in range(min(WORST_BLOCKS, len(energies))):
            place = energies.argmax()
            places.append(place)
            largest.append(energies[place].clone())
            energies[place] = -math.inf
        index = torch.stack(places)
        signals = w.reshape(-1, self.block)[index].double().square().sum(-1)
        return list(zip(torch.stack(largest).tolist(), index.tolist(), signals.tolist(), strict=True))

    def _samples(self, chunk: tuple[int, int], w: Tensor, a: Tensor, b: Tensor) -> NDArray[np.float64]:
        start = (-chunk[0] * self.shape[-1]) % self.stride
        x, y, z = (_numpy(t.reshape(-1)[start :: self.stride].double()) for t in (w, a, b))
        return np.stack((y - x, z - y))


def _numpy(values: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = values.cpu().numpy()
    return found


def _bad_arms(found: dict[str, Tensor], sums: NDArray[np.float64]) -> tuple[str, ...]:
    """Arms with NaN or infinity. Only where the sums are not finite are the elements looked at."""
    if np.isfinite(sums).all():
        return ()
    return tuple(arm for arm, values in found.items() if not bool(torch.isfinite(values).all()))
