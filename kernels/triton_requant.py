"""NVFP4 to MXFP4 in one pass over the codes: no weight is ever decoded.

    codes, scale_bytes = triton_requant.nvfp4_to_mxfp4(codes, scales, global_scale, "even")

Equals `reference.mxfp4_quantize(reference.nvfp4_dequantize(codes, scales, global_scale), rule)`, and moves 1.09 bytes a
weight where a detour through bfloat16 moves 5.09. Within 16 weights that share a scale the new code depends on the old
one alone, through the E4M3 scale byte and the block's new exponent. Under one global scale these take few values, so
all answers are tables of 18 KiB, made first: the new scale byte of (scale byte, largest code), and the eight new codes
of (scale byte, exponent). A weight then costs a lookup in eight nibbles: a byte permutation (PRMT) on NVIDIA cards,
shifts elsewhere. Where a global scale has too few weights for a table (one a row, say), the eight codes of each half
block are rounded where they are used. In blocks whose scale is NaN (byte 255) all codes are 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule
from .triton_elements import bits_float, e2m1_magnitude_codes, e2m1_values, e4m3_values, e8m0_inverses, float_bits
from .triton_launch import EXACT, bytes_of, check_scales, has_permute, scale_shape, tile
from .triton_scales import mxfp4_scale_bytes

_ROWS = tile(128)  # blocks a program: one a thread of 4 warps
TABLE_WORTH = 1 << 13  # half blocks of one global scale from which on its table pays
_OFFSETS = tl.constexpr(16)  # exponents of the new scale against the old one; beyond 12 every code is 0


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
    g, per_global = runs_of_globals(global_scale, scales.shape)
    if scale_bytes.numel():
        tabled = scales.numel() < 1 << 31 and (per_global or scales.numel()) >= TABLE_WORTH
        byte_table, code_table = requant_tables(g, rule) if tabled else (g, g)
        _requant_kernel[(triton.cdiv(scale_bytes.numel(), _ROWS),)](
            bytes_of(packed).view(torch.int32),
            scales.contiguous(),
            g,
            byte_table,
            code_table,
            codes.view(torch.int32),
            scale_bytes,
            scale_bytes.numel(),
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            TABLED=tabled,
            PERMUTE=has_permute(),
            ROWS=_ROWS,
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


def runs_of_globals(global_scale: Tensor, shape: torch.Size) -> tuple[Tensor, int]:
    """`global_per_block`, with the last dimensions over which a global scale does not change in one run.

    One scale an expert, `[E, 1, 1]`, so stays E scales and is not spread over the rows.
    """
    g = global_scale.float()
    if g.numel() == 1:
        return g.reshape(1), 0
    sizes = (1,) * (len(shape) - g.dim()) + tuple(g.shape)
    last = max(i for i, size in enumerate(sizes) if size != 1)
    return g.reshape(sizes[: last + 1]).expand(shape[: last + 1]).contiguous().view(-1), shape[last + 1 :].numel()


def requant_tables(g: Tensor, rule: str, *, values: bool = False) -> tuple[Tensor, Tensor]:
    """For each decode multiplier of `g` `[G]`: exponents `[G, 128, 8]` int16 and new codes `[G, 128, 16]` int64.

    The first is indexed by the scale byte without its sign and the largest magnitude code under it, and holds the E8M0
    byte and, times 256, the exponent of the old step; the second by the scale byte and by how far the block's E8M0 byte
    lies above that exponent (`_OFFSETS`, from -4 on), and holds eight bytes, one a magnitude code. values: the bytes
    are not codes but twice their magnitudes.
    """
    exponents = torch.empty((g.numel(), 128, 8), dtype=torch.int16, device=g.device)
    codes = torch.empty((g.numel(), 128, 16), dtype=torch.int64, device=g.device)
    _table_kernel[(g.numel(), 8)](g, exponents, codes, RULE=rule, VALUES=values, SCALES=16, num_warps=2, **EXACT)
    return exponents, codes


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _table_kernel(g_ptr, exponents_ptr, codes_ptr, RULE: tl.constexpr, VALUES: tl.constexpr, SCALES: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    scale = tl.program_id(1) * SCALES + tl.arange(0, SCALES)
    size = tl.abs(e4m3_values(scale) * tl.load(g_ptr + one))
    old = float_bits(size) >> 23
    code = tl.arange(0, 8)
    amax = float_bits(e2m1_values(code)[None, :] * size[:, None]) & 0x7FFFFFFF
    byte = mxfp4_scale_bytes(bits_float(amax), RULE) | (old << 8)[:, None]
    tl.store(exponents_ptr + one * 1024 + scale[:, None] * 8 + code[None, :], byte.to(tl.int16))
    offset = tl.arange(0, _OFFSETS)[None, :]
    inverse = e8m0_inverses(tl.minimum(tl.maximum(old[:, None] + offset - 4, 0), 253))
    low, high = _new_codes(tl.broadcast_to(size[:, None], [SCALES, _OFFSETS]), inverse, VALUES)
    word = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    tl.store(codes_ptr + one * (128 * _OFFSETS) + scale[:, None] * _OFFSETS + offset, word)


@triton.jit
def _new_codes(size, inverse, VALUES: tl.constexpr):
    """MXFP4's magnitude codes of E2M1's eight magnitudes with the step `size`: bytes, four in each of two words.

    inverse: of MXFP4's step. VALUES: not the codes but twice their magnitudes.
    """
    low = (_new_code(size, 0.5, inverse, VALUES) << 8) | (_new_code(size, 1.0, inverse, VALUES) << 16)
    low |= _new_code(size, 1.5, inverse, VALUES) << 24
    high = _new_code(size, 2.0, inverse, VALUES) | (_new_code(size, 3.0, inverse, VALUES) << 8)
    return low, high | (_new_code(size, 4.0, inverse, VALUES) << 16) | (_new_code(size, 6.0, inverse, VALUES) << 24)


@triton.jit
def _new_code(size, magnitude, inverse, VALUES: tl.constexpr):
    code = e2m1_magnitude_codes(size * magnitude * inverse, "even")
    if VALUES:
        code = tl.where(code < 4, code, (4 | ((code & 1) << 1)) << ((code >> 1) & 1))
    return code


@triton.jit
def requant_block(
    even,
    odd,
    scale,
    g_ptr,
    table,
    exponents_ptr,
    codes_ptr,
    RULE: tl.constexpr,
    TABLED: tl.constexpr,
    PERMUTE: tl.constexpr,
    VALUES: tl.constexpr,
):
    """E8M0 bytes `[ROWS]` of blocks of two halves, and their new codes by old ones: bytes of two words `[ROWS, 2]`.

    even, odd: the first and the second word of codes of each half; scale: its byte; table: its global scale's number.
    VALUES: twice the new codes' magnitudes, whatever they are where the E8M0 byte is 255.
    """
    largest = largest_code(even, odd, PERMUTE)
    at = scale & 127
    if TABLED:
        row = table * 128 + at
        found = tl.load(exponents_ptr + ((row << 3) | largest)).to(tl.int32) & 0xFFFF
        byte = tl.max(found & 255, 1)
        both = tl.broadcast_to(byte[:, None], found.shape)
        offset = tl.minimum(tl.maximum(both + 4 - (found >> 8), 0), _OFFSETS - 1)
        word = tl.load(codes_ptr + ((row * _OFFSETS) | offset))
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    else:
        size = tl.abs(e4m3_values(at) * tl.load(g_ptr + table))
        amax = float_bits(e2m1_values(largest) * size) & 0x7FFFFFFF
        byte = tl.max(mxfp4_scale_bytes(bits_float(amax), RULE), 1)
        both = tl.broadcast_to(byte[:, None], size.shape)
        low, high = _new_codes(size, e8m0_inverses(both), VALUES)
    if not VALUES:
        low, high = tl.where(both == 255, 0x07070707, low), tl.where(both == 255, 0x07070707, high)
    return byte, low, high


@triton.jit
def global_number(block, tile, ROWS: tl.constexpr, here, per_global, ONE_GLOBAL: tl.constexpr, TABLED: tl.constexpr):
    """Which global scale each half of the blocks `[ROWS]` of the `tile`-th tile has, `[ROWS, 2]`; 0 if not `here`."""
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    if ONE_GLOBAL:
        table = tl.zeros([ROWS, 2], tl.int32)
    elif TABLED:  # a run is longer than a program's part, so there is at most one border; sizes are below 2**31
        first = tile.to(tl.int32) * (ROWS * 2)
        run = first // per_global
        table = run + (half.to(tl.int32) >= (run + 1) * per_global).to(tl.int32)
    else:
        table = half // per_global
    return tl.where(here[:, None], table, 0)


@triton.jit
def _requant_kernel(
    words_ptr,
    scales_ptr,
    g_ptr,
    exponents_ptr,
    codes_ptr,
    out_ptr,
    out_scales_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    TABLED: tl.constexpr,
    PERMUTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = block < blocks
    at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.reshape(tl.load(words_ptr + at, mask=here[:, None], other=0), [ROWS, 2, 2])
    even, odd = tl.split(words)  # [ROWS, 2]: the first and the second word of each half
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    scale = tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32)
    table = global_number(block, tl.program_id(0), ROWS, here, per_global, ONE_GLOBAL, TABLED)
    byte, low, high = requant_block(
        even, odd, scale, g_ptr, table, exponents_ptr, codes_ptr, RULE, TABLED, PERMUTE, False
    )
    negative = (scale << 24) ^ float_bits(tl.load(g_ptr + table))
    kept = tl.where(byte == 255, 0, -2004318072)[:, None]  # 0x88888888, the signs; none where the scale is NaN
    flipped = tl.where(negative < 0, kept, 0)
    even = _looked_up(even, low, high, PERMUTE) | ((even & kept) ^ flipped)
    odd = _looked_up(odd, low, high, PERMUTE) | ((odd & kept) ^ flipped)
    tl.store(out_ptr + at, tl.reshape(tl.join(even, odd), [ROWS, 4]), mask=here[:, None])
    tl.store(out_scales_ptr + block, byte.to(tl.uint8), mask=here)


@triton.jit
def _looked_up(word, low, high, PERMUTE: tl.constexpr):
    """Eight nibbles through a table of eight bytes, by their magnitude codes."""
    if PERMUTE:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, a, b;
            and.b32 s, $1, 0x77777777;
            prmt.b32 a, $2, $3, s;
            shr.u32 s, s, 16;
            prmt.b32 b, $2, $3, s;
            mad.hi.u32 a, a, 0x10000000, a;
            mad.hi.u32 b, b, 0x10000000, b;
            prmt.b32 $0, a, b, 0x6420;
            }""",
            "=r,r,r,r",
            [word, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = word & 0
        for j in tl.static_range(8):
            code = word >> (4 * j) & 7
            found |= ((tl.where(code < 4, low, high) >> ((code & 3) << 3)) & 7) << (4 * j)
    return found


@triton.jit
def largest_code(w0, w1, PERMUTE: tl.constexpr):
    """Largest magnitude code (int32, 0..7) of 16, eight nibbles a word."""
    if PERMUTE:  # a bit a code, gathered from all nibbles; the highest one counts
        largest = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, a, b, c, d, t;
            and.b32 s, $1, 0x77777777;
            prmt.b32 a, 0x08040201, 0x80402010, s;
            shr.u32 s, s, 16;
            prmt.b32 b, 0x08040201, 0x80402010, s;
            and.b32 t, $2, 0x77777777;
            prmt.b32 c, 0x08040201, 0x80402010, t;
            shr.u32 t, t, 16;
            prmt.b32 d, 0x08040201, 0x80402010, t;
            lop3.b32 a, a, b, c, 0xFE;
            or.b32 a, a, d;
            shr.u32 b, a, 16;
            or.b32 a, a, b;
            shr.u32 b, a, 8;
            or.b32 a, a, b;
            and.b32 a, a, 255;
            bfind.u32 $0, a;
            }""",
            "=r,r,r",
            [w0, w1],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:  # a nibble's bits meet at one place by shifting: w & (w << 1) has b2 & b1 at bit 2, and b1 & b0 at bit 1
        any_bit = w0 | w1
        pairs = (w0 & (w0 << 1)) | (w1 & (w1 << 1))
        ends = (w0 & (w0 << 2)) | (w1 & (w1 << 2))
        all_bits = (w0 & (w0 << 1) & (w0 << 2)) | (w1 & (w1 << 1) & (w1 << 2))
        four = (any_bit & 0x44444444) != 0
        two = tl.where(four, pairs & 0x44444444, any_bit & 0x22222222) != 0
        above = tl.where(two, all_bits, ends) & 0x44444444
        below = tl.where(two, pairs & 0x22222222, any_bit & 0x11111111)
        one = tl.where(four, above, below) != 0
        largest = tl.where(four, 4, 0) + tl.where(two, 2, 0) + tl.where(one, 1, 0)
    return largest
