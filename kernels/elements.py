"""Element codecs: E2M1, E2M3, E3M2, E4M3, E5M2 floats and INT4, INT8 integers, exact in float32.

    codes = encode(x, "e2m3")             # one code an element
    values = decode(pack(codes, "e2m3"), "e2m3")  # float32 [..., K]

Packed forms, K the last dimension: 4-bit elements two a byte, the even index low; 6-bit elements four in three bytes,
a little-endian bit stream; 8-bit elements one a byte, in their own torch dtype. Sources: OCP Microscaling Formats (MX)
v1.0, 5.3.1 (E4M3, E5M2), 5.3.2 (E2M3, E3M2), 5.3.3 (E2M1), 5.3.4 (INT8).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import e2m1_values, unpack_fp4
from .tables import Ties, Zeros


@dataclass(frozen=True, slots=True)
class Element:
    """bits: stored bits. max: largest magnitude. emax: exponent of the largest power of two. mantissa_bits: explicit
    ones of a float (0: an integer). dtype: of packed codes."""

    name: str
    bits: int
    max: float
    emax: int
    mantissa_bits: int
    dtype: torch.dtype


ELEMENTS = {
    e.name: e
    for e in (
        Element("e2m1", 4, 6.0, 2, 1, torch.uint8),
        Element("e2m3", 6, 7.5, 2, 3, torch.uint8),
        Element("e3m2", 6, 28.0, 4, 2, torch.uint8),
        Element("e4m3", 8, 448.0, 8, 3, torch.float8_e4m3fn),
        Element("e5m2", 8, 57344.0, 15, 2, torch.float8_e5m2),
        Element("int4", 4, 8.0, 3, 0, torch.uint8),  # two's complement, -8..7
        Element("int8", 8, 128.0, 7, 0, torch.int8),
    )
}


def packed_columns(element: str, k: int) -> int:
    """Stored columns of K elements. Raises ValueError for a K that the packing does not divide."""
    bits = ELEMENTS[element].bits
    if k * bits % 8:
        raise ValueError(f"K = {k} elements of {bits} bits do not fill whole bytes")
    return k * bits // 8


def unpack(packed: Tensor, element: str) -> Tensor:
    """Packed codes `[..., C]` to one code an element, `[..., K]`: uint8 for 4- and 6-bit elements; 8-bit ones as
    they are."""
    bits = ELEMENTS[element].bits
    if bits == 8:
        return packed
    if bits == 4:
        return unpack_fp4(packed)
    b0, b1, b2 = (packed.unflatten(-1, (-1, 3))[..., i].int() for i in range(3))
    word = b0 | (b1 << 8) | (b2 << 16)
    return torch.stack([(word >> shift) & 0x3F for shift in (0, 6, 12, 18)], dim=-1).flatten(-2).to(torch.uint8)


def pack(codes: Tensor, element: str) -> Tensor:
    """The inverse of `unpack`."""
    bits = ELEMENTS[element].bits
    if bits == 8:
        return codes
    if bits == 4:
        return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()
    c = codes.unflatten(-1, (-1, 4)).int()
    word = c[..., 0] | (c[..., 1] << 6) | (c[..., 2] << 12) | (c[..., 3] << 18)
    return torch.stack([(word >> shift) & 0xFF for shift in (0, 8, 16)], dim=-1).flatten(-2).to(torch.uint8)


def encode(x: Tensor, element: str, ties: Ties = Ties.EVEN, zeros: Zeros = Zeros.SIGNED) -> Tensor:
    """Round float32 `x` to codes of `element`, one an element: nearest, saturating at the largest magnitude.

    Returns uint8 for 4- and 6-bit elements, the element's own dtype for 8-bit ones. ties and zeros: of floats; integers
    go to the even neighbour and have one zero. NaN has no code and is the caller's to refuse.
    """
    spec = ELEMENTS[element]
    x = x.float()
    if not spec.mantissa_bits:
        rounded = x.round().clamp(-spec.max, spec.max - 1).to(torch.int8)
        return rounded if spec.bits == 8 else (rounded & 0xF).view(torch.uint8)
    midpoints = _midpoints(element).to(x.device)
    magnitude = x.abs()
    code = torch.bucketize(magnitude, midpoints)  # a value on a midpoint takes the lower neighbour
    if ties is not Ties.ZERO:
        upper = torch.bucketize(magnitude, midpoints, right=True)
        code = upper if ties is Ties.AWAY else torch.where(code % 2 == 1, upper, code)
    negative = torch.signbit(x) if zeros is Zeros.SIGNED else x < 0
    if zeros is Zeros.POSITIVE:
        negative = negative & (code > 0)
    elif zeros is Zeros.NEGATIVE:
        negative = negative | (x == 0)
    code = code + (negative.to(code.dtype) << (spec.bits - 1))
    return code.to(torch.uint8).view(spec.dtype)


def decode(packed: Tensor, element: str) -> Tensor:
    """Packed codes `[..., C]` to float32 values `[..., K]`."""
    if element == "e2m1":
        return e2m1_values(unpack_fp4(packed))
    if element in ("e2m3", "e3m2"):
        return _six_bit_values(element).to(packed.device)[unpack(packed, element).long()]
    if element == "int4":
        codes = unpack_fp4(packed).to(torch.int8)
        return torch.where(codes >= 8, codes - 16, codes).float()
    return packed.float()


@functools.cache
def _midpoints(element: str) -> Tensor:
    """Midpoints between neighbouring magnitudes of a float element, exact in float32."""
    spec = ELEMENTS[element]
    codes = torch.arange(1 << (spec.bits - 1), dtype=torch.int32).to(torch.uint8)
    values = decode(pack(codes.view(spec.dtype), element), element)
    magnitudes = values[values <= spec.max]  # drops infinity and NaN
    return (magnitudes[1:] + magnitudes[:-1]) / 2


@functools.cache
def _six_bit_values(element: str) -> Tensor:
    """64 values: sign, exponent (bias 1 for E2M3, 3 for E3M2), mantissa; no infinities and no NaN (OCP MX 5.3.2)."""
    mantissa_bits, bias = {"e2m3": (3, 1), "e3m2": (2, 3)}[element]
    values = []
    for code in range(64):
        exponent, mantissa = (code & 0x1F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        magnitude = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        values.append(-magnitude if code & 0x20 else magnitude)
    return torch.tensor(values, dtype=torch.float32)
