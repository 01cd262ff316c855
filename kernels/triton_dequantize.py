"""Decoding in Triton: NVFP4, MXFP4, MXFP6, MXFP8 and block-scaled FP8 to float32, bfloat16 or float16.

    w_hat_nk = triton_dequantize.nvfp4_dequantize(codes, scales, global_scale, torch.bfloat16)

Every value is decoded exactly in float32 and rounded once, so the result is the reference's, cast. Codes and scales are
read once, in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import ELEMENTS, packed_columns
from .tables import MXFP4_BLOCK, NVFP4_BLOCK
from .triton_elements import (
    bits_float,
    e2m1_values,
    e4m3_values,
    e5m2_values,
    e8m0_values,
    float_bits,
    rounded_to,
    unpack_codes,
)
from .triton_launch import STORED, bytes_of, check_scales, global_per_block, scale_shape, tile

_TILE = tile(4096)  # values a program
_FP8_ROWS, _FP8_COLUMNS = 16, 128


def nvfp4_dequantize(
    packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """NVFP4 `[..., K/2]` uint8 and scales `[..., K/16]` float8_e4m3fn to values `[..., K]` of `dtype`.

    `global_scale` (float32 decode multiplier) broadcasts against `scales`. Equals
    `reference.nvfp4_dequantize(packed, scales, global_scale).to(dtype)`.
    """
    check_scales(packed, scales, NVFP4_BLOCK)
    stored = _stored(dtype)
    return torch.ops.workbench_kernels.fp4_decode(packed, scales.view(torch.uint8), global_scale, stored).to(dtype)


def mxfp4_dequantize(packed: Tensor, scale_bytes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 `[..., K/2]` uint8 and E8M0 bytes `[..., K/32]` uint8 to values `[..., K]` of `dtype`.

    Equals `reference.mxfp4_dequantize(packed, scale_bytes).to(dtype)`.
    """
    check_scales(packed, scale_bytes, MXFP4_BLOCK)
    return torch.ops.workbench_kernels.fp4_decode(packed, scale_bytes, None, _stored(dtype)).to(dtype)


def mx_dequantize(codes: Tensor, scale_bytes: Tensor, element: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """MX codes of `element` (e2m1, e2m3, e3m2, e4m3, e5m2) and E8M0 bytes, one a block of 32 along K, to values.

    Equals `mx.dequantize(codes, scale_bytes, element).to(dtype)`. Raises ValueError for another element.
    """
    if element == "e2m1":
        return mxfp4_dequantize(codes, scale_bytes, dtype)
    if element not in _MX_ELEMENTS:
        raise ValueError(
            f"no Triton decoding of MX elements {element!r}; choose one of: e2m1, {', '.join(_MX_ELEMENTS)}"
        )
    k = codes.shape[-1] * 8 // ELEMENTS[element].bits
    if scale_shape(torch.Size((*codes.shape[:-1], k)), MXFP4_BLOCK) != scale_bytes.shape:
        raise ValueError(f"codes {tuple(codes.shape)} and scales {tuple(scale_bytes.shape)} do not fit each other")
    return torch.ops.workbench_kernels.mx_decode(codes.view(torch.uint8), scale_bytes, element, _stored(dtype)).to(
        dtype
    )


def fp8_dequantize(
    codes: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.float32
) -> Tensor:
    """FP8 `[..., N, K]` (float8_e4m3fn or float8_e5m2) with one scale a block of (rows, columns) to values of `dtype`.

    block: 0 stands for all rows, or columns; partial last blocks are allowed. scales: float32, or E8M0 bytes (uint8),
    `[..., ceil(N / rows), ceil(K / columns)]`. Equals `codes.float() * blocks.spread(scales, block, shape)`, cast once.
    """
    n, k = codes.shape[-2:]
    rows, columns = block[0] or max(n, 1), block[1] or max(k, 1)
    expected = (*codes.shape[:-2], -(-n // rows), -(-k // columns))
    if tuple(scales.shape) != expected:
        raise ValueError(f"scales {tuple(scales.shape)} do not fit codes {tuple(codes.shape)}: expected {expected}")
    if codes.dtype not in _FP8:
        raise ValueError(f"codes of dtype {codes.dtype} are no FP8; give float8_e4m3fn or float8_e5m2")
    return torch.ops.workbench_kernels.fp8_decode(
        codes.view(torch.uint8), scales, _FP8[codes.dtype], rows, columns, _stored(dtype)
    ).to(dtype)


_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_MX_ELEMENTS = ("e2m3", "e3m2", "e4m3", "e5m2")


def _stored(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in STORED else torch.float32


# ---- launches --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::fp4_decode", mutates_args=())
def _fp4_decode(packed: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """NVFP4 where there is a global scale, MXFP4 where there is none. scales: bytes."""
    nvfp4 = global_scale is not None
    block = NVFP4_BLOCK if nvfp4 else MXFP4_BLOCK
    g, per_global = global_per_block(global_scale, scales.shape) if nvfp4 else (scales, 0)
    out = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)
    rows = _TILE // block
    if out.numel():
        _fp4_kernel[(triton.cdiv(scales.numel(), rows),)](
            bytes_of(packed),
            scales.contiguous(),
            g,
            out,
            scales.numel(),
            max(per_global, 1),
            NVFP4=nvfp4,
            ONE_GLOBAL=per_global == 0,
            BLOCK=block,
            ROWS=rows,
            num_warps=4,
        )
    return out


@_fp4_decode.register_fake
def _(packed: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@torch.library.custom_op("workbench_kernels::mx_decode", mutates_args=())
def _mx_decode(codes: Tensor, scale_bytes: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    out = _empty_mx(codes, element, dtype)
    rows = _TILE // MXFP4_BLOCK
    if out.numel():
        _mx_kernel[(triton.cdiv(scale_bytes.numel(), rows),)](
            codes.contiguous(),
            scale_bytes.contiguous(),
            out,
            scale_bytes.numel(),
            ELEMENT=element,
            ROWS=rows,
            num_warps=4,
        )
    return out


@_mx_decode.register_fake
def _(codes: Tensor, scale_bytes: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    return _empty_mx(codes, element, dtype)


def _empty_mx(codes: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    k = codes.shape[-1] * 8 // ELEMENTS[element].bits
    assert packed_columns(element, MXFP4_BLOCK) * k == codes.shape[-1] * MXFP4_BLOCK
    return codes.new_empty((*codes.shape[:-1], k), dtype=dtype)


@torch.library.custom_op("workbench_kernels::fp8_decode", mutates_args=())
def _fp8_decode(codes: Tensor, scales: Tensor, element: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    n, k = codes.shape[-2:]
    lead = codes.shape[:-2].numel()
    if out.numel():
        grid = (triton.cdiv(n, _FP8_ROWS) * triton.cdiv(k, _FP8_COLUMNS), lead)
        _fp8_kernel[grid](
            codes.contiguous(),
            scales.contiguous() if scales.dtype == torch.uint8 else scales.float().contiguous(),
            out,
            n,
            k,
            rows,
            columns,
            ELEMENT=element,
            E8M0=scales.dtype == torch.uint8,
            ROWS=_FP8_ROWS,
            COLUMNS=_FP8_COLUMNS,
            num_warps=4,
        )
    return out


@_fp8_decode.register_fake
def _(codes: Tensor, scales: Tensor, element: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _fp4_kernel(
    packed_ptr,
    scales_ptr,
    g_ptr,
    out_ptr,
    blocks,
    per_global,
    NVFP4: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    half: tl.constexpr = BLOCK // 2
    packed = tl.load(packed_ptr + block[:, None] * half + tl.arange(0, half)[None, :], mask=here[:, None], other=0)
    byte = tl.load(scales_ptr + block, mask=here, other=0).to(tl.int32)
    if NVFP4:
        if ONE_GLOBAL:
            step = e4m3_values(byte) * tl.load(g_ptr)
        else:
            step = e4m3_values(byte) * tl.load(g_ptr + block // per_global, mask=here, other=1.0)
    else:
        step = e8m0_values(byte)
    values = e2m1_values(unpack_codes(packed, ROWS, BLOCK)) * step[:, None]
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, rounded_to(values, out_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def _mx_kernel(codes_ptr, scales_ptr, out_ptr, blocks, ELEMENT: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    k = tl.arange(0, 32)[None, :]
    step = e8m0_values(tl.load(scales_ptr + block, mask=here, other=0).to(tl.int32))
    if (ELEMENT == "e4m3") | (ELEMENT == "e5m2"):
        byte = tl.load(codes_ptr + block[:, None] * 32 + k, mask=here[:, None], other=0).to(tl.int32)
        values = fp8_values(byte, ELEMENT)
    else:
        # Element k lies in bits 6k .. 6k + 5 of the block's 24 bytes: in one byte, or in it and the next.
        first = codes_ptr + block[:, None] * 24 + (k * 6) // 8
        low = tl.load(first, mask=here[:, None], other=0).to(tl.int32)
        crosses = (k * 6) % 8 > 2
        high = tl.load(first + 1, mask=here[:, None] & crosses, other=0).to(tl.int32)
        values = _six_bit_values(((low | (high << 8)) >> ((k * 6) % 8)) & 0x3F, ELEMENT)
    at = block[:, None] * 32 + k
    tl.store(out_ptr + at, rounded_to(values * step[:, None], out_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def _fp8_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    n,
    k,
    block_rows,
    block_columns,
    ELEMENT: tl.constexpr,
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(k, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (row < n) & (column < k)
    matrix = tl.program_id(1).to(tl.int64)
    at = (matrix * n + row) * k + column
    byte = tl.load(codes_ptr + at, mask=here, other=0).to(tl.int32)
    blocks = tl.cdiv(n, block_rows).to(tl.int64)
    scale_at = (matrix * blocks + row // block_rows) * tl.cdiv(k, block_columns) + column // block_columns
    scale = tl.load(scales_ptr + scale_at, mask=here, other=0)
    step = e8m0_values(scale.to(tl.int32)) if E8M0 else scale.to(tl.float32)
    tl.store(out_ptr + at, rounded_to(fp8_values(byte, ELEMENT) * step, out_ptr.dtype.element_ty), mask=here)


@triton.jit
def fp8_values(byte, ELEMENT: tl.constexpr):
    """FP8 bytes (int32) to float32."""
    if ELEMENT == "e4m3":
        values = e4m3_values(byte)
    else:
        values = e5m2_values(byte)
    return values


@triton.jit
def _six_bit_values(code, ELEMENT: tl.constexpr):
    """E2M3 or E3M2 codes (int32, 0..63) to float32: magnitude bits moved to float32's exponent, scaled by its bias."""
    if ELEMENT == "e2m3":
        magnitude = bits_float((code & 0x1F) << 20) * 8.507059173023462e37  # 2**126
    else:
        magnitude = bits_float((code & 0x1F) << 21) * 2.1267647932558654e37  # 2**124
    return bits_float(float_bits(magnitude) | ((code & 0x20) << 26))
