"""Products with packed weights on a CUDA card: one matrix against cuBLAS and Marlin, and experts against fused MoEs.

Weights, and for experts the chosen experts, are rotated beyond the second-level cache, as a model's layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from workbench.bench import cuda_rivals as rivals
from workbench.bench.cuda_table import Figure, Row, Section, of_copy, of_rate, times
from workbench.bench.cuda_timing import Card, Timed, measure, measure_made, reason, rotations
from workbench.kernels import triton_dequantize as deq
from workbench.kernels import triton_gemm as gemm
from workbench.kernels import triton_moe as moe
from workbench.kernels import triton_quantize as quant

FEW_TOKENS, TIMES_MARLIN, TIMES_CUBLAS = 16, 1.0, 1.6
MANY_TOKENS, TIMES_CUBLAS_OF_MANY = 2048, 0.85
FEW_ROUTED, TIMES_DECODING = 4, 10.0
TIMES_FUSED, TIMES_FUSED_OF_MANY, MANY_ROUTED = 1.0, 0.8, 4096
Packed = tuple[Tensor, Tensor, Tensor | None]
_Laid = TypeVar("_Laid")
_ALL_AT_ONCE = 256  # tokens up to which all rotated weights are timed; above, products take long and 3 are enough


def measure_linear(card: Card, size: int, tokens: Iterable[int], device: str = "cuda") -> Section:
    """`[M, size] @ [size, size]^T` for every M of `tokens`, in NVFP4 and MXFP4, weight-only and with activations."""
    copies = rotations(size * size * (0.5 + 1 / 32))
    dense = [torch.randn(size, size, device=device).bfloat16() for _ in range(rotations(2 * size * size))]
    packed: dict[str, list[Packed]] = {"nvfp4": [], "mxfp4": []}
    for _ in range(copies):
        w = torch.randn(size, size, device=device).bfloat16()
        codes, scales, g = quant.nvfp4_quantize(w)
        packed["nvfp4"].append((codes, scales, g.view(1)))
        packed["mxfp4"].append((*quant.mxfp4_quantize(w), None))
    marlin = {name: _made(partial(rivals.Marlin, weights, name)) for name, weights in packed.items()}
    rows = []
    for m in tokens:
        x = torch.randn(m, size, device=device).bfloat16()
        cublas = measure([partial(torch.nn.functional.linear, x, w) for w in dense])
        for name, weights in packed.items():
            few = weights if m <= _ALL_AT_ONCE else weights[:3]
            calls = [partial(gemm.packed_linear, x, *w, None, None, [size], name) for w in few]
            rows.append(
                _weight_only(card, m, size, name, [partial(call, "none") for call in calls], cublas, marlin[name], x)
            )
            both = measure([partial(call, name) for call in calls])
            rows.append(Row(case=f"M={m} {name} W4A4", ours=both, figures={"x cuBLAS bf16": times(both, cublas)}))
    title = f"Linear, N = K = {size}"
    return Section(name="linear", title=title, rows=tuple(rows))


def _weight_only(
    card: Card,
    m: int,
    size: int,
    name: str,
    calls: list[Callable[[], Tensor]],
    cublas: Timed,
    marlin: rivals.Marlin | Timed,
    x: Tensor,
) -> Row:
    ours = measure(calls)
    if isinstance(marlin, Timed):
        theirs = marlin
    elif ours.seconds is None:
        theirs = Timed(why="ours did not run: nothing to compare with")
    else:
        theirs = measure_made(partial(_only, marlin.calls, len(calls), x, calls[0]()))
    few = m <= FEW_TOKENS
    bar = TIMES_CUBLAS if few else TIMES_CUBLAS_OF_MANY if m >= MANY_TOKENS else None
    figures = {
        "x cuBLAS bf16": times(ours, cublas, bar),
        "x Marlin": times(ours, theirs, TIMES_MARLIN if few else None),
    }
    if few:
        nbytes = size * size * (0.5 + 1 / (16 if name == "nvfp4" else 32)) + 4 * m * size
        figures["of copy"] = of_copy(ours, nbytes, card)
    if m >= MANY_TOKENS:
        figures["of bf16 rate"] = of_rate(ours, 2 * m * size * size, card)
    return Row(case=f"M={m} {name} W4A16", ours=ours, figures=figures)


def _only(
    make: Callable[..., list[Callable[[], object]]], count: int, *arguments: Tensor
) -> list[Callable[[], object]]:
    return make(*arguments)[:count]


# ---- experts ---------------------------------------------------------------------------------------------------------


def random_experts(
    experts: int, hidden: int, inner: int, device: str = "cuda", *, shared: bool = False
) -> tuple[Tensor, ...]:
    """NVFP4: w13 `[E, 2I, H/2]`, its scales and globals `[E, 2]`, w2 `[E, H, I/2]`, its scales and globals `[E]`.

    shared: gate and up have one global scale, which is all that Marlin knows.
    """
    g13, g2 = (0.0005 + 0.001 * torch.rand(shape, device=device) for shape in ((experts, 2), (experts,)))
    if shared:
        g13 = g13[:, :1].expand(-1, 2).contiguous()
    w13 = torch.randn(experts, 2 * inner, hidden, device=device, dtype=torch.bfloat16)
    w2 = torch.randn(experts, hidden, inner, device=device, dtype=torch.bfloat16)
    a = quant.nvfp4_quantize(w13, g13.repeat_interleave(inner, 1).unsqueeze(-1))
    b = quant.nvfp4_quantize(w2, g2[:, None, None])
    return a[0], a[1], g13, b[0], b[1], g2


def decode_experts(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """All experts of `random_experts` in bfloat16: `[E, 2I, H]` and `[E, H, I]`."""
    c13, s13, g13, c2, s2, g2 = parts
    w13 = deq.nvfp4_dequantize(c13, s13, g13.repeat_interleave(c13.shape[1] // 2, 1).unsqueeze(-1), torch.bfloat16)
    return w13, deq.nvfp4_dequantize(c2, s2, g2[:, None, None], torch.bfloat16)


def measure_experts(
    card: Card, experts: int, hidden: int, inner: int, k: int, tokens: Iterable[int], device: str = "cuda"
) -> Section:
    """Routed experts in NVFP4, `k` of `experts` a token, against decoding them all, and vLLM's fused MoEs."""
    parts = random_experts(experts, hidden, inner, device, shared=True)
    dense = decode_experts(parts)
    decoding = measure([partial(decode_experts, parts)])
    marlin = _made(partial(rivals.MarlinExperts, (*parts[:2], parts[2][:, 0].contiguous()), parts[3:]))
    rows = []
    for count in tokens:
        x = torch.randn(count, hidden, device=device, dtype=torch.bfloat16)
        per_call = min(count * k, experts) * 3 * inner * hidden * 0.5625
        routings = _routings(count, k, experts, rotations(per_call), device)
        for case, activation in (("W4A16", "none"), ("W4A4", "nvfp4")):
            calls = [partial(moe.packed_moe, x, *parts, *r, None, None, "nvfp4", activation, False) for r in routings]
            ours = measure(calls)
            figures: dict[str, Figure] = {}
            if activation == "none":
                expected = calls[0]() if ours.seconds is not None else None
                fused = measure_made(partial(rivals.fused_experts, x, *dense, routings, expected))
                if isinstance(marlin, Timed) or expected is None:
                    packed = marlin if isinstance(marlin, Timed) else Timed(why="ours did not run")
                else:
                    packed = measure_made(partial(marlin.calls, x, routings, expected))
                faster = TIMES_FUSED if count <= FEW_ROUTED else TIMES_FUSED_OF_MANY if count >= MANY_ROUTED else None
                figures = {
                    "x decoding all": times(ours, decoding, TIMES_DECODING if count <= FEW_ROUTED else None),
                    "x fused bf16": times(ours, fused, faster),
                    "x Marlin": times(ours, packed),
                }
                if count <= FEW_ROUTED:
                    figures["of copy"] = of_copy(ours, per_call, card)
            rows.append(Row(case=f"{count} tokens {case}", ours=ours, figures=figures))
    title = (
        f"Experts: {k} of {experts}, hidden {hidden}, intermediate {inner}, NVFP4 (decoding all: the decoding alone)"
    )
    return Section(name="experts", title=title, rows=tuple(rows))


def _routings(tokens: int, k: int, experts: int, calls: int, device: str) -> list[rivals.Routing]:
    """Router weights and ids of so many calls. While few experts are chosen, each call has others."""
    found = []
    pool = torch.empty(0, dtype=torch.int64, device=device)
    for _ in range(calls):
        if tokens * k <= experts and experts % k == 0:
            if pool.numel() < tokens * k:
                pool = torch.randperm(experts, device=device)
            ids, pool = pool[: tokens * k].view(tokens, k), pool[tokens * k :]
        else:
            ids = torch.rand(tokens, experts, device=device).topk(k).indices
        weights = torch.rand(tokens, k, device=device)
        found.append((weights / weights.sum(-1, keepdim=True), ids.contiguous()))
    return found


def _made(make: Callable[[], _Laid]) -> _Laid | Timed:
    try:
        return make()
    except Exception as error:
        return Timed(why=reason(error))
