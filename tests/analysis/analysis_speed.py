"""How much faster the analysis pass is than the same algebra in plain torch: `python tests/analysis/analysis_speed.py`.

Both take a matrix as it lies on disk (bfloat16 source, packed NVFP4) to the figures of one row, with the same number of
threads. The eager side leaves out what only the pass does (attribution, worst blocks, codes, intervals). Wall and
processor seconds, alternating, the median of each: on a busy machine only the latter means anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from workbench.kernels import reference

from workbench.analysis.algebra import Sides, measure_sides
from workbench.analysis.matrices import _alone
from workbench.analysis.sides import DenseSide, RoundedSide, StoredSide
from workbench.formats import QuantizedTensor, quantize


def eager(w: torch.Tensor, q: QuantizedTensor) -> dict[str, float]:
    """The figures as one would write them down."""
    assert q.global_scale is not None
    source = w.float()
    a = reference.nvfp4_dequantize(q.codes, q.block_scales, q.global_scale)
    b = reference.mxfp4_dequantize(*reference.mxfp4_quantize(a))
    d = reference.mxfp4_dequantize(*reference.mxfp4_quantize(source))
    x, y, z, direct = source.double(), a.double(), b.double(), d.double()
    e1, e2, e, ed = y - x, z - y, z - x, direct - x
    sums = {
        "ww": x.square().sum(), "e1e1": e1.square().sum(), "e2e2": e2.square().sum(), "ee": e.square().sum(),
        "eded": ed.square().sum(), "we1": (x * e1).sum(), "we": (x * e).sum(), "wed": (x * ed).sum(),
        "e1e2": (e1 * e2).sum(), "e2_3": e2.pow(3).sum(), "e2_4": e2.pow(4).sum(),
        "w": x.sum(), "e1": e1.sum(), "e2": e2.sum(), "e": e.sum(), "ed": ed.sum(),
    }  # fmt: skip
    return {name: float(value) for name, value in sums.items()}


def ours(w: torch.Tensor, q: QuantizedTensor, pool: ThreadPoolExecutor) -> dict[str, float]:
    source, first = DenseSide(w), StoredSide(q)
    sides = Sides(
        source=source,
        first=first,
        second=RoundedSide(first, "mxfp4", "even", "speed"),
        direct=RoundedSide(source, "mxfp4", "even", "speed"),
    )
    return measure_sides(sides, pool=pool).figures


def compare(rows: int, columns: int, threads: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of each side, medians."""
    torch.set_num_threads(threads)
    w = (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))).bfloat16()
    q = quantize(w, "nvfp4")
    with ThreadPoolExecutor(threads, initializer=_alone) as pool:
        jobs: dict[str, Callable[[], object]] = {
            "eager": lambda: eager(w, q),
            "ours": lambda: ours(w, q, pool),
        }
        for job in jobs.values():
            job()
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
        for _ in range(repeats):
            for name, job in jobs.items():
                wall, cpu = time.perf_counter(), time.process_time()
                job()
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: tuple(statistics.median(t) for t in zip(*of, strict=True)) for name, of in spent.items()}  # type: ignore[misc]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    found = compare(arguments.rows, arguments.columns, arguments.threads, arguments.repeats)
    weights = arguments.rows * arguments.columns
    for name, (wall, cpu) in found.items():
        print(f"{name}: {wall:.3f} s, {cpu:.3f} processor s, {weights / wall / 1e6:.0f} M weights/s")
    print("ratio: wall {:.1f}, processor {:.1f}".format(*(a / b for a, b in zip(found["eager"], found["ours"]))))  # noqa: B905
