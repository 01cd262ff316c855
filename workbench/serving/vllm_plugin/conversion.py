"""One tensor to the plan's format, and decoding, on the device where the weights go. Imports no vLLM.

    packed = convert_tensor(name, stored, plan, settings, meter)
    values = decode_tensor(name, stored, torch.bfloat16, meter)

On a GPU four-bit tensors are converted and decoded by its kernels, which give the CPU's bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.formats import PACKED_FORMATS
from workbench.kernels import triton_dispatch
from workbench.kernels.tables import MXFP4_RULES, ScaleRule

from .meter import LoadMeter
from .settings import ModulePlan, PluginSettings


def convert_tensor(name: str, stored: Any, plan: ModulePlan, settings: PluginSettings, meter: LoadMeter) -> Any:
    """`stored` in the plan's format: itself, or quantize(effective(stored)) in float32 (requant). Raises FormatError
    for a value that the format cannot hold."""
    from workbench.formats import get_format, quantize

    if not isinstance(stored, Tensor):
        as_stored = not plan.converts(settings)
        if as_stored and stored.pre_quant_scale is not None:
            raise FormatError(
                f"{name} has a scale of the layer's input (AWQ), which packed layers do not apply",
                fix="use backend=reference, or requant with a scale rule, which folds it into the weight",
            )
        if as_stored:
            return stored
    with meter.reading():
        stored = _on_device(stored, meter.device)
    with meter.converting(name):
        rule = get_format(plan.weight).rule(settings.rule or None)
        packed = None
        if not isinstance(stored, Tensor) and (stored.format, plan.weight) == ("nvfp4", "mxfp4"):
            packed = _requantized(stored, rule, meter)
        if packed is None:
            values = stored if isinstance(stored, Tensor) else stored.effective(torch.float32)
            values = values.to(meter.device).float()
            packed = quantize(values, plan.weight, rule.value, name=name)
            meter.holds(None if isinstance(stored, Tensor) else stored, values, packed)
    return packed


def decode_tensor(name: str, stored: Any, dtype: torch.dtype, meter: LoadMeter) -> Tensor:
    """`stored`, a QuantizedTensor, decoded exactly in float32, then cast once to `dtype`."""
    with meter.reading():
        stored = _on_device(stored, meter.device)
    with meter.converting(name):
        decoded: Tensor = _decoded(stored, dtype)
        meter.holds(stored, decoded)
    return decoded


def _requantized(stored: Any, rule: ScaleRule, meter: LoadMeter) -> Any:
    """NVFP4 to MXFP4 by codes: no weight is decoded on a GPU. None where a value needs the general way: scales that
    are not finite (it says which tensor), an input scale to fold in, a global scale that is no float32."""
    from workbench.formats import QuantizedTensor

    g = stored.global_scale
    if rule not in MXFP4_RULES or stored.pre_quant_scale is not None or g.dtype != torch.float32:
        return None
    if stored.shape[-1] % 32 or not bool((stored.block_scales.float() * (6.0 * g)).isfinite().all()):
        return None
    codes, scale_bytes = triton_dispatch.nvfp4_to_mxfp4(stored.codes, stored.block_scales, g, rule)
    packed = QuantizedTensor(
        format="mxfp4", codes=codes, block_scales=scale_bytes, global_scale=None, shape=stored.shape
    )
    values = None if codes.is_cuda else torch.empty(stored.shape, dtype=torch.float32, device="meta")
    meter.holds(stored, values, packed)  # a CPU decodes on the way
    return packed


def _decoded(stored: Any, dtype: torch.dtype) -> Tensor:
    """`stored.effective(dtype)`, by the GPU's kernels where it lies there."""
    plain = stored.pre_quant_scale is None and _on_gpu(stored.codes)
    if plain and stored.format == "mxfp4":
        return triton_dispatch.mxfp4_dequantize(stored.codes, stored.block_scales, dtype)
    if plain and stored.format == "nvfp4" and stored.global_scale.dtype == torch.float32:
        return triton_dispatch.nvfp4_dequantize(stored.codes, stored.block_scales, stored.global_scale, dtype)
    return stored.effective(dtype)


def _on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def _on_device(stored: Any, device: torch.device) -> Any:
    """`stored` on `device`, if the device has kernels for it: plain tensors and the packed formats. Others are decoded
    where they were read."""
    if device.type == "cpu":
        return stored
    if isinstance(stored, Tensor):
        return stored.to(device)
    if stored.format not in PACKED_FORMATS:
        return stored
    moved = {
        f.name: value.to(device)
        for f in dataclasses.fields(stored)
        if isinstance(value := getattr(stored, f.name), Tensor)
    }
    return dataclasses.replace(stored, **moved)
