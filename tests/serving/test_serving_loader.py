"""How the loader converts one tensor, and what it says that cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workbench.kernels.tables import ScaleRule
from workbench.mini_models import model_path

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


# ---- many at once ----------------------------------------------------------------------------------------------------


def entry(layer: int, expert: int) -> Any:
    return SimpleNamespace(layer=layer, expert=expert, name=f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight")


def test_a_batch_is_of_one_layer_and_in_order() -> None:
    from workbench.serving.vllm_plugin.together import batches

    entries = [entry(0, -1), *(entry(0, e) for e in range(5)), *(entry(1, e) for e in range(2)), entry(1, -1)]
    found = list(batches(entries, lambda e: e.expert >= 0, 3))
    assert [[(e.layer, e.expert) for e in batch] for batch in found] == [
        [(0, -1)], [(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)], [(1, 0), (1, 1)], [(1, -1)],
    ]  # fmt: skip
    assert [len(batch) for batch in batches(entries, lambda e: e.expert >= 0, 1)] == [1] * 9


def quantized(seed: int, rows: int = 8, *, scale: float = 1.0) -> QuantizedTensor:
    return quantize(scale * torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)), "nvfp4")


@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
def test_what_is_converted_together_has_the_bytes_of_one_by_one(rule: str) -> None:
    from workbench.serving.vllm_plugin.together import requantize_together

    tall = {f"{NAME}.{i}": quantized(i, 16, scale=0.01 * i) for i in range(3, 5)}
    stored: dict[str, Any] = {f"{NAME}.{i}": quantized(i, scale=10.0**i) for i in range(3)} | tall
    stored["alone"], stored["plain"] = quantized(9, 24), torch.zeros(8, 64)
    stored["double"] = nvfp4(global_dtype=torch.float64)
    meter = LoadMeter(torch.device("cpu"))
    found = requantize_together(stored, ScaleRule(rule), meter, name=NAME)
    assert set(found) == {f"{NAME}.{i}" for i in range(5)}
    for name, packed in found.items():
        one, _ = convert(stored[name], rule=rule)
        assert packed.shape == one.shape
        assert torch.equal(packed.codes, one.codes)
        assert torch.equal(packed.block_scales, one.block_scales)
    assert meter.record()["converted"]["model.layers.7"]["conversions"] == 5


def test_a_group_with_a_scale_that_is_not_finite_is_left_to_be_named() -> None:
    from workbench.serving.vllm_plugin.together import requantize_together

    stored: dict[str, Any] = {
        "a": quantized(0),
        "b": nvfp4(scale=float("nan")),
        "c": quantized(1, 16),
        "d": quantized(2, 16),
    }
    assert set(requantize_together(stored, ScaleRule.EVEN, LoadMeter(torch.device("cpu")), name=NAME)) == {"c", "d"}


def test_the_loader_hands_on_the_same_tensors_in_the_same_order_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, in batches, against one by one."""
    from vllm.config.load import LoadConfig

    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.convert import quantize_checkpoint
    from workbench.serving.vllm_plugin import loader as module
    from workbench.serving.vllm_plugin import together

    folder = tmp_path / "nvfp4"
    quantize_checkpoint(model_path(), folder, format="nvfp4", dialect="modelopt", exclude=["*self_attn*", "lm_head"])
    with open_checkpoint(folder) as checkpoint:
        taken = {e.module for e in checkpoint.entries() if e.quantized}
    settings = PluginSettings(checkpoint=str(folder), backend="requant", format="mxfp4")
    model: Any = torch.nn.Linear(1, 1)
    model_config: Any = SimpleNamespace(dtype=torch.bfloat16)

    def handed_on() -> list[tuple[str, torch.Tensor]]:
        loader = module.WorkbenchModelLoader(
            LoadConfig(load_format="workbench", model_loader_extra_config=settings.to_dict())
        )
        loader._config = SimpleNamespace(taken=taken)
        return list(loader.get_all_weights(model_config, model))

    expected = handed_on()
    sizes: list[int] = []

    def many(entries: Any, joins: Any, at_most: int) -> Any:
        for batch in together.batches(entries, joins, together.AT_MOST):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(module, "batches", many)
    found = handed_on()
    assert max(sizes) == 3 * 16
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), name
