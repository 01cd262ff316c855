"""Products with packed FP4 weights in Triton: decode and multiply in one kernel, no dense weight in memory.

    y_mn = triton_gemm.packed_linear(x_mk, codes, scales, globals_, input_scales, None, [n], "nvfp4", "nvfp4")

Which kernel multiplies depends on the card and on M. NVIDIA's: `triton_gemm_registers` for few tokens, on Hopper
`triton_gemm_wgmma` for more; where one overtakes the other `triton_configs` holds for an H200, `triton_tuning` finds on
other cards. Elsewhere, and for what those do not take, the kernel of this file, in plain Triton: a program decodes a
tile of rows of the weight and multiplies it with all tokens, whose activations it rounds on the way; K is split over
programs until the card is full. For many tokens the weight is decoded once and the vendor's GEMM multiplies.

Numbers: NVIDIA's kernels multiply the weights as they are, which 16 bits hold up to NVFP4's decode multiplier, and that
goes on the float32 sum; only an MXFP4 weight beyond x's dtype is rounded to it. The portable kernel and the decoded
weight are decoded exactly in float32 and rounded once to x's dtype. Activations are rounded as `triton_activation`
rounds them; products are added in float32, parts in a fixed order. Columns of K may be multiplied in another order,
which needs no shuffling of codes and changes the order of the additions alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_configs, triton_tuning
from .tables import MXFP4_BLOCK, NVFP4_BLOCK
from .triton_activation import mxfp4_qdq_activation, nvfp4_own_global, nvfp4_qdq_activation
from .triton_dequantize import mxfp4_dequantize, nvfp4_dequantize
from .triton_elements import (
    bits_float,
    dot_operand,
    e2m1_rounded,
    e2m1_values,
    e4m3_bytes,
    e4m3_values,
    e8m0_inverses,
    e8m0_values,
    float_bits,
    largest_magnitude,
    rounded_to,
    widened,
)
from .triton_gemm_sum import sum_parts
from .triton_launch import bytes_of, split_steps
from .triton_routes import bucket, default_route, gluon_module, linear_key, linear_plans, linear_routes
from .triton_scales import mxfp4_scale_bytes
from .triton_tuning import Plan

BLOCKS = {"nvfp4": NVFP4_BLOCK, "mxfp4": MXFP4_BLOCK}
_ROW_TILE = 2048


def packed_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    globals_: Tensor | None,
    input_scales: Tensor | None,
    bias: Tensor | None,
    widths: list[int],
    weight_format: str,
    activation_format: str,
) -> Tensor:
    """`x` `[..., K]` times a packed `[N, K]`: `[..., N]`. The N rows are `len(widths)` matrices that share an input.

    codes `[N, K/2]` uint8; scales `[N, K/16]` float8_e4m3fn (nvfp4) or `[N, K/32]` uint8 (mxfp4). globals_: float32
    decode multipliers (nvfp4): one for all, one a matrix, or one a row (laid out once at load). input_scales: one for
    all, or one a matrix, whose input is then rounded apart; NaN or None: each token's own. activation_format: none,
    nvfp4 or mxfp4.
    """
    x_mk = x.reshape(-1, x.shape[-1])
    if input_scales is not None and input_scales.numel() > 1:
        parts, start = [], 0
        for i, width in enumerate(widths):
            rows = slice(start, start + width)
            g = globals_
            if g is not None and g.numel() > 1:
                g = g[rows] if g.numel() == codes.shape[0] else g[i : i + 1]
            parts.append(
                _linear(
                    x_mk, codes[rows], scales[rows], g, input_scales[i], None, [width], weight_format, activation_format
                )
            )
            start += width
        y = torch.cat(parts, dim=-1)
        y = y if bias is None else y + bias
    else:
        y = _linear(x_mk, codes, scales, globals_, input_scales, bias, widths, weight_format, activation_format)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def round_activation(x: Tensor, activation_format: str, global_scale: Tensor | None) -> Tensor:
    """`x` `[M, K]` through the format's quantize-dequantize. global_scale: scalar or `[M, 1]`; NaN, None: each token's
    own."""
    if activation_format == "none":
        return x
    if activation_format == "mxfp4":
        return mxfp4_qdq_activation(x)
    return nvfp4_qdq_activation(x, global_scale, own_where_nan=True)


def decode(
    codes: Tensor, scales: Tensor, global_scale: Tensor | None, weight_format: str, dtype: torch.dtype
) -> Tensor:
    """Packed `[..., N, K/2]` to dense `[..., N, K]` in `dtype`; `global_scale` broadcasts against `scales`."""
    if weight_format == "mxfp4":
        return mxfp4_dequantize(codes, scales, dtype)
    assert global_scale is not None
    return nvfp4_dequantize(codes, scales, global_scale, dtype)


def _linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    widths: list[int],
    weight_format: str,
    activation_format: str,
) -> Tensor:
    def multiply(plan: Plan) -> Tensor:
        return multiplied(plan, x, codes, scales, g, input_scale, bias, widths, weight_format, activation_format)

    (m, k), n = x.shape, codes.shape[0]
    routes = linear_routes(x, codes, scales, g, widths)
    tuner, tokens = triton_tuning.tuner(x.device), bucket(m)
    if tuner is None or tokens is None or not m or not n:
        return multiply(Plan(default_route(m, routes)))
    key = linear_key(n, k, tokens, weight_format, activation_format, x.dtype)
    return multiply(tuner.plan(key, lambda: linear_plans(tokens, routes), multiply))


def multiplied(
    plan: Plan,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    widths: list[int],
    weight_format: str,
    activation_format: str,
) -> Tensor:
    """`packed_linear` of x `[M, K]` as `plan` says, with one input scale for all."""
    route, numbers = plan.route, list(plan.numbers)
    if route in ("registers", "wgmma"):
        y = torch.ops.workbench_kernels.gluon_linear(
            round_activation(x, activation_format, input_scale),
            codes,
            scales.view(torch.uint8),
            g,
            widths,
            weight_format,
            route == "wgmma",
            numbers,
        )
        return y if bias is None else y + bias
    rows = None if g is None else _per_row(g, widths)
    if route == "decode":
        rows = rows if rows is None or rows.numel() == 1 else rows.unsqueeze(-1)
        weight_nk = decode(codes, scales, rows, weight_format, x.dtype)
        return torch.nn.functional.linear(round_activation(x, activation_format, input_scale), weight_nk, bias)
    y = torch.ops.workbench_kernels.fused_linear(
        x, codes, scales.view(torch.uint8), rows, input_scale, weight_format, activation_format, numbers
    )
    return y if bias is None else y + bias


def _per_row(globals_: Tensor, widths: list[int]) -> Tensor:
    """One multiplier a row of the weight, or the only one; a matrix of one row is both."""
    g = globals_.float().reshape(-1)
    if g.numel() in (1, sum(widths)):
        return g
    return torch.cat([g[i : i + 1].expand(width) for i, width in enumerate(widths)])


# ---- launches --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::fused_linear", mutates_args=())
def _fused_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    input_scale: Tensor | None,
    weight_format: str,
    activation_format: str,
    numbers: list[int],
) -> Tensor:
    """numbers: a `triton_configs.Tile`; empty: the default."""
    (m, k), n = x.shape, codes.shape[0]
    if not m or not n:
        return x.new_empty((m, n))
    x = x.contiguous()
    tokens = min(64, max(16, triton.next_power_of_2(m)))
    rows, columns, warps, stages, split = numbers or triton_configs.TILES[tokens]
    programs = triton.cdiv(n, rows) * triton.cdiv(m, tokens)
    split, steps_each = split_steps(triton.cdiv(k, columns), programs, x.device, split)
    partial = x.new_empty((split, m, n), dtype=torch.float32 if split > 1 else x.dtype)
    own = token_globals(x, input_scale) if activation_format == "nvfp4" else x
    _linear_kernel[(triton.cdiv(n, rows), triton.cdiv(m, tokens), split)](
        x,
        own,
        bytes_of(codes),
        scales.contiguous(),
        x if g is None else g.contiguous(),
        partial,
        m,
        n,
        k,
        codes.shape[1],
        scales.shape[1],
        0 if g is None or g.numel() == 1 else 1,
        steps_each,
        FORMAT=weight_format,
        ACTIVATION=activation_format,
        TOKENS=tokens,
        ROWS=rows,
        COLUMNS=columns,
        EVEN=k % columns == 0,
        num_warps=warps,
        num_stages=stages,
    )
    return sum_parts(partial, x.dtype)


@_fused_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    input_scale: Tensor | None,
    weight_format: str,
    activation_format: str,
    numbers: list[int],
) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


@torch.library.custom_op("workbench_kernels::gluon_linear", mutates_args=())
def _gluon_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    widths: list[int],
    weight_format: str,
    wide: bool,
    numbers: list[int],
) -> Tensor:
    """numbers: a `triton_configs.WideConfig` (wide) or `Config`; empty: the default."""
    (m, k), n = x.shape, codes.shape[0]
    if not m or not n:
        return x.new_empty((m, n))
    kernels = gluon_module("wgmma" if wide else "registers")
    assert kernels is not None
    if wide:
        x = kernels.order_tokens(x)
        config = triton_configs.WideConfig(*numbers) if numbers else triton_configs.wgmma(x.device, n, k, m)
    elif numbers:
        config = triton_configs.Config(*numbers)
    else:
        tokens = kernels.tokens_tile(m)
        config = triton_configs.registers(x.device, n, triton.cdiv(m, tokens), k, tokens)
    return kernels.linear(x, codes, scales, g, widths, weight_format, config)


@_gluon_linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    g: Tensor | None,
    widths: list[int],
    weight_format: str,
    wide: bool,
    numbers: list[int],
) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


def token_globals(x: Tensor, input_scale: Tensor | None) -> Tensor:
    """NVFP4's decode multiplier of each token of `x` `[M, K]`: the given one, or the token's own where it is NaN."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    g = x if input_scale is None else input_scale.float().reshape(1)
    _globals_kernel[(x.shape[0],)](
        x, g, out, x.shape[1], HAS_GLOBAL=input_scale is not None, TILE=_ROW_TILE, num_warps=4
    )
    return out


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _globals_kernel(x_ptr, g_ptr, out_ptr, k, HAS_GLOBAL: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    given = tl.load(g_ptr).to(tl.float32) if HAS_GLOBAL else float("nan")
    length = k
    if HAS_GLOBAL:
        length = tl.where(given == given, 0, k)  # nothing is read where a scale is given
    largest = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        x = widened(tl.load(x_ptr + row * k + at, mask=at < k, other=0.0))
        largest = tl.maximum(largest, float_bits(x) & 0x7FFFFFFF)
    own = nvfp4_own_global(bits_float(tl.max(largest, 0)))
    if HAS_GLOBAL:
        own = tl.where(given == given, given, own)
    tl.store(out_ptr + row, own)


@triton.jit
def _linear_kernel(
    x_ptr,
    x_globals_ptr,
    codes_ptr,
    scales_ptr,
    g_ptr,
    out_ptr,
    m,
    n,
    k,
    code_stride,
    scale_stride,
    g_stride,
    steps,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    if FORMAT == "nvfp4":
        g = tl.load(g_ptr + row * g_stride, mask=row < n, other=0.0)
    else:
        g = tl.zeros([ROWS], tl.float32)
    if ACTIVATION == "nvfp4":
        x_global = tl.load(x_globals_ptr + token, mask=token < m, other=1.0)
    else:
        x_global = tl.zeros([TOKENS], tl.float32)
    product = fp4_product(
        x_ptr + token.to(tl.int64) * k,
        token < m,
        x_global,
        codes_ptr + row.to(tl.int64) * code_stride,
        scales_ptr + row.to(tl.int64) * scale_stride,
        row < n,
        g,
        part * steps * COLUMNS,
        tl.minimum((part + 1) * steps * COLUMNS, k),
        k,
        code_stride,
        scale_stride,
        FORMAT,
        ACTIVATION,
        TOKENS,
        ROWS,
        COLUMNS,
        EVEN,
    )
    at = (part.to(tl.int64) * m + token[None, :]) * n + row[:, None]
    here = (token < m)[None, :] & (row < n)[:, None]
    tl.store(out_ptr + at, rounded_to(product, out_ptr.dtype.element_ty), mask=here)


@triton.jit
def fp4_product(
    x_rows,
    x_here,
    x_global,
    code_rows,
    scale_rows,
    here,
    g,
    start,
    stop,
    k,
    code_stride,
    scale_stride,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows of a packed weight times tokens over columns start .. stop: float32 `[ROWS, TOKENS]`.

    x_rows `[TOKENS]`, code_rows and scale_rows `[ROWS]`: pointers to the first element of each. x_global, g: decode
    multipliers of tokens and rows (nvfp4). EVEN: COLUMNS divides k. Rounds tokens as ACTIVATION says.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    half: tl.constexpr = COLUMNS // 2
    dtype: tl.constexpr = x_rows.dtype.element_ty
    out = tl.zeros([ROWS, TOKENS], tl.float32)
    for column in range(start, stop, COLUMNS):
        byte_at = column // 2 + tl.arange(0, half)[None, :]
        scale_at = column // BLOCK + tl.arange(0, COLUMNS // BLOCK)[None, :]
        x_at = column + tl.arange(0, COLUMNS)[None, :]
        code_mask = here[:, None]
        scale_mask = here[:, None]
        x_mask = x_here[:, None]
        if not EVEN:
            code_mask = code_mask & (byte_at < code_stride)
            scale_mask = scale_mask & (scale_at < scale_stride)
            x_mask = x_mask & (x_at < k)
        packed = tl.load(code_rows[:, None] + byte_at, mask=code_mask, other=0).to(tl.int32)
        scale = tl.load(scale_rows[:, None] + scale_at, mask=scale_mask, other=0)
        x = tl.load(x_rows[:, None] + x_at, mask=x_mask, other=0.0)
        if FORMAT == "nvfp4":
            step = e4m3_values(scale.to(tl.int32)) * g[:, None]
        else:
            step = e8m0_values(scale.to(tl.int32))
        even, odd = tl.split(tl.reshape(_rounded_tokens(x, x_global, ACTIVATION, TOKENS, COLUMNS), [TOKENS, half, 2]))
        low = _stepped(e2m1_values(packed & 0xF), step, ROWS, COLUMNS, BLOCK)
        high = _stepped(e2m1_values(packed >> 4), step, ROWS, COLUMNS, BLOCK)
        low = dot_operand(rounded_to(low, dtype))
        high = dot_operand(rounded_to(high, dtype))
        out = tl.dot(low, tl.trans(dot_operand(even)), out, input_precision="ieee")
        out = tl.dot(high, tl.trans(dot_operand(odd)), out, input_precision="ieee")
    return out


@triton.jit
def _stepped(values, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Every second element of blocks times the block's step."""
    blocks = tl.reshape(values, [ROWS, COLUMNS // BLOCK, BLOCK // 2])
    return tl.reshape(blocks * step[:, :, None], [ROWS, COLUMNS // 2])


@triton.jit
def _rounded_tokens(x, x_global, ACTIVATION: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens `[TOKENS, COLUMNS]` through ACTIVATION's quantize-dequantize, in their dtype."""
    if ACTIVATION == "nvfp4":
        blocks = tl.reshape(widened(x), [TOKENS, COLUMNS // 16, 16])
        encode = tl.div_rn(tl.full(x_global.shape, 1.0, tl.float32), x_global)[:, None]
        scale = e4m3_values(e4m3_bytes(encode * (largest_magnitude(blocks, 2) * 0.16666666666666666)))
        encode = tl.broadcast_to(encode, scale.shape)
        down = tl.where(scale == 0, 0.0, tl.div_rn(encode, scale))
        values = e2m1_rounded(blocks * down[:, :, None]) * tl.div_rn(scale, encode)[:, :, None]
        out = rounded_to(tl.reshape(values, [TOKENS, COLUMNS]), x.dtype)
    elif ACTIVATION == "mxfp4":
        blocks = tl.reshape(widened(x), [TOKENS, COLUMNS // 32, 32])
        byte = mxfp4_scale_bytes(largest_magnitude(blocks, 2), "even")
        values = e2m1_rounded(blocks * e8m0_inverses(byte)[:, :, None]) * e8m0_values(byte)[:, :, None]
        out = rounded_to(tl.reshape(values, [TOKENS, COLUMNS]), x.dtype)
    else:
        out = x
    return out
