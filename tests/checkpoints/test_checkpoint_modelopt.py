"""The ModelOpt dialect against what ModelOpt 0.47.0 wrote (golden_modelopt.*): reading, faults, configs."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
from modelopt_files import GOLDEN, K_PROJ, W, declare, golden, refused, write, write_golden

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

# preset -> weights' format, what activations are rounded to
PRESETS = {
    "NVFP4_DEFAULT_CFG": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4_CFG": ("nvfp4", ""),
    "W4A8_NVFP4_FP8_CFG": ("nvfp4_w4a8", "fp8_tensor"),
    "MXFP4_DEFAULT_CFG": ("mxfp4", "mxfp4"),
    "W4A8_MXFP4_FP8_CFG": ("mxfp4", "fp8_tensor"),
    "MXFP8_DEFAULT_CFG": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "FP8_DEFAULT_CFG": ("fp8_tensor", "fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8_channel", "fp8_channel"),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": ("fp8_block", ""),
    "INT4_AWQ_CFG": ("int4_group", ""),
    "W4A8_AWQ_BETA_CFG": ("int4_group", "fp8_tensor"),
    "INT8_SMOOTHQUANT_CFG": ("int8_channel", "int8_tensor"),
    "INT8_WEIGHT_ONLY_CFG": ("int8_channel", ""),
}


# ---- Reading what the tool wrote -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_decodes_as_the_tool_decodes_it(tmp_path, preset):
    facts, stored = GOLDEN[preset], golden(preset)
    with open_checkpoint(write_golden(tmp_path / "m", preset)) as checkpoint:
        declared = checkpoint.declaration
        assert (declared.format, declared.activations) == PRESETS[preset]
        assert declared.conflicts == ()
        assert [p for p in checkpoint.problems if p.severity == "error"] == []
        for name, digest in facts["sha256"].items():
            q = checkpoint.read(name)
            assert isinstance(q, QuantizedTensor)
            assert q.format == declared.format == declared.format_of(name.removesuffix(".weight"))
            values = (q.dequantize() + 0.0).contiguous().numpy()
            assert hashlib.sha256(values.tobytes()).hexdigest() == digest
            stem = name.removesuffix("weight")
            for part, value in (("input_scale", q.input_scale), ("pre_quant_scale", q.pre_quant_scale)):
                assert (value is not None) == (stem + part in stored)
                if value is not None:
                    assert torch.equal(value, stored[stem + part].float())


def test_pre_quant_scale_is_multiplied_into_the_effective_weight(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    with open_checkpoint(write_golden(tmp_path / "m", "INT4_AWQ_CFG")) as checkpoint:
        q = checkpoint.read(name)
        smoothing = golden("INT4_AWQ_CFG")["model.layers.0.mlp.down_proj.pre_quant_scale"].float()
        assert torch.equal(checkpoint.read_dense(name), q.dequantize() * smoothing)
        assert not torch.equal(checkpoint.read_dense(name), q.dequantize())


def test_the_second_scale_of_w4a8_awq_is_no_part_of_the_weight(tmp_path):
    """Its weight_scale_2 is amax / 448 of the decoded weight: multiplied in, values would be 1000 times too small."""
    with open_checkpoint(write_golden(tmp_path / "m", "W4A8_AWQ_BETA_CFG")) as checkpoint:
        amax = checkpoint.read(W).dequantize().abs().amax()
        assert float(golden("W4A8_AWQ_BETA_CFG")[W + "_scale_2"]) == pytest.approx(float(amax) / 448, rel=0.1)
        assert [p.severity for p in checkpoint.problems] == ["warning"]
        assert "2 such tensors" in checkpoint.problems[0].message


def test_int4_rows_in_a_byte(tmp_path):
    """Byte 0x8F in row 0: row 0 holds 0xF = -1, row 1 holds 0x8 = -8."""
    weight = torch.zeros(1, 32, dtype=torch.uint8)
    weight[0, 1] = 0x8F
    scales = torch.tensor([[0.5], [0.25]])
    path = write(tmp_path / "m", {W: weight, W + "_scale": scales}, {"quant_algo": "W4A16_AWQ"})
    with open_checkpoint(path) as checkpoint:
        expected = torch.zeros(2, 32)
        expected[:, 1] = torch.tensor([-0.5, -2.0])
        assert torch.equal(checkpoint.read_dense(W), expected)


@pytest.mark.parametrize("shape", [(3, 1, 2, 1), (1, 3, 2), (3, 2)])
def test_fp8_blocks_in_every_shape_of_scales(tmp_path, shape):
    weight = torch.ones(320, 256).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 7.0)
    path = write(tmp_path / "m", {W: weight, W + "_scale": scales.reshape(shape)}, {"quant_algo": "fp8_pb_wo"})
    with open_checkpoint(path) as checkpoint:
        q = checkpoint.read(W)
        assert (q.format, q.block) == ("fp8_block", (128, 128))
        assert q.dequantize()[[0, 127, 128, 319]][:, [0, 128]].tolist() == [[1, 2], [1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(("rows", "scales", "block"), [(576, 5, 128), (1000, 8, 128), (448, 4, 128), (256, 4, 64)])
def test_block_size_is_no_quotient(tmp_path, rows, scales, block):
    weight = torch.ones(rows, 128).to(torch.float8_e4m3fn)
    values = torch.arange(1.0, scales + 1)
    path = write(tmp_path / "m", {W: weight, W + "_scale": values[:, None].clone()}, {"quant_algo": "FP8_BLOCK_SCALES"})
    with open_checkpoint(path) as checkpoint:
        expected = values.repeat_interleave(block)[:rows]
        assert torch.equal(checkpoint.read_dense(W)[:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_bytes_are_exponents_in_either_dtype(tmp_path, dtype):
    weight = torch.ones(2, 32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[118], [0]], dtype=torch.uint8).view(dtype)
    path = write(tmp_path / "m", {W: weight, W + "_scale": scales}, {"quant_algo": "MXFP8"})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read_dense(W)[:, 0].tolist() == [2.0**-9, 2.0**-127]


def test_an_all_zero_matrix_is_read_as_the_tool_decodes_it_and_reported(tmp_path):
    """ModelOpt's export of one: weight_scale_2 = 0 and NaN block scales."""
    nvfp4 = {
        W: torch.zeros(16, 16, dtype=torch.uint8),
        W + "_scale": torch.full((16, 2), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn),
        W + "_scale_2": torch.tensor(0.0),
    }
    path = write(tmp_path / "m", nvfp4, {"quant_algo": "W4A16_NVFP4"})
    with open_checkpoint(path) as checkpoint:
        assert bool(checkpoint.read_dense(W).isnan().all())
    assert {"scale-nan", "global-scale-range"} <= {f.check for f in lint_checkpoint(path).findings}


def test_kv_scales_stay_tensors_of_their_own(tmp_path):
    scales = {f"{K_PROJ}.k_scale": torch.tensor(0.02), "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.01)}
    facts = GOLDEN["FP8_DEFAULT_CFG"]
    block = {**facts["quantization_config"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    with open_checkpoint(write(tmp_path / "m", golden("FP8_DEFAULT_CFG") | scales, block)) as checkpoint:
        assert checkpoint.declaration.kv_cache == "FP8"
        assert checkpoint.read(f"{K_PROJ}.k_scale") == torch.tensor(0.02)
        assert {e.format for e in checkpoint.entries() if "scale" in e.name} == {"f32"}


def test_the_tensors_alone_are_recognized(tmp_path):
    for preset in ("NVFP4_DEFAULT_CFG", "INT4_AWQ_CFG"):
        with open_checkpoint(write(tmp_path / preset, golden(preset))) as checkpoint:
            assert checkpoint.dialect == "modelopt"
            assert checkpoint.entry(W).format == PRESETS[preset][0]


# ---- Refusing --------------------------------------------------------------------------------------------------------


def test_half_the_scales_are_a_format_only_where_the_config_says_so(tmp_path):
    """A damaged NVFP4 export (scales of half size, without meaning) has the shapes of W4A8_NVFP4_FP8."""
    tensors = golden("W4A8_NVFP4_FP8_CFG")
    block = GOLDEN["NVFP4_DEFAULT_CFG"]["quantization_config"]
    refused(write(tmp_path / "damaged", tensors, block), W + "_scale", "[16, 4], expected [16, 8]")
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {K_PROJ: {"quant_algo": "W4A8_NVFP4_FP8"}}}
    with open_checkpoint(write(tmp_path / "mixed", tensors, mixed)) as checkpoint:
        assert checkpoint.entry(W).format == "nvfp4_w4a8"


@pytest.mark.parametrize("by_tensors", [True, False])
def test_svdquant_is_refused_with_its_reason(tmp_path, by_tensors):
    tensors = golden("NVFP4_DEFAULT_CFG")
    if by_tensors:
        tensors |= {f"{K_PROJ}.svdquant_lora_a": torch.zeros(4, 128), f"{K_PROJ}.svdquant_lora_b": torch.zeros(16, 4)}
    path = write(tmp_path / "m", tensors, {"quant_algo": "NVFP4" if by_tensors else "NVFP4_SVD"})
    refused(path, W, "NVFP4_SVD", "svdquant_lora_a")


def _pop(suffix):
    return lambda t: t.pop(W + suffix)


def _set(suffix, value):
    return lambda t: t.update({W + suffix: value})


@pytest.mark.parametrize(
    ("preset", "damage", "words"),
    [
        ("FP8_DEFAULT_CFG", _pop("_scale"), ("weight_scale is in no shard",)),
        ("NVFP4_DEFAULT_CFG", _pop("_scale_2"), ("weight_scale_2 is in no shard",)),
        ("FP8_DEFAULT_CFG", _set("_scale_2", torch.tensor(1.0)), ("fp8_tensor has no global scale",)),
        ("FP8_DEFAULT_CFG", _set("_scale", torch.ones(7)), ("[7], expected",)),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", _set("_scale", torch.ones(3, 3)), ("[3, 3], expected",)),
        ("MXFP8_DEFAULT_CFG", _set("_scale", torch.zeros(16, 5, dtype=torch.uint8)), ("[16, 5], expected",)),
        ("INT4_AWQ_CFG", _set("_scale", torch.ones(16, 3)), ("[16, 3], expected [16, K / group]",)),
        ("INT4_AWQ_CFG", _set("_scale", torch.ones(8, 1)), ("weight_scale F32 [8, 1]", "expected packed U8")),
        ("INT8_WEIGHT_ONLY_CFG", _set("_scale", torch.ones(16, 4)), ("[16, 4], expected [] or [16]",)),
        ("NVFP4_DEFAULT_CFG", _set("_scale_2", torch.ones(2)), ("F32 [2], expected one F32 value",)),
        ("FP8_DEFAULT_CFG", _set("", torch.ones(2, 16, 128).to(torch.float8_e4m3fn)), ("expected a matrix",)),
    ],
)
def test_what_is_no_format_is_refused_by_name(tmp_path, preset, damage, words):
    tensors = golden(preset)
    damage(tensors)
    refused(write(tmp_path / "m", tensors, GOLDEN[preset]["quantization_config"]), K_PROJ, *words)


def test_a_pre_quant_scale_of_another_length_is_refused(tmp_path):
    tensors = golden("NVFP4_DEFAULT_CFG") | {f"{K_PROJ}.pre_quant_scale": torch.ones(16)}
    refused(write(tmp_path / "m", tensors, {"quant_algo": "NVFP4_AWQ"}), "pre_quant_scale", "[16]", "128 inputs")


# ---- The config ------------------------------------------------------------------------------------------------------

NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("block", "side"),
    [
        (None, {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": NVFP4}),
        (None, NVFP4),  # flat
        (None, {"producer": {"name": "shared-scales-nvfp4"}, "quantization": NVFP4}),
        ({"quant_method": "modelopt", "quantization": NVFP4}, None),
        ({"quant_algo": "nvfp4", "kv_cache_scheme": "fp8", "ignore": ["lm_head"]}, None),  # without quant_method
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
                "ignore": ["lm_head"],
            },
            {"quantization": NVFP4},
        ),
        ({"quant_method": "modelopt"}, {"quantization": NVFP4}),  # config.json names the producer only
    ],
)
def test_the_same_claim_in_every_place(tmp_path, block, side):
    declared = declare(tmp_path, block, side)
    assert (declared.algorithm, declared.format, declared.activations) == ("NVFP4", "nvfp4", "nvfp4")
    assert (declared.kv_cache, declared.excludes) == ("FP8", ("lm_head",))
    assert declared.expects_quantized(K_PROJ)
    assert not declared.expects_quantized("lm_head")


def test_shortened_side_file(tmp_path):
    declared = declare(tmp_path, None, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    assert (declared.format, declared.kv_cache, declared.excludes) == ("fp8_tensor", "FP8", ())


def test_files_that_disagree_are_conflicts_and_config_json_is_taken(tmp_path):
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"], "producer": {"version": "0.37.0"}}
    side = {
        "producer": {"version": "0.44.0"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["b", "c"]},
    }
    declared = declare(tmp_path, block, side)
    assert (declared.format, declared.excludes) == ("nvfp4", ("a",))
    text = "\n".join(declared.conflicts)
    for words in (
        "quant_algo NVFP4",
        "says KV cache unquantized, hf_quant_config.json says FP8",
        "excludes a,",
        "excludes b (2 such patterns)",
        "0.37.0",
    ):
        assert words in text
    assert len(declared.conflicts) == 5


def test_weight_only_by_its_groups(tmp_path):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    declared = declare(tmp_path, {"quant_algo": "NVFP4", "config_groups": {"group_0": group}})
    assert (declared.format, declared.activations) == ("nvfp4", "")


MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
}


def test_mixed_precision_by_container_and_what_is_not_listed_is_dense(tmp_path):
    declared = declare(tmp_path, MIXED)
    assert declared.format_of("model.layers.0.mlp.experts.3.up_proj") == "nvfp4"
    assert declared.format_of("model.layers.0.self_attn.q_proj") == "fp8_tensor"
    assert declared.format_of("model.layers.0.self_attn.k_proj") == ""
    assert not declared.expects_quantized("model.layers.1.self_attn.q_proj")
    assert declared.weight_only == {"model.layers.1.mlp.experts"}


def test_groups_that_contradict_the_listed_layers(tmp_path):
    group = {
        "input_activations": {"num_bits": 4},
        "weights": {"num_bits": 4},
        "targets": ["model.layers.1.mlp.experts"],
    }
    conflicts = declare(tmp_path, {**MIXED, "config_groups": {"group_1": group}}).conflicts
    assert len(conflicts) == 1
    assert "group_1" in conflicts[0]
    assert "W4A16_NVFP4 for model.layers.1.mlp.experts" in conflicts[0]


def test_listed_layers_that_differ_between_the_files(tmp_path):
    layers = {**MIXED["quantized_layers"], "model.layers.1.mlp.experts": {"quant_algo": "NVFP4"}}
    declared = declare(tmp_path, MIXED, {"quantization": {**MIXED, "quantized_layers": layers}})
    assert len(declared.conflicts) == 1
    assert "model.layers.1.mlp.experts different formats" in declared.conflicts[0]


def test_wildcards_without_a_dot(tmp_path):
    declared = declare(tmp_path, {"quant_algo": "NVFP4", "ignore": ["model.layers.0.self_attn*", "vision_tower"]})
    assert not declared.expects_quantized("model.layers.0.self_attn.q_proj")
    assert not declared.expects_quantized("vision_tower.blocks.0.attn")
    assert declared.expects_quantized("model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"quant_algo": "INT9"}, "'INT9'"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W2"}}}, "'W2'"),
        ({"quant_algo": "NVFP4", "quantized_layers": ["a"]}, "quantized_layers"),
        ({"quant_algo": "NVFP4", "quantized_layers": {"a": 3}}, "quantized_layers"),
        ({"quant_algo": "NVFP4", "config_groups": [1]}, "config_groups"),
        ({"quant_algo": "NVFP4", "config_groups": {"g": {"targets": "Linear"}}}, "targets"),
        ({"quant_algo": "NVFP4", "ignore": "lm_head"}, "ignore"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": 8}, "KV cache"),
    ],
)
def test_a_broken_config_is_refused_by_key(tmp_path, block, word):
    with pytest.raises(CheckpointError, match=word):
        declare(tmp_path, {"quant_method": "modelopt", **block})


def test_22000_listed_layers_are_fast(tmp_path):
    experts = [
        f"language_model.model.layers.{layer}.block_sparse_moe.experts.{e}.w{i}"
        for layer in range(57)
        for e in range(128)
        for i in (1, 2, 3)
    ]
    others = [f"language_model.model.layers.{layer}.self_attn.indexer{i}" for layer in range(57) for i in range(20)]
    started = time.perf_counter()
    block = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {m: {"quant_algo": "NVFP4"} for m in experts}}
    declared = declare(tmp_path, block, {"quantization": block})
    assert all(declared.format_of(m) == "nvfp4" for m in experts)
    assert not any(declared.expects_quantized(m) for m in others)
    assert time.perf_counter() - started < 5
