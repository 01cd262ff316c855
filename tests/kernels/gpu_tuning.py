"""Tuning on a CUDA card: the first process measures plans and keeps them, a second one reads them (`gpu_check.py`).

    failures = gpu_tuning.check(); us of the default and of the plan that was chosen are printed

The candidates compile in several processes first, into the cache that the measurements then read.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import from_source
import torch
from torch import Tensor

from_source.make_importable()
from workbench.kernels import triton_dequantize as deq  # noqa: E402
from workbench.kernels import triton_gemm as gemm  # noqa: E402
from workbench.kernels import triton_quantize as quant  # noqa: E402
from workbench.kernels import triton_routes, triton_tuning  # noqa: E402

N = K = 8192
TOKENS = (1, 16, 64, 512)
WORKERS = 10
Weight = tuple[Tensor, Tensor, Tensor]
Row = tuple[str, str, str, float, float]  # key, route, division, us, the default's us


def check() -> list[str]:
    """Failures. Prints a line a shape."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, environment(Path(folder) / "plans.json"):
        spawn = multiprocessing.get_context("spawn")
        pools = [ProcessPoolExecutor(n, mp_context=spawn) for n in (WORKERS, 1, 1)]
        with pools[0] as compiling, pools[1] as first, pools[2] as second:
            imported = [pool.submit(os.getpid) for pool in pools[1:]]  # both start while the candidates compile
            list(compiling.map(compile_some, range(WORKERS)))
            [future.result() for future in imported]
            print(f"candidates compiled after {time.monotonic() - start:.0f} s", flush=True)
            tuned, measured, wrong = first.submit(tune).result()
            read, again, wrong_again = second.submit(tune).result()
            replayed = second.submit(replay).result()
    failures = wrong + wrong_again
    for (key, route, numbers, us, default_us), (default_replayed, us_replayed) in zip(tuned, replayed, strict=False):
        print(
            f"{key}: default {default_us:.1f} us, tuned {us:.1f} us: {route} {numbers};"
            f" in graphs {default_replayed:.1f} and {us_replayed:.1f} us",
            flush=True,
        )
        if not us_replayed <= 1.1 * default_replayed:
            failures.append(
                f"tuning {key}: {us_replayed:.1f} us in graphs, where the default takes {default_replayed:.1f}"
            )
    print(f"tuning checked after {time.monotonic() - start:.0f} s", flush=True)
    if (len(tuned), measured, again) != (len(TOKENS), len(TOKENS), 0) or read != tuned:
        failures.append(f"tuning: {measured} shapes measured, then {again}; plans {tuned}, then {read}")
    return failures


@contextlib.contextmanager
def environment(path: Path) -> Iterator[None]:
    """Tuning on, into `path`, for the processes that start meanwhile."""
    given = {"WORKBENCH_TUNE": "1", "WORKBENCH_TUNE_CACHE": str(path)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compile_some(part: int) -> None:
    """Runs every `WORKERS`-th plan on a weight of few rows. Tells of those that fail, which tuning leaves out."""
    x, weight, _ = inputs(512)
    plans = [(m, p) for m in TOKENS for p in plans_of(x[:m], weight)]
    for m, plan in plans[part::WORKERS]:
        try:
            gemm.multiplied(plan, x[:m], *weight, None, None, [512], "nvfp4", "none")
            torch.cuda.synchronize()
        except Exception as error:
            print(f"M={m} {plan}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)


def tune() -> tuple[list[Row], int, list[str]]:
    """`packed_linear` of every TOKENS: plans, how many shapes this process measured, and results out of their band."""
    x, weight, dense = inputs(N)
    tuner = triton_tuning.tuner(x.device)
    assert tuner is not None
    failures = []
    for m in TOKENS:
        y = gemm.packed_linear(x[:m], *weight, None, None, [N], "nvfp4", "none")
        expected, size = x[:m].double() @ dense.T, x[:m].double().abs() @ dense.abs().T
        worst = ((y.double() - expected).abs() / (2.0**-8 * expected.abs() + 2e-6 * size)).max().item()
        if not worst <= 1:
            failures.append(f"tuned linear M={m}: {worst:.3g} times the bound")
    entries = tuner.store.entries
    rows = [(key, e.plan.route, str(tuple(e.plan.numbers)), e.us, e.default_us) for key, e in entries.items()]
    return rows, tuner.tuned, failures


def replay() -> list[tuple[float, float]]:
    """us of the default and of the tuned plan of every TOKENS, by graphs over more weights than the cache holds."""
    from gpu_tune import seconds

    x, (codes, scales, g), _ = inputs(N)
    weights = [(codes.clone(), scales.clone(), g) for _ in range(5)]
    tuner = triton_tuning.tuner(x.device)
    assert tuner is not None
    found = []
    for m, entry in zip(TOKENS, tuner.store.entries.values(), strict=True):
        plans = (plans_of(x[:m], weights[0])[0], entry.plan)
        default, tuned = (
            seconds(
                [lambda w=w, p=p, m=m: gemm.multiplied(p, x[:m], *w, None, None, [N], "nvfp4", "none") for w in weights]
            )
            for p in plans
        )
        found.append((1e6 * default, 1e6 * tuned))
    return found


def inputs(n: int) -> tuple[Tensor, Weight, Tensor]:
    """x `[512, K]`, an NVFP4 weight of `n` rows, and the same decoded, in float64."""
    torch.manual_seed(0)
    x = torch.randn(max(TOKENS), K, device="cuda").bfloat16()
    codes, scales, g = quant.nvfp4_quantize(torch.randn(n, K, device="cuda").bfloat16())
    return x, (codes, scales, g.view(1)), deq.nvfp4_dequantize(codes, scales, g, torch.bfloat16).double()


def plans_of(x: Tensor, weight: Weight) -> list[triton_tuning.Plan]:
    tokens = triton_routes.bucket(x.shape[0])
    assert tokens is not None
    return triton_routes.linear_plans(tokens, triton_routes.linear_routes(x, *weight, [weight[0].shape[0]]))
