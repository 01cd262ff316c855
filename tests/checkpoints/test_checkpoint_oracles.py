"""Real exports of NVIDIA ModelOpt and AMD Quark, where WORKBENCH_SHARED_DATA holds them (see its oracles/README)."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import choose_dialect
from workbench.checkpoints.files import Folder
from workbench.checkpoints.lint import lint_checkpoint
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

READABLE = [
    "modelopt--nvfp4_default--qwen3moe",
    "modelopt--nvfp4_default--llamazero",
    "modelopt--w4a16_nvfp4--llama",
    "modelopt--mxfp4_default--llama",
    "modelopt--kvfp8--llama",
    "quark--mxfp4--llama",
    "quark-f2f--mxfp4--llama",
    "quark--nvfp4--llama",
    "quark-f2f--nvfp4--qwen3moe",
]
UNREADABLE = {
    "llmcompressor--nvfp4--llama": "compressed-tensors",
    "torchao--mxfp4wo--llama": "torchao",
    "modelopt--fp8_default--qwen3moe": "FP8",
    "modelopt--mxfp8_default--llama": "MXFP8",
    "modelopt--w4a8_nvfp4_fp8--llama": "W4A8_NVFP4_FP8",
    "modelopt--int4_awq--llama": "W4A16_AWQ",
    "modelopt--mixed3--qwen3moe": "self_attn.k_proj.weight is F8_E4M3",
    "quark--int4_wo_32--llama": "int4",
    "quark-f2f--mxfp6_e3m2--llama": "fp6_e3m2",
    "quark-f2f--int4_fp8--llama": "fp8_e4m3",
}


@pytest.mark.parametrize("name", READABLE)
def test_every_tensor_decodes_to_the_recorded_float32_bytes(shared_data, name):
    oracle = json.loads((shared_data / "oracles" / name / "oracle.json").read_text())["tensors"]
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        assert checkpoint.problems == ()
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert {e.name for e in quantized} == set(oracle)
        for entry in quantized:
            value = checkpoint.read_dense(entry.name)
            assert list(value.shape) == oracle[entry.name]["shape"]
            digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
            assert digest == oracle[entry.name]["sha256_f32_le"], entry.name


@pytest.mark.parametrize(("name", "word"), UNREADABLE.items())
def test_what_is_not_understood_is_refused_by_name(shared_data, name, word):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(shared_data / "oracles" / name)
    assert word in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    ("source", "oracle", "format", "dialect", "shared"),
    [
        ("qwen3moe", "modelopt--nvfp4_default--qwen3moe", "nvfp4", "modelopt", True),
        ("llama", "modelopt--w4a16_nvfp4--llama", "nvfp4", "modelopt", True),
        ("llama", "quark--nvfp4--llama", "nvfp4", "modelopt", True),
        ("llama", "quark--mxfp4--llama", "mxfp4", "quark", True),
        ("llama", "quark-f2f--mxfp4--llama", "mxfp4", "quark", True),
    ],
)
def test_our_conversion_of_the_same_source_equals_the_producers(
    shared_data, tmp_path, source, oracle, format, dialect, shared
):
    """Same tensors quantized, same globals, same values; block scales too, but for all-zero blocks (Quark: byte 1)."""
    quantize_checkpoint(
        shared_data / "oracles" / f"source--{source}",
        tmp_path / "q",
        format=format,
        dialect=dialect,
        shared_globals=shared,
    )
    with open_checkpoint(tmp_path / "q") as ours, open_checkpoint(shared_data / "oracles" / oracle) as theirs:
        for entry in theirs.entries():
            a, b = ours.read(entry.name), theirs.read(entry.name)
            if not entry.quantized:
                assert torch.equal(a, b), entry.name
                continue
            assert isinstance(a, QuantizedTensor)
            assert isinstance(b, QuantizedTensor)
            assert torch.equal(a.dequantize(), b.dequantize()), entry.name
            if a.global_scale is not None:
                assert torch.equal(a.global_scale, b.global_scale), entry.name
            live = b.dequantize().unflatten(-1, (-1, b.spec.block)).abs().amax(-1) > 0
            assert torch.equal(a.block_scales.view(torch.uint8)[live], b.block_scales.view(torch.uint8)[live])


def test_written_config_matches_the_producers(shared_data, tmp_path):
    for source, oracle, format, dialect in (
        ("llama", "modelopt--w4a16_nvfp4--llama", "nvfp4", "modelopt"),
        ("llama", "quark--mxfp4--llama", "mxfp4", "quark"),
    ):
        target = tmp_path / dialect
        quantize_checkpoint(shared_data / "oracles" / f"source--{source}", target, format=format, dialect=dialect)
        ours, theirs = (
            json.loads((folder / "config.json").read_text())["quantization_config"]
            for folder in (target, shared_data / "oracles" / oracle)
        )
        assert ours.keys() == theirs.keys()
        if dialect == "modelopt":
            assert ours == theirs
            side = (folder / "hf_quant_config.json" for folder in (target, shared_data / "oracles" / oracle))
            first, second = (json.loads(file.read_text()) for file in side)
            assert first == second
        else:
            spec = ours["global_quant_config"]["weight"]
            assert spec.items() <= theirs["global_quant_config"]["weight"].items()


@pytest.mark.parametrize("name", READABLE)
def test_real_exports_lint_clean_but_for_their_known_faults(shared_data, name):
    """ModelOpt's all-zero matrices really are NaN; Quark's file-to-file export really has unequal fused globals."""
    known = {
        "modelopt--nvfp4_default--llamazero": {"scale-nan", "global-scale-range", "dead-tensor"},
        "quark-f2f--nvfp4--qwen3moe": {"global-scale-mismatch"},
    }
    assert {f.check for f in lint_checkpoint(shared_data / "oracles" / name).findings} == known.get(name, set())


def test_every_published_config_is_parsed_or_refused_by_value(shared_data, tmp_path):
    outcomes = {}
    for file in sorted((shared_data / "metadata").glob("*config*.json")):
        path = tmp_path / file.stem
        path.mkdir()
        side = "hf_quant_config" in file.name
        (path / ("hf_quant_config.json" if side else "config.json")).write_text(file.read_text())
        config = {} if side else json.loads(file.read_text())
        folder = Folder(path=path, tensors={}, config=config, files=(), headers={})
        try:
            declaration = choose_dialect(folder).declare(folder)
        except CheckpointError as error:
            outcomes[file.stem] = f"{error.message} {error.fix}"
            continue
        outcomes[file.stem] = declaration.algorithm or "plain"
        if file.stem == "nvidia--Kimi-K2.6-NVFP4_config":
            layer = "language_model.model.layers.5."
            assert declaration.expects_quantized(layer + "mlp.experts.383.down_proj")
            assert not declaration.expects_quantized(layer + "self_attn.o_proj")
            assert not declaration.expects_quantized(layer + "mlp.shared_experts.up_proj")
            assert not declaration.expects_quantized("language_model.lm_head")
    assert outcomes["nvidia--Kimi-K2.6-NVFP4_config"] == "NVFP4"
    assert outcomes["nvidia--DeepSeek-V3.1-NVFP4_hf_quant_config"] == "NVFP4"
    assert outcomes["amd--DeepSeek-V3.2-mxfp4_quark_quantization_config"] == "MXFP4"
    assert outcomes["nvidia--Qwen3.6-27B-NVFP4_config"] == "MIXED_PRECISION"
    assert outcomes["nvidia--DeepSeek-V3.1-NVFP4_config"] == "plain"  # the producer left it out; the side file has it
    assert "quant_method is 'mxfp4'" in outcomes["openai--gpt-oss-20b_config"]
    assert "quant_method is 'compressed-tensors'" in outcomes["moonshotai--Kimi-K2.5_config"]
    assert "quant_method is 'fp8'" in outcomes["deepseek-ai--DeepSeek-V3_config"]
