"""FP4 codes to the matrix unit's left operand, in registers: what the GEMM kernels for NVIDIA's cards share (Gluon).

    w0, w1, w2, w3 = decoded_pairs(codes, steps, "nvfp4", gl.bfloat16, True)    # inside a kernel

Gluon is Triton's lower level, where a kernel names the layout of each tensor. A thread loads 16 bytes of a row, 32
consecutive codes: whole blocks, so that it builds a block's eight magnitudes once, in float32 and rounded once to the
operand's dtype, and then picks bytes of them by the codes (PRMT): 2.5 integer operations a weight, and no rounding is
left out. Columns of K may come in any order if both operands have the same, so the codes are multiplied as they lie:
the four pairs of codes of each 32-bit word make four products, whose right operands are the same pairs of x. Nothing is
moved between threads. Needs compute capability 8.9 (E4M3 conversion).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CHUNK = gl.constexpr(128)  # values of K that a quad of threads takes at a time: 16 bytes of codes a thread
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def _decode_assembly(kind: str, words_a_block: int, quick: bool = False) -> str:
    """PTX for 16 bytes of codes ($16..$19) under float32 steps ($20..$27, one for every two bytes).

    Out: registers $0..$15, of which 4 * j + w holds the pair j of word w as two values of `kind`. quick: only 1 and 1.5
    steps are rounded and the others are these times a power of two, which is the same unless they are subnormal.
    """
    text = ["{", ".reg .f32 v<8>;", ".reg .b32 t<4>, lo<2>, hi<2>, m, y, a, b, s;"]
    if quick:
        text += [".reg .b32 half, two, four, zero;", "mov.b32 half, 0x3F000000;", "mov.b32 two, 0x40004000;"]
        text += ["mov.b32 four, 0x40804080;", "mov.b32 zero, 0x80008000;"]  # -0, which changes no product's sign
    for word in range(4):
        if word % words_a_block == 0:
            step = f"${20 + 2 * word}"
            if quick:
                text += [f"mul.rn.f32 v3, {step}, 0f{_float_bits(1.5):08X};", f"cvt.rn.{kind}.f32 t1, v3, {step};"]
                text += ["prmt.b32 t0, t1, t1, 0x1010;", f"fma.rn.{kind} t0, t0, half, zero;"]
                text += [f"fma.rn.{kind} t2, t1, two, zero;", f"fma.rn.{kind} t3, t1, four, zero;"]
            else:
                for i, magnitude in enumerate(_MAGNITUDES):
                    text.append(f"mul.rn.f32 v{i}, {step}, 0f{_float_bits(magnitude):08X};")
                text += [f"cvt.rn.{kind}.f32 t{i}, v{2 * i + 1}, v{2 * i};" for i in range(4)]
            for part, selector in (("lo", "0x6420"), ("hi", "0x7531")):  # the lower and the upper bytes of the eight
                text += [f"prmt.b32 {part}{i}, t{2 * i}, t{2 * i + 1}, {selector};" for i in range(2)]
        code = f"${16 + word}"
        text += [f"and.b32 m, {code}, 0x77777777;", f"shl.b32 y, {code}, 4;"]
        for half, signs in ((0, "0x5140"), (1, "0x7362")):
            if half:
                text.append("shr.u32 m, m, 16;")
            text += [
                "prmt.b32 a, lo0, lo1, m;",
                "prmt.b32 b, hi0, hi1, m;",
                f"prmt.b32 s, y, {code}, {signs};",  # each code's sign at the top of its byte
                "lop3.b32 b, b, s, 0x80808080, 0x78;",  # b ^ (s & 0x80808080)
                f"prmt.b32 ${8 * half + word}, a, b, 0x5140;",
                f"prmt.b32 ${8 * half + 4 + word}, a, b, 0x7362;",
            ]
    return "\n".join([*text, "}"])


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


_NVFP4_BFLOAT16 = gl.constexpr(_decode_assembly("bf16x2", 2))
_NVFP4_FLOAT16 = gl.constexpr(_decode_assembly("f16x2", 2))
_NVFP4_BFLOAT16_QUICK = gl.constexpr(_decode_assembly("bf16x2", 2, quick=True))
_MXFP4_BFLOAT16 = gl.constexpr(_decode_assembly("bf16x2", 4, quick=True))  # steps are powers of two: always the same
_MXFP4_FLOAT16 = gl.constexpr(_decode_assembly("f16x2", 4))


@gluon.constexpr_function
def _assembly(weight_format, dtype, quick):
    if weight_format == "nvfp4":
        if quick and dtype == gl.bfloat16:
            return _NVFP4_BFLOAT16_QUICK
        return _NVFP4_BFLOAT16 if dtype == gl.bfloat16 else _NVFP4_FLOAT16
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
def block_steps(scales, g, SLICES: gl.constexpr, ROWS: gl.constexpr, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Scales as stored `[SLICES, ROWS, 4]` to float32 steps, one a block; `g`: decode multipliers (nvfp4)."""
    if FORMAT == "nvfp4":
        first, second = gl.inline_asm_elementwise(
            _TWO_SCALES, "=f,=f,h", [scales], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
        )
        step = gl.reshape(gl.join(first * g, second * g), [SLICES, ROWS, 8])
    else:
        byte = scales.to(gl.int32)
        bits = gl.where(byte == 0, 0x00400000, byte << 23)  # byte 0 is the subnormal 2**-127
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

    Element 2 * i + b of tensor j is the code 8 * i + 2 * j + b. QUICK: no step lies near the subnormal numbers.
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
def any_tiny(g):
    """Whether a step under one of the decode multipliers `g` may lie near the subnormal numbers."""
    return gl.max(gl.where(gl.abs(g) < 1.0e-33, 1, 0)) > 0  # the smallest scale is 2**-9


@gluon.jit
def left_operand(w, SLICES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """One of `decoded_pairs`' `[SLICES, ROWS, 32]` as a left operand, with `right_operands`' order of columns."""
    w = gl.permute(gl.reshape(w, [SLICES, ROWS, 4, 2, 4]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(w, [SLICES, ROWS, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def right_operands(x, SLICES: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """x `[SLICES, TOKENS, 128]` of `token_layout` as right operands `[SLICES, 32, TOKENS]` of the four pairs."""
    # A thread's value 32 * t + 16 * h + 8 * w + 2 * j + b is column (h, t, w, b) of operand j.
    x = gl.permute(gl.reshape(x, [SLICES, TOKENS, 4, 2, 2, 4, 2]), [0, 1, 3, 2, 4, 6, 5])
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
