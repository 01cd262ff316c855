"""The GEMM kernels in Gluon, which neither interpret nor run without a card: their code, and what it computes.

The assembly that decodes is run here instruction by instruction and compared with the reference for every code and
every scale; the kernels compile for Hopper and Blackwell to the instructions meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from workbench.kernels import reference

pytest.importorskip("triton.experimental.gluon")
import triton
from triton.experimental.gluon._runtime import GluonASTSource
from triton_interpreter import interpreted
from triton_targets import TARGETS
from workbench.kernels import triton_configs, triton_gemm_decode, triton_gemm_registers, triton_gemm_wgmma

DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


# ---- what the assembly computes --------------------------------------------------------------------------------------


def number(pattern: int) -> float:
    """The float32 of these bits."""
    return torch.tensor([pattern], dtype=torch.int64).int().view(torch.float32).item()


def convert(kind: str, high: float, low: float) -> int:
    """`cvt.rn.{kind}.f32`."""
    low_bits, high_bits = torch.tensor([low, high], dtype=torch.float32).to(DTYPES[kind]).view(torch.int16).tolist()
    return (high_bits & 0xFFFF) << 16 | (low_bits & 0xFFFF)


def fused(kind: str, a: int, b: int, c: int) -> int:
    """`fma.rn.{kind}` of a, b and -0: the product, rounded once."""
    assert c == 0x80008000
    pairs = [torch.tensor([t & 0xFFFF, t >> 16]).to(torch.int16).view(DTYPES[kind]) for t in (a, b)]
    low, high = (pairs[0] * pairs[1]).view(torch.int16).tolist()
    return (high & 0xFFFF) << 16 | (low & 0xFFFF)


def select(a: int, b: int, c: int, table: int) -> int:
    """`lop3.b32`: where c, a, else b."""
    assert table == 0xE4
    return (a & c) | (b & ~c & 0xFFFFFFFF)


def in_float32(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[float, float], float]:
    return lambda a, b: function(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)).item()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul.rn.f32": in_float32(torch.mul),
    "min.f32": in_float32(torch.fmin),
    "max.f32": in_float32(torch.fmax),
    "min.NaN.f32": in_float32(torch.minimum),
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": select,
    "mov.b32": lambda a: a,
    **{f"fma.rn.{kind}": partial(fused, kind) for kind in DTYPES},
    **{f"cvt.rn.{kind}.f32": partial(convert, kind) for kind in DTYPES},
}


def run_assembly(text: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Registers after `text`: integers, and floats in v, f and the scales."""
    values = dict(inputs)

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return number(int(name[2:], 16))
        return int(name, 0) if name[0].isdigit() else values[name]

    for line in text.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        name, arguments = line.split(" //")[0].rstrip(";").split(" ", 1)
        target, *sources = arguments.split(", ")
        values[target] = OPERATIONS[name](*map(value, sources))
    return values


def decoded(text: str, codes: Tensor, scales: list[float], kind: str) -> Tensor:
    """Values of 16 bytes of codes under the scales of their blocks, in the codes' order."""
    words = codes.view(torch.int32).tolist()
    inputs: dict[str, Any] = {f"${16 + i}": word & 0xFFFFFFFF for i, word in enumerate(words)}
    inputs |= {f"${20 + i}": scales[i * len(scales) // 8] for i in range(8)}
    out = run_assembly(text, inputs)
    halves = [out[f"${4 * j + word}"] >> 16 * b & 0xFFFF for word in range(4) for b in range(2) for j in range(4)]
    return torch.tensor(halves).to(torch.int16).view(DTYPES[kind])


EVERY_CODE = torch.arange(256).to(torch.uint8).view(16, 16)  # 16 bytes a row: every pair of codes


def same(found: Tensor, expected: Tensor) -> bool:
    """The same bits, any NaN being a NaN."""
    equal = found.view(torch.int16) == expected.view(torch.int16)
    return bool((equal | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_nvfp4_is_decoded_without_rounding(kind: str) -> None:
    text = triton_gemm_decode._decode_assembly(kind, "nvfp4")
    small = 2.0 ** -triton_gemm_decode._KINDS[kind].nvfp4_shift
    every = torch.arange(256).to(torch.uint8).view(128, 2).view(torch.float8_e4m3fn)
    for i, scales in enumerate(every):
        codes = EVERY_CODE[i % 16]
        exact = reference.nvfp4_dequantize(codes[None], scales[None], torch.tensor(1.0))[0] * small
        expected = exact.to(DTYPES[kind])
        assert torch.equal(expected.float().nan_to_num(7), exact.nan_to_num(7))  # the type holds it
        assert same(decoded(text, codes, scales.float().tolist(), kind), expected), scales


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_mxfp4_is_decoded_as_the_reference_rounds_it(kind: str, quick: bool) -> None:
    text = triton_gemm_decode._decode_assembly(kind, "mxfp4", quick)
    for byte in range(triton_gemm_decode.QUICK_BYTE.value + 1 if quick else 256):
        codes, scale = EVERY_CODE[byte % 16], torch.tensor([byte], dtype=torch.uint8)
        expected = reference.mxfp4_dequantize(codes[None], scale[None])[0].to(DTYPES[kind])
        assert same(decoded(text, codes, reference.e8m0_values(scale).tolist(), kind), expected), byte


def test_every_code_stands_at_its_place() -> None:
    for kind in DTYPES:
        for weight_format in ("nvfp4", "mxfp4"):
            text = triton_gemm_decode._decode_assembly(kind, weight_format)
            up = 2.0 ** triton_gemm_decode._KINDS[kind].nvfp4_shift if weight_format == "nvfp4" else 1.0
            for row in EVERY_CODE:
                expected = reference.mxfp4_dequantize(row[None], torch.tensor([[127]], dtype=torch.uint8))[0]
                assert torch.equal(decoded(text, row, [1.0, 1.0], kind).float() * up, expected)


@interpreted
def test_tokens_are_ordered_as_the_codes_are_multiplied() -> None:
    x = torch.stack([torch.arange(256, dtype=torch.int16) + 256 * i for i in range(3)]).view(torch.bfloat16)
    found = triton_gemm_wgmma.order_tokens(x).view(torch.int16).view(3, 2, 4, 4, 4, 2)  # chunk, j, s, t, b
    natural = x.view(torch.int16).view(3, 2, 4, 4, 2, 4)  # chunk, t, s, b, j
    assert torch.equal(found, natural.permute(0, 1, 5, 3, 2, 4))


# ---- what is compiled ------------------------------------------------------------------------------------------------

POINTERS = {"x_ptr": "*bf16", "codes_ptr": "*i32", "g_ptr": "*fp32", "out_ptr": "*bf16"}
POINTERS |= dict.fromkeys(("order_ptr", "expert_ptr", "first_ptr", "stop_ptr"), "*i32")
WIDE_STRIDES = ("n", "k", "code_stride", "scale_stride", "x_shard_stride")  # multiples of 16


def compiled(target: str, kernel: Any, constants: dict[str, Any], warps: int, **options: Any) -> str:
    types = POINTERS | {"scales_ptr": "*i16" if constants["FORMAT"] == "nvfp4" else "*u8"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in WIDE_STRIDES or name in types
    }
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    code: str = triton.compile(source, target=TARGETS[target], options={"num_warps": warps, **options}).asm["ptx"]
    return code


@pytest.mark.parametrize(
    ("target", "weight_format", "mode"),
    [("sm_90", "nvfp4", "tokens"), ("sm_100", "mxfp4", "groups")],
)
def test_codes_reach_the_matrix_unit_through_registers(target: str, weight_format: str, mode: str) -> None:
    constants = {"MODE": mode, "FORMAT": weight_format, "TOKENS": 8, "EVEN": True}
    constants |= {"SLICES": 8, "ROW_WARPS": 1, "GROUPS": 2}
    code = compiled(target, triton_gemm_registers._product_kernel, constants, 8, maxnreg=128)
    loops = [part.split("\tbra", 1)[0] for part in re.split(r"\n\$L__BB\S+:", code) if "mma.sync" in part]
    products = [loop.count("fma.rn.bf16x2") for loop in loops]
    assert products == ([64] if weight_format == "nvfp4" else [64, 128])  # mxfp4: quick, and for scales above 2
    for loop in loops:
        assert loop.count("mma.sync.aligned.m16n8k16") == 16  # two groups of 16 rows, 128 columns of K
        assert loop.count("ld.global.v4") + len(re.findall(r"ld\.global\S*\.v4\.b32", loop)) >= 8
        assert "shared" not in loop
        assert "bar.sync" not in loop


@pytest.mark.parametrize(("grouped", "weight_format"), [(False, "nvfp4"), (True, "nvfp4"), (False, "mxfp4")])
def test_many_tokens_take_hoppers_instructions(grouped: bool, weight_format: str) -> None:
    constants = {"GROUPED": grouped, "FORMAT": weight_format, "TOKENS": 128, "WARPGROUPS": 2, "STAGES": 3}
    code = compiled("sm_90", triton_gemm_wgmma._wgmma_kernel, constants, 8)
    runs = 1 if weight_format == "nvfp4" else 2  # quick, and for scales above 2
    assert len(re.findall(r"wgmma\.mma_async\S*m64n128k16", code)) == 8 * runs
    assert "cp.async.cg.shared.global" in code
    # The left operand's registers are written anew in each step of the loop, so the product must end within it.
    last = code.rindex("wgmma.mma_async")
    assert "wgmma.wait_group.sync.aligned 0" in code[last : code.index("bra", last)]
    assert "ldmatrix" not in code
    assert code.count("st.shared") == runs - 1  # the largest scale's, after the loop


def test_configurations_fill_programs_and_leave_no_part_empty() -> None:
    device = torch.device("cpu")  # counts as one multiprocessor
    for k in (128, 256, 384, 2048, 7168, 8192):
        for tokens in (8, 16, 32):
            config = triton_configs.registers(device, 512, 1, k, tokens)
            assert config.slices * config.split <= max(1, k // 128)
            assert 2 <= config.slices * config.row_warps <= 16
            assert 16 * config.row_warps * config.groups <= 128
