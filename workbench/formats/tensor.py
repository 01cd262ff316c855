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
from workbench.kernels.blocks import spread
from workbench.kernels.elements import decode, packed_columns
from workbench.kernels.reference import e8m0_values
from workbench.kernels.tables import NVFP4_MIN_GLOBAL

from .table import SCALE_DTYPES, VARIABLE, Format, element_dtype, get_format


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """A quantized matrix (or stack of matrices) in canonical form.

    format: name in FORMATS. shape: logical `[..., N, K]`.
    codes: packed codes as `kernels.elements` packs them: `[..., N, K/2]` uint8 for 4-bit elements (low nibble = even K
    index), `[..., N, 3K/4]` uint8 for 6-bit ones, `[..., N, K]` float8 or int8 for 8-bit ones.
    block_scales: linear row-major, `format.scale_shape(shape, block)`; float8_e4m3fn for nvfp4, E8M0 bytes (uint8) for
    MX formats, float32 (or E8M0 bytes) for the others. They multiply.
    block: (rows, columns) that share a scale; None: the format's own. Needed where the format leaves them VARIABLE.
    global_scale: **decode multiplier** (scalar, or broadcastable to block_scales where fused shards keep their own),
    None where the format has none. float32; float64 where the producer stores a divisor: 1 / divisor, whose product
    with an E4M3 scale rounds to the float32 that the division gives.
    zero_points: int32 of block_scales' shape, subtracted from the codes before scaling; None: symmetric.
    group_index: int32 `[K]`, the scale column of each K (GPTQ's act-order); None: blocks lie in order.
    input_scale: float32 decode multiplier for static activation quantization, None when the checkpoint has none.
    pre_quant_scale: float32 `[K]`, multiplies the layer's *input* (AWQ as ModelOpt stores it); None: 1.
    """

    format: str
    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor | None
    shape: tuple[int, ...]
    block: tuple[int, int] | None = None
    zero_points: Tensor | None = None
    group_index: Tensor | None = None
    input_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    def __post_init__(self) -> None:
        spec = get_format(self.format)
        *lead, k = self.shape
        try:
            columns = packed_columns(spec.element, k)
        except ValueError as error:
            raise FormatError(f"{self.format}: {error}", fix="the file's shape contradicts its format") from error
        _expect("codes", self.codes, (*lead, columns), (element_dtype(self.format),))
        if self.block is None and VARIABLE in (spec.rows, spec.block):
            raise FormatError(f"{self.format} needs the size of its blocks", fix="pass block=(rows, columns)")
        scale_shape = spec.scale_shape(self.shape, self.block)
        _expect("block_scales", self.block_scales, scale_shape, SCALE_DTYPES[spec.scale])
        if spec.has_global and self.global_scale is None:
            raise FormatError(f"{self.format} needs a global scale", fix="pass the float32 decode multiplier")
        if self.zero_points is not None:
            _expect("zero_points", self.zero_points, scale_shape, (torch.int32,))
        for what, tensor, dtype in (
            ("group_index", self.group_index, torch.int32),
            ("pre_quant_scale", self.pre_quant_scale, torch.float32),
        ):
            if tensor is not None:
                _expect(what, tensor, (k,), (dtype,))

    @property
    def spec(self) -> Format:
        return get_format(self.format)

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes + block scales + global scale + zero points."""
        parts = [t for t in (self.codes, self.block_scales, self.global_scale, self.zero_points) if t is not None]
        return sum(t.numel() * t.element_size() for t in parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The stored weight's values `[..., N, K]`, exact in float32, then cast once to `dtype`.

        `pre_quant_scale` belongs to the input and is not in them; see `effective`.
        """
        spec = self.spec
        if self.global_scale is not None and self.global_scale.dtype == torch.float64:
            return self._decode().to(dtype)
        if self.codes.is_cpu and spec.dequantize_cpu is not None:
            return spec.dequantize_cpu(self.codes, self.block_scales, self.global_scale, dtype)
        if spec.dequantize is not None:
            return spec.dequantize(self.codes, self.block_scales, self.global_scale).to(dtype)
        return self._decode().to(dtype)

    def effective(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that multiplies the layer's unscaled input: `dequantize` times `pre_quant_scale` along K."""
        if self.pre_quant_scale is None:
            return self.dequantize(dtype)
        return (self.dequantize() * self.pre_quant_scale).to(dtype)

    def _decode(self) -> Tensor:
        """(codes - zero points) * scales [* global], in float32, for any format."""
        block = self.block or (self.spec.rows, self.spec.block)
        scales = self.block_scales
        scales = e8m0_values(scales) if scales.dtype == torch.uint8 else scales.float()
        if self.global_scale is not None:
            scales = (scales.double() * self.global_scale.double()).float()  # a float32 product's bits, rounded once
        values = decode(self.codes, self.spec.element)
        if self.zero_points is not None:
            values = values - self._spread(self.zero_points.float(), block)
        return values * self._spread(scales, block)

    def _spread(self, values: Tensor, block: tuple[int, int]) -> Tensor:
        """One value a block to one an element."""
        if self.group_index is None:
            return spread(values, block, torch.Size(self.shape))
        return spread(values, (block[0], 0), torch.Size(self.shape)).index_select(-1, self.group_index.long())


def quantize(
    w: Tensor,
    format: str,
    rule: str | None = None,
    *,
    block: tuple[int, int] | None = None,
    global_scale: Tensor | None = None,
    name: str = "tensor",
) -> QuantizedTensor:
    """Quantize `w` `[..., N, K]` (any float dtype) to `format` under `rule` (None: the format's default).

    block: (rows, columns) that share a scale, where the format leaves them open; None: its default. global_scale: a
    decode multiplier shared with other tensors, from `global_scale()`; None: the tensor's own. name: the tensor's, for
    messages. A rule that computes in the checkpoint's dtype takes it from `w`: its own, or for float32 the narrowest
    that holds all its values. Raises FormatError for a K that the blocks do not divide, a non-finite value, an unknown
    format or rule, a block or global scale that the format cannot have.
    """
    spec = get_format(format)
    chosen = spec.rule(rule)
    rows, columns = spec.resolve_block(block)
    _check_columns(w, spec, columns, name)
    if not bool(torch.isfinite(w).all()):
        bad = int((~torch.isfinite(w)).sum())
        raise FormatError(
            f"{name}: {bad} of {w.numel()} values are NaN or infinite; no {format} code represents them",
            fix="repair the source checkpoint, or exclude this tensor (--exclude)",
        )
    if global_scale is not None:
        _check_global_scale(global_scale, spec, name)
    parts = spec.quantize(w, chosen, (rows, columns), global_scale)
    return QuantizedTensor(
        format=format,
        codes=parts.codes,
        block_scales=parts.block_scales,
        global_scale=parts.global_scale,
        shape=tuple(w.shape),
        block=(rows, columns) if VARIABLE in (spec.rows, spec.block) else None,
        zero_points=parts.zero_points,
    )


def _check_columns(w: Tensor, spec: Format, columns: int, name: str) -> None:
    k = w.shape[-1] if w.dim() else 0
    if w.dim() < 1 or (columns and not spec.partial_blocks and k % columns):
        raise FormatError(
            f"{name}: K = {k} is not a multiple of {spec.name}'s block of {columns} (shape {tuple(w.shape)})",
            fix="exclude this tensor (--exclude), or choose a format whose block divides K",
        )
    try:
        packed_columns(spec.element, k)
    except ValueError as error:
        raise FormatError(f"{name}: {error} (shape {tuple(w.shape)})", fix="exclude this tensor (--exclude)") from error


def _check_global_scale(global_scale: Tensor, spec: Format, name: str) -> None:
    if spec.shared_scale is None:
        raise FormatError(f"{name}: {spec.name} has no global scale, but one was given", fix="leave it out")
    if not bool((global_scale.isfinite() & (global_scale >= NVFP4_MIN_GLOBAL)).all()):
        raise FormatError(
            f"{name}: the given global scale {global_scale.min().item()} is no finite multiplier of at least 2**-118",
            fix="take it from `global_scale()` with the largest magnitude of the tensor or of its fused group",
        )


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise FormatError(
            f"{what} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {wanted}",
            fix="the file's shape contradicts its format; run `workbench lint` on the checkpoint",
        )
