"""The error pass with moments and attributions: everything `triton_errors` sums, and why the errors are what they are.

    details = triton_error_details.error_details(w_nk, codes, scales, global_scale, "even")
    details[DETAILS.index("e2 underflow")]

Still one read of the weights and of the codes, and no intermediate written; it costs about three times the arithmetic
of the core sums, so those have a kernel of their own. Definitions: `cpu_errors.SUMS` and `cpu_errors.PARTS`, where e1
is what rounding w to E2M1 in blocks of 16 did, and e2 what rounding a in blocks of 32 did. Values, products and the
sums of one thread (at most 512 elements) are float32, all other sums float64 in a fixed order; a fourth power below
1e-38 is lost. Where a weight or a scale is not finite, the parts of its error are NaN or those of the finite rest.
bfloat16 has a kernel of its own (`triton_details_pairs`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import MXFP4_BLOCK, ScaleRule
from .triton_details_pairs import detail_pairs_kernel
from .triton_elements import (
    divide,
    divisor,
    e2m1_rounded,
    e2m1_values,
    e4m3_values,
    e8m0_inverses,
    e8m0_values,
    larger,
    largest_magnitude,
)
from .triton_errors import PAIR_TILES, SUMS, checked_rule, finish_kernel, launch_pairs
from .triton_launch import bytes_of, flat_values, global_per_block, tile
from .triton_quantize import eight_values
from .triton_scales import mxfp4_scale_bytes

MOMENTS = ("w", "e1", "e2", "e2_e2_e2", "e2_e2_e2_e2")
PARTS = ("saturation", "underflow", "element", "saturated", "underflowed")
DETAILS = SUMS + MOMENTS + tuple(f"{error} {part}" for error in ("e1", "e2") for part in PARTS)
_ROWS = tile(128)  # blocks at a time: one a thread of 4 warps
_TILES = 4
_REGISTERS = None  # of a thread, for bfloat16: 96 when left to the compiler, spilled when told to take 128
_MEASURED = 7 + len(MOMENTS) + 2 * len(PARTS)


def error_details(
    w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: ScaleRule | str = ScaleRule.EVEN
) -> Tensor:
    """DETAILS over all elements of `w` `[..., N, K]`, float64 `[24]`, on w's device.

    packed, scales, global_scale: w in NVFP4. rule: of MXFP4: floor, even, rceil or ceil. Raises ValueError for another
    rule, for shapes that do not fit, or for a K that is not a multiple of 32.
    """
    name = checked_rule(w, packed, scales, rule)
    return torch.ops.workbench_kernels.error_details(w, packed, scales.view(torch.uint8), global_scale, name)


@torch.library.custom_op("workbench_kernels::error_details", mutates_args=())
def _error_details(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    blocks = w.numel() // MXFP4_BLOCK
    words = w.dtype == torch.bfloat16
    tiles = min(PAIR_TILES if words else _TILES, triton.next_power_of_2(triton.cdiv(blocks, _ROWS)))
    programs = triton.cdiv(blocks, _ROWS * max(tiles, 1))
    partial = torch.empty((programs, _MEASURED), dtype=torch.float64, device=w.device)
    sums = torch.empty((len(DETAILS),), dtype=torch.float64, device=w.device)
    if blocks and words:
        launch_pairs(detail_pairs_kernel, partial, w, packed, scales, global_scale, rule, tiles, _REGISTERS)
    elif blocks:
        g, per_global = global_per_block(global_scale, scales.shape)
        _details_kernel[(programs,)](
            flat_values(w),
            bytes_of(packed).view(torch.int32),
            scales.contiguous(),
            g,
            partial,
            blocks,
            max(per_global, 1),
            RULE=rule,
            ONE_GLOBAL=per_global == 0,
            ROWS=_ROWS,
            TILES=tiles,
            num_warps=4,
        )
    finish_kernel[(1,)](partial, sums, programs, MEASURED=_MEASURED, COLUMNS=32, PARTS=128, num_warps=8)
    return sums


@_error_details.register_fake
def _(w: Tensor, packed: Tensor, scales: Tensor, global_scale: Tensor, rule: str) -> Tensor:
    return w.new_empty((len(DETAILS),), dtype=torch.float64)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _details_kernel(
    x_ptr,
    words_ptr,
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
    zero = tl.zeros([ROWS], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    sums += (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for i in range(TILES):
        block = (program * TILES + i) * ROWS + tl.arange(0, ROWS)
        here = block < blocks
        x0, x1 = eight_values(x_ptr, block * 32, here), eight_values(x_ptr, block * 32 + 8, here)
        x2, x3 = eight_values(x_ptr, block * 32 + 16, here), eight_values(x_ptr, block * 32 + 24, here)
        at = block[:, None] * 4 + tl.arange(0, 4)[None, :]
        words = tl.reshape(tl.load(words_ptr + at, mask=here[:, None], other=0), [ROWS, 2, 2])
        even, odd = tl.split(words)
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        step0 = _step(scales_ptr, g_ptr, block * 2, here, per_global, ONE_GLOBAL)
        step1 = _step(scales_ptr, g_ptr, block * 2 + 1, here, per_global, ONE_GLOBAL)
        w_amax0 = larger(largest_magnitude(x0, 1), largest_magnitude(x1, 1))
        w_amax1 = larger(largest_magnitude(x2, 1), largest_magnitude(x3, 1))
        a_amax = larger(_largest_of_two(word0, word1, step0), _largest_of_two(word2, word3, step1))
        byte = mxfp4_scale_bytes(a_amax, RULE)
        own = mxfp4_scale_bytes(larger(w_amax0, w_amax1), RULE)
        first0, first1, second = _ideal(w_amax0), _ideal(w_amax1), _ideal(a_amax)
        sums = _eight_details(sums, x0, word0, step0, first0, byte, second, own)
        sums = _eight_details(sums, x1, word1, step0, first0, byte, second, own)
        sums = _eight_details(sums, x2, word2, step1, first1, byte, second, own)
        sums = _eight_details(sums, x3, word3, step1, first1, byte, second, own)
    for j in tl.static_range(22):
        tl.store(partial_ptr + program * 22 + j, tl.sum(sums[j].to(tl.float64), 0))


@triton.jit
def _step(scales_ptr, g_ptr, half, here, per_global, ONE_GLOBAL: tl.constexpr):
    scale = e4m3_values(tl.load(scales_ptr + half, mask=here, other=0).to(tl.int32))
    if ONE_GLOBAL:
        step = scale * tl.load(g_ptr)
    else:
        step = scale * tl.load(g_ptr + half // per_global, mask=here, other=1.0)
    return step


@triton.jit
def _largest_of_two(word0, word1, step):
    """The largest magnitude that sixteen codes decode to; NaN where the step is."""
    most = word0 & 7
    for j in tl.static_range(8):
        most = tl.maximum(most, tl.maximum(word0 >> (4 * j) & 7, word1 >> (4 * j) & 7))
    return tl.abs(e2m1_values(most) * step)


@triton.jit
def _ideal(amax):
    """A block's unrounded scale, the largest magnitude over 6 (1 for a block of zeros), as `divide` takes it."""
    exact = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    exact = tl.where(exact == 0, 1.0, exact)
    m, inverse, power = divisor(exact)
    return exact, m, inverse, power


@triton.jit
def _eight_details(sums, x, word, step, first, byte, second, own):
    """`sums` and those of eight elements a block: `x` `[ROWS, 8]`, everything else `[ROWS]`."""
    x = tl.reshape(x, [x.shape[0], 2, 2, 2])
    even, odd = tl.split(x)
    even0, even1 = tl.split(even)
    odd0, odd1 = tl.split(odd)
    x0, x4 = tl.split(even0)
    x2, x6 = tl.split(even1)
    x1, x5 = tl.split(odd0)
    x3, x7 = tl.split(odd1)
    sums = _one_detail(sums, x0, word, step, first, byte, second, own)
    sums = _one_detail(sums, x1, word >> 4, step, first, byte, second, own)
    sums = _one_detail(sums, x2, word >> 8, step, first, byte, second, own)
    sums = _one_detail(sums, x3, word >> 12, step, first, byte, second, own)
    sums = _one_detail(sums, x4, word >> 16, step, first, byte, second, own)
    sums = _one_detail(sums, x5, word >> 20, step, first, byte, second, own)
    sums = _one_detail(sums, x6, word >> 24, step, first, byte, second, own)
    return _one_detail(sums, x7, word >> 28, step, first, byte, second, own)


@triton.jit
def _one_detail(sums, w, code, step, first, byte, second, own):
    size = e8m0_values(byte)
    a = e2m1_values(code & 15) * step
    b = e2m1_rounded(a * e8m0_inverses(byte)) * size
    direct = e2m1_rounded(w * e8m0_inverses(own)) * e8m0_values(own) - w
    e1 = a - w
    e2 = b - a
    square1, square2 = e1 * e1, e2 * e2
    found = (w * w, square1, square2, w * e1, w * e2, e1 * e2, direct * direct)
    found += (w, e1, e2, square2 * e2, square2 * square2)
    found += _parts(w, a, square1, step, first) + _parts(a, b, square2, size, second)
    added = ()
    for j in tl.static_range(22):
        added += (sums[j] + found[j],)
    return added


@triton.jit
def _parts(x, x_hat, square, step, ideal):
    """`cpu_errors.attribute` of an element, without the total."""
    exact, m, inverse, power = ideal
    magnitude = tl.abs(x)
    beyond = tl.fma(tl.abs(step), -6.0, magnitude) > 0  # the sign of what is exact
    lost = (x_hat == 0) & (magnitude > 0) & (beyond == 0)
    other = e2m1_rounded(divide(magnitude * power, m, inverse)) * exact - magnitude
    element = tl.where(beyond | lost, 0.0, other * other)
    saturation, underflow = tl.where(beyond, square, 0.0), tl.where(lost, square, 0.0)
    return saturation, underflow, element, beyond.to(tl.float32), lost.to(tl.float32)
