"""Faults reported in public trackers, with their smallest inputs and their right results, where no other test has them.

A name ends in the thread's repository and number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import write_checkpoint
from workbench.kernels import reference

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.lint_facts import read_facts
from workbench.checkpoints.match import matches_any, unmatched_patterns
from workbench.errors import CheckpointError
from workbench.formats import get_format, quantize

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
}
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write(path: Path, block: dict[str, object], *shards: dict[str, torch.Tensor], **config: object) -> Path:
    """A checkpoint of these shards; with an index where there are several."""
    path.mkdir()
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, path / file)
        weight_map.update(dict.fromkeys(tensors, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "tiny", **config, "quantization_config": block}
    (path / "config.json").write_text(json.dumps(config))
    return path


def packed(module: str, **scalars: float) -> dict[str, torch.Tensor]:
    """An NVFP4 matrix as compressed-tensors stores it: every code 1.0, every block scale 448."""
    return {
        f"{module}.weight_packed": torch.full((16, 8), 0x22, dtype=torch.uint8),
        f"{module}.weight_scale": torch.full((16, 1), 448.0).to(torch.float8_e4m3fn),
        **{f"{module}.{name}": torch.tensor([value]) for name, value in scalars.items()},
    }


def test_the_largest_divisor_is_the_smallest_multiplier_vllm_47515(tmp_path):
    """Divisors 5000 (gate) and 500 (up): what loses no range is 1 / 500, and taking the largest divisor shrinks up."""
    mlp = "model.layers.0.mlp."
    tensors = packed(mlp + "gate_proj", weight_global_scale=5000.0) | packed(mlp + "up_proj", weight_global_scale=500.0)
    path = write(tmp_path / "pair", COMPRESSED, tensors)
    with open_checkpoint(path) as checkpoint:
        scales = {f.entry.projection: f.global_scale for f in read_facts(checkpoint).matrices}
        assert checkpoint.read_dense(mlp + "up_proj.weight")[0, 0].item() == pytest.approx(0.896)
    assert scales == pytest.approx({"gate_proj": 2e-4, "up_proj": 2e-3})
    (finding,) = [f for f in lint_checkpoint(path).findings if f.check == "global-scale-mismatch"]
    assert "ratio 10" in finding.message


def test_zero_blocks_beside_a_small_global_never_become_nan_modelopt_1397():
    """Largest weight 3.0: a scale of 1.0 for a zero block, times 448 / (3 / 6), is 896 before the cast."""
    w = torch.zeros(1, 32)
    w[0, 16:] = 3.0
    for rule in get_format("nvfp4").rules:
        q = quantize(w, "nvfp4", rule.value)
        assert not bool(((q.block_scales.view(torch.uint8) & 0x7F) == 0x7F).any()), rule
        assert q.dequantize()[0, :16].tolist() == [0.0] * 16, rule
    assert reference.e4m3_round(torch.tensor([896.0, 464.0])).tolist() == [448.0, 448.0]


def test_where_a_block_scale_underflows_modelopt_1382(tmp_path):
    """9e-4 lies below 2^-10, the cut to 0; 1.1e-3 becomes 2^-9. A zero scale over live codes is counted."""
    scales = reference.e4m3_round(torch.tensor([9e-4, 2.0**-10, 1.1e-3])).to(torch.float8_e4m3fn)
    assert scales.view(torch.uint8).tolist() == [0, 0, 1]
    module = "model.layers.0.mlp.down_proj"
    tensors = packed(module, weight_global_scale=500.0)
    tensors[module + ".weight_scale"][:3, 0] = scales
    report = lint_checkpoint(write(tmp_path / "under", COMPRESSED, tensors))
    (finding,) = [f for f in report.findings if f.check == "scale-zero-or-negative"]
    assert (finding.severity, finding.message[:7]) == ("warning", "2 of 16")


def test_one_dead_experts_zero_does_not_become_infinite_tensorrt_llm_16447(tmp_path):
    """input_global_scale 3, 0 and 5: multipliers 1/3, 0 (flagged) and 1/5; the layer's largest is 1/3."""
    tensors: dict[str, torch.Tensor] = {}
    for expert, divisor in enumerate((3.0, 0.0, 5.0)):
        module = f"model.layers.0.mlp.experts.{expert}.down_proj"
        tensors |= packed(module, weight_global_scale=500.0, input_global_scale=divisor)
    path = write(tmp_path / "dead", COMPRESSED, tensors)
    with open_checkpoint(path) as checkpoint:
        scales = [f.input_scale for f in read_facts(checkpoint).matrices]
        read = [float(checkpoint.read(e.name).input_scale) for e in checkpoint.entries()]
    assert scales == read == [1 / 3, 0.0, 1 / 5]
    (finding,) = [f for f in lint_checkpoint(path).findings if f.check == "input-scale-missing"]
    assert finding.tensors == ("model.layers.0.mlp.experts.1.down_proj.weight",)


def test_small_block_scales_under_a_global_of_one_are_a_warning_vllm_34577(tmp_path):
    """Scales 2^-9 to 2^-7 are legal E4M3; one backend misreads them, so the file is not called corrupt."""
    module = "model.layers.0.mlp.down_proj"
    tensors = packed(module, weight_global_scale=1.0)
    tensors[module + ".weight_scale"] = torch.tensor([2.0**-9, 2.0**-8, 3 * 2.0**-9, 2.0**-7] * 4).to(
        torch.float8_e4m3fn
    )[:, None]
    path = write(tmp_path / "small", COMPRESSED, tensors)
    with open_checkpoint(path) as checkpoint:
        values = checkpoint.read_dense(module + ".weight")
    assert values[:4, 0].tolist() == [2.0**-9, 2.0**-8, 3 * 2.0**-9, 2.0**-7]
    assert [f.severity for f in lint_checkpoint(path).findings if f.check == "scale-subnormal"] == ["warning"]


def test_split_nibbles_of_ggml_read_linearly_are_another_weight_imp_567():
    """Codes 0 to 7, element j in the low nibble of byte j and j + 4 in the high one; no dialect here is packed so."""
    stored = torch.tensor([0x40, 0x51, 0x62, 0x73], dtype=torch.uint8)
    assert reference.unpack_fp4(stored).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.cat([stored & 0xF, stored >> 4]).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("values", "exact"), [([7, -7, 3], True), ([5, -2, 1], False), ([-8, 7, 0], False)], ids=["7", "5", "-8"]
)
def test_int4_again_is_exact_only_where_the_largest_is_7_llama_cpp_17064(values, exact):
    """Symmetric training never emits -8: with amax / 7, only a group that reaches 7 comes back as it was."""
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor(values, dtype=torch.float32)
    q = quantize(w, "int4_group", "amax", block=(1, 32))
    assert torch.equal(q.dequantize(), w) == exact


def test_weight_and_scale_in_two_shards_with_a_partial_block_gptqmodel_2875(tmp_path):
    """576 rows are four blocks of 128 and one of 64: rows 512 to 575 take the scale row 4."""
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = torch.ones(576, 256).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 11.0).reshape(5, 2)
    path = write(tmp_path / "two", BLOCK_FP8, {name: weight}, {name + "_scale_inv": scale})
    with open_checkpoint(path) as checkpoint:
        values = checkpoint.read_dense(name)
    assert values[511, [0, 128]].tolist() == [7.0, 8.0]
    assert values[512:, 0].unique().tolist() == [9.0]
    assert values[575, 255].item() == 10.0
    with pytest.raises(CheckpointError, match="no scale of it is in any shard"):
        open_checkpoint(write(tmp_path / "one", BLOCK_FP8, {name: weight}))


def test_surplus_scale_columns_are_an_error_and_not_cut_off_mcore_bridge_32(tmp_path):
    """258 columns have three blocks; two shards' halves of 129 gave four, whose third starts at column 129."""
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {name: torch.ones(128, 258).to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(1, 4)}
    path = write(tmp_path / "surplus", BLOCK_FP8, tensors)
    with pytest.raises(CheckpointError, match=r"\[1, 4\], expected \[1, 3\]"):
        open_checkpoint(path)
    assert [f.check for f in lint_checkpoint(path).errors] == ["scale-shape"]


def test_the_same_module_under_a_doubled_prefix_auto_round_2349(tmp_path):
    once = packed("m.lm.layers.0.q", weight_global_scale=500.0)
    twice = packed("m.lm.lm.layers.0.q", weight_global_scale=500.0)
    (finding,) = lint_checkpoint(write(tmp_path / "twice", COMPRESSED, once | twice)).errors
    assert (finding.check, finding.tensors) == ("duplicate-module", ("m.lm.lm.layers.0.q.weight",))


def test_a_wrappers_suffix_makes_no_dead_pattern_sglang_24929():
    patterns = ["a.q_proj.linear", "a.k_proj.linear", "a.v_proj.linear"]
    modules = ["a.q_proj", "a.k_proj", "a.v_proj"]
    assert all(matches_any(module, patterns) for module in modules)
    assert unmatched_patterns(patterns, modules) == []
    assert unmatched_patterns(["b.q_proj.linear", *patterns], modules) == ["b.q_proj.linear"]


def test_one_expert_excluded_makes_its_layer_mixed_sglang_39317(tmp_path):
    """What is excluded by name stays BF16 among quantized siblings: a fused layer cannot hold both."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{p}_proj.weight": torch.randn(32, 32, generator=generator).bfloat16()
        for e in range(4)
        for p in ("gate", "up", "down")
    }
    source = write_checkpoint(tmp_path / "moe", tensors, shards=1, num_hidden_layers=1)
    excluded = "model.layers.0.mlp.experts.0.down_proj"
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=[excluded])
    (finding,) = lint_checkpoint(tmp_path / "q").findings
    assert (finding.check, finding.tensors) == ("expert-suffix-sets", (excluded + ".weight",))
