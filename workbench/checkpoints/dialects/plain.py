"""Plain checkpoints: BF16, F16 or F32 tensors under their own names, no quantization block.

Experts that are fused into 3-D stacks are handed out one by one (`stacks.py`); fused 2-D matrices of a dense layer
(`gate_up_proj`, `qkv_proj`) stay the one matrix that servers keep them as.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder, Problem
from .base import Declaration, Dialect, Load, Located, Written, find_config_block, without_config_block
from .dense import locate_plain
from .stacks import read_plain, split_expert_stacks

_TORCH_DTYPE = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class Plain(Dialect):
    name = "plain"
    writes = ("bf16", "f32")

    def detect(self, folder: Folder) -> bool:
        return False  # what no other dialect claims

    def detect_tensors(self, folder: Folder) -> bool:
        return False

    def declare(self, folder: Folder) -> Declaration:
        if find_config_block(folder.config) is not None:
            raise CheckpointError(
                f"{folder.path / 'config.json'} has a quantization_config; it is not plain", fix="leave out the dialect"
            )
        return Declaration()

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        located = (locate_plain(info, problems) for info in folder.tensors.values())
        return split_expert_stacks(folder, (entry for entry in located if entry is not None), problems)

    def assemble(self, located: Located, load: Load) -> torch.Tensor:
        return read_plain(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        raise CheckpointError(
            f"{name} is {tensor.format}; a plain checkpoint holds no quantized tensors", fix="decode it (--format bf16)"
        )

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
        return {"config.json": {**without_config_block(config), key: _TORCH_DTYPE[written.dtype]}}
