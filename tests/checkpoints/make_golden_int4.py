"""Make golden_int4.safetensors: linears as GPTQModel 7.7.0 and AutoAWQ 0.2.9 pack them, with their own dequantization.

    pip install torch==2.13.0 gptqmodel==7.7.0 autoawq==0.2.9 && python make_golden_int4.py

Keys: `<case>.` and the stored parts, and `<case>.dequantized`, F16 [K, N], as the tool decodes them.
Zero points run through the whole range, 0 included: its neighbours are what the two GPTQ formats differ in.
Both source archives may be unpacked beside each other and put on PYTHONPATH instead (neither needs its kernels).
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

HERE = Path(__file__).parent
K, N = 128, 32


def quantized(bits: int, group: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [N, K] that lies on its grid, scales [N, G] and zero points [N, G]."""
    generator = torch.Generator().manual_seed(seed)
    top, groups = (1 << bits) - 1, K // group
    scales = (torch.rand(N, groups, generator=generator) * 0.02 + 0.001).half().float()
    zeros = torch.randint(0, top + 1, (N, groups), generator=generator).float()
    zeros[:4] = 0
    codes = torch.randint(0, top + 1, (N, K), generator=generator).float()
    spread = [t.repeat_interleave(group, 1) for t in (zeros, scales)]
    return (codes - spread[0]) * spread[1], scales, zeros


def gptq(name: str, bits: int, group: int, seed: int, *, act_order: bool, one_less: bool) -> dict[str, torch.Tensor]:
    w_nk, scales, zeros = quantized(bits, group, seed)
    g_idx = torch.arange(K, dtype=torch.int32) // group
    if act_order:
        order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
        w_nk, g_idx = w_nk[:, order], g_idx[order].contiguous()
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = w_nk
    module = TorchLinear(
        bits=bits,
        group_size=group,
        sym=False,
        desc_act=act_order,
        in_features=K,
        out_features=N,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    module.pack_original(linear, scales, zeros, g_idx)
    module.post_init()
    values = module.dequantize_weight().half()
    if one_less:
        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=group))
    stored = {key: getattr(module, key).clone() for key in ("qweight", "qzeros", "scales", "g_idx")}
    return {f"{name}.{key}": value.contiguous() for key, value in {**stored, "dequantized": values}.items()}


def awq(name: str, group: int, seed: int) -> dict[str, torch.Tensor]:
    w_nk, scales, zeros = quantized(4, group, seed)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = w_nk
    gemm = load_awq("modules.linear.gemm")
    module = gemm.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    values = gemm.dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, group)
    stored = {key: getattr(module, key) for key in ("qweight", "qzeros", "scales")}
    return {f"{name}.{key}": value.contiguous() for key, value in {**stored, "dequantized": values.half()}.items()}


def load_awq(module: str) -> types.ModuleType:
    """A module of AutoAWQ without its package's imports, which need another transformers."""
    spec = PathFinder.find_spec("awq")  # gptqmodel has put a stub of its own in its place
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear", "awq.modules.triton"):
        stub = types.ModuleType(package)
        stub.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = stub
    return importlib.import_module(f"awq.{module}")


if __name__ == "__main__":
    tensors = {
        **gptq("gptq_v1", 4, 32, 1, act_order=False, one_less=True),
        **gptq("gptq_v2", 4, 32, 1, act_order=False, one_less=False),
        **gptq("gptq_act_order", 4, 32, 2, act_order=True, one_less=True),
        **gptq("gptq_one_group", 4, K, 3, act_order=False, one_less=True),
        **gptq("gptq_8bit", 8, 64, 4, act_order=False, one_less=True),
        **awq("awq", 32, 5),
        **awq("awq_one_group", K, 6),
    }
    metadata = {"tools": "gptqmodel 7.7.0, autoawq 0.2.9", "torch": torch.__version__}
    save_file(tensors, HERE / "golden_int4.safetensors", metadata=metadata)
