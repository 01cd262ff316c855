"""Make golden_torchao.safetensors and golden_torchao.json: weights as torchao 0.18.0 quantizes and flattens them.

    pip install torch==2.13.0 torchao==0.18.0 safetensors && python make_golden_torchao.py

Shapes that fill no whole scale tile (130 rows, 3 or 5 blocks), a zero block and an outlier. The JSON holds the SHA-256
of the values that each subclass's own `dequantize` gives, float32 little-endian.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torchao
from safetensors.torch import save_file
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference

HERE = Path(__file__).parent


def weight(n: int, k: int, seed: int) -> torch.Tensor:
    w = (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()
    w[1, :32] = 0.0
    w[2, 5] = 3.0
    return w


def from_config(w_nk: torch.Tensor, config: Any) -> torch.Tensor:
    module = torch.nn.Sequential(torch.nn.Linear(w_nk.shape[1], w_nk.shape[0], bias=False, dtype=w_nk.dtype))
    module[0].weight.data.copy_(w_nk)
    quantize_(module, config)
    return module[0].weight.data


def mx(w_nk: torch.Tensor, element: torch.dtype, *, swizzled: bool) -> torch.Tensor:
    return MXTensor.to_mx(
        w_nk, element, 32, ScaleCalculationMode.RCEIL, KernelPreference.AUTO, None, is_swizzled_scales=swizzled
    )


def main() -> None:
    w = weight(130, 96, 1)
    amax = weight(130, 80, 2).abs().amax()
    tensors = {
        "mxfp4_swizzled": mx(w, torch.float4_e2m1fn_x2, swizzled=True),
        "mxfp4_linear": mx(w, torch.float4_e2m1fn_x2, swizzled=False),
        "mxfp8_e4m3": mx(w, torch.float8_e4m3fn, swizzled=True),
        "nvfp4_swizzled": NVFP4Tensor.to_nvfp4(
            weight(130, 80, 2), per_tensor_scale=per_tensor_amax_to_scale(amax), is_swizzled_scales=True
        ),
        "nvfp4_single_level": from_config(weight(16, 80, 3), NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False)),
        "fp8_channel": from_config(weight(16, 96, 4), Float8WeightOnlyConfig()),
        "int8_channel": from_config(weight(16, 96, 5), Int8WeightOnlyConfig(version=2)),
        "int4_group_asymmetric": from_config(
            weight(16, 96, 6),
            IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC, version=2
            ),
        ),
    }
    named = {f"model.layers.0.{name}.weight": tensor for name, tensor in tensors.items()}
    data, metadata = flatten_tensor_state_dict(named)
    save_file({k: v.contiguous() for k, v in data.items()}, HERE / "golden_torchao.safetensors", metadata=metadata)
    rows = {}
    for name, tensor in named.items():
        try:
            values = tensor.dequantize(torch.float32)
        except TypeError:  # IntxUnpackedToInt8Tensor: in its own dtype only
            values = tensor.dequantize()
        rows[name] = {
            "type": type(tensor).__name__,
            "dtype": str(values.dtype).removeprefix("torch."),
            "sha256_f32_le": hashlib.sha256(values.float().contiguous().numpy().tobytes()).hexdigest(),
        }
    golden = {"tool": f"torchao {torchao.__version__}, torch {torch.__version__}", "tensors": rows}
    (HERE / "golden_torchao.json").write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main()
