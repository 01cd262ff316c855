"""Scale rules: what they promise for every input, and what each producer does with ties, zeros and small blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_kernels_reference import sample, sqnr_db
from torch import Tensor
from workbench.kernels import mx, nvfp4, reference, scaled
from workbench.kernels.blocks import join_blocks, narrow, split_blocks
from workbench.kernels.elements import ELEMENTS, decode, encode, pack
from workbench.kernels.tables import MXFP4_RULES, ScaleRule, Ties, Zeros

MX_ELEMENTS = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]
FLOATS = st.floats(min_value=-(2.0**40), max_value=2.0**40, width=32)
WEIGHTS = arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=FLOATS)


# ---- elements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", MX_ELEMENTS)
@pytest.mark.parametrize("ties", Ties)
def test_every_code_is_encoded_to_itself_and_every_midpoint_by_its_tie(element: str, ties: Ties) -> None:
    spec = ELEMENTS[element]
    codes = torch.arange(1 << (spec.bits - 1), dtype=torch.int32).to(torch.uint8)
    values = decode(pack(codes.view(spec.dtype), element), element)
    codes = codes[values <= spec.max]
    values = values[values <= spec.max]
    assert torch.equal(encode(values, element, ties).view(torch.uint8), codes)
    assert torch.equal(encode(-values, element, ties).view(torch.uint8), codes + (1 << (spec.bits - 1)))
    middle = (values[1:] + values[:-1]) / 2
    lower = codes[:-1]
    want = {Ties.ZERO: lower, Ties.AWAY: lower + 1, Ties.EVEN: lower + lower % 2}[ties]
    assert torch.equal(encode(middle, element, ties).view(torch.uint8), want)
    assert torch.equal(encode(torch.tensor([1e30]), element, ties).view(torch.uint8), codes[-1:])


@pytest.mark.parametrize(
    ("zeros", "want"),
    [
        (Zeros.SIGNED, [0, 8, 0, 8]),
        (Zeros.VALUE, [0, 0, 0, 8]),
        (Zeros.POSITIVE, [0] * 4),
        (Zeros.NEGATIVE, [8, 8, 0, 8]),
    ],
)
def test_which_zero_an_element_gets(zeros: Zeros, want: list[int]) -> None:
    x = torch.tensor([0.0, -0.0, 0.1, -0.1])
    assert encode(x, "e2m1", zeros=zeros).tolist() == want


@given(WEIGHTS)
def test_e2m1_equals_its_definition_and_e4m3_the_saturating_cast(w: np.ndarray) -> None:
    x = torch.from_numpy(w)
    assert torch.equal(encode(x, "e2m1"), reference.e2m1_round(x))
    assert torch.equal(encode(x, "e4m3").view(torch.uint8), reference.e4m3_round(x).view(torch.uint8))


# ---- MX --------------------------------------------------------------------------------------------------------------


@given(WEIGHTS, st.sampled_from(MXFP4_RULES))
@settings(deadline=None, max_examples=60)
def test_plain_rules_on_e2m1_are_the_reference(w: np.ndarray, rule: ScaleRule) -> None:
    codes, scale_bytes = mx.quantize(torch.from_numpy(w), "e2m1", rule)
    want_codes, want_bytes = reference.mxfp4_quantize(torch.from_numpy(w), rule)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale_bytes, want_bytes)


@given(WEIGHTS, st.sampled_from(MX_ELEMENTS), st.sampled_from(["floor", "even", "rceil", "mse"]))
@settings(deadline=None, max_examples=120)
def test_mx_of_mx_is_itself(w: np.ndarray, element: str, rule: str) -> None:
    once = mx.dequantize(*mx.quantize(torch.from_numpy(w), element, rule), element)
    twice = mx.dequantize(*mx.quantize(once, element, rule), element)
    assert torch.equal(once, twice)


@given(WEIGHTS, st.sampled_from(MX_ELEMENTS), st.sampled_from(list(mx.RULES)))
@settings(deadline=None, max_examples=120)
def test_mx_error_is_half_a_gap_or_the_clipping(w: np.ndarray, element: str, rule: ScaleRule) -> None:
    """The widest gap is 2**(emax - mantissa bits) steps. Not for tiny blocks: there tools' scales and codes part."""
    x, spec = torch.from_numpy(w), ELEMENTS[element]
    codes, scale_bytes = mx.quantize(x, element, rule)
    blocks = split_blocks(x.double(), (1, 32))
    step = reference.e8m0_values(scale_bytes).double()[..., :, None, :, None]
    error = (split_blocks(mx.dequantize(codes, scale_bytes, element).double(), (1, 32)) - blocks).abs()
    half_gap = step * 2.0 ** (spec.emax - spec.mantissa_bits) / 2
    clipping = (blocks.abs() - spec.max * step).clamp(min=0)
    live = blocks.abs().amax((-3, -1), keepdim=True) > 2.0**-90
    assert ((error <= torch.maximum(half_gap, clipping)) | ~live).all()


@given(WEIGHTS, st.sampled_from(MX_ELEMENTS))
@settings(deadline=None, max_examples=60)
def test_mse_is_never_worse_than_any_plain_rule(w: np.ndarray, element: str) -> None:
    x = torch.from_numpy(w)

    def error(rule: ScaleRule) -> Tensor:
        value = mx.dequantize(*mx.quantize(x, element, rule), element)
        return split_blocks((value.double() - x.double()).square(), (1, 32)).sum((-3, -1))

    best = error(ScaleRule.MSE)
    for rule in MXFP4_RULES:
        assert (best <= error(rule) * (1 + 1e-12)).all(), rule


def test_a_scale_shared_by_rows() -> None:
    w = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    codes, scale_bytes = mx.quantize(w, "e4m3", "rceil", (4, 32))
    assert scale_bytes.shape == (2, 2)
    alone = mx.quantize(w[:4].reshape(1, 4, 2, 32).permute(0, 2, 1, 3).reshape(2, 128), "e4m3", "rceil", (1, 128))[1]
    assert torch.equal(scale_bytes[0], alone.flatten())
    assert (mx.dequantize(codes, scale_bytes, "e4m3", (4, 32)) - w).abs().max() < 0.13


@pytest.mark.parametrize(
    ("rule", "scale_byte", "zero_code"),
    [("even", 0, 8), ("modelopt", 0, 8), ("llm_compressor", 0, 0), ("quark", 1, 0), ("torchao", 0, 8)],
)
def test_what_each_tool_writes_for_a_block_of_minus_zeros(rule: str, scale_byte: int, zero_code: int) -> None:
    codes, scale_bytes = mx.quantize(torch.full((1, 32), -0.0), "e2m1", rule)
    assert scale_bytes.tolist() == [[scale_byte]]
    assert codes.tolist() == [[zero_code * 17] * 16]


def test_ties_toward_zero_and_away() -> None:
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4])
    for rule, want in (
        ("even", [0, 2, 2, 4, 4, 6, 6, 7]),
        ("modelopt", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("microxcaling", [1, 2, 3, 4, 5, 6, 7, 7]),
    ):
        codes, scale_bytes = mx.quantize(x, "e2m1", rule)
        assert scale_bytes.item() == 127
        assert reference.unpack_fp4(codes)[0, :8].tolist() == want, rule


def test_a_rule_that_mx_does_not_have() -> None:
    with pytest.raises(ValueError, match="no scale rule 'amax'; choose one of: floor, even"):
        mx.quantize(torch.ones(1, 32), "e2m1", "amax")


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


@given(WEIGHTS)
@settings(deadline=None, max_examples=40)
def test_amax_is_the_reference(w: np.ndarray) -> None:
    got, want = nvfp4.quantize(torch.from_numpy(w), "amax"), reference.nvfp4_quantize(torch.from_numpy(w))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dim() else a == b


@given(WEIGHTS)
@settings(deadline=None, max_examples=40)
def test_four_over_six_and_mse_are_never_worse_than_amax_at_the_same_global(w: np.ndarray) -> None:
    x = torch.from_numpy(w)
    g = nvfp4.get_rule("four_over_six").global_scale(x.abs().amax())

    def error(rule: str) -> Tensor:
        value = reference.nvfp4_dequantize(*nvfp4.quantize(x, rule, g))
        return (value.double() - x.double()).square().unflatten(-1, (-1, 16)).sum(-1)

    amax, four_over_six, mse = (error(rule) for rule in ("amax", "four_over_six", "mse"))
    # The search weighs exact products; the decoder rounds them to float32.
    slack = 1 + 1e-5
    assert (four_over_six <= amax * slack).all()
    assert (mse <= four_over_six * slack).all()


def test_mse_finds_the_best_of_all_126_scales() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 16, generator=generator)
    x[:8] = x[:8].sign() * torch.randint(0, 3, (8, 16), generator=generator)  # few values: large steps may be best
    x[8:16, 1:] *= 0.02
    x[16:24] *= 2.0**-9
    g = reference.nvfp4_global_scale(x.abs().amax())
    _, scales, _ = nvfp4.quantize(x, "mse", g)
    best = torch.full((64,), torch.inf, dtype=torch.float64)
    for code in range(1, 127):
        step = torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * g
        value = reference.e2m1_values(reference.e2m1_round(x / step)).double() * step
        best = torch.minimum(best, (value - x).square().sum(-1))
    step = scales.float() * g
    value = reference.e2m1_values(reference.e2m1_round(x / step)).double() * step
    assert torch.allclose((value - x).square().sum(-1), best, rtol=1e-12)


@pytest.mark.parametrize("rule", list(nvfp4.RULES))
def test_nvfp4_is_finite_for_zero_and_for_tiny_matrices(rule: ScaleRule) -> None:
    """An all-zero matrix decodes to zeros under every rule, also where the tool itself would write NaN."""
    for w in (torch.zeros(2, 32), torch.full((1, 32), 1e-30), torch.full((1, 32), 1e-42)):
        codes, scales, g = nvfp4.quantize(w, rule)
        assert bool((g > 0).all())
        value = reference.nvfp4_dequantize(codes, scales, g)
        assert value.isfinite().all()
        if not w.any():
            assert torch.count_nonzero(value) == 0


@pytest.mark.parametrize(
    ("rule", "zero", "small"),
    [("modelopt", 1.0, 2.0**-9), ("llm_compressor", 0.125, 0.125), ("quark", 1.0, 1.0), ("torchao", 2.0**-6, 2.0**-6)],
)
def test_scales_of_zero_and_underflowing_blocks(rule: str, zero: float, small: float) -> None:
    w = torch.zeros(1, 48)
    w[0, 0], w[0, 16:32] = 2688.0, 1e-3  # global scale 1; 1e-3 / 6 is below half of E4M3's smallest number
    _, scales, g = nvfp4.quantize(w, rule)
    assert g == 1.0
    assert scales.float().tolist() == [[448.0, small, zero]]


@pytest.mark.parametrize(("rule", "want_db"), [("amax", 20.44), ("four_over_six", 21.21), ("mse", 21.8)])
def test_sqnr_of_nvfp4_rules_on_gaussian_weights(rule: str, want_db: float) -> None:
    w = sample("gauss")[:48]
    assert sqnr_db(w, reference.nvfp4_dequantize(*nvfp4.quantize(w, rule))) == pytest.approx(want_db, abs=0.1)


@pytest.mark.parametrize(("rule", "want_db"), [("floor", 16.83), ("even", 17.01), ("rceil", 16.64), ("ceil", 15.75)])
def test_sqnr_of_requantizing_nvfp4_to_mxfp4_on_gaussian_weights(rule: str, want_db: float) -> None:
    w = sample("gauss")
    a = reference.nvfp4_dequantize(*reference.nvfp4_quantize(w))
    assert sqnr_db(w, mx.dequantize(*mx.quantize(a, "e2m1", rule), "e2m1")) == pytest.approx(want_db, abs=0.1)


# ---- float scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["e4m3", "int4", "int8"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 32), (3, 50)])
def test_data_on_the_grid_comes_back(element: str, block: tuple[int, int]) -> None:
    """Codes with a largest one in every block, times a power of two a block: quantizing them is exact."""
    spec = ELEMENTS[element]
    largest = spec.max if spec.mantissa_bits else spec.max - 1
    generator = torch.Generator().manual_seed(5)
    n, k = 7, 96 if block != (3, 50) else 110
    values = (torch.rand(n, k, generator=generator) * 2 - 1) * largest
    values = decode(pack(encode(values, element), element), element).clamp(-largest, largest)
    blocks = split_blocks(values, block)
    blocks[..., 0, :, 0] = largest
    blocks = (
        blocks * torch.exp2(torch.randint(-9, 9, blocks.shape[-4::2], generator=generator).float())[:, None, :, None]
    )
    w = join_blocks(blocks, values.shape)
    for rule in ("amax", "modelopt"):
        parts = scaled.quantize(w, element, rule, block)
        steps = split_blocks(decode(parts.codes, element), block) * parts.scales[:, None, :, None]
        assert torch.equal(join_blocks(steps, w.shape), w), rule


@given(WEIGHTS, st.sampled_from(["e4m3", "int4", "int8"]), st.sampled_from(list(scaled.RULES)))
@settings(deadline=None, max_examples=120)
def test_error_of_float_scales(w: np.ndarray, element: str, rule: ScaleRule) -> None:
    """At most half of the widest gap, or a step where half ranges clip, plus what a bfloat16 quotient loses."""
    x, spec = torch.from_numpy(w), ELEMENTS[element]
    if rule is ScaleRule.RCEIL and not spec.mantissa_bits:
        return
    parts = scaled.quantize(x, element, rule, (1, 32))
    scales = reference.e8m0_values(parts.scales) if parts.scales.dtype == torch.uint8 else parts.scales
    step = scales.double()[:, None, :, None]
    zero = 0 if parts.zero_points is None else parts.zero_points.double()[:, None, :, None]
    value = (split_blocks(decode(parts.codes, element).double(), (1, 32)) - zero) * step
    blocks = split_blocks(x.double(), (1, 32))
    bound = step * (2.0 ** (spec.emax - spec.mantissa_bits) / 2 if spec.mantissa_bits else 1.0) + blocks.abs() / 60
    live = step > 2.0**-100
    assert (((value - blocks).abs() <= bound) | ~live).all()


def test_zero_points_keep_zero_exact() -> None:
    w = torch.rand(4, 64, generator=torch.Generator().manual_seed(6)) + 0.5
    w[:, ::5] = 0
    for rule in ("minmax", "llm_compressor_asym"):
        parts = scaled.quantize(w, "int4", rule, (1, 32))
        assert parts.zero_points is not None
        value = (
            split_blocks(decode(parts.codes, "int4"), (1, 32)) - parts.zero_points[:, None, :, None]
        ) * parts.scales[:, None, :, None]
        assert torch.count_nonzero(join_blocks(value, w.shape)[:, ::5]) == 0
    assert torch.equal(scaled.quantize(torch.zeros(1, 32), "int4", "minmax", (1, 32)).codes, torch.zeros(1, 16).byte())


def test_the_checkpoints_dtype_is_found_again() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        w = torch.randn(64, generator=torch.Generator().manual_seed(7)).to(dtype)
        assert narrow(w.float()).dtype == dtype
        assert narrow(w).dtype == dtype
