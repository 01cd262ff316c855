"""What the Quark dialect writes: read back, refused, and as Quark's own exports and vLLM's reader have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quark_files import (
    MODULE,
    QUARK,
    assert_equal,
    declare,
    make_weight,
    read_all,
    write_with_dialect,
)
from safetensors.torch import load_file

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor


@pytest.mark.parametrize("format", QUARK.writes)
def test_what_is_written_reads_back_and_writes_the_same_bytes(format, tmp_path):
    static = format in ("nvfp4", "fp8_tensor")
    written = {MODULE: make_weight(format)}
    first = write_with_dialect(tmp_path / "first", written, static_activations=static)
    read = read_all(first)
    assert_equal(read[MODULE], written[MODULE])
    second = write_with_dialect(tmp_path / "second", read, static_activations=static)
    for file in ("model.safetensors", "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_mxfp8_in_blocks_of_rows_is_written_as_such(tmp_path):
    scales = torch.randint(100, 140, (4, 2)).to(torch.uint8)
    codes = torch.randint(0, 0x7E, (16, 64)).to(torch.uint8).view(torch.float8_e4m3fn)
    q = QuantizedTensor(
        format="mxfp8_e4m3", codes=codes, block_scales=scales, global_scale=None, shape=(16, 64), block=(4, 32)
    )
    path = write_with_dialect(tmp_path / "q", {MODULE: q})
    assert load_file(path / "model.safetensors")[MODULE + ".weight_scale"].dtype == torch.float8_e8m0fnu
    assert_equal(read_all(path)[MODULE], q)


def test_int4_scales_that_bfloat16_cannot_hold_stay_float32(tmp_path):
    q = make_weight("int4_group")
    stored = QUARK.disassemble("a.weight", q)
    assert stored["a.weight_scale"].dtype == torch.float32
    exact = QUARK.disassemble("a.weight", make_weight_with(q, block_scales=torch.full((16, 2), 0.5)))
    assert exact["a.weight_scale"].dtype == torch.bfloat16


def make_weight_with(q: QuantizedTensor, **changes: Any) -> QuantizedTensor:
    import dataclasses

    return dataclasses.replace(q, **changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"zero_points": torch.ones(16, 2, dtype=torch.int32)}, "zero points"),
        ({"group_index": torch.zeros(64, dtype=torch.int32)}, "act-order"),
        ({"pre_quant_scale": torch.ones(64)}, "pre_quant_scale"),
    ],
)
def test_what_the_dialect_cannot_hold_is_refused(changes, word):
    with pytest.raises(CheckpointError, match=word):
        QUARK.disassemble("a.weight", make_weight_with(make_weight("int4_group"), **changes))


def test_rows_that_fill_no_word_and_several_globals_are_refused():
    with pytest.raises(CheckpointError, match="13 rows"):
        QUARK.disassemble("a.weight", make_weight("int4_group", n=13))
    fused = make_weight_with(make_weight("nvfp4"), global_scale=torch.ones(16, 1))
    with pytest.raises(CheckpointError, match="16 global scales"):
        QUARK.disassemble("a.weight", fused)


def mixed_checkpoint(path: Path) -> tuple[Path, dict[str, str]]:
    """MXFP4 experts, FP8 attention, one layer's experts in MXFP6, another's down_proj in FP8 by channel."""
    formats = {}
    for i in range(4):
        formats |= {f"model.layers.{i}.self_attn.{p}": "fp8_tensor" for p in ("q_proj", "o_proj")}
        for e in range(3):
            for p in ("gate_proj", "up_proj", "down_proj"):
                odd = "mxfp6_e2m3" if i == 1 else "fp8_channel" if i == 2 and p == "down_proj" else "mxfp4"
                formats[f"model.layers.{i}.mlp.experts.{e}.{p}"] = odd
    excludes = ("lm_head", "model.layers.0.mlp.gate", "model.layers.9.mlp.experts")
    tensors = {m: make_weight_with(make_weight(f, i), input_scale=None) for i, (m, f) in enumerate(formats.items())}
    return write_with_dialect(path, tensors, excludes=excludes), formats


def test_several_formats_become_layer_configs_and_read_back(tmp_path):
    path, formats = mixed_checkpoint(tmp_path / "mixed")
    assert {m: q.format for m, q in read_all(path).items()} == formats
    block = json.loads((path / "config.json").read_text())["quantization_config"]
    attention = {f"model.layers.{i}.self_attn.{p}" for i in range(4) for p in ("q_proj", "o_proj")}
    experts = {"model.layers.1.mlp.experts*", "model.layers.2.mlp.experts.*.down_proj"}
    assert set(block["layer_quant_config"]) == attention | experts
    assert block["global_quant_config"]["weight"]["dtype"] == "fp4"
    declaration = declare({"quantization_config": block})
    for module in ("lm_head", "model.layers.9.mlp.experts.2.up_proj", "model.layers.0.mlp.gate"):
        assert declaration.format_of(module) == ""


def test_weight_only_declares_no_activations(tmp_path):
    path = write_with_dialect(tmp_path / "q", {MODULE: make_weight("mxfp4")}, weight_only=True)
    block = json.loads((path / "config.json").read_text())["quantization_config"]
    assert block["global_quant_config"]["input_tensors"] is None


def test_written_specs_are_the_tools_own(shared_data, tmp_path):
    for oracle, format, static in (
        ("quark--mxfp4--llama", "mxfp4", False),
        ("quark--nvfp4--llama", "nvfp4", True),
        ("quark--int4_wo_32--llama", "int4_group", False),
        ("quark-f2f--mxfp6_e3m2--llama", "mxfp6_e3m2", False),
    ):
        theirs = json.loads((shared_data / "oracles" / oracle / "config.json").read_text())["quantization_config"]
        path = write_with_dialect(tmp_path / oracle, {MODULE: make_weight(format)}, static_activations=static)
        ours = json.loads((path / "config.json").read_text())["quantization_config"]
        assert ours.keys() == theirs.keys()
        assert ours["global_quant_config"] == theirs["global_quant_config"]


@pytest.mark.slow
def test_vllms_reader_picks_the_scheme_that_was_written(tmp_path):
    """vLLM's QuarkConfig, without an engine: the scheme of a linear, an expert stack and an excluded layer."""
    quark = pytest.importorskip("vllm.model_executor.layers.quantization.quark.quark")
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    schemes = {
        "mxfp4": "QuarkOCP_MX",
        "nvfp4": "QuarkNVFP4",
        "mxfp6_e2m3": "QuarkOCP_MX",
        "mxfp6_e3m2": "QuarkOCP_MX",
        "mxfp8_e4m3": "QuarkOCP_MX",
        "fp8_tensor": "QuarkW8A8Fp8",
        "fp8_channel": "QuarkW8A8Fp8",
        "int4_group": "QuarkW4A16Int4",
    }
    for format, scheme in schemes.items():
        static = format in ("nvfp4", "fp8_tensor")
        path = write_with_dialect(
            tmp_path / format, {MODULE: make_weight(format)}, static_activations=static, excludes=("lm_head",)
        )
        config = quark.QuarkConfig.from_config(json.loads((path / "config.json").read_text())["quantization_config"])
        assert config.get_scheme_cls(ReplicatedLinear, MODULE)[2].__name__ == scheme
        assert config.get_quant_method_target("lm_head", ReplicatedLinear)[2] is UnquantizedLinearMethod
    path, _ = mixed_checkpoint(tmp_path / "mixed")
    config = quark.QuarkConfig.from_config(json.loads((path / "config.json").read_text())["quantization_config"])
    attention = config.get_scheme_cls(ReplicatedLinear, "model.layers.3.self_attn.q_proj")[2]
    assert attention.__name__ == "QuarkW8A8Fp8"
    weights = [config.get_quant_method_target(f"model.layers.{i}.mlp.experts", RoutedExperts)[0] for i in (0, 1)]
    assert [str(w.dtype) for w in weights] == ["torch.uint8", "float6_e2m3f"]
    dense = config.get_quant_method_target("model.layers.9.mlp.experts", RoutedExperts)[2]
    assert dense.__name__ == "UnquantizedFusedMoEMethod"
