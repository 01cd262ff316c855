"""The GEMM kernels in Gluon, which neither interpret nor run without a card: their code, and what it computes.

The assembly that decodes is run here instruction by instruction and compared with the reference for every code and
many scales; the kernels compile for Hopper and Blackwell to the instructions meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from workbench.kernels import reference

pytest.importorskip("triton.experimental.gluon")
import triton
from triton.experimental.gluon._runtime import GluonASTSource
from triton_interpreter import interpreted
from triton_targets import TARGETS
from workbench.kernels import triton_configs, triton_gemm_decode, triton_gemm_registers, triton_gemm_wgmma

DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


# ---- what the assembly computes --------------------------------------------------------------------------------------


def permute(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: each byte of the result is one of the eight of a and b."""
    source = [(a >> 8 * i) & 255 for i in range(4)] + [(b >> 8 * i) & 255 for i in range(4)]
    chosen = [(selector >> 4 * i) & 15 for i in range(4)]
    assert all(c < 8 for c in chosen), "no byte is replicated from its sign"
    return sum(source[c] << 8 * i for i, c in enumerate(chosen))


def convert(kind: str, high: float, low: float) -> int:
    """`cvt.rn.{kind}.f32`."""
    pair = torch.tensor([low, high], dtype=torch.float32).to(DTYPES[kind])
    low_bits, high_bits = pair.view(torch.int16).tolist()
    return (high_bits & 0xFFFF) << 16 | (low_bits & 0xFFFF)


def run_assembly(text: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Registers after `text`: integers, and floats in v0..v7 and the steps."""
    values = dict(inputs)

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return torch.tensor([int(name[2:], 16)], dtype=torch.int64).int().view(torch.float32).item()
        return int(name, 0) if name[0].isdigit() else values[name]

    def multiply(a: float, b: float) -> float:
        return (torch.tensor(a, dtype=torch.float32) * torch.tensor(b, dtype=torch.float32)).item()

    def fused(kind: str, a: int, b: int, c: int) -> int:
        assert c == 0x80008000  # two of -0
        halves = []
        for shift in (0, 16):
            values = [
                torch.tensor([(t >> shift) & 0xFFFF], dtype=torch.int32).short().view(DTYPES[kind]) for t in (a, b)
            ]
            halves.append(int((values[0] * values[1]).view(torch.int16).item()) & 0xFFFF)
        return halves[1] << 16 | halves[0]

    def select(a: int, b: int, c: int, table: int) -> int:
        assert table == 0x78
        return a ^ (b & c)

    operations: dict[str, Callable[..., Any]] = {
        "mul.rn.f32": multiply,
        "prmt.b32": permute,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "lop3.b32": select,
        "mov.b32": lambda a: a,
        "fma.rn.bf16x2": lambda a, b, c: fused("bf16x2", a, b, c),
    }
    for line in text.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        name, arguments = line.rstrip(";").split(" ", 1)
        target, *sources = arguments.split(", ")
        kind = re.fullmatch(r"cvt\.rn\.(\w+)\.f32", name)
        values[target] = convert(kind[1], *map(value, sources)) if kind else operations[name](*map(value, sources[:4]))
    return values


@pytest.mark.parametrize(("kind", "quick"), [("bf16x2", False), ("bf16x2", True), ("f16x2", False)])
@pytest.mark.parametrize(("weight_format", "words"), [("nvfp4", 2), ("mxfp4", 4)])
def test_the_decoding_assembly_gives_the_references_values(
    weight_format: str, words: int, kind: str, quick: bool
) -> None:
    text = triton_gemm_decode._decode_assembly(kind, words, quick)
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(256).to(torch.uint8).view(16, 16)  # 16 bytes a row: every pair of codes
    if weight_format == "nvfp4":
        scales = torch.randint(0, 256, (16, 2), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
        g = torch.tensor([0.013, -0.5, 1.1e-33 if quick else 2.0**-130, 1e36] * 4)[:, None]
        steps = scales.float() * g
        expected = reference.nvfp4_dequantize(every, scales, g)
    else:
        scales = torch.tensor([0, 1, 100, 120, 126, 127, 128, 130, 140, 200, 250, 252, 254, 255, 64, 3])[:, None]
        steps = reference.e8m0_values(scales.to(torch.uint8))
        expected = reference.mxfp4_dequantize(every, scales.to(torch.uint8))
    expected = expected.to(DTYPES[kind])
    for row in range(16):
        codes = every[row].view(torch.int32).tolist()
        inputs: dict[str, Any] = {f"${16 + i}": code & 0xFFFFFFFF for i, code in enumerate(codes)}
        inputs |= {f"${20 + i}": steps[row, i // 4 if words == 2 else 0].item() for i in range(8)}
        out = run_assembly(text, inputs)
        pairs = [out[f"${4 * j + word}"] for word in range(4) for j in range(4)]
        bits = torch.tensor([half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]).to(torch.int16)
        found = bits.view(DTYPES[kind])
        same = (bits == expected[row].view(torch.int16)) | (found.isnan() & expected[row].isnan())
        assert bool(same.all()), row


@interpreted
def test_tokens_are_ordered_as_the_codes_are_multiplied() -> None:
    x = torch.stack([torch.arange(256, dtype=torch.int16) + 256 * i for i in range(3)]).view(torch.bfloat16)
    found = triton_gemm_wgmma.order_tokens(x).view(torch.int16).view(3, 2, 4, 2, 2, 4, 2)  # chunk, j, s, h, t, b
    natural = x.view(torch.int16).view(3, 2, 4, 2, 2, 4, 2)  # chunk, t, s, h, j, b
    assert torch.equal(found, natural.permute(0, 1, 5, 3, 4, 2, 6))


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
    ("target", "weight_format", "mode"), [("sm_90", "nvfp4", "tokens"), ("sm_100", "mxfp4", "groups")]
)
def test_codes_reach_the_matrix_unit_through_registers(target: str, weight_format: str, mode: str) -> None:
    constants = {"MODE": mode, "FORMAT": weight_format, "TOKENS": 8, "EVEN": True}
    constants |= {"SLICES": 8, "ROW_WARPS": 1, "GROUPS": 2}
    code = compiled(target, triton_gemm_registers._product_kernel, constants, 8, maxnreg=128)
    last = code.rindex("mma.sync")
    loop = code[code.rindex("\n$L__BB", 0, last) : last]
    assert loop.count("mma.sync.aligned.m16n8k16") == 16 - 1  # two groups of 16 rows, 128 columns of K
    assert loop.count("ld.global.v4") + len(re.findall(r"ld\.global\S*\.v4\.b32", loop)) >= 8
    assert "shared" not in loop
    assert "bar.sync" not in loop


@pytest.mark.parametrize("grouped", [False, True])
def test_many_tokens_take_hoppers_instructions(grouped: bool) -> None:
    constants = {"GROUPED": grouped, "FORMAT": "nvfp4", "TOKENS": 128, "WARPGROUPS": 2, "STAGES": 3}
    code = compiled("sm_90", triton_gemm_wgmma._wgmma_kernel, constants, 8)
    assert len(re.findall(r"wgmma\.mma_async\S*m64n128k16", code)) == 8
    assert "cp.async.cg.shared.global" in code
    # The left operand's registers are written anew in each step of the loop, so the product must end within it.
    last = code.rindex("wgmma.mma_async")
    assert "wgmma.wait_group.sync.aligned 0" in code[last : code.index("bra", last)]
    assert "ldmatrix" not in code
    assert "st.shared" not in code


def test_configurations_fill_programs_and_leave_no_part_empty() -> None:
    device = torch.device("cpu")  # counts as one multiprocessor
    for k in (128, 256, 384, 2048, 7168, 8192):
        for tokens in (8, 16, 32):
            config = triton_configs.registers(device, 512, 1, k, tokens)
            assert config.slices * config.split <= max(1, k // 128)
            assert 2 <= config.slices * config.row_warps <= 16
            assert 16 * config.row_warps * config.groups <= 128
