"""Lint on scales: every format and dialect, stacks of experts, samples beyond the budget, and factors between peers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import lint_facts, lint_values, open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.records import LintFinding, LintReport

EXPERT = "model.layers.1.mlp.experts.2."
Edit = Callable[[dict[str, torch.Tensor]], None]


def findings(path: Path, check: str, **options: object) -> list[LintFinding]:
    return [f for f in lint_checkpoint(path, **options).findings if f.check == check]


def quantized(plain: Path, tmp_path: Path, format: str, dialect: str, edit: Edit | None = None, **options) -> Path:
    """The tiny checkpoint in `format`, its stored tensors edited."""
    target = tmp_path / f"{format}-{dialect}"
    quantize_checkpoint(plain, target, format=format, dialect=dialect, **options)
    if edit is not None:
        tensors = load_file(target / "model.safetensors")
        edit(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fill(name: str, value: float, first: int = 1) -> Edit:
    """Set the first values of a stored tensor."""
    return lambda tensors: tensors[name].view(-1)[:first].fill_(value)


# ---- every format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "dialect"),
    [
        *((f, "modelopt") for f in ("mxfp4", "mxfp8_e4m3", "fp8_tensor", "fp8_channel", "fp8_block")),
        *((f, "compressed_tensors") for f in ("nvfp4", "mxfp4", "fp8_tensor", "fp8_channel", "int8_channel")),
        *((f, "quark") for f in ("nvfp4", "mxfp6_e3m2", "fp8_channel")),
    ],
)
def test_a_clean_conversion_has_no_finding_in_any_format(plain, tmp_path, input_amax, format, dialect):
    static = {"input_amax": input_amax} if (format, dialect) == ("fp8_tensor", "modelopt") else {}
    report = lint_checkpoint(quantized(plain, tmp_path, format, dialect, **static))
    assert report.findings == ()
    assert report.scale_bytes_read == report.scale_bytes > 0


def test_static_fp8_without_any_input_scale(plain, tmp_path):
    """quant_algo FP8 means static activations: the reader waits for a scale."""
    (finding,) = findings(quantized(plain, tmp_path, "fp8_tensor", "modelopt"), "input-scale-missing")
    assert (finding.severity, finding.count) == ("warning", 45)


@pytest.mark.parametrize(
    ("value", "check", "severity", "words"),
    [
        (math.nan, "scale-nan", "error", "1 of 32 block scales are NaN"),
        (math.inf, "scale-nan", "error", "1 of 32 block scales are infinite"),
        (-1.0, "scale-zero-or-negative", "error", "1 of 32 block scales are negative"),
        (0.0, "scale-zero-or-negative", "error", "1 of 32 block scales are zero, their codes are not"),
        (1e6, "global-scale-range", "error", "weights up to 4.48e+08"),
    ],
)
def test_float_scales(plain, tmp_path, value, check, severity, words):
    edit = fill(EXPERT + "gate_proj.weight_scale", value)
    (finding,) = findings(quantized(plain, tmp_path, "fp8_channel", "modelopt", edit), check)
    assert finding.severity == severity
    assert words in finding.message
    assert finding.tensors == (EXPERT + "gate_proj.weight",)


def test_an_fp8_matrix_of_nan_bytes_as_modelopt_writes_an_all_zero_one(plain, tmp_path):
    def edit(tensors):
        tensors[EXPERT + "gate_proj.weight"].view(torch.uint8).fill_(0x7F)
        tensors[EXPERT + "gate_proj.weight_scale"].zero_()

    path = quantized(plain, tmp_path, "fp8_tensor", "modelopt", edit)
    assert findings(path, "nan-values")[0].tensors == (EXPERT + "gate_proj.weight",)
    assert findings(path, "scale-zero-or-negative")
    assert not findings(path, "dead-tensor")


def test_plain_weights_that_are_infinite(tmp_path):
    tensors = tiny_tensors()
    tensors[EXPERT + "up_proj.weight"][16, 32] = math.inf
    (finding,) = findings(write_checkpoint(tmp_path / "inf", tensors), "nan-values")
    assert finding.tensor == EXPERT + "up_proj.weight"


# ---- divisors --------------------------------------------------------------------------------------------------------


def test_a_multiplier_stored_as_compressed_tensors_divisor(plain, tmp_path):
    name = EXPERT + "down_proj.weight_global_scale"
    path = quantized(plain, tmp_path, "nvfp4", "compressed_tensors", lambda t: t[name].copy_(1 / t[name]))
    (finding,) = findings(path, "global-scale-reciprocal")
    assert finding.tensors == (EXPERT + "down_proj.weight",)
    assert not findings(path, "global-scale-range")


def test_an_input_divisor_of_zero_is_a_missing_scale_and_never_infinite(plain, tmp_path, input_amax):
    edit = fill(EXPERT + "down_proj.input_global_scale", 0.0)
    path = quantized(plain, tmp_path, "nvfp4", "compressed_tensors", edit, input_amax=input_amax)
    (finding,) = findings(path, "input-scale-missing")
    assert "input_scale is 0.0" in finding.message


def test_input_scales_of_exactly_one_were_never_measured(modelopt, broken):
    def edit(tensors):
        for name in [n for n in tensors if n.endswith("input_scale")]:
            tensors[name].fill_(1.0)

    (finding,) = findings(broken(modelopt, edit), "input-scale-missing")
    assert (finding.severity, finding.count) == ("warning", 45)


# ---- stacks of experts -----------------------------------------------------------------------------------------------

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def gpt_oss(path: Path, edit: Edit) -> Path:
    generator = torch.Generator().manual_seed(0)

    def codes(n: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (4, n, k // 32, 16), generator=generator, dtype=torch.uint8)

    tensors = {
        GATE_UP + "_blocks": codes(128, 64),
        GATE_UP + "_scales": torch.full((4, 128, 2), 118, dtype=torch.uint8),
        "model.layers.0.mlp.experts.down_proj_blocks": codes(64, 64),
        "model.layers.0.mlp.experts.down_proj_scales": torch.full((4, 64, 2), 118, dtype=torch.uint8),
    }
    edit(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    block = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config = {"model_type": "gpt_oss", "hidden_size": 64, "num_local_experts": 4, "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    return path


def test_a_fault_in_a_stack_is_one_experts(tmp_path):
    """Rows of gate and up lie in turn: row 5 is up's row 2."""

    def edit(tensors):
        tensors[GATE_UP + "_scales"][2, 5, 0] = 255

    report = lint_checkpoint(gpt_oss(tmp_path / "stack", edit))
    assert [(f.check, f.tensors) for f in report.findings] == [
        ("scale-nan", ("model.layers.0.mlp.experts.2.up_proj.weight",))
    ]
    assert "1 of 128 block scales" in report.findings[0].message


def test_a_dead_half_of_one_expert_in_a_stack(tmp_path):
    def edit(tensors):
        tensors[GATE_UP + "_blocks"][3, 0::2] = 0x80  # +-0

    (finding,) = lint_checkpoint(gpt_oss(tmp_path / "stack", edit)).findings
    assert (finding.check, finding.tensors) == ("dead-tensor", ("model.layers.0.mlp.experts.3.gate_proj.weight",))


def test_a_scale_an_expert_in_an_fp8_stack(tmp_path):
    """[E] scales: each expert's own value is judged, not the stack's first."""
    generator = torch.Generator().manual_seed(0)
    down = "model.layers.0.mlp.experts.down_proj"
    tensors = {
        down: torch.randn(3, 64, 32, generator=generator).to(torch.float8_e4m3fn),
        down + "_scale_inv": torch.tensor([0.01, math.nan, 0.02]),
    }
    (tmp_path / "stack").mkdir()
    save_file(tensors, tmp_path / "stack" / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "stack" / "config.json").write_text(json.dumps(config))
    (finding,) = findings(tmp_path / "stack", "scale-nan")
    assert finding.tensors == ("model.layers.0.mlp.experts.1.down_proj.weight",)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_beyond_the_budget_scales_are_sampled_scalars_are_not_and_the_report_says_so(monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(0)
    down = "model.layers.0.mlp.down_proj"
    tensors = {down + ".weight": (torch.randn(256, 512, generator=generator) * 0.02).bfloat16()}
    source = write_checkpoint(tmp_path / "wide", tensors, shards=1, num_hidden_layers=1)

    def edit(stored):
        stored[down + ".weight_scale"].view(torch.uint8).view(-1)[2000] = 0x7F  # of 8192: outside the three windows
        stored[down + ".weight_scale_2"].fill_(math.nan)

    path = quantized(source, tmp_path, "nvfp4", "modelopt", edit)
    monkeypatch.setattr(lint_facts, "SCALE_BUDGET", 3000)
    report = lint_checkpoint(path)
    assert {f.check for f in report.findings} == {"global-scale-range"}
    assert (report.scale_bytes, report.scale_bytes_read) == (8192, 3000)
    whole = lint_checkpoint(path, all_scales=True)
    assert {f.check for f in whole.findings} == {"global-scale-range", "scale-nan"}
    assert whole.scale_bytes_read == 8192


def test_zero_scales_whose_codes_are_not_read_are_told_apart(monkeypatch, modelopt, broken):
    def edit(tensors):
        tensors[EXPERT + "gate_proj.weight_scale"].view(torch.uint8).view(-1)[:2] = 0

    monkeypatch.setattr(lint_values, "CODE_BUDGET", 0)
    (finding,) = findings(broken(modelopt, edit), "scale-zero-or-negative")
    assert "may be harmless" in finding.message


# ---- peers -----------------------------------------------------------------------------------------------------------


def test_what_one_global_for_gate_and_up_costs(tmp_path):
    """Globals 2e-4 and 2e-3, all codes 1.0, block scales 448: the larger part holds 100 / 101 of the power.

    Under the gate's (or the smaller) global up keeps a tenth of its value: error 0.9^2 of its power. Under the larger
    one gate is ten times too large: error 9^2 of a hundredth of up's power. Rescaled, gate's block scales 44.8 round
    to 44: an error of (0.8 / 44.8)^2 of gate's power.
    """
    gate, up = (f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up"))
    tensors = {}
    for module, scale in ((gate, 2e-4), (up, 2e-3)):
        tensors[module + ".weight"] = torch.full((16, 8), 0x22, dtype=torch.uint8)
        tensors[module + ".weight_scale"] = torch.full((16, 1), 448.0).to(torch.float8_e4m3fn)
        tensors[module + ".weight_scale_2"] = torch.tensor(scale)
    (tmp_path / "pair").mkdir()
    save_file(tensors, tmp_path / "pair" / "model.safetensors")
    block = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    (tmp_path / "pair" / "config.json").write_text(json.dumps({"quantization_config": block}))
    (finding,) = findings(tmp_path / "pair", "global-scale-mismatch")
    smaller = 10 * math.log10(101 / (100 * 0.9**2))
    larger = 10 * math.log10(101 / 9.0**2)
    rescaled = 10 * math.log10(101 / (0.8 / 44.8) ** 2)
    assert "gate_proj 0.0002, up_proj 0.002 (ratio 10); 1 of 1 fused groups differ" in finding.message
    assert finding.message.endswith(
        f"max-merge {larger:.1f} dB; gate_proj-only {smaller:.1f} dB; min-merge {smaller:.1f} dB;"
        f" max with rescaled blocks {rescaled:.1f} dB"
    )
    assert finding.tensors == (gate + ".weight", up + ".weight")


def test_fp8_scales_of_fused_projections_may_differ(plain, tmp_path):
    """Servers requantize per-tensor FP8 to the largest scale: no kernel takes one for all."""
    path = quantized(plain, tmp_path, "fp8_tensor", "modelopt", lambda t: t[EXPERT + "up_proj.weight_scale"].mul_(1.25))
    assert not findings(path, "global-scale-mismatch")


def test_all_gates_twice_as_large_as_their_ups(plain, tmp_path):
    """A bias off by one: every exponent of every gate one too large."""

    def edit(tensors):
        for name in [n for n in tensors if n.endswith("gate_proj.weight_scale")]:
            tensors[name] += 1

    (finding,) = findings(quantized(plain, tmp_path, "mxfp4", "quark", edit), "power-of-two-factor")
    assert "gate_proj is 2^1 times as large as its partner in 11 of 11 pairs" in finding.message


def test_block_scales_that_are_all_halved(plain, tmp_path):
    """E4M3FNUZ bytes read as E4M3 have half their value: the largest under every global is 224, not 448."""

    def edit(tensors):
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            tensors[name] = (tensors[name].float() / 2).to(torch.float8_e4m3fn)

    (finding,) = findings(quantized(plain, tmp_path, "nvfp4", "modelopt", edit), "power-of-two-factor")
    assert "224 = 448 / 2" in finding.message


# ---- findings --------------------------------------------------------------------------------------------------------


def test_one_cause_is_one_finding_with_all_names(modelopt, broken, tmp_path):
    def edit(tensors):
        for expert in (0, 1, 3):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale"]

    path = broken(modelopt, edit)
    (finding,) = findings(path, "missing-companion")
    assert finding.count == 3
    assert "(3 such tensors)" in finding.message
    assert finding.tensors == tuple(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (0, 1, 3))
    assert not findings(path, "missing-tensor")  # they are there


def test_the_command_exits_0_1_or_3_and_its_json_has_every_name(plain, modelopt, broken, tmp_path, capsys):
    from workbench import records
    from workbench.cli import main

    def edit(tensors):
        for e in range(4):
            tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight_scale"].view(torch.uint8).view(-1)[0] = 0x7F

    assert main(["lint", str(plain)]) == 0
    assert "clean" in capsys.readouterr().out
    assert main(["lint", str(broken(modelopt, edit)), "--json", str(tmp_path / "lint.json")]) == 1
    assert "experts.0.up_proj" in capsys.readouterr().out
    report = records.read_json(LintReport, tmp_path / "lint.json")
    assert report.findings[0].tensors == tuple(f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4))
    assert main(["lint", str(tmp_path / "nowhere")]) == 3


def test_scales_alone_are_read_without_a_code(modelopt):
    with open_checkpoint(modelopt) as checkpoint:
        q = lint_facts.without_codes(checkpoint).read(EXPERT + "gate_proj.weight")
        assert q.codes.is_meta
        assert torch.equal(q.block_scales, checkpoint.read(EXPERT + "gate_proj.weight").block_scales)
