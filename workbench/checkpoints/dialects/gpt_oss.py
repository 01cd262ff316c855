"""gpt-oss: experts as MXFP4 stacks (`_blocks`, `_scales`, `_bias`); quant_method "mxfp4".

Of a layer with E experts, hidden size H and intermediate size I:

    mlp.experts.gate_up_proj_blocks U8 [E, 2I, H/32, 16]    _scales U8 [E, 2I, H/32]    _bias [E, 2I]
    mlp.experts.down_proj_blocks    U8 [E, H, I/32, 16]     _scales U8 [E, H, I/32]     _bias [E, H]

16 bytes are a block of 32 codes, low nibble first; scales are E8M0 bytes; gate is rows 0::2 of gate_up, up is 1::2. The
canonical entries are `experts.<e>.{gate_proj,up_proj,down_proj}.{weight,bias}`. Writing puts a layer together again:
MXFP4 as above, unquantized experts as the dense stacks of the same model (`experts.gate_up_proj` [E, H, 2I], still
interleaved). A whole layer's experts are in memory then. Only experts can be quantized here: no reader of this layout
knows another quantized module. Source: openai/gpt-oss-20b and -120b; transformers 5.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder, Problem
from ..header import StoredTensor
from .base import Declaration, Dialect, Load, Located, Written, find_config_block, string_list, without_config_block
from .deepseek_fp8 import translate_skip_list
from .dense import locate_plain
from .plain import Plain
from .stacks import LAYOUTS, ExpertSlice, Stack, StackLayout, read_plain, split_expert_stacks

MODEL_TYPE = "gpt_oss"
BLOCK_BYTES = 16
_INTERLEAVED = StackLayout(transposed=False, interleaved=True)
_BLOCKS = re.compile(r"(?P<container>(?:.*\.)?experts)\.(?P<projection>gate_up_proj|down_proj)_blocks")
_MEMBER = re.compile(
    r"(?P<container>(?:.*\.)?experts)\.(?P<expert>\d+)\."
    r"(?P<projection>gate_proj|up_proj|down_proj)\.(?P<parameter>weight|bias)"
)


class GptOss(Dialect):
    name = "gpt_oss"
    writes = ("mxfp4", "bf16", "f32")

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        return block is not None and block.get("quant_method") == "mxfp4"

    def detect_tensors(self, folder: Folder) -> bool:
        return any(_BLOCKS.fullmatch(name) for name in folder.tensors)

    def declare(self, folder: Folder) -> Declaration:
        block = find_config_block(folder.config)
        if block is None:
            return Declaration()
        where = "config.json quantization_config"
        skipped = string_list(block.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
        return Declaration(
            files=(where,),
            algorithm="MXFP4",
            format="mxfp4",
            excludes=translate_skip_list(skipped),
            modules={"*.experts.*": "mxfp4"},
            listed_only=True,
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        located: list[Located] = []
        used: set[str] = set()
        for name, info in folder.tensors.items():
            match = _BLOCKS.fullmatch(name)
            if match is None:
                continue
            scales = name.removesuffix("blocks") + "scales"
            used.update((name, scales))
            fault = _check_blocks(info, folder.tensors.get(scales), scales)
            if fault is not None:
                problems.append(fault)
                continue
            experts, n, groups, _ = info.shape
            stack = Stack(
                name, match["container"], match["projection"], "weight", (experts, n, groups * 32), _INTERLEAVED
            )
            parts = {"values": name, "block_scales": scales}
            located += (
                Located(name=member, format="mxfp4", shape=shape, parts=parts, quantized=True, detail=place)
                for member, shape, place in stack.members()
            )
        rest = (locate_plain(info, problems) for name, info in folder.tensors.items() if name not in used)
        plain = [entry for entry in rest if entry is not None]
        return located + split_expert_stacks(folder, plain, problems, family=LAYOUTS[MODEL_TYPE])

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        place: ExpertSlice = located.detail
        return QuantizedTensor(
            format="mxfp4",
            codes=place.read(load, located.parts["values"]).flatten(1),
            block_scales=place.read(load, located.parts["block_scales"]).view(torch.uint8),
            global_scale=None,
            shape=located.shape,
        )

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        raise CheckpointError(
            f"{name} is {tensor.format}; the gpt_oss dialect stores quantized experts only",
            fix="exclude everything but the experts (--exclude '*self_attn*' and the like), or choose another dialect",
        )

    def bundle(self, name: str) -> str | None:
        match = _MEMBER.fullmatch(name)
        return match["container"] if match else None

    def disassemble_bundle(
        self, key: str, members: Mapping[str, QuantizedTensor | torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One layer's experts to stacks: MXFP4 ones to `_blocks` and `_scales`, dense ones to `[E, K, N]`.

        Raises CheckpointError for a missing expert, experts in two formats, another format than MXFP4, and an input
        scale, which this layout has no place for.
        """
        matches = [match for match in map(_MEMBER.fullmatch, members) if match]
        experts = 1 + max(int(match["expert"]) for match in matches)
        biased = {match["projection"] for match in matches if match["parameter"] == "bias"}
        stored: dict[str, torch.Tensor] = {}
        for projection, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            weights = [_members(key, members, experts, part, "weight") for part in parts]
            quantized = [[w for w in column if isinstance(w, QuantizedTensor)] for column in weights]
            if not any(quantized):
                stored[f"{key}.{projection}"] = _interleave(weights).transpose(1, 2).contiguous()
            elif all(len(column) == experts for column in quantized):
                for suffix, stack in _pack(key, projection, quantized).items():
                    stored[f"{key}.{projection}_{suffix}"] = stack
            else:
                raise CheckpointError(
                    f"some experts of {key} are quantized and others not ({projection}); gpt_oss stores one stack",
                    fix="quantize or exclude all experts of a layer",
                )
            if biased.intersection(parts):
                stored[f"{key}.{projection}_bias"] = _interleave(
                    [_members(key, members, experts, part, "bias") for part in parts]
                )
        return stored

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        if config.get("model_type") != MODEL_TYPE:
            raise CheckpointError(
                f"config.json's model_type is {config.get('model_type')!r}; servers read the gpt_oss layout for"
                f" {MODEL_TYPE} models only",
                fix="choose another dialect (quark writes mxfp4 for any model)",
            )
        if not written.formats:
            return Plain().config_files(config, written)
        block = {"modules_to_not_convert": sorted(set(written.excludes)), "quant_method": "mxfp4"}
        return {"config.json": {**without_config_block(config), "quantization_config": block}}


def _check_blocks(blocks: StoredTensor, scales: StoredTensor | None, scales_name: str) -> Problem | None:
    def fault(check: str, message: str, part: StoredTensor) -> Problem:
        return Problem(
            check, "error", message, tensor=part.name, file=part.file, fix="download or export the checkpoint again"
        )

    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != BLOCK_BYTES or 0 in blocks.shape:
        found = f"{blocks.name} in {blocks.file} is {blocks.dtype} {list(blocks.shape)}"
        return fault("scale-shape", f"{found}, expected packed U8 [experts, N, K/32, {BLOCK_BYTES}]", blocks)
    if "gate_up_proj" in blocks.name and blocks.shape[1] % 2:
        return fault("scale-shape", f"{blocks.name}: {blocks.shape[1]} rows cannot be gate and up interleaved", blocks)
    if scales is None:
        message = f"{blocks.name} is U8 {list(blocks.shape)} in {blocks.file}, but {scales_name} is in no shard"
        return fault("missing-companion", message, blocks)
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != blocks.shape[:3]:
        found = f"{scales.name} in {scales.file} is {scales.dtype} {list(scales.shape)}"
        return fault("scale-shape", f"{found}, expected E8M0 bytes (U8) {list(blocks.shape[:3])}", scales)
    return None


def _members(
    key: str, members: Mapping[str, QuantizedTensor | torch.Tensor], experts: int, projection: str, parameter: str
) -> list[QuantizedTensor | torch.Tensor]:
    names = [f"{key}.{expert}.{projection}.{parameter}" for expert in range(experts)]
    missing = [name for name in names if name not in members]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing: the gpt_oss dialect stores all {experts} experts of a layer as one stack",
            fix="export the source again with all of its experts",
        )
    return [members[name] for name in names]


def _pack(key: str, projection: str, weights: list[list[QuantizedTensor]]) -> dict[str, torch.Tensor]:
    for q in (q for column in weights for q in column):
        if q.format != "mxfp4" or q.input_scale is not None:
            what = "a static input scale" if q.format == "mxfp4" else f"the format {q.format}"
            raise CheckpointError(
                f"{key}: {projection} has {what}; the gpt_oss dialect stores mxfp4 weights and nothing else",
                fix="choose another dialect (quark)",
            )
    codes = _interleave([[q.codes for q in column] for column in weights])
    experts, n, columns = codes.shape
    return {
        "blocks": codes.reshape(experts, n, columns // BLOCK_BYTES, BLOCK_BYTES),
        "scales": _interleave([[q.block_scales for q in column] for column in weights]),
    }


def _interleave(columns: list[list[Any]]) -> torch.Tensor:
    """Tensors `[N, ...]` by projection and expert to one `[E, projections * N, ...]`, rows in turn."""
    stacks = [torch.stack(column) for column in columns]
    return torch.stack(stacks, dim=2).flatten(1, 2).contiguous()
