"""Make golden_rules.json: chosen awkward rows, quantized by the producers' own functions.

    pip install torch==2.13.0 nvidia-modelopt==0.47.0 compressed-tensors==0.19.0 amd-quark==0.13 torchao==0.18.0
    git clone https://github.com/microsoft/microxcaling
    PYTHONPATH=microxcaling python tests/formats/make_golden_rules.py

No part of the test run: it needs the five tools (and a C++ compiler, for Quark). The functions called are those that
the tools' exports call; where a step lies outside a callable function it is noted beside the call.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Rows of 64 columns. "near": block maxima around 1, so that all rows of one NVFP4 tensor stay live.
K = 64
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.1]


def near() -> Tensor:
    generator = torch.Generator().manual_seed(20)
    rows = [torch.tensor(TIES * 4)]  # every tie of E2M1 at scale 1, both signs, and a value that rounds to zero
    zeros = torch.zeros(K)
    zeros[32:48] = -0.0
    zeros[48:] = torch.tensor(TIES) * 0.01
    rows.append(zeros)  # zero blocks of 16 and 32, minus zeros, a block of small values
    noise = torch.randn(3, K, generator=generator)
    # Block maxima with the mantissas where the rules part: 1, 1.5, 1.75, 1.875, 1.9375 and their bf16 neighbours.
    for i, mantissas in enumerate([(1.0, 1.5), (1.75, 1.5078125), (1.9921875, 1.7421875)]):
        row = noise[i] * 0.2
        row[3], row[40] = mantissas[0], -mantissas[1]
        rows.append(row)
    rows.append(torch.randn(K, generator=generator) * 2.0**-13)  # subnormal E4M3 scales under the shared global
    return torch.stack(rows)


def extreme() -> Tensor:
    """For formats without a global scale: subnormal numbers, powers of two beside them, and the largest numbers."""
    generator = torch.Generator().manual_seed(21)
    scales = [2.0**-133, 2.0**-126, 2.0**-124, 2.0**-100, 2.0**60, 2.0**120]
    return torch.stack([torch.randn(K, generator=generator) * s for s in scales])


def ulps() -> Tensor:
    """float32 only: block maxima at 1, 1.5, 1.75 and one unit in the last place to either side, at several octaves."""
    rows = []
    for exponent in (0, -6):
        for centre in (1.0, 1.5, 1.75):
            row = torch.linspace(-0.5, 0.5, K) * 2.0**exponent
            middle = torch.tensor(centre * 2.0**exponent)
            row[0] = torch.nextafter(middle, torch.tensor(0.0))
            row[32] = torch.nextafter(middle, torch.tensor(10.0))
            rows.append(row)
    return torch.stack(rows)


INPUTS: dict[str, Tensor] = {"near": near().bfloat16(), "extreme": extreme().bfloat16(), "ulps": ulps()}

# ---- ModelOpt --------------------------------------------------------------------------------------------------------


def modelopt(format: str, w: Tensor) -> dict[str, Tensor]:
    from modelopt.torch.export import quant_utils
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    amax = w.float().abs().amax()
    if format == "nvfp4":
        q, scales, global_scale = NVFP4QTensor.quantize(w, 16)
        return {"codes": q._quantized_data, "block_scales": scales, "global_scale": global_scale}
    if format == "nvfp4_w4a8":
        q, scales, global_scale = NVFP4QTensor.quantize(w, 32, weights_scaling_factor_2=amax / 448.0)
        return {"codes": q._quantized_data, "block_scales": scales, "global_scale": global_scale}
    if format == "mxfp4":
        q, scales = MXFP4QTensor.quantize(w, 32)
        return {"codes": q._quantized_data, "block_scales": scales.reshape(w.shape[0], -1)}
    if format == "mxfp8_e4m3":
        q, scales = MXFP8QTensor.quantize(w)
        return {"codes": q._quantized_data, "block_scales": scales}
    if format == "fp8_tensor":
        codes = quant_utils.to_quantized_weight(w, amax / 448.0, quant_utils.QUANTIZATION_FP8)
        return {"codes": codes, "block_scales": (amax / 448.0).reshape(1, 1)}
    if format == "fp8_channel":
        scales = w.float().abs().amax(1) / 448.0
        codes = quant_utils.to_quantized_weight(w, scales, quant_utils.QUANTIZATION_FP8_PC_PT)
        return {"codes": codes, "block_scales": scales.unsqueeze(-1)}
    if format == "fp8_block":
        q, scales = FP8QTensor.quantize(w.float(), block_sizes={-1: 32, -2: 4})
        return {"codes": q._quantized_data, "block_scales": scales}
    scales = quant_utils.get_scaling_factor_from_weight(w, 32 if format == "int4_group" else 0)
    if format == "int8_channel":
        codes = quant_utils.to_quantized_weight(w, scales, quant_utils.QUANTIZATION_INT8_WO)
        return {"codes": codes, "block_scales": scales.unsqueeze(-1)}
    two_rows = quant_utils.pack_int4_in_uint8(w, scales, 32)  # rows 2i and 2i + 1 in one byte
    codes = torch.stack((two_rows & 0xF, two_rows >> 4), dim=1).flatten(0, 1)
    return {"codes": codes[:, 0::2] | (codes[:, 1::2] << 4), "block_scales": scales}


# ---- compressed-tensors, as llm-compressor's minmax observer calls it ------------------------------------------------


def llm_compressor(format: str, w: Tensor, symmetric: bool = True) -> dict[str, Tensor]:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = {
        "nvfp4": dict(
            num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
        ),
        "mxfp4": dict(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
        "mxfp8_e4m3": dict(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
        "fp8_tensor": dict(num_bits=8, type="float", strategy="tensor"),
        "fp8_channel": dict(num_bits=8, type="float", strategy="channel"),
        "fp8_block": dict(num_bits=8, type="float", strategy="block", block_structure=[4, 32]),
        "int4_group": dict(num_bits=4, type="int", strategy="group", group_size=32),
        "int8_group": dict(num_bits=8, type="int", strategy="group", group_size=32),
        "int8_channel": dict(num_bits=8, type="int", strategy="channel"),
    }[format]
    args = QuantizationArgs(symmetric=symmetric, zp_dtype=None if symmetric else torch.int8, **arguments)
    rows, columns = {"nvfp4": (1, 16), "fp8_tensor": (w.shape[0], K), "fp8_block": (4, 32)}.get(format, (1, 32))
    if format.endswith("channel"):
        columns = K
    padded = torch.nn.functional.pad(w, (0, 0, 0, -w.shape[0] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(0, (-1, rows))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    global_scale = generate_gparam(low.amin().reshape(1), high.amax().reshape(1)) if format == "nvfp4" else None
    scales, zero_points = calculate_qparams(low, high, args, global_scale=global_scale)
    scales = scales.reshape(low.shape)
    codes = quantize(
        w, scales, zero_points.reshape(low.shape), args,
        global_scale=global_scale,
    )  # fmt: skip
    out: dict[str, Tensor] = {}
    if format in ("nvfp4", "mxfp4"):
        out["codes"] = pack_fp4_to_uint8(codes)
    elif "fp8" in format:
        out["codes"] = codes.to(torch.float8_e4m3fn)
    else:
        codes = codes.to(torch.int8)
        out["codes"] = (
            codes if "8" in format else ((codes[:, 0::2] & 0xF) | ((codes[:, 1::2] & 0xF) << 4)).view(torch.uint8)
        )
    if format.startswith("mx"):
        out["block_scales"] = (torch.log2(scales.float()) + 127).to(torch.uint8)  # as its MX compressor stores them
    else:
        out["block_scales"] = scales.to(torch.float8_e4m3fn) if format == "nvfp4" else scales.float()
    if global_scale is not None:
        out["divisor"] = global_scale.reshape(())
    if not symmetric:
        out["zero_points"] = zero_points.reshape(low.shape).to(torch.int32)
    return out


# ---- AMD Quark -------------------------------------------------------------------------------------------------------


def quark_specs(format: str) -> object:
    from quark.torch.quantization.config import config as c

    if format == "nvfp4":
        from quark.torch import LLMTemplate

        return LLMTemplate.get("llama").get_config(scheme="nvfp4").global_quant_config.weight
    mx = dict(ch_axis=-1, group_size=32, scale_format="e8m0", scale_calculation_mode="even", is_dynamic=False)
    return {
        "mxfp4": lambda: c.FP4PerGroupSpec(**mx),
        "mxfp6_e2m3": lambda: c.FP6E2M3PerGroupSpec(**mx),
        "mxfp6_e3m2": lambda: c.FP6E3M2PerGroupSpec(**mx),
        "fp8_tensor": lambda: c.FP8E4M3PerTensorSpec(scale_type="float", is_dynamic=False),
        "fp8_channel": lambda: c.FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False),
        "int4_group": lambda: c.Int4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False),
        "int8_group": lambda: c.Int8PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=False),
        "int8_channel": lambda: c.Int8PerChannelSpec(symmetric=True, ch_axis=0, is_dynamic=False),
    }[format]().to_quantization_spec()


def quark_f2f(format: str, w: Tensor) -> dict[str, Tensor]:
    from quark.torch.quantization import file2file_quantization as f2f

    stored: dict[str, Tensor] = {}
    if format == "nvfp4":
        f2f._scale_quantize_weight(w, "w", "w", quark_specs(format), stored, "", "cpu")
        return {
            "codes": stored["w"],
            "block_scales": stored["w_scale"],
            "global_scale": stored["w_scale_2"].reshape(()),
        }
    f2f._single_stage_quantize_weight(w, "w", "w", quark_specs(format), stored, "")
    return _quark_parts(format, w, stored["w"], stored["w_scale"], reorder=False)


def quark(format: str, w: Tensor) -> dict[str, Tensor]:
    """A loaded model's path: observe, realign the block scales (NVFP4), export through the real quantizer."""
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.quantization.post_calibration import realign_single_sequential_quantizer
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    specs = quark_specs(format)
    if format.startswith("mx"):
        return quark_f2f(format, w)  # the same functions
    observed = FakeQuantizeBase.get_fake_quantize(specs, device=torch.device("cpu"))
    observed.enable_observer()
    observed.disable_fake_quant()
    observed(w)
    if format == "nvfp4":
        realign_single_sequential_quantizer(observed)
    real = get_real_quantizer(specs, observed, True, True, w.dtype, torch.device("cpu"))
    codes = real.to_real_quantize_params(w)
    if format == "nvfp4":
        global_scale = real[1].scale.float().reshape(())
        real.maybe_convert_and_transpose_scale()
        return {"codes": codes, "block_scales": real[0].scale, "global_scale": global_scale}
    return _quark_parts(format, w, codes, real.scale, reorder=True)


def _quark_parts(format: str, w: Tensor, stored: Tensor, scales: Tensor, reorder: bool) -> dict[str, Tensor]:
    if format.startswith("mx"):
        return {"codes": stored, "block_scales": scales.reshape(w.shape[0], -1)}
    if format.startswith("fp8"):
        return {"codes": stored, "block_scales": scales.float().reshape((1, 1) if format == "fp8_tensor" else (-1, 1))}
    if format == "int8_channel":
        return {"codes": stored.to(torch.int8).reshape(w.shape), "block_scales": scales.float().reshape(-1, 1)}
    if format == "int8_group":
        codes = stored.to(torch.int8).reshape(K, -1).T  # stored transposed
        return {"codes": codes, "block_scales": scales.float().reshape(w.shape[0], -1)}
    order = [0, 2, 4, 6, 1, 3, 5, 7] if reorder else list(range(8))  # int32 words of eight rows
    words = stored.reshape(K, -1)
    nibbles = torch.stack([(words >> (4 * order.index(i))) & 0xF for i in range(8)], dim=-1).flatten(-2)
    codes = nibbles[:, : w.shape[0]].T.to(torch.uint8)
    return {
        "codes": (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous(),
        "block_scales": scales.float().reshape(w.shape[0], -1),
    }


# ---- torchao ---------------------------------------------------------------------------------------------------------


def torchao(format: str, w: Tensor) -> dict[str, Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    if format == "nvfp4":
        global_scale = per_tensor_amax_to_scale(w.abs().amax())
        scales, codes = nvfp4_quantize(w, 16, global_scale)
        return {"codes": codes, "block_scales": scales, "global_scale": global_scale}
    element = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }[format]
    scales, codes = to_mx(w, element, 32, ScaleCalculationMode.RCEIL)  # the mode of its inference configs
    if format.startswith("mxfp6"):  # unpacked here; four codes in three bytes, little-endian, as in checkpoints
        c = codes.reshape(w.shape[0], -1, 4).int()
        word = c[..., 0] | (c[..., 1] << 6) | (c[..., 2] << 12) | (c[..., 3] << 18)
        codes = torch.stack([(word >> shift) & 0xFF for shift in (0, 8, 16)], dim=-1).flatten(-2).to(torch.uint8)
    return {"codes": codes, "block_scales": scales}


# ---- microxcaling ----------------------------------------------------------------------------------------------------


def microxcaling(format: str, w: Tensor) -> dict[str, Tensor]:
    """Its quantize-dequantize keeps no codes: the values that it gives, computed in float32."""
    from mx.mx_ops import _quantize_mx

    element = "fp4_e2m1" if format == "mxfp4" else format.removeprefix("mx")
    return {"values": _quantize_mx(w.float(), 8, element, axes=[-1], block_size=32, round="nearest")}


# ---- file ------------------------------------------------------------------------------------------------------------

MX = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"]
FP8 = ["fp8_tensor", "fp8_channel"]
Tool = Callable[[str, Tensor], dict[str, Tensor]]
CASES: list[tuple[str, str, Tool, list[str]]] = [
    ("modelopt", "nvidia-modelopt", modelopt,
     ["nvfp4", "nvfp4_w4a8", "mxfp4", "mxfp8_e4m3", *FP8, "fp8_block", "int4_group", "int8_channel"]),
    ("llm_compressor", "compressed-tensors", llm_compressor,
     ["nvfp4", "mxfp4", "mxfp8_e4m3", *FP8, "fp8_block", "int4_group", "int8_group", "int8_channel"]),
    ("llm_compressor_asym", "compressed-tensors", functools.partial(llm_compressor, symmetric=False),
     ["int4_group", "int8_group", "int8_channel"]),
    ("quark", "amd-quark", quark, ["nvfp4", *MX[:3], *FP8, "int4_group", "int8_group", "int8_channel"]),
    ("quark_f2f", "amd-quark", quark_f2f, ["nvfp4", *FP8, "int4_group", "int8_group", "int8_channel"]),
    ("torchao", "torchao", torchao, ["nvfp4", *MX]),
    ("microxcaling", "microxcaling", microxcaling, MX),
]  # fmt: skip


def main() -> None:
    versions = {"microxcaling": "3b429a8 (mx_ops.py), 4adf988 (elemwise_ops.py)"}  # no distribution: its commits
    cases = []
    for rule, package, tool, formats in CASES:
        for format in formats:
            names = ["near"] + (["extreme"] if format == "mxfp4" else []) + (["ulps"] if format in MX[::3] else [])
            for name in names:
                parts = tool(format, INPUTS[name].clone())
                cases.append(
                    {
                        "format": format,
                        "rule": rule,
                        "tool": f"{package} {versions.get(package) or importlib.metadata.version(package)}",
                        "input": name,
                        **{part: hexed(value) for part, value in parts.items()},
                    }
                )
    inputs = {n: {"dtype": str(w.dtype), "shape": list(w.shape), "hex": hexed(w)} for n, w in INPUTS.items()}
    lines = [json.dumps(case) for case in cases]
    text = '{"inputs": ' + json.dumps(inputs) + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (Path(__file__).parent / "golden_rules.json").write_text(text)


def hexed(tensor: Tensor) -> str:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


if __name__ == "__main__":
    main()
