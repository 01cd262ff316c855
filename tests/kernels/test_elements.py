"""Element codecs: every code against the grid written out by the format's own formula, and packing both ways."""

from __future__ import annotations

import pytest
import torch
from workbench.kernels import elements


@pytest.mark.parametrize("name", elements.ELEMENTS)
def test_packing_is_undone_by_unpacking(name: str) -> None:
    bits = elements.ELEMENTS[name].bits
    codes = torch.randint(0, 1 << bits, (3, 5, 32)).to(torch.uint8)
    if bits == 8:
        codes = codes.view(elements.ELEMENTS[name].dtype)
    packed = elements.pack(codes, name)
    assert packed.shape == (3, 5, elements.packed_columns(name, 32))
    assert torch.equal(elements.unpack(packed, name).view(torch.uint8), codes.view(torch.uint8))


def test_six_bit_codes_are_a_little_endian_bit_stream() -> None:
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert elements.pack(codes, "e2m3").tolist() == [[0b10_000001, 0b0011_0000, 0b000100_00]]


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "normal"), [("e2m3", 7.5, 0.125, 1.0), ("e3m2", 28.0, 0.0625, 0.25)]
)
def test_six_bit_values(name: str, largest: float, smallest: float, normal: float) -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    values = elements.decode(elements.pack(codes, name), name)
    assert values[31] == largest == -values[63]
    assert values[1] == smallest
    assert values[8 if name == "e2m3" else 4] == normal
    assert bool((values[:32].diff() > 0).all())
    assert torch.equal(values[32:], -values[:32])
    assert values[32].signbit()


def test_four_bit_integers_are_twos_complement() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert elements.decode(elements.pack(codes, "int4"), "int4").tolist() == [*range(8), *range(-8, 0)]


def test_a_k_that_fills_no_whole_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="K = 6 elements of 6 bits"):
        elements.packed_columns("e2m3", 6)
