"""QuantizedTensor and quantize(): shapes, messages, and the table of formats."""

from __future__ import annotations

import pytest
import torch
from workbench.kernels import reference

from workbench.errors import FormatError
from workbench.formats import FORMATS, QuantizedTensor, get_format, quantize


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_gives_canonical_shapes_and_dtypes(format):
    w = torch.randn(3, 5, 64)
    q = quantize(w, format)
    block = q.spec.block
    assert (q.codes.shape, q.codes.dtype) == ((3, 5, 32), torch.uint8)
    assert q.block_scales.shape == (3, 5, 64 // block)
    assert q.shape == (3, 5, 64)
    assert q.dequantize().dtype == torch.float32
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().bfloat16())
    bits = 8 * (q.nbytes - (4 if q.spec.has_global else 0)) / w.numel()
    assert bits == q.spec.bits


@pytest.mark.parametrize("format", FORMATS)
def test_the_cpu_decoder_of_each_format_equals_its_definition(format):
    q = quantize(torch.randn(4, 96), format)
    definition = q.spec.dequantize(q.codes, q.block_scales, q.global_scale)
    assert torch.equal(q.spec.dequantize_cpu(q.codes, q.block_scales, q.global_scale, torch.float32), definition)


def test_unknown_format_and_rule_name_the_choices():
    with pytest.raises(FormatError) as caught:
        get_format("int3")
    assert "nvfp4, mxfp4" in caught.value.fix
    with pytest.raises(FormatError) as caught:
        quantize(torch.ones(1, 32), "mxfp4", "amax")
    assert "even, floor, rceil, ceil" in caught.value.fix


def test_k_that_the_block_does_not_divide():
    with pytest.raises(FormatError, match=r"layer\.weight: K = 40 is not a multiple of mxfp4's block of 32"):
        quantize(torch.ones(2, 40), "mxfp4", name="layer.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_non_finite_weights_are_refused_by_name_and_count(format, value):
    w = torch.ones(2, 32)
    w[1, 3] = value
    with pytest.raises(FormatError, match=r"layer\.weight: 1 of 64 values"):
        quantize(w, format, name="layer.weight")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_unusable_global_scale_is_refused(value):
    with pytest.raises(FormatError, match=r"layer\.weight: the given global scale"):
        quantize(torch.ones(2, 32), "nvfp4", global_scale=torch.tensor(value), name="layer.weight")


def test_shapes_that_contradict_the_format_are_refused():
    codes, scales, g = reference.nvfp4_quantize(torch.ones(2, 64))
    with pytest.raises(FormatError, match="block_scales"):
        QuantizedTensor(format="nvfp4", codes=codes, block_scales=scales[:, :2], global_scale=g, shape=(2, 64))
    with pytest.raises(FormatError, match="codes"):
        QuantizedTensor(format="nvfp4", codes=codes[:, :8], block_scales=scales, global_scale=g, shape=(2, 64))
    with pytest.raises(FormatError, match="needs a global scale"):
        QuantizedTensor(format="nvfp4", codes=codes, block_scales=scales, global_scale=None, shape=(2, 64))


def test_global_scale_of_each_shard_of_a_fused_tensor():
    gate, up = torch.randn(2, 32), torch.randn(3, 32) * 50
    parts = [quantize(w, "nvfp4") for w in (gate, up)]
    fused = QuantizedTensor(
        format="nvfp4",
        codes=torch.cat([p.codes for p in parts]),
        block_scales=torch.cat([p.block_scales for p in parts]),
        global_scale=torch.cat([p.global_scale.expand(p.shape[0], 1) for p in parts]),
        shape=(5, 32),
    )
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
