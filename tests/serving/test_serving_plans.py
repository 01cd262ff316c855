"""Which modules run quantized under each backend, from a checkpoint's entries alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.errors import ConfigError
from workbench.serving.vllm_plugin.settings import PluginSettings, plan_modules

EXPERT, QUERY = "model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.self_attn.q_proj"


def checkpoint(**formats: str) -> Any:
    """A checkpoint whose `expert` and `query` modules are in the given formats."""
    named = {EXPERT: formats["expert"], QUERY: formats["query"]}
    entries = [
        SimpleNamespace(
            module=module,
            name=f"{module}.weight",
            format=format,
            quantized=format != "bf16",
            projection=module.rpartition(".")[2],
            has_input_scale=True,
        )
        for module, format in named.items()
    ]
    return SimpleNamespace(entries=lambda: entries)


def plans(checkpoint: Any, backend: str, format: str = "") -> dict[str, tuple[str, str]]:
    found = plan_modules(checkpoint, PluginSettings(checkpoint="c", backend=backend, format=format))
    return {module: (plan.stored, plan.weight) for module, plan in found.items()}


def test_emulation_packs_what_it_can_and_leaves_the_rest_to_be_decoded() -> None:
    mixed = checkpoint(expert="nvfp4", query="fp8_block")
    assert plans(mixed, "emulation") == {EXPERT: ("nvfp4", "nvfp4")}


def test_requant_of_mixed_precision_converts_the_four_bit_modules_only() -> None:
    mixed = checkpoint(expert="nvfp4", query="fp8_tensor")
    assert plans(mixed, "requant", "mxfp4") == {EXPERT: ("nvfp4", "mxfp4")}


def test_requant_of_one_precision_converts_all_of_it() -> None:
    fp8 = checkpoint(expert="fp8_block", query="fp8_block")
    assert plans(fp8, "requant", "mxfp4") == {EXPERT: ("fp8_block", "mxfp4"), QUERY: ("fp8_block", "mxfp4")}
    int4 = checkpoint(expert="int4_group", query="bf16")
    assert plans(int4, "requant", "mxfp4") == {EXPERT: ("int4_group", "mxfp4")}


def test_emulation_of_a_format_that_it_does_not_pack_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="quantized as fp8_block, int4_group") as caught:
        plans(checkpoint(expert="int4_group", query="fp8_block"), "emulation")
    assert "backend=reference" in caught.value.fix


def test_requant_to_a_format_that_it_does_not_pack_is_refused() -> None:
    with pytest.raises(ConfigError, match="format is 'fp8_block'"):
        plans(checkpoint(expert="nvfp4", query="bf16"), "requant", "fp8_block")


def test_a_static_scale_is_used_only_where_it_means_the_same() -> None:
    settings = PluginSettings(checkpoint="c", backend="requant", format="mxfp4")
    plan = plan_modules(checkpoint(expert="nvfp4", query="bf16"), settings)[EXPERT]
    assert (plan.activation, plan.static) == ("mxfp4", False)
    settings = PluginSettings(checkpoint="c", backend="emulation")
    plan = plan_modules(checkpoint(expert="nvfp4", query="bf16"), settings)[EXPERT]
    assert (plan.activation, plan.static) == ("nvfp4", True)
