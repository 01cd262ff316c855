"""Times the GEMM and MoE kernels' divisions of work on a CUDA card, after checking each, and prints the best three.

    python tests/kernels/gpu_tune.py [--out tune.json] [--only linear|experts|routes]

Needs torch and triton alone. A result is compared with the float64 product of the decoded weights
before it is timed. Kernels compile in several processes first, into the cache that the timings then read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import from_source
import torch
import triton
from torch import Tensor

from_source.make_importable()
from workbench.kernels import triton_configs  # noqa: E402
from workbench.kernels import triton_dequantize as deq  # noqa: E402
from workbench.kernels import triton_gemm as gemm  # noqa: E402
from workbench.kernels import triton_gemm_registers as registers  # noqa: E402
from workbench.kernels import triton_gemm_wgmma as wgmma  # noqa: E402
from workbench.kernels import triton_moe as moe  # noqa: E402
from workbench.kernels import triton_quantize as quant  # noqa: E402

N = K = 8192
Config, WideConfig = triton_configs.Config, triton_configs.WideConfig
LINEAR, UP, DOWN = (
    triton_configs.REGISTER_CANDIDATES,
    triton_configs.UP_CANDIDATES,
    triton_configs.DOWN_CANDIDATES,
)
WIDE, WIDE_EXPERTS = triton_configs.WIDE_CANDIDATES, triton_configs.WIDE_EXPERT_CANDIDATES
results: dict[str, dict[str, float]] = {}
failures: list[str] = []


def compile_one(job: tuple[str, str, tuple[int, ...], int]) -> str:
    """Runs one configuration on a small input, so that its code lies in the cache."""
    kind, weight_format, numbers, tokens = job
    device = torch.device("cuda")
    try:
        if kind == "linear":
            codes, scales, g = packed(weight_format, 512, K)
            x = torch.randn(tokens, K, device=device).bfloat16()
            registers.linear(x, codes, scales, g, [512], weight_format, Config(*numbers))
        elif kind == "wide":
            codes, scales, g = packed(weight_format, 512, K)
            x = torch.randn(tokens, K, device=device).bfloat16()
            wgmma.linear(wgmma.order_tokens(x), codes, scales, g, [512], weight_format, WideConfig(*numbers))
        elif kind == "wide experts":
            codes, scales, _ = packed(weight_format, 4 * 512, 512)
            ids = torch.arange(4, device=device, dtype=torch.int32).repeat_interleave(tokens)
            for shards in (1, 2):
                parts = (codes.view(4, 512, -1), scales.view(4, 512, -1), torch.full((4, shards), 0.01, device=device))
                x = torch.randn(1, ids.numel(), 512, device=device).bfloat16()
                wide_grouped(x, parts, ids, numbers, 1)
        else:
            k = 7168 if kind == "up" else 256
            codes, scales, g = (None if t is None else t for t in packed(weight_format, 4 * 512, k))
            parts = (
                codes.view(4, 512, -1),
                scales.view(4, 512, -1),
                torch.full((4, 2 if kind == "up" else 1), 0.01, device=device),
            )
            ids = torch.arange(4, device=device, dtype=torch.int32).repeat_interleave(max(1, tokens))
            grouped(
                torch.randn(1, ids.numel(), k, device=device).bfloat16(),
                parts,
                ids,
                0 if tokens == 8 else tokens,
                numbers,
            )
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def packed(weight_format: str, n: int, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    w = torch.randn(n, k, device="cuda").bfloat16()
    if weight_format == "mxfp4":
        return *quant.mxfp4_quantize(w), None
    codes, scales, g = quant.nvfp4_quantize(w)
    return codes, scales, g.view(1)


def decoded(codes: Tensor, scales: Tensor, g: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if g is None:
        return deq.mxfp4_dequantize(codes, scales, dtype)
    return deq.nvfp4_dequantize(codes, scales, g, dtype)


def grouped(
    x: Tensor, weight: tuple[Tensor, ...], ids: Tensor, size: int, numbers: tuple[int, ...], per_row: int = 1
) -> Tensor:
    groups = moe.group_by_expert(ids, weight[0].shape[0], size) if size else [ids]
    return registers.grouped(x, *weight, groups, size, ids.numel(), per_row, "nvfp4", Config(*numbers))


def wide_grouped(x: Tensor, weight: tuple[Tensor, ...], ids: Tensor, numbers: tuple[int, ...], per_row: int) -> Tensor:
    config = WideConfig(*numbers)
    groups = moe.group_by_expert(ids, weight[0].shape[0], config.tokens)
    return wgmma.grouped(wgmma.order_tokens(x), *weight, groups, ids.numel(), per_row, "nvfp4", config)


def close(name: str, found: Tensor, expected: Tensor, size: Tensor) -> bool:
    """found against the float64 product: bfloat16's rounding and float32's additions."""
    worst = ((found.double() - expected).abs() / (2.0**-8 * expected.abs() + 2e-6 * size)).max().item()
    if not worst <= 1:
        failures.append(f"{name}: {worst:.3g} times the bound")
    return worst <= 1


def random_experts(tokens: int) -> tuple[Tensor, ...]:
    """x, w13, its scales and globals, w2, its scales and globals, router weights and ids: NVFP4, 384 experts, top 8."""
    g13, g2 = (0.0005 + 0.001 * torch.rand(s, device="cuda") for s in ((384, 2), (384,)))
    w13 = torch.randn(384, 512, 7168, device="cuda", dtype=torch.bfloat16)
    c13, s13, _ = quant.nvfp4_quantize(w13, g13.repeat_interleave(256, 1).unsqueeze(-1))
    c2, s2, _ = quant.nvfp4_quantize(w13.view(384, 7168, 512)[:, :, :256].contiguous(), g2[:, None, None])
    ids = torch.rand(tokens, 384, device="cuda").topk(8).indices
    x = torch.randn(tokens, 7168, device="cuda", dtype=torch.bfloat16)
    return x, c13, s13, g13, c2, s2, g2, torch.rand(tokens, 8, device="cuda"), ids


def dense_experts(parts: tuple[Tensor, ...]) -> Tensor:
    """The same in float64, of rounded-to-bfloat16 weights and intermediates."""
    x, c13, s13, g13, c2, s2, g2, weights, ids = parts
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            w13 = deq.nvfp4_dequantize(c13[e], s13[e], g13[e].repeat_interleave(256).unsqueeze(-1), torch.bfloat16)
            w2 = deq.nvfp4_dequantize(c2[e], s2[e], g2[e].view(1), torch.bfloat16)
            gate, up = (w13.double() @ x[t].double()).bfloat16().chunk(2)
            h = torch.nn.functional.silu(gate.float()).bfloat16() * up
            out[t] += weight * (w2.double() @ h.double()).bfloat16().double()
    return out


def seconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds a call, over graph replays of all `calls` (which work on different inputs)."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(found)


def timed(case: str, name: str, calls: list[Callable[[], object]]) -> None:
    try:
        results.setdefault(case, {})[name] = seconds(calls) * 1e6
    except Exception as error:
        failures.append(f"{case} {name}: {type(error).__name__}: {str(error)[:200]}")


def tune_linear() -> None:
    dense = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(4)]
    tokens = (1, 4, 8, 16, 32, 64, 128, 256)
    x = {m: torch.randn(m, K, device="cuda").bfloat16() for m in tokens}
    for m in tokens:
        timed(f"cublas M={m}", "cublas", [lambda w=w, m=m: torch.nn.functional.linear(x[m], w) for w in dense])
    for weight_format in ("nvfp4", "mxfp4"):
        weights = [packed(weight_format, N, K) for _ in range(9)]  # more than four times the second-level cache
        w = decoded(*weights[0], torch.float32).double()
        for size, configs in LINEAR.items():
            for numbers in configs:
                name = str(tuple(numbers))
                for m in (m for m in tokens if registers.tokens_tile(m) == size):
                    if weight_format == "mxfp4" and m not in (1, 16, 64):
                        continue
                    call = lambda p, m=m, c=numbers, f=weight_format: registers.linear(x[m], *p, [N], f, Config(*c))  # noqa: E731
                    try:
                        y = call(weights[0])
                    except Exception as error:
                        failures.append(f"{numbers} M={m}: {type(error).__name__}: {str(error)[:200]}")
                        continue
                    expected = x[m].double() @ w.T
                    if close(f"{weight_format} M={m} {name}", y, expected, x[m].double().abs() @ w.abs().T):
                        timed(f"{weight_format} M={m}", name, [lambda p=p, f=call: f(p) for p in weights])
        for numbers, m in itertools.product(WIDE, (32, 64, 128, 256)):
            if weight_format == "nvfp4" and numbers[0] // 2 <= m:
                call = lambda p, m=m, c=numbers, f=weight_format: wgmma.linear(  # noqa: E731
                    wgmma.order_tokens(x[m]), *p, [N], f, WideConfig(*c)
                )
                good = True
                for _ in range(3):  # a race shows in some runs only
                    x[m].normal_()
                    torch.full((4 * m * N,), float("nan"), device="cuda")  # what the output's memory held
                    try:
                        y = call(weights[0])
                    except Exception as error:
                        failures.append(f"wide {numbers} M={m}: {type(error).__name__}: {str(error)[:200]}")
                        good = False
                        break
                    size = x[m].double().abs() @ w.abs().T
                    good &= close(f"wide {weight_format} M={m} {numbers}", y, x[m].double() @ w.T, size)
                if good:
                    timed(
                        f"{weight_format} M={m}",
                        f"(wide {tuple(numbers)})",
                        [lambda p=p, f=call: f(p) for p in weights],
                    )
        for m in tokens:
            for activation in ("none", weight_format):
                if activation == "none" or m in (1, 16, 64, 256):
                    calls = [
                        lambda p=p, m=m, a=activation, f=weight_format: gemm.packed_linear(
                            x[m], *p, None, None, [N], f, a
                        )
                        for p in weights
                    ]
                    timed(f"{weight_format} M={m}", f"packed_linear {activation}", calls)
            timed(
                f"{weight_format} M={m}",
                "decode + cublas",
                [lambda p=p, m=m: torch.nn.functional.linear(x[m], decoded(*p)) for p in weights[:4]],
            )


def tune_experts() -> None:
    for tokens in (1, 4, 16, 64, 512, 4096):
        parts = random_experts(tokens)
        x, c13, s13, g13, c2, s2, g2, _, topk_ids = parts
        ids = topk_ids.reshape(-1).int()
        hidden = torch.randn(1, ids.numel(), 256, device="cuda").bfloat16()
        spread = [ids.roll(i).add(i * 37).remainder(384) for i in range(4)]  # other experts each time
        sizes = {1: [0], 4: [0], 16: [0], 64: [8], 512: [16], 4096: [32]}[tokens]
        for size in sizes:
            for kind, table, rows, weight, per_row in (
                ("up", UP, x.unsqueeze(0), (c13, s13, g13), 8),
                ("down", DOWN, hidden, (c2, s2, g2.view(-1, 1)), 1),
            ):
                dense = None
                for numbers in table[32 if size > 8 else 8][: 2 if size == 16 else None]:
                    call = lambda i, r=rows, w=weight, s=size, c=numbers, p=per_row: grouped(r, w, i, s, c, p)  # noqa: E731
                    try:
                        y = call(ids)
                    except Exception as error:
                        failures.append(f"{kind} {tokens} {numbers}: {type(error).__name__}: {str(error)[:200]}")
                        continue
                    if dense is None:
                        dense = _checked_rows(rows, weight, ids, per_row)
                    rows_at, expected, bound = dense
                    if close(f"{kind} {tokens} {size} {numbers}", y[rows_at], expected, bound):
                        timed(
                            f"{kind} {tokens} tokens",
                            f"{tuple(numbers)} size {size}",
                            [lambda i=i, f=call: f(i) for i in spread],
                        )
        for numbers in WIDE_EXPERTS if tokens >= 64 else ():
            for kind, rows, weight, per_row in (
                ("up", x.unsqueeze(0), (c13, s13, g13), 8),
                ("down", hidden, (c2, s2, g2.view(-1, 1)), 1),
            ):
                call = lambda i, r=rows, w=weight, c=numbers, p=per_row: wide_grouped(r, w, i, c, p)  # noqa: E731
                try:
                    y = call(ids)
                except Exception as error:
                    failures.append(f"wide {kind} {numbers}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                rows_at, expected, bound = _checked_rows(rows, weight, ids, per_row)
                if close(f"wide {kind} {numbers}", y[rows_at], expected, bound):
                    calls = [lambda i=i, f=call: f(i) for i in spread]
                    timed(f"{kind} {tokens} tokens", f"(wide {tuple(numbers)})", calls)
        for activation in ("none", "nvfp4"):
            calls = [
                lambda i=i, p=parts, a=activation: moe.packed_moe(
                    *p[:-1], i.view(p[-1].shape), None, None, "nvfp4", a, False
                )
                for i in spread
            ]
            timed(f"moe {tokens} tokens", f"packed_moe {activation}", calls)
        if tokens <= 16:
            y, expected = moe.packed_moe(*parts, None, None, "nvfp4", "none", False), dense_experts(parts)
            if not (y.double() - expected).abs().max().item() <= 0.02 * expected.abs().max().item():
                failures.append(f"packed_moe of {tokens} tokens differs")
        if tokens == 4096:
            timed("moe 4096 tokens", "grouping", [lambda i=i: moe.group_by_expert(i, 384, 32) for i in spread])


def _checked_rows(rows: Tensor, weight: tuple[Tensor, ...], ids: Tensor, per_row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some assignments, their products in float64 and the sizes of those."""
    at = torch.arange(0, ids.numel(), max(1, ids.numel() // 96), device="cuda")
    expected, bound = [], []
    for a in at.tolist():
        e = int(ids[a])
        g = weight[2][e].repeat_interleave(weight[0].shape[1] // weight[2].shape[1]).unsqueeze(-1)
        w = deq.nvfp4_dequantize(weight[0][e], weight[1][e], g, torch.float32).double()
        row = rows[0, a // per_row].double()
        expected.append(w @ row)
        bound.append(w.abs() @ row.abs())
    return at, torch.stack(expected), torch.stack(bound)


def jobs(only: list[str]) -> list[tuple[str, str, tuple[int, ...], int]]:
    found: list[Any] = []
    if "linear" in only:
        found += [("linear", f, c, t) for f in ("nvfp4", "mxfp4") for t, cs in LINEAR.items() for c in cs]
        found += [("wide", "nvfp4", c, c[0]) for c in WIDE]
    if "experts" in only:
        found += [("wide experts", "nvfp4", c, c[0]) for c in WIDE_EXPERTS]
        for kind, table in (("up", UP), ("down", DOWN)):
            found += [(kind, "nvfp4", c, t) for t, cs in table.items() for c in cs]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(os.environ.get("OUT", ".")) / "tune.json"))
    parser.add_argument("--only", choices=("linear", "experts"), action="append")
    arguments = parser.parse_args()
    only = arguments.only or ["linear", "experts"]
    start = time.monotonic()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        failures.extend(filter(None, pool.map(compile_one, jobs(only))))
    print(
        f"{torch.cuda.get_device_name()}, triton {triton.__version__}; compiled after {time.monotonic() - start:.0f} s",
        flush=True,
    )
    torch.manual_seed(0)
    for name, tune in (("linear", tune_linear), ("experts", tune_experts)):
        if name in only:
            try:
                tune()
            except Exception as error:  # the other part and what was found are still worth printing
                failures.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            print(f"{name} after {time.monotonic() - start:.0f} s", flush=True)
    Path(arguments.out).write_text(json.dumps({"us": results, "failures": failures}, indent=1))
    print("\n".join(failures[:25]))
    for case, found in results.items():
        best = sorted(found.items(), key=lambda item: item[1])
        named = [item for item in best if item[0][0] != "("]
        text = itertools.chain([item for item in best if item[0][0] == "("][:4], named)
        print(f"{case:18} " + "  ".join(f"{name} {us:.1f}" for name, us in text))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
