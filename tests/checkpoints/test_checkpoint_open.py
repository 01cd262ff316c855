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
from workbench.checkpoints.dialects import Located
from workbench.checkpoints.dialects.plain import Plain
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


def test_the_weights_digest_is_of_the_weights_alone(plain, modelopt, broken, tmp_path):
    with open_checkpoint(plain) as checkpoint, open_checkpoint(modelopt) as other:
        digest = checkpoint.weights_digest()
        assert len(digest) == 16
        assert other.weights_digest() != digest
    again = copy(plain, tmp_path)
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps({**config, "transformers_version": "another"}))
    tensors = {name: tensor for shard in again.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for file in (*again.glob("*.safetensors"), *again.glob("*.index.json")):
        file.unlink()
    save_file(tensors, again / "model.safetensors")  # other shards, another header
    with open_checkpoint(again) as same, open_checkpoint(plain) as checkpoint:
        assert same.weights_digest() == digest
        assert same.fingerprint() != checkpoint.fingerprint()
    name = next(name for name in tensors if name.endswith("proj.weight"))
    for changed in (tensors[name] * 1.01, tensors[name].reshape(-1), tensors[name].float()):
        save_file({**tensors, name: changed}, again / "model.safetensors")
        with open_checkpoint(again, strict=False) as different:
            assert different.weights_digest() != digest


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


class Stacks(Plain):
    """A dialect whose canonical tensors are the matrices of stored stacks."""

    def locate(self, folder, problems):
        (stack,) = (info for info in folder.tensors.values() if len(info.shape) == 3)
        names = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(stack.shape[0])]
        return [*super().locate(folder, problems)] + [
            Located(name=n, format="bf16", shape=stack.shape[1:], parts={"values": stack.name}, detail=e)
            for e, n in enumerate(names)
        ]

    def assemble(self, located, load):
        if located.detail is None:
            return super().assemble(located, load)
        return load(located.parts["values"], rows=(located.detail, located.detail + 1))[0]


def test_entries_of_one_stored_stack(tmp_path, monkeypatch):
    tensors = {"model.norm.weight": torch.ones(4), "stack": torch.arange(24.0).bfloat16().reshape(2, 3, 4)}
    target = write_checkpoint(tmp_path / "c", tensors, shards=1)
    monkeypatch.setattr("workbench.checkpoints.open.choose_dialect", lambda _: Stacks())
    with open_checkpoint(target) as checkpoint:
        experts = [e for e in checkpoint.entries() if e.expert >= 0]
        assert [(e.expert, e.shape, e.shared) for e in experts] == [(0, (3, 4), True), (1, (3, 4), True)]
        assert not checkpoint.entry("model.norm.weight").shared
        for entry in experts:
            assert torch.equal(checkpoint.read(entry.name), tensors["stack"][entry.expert])
            assert checkpoint.parts(entry.name)["values"].shape == (2, 3, 4)
        assert checkpoint.total_bytes() == sum(t.nbytes for t in tensors.values())
        fingerprint = checkpoint.fingerprint()
    tensors["stack"][1, 0, 0] += 1
    with open_checkpoint(write_checkpoint(tmp_path / "d", tensors, shards=1)) as other:
        assert other.fingerprint() != fingerprint
    with pytest.raises(IndexError, match="no rows 2 to 3"), open_checkpoint(target) as checkpoint:
        checkpoint.folder.load("stack", rows=(2, 3))


def test_one_canonical_tensor_stored_in_two_ways_is_refused(tmp_path, monkeypatch):
    twice = {"model.layers.1.mlp.experts.1.up_proj.weight": torch.ones(3, 4), "stack": torch.ones(2, 3, 4)}
    target = write_checkpoint(tmp_path / "c", twice, shards=1)
    monkeypatch.setattr("workbench.checkpoints.open.choose_dialect", lambda _: Stacks())
    fails(target, "stores model.layers.1.mlp.experts.1.up_proj.weight twice", "and as stack")


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


def edit_index(folder: Path, edit) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    edit(content)
    index.write_text(json.dumps(content))


def test_an_index_that_lists_what_no_shard_holds_is_refused(plain, tmp_path):
    target = copy(plain, tmp_path)
    edit_index(target, lambda c: c["weight_map"].update({"model.gone.weight": "model-00001-of-00002.safetensors"}))
    fails(target, "stale", "model.gone.weight")
    (target / "model.safetensors.index.json").write_text("{}")
    fails(target, "weight_map")


def test_a_stale_index_whose_tensors_are_all_found_is_read_with_a_warning(plain, tmp_path):
    """As transformers and vLLM do: the index chooses the shards, the shards' headers say what they hold."""
    target = copy(plain, tmp_path)

    def edit(content):
        del content["weight_map"]["lm_head.weight"]
        for name in ("model.norm.weight", "model.embed_tokens.weight"):
            first = content["weight_map"][name].startswith("model-00001")
            content["weight_map"][name] = f"model-0000{2 if first else 1}-of-00002.safetensors"
        content["metadata"]["total_size"] = 5

    edit_index(target, edit)
    with open_checkpoint(target) as checkpoint:
        for name, tensor in tiny_tensors().items():
            assert torch.equal(checkpoint.read(name), tensor), name
        problems = [(p.check, p.severity) for p in checkpoint.problems]
        assert problems == [("index-vs-files", "warning")] * 3
        said = " ".join(p.message for p in checkpoint.problems)
        for words in ("2 tensors", "model.norm.weight", "lm_head.weight", "total_size 5"):
            assert words in said


def test_a_missing_shard_a_renamed_tensor_and_an_unlisted_one_are_three_problems(tmp_path):
    target = write_checkpoint(tmp_path / "c", tiny_tensors(), shards=3)
    (target / "model-00003-of-00003.safetensors").unlink()
    held = load_file(target / "model-00001-of-00003.safetensors")

    def rename(content):
        content["weight_map"]["old.name.weight"] = content["weight_map"].pop(next(iter(held)))

    edit_index(target, rename)
    fails(target, "model-00003-of-00003.safetensors, which does not exist", "1 more faults")
    with open_checkpoint(target, strict=False) as checkpoint:
        problems = [p for p in checkpoint.problems if p.check == "index-vs-files"]
        assert [p.severity for p in problems] == ["error", "error", "warning"]
        assert [p.tensor for p in problems] == ["", "old.name.weight", next(iter(held))]
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in held.items())


def test_a_shard_that_the_index_does_not_name_is_not_read(plain, tmp_path):
    target = copy(plain, tmp_path)
    save_file({"lm_head.weight": torch.zeros(1)}, target / "consolidated.safetensors")
    with open_checkpoint(target) as checkpoint:
        assert [p.file for p in checkpoint.problems] == ["consolidated.safetensors"]
        assert torch.equal(checkpoint.read("lm_head.weight"), tiny_tensors()["lm_head.weight"])


def test_tied_embeddings_are_no_fault(tmp_path):
    tensors = tiny_tensors()
    del tensors["lm_head.weight"]
    target = write_checkpoint(tmp_path / "c", tensors, tie_word_embeddings=True)
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.problems == ()
        assert {e.name for e in checkpoint.entries()} == set(tensors)


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
        ({"quant_method": "exl3"}, ("quant_method is 'exl3'",)),
        ({"quant_method": "modelopt", "quant_algo": "INT9"}, ("quant_algo is 'INT9'",)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"}, (".ignore is 'lm_head'",)),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}}, ("dtype 'int3'",)),
    ],
)
def test_unknown_quant_method_or_algorithm_names_value_and_choices(plain, broken, block, fragments):
    error = fails(broken(plain, None, quantization_config=block), "quantization_config", *fragments)
    assert any(word in error.fix for word in ("modelopt", "NVFP4", "mxfp4", "repair"))


def test_quantization_config_within_text_config_counts(plain, broken):
    fails(broken(plain, None, text_config={"quantization_config": {"quant_method": "exl3"}}), "'exl3'")


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


def test_unknown_name(plain):
    with open_checkpoint(plain) as checkpoint, pytest.raises(CheckpointError, match="no tensor"):
        checkpoint.read("model.layers.9.q_proj.weight")
