"""Error algebra of one matrix: what a first and a second quantization did to it.

    measured = measure_sides(Sides(source=w, first=a, second=b, direct=d))
    measured.figures["sqnr_total_db"], measured.figures["corr_e1_e2"], measured.worst

w = source, a = first(w), b = second(a), d = second(w) (direct); e1 = a - w, e2 = b - a, e = b - w, ed = d - w. All
figures follow from sums over elements (`figures.py`), made some rows at a time (`chunks.py`) and kept for
each unit (a run of scale blocks), whose influence on a figure gives its interval. Definitions: docs/analysis.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import FormatError
from workbench.kernels import cpu_errors

from .attribution import attribution_of
from .chunks import WORST_BLOCKS, Job, Part, Sides
from .figures import Missing, figures_of, sqnr_db
from .histograms import code_asymmetry, count_density
from .sides import DenseSide, Side

__all__ = ["Measured", "Sides", "measure_matrix", "measure_sides", "sqnr_db"]


class WorstBlock(NamedTuple):
    """A scale block of the coarser format by its share of the total error. row, column: of its first element.

    excess: its mean squared error over the matrix's. sqnr_db: of the block itself.
    """

    row: int
    column: int
    share: float
    excess: float
    sqnr_db: float


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """figures: the keys of TensorRecord from `power_source` on. worst: blocks with the largest total error, the worst
    first. codes: for each code of the second format `[16, 3]`: elements counted, sum of e2 and of e2 squared (None
    where it is not E2M1). density: see `error_density`. sums: `figures.COLUMNS` over the
    matrix. nonfinite: arms that hold NaN or infinity. doubtful: figures whose interval rests on few blocks."""

    figures: dict[str, float]
    worst: tuple[WorstBlock, ...]
    codes: NDArray[np.float64] | None
    density: NDArray[np.int64] | None
    sums: NDArray[np.float64]
    nonfinite: tuple[str, ...]
    doubtful: tuple[str, ...]


def measure_matrix(
    w: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    direct: Tensor | None = None,
    *,
    block: int = 32,
    name: str = "tensor",
) -> dict[str, float]:
    """All figures of `records.TensorRecord` for dense values (its keys from `power_source` on).

    w, first, second, direct: `[..., K]`, equal shapes, any float dtype (exact in float64). A side that is None leaves
    its figures NaN; with `first` None, e = second - w and e1, e2 are undefined. block: elements of K per unit of an
    interval (the coarser scale block), K must be a multiple. Powers are means of squares. An error that is exactly
    zero has SQNR +inf; a correlation with a constant side is NaN; fewer than 8 blocks leave intervals NaN. Dense values
    have no scales, so attributions are NaN.
    Raises FormatError naming `name` for shapes that differ, are empty or do not divide into blocks.
    """

    def dense(t: Tensor | None) -> Side | None:
        return None if t is None else DenseSide(t, block=block)

    sides = Sides(source=dense(w), first=dense(first), second=dense(second), direct=dense(direct))
    return measure_sides(sides, name=name).figures


def measure_sides(
    sides: Sides,
    *,
    name: str = "tensor",
    pool: ThreadPoolExecutor | None = None,
    elements: int | None = None,
) -> Measured:
    """Measure one matrix in one pass over its rows. pool: threads that share the chunks; None: this thread alone.
    elements: values of each arm at once where they lie on a GPU (`chunks.py`).

    The result does not depend on the number of threads. On a GPU, and by whatever `elements`, counts, samples and the
    worst blocks' places are equal, and a sum differs by the order of summation: less than 1e-12 of the sum of its
    terms' magnitudes. Raises FormatError naming `name` for shapes that differ
    and for an empty matrix.
    """
    shape, block = _check(sides, name)
    job = Job.of(sides, shape, block, elements)
    chunks, count = job.chunks, math.prod(shape)
    run: Callable[..., Any] = map if pool is None else pool.map
    parts: list[Part] = list(run(job.measure, chunks))
    units = np.concatenate([part.units for part in parts])
    missing = Missing(
        source=sides.source is None,
        first=sides.first is None,
        second=sides.second is None,
        direct=sides.direct is None,
    )
    total = units.sum(axis=0)
    figures, doubtful = figures_of(units, total, missing, _constant(job, chunks, total, missing))
    figures |= _attributions(parts, count, missing)
    codes = np.sum([p.codes for p in parts if p.codes is not None], axis=0) if parts[0].codes is not None else None
    figures["e2_code_asymmetry"] = code_asymmetry(codes)
    both = sides.source is not None and sides.first is not None and sides.second is not None
    samples = np.concatenate([part.samples for part in parts], axis=1) if both else None
    return Measured(
        figures=figures,
        worst=_worst_blocks(parts, chunks, shape, block, count),
        codes=codes,
        density=None if samples is None else count_density(samples[0], samples[1]),
        sums=total,
        nonfinite=tuple(name for name in ("source", "first", "second", "direct") if any(name in p.bad for p in parts)),
        doubtful=doubtful,
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(sides: Sides, name: str) -> tuple[tuple[int, ...], int]:
    """The common shape, and the coarser scale block: what happens inside one block is not independent."""
    present = sides.present()
    leading = sides.source or sides.first
    if leading is None:
        raise FormatError(f"{name}: neither a source nor a first arm", fix="give at least one of them")
    shape = leading.shape
    if 0 in shape:
        raise FormatError(f"{name}: is empty (shape {shape})", fix="exclude this tensor from the quantized arms")
    for arm, side in present.items():
        if side.shape != shape:
            raise FormatError(
                f"{name}: the {arm} arm's matrix is {side.shape}, the source's is {shape}",
                fix="the arms are not one model: check the checkpoints' paths, or re-export the arm that differs",
            )
    block = max(1, *(side.block for side in present.values()))
    if not shape or shape[-1] % block:
        raise FormatError(
            f"{name}: K = {shape[-1] if shape else 0} is not a multiple of the block of {block} (shape {shape})",
            fix="exclude this tensor from the quantized arms",
        )
    return shape, block


# ---- from parts to figures -------------------------------------------------------------------------------------------


def _constant(job: Job, chunks: list[tuple[int, int]], total: NDArray[np.float64], missing: Missing) -> dict[str, bool]:
    """Which of w, a, e1, e2 are constant. The sums only rule it out; where they cannot, the elements decide."""
    at = dict(zip((*cpu_errors.SUMS, "n"), total, strict=True))

    def suspect(sum_: float, squares: float) -> bool:
        return bool(squares / at["n"] - (sum_ / at["n"]) ** 2 <= 1e-9 * squares / at["n"])

    a_squares = at["w_w"] + 2 * at["w_e1"] + at["e1_e1"]
    suspects = {
        "w": suspect(at["w"], at["w_w"]),
        "a": not missing.first and suspect(at["w"] + at["e1"], a_squares),
        "e1": not missing.first and suspect(at["e1"], at["e1_e1"]),
        "e2": not missing.first and not missing.second and suspect(at["e2"], at["e2_e2"]),
    }
    if not any(suspects.values()):
        return suspects
    low, high = dict.fromkeys(suspects, math.inf), dict.fromkeys(suspects, -math.inf)
    for chunk in chunks:
        found, _ = job.values(chunk)
        w = found.get("source", found.get("first"))
        assert w is not None
        a = found.get("first", w).double()
        errors = {"w": w.double(), "a": a, "e1": a - w.double(), "e2": found.get("second", a).double() - a}
        for side in suspects:
            low[side] = min(low[side], float(errors[side].min()))
            high[side] = max(high[side], float(errors[side].max()))
    return {side: suspected and low[side] == high[side] for side, suspected in suspects.items()}


def _attributions(parts: list[Part], elements: int, missing: Missing) -> dict[str, float]:
    """Mean squares by cause for both quantizations, and shares of elements; NaN where they cannot be told."""
    found: dict[str, float] = {}
    for arm in ("first", "second"):
        sums = [getattr(part, arm) for part in parts]
        if sums[0] is None:
            causes = dict.fromkeys(("scale", "element", "saturation", "underflow"), math.nan)
            shares = dict.fromkeys(("saturated", "underflowed"), math.nan)
        else:
            division = attribution_of(np.sum(sums, axis=0))
            causes = {k: getattr(division, k) / elements for k in ("scale", "element", "saturation", "underflow")}
            shares = {k: getattr(division, k) / elements for k in ("saturated", "underflowed")}
        found |= {f"{arm}_error_{cause}": value for cause, value in causes.items()}
        found |= {f"{arm}_{what}": value for what, value in shares.items()}
    return found


def _worst_blocks(
    parts: list[Part], chunks: list[tuple[int, int]], shape: tuple[int, ...], block: int, elements: int
) -> tuple[WorstBlock, ...]:
    k = shape[-1]
    total = sum(part.units[:, cpu_errors.SUMS.index("e_e")].sum() for part in parts)
    found = []
    for part, (start, _) in zip(parts, chunks, strict=True):
        for energy, index, signal in part.top:
            row, column = divmod(start * k + index * block, k)
            found.append((-energy, row, column, signal))
    worst = []
    for energy, row, column, signal in sorted(found)[:WORST_BLOCKS]:
        if not energy < 0 or not math.isfinite(total):
            continue
        excess = (-energy / block) / (total / elements)
        worst.append(WorstBlock(row, column, float(-energy / total), float(excess), float(sqnr_db(signal, -energy))))
    return tuple(worst)
