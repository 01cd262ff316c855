"""The sums of the error algebra of NVFP4 and of MXFP4 made from it, in one read of the weights and of the codes.

    sums = triton_errors.error_sums(w_nk, codes, scales, global_scale, "even")
    sums[SUMS.index("e1_e2")]

w = source, a = the decoded NVFP4, b = MXFP4(a), d = MXFP4(w); e1 = a - w, e2 = b - a, e = b - w. Errors and products
are float32, a block's sum is float32, sums over blocks float64, added in a fixed order, so a result repeats to the bit.
Against `analysis.algebra`, which is float64 throughout, <x, y> differs by less than 2e-6 of sqrt(<x, x> <y, y>).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, MXFP4_RULES, NVFP4_BLOCK, ScaleRule
from .triton_elements import (
    bits_float,
    e2m1_values,
    e4m3_values,
    e5m2_values,
    e8m0_inverses,
    e8m0_values,
    float_bits,
    largest_magnitude,
    unpack_codes,
    widened,
)
from .triton_launch import bytes_of, check_scales, flat_values, global_per_block, has_packed_bfloat16, scale_shape, tile
from .triton_quantize import mxfp4_scale_bytes
from .triton_requant import TABLE_WORTH, global_number, requant_block, requant_tables, runs_of_globals

SUMS = ("w_w", "e1_e1", "e2_e2", "e_e", "w_e1", "w_e2", "e1_e2", "w_b", "direct_direct")
_TILE = tile(2048)  # weights at a time
_TILES = 8  # that a program takes
_ROWS = tile(128)  # blocks of bfloat16 at a time: one a thread of 4 warps
_MEASURED = 7  # the rest follows from them: e = e1 + e2, b = w + e1 + e2


def error_sums(
    w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: ScaleRule | str = ScaleRule.EVEN
) -> Tensor:
    """SUMS over all elements of `w` `[..., N, K]`, float64 `[9]`, on w's device.

    packed, scales, global_scale: w in NVFP4. rule: of MXFP4: floor, even, rceil or ceil. Raises ValueError for another
    rule, for shapes that do not fit, or for a K that is not a multiple of 32.
    """
    rule = ScaleRule(rule)
    if rule not in MXFP4_RULES:
        raise ValueError(f"no fused error pass under {rule.value!r}; choose one of: {', '.join(MXFP4_RULES)}")
    scale_shape(w.shape, MXFP4_BLOCK)
    if check_scales(packed, scales, NVFP4_BLOCK) != w.shape:
        raise ValueError(f"codes {tuple(packed.shape)} are not those of weights {tuple(w.shape)}")
    found = torch.ops.workbench_kernels.error_sums(w, packed, scales.view(torch.uint8), global_scale, rule.value)
    w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct = found.unbind()
    e_e = e1_e1 + 2 * e1_e2 + e2_e2
    return torch.stack((w_w, e1_e1, e2_e2, e_e, w_e1, w_e2, e1_e2, w_w + w_e1 + w_e2, direct))


@torch.library.custom_op("workbench_kernels::error_sums", mutates_args=())
def _error_sums(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    words = w.dtype == torch.bfloat16
    blocks, rows = w.numel() // MXFP4_BLOCK, _ROWS if words else _TILE // MXFP4_BLOCK
    programs = triton.cdiv(blocks, rows * _TILES)
    partial = torch.zeros((programs, _MEASURED), dtype=torch.float64, device=w.device)
    if blocks and words:
        g, per_global = runs_of_globals(global_scale, scales.shape)
        tabled = scales.numel() < 1 << 31 and (per_global or scales.numel()) >= TABLE_WORTH
        exponents, values = requant_tables(g, rule, values=True) if tabled else (g, g)
        _error_words_kernel[(programs,)](
            w.contiguous().view(torch.int32),
            bytes_of(packed).view(torch.int32),
            scales.contiguous(),
            g,
            exponents,
            values,
            partial,
            blocks,
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            TABLED=tabled,
            PACKED=has_packed_bfloat16(w.device),
            ROWS=rows,
            TILES=_TILES,
            num_warps=4,
        )
    elif blocks:
        g, per_global = global_per_block(global_scale, scales.shape)
        _error_kernel[(programs,)](
            flat_values(w),
            bytes_of(packed),
            scales.contiguous(),
            g,
            partial,
            blocks,
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            ROWS=rows,
            TILES=_TILES,
            num_warps=4,
        )
    return partial.sum(0)


@_error_sums.register_fake
def _(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    return w.new_empty((_MEASURED,), dtype=torch.float64)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _error_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    g_ptr,
    partial_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    w_w = tl.zeros([ROWS], tl.float64)
    e1_e1 = w_w
    e2_e2 = w_w
    w_e1 = w_w
    w_e2 = w_w
    e1_e2 = w_w
    direct = w_w
    for i in range(TILES):
        block = (program * TILES + i) * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        w = widened(tl.load(x_ptr + at, mask=here[:, None], other=0.0))
        packed = tl.load(packed_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :], mask=here[:, None], other=0)
        half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        step = e4m3_values(tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32))
        if ONE_GLOBAL:
            step *= tl.load(g_ptr)
        else:
            step *= tl.load(g_ptr + half // per_global, mask=here[:, None], other=1.0)
        codes = tl.reshape(unpack_codes(packed, ROWS, 32), [ROWS, 2, 16])
        a = tl.reshape(e2m1_values(codes) * step[:, :, None], [ROWS, 32])
        e1 = a - w
        e2 = _rounding_error(a, RULE)
        e_direct = _rounding_error(w, RULE)
        w_w += tl.sum(w * w, 1).to(tl.float64)
        e1_e1 += tl.sum(e1 * e1, 1).to(tl.float64)
        e2_e2 += tl.sum(e2 * e2, 1).to(tl.float64)
        w_e1 += tl.sum(w * e1, 1).to(tl.float64)
        w_e2 += tl.sum(w * e2, 1).to(tl.float64)
        e1_e2 += tl.sum(e1 * e2, 1).to(tl.float64)
        direct += tl.sum(e_direct * e_direct, 1).to(tl.float64)
    out = partial_ptr + program * 7
    tl.store(out, tl.sum(w_w, 0))
    tl.store(out + 1, tl.sum(e1_e1, 0))
    tl.store(out + 2, tl.sum(e2_e2, 0))
    tl.store(out + 3, tl.sum(w_e1, 0))
    tl.store(out + 4, tl.sum(w_e2, 0))
    tl.store(out + 5, tl.sum(e1_e2, 0))
    tl.store(out + 6, tl.sum(direct, 0))


@triton.jit
def _rounding_error(x, RULE: tl.constexpr):
    """MXFP4(x) - x of blocks `x` `[ROWS, 32]`, float32."""
    byte = mxfp4_scale_bytes(largest_magnitude(x, 1), RULE)
    return _nearest(x * e8m0_inverses(byte)[:, None]) * e8m0_values(byte)[:, None] - x


@triton.jit
def _nearest(q):
    """The E2M1 value nearest to `q`: adding 1.5 * 2**(22 + exponent) leaves one bit of mantissa, ties to even."""
    q = tl.minimum(tl.maximum(q, -6.0), 6.0)
    exponent = tl.maximum(float_bits(q) & 0x7F800000, 0x3F800000)  # below 1 the spacing is that of 1
    large = bits_float((exponent + (22 << 23)) | 0x400000)
    return (q + large) - large


# ---- bfloat16, a block a thread --------------------------------------------------------------------------------------


@triton.jit
def _error_words_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    g_ptr,
    exponents_ptr,
    values_ptr,
    partial_ptr,
    blocks,
    per_global,
    RULE: tl.constexpr,
    ONE_GLOBAL: tl.constexpr,
    TABLED: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """As `_error_kernel`, for bfloat16 in words of two and codes in words of eight.

    All of an element's numbers are taken times the sign of its code, which no sum notices.
    """
    program = tl.program_id(0).to(tl.int64)
    w_w = tl.zeros([ROWS], tl.float64)
    e1_e1 = w_w
    e2_e2 = w_w
    w_e1 = w_w
    w_e2 = w_w
    e1_e2 = w_w
    direct = w_w
    for i in range(TILES):
        tile = program * TILES + i
        block = tile * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        codes = tl.reshape(tl.load(words_ptr + at, mask=here[:, None], other=0), [ROWS, 2, 2])
        half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        scale = tl.load(scales_ptr + half, mask=here[:, None], other=0).to(tl.int32)
        table = global_number(block, tile, ROWS, here, per_global, ONE_GLOBAL, TABLED)
        even, odd = tl.split(codes)
        byte, low, high = requant_block(
            even, odd, scale, g_ptr, table, exponents_ptr, values_ptr, RULE, TABLED, PACKED, True
        )
        step = e4m3_values(scale) * tl.load(g_ptr + table)
        size = e8m0_values(byte)[:, None]  # of b, with the sign of the step of a
        size = bits_float((float_bits(size) & 0x7FFFFFFF) | (float_bits(step) & -2147483648))
        step0, step1 = tl.split(step)
        size0, size1 = tl.split(size)
        low0, low1 = tl.split(low)
        high0, high1 = tl.split(high)
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        x0, x1, x2, x3 = _four_words(x_ptr, block * 16, here)
        x4, x5, x6, x7 = _four_words(x_ptr, block * 16 + 4, here)
        x8, x9, x10, x11 = _four_words(x_ptr, block * 16 + 8, here)
        x12, x13, x14, x15 = _four_words(x_ptr, block * 16 + 12, here)
        most = _larger_pairs(_largest_pair(x0, x1, x2, x3, PACKED), _largest_pair(x4, x5, x6, x7, PACKED), PACKED)
        rest = _larger_pairs(_largest_pair(x8, x9, x10, x11, PACKED), _largest_pair(x12, x13, x14, x15, PACKED), PACKED)
        most = _larger_pairs(most, rest, PACKED)
        own = mxfp4_scale_bytes(bits_float(tl.maximum(most & 0xFFFF, most >> 16) << 16), RULE)
        zero = tl.zeros([ROWS], tl.float32)
        sums = (zero, zero, zero, zero, zero, zero, zero)
        sums = _eight_errors(sums, x0, x1, x2, x3, word0, low0, high0, step0, size0, own, PACKED)
        sums = _eight_errors(sums, x4, x5, x6, x7, word1, low0, high0, step0, size0, own, PACKED)
        sums = _eight_errors(sums, x8, x9, x10, x11, word2, low1, high1, step1, size1, own, PACKED)
        sums = _eight_errors(sums, x12, x13, x14, x15, word3, low1, high1, step1, size1, own, PACKED)
        w_w += sums[0].to(tl.float64)
        e1_e1 += sums[1].to(tl.float64)
        e2_e2 += sums[2].to(tl.float64)
        w_e1 += sums[3].to(tl.float64)
        w_e2 += sums[4].to(tl.float64)
        e1_e2 += sums[5].to(tl.float64)
        unit = e8m0_values(own).to(tl.float64)
        direct += tl.where(here, sums[6].to(tl.float64) * unit * unit, 0.0)
    out = partial_ptr + program * 7
    tl.store(out, tl.sum(w_w, 0))
    tl.store(out + 1, tl.sum(e1_e1, 0))
    tl.store(out + 2, tl.sum(e2_e2, 0))
    tl.store(out + 3, tl.sum(w_e1, 0))
    tl.store(out + 4, tl.sum(w_e2, 0))
    tl.store(out + 5, tl.sum(e1_e2, 0))
    tl.store(out + 6, tl.sum(direct, 0))


@triton.jit
def _four_words(x_ptr, first, here):
    """Four words from `first` `[ROWS]` on: 16 bytes, one read of a thread."""
    at = first[:, None] + tl.arange(0, 4)[None, :]
    x = tl.reshape(tl.load(x_ptr + at, mask=here[:, None], other=0), [here.shape[0], 2, 2])
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _largest_pair(x0, x1, x2, x3, PACKED: tl.constexpr):
    """Largest magnitudes, as bits, of the lower and of the upper halves of four words."""
    m: tl.constexpr = 0x7FFF7FFF
    return _larger_pairs(_larger_pairs(x0 & m, x1 & m, PACKED), _larger_pairs(x2 & m, x3 & m, PACKED), PACKED)


@triton.jit
def _larger_pairs(a, b, PACKED: tl.constexpr):
    if PACKED:
        largest = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)
    else:
        largest = tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    return largest


@triton.jit
def _eight_errors(sums, x0, x1, x2, x3, word, low, high, step, size, own, PACKED: tl.constexpr):
    """`sums` and those of eight weights: `x0` to `x3` bfloat16 pairs, `word` their codes.

    low, high: values of b by a's magnitude codes, E5M2; step, size: the steps of a and b; own: the E8M0 byte of d.
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = _magnitudes(word, 0x3E3C3800, 0x46444240, PACKED)
    b0, b1, b2, b3, b4, b5, b6, b7 = _magnitudes(word, low, high, PACKED)
    s0, s1, s2, s3 = _signs(word, PACKED)
    sums = _pair_errors(sums, x0, s0, a0, a1, b0, b1, step, size, own, PACKED)
    sums = _pair_errors(sums, x1, s1, a2, a3, b2, b3, step, size, own, PACKED)
    sums = _pair_errors(sums, x2, s2, a4, a5, b4, b5, step, size, own, PACKED)
    return _pair_errors(sums, x3, s3, a6, a7, b6, b7, step, size, own, PACKED)


@triton.jit
def _pair_errors(sums, x, signs, a0, a1, b0, b1, step, size, own, PACKED: tl.constexpr):
    d0, d1 = _direct_errors(x & 0x7FFF7FFF, own, PACKED)
    x = x ^ (signs & -2147450880)  # 0x80008000
    w0, w1 = bits_float(x << 16), bits_float(x & -65536)
    sums = _one_error(sums, w0, a0 * step, b0 * size, d0)
    return _one_error(sums, w1, a1 * step, b1 * size, d1)


@triton.jit
def _one_error(sums, w, a, b, d):
    w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct = sums
    e1 = a - w
    e2 = b - a
    w_w += w * w
    e1_e1 += e1 * e1
    e2_e2 += e2 * e2
    w_e1 += w * e1
    w_e2 += w * e2
    e1_e2 += e1 * e2
    direct += d * d
    return w_w, e1_e1, e2_e2, w_e1, w_e2, e1_e2, direct


@triton.jit
def _signs(word, PACKED: tl.constexpr):
    """Four words whose bits 15 and 31 are the signs of two of the eight codes each."""
    if PACKED:
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shl.b32 t, $4, 4;
            prmt.b32 $0, $4, t, 0x0040;
            prmt.b32 $1, $4, t, 0x1050;
            prmt.b32 $2, $4, t, 0x2060;
            prmt.b32 $3, $4, t, 0x3070;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        s0 = ((word << 12) & 0x8000) | ((word << 24) & -2147483648)
        s1 = ((word << 4) & 0x8000) | ((word << 16) & -2147483648)
        s2 = ((word >> 4) & 0x8000) | ((word << 8) & -2147483648)
        s3 = ((word >> 12) & 0x8000) | (word & -2147483648)
    return s0, s1, s2, s3


@triton.jit
def _magnitudes(word, low, high, PACKED: tl.constexpr):
    """The eight codes' magnitudes, float32, through a table of eight E5M2 bytes."""
    if PACKED:
        m0, m1, m2, m3, m4, m5, m6, m7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, a, b, p;
            .reg .b16 l, h;
            and.b32 s, $8, 0x77777777;
            prmt.b32 a, $9, $10, s;
            shr.u32 s, s, 16;
            prmt.b32 b, $9, $10, s;
            prmt.b32 p, a, 0, 0x1404;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $0, l;
            cvt.f32.f16 $1, h;
            prmt.b32 p, a, 0, 0x3424;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $2, l;
            cvt.f32.f16 $3, h;
            prmt.b32 p, b, 0, 0x1404;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $4, l;
            cvt.f32.f16 $5, h;
            prmt.b32 p, b, 0, 0x3424;
            mov.b32 {l, h}, p;
            cvt.f32.f16 $6, l;
            cvt.f32.f16 $7, h;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r",
            [word, low, high],
            dtype=(
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
                tl.float32,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        m0, m1 = _magnitude(word, low, high), _magnitude(word >> 4, low, high)
        m2, m3 = _magnitude(word >> 8, low, high), _magnitude(word >> 12, low, high)
        m4, m5 = _magnitude(word >> 16, low, high), _magnitude(word >> 20, low, high)
        m6, m7 = _magnitude(word >> 24, low, high), _magnitude(word >> 28, low, high)
    return m0, m1, m2, m3, m4, m5, m6, m7


@triton.jit
def _magnitude(word, low, high):
    code = word & 7
    return e5m2_values((tl.where(code < 4, low, high) >> ((code & 3) << 3)) & 255)


@triton.jit
def _direct_errors(x, byte, PACKED: tl.constexpr):
    """MXFP4(x) - x of a pair of magnitudes, in units of the E8M0 scale `byte`, float32."""
    if PACKED:  # the quotient, its rounding and the error are all exact in bfloat16; `_nearest` for two
        inverse = tl.where(byte == 255, 0x7FC0, (254 - byte) << 7)
        d0, d1 = tl.inline_asm_elementwise(
            """{
            .reg .b32 q, m, h, one, six;
            mov.b32 one, 0x3F803F80;
            mov.b32 six, 0x40C040C0;
            mul.rn.bf16x2 q, $2, $3;
            and.b32 m, q, 0x7F807F80;
            max.u16x2 m, m, one;
            add.u32 m, m, 0x03400340;
            add.rn.bf16x2 h, q, m;
            sub.rn.bf16x2 h, h, m;
            min.bf16x2 h, h, six;
            sub.rn.bf16x2 h, h, q;
            shl.b32 $0, h, 16;
            and.b32 $1, h, 0xFFFF0000;
            }""",
            "=&r,=&r,r,r",
            [x, inverse | (inverse << 16)],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        d0, d1 = bits_float(d0), bits_float(d1)
    else:
        q0 = bits_float(x << 16) * e8m0_inverses(byte)
        q1 = bits_float(x & -65536) * e8m0_inverses(byte)
        d0, d1 = _nearest(q0) - q0, _nearest(q1) - q1
    return d0, d1
