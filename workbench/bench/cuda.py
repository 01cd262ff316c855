"""`workbench bench kernels --device cuda`: every Triton kernel timed beside the card's own rates and its rivals.

    result = bench_cuda(sections=SECTIONS, quick=False, tell=print)
    print(cuda_table.markdown(result))

Needs torch and Triton alone. What is not installed, or refuses, is a reason in the table. A section is told when it is
finished, so that a run that dies keeps what it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from workbench.bench.cuda_products import measure_experts, measure_linear
from workbench.bench.cuda_streams import measure_streams
from workbench.bench.cuda_table import CudaBench, Section, card_line, summary, text, today
from workbench.bench.cuda_timing import Card, card_rates

SECTIONS = ("streams", "linear", "experts")
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
_ROUTED = (1, 2, 4, 64, 4096)


def bench_cuda(
    sections: Sequence[str] = SECTIONS,
    *,
    quick: bool = False,
    tell: Callable[[str], object] = print,
    save: Callable[[CudaBench], object] = lambda _: None,
) -> CudaBench:
    """Measures the named sections, in their order. tell: gets each table when it is done; save: what there is so far.

    quick: fewer sizes. Raises RuntimeError where torch finds no CUDA card.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA card")
    torch.manual_seed(0)
    start = time.monotonic()
    card = card_rates()
    tell(card_line(card))
    done: list[Section] = []
    for name in sections:
        done.append(_measured(name, card, quick))
        torch.cuda.empty_cache()
        tell(f"{text(done[-1])}\n  [{name}: done after {time.monotonic() - start:.0f} s]")
        save(CudaBench(date=today(), card=card, sections=tuple(done)))
    tell(summary(done))
    return CudaBench(date=today(), card=card, sections=tuple(done))


def _measured(name: str, card: Card, quick: bool) -> Section:
    if name == "streams":
        return measure_streams(card, 8192 if quick else 16384, 8192)
    if name == "linear":
        return measure_linear(card, 8192, (1, 16, 2048) if quick else _TOKENS)
    return measure_experts(card, 384, 7168, 256, 8, (1, 4096) if quick else _ROUTED)
