"""`compat`: what a packed layer does with scales that vLLM has one slot for, and how scales lie after loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workbench.kernels import reference

from workbench.errors import ConfigError
from workbench.serving.vllm_plugin import ops
from workbench.serving.vllm_plugin.settings import ModulePlan, PluginSettings

pytestmark = pytest.mark.vllm
PLAN = ModulePlan("m", "nvfp4", "nvfp4", "nvfp4", True)
HIDDEN, INTER, EXPERTS = 64, 32, 3


def fixed(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)


def linear(globals_: list[float], inputs: list[float], *, as_vllm: bool) -> tuple[Any, nn.Module]:
    """A loaded layer of two fused matrices of 16 rows."""
    from workbench.serving.vllm_plugin.linear import PackedLinearMethod

    method = PackedLinearMethod("m", PLAN, static=[True, True], as_vllm=as_vllm)
    method.widths = [16, 16]
    layer = nn.Module()
    w = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = reference.nvfp4_quantize(w, torch.tensor(0.002))
    layer.weight, layer.weight_scale = fixed(codes), fixed(scales)
    layer.weight_scale_2, layer.input_scale = fixed(torch.tensor(globals_)), fixed(torch.tensor(inputs))
    method.process_weights_after_loading(layer)
    return method, layer


def experts(globals_: Tensor, inputs: Tensor, *, as_vllm: bool) -> tuple[Any, nn.Module]:
    from workbench.serving.vllm_plugin.moe import PackedMoEMethod

    method = PackedMoEMethod(SimpleNamespace(), "m", PLAN, static=[True], as_vllm=as_vllm)
    layer = nn.Module()
    layer.expert_map, layer.apply_router_weight_on_input = None, False
    g = torch.Generator().manual_seed(1)
    for stem, shape in (("w13", (EXPERTS, 2 * INTER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INTER))):
        codes, scales, _ = reference.nvfp4_quantize(torch.randn(shape, generator=g), torch.tensor(0.002))
        layer.register_parameter(f"{stem}_weight", fixed(codes))
        layer.register_parameter(f"{stem}_weight_scale", fixed(scales))
    layer.w13_weight_scale_2, layer.w2_weight_scale_2 = fixed(globals_.clone()), fixed(torch.full((EXPERTS,), 0.002))
    layer.w13_input_scale, layer.w2_input_scale = fixed(inputs), fixed(inputs[:, 0] * 10)
    method.process_weights_after_loading(layer)
    return method, layer


def run_linear(*arguments: Any, as_vllm: bool) -> Tensor:
    method, layer = linear(*arguments, as_vllm=as_vllm)
    return method.apply(layer, torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)))


def run_experts(*arguments: Any, as_vllm: bool) -> Tensor:
    method, layer = experts(*arguments, as_vllm=as_vllm)
    g = torch.Generator().manual_seed(3)
    x, weights = torch.randn(4, HIDDEN, generator=g), torch.rand(4, 2, generator=g)
    return method.apply(layer, x, weights, torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]]))


def test_linear_differs_from_vllm_where_scales_differ_and_only_there() -> None:
    agree = ([0.002, 0.002], [0.003, 0.003])
    assert torch.equal(run_linear(*agree, as_vllm=True), run_linear(*agree, as_vllm=False))
    for apart in (([0.002, 0.001], [0.003, 0.003]), ([0.002, 0.002], [0.003, 0.001])):
        ours, theirs = run_linear(*apart, as_vllm=False), run_linear(*apart, as_vllm=True)
        assert torch.equal(ours[:, :16], theirs[:, :16])  # the matrix with the largest scales
        assert not torch.equal(ours[:, 16:], theirs[:, 16:])
    doubled = run_linear([0.002, 0.001], [0.003, 0.003], as_vllm=False)[:, 16:]
    assert torch.equal(run_linear([0.002, 0.001], [0.003, 0.003], as_vllm=True)[:, 16:], 2 * doubled)


@pytest.mark.parametrize("globals_", [[0.002, 0.0011], [0.002, 0.002]])
def test_linear_as_vllm_computes_the_bits_of_its_emulation(globals_: list[float]) -> None:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import run_nvfp4_emulations

    inputs = torch.tensor([0.003, 0.0017])
    method, layer = linear(globals_, inputs.tolist(), as_vllm=True)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))
    theirs = run_nvfp4_emulations(  # as its linear method prepares the scales: see `compat`
        x=x,
        input_global_scale=1.0 / inputs.max(),
        weight=layer.weight,
        weight_scale_swizzled=layer.weight_scale,
        weight_global_scale=torch.tensor(globals_).max(),
        swizzle=False,
    )
    assert torch.equal(method.apply(layer, x), theirs)


def test_experts_differ_from_vllm_where_scales_differ_and_only_there() -> None:
    agree = (torch.full((EXPERTS, 2), 0.002), torch.full((EXPERTS, 2), 0.003))
    assert torch.equal(run_experts(*agree, as_vllm=True), run_experts(*agree, as_vllm=False))
    up_apart = torch.tensor([[0.002, 0.001]]).repeat(EXPERTS, 1)
    assert not torch.equal(
        run_experts(up_apart, agree[1], as_vllm=True), run_experts(up_apart, agree[1], as_vllm=False)
    )
    # the gate's global for both: what stored equal globals compute
    assert torch.equal(run_experts(up_apart, agree[1], as_vllm=True), run_experts(*agree, as_vllm=False))
    inputs = torch.tensor([[0.003, 0.003], [0.001, 0.001], [0.002, 0.002]])
    assert not torch.equal(run_experts(agree[0], inputs, as_vllm=True), run_experts(agree[0], inputs, as_vllm=False))
    # the largest for all experts
    assert torch.equal(run_experts(agree[0], inputs, as_vllm=True), run_experts(*agree, as_vllm=False))


def test_scales_are_joined_at_load() -> None:
    nan = torch.nan
    assert ops.joined_input_scale(torch.tensor([nan, nan])) is None
    assert ops.joined_input_scale(torch.tensor([0.5, 0.5])).tolist() == [0.5]
    assert ops.joined_input_scale(torch.tensor([[0.5, 0.5], [0.25, 0.25]])).tolist() == [0.5, 0.25]
    for apart in ([0.5, 0.25], [0.5, nan], [[0.5, 0.25], [0.5, 0.5]], [[0.5, nan], [0.5, 0.5]]):
        scale = torch.tensor(apart)
        assert ops.joined_input_scale(scale) is scale
    _, layer = experts(
        torch.full((EXPERTS, 2), 0.002), torch.tensor([[0.1, 0.1], [nan, nan], [0.2, 0.2]]), as_vllm=False
    )
    assert layer.w13_input_scale.shape == (EXPERTS,)
    _, layer = linear([0.002, 0.001], [nan, nan], as_vllm=False)
    assert layer.input_scale is None
    assert layer.weight_scale_2.tolist() == pytest.approx([0.002, 0.001])


def test_a_missing_global_scale_is_an_error() -> None:
    from workbench.errors import CheckpointError

    with pytest.raises(CheckpointError, match="no \\(or a NaN\\) global scale for 1 of 2 matrices"):
        linear([0.002, torch.nan], [0.003, 0.003], as_vllm=False)


def test_compat_is_for_emulation_alone() -> None:
    with pytest.raises(ConfigError, match="compat=vllm") as caught:
        PluginSettings(checkpoint="c", backend="requant", format="mxfp4", compat="vllm")
    assert "backend=emulation" in caught.value.fix
    with pytest.raises(ConfigError, match="compat is 'sglang'"):
        PluginSettings(checkpoint="c", backend="emulation", compat="sglang")
