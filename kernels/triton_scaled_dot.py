"""Products of packed FP4 with packed FP4 on matrix units that take them (`tl.dot_scaled`), in a kernel of its own.

    if triton_scaled_dot.supports(x.device, "mxfp4"):
        y_mn = triton_scaled_dot.native_linear(x_codes, x_scales, w_codes, w_scales, "mxfp4", dtype=torch.bfloat16)

Where it compiles to such instructions is a table, read off compiled code (tests/kernels count them): CDNA4 for MXFP4,
Blackwell's data-centre cards for both. Elsewhere use `triton_gemm`: Hopper would decode to bfloat16 and multiply that,
CDNA3 does not compile. Products are added in float32 without rounding a weight to bfloat16 first, so results differ
from emulation's in the order of additions and in that rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, NVFP4_BLOCK
from .triton_elements import rounded_to
from .triton_launch import bytes_of, check_scales

FORMATS_BY_ARCHITECTURE = {"gfx950": ("mxfp4",), "sm_100": ("mxfp4", "nvfp4"), "sm_103": ("mxfp4", "nvfp4")}
TOKENS, ROWS, COLUMNS = 128, 128, 256


def supports(device: torch.device, weight_format: str) -> bool:
    """Whether `device` multiplies packed codes of `weight_format` natively."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return weight_format in FORMATS_BY_ARCHITECTURE.get(name, ())


def native_linear(
    x_codes: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    weight_format: str,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x `[M, K]` times w `[N, K]`, both packed in `weight_format` (mxfp4 or nvfp4): `[M, N]` of `dtype`.

    global_scale: float32 scalar, the product of both decode multipliers (nvfp4). Raises ValueError for scales that do
    not fit.
    """
    block = NVFP4_BLOCK if weight_format == "nvfp4" else MXFP4_BLOCK
    check_scales(x_codes, x_scales, block)
    check_scales(codes, scales, block)
    return torch.ops.workbench_kernels.scaled_linear(x_codes, x_scales, codes, scales, global_scale, dtype)


@torch.library.custom_op("workbench_kernels::scaled_linear", mutates_args=())
def _scaled_linear(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (m, half), n = x_codes.shape, codes.shape[0]
    out = x_codes.new_empty((m, n), dtype=dtype)
    if m and n:
        _scaled_kernel[(triton.cdiv(m, TOKENS), triton.cdiv(n, ROWS))](
            bytes_of(x_codes),
            x_scales.contiguous(),
            bytes_of(codes),
            scales.contiguous(),
            x_scales if global_scale is None else global_scale.float().reshape(1),
            out,
            m,
            n,
            2 * half,
            x_scales.shape[1],
            BLOCK=2 * half // x_scales.shape[1],
            HAS_GLOBAL=global_scale is not None,
            TOKENS=TOKENS,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
    return out


@_scaled_linear.register_fake
def _(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return x_codes.new_empty((x_codes.shape[0], codes.shape[0]), dtype=dtype)


@triton.jit
def _scaled_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    g_ptr,
    out_ptr,
    m,
    n,
    k,
    scale_stride,
    BLOCK: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, COLUMNS // 2)
    block = tl.arange(0, COLUMNS // BLOCK)
    out = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, k, COLUMNS):
        byte_at = start // 2 + byte
        block_at = start // BLOCK + block
        x_mask = (token < m)[:, None] & (byte_at < k // 2)[None, :]
        w_mask = (row < n)[None, :] & (byte_at < k // 2)[:, None]
        x = tl.load(x_ptr + token[:, None] * (k // 2) + byte_at[None, :], mask=x_mask, other=0)
        w = tl.load(codes_ptr + row[None, :] * (k // 2) + byte_at[:, None], mask=w_mask, other=0)
        x_mask = (token < m)[:, None] & (block_at < scale_stride)[None, :]
        w_mask = (row < n)[:, None] & (block_at < scale_stride)[None, :]
        x_scale = tl.load(x_scales_ptr + token[:, None] * scale_stride + block_at[None, :], mask=x_mask, other=0.0)
        w_scale = tl.load(scales_ptr + row[:, None] * scale_stride + block_at[None, :], mask=w_mask, other=0.0)
        out = tl.dot_scaled(x, x_scale, "e2m1", w, w_scale, "e2m1", acc=out)
    if HAS_GLOBAL:
        out *= tl.load(g_ptr)
    at = token[:, None] * n + row[None, :]
    tl.store(out_ptr + at, rounded_to(out, out_ptr.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])
