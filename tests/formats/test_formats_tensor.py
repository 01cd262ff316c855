"""QuantizedTensor and quantize(): shapes, messages, and the table of formats."""

from __future__ import annotations

import pytest
import torch
from workbench.kernels import reference
from workbench.kernels.elements import ELEMENTS, decode, packed_columns

from workbench.errors import FormatError
from workbench.formats import FORMATS, QuantizedTensor, get_format, global_scale, quantize

PAIRS = [(f.name, rule.value) for f in FORMATS.values() for rule in f.rules]


@pytest.mark.parametrize(("format", "rule"), PAIRS)
def test_quantize_gives_canonical_shapes_and_dtypes(format, rule):
    """QuantizedTensor checks every part against its format; the values are near the weights."""
    w = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0))
    q = quantize(w, format, rule)
    assert q.shape == (3, 5, 256)
    assert q.dequantize().dtype == torch.float32
    assert torch.equal(q.dequantize(torch.bfloat16), q.dequantize().bfloat16())
    assert (q.dequantize() - w).square().mean() < 0.04
    assert (q.zero_points is not None) == (rule in ("minmax", "llm_compressor_asym"))


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if 0 not in (f.block, f.rows) and f.block > 0])
def test_the_table_states_the_stored_bits(format):
    q = quantize(torch.randn(5, 64), format)
    bits = 8 * (q.nbytes - (4 if q.spec.has_global else 0)) / (5 * 64)
    assert bits == q.spec.bits


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if f.dequantize_cpu is not None])
def test_the_cpu_decoder_of_each_format_equals_its_definition(format):
    q = quantize(torch.randn(4, 96), format)
    definition = q.spec.dequantize(q.codes, q.block_scales, q.global_scale)
    assert torch.equal(q.spec.dequantize_cpu(q.codes, q.block_scales, q.global_scale, torch.float32), definition)


def test_blocks_are_given_where_the_format_leaves_them_open():
    w = torch.randn(5, 300)
    q = quantize(w, "fp8_block", block=(2, 128))
    assert (q.block, q.block_scales.shape) == ((2, 128), (3, 3))  # partial last blocks
    assert quantize(w, "fp8_block", "rceil").block_scales.dtype == torch.uint8
    assert quantize(w[:, :256], "int4_group").block == (1, 128)
    assert quantize(w[:, :256], "mxfp8_e4m3", block=(4, 32)).block_scales.shape == (2, 8)
    for format, block, allowed in (
        ("nvfp4", (1, 32), "rows = 1, columns = 16"),
        ("mxfp8_e4m3", (1, 16), "rows = 1 to 1073741824, columns = 32"),
        ("int4_group", (1, 0), "rows = 1, columns = 1 to 1073741824"),
    ):
        with pytest.raises(FormatError, match="has no blocks of") as caught:
            quantize(w[:, :256], format, block=block)
        assert allowed in caught.value.fix
    with pytest.raises(FormatError, match="K = 300 is not a multiple of int4_group's block of 128"):
        quantize(w, "int4_group")
    with pytest.raises(FormatError, match="do not fill whole bytes"):
        quantize(w[:, :5], "int4_channel")


def test_a_vector_is_quantized_like_a_row():
    w = torch.randn(64)
    for format in ("nvfp4", "mxfp4", "mxfp6_e2m3"):
        assert torch.equal(quantize(w, format).dequantize(), quantize(w.unsqueeze(0), format).dequantize()[0])


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if f.shared_scale is not None])
def test_a_shared_scale_is_that_of_the_larger_tensor(format):
    """`global_scale` of an amax gives what a tensor with that amax gets by itself; a smaller one quantizes under it."""
    large, small = torch.randn(4, 64) * 3, torch.randn(2, 64)
    for rule in FORMATS[format].rules:
        shared = global_scale(format, rule.value, large.abs().amax())
        alone, given = (quantize(large, format, rule.value, global_scale=g) for g in (None, shared))
        assert torch.equal(alone.dequantize(), given.dequantize())
        below = quantize(small, format, rule.value, global_scale=shared)
        assert torch.equal((below.global_scale if below.spec.has_global else below.block_scales).flatten()[0], shared)
        assert (below.dequantize() - small).abs().max() < 0.8


def test_a_global_scale_where_there_is_none():
    with pytest.raises(FormatError, match="mxfp4 has no scale that a whole tensor shares"):
        global_scale("mxfp4", None, torch.tensor(1.0))
    with pytest.raises(FormatError, match="mxfp4 has no global scale, but one was given"):
        quantize(torch.ones(1, 32), "mxfp4", global_scale=torch.tensor(1.0))


def test_a_divisor_as_the_global_scale_decodes_as_the_division():
    """compressed-tensors stores G and decodes e2m1 * (scale / G); a float64 1 / G gives the same float32 values."""
    codes, scales, _ = reference.nvfp4_quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    for divisor in (419.59, 1234.5, 0.7, 77777.0):
        g = torch.tensor(divisor)
        q = QuantizedTensor(
            format="nvfp4", codes=codes, block_scales=scales, global_scale=1.0 / g.double(), shape=(64, 64)
        )
        steps = (scales.float() / g).repeat_interleave(16, -1)
        assert torch.equal(q.dequantize(), decode(codes, "e2m1") * steps)
        assert (1.0 / q.global_scale).float() == g


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e2m3", "mxfp6_e3m2", "fp8_tensor", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_as_weights_are_and_row_by_row(format, dtype):
    x = (torch.randn(6, 256, generator=torch.Generator().manual_seed(2)) * 5).to(dtype)
    x[2] = 0
    spec = get_format(format)
    whole = spec.qdq_activation(x, spec.default_rule, None)
    assert (whole.dtype, whole.shape) == (dtype, x.shape)
    for row in range(6):
        assert torch.equal(spec.qdq_activation(x[row : row + 1], spec.default_rule, None)[0], whole[row])
    per_row = {"fp8_tensor": "fp8_channel"}.get(format, format)
    block = (1, 128) if format == "fp8_block" else None
    assert torch.equal(whole, quantize(x, per_row, block=block).dequantize(dtype))


def test_static_activation_scales_saturate():
    x = torch.tensor([[1.0, -2.0, 1000.0, 0.3]])
    got = get_format("fp8_tensor").qdq_activation(x, get_format("fp8_tensor").default_rule, torch.tensor(0.5))
    assert got.tolist() == [[1.0, -2.0, 224.0, 0.3125]]


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
    w = torch.ones(2, 128)
    w[1, 3] = value
    with pytest.raises(FormatError, match=r"layer\.weight: 1 of 256 values"):
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
            if format == "int4_channel":  # Quark's order of products
                want = values[i, j] * scales[at] * 0.37
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


@pytest.mark.parametrize("format", FORMATS)
def test_the_default_dtype_does_not_matter(format):
    """vLLM loads weights under its model's dtype as torch's default."""
    w = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    before = quantize(w, format)
    torch.set_default_dtype(torch.bfloat16)
    try:
        q = quantize(w, format)
        values = q.dequantize()
        rounded = q.spec.qdq_activation(w, q.spec.default_rule, None) if q.spec.qdq_activation else None
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(q.codes.view(torch.uint8), before.codes.view(torch.uint8))
    assert torch.equal(q.block_scales.view(torch.uint8), before.block_scales.view(torch.uint8))
    assert values.dtype == torch.float32
    assert torch.equal(values, before.dequantize())
    if rounded is not None:
        assert torch.equal(rounded, q.spec.qdq_activation(w, q.spec.default_rule, None))
