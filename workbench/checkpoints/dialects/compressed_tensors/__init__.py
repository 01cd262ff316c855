"""compressed-tensors (llm-compressor, Kimi's own releases): config groups, and tensors whose names say how they pack.

    nvfp4-pack-quantized   weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_global_scale F32 [1]
                           (+ input_global_scale F32 [1]); both globals are divisors
    mxfp4-, mxfp6-pack-quantized   weight_packed U8 [N, K/2] or [N, 3K/4] (E2M3), weight_scale U8 (E8M0) [N, K/32]
    mxfp8-quantized        weight F8_E4M3, weight_scale U8 (E8M0) [N, K/32]
    float-quantized        weight F8_E4M3, weight_scale [1], [N, 1] or [N/r, K/c] (+ input_scale, a multiplier)
    pack-quantized         weight_packed I32, offset binary, the lowest bits first; weight_scale [N, K/g]; weight_shape
                           I64 [2]; weight_zero_point I32 packed along N; weight_g_idx I32 [K]
    int-, naive-quantized  weight I8, weight_scale (+ weight_zero_point I8)

NVFP4's value is e2m1 * (weight_scale / weight_global_scale) in float32. No float32 multiplier gives those bits for
every divisor, so globals are handed out as float64 reciprocals: their product with an E4M3 scale rounds to the same
float32 as the division, and the divisor comes back exactly when it is written. A float32 multiplier of another dialect
is written as the nearest divisor, which moves a quarter of the decoded values by one unit in the last place.

Source: compressed-tensors 0.17.0 and 0.20.1, exports of llm-compressor 0.14.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.formats import QuantizedTensor

from ...files import Folder, Problem
from ..base import Declaration, Dialect, Load, Located, Written, find_config_block, without_config_block
from .groups import declare_plan, read_plan
from .tensors import assemble_tensor, locate_tensors
from .write import WRITABLE, make_config_block, split_tensor


class CompressedTensors(Dialect):
    name = "compressed_tensors"
    writes = WRITABLE

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        if block is None:
            return False
        method = block.get("quant_method")
        return method == "compressed-tensors" or (
            method is None and "config_groups" in block and "quant_algo" not in block
        )

    def detect_tensors(self, folder: Folder) -> bool:
        return any(name.endswith(".weight_packed") for name in folder.tensors)

    def declare(self, folder: Folder) -> Declaration:
        plan = read_plan(folder)
        return Declaration() if plan is None else declare_plan(plan)

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        return locate_tensors(folder, read_plan(folder), problems)

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        return assemble_tensor(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return split_tensor(name, tensor)

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        block = make_config_block(written)
        return {"config.json": {**without_config_block(config), "quantization_config": block}}
