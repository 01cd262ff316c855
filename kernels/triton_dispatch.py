"""The reference's functions on whatever device their tensor lies: one import for code that serves both.

    from workbench.kernels import triton_dispatch as kernels
    codes, scales, global_scale = kernels.nvfp4_quantize(w_nk)

A CPU tensor goes to `cpu`, a GPU's to the Triton kernels, and to plain torch where Triton is missing. Signatures
are `cpu`'s; results are the reference's, bit for bit, whichever runs.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from . import cpu, reference
from .tables import ScaleRule


def nvfp4_quantize(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """As `cpu.nvfp4_quantize`."""
    if _on_triton(w):
        from . import triton_quantize

        return triton_quantize.nvfp4_quantize(w, global_scale)
    return (cpu if _on_cpu(w) else reference).nvfp4_quantize(w, global_scale)


def nvfp4_dequantize(
    packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As `cpu.nvfp4_dequantize`."""
    if _on_triton(packed):
        from . import triton_dequantize

        return triton_dequantize.nvfp4_dequantize(packed, scales, global_scale, dtype)
    if _on_cpu(packed):
        return cpu.nvfp4_dequantize(packed, scales, global_scale, dtype)
    return reference.nvfp4_dequantize(packed, scales, global_scale).to(dtype)


def nvfp4_qdq_activation(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """As `cpu.nvfp4_qdq_activation`."""
    if _on_triton(x):
        from . import triton_activation

        return triton_activation.nvfp4_qdq_activation(x, global_scale)
    return (cpu if _on_cpu(x) else reference).nvfp4_qdq_activation(x, global_scale)


def mxfp4_quantize(w: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> tuple[Tensor, Tensor]:
    """As `cpu.mxfp4_quantize`."""
    if _on_triton(w):
        from . import triton_quantize

        return triton_quantize.mxfp4_quantize(w, rule)
    return (cpu if _on_cpu(w) else reference).mxfp4_quantize(w, rule)


def mxfp4_dequantize(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `cpu.mxfp4_dequantize`."""
    if _on_triton(packed):
        from . import triton_dequantize

        return triton_dequantize.mxfp4_dequantize(packed, scale_bytes, dtype)
    if _on_cpu(packed):
        return cpu.mxfp4_dequantize(packed, scale_bytes, dtype)
    return reference.mxfp4_dequantize(packed, scale_bytes).to(dtype)


def mxfp4_qdq_activation(x: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> Tensor:
    """As `cpu.mxfp4_qdq_activation`."""
    if _on_triton(x):
        from . import triton_activation

        return triton_activation.mxfp4_qdq_activation(x, rule)
    return (cpu if _on_cpu(x) else reference).mxfp4_qdq_activation(x, rule)


def nvfp4_to_mxfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor, rule: ScaleRule | str = ScaleRule.EVEN
) -> tuple[Tensor, Tensor]:
    """MXFP4 codes and scale bytes of an NVFP4 tensor, as by decoding it to float32 and quantizing that."""
    if _on_triton(packed):
        from . import triton_requant

        return triton_requant.nvfp4_to_mxfp4(packed, scales, global_scale, rule)
    return mxfp4_quantize(nvfp4_dequantize(packed, scales, global_scale), rule)


def _on_cpu(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _on_triton(t: Tensor) -> bool:
    return t.device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
