"""NVFP4 and MXFP4 quantization in Triton, equal bit for bit to `reference.py`, `nvfp4.py` and `mx.py`.

    codes, scales, global_scale = triton_quantize.nvfp4_quantize(w_nk)
    codes, scale_bytes = triton_quantize.mxfp4_quantize(w_nk, "even")

Each weight is read once and nothing but the results is written; a global scale that is not given costs a pass of its
own (`largest`). Rules that pick among candidates (mse, four_over_six) try them in registers. One rule needs the
checkpoint's own number type (NVFP4's llm_compressor) and runs as plain torch. Tensors that are not contiguous are
copied first. Two exceptions to the last bit: candidates whose float64 errors differ by less than rounding may be chosen
otherwise, and codes of a block with NaN or infinity under MX's producers' rules (its scale is NaN either way).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import nvfp4
from .tables import MXFP4_BLOCK, NVFP4_BLOCK, ScaleRule, Zeros
from .triton_elements import (
    divide,
    divisor,
    e2m1_codes,
    e2m1_values,
    e4m3_bytes,
    e4m3_values,
    e8m0_inverses,
    float_bits,
    larger,
    largest_magnitude,
    pack_words,
    sign_limit,
    widened,
)
from .triton_launch import EXACT, flat_values, global_per_block, has_packed_bfloat16, scale_shape, tile
from .triton_pairs import SHIFT_LEFT_16
from .triton_quantize_pairs import nvfp4_pairs_kernel
from .triton_scales import mxfp4_scale_bytes, nvfp4_scale_bytes

# A thread takes whole blocks, so that nothing of a block is computed twice and no value crosses threads.
_ROWS = tile(128)  # blocks a program: one a thread of 4 warps
_CANDIDATES = tl.constexpr(47)  # neighbours of the scale that `mse` tries
_AMAX_TILE = tile(8192)
_MX_RULES = (
    ScaleRule.FLOOR,
    ScaleRule.EVEN,
    ScaleRule.CEIL,
    ScaleRule.RCEIL,
    ScaleRule.MSE,
    ScaleRule.MODELOPT,
    ScaleRule.LLM_COMPRESSOR,
    ScaleRule.QUARK,
    ScaleRule.TORCHAO,
    ScaleRule.MICROXCALING,
)


def largest(w: Tensor) -> Tensor:
    """Largest magnitude of `w`, float32 scalar; NaN where there is one, 0 for no elements. Nothing is synchronized."""
    return torch.ops.workbench_kernels.largest(w)


def nvfp4_quantize(
    w: Tensor, global_scale: Tensor | None = None, rule: ScaleRule | str = ScaleRule.AMAX
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `w` `[..., K]` (K divisible by 16) to NVFP4; equals `nvfp4.quantize(w, rule, global_scale)`.

    global_scale: decode multiplier, broadcastable to `[..., K/16]`; None: the rule's own for the whole tensor.
    Returns packed codes `[..., K/2]` uint8, block scales `[..., K/16]` float8_e4m3fn and the global scale.
    """
    chosen = nvfp4.get_rule(rule)
    scale_shape(w.shape, NVFP4_BLOCK)
    if chosen.narrow:
        return nvfp4.quantize(w, rule, global_scale)
    if global_scale is None:
        global_scale = chosen.global_scale(largest(w))
    codes, scales = torch.ops.workbench_kernels.nvfp4_encode(w, global_scale.float(), ScaleRule(rule).value)
    return codes, scales, global_scale.float()


def mxfp4_quantize(w: Tensor, rule: ScaleRule | str = ScaleRule.EVEN) -> tuple[Tensor, Tensor]:
    """Quantize `w` `[..., K]` (K divisible by 32) to MXFP4; equals `mx.quantize(w, "e2m1", rule)`.

    Returns packed codes `[..., K/2]` uint8 and E8M0 scale bytes `[..., K/32]` uint8.
    """
    rule = ScaleRule(rule)
    if rule not in _MX_RULES:
        raise ValueError(f"MXFP4 has no scale rule {rule.value!r}; choose one of: {', '.join(_MX_RULES)}")
    return torch.ops.workbench_kernels.mxfp4_encode(w, rule.value)


# ---- launches --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("workbench_kernels::largest", mutates_args=())
def _largest(w: Tensor) -> Tensor:
    x = flat_values(w)
    bits = torch.zeros((), dtype=torch.int32, device=w.device)
    if x.numel():
        _largest_kernel[(triton.cdiv(x.numel(), _AMAX_TILE),)](x, bits, x.numel(), TILE=_AMAX_TILE)
    return bits.view(torch.float32)


@_largest.register_fake
def _(w: Tensor) -> Tensor:
    return w.new_empty((), dtype=torch.float32)


@torch.library.custom_op("workbench_kernels::nvfp4_encode", mutates_args=())
def _nvfp4_encode(w: Tensor, global_scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    x, shape = flat_values(w), scale_shape(w.shape, NVFP4_BLOCK)
    codes, scales = _empty_nvfp4(w)
    g, per_global = global_per_block(global_scale, shape)
    blocks = shape.numel()
    if blocks and w.dtype == torch.bfloat16 and rule == ScaleRule.AMAX:
        nvfp4_pairs_kernel[(triton.cdiv(blocks, _ROWS),)](
            x.view(torch.int32),
            g,
            codes.view(torch.int32),
            scales.view(torch.uint8),
            blocks,
            max(per_global, 1),
            SHIFT_LEFT_16,
            ONE_GLOBAL=per_global == 0,
            PACKED=has_packed_bfloat16(w.device),
            WHOLE=blocks % _ROWS == 0,
            ROWS=_ROWS,
            num_warps=4,
            **EXACT,
        )
    elif blocks:
        _nvfp4_kernel[(triton.cdiv(blocks, _ROWS),)](
            x,
            g,
            codes.view(torch.int32),
            scales.view(torch.uint8),
            blocks,
            max(per_global, 1),
            RULE=rule,
            ZEROS=nvfp4.RULES[ScaleRule(rule)].zeros.value,
            ONE_GLOBAL=per_global == 0,
            ROWS=_ROWS,
            num_warps=4,
            **EXACT,
        )
    return codes, scales


@_nvfp4_encode.register_fake
def _(w: Tensor, global_scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    return _empty_nvfp4(w)


def _empty_nvfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    *lead, k = w.shape
    codes = w.new_empty((*lead, k // 2), dtype=torch.uint8)
    return codes, w.new_empty((*lead, k // NVFP4_BLOCK), dtype=torch.float8_e4m3fn)


@torch.library.custom_op("workbench_kernels::mxfp4_encode", mutates_args=())
def _mxfp4_encode(w: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    x, blocks = flat_values(w), scale_shape(w.shape, MXFP4_BLOCK).numel()
    codes, scale_bytes = _empty_mxfp4(w)
    exponent, ties, zeros, min_byte = _MX_ROWS.get(ScaleRule(rule), (rule, "even", Zeros.SIGNED.value, 0))
    if blocks:
        _mxfp4_kernel[(triton.cdiv(blocks, _ROWS),)](
            x,
            codes.view(torch.int32),
            scale_bytes,
            blocks,
            RULE=exponent,
            TIES=ties,
            ZEROS=zeros,
            MIN_BYTE=min_byte,
            ROWS=_ROWS,
            num_warps=4,
            **EXACT,
        )
    return codes, scale_bytes


@_mxfp4_encode.register_fake
def _(w: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    return _empty_mxfp4(w)


def _empty_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    *lead, k = w.shape
    codes = w.new_empty((*lead, k // 2), dtype=torch.uint8)
    return codes, w.new_empty((*lead, k // MXFP4_BLOCK), dtype=torch.uint8)


# Producers' rows of mx.RULES for E2M1: how the exponent is found, ties, zeros, smallest byte stored.
_MX_ROWS = {
    ScaleRule.MODELOPT: ("log2", "zero", Zeros.NEGATIVE.value, 0),
    ScaleRule.LLM_COMPRESSOR: ("even", "even", Zeros.VALUE.value, 0),
    ScaleRule.QUARK: ("even", "even", Zeros.POSITIVE.value, 1),
    ScaleRule.TORCHAO: ("torchao", "even", Zeros.SIGNED.value, 0),
    ScaleRule.MICROXCALING: ("floor_log2", "away", Zeros.SIGNED.value, 0),
}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _largest_kernel(x_ptr, bits_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = widened(tl.load(x_ptr + at, mask=at < count, other=0.0))
    tl.atomic_max(bits_ptr, float_bits(largest_magnitude(x, 0)))


@triton.jit
def _nvfp4_kernel(
    x_ptr,
    g_ptr,
    words_ptr,
    scales_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ZEROS: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    x0, x1 = eight_values(x_ptr, block * 16, here), eight_values(x_ptr, block * 16 + 8, here)
    if ONE_GLOBAL:
        g = tl.load(g_ptr) + tl.zeros([ROWS], tl.float32)
    else:
        g = tl.load(g_ptr + block // per_global, mask=here, other=1.0)
    amax = larger(largest_magnitude(x0, 1), largest_magnitude(x1, 1))
    byte = nvfp4_scale_bytes(amax, g, RULE)
    word0, word1 = _nvfp4_words(x0, x1, byte, g, RULE, ZEROS)
    if (RULE == "four_over_six") | (RULE == "mse"):
        least = _nvfp4_error(x0, x1, word0, word1, byte, g)
        first = byte
        for i in range(_CANDIDATES if RULE == "mse" else 1):
            if RULE == "mse":
                other = tl.minimum(tl.maximum(first + (i - 8), 1), 126)
            else:
                other = nvfp4_scale_bytes(amax * 1.5, g, RULE)
            found0, found1 = _nvfp4_words(x0, x1, other, g, RULE, ZEROS)
            error = _nvfp4_error(x0, x1, found0, found1, other, g)
            better = error < least
            byte = tl.where(better, other, byte)
            word0 = tl.where(better, found0, word0)
            word1 = tl.where(better, found1, word1)
            least = tl.where(better, error, least)
    elif RULE == "quark_f2f":
        byte = e4m3_bytes(tl.div_rn(e4m3_values(byte) * g, g))
    at = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(words_ptr + at, tl.join(word0, word1), mask=here[:, None])
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=here)


@triton.jit
def eight_values(x_ptr, first, here):
    """Eight values from `first` `[ROWS]`, float32 `[ROWS, 8]`: 16 bytes of bfloat16, one read of a thread."""
    at = first[:, None] + tl.arange(0, 8)[None, :]
    return widened(tl.load(x_ptr + at, mask=here[:, None], other=0.0))


@triton.jit
def _nvfp4_words(x0, x1, byte, g, RULE: tl.constexpr, ZEROS: tl.constexpr):
    """The two words of codes of blocks `x0`, `x1` `[ROWS, 8]`."""
    word0 = pack_words(_nvfp4_codes(x0, byte, g, RULE, ZEROS))
    return word0, pack_words(_nvfp4_codes(x1, byte, g, RULE, ZEROS))


@triton.jit
def _nvfp4_codes(x, byte, g, RULE: tl.constexpr, ZEROS: tl.constexpr):
    """Codes (int32) of blocks `x` `[ROWS, 16]` under the block scales `byte` and the global ones `g` `[ROWS]`."""
    scale = e4m3_values(byte)
    step = scale * g
    if RULE == "torchao":
        q = x * tl.div_rn(tl.div_rn(tl.full(g.shape, 1.0, tl.float32), g), scale)[:, None]
    else:
        if RULE == "quark_f2f":
            step = tl.where(step == 0, 1.1920928955078125e-07, step)
        if ZEROS == "value":  # the sign of a quotient that is nearly zero counts
            q = tl.div_rn(x, tl.broadcast_to(step[:, None], x.shape))
        else:
            m, inverse, power = divisor(step)
            q = divide(x * power[:, None], m[:, None], inverse[:, None])
    return e2m1_codes(q, x, sign_limit(step != step)[:, None], "even", ZEROS)


@triton.jit
def _nvfp4_error(x0, x1, word0, word1, byte, g):
    """Sum of squared errors of each block, float64."""
    step = (e4m3_values(byte) * g).to(tl.float64)
    return squared_error(x0, word0, step) + squared_error(x1, word1, step)


@triton.jit
def squared_error(x, word, step):
    """Sum over `x` `[ROWS, 8]` of the squared error of its codes `word` times `step` `[ROWS]`, float64."""
    values = e2m1_values(word[:, None] >> (4 * tl.arange(0, 8))[None, :] & 15)
    error = values.to(tl.float64) * step[:, None] - x.to(tl.float64)
    return tl.sum(error * error, 1)


@triton.jit
def _mxfp4_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    blocks,
    RULE: tl.constexpr,
    TIES: tl.constexpr,
    ZEROS: tl.constexpr,
    MIN_BYTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    x0, x1 = eight_values(x_ptr, block * 32, here), eight_values(x_ptr, block * 32 + 8, here)
    x2, x3 = eight_values(x_ptr, block * 32 + 16, here), eight_values(x_ptr, block * 32 + 24, here)
    amax = larger(largest_magnitude(x0, 1), largest_magnitude(x1, 1))
    amax = larger(amax, larger(largest_magnitude(x2, 1), largest_magnitude(x3, 1)))
    byte = mxfp4_scale_bytes(amax, RULE)
    invalid = byte == 255
    divided = tl.where(byte == 0, 127, byte) if RULE == "torchao" else byte
    word0, word1, word2, word3 = _mxfp4_words(x0, x1, x2, x3, divided, invalid, TIES, ZEROS)
    if RULE == "mse":
        least = _mxfp4_error(x0, x1, x2, x3, word0, word1, word2, word3, byte)
        exponent = (float_bits(amax) >> 23) - 2
        first = byte
        for step in tl.static_range(2):
            other = tl.minimum(tl.maximum(exponent + (1 - 2 * step), 0), 252)
            other = tl.where(amax == 0, 0, tl.where(first == 255, 255, other))
            found0, found1, found2, found3 = _mxfp4_words(x0, x1, x2, x3, other, invalid, TIES, ZEROS)
            error = _mxfp4_error(x0, x1, x2, x3, found0, found1, found2, found3, other)
            better = error < least
            byte = tl.where(better, other, byte)
            word0 = tl.where(better, found0, word0)
            word1 = tl.where(better, found1, word1)
            word2 = tl.where(better, found2, word2)
            word3 = tl.where(better, found3, word3)
            least = tl.where(better, error, least)
    byte = tl.maximum(byte, MIN_BYTE)
    at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [ROWS, 4])
    tl.store(words_ptr + at, words, mask=here[:, None])
    tl.store(scales_ptr + block, byte.to(tl.uint8), mask=here)


@triton.jit
def _mxfp4_words(x0, x1, x2, x3, byte, invalid, TIES: tl.constexpr, ZEROS: tl.constexpr):
    """The four words of codes of blocks `x0` to `x3` `[ROWS, 8]` under the scale bytes `byte`."""
    inverse, limit = e8m0_inverses(byte)[:, None], sign_limit(invalid)[:, None]
    word0 = pack_words(e2m1_codes(x0 * inverse, x0, limit, TIES, ZEROS))
    word1 = pack_words(e2m1_codes(x1 * inverse, x1, limit, TIES, ZEROS))
    word2 = pack_words(e2m1_codes(x2 * inverse, x2, limit, TIES, ZEROS))
    return word0, word1, word2, pack_words(e2m1_codes(x3 * inverse, x3, limit, TIES, ZEROS))


@triton.jit
def _mxfp4_error(x0, x1, x2, x3, word0, word1, word2, word3, byte):
    """Sum of squared errors of each block, float64; NaN for byte 255."""
    step = tl.div_rn(tl.full(byte.shape, 1.0, tl.float32), e8m0_inverses(byte)).to(tl.float64)
    error = squared_error(x0, word0, step) + squared_error(x1, word1, step)
    return error + squared_error(x2, word2, step) + squared_error(x3, word3, step)
