"""NVIDIA ModelOpt: `weight`, `weight_scale`, `weight_scale_2`, `input_scale`; hf_quant_config.json and config.json.

    NVFP4             weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 (amax / 2688)
    W4A8_NVFP4_FP8    the same with blocks of 32 and weight_scale_2 = amax / 448
    NVFP4_AWQ         NVFP4 and pre_quant_scale [K], which multiplies the layer's input
    MXFP4, MXFP8      weight U8 [N, K/2] or F8_E4M3 [N, K], weight_scale U8 (E8M0) [N, K/32]
    FP8               weight F8_E4M3 [N, K], weight_scale F32: one, [N], or by blocks of 128 as [a, 1, b, 1]
    W4A16_AWQ         weight U8 [N/2, K]: two rows a byte, the even row low; weight_scale F32 [N, K/g]
    W8A16, W8A8_SQ    weight I8 [N, K], weight_scale F32 [N]

All scales multiply; value = code * (weight_scale * weight_scale_2). In W4A8_AWQ weight_scale_2 belongs to the FP8 step
after the weight was decoded: it is no part of the weight. NVFP4_SVD, a weight plus a low-rank product, is refused.
`k_scale` and `v_scale` are the KV cache's and stay plain tensors. An all-zero matrix comes as NaN scales (NVFP4) or NaN
bytes (FP8) and is read as such, as the tool itself decodes it. Source: exports by nvidia-modelopt 0.47.0 and its code.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ...files import Folder, Problem
from ..base import Declaration, Dialect, Load, Located, Written
from ..dense import PLAIN_FORMATS
from .config import is_modelopt, read_declaration, write_config
from .tensors import FP8_BLOCK, Layout, locate_tensors, read_tensor, write_tensor

LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
# The only blocks that the config, which names no size, can mean.
_BLOCKS = {"fp8_block": (FP8_BLOCK, FP8_BLOCK), "mxfp8_e4m3": (1, 32)}


class ModelOpt(Dialect):
    name = "modelopt"
    writes = ("nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_tensor", "fp8_channel", "fp8_block")

    def detect(self, folder: Folder) -> bool:
        return is_modelopt(folder)

    def detect_tensors(self, folder: Folder) -> bool:
        def is_ours(name: str) -> bool:
            scale = folder.tensors.get(name + "_scale")
            two_rows_a_byte = scale is not None and scale.dtype in PLAIN_FORMATS
            return two_rows_a_byte or name + "_scale_2" in folder.tensors

        return any(
            info.dtype == "U8" and name.endswith(".weight") and is_ours(name) for name, info in folder.tensors.items()
        )

    def declare(self, folder: Folder) -> Declaration:
        return read_declaration(folder)

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        declared = read_declaration(folder)
        located = locate_tensors(folder, problems, declared=declared.format_of)
        low_rank = [entry for entry in located if self._is_low_rank(entry, folder, declared)]
        if low_rank:
            problems.append(
                Problem(
                    "missing-companion",
                    "error",
                    f"{low_rank[0].name} is NVFP4_SVD: its values are an NVFP4 matrix plus the product of"
                    f" {' and '.join(LOW_RANK)}, which no format here holds ({len(low_rank)} such tensors)",
                    tensor=low_rank[0].name,
                    file=folder.tensors[low_rank[0].name].file,
                    fix="export with another algorithm (NVFP4 or NVFP4_AWQ)",
                )
            )
        second_step = [entry for entry in located if self._has_second_step(entry, folder)]
        if second_step:
            problems.append(
                Problem(
                    "missing-companion",
                    "warning",
                    f"{second_step[0].name} has a weight_scale_2 for W4A8's FP8 step; the weight is read without it"
                    f" ({len(second_step)} such tensors)",
                    tensor=second_step[0].name,
                    file=folder.tensors[second_step[0].name].file,
                    fix="nothing to do: it does not change the weight's values",
                )
            )
        refused = {entry.name for entry in low_rank}
        return [entry for entry in located if entry.name not in refused]

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        return read_tensor(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        if tensor.format not in self.writes:
            raise CheckpointError(
                f"{name} is {tensor.format}, which the modelopt dialect does not write",
                fix=f"convert it to one of: {', '.join(self.writes)}",
            )
        wanted = _BLOCKS.get(tensor.format, tensor.block)
        if tensor.block != wanted:
            raise CheckpointError(
                f"{name} ({tensor.format}) has blocks of {tensor.block}; ModelOpt's config names no size, and readers"
                f" expect {wanted}",
                fix="quantize it again with that block size",
            )
        return write_tensor(name, tensor)

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        return write_config(config, written)

    def _is_low_rank(self, entry: Located, folder: Folder, declared: Declaration) -> bool:
        """By its tensors; by the config where the low-rank factors are missing."""
        stem = entry.name.removesuffix("weight")
        return entry.quantized and (
            any(stem + suffix in folder.tensors for suffix in LOW_RANK) or declared.algorithm == "NVFP4_SVD"
        )

    def _has_second_step(self, entry: Located, folder: Folder) -> bool:
        is_int4 = isinstance(entry.detail, Layout) and entry.detail.row_pairs
        return is_int4 and entry.name + "_scale_2" in folder.tensors
