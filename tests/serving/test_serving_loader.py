"""How the loader converts one tensor, and what it says that cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.errors import FormatError
from workbench.formats import QuantizedTensor, quantize
from workbench.serving.vllm_plugin.meter import LoadMeter, layer_of
from workbench.serving.vllm_plugin.settings import ModulePlan, PluginSettings

pytestmark = pytest.mark.vllm
NAME = "model.layers.7.mlp.up_proj.weight"


def nvfp4(*, scale: float | None = None, global_dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    q = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), "nvfp4")
    scales = q.block_scales.clone()
    if scale is not None:
        scales[3, 1] = scale
    return QuantizedTensor(
        format="nvfp4",
        codes=q.codes,
        block_scales=scales,
        global_scale=q.global_scale.to(global_dtype),
        shape=(8, 64),
    )


def convert(stored: Any, *, rule: str = "", weight: str = "mxfp4") -> tuple[QuantizedTensor, dict[str, Any]]:
    from workbench.serving.vllm_plugin.loader import convert_tensor

    settings = PluginSettings(checkpoint="c", backend="requant", format=weight, rule=rule)
    plan = ModulePlan(NAME.removesuffix(".weight"), "nvfp4", weight, weight, False)
    meter = LoadMeter(torch.device("cpu"))
    packed = convert_tensor(NAME, stored, plan, settings, meter)
    return packed, meter.record()


@pytest.mark.parametrize("rule", ["", "floor", "mse"])
@pytest.mark.parametrize("global_dtype", [torch.float32, torch.float64])
def test_requantization_equals_quantizing_the_decoded_values(rule: str, global_dtype: torch.dtype) -> None:
    stored = nvfp4(global_dtype=global_dtype)
    packed, cost = convert(stored, rule=rule)
    expected = quantize(stored.dequantize(), "mxfp4", rule or None)
    assert torch.equal(packed.codes, expected.codes)
    assert torch.equal(packed.block_scales, expected.block_scales)
    layer = cost["converted"]["model.layers.7"]
    assert layer["conversions"] == 1
    assert layer["peak_bytes"] == 8 * 64 * 4 + stored.nbytes + packed.nbytes
    assert layer["seconds"] == pytest.approx(cost["convert_s"], abs=1e-3)


def test_a_scale_that_is_not_finite_is_named_and_not_requantized() -> None:
    with pytest.raises(FormatError, match=NAME):
        convert(nvfp4(scale=float("nan")))


def test_a_source_in_bfloat16_is_quantized_in_float32() -> None:
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, _ = convert(w)
    assert torch.equal(packed.codes, quantize(w.float(), "mxfp4").codes)


def test_what_is_stored_as_planned_is_handed_on_untouched() -> None:
    stored = nvfp4()
    packed, cost = convert(stored, weight="nvfp4")
    assert packed is stored
    assert cost["converted"] == {}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (NAME, "model.layers.7"),
        ("language_model.model.layers.12.self_attn.o_proj.weight", "language_model.model.layers.12"),
        ("lm_head.weight", "other"),
    ],
)
def test_a_tensor_counts_for_its_layer(name: str, layer: str) -> None:
    assert layer_of(name) == layer
