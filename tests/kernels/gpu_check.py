"""Checks every Triton kernel on a CUDA card against the reference, bit for bit, then times them (workbench.bench).

    python tests/kernels/gpu_check.py [--quick] [--only checks|tuning|streams|linear|experts] [--json FILE]
                                      [--markdown FILE]

Needs torch and Triton alone; vLLM, torchao and compressed-tensors are timed beside them where they are installed.
Tuning (`gpu_tuning.py`) is checked only where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import from_source
import torch
from torch import Tensor

from_source.make_importable()
from workbench.kernels import (  # noqa: E402
    blocks,
    elements,
    mx,
    nvfp4,
    reference,
    tables,
    triton_routes,
)
from workbench.kernels import triton_activation as act  # noqa: E402
from workbench.kernels import triton_dequantize as deq  # noqa: E402
from workbench.kernels import triton_error_details as details  # noqa: E402
from workbench.kernels import triton_errors as err  # noqa: E402
from workbench.kernels import triton_gemm as gemm  # noqa: E402
from workbench.kernels import triton_moe as moe  # noqa: E402
from workbench.kernels import triton_quantize as quant  # noqa: E402
from workbench.kernels import triton_requant as requant  # noqa: E402

from workbench.bench.cuda import SECTIONS, bench_cuda  # noqa: E402
from workbench.bench.cuda_products import decode_experts, random_experts  # noqa: E402
from workbench.bench.cuda_table import CudaBench, as_json, markdown  # noqa: E402

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
        for g in (None, *map(torch.tensor, (0.01, 2.0**-118, 1e-30, 3e38)), rows):
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
    packed = torch.randint(0, 256, (64, 4096, 64)).to(torch.uint8)
    packed[:10] &= 0x33  # blocks without the large codes
    packed[10:15] &= 0x99
    packed[15:20] &= 0x11
    scales = torch.randint(0, 256, (64, 4096, 8)).to(torch.uint8).view(torch.float8_e4m3fn)
    one = [torch.tensor(g) for g in (0.013, 2.0**-140, -0.5, 1e36)]
    experts = [torch.rand(64, 1, 1), 2.0 ** torch.randint(-130, 120, (64, 1, 1)).float()]
    rows = [torch.rand(64, 4096, 1)]
    for i, g in enumerate(one + experts + rows):
        a = reference.nvfp4_dequantize(packed, scales, g)
        for rule in PLAIN:
            codes, found = requant.nvfp4_to_mxfp4(packed.cuda(), scales.cuda(), g.cuda(), rule)
            expected, scale_bytes = reference.mxfp4_quantize(a, rule)
            check(f"requant {rule} {i}, scales", found, scale_bytes)
            valid = (scale_bytes != tables.E8M0_NAN).repeat_interleave(16, -1)
            check(f"requant {rule} {i}, codes", torch.where(valid.cuda(), codes, 0), torch.where(valid, expected, 0))


def _check_division(stride: int) -> None:
    """All 2**23 significands (or every `stride`-th) at each midpoint of E2M1, and of E4M3 with its subnormals."""
    sys.path.insert(0, str(Path(__file__).parent))
    from triton_division import both_codes, both_codes_unscaled, both_scales

    normal = [(17 + 2 * i) / 16 * 2.0**e for i in range(8) for e in (-6, 0, 7)]
    scales = [*normal, *((2 * k + 1) / 2 * 2.0**-9 for k in range(8)), 448.0, 464.0, 480.0, 1000.0, 1023.9]
    d = (torch.arange(0, 1 << 23, stride, dtype=torch.int32, device="cuda") | (127 << 23)).view(torch.float32)
    short, exact = (torch.empty_like(d, dtype=torch.int32) for _ in range(2))
    codes = list(tables.E2M1_MIDPOINTS)
    for kernel, midpoints in ((both_codes, codes), (both_codes_unscaled, codes), (both_scales, scales)):
        for midpoint in midpoints:
            for step in range(-3, 4):
                x = ((d * midpoint).view(torch.int32) + step).view(torch.float32)
                kernel[(d.numel() // 1024,)](x, d, short, exact, TILE=1024)
                if not torch.equal(short, exact):
                    failures.append(f"{kernel.__name__} at {midpoint} {step:+}: {int((short != exact).sum())} differ")


def _check_error_sums(dtype: torch.dtype, rule: str, spread: str) -> None:
    w = torch.randn(512, 4096).to(dtype)
    w[3, 64:96] = 0
    w[5, :32] *= 1e-4
    w[6, :1000] *= 2.0**-120
    g = reference.nvfp4_global_scale(w.abs().amax().float())
    if spread == "row":
        g = torch.rand(512, 1) * g
    elif spread == "shard":
        g = (g * torch.tensor([1.0, 1.7])).repeat_interleave(256).view(512, 1)
    codes, scales, g = reference.nvfp4_quantize(w, g)
    scales.view(torch.uint8)[9, ::3] |= 128  # a scale's sign turns both a and b
    a = reference.nvfp4_dequantize(codes, scales, g)
    b, d = (reference.mxfp4_dequantize(*reference.mxfp4_quantize(t, rule)).double() for t in (a, w))
    x, a = w.double(), a.double()
    sides = {"w": x, "e1": a - x, "e2": b - a, "e": b - x, "b": b, "direct": d - x}
    found = err.error_sums(*(t.cuda() for t in (w, codes, scales, g)), rule)
    for name, value in zip(err.SUMS, found, strict=True):
        p, q = (sides[s] for s in name.split("_"))
        size = ((p * p).sum() * (q * q).sum()).sqrt().item()
        check_near(f"error sum {name} {dtype} {rule}, a global a {spread}", value, (p * q).sum(), 2e-6 * size)


def _check_error_details(dtype: torch.dtype) -> None:
    w = torch.randn(512, 4096).to(dtype)
    w[5, :64] *= 1e-3
    codes, scales, g = reference.nvfp4_quantize(w)
    g = g * (0.5 + torch.rand(512, 1))  # some blocks saturate
    a = reference.nvfp4_dequantize(codes, scales, g)
    packed, scale_bytes = reference.mxfp4_quantize(a)
    b = reference.mxfp4_dequantize(packed, scale_bytes)
    found = dict(
        zip(details.DETAILS, details.error_details(*(t.cuda() for t in (w, codes, scales, g))).tolist(), strict=True)
    )
    steps = (scales.float() * g, reference.e8m0_values(scale_bytes))
    for name, x, x_hat, step, block in (("e1", w.float(), a, steps[0], 16), ("e2", a, b, steps[1], 32)):
        for part, value, size in _parts(x.view(-1, block), x_hat.view(-1, block), step.view(-1, 1)):
            check_near(f"{name} {part} {dtype}", torch.tensor(found[f"{name} {part}"]), value, 2e-6 * size.item())
    e2 = (b - a).double()
    for name, power in (("e2", 1), ("e2_e2_e2", 3), ("e2_e2_e2_e2", 4)):
        size = (e2**power).abs().sum().item()
        check_near(f"{name} {dtype}", torch.tensor(found[name]), (e2**power).sum(), 2e-6 * size)


def _parts(x: Tensor, x_hat: Tensor, step: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """`cpu_errors.attribute` in plain torch: name, value, what its error is measured by."""
    square = (x_hat.double() - x.double()).square()
    beyond = x.double().abs() > 6 * step.double()
    lost = (x_hat == 0) & (x != 0) & ~beyond
    exact = x.abs().amax(1, keepdim=True) / 6
    exact = torch.where(exact == 0, 1.0, exact)
    ideal = reference.e2m1_values(reference.e2m1_round(x / exact)) * exact
    element = (ideal.double() - x.double()).square() * ~(beyond | lost)
    total = square.sum()
    return [
        ("saturation", (square * beyond).sum(), total),
        ("underflow", (square * lost).sum(), total),
        ("element", element.sum(), total),
        ("saturated", beyond.sum(), beyond.sum() + 1),
        ("underflowed", lost.sum(), lost.sum() + 1),
    ]


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
        for m in (1, 2, 16, 33, 64, 200):
            for activation, s in (("none", None), ("nvfp4", None), ("nvfp4", static), ("mxfp4", None)):
                x = x_all[:m]
                packed = [t if t is None else t.cuda() for t in (codes, scales, None if g is None else g.view(1))]
                y = gemm.packed_linear(
                    x.cuda(), *packed, None if s is None else s.cuda(), None, [n], weight_format, activation
                )
                if activation != "none":
                    x = (
                        reference.mxfp4_qdq_activation(x)
                        if activation == "mxfp4"
                        else reference.nvfp4_qdq_activation(x, s)
                    )
                _check_product(f"{weight_format} {activation} M={m}", y, x, dense, packed)
    _check_odd_scales()
    for dtype in (torch.bfloat16, torch.float32):
        for rule, spread in (("even", "tensor"), ("even", "row"), ("even", "shard"), ("floor", "tensor")):
            _check_error_sums(dtype, rule, spread)
        _check_error_details(dtype)
    _check_experts()


def _check_product(name: str, y: Tensor, x: Tensor, dense: Tensor, packed: list[Tensor | None]) -> None:
    """Of weights as they are, or rounded to x's dtype where the route rounds them."""
    routes = triton_routes.linear_routes(x.cuda(), *packed, [dense.shape[0]])
    if triton_routes.default_route(x.shape[0], routes) in ("portable", "decode"):
        dense = dense.to(x.dtype)
    dense, x = dense.double(), x.double()
    bound = torch.finfo(y.dtype).eps / 2 * 1.001 * (x @ dense.T).abs() + 2e-6 * (x.abs() @ dense.abs().T)
    check_near(f"linear {name}", y, x @ dense.T, bound)


def _check_odd_scales() -> None:
    """Every code under every scale that is a number, large and tiny decode multipliers, a multiplier a row, and scales
    above 2 or NaN in a few rows alone, in both 16-bit types: one token, of ones, sees each weight."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 8) * 17  # every code twice in 32
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = every[every.float().isfinite()].repeat(2)[: 23 * 16].view(23, 16)
        large = 3.0e4 if dtype == torch.float16 else 1e30
        for g in (torch.tensor([2.0**-20]), torch.tensor([large]), torch.rand(23) / 64):
            w = reference.nvfp4_dequantize(codes.expand(23, 128), scales, g if g.numel() == 1 else g[:, None])
            _check_each(f"nvfp4 {dtype} {g[0].item():g}", "nvfp4", codes, scales, g, w, dtype)
        usual = 100 + torch.arange(23 * 8).remainder(29).view(23, 8)
        for name, high in (("usual", 127), ("above 2 in one row", 131), ("NaN in one row", 255), ("huge", 250)):
            scales = usual.clone()
            scales[5, 3] = high
            scales = scales.to(torch.uint8)
            w = reference.mxfp4_dequantize(codes.expand(23, 128), scales)
            _check_each(f"mxfp4 {dtype} {name}", "mxfp4", codes, scales, None, w, dtype)


def _check_each(
    name: str, weight_format: str, codes: Tensor, scales: Tensor, g: Tensor | None, w: Tensor, dtype: torch.dtype
) -> None:
    n, k = w.shape
    packed = [None if t is None else t.cuda() for t in (codes.expand(n, k // 2).contiguous(), scales, g)]
    for m in (1, 16, 40):
        x = torch.zeros(m, k)
        at = torch.arange(m) * 5 % k
        x[torch.arange(m), at] = 1.0
        y = gemm.packed_linear(x.to(dtype).cuda(), *packed, None, None, [n], weight_format, "none")
        found, same = y.cpu(), torch.zeros(m, n, dtype=torch.bool)
        broken = ~(w if g is not None else w.to(dtype)).isfinite().all(1)  # 0 times what is no number
        for way in (-1, 0, 1):  # a float32 product's last bit
            expected = (w * (1.0 + way * 2.0**-22 * (g is not None)))[:, at].T.contiguous().to(dtype)
            expected[:, broken] = float("nan")
            same |= (found == expected) | (found.isnan() & expected.isnan())
        if not bool(same.all()):
            failures.append(f"each weight {name} M={m}: {int((~same).sum())} of {same.numel()} differ")


def _experts(experts: int, hidden: int, inner: int, tokens: int, k: int) -> tuple[Tensor, ...]:
    """x, w13, its scales and globals, w2, its scales and globals, router weights and ids: on the card, NVFP4."""
    ids = torch.rand(tokens, experts, device="cuda").topk(k).indices
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return x, *random_experts(experts, hidden, inner), torch.rand(tokens, k, device="cuda"), ids


def _dense_experts(parts: tuple[Tensor, ...]) -> Tensor:
    """The same in float64, of rounded-to-bfloat16 weights and intermediates."""
    x, c13, s13, g13, c2, s2, g2, weights, ids = parts
    w13, w2 = decode_experts((c13, s13, g13, c2, s2, g2))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer sizes")
    parser.add_argument("--only", choices=("checks", "tuning", *SECTIONS), action="append")
    parser.add_argument("--json", type=Path, help="every figure, written after each section")
    parser.add_argument("--markdown", type=Path, help="the tables for the documentation")
    arguments = parser.parse_args()
    only = arguments.only or ["checks", *SECTIONS]
    start = time.monotonic()
    if "checks" in only:
        torch.manual_seed(0)
        check_streams(arguments.quick)
        print(f"streams checked after {time.monotonic() - start:.0f} s", flush=True)
        check_products()
        print(f"{len(failures)} checks failed" if failures else "every check passed", flush=True)
        print("\n".join(failures[:40]), flush=True)

    if "tuning" in only:
        import gpu_tuning

        found = gpu_tuning.check()
        failures.extend(found)
        print("\n".join(found) if found else "tuning: every check passed", flush=True)

    def save(result: CudaBench) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(as_json(result), indent=1))
        if arguments.markdown:
            arguments.markdown.write_text(markdown(result))

    if sections := [name for name in SECTIONS if name in only]:
        bench_cuda(sections, quick=arguments.quick, tell=lambda lines: print(lines, flush=True), save=save)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
