"""The packed GEMMs on plain tensors, against the definition written out token by token; no vLLM."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from workbench.kernels import reference

from workbench.serving.vllm_plugin import ops, plain

TOKENS, HIDDEN, INTER, EXPERTS, TOP = 9, 64, 32, 5, 2


@pytest.fixture
def moe():
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2, INTER, HIDDEN, generator=g)
    w13[:, 1] *= 3  # gate and up must not share a global scale
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=g)
    parts13 = [[reference.nvfp4_quantize(w13[e, s]) for s in (0, 1)] for e in range(EXPERTS)]
    parts2 = [reference.nvfp4_quantize(w2[e]) for e in range(EXPERTS)]
    return {
        "x": torch.randn(TOKENS, HIDDEN, generator=g),
        "w13": torch.stack([torch.cat([p[0] for p in pair]) for pair in parts13]),
        "w13_scale": torch.stack([torch.cat([p[1] for p in pair]) for pair in parts13]),
        "w13_global": torch.tensor([[float(p[2]) for p in pair] for pair in parts13]),
        "w2": torch.stack([p[0] for p in parts2]),
        "w2_scale": torch.stack([p[1] for p in parts2]),
        "w2_global": torch.tensor([float(p[2]) for p in parts2]),
        "topk_weights": torch.rand(TOKENS, TOP, generator=g),
        "topk_ids": torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP] for _ in range(TOKENS)]),
        "w13_input_scale": None,
        "w2_input_scale": None,
        "weight_format": "nvfp4",
        "activation_format": "nvfp4",
        "weight_on_input": False,
    }


def expected_moe(a: dict) -> torch.Tensor:
    out = torch.zeros(TOKENS, HIDDEN)
    for t in range(TOKENS):
        for k in range(TOP):
            e = int(a["topk_ids"][t, k])
            if e < 0:
                continue
            x, weight = a["x"][t : t + 1], a["topk_weights"][t, k]
            if a["weight_on_input"]:
                x, weight = x * weight, 1.0
            halves = []
            for s in (0, 1):
                rows = slice(s * INTER, (s + 1) * INTER)
                w = reference.nvfp4_dequantize(a["w13"][e, rows], a["w13_scale"][e, rows], a["w13_global"][e, s])
                halves.append(_round(x, a["w13_input_scale"], e, s, a["activation_format"]) @ w.T)
            hidden = F.silu(halves[0]) * halves[1]
            w2 = reference.nvfp4_dequantize(a["w2"][e], a["w2_scale"][e], a["w2_global"][e])
            out[t] += (_round(hidden, a["w2_input_scale"], e, None, a["activation_format"]) @ w2.T)[0] * weight
    return out


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the order of float32 sums."""
    return bool((got - expected).abs().max() <= 1e-5 * expected.abs().max())


def _round(x, scales, e, s, format):
    if format == "none":
        return x
    scale = None if scales is None else (scales[e] if s is None else scales[e, s])
    return reference.nvfp4_qdq_activation(x, None if scale is None or bool(scale.isnan()) else scale)


@pytest.mark.parametrize(
    "kind", ["dynamic", "static", "partly static", "none", "other rank", "on input", "small groups"]
)
def test_experts_equal_the_definition(moe, kind, monkeypatch):
    if kind in ("static", "partly static"):
        g = torch.Generator().manual_seed(1)
        moe["w13_input_scale"] = torch.rand(EXPERTS, 2, generator=g) * 1e-3 + 1e-3
        moe["w2_input_scale"] = torch.rand(EXPERTS, generator=g) * 1e-1 + 1e-2
    if kind == "partly static":
        moe["w13_input_scale"][2] = torch.nan
        moe["w2_input_scale"][0] = torch.nan
    if kind == "none":
        moe["activation_format"] = "none"
    if kind == "other rank":
        moe["topk_ids"][moe["topk_ids"] == 1] = -1
    if kind == "on input":
        moe["weight_on_input"] = True
    if kind == "small groups":
        monkeypatch.setattr(plain, "DECODE_GROUP_WEIGHTS", 1)
    got = ops.packed_moe(**moe)
    assert close(got, expected_moe(moe))


def test_a_token_does_not_depend_on_its_batch(moe):
    whole = ops.packed_moe(**moe)
    alone = {k: v[3:4] if k in ("x", "topk_weights", "topk_ids") else v for k, v in moe.items()}
    assert close(ops.packed_moe(**alone), whole[3:4])


def test_no_token_for_this_rank_gives_zeros(moe):
    moe["topk_ids"].fill_(-1)
    assert torch.equal(ops.packed_moe(**moe), torch.zeros(TOKENS, HIDDEN))


def test_fused_linear_keeps_each_matrix_its_own_scales():
    g = torch.Generator().manual_seed(2)
    widths, x = [32, 16, 16], torch.randn(3, 4, 64, generator=g)
    weights = [torch.randn(n, 64, generator=g) * 10.0**i for i, n in enumerate(widths)]
    parts = [reference.nvfp4_quantize(w) for w in weights]
    codes, scales = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    globals_ = torch.stack([p[2] for p in parts])
    bias = torch.randn(64, generator=g)
    for input_scales in (None, torch.full((3,), 0.002), torch.tensor([0.001, 0.002, torch.nan])):
        got = ops.packed_linear(x, codes, scales, globals_, input_scales, bias, widths, "nvfp4", "nvfp4")
        expected = []
        for i, part in enumerate(parts):
            scale = None if input_scales is None or bool(input_scales[i].isnan()) else input_scales[i]
            rounded = reference.nvfp4_qdq_activation(x.reshape(-1, 64), scale)
            expected.append((rounded @ reference.nvfp4_dequantize(*part).T).view(3, 4, -1))
        assert close(got, torch.cat(expected, -1) + bias)


def test_mxfp4_linear_equals_the_definition():
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(5, 64, generator=g), torch.randn(8, 64, generator=g)
    codes, scales = reference.mxfp4_quantize(w)
    got = torch.ops.workbench.packed_linear(x, codes, scales, None, None, None, [8], "mxfp4", "mxfp4")
    expected = reference.mxfp4_qdq_activation(x) @ reference.mxfp4_dequantize(codes, scales).T
    assert close(got, expected)


def test_the_ops_are_opaque_to_torch_compile():
    w = torch.randn(8, 64)
    codes, scales = reference.mxfp4_quantize(w)
    x = torch.randn(5, 64)

    def layer(x):
        return torch.ops.workbench.packed_linear(x, codes, scales, None, None, None, [8], "mxfp4", "mxfp4") + 1

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))
