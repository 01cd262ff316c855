"""What others run for the same work on the same tensors: torchao, compressed-tensors, and vLLM's Marlin and fused MoE.

Every function returns the calls to be timed, or raises where the rival is not installed or does not take the input;
`cuda_timing.measure_made` turns that into the table's reason. Rivals are imported inside the functions. Read against
torchao 0.18, compressed-tensors 0.17 and vLLM 0.26. A product is compared with ours before it is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workbench.bench.cuda_timing import Call
from workbench.kernels.tables import MXFP4_BLOCK, NVFP4_BLOCK

_ALIKE = 0.03  # of the norm: two bfloat16 results of one product, summed in another order and rounded between


class DifferentResult(Exception):
    """A rival ran, but computed something else: its time says nothing."""


# ---- casts -----------------------------------------------------------------------------------------------------------


def torchao_nvfp4_quantize(sources: Sequence[Tensor], global_scale: Tensor) -> list[Call]:
    """The body of `NVFP4Tensor.to_nvfp4`, compiled, with the global scale given."""
    quantize = torch.compile(_torchao("nvfp4_tensor").nvfp4_quantize)
    return [partial(quantize, w, NVFP4_BLOCK, global_scale) for w in sources]


def torchao_nvfp4_dequantize(sources: Sequence[Tensor], global_scale: Tensor) -> list[Call]:
    """`NVFP4Tensor.dequantize` to bfloat16, compiled."""
    module = _torchao("nvfp4_tensor")
    packed = [module.NVFP4Tensor.to_nvfp4(w, per_tensor_scale=global_scale) for w in sources]
    decode = torch.compile(lambda t: t.dequantize(torch.bfloat16))
    return [partial(decode, t) for t in packed]


def torchao_mxfp4_quantize(sources: Sequence[Tensor], rule: str) -> list[Call]:
    """The body of `MXTensor.to_mx`, compiled."""
    module = _torchao("mx_tensor")
    mode = module.ScaleCalculationMode[rule.upper()]
    quantize = torch.compile(lambda w: module.to_mx(w, torch.float4_e2m1fn_x2, MXFP4_BLOCK, mode))
    return [partial(quantize, w) for w in sources]


def torchao_mxfp4_dequantize(sources: Sequence[Tensor]) -> list[Call]:
    """The body of `MXTensor.dequantize` to bfloat16, compiled."""
    module = _torchao("mx_tensor")
    packed = [module.to_mx(w, torch.float4_e2m1fn_x2, MXFP4_BLOCK) for w in sources]
    decode = torch.compile(
        lambda scale, data: module.to_dtype(data, scale, torch.float4_e2m1fn_x2, MXFP4_BLOCK, torch.bfloat16)
    )
    return [partial(decode, *pair) for pair in packed]


def _torchao(module: str) -> Any:
    return importlib.import_module(f"torchao.prototype.mx_formats.{module}")


def compressed_tensors_quantize(sources: Sequence[Tensor], preset: str) -> list[Call]:
    """Block scales from each block's minimum and maximum, as llm-compressor's observer takes them, then the compressor,
    all eager. preset: NVFP4 (its global scale is computed before, and not timed) or MXFP4 (scales of `even`)."""
    return [_compressed(w, preset)[0] for w in sources]


def compressed_tensors_dequantize(sources: Sequence[Tensor], preset: str) -> list[Call]:
    """The decompressor, eager, to bfloat16."""
    return [_compressed(w, preset)[1] for w in sources]


def _compressed(w: Tensor, preset: str) -> tuple[Call, Call]:
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    schemes = importlib.import_module("compressed_tensors.quantization.quant_scheme")
    compressor = getattr(importlib.import_module("compressed_tensors.compressors"), f"{preset}PackedCompressor")
    scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
    global_scale = None
    if preset == "NVFP4":
        global_scale = utils.generate_gparam(w.amin().view(1), w.amax().view(1))

    def quantize() -> Any:
        blocks = w.view(w.shape[0], -1, scheme.weights.group_size)
        scales, _ = utils.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=global_scale)
        parts = {"weight": w, "weight_scale": scales, "weight_global_scale": global_scale}
        return compressor.compress(parts, scheme)

    packed = quantize()
    return quantize, lambda: compressor.decompress(packed, scheme)


# ---- products --------------------------------------------------------------------------------------------------------


class Marlin:
    """vLLM's Marlin FP4 product of packed weights, laid out once: `Marlin(weights, "nvfp4").calls(x, expected)`."""

    def __init__(self, weights: Sequence[tuple[Tensor, Tensor, Tensor | None]], weight_format: str) -> None:
        """weights: codes `[N, K/2]`, block scales, and the global scale (nvfp4; None for mxfp4), on the card."""
        self._module = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
        self._layers = [self._laid_out(*w) for w in weights]

    def _laid_out(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Any:
        layer: Any = torch.nn.Module()  # what vLLM's function fills in
        layer.output_size_per_partition, columns = codes.shape
        layer.input_size_per_partition = columns * 2
        layer.params_dtype = torch.bfloat16
        layer.weight = _fixed(codes)
        layer.weight_scale = _fixed(scales)
        if global_scale is not None:
            layer.weight_global_scale = _fixed(global_scale.reshape(()))
        self._module.prepare_fp4_layer_for_marlin(layer)
        return layer

    def calls(self, x: Tensor, expected: Tensor) -> list[Call]:
        """One call a weight for `x` `[M, K]`. expected: our product with the first weight.

        Raises DifferentResult where Marlin's is another.
        """
        calls: list[Callable[[], Tensor]] = [
            partial(
                self._module.apply_fp4_marlin_linear,
                x,
                layer.weight,
                layer.weight_scale,
                getattr(layer, "weight_global_scale", None),
                layer.workspace,
                layer.output_size_per_partition,
                layer.input_size_per_partition,
            )
            for layer in self._layers
        ]
        _check_alike(calls[0](), expected)
        return list(calls)


Routing = tuple[Tensor, Tensor]  # weights float32 [T, k] and expert ids [T, k]


class MarlinExperts:
    """vLLM's Marlin MoE on NVFP4 experts. It takes one global scale for gate and up, so both must have the same."""

    def __init__(self, w13: Sequence[Tensor], w2: Sequence[Tensor]) -> None:
        """Codes `[E, 2I, H/2]` and `[E, H, I/2]`, their block scales, and a global scale an expert, float32 `[E]`."""
        utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
        layer = SimpleNamespace(
            num_experts=w13[0].shape[0],
            hidden_size=w2[0].shape[1],
            intermediate_size_per_partition=w2[0].shape[2] * 2,
            params_dtype=torch.bfloat16,
        )
        self._parts = utils.prepare_nvfp4_moe_layer_for_marlin(layer, *w13, *w2, True)
        self._workspace = layer.workspace

    def calls(self, x: Tensor, routings: Sequence[Routing], expected: Tensor) -> list[Call]:
        """One call a routing for `x` `[T, H]`. expected: our result of the first. Raises DifferentResult."""
        moe = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.marlin_moe")
        kind = importlib.import_module("vllm.scalar_type").scalar_types.float4_e2m1f.id
        w13, scale13, global13, w2, scale2, global2 = self._parts

        def call(weights: Tensor, ids: Tensor) -> Tensor:
            return moe.fused_marlin_moe(
                x, w13, w2, None, None, scale13, scale2, weights, ids, kind,
                global_scale1=global13, global_scale2=global2, workspace=self._workspace,
            )  # fmt: skip

        calls = [partial(call, weights, ids.int()) for weights, ids in routings]
        _check_alike(calls[0](), expected)
        return list(calls)


def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, routings: Sequence[Routing], expected: Tensor | None
) -> list[Call]:
    """vLLM's fused MoE on bfloat16 experts `[E, 2I, H]` and `[E, H, I]`: the decoded weights of ours."""
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    calls = [partial(module.fused_experts, x, w13, w2, weights, ids.int()) for weights, ids in routings]
    if expected is not None:
        _check_alike(calls[0](), expected)
    return list(calls)


def _check_alike(found: Tensor, expected: Tensor) -> None:
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= _ALIKE:
        raise DifferentResult(f"its result is {error:.2g} of ours away, in the norm")


def _fixed(t: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(t, requires_grad=False)
