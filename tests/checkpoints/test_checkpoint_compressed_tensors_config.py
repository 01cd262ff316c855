"""The compressed-tensors config block: targets, schemes, what is declared and what is refused."""

from __future__ import annotations

import json
import time

import pytest
import torch
from compressed_tensors_blocks import BYTES, FP8, INT4, MXFP4, NVFP4, PACKED, M, block, declare, group
from tiny_checkpoints import write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.errors import CheckpointError

BROKEN = {
    "marlin-24": block(MXFP4, format="marlin-24"),
    "sparsity_config": block(MXFP4, sparsity_config={"format": "sparse-24-bitmask"}),
    "num_bits 3": block(group(num_bits=3, type="int", strategy="group", group_size=32)),
    "num_bits 5": block(group(num_bits=5, type="float", strategy="channel")),
    "group_size": block(group(num_bits=4, type="int", strategy="group")),
    "block_structure": block(group(**FP8, strategy="block", block_structure=[128, float("inf")])),
    "strategy": block(group(**FP8, strategy=["tensor"])),
    "regular expression": block(group(["re:("], **FP8)),
    "ignore": block(MXFP4, ignore="lm_head"),
    "targets, weights": block() | {"config_groups": {"W4A16": ["Linear"]}},
    "table of groups": block() | {"config_groups": ["W4A16"]},
    "quantization arguments": block() | {"config_groups": {"g": {"targets": [], "weights": 4}}},
    "kv_cache_scheme": block(MXFP4, kv_cache_scheme="FP8"),
}


@pytest.mark.parametrize("word", BROKEN)
def test_a_config_that_is_not_read_is_refused_by_key(word):
    with pytest.raises(CheckpointError) as caught:
        declare({"quantization_config": BROKEN[word]})
    assert word in caught.value.message
    assert caught.value.fix


# ---- Declarations ----------------------------------------------------------------------------------------------------


def test_targets_resolve_as_the_tool_resolves_them():
    """Names before regexes (in alphabetical order) before classes; a name covers no child; regexes match from the
    start; `ignore` is asked first. Compared with compressed-tensors' own `match_targets` on real modules."""
    match = pytest.importorskip("compressed_tensors.utils.match")

    def layer() -> torch.nn.Module:
        attention = torch.nn.ModuleDict({p: torch.nn.Linear(2, 2) for p in ("q_proj", "o_proj")})
        experts = torch.nn.ModuleList(torch.nn.ModuleDict({"up_proj": torch.nn.Linear(2, 2)}) for _ in range(2))
        return torch.nn.ModuleDict({"self_attn": attention, "mlp": torch.nn.ModuleDict({"experts": experts})})

    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer(), layer()])})})
    model["model"]["embed_tokens"] = torch.nn.Embedding(4, 2)
    model["lm_head"] = torch.nn.Linear(2, 4)
    targets = {
        "model.layers.0.self_attn.q_proj": {**FP8, "strategy": "tensor"},
        "model.layers.1": {**FP8, "strategy": "channel"},  # no linear layer of that name
        "re:.*proj$": {**FP8, "strategy": "block", "block_structure": [64, 64]},
        "re:.*_attn": {**INT4, "group_size": 32},
        "re:layers": {**FP8, "strategy": "channel"},  # no name starts so
        "Linear": {**INT4, "strategy": "channel"},
    }
    groups = [group([target], **args) for target, args in targets.items()]
    ignore = ["model.layers.1.self_attn", "re:.*experts\\.1", "model.layers.1.self_attn.o_proj"]
    declaration = declare({"quantization_config": block(*groups, ignore=ignore)})
    formats = {
        "model.layers.0.self_attn.q_proj": "fp8_tensor",
        "re:.*_attn": "int4_group",
        "re:.*proj$": "fp8_block",
        "Linear": "int4_group",
        "": "",
    }
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            chosen = match.match_targets(name, module, targets) or [""]
            ignored = match.is_match(name, module, ignore)
            assert declaration.format_of(name) == ("" if ignored else formats[chosen[0]]), name
            found.add((chosen[0], ignored))
    assert len(found) == 7  # each kind was met, two of them ignored too


def test_named_layers_beat_the_class_whatever_the_order():
    named = group(["model.layers.0.self_attn.q_proj"], num_bits=4, type="float", strategy="group", group_size=32)
    every = group(**FP8, strategy="group", group_size=32, scale_dtype="torch.uint8")
    for groups in ((named, every), (every, named)):
        declaration = declare({"quantization_config": block(*groups, format="mixed-precision")})
        assert declaration.format_of("model.layers.0.self_attn.q_proj") == "mxfp4"
        assert declaration.format_of("model.layers.1.self_attn.q_proj") == "mxfp8_e4m3"
        assert declaration.format == ""
        assert declaration.algorithm == "mixed-precision"


def test_tens_of_thousands_of_names_stay_fast():
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(100) for e in range(384)]
    declaration = declare({"quantization_config": block(MXFP4, group(names[::3], **FP8), ignore=names[::2])})
    started = time.perf_counter()
    formats = [declaration.format_of(name) for name in names]
    assert time.perf_counter() - started < 5  # 0.05 s; a list that is searched takes minutes
    assert (formats.count(""), formats.count("fp8_tensor")) == (len(names) // 2, len(names) // 6)


def test_activations_kv_cache_and_weight_only_are_told():
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    w4a4 = {**NVFP4, "input_activations": inputs, "format": "nvfp4-pack-quantized"}
    w8 = group(["re:.*self_attn.*"], **FP8, strategy="channel")
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": kv}
    config = block(w4a4, w8, attention, format="mixed-precision", kv_cache_scheme=kv)
    declaration = declare({"quantization_config": config})
    assert declaration.kv_cache == "FP8"
    assert declaration.weight_only == {"re:.*self_attn.*"}
    assert declaration.format_of("model.layers.0.mlp.up_proj") == "nvfp4"
    only = declare({"quantization_config": block(w4a4, format="nvfp4-pack-quantized")})
    assert (only.format, only.activations, only.kv_cache) == ("nvfp4", "nvfp4", "")


def test_a_block_in_text_config_is_about_the_language_model(tmp_path):
    tensors = {
        "language_model.model.layers.0.mlp.up_proj.weight_packed": torch.zeros(4, 4, dtype=torch.int32),
        "language_model.model.layers.0.mlp.up_proj.weight_scale": torch.ones(4, 1),
        "vision_tower.blocks.0.wqkv.weight": torch.ones(4, 4),
        "mm_projector.proj.0.weight": torch.ones(4, 4),
    }
    config = {"quantization_config": block(group(**INT4, group_size=32))}
    path = write_checkpoint(tmp_path / "c", tensors, text_config=config)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.problems == ()
        for entry in checkpoint.entries():
            assert checkpoint.declaration.expects_quantized(entry.module) == entry.quantized, entry.name


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_block_is_found_by_either_key_and_without_a_method(key):
    config = block(MXFP4, format="mxfp4-pack-quantized")
    del config["quant_method"]
    assert declare({key: config}).format == "mxfp4"


def test_tensors_without_a_config_are_recognized(tmp_path):
    tensors = {f"{M}.weight_packed": PACKED, f"{M}.weight_scale": BYTES}
    with open_checkpoint(write_checkpoint(tmp_path / "c", tensors)) as checkpoint:
        assert checkpoint.dialect == "compressed_tensors"
        assert checkpoint.entry(f"{M}.weight").format == "mxfp4"
        assert any("no quantization_config" in p.message for p in checkpoint.problems)


def test_published_configs_give_the_plan_that_their_producers_mean(shared_data):
    def read(name: str) -> dict:
        return json.loads((shared_data / "metadata" / name).read_text())

    kimi = declare(read("moonshotai--Kimi-K2.5_config.json"))
    layer = "language_model.model.layers.7."
    assert (kimi.algorithm, kimi.format, kimi.activations) == ("pack-quantized", "int4_group", "")
    assert kimi.format_of(layer + "mlp.experts.383.down_proj") == "int4_group"
    for name in (layer + "self_attn.o_proj", layer + "mlp.shared_experts.up_proj", layer + "mlp.gate_proj", "lm_head"):
        assert not kimi.expects_quantized(name), name
    k3 = declare(read("moonshotai--Kimi-K3_config.json"))
    assert k3.format_of(layer + "mlp.experts.0.up_proj") == "mxfp4"
    assert not k3.expects_quantized("vision_tower.encoder.blocks.0.wqkv")
    assert not k3.expects_quantized("language_model.lm_head")
    linear = declare(read("Firworks--Kimi-Linear-48B-A3B-Instruct-nvfp4_config_excerpt.json"))
    assert (linear.format, linear.activations) == ("nvfp4", "nvfp4")
    assert not linear.expects_quantized("lm_head")
    llama = declare(read("compressed-tensors-docs--Meta-Llama-3-8B-MXFP4_config.json"))
    assert (llama.format, llama.activations) == ("mxfp4", "mxfp4")
    old = declare({"quantization_config": read("compressed-tensors-example--llama1.1b_quant_config.json")})
    assert (old.algorithm, old.format, old.activations) == ("naive-quantized", "int8_tensor", "int8_tensor")
