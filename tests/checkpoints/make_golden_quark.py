"""Write golden_quark.safetensors and golden_quark.json: weights packed and decoded by amd-quark's own quantizers.

    pip install amd-quark==0.13 torch==2.13.0 safetensors && python make_golden_quark.py

One weight a case, `<case>.weight` with its companions, as `export_safetensors` writes a Linear's; the specs and the
SHA-256 of the tool's float32 values (little endian) are in the JSON. Compares with the formats of which the test
checkpoints hold no export.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import quark.torch.kernel
import torch
from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
from quark.torch.quantization.config import config as specs
from quark.torch.quantization.config.template import LLMTemplate
from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
from quark.torch.utils import create_pack_method
from safetensors.torch import save_file

N, K = 16, 64


def make_weight(rows: int, seed: int) -> torch.Tensor:
    """BF16 [rows, K]: normal, with a zero block, an outlier and a tiny row."""
    w = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * 0.05
    w[0, :32] = 0
    w[1, 5] = 3.0
    w[2] *= 1e-4
    return w.bfloat16()


def scheme(name: str) -> specs.QTensorConfig:
    return LLMTemplate._SCHEME_COLLECTION.get_scheme(name).config.weight


def eight_bits(kind: Any, *, symmetric: bool = True, **axes: int) -> specs.QTensorConfig:
    return kind(
        symmetric=symmetric, is_dynamic=False, scale_type="float", round_method="half_even", **axes
    ).to_quantization_spec()


def export(spec: specs.QTensorConfig, w: torch.Tensor, reorder: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(companions by suffix, decoded float32): the steps of the export in memory, and of its import."""
    quantizer = FakeQuantizeBase.get_fake_quantize(spec, device=torch.device("cpu"))
    quantizer.enable_observer()
    quantizer.disable_fake_quant()
    quantizer(w)
    cpu = torch.device("cpu")
    real = get_real_quantizer(spec, quantizer, reorder, True, w.dtype, cpu)
    packed = real.to_real_quantize_params(w)
    real.maybe_convert_and_transpose_scale()
    real.pack_zero_point()
    parts = {"": packed, "_scale": real.scale}
    if getattr(real, "zero_point", None) is not None:
        parts["_zero_point"] = real.zero_point
    reader = get_real_quantizer(spec, None, reorder, True, torch.float32, cpu)
    reader.scale = real.scale
    if "_zero_point" in parts:
        reader.zero_point = parts["_zero_point"]
    return parts, reader(packed).float()


def export_blocks(w: torch.Tensor, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """FP8 in blocks of [rows, 32]; the tool only copies such weights from a source, and decodes them."""
    blocks = w.float().unflatten(0, (-1, rows)).unflatten(-1, (-1, 32))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).clamp(-448, 448).to(torch.float8_e4m3fn)
    values = quark.torch.kernel.dequantize("fp8_e4m3", codes, scales, None, 0, 0, "per_block")
    return {"": codes, "_scale": scales}, values


def export_legacy(w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """dtype mx of fp4: scale and codes in one tensor, by the tool's own pack method."""
    blocks = w.float().unflatten(-1, (-1, 32))
    scales = 2.0 ** (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (blocks / scales).abs().unsqueeze(-1).sub(values).abs().argmin(-1)
    codes = values[nearest] * blocks.sign()
    method = create_pack_method(None, "mx", "fp4")
    packed = method.pack(torch.cat([scales, codes], dim=-1).flatten(-2), False)
    decoded = method.unpack(packed, False).unflatten(-1, (-1, 33))
    return {"": packed}, (decoded[..., :1] * decoded[..., 1:]).flatten(-2)


def main() -> None:
    cases = {
        "fp8_tensor": (scheme("fp8"), N, True),
        "fp8_channel": (scheme("ptpc_fp8"), N, True),
        "mxfp6_e2m3": (scheme("mxfp6_e2m3"), N, True),
        "int4_group_order": (scheme("int4_wo_32"), N, False),
        "int4_group_rows": (scheme("int4_wo_32"), 13, True),
        "int4_channel_rows": (scheme("int4_wo_per_channel"), N, True),
        "uint4_group": (scheme("uint4_wo_32"), N, True),
        "uint4_channel": (scheme("uint4_wo_per_channel"), N, True),
        "int8_tensor": (scheme("int8"), N, True),
        "int8_channel": (eight_bits(specs.Int8PerChannelSpec, ch_axis=0), N, True),
        "int8_group": (eight_bits(specs.Int8PerGroupSpec, ch_axis=-1, group_size=32), N, True),
        "uint8_group": (eight_bits(specs.Uint8PerGroupSpec, symmetric=False, ch_axis=-1, group_size=32), N, True),
    }
    tensors, table = {}, {}
    for seed, (name, (spec, rows, reorder)) in enumerate(cases.items()):
        parts, values = export(spec, make_weight(rows, seed), reorder)
        table[name] = {"weight": spec.to_dict(), "pack_method": "reorder" if reorder else "order"}
        store(name, parts, values, tensors, table)
    parts, values = export_blocks(make_weight(N, 98), 8)
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [8, 32], "symmetric": True}
    table["fp8_block"] = {"weight": spec, "pack_method": "reorder"}
    store("fp8_block", parts, values, tensors, table)
    parts, values = export_legacy(make_weight(N, 99))
    table["legacy_mx"] = {
        "weight": {"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32},
        "pack_method": "reorder",
    }
    store("legacy_mx", parts, values, tensors, table)
    here = Path(__file__).parent
    save_file(tensors, here / "golden_quark.safetensors", metadata={"tool": "amd-quark 0.13, torch 2.13.0"})
    (here / "golden_quark.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def store(name: str, parts: dict[str, torch.Tensor], values: torch.Tensor, tensors: dict, table: dict) -> None:
    tensors.update({f"{name}.weight{suffix}": part.contiguous() for suffix, part in parts.items()})
    table[name]["shape"] = list(values.shape)
    table[name]["sha256_f32_le"] = hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
