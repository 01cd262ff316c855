"""Every lint check: silent on clean checkpoints, and finding its fault in a broken copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import CHECKS, lint_checkpoint
from workbench.errors import CheckpointError, ConfigError
from workbench.formats import quantize

EXPERT = "model.layers.1.mlp.experts.2."
GATE = EXPERT + "gate_proj"


def found(path: Path, check: str, severity: str = "error", **options: object):
    """The first finding of `check`, which has this severity and a way out."""
    report = lint_checkpoint(path, **options)
    hits = [f for f in report.findings if f.check == check]
    assert hits, [(f.check, f.message) for f in report.findings]
    assert hits[0].severity == severity
    assert hits[0].fix
    return hits[0]


def test_clean_checkpoints_have_no_findings(plain, modelopt, quark):
    for path, dialect, quantized in ((plain, "plain", 0), (modelopt, "modelopt", 45), (quark, "quark", 45)):
        report = lint_checkpoint(path)
        assert report.findings == ()
        assert (report.dialect, report.quantized_tensors) == (dialect, quantized)
        assert report.checks == tuple(CHECKS)
        assert len(CHECKS) >= 10


def test_weight_only_export_is_clean(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=["*self_attn*"])
    assert lint_checkpoint(tmp_path / "q").findings == ()


# ---- structure -------------------------------------------------------------------------------------------------------


def test_index_vs_files(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "copy"))
    index = target / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.gone.weight"] = "model-00001-of-00002.safetensors"
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    save_file({"extra": torch.zeros(1)}, target / "extra.safetensors")
    messages = [f.message for f in lint_checkpoint(target).findings if f.check == "index-vs-files"]
    assert len(messages) == 3
    for word in ("model.gone.weight", "lm_head.weight", "extra.safetensors"):
        assert any(word in m for m in messages)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2"])
def test_missing_companion(modelopt, broken, suffix):
    finding = found(broken(modelopt, lambda t: t.pop(f"{GATE}.{suffix}")), "missing-companion")
    assert finding.tensor == GATE + ".weight"
    assert finding.file == "model.safetensors"


def test_scale_shape(modelopt, broken):
    def halve(tensors):
        tensors[GATE + ".weight_scale"] = tensors[GATE + ".weight_scale"][:16]

    assert "[16, 4], expected [32, 4]" in found(broken(modelopt, halve), "scale-shape").message


def test_k_divisible(quark, broken):
    def cut(tensors):
        tensors[GATE + ".weight"] = tensors[GATE + ".weight"][:, :20]

    assert "K = 40" in found(broken(quark, cut), "k-divisible").message


def test_expert_suffix_sets(modelopt, broken):
    def decode(tensors):
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{GATE}.{suffix}"]
        tensors[GATE + ".weight"] = torch.ones(32, 64, dtype=torch.bfloat16)

    path = broken(modelopt, decode)
    assert GATE in found(path, "expert-suffix-sets").message
    found(path, "exclude-conflict")


def test_missing_tensor(modelopt, broken):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith(EXPERT)]:
            del tensors[name]

    assert "expert 2 of layer 1" in found(broken(modelopt, drop), "missing-tensor").message


def test_missing_layer(plain, broken, tmp_path):
    shallow = write_checkpoint(tmp_path / "shallow", tiny_tensors(), num_hidden_layers=4)
    assert "layer 3 has no tensor" in found(shallow, "missing-tensor").message


# ---- config ----------------------------------------------------------------------------------------------------------


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_ignore(target: Path, change) -> Path:
    edit_json(target / "config.json", lambda c: change(c["quantization_config"]["ignore"]))
    edit_json(target / "hf_quant_config.json", lambda c: change(c["quantization"]["exclude_modules"]))
    return target


def test_excluded_but_stored_quantized(modelopt, broken):
    target = set_ignore(broken(modelopt), lambda names: names.append("model.layers.1.self_attn*"))
    finding = found(target, "exclude-conflict")
    assert "is not quantized, the tensor is nvfp4 (4 such tensors)" in finding.message


def test_declared_quantized_but_stored_plain(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", exclude=["*.o_proj"])
    set_ignore(tmp_path / "q", lambda names: names.remove("model.layers.2.self_attn.o_proj"))
    finding = found(tmp_path / "q", "exclude-conflict")
    assert finding.tensor == "model.layers.2.self_attn.o_proj.weight"


def test_fused_projections_in_two_formats(plain, tmp_path):
    result = quantize_checkpoint(
        plain, tmp_path / "q", format="mxfp4", dialect="quark", exclude=["*1.self_attn.k_proj"]
    )
    assert "only partly quantized" in result.warnings[0]
    finding = found(tmp_path / "q", "exclude-conflict")
    assert "q_proj (mxfp4)" in finding.message
    assert "k_proj (bf16)" in finding.message


def test_exclude_pattern_that_matches_nothing(modelopt, broken):
    target = set_ignore(broken(modelopt), lambda names: names.append("language_model.model.layers.0*"))
    assert "matches no module" in found(target, "exclude-conflict", "warning").message


@pytest.mark.parametrize("pattern", ["model.layers.1.mlp.experts", "model.layers.1*", "re:.*layers.1.*", "*.mlp"])
def test_exclude_patterns_that_name_containers_are_alive(modelopt, broken, pattern):
    target = set_ignore(broken(modelopt), lambda names: names.append(pattern))
    assert not any("matches no module" in f.message for f in lint_checkpoint(target).findings)


def test_config_files_that_contradict_each_other(modelopt, broken):
    target = broken(modelopt)
    edit_json(target / "hf_quant_config.json", lambda c: c["quantization"]["exclude_modules"].remove("lm_head"))
    assert "lm_head" in found(target, "config-conflict", "warning").message


def test_config_that_contradicts_the_tensors_format(modelopt, broken):
    target = broken(modelopt)
    edit_json(target / "hf_quant_config.json", lambda c: c["quantization"].update(quant_algo="mxfp4"))
    edit_json(target / "config.json", lambda c: c["quantization_config"].update(quant_algo="mxfp4"))
    assert "declares mxfp4, the tensor is nvfp4" in found(target, "config-conflict").message


def test_missing_config_block_is_reported(quark, broken):
    target = broken(quark, None, quantization_config=None)
    assert "no quantization_config" in found(target, "exclude-conflict", "warning").message


# ---- scales ----------------------------------------------------------------------------------------------------------


def set_scale_byte(name: str, byte: int, count: int = 1):
    def edit(tensors):
        tensors[name].view(torch.uint8).view(-1)[:count] = byte

    return edit


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_e4m3_nan_scale(modelopt, broken, byte):
    finding = found(broken(modelopt, set_scale_byte(GATE + ".weight_scale", byte, 3)), "scale-nan")
    assert finding.message == "3 of 128 block scales are NaN"
    assert finding.tensor == GATE + ".weight"


def test_e8m0_nan_scale_and_byte_254_is_none(quark, broken):
    assert "1 of 64" in found(broken(quark, set_scale_byte(GATE + ".weight_scale", 255)), "scale-nan").message


@pytest.mark.parametrize("byte", [0x80, 0xB8, 0xFE])
def test_negative_scale(modelopt, broken, byte):
    path = broken(modelopt, set_scale_byte(GATE + ".weight_scale", byte))
    assert "negative" in found(path, "scale-zero-or-negative").message


def test_zero_scale_over_live_codes(modelopt, broken):
    path = broken(modelopt, set_scale_byte(GATE + ".weight_scale", 0, 2))
    assert "2 of 128" in found(path, "scale-zero-or-negative", "warning").message


def test_zero_scale_over_zero_codes_is_fine(modelopt, broken):
    def edit(tensors):
        set_scale_byte(GATE + ".weight_scale", 0)(tensors)
        tensors[GATE + ".weight"].view(-1)[:8] = 0x80  # eight bytes: 16 codes, +-0

    assert lint_checkpoint(broken(modelopt, edit)).findings == ()


def test_subnormal_scales_with_a_global_of_one(modelopt, broken):
    def edit(tensors):
        for projection in ("gate_proj", "up_proj"):
            w = tiny_tensors()[f"{EXPERT}{projection}.weight"]
            q = quantize(w, "nvfp4", global_scale=torch.tensor(1.0))
            tensors[f"{EXPERT}{projection}.weight_scale"] = q.block_scales
            tensors[f"{EXPERT}{projection}.weight_scale_2"] = torch.tensor(1.0)

    found(broken(modelopt, edit), "scale-subnormal", "warning")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1e-4])
def test_unusable_global_scale(modelopt, broken, value):
    name = EXPERT + "down_proj.weight_scale_2"
    found(broken(modelopt, lambda t: t.update({name: torch.tensor(value)})), "global-scale-range")


def test_inverted_global_scale(modelopt, broken):
    name = EXPERT + "down_proj.weight_scale_2"
    finding = found(broken(modelopt, lambda t: t.update({name: 1 / t[name]})), "global-scale-reciprocal")
    assert "divisor" in finding.fix


def test_implausible_mxfp4_scales(quark, broken):
    found(broken(quark, set_scale_byte(GATE + ".weight_scale", 200)), "global-scale-range")


def test_tiny_weights_are_a_warning(modelopt, broken):
    name = EXPERT + "down_proj.weight_scale_2"
    path = broken(modelopt, lambda t: t.update({name: t[name] * 1e-6}))
    found(path, "global-scale-range", "warning")


def test_global_scale_mismatch_names_both_and_the_ratio(modelopt, broken):
    path = broken(modelopt, lambda t: t.update({GATE + ".weight_scale_2": t[GATE + ".weight_scale_2"] * 2}))
    finding = found(path, "global-scale-mismatch")
    assert "gate_proj" in finding.message
    assert "up_proj" in finding.message
    assert "ratio 2" in finding.message


def test_no_shared_globals_is_found_and_can_be_allowed(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="nvfp4", dialect="modelopt", shared_globals=False)
    report = lint_checkpoint(tmp_path / "q", allow=["global-scale-mismatch"])
    assert [(f.check, f.severity) for f in report.findings] == [("global-scale-mismatch", "allowed")]
    assert report.errors == ()
    assert lint_checkpoint(tmp_path / "q").errors


def test_input_scale_missing_on_one_expert(modelopt, broken):
    name = EXPERT + "down_proj.input_scale"
    finding = found(broken(modelopt, lambda t: t.pop(name)), "input-scale-missing")
    assert finding.tensor == EXPERT + "down_proj.weight"


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_unusable_input_scale(modelopt, broken, value):
    name = EXPERT + "down_proj.input_scale"
    found(broken(modelopt, lambda t: t.update({name: torch.tensor(value)})), "input-scale-missing")


def test_w4a4_declared_without_any_input_scale(modelopt, broken):
    def strip(tensors):
        for name in [n for n in tensors if n.endswith("input_scale")]:
            del tensors[name]

    found(broken(modelopt, strip), "input-scale-missing", "warning")


# ---- the arms broken on purpose --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["codes", "scales"])
def test_zeroed_expert_is_dead(modelopt, quark, broken, what):
    def zero(tensors):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = f"{EXPERT}{projection}.weight" + ("_scale" if what == "scales" else "")
            tensors[name].view(torch.uint8).zero_()

    finding = found(broken(modelopt, zero), "dead-tensor")
    assert finding.tensor.startswith(EXPERT)
    assert "(3 such tensors)" in finding.message


def test_zeroed_expert_in_a_plain_checkpoint_is_dead(tmp_path):
    tensors = tiny_tensors()
    tensors[GATE + ".weight"].zero_()
    tensors[GATE + ".weight"][3, 4] = -0.0
    found(write_checkpoint(tmp_path / "dead", tensors), "dead-tensor")


def test_one_live_code_far_from_the_sample_keeps_a_matrix_alive(tmp_path):
    tensors = tiny_tensors()
    wide = torch.zeros(64, 1024, dtype=torch.bfloat16)
    wide[63, 1023] = 0.01
    tensors["model.layers.0.mlp.down_proj.weight"] = wide
    for projection in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{projection}.weight"] = torch.full((1024, 64), 0.02, dtype=torch.bfloat16)
    assert lint_checkpoint(write_checkpoint(tmp_path / "sparse", tensors)).findings == ()


def test_doubled_global_of_one_expert_stands_out(modelopt, broken):
    def double(tensors):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{EXPERT}{projection}.weight_scale_2"] *= 2

    finding = found(broken(modelopt, double), "scale-outlier", "warning")
    assert finding.tensor.startswith(EXPERT)
    assert "its layer's other experts" in finding.message


def test_doubled_globals_of_a_whole_layer_stand_out_when_there_are_peers(tmp_path):
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"model.layers.{layer}.mlp.{p}.weight": (torch.randn(64, 64, generator=generator) * 0.02).bfloat16()
        for layer in range(6)
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    source = write_checkpoint(tmp_path / "deep", tensors, num_hidden_layers=6)
    quantize_checkpoint(source, tmp_path / "q", format="nvfp4", dialect="modelopt")
    assert lint_checkpoint(tmp_path / "q").findings == ()
    file = tmp_path / "q" / "model.safetensors"
    stored = load_file(file)
    for name in [n for n in stored if ".layers.3." in n and n.endswith("weight_scale_2")]:
        stored[name] = stored[name] * 2
    save_file(stored, file)
    finding = found(tmp_path / "q", "scale-outlier", "warning")
    assert ".layers.3." in finding.tensor
    assert "2 times as large" in finding.message or "1.9" in finding.message or "2.0" in finding.message


def test_swapped_nibbles_are_not_statically_visible(modelopt, broken):
    """Stated in the module: both orders decode to plausible weights. Only the source tells (SQNR about 0 dB)."""

    def swap(tensors):
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            tensors[name] = (tensors[name] >> 4) | (tensors[name] << 4)

    assert lint_checkpoint(broken(modelopt, swap)).findings == ()


# ---- the interface ---------------------------------------------------------------------------------------------------


def test_unknown_allow_id_names_the_known_ones(plain):
    with pytest.raises(ConfigError) as caught:
        lint_checkpoint(plain, allow=["scale-nam"])
    assert "scale-nan" in caught.value.fix


def test_a_missing_shard_is_one_finding_beside_the_others(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "copy"))
    (target / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors" in found(target, "index-vs-files").message


def test_a_checkpoint_that_cannot_be_opened_raises(tmp_path):
    with pytest.raises(CheckpointError):
        lint_checkpoint(tmp_path / "nowhere")


def test_errors_come_before_warnings(modelopt, broken):
    def edit(tensors):
        set_scale_byte(GATE + ".weight_scale", 0, 2)(tensors)
        set_scale_byte(EXPERT + "down_proj.weight_scale", 0x7F)(tensors)

    severities = [f.severity for f in lint_checkpoint(broken(modelopt, edit)).findings]
    assert severities == ["error", "warning"]
