"""MXFP4 to NVFP4: exact where the scales reach, counted where they do not."""

from __future__ import annotations

import pytest
import torch

from workbench.errors import FormatError
from workbench.formats import QuantizedTensor, mxfp4_to_nvfp4, quantize

ONE = 127  # E8M0 byte of 2**0


def mxfp4(codes: list[list[int]], exponents: list[int]) -> QuantizedTensor:
    """One row; a block of 32 for each exponent, filled with its codes over and over."""
    nibbles = torch.tensor([(c * 32)[:32] for c in codes], dtype=torch.uint8).flatten()
    return QuantizedTensor(
        format="mxfp4",
        codes=(nibbles[0::2] | (nibbles[1::2] << 4)).unsqueeze(0),
        block_scales=torch.tensor([[ONE + k for k in exponents]], dtype=torch.uint8),
        global_scale=None,
        shape=(1, 32 * len(exponents)),
    )


@pytest.mark.parametrize("top", [0, -100, 118])
def test_a_spread_of_17_octaves_is_exact(top: int) -> None:
    q = mxfp4([[7, 1, 15, 9, 8, 0], [1, 9, 3, 6], [0]], [top, top - 17, top - 60 if top > -60 else top])
    cast, lossy = mxfp4_to_nvfp4(q)
    assert lossy == 0
    assert torch.equal(cast.codes, q.codes)
    assert torch.equal(cast.dequantize(), q.dequantize())
    assert cast.global_scale == 2.0 ** (top - 8)
    assert cast.block_scales.float().tolist() == [[256.0, 256.0, 2.0**-9, 2.0**-9, 1.0, 1.0]]


def test_below_that_blocks_are_rounded_and_counted() -> None:
    """At 18 octaves the codes are halved: 1.0 and 6.0 stay (0.5, 3.0), 0.5 does not (0.25 rounds to 0)."""
    q = mxfp4([[7], [2, 7], [1], [2]], [0, -18, -18, -30])
    cast, lossy = mxfp4_to_nvfp4(q)
    assert lossy == 2
    value, want = cast.dequantize()[0].unflatten(0, (4, 32)), q.dequantize()[0].unflatten(0, (4, 32))
    assert torch.equal(value[:2], want[:2])
    assert torch.count_nonzero(value[2:]) == 0


def test_requantizing_the_cast_gives_the_source_back() -> None:
    q = quantize(torch.randn(16, 512, generator=torch.Generator().manual_seed(0)), "mxfp4", "even")
    cast, lossy = mxfp4_to_nvfp4(q)
    assert lossy == 0
    assert torch.equal(quantize(cast.dequantize(), "mxfp4", "even").dequantize(), q.dequantize())


def test_an_all_zero_matrix_and_what_is_refused() -> None:
    cast, lossy = mxfp4_to_nvfp4(quantize(torch.zeros(2, 64), "mxfp4"))
    assert lossy == 0
    assert torch.count_nonzero(cast.dequantize()) == 0
    with pytest.raises(FormatError, match="the tensor is nvfp4"):
        mxfp4_to_nvfp4(cast)
    with pytest.raises(FormatError, match="NaN scales"):
        mxfp4_to_nvfp4(mxfp4([[1]], [128]))
