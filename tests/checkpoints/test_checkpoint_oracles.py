"""Real exports of the producers' tools, where WORKBENCH_SHARED_DATA holds them (see its oracles/README)."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.checkpoints.lint import lint_checkpoint
from workbench.formats import QuantizedTensor

# name -> the formats of its quantized tensors
ORACLES = {
    "llmcompressor--fp8_block--llama": {"fp8_block"},
    "llmcompressor--mixed--qwen3moe": {"fp8_channel", "nvfp4"},
    "llmcompressor--mxfp4--llama": {"mxfp4"},
    "llmcompressor--nvfp4--llama": {"nvfp4"},
    "llmcompressor--nvfp4a16--qwen3moe": {"nvfp4"},
    "llmcompressor--w4a16--llama": {"int4_group"},
    "llmcompressor--w4a16g32asym--llama": {"int4_group"},
    "llmcompressor--w8a8--llama": {"int8_channel"},
    "modelopt--fp8_2d_blockwise_weight_only--llama": {"fp8_block"},
    "modelopt--fp8_default--qwen3moe": {"fp8_tensor"},
    "modelopt--int4_awq--llama": {"int4_group"},
    "modelopt--kvfp8--llama": {"nvfp4"},
    "modelopt--mixed3--qwen3moe": {"fp8_tensor", "nvfp4"},
    "modelopt--mxfp4_default--llama": {"mxfp4"},
    "modelopt--mxfp8_default--llama": {"mxfp8_e4m3"},
    "modelopt--nvfp4_default--llamazero": {"nvfp4"},
    "modelopt--nvfp4_default--qwen3moe": {"nvfp4"},
    "modelopt--w4a16_nvfp4--llama": {"nvfp4"},
    "modelopt--w4a8_nvfp4_fp8--llama": {"nvfp4_w4a8"},
    "quark--int4_wo_32--llama": {"int4_group"},
    "quark--mxfp4--llama": {"mxfp4"},
    "quark--nvfp4--llama": {"nvfp4"},
    "quark-f2f--int4_fp8--llama": {"int4_channel"},
    "quark-f2f--int4_wo_32--llama": {"int4_group"},
    "quark-f2f--mxfp4--llama": {"mxfp4"},
    "quark-f2f--mxfp6_e3m2--llama": {"mxfp6_e3m2"},
    "quark-f2f--nvfp4--qwen3moe": {"nvfp4"},
    "torchao--mxfp4wo--llama": {"mxfp4"},
}
MODELOPT = [name for name in ORACLES if name.startswith("modelopt")]
WRITABLE = [name for name in MODELOPT if ORACLES[name] <= set(DIALECTS["modelopt"].writes)]


def sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", ORACLES)
def test_every_tensor_decodes_to_the_recorded_bytes(shared_data, name):
    """To the float32 values; a tool that itself rounds to bf16 is equalled after that rounding. Without the scale of
    the layer's input, as the tools decode."""
    recorded = json.loads((shared_data / "oracles" / name / "oracle.json").read_text())
    oracle, rounds = recorded["tensors"], recorded["tool_output_is_bf16_representable"]
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        assert checkpoint.declaration.conflicts == ()
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert {e.name for e in quantized} == set(oracle)
        assert {e.format for e in quantized} == ORACLES[name]
        for entry in quantized:
            q = checkpoint.read(entry.name)
            assert isinstance(q, QuantizedTensor)
            values = q.dequantize()
            assert list(values.shape) == oracle[entry.name]["shape"]
            if rounds:
                assert sha256(values.bfloat16().float()) == oracle[entry.name]["sha256_tool"], entry.name
            else:
                assert sha256(values) == oracle[entry.name]["sha256_f32_le"], entry.name


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_configs_agree_with_their_tensors(shared_data, name):
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        assert checkpoint.problems == ()
        for entry in checkpoint.entries():
            if entry.quantized or entry.projection.endswith("_proj"):
                format = entry.format if entry.quantized else ""
                assert checkpoint.declaration.format_of(entry.module) == format, entry.name


@pytest.mark.parametrize("name", WRITABLE)
def test_modelopt_tensors_are_written_as_they_were(shared_data, name):
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        for entry in checkpoint.entries():
            if not entry.quantized:
                continue
            q = checkpoint.read(entry.name)
            parts = DIALECTS["modelopt"].disassemble(entry.name, q)
            assert set(parts) == {part.name for part in checkpoint.parts(entry.name).values()}
            for stored, part in parts.items():
                theirs = checkpoint.folder.load(stored)
                assert (part.dtype, part.shape) == (theirs.dtype, theirs.shape), stored
                assert torch.equal(part.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), stored


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


PARALLEL, TOTAL_SIZE = ("info", "tensor-parallel"), ("warning", "index-vs-files")
# What is true of each real export; every other one is clean. Its matrices have 384 columns or rows, which are three
# blocks of 128: no usual tensor-parallel size splits them. Quark's file-to-file exports have an index whose total_size
# counts more than the tensors.
FINDINGS = {
    "llmcompressor--fp8_block--llama": [PARALLEL, PARALLEL],
    "llmcompressor--w4a16--llama": [PARALLEL],
    "modelopt--fp8_2d_blockwise_weight_only--llama": [PARALLEL, PARALLEL],
    "modelopt--int4_awq--llama": [PARALLEL],
    # q_proj of layer 1 stayed BF16, its partners are FP8.
    "modelopt--mixed3--qwen3moe": [("error", "exclude-conflict")],
    # Two all-zero matrices are NaN under a global scale of 0; a third, whose partners are not zero, is just zero.
    "modelopt--nvfp4_default--llamazero": [
        ("error", "scale-nan"),
        ("error", "global-scale-range"),
        ("error", "dead-tensor"),
    ],
    "quark-f2f--int4_fp8--llama": [TOTAL_SIZE],
    # The config says reorder, the words are packed in sequence.
    "quark-f2f--int4_wo_32--llama": [TOTAL_SIZE, ("warning", "config-conflict")],
    "quark-f2f--mxfp4--llama": [TOTAL_SIZE],
    "quark-f2f--mxfp6_e3m2--llama": [TOTAL_SIZE],
    # Globals are not shared over q/k/v and gate/up; the config asks for static activation scales, none is stored.
    "quark-f2f--nvfp4--qwen3moe": [
        ("error", "global-scale-mismatch"),
        TOTAL_SIZE,
        ("warning", "input-scale-missing"),
    ],
}


@pytest.mark.parametrize("name", [*ORACLES, "source--llama", "source--qwen3moe"])
def test_real_exports_lint_with_exactly_what_is_true_of_them(shared_data, name):
    report = lint_checkpoint(shared_data / "oracles" / name)
    assert [(f.severity, f.check) for f in report.findings] == FINDINGS.get(name, [])
    assert report.scale_bytes_read == report.scale_bytes


def test_what_lint_says_of_an_all_zero_matrix_by_modelopt(shared_data):
    findings = lint_checkpoint(shared_data / "oracles" / "modelopt--nvfp4_default--llamazero").findings
    nan = {"model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"}
    assert [set(f.tensors) for f in findings] == [nan, nan, {"model.layers.0.self_attn.v_proj.weight"}]


def test_what_lint_says_of_globals_that_quark_does_not_share(shared_data):
    """One global for q, k and v of layer 1: the figures follow from the three scales and the parts' powers."""
    path = shared_data / "oracles" / "quark-f2f--nvfp4--qwen3moe"
    finding = lint_checkpoint(path).findings[0]
    assert "10 of 10 fused groups differ" in finding.message
    assert finding.count == 10
    with open_checkpoint(path) as checkpoint:
        parts = [checkpoint.read(f"model.layers.1.self_attn.{p}_proj.weight") for p in "qkv"]
    powers = [float(q.dequantize().double().square().sum()) for q in parts]
    scales = [float(q.global_scale) for q in parts]
    for word, used in (("max-merge", max(scales)), ("q_proj-only", scales[0]), ("min-merge", min(scales))):
        error = sum(p * (used / s - 1) ** 2 for p, s in zip(powers, scales, strict=True))
        assert f"{word} {10 * math.log10(sum(powers) / error):.1f} dB" in finding.message
