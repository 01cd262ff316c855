"""The ModelOpt dialect against what ModelOpt 0.47.0 wrote (golden_modelopt.*): writing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from modelopt_files import GOLDEN, K_PROJ, W, golden, write_golden
from safetensors.torch import save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import DIALECTS, Written
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, quantize

# What the dialect writes, and how ModelOpt names it.
WRITTEN = {
    "W4A16_NVFP4_CFG": "nvfp4",
    "NVFP4_DEFAULT_CFG": "nvfp4",
    "MXFP4_DEFAULT_CFG": "mxfp4",
    "MXFP8_DEFAULT_CFG": "mxfp8_e4m3",
    "FP8_DEFAULT_CFG": "fp8_tensor",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_channel",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "fp8_block",
}


def by_hand(format: str, n: int = 160, k: int = 128) -> QuantizedTensor:
    """A quantized tensor whose parts are put together without the package's quantizers."""
    generator = torch.Generator().manual_seed(len(format))
    if format in ("nvfp4", "mxfp4"):
        return quantize(torch.randn(n, k, generator=generator), format)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    shape, block = {
        "fp8_tensor": ((1, 1), None),
        "fp8_channel": ((n, 1), None),
        "fp8_block": ((-(-n // 128), -(-k // 128)), (128, 128)),
        "mxfp8_e4m3": ((n, k // 32), (1, 32)),
    }[format]
    scales = torch.rand(shape, generator=generator) + 0.5
    if format == "mxfp8_e4m3":
        scales = torch.randint(100, 140, shape, generator=generator).to(torch.uint8)
    return QuantizedTensor(
        format=format, codes=codes, block_scales=scales, global_scale=None, shape=(n, k), block=block
    )


def store(path: Path, tensors: dict[str, QuantizedTensor], **extra: object) -> Path:
    dialect = DIALECTS["modelopt"]
    stored = {n: t for name, q in tensors.items() for n, t in dialect.disassemble(name, q).items()}
    formats = {name.removesuffix(".weight"): q.format for name, q in tensors.items()}
    path.mkdir(parents=True)
    save_file(stored, path / "model.safetensors")
    for file, content in dialect.config_files({"model_type": "llama"}, Written(formats=formats, **extra)).items():
        (path / file).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("format", DIALECTS["modelopt"].writes)
def test_written_is_read_and_written_again_byte_for_byte(tmp_path, format):
    q = by_hand(format)
    first = store(tmp_path / "one", {W: q}, excludes=("lm_head",))
    with open_checkpoint(first) as checkpoint:
        again = checkpoint.read(W)
        assert checkpoint.dialect == "modelopt"
        assert checkpoint.declaration.format == format
        assert checkpoint.declaration.conflicts == ()
        assert checkpoint.problems == ()
    assert again.block == q.block
    assert torch.equal(again.codes.view(torch.uint8), q.codes.view(torch.uint8))
    assert torch.equal(again.block_scales.view(torch.uint8), q.block_scales.view(torch.uint8))
    assert torch.equal(again.dequantize(), q.dequantize())
    second = store(tmp_path / "two", {W: again}, excludes=("lm_head",))
    for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.parametrize("preset", WRITTEN)
def test_the_tools_own_tensors_come_back_as_they_were(tmp_path, preset):
    stored = golden(preset)
    with open_checkpoint(write_golden(tmp_path / "m", preset)) as checkpoint:
        parts = DIALECTS["modelopt"].disassemble(W, checkpoint.read(W))
    assert parts.keys() == stored.keys()
    for name, part in parts.items():
        assert part.dtype == stored[name].dtype, name
        if "2D" not in preset:  # where a matrix of one block gets one number, by the tool, and a grid of one here
            assert part.shape == stored[name].shape, name
        assert part.reshape(-1).view(torch.uint8).tolist() == stored[name].reshape(-1).view(torch.uint8).tolist(), name


@pytest.mark.parametrize("preset", WRITTEN)
def test_written_config_equals_the_tools(preset):
    facts = GOLDEN[preset]
    written = Written(
        formats={K_PROJ: WRITTEN[preset]},
        excludes=tuple(facts["hf_quant_config"]["quantization"]["exclude_modules"]),
        static_activations=preset in ("NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"),
    )
    files = DIALECTS["modelopt"].config_files({"model_type": "llama", "quantization_config": {"old": 1}}, written)
    assert files["config.json"] == {"model_type": "llama", "quantization_config": facts["quantization_config"]}
    assert list(files["config.json"]["quantization_config"]) == list(facts["quantization_config"])
    assert files["hf_quant_config.json"] == facts["hf_quant_config"]


def test_several_formats_are_listed_by_module_and_experts_by_container(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": by_hand("nvfp4") for e in range(3)}
    half = {f"model.layers.1.mlp.experts.{e}.up_proj.weight": by_hand("nvfp4") for e in range(2)}
    tensors = {W: by_hand("fp8_tensor"), **experts, **half}
    path = store(tmp_path / "m", tensors, excludes=("lm_head", "model.layers.1.mlp.experts.2.up_proj"))
    side = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    weight_only = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert side == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": {
            K_PROJ: {"quant_algo": "FP8"},
            "model.layers.0.mlp.experts": weight_only,
            "model.layers.1.mlp.experts.0.up_proj": weight_only,
            "model.layers.1.mlp.experts.1.up_proj": weight_only,
        },
    }
    block = json.loads((path / "config.json").read_text())["quantization_config"]
    assert [len(g["targets"]) for g in block["config_groups"].values()] == [1, 3]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.declaration.conflicts == ()
        for entry in checkpoint.entries():
            assert checkpoint.declaration.format_of(entry.module) == entry.format
        assert not checkpoint.declaration.expects_quantized("model.layers.1.mlp.experts.2.up_proj")


def test_nothing_quantized_needs_no_config():
    files = DIALECTS["modelopt"].config_files({"a": 1, "quantization_config": {}}, Written())
    assert files == {"config.json": {"a": 1}}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"pre_quant_scale": torch.ones(128)}, "pre_quant_scale"),
        ({"global_scale": torch.ones(160, 1)}, "160 global scales"),
    ],
)
def test_what_the_parts_cannot_say_is_not_written(change, word):
    with pytest.raises(CheckpointError, match=word):
        DIALECTS["modelopt"].disassemble(W, dataclasses.replace(by_hand("nvfp4"), **change))


def test_other_formats_and_blocks_are_not_written():
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    int4 = QuantizedTensor(
        format="int4_group",
        codes=codes,
        block_scales=torch.ones(4, 4),
        global_scale=None,
        shape=(4, 128),
        block=(1, 32),
    )
    with pytest.raises(CheckpointError, match="int4_group, which the modelopt dialect does not write"):
        DIALECTS["modelopt"].disassemble(W, int4)
    fp8 = QuantizedTensor(
        format="fp8_block",
        codes=torch.zeros(64, 64).to(torch.float8_e4m3fn),
        block_scales=torch.ones(2, 2),
        global_scale=None,
        shape=(64, 64),
        block=(32, 32),
    )
    with pytest.raises(CheckpointError, match=r"blocks of \(32, 32\)"):
        DIALECTS["modelopt"].disassemble(W, fp8)
