"""Properties that hold for every input: round trips, error bounds, and the fast paths' equality with the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from workbench.kernels import cpu, reference
from workbench.kernels.tables import MXFP4_RULES

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
RULES = [rule.value for rule in MXFP4_RULES]

magnitudes = st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32)
weights = arrays(np.float32, st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 96])), elements=magnitudes)
any_float = arrays(
    np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=st.floats(width=32, allow_nan=False)
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN being a NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    return bool(((a.view(BITS[a.dtype]) == b.view(BITS[b.dtype])) | (a.isnan() & b.isnan())).all())


@given(arrays(np.uint8, st.tuples(st.integers(0, 5), st.integers(1, 9))))
def test_unpack_and_pack_are_inverse(packed):
    tensor = torch.from_numpy(packed)
    assert torch.equal(reference.pack_fp4(reference.unpack_fp4(tensor)), tensor)


@given(weights, st.sampled_from(["floor", "even", "rceil"]))
@settings(deadline=None, max_examples=60)
def test_mxfp4_of_mxfp4_is_itself(w, rule):
    """Requantizing decoded MXFP4 keeps every value (not so under `ceil`: a maximum of 6 moves the exponent)."""
    once = reference.mxfp4_dequantize(*reference.mxfp4_quantize(torch.from_numpy(w), rule))
    twice = reference.mxfp4_dequantize(*reference.mxfp4_quantize(once, rule))
    assert torch.equal(once, twice)


@given(weights, st.sampled_from(RULES))
@settings(deadline=None, max_examples=60)
def test_mxfp4_error_is_at_most_half_a_step_or_the_clipping(w, rule):
    w32 = torch.from_numpy(w)
    packed, scale_bytes = reference.mxfp4_quantize(w32, rule)
    step = reference.e8m0_values(scale_bytes).unsqueeze(-1)
    blocks = w32.unflatten(-1, (-1, 32))
    error = (reference.mxfp4_dequantize(packed, scale_bytes).unflatten(-1, (-1, 32)) - blocks).abs()
    clipping = (blocks.abs() - 6 * step).clamp(min=0)
    assert (error <= torch.maximum(step, clipping)).all()  # widest gap: 4 to 6
    if rule in ("rceil", "ceil"):
        assert (clipping == 0).all()


@given(weights)
@settings(deadline=None, max_examples=60)
def test_nvfp4_error_bound(w):
    w32 = torch.from_numpy(w)
    codes, scales, g = reference.nvfp4_quantize(w32)
    step = (scales.double() * g.double()).unsqueeze(-1)
    blocks = w32.double().unflatten(-1, (-1, 16))
    error = (reference.nvfp4_dequantize(codes, scales, g).double().unflatten(-1, (-1, 16)) - blocks).abs()
    # Half of the widest gap (4 to 6), or the overshoot where E4M3 rounded the block's scale down by up to 1/16.
    assert (error <= step * (1 + 1e-6) + 2.0**-140).all()


@given(any_float, st.sampled_from(RULES))
@settings(deadline=None, max_examples=60)
def test_every_finite_or_infinite_activation_is_handled_alike_on_both_paths(x, rule):
    x32 = torch.from_numpy(x)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = x32.to(dtype)
        assert same_bits(cpu.mxfp4_qdq_activation(rounded, rule), reference.mxfp4_qdq_activation(rounded, rule))
        for g in (None, torch.tensor(0.01), torch.full((x.shape[0], 1), 0.37)):
            assert same_bits(cpu.nvfp4_qdq_activation(rounded, g), reference.nvfp4_qdq_activation(rounded, g))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("shape", [(3, 32), (0, 64), (1, 64), (5, 7, 96), (700, 1024), (2, 300_032)])
def test_fast_decoding_equals_the_reference_for_every_byte(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=generator)
    e8m0 = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=generator)
    e4m3 = torch.randint(0, 256, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8, generator=generator)
    e4m3 = e4m3.view(torch.float8_e4m3fn)
    assert same_bits(cpu.mxfp4_dequantize(packed, e8m0, dtype), reference.mxfp4_dequantize(packed, e8m0).to(dtype))
    per_row = torch.rand(*shape[:-1], 1, generator=generator)
    for g in (torch.tensor(3.1e-4), per_row):
        expected = reference.nvfp4_dequantize(packed, e4m3, g).to(dtype)
        assert same_bits(cpu.nvfp4_dequantize(packed, e4m3, g, dtype), expected)


def test_nearest_equals_the_code_table_on_a_dense_grid():
    x = torch.cat((torch.linspace(-6, 6, 200_001), torch.arange(-24, 25) / 4.0, torch.tensor([0.0, -0.0])))
    assert same_bits(cpu.e2m1_nearest(x), reference.e2m1_values(reference.e2m1_round(x)))
