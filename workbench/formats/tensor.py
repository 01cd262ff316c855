"""The one canonical quantized tensor; dialects are translated to and from it at the border.

    q = quantize(w_nk, "nvfp4")
    w_hat_nk = q.dequantize()

Blocks run along K, the last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import FormatError
from workbench.kernels.tables import NVFP4_MIN_GLOBAL

from .table import Format, get_format


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """A quantized matrix (or stack of matrices) in canonical form.

    format: name in FORMATS. codes: packed codes, low nibble = even K index, `[..., N, K/2]` uint8.
    block_scales: linear row-major, `[..., N, K/block]`; float8_e4m3fn for nvfp4, E8M0 bytes (uint8) for mxfp4.
    global_scale: float32 **decode multiplier** (scalar, or broadcastable to block_scales where fused shards keep their
    own), None where the format has none. shape: logical `[..., N, K]`.
    input_scale: float32 decode multiplier for static activation quantization, None when the checkpoint has none.
    """

    format: str
    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor | None
    shape: tuple[int, ...]
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        spec = get_format(self.format)
        *lead, k = self.shape
        _expect("codes", self.codes, (*lead, k // 2), torch.uint8)
        scale_dtype = torch.float8_e4m3fn if spec.has_global else torch.uint8
        _expect("block_scales", self.block_scales, (*lead, k // spec.block), scale_dtype)
        if spec.has_global and self.global_scale is None:
            raise FormatError(f"{self.format} needs a global scale", fix="pass the float32 decode multiplier")

    @property
    def spec(self) -> Format:
        return get_format(self.format)

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes + block scales + global scale."""
        parts = [self.codes, self.block_scales] + ([self.global_scale] if self.global_scale is not None else [])
        return sum(t.numel() * t.element_size() for t in parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values `[..., N, K]`, exact in float32, then cast once to `dtype`."""
        if self.codes.is_cpu:
            return self.spec.dequantize_cpu(self.codes, self.block_scales, self.global_scale, dtype)
        return self.spec.dequantize(self.codes, self.block_scales, self.global_scale).to(dtype)


def quantize(
    w: Tensor, format: str, rule: str | None = None, *, global_scale: Tensor | None = None, name: str = "tensor"
) -> QuantizedTensor:
    """Quantize `w` `[..., N, K]` (any float dtype) with blocks along K.

    `name` is the tensor's name for messages. Raises FormatError for K not divisible by the block, a non-finite value,
    an unknown format or rule.
    """
    spec = get_format(format)
    chosen = spec.rule(rule)
    if w.dim() < 1 or w.shape[-1] % spec.block:
        raise FormatError(
            f"{name}: K = {w.shape[-1] if w.dim() else 0} is not a multiple of {format}'s block of {spec.block}"
            f" (shape {tuple(w.shape)})",
            fix="exclude this tensor (--exclude), or choose a format whose block divides K",
        )
    if not bool(torch.isfinite(w).all()):
        bad = int((~torch.isfinite(w)).sum())
        raise FormatError(
            f"{name}: {bad} of {w.numel()} values are NaN or infinite; no FP4 code represents them",
            fix="repair the source checkpoint, or exclude this tensor (--exclude)",
        )
    if global_scale is not None and not bool((global_scale.isfinite() & (global_scale >= NVFP4_MIN_GLOBAL)).all()):
        raise FormatError(
            f"{name}: the given global scale {global_scale.min().item()} is no finite multiplier of at least 2**-118",
            fix="give amax / (6 * 448) of the tensor or of its fused group",
        )
    codes, scales, used_global = spec.quantize(w, chosen, global_scale)
    return QuantizedTensor(
        format=format, codes=codes, block_scales=scales, global_scale=used_global, shape=tuple(w.shape)
    )


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise FormatError(
            f"{what} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}",
            fix="the file's shape contradicts its format; run `workbench lint` on the checkpoint",
        )
