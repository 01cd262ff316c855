"""Lint on shapes and on what config.json counts: weights that contradict each other, a config that is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.lint_config import check_config_values
from workbench.checkpoints.lint_model import check_surplus_tensor
from workbench.checkpoints.lint_shapes import check_shape_conflict
from workbench.errors import CheckpointError
from workbench.records import LintFinding

MLP = "model.layers.0.mlp."
ATTENTION = "model.layers.0.self_attn."
EXPERT = "model.layers.1.mlp.experts.2."
COUNTED = {"hidden_size": HIDDEN, "vocab_size": 128, "intermediate_size": INTERMEDIATE}


def dense(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.02, dtype=torch.bfloat16)


def findings(path: Path) -> list[LintFinding]:
    return list(lint_checkpoint(path).findings)


def with_shapes(tmp_path: Path, shapes: dict[str, tuple[int, ...]], **config: object) -> Path:
    """The tiny checkpoint with other tensors in the place of some, or beside them."""
    tensors = tiny_tensors() | {name: dense(*shape) for name, shape in shapes.items()}
    return write_checkpoint(tmp_path / "shapes", tensors, shards=1, **config)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({MLP + "gate_proj.weight": (0, HIDDEN)}, "[0, 64]: it holds nothing"),
        ({MLP + "gate_proj.weight": (INTERMEDIATE, 0)}, "[32, 0]: it holds nothing"),
        ({"model.norm.weight": (0,)}, "[0]: it holds nothing"),
        ({ATTENTION + "q_proj.bias": (0,)}, "[0]: it holds nothing"),
        ({MLP + "gate_proj.weight": (HIDDEN,)}, "[64], expected a matrix"),
        ({ATTENTION + "q_proj.weight": (HIDDEN, 3, HIDDEN)}, "[64, 3, 64], expected a matrix"),
        ({"lm_head.weight": (128,)}, "[128], expected a matrix"),
        ({MLP + "gate_proj.weight": (INTERMEDIATE, 7)}, "[32, 7], up_proj beside it [32, 64]"),
        ({MLP + "gate_proj.weight": (30, HIDDEN)}, "[30, 64], up_proj beside it [32, 64]"),
        ({MLP + "down_proj.weight": (60, INTERMEDIATE)}, "[60, 32], up_proj beside it [32, 64]"),
        ({MLP + "down_proj.weight": (HIDDEN, 31)}, "[64, 31], up_proj beside it [32, 64]"),
        ({ATTENTION + "k_proj.weight": (16, 32)}, "[16, 32], q_proj beside it [64, 64]"),
        ({EXPERT + "down_proj.weight": (HIDDEN, 16)}, "[64, 16], its sibling experts are [64, 32]"),
        ({ATTENTION + "q_proj.bias": (63,)}, "[63], its weight [64, 64]"),
    ],
)
def test_shapes_that_contradict_each_other(tmp_path, shapes, words):
    (finding,) = findings(with_shapes(tmp_path, shapes))
    assert (finding.check, finding.severity, finding.tensors) == ("shape-conflict", "error", tuple(shapes))
    assert words in finding.message


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({MLP + "down_proj.weight": (60, INTERMEDIATE)}, "N = 60, but hidden_size of config.json is 64"),
        ({ATTENTION + "o_proj.weight": (32, HIDDEN)}, "N = 32, but hidden_size of config.json is 64"),
        ({ATTENTION + "q_proj.weight": (HIDDEN, 63)}, "K = 63, but hidden_size of config.json is 64"),
        ({"lm_head.weight": (128, 63)}, "K = 63, but hidden_size of config.json is 64"),
        ({"model.layers.1.input_layernorm.weight": (63,)}, "[63], but hidden_size of config.json is 64"),
        ({"model.embed_tokens.weight": (127, HIDDEN)}, "[127, 64], but vocab_size of config.json is 128"),
    ],
)
def test_shapes_that_contradict_the_config(tmp_path, shapes, words):
    (finding,) = findings(with_shapes(tmp_path, shapes, **COUNTED))
    assert (finding.check, finding.severity, finding.tensors) == ("shape-conflict", "error", tuple(shapes))
    assert words in finding.message


def test_a_config_of_another_width_is_one_finding(tmp_path):
    (finding,) = findings(with_shapes(tmp_path, {}, hidden_size=HIDDEN + 1))
    matrices = 2 + LAYERS * 5 + (1 + (LAYERS - 1) * (EXPERTS + 1)) * 3  # not the routers
    assert finding.count == matrices
    assert "hidden_size of config.json is 65" in finding.message


def test_a_quantized_matrix_counts_by_its_logical_shape(tmp_path):
    shapes = {f"{MLP}{p}_proj.weight": (INTERMEDIATE, 32) for p in ("gate", "up")}
    quantize_checkpoint(with_shapes(tmp_path, shapes), tmp_path / "q", format="nvfp4", dialect="modelopt")
    (finding,) = findings(tmp_path / "q")
    assert finding.message == f"{MLP}down_proj.weight is [64, 32], up_proj beside it [32, 32]"


@pytest.mark.parametrize(
    "shapes",
    [
        {ATTENTION + "q_proj.weight": (2 * HIDDEN, HIDDEN), ATTENTION + "o_proj.weight": (HIDDEN, 2 * HIDDEN)},
        {f"{ATTENTION}{p}_proj.weight": (HIDDEN, 2 * HIDDEN) for p in ("q", "k", "v")},  # a draft model's first layer
        {"model.embed_tokens.weight": (160, HIDDEN), "lm_head.weight": (160, HIDDEN)},  # padded
        {"vision_tower.layers.0.self_attn.q_proj.weight": (48, 48), "visual.layers.0.mlp.down_proj.weight": (48, 99)},
        {"model.layers.0.cross_attn.k_proj.weight": (16, 48), "model.layers.0.cross_attn.q_proj.weight": (64, 64)},
        {"model.layers.0.conv.weight": (64, 1, 4), "model.layers.0.self_attn.indexer.k_proj.weight": (16, 40)},
    ],
)
def test_shapes_that_families_really_have(tmp_path, shapes):
    assert findings(with_shapes(tmp_path, shapes, **COUNTED)) == []


def test_experts_that_work_in_a_latent_space(tmp_path):
    shapes = {
        f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight": (48, 16) if p == "down" else (16, 48)
        for layer in (1, 2)
        for e in range(EXPERTS)
        for p in ("gate", "up", "down")
    }
    assert findings(with_shapes(tmp_path, shapes, **COUNTED, moe_latent_size=48)) == []
    (finding,) = findings(with_shapes(tmp_path / "other", shapes, **COUNTED))
    assert finding.count == len(shapes)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gemma3_text", "gpt_oss", "longcat_flash", "mllama", "nemotron_h", "opt", "phi3", "zamba2"],
)
def test_a_family_as_transformers_builds_it_has_no_conflict(tmp_path, family):
    """Names, shapes and config of two layers at their default sizes; the file is a hole, as no value is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = {"num_hidden_layers": 2} if family not in ("mllama", "nemotron_h", "zamba2") else {}
    config = AutoConfig.for_model(family, **layers)
    with torch.device("meta"):
        shapes = {n: list(t.shape) for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with open_checkpoint(tmp_path) as checkpoint:
        checks = (check_shape_conflict, check_config_values, check_surplus_tensor)
        assert [f.message for check in checks for f in check(checkpoint)] == []


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["3", [3], True, -3, 3.0, {}, ""])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "n_routed_experts", "vocab_size"])
def test_a_count_is_a_whole_number(tmp_path, key, value):
    (finding,) = findings(write_checkpoint(tmp_path / "m", tiny_tensors(), **{key: value}))
    assert (finding.check, finding.severity, finding.file) == ("config-conflict", "error", "config.json")
    assert f"{key} is {value!r}, expected a whole number" in finding.message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number, 1 or more"),
        ({"intermediate_size": [32, "32", 32]}, "intermediate_size is [32, '32', 32]"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"text_config": {"hidden_size": "64"}}, "text_config.hidden_size is '64'"),
        ({"text_config": []}, "text_config is [], expected a JSON object"),
        ({"model_type": ["deepseek_v3"]}, "model_type is ['deepseek_v3'], expected a name"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "expected a list of names"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings is 'true', expected true or false"),
    ],
)
def test_config_keys_of_the_wrong_type(tmp_path, config, words):
    (finding,) = findings(write_checkpoint(tmp_path / "m", tiny_tensors(), **config))
    assert (finding.check, finding.severity) == ("config-conflict", "error")
    assert words in finding.message


@pytest.mark.parametrize(
    "config",
    [
        {"n_routed_experts": None, "num_experts": EXPERTS, "head_dim": None, "hidden_size": None},
        {"intermediate_size": [32, 32, 32], "num_key_value_heads": [4, 4, 4], "n_shared_experts": 0},
        {"text_config": {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}},
    ],
)
def test_what_configs_really_say(tmp_path, config):
    assert findings(write_checkpoint(tmp_path / "m", tiny_tensors(), **config)) == []


def test_published_configs_count_in_whole_numbers(tmp_path, shared_data):
    files = [f for f in sorted((shared_data / "metadata").glob("*_config.json")) if "quant" not in f.name]
    assert len(files) > 25
    path = write_checkpoint(tmp_path / "m", tiny_tensors())
    for file in files:
        config = json.loads(file.read_text())
        config.pop("quantization_config", None)
        if isinstance(config.get("text_config"), dict):
            config["text_config"].pop("quantization_config", None)
        if not config.get("model_type"):
            continue  # an excerpt
        (path / "config.json").write_text(json.dumps(config))
        assert not [f for f in findings(path) if ", expected " in f.message and f.check == "config-conflict"], file.name


@pytest.mark.parametrize(
    ("text", "severity"),
    [("{}", "error"), ('{"architectures": []}', "error"), ('{"architectures": ["LlamaForCausalLM"]}', "warning")],
)
def test_a_config_that_says_no_model(tmp_path, text, severity):
    path = write_checkpoint(tmp_path / "m", tiny_tensors())
    (path / "config.json").write_text(text)
    (finding,) = findings(path)
    assert (finding.check, finding.severity) == ("config-conflict", severity)
    assert "it has no model_type" in finding.message


@pytest.mark.parametrize(("text", "word"), [("[]", "a list"), ('"x"', "a string"), ("null", "null"), ("3", "a number")])
def test_a_config_that_is_no_object_is_refused(tmp_path, text, word):
    path = write_checkpoint(tmp_path / "m", tiny_tensors())
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"holds {word}, expected a JSON object"):
        lint_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "count", "words"),
    [
        ({"num_hidden_layers": 2}, 22, "counts 2 layers, and model.layers.2.input_layernorm.weight is stored"),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, 0, ""),
        ({"n_routed_experts": 3}, 6, "counts 3 experts, and model.layers.1.mlp.experts.3.down_proj.weight is stored"),
        ({"n_routed_experts": 0}, 24, "counts 0 experts"),
    ],
)
def test_more_layers_or_experts_than_the_config_counts(tmp_path, config, count, words):
    hits = findings(write_checkpoint(tmp_path / "m", tiny_tensors(), **config))
    assert [(f.check, f.severity, f.count) for f in hits] == ([("config-conflict", "warning", count)] if count else [])
    assert all(words in f.message for f in hits)


@pytest.mark.parametrize(("name", "lacking"), [("x.weight", 1), ("transformer.h.0.x.weight", 0)])
def test_no_layer_at_all(tmp_path, name, lacking):
    hits = findings(write_checkpoint(tmp_path / "m", {name: dense(4, 4)}, shards=1))
    assert [f.check for f in hits] == ["missing-tensor"] * lacking


# ---- quantization blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ([], "quantization_config: it is []"),
        ("nvfp4", "quantization_config: it is 'nvfp4'"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "config_groups is no table of groups, but []"),
        ({"quant_method": "compressed-tensors", "config_groups": ""}, "config_groups is no table of groups, but ''"),
        ({"quant_method": "compressed-tensors", "sparsity_config": []}, "sparsity_config is no table of settings"),
        ({"quant_method": "modelopt", "quantization": []}, "quantization is no table of settings, but []"),
        ({"quant_method": "modelopt", "quantized_layers": []}, "quantized_layers is no table of module names, but []"),
        ({"quant_method": "modelopt", "quant_algo": []}, "quant_algo is []"),
        ({"quant_method": "modelopt", "config_groups": {"g": []}}, "config_groups.g is no table of settings, but []"),
        ({"quant_method": "quark", "layer_quant_config": []}, "layer_quant_config is no table of module names, but []"),
        ({"quant_method": "quark", "layer_quant_config": {"*": []}}, "layer_quant_config.* is no table of settings"),
        ({"quant_method": "quark", "global_quant_config": []}, "global_quant_config is no table of settings, but []"),
        ({"quant_method": "quark", "export": []}, "export is no table of settings, but []"),
        ({"quant_method": "fp8", "quantized_layers": []}, "quantized_layers is no table of module names, but []"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": []}, "dynamic is no table of module patterns, but []"),
        ({"quant_method": "torchao", "quant_type": []}, "quant_type is no table of settings, but []"),
        ({"quant_method": "torchao", "quant_type": {"default": [1]}}, "quant_type.default is [1]"),
    ],
)
def test_a_table_that_is_none_is_refused_also_when_empty(tmp_path, block, place):
    path = write_checkpoint(tmp_path / "m", tiny_tensors(), quantization_config=block)
    with pytest.raises(CheckpointError) as caught:
        lint_checkpoint(path)
    assert place in caught.value.message


def test_a_side_file_of_no_settings_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m", tiny_tensors())
    (path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": []}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json.quantization is no table of settings, but \[\]"):
        lint_checkpoint(path)


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "modelopt", "quantization": {}},
        {"quant_method": "modelopt", "quant_algo": None},
        {"quant_method": "quark", "layer_quant_config": {}, "global_quant_config": {}},
    ],
)
def test_a_block_that_quantizes_nothing_is_told(tmp_path, block):
    (finding,) = findings(write_checkpoint(tmp_path / "m", tiny_tensors(), quantization_config=block))
    assert (finding.check, finding.severity) == ("config-conflict", "warning")
    assert "quantizes nothing" in finding.message


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_two_blocks_that_differ_are_told_and_a_broken_second_one_is_refused(quark, broken, place):
    path = broken(quark)
    content = json.loads((path / "config.json").read_text())
    own = content["quantization_config"]
    for other, count in ((own, 0), ({**own, "exclude": []}, 1)):
        content[place] = {"quantization_config": other} if place == "text_config" else other
        (path / "config.json").write_text(json.dumps(content))
        hits = findings(path)
        assert [(f.check, f.severity) for f in hits] == [("config-conflict", "warning")] * count
        assert all("config.json has a quantization_config, which is read, and another" in f.message for f in hits)
    content[place] = {"quantization_config": []} if place == "text_config" else []
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"broken {place}"):
        lint_checkpoint(path)


def test_a_block_for_the_kv_cache_alone_quantizes_something(tmp_path):
    block = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert [f.check for f in findings(write_checkpoint(tmp_path / "m", tiny_tensors(), quantization_config=block))] == [
        "kv-scale"
    ]
