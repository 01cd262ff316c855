"""Which calls the plugin measures while a model loads: each distinct packed layer, each bucket of tokens, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")
pytest.importorskip("triton", minversion="3.9")
from workbench.kernels import triton_gemm, triton_moe
from workbench.kernels.triton_routes import BUCKETS

from workbench.serving.vllm_plugin import tuning
from workbench.serving.vllm_plugin.linear import PackedLinearMethod
from workbench.serving.vllm_plugin.moe import PackedMoEMethod
from workbench.serving.vllm_plugin.settings import ModulePlan

PLAN = ModulePlan("m", "nvfp4", "nvfp4", "nvfp4", True)


def fixed(*shape: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def linear(n: int, k: int, ranks: str = "", scale: bool = True) -> nn.Module:
    layer = nn.Module()
    layer.quant_method = PackedLinearMethod("m", PLAN, static=[True])
    layer.quant_method.widths, layer.quant_method.ranks = [n], ranks
    layer.weight, layer.weight_scale = fixed(n, k // 2), fixed(n, k // 16)
    layer.weight_scale_2 = fixed(1, dtype=torch.float32)
    if scale:
        layer.input_scale = fixed(1, dtype=torch.float32)
    return layer


def experts() -> nn.Module:
    layer = nn.Module()
    method = PackedMoEMethod.__new__(PackedMoEMethod)
    method.plan, method.ranks = PLAN, "tp"
    layer.quant_method, layer.expert_map, layer.apply_router_weight_on_input = (
        method,
        torch.tensor([0, 1, -1, -1]),
        False,
    )
    layer.moe_config = SimpleNamespace(num_experts=4, experts_per_token=2)
    layer.w13_weight, layer.w13_weight_scale = fixed(2, 64, 32), fixed(2, 64, 4)
    layer.w2_weight, layer.w2_weight_scale = fixed(2, 64, 16), fixed(2, 64, 2)
    return layer


def test_each_distinct_layer_is_called_once_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    linears: list[tuple[Any, ...]] = []
    moes: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_gemm, "packed_linear", lambda *a: linears.append(a))
    monkeypatch.setattr(triton_moe, "packed_moe", lambda *a, **named: moes.append((*a, named)))
    model = nn.ModuleList(
        [linear(64, 32), linear(64, 32), linear(32, 64), linear(64, 32, scale=False), experts(), nn.Linear(4, 4)]
    )
    for call in tuning.distinct_calls(model, torch.bfloat16):
        call()
    assert [tuple(a[0].shape) for a in linears] == [(m, k) for k in (32, 64, 32) for m in BUCKETS]
    assert {a[0].dtype for a in linears} == {torch.bfloat16}
    assert {a[1].shape for a in linears} == {(64, 16), (32, 32)}
    assert {(tuple(a[6]), *a[7:]) for a in linears} == {((64,), "nvfp4", "nvfp4"), ((32,), "nvfp4", "nvfp4")}
    assert [a[4] is None for a in linears] == [False] * 2 * len(BUCKETS) + [True] * len(BUCKETS)
    assert [tuple(a[0].shape) for a in moes] == [(m, 64) for m in BUCKETS]
    ids: Tensor = moes[-1][8]
    assert (ids.shape, set(ids.unique().tolist())) == ((BUCKETS[-1], 2), {-1, 0, 1})
    hidden = torch.ones(2, 2)
    assert moes[0][-1]["round_hidden"](hidden, None) is hidden


def test_ranks_that_split_k_tune_the_product_of_rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounding they agree on needs all of them, and only the first measures."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_gemm, "packed_linear", lambda *a: calls.append(a))
    for call in tuning.distinct_calls(nn.ModuleList([linear(64, 32, ranks="tp")]), torch.bfloat16):
        call()
    assert [(a[4], a[8]) for a in calls] == [(None, "none")] * len(BUCKETS)


def test_a_model_on_a_cpu_is_not_tuned() -> None:
    tuning.tune_layers(nn.ModuleList([linear(64, 32)]), torch.bfloat16)  # asks no group of ranks, measures nothing
