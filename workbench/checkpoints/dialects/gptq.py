"""GPTQ (AutoGPTQ, GPTQModel): `qweight`, `qzeros`, `scales`, `g_idx`; config.json quantization_config. Read only.

    <m>.qweight I32 [K * bits / 32, N]   unsigned codes packed along K, low bits first
    <m>.qzeros  I32 [G, N * bits / 32]   zero points packed along N; checkpoint_format "gptq" stores them less one
    <m>.scales  F16 [G, N]               value = (code - zero) * scale
    <m>.g_idx   I32 [K]                  the group of each input; in act-order (desc_act) it is not sorted

The tensors give bits and group size; the config gives what they cannot: whether zeros are stored less one. That one is
added to whole words, as GPTQModel takes it off, so a zero point of 0, stored as 15 with a borrow from its neighbour,
comes back. Source: GPTQModel 7.7.0 (`pack_original`, `convert_gptq_v1_to_v2_format_module`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder
from ..header import StoredTensor
from .base import Declaration, Load, Located, config_table
from .int4 import PackedWordsDialect, from_unsigned, unpack_int32
from .stacks import read_plain

BITS = (4, 8)
ONE_LESS = {"gptq": True, "gptq_v2": False}  # checkpoint_format -> whether zeros are stored less one
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class Packing:
    """bits: of a code. group: inputs that share a scale. one_less: zeros are stored less one."""

    bits: int
    group: int
    one_less: bool


class Gptq(PackedWordsDialect):
    name = "gptq"
    side_file = "quantize_config.json"
    roles: ClassVar[Mapping[str, str]] = {
        "values": "qweight",
        "block_scales": "scales",
        "zero_points": "qzeros",
        "group_index": "g_idx",
    }
    advice = "export the checkpoint again; if config.json names another producer, restore it"

    def detect_tensors(self, folder: Folder) -> bool:
        return any(
            name.endswith(".qweight") and name.removesuffix("qweight") + "g_idx" in folder.tensors
            for name in folder.tensors
        )

    def declare(self, folder: Folder) -> Declaration:
        where, block = self.read_block(folder)
        if block is None:
            return Declaration()
        bits = _check_bits(block.get("bits"), f"{where}.bits")
        _stores_one_less(block, where)
        excludes, modules = [], {}
        for pattern, override in _overrides(block, where).items():
            regex = "re:" + pattern.removeprefix("-:").removeprefix("+:")
            if pattern.startswith("-:"):
                excludes.append(regex)
            elif "bits" in override:
                modules[regex] = f"int{_check_bits(override['bits'], f'{where}.dynamic[{pattern!r}].bits')}_group"
        return Declaration(
            files=(where,),
            algorithm="GPTQ",
            format=f"int{bits}_group",
            excludes=tuple(excludes),
            modules=modules,
        )

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        packing: Packing = located.detail
        n, k = located.shape
        codes_nk = unpack_int32(load(located.parts["values"]).T.contiguous(), packing.bits)
        zeros_gn = unpack_zeros(load(located.parts["zero_points"]), packing)[:, :n]
        scales_ng = load(located.parts["block_scales"]).T
        index = load(located.parts["group_index"]) if "group_index" in located.parts else None
        if index is not None:
            groups = scales_ng.shape[1]
            if k and not 0 <= int(index.min()) <= int(index.max()) < groups:
                raise CheckpointError(
                    f"{located.parts['group_index']} names groups {int(index.min())} to {int(index.max())}, there are"
                    f" {groups}",
                    fix="export the checkpoint again: its inputs cannot be told apart",
                )
            if bool((index == torch.arange(k, dtype=torch.int32) // packing.group).all()):
                index = None  # in order
        return from_unsigned(codes_nk, zeros_gn.T, scales_ng, bits=packing.bits, group=packing.group, group_index=index)

    def find_fault(self, parts: Mapping[str, StoredTensor], stem: str, block: Mapping[str, Any]) -> str:
        scales, zeros = parts["block_scales"], parts["zero_points"]
        (words, n), (groups, columns) = parts["values"].shape, scales.shape
        if n != columns:
            awq = " (packed along N, as AWQ does)" if n * 8 == columns else ""
            return f"{scales.name} has {columns} columns{awq}, expected {n}"
        index = parts.get("group_index")
        if index is None and block.get("desc_act"):
            return f"{stem}g_idx is in no shard, and desc_act says that the groups are not in order"
        if index is not None and (index.dtype != "I32" or len(index.shape) != 1):
            return f"{index.name} is {index.dtype} {list(index.shape)}, expected I32 [K]"
        bits, k, _ = _sizes(parts)
        if bits not in BITS or k * bits != words * 32:
            return f"{words} words for K = {k} inputs are {words * 32 / max(k, 1):g} bits a code; 4 and 8 are read"
        if zeros.shape != (groups, -(-n * bits // 32)):
            return f"{zeros.name} is {list(zeros.shape)}, expected {[groups, -(-n * bits // 32)]}"
        if not groups or -(-k // -(-k // groups)) != groups:
            return f"{scales.name} has {groups} groups, into which K = {k} does not divide"
        return ""

    def describe(
        self, parts: Mapping[str, StoredTensor], block: Mapping[str, Any], where: str
    ) -> tuple[int, tuple[int, int], Any]:
        bits, k, n = _sizes(parts)
        group = -(-k // parts["block_scales"].shape[0])
        return bits, (n, k), Packing(bits=bits, group=group, one_less=_stores_one_less(block, where))


def unpack_zeros(words: torch.Tensor, packing: Packing) -> torch.Tensor:
    """qzeros I32 `[G, W]` to zero points, uint8 `[G, W * 32 / bits]`."""
    if packing.one_less:
        sums = (words.long() + _ONES[packing.bits]) & 0xFFFFFFFF
        words = torch.where(sums >= 1 << 31, sums - (1 << 32), sums).to(torch.int32)
    return unpack_int32(words, packing.bits)


def _check_bits(value: Any, where: str) -> int:
    if value not in BITS or isinstance(value, bool):
        raise CheckpointError(f"{where} is {value!r}, which this version does not read", fix="known: 4 and 8 bits")
    return int(value)


def _stores_one_less(block: Mapping[str, Any], where: str) -> bool:
    stated = next((v for key in ("checkpoint_format", "format") if (v := block.get(key)) not in (None, "")), "gptq")
    if not isinstance(stated, str) or stated not in ONE_LESS:
        raise CheckpointError(
            f"{where}.checkpoint_format is {stated!r}, which this version does not read",
            fix=f"known: {', '.join(ONE_LESS)}; other layouts are a runtime's own, export the checkpoint again",
        )
    return ONE_LESS[stated]


def _overrides(block: Mapping[str, Any], where: str) -> Mapping[str, Mapping[str, Any]]:
    """GPTQModel's `dynamic`: `-:regex` leaves modules alone, `+:regex` or `regex` gives them other settings."""
    table = config_table(block, "dynamic", where, of="module patterns")
    return {pattern: config_table(table, pattern, f"{where}.dynamic", of="settings") for pattern in table}


def _sizes(parts: Mapping[str, StoredTensor]) -> tuple[int, int, int]:
    """bits, K, N: K from g_idx; without it, bits from the width of the zeros."""
    words, n = parts["values"].shape
    index = parts.get("group_index")
    if index is not None:
        k = index.shape[0]
        return (words * 32 // k if k else 0), k, n
    bits = parts["zero_points"].shape[1] * 32 // n if n else 0
    return bits, (words * 32 // bits if bits else 0), n
