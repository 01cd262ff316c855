"""Recipes: the first rule decides, shipped ones are found by name, mistakes are named by file and rule."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.recipe import Recipe, Rule, combine, read_recipe
from workbench.errors import CheckpointError, ConfigError
from workbench.formats import quantize

SHIPPED = sorted(Path(str(files("workbench.conf"))).glob("recipe/*.yaml"))
KIMI = "language_model.model.layers.3."


def formats(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {e.module: e.format for e in checkpoint.entries() if e.name.endswith(".weight")}


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_covers_a_module_decides():
    recipe = read_recipe(
        {"rules": [{"match": "re:.*o_proj", "format": "keep"}, {"match": "*self_attn*", "format": "fp8_tensor"}]}
    )
    assert recipe.choose("model.layers.0.self_attn.o_proj") == recipe.rules[0]
    assert recipe.choose("model.layers.0.self_attn.q_proj") == recipe.rules[1]
    assert recipe.choose("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_recipe_is_read_by_its_name_and_by_its_path(path):
    assert read_recipe(path.stem).rules
    assert [r.match for r in read_recipe(path.stem).rules] == [r.match for r in read_recipe(path).rules]


@pytest.mark.parametrize(
    ("recipe", "module", "format"),
    [
        # AMD's exclude list: *self_attn* *mlp.gate *lm_head *mlp.{gate,up,down}_proj *mm_projector* *vision_tower*
        ("kimi_k2_6_nvfp4", KIMI + "self_attn.q_a_proj", "keep"),
        ("kimi_k2_6_nvfp4", KIMI + "mlp.gate", "keep"),
        ("kimi_k2_6_nvfp4", "language_model.lm_head", "keep"),
        ("kimi_k2_6_nvfp4", "language_model.model.layers.0.mlp.up_proj", "keep"),
        ("kimi_k2_6_nvfp4", "mm_projector.proj.0", "keep"),
        ("kimi_k2_6_nvfp4", "vision_tower.encoder.blocks.0.mlp.fc0", "keep"),
        ("kimi_k2_6_nvfp4", KIMI + "mlp.experts.383.down_proj", "nvfp4"),
        ("kimi_k2_6_nvfp4", KIMI + "mlp.shared_experts.up_proj", "nvfp4"),
        # lm_head *self_attn* *.gate *shared_experts* *embed* *norm*
        ("quanto_mxfp4_rtn", "lm_head", "keep"),
        ("quanto_mxfp4_rtn", KIMI + "self_attn.o_proj", "keep"),
        ("quanto_mxfp4_rtn", KIMI + "mlp.gate", "keep"),
        ("quanto_mxfp4_rtn", KIMI + "mlp.shared_experts.up_proj", "keep"),
        ("quanto_mxfp4_rtn", "model.embed_tokens", "keep"),
        ("quanto_mxfp4_rtn", "model.norm", "keep"),
        ("quanto_mxfp4_rtn", KIMI + "mlp.experts.0.gate_proj", "mxfp4"),
        ("quanto_mxfp4_rtn", "model.layers.0.mlp.gate_proj", "mxfp4"),
    ],
)
def test_the_published_lists_cover_what_they_covered(recipe, module, format):
    chosen = read_recipe(recipe).choose(module)
    assert chosen is not None
    assert chosen.format == format


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{match: '*', format: nvfp5}", "unknown format 'nvfp5'"),
        ("{match: '*', format: nvfp4, rule: even}", "no scale rule 'even'"),
        ("{match: '*', format: nvfp4, rules: amax}", "unknown keys: rules"),
        ("{match: 're:(', format: nvfp4}", "regular expression"),
        ("{match: '*', format: int4_group, block: 128}", "block 128"),
        ("{match: '*', format: int4_group, block: [2, 128]}", "no blocks of 2 x 128"),
        ("{match: '*', format: keep, rule: even}", "keep has no scale rule"),
        ("{format: nvfp4}", "has no match"),
        ("{match: '*'}", "has no format"),
        ("nvfp4", "expected a mapping"),
    ],
)
def test_a_mistake_is_named_by_file_and_rule(tmp_path, rule, words):
    path = write(tmp_path, f"rules:\n  - {{match: 'a', format: keep}}\n  - {rule}\n")
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert f"{path}, rule 2" in caught.value.message
    assert words in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    "text", ["", "rules: 3", "rules: []", "[1, 2]", "rules: {a: b}", "rules: [", "x: 1\nrules: []"]
)
def test_a_file_that_is_no_recipe(tmp_path, text):
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        read_recipe(write(tmp_path, text))


def test_an_unknown_name_lists_the_shipped_recipes():
    with pytest.raises(ConfigError, match="no recipe 'kimi'") as caught:
        read_recipe("kimi")
    assert all(path.stem in caught.value.fix for path in SHIPPED)


# ---- combining with flags --------------------------------------------------------------------------------------------


def test_excludes_come_first_and_the_format_last():
    recipe = combine(
        Recipe(name="r", rules=(Rule(match="*b*", format="mxfp4"),)), format="nvfp4", exclude=["*ab*"], include=["*c"]
    )
    chosen = {m: recipe.choose(m) for m in ("ab", "b", "c", "d")}
    assert {m: r and r.format for m, r in chosen.items()} == {"ab": "", "b": "mxfp4", "c": "nvfp4", "d": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": None}, "neither a format nor a recipe"),
        ({"format": None, "recipe": "quanto_mxfp4_rtn", "include": ["a"]}, "--format is used"),
        ({"format": "mxfp4", "recipe": "quanto_mxfp4_rtn"}, "decides for every module"),
    ],
)
def test_flags_that_could_never_decide_are_refused(arguments, words):
    name = arguments.pop("recipe", None)
    with pytest.raises(ConfigError, match=words):
        combine(read_recipe(name) if name else None, **arguments)


@pytest.mark.parametrize("format", [None, "bf16"])
def test_a_recipe_that_quantizes_nothing_is_refused(format):
    with pytest.raises(ConfigError, match="quantizes nothing"):
        combine(read_recipe([{"match": "*self_attn*", "format": "keep"}]), format=format)


# ---- converting ------------------------------------------------------------------------------------------------------


def test_a_recipe_of_two_formats_is_written_and_read_back_by_module(plain, tmp_path):
    recipe = read_recipe(
        {
            "rules": [
                {"match": "*self_attn.o_proj", "format": "keep"},
                {"match": "*self_attn*", "format": "fp8_tensor"},
                {"match": "*.experts.*", "format": "nvfp4", "rule": "four_over_six"},
            ]
        }
    )
    result = quantize_checkpoint(plain, tmp_path / "q", recipe=recipe, dialect="modelopt")
    found = formats(tmp_path / "q")
    layer = "model.layers.1."
    assert found[layer + "self_attn.o_proj"] == "bf16"
    assert found[layer + "self_attn.q_proj"] == "fp8_tensor"
    assert found[layer + "mlp.experts.0.up_proj"] == "nvfp4"
    assert found[layer + "mlp.shared_experts.up_proj"] == "bf16"
    assert result.format == "fp8_tensor+nvfp4"
    name = layer + "mlp.experts.2.down_proj.weight"
    with open_checkpoint(tmp_path / "q") as checkpoint:
        assert checkpoint.declaration.algorithm == "MIXED_PRECISION"
        expected = quantize(tiny_tensors()[name], "nvfp4", "four_over_six").dequantize()
        assert torch.equal(checkpoint.read_dense(name), expected)


def test_a_name_may_add_a_matrix_outside_the_layers_and_a_pattern_may_not(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", include=["*down_proj", "lm_head"])
    found = formats(tmp_path / "q")
    assert {m for m, f in found.items() if f == "nvfp4"} == {
        m for m in found if m.endswith("down_proj") or m == "lm_head"
    }
    quantize_checkpoint(plain, tmp_path / "p", format="nvfp4", dialect="modelopt", include=["*"])
    assert formats(tmp_path / "p")["lm_head"] == formats(tmp_path / "p")["model.layers.1.mlp.gate"] == "bf16"


def test_keep_copies_a_quantized_tensor_that_the_dialect_writes_and_bf16_decodes_it(modelopt, tmp_path):
    for word in ("keep", "bf16"):
        recipe = read_recipe(
            {"rules": [{"match": "*self_attn*", "format": word}, {"match": "*", "format": "fp8_tensor"}]}
        )
        quantize_checkpoint(modelopt, tmp_path / word, recipe=recipe, dialect="modelopt")
    module = "model.layers.1.self_attn.q_proj"
    assert formats(tmp_path / "keep")[module] == "nvfp4"
    assert formats(tmp_path / "bf16")[module] == "bf16"
    with open_checkpoint(modelopt) as source, open_checkpoint(tmp_path / "keep") as kept:
        assert torch.equal(source.read(module + ".weight").codes, kept.read(module + ".weight").codes)


def test_a_format_that_the_dialect_does_not_write_is_named_with_its_rule(plain, tmp_path):
    path = write(tmp_path, "rules: [{match: a, format: keep}, {match: '*', format: int4_group}]")
    with pytest.raises(ConfigError, match=r"mine\.yaml, rule 2: the modelopt dialect writes nvfp4"):
        quantize_checkpoint(plain, tmp_path / "q", recipe=read_recipe(path), dialect="modelopt")


def test_one_format_has_one_block_size_and_a_contradiction_is_told_before_the_work(plain, tmp_path):
    recipe = read_recipe(
        [
            {"match": "*down_proj", "format": "int4_group", "block": [1, 32]},
            {"match": "*self_attn*", "format": "int4_group", "block": [1, 64]},
        ]
    )
    seen: list[int] = []
    with pytest.raises(CheckpointError, match=r"blocks of \(1, 64\), others have \(1, 32\)"):
        quantize_checkpoint(
            plain, tmp_path / "q", recipe=recipe, dialect="compressed_tensors", progress=lambda n, *_: seen.append(n)
        )
    assert not seen


def test_a_default_block_is_written_into_the_config(tmp_path):
    source = write_checkpoint(tmp_path / "s", {"model.layers.0.mlp.up_proj.weight": torch.ones(64, 256).bfloat16()})
    quantize_checkpoint(source, tmp_path / "q", format="int4_group", dialect="compressed_tensors")
    block = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    (group,) = block["config_groups"].values()
    assert group["weights"]["group_size"] == 128


def test_a_pattern_that_covers_nothing_is_a_warning_with_its_rule(plain, tmp_path):
    path = write(tmp_path, "rules: [{match: '*selfattn*', format: keep}, {match: '*', format: nvfp4}]")
    result = quantize_checkpoint(plain, tmp_path / "q", recipe=read_recipe(path), dialect="modelopt")
    assert f"{path}, rule 1: pattern '*selfattn*' matches no module of tiny" in result.warnings


def test_a_kimi_style_checkpoint_by_its_recipe(tmp_path):
    """The INT4 release has `language_model.` names; the exclude list lands in the written config."""
    tensors = {
        n.replace("model.", "language_model.model.", 1) if n.startswith("model.") else f"language_model.{n}": t
        for n, t in tiny_tensors().items()
    }
    tensors["vision_tower.blocks.0.fc0.weight"] = torch.ones(32, 32).bfloat16()
    source = write_checkpoint(tmp_path / "kimi", tensors, model_type="kimi_k25")
    recipe = read_recipe("kimi_k2_6_nvfp4")
    result = quantize_checkpoint(source, tmp_path / "q", recipe=recipe, dialect="modelopt")
    quantized = {n for n in tensors if ".experts." in n or "shared_experts" in n}
    assert set(result.quantized) == quantized
    ignore = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("vision_tower" in name for name in ignore)
    assert result.warnings == (f"{recipe.rules[6].where}: pattern '*mm_projector*' matches no module of kimi",)
