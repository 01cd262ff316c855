"""Opening and reading checkpoints, and every way in which that must fail clearly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, quantize

EXPERT = "model.layers.1.mlp.experts.2.gate_proj"


def fails(path: Path, *fragments: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for fragment in fragments:
        assert fragment in caught.value.message, caught.value.message
    assert caught.value.fix
    return caught.value


def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_plain_entries_come_in_layer_order_with_parsed_names(plain):
    with open_checkpoint(plain) as checkpoint:
        entries = checkpoint.entries()
        assert checkpoint.dialect == "plain"
        assert entries[0].name == "model.embed_tokens.weight"
        assert [e.layer for e in entries] == [-1, *sorted(e.layer for e in entries if e.layer >= 0), -1, -1]
        entry = checkpoint.entry(EXPERT + ".weight")
        assert (entry.layer, entry.expert, entry.projection, entry.module) == (1, 2, "gate_proj", EXPERT)
        assert (entry.format, entry.shape, entry.quantized, entry.shared_expert) == ("bf16", (32, 64), False, False)
        assert checkpoint.entry("model.layers.2.mlp.shared_experts.up_proj.weight").shared_expert
        assert checkpoint.entry("model.layers.1.input_layernorm.weight").projection == ""
        assert checkpoint.entry("model.layers.1.mlp.gate.e_score_correction_bias").projection == ""


def test_plain_reads_every_tensor_bit_for_bit(plain):
    with open_checkpoint(plain) as checkpoint:
        expected = tiny_tensors()
        assert {e.name for e in checkpoint.entries()} == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.total_bytes() == sum(t.numel() * t.element_size() for t in expected.values())


def test_modelopt_weight_and_companions_become_one_quantized_tensor(modelopt):
    stored = load_file(modelopt / "model.safetensors")
    with open_checkpoint(modelopt) as checkpoint:
        assert checkpoint.dialect == "modelopt"
        assert not any(e.name.endswith(("_scale", "_scale_2")) for e in checkpoint.entries())
        entry = checkpoint.entry(EXPERT + ".weight")
        assert (entry.format, entry.shape, entry.quantized, entry.has_input_scale) == ("nvfp4", (32, 64), True, True)
        q = checkpoint.read(EXPERT + ".weight")
        assert isinstance(q, QuantizedTensor)
        assert torch.equal(q.codes, stored[EXPERT + ".weight"])
        assert torch.equal(q.global_scale, stored[EXPERT + ".weight_scale_2"])
        assert torch.equal(q.input_scale, stored[EXPERT + ".input_scale"])
        assert torch.equal(checkpoint.read_dense(EXPERT + ".weight", torch.bfloat16), q.dequantize(torch.bfloat16))


def test_quark_scale_bytes_stay_bytes(quark):
    with open_checkpoint(quark) as checkpoint:
        q = checkpoint.read(EXPERT + ".weight")
        assert (checkpoint.dialect, q.format, q.block_scales.dtype) == ("quark", "mxfp4", torch.uint8)
        assert torch.equal(q.dequantize(), quantize(tiny_tensors()[EXPERT + ".weight"], "mxfp4").dequantize())


def test_companions_may_lie_in_another_shard(modelopt, tmp_path):
    tensors = load_file(modelopt / "model.safetensors")
    config = json.loads((modelopt / "config.json").read_text())
    split = write_checkpoint(tmp_path / "split", tensors, shards=3, **config)
    with open_checkpoint(modelopt) as one, open_checkpoint(split) as three:
        for entry in one.entries():
            assert torch.equal(one.read_dense(entry.name), three.read_dense(entry.name))


def test_scalars_of_shape_one_and_scales_of_shape_1_n_m_are_accepted(modelopt, broken):
    def reshape(tensors):
        tensors[EXPERT + ".weight_scale_2"] = tensors[EXPERT + ".weight_scale_2"].reshape(1)
        tensors[EXPERT + ".weight_scale"] = tensors[EXPERT + ".weight_scale"].unsqueeze(0)

    with open_checkpoint(broken(modelopt, reshape)) as checkpoint, open_checkpoint(modelopt) as reference:
        a, b = checkpoint.read(EXPERT + ".weight"), reference.read(EXPERT + ".weight")
        assert a.global_scale.shape == ()
        assert torch.equal(a.dequantize(), b.dequantize())


def test_e8m0_typed_scales_equal_their_bytes(quark, broken):
    def retype(tensors):
        tensors[EXPERT + ".weight_scale"] = tensors[EXPERT + ".weight_scale"].view(torch.float8_e8m0fnu)

    with open_checkpoint(broken(quark, retype)) as checkpoint, open_checkpoint(quark) as reference:
        assert torch.equal(checkpoint.read_dense(EXPERT + ".weight"), reference.read_dense(EXPERT + ".weight"))


def test_fingerprint_tells_values_names_and_config_apart(plain, modelopt, broken, tmp_path):
    with open_checkpoint(modelopt) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    assert len(fingerprint) == 16
    assert int(fingerprint, 16) >= 0
    with open_checkpoint(copy(modelopt, tmp_path)) as same:
        assert same.fingerprint() == fingerprint

    def swap_nibbles(tensors):
        tensors[EXPERT + ".weight"] = (tensors[EXPERT + ".weight"] >> 4) | (tensors[EXPERT + ".weight"] << 4)

    with open_checkpoint(broken(modelopt, swap_nibbles)) as other, open_checkpoint(plain) as source:
        assert len({fingerprint, other.fingerprint(), source.fingerprint()}) == 3


def test_hf_quant_config_alone_nested_or_flat_names_modelopt(modelopt, tmp_path):
    target = copy(modelopt, tmp_path)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    side = json.loads((target / "hf_quant_config.json").read_text())
    for content in (side, side["quantization"]):
        (target / "hf_quant_config.json").write_text(json.dumps(content))
        with open_checkpoint(target) as checkpoint:
            assert (checkpoint.dialect, checkpoint.declaration.algorithm) == ("modelopt", "NVFP4")
            assert "lm_head" in checkpoint.declaration.excludes


def test_tensors_name_the_dialect_when_no_config_does_and_it_is_reported(modelopt, quark, broken):
    target = broken(modelopt, None, quantization_config=None)
    (target / "hf_quant_config.json").unlink()
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.dialect == "modelopt"
        assert any("no quantization_config" in p.message for p in checkpoint.problems)


# ---- failing ---------------------------------------------------------------------------------------------------------


def test_missing_folder(tmp_path):
    fails(tmp_path / "nowhere", "no checkpoint at", "nowhere")


def test_file_instead_of_folder(plain):
    fails(plain / "config.json", "is a file")


def test_missing_and_broken_config(plain, tmp_path):
    target = copy(plain, tmp_path)
    (target / "config.json").write_text('{"a": 1,,}')
    fails(target, "config.json is broken JSON", "line 1, column 9")
    (target / "config.json").write_text("[]")
    fails(target, "expected a JSON object")
    (target / "config.json").unlink()
    fails(target, "has no config.json")


@pytest.mark.parametrize("keep", [4, 100, 20000])
def test_truncated_shard(plain, tmp_path, keep):
    target = copy(plain, tmp_path)
    shard = target / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    fails(target, "model-00002-of-00002.safetensors")


def test_shard_with_surplus_bytes_and_a_git_lfs_pointer(plain, tmp_path):
    target = copy(plain, tmp_path)
    shard = target / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole + b"\0")
    fails(target, "surplus bytes")
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in fails(target, "Git LFS pointer").fix


def test_shard_truncated_while_open_raises_instead_of_crashing(plain, tmp_path):
    target = copy(plain, tmp_path)
    with open_checkpoint(target) as checkpoint:
        entry = max(checkpoint.entries(), key=lambda e: checkpoint.parts(e.name)["values"].end)
        with (target / entry.file).open("r+b") as stream:
            stream.truncate(1000)
        with pytest.raises(CheckpointError, match="cut short"):
            checkpoint.read(entry.name)


def test_index_that_names_a_missing_file(plain, tmp_path):
    target = copy(plain, tmp_path)
    (target / "model-00002-of-00002.safetensors").unlink()
    fails(target, "model.safetensors.index.json names model-00002-of-00002.safetensors, which does not exist")


def test_missing_index_is_fine_when_the_series_is_whole(plain, tmp_path):
    target = copy(plain, tmp_path)
    (target / "model.safetensors.index.json").unlink()
    with open_checkpoint(target) as checkpoint:
        assert [p.check for p in checkpoint.problems] == ["index-vs-files"]
    (target / "model-00001-of-00002.safetensors").unlink()
    fails(target, "lacks the shard model-00001-of-00002.safetensors")


def test_stale_index(plain, tmp_path):
    target = copy(plain, tmp_path)
    index = target / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.gone.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    fails(target, "stale", "model.gone.weight")
    del content["weight_map"]["model.gone.weight"], content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    fails(target, "does not list lm_head.weight")
    index.write_text("{}")
    fails(target, "weight_map")


def test_tensor_stored_in_two_shards(plain, tmp_path):
    target = copy(plain, tmp_path)
    first = load_file(target / "model-00001-of-00002.safetensors")
    second = load_file(target / "model-00002-of-00002.safetensors")
    name = next(iter(first))
    save_file({**second, name: first[name]}, target / "model-00002-of-00002.safetensors")
    fails(target, name, "stored twice")


def test_no_safetensors_at_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    fails(tmp_path, "holds no *.safetensors")


@pytest.mark.parametrize(
    ("block", "fragments"),
    [
        ({"quant_method": "awq"}, ("quant_method is 'awq'",)),
        ({"quant_method": "modelopt", "quant_algo": "INT9"}, ("quant_algo is 'INT9'",)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"}, (".ignore is 'lm_head'",)),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, ("dtype 'int4'",)),
    ],
)
def test_unknown_quant_method_or_algorithm_names_value_and_choices(plain, broken, block, fragments):
    error = fails(broken(plain, None, quantization_config=block), "quantization_config", *fragments)
    assert any(word in error.fix for word in ("modelopt", "NVFP4", "mxfp4", "repair"))


def test_quantization_config_within_text_config_counts(plain, broken):
    fails(broken(plain, None, text_config={"quantization_config": {"quant_method": "awq"}}), "'awq'")


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2"])
def test_missing_companion_names_tensor_and_file(modelopt, broken, suffix):
    fails(broken(modelopt, lambda t: t.pop(f"{EXPERT}.{suffix}")), EXPERT + ".weight", suffix, "model.safetensors")


def test_scale_of_the_wrong_shape_names_found_and_expected(modelopt, broken):
    def halve(tensors):
        tensors[EXPERT + ".weight_scale"] = tensors[EXPERT + ".weight_scale"][:, :2]

    fails(broken(modelopt, halve), EXPERT + ".weight_scale", "[32, 2]", "expected [32, 4]", "model.safetensors")


def test_scale_of_the_wrong_dtype(modelopt, broken):
    def widen(tensors):
        tensors[EXPERT + ".weight_scale"] = tensors[EXPERT + ".weight_scale"].float()

    fails(broken(modelopt, widen), EXPERT + ".weight_scale F32", "expected packed U8")


def test_global_scale_that_is_no_scalar(modelopt, broken):
    def repeat(tensors):
        tensors[EXPERT + ".weight_scale_2"] = tensors[EXPERT + ".weight_scale_2"].repeat(2)

    fails(broken(modelopt, repeat), EXPERT + ".weight_scale_2", "expected one F32 value")


def test_k_that_the_block_does_not_divide(quark, broken):
    def cut(tensors):
        tensors[EXPERT + ".weight"] = tensors[EXPERT + ".weight"][:, :20]

    fails(broken(quark, cut), EXPERT + ".weight", "K = 40 is not a multiple of mxfp4's block of 32")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_low_bit_weight_without_scales_never_passes(plain, tmp_path, dtype):
    tensors = tiny_tensors()
    tensors[EXPERT + ".weight"] = torch.zeros(32, 32, dtype=torch.uint8).view(dtype)
    fails(write_checkpoint(tmp_path / "raw", tensors), EXPERT + ".weight", "without scales")


def test_left_over_scale_of_an_unquantized_weight(modelopt, broken):
    def decode(tensors):
        tensors[EXPERT + ".weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)

    fails(broken(modelopt, decode), EXPERT + ".", "belongs to no quantized weight")


def test_mxfp4_beside_a_global_scale_is_refused(quark, broken):
    def add(tensors):
        tensors[EXPERT + ".weight_scale_2"] = torch.tensor(0.5)

    fails(broken(quark, add), EXPERT + ".weight_scale_2", "MXFP4 has no global scale")


def test_several_faults_are_counted(modelopt, broken):
    def drop(tensors):
        for expert in range(4):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale"]

    assert "3 more faults" in fails(broken(modelopt, drop), "up_proj").message


def test_unknown_name_and_hub_name(plain):
    with open_checkpoint(plain) as checkpoint, pytest.raises(CheckpointError, match="no tensor"):
        checkpoint.read("model.layers.9.q_proj.weight")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("hf://nobody/no-such-model@main")
    assert "hf download nobody/no-such-model --revision main" in caught.value.fix
