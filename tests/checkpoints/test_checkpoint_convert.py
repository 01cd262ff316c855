"""quantize_checkpoint: what is quantized, how scales are shared, what is written, and that nothing is half done."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import tiny_tensors, write_checkpoint
from workbench.kernels import reference

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.calibration import resolve_input_scales
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.errors import CheckpointError, ConfigError, FormatError, OutputError
from workbench.formats import FORMATS, QuantizedTensor, quantize

EXPERT = "model.layers.1.mlp.experts.2."


def names(path: Path, quantized: bool = True) -> set[str]:
    with open_checkpoint(path) as checkpoint:
        return {e.name for e in checkpoint.entries() if e.quantized == quantized}


def siblings(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---- what is quantized -----------------------------------------------------------------------------------------------


def test_linear_layers_are_quantized_and_the_rest_is_byte_identical(plain, modelopt):
    expected = tiny_tensors()
    linears = {n for n in expected if n.endswith("_proj.weight")}
    assert names(modelopt) == linears
    with open_checkpoint(modelopt) as checkpoint:
        for name in set(expected) - linears:
            assert torch.equal(checkpoint.read(name), expected[name]), name


def test_exclude_globs_and_config_list(plain, tmp_path):
    result = quantize_checkpoint(
        plain, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=["*self_attn*", "model.layers.0.*", "typo*"]
    )
    assert all(".mlp." in n and "layers.0" not in n for n in names(tmp_path / "q"))
    assert result.warnings == ("exclude pattern 'typo*' matches no module of tiny",)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    side = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())["quantization"]
    assert config["ignore"] == side["exclude_modules"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate", "model.layers.2.self_attn.q_proj"} <= set(
        config["ignore"]
    )
    assert (config["quant_method"], config["quant_algo"], side["group_size"]) == ("modelopt", "W4A16_NVFP4", 16)


def test_a_layers_experts_that_are_all_excluded_are_listed_by_container(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="mxfp4", dialect="quark", exclude=["*.layers.1.mlp.experts.*"])
    exclude = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["exclude"]
    assert "model.layers.1.mlp.experts" in exclude
    assert not any(".experts.0" in e for e in exclude)
    with open_checkpoint(tmp_path / "q") as checkpoint:
        assert not checkpoint.declaration.expects_quantized("model.layers.1.mlp.experts.0.up_proj")
        assert checkpoint.declaration.expects_quantized("model.layers.2.mlp.experts.0.up_proj")


def test_side_files_are_copied_and_weights_and_index_are_not(plain, modelopt):
    expected = ["README.md", "config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"]
    assert siblings(modelopt) == expected


def test_modelopt_config_block_has_the_producers_keys(modelopt):
    block = json.loads((modelopt / "config.json").read_text())["quantization_config"]
    assert set(block) == {"config_groups", "ignore", "quant_algo", "producer", "quant_method"}
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert block["config_groups"]["group_0"]["input_activations"] == four_bits
    assert block["quant_algo"] == "NVFP4"


# ---- values ----------------------------------------------------------------------------------------------------------


def test_globals_are_shared_over_fused_projections_and_equal_the_largest_amax(modelopt):
    tensors, stored = tiny_tensors(), load_file(modelopt / "model.safetensors")
    for group in (("mlp.experts.2.gate_proj", "mlp.experts.2.up_proj"), *[("self_attn.q_proj", "self_attn.k_proj")]):
        members = [f"model.layers.1.{m}" for m in group]
        assert stored[members[0] + ".weight_scale_2"] == stored[members[1] + ".weight_scale_2"]
    amax = max(tensors[EXPERT + p + ".weight"].abs().max().float() for p in ("gate_proj", "up_proj"))
    assert stored[EXPERT + "gate_proj.weight_scale_2"] == reference.nvfp4_global_scale(amax)
    assert stored[EXPERT + "gate_proj.weight_scale_2"].shape == ()
    q = quantize(tensors[EXPERT + "up_proj.weight"], "nvfp4", global_scale=stored[EXPERT + "gate_proj.weight_scale_2"])
    assert torch.equal(stored[EXPERT + "up_proj.weight"], q.codes)


def test_shared_globals_off_gives_each_matrix_its_own(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", shared_globals=False)
    stored, tensors = load_file(tmp_path / "q" / "model.safetensors"), tiny_tensors()
    for projection in ("gate_proj", "up_proj"):
        own = reference.nvfp4_global_scale(tensors[EXPERT + projection + ".weight"].abs().max())
        assert stored[EXPERT + projection + ".weight_scale_2"] == own


def test_requantization_is_quantize_of_the_exact_decoding(modelopt, tmp_path):
    quantize_checkpoint(modelopt, tmp_path / "q", format="mxfp4", dialect="quark", rule="floor")
    with open_checkpoint(modelopt) as first, open_checkpoint(tmp_path / "q") as second:
        assert (second.dialect, second.config["quantization_config"]["quant_method"]) == ("quark", "quark")
        assert not (tmp_path / "q" / "hf_quant_config.json").exists()
        for name in names(modelopt):
            expected = quantize(first.read_dense(name), "mxfp4", "floor")
            found = second.read(name)
            assert isinstance(found, QuantizedTensor)
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.block_scales, expected.block_scales)


@pytest.mark.parametrize(("format", "dtype"), [("f32", torch.float32), ("bf16", torch.bfloat16)])
def test_decoding_gives_a_plain_checkpoint_of_the_same_values(modelopt, tmp_path, format, dtype):
    quantize_checkpoint(modelopt, tmp_path / "d", format=format, dialect="plain")
    with open_checkpoint(modelopt) as packed, open_checkpoint(tmp_path / "d") as dense:
        assert dense.dialect == "plain"
        assert "quantization_config" not in dense.config
        assert dense.config["dtype"] == str(dtype).removeprefix("torch.")
        for entry in packed.entries():
            value = dense.read(entry.name)
            kept = entry.name.endswith("e_score_correction_bias")
            assert value.dtype == (torch.float32 if kept else dtype)
            assert torch.equal(value, packed.read_dense(entry.name, value.dtype))


def test_requantizing_into_the_same_format_copies_the_bytes(modelopt, tmp_path):
    result = quantize_checkpoint(modelopt, tmp_path / "again", format="nvfp4", dialect="modelopt")
    assert not result.quantized
    assert "copied unchanged" in result.warnings[0]
    for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (modelopt / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_quantized_source_tensors_that_are_excluded_are_decoded_and_reported(modelopt, tmp_path):
    result = quantize_checkpoint(modelopt, tmp_path / "q", format="mxfp4", dialect="quark", exclude=["*self_attn*"])
    assert any("decoded to bf16" in w for w in result.warnings)
    assert {n for n in result.decoded} == {n for n in names(modelopt) if "self_attn" in n}
    with open_checkpoint(tmp_path / "q") as checkpoint:
        assert checkpoint.entry("model.layers.1.self_attn.q_proj.weight").format == "bf16"


def test_kv_cache_scales_are_dropped_with_a_warning(modelopt, broken, tmp_path):
    source = broken(modelopt, lambda t: t.update({"model.layers.1.self_attn.k_proj.k_scale": torch.tensor(0.02)}))
    result = quantize_checkpoint(source, tmp_path / "q", format="mxfp4", dialect="quark")
    assert any("KV-cache scales" in w for w in result.warnings)
    assert not any("k_scale" in n for n in names(tmp_path / "q", quantized=False))


def test_all_zero_matrix_stays_finite(plain, tmp_path):
    tensors = tiny_tensors()
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    source = write_checkpoint(tmp_path / "zero", tensors)
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    with open_checkpoint(tmp_path / "q") as checkpoint:
        assert torch.count_nonzero(checkpoint.read_dense("model.layers.1.self_attn.o_proj.weight")) == 0


# ---- input scales ----------------------------------------------------------------------------------------------------


def test_input_scales_are_amax_over_2688_shared_over_fused_projections(modelopt, input_amax):
    stored = load_file(modelopt / "model.safetensors")
    down = EXPERT + "down_proj"
    assert stored[down + ".input_scale"] == torch.tensor(input_amax[down] / 2688)
    largest = max(input_amax[EXPERT + "gate_proj"], input_amax[EXPERT + "up_proj"])
    assert stored[EXPERT + "gate_proj.input_scale"] == stored[EXPERT + "up_proj.input_scale"]
    assert stored[EXPERT + "up_proj.input_scale"] == torch.tensor(largest / 2688)


def test_unseen_experts_take_their_layers_largest_amax_else_one_half():
    modules = [f"model.layers.{layer}.mlp.experts.{e}.down_proj" for layer in (1, 2) for e in range(3)]
    formats = dict.fromkeys(modules, "nvfp4")
    scales, notes = resolve_input_scales(formats, {modules[0]: 2.0, modules[2]: 8.0, modules[1]: 0.0})
    assert [scales[m] * 2688 for m in modules] == pytest.approx([2.0, 8.0, 8.0, 0.5, 0.5, 0.5])
    assert "1 expert projections" in notes[0]
    assert modules[1] in notes[0]
    assert "3 expert projections" in notes[1]
    assert "0.5" in notes[1]


@pytest.mark.parametrize("value", [None, 0.0, float("nan"), float("inf"), -1.0, 1e-36])
def test_an_unmeasured_module_that_is_no_expert_is_refused(value):
    module = "model.layers.1.self_attn.o_proj"
    with pytest.raises(CheckpointError, match="o_proj has no measured input amax"):
        resolve_input_scales({module: "nvfp4"}, {} if value is None else {module: value})


def test_input_scales_are_amax_over_the_formats_largest_activation_and_none_where_it_is_dynamic():
    formats = {"model.layers.0.self_attn.o_proj": "nvfp4", "a.q_proj": "fp8_tensor", "b.o_proj": "mxfp4"}
    scales, _ = resolve_input_scales(formats, dict.fromkeys(formats, 3.0))
    assert scales == {"model.layers.0.self_attn.o_proj": 3.0 / 2688, "a.q_proj": 3.0 / 448}


# ---- refusals --------------------------------------------------------------------------------------------------------


UNWRITTEN = [(d, f) for d in DIALECTS for f in FORMATS if f not in DIALECTS[d].writes]


@pytest.mark.parametrize(("dialect", "format"), UNWRITTEN)
def test_combinations_that_cannot_be_written_name_those_that_can(plain, tmp_path, dialect, format):
    writers = [d.name for d in DIALECTS.values() if format in d.writes]
    with pytest.raises(ConfigError) as caught:
        quantize_checkpoint(plain, tmp_path / "q", format=format, dialect=dialect)
    assert all(f"{writer}" in caught.value.fix for writer in writers)
    assert siblings(tmp_path) == []


def test_an_unknown_format_lists_the_known(plain, tmp_path):
    with pytest.raises(ConfigError, match="unknown format 'int4'") as caught:
        quantize_checkpoint(plain, tmp_path / "q", format="int4", dialect="plain")
    assert {f for d in DIALECTS.values() for f in d.writes} <= set(caught.value.fix.replace(",", "").split())


def test_unknown_dialect_rule_and_exclude_of_a_decoding(plain, tmp_path):
    with pytest.raises(CheckpointError, match="unknown dialect 'gguf'"):
        quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="gguf")
    with pytest.raises(FormatError, match="no scale rule 'up'"):
        quantize_checkpoint(plain, tmp_path / "q", format="mxfp4", dialect="quark", rule="up")
    with pytest.raises(ConfigError, match="no scale rule"):
        quantize_checkpoint(plain, tmp_path / "q", format="bf16", dialect="plain", rule="even")
    with pytest.raises(ConfigError, match="nothing can be excluded"):
        quantize_checkpoint(plain, tmp_path / "q", format="bf16", dialect="plain", exclude=["*"])


def test_destination_is_never_the_source_nor_occupied_nor_nested(plain, tmp_path):
    source = Path(shutil.copytree(plain, tmp_path / "source"))
    convert = {"format": "nvfp4", "dialect": "modelopt"}
    with pytest.raises(CheckpointError, match="same folder"):
        quantize_checkpoint(source, source / "." / "", **convert, overwrite=True)
    with pytest.raises(CheckpointError, match="within each other"):
        quantize_checkpoint(source, source / "inside", **convert)
    with pytest.raises(CheckpointError, match="within each other"):
        quantize_checkpoint(source, tmp_path, **convert, overwrite=True)
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not empty") as caught:
        quantize_checkpoint(source, occupied, **convert)
    assert "--overwrite" in caught.value.fix
    assert siblings(occupied) == ["mine.txt"]
    with pytest.raises(CheckpointError, match="no checkpoint") as caught:
        quantize_checkpoint(source, occupied, **convert, overwrite=True)
    assert siblings(occupied) == ["mine.txt"]
    shutil.copytree(plain, occupied, dirs_exist_ok=True)
    quantize_checkpoint(source, occupied, **convert, overwrite=True)
    assert "mine.txt" not in siblings(occupied)
    assert len(names(occupied)) > 0
    assert siblings(tmp_path) == ["occupied", "source"]


def test_k_that_the_block_does_not_divide_names_the_tensor(tmp_path):
    tensors = tiny_tensors()
    tensors[EXPERT + "down_proj.weight"] = torch.zeros(64, 24, dtype=torch.bfloat16)
    source = write_checkpoint(tmp_path / "odd", tensors)
    with pytest.raises(FormatError, match=r"experts\.2\.down_proj\.weight: K = 24") as caught:
        quantize_checkpoint(source, tmp_path / "q", format="mxfp4", dialect="quark")
    assert "--exclude 'model.layers.1.mlp.experts.2.down_proj'" in caught.value.fix


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_nan_weight_names_the_tensor_and_leaves_nothing(tmp_path, projection):
    tensors = tiny_tensors()
    tensors[EXPERT + projection + ".weight"][3, 5] = float("nan")
    source = write_checkpoint(tmp_path / "nan", tensors)
    with pytest.raises(FormatError, match=f"experts.2.{projection}"):
        quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    assert siblings(tmp_path) == ["nan"]


def test_a_stack_of_experts_is_quantized_expert_by_expert(tmp_path):
    """transformers' fused layout: gate_up [E, 2I, H], down [E, H, I]; read and written as single experts."""
    tensors = tiny_tensors()
    single = {n: tensors.pop(n) for n in list(tensors) if ".layers.1.mlp.experts." in n}

    def stack(*parts: str) -> torch.Tensor:
        base = "model.layers.1.mlp.experts."
        return torch.stack([torch.cat([single[f"{base}{e}.{p}.weight"] for p in parts]) for e in range(4)])

    tensors["model.layers.1.mlp.experts.gate_up_proj"] = stack("gate_proj", "up_proj")
    tensors["model.layers.1.mlp.experts.down_proj"] = stack("down_proj")
    write_checkpoint(tmp_path / "fused", tensors, hidden_size=64, model_type="qwen3_moe")
    write_checkpoint(tmp_path / "single", tiny_tensors(), hidden_size=64, model_type="qwen3_moe")
    for name in ("fused", "single"):
        quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-q", format="nvfp4", dialect="modelopt")
    one, other = (tmp_path / f"{name}-q" / "model.safetensors" for name in ("fused", "single"))
    assert one.read_bytes() == other.read_bytes()


def test_nothing_to_quantize(plain, tmp_path):
    with pytest.raises(CheckpointError, match="every linear layer is excluded"):
        quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=["*"])


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_many_shards_get_an_index_and_companions_stay_together(plain, modelopt, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", max_shard_bytes=20_000)
    files = sorted(p.name for p in (tmp_path / "q").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for f in files for t in load_file(tmp_path / "q" / f).values()
    )
    with open_checkpoint(tmp_path / "q") as many, open_checkpoint(modelopt) as one:
        for entry in many.entries():
            assert len({p.file for p in many.parts(entry.name).values()}) == 1
            assert torch.equal(many.read_dense(entry.name), one.read_dense(entry.name))


def test_progress_counts_every_tensor(plain, tmp_path):
    seen = []
    quantize_checkpoint(
        plain, tmp_path / "q", format="mxfp4", dialect="quark", progress=lambda *step: seen.append(step)
    )
    assert [s[0] for s in seen] == list(range(1, len(tiny_tensors()) + 1))
    assert {s[1] for s in seen} == {len(tiny_tensors())}


def test_interrupt_leaves_neither_destination_nor_temporary_files(plain, tmp_path):
    def interrupt(done: int, total: int, name: str) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            plain, tmp_path / "q", format="mxfp4", dialect="quark", progress=interrupt, max_shard_bytes=5_000
        )
    assert siblings(tmp_path) == []


def test_interrupt_while_overwriting_keeps_the_old_checkpoint(plain, modelopt, tmp_path):
    target = Path(shutil.copytree(modelopt, tmp_path / "old"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(plain, target, format="mxfp4", dialect="quark", overwrite=True, progress=interrupt)
    assert siblings(tmp_path) == ["old"]
    assert names(target) == names(modelopt)


def test_full_disk_is_one_clear_message_and_leaves_nothing(plain, tmp_path):
    """A file-size limit stands in for a full disk: the kernel refuses the write in the middle of a shard."""
    script = (
        "import sys; from workbench.checkpoints.convert import quantize_checkpoint\n"
        "from workbench.errors import OutputError\n"
        "try: quantize_checkpoint(sys.argv[1], sys.argv[2], format='nvfp4', dialect='modelopt')\n"
        "except OutputError as error: print(error); sys.exit(7)\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    run = subprocess.run(
        [sys.executable, "-c", script, str(plain), str(tmp_path / "q")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 7, run.stderr
    assert "could not write the checkpoint" in run.stdout
    assert "fix: free space" in run.stdout
    assert siblings(tmp_path) == []


def test_unwritable_destination(plain, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((OutputError, CheckpointError)):
        quantize_checkpoint(plain, tmp_path / "file" / "q", format="mxfp4", dialect="quark")
