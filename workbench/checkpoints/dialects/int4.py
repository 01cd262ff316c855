"""Integers packed into int32 words, as GPTQ, AWQ and Quark store them, and what GPTQ and AWQ have in common.

    codes = unpack_int32(qweight, 4, order="awq")                         # int32 [..., W] -> uint8 [..., 8 W]
    words = pack_int32(codes, 4, order="awq")                             # the inverse
    q = from_unsigned(codes_nk, zeros_ng, scales_ng, bits=4, group=128)   # the canonical tensor

A word holds 32 / bits codes, its lowest bits first. "sequential" keeps the order of the columns; "awq" fills the eight
slots of a word with the columns 0, 2, 4, 6, 1, 3, 5, 7. Sources: AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`), GPTQModel
7.7.0 (`pack_original`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.formats import QuantizedTensor
from workbench.kernels.elements import pack

from ..files import Folder, Problem
from ..header import StoredTensor
from .base import Dialect, Located, find_config_block
from .dense import PLAIN_FORMATS, locate_plain
from .stacks import split_expert_stacks

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


class PackedWordsDialect(Dialect):
    """`<m>.qweight`, `<m>.qzeros` and `<m>.scales` beside each other: GPTQ and AWQ. Read only.

    side_file: the config of exports whose config.json has no quantization_config. roles: what is stored, by suffix.
    advice: the way out of a matrix that cannot be read.
    """

    writes = ()
    side_file: str
    roles: ClassVar[Mapping[str, str]]
    advice: str

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        if block is None:
            return (folder.path / self.side_file).is_file() and self.detect_tensors(folder)
        return block.get("quant_method") == self.name

    def read_block(self, folder: Folder) -> tuple[str, dict[str, Any] | None]:
        """Where the config block stands, and the block; None where there is none. Raises CheckpointError."""
        block = find_config_block(folder.config)
        if block is not None:
            return "config.json quantization_config", block
        return self.side_file, folder.read_json(self.side_file)

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        where, block = self.read_block(folder)
        located: list[Located] = []
        used: set[str] = set()
        for name, info in folder.tensors.items():
            if not name.endswith(".qweight"):
                continue
            stem = name.removesuffix("qweight")
            parts = {role: folder.tensors[stem + s] for role, s in self.roles.items() if stem + s in folder.tensors}
            used.update(part.name for part in parts.values())
            lacking = _find_lacking(parts, stem)
            fault = lacking or _find_mistyped(parts) or self.find_fault(parts, stem, block or {})
            if fault:
                problems.append(
                    Problem(
                        "missing-companion" if lacking else "scale-shape",
                        "error",
                        f"{name} in {info.file} is {info.dtype} {list(info.shape)}: {fault}",
                        tensor=name,
                        file=info.file,
                        fix=self.advice,
                    )
                )
                continue
            bits, shape, detail = self.describe(parts, block or {}, where)
            located.append(
                Located(
                    name=stem + "weight",
                    format=f"int{bits}_group",
                    shape=shape,
                    parts={role: part.name for role, part in parts.items()},
                    quantized=True,
                    detail=detail,
                )
            )
        plain = (locate_plain(info, problems) for name, info in folder.tensors.items() if name not in used)
        return located + split_expert_stacks(folder, (entry for entry in plain if entry is not None), problems)

    @abstractmethod
    def find_fault(self, parts: Mapping[str, StoredTensor], stem: str, block: Mapping[str, Any]) -> str:
        """Why these three matrices (and what else there is by role) are none of this dialect's; "" if they are."""

    @abstractmethod
    def describe(
        self, parts: Mapping[str, StoredTensor], block: Mapping[str, Any], where: str
    ) -> tuple[int, tuple[int, int], Any]:
        """Bits of a code, [N, K], and the `detail` that `assemble` needs."""


def _find_lacking(parts: Mapping[str, StoredTensor], stem: str) -> str:
    missing = [suffix for role, suffix in (("block_scales", "scales"), ("zero_points", "qzeros")) if role not in parts]
    return f"{stem}{missing[0]} is in no shard" if missing else ""


def _find_mistyped(parts: Mapping[str, StoredTensor]) -> str:
    weight, scales, zeros = parts["values"], parts["block_scales"], parts["zero_points"]
    if {weight.dtype, zeros.dtype} != {"I32"} or scales.dtype not in PLAIN_FORMATS:
        return f"with {scales.dtype} scales and {zeros.dtype} zeros; expected I32 words and float scales"
    if {len(part.shape) for part in (weight, scales, zeros)} != {2}:
        return "qweight, scales and qzeros are not all matrices"
    return ""
