"""AWQ (AutoAWQ's gemm layout): `qweight`, `qzeros`, `scales`; config.json quantization_config. Read only.

    <m>.qweight I32 [K, N / 8]   unsigned 4-bit codes packed along N, in slots 0, 2, 4, 6, 1, 3, 5, 7
    <m>.qzeros  I32 [G, N / 8]   zero points, packed alike
    <m>.scales  F16 [G, N]       value = (code - zero) * scale

The scaling of the inputs is folded into the layers before, so the weights differ from the source's. `version` tells the
layout; gemv and others pack along K for one kernel and are refused. Source: AutoAWQ 0.2.9 (`WQLinear_GEMM`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder, Problem
from ..header import StoredTensor
from .base import Declaration, Dialect, Load, Located, Written, find_config_block, string_list
from .dense import PLAIN_FORMATS, locate_plain
from .int4 import from_unsigned, unpack_int32
from .stacks import read_plain, split_expert_stacks

SIDE_FILE = "quant_config.json"
_ROLES = {"values": "qweight", "block_scales": "scales", "zero_points": "qzeros"}


class Awq(Dialect):
    name = "awq"
    writes = ()

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        if block is None:
            return (folder.path / SIDE_FILE).is_file() and self.detect_tensors(folder)
        return block.get("quant_method") == "awq"

    def detect_tensors(self, folder: Folder) -> bool:
        for name, info in folder.tensors.items():
            scales = folder.tensors.get(name.removesuffix("qweight") + "scales")
            if name.endswith(".qweight") and scales is not None and len(info.shape) == len(scales.shape) == 2:
                return info.shape[1] * 8 == scales.shape[1]
        return False

    def declare(self, folder: Folder) -> Declaration:
        block = find_config_block(folder.config)
        where = "config.json quantization_config" if block is not None else SIDE_FILE
        block = folder.read_json(SIDE_FILE) if block is None else block
        if block is None:
            return Declaration()
        bits = block.get("bits", block.get("w_bit", 4))
        version = str(block.get("version") or "gemm").lower()
        packing = block.get("pack_method") or "reorder"  # Quark's exports say it
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

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        located: list[Located] = []
        used: set[str] = set()
        for name, info in folder.tensors.items():
            if not name.endswith(".qweight"):
                continue
            stem = name.removesuffix("qweight")
            parts = {role: folder.tensors[stem + s] for role, s in _ROLES.items() if stem + s in folder.tensors}
            used.update(part.name for part in parts.values())
            fault = _find_fault(parts, stem)
            if fault:
                problems.append(
                    Problem(
                        "scale-shape" if len(parts) == 3 else "missing-companion",
                        "error",
                        f"{name} in {info.file} is {info.dtype} {list(info.shape)}: {fault}",
                        tensor=name,
                        file=info.file,
                        fix="export the checkpoint again in AutoAWQ's gemm layout",
                    )
                )
                continue
            k, n = info.shape[0], parts["block_scales"].shape[1]
            located.append(
                Located(
                    name=stem + "weight",
                    format="int4_group",
                    shape=(n, k),
                    parts={role: part.name for role, part in parts.items()},
                    quantized=True,
                )
            )
        plain = (locate_plain(info, problems) for name, info in folder.tensors.items() if name not in used)
        return located + split_expert_stacks(folder, (entry for entry in plain if entry is not None), problems)

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        codes_kn, zeros_gn = (
            unpack_int32(load(located.parts[role]), 4, order="awq") for role in ("values", "zero_points")
        )
        scales_gn = load(located.parts["block_scales"])
        group = located.shape[1] // scales_gn.shape[0]
        return from_unsigned(codes_kn.T, zeros_gn.T, scales_gn.T, bits=4, group=group)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        raise CheckpointError("the awq dialect is read, not written", fix="choose another dialect")

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        raise CheckpointError("the awq dialect is read, not written", fix="choose another dialect")


def _find_fault(parts: Mapping[str, StoredTensor], stem: str) -> str:
    """Why these parts are no AWQ matrix; "" if they are."""
    missing = [_ROLES[role] for role in ("block_scales", "zero_points") if role not in parts]
    if missing:
        return f"{stem}{missing[0]} is in no shard"
    weight, scales, zeros = parts["values"], parts["block_scales"], parts["zero_points"]
    if {weight.dtype, zeros.dtype} != {"I32"} or scales.dtype not in PLAIN_FORMATS:
        return f"with {scales.dtype} scales and {zeros.dtype} zeros; expected I32 words and float scales"
    if {len(part.shape) for part in (weight, scales, zeros)} != {2}:
        return "qweight, scales and qzeros are not all matrices"
    (k, words), (groups, n) = weight.shape, scales.shape
    if words * 8 != n:
        gptq = " (packed along K, as GPTQ does)" if words == n else ""
        return f"{scales.name} has {n} columns{gptq}, expected {words * 8}"
    if zeros.shape != (groups, words):
        return f"{zeros.name} is {list(zeros.shape)}, expected {[groups, words]}"
    if not groups or k % groups or k % 2:
        return f"{scales.name} has {groups} groups, into which K = {k} does not divide"
    return ""
