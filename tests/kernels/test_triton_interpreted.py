"""The Triton kernels, interpreted on the CPU, give the reference's bits: every rule and dtype, ragged and empty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from workbench.kernels import blocks, elements, mx, nvfp4, reference, tables

pytest.importorskip("triton", minversion="3.9", reason="older interpreters round a fused multiply-add twice")
from triton_interpreter import interpreted

PLAIN = [rule.value for rule in tables.MXFP4_RULES]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}


def same(found: object, expected: object) -> bool:
    """Equal bit for bit, any NaN being a NaN."""
    if isinstance(found, tuple):
        assert isinstance(expected, tuple)
        return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert isinstance(found, Tensor)
    assert isinstance(expected, Tensor)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype not in BITS:
        return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    return bool(
        ((found.view(BITS[found.dtype]) == expected.view(BITS[found.dtype])) | found.isnan() & expected.isnan()).all()
    )


def random_bits(*shape: int, finite: bool = False, seed: int = 0) -> Tensor:
    """float32 numbers of every exponent; with infinity and NaN unless `finite`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).int().view(torch.float32)
    return torch.where(x.isfinite(), x, 0.0) if finite else x


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def edge_rows() -> Tensor:
    """Ties at several scales, zero blocks, minus zero, a clipped maximum, and rows of single magnitudes: `[14, 32]`."""
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    row = torch.tensor([*midpoints, *(-m for m in midpoints), 0.0, -0.0, *[0.5, -0.5] * 7])
    thresholds = torch.zeros(6, 32)
    thresholds[:, 7] = torch.tensor([1.0, 1.5, 1.75]).repeat(2) * (1 + 2.0**-23 * torch.tensor([0, 0, 0, 1, 1, 1]))
    below = torch.zeros(2, 32)  # the next float32 below a power of two
    below[:, 3] = torch.tensor([2.0**-6, 2.0**40]) * (1 - 2.0**-24)
    tiny = torch.stack((row * 2.0**-9, row * 448, row * 2.0**-130))
    return torch.cat((row[None], tiny, torch.zeros(1, 32), -torch.zeros(1, 32), thresholds, below))


@interpreted
def test_the_largest_is_reduced_at_once_as_one_by_one() -> None:
    from triton.runtime.interpreter import ReduceOps
    from workbench.kernels import triton_quantize

    at_once = ReduceOps.generic_reduce
    x = torch.cat((random_bits(8, 32), edge_rows()))
    found = {}
    for way in (at_once, ReduceOps.one_by_one):
        ReduceOps.generic_reduce = way
        try:
            found[way] = triton_quantize.mxfp4_quantize(x)
        finally:
            ReduceOps.generic_reduce = at_once
    assert same(*found.values())


# ---- quantize --------------------------------------------------------------------------------------------------------


@interpreted
def test_quantization_of_every_exponent_tie_and_special_value() -> None:
    from workbench.kernels import triton_quantize

    x = torch.cat((random_bits(84, 32), edge_rows()))
    for rule in PLAIN:
        assert same(triton_quantize.mxfp4_quantize(x, rule), reference.mxfp4_quantize(x, rule)), rule
    for g in (None, torch.tensor(0.01), torch.tensor(2.0**-118), torch.tensor(3e38)):
        assert same(triton_quantize.nvfp4_quantize(x, g), reference.nvfp4_quantize(x, g)), g


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@interpreted
def test_quantization_of_ragged_empty_and_strided_tensors(dtype: torch.dtype) -> None:
    from workbench.kernels import triton_quantize

    w = normal(96, 33).to(dtype)
    for x in (w.t(), w.t()[::2], torch.zeros(0, 64, dtype=dtype), normal(3, 5, 32).to(dtype), normal(64).to(dtype)):
        assert same(triton_quantize.mxfp4_quantize(x), reference.mxfp4_quantize(x))
        assert same(triton_quantize.nvfp4_quantize(x), reference.nvfp4_quantize(x))


@pytest.mark.parametrize("rule", [rule.value for rule in mx.RULES])
@interpreted
def test_mxfp4_rules(rule: str) -> None:
    from workbench.kernels import triton_quantize

    for x in (random_bits(8, 64, finite=True), edge_rows(), normal(5, 64).bfloat16()):
        assert same(triton_quantize.mxfp4_quantize(x, rule), mx.quantize(x, "e2m1", rule))


@pytest.mark.parametrize("rule", [rule.value for rule in nvfp4.RULES])
@interpreted
def test_nvfp4_rules(rule: str) -> None:
    from workbench.kernels import triton_quantize

    x = torch.cat((random_bits(8, 32, finite=True), edge_rows(), normal(5, 32)))
    assert same(triton_quantize.nvfp4_quantize(x, None, rule), nvfp4.quantize(x, rule))
    x = normal(5, 64).bfloat16()
    g = torch.rand(5, 1, generator=torch.Generator().manual_seed(0)) + 0.01
    assert same(triton_quantize.nvfp4_quantize(x, g, rule), nvfp4.quantize(x, rule, g))


@interpreted
def test_the_short_division_rounds_to_e2m1_as_the_quotient_does() -> None:
    """Near every midpoint, where alone it could differ, for a sample of significands (the GPU check takes all)."""
    from triton_division import both_codes

    significands = torch.arange(0, 1 << 23, 1021, dtype=torch.int32) | (127 << 23)
    d = significands.view(torch.float32)[:8192] * 2.0**-20
    middles = (torch.tensor(tables.E2M1_MIDPOINTS)[:, None] * d).view(torch.int32)
    x = torch.stack([middles + step for step in (-1, 0, 1)]).view(torch.float32).reshape(-1)
    d = d.repeat(21)
    short, exact = (torch.empty(x.shape, dtype=torch.int32) for _ in range(2))
    both_codes[(21,)](x, d, short, exact, TILE=8192)
    assert torch.equal(short, exact)
    assert exact.unique().tolist() == list(range(8))


# ---- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@interpreted
def test_every_byte_with_every_scale_decodes_as_the_reference(dtype: torch.dtype) -> None:
    from workbench.kernels import triton_dequantize

    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    packed, scales = every.expand(256, 256), every.view(-1, 1)
    mx_scales, nv_scales = (scales.expand(256, n).contiguous() for n in (16, 32))
    expected = reference.mxfp4_dequantize(packed, mx_scales).to(dtype)
    assert same(triton_dequantize.mxfp4_dequantize(packed, mx_scales, dtype), expected)
    for g in (torch.tensor(2.0**-22 / 3), torch.tensor(-1e38), torch.logspace(-40, 38, 256).view(-1, 1)):
        expected = reference.nvfp4_dequantize(packed, nv_scales.view(torch.float8_e4m3fn), g).to(dtype)
        assert same(triton_dequantize.nvfp4_dequantize(packed, nv_scales.view(torch.float8_e4m3fn), g, dtype), expected)


@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
@interpreted
def test_mx_elements_decode_as_the_reference(element: str) -> None:
    from workbench.kernels import triton_dequantize

    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(-1, 1).expand(256, 2)
    codes = torch.randint(0, 256, (256, elements.packed_columns(element, 64)), generator=generator).to(torch.uint8)
    codes = codes.view(elements.ELEMENTS[element].dtype)
    assert same(triton_dequantize.mx_dequantize(codes, scales, element), mx.dequantize(codes, scales, element))


@pytest.mark.parametrize("block", [(128, 128), (0, 0), (1, 0), (3, 7)])
@interpreted
def test_block_scaled_fp8_decodes_with_partial_blocks(block: tuple[int, int]) -> None:
    from workbench.kernels import triton_dequantize

    codes = torch.randint(0, 256, (2, 45, 150), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows, columns = block[0] or 45, block[1] or 150
    scales = normal(2, -(-45 // rows), -(-150 // columns))
    scale_bytes = torch.randint(0, 256, scales.shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = codes.view(dtype).float()
        expected = values * blocks.spread(scales, block, values.shape)
        assert same(triton_dequantize.fp8_dequantize(codes.view(dtype), scales, block), expected)
        expected = values * blocks.spread(reference.e8m0_values(scale_bytes), block, values.shape)
        assert same(triton_dequantize.fp8_dequantize(codes.view(dtype), scale_bytes, block), expected)


@interpreted
def test_shapes_that_do_not_fit_are_refused() -> None:
    from workbench.kernels import triton_dequantize, triton_quantize, triton_requant

    codes, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    for call in (
        lambda: triton_quantize.mxfp4_quantize(torch.zeros(2, 33)),
        lambda: triton_quantize.nvfp4_quantize(torch.zeros(2, 8)),
        lambda: triton_quantize.mxfp4_quantize(torch.zeros(2, 32), "amax"),
        lambda: triton_dequantize.mxfp4_dequantize(codes, scales),
        lambda: triton_requant.nvfp4_to_mxfp4(codes[:, :8], scales[:, :1].view(torch.float8_e4m3fn), torch.ones(())),
    ):
        with pytest.raises(ValueError, match=r"multiple|no scale rule|do not fit"):
            call()


# ---- activations, requantization, errors -----------------------------------------------------------------------------


@interpreted
def test_activations_are_rounded_as_by_the_reference() -> None:
    from workbench.kernels import triton_activation

    for x in (random_bits(8, 64), edge_rows().bfloat16(), normal(32, 7).half().t(), torch.zeros(0, 32)):
        for rule in PLAIN:
            expected = reference.mxfp4_qdq_activation(x, rule)
            assert same(triton_activation.mxfp4_qdq_activation(x, rule), expected)
        rows = torch.rand(x.shape[0], 1, generator=torch.Generator().manual_seed(0)) + 0.1
        for g in (None, torch.tensor(0.01), torch.tensor([3e38]), rows):
            assert same(triton_activation.nvfp4_qdq_activation(x, g), reference.nvfp4_qdq_activation(x, g))
    x, g = normal(4, 32), torch.tensor([[0.1], [torch.nan], [0.2], [torch.nan]])
    own = torch.where(g.isnan(), reference.nvfp4_global_scale(x.abs().amax(-1, keepdim=True)), g)
    expected = reference.nvfp4_qdq_activation(x, own)
    assert same(triton_activation.nvfp4_qdq_activation(x, g, own_where_nan=True), expected)


def nvfp4_codes(*lead: int) -> tuple[Tensor, Tensor]:
    """Random codes and scales of `[*lead, 160, 128]` weights, some blocks of which lack the large codes."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (*lead, 160, 64), generator=generator).to(torch.uint8)
    packed[..., :40, :] &= 0x33
    packed[..., 40:70, :] &= 0x99
    packed[..., 70:80, :] &= 0x88
    scales = torch.randint(0, 256, (*lead, 160, 8), generator=generator).to(torch.uint8)
    return packed, scales.view(torch.float8_e4m3fn)


def requantizes_as_the_reference(packed: Tensor, scales: Tensor, g: Tensor, rule: str) -> None:
    from workbench.kernels import triton_requant

    codes, scale_bytes = triton_requant.nvfp4_to_mxfp4(packed, scales, g, rule)
    expected, expected_bytes = reference.mxfp4_quantize(reference.nvfp4_dequantize(packed, scales, g), rule)
    assert same(scale_bytes, expected_bytes)
    valid = (expected_bytes != tables.E8M0_NAN).unsqueeze(-1)
    blocks = (*scale_bytes.shape, 16)
    assert bool(((codes.view(blocks) == expected.view(blocks)) | ~valid).all())


GLOBALS = (0.013, 2.0**-140, 3e36, -0.5)


@pytest.mark.parametrize("rule", PLAIN)
@interpreted
def test_requantization_equals_decoding_and_quantizing(rule: str) -> None:
    packed, scales = nvfp4_codes()
    rows = torch.rand(160, 1, generator=torch.Generator().manual_seed(0))
    for g in (*map(torch.tensor, GLOBALS), rows):
        requantizes_as_the_reference(packed, scales, g, rule)


@pytest.mark.parametrize("rule", PLAIN)
@interpreted
def test_requantization_by_tables_equals_decoding_and_quantizing(rule: str) -> None:
    from workbench.kernels import triton_requant

    usual = triton_requant.TABLE_WORTH
    triton_requant.TABLE_WORTH = 1
    try:
        packed, scales = nvfp4_codes(4)
        requantizes_as_the_reference(packed, scales, torch.tensor(GLOBALS).view(4, 1, 1), rule)
        for g in GLOBALS:
            requantizes_as_the_reference(packed[0], scales[0], torch.tensor(g), rule)
    finally:
        triton_requant.TABLE_WORTH = usual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", ["even", "floor"])
@interpreted
def test_error_sums_are_those_of_the_algebra(dtype: torch.dtype, rule: str) -> None:
    from workbench.kernels import triton_errors, triton_requant

    w = (normal(37, 96) * normal(37, 1, seed=1).exp()).to(dtype)
    rows = torch.rand(37, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    check_error_sums(w, rows, rule)
    usual = triton_errors.TABLE_WORTH
    triton_errors.TABLE_WORTH = triton_requant.TABLE_WORTH = 1
    try:
        check_error_sums(w, torch.tensor(0.3), rule)
    finally:
        triton_errors.TABLE_WORTH = triton_requant.TABLE_WORTH = usual


def check_error_sums(w: Tensor, g: Tensor, rule: str) -> None:
    from workbench.kernels import triton_errors

    codes, scales, g = reference.nvfp4_quantize(w, g)
    scales.view(torch.uint8)[3, ::2] |= 128  # a scale's sign turns both a and b
    a = reference.nvfp4_dequantize(codes, scales, g)
    b, d = (reference.mxfp4_dequantize(*reference.mxfp4_quantize(t, rule)).double() for t in (a, w))
    a, x = a.double(), w.double()
    sides = {"w": x, "e1": a - x, "e2": b - a, "e": b - x, "b": b, "direct": d - x}
    found = triton_errors.error_sums(w, codes, scales, g, rule).tolist()
    for name, value in zip(triton_errors.SUMS, found, strict=True):
        p, q = (sides[side] for side in name.split("_"))
        size = float(((p * p).sum() * (q * q).sum()).sqrt())
        assert abs(value - float((p * q).sum())) <= 2e-6 * size, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@interpreted
def test_error_details_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    from workbench.kernels import cpu_errors, triton_error_details

    w = (normal(37, 96) * normal(37, 1, seed=1).exp()).to(dtype)
    w[5], w[6, :40] = 0, 3e-4
    codes, scales, g = reference.nvfp4_quantize(w)
    g = g * torch.rand(37, 1, generator=torch.Generator().manual_seed(0)).add(0.5)  # some blocks saturate
    g[7:9] *= -1
    scales.view(torch.uint8)[3, ::2] |= 128  # the sign of a step limits nothing
    a = reference.nvfp4_dequantize(codes, scales, g)
    packed, scale_bytes = reference.mxfp4_quantize(a)
    b = reference.mxfp4_dequantize(packed, scale_bytes)
    found = dict(
        zip(
            triton_error_details.DETAILS,
            triton_error_details.error_details(w, codes, scales, g).tolist(),
            strict=True,
        )
    )
    steps = {"e1": (scales.float() * g).flatten(), "e2": cpu_errors.scale_values(scale_bytes).flatten()}
    for error, x, x_hat, block in (("e1", w, a, 16), ("e2", a, b, 32)):
        parts = cpu_errors.attribute(x.float(), x_hat, steps[error], block=block)
        expected = dict(zip(cpu_errors.PARTS, parts, strict=True))
        for name in triton_error_details.PARTS:
            assert abs(found[f"{error} {name}"] - expected[name]) <= 2e-6 * max(expected["total"], expected[name]), name
        assert expected["underflow"] > 0
    e2 = (b - a).double()
    assert abs(found["e2_e2_e2_e2"] - float((e2**4).sum())) <= 2e-6 * float((e2**4).sum())
    assert abs(found["e2_e2_e2"] - float((e2**3).sum())) <= 2e-6 * float((e2**3).abs().sum())
    for name, values in (("w", w.double()), ("e1", (a - w.float()).double()), ("e2", e2)):
        assert abs(found[name] - float(values.sum())) <= 2e-6 * float(values.abs().sum())


# ---- products --------------------------------------------------------------------------------------------------------


def packed_weight(weight_format: str, g: Tensor, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the decoded float32 values of a random weight."""
    w = normal(*shape)
    if weight_format == "nvfp4":
        codes, scales, _ = reference.nvfp4_quantize(w, g)
        return codes, scales, reference.nvfp4_dequantize(codes, scales, g)
    codes, scales = reference.mxfp4_quantize(w)
    return codes, scales, reference.mxfp4_dequantize(codes, scales)


def rounded(x: Tensor, activation: str, g: Tensor | None) -> Tensor:
    if activation == "mxfp4":
        return reference.mxfp4_qdq_activation(x)
    return reference.nvfp4_qdq_activation(x, g) if activation == "nvfp4" else x


def close(found: Tensor, x: Tensor, w: Tensor) -> bool:
    """found is x @ w.T in float32, added in any order."""
    bound = 1e-6 * (x.abs().double() @ w.abs().double().T)
    return bool(((found.double() - x.double() @ w.double().T).abs() <= bound).all())


@pytest.mark.parametrize("tokens", [0, 17, 70])
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
@interpreted
def test_packed_linear(weight_format: str, tokens: int) -> None:
    from workbench.kernels import triton_gemm

    g = torch.tensor([0.002, 0.003])
    rows = g.repeat_interleave(torch.tensor([32, 48])).unsqueeze(-1)
    codes, scales, w = packed_weight(weight_format, rows, 80, 352)
    x = normal(tokens, 352, seed=1)
    for activation, static in (("none", None), ("nvfp4", None), ("nvfp4", torch.tensor([0.001])), ("mxfp4", None)):
        globals_ = g if weight_format == "nvfp4" else None
        y = triton_gemm.packed_linear(x, codes, scales, globals_, static, None, [32, 48], weight_format, activation)
        assert y.shape == (tokens, 80)
        assert close(y, rounded(x, activation, static), w), activation


@interpreted
def test_packed_linear_in_bfloat16_split_biased_and_with_an_input_scale_a_matrix() -> None:
    from workbench.kernels import triton_gemm

    triton_gemm._PROGRAMS_PER_MULTIPROCESSOR = 8  # so that K is split here as on a card
    codes, scales, w = packed_weight("nvfp4", torch.tensor(0.002), 64, 1024)
    x, bias = normal(5, 1024, seed=1).bfloat16(), normal(64, seed=2).bfloat16()
    static = torch.tensor([0.001, torch.nan])
    y = triton_gemm.packed_linear(x, codes, scales, torch.tensor([0.002]), static, bias, [32, 32], "nvfp4", "nvfp4")
    halves = [rounded(x, "nvfp4", g).float() for g in (static[0], None)]
    expected = torch.cat([h @ part.bfloat16().float().T for h, part in zip(halves, w.split(32), strict=True)], 1)
    assert torch.allclose(y.float(), expected + bias.float(), rtol=2.0**-7, atol=0.02)


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
@interpreted
def test_packed_experts(weight_format: str) -> None:
    """Shards and experts with their own globals, experts without tokens, another rank's, and both kinds of scales."""
    from workbench.kernels import triton_moe

    experts, hidden, inner, tokens, k = 5, 64, 32, 6, 2
    generator = torch.Generator().manual_seed(0)
    g13, g2 = (0.001 + 0.003 * torch.rand(shape, generator=generator) for shape in ((experts, 2), (experts,)))
    w13 = packed_weight(weight_format, g13.repeat_interleave(inner, 1).unsqueeze(-1), experts, 2 * inner, hidden)
    w2 = packed_weight(weight_format, g2[:, None, None], experts, hidden, inner)
    ids = torch.randint(-1, experts, (tokens, k), generator=generator)
    weights, x = torch.rand(tokens, k, generator=generator), normal(tokens, hidden, seed=3)
    in13 = 0.001 + 0.002 * torch.rand(experts, 2, generator=generator)
    in2 = 0.01 + 0.01 * torch.rand(experts, generator=generator)
    globals_ = (g13, g2) if weight_format == "nvfp4" else (None, None)
    for activation, s13, s2 in (("none", None, None), (weight_format, None, None), ("nvfp4", in13, in2)):
        y = triton_moe.packed_moe(
            x, *w13[:2], globals_[0], *w2[:2], globals_[1], weights, ids, s13, s2, weight_format, activation, False
        )
        expected = torch.zeros(tokens, hidden)
        for t in range(tokens):
            for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
                if e >= 0:
                    gate, up = (
                        rounded(x[t : t + 1], activation, None if s13 is None else s13[e, i])
                        @ w13[2][e, i * inner : (i + 1) * inner].T
                        for i in (0, 1)
                    )
                    h = torch.nn.functional.silu(gate) * up
                    expected[t] += weight * (rounded(h, activation, None if s2 is None else s2[e]) @ w2[2][e].T)[0]
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()), activation


@interpreted
def test_assignments_are_grouped_by_expert_in_order() -> None:
    """Experts without tokens, one with more than a group holds, and another rank's assignments, which are in none."""
    from workbench.kernels import triton_moe

    ids = torch.tensor([4, 1, -1, 4, 4, 0, 4, -1, 1, 4], dtype=torch.int32)
    order, expert, first, stop = (t.tolist() for t in triton_moe.group_by_expert(ids, 6, 2))
    assert len(expert) == 10
    groups = [(e, order[a : min(a + 2, b)]) for e, a, b in zip(expert, first, stop, strict=True) if e >= 0]
    assert groups == [(0, [5]), (1, [1, 8]), (4, [0, 3]), (4, [4, 6]), (4, [9])]


@interpreted
def test_native_product_of_mxfp4() -> None:
    from workbench.kernels import triton_scaled_dot

    triton_scaled_dot.TOKENS, triton_scaled_dot.ROWS, triton_scaled_dot.COLUMNS = 16, 16, 64
    x, w = (reference.mxfp4_quantize(normal(n, 96, seed=n)) for n in (17, 20))
    y = triton_scaled_dot.native_linear(*x, *w, "mxfp4", dtype=torch.float32)
    assert close(y, reference.mxfp4_dequantize(*x), reference.mxfp4_dequantize(*w))
    assert not triton_scaled_dot.supports(torch.device("cpu"), "mxfp4")


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@interpreted
def test_ops_have_fakes_that_agree() -> None:
    from workbench.kernels import triton_activation, triton_dequantize, triton_quantize, triton_requant

    x = normal(4, 64)
    codes, scales, g = triton_quantize.nvfp4_quantize(x)
    ops = torch.ops.workbench_kernels
    for op, arguments in (
        (ops.largest, (x,)),
        (ops.nvfp4_encode, (x, g, "amax")),
        (ops.mxfp4_encode, (x, "even")),
        (ops.fp4_decode, (codes, scales.view(torch.uint8), g, torch.bfloat16)),
        (ops.nvfp4_qdq, (x, None, True)),
        (ops.mxfp4_qdq, (x, "even")),
        (ops.nvfp4_to_mxfp4, (codes, scales.view(torch.uint8), g, "even")),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))

    @torch.compile(backend="eager", fullgraph=True)
    def chain(w: Tensor) -> Tensor:
        parts = triton_requant.nvfp4_to_mxfp4(*triton_quantize.nvfp4_quantize(w))
        return triton_activation.nvfp4_qdq_activation(triton_dequantize.mxfp4_dequantize(*parts))

    a = reference.nvfp4_dequantize(*reference.nvfp4_quantize(x))
    b = reference.mxfp4_dequantize(*reference.mxfp4_quantize(a))
    assert same(chain(x), reference.nvfp4_qdq_activation(b))
