"""Lint on the model as a whole: names, excludes, tied heads, KV scales, and what tensor parallelism can split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.records import LintFinding


def findings(path: Path, check: str, **options: object) -> list[LintFinding]:
    return [f for f in lint_checkpoint(path, **options).findings if f.check == check]


def edit_configs(path: Path, **changes: object) -> Path:
    """Change ModelOpt's claim in both of its files."""
    config = json.loads((path / "config.json").read_text())
    side = json.loads((path / "hf_quant_config.json").read_text())
    for key, value in changes.items():
        config["quantization_config"][{"exclude_modules": "ignore", "kv_cache_quant_algo": "kv_cache_scheme"}[key]] = (
            value
        )
        side["quantization"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").write_text(json.dumps(side))
    return path


# ---- excludes --------------------------------------------------------------------------------------------------------


def numbered_layers(tmp_path: Path, excluded: tuple[int, ...]) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{i}.mlp.{p}_proj.weight": (torch.randn(32, 32, generator=generator) * 0.02).bfloat16()
        for i in range(13)
        for p in ("gate", "up", "down")
    }
    source = write_checkpoint(tmp_path / "deep", tensors, num_hidden_layers=13)
    patterns = [f"model.layers.{i}.mlp" for i in excluded]
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=patterns)
    return tmp_path / "q"


def test_a_pattern_that_fits_layer_1_and_layers_10_to_12(tmp_path):
    path = edit_configs(numbered_layers(tmp_path, (1, 10, 11, 12)), exclude_modules=["model.layers.1*"])
    (finding,) = lint_checkpoint(path).findings
    assert finding.check == "exclude-ambiguous"
    assert "1 and 10, 11, 12" in finding.message


def test_a_pattern_that_covers_more_than_it_should_contradicts_the_tensors(tmp_path):
    path = edit_configs(numbered_layers(tmp_path, (1,)), exclude_modules=["model.layers.1*"])
    (finding,) = findings(path, "exclude-conflict")
    assert finding.count == 9
    assert all(f"layers.{i}." in name for i, name in zip((10, 10, 10, 11), finding.tensors, strict=False))


def test_layer_0_with_a_star_is_unambiguous(tmp_path):
    path = edit_configs(numbered_layers(tmp_path, (0,)), exclude_modules=["model.layers.0*"])
    assert lint_checkpoint(path).findings == ()


def test_a_prediction_head_declared_quantized_is_a_mismatch_of_its_own(tmp_path):
    """`mtp.layers.0*` leaves mtp.fc out; the model itself is right."""
    tensors = tiny_tensors()
    tensors["mtp.fc.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64, dtype=torch.bfloat16)
    source = write_checkpoint(tmp_path / "mtp", tensors)
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    ignored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    names = [n for n in ignored if not n.startswith("mtp")] + ["mtp.layers.0*"]
    (finding,) = lint_checkpoint(edit_configs(tmp_path / "q", exclude_modules=names)).findings
    assert (finding.check, finding.severity, finding.tensors) == ("exclude-conflict", "warning", ("mtp.fc.weight",))


@pytest.mark.parametrize(("tied", "dead"), [(True, 0), (False, 1)])
def test_an_excluded_head_that_is_tied_need_not_be_stored(tmp_path, tied, dead):
    tensors = tiny_tensors()
    del tensors["lm_head.weight"]
    source = write_checkpoint(tmp_path / "headless", tensors, tie_word_embeddings=tied)
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    ignored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    path = edit_configs(tmp_path / "q", exclude_modules=[*ignored, "lm_head"])
    assert len(findings(path, "exclude-conflict")) == dead


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_an_expert_without_the_pre_quant_scale_of_its_siblings(modelopt, broken):
    def edit(tensors):
        for expert in range(4):
            if expert != 2:
                name = f"model.layers.1.mlp.experts.{expert}.down_proj.pre_quant_scale"
                tensors[name] = torch.ones(32, dtype=torch.bfloat16)

    (finding,) = findings(broken(modelopt, edit), "expert-suffix-sets")
    assert finding.tensors == ("model.layers.1.mlp.experts.2.down_proj.weight",)
    assert "lacks pre_quant_scale" in finding.message
    assert "pre_quant_scale of ones" in finding.fix


# ---- there twice, or not at all --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "duplicates"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", 1),
        ("model.model.layers.0.mlp.up_proj.weight", 1),
        ("vision_tower.layers.0.mlp.up_proj.weight", 0),
        ("encoder.layers.0.mlp.up_proj.weight", 0),
    ],
)
def test_one_module_under_two_prefixes(tmp_path, other, duplicates):
    tensors = tiny_tensors()
    tensors[other] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    hits = findings(write_checkpoint(tmp_path / "twice", tensors), "duplicate-module")
    assert len(hits) == duplicates
    assert all(f.severity == "error" and len(f.tensors) == 1 for f in hits)


@pytest.mark.parametrize(
    ("tied", "head", "check", "severity"),
    [
        (True, "absent", None, None),
        (True, "equal", "tied-embeddings", "info"),
        (True, "different", "tied-embeddings", "error"),
        (False, "absent", "missing-tensor", "error"),
        (False, "different", None, None),
        (None, "absent", None, None),  # the family's default decides, which no file says
    ],
)
def test_tied_embeddings(tmp_path, tied, head, check, severity):
    tensors = tiny_tensors()
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = {} if tied is None else {"tie_word_embeddings": tied}
    report = lint_checkpoint(write_checkpoint(tmp_path / "tied", tensors, **config))
    assert [(f.check, f.severity) for f in report.findings] == ([(check, severity)] if check else [])


# ---- KV cache --------------------------------------------------------------------------------------------------------

NAMINGS = {
    "by projection": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "by attention": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "fused": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    "one": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


def with_kv_scales(tmp_path: Path, names: tuple[str, ...], values: list[float]) -> Path:
    tensors = tiny_tensors()
    for layer, value in enumerate(values):
        for name in names:
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor(value)
    return write_checkpoint(tmp_path / "kv", tensors)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    ("values", "severity", "words"),
    [
        ([0.01, 0.045, 0.02], None, ""),
        ([1.0, 1.0, 1.0], "warning", "exactly 1: uncalibrated"),
        ([1.0, 0.02, 0.03], None, ""),
        ([0.01, 0.0, 0.02], "error", "is 0.0"),
        ([0.01, float("inf"), 0.02], "error", "is inf"),
    ],
)
def test_kv_scales_under_every_naming(tmp_path, naming, values, severity, words):
    hits = findings(with_kv_scales(tmp_path, NAMINGS[naming], values), "kv-scale")
    assert [f.severity for f in hits] == ([severity] if severity else [])
    assert all(words in f.message for f in hits)


def test_a_declared_kv_cache_without_scales_is_told(modelopt, broken):
    path = edit_configs(broken(modelopt), kv_cache_quant_algo="FP8")
    assert [f.severity for f in findings(path, "kv-scale")] == ["info"]


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def one_matrix(tmp_path: Path, projection: str, n: int, k: int, format: str, dialect: str) -> Path:
    generator = torch.Generator().manual_seed(0)
    name = f"model.layers.0.mlp.{projection}.weight"
    tensors = {name: (torch.randn(n, k, generator=generator) * 0.02).bfloat16()}
    source = write_checkpoint(tmp_path / "one", tensors, shards=1, num_hidden_layers=1)
    quantize_checkpoint(source, tmp_path / "q", format=format, dialect=dialect)
    return tmp_path / "q"


@pytest.mark.parametrize(
    ("projection", "n", "k", "format", "size", "message"),
    [
        # 90 blocks of 32, as gpt-oss has: two ranks, but neither four nor eight
        ("down_proj", 64, 2880, "mxfp4", 2, ""),
        ("down_proj", 64, 2880, "mxfp4", 4, "K = 90 blocks of 32; tensor-parallel sizes up to 16 that divide it: 2, 3"),
        ("down_proj", 64, 2880, "nvfp4", 4, ""),
        (
            "down_proj",
            64,
            2880,
            "nvfp4",
            8,
            "K = 180 blocks of 16; tensor-parallel sizes up to 16 that divide it: 2, 3",
        ),
        ("down_proj", 64, 2880, "fp8_channel", 8, ""),  # a scale a row: any split of K
        (
            "gate_proj",
            1000,
            128,
            "nvfp4",
            16,
            "N = 1000; tensor-parallel sizes up to 16 that divide it: 2, 4, 5, 8, 10",
        ),
        (
            "gate_proj",
            768,
            128,
            "fp8_block",
            4,
            "N = 6 blocks of 128; tensor-parallel sizes up to 16 that divide it: 2",
        ),
        (
            "gate_proj",
            1000,
            128,
            "fp8_block",
            2,
            "N = 7.8125 blocks of 128; tensor-parallel sizes up to 16 that divide",
        ),
    ],
)
def test_sizes_that_do_not_split_into_whole_blocks(tmp_path, projection, n, k, format, size, message):
    path = one_matrix(tmp_path, projection, n, k, format, "modelopt")
    hits = [f for f in findings(path, "tensor-parallel", tensor_parallel=[size]) if f.severity == "error"]
    assert len(hits) == bool(message)
    assert all(message in f.message for f in hits)


def test_a_shape_that_no_usual_size_divides_is_told_unasked(tmp_path):
    """Three blocks of 128 rows: three ranks only."""
    path = one_matrix(tmp_path, "gate_proj", 384, 256, "fp8_block", "modelopt")
    (finding,) = findings(path, "tensor-parallel")
    assert finding.severity == "info"
    assert finding.message.endswith("that divide it: 3")


def test_a_dead_pattern_for_one_expert_is_looked_for_among_all(modelopt, broken):
    tensors = load_file(modelopt / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj"
    assert name + ".weight" in tensors
    path = broken(modelopt)
    ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    edit_configs(path, exclude_modules=[*ignored, "re:.*experts\\.3\\.down_proj"])
    assert not any("matches no module" in f.message for f in lint_checkpoint(path).findings)
