"""Matrices that the compiled loops and plain torch must measure alike: shapes, formats, arms that are missing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from workbench.kernels import cpu_errors

from workbench.analysis import chunks
from workbench.analysis.algebra import Measured, Sides
from workbench.analysis.sides import DenseSide, RoundedSide, Side, StoredSide, on_device
from workbench.formats import quantize

try:
    from .table_bands import figure_bands
except ImportError:  # of a script's
    from table_bands import figure_bands

SEED = 3


def values(*shape: int, scale: float = 0.02, seed: int = SEED) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain_of(w: Tensor | None, first: Side | None, second: str = "mxfp4") -> Sides:
    source = None if w is None else DenseSide(w)
    base = first or source
    assert base is not None
    direct = None if source is None else RoundedSide(source, second, None, "w")
    return Sides(source=source, first=first, second=RoundedSide(base, second, None, "w"), direct=direct)


def stored(w: Tensor, format: str, block: tuple[int, int] | None = None) -> StoredSide:
    return StoredSide(quantize(w, format, block=block))


def cases(device: str = "cpu") -> dict[str, Callable[[], Sides]]:
    """Sides on `device`; the first is quantized on the CPU, as a file's was."""

    def chain(w: Tensor | None, first: Side | None, second: str = "mxfp4") -> Sides:
        moved = first
        if isinstance(first, StoredSide):
            moved = StoredSide(on_device(first.tensor, torch.device(device)))
        return chain_of(None if w is None else w.to(device), moved, second)

    wide = values(300, 1024).bfloat16()
    constant = torch.full((64, 128), 0.03125)
    stack = values(5, 48, 96)
    outlier = values(64, 256)
    outlier[17, 40] = 50.0
    return {
        "several chunks": lambda: chain(wide, stored(wide.float(), "nvfp4")),
        "ragged rows": lambda: chain(values(1001, 544), stored(values(1001, 544), "nvfp4")),
        "one row": lambda: chain(values(1, 64), stored(values(1, 64), "nvfp4")),
        "expert stack": lambda: chain(stack, stored(stack, "nvfp4")),
        "mxfp4 first": lambda: chain(wide, stored(wide.float(), "mxfp4"), "nvfp4"),
        "fp8 block first": lambda: chain(wide, stored(wide.float(), "fp8_block")),
        "fp8 channel first": lambda: chain(wide, stored(wide.float(), "fp8_channel")),
        "mxfp8 first": lambda: chain(wide, stored(wide.float(), "mxfp8_e4m3")),
        "mxfp6 second": lambda: chain(wide, stored(wide.float(), "nvfp4"), "mxfp6_e2m3"),
        "int4 first": lambda: chain(wide, stored(wide.float(), "int4_group", (1, 32))),
        "no source": lambda: chain(None, stored(wide.float(), "nvfp4")),
        "no first": lambda: chain(wide, None),
        "constant": lambda: chain(constant, stored(constant, "nvfp4")),
        "zero": lambda: chain(torch.zeros(64, 128), stored(torch.zeros(64, 128), "nvfp4")),
        "outlier": lambda: chain(outlier, stored(outlier, "nvfp4")),
        "float64 source": lambda: chain(values(64, 128).double(), stored(values(64, 128), "nvfp4")),
    }


def different(found: Measured, want: Measured, terms: np.ndarray) -> list[str]:
    """What differs: counts, places and codes must be equal, a sum within 1e-12 of its terms' magnitudes (`terms`)."""
    wrong = []

    def check(what: str, equal: bool, *shown: object) -> None:
        if not equal:
            wrong.append(f"{what}: {shown}")

    check("arms", (found.nonfinite, found.doubtful) == (want.nonfinite, want.doubtful), found.doubtful, want.doubtful)
    check("worst", [w[:2] for w in found.worst] == [w[:2] for w in want.worst], found.worst, want.worst)
    for ours, theirs in zip(found.worst, want.worst, strict=False):
        check("worst block", np.allclose(ours[2:], theirs[2:], rtol=1e-12, atol=0), ours, theirs)
    for counts in ("density", "codes"):
        check(counts, (getattr(found, counts) is None) == (getattr(want, counts) is None))
    if want.density is not None and found.density is not None:
        check("density", np.array_equal(found.density, want.density))
    if want.codes is not None and found.codes is not None:
        check("code counts", np.array_equal(found.codes[:, 0], want.codes[:, 0]))
        limits = 1e-12 * np.sqrt(want.codes[:, 0] * want.codes[:, 2])  # Cauchy-Schwarz: above the sum of |e2|
        check("code sums", bool((np.abs(found.codes[:, 1] - want.codes[:, 1]) <= limits).all()))
        check("code squares", np.allclose(found.codes[:, 2], want.codes[:, 2], rtol=1e-12, atol=0))
    check("sums", bool((np.abs(found.sums - want.sums) <= 1e-12 * terms).all()), found.sums, want.sums)
    bands = figure_bands(want.figures)
    for key, value in want.figures.items():
        ours = found.figures[key]
        close = (math.isnan(value) and math.isnan(ours)) or ours == value or abs(ours - value) <= bands[key]
        check(key, close, ours, value, bands[key])
    return wrong


def magnitudes(sides_: Sides) -> np.ndarray:
    """Sums of the magnitudes of the terms of `SUMS`, then the number of elements."""
    job = chunks.Job.of(sides_, next(iter(sides_.present().values())).shape, 1)
    found, _ = job.values((0, math.prod(job.shape[:-1])))
    w = found.get("source", found.get("first")).double()  # type: ignore[union-attr]
    a = found.get("first", w).double()
    b, d = found.get("second", a).double(), found.get("direct", w).double()
    terms = {"w": w, "e1": a - w, "e2": b - a, "e": b - w, "ed": d - w}
    sums = []
    for name in cpu_errors.SUMS:
        product = torch.ones_like(w)
        for part in name.split("_"):
            product = product * terms[part]
        sums.append(float(product.abs().sum()))
    return np.array([*sums, 0.0])
