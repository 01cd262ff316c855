"""AMD Quark's dialect: every stored form and every config.

golden_quark.*: weights packed and decoded by amd-quark 0.13's own quantizers (make_golden_quark.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quark_files import (
    BLOCK,
    FP8,
    GOLDEN,
    HERE,
    INT4,
    MXFP4,
    MXFP8_ROWS,
    QUARK,
    declare,
    quark_config,
    sha256,
    write,
)
from safetensors.torch import load_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import Declaration
from workbench.errors import CheckpointError
from workbench.formats import quantize

# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN)
def test_the_tools_own_weights_decode_to_its_own_values(case, tmp_path):
    tensors = {n: t for n, t in load_file(HERE / "golden_quark.safetensors").items() if n.startswith(case + ".")}
    config = quark_config(GOLDEN[case]["weight"], export={"pack_method": GOLDEN[case]["pack_method"]})
    with open_checkpoint(write(tmp_path, tensors, config)) as checkpoint:
        assert checkpoint.problems == ()
        (entry,) = checkpoint.entries()
        assert list(entry.shape) == GOLDEN[case]["shape"]
        assert entry.format == checkpoint.declaration.format_of(case)
        assert sha256(checkpoint.read_dense(entry.name)) == GOLDEN[case]["sha256_f32_le"]


ORACLES = {
    "quark--int4_wo_32--llama": "int4_group",
    "quark--mxfp4--llama": "mxfp4",
    "quark--nvfp4--llama": "nvfp4",
    "quark-f2f--int4_fp8--llama": "int4_channel",
    "quark-f2f--int4_wo_32--llama": "int4_group",
    "quark-f2f--mxfp4--llama": "mxfp4",
    "quark-f2f--mxfp6_e3m2--llama": "mxfp6_e3m2",
    "quark-f2f--nvfp4--qwen3moe": "nvfp4",
}


@pytest.mark.parametrize(("name", "format"), ORACLES.items())
def test_every_export_decodes_to_the_recorded_float32_bytes(shared_data, name, format):
    recorded = json.loads((shared_data / "oracles" / name / "oracle.json").read_text())["tensors"]
    with open_checkpoint(shared_data / "oracles" / name) as checkpoint:
        assert not any(p.severity == "error" for p in checkpoint.problems)
        conflicts = [p.message for p in checkpoint.problems if p.check == "config-conflict"]
        assert len(conflicts) == (1 if name == "quark-f2f--int4_wo_32--llama" else 0)
        assert all("14 tensors" in message and "in sequence" in message for message in conflicts)
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert {e.name for e in quantized} == set(recorded)
        for entry in quantized:
            assert entry.format == format == checkpoint.declaration.format_of(entry.module)
            assert sha256(checkpoint.read_dense(entry.name)) == recorded[entry.name]["sha256_f32_le"], entry.name
        assert not checkpoint.declaration.expects_quantized("lm_head")


def test_words_in_sequence_and_in_awq_order_hold_the_same_weight(tmp_path):
    """FIELD_CASES 19: eight values packed linearly under a config that says reorder."""
    values = torch.arange(-8, 8).repeat(4, 1).T.contiguous()  # [N = 16, K = 4]
    nibbles = (values.T & 0xF).unflatten(-1, (2, 8))
    shifts = torch.arange(0, 32, 4)
    sequential, awq = (
        ((nibbles[..., order] << shifts).sum(-1)).int() for order in ([*range(8)], [0, 2, 4, 6, 1, 3, 5, 7])
    )
    spec = {**INT4, "group_size": 4}
    scale = torch.ones(16, 1)
    file_to_file = {"a.weight": sequential, "a.weight_scale": scale}
    in_memory = {
        "a.weight": awq,
        "a.weight_scale": scale.T,
        "a.weight_zero_point": torch.zeros(1, 2, dtype=torch.int32),
    }
    for number, tensors in enumerate((file_to_file, in_memory)):
        with open_checkpoint(write(tmp_path / str(number), tensors, quark_config(spec))) as checkpoint:
            assert torch.equal(checkpoint.read_dense("a.weight"), values.float())
            assert [p.check for p in checkpoint.problems] == ["config-conflict"] * (number == 0)


def test_a_square_scale_is_read_by_whether_there_are_zero_points(tmp_path):
    scale = torch.arange(1.0, 65.0).reshape(8, 8)  # N = 8, K = 16 in groups of 2
    words = torch.full((16, 1), 0x11111111, dtype=torch.int32)
    points = {"a.weight_zero_point": torch.zeros(8, 1, dtype=torch.int32)}
    for number, (extra, expected) in enumerate((({}, scale), (points, scale.T))):
        path = write(tmp_path / str(number), {"a.weight": words, "a.weight_scale": scale, **extra}, quark_config(INT4))
        with open_checkpoint(path) as checkpoint:
            assert torch.equal(checkpoint.read_dense("a.weight"), expected.repeat_interleave(2, 1))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_mxfp8_in_blocks_of_several_rows(tmp_path, dtype):
    """One scale row for four weight rows, the last block partial: as vLLM repeats them."""
    codes = (torch.arange(10 * 64).reshape(10, 64) % 100 / 16).to(torch.float8_e4m3fn)
    powers = torch.tensor([[120, 121], [122, 123], [124, 125]], dtype=torch.uint8)
    path = write(tmp_path, {"a.weight": codes, "a.weight_scale": powers.view(dtype)}, quark_config(MXFP8_ROWS))
    with open_checkpoint(path) as checkpoint:
        q = checkpoint.read("a.weight")
        assert (q.format, q.block) == ("mxfp8_e4m3", (4, 32))
        scales = (2.0 ** (powers.float() - 127)).repeat_interleave(4, 0)[:10].repeat_interleave(32, 1)
        assert torch.equal(q.dequantize(), codes.float() * scales)


def test_fp8_in_partial_blocks_and_powers_of_two_take_the_configs_block(tmp_path):
    """FIELD_CASES 25, 26: 576 rows have five scale rows, of 128 rows each but the last."""
    codes = torch.ones(576, 256).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 11.0).reshape(5, 2)
    path = write(tmp_path / "f32", {"a.weight": codes, "a.weight_scale": scale}, quark_config(BLOCK))
    with open_checkpoint(path) as checkpoint:
        values = checkpoint.read_dense("a.weight")
        assert values[511, 0] == 7
        assert values[512, 255] == 10
    powers = torch.full((5, 2), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    path = write(tmp_path / "e8m0", {"a.weight": codes, "a.weight_scale": powers}, quark_config(BLOCK))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.entry("a.weight").format == "fp8_block"
        assert bool((checkpoint.read_dense("a.weight") == 2).all())


def test_static_fp8_activations_of_mxfp4_and_scales_of_the_kv_cache(tmp_path):
    q = quantize(torch.randn(16, 64), "mxfp4")
    scalar = torch.tensor(0.5)
    tensors = {"a.k_proj.weight": q.codes, "a.k_proj.weight_scale": q.block_scales, "a.k_proj.input_scale": scalar}
    tensors |= {"a.k_proj.output_scale": scalar.clone(), "a.prob_output_scale": scalar.clone()}
    kv = {"*k_proj": {"weight": MXFP4, "output_tensors": FP8}}
    config = quark_config(MXFP4, kv_cache_quant_config=kv)
    config["quantization_config"]["global_quant_config"]["input_tensors"] = FP8
    with open_checkpoint(write(tmp_path, tensors, config)) as checkpoint:
        assert checkpoint.problems == ()
        assert checkpoint.read("a.k_proj.weight").input_scale == 0.5
        assert {e.name for e in checkpoint.entries() if not e.quantized} == {
            "a.k_proj.output_scale",
            "a.prob_output_scale",
        }
        assert (checkpoint.declaration.activations, checkpoint.declaration.kv_cache) == ("fp8_tensor", "fp8_e4m3")


def test_a_bfloat16_global_scale_is_read_as_a_multiplier(tmp_path):
    q = quantize(torch.randn(16, 64), "nvfp4", global_scale=torch.tensor(0.015625))
    tensors = QUARK.disassemble("a.weight", q)
    tensors["a.weight_scale_2"] = tensors["a.weight_scale_2"].bfloat16().reshape(1)
    two = [{**MXFP4, "group_size": 16}, {**FP8, "is_scale_quant": True}]
    with open_checkpoint(write(tmp_path, tensors, quark_config(two))) as checkpoint:
        assert torch.equal(checkpoint.read_dense("a.weight"), q.dequantize())


def test_gpt_oss_experts_are_split_into_gate_and_up(tmp_path):
    """Rows of gate and up in turn, in packed weights, their scales, biases, and unquantized experts."""
    q = quantize(torch.randn(32, 64), "mxfp4")
    expert = "model.layers.0.mlp.experts.1."
    tensors = {expert + "gate_up_proj.weight": q.codes, expert + "gate_up_proj.weight_scale": q.block_scales}
    tensors[expert + "gate_up_proj.input_scale"] = torch.tensor(0.5)
    tensors[expert + "gate_up_proj.bias"] = torch.arange(32.0)
    plain = "model.layers.1.mlp.experts.0.gate_up_proj.weight"
    tensors[plain] = torch.randn(8, 4).bfloat16()
    config = {"model_type": "gpt_oss", **quark_config(MXFP4)}
    with open_checkpoint(write(tmp_path / "gpt_oss", tensors, config)) as checkpoint:
        for start, projection in enumerate(("gate_proj", "up_proj")):
            part = checkpoint.read(f"{expert}{projection}.weight")
            assert torch.equal(part.dequantize(), q.dequantize()[start::2])
            assert part.input_scale == 0.5
            assert checkpoint.entry(f"{expert}{projection}.weight").shape == (16, 64)
            assert torch.equal(checkpoint.read(f"{expert}{projection}.bias"), torch.arange(32.0)[start::2])
            name = plain.replace("gate_up_proj", projection)
            assert torch.equal(checkpoint.read(name), tensors[plain][start::2])
            assert checkpoint.declaration.format_of(f"{expert}{projection}") == "mxfp4"
    with open_checkpoint(write(tmp_path / "other", tensors, quark_config(MXFP4))) as checkpoint:
        assert torch.equal(checkpoint.read_dense(expert + "gate_up_proj.weight"), q.dequantize())


def test_stacked_experts_that_stayed_unquantized_are_handed_out_one_by_one(tmp_path):
    """What the export in memory leaves with transformers 5: three dimensions, no `.weight`, in no exclude list."""
    stack = torch.randn(3, 16, 8).bfloat16()
    config = {"model_type": "qwen3_moe", "hidden_size": 8, **quark_config(MXFP4)}
    with open_checkpoint(write(tmp_path, {"model.layers.0.mlp.experts.gate_up_proj": stack}, config)) as checkpoint:
        up = checkpoint.read("model.layers.0.mlp.experts.2.up_proj.weight")
        assert torch.equal(up, stack[2, 8:])


def test_codes_that_need_the_config_are_refused_without_it(tmp_path):
    words = {"a.weight": torch.zeros(64, 2, dtype=torch.int32), "a.weight_scale": torch.ones(16, 2)}
    path = write(tmp_path, words, quark_config(MXFP4))
    refuse(path, "a.weight is I32", "neither int4 nor uint4")
    (path / "config.json").write_text("{}")
    refuse(path, "a.weight is I32")


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.fix
    for word in words:
        assert word in caught.value.message, caught.value.message


U8, F8, I32 = torch.uint8, torch.float8_e4m3fn, torch.int32


@pytest.mark.parametrize(
    ("spec", "tensors", "words"),
    [
        (MXFP4, {"weight": (8, 48, U8), "weight_scale": (8, 2, U8)}, ("a.weight [8, 48]", "fp6_e2m3")),
        (MXFP4, {"weight": (8, 32, U8), "weight_scale": (8, 1, U8)}, ("weight_scale", "[8, 1], expected [8, 2]")),
        (MXFP4, {"weight": (8, 32, U8)}, ("a.weight_scale is in no shard",)),
        (MXFP4, {"weight": (2, 8, 32, U8), "weight_scale": (2, 8, 2, U8)}, ("expected a matrix",)),
        (MXFP4, {"weight": (8, 32, U8), "weight_scale": (8, 4, F8)}, ("a.weight_scale_2 is in no shard",)),
        (BLOCK, {"weight": (576, 256, F8), "weight_scale": (7, 2, torch.float32)}, ("[7, 2]", "[128, 128]")),
        (FP8, {"weight": (8, 64, torch.float8_e5m2), "weight_scale": (torch.float32,)}, ("F8_E5M2",)),
        (INT4, {"weight": (64, 2, I32), "weight_scale": (3, 5, torch.float32)}, ("[K / group, N]", "K = 64")),
        (
            {**INT4, "dtype": "uint4", "symmetric": False},
            {"weight": (64, 2, I32), "weight_scale": (16, 2, torch.float32)},
            ("unsigned codes", "a.weight_zero_point is in no shard"),
        ),
        (
            FP8,
            {"weight": (8, 64, F8), "weight_scale": (torch.float32,), "weight_zero_point": (I32,)},
            ("only of int4 and int8",),
        ),
        ({"dtype": "mx", "mx_element_dtype": "fp4"}, {"weight": (8, 32, U8)}, ("17 bytes",)),
    ],
)
def test_tensors_that_cannot_be_what_they_say_are_refused_by_name(tmp_path, spec, tensors, words):
    stored = {f"a.{n}": torch.zeros(shape).to(dtype) for n, (*shape, dtype) in tensors.items()}
    refuse(write(tmp_path, stored, quark_config(spec)), *words)


# ---- config ----------------------------------------------------------------------------------------------------------


def test_published_configs_give_each_module_its_format(shared_data):
    def read(name: str) -> Declaration:
        return declare(json.loads((shared_data / "metadata" / name).read_text()))

    layer = "model.layers.5."
    for name in (
        "amd--DeepSeek-V3.2-mxfp4_quark_quantization_config.json",
        "DERIVED--quark_layer_quant_config_override.json",
    ):
        declaration = read(name)
        assert declaration.format_of(layer + "mlp.experts.3.down_proj") == "mxfp4"
        assert declaration.format_of("lm_head") == ""
        assert declaration.format_of(layer + "self_attn.q_a_proj") == ""
    assert declaration.format_of(layer + "self_attn.o_proj") == "mxfp4"  # the derived one excludes two projections only
    amd = read("amd--DeepSeek-V3.2-mxfp4_quark_quantization_config.json")
    for module in (layer + "mlp.gate", layer + "self_attn.o_proj", "model.layers.61.mlp.experts.0.up_proj"):
        assert amd.format_of(module) == ""
    assert amd.format_of(layer + "mlp.gate_proj") == "mxfp4"
    progressive = read("amd--Kimi-K2.5-fp8-int4_quark_progressive_excerpt.json")
    assert progressive.format_of("language_model.model.layers.3.mlp.experts.0.up_proj") == "int4_channel"
    assert progressive.activations == "fp8_tensor"


def test_layer_configs_decide_in_order_then_types_then_the_global_one():
    def layer(spec: Any) -> dict[str, Any]:
        return {"weight": spec, "input_tensors": None}

    config = quark_config(
        MXFP4,
        exclude=["lm_head", "*.mlp.gate"],
        layer_quant_config={
            "*.down_proj": layer(FP8),
            "*.layers.1.*": layer(BLOCK),
            "*.layers.2.*": layer(None),
            "model.layers.1.mlp.down_proj": layer(INT4),
        },
        layer_type_quant_config={"Linear": layer({**MXFP4, "dtype": "fp6_e2m3"}), "Conv2d": layer(FP8)},
    )
    declaration = declare(config)
    expected = {
        "model.layers.0.mlp.down_proj": "fp8_tensor",
        "model.layers.1.mlp.down_proj": "int4_group",  # a name before any glob, as Quark looks it up
        "model.layers.1.mlp.up_proj": "fp8_block",
        "model.layers.2.mlp.up_proj": "",
        "model.layers.2.mlp.down_proj": "fp8_tensor",
        "model.layers.0.mlp.up_proj": "mxfp6_e2m3",
        "model.layers.0.mlp.gate": "",
        "lm_head": "",
    }
    assert {m: declaration.format_of(m) for m in expected} == expected
    assert declaration.format == ""


def test_thousands_of_expanded_excludes_are_looked_up():
    names = tuple(f"model.layers.{i}.mlp.experts.{e}.{p}" for i in range(40) for e in range(64) for p in ("w1", "w3"))
    declaration = declare(quark_config(MXFP4, exclude=list(names)))
    assert not any(declaration.expects_quantized(n) for n in names)
    assert declaration.expects_quantized("model.layers.0.mlp.experts.0.w2")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"dtype": "mx6", "group_size": 16}, "mx6"),
        ({"dtype": "bfp16", "group_size": 8}, "bfp16"),
        ({"dtype": "mx", "mx_element_dtype": "fp6_e2m3", "group_size": 32}, "fp6_e2m3"),
        ({**MXFP4, "group_size": 16, "scale_format": "e5m3"}, "e5m3"),
        ({**MXFP4, "group_size": 16}, "group_size 16"),
        ({**FP8, "dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ([FP8, FP8], "a list of"),
        ([], "a list of nothing"),
        ({"dtype": ["int4"], "qscheme": {}}, "['int4']"),
        ("int4", "'int4'"),
    ],
)
def test_specs_that_are_not_read_are_refused_by_value(spec, word):
    with pytest.raises(CheckpointError) as caught:
        declare(quark_config(spec))
    assert word in caught.value.message
    assert "global_quant_config" in caught.value.message


@pytest.mark.parametrize("block", [{"layer_quant_config": ["*"]}, {"kv_cache_quant_config": 3}, {"exclude": "lm_head"}])
def test_tables_that_are_none_are_refused(block):
    with pytest.raises(CheckpointError):
        declare(quark_config(MXFP4, **block))
