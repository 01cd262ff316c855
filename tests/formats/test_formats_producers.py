"""Our NVFP4 and MXFP4 against bytes that the producers' own tools wrote (named in golden_producers.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.formats import QuantizedTensor, quantize

GOLDEN = json.loads((Path(__file__).parent / "golden_producers.json").read_text())
ROWS = [(format, row) for format in ("nvfp4", "mxfp4") for row in GOLDEN[format]["rows"]]


def from_hex(text: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone().view(dtype)


@pytest.mark.parametrize(("format", "row"), ROWS, ids=[f"{f}-{r['tensor']}" for f, r in ROWS])
def test_codes_and_scales_equal_the_producers(format, row):
    w = from_hex(row["source_bf16"], torch.bfloat16)
    scale_dtype = torch.float8_e4m3fn if format == "nvfp4" else torch.uint8
    theirs = QuantizedTensor(
        format=format,
        codes=from_hex(row["codes"], torch.uint8),
        block_scales=from_hex(row["block_scales"], scale_dtype),
        global_scale=from_hex(row["global_scale_f32"], torch.float32).reshape(()) if format == "nvfp4" else None,
        shape=tuple(w.shape),
    )
    ours = quantize(w, format, global_scale=theirs.global_scale)
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    # Zero blocks: the producers' scale conventions differ (Quark writes byte 1), and so do signs of zeros.
    live = w.unflatten(-1, (-1, ours.spec.block)).abs().amax(-1) > 0
    assert live.any()
    ours_bytes, theirs_bytes = (t.block_scales.view(torch.uint8) for t in (ours, theirs))
    assert torch.equal(ours_bytes[live], theirs_bytes[live])


def test_golden_rows_hold_the_awkward_cases():
    """An all-zero block, subnormal E4M3 scales and an outlier are among the rows; else the test above proves little."""
    scales = [from_hex(r["block_scales"], torch.uint8) for r in GOLDEN["nvfp4"]["rows"]]
    assert any((s == 0x38).any() for s in scales)
    assert any((s < 0x08).any() for s in scales)
    assert any((s == 0x7E).any() for s in scales)
