"""The reference kernels against golden values: codes, scales, ties, edges, and the bands that distributions give.

Sources: OCP Microscaling Formats (MX) v1.0 (E2M1, E8M0), OCP OFP8 v1.0 (E4M3). Bands: an independent float64
simulation of 2048 x 4096 matrices (std 0.02, seed 0), quoted to 0.01 dB.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from workbench.kernels import reference
from workbench.kernels.tables import E2M1_MAGNITUDES, MXFP4_RULES, ScaleRule

ULP = 2.0**-23  # of float32 in [1, 2)
RULES = [rule.value for rule in MXFP4_RULES]


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- E2M1 ------------------------------------------------------------------------------------------------------------


def test_all_sixteen_codes():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = reference.e2m1_values(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == expected
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert reference.e2m1_round(values).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("tie", "value"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code_and_one_ulp_decides(tie, value):
    below, above = (torch.nextafter(f32(tie), f32(towards)).item() for towards in (0, 9))
    x = f32(tie, -tie, below, above)
    neighbours = [m for m in E2M1_MAGNITUDES if abs(m - tie) == min(abs(n - tie) for n in E2M1_MAGNITUDES)]
    assert reference.e2m1_values(reference.e2m1_round(x)).tolist() == [value, -value, *neighbours]


def test_rounding_saturates_and_keeps_the_sign_of_zero():
    x = f32(0.0, -0.0, 0.1, -0.1, 5.0000005, 7.0, -1e30, math.inf, -math.inf, 1e-45)
    assert reference.e2m1_round(x).tolist() == [0, 8, 0, 8, 7, 7, 15, 7, 15, 0]


def test_all_256_packed_bytes_low_nibble_first():
    packed = torch.arange(256, dtype=torch.uint8)
    codes = reference.unpack_fp4(packed.unsqueeze(-1))
    assert codes.tolist() == [[b & 15, b >> 4] for b in range(256)]
    assert torch.equal(reference.pack_fp4(codes).flatten(), packed)


# ---- scales ----------------------------------------------------------------------------------------------------------


def test_all_e4m3_codes():
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for byte, value in enumerate(values):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if byte & 0x7F == 0x7F:
            assert math.isnan(value)
            continue
        magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert value == (-magnitude if byte & 0x80 else magnitude)
    assert values[0x7E] == 448.0
    assert values[0x01] == 2.0**-9
    assert math.copysign(1, values[0x80]) == -1


def test_e4m3_rounding_saturates_and_ties_to_even():
    x = f32(448, 463.9, 464, 465, 1e30, math.inf, -math.inf, 9e-4, 1.1e-3, 1.0625, 1.1875)
    expected = [448, 448, 448, 448, 448, 448, -448, 0, 2.0**-9, 1.0, 1.25]
    assert reference.e4m3_round(x).float().tolist() == expected
    assert reference.e4m3_round(f32(2.0**-10, 2.0**-10 * (1 + ULP))).float().tolist() == [0, 2.0**-9]
    assert reference.e4m3_round(f32(math.nan)).float().isnan().all()


def test_all_e8m0_codes():
    values = reference.e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8)).tolist()
    assert values[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert values[0] == 5.877471754111438e-39  # 2**-127, a float32 subnormal, not zero
    assert math.isnan(values[255])


# ---- MXFP4 scale rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("significand", "floor", "even", "rceil", "ceil"),
    [
        (1.0, 0, 0, 0, 0),
        (1.0 + ULP, 0, 0, 0, 1),
        (1.5, 0, 0, 0, 1),
        (1.5 + ULP, 0, 0, 1, 1),
        (1.75 - ULP, 0, 0, 1, 1),
        (1.75, 0, 1, 1, 1),
        (2.0 - ULP, 0, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("exponent", [-100, -3, 0, 5, 100])
def test_scale_exponent_by_rule(significand, floor, even, rceil, ceil, exponent):
    amax = f32(significand * 2.0**exponent)
    expected = {"floor": floor, "even": even, "rceil": rceil, "ceil": ceil}
    for rule, step in expected.items():
        assert reference.mxfp4_scale_bytes(amax, rule).item() == 127 + exponent - 2 + step, rule


def test_scale_bytes_at_the_edges_of_float32():
    amax = f32(0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-125, 2.0**-124, math.inf, math.nan)
    for rule in RULES:
        assert reference.mxfp4_scale_bytes(amax, rule).tolist() == [0, 0, 0, 0, 0, 1, 255, 255], rule


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [3.4e38, 3.0e38, 2.6e38, 2.0**126, 2.0**-126, 2.0**-127, 2.0**-128, 2.0**-149])
def test_no_finite_block_decodes_to_anything_infinite_or_nan(rule, amax):
    block = torch.zeros(1, 32)
    block[0, 0], block[0, 1] = amax, -amax
    value = reference.mxfp4_dequantize(*reference.mxfp4_quantize(block, rule))
    assert value.isfinite().all()
    if amax >= 2.0**-127:
        assert abs(value[0, 0].item() / amax - 1) <= 1 / 3


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("floor", [3.0, 6.0, 1.0, 3.0, 6.0]), ("even", [3.0, 6.0, 1.0, 4.0, 8.0]), ("ceil", [3.0, 6.0, 1.0, 4.0, 8.0])],
)
def test_what_the_block_maximum_decodes_to(rule, expected):
    """vllm-project/vllm#43557: floor(log2(amax / 6)) would give 1.5, 3, 0.75, 3, 6."""
    for amax, value in zip([2.7, 5.5, 1.2, 3.5, 7.9], expected, strict=True):
        block = torch.zeros(32)
        block[7] = amax
        assert reference.mxfp4_dequantize(*reference.mxfp4_quantize(block, rule))[7] == value


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="amax"):
        reference.mxfp4_scale_bytes(f32(1.0), ScaleRule.AMAX)


# ---- MXFP4 values ----------------------------------------------------------------------------------------------------


def test_mxfp4_element_one_at_scale_byte_zero_and_118():
    """TransformerEngine#3262: byte 0 is 2**-127, not 0. omlx#2159: bytes are exponents, not linear numbers."""
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    for byte, value in ((0, 2.0**-127), (118, 2.0**-9), (127, 1.0), (254, 2.0**127)):
        decoded = reference.mxfp4_dequantize(packed, torch.tensor([[byte]], dtype=torch.uint8))
        assert decoded.tolist() == [[value] * 32]
    nan = reference.mxfp4_dequantize(packed, torch.tensor([[255]], dtype=torch.uint8))
    assert nan.isnan().all()


def test_nibble_order_is_even_index_low():
    """kekzl/imp#567: codes 0..7 packed sequentially are bytes 10 32 54 76."""
    packed = reference.pack_fp4(torch.arange(8, dtype=torch.uint8))
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76]


def test_zero_blocks_and_minus_zero():
    w = torch.zeros(2, 64)
    w[1, :32] = -0.0
    w[1, 40] = 1.0
    packed, scales = reference.mxfp4_quantize(w)
    assert scales.tolist() == [[0, 0], [0, 125]]
    assert torch.equal(torch.signbit(reference.mxfp4_dequantize(packed, scales)), torch.signbit(w))
    codes, e4m3, g = reference.nvfp4_quantize(w)
    assert torch.equal(reference.nvfp4_dequantize(codes, e4m3, g)[0], w[0])
    assert e4m3.float()[0].tolist() == [1.0] * 4  # ModelOpt's convention for a zero block


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


def test_nvfp4_global_and_block_scales():
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 6.0 * 448.0, 6.0 * 3.0
    codes, scales, g = reference.nvfp4_quantize(w)
    assert g == 1.0
    assert scales.float().tolist() == [[448.0, 3.0]]
    assert torch.equal(reference.nvfp4_dequantize(codes, scales, g), w)


def test_nvfp4_block_scale_bounds():
    """Scale 9e-4 (below 2**-10) is lifted to 2**-9 as ModelOpt does; a zero block never exceeds 448 (ModelOpt#1397)."""
    blocks = reference.nvfp4_block_scales(f32(6 * 9e-4, 0.0, 6 * 1000.0, 6 * 1.0), torch.tensor(1.0))
    assert blocks.float().tolist() == [2.0**-9, 1.0, 448.0, 1.0]
    zero_beside_small_global = reference.nvfp4_block_scales(f32(0.0), reference.nvfp4_global_scale(torch.tensor(3.0)))
    assert zero_beside_small_global.float().tolist() == [1.0]


def test_fused_runtime_example():
    """vllm-project/vllm#54974: codes 1.0, block scale 448, global 2e-3: 0.896; with the gate's 2e-4: 0.0896."""
    packed = torch.full((1, 8), 0x22, dtype=torch.uint8)
    scales = torch.full((1, 1), 448.0).to(torch.float8_e4m3fn)
    assert reference.nvfp4_dequantize(packed, scales, torch.tensor(2e-3))[0, 0].item() == pytest.approx(0.896, rel=1e-6)
    assert reference.nvfp4_dequantize(packed, scales, torch.tensor(2e-4))[0, 0].item() == pytest.approx(
        0.0896, rel=1e-6
    )
    assert reference.e4m3_round(f32(44.8)).item() == 44.0


@pytest.mark.parametrize("amax", [1e-44, 1e-40, 1e-38, 1e-35, 1e-33, 1e-30, 1.0, 1e30, 3.4e38])
def test_nvfp4_is_finite_for_every_finite_matrix(amax):
    w = torch.linspace(-1, 1, 64).reshape(2, 32) * amax
    w[0, :16] = 0
    codes, scales, g = reference.nvfp4_quantize(w)
    value = reference.nvfp4_dequantize(codes, scales, g)
    assert value.isfinite().all()
    assert g > 0
    assert not scales.float().isnan().any()
    if amax >= 1e-30:
        assert (value - w).abs().max() <= amax / 6 * 1.07  # half of the widest step, 2 of 6, and E4M3's rounding
    x = w.clone()
    assert reference.nvfp4_qdq_activation(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_rows_do_not_depend_on_their_batch(dtype):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    whole = reference.nvfp4_qdq_activation(x)
    assert whole.dtype == dtype
    for row in range(8):
        assert torch.equal(reference.nvfp4_qdq_activation(x[row : row + 1])[0], whole[row])


def test_activation_block_whose_scale_underflows_becomes_zero():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 2688.0, 5e-3  # 5e-3 / 6 is below 2**-10 at a global scale of 1
    assert torch.count_nonzero(reference.nvfp4_qdq_activation(x)[0, 16:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("global_scale", [1.0, 0.05, 0.00332496, 3.7e-4])
def test_activation_rounding_equals_vllms_emulation(dtype, global_scale):
    """Oracle: `ref_nvfp4_quant_dequant` of the installed vLLM (its `global_scale` is the reciprocal)."""
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn(256, 512, generator=generator) * torch.rand(256, 1, generator=generator) * 10).to(dtype)
    x[:, ::7], x[:, 32:48] = 0, 0
    g = torch.tensor(global_scale, dtype=torch.float32)
    assert torch.equal(reference.nvfp4_qdq_activation(x, g), utils.ref_nvfp4_quant_dequant(x, 1.0 / g, 16))


# ---- bands -----------------------------------------------------------------------------------------------------------

# distribution: NVFP4; direct MXFP4; NVFP4 -> MXFP4; corr(e1, e2); each triple by rule floor, even, rceil. (The source
# calls its third column "ceil" and defines it as ceil(log2(amax / 6)): rceil here.)
# NVFP4 -> MXFP4 depends on where the global scale falls between powers of two, and that follows the sample's largest
# value. The Gaussian's hardly varies from sample to sample; a heavy tail's does, so those rows are the range over an
# octave, which contains the source's single values (16.31/16.38/15.86 and 16.30/16.29/15.89).
BANDS = {
    "gauss": (20.44, (18.86, 19.01, 18.52), ((16.73, 16.93), (16.90, 17.10), (16.54, 16.74)), (-0.071, -0.054, -0.049)),
    "student_t5": (20.69, (17.97, 18.15, 17.57), ((16.0, 16.6), (16.05, 16.75), (15.4, 16.2)), None),
    "laplace": (20.66, (17.99, 18.16, 17.57), ((16.05, 16.6), (15.95, 16.6), (15.4, 16.3)), None),
}
BAND_RULES = ("floor", "even", "rceil")


@pytest.mark.parametrize("distribution", BANDS)
def test_sqnr_bands(distribution):
    nvfp4, direct, requantized, correlation = BANDS[distribution]
    w = sample(distribution)
    a = reference.nvfp4_dequantize(*reference.nvfp4_quantize(w))
    assert sqnr_db(w, a) == pytest.approx(nvfp4, abs=0.1)
    for i, rule in enumerate(BAND_RULES):
        straight = reference.mxfp4_dequantize(*reference.mxfp4_quantize(w, rule))
        assert sqnr_db(w, straight) == pytest.approx(direct[i], abs=0.1), rule
        b = reference.mxfp4_dequantize(*reference.mxfp4_quantize(a, rule))
        assert requantized[i][0] <= sqnr_db(w, b) <= requantized[i][1], rule
        if correlation:
            found = torch.corrcoef(torch.stack(((a - w).flatten(), (b - a).flatten())))[0, 1].item()
            assert found == pytest.approx(correlation[i], abs=0.01), rule


@pytest.mark.parametrize("distribution", BANDS)
def test_sqnr_equals_an_independent_float64_evaluation(distribution):
    """The formats written down a second time, in float64 numpy and by exhaustive nearest value."""
    w = sample(distribution)[:32]
    a = reference.nvfp4_dequantize(*reference.nvfp4_quantize(w))
    w64 = w.double().numpy()
    a64 = nvfp4_float64(w64)
    assert np.abs(a.double().numpy() - a64).max() <= 1e-6 * np.abs(w64).max()
    for rule in RULES:
        b = reference.mxfp4_dequantize(*reference.mxfp4_quantize(a, rule))
        assert np.array_equal(b.double().numpy(), mxfp4_float64(a.double().numpy(), rule)), rule


def sqnr_db(w: torch.Tensor, approximation: torch.Tensor) -> float:
    error = (approximation - w).double()
    return 10 * math.log10(float(w.double().square().sum() / error.square().sum()))


def sample(distribution: str) -> torch.Tensor:
    """Weights of standard deviation 0.02 (the deviation is part of the golden values); 2M Gaussian, 1M others."""
    rng = np.random.default_rng(0)
    if distribution == "gauss":
        w = rng.standard_normal((512, 4096))
    elif distribution == "laplace":
        w = rng.laplace(size=(256, 4096)) / math.sqrt(2)
    else:
        w = rng.standard_t(5, size=(256, 4096)) / math.sqrt(5 / 3)
    return torch.from_numpy((w * 0.02).astype("float32"))


def nearest_float64(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Nearest grid magnitude with the sign of x; ties to the even index."""
    distance = np.abs(np.abs(x)[..., None] - grid)
    lowest = distance.argmin(-1)
    tie = (lowest + 1 < len(grid)) & (
        np.take_along_axis(distance, np.minimum(lowest + 1, len(grid) - 1)[..., None], -1)[..., 0] == distance.min(-1)
    )
    return np.copysign(grid[lowest + (tie & (lowest % 2 == 1))], x)


def nvfp4_float64(w: np.ndarray) -> np.ndarray:
    e4m3 = np.array(
        [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
    )
    blocks = w.reshape(-1, 16)
    g = float(np.float32(np.abs(w).max() / 2688))
    scale = nearest_float64(np.abs(blocks).max(-1) / (6 * g), e4m3)[:, None] * g
    return (nearest_float64(blocks / scale, np.array(E2M1_MAGNITUDES)) * scale).reshape(w.shape)


def mxfp4_float64(w: np.ndarray, rule: str) -> np.ndarray:
    blocks = w.reshape(-1, 32)
    amax = np.abs(blocks).max(-1)
    k = {
        "floor": lambda a: math.floor(math.log2(a)) - 2,
        "even": lambda a: math.floor(math.log2(a * 8 / 7)) - 2,
        "rceil": lambda a: math.ceil(math.log2(a / 6)),
        "ceil": lambda a: math.ceil(math.log2(a)) - 2,
    }[rule]
    step = np.array([2.0 ** k(a) for a in amax])[:, None]
    return (nearest_float64(blocks / step, np.array(E2M1_MAGNITUDES)) * step).reshape(w.shape)


def test_power_of_two_scaling_moves_mxfp4_only_in_its_exponents():
    w = sample("gauss")[:8]
    for rule in RULES:
        packed, scales = reference.mxfp4_quantize(w, rule)
        packed_up, scales_up = reference.mxfp4_quantize(w * 16, rule)
        assert torch.equal(packed, packed_up)
        assert torch.equal(scales.int() + 4, scales_up.int())
