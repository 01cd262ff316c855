"""Properties that hold for every input: round trips and error bounds."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from workbench.kernels import reference
from workbench.kernels.tables import MXFP4_RULES

RULES = [rule.value for rule in MXFP4_RULES]

magnitudes = st.floats(min_value=-(2.0**60), max_value=2.0**60, width=32)
weights = arrays(np.float32, st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 96])), elements=magnitudes)


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
