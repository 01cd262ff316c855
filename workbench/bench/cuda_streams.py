"""Quantize, decode, round activations, requantize and sum errors on a CUDA card, beside its copy bandwidth and rivals.

Bytes are those that a function must read and write, once. Inputs are rotated beyond the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.bench import cuda_rivals as rivals
from workbench.bench.cuda_table import Figure, Row, Section, of_copy, times
from workbench.bench.cuda_timing import Call, Card, measure, measure_made
from workbench.kernels import tables
from workbench.kernels import triton_activation as act
from workbench.kernels import triton_dequantize as deq
from workbench.kernels import triton_error_details as details
from workbench.kernels import triton_errors as err
from workbench.kernels import triton_quantize as quant
from workbench.kernels import triton_requant as requant

OF_COPY, REQUANT_OF_COPY, ERRORS_OF_COPY, DETAILS_OF_COPY = 0.75, 0.70, 0.60, 0.30
TIMES_TWO_STEPS, TIMES_TORCHAO, TIMES_COMPRESSED_TENSORS = 3.5, 1.2, 10.0
_BF16, _F32 = 2.0, 4.0
_NVFP4, _MXFP4 = 0.5 + 1 / tables.NVFP4_BLOCK, 0.5 + 1 / tables.MXFP4_BLOCK
_COPIES = 4  # at 64 M weights the packed inputs and outputs of as many calls are more than four second-level caches

EAGER = "compressed-tensors"  # copies constants to the card in every call

Made = Callable[[], Sequence[Call]]


def measure_streams(card: Card, rows: int, columns: int, device: str = "cuda") -> Section:
    """Every streaming function on bfloat16 `[rows, columns]`, a multiple of 32 columns."""
    sources = [torch.randn(rows, columns, device=device).bfloat16() for _ in range(_COPIES)]
    count = rows * columns
    nv = [quant.nvfp4_quantize(w) for w in sources]
    mx = [quant.mxfp4_quantize(w) for w in sources]
    g = nv[0][2]

    def each(function: Callable[..., object], inputs: Sequence[Any], *more: Any) -> list[Call]:
        return [partial(function, *(i if isinstance(i, tuple) else (i,)), *more) for i in inputs]

    def row(
        case: str,
        calls: list[Call],
        size: float,
        needed: float | None,
        others: dict[str, tuple[Made, float]] | None = None,
    ) -> Row:
        ours = measure(calls)
        figures: dict[str, Figure] = {"of copy": of_copy(ours, size * count, card, needed)}
        for name, (make, bar) in (others or {}).items():
            figures[f"x {name}"] = times(ours, measure_made(make, capture=name != EAGER), bar)
        return Row(case=f"{case} ({size:.2f} B)", ours=ours, figures=figures)

    by_row = [(codes, scales, own.expand(rows, 1).contiguous()) for codes, scales, own in nv]
    found = [
        row("largest magnitude", each(quant.largest, sources), _BF16, None),
        row(
            "nvfp4 quantize",
            each(quant.nvfp4_quantize, sources, g),
            _BF16 + _NVFP4,
            OF_COPY,
            _casts(
                partial(rivals.torchao_nvfp4_quantize, sources, g),
                partial(rivals.compressed_tensors_quantize, sources, "NVFP4"),
            ),
        ),
        row(
            "nvfp4 quantize four_over_six",
            each(quant.nvfp4_quantize, sources, g, "four_over_six"),
            _BF16 + _NVFP4,
            None,
        ),
        *(
            row(
                f"mxfp4 quantize {rule}",
                each(quant.mxfp4_quantize, sources, rule),
                _BF16 + _MXFP4,
                OF_COPY,
                _casts(
                    partial(rivals.torchao_mxfp4_quantize, sources, rule),
                    partial(rivals.compressed_tensors_quantize, sources, "MXFP4") if rule == "even" else None,
                ),
            )
            for rule in tables.MXFP4_RULES
        ),
        row("mxfp4 quantize mse", each(quant.mxfp4_quantize, sources, "mse"), _BF16 + _MXFP4, None),
        row(
            "nvfp4 decode bf16",
            each(deq.nvfp4_dequantize, nv, torch.bfloat16),
            _NVFP4 + _BF16,
            OF_COPY,
            _casts(
                partial(rivals.torchao_nvfp4_dequantize, sources, g),
                partial(rivals.compressed_tensors_dequantize, sources, "NVFP4"),
            ),
        ),
        row(
            "nvfp4 decode bf16, a global a row",
            each(deq.nvfp4_dequantize, by_row, torch.bfloat16),
            _NVFP4 + _BF16,
            OF_COPY,
        ),
        row("nvfp4 decode f32", each(deq.nvfp4_dequantize, nv), _NVFP4 + _F32, OF_COPY),
        row(
            "mxfp4 decode bf16",
            each(deq.mxfp4_dequantize, mx, torch.bfloat16),
            _MXFP4 + _BF16,
            OF_COPY,
            _casts(
                partial(rivals.torchao_mxfp4_dequantize, sources),
                partial(rivals.compressed_tensors_dequantize, sources, "MXFP4"),
            ),
        ),
        row("nvfp4 activation, static", each(act.nvfp4_qdq_activation, sources, g), 2 * _BF16, OF_COPY),
        row("nvfp4 activation, by token", each(act.nvfp4_qdq_activation, sources), 2 * _BF16, OF_COPY),
        row("mxfp4 activation", each(act.mxfp4_qdq_activation, sources), 2 * _BF16, OF_COPY),
        row(
            "nvfp4 to mxfp4",
            each(requant.nvfp4_to_mxfp4, nv),
            _NVFP4 + _MXFP4,
            REQUANT_OF_COPY,
            {"by way of bf16": (partial(each, _requant_in_two_steps, nv), TIMES_TWO_STEPS)},
        ),
        row(
            "error sums",
            [partial(err.error_sums, w, *packed) for w, packed in zip(sources, nv, strict=True)],
            _BF16 + _NVFP4,
            ERRORS_OF_COPY,
        ),
        row(
            "error sums, moments, attributions",
            [partial(details.error_details, w, *packed) for w, packed in zip(sources, nv, strict=True)],
            _BF16 + _NVFP4,
            DETAILS_OF_COPY,
        ),
    ]
    title = f"Streams of {count / 2**20:.0f} M weights (bytes read and written a weight)"
    return Section(name="streams", title=title, rows=tuple(found))


def _casts(torchao: Made, compressed_tensors: Made | None) -> dict[str, tuple[Made, float]]:
    found = {"torchao": (torchao, TIMES_TORCHAO)}
    if compressed_tensors is not None:
        found[EAGER] = (compressed_tensors, TIMES_COMPRESSED_TENSORS)
    return found


def _requant_in_two_steps(codes: Tensor, scales: Tensor, global_scale: Tensor) -> object:
    return quant.mxfp4_quantize(deq.nvfp4_dequantize(codes, scales, global_scale, torch.bfloat16))
