"""QuantizedTensor and quantize(): shapes, messages, and the table of formats."""

from __future__ import annotations

import pytest
import torch
from workbench.kernels import reference
from workbench.kernels.elements import ELEMENTS, decode, packed_columns

from workbench.errors import FormatError
from workbench.formats import FORMATS, QuantizedTensor, get_format, quantize

WRITTEN = [f.name for f in FORMATS.values() if f.rules]


@pytest.mark.parametrize("format", WRITTEN)
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


@pytest.mark.parametrize("format", WRITTEN)
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
@pytest.mark.parametrize("format", WRITTEN)
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


@pytest.mark.parametrize("format", FORMATS)
def test_the_generic_decoder_is_codes_minus_zeros_times_scales(format):
    """Against plain loops, for every format, with partial last blocks where the format has them."""
    spec = FORMATS[format]
    n, k = (5, 96) if spec.block > 0 else (5, 100)
    block = (2 if spec.rows == -1 else spec.rows, 48 if spec.block == -1 else spec.block)
    generator = torch.Generator().manual_seed(0)
    element = ELEMENTS[spec.element]
    raw = torch.randint(0, 100, (n, packed_columns(spec.element, k)), generator=generator).to(torch.uint8)
    codes = raw.view(element.dtype)
    shape = spec.scale_shape((n, k), block)
    scale_bytes = torch.randint(110, 130, shape, generator=generator).to(torch.uint8)
    scales = {
        "e4m3": (scale_bytes // 2).view(torch.float8_e4m3fn),
        "e8m0": scale_bytes,
        "float": torch.rand(shape, generator=generator) + 0.5,
    }[spec.scale]
    zeros = torch.randint(-3, 4, shape, generator=generator).int() if spec.zero_points else None
    q = QuantizedTensor(
        format=format,
        codes=codes,
        block_scales=scales,
        global_scale=torch.tensor(0.37) if spec.has_global else None,
        shape=(n, k),
        block=block,
        zero_points=zeros,
    )
    steps = reference.e8m0_values(scales) if spec.scale == "e8m0" else scales.float()
    steps = steps * 0.37 if spec.has_global else steps
    values, got = decode(codes, spec.element), q.dequantize()
    for i in range(n):
        for j in range(k):
            at = (i // block[0] if block[0] else 0, j // block[1] if block[1] else 0)
            want = (values[i, j] - (zeros[at] if zeros is not None else 0)) * steps[at]
            assert got[i, j] == want, (i, j)


def test_a_scale_of_the_input_and_an_order_of_groups():
    q = QuantizedTensor(
        format="int4_group",
        codes=torch.tensor([[0x21, 0x43]], dtype=torch.uint8),
        block_scales=torch.tensor([[10.0, 100.0]]),
        global_scale=None,
        shape=(1, 4),
        block=(1, 2),
        group_index=torch.tensor([1, 0, 1, 0], dtype=torch.int32),
        pre_quant_scale=torch.tensor([1.0, 1.0, 1.0, 0.5]),
    )
    assert q.dequantize().tolist() == [[100.0, 20.0, 300.0, 40.0]]
    assert q.effective().tolist() == [[100.0, 20.0, 300.0, 20.0]]
