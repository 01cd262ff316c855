"""Checks every Triton kernel on a CUDA card against the reference, bit for bit, then times them: one short table last.

    python tests/kernels/gpu_check.py [--quick] [--only checks|streams|linear|experts]

Needs torch and triton alone. A time is the median of CUDA-event timings over inputs that are rotated beyond the cache;
beside it stand, from the same run, the card's copy bandwidth (bytes read and written) and its bf16 matrix rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def _kernels_from_source() -> None:
    """`workbench.kernels` from this checkout where the workbench is not installed."""
    if importlib.util.find_spec("workbench") is not None and importlib.util.find_spec("workbench.kernels") is not None:
        return
    package = types.ModuleType("workbench")
    package.__path__ = [str(ROOT / "workbench")]
    sys.modules["workbench"] = package
    location = ROOT / "kernels"
    spec = importlib.util.spec_from_file_location(
        "workbench.kernels", location / "__init__.py", submodule_search_locations=[str(location)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workbench.kernels"] = module
    spec.loader.exec_module(module)


_kernels_from_source()
from workbench.kernels import blocks, elements, mx, nvfp4, reference, tables  # noqa: E402
from workbench.kernels import triton_activation as act  # noqa: E402
from workbench.kernels import triton_dequantize as deq  # noqa: E402
from workbench.kernels import triton_errors as err  # noqa: E402
from workbench.kernels import triton_gemm as gemm  # noqa: E402
from workbench.kernels import triton_moe as moe  # noqa: E402
from workbench.kernels import triton_quantize as quant  # noqa: E402
from workbench.kernels import triton_requant as requant  # noqa: E402

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
PLAIN = [rule.value for rule in tables.MXFP4_RULES]
failures: list[str] = []


def check(name: str, found: object, expected: object) -> None:
    """Equal bit for bit, any NaN being a NaN; `expected` lies on the CPU."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]  # type: ignore[arg-type]
    for part, (a, b) in enumerate(pairs):
        a = a.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            different, of = -1, b.numel()
        else:
            kind = BITS.get(a.dtype, torch.uint8)
            wrong = a.view(kind) != b.view(kind)
            if a.dtype in BITS:
                wrong &= ~(a.isnan() & b.isnan())
            different, of = int(wrong.sum()), b.numel()
        if different:
            failures.append(f"{name}, part {part}: {different} of {of} differ")


def check_near(name: str, found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    worst = ((found.double().cpu() - expected.double().cpu()).abs() / bound).max().item() if found.numel() else 0.0
    if not worst <= 1:
        failures.append(f"{name}: {worst:.3g} times the bound")


# ---- equality --------------------------------------------------------------------------------------------------------


def inputs(quick: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2048, 128), dtype=torch.int64, generator=generator).int()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return {
        "random bits": bits.view(torch.float32),
        "every bfloat16": every.view(torch.bfloat16).view(-1, 64),
        "every float16": every.view(torch.float16).view(-1, 64),
        "normal": torch.randn((256 if quick else 2048), 7168, generator=generator).bfloat16(),
        "ragged": torch.randn(33, 96, generator=generator),
        "strided": torch.randn(96, 33, generator=generator).t(),
        "empty": torch.zeros(0, 64),
    }


def check_streams(quick: bool) -> None:
    for name, x in inputs(quick).items():
        c = x.cuda()
        for rule in PLAIN:
            check(f"mxfp4 {rule}, {name}", quant.mxfp4_quantize(c, rule), reference.mxfp4_quantize(x, rule))
            check(
                f"mxfp4 act {rule}, {name}", act.mxfp4_qdq_activation(c, rule), reference.mxfp4_qdq_activation(x, rule)
            )
        rows = torch.rand(x.shape[0], 1) + 0.01
        for g in (None, torch.tensor(0.01), torch.tensor(2.0**-118), torch.tensor(3e38), rows):
            on_card = None if g is None else g.cuda()
            check(f"nvfp4, {name}", quant.nvfp4_quantize(c, on_card), reference.nvfp4_quantize(x, g))
            check(f"nvfp4 act, {name}", act.nvfp4_qdq_activation(c, on_card), reference.nvfp4_qdq_activation(x, g))
        finite = torch.where(x.isfinite(), x, torch.zeros_like(x))[:64]
        for rule in mx.RULES:
            check(f"mx {rule}, {name}", quant.mxfp4_quantize(finite.cuda(), rule), mx.quantize(finite, "e2m1", rule))
        for rule in nvfp4.RULES:
            g = torch.tensor(0.003)
            check(
                f"nv {rule}, {name}",
                quant.nvfp4_quantize(finite.cuda(), g.cuda(), rule),
                nvfp4.quantize(finite, rule, g),
            )
    _check_decoding()
    _check_requant()
    _check_division(16 if quick else 1)


def _check_decoding() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    packed = every.expand(256, 256)
    mx_scales, nv_scales = (every.view(-1, 1).expand(256, n).contiguous() for n in (16, 32))
    nv_scales = nv_scales.view(torch.float8_e4m3fn)
    for dtype in BITS:
        expected = reference.mxfp4_dequantize(packed, mx_scales).to(dtype)
        check(f"mxfp4 decode {dtype}", deq.mxfp4_dequantize(packed.cuda(), mx_scales.cuda(), dtype), expected)
        for g in (torch.tensor(2.0**-22 / 3), torch.tensor(-1e38), torch.logspace(-40, 38, 256).view(-1, 1)):
            expected = reference.nvfp4_dequantize(packed, nv_scales, g).to(dtype)
            found = deq.nvfp4_dequantize(packed.cuda(), nv_scales.cuda(), g.cuda(), dtype)
            check(f"nvfp4 decode {dtype}", found, expected)
    for element in ("e2m3", "e3m2", "e4m3", "e5m2"):
        codes = torch.randint(0, 256, (256, elements.packed_columns(element, 512))).to(torch.uint8)
        codes = codes.view(elements.ELEMENTS[element].dtype)
        expected = mx.dequantize(codes, mx_scales, element)
        check(f"mx {element} decode", deq.mx_dequantize(codes.cuda(), mx_scales.cuda(), element), expected)
    codes = torch.randint(0, 256, (3, 200, 300)).to(torch.uint8).view(torch.float8_e4m3fn)
    for block in ((128, 128), (1, 0), (0, 0), (3, 7)):
        rows, columns = block[0] or 200, block[1] or 300
        scales = torch.randn(3, -(-200 // rows), -(-300 // columns))
        expected = codes.float() * blocks.spread(scales, block, codes.shape)
        check(f"fp8 {block}", deq.fp8_dequantize(codes.cuda(), scales.cuda(), block), expected)


def _check_requant() -> None:
    packed = torch.randint(0, 256, (4096, 128)).to(torch.uint8)
    packed[:1000] &= 0x33
    packed[1000:1500] &= 0x99
    scales = torch.randint(0, 256, (4096, 16)).to(torch.uint8).view(torch.float8_e4m3fn)
    for g in (torch.tensor(0.013), torch.tensor(2.0**-140), torch.tensor(-0.5), torch.rand(4096, 1)):
        for rule in PLAIN:
            codes, found = requant.nvfp4_to_mxfp4(packed.cuda(), scales.cuda(), g.cuda(), rule)
            expected, scale_bytes = reference.mxfp4_quantize(reference.nvfp4_dequantize(packed, scales, g), rule)
            check(f"requant {rule}, scales", found, scale_bytes)
            valid = (scale_bytes != tables.E8M0_NAN).repeat_interleave(16, 1)
            check(f"requant {rule}, codes", torch.where(valid.cuda(), codes, 0), torch.where(valid, expected, 0))


def _check_division(stride: int) -> None:
    """All 2**23 significands (or every `stride`-th) at each midpoint."""
    sys.path.insert(0, str(Path(__file__).parent))
    from triton_division import both_codes

    d = (torch.arange(0, 1 << 23, stride, dtype=torch.int32, device="cuda") | (127 << 23)).view(torch.float32)
    for midpoint in tables.E2M1_MIDPOINTS:
        for step in (-2, -1, 0, 1, 2):
            x = ((d * midpoint).view(torch.int32) + step).view(torch.float32)
            short, exact = (torch.empty_like(d, dtype=torch.int32) for _ in range(2))
            both_codes[(d.numel() // 1024,)](x, d, short, exact, TILE=1024)
            check(f"division at {midpoint}", short, exact.cpu())


def check_products() -> None:
    torch.manual_seed(1)
    n, k = 576, 1184
    w = torch.randn(n, k)
    x_all = torch.randn(200, k).bfloat16()
    static = torch.tensor([0.002])
    for weight_format in ("nvfp4", "mxfp4"):
        if weight_format == "nvfp4":
            codes, scales, g = reference.nvfp4_quantize(w)
            dense = reference.nvfp4_dequantize(codes, scales, g)
        else:
            (codes, scales), g = reference.mxfp4_quantize(w), None
            dense = reference.mxfp4_dequantize(codes, scales)
        dense = dense.bfloat16().double()
        for m in (1, 2, 16, 33, 64, 200):
            for activation, s in (("none", None), ("nvfp4", None), ("nvfp4", static), ("mxfp4", None)):
                x = x_all[:m]
                parts = [t if t is None else t.cuda() for t in (x, codes, scales, None if g is None else g.view(1), s)]
                y = gemm.packed_linear(*parts, None, [n], weight_format, activation)
                if activation != "none":
                    x = (
                        reference.mxfp4_qdq_activation(x)
                        if activation == "mxfp4"
                        else reference.nvfp4_qdq_activation(x, s)
                    )
                expected = x.double() @ dense.T
                bound = 2.0**-8 * expected.abs() + 2e-6 * (x.double().abs() @ dense.abs().T)
                check_near(f"linear {weight_format} {activation} M={m}", y, expected, bound)
    w = torch.randn(512, 4096).bfloat16()
    codes, scales, g = reference.nvfp4_quantize(w)
    a = reference.nvfp4_dequantize(codes, scales, g)
    b, d = (reference.mxfp4_dequantize(*reference.mxfp4_quantize(t)) for t in (a, w))
    w, a, b, d = (t.double() for t in (w, a, b, d))
    sides = {"w": w, "e1": a - w, "e2": b - a, "e": b - w, "b": b, "direct": d - w}
    found = err.error_sums(*(t.cuda() for t in (w.bfloat16(), codes, scales, g)))
    for name, value in zip(err.SUMS, found, strict=True):
        p, q = (sides[s] for s in name.split("_"))
        size = ((p * p).sum() * (q * q).sum()).sqrt().item()
        check_near(f"error sum {name}", value, (p * q).sum(), 2e-6 * size)
    _check_experts()


def _experts(experts: int, hidden: int, inner: int, tokens: int, k: int) -> tuple[Tensor, ...]:
    """x, w13, its scales and globals, w2, its scales and globals, router weights and ids: on the card, NVFP4."""
    g13, g2 = (0.0005 + 0.001 * torch.rand(s, device="cuda") for s in ((experts, 2), (experts,)))
    w13 = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16)
    a = quant.nvfp4_quantize(w13, g13.repeat_interleave(inner, 1).unsqueeze(-1))
    b = quant.nvfp4_quantize(w2, g2[:, None, None])
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return x, a[0], a[1], g13, b[0], b[1], g2, torch.rand(tokens, k, device="cuda"), ids


def _dense_experts(parts: tuple[Tensor, ...]) -> Tensor:
    """The same in float64, of rounded-to-bfloat16 weights and intermediates."""
    x, c13, s13, g13, c2, s2, g2, weights, ids = parts
    inner = c13.shape[1] // 2
    w13 = deq.nvfp4_dequantize(c13, s13, g13.repeat_interleave(inner, 1).unsqueeze(-1), torch.bfloat16)
    w2 = deq.nvfp4_dequantize(c2, s2, g2[:, None, None], torch.bfloat16)
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for t in range(x.shape[0]):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (w13[e].double() @ x[t].double()).bfloat16().chunk(2)
            h = torch.nn.functional.silu(gate.float()).bfloat16() * up
            out[t] += weight * (w2[e].double() @ h.double()).bfloat16().double()
    return out


def _check_experts() -> None:
    for tokens in (1, 3, 40):
        parts = _experts(12, 256, 96, tokens, 4)
        expected = _dense_experts(parts)
        y = moe.packed_moe(*parts, None, None, "nvfp4", "none", False)
        check_near(f"experts, {tokens} tokens", y, expected, 0.02 * expected.abs().max().item())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.packed_moe(*parts, None, None, "nvfp4", "nvfp4", False)
    graph.replay()
    check("experts in a graph", captured, moe.packed_moe(*parts, None, None, "nvfp4", "nvfp4", False).cpu())


# ---- times -----------------------------------------------------------------------------------------------------------


def seconds(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds a call, over graph replays of all `calls` (which work on different inputs)."""
    for call in calls[:2]:
        call()
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


def card_rates() -> tuple[float, float]:
    """The card's copy bandwidth (bytes read and written) and its bfloat16 matrix rate, a second."""
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(large)
    copy = 2 * large.numel() / seconds([lambda: target.copy_(large)] * 4)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    rate = 2 * 8192**3 / seconds([lambda: a @ b] * 3)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: "
        f"copy {copy / 1e12:.2f} TB/s, bf16 {rate / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return copy, rate


def stream_times(quick: bool, rates: tuple[float, float]) -> list[str]:
    rows, columns = (8192, 8192) if quick else (16384, 8192)
    count, copy = rows * columns, rates[0]
    source = torch.randn(rows, columns, device="cuda").bfloat16()
    lines = [f"stream of {count / 2**20:.0f} M weights (bytes a weight): fraction of the copy, us"]
    nv = quant.nvfp4_quantize(source)
    codes_mx = quant.mxfp4_quantize(source)
    g = nv[2]
    row_globals = g.expand(rows, 1).contiguous()
    streams: dict[str, tuple[float, Callable[[], object]]] = {
        "largest": (2, lambda: quant.largest(source)),
        "nvfp4 quantize": (2.5625, lambda: quant.nvfp4_quantize(source, g)),
        **{f"mxfp4 quantize {r}": (2.53125, lambda r=r: quant.mxfp4_quantize(source, r)) for r in PLAIN},
        "mxfp4 quantize mse": (2.53125, lambda: quant.mxfp4_quantize(source, "mse")),
        "nvfp4 four over six": (2.5625, lambda: quant.nvfp4_quantize(source, g, "four_over_six")),
        "nvfp4 decode bf16": (2.5625, lambda: deq.nvfp4_dequantize(*nv, torch.bfloat16)),
        "nvfp4 decode bf16, rows": (2.5625, lambda: deq.nvfp4_dequantize(*nv[:2], row_globals, torch.bfloat16)),
        "nvfp4 decode f32": (4.5625, lambda: deq.nvfp4_dequantize(*nv)),
        "mxfp4 decode bf16": (2.53125, lambda: deq.mxfp4_dequantize(*codes_mx, torch.bfloat16)),
        "nvfp4 activation static": (4, lambda: act.nvfp4_qdq_activation(source, g)),
        "nvfp4 activation token": (4, lambda: act.nvfp4_qdq_activation(source)),
        "mxfp4 activation": (4, lambda: act.mxfp4_qdq_activation(source)),
        "requant fused": (1.09375, lambda: requant.nvfp4_to_mxfp4(*nv)),
        "requant by bf16": (1.09375, lambda: quant.mxfp4_quantize(deq.nvfp4_dequantize(*nv, torch.bfloat16))),
        "error sums": (2.5625, lambda: err.error_sums(source, *nv)),
    }
    for name, (size, call) in streams.items():
        taken = seconds([call] * 4)
        lines.append(f"  {name:26} ({size:.2f})  {size * count / taken / copy:.2f}  {taken * 1e6:.0f}")
    return lines


def linear_times(quick: bool, rates: tuple[float, float]) -> list[str]:
    n = k = 8192
    copies = 9  # of 36 MiB of codes: more than four times the second-level cache
    weights = [quant.nvfp4_quantize(torch.randn(n, k, device="cuda").bfloat16()) for _ in range(copies)]
    mx_weights = [quant.mxfp4_quantize(torch.randn(n, k, device="cuda").bfloat16()) for _ in range(copies)]
    dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(4)]
    lines = [
        "linear, N = K = 8192: times cuBLAS bf16: nvfp4 W4A16, W4A4; mxfp4 W4A16, W4A4; us of cuBLAS, of the first"
    ]
    for m in (1, 16, 64, 2048) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192):
        x = torch.randn(m, k, device="cuda").bfloat16()
        base = seconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense])
        taken = []
        for weight_format, activation in (("nvfp4", "none"), ("nvfp4", "nvfp4"), ("mxfp4", "none"), ("mxfp4", "mxfp4")):
            packed = (
                [(*w[:2], w[2].view(1)) for w in weights]
                if weight_format == "nvfp4"
                else [(*w, None) for w in mx_weights]
            )
            calls = [
                lambda w=w, x=x, f=weight_format, a=activation: gemm.packed_linear(x, *w, None, None, [n], f, a)
                for w in packed
            ]
            taken.append(seconds(calls if m <= 256 else calls[:3]))
        ratios = "  ".join(f"{base / t:.2f}" for t in taken)
        lines.append(f"  M={m:<5} {ratios}  {base * 1e6:.0f} {taken[0] * 1e6:.0f}")
    return lines


def expert_times(quick: bool, rates: tuple[float, float]) -> list[str]:
    lines = ["experts of 384, top 8, hidden 7168, intermediate 256: us; times decoding all"]
    for tokens in (1, 2, 4, 64, 4096):
        parts = _experts(384, 7168, 256, tokens, 8)
        taken = seconds([lambda p=parts: moe.packed_moe(*p, None, None, "nvfp4", "none", False)] * 3)
        g13 = parts[3].repeat_interleave(256, 1).unsqueeze(-1)
        decode = seconds(
            [
                lambda p=parts, g=g13: (
                    deq.nvfp4_dequantize(p[1], p[2], g, torch.bfloat16),
                    deq.nvfp4_dequantize(p[4], p[5], p[6][:, None, None], torch.bfloat16),
                )
            ]
        )
        lines.append(f"  {tokens:5} tokens  {taken * 1e6:.0f}  {decode / taken:.1f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer sizes")
    parser.add_argument("--only", choices=("checks", "streams", "linear", "experts"), action="append")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    only = arguments.only or ["checks", "streams", "linear", "experts"]
    start = time.monotonic()
    if "checks" in only:
        check_streams(arguments.quick)
        print(f"streams checked after {time.monotonic() - start:.0f} s", flush=True)
        check_products()
        print(f"{len(failures)} checks failed" if failures else "every check passed")
        print("\n".join(failures[:40]))
    rates = card_rates()
    for name, measure in (("streams", stream_times), ("linear", linear_times), ("experts", expert_times)):
        if name in only:
            print("\n".join(measure(arguments.quick, rates)), flush=True)
            print(f"{name} timed after {time.monotonic() - start:.0f} s", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
