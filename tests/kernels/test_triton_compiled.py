"""Every Triton kernel compiles for AMD's CDNA3 and CDNA4 and NVIDIA's Hopper and Blackwell, to the code meant.

What can be known of cards that are not there: that code is made, that sizes are 64-bit, and which matrix instructions
and permutations are in it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")
from triton_targets import TARGETS, assembly, compile_for
from workbench.kernels import (
    triton_activation,
    triton_dequantize,
    triton_details_pairs,
    triton_error_details,
    triton_errors,
    triton_errors_pairs,
    triton_gemm,
    triton_moe,
    triton_quantize,
    triton_quantize_pairs,
    triton_requant,
    triton_scaled_dot,
)

BYTES, FLOATS, HALVES, WORDS = "*u8", "*fp32", "*bf16", "*i32"
ENCODE = {
    "x_ptr": HALVES,
    "g_ptr": FLOATS,
    "words_ptr": WORDS,
    "scales_ptr": BYTES,
    "blocks": "i64",
    "per_global": "i32",
}
DECODE = {
    "packed_ptr": BYTES,
    "scales_ptr": BYTES,
    "g_ptr": FLOATS,
    "out_ptr": HALVES,
    "blocks": "i64",
    "per_global": "i32",
}
ROUND = {"x_ptr": HALVES, "g_ptr": FLOATS, "out_ptr": HALVES, "blocks": "i64", "per_global": "i32"}
NVFP4 = {"ZEROS": "signed", "ONE_GLOBAL": True}
MXFP4 = {"TIES": "even", "ZEROS": "signed", "MIN_BYTE": 0, "ROWS": 128}
PAIRS = {"x_ptr": WORDS, "words_ptr": WORDS, "exponents_ptr": "*i16", "codes_ptr": "*i64", "values_ptr": "*i64"}
STREAMS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "largest": (triton_quantize._largest_kernel, {"x_ptr": HALVES, "bits_ptr": "*i32", "count": "i64"}, {"TILE": 8192}),
    "nvfp4 quantize": (triton_quantize._nvfp4_kernel, ENCODE, {**NVFP4, "RULE": "amax", "ROWS": 128}),
    "nvfp4 mse": (triton_quantize._nvfp4_kernel, ENCODE, {**NVFP4, "RULE": "mse", "ROWS": 128}),
    "nvfp4 four over six": (triton_quantize._nvfp4_kernel, ENCODE, {**NVFP4, "RULE": "four_over_six", "ROWS": 128}),
    "mxfp4 quantize": (triton_quantize._mxfp4_kernel, ENCODE, {**MXFP4, "RULE": "even"}),
    "mxfp4 modelopt": (
        triton_quantize._mxfp4_kernel,
        ENCODE,
        {**MXFP4, "RULE": "log2", "TIES": "zero", "ZEROS": "negative"},
    ),
    "nvfp4 decode": (
        triton_dequantize._fp4_kernel,
        DECODE,
        {"NVFP4": True, "ONE_GLOBAL": False, "BLOCK": 16, "ROWS": 256},
    ),
    "mxfp4 decode": (
        triton_dequantize._fp4_kernel,
        DECODE,
        {"NVFP4": False, "ONE_GLOBAL": True, "BLOCK": 32, "ROWS": 128},
    ),
    "mxfp6 decode": (
        triton_dequantize._mx_kernel,
        {"codes_ptr": BYTES, **DECODE},
        {"ELEMENT": "e2m3", "ROWS": 128},
    ),
    "mxfp8 decode": (
        triton_dequantize._mx_kernel,
        {"codes_ptr": BYTES, **DECODE},
        {"ELEMENT": "e4m3", "ROWS": 128},
    ),
    "fp8 decode": (
        triton_dequantize._fp8_kernel,
        {"codes_ptr": BYTES, "scales_ptr": FLOATS, "out_ptr": HALVES}
        | dict.fromkeys(("n", "k", "block_rows", "block_columns"), "i32"),
        {"ELEMENT": "e4m3", "E8M0": False, "ROWS": 16, "COLUMNS": 128},
    ),
    "nvfp4 activation": (triton_activation._nvfp4_flat_kernel, ROUND, {"ONE_GLOBAL": True, "ROWS": 128}),
    "nvfp4 activation by token": (
        triton_activation._nvfp4_row_kernel,
        {**ROUND, "k": "i32"},
        {"HAS_GLOBAL": True, "ONE_GLOBAL": True, "BLOCKS": 128},
    ),
    "mxfp4 activation": (triton_activation._mxfp4_flat_kernel, ROUND, {"RULE": "even", "ROWS": 64}),
    "token globals": (
        triton_gemm._globals_kernel,
        {"x_ptr": HALVES, "g_ptr": FLOATS, "out_ptr": FLOATS, "k": "i32"},
        {"HAS_GLOBAL": True, "TILE": 2048},
    ),
    "nvfp4 activation by whole token": (
        triton_activation._nvfp4_whole_row_kernel,
        {**ROUND, "k": "i32"},
        {"HAS_GLOBAL": False, "ONE_GLOBAL": True, "BLOCKS": 512},
    ),
    "nvfp4 quantize, pairs": (
        triton_quantize_pairs.nvfp4_pairs_kernel,
        {**ENCODE, **PAIRS},
        {"ONE_GLOBAL": True, "PACKED": False, "WHOLE": True, "ROWS": 128},
    ),
    "requantization tables": (
        triton_requant._table_kernel,
        {"g_ptr": FLOATS, **PAIRS},
        {"RULE": "even", "VALUES": False, "SCALES": 16},
    ),
    "errors of bfloat16": (
        triton_errors_pairs.error_pairs_kernel,
        {**ENCODE, **PAIRS, "partial_ptr": "*fp64"},
        {
            "RULE": "even",
            "ONE_GLOBAL": True,
            "TABLED": True,
            "PACKED": False,
            "WHOLE": False,
            "ROWS": 128,
            "TILES": 8,
        },
    ),
    "error details": (
        triton_error_details._details_kernel,
        {**ENCODE, "partial_ptr": "*fp64"},
        {"RULE": "even", "ONE_GLOBAL": True, "ROWS": 128, "TILES": 4},
    ),
    "errors, finished": (
        triton_errors.finish_kernel,
        {"partial_ptr": "*fp64", "sums_ptr": "*fp64"},
        {"MEASURED": 22, "COLUMNS": 32, "PARTS": 128},
    ),
    "error details of bfloat16": (
        triton_details_pairs.detail_pairs_kernel,
        {**ENCODE, **PAIRS, "partial_ptr": "*fp64"},
        {
            "RULE": "even",
            "ONE_GLOBAL": True,
            "TABLED": True,
            "PACKED": False,
            "WHOLE": False,
            "ROWS": 128,
            "TILES": 8,
        },
    ),
    "errors": (
        triton_errors._error_kernel,
        {**ENCODE, "packed_ptr": BYTES, "partial_ptr": "*fp64"},
        {"RULE": "even", "ONE_GLOBAL": True, "ROWS": 64, "TILES": 8},
    ),
}
PRODUCT = {"x_ptr": HALVES, "codes_ptr": BYTES, "scales_ptr": BYTES, "g_ptr": FLOATS, "out_ptr": FLOATS}
LINEAR = {**PRODUCT, "x_globals_ptr": FLOATS}
GROUPED = {**PRODUCT, "order_ptr": "*i64", "expert_ptr": "*i32", "first_ptr": "*i32", "stop_ptr": "*i32"}
SCALED = {"x_ptr": BYTES, "codes_ptr": BYTES, "g_ptr": FLOATS, "out_ptr": HALVES}
SCALED |= dict.fromkeys(("m", "n", "k", "scale_stride"), "i32")


def compiled(target: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """The kernel's assembly. An argument in neither is a 32-bit size; types of no argument are ignored."""
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return assembly(compile_for(target, kernel, signature, constants, **options))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STREAMS)
def test_every_kernel_that_streams_compiles(name: str, target: str) -> None:
    code = compiled(target, *STREAMS[name], enable_fp_fusion=False)
    if target.startswith("sm"):
        assert "mul.ftz" not in code, "subnormal numbers must be kept"
        assert "div.full" not in code, "divisions must be exact"


@pytest.mark.parametrize("tabled", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_requantization_permutes_bytes_on_nvidia_and_shifts_elsewhere(target: str, tabled: bool) -> None:
    nvidia = target.startswith("sm")
    types = {**ENCODE, **PAIRS, "out_ptr": WORDS, "out_scales_ptr": BYTES}
    constants = {"RULE": "even", "ONE_GLOBAL": False, "TABLED": tabled, "PERMUTE": nvidia, "ROWS": 128}
    code = compiled(target, triton_requant._requant_kernel, types, constants)
    # 4 words a thread, three permutations each; two halves, whose largest codes take four each
    assert len(re.findall(r"prmt\.b32 .*, 0x6420", code)) == (4 if nvidia else 0)
    assert len(re.findall(r"prmt\.b32 ", code)) >= (20 if nvidia else 0)
    assert nvidia or "prmt" not in code


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_pairs_of_bfloat16_are_worked_on_together_where_the_card_can(target: str) -> None:
    types = {**ENCODE, **PAIRS, "partial_ptr": "*fp64"}
    pairs = {"ONE_GLOBAL": True, "PACKED": True, "WHOLE": True, "ROWS": 128}
    code = compiled(target, triton_quantize_pairs.nvfp4_pairs_kernel, types, pairs, enable_fp_fusion=False)
    assert "max.NaN.xorsign.abs.bf16x2" in code
    assert "cvt.rn.satfinite.e4m3x2.f32" in code
    for kernel in (triton_errors_pairs.error_pairs_kernel, triton_details_pairs.detail_pairs_kernel):
        code = compiled(target, kernel, types, {**pairs, "RULE": "even", "TABLED": True, "TILES": 8})
        assert code.count("fma.rn.bf16x2") == 32, "16 pairs of weights, each rounded to E2M1 by two"


MATRIX_INSTRUCTION = {
    "gfx942": "v_mfma_f32",
    "gfx950": "v_mfma_f32",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["none", "mxfp4"])
def test_packed_linear_uses_matrix_units(activation: str, target: str) -> None:
    constants = {"FORMAT": "nvfp4", "ACTIVATION": activation, "TOKENS": 16, "ROWS": 64, "COLUMNS": 128, "EVEN": True}
    code = compiled(target, triton_gemm._linear_kernel, LINEAR, constants)
    assert MATRIX_INSTRUCTION[target] in code


@pytest.mark.parametrize("target", TARGETS)
def test_grouped_linear_uses_matrix_units(target: str) -> None:
    constants = {"SHARDS": 2, "FORMAT": "nvfp4", "TOKENS": 16, "ROWS": 64, "COLUMNS": 128, "EVEN": True}
    code = compiled(target, triton_moe._grouped_kernel, GROUPED, constants)
    assert MATRIX_INSTRUCTION[target] in code


@pytest.mark.parametrize(
    ("target", "weight_format", "instruction", "count"),
    [
        ("gfx950", "mxfp4", r"v_mfma_scale_f32", 16),
        ("sm_100", "mxfp4", r"tcgen05\.mma\S*kind::mxf4\.block_scale", 4),
        ("sm_100", "nvfp4", r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.(?:block16|scale_vec::4X)", 4),
        ("sm_90", "mxfp4", r"tcgen05|mxf4", 0),  # decomposed
    ],
)
def test_scaled_products_are_native_where_the_table_says(
    target: str, weight_format: str, instruction: str, count: int
) -> None:
    nvfp4 = weight_format == "nvfp4"
    types = {**SCALED, "x_scales_ptr": "*fp8e4nv" if nvfp4 else BYTES, "scales_ptr": "*fp8e4nv" if nvfp4 else BYTES}
    constants = {"BLOCK": 16 if nvfp4 else 32, "HAS_GLOBAL": nvfp4, "TOKENS": 128, "ROWS": 128, "COLUMNS": 256}
    # One stage: with more, AMD's pipeline writes the loop's body twice.
    code = compiled(target, triton_scaled_dot._scaled_kernel, types, constants, num_stages=1)
    assert len(re.findall(instruction, code)) == count
    listed = weight_format in triton_scaled_dot.FORMATS_BY_ARCHITECTURE.get(target, ())
    assert listed == (count > 0)


def test_offsets_beyond_two_to_the_31_are_64_bits_wide() -> None:
    """A tensor of 2**32 values has program numbers below 2**31, whose products with a tile's size are 64 bits wide."""
    kernel, types, constants = STREAMS["mxfp4 quantize"]
    intermediate = compile_for(
        "sm_90", kernel, {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}, constants
    ).asm["ttir"]
    assert re.search(r"arith\.extsi %\S+ : i32 to i64", intermediate)
    assert re.search(r"tt\.addptr .*tensor<128x8xi64>", intermediate)
    assert not re.search(r"tt\.addptr .*xi32>", intermediate)
    assert (1 << 32) // (16 * triton_quantize._ROWS) < 1 << 31
