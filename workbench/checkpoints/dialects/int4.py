"""Integers packed into int32 words, as GPTQ, AWQ and Quark store them.

    codes = unpack_int32(qweight, 4, order="awq")                         # int32 [..., W] -> uint8 [..., 8 W]
    words = pack_int32(codes, 4, order="awq")                             # the inverse
    q = from_unsigned(codes_nk, zeros_ng, scales_ng, bits=4, group=128)   # the canonical tensor

A word holds 32 / bits codes, its lowest bits first. "sequential" keeps the order of the columns; "awq" fills the eight
slots of a word with the columns 0, 2, 4, 6, 1, 3, 5, 7. Sources: AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`), GPTQModel
7.7.0 (`pack_original`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.formats import QuantizedTensor
from workbench.kernels.elements import pack

# slot of a word -> column of the group of eight that it holds
_SLOTS = {"sequential": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}


def unpack_int32(words: Tensor, bits: int, order: str = "sequential") -> Tensor:
    """int32 words `[..., W]` to codes uint8 `[..., W * 32 / bits]`, for 4 or 8 bits ("awq": 4 only)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    slots: Tensor = (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).to(torch.uint8)
    if order != "sequential":
        slots = slots[..., [_SLOTS[order].index(column) for column in range(8)]]
    return slots.flatten(-2)


def pack_int32(codes: Tensor, bits: int, order: str = "sequential") -> Tensor:
    """Codes uint8 `[..., C]`, C a multiple of 32 / bits, to int32 words `[..., C * bits / 32]`."""
    slots = codes.reshape(*codes.shape[:-1], -1, 32 // bits)[..., list(_SLOTS[order][: 32 // bits])]
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (slots.long() << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def from_unsigned(
    codes_nk: Tensor,
    zeros_ng: Tensor,
    scales_ng: Tensor,
    *,
    bits: int,
    group: int,
    group_index: Tensor | None = None,
) -> QuantizedTensor:
    """The canonical int4_group or int8_group tensor of unsigned codes: value = (code - zero) * scale.

    codes_nk: uint8. zeros_ng: int, scales_ng: float, a column for each group of K. Canonical codes are signed, so the
    middle of the range is taken off codes and zeros alike, which is exact; zeros that then are all 0 are left out.
    """
    middle = 1 << (bits - 1)
    signed = codes_nk ^ middle  # two's complement of code - middle, in the lowest bits
    zeros = zeros_ng.to(torch.int32) - middle
    return QuantizedTensor(
        format=f"int{bits}_group",
        codes=pack(signed, "int4") if bits == 4 else signed.contiguous().view(torch.int8),
        block_scales=scales_ng.float().contiguous(),
        global_scale=None,
        shape=tuple(codes_nk.shape),
        block=(1, group),
        zero_points=zeros.contiguous() if bool(zeros.any()) else None,
        group_index=group_index,
    )
