"""NVFP4 to MXFP4 in one pass over the codes: no weight is ever decoded.

    codes, scale_bytes = triton_requant.nvfp4_to_mxfp4(codes, scales, global_scale, "even")

Equals `reference.mxfp4_quantize(reference.nvfp4_dequantize(codes, scales, global_scale), rule)`, and moves 1.09 bytes a
weight where a detour through bfloat16 moves 5.09. Within 16 weights that share a scale the new code depends on the old
one alone, so eight magnitudes are rounded and looked up 16 times; the block's largest magnitude is its largest code
times its scale, and the largest code of 16 is found by bit operations on two words. The lookup is a byte permutation
(PRMT) on NVIDIA cards and shifts elsewhere. In blocks whose scale is NaN (byte 255) all codes are 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule
from .triton_elements import e2m1_magnitude_codes, e2m1_values, e4m3_values, e8m0_inverses, float_bits
from .triton_launch import EXACT, bytes_of, check_scales, global_per_block, has_permute, scale_shape, tile
from .triton_quantize import mxfp4_scale_bytes

_TILE = tile(8192)  # weights a program: two times 16 bytes of codes a thread of 4 warps


def nvfp4_to_mxfp4(
    packed: Tensor, scales: Tensor, global_scale: Tensor, rule: ScaleRule | str = ScaleRule.EVEN
) -> tuple[Tensor, Tensor]:
    """NVFP4 `[..., K/2]` uint8 and scales `[..., K/16]` float8_e4m3fn to MXFP4 codes and E8M0 bytes `[..., K/32]`.

    global_scale: decode multiplier, broadcastable to the scales: one, or one a shard, row or expert. rule: floor, even,
    rceil or ceil. Raises ValueError for another rule, or for a K that is not a multiple of 32.
    """
    rule = ScaleRule(rule)
    if rule not in MXFP4_RULES:
        raise ValueError(f"no fused requantization under {rule.value!r}; choose one of: {', '.join(MXFP4_RULES)}")
    scale_shape(check_scales(packed, scales, NVFP4_BLOCK), MXFP4_BLOCK)
    return torch.ops.workbench_kernels.nvfp4_to_mxfp4(packed, scales.view(torch.uint8), global_scale, rule.value)


@torch.library.custom_op("workbench_kernels::nvfp4_to_mxfp4", mutates_args=())
def _nvfp4_to_mxfp4(packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    codes, scale_bytes = _empty(packed, scales)
    g, per_global = global_per_block(global_scale, scales.shape)
    blocks, rows = scale_bytes.numel(), _TILE // MXFP4_BLOCK
    if blocks:
        _requant_kernel[(triton.cdiv(blocks, rows),)](
            bytes_of(packed).view(torch.int32),
            scales.contiguous(),
            g,
            codes.view(torch.int32),
            scale_bytes,
            blocks,
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            PERMUTE=has_permute(),
            ROWS=rows,
            num_warps=4,
            **EXACT,
        )
    return codes, scale_bytes


@_nvfp4_to_mxfp4.register_fake
def _(packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    return _empty(packed, scales)


def _empty(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    codes = packed.new_empty(packed.shape, dtype=torch.uint8)
    return codes, scales.new_empty((*scales.shape[:-1], scales.shape[-1] // 2), dtype=torch.uint8)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _requant_kernel(
    words_ptr,
    scales_ptr,
    g_ptr,
    out_ptr,
    out_scales_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    PERMUTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    word = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.reshape(tl.load(words_ptr + word, mask=here[:, None], other=0), [ROWS, 2, 2])
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    scale = e4m3_values(tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32))
    if ONE_GLOBAL:
        step = scale * tl.load(g_ptr)
    else:
        step = scale * tl.load(g_ptr + half // per_global, mask=here[:, None], other=1.0)
    size = tl.abs(step)  # [ROWS, 2]
    amax = tl.max(float_bits(e2m1_values(_largest_code(words)) * size) & 0x7FFFFFFF, 1)
    byte = mxfp4_scale_bytes(amax.to(tl.float32, bitcast=True), RULE)
    inverse = e8m0_inverses(byte)[:, None]  # NaN in a block that gets byte 255, and so all its codes are 7
    low = tl.where(byte == 255, 7, 0)[:, None] | (_new_code(size, 0.5, inverse) << (8 if PERMUTE else 4))
    if PERMUTE:
        low |= (_new_code(size, 1.0, inverse) << 16) | (_new_code(size, 1.5, inverse) << 24)
        high = _new_code(size, 2.0, inverse) | (_new_code(size, 3.0, inverse) << 8)
        high |= (_new_code(size, 4.0, inverse) << 16) | (_new_code(size, 6.0, inverse) << 24)
    else:
        low |= (_new_code(size, 1.0, inverse) << 8) | (_new_code(size, 1.5, inverse) << 12)
        low |= (_new_code(size, 2.0, inverse) << 16) | (_new_code(size, 3.0, inverse) << 20)
        low |= (_new_code(size, 4.0, inverse) << 24) | (_new_code(size, 6.0, inverse) << 28)
    shape: tl.constexpr = [ROWS, 2, 2]
    table = tl.broadcast_to(low[:, :, None], shape)
    if PERMUTE:
        found = _permuted(words, table, tl.broadcast_to(high[:, :, None], shape))
    else:
        found = tl.zeros(shape, tl.int32)
        for j in tl.static_range(8):
            found |= ((table >> ((words >> (4 * j) & 7) << 2)) & 7) << (4 * j)
    signs = tl.where(byte == 255, 0, -2004318072)[:, None, None]  # 0x88888888
    flipped = tl.where(float_bits(step) < 0, -1, 0)[:, :, None]
    found |= (words ^ flipped) & signs
    tl.store(out_ptr + word, tl.reshape(found, [ROWS, 4]), mask=here[:, None])
    tl.store(out_scales_ptr + block, byte.to(tl.uint8), mask=here)


@triton.jit
def _new_code(size, magnitude, inverse):
    """MXFP4's magnitude code of an E2M1 magnitude with the step `size`; `inverse`: of MXFP4's step."""
    return e2m1_magnitude_codes(size * magnitude * inverse, "even")


@triton.jit
def _largest_code(words):
    """Largest magnitude code (int32, 0..7) of 16: `words` `[..., 2]`, eight nibbles each.

    A nibble's bits meet at one place by shifting: w & (w << 1) has b2 & b1 at bit 2, and b1 & b0 at bit 1.
    """
    w0, w1 = tl.split(words)
    any_bit = w0 | w1
    pairs = (w0 & (w0 << 1)) | (w1 & (w1 << 1))
    ends = (w0 & (w0 << 2)) | (w1 & (w1 << 2))
    all_bits = (w0 & (w0 << 1) & (w0 << 2)) | (w1 & (w1 << 1) & (w1 << 2))
    four = (any_bit & 0x44444444) != 0
    two = tl.where(four, pairs & 0x44444444, any_bit & 0x22222222) != 0
    above = tl.where(two, all_bits, ends) & 0x44444444
    below = tl.where(two, pairs & 0x22222222, any_bit & 0x11111111)
    one = tl.where(four, above, below) != 0
    return tl.where(four, 4, 0) + tl.where(two, 2, 0) + tl.where(one, 1, 0)


@triton.jit
def _permuted(words, low, high):
    """Eight nibbles through a table of eight bytes (low: entries 0..3): two permutations, and one that packs."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, a, b, t;
        and.b32 s, $1, 0x77777777;
        prmt.b32 a, $2, $3, s;
        shr.u32 s, s, 16;
        prmt.b32 b, $2, $3, s;
        shr.u32 t, a, 4;
        or.b32 a, a, t;
        shr.u32 t, b, 4;
        or.b32 b, b, t;
        prmt.b32 $0, a, b, 0x6420;
        }""",
        "=r,r,r,r",
        [words, low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
