"""AWQ (AutoAWQ's gemm layout): `qweight`, `qzeros`, `scales`; config.json quantization_config. Read only.

    <m>.qweight I32 [K, N / 8]   unsigned 4-bit codes packed along N, in slots 0, 2, 4, 6, 1, 3, 5, 7
    <m>.qzeros  I32 [G, N / 8]   zero points, packed alike
    <m>.scales  F16 [G, N]       value = (code - zero) * scale

The scaling of the inputs is folded into the layers before, so the weights differ from the source's. `version` tells the
layout; gemv and others pack along K for one kernel and are refused. Source: AutoAWQ 0.2.9 (`WQLinear_GEMM`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder
from ..header import StoredTensor
from .base import Declaration, Load, Located, string_list
from .int4 import PackedWordsDialect, from_unsigned, unpack_int32
from .stacks import read_plain


class Awq(PackedWordsDialect):
    name = "awq"
    side_file = "quant_config.json"
    roles: ClassVar[Mapping[str, str]] = {"values": "qweight", "block_scales": "scales", "zero_points": "qzeros"}
    advice = "export the checkpoint again in AutoAWQ's gemm layout"

    def detect_tensors(self, folder: Folder) -> bool:
        for name, info in folder.tensors.items():
            scales = folder.tensors.get(name.removesuffix("qweight") + "scales")
            if name.endswith(".qweight") and scales is not None and len(info.shape) == len(scales.shape) == 2:
                return info.shape[1] * 8 == scales.shape[1]
        return False

    def declare(self, folder: Folder) -> Declaration:
        where, block = self.read_block(folder)
        if block is None:
            return Declaration()
        bits = block.get("bits", block.get("w_bit", 4))
        version = str(_stated(block, "version", "gemm")).lower()
        packing = _stated(block, "pack_method", "reorder")  # Quark's exports say it
        for key, value, known in (("bits", bits, 4), ("version", version, "gemm"), ("pack_method", packing, "reorder")):
            if value != known:
                raise CheckpointError(
                    f"{where}.{key} is {value!r}, which this version does not read", fix=f"known: {known}"
                )
        skipped = string_list(block.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
        return Declaration(
            files=(where,),
            algorithm="AWQ",
            format="int4_group",
            excludes=tuple(f"*{part}*" for part in skipped),  # AutoAWQ looks for them anywhere in a name
        )

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        codes_kn, zeros_gn = (
            unpack_int32(load(located.parts[role]), 4, order="awq") for role in ("values", "zero_points")
        )
        scales_gn = load(located.parts["block_scales"])
        group = located.shape[1] // scales_gn.shape[0]
        return from_unsigned(codes_kn.T, zeros_gn.T, scales_gn.T, bits=4, group=group)

    def find_fault(self, parts: Mapping[str, StoredTensor], stem: str, block: Mapping[str, Any]) -> str:
        scales, zeros = parts["block_scales"], parts["zero_points"]
        (k, words), (groups, n) = parts["values"].shape, scales.shape
        if words * 8 != n:
            gptq = " (packed along K, as GPTQ does)" if words == n else ""
            return f"{scales.name} has {n} columns{gptq}, expected {words * 8}"
        if zeros.shape != (groups, words):
            return f"{zeros.name} is {list(zeros.shape)}, expected {[groups, words]}"
        if not groups or k % groups or k % 2:
            return f"{scales.name} has {groups} groups, into which K = {k} does not divide"
        return ""

    def describe(
        self, parts: Mapping[str, StoredTensor], block: Mapping[str, Any], where: str
    ) -> tuple[int, tuple[int, int], Any]:
        return 4, (parts["block_scales"].shape[1], parts["values"].shape[0]), None


def _stated(block: Mapping[str, Any], key: str, default: str) -> Any:
    value = block.get(key)
    return default if value is None else value
