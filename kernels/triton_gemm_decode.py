"""FP4 codes to the matrix unit's left operand, in registers: what the GEMM kernels for NVIDIA's cards share (Gluon).

    w0, w1, w2, w3 = decoded_pairs(codes, steps, "nvfp4", gl.bfloat16, True)    # inside a kernel

Gluon is Triton's lower level, where a kernel names the layout of each tensor. A thread loads 16 bytes of a row, 32
consecutive codes. A code's four bits, laid into a bfloat16 (float16) with the sign at the top and the magnitude at the
exponent's end, are its value times 2**-126 (2**-14), subnormal where the magnitude is a half; one product with the
block's scale makes it the weight. That is exact: an E2M1 element times an E4M3 scale has six bits. NVFP4's decode
multiplier, of a whole row, goes on the float32 sum instead (`multiplied`), so that no weight is rounded at all. Two
codes four apart in a word stand as far apart as the two halves of a register: 0.75 logical operations, 0.6 shifts and
half a product a weight.

Columns of K may come in any order if both operands have the same: the pairs j of codes j and j + 4 of each 32-bit word
make four products, whose right operands are the same pairs of x. Nothing is moved between threads. Needs compute
capability 8.9 (E4M3 conversion).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNK = gl.constexpr(128)  # values of K that a quad of threads takes at a time: 16 bytes of codes a thread


def supports(device: torch.device, dtype: torch.dtype, k: int) -> bool:
    """Whether these kernels run on `device` for inputs of `dtype` with K of `k`."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability >= (8, 9) and dtype in (torch.bfloat16, torch.float16) and k % 32 == 0


def aligned(*tensors: Tensor) -> bool:
    """Whether the tensors start at multiples of 16 bytes, as the wide loads need."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def matrix_ends(widths: list[int]) -> list[int]:
    """Row after the last of each of the first three of up to four stacked matrices; where there are fewer, no row."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    return (ends + [2**31 - 1] * 3)[:3]


def multiplier_strides(g: Tensor | None, n: int) -> tuple[int, int, int]:
    """Steps from expert to expert, matrix to matrix and row to row in decode multipliers of N rows: one for all, one a
    matrix or one a row."""
    many = 0 if g is None else g.numel()
    return (0, 0, 1) if many == n and n > 1 else (0, int(many > 1), 0)


class _Kind(NamedTuple):
    """How codes become values of a 16-bit type. `extract`: for two pairs each, how far signs (left) or magnitudes
    (right) move to stand as in the type, which bits are signs, and how far each pair then is from its place."""

    lowest: int  # power of two of the type's least normal number
    mask: int
    extract: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    nvfp4_shift: int  # powers of two that a decoded NVFP4 weight is too small

    @property
    def most(self) -> int:  # the largest power of two
        return -self.lowest + 1


_KINDS = {
    "bf16x2": _Kind(-126, 0x81C081C0, ((-6, 0x88008800, ((3, 0), (2, 4))), (6, 0x22002200, ((1, 2), (0, 6)))), 8),
    "f16x2": _Kind(-14, 0x8E008E00, ((-3, 0x80808080, ((3, 0), (1, 8))), (3, 0x40404040, ((2, 1), (0, 9)))), 7),
}


def _decode_assembly(kind: str, weight_format: str, quick: bool = True) -> str:
    """PTX for 16 bytes of codes ($16..$19) under float32 scales ($20..$27, one for every two bytes).

    Out: registers $0..$15, of which 4 * j + w holds the codes j and j + 4 of word w as two values of `kind`: of nvfp4
    times 2**-nvfp4_shift. quick: MXFP4's scales are at most 2; larger ones take further products, of which one at most
    is not exact: the weight is rounded once.
    """
    lowest, mask, extract, shift = _KINDS[kind]
    up = -lowest - (shift if weight_format == "nvfp4" else 0)
    rests = ["p"] if kind == "bf16x2" else ["p", "q"]
    text = ["{", ".reg .f32 v, f;", ".reg .b32 r, p, q, a, b, zero;"]
    text.append("mov.b32 zero, 0x80008000;")  # -0, which changes no product's sign
    for word in range(4):
        scale, code = f"${20 + 2 * word}", f"${16 + word}"
        if word % (2 if weight_format == "nvfp4" else 4) == 0:
            if quick:
                text += [f"mul.rn.f32 v, {scale}, {_number(2.0**up)};", f"cvt.rn.{kind}.f32 r, v, v;"]
            else:
                most = _number(2.0 ** _KINDS[kind].most)
                text += [f"min.NaN.f32 v, {scale}, {_number(2.0)};", f"mul.rn.f32 v, v, {_number(2.0**up)};"]
                text += [f"cvt.rn.{kind}.f32 r, v, v;", f"mul.rn.f32 v, {scale}, {_number(0.5)};"]
                for rest in rests:  # what is above 2, in factors that are finite
                    text += [
                        f"max.f32 v, v, {_number(1.0)};",
                        f"min.f32 f, v, {most};",
                        f"cvt.rn.{kind}.f32 {rest}, f, f;",
                    ]
                    text.append(f"mul.rn.f32 v, v, {_number(2.0 ** -_KINDS[kind].most)};")
        for move, signs, pairs in extract:
            if move < 0:
                text += [f"shr.u32 a, {code}, {-move};", f"lop3.b32 a, {code}, a, 0x{signs:08X}, 0xE4;"]
            else:
                text += [f"shl.b32 a, {code}, {move};", f"lop3.b32 a, a, {code}, 0x{signs:08X}, 0xE4;"]
            for pair, left in pairs:
                out = f"${4 * pair + word}"
                if left:
                    text.append(f"shl.b32 b, a, {left};")
                text.append(f"and.b32 b, {'b' if left else 'a'}, 0x{mask:08X};")
                if quick:
                    text.append(f"fma.rn.{kind} {out}, b, r, zero;")
                else:
                    factors = ["r", *rests]
                    text += [f"fma.rn.{kind} b, b, {factor}, zero;" for factor in factors[:-1]]
                    text.append(f"fma.rn.{kind} {out}, b, {factors[-1]}, zero;")
    return "\n".join([*text, "}"])


def _number(value: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{int.from_bytes(struct.pack('>f', value)):08X}"


_NVFP4_BFLOAT16 = gl.constexpr(_decode_assembly("bf16x2", "nvfp4"))
_NVFP4_FLOAT16 = gl.constexpr(_decode_assembly("f16x2", "nvfp4"))
_MXFP4_BFLOAT16 = gl.constexpr(_decode_assembly("bf16x2", "mxfp4", quick=False))
_MXFP4_FLOAT16 = gl.constexpr(_decode_assembly("f16x2", "mxfp4", quick=False))
_MXFP4_BFLOAT16_QUICK = gl.constexpr(_decode_assembly("bf16x2", "mxfp4"))
_MXFP4_FLOAT16_QUICK = gl.constexpr(_decode_assembly("f16x2", "mxfp4"))
_BFLOAT16_UP = gl.constexpr(2.0 ** _KINDS["bf16x2"].nvfp4_shift)
_FLOAT16_UP = gl.constexpr(2.0 ** _KINDS["f16x2"].nvfp4_shift)
QUICK_BYTE = gl.constexpr(128)  # the largest E8M0 scale of quick decoding


@gluon.constexpr_function
def _assembly(weight_format, dtype, quick):
    if weight_format == "nvfp4":
        return _NVFP4_BFLOAT16 if dtype == gl.bfloat16 else _NVFP4_FLOAT16
    if quick:
        return _MXFP4_BFLOAT16_QUICK if dtype == gl.bfloat16 else _MXFP4_FLOAT16_QUICK
    return _MXFP4_BFLOAT16 if dtype == gl.bfloat16 else _MXFP4_FLOAT16


# Two E4M3 scales to float32, exactly.
_TWO_SCALES = gl.constexpr(
    "{.reg .b32 p; .reg .b16 a, b; cvt.rn.f16x2.e4m3x2 p, $2; mov.b32 {a, b}, p; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
)
_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 4 + ["f"] * 8))


# ---- layouts ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _powers(below, start=1):
    """Powers of two from `start` up to, not including, `below`."""
    return [1 << i for i in range(30) if start <= 1 << i < below]


@gluon.constexpr_function
def _warps(slices, row_warps):
    return [[0, 16 * b, 0] for b in _powers(row_warps)] + [[b, 0, 0] for b in _powers(slices)]


@gluon.constexpr_function
def code_layout(slices, row_warps, rows):
    """Of codes `[slices, rows, 32]` (int16): a thread has 16 bytes of the rows r and r + 8 of each 16, a quad 64."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]] + [[0, b, 0] for b in _powers(rows, 16 * row_warps)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warps(slices, row_warps), [], [slices, rows, 32])


@gluon.constexpr_function
def word_layout(slices, row_warps, rows):
    """Of the same codes as words `[slices, rows, 16]` (int32)."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + [[0, b, 0] for b in _powers(rows, 16 * row_warps)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warps(slices, row_warps), [], [slices, rows, 16])


@gluon.constexpr_function
def stored_scale_layout(slices, row_warps, rows):
    """Of scales as stored `[slices, rows, 4]`: a thread has those of its codes, two E4M3 (int16) or one E8M0."""
    registers = [[0, 8, 0]] + [[0, b, 0] for b in _powers(rows, 16 * row_warps)]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warps(slices, row_warps), [], [slices, rows, 4])


@gluon.constexpr_function
def scale_layout(slices, row_warps, rows, block):
    """Of scales `[slices, rows, 128 / block, block / 4]`, repeated to one for each two bytes of codes."""
    repeats = block // 4
    registers = [[0, 0, 0, b] for b in _powers(repeats)] + ([[0, 0, 1, 0]] if repeats == 4 else [])
    registers += [[0, 8, 0, 0]] + [[0, b, 0, 0] for b in _powers(rows, 16 * row_warps)]
    lanes = [[0, 0, 32 // block, 0], [0, 0, 64 // block, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[*base, 0] for base in _warps(slices, row_warps)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, rows, 128 // block, repeats])


@gluon.constexpr_function
def token_layout(slices, row_warps, tokens):
    """Of x `[slices, tokens, 128]`: a thread has the values that stand at its codes' places."""
    registers = [[0, 0, b] for b in _powers(32)] + [[0, b, 0] for b in _powers(tokens, 8)]
    lanes = [[0, 0, 32], [0, 0, 64], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 0] for _ in _powers(row_warps)] + [[b, 0, 0] for b in _powers(slices)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [slices, tokens, 128])


# ---- device functions ------------------------------------------------------------------------------------------------


@gluon.jit
def codes_of(words, SLICES: gl.constexpr, ROWS: gl.constexpr, CODES: gl.constexpr):
    """Words `[SLICES, ROWS, 16]`, which loops carry as whole registers, as codes `[SLICES, ROWS, 32]` (int16)."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [SLICES, ROWS, 32]), CODES, assert_trivial=True)


@gluon.jit
def block_steps(scales, SLICES: gl.constexpr, ROWS: gl.constexpr, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Scales as stored `[SLICES, ROWS, 4]` to float32, one a block."""
    if FORMAT == "nvfp4":
        first, second = gl.inline_asm_elementwise(
            _TWO_SCALES, "=f,=f,h", [scales], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        step = gl.reshape(gl.join(first, second), [SLICES, ROWS, 8])
    else:
        byte = scales.to(gl.int32)
        bits = gl.maximum(byte << 23, 0x00400000)  # byte 0 is the subnormal 2**-127
        step = gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return gl.convert_layout(step, STEPS, assert_trivial=True)


@gluon.jit
def spread_steps(
    step, SLICES: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr
):
    """Steps `[SLICES, ROWS, 128 / BLOCK]` repeated to one for each two bytes of codes."""
    step, _ = gl.broadcast(
        gl.expand_dims(step, 3), gl.zeros([SLICES, ROWS, 128 // BLOCK, BLOCK // 4], gl.float32, SCALES)
    )
    return gl.convert_layout(gl.reshape(step, [SLICES, ROWS, 32]), CODES, assert_trivial=True)


@gluon.jit
def decoded_pairs(codes, steps, FORMAT: gl.constexpr, dtype: gl.constexpr, QUICK: gl.constexpr):
    """Codes `[.., 32]` (int16) under steps of the same shape: four tensors `[.., 32]` of `dtype`.

    Element 2 * i + b of tensor j is the code 8 * i + 4 * b + j; of nvfp4, a power of two that `multiplied` takes back
    too small. QUICK: no E8M0 scale is above QUICK_BYTE.
    """
    ASSEMBLY: gl.constexpr = _assembly(FORMAT, dtype, QUICK)
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            ASSEMBLY, _CONSTRAINTS, [codes, steps], dtype=(gl.bfloat16,) * 4, is_pure=True, pack=8
        )
    else:
        pairs = gl.inline_asm_elementwise(
            ASSEMBLY, _CONSTRAINTS, [codes, steps], dtype=(gl.float16,) * 4, is_pure=True, pack=8
        )
    return pairs


@gluon.jit
def multiplied(total, g, dtype: gl.constexpr):
    """A float32 sum of decoded NVFP4 weights of `dtype` times inputs, times its row's decode multiplier."""
    UP: gl.constexpr = _BFLOAT16_UP if dtype == gl.bfloat16 else _FLOAT16_UP
    return total * UP * g


@gluon.jit
def left_operand(w, SLICES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """One of `decoded_pairs`' `[SLICES, ROWS, 32]` as a left operand, with `right_operands`' order of columns."""
    w = gl.permute(gl.reshape(w, [SLICES, ROWS, 4, 2, 4]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(w, [SLICES, ROWS, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def right_operands(x, SLICES: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """x `[SLICES, TOKENS, 128]` of `token_layout` as right operands `[SLICES, 32, TOKENS]` of the four pairs."""
    # A thread's value 32 * t + 16 * h + 8 * w + 4 * b + j is column (h, t, w, b) of operand j.
    x = gl.permute(gl.reshape(x, [SLICES, TOKENS, 4, 2, 2, 2, 4]), [0, 1, 3, 2, 4, 5, 6])
    even, odd = gl.split(gl.reshape(x, [SLICES, TOKENS, 32, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(gl.permute(x0, [0, 2, 1]), LAYOUT, assert_trivial=True),
        gl.convert_layout(gl.permute(x1, [0, 2, 1]), LAYOUT, assert_trivial=True),
        gl.convert_layout(gl.permute(x2, [0, 2, 1]), LAYOUT, assert_trivial=True),
        gl.convert_layout(gl.permute(x3, [0, 2, 1]), LAYOUT, assert_trivial=True),
    )


@gluon.jit
def row_groups(x, GROUPS: gl.constexpr):
    """`[S, GROUPS, ..]` as a tuple of GROUPS tensors `[S, ..]`."""
    if GROUPS == 1:
        return (gl.reshape(x, [x.shape[0], x.shape[2], x.shape[3]]),)
    else:
        first, second = gl.split(
            gl.permute(gl.reshape(x, [x.shape[0], 2, GROUPS // 2, x.shape[2], x.shape[3]]), [0, 2, 3, 4, 1])
        )
        return row_groups(first, GROUPS // 2) + row_groups(second, GROUPS // 2)
