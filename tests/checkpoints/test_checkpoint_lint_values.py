"""Lint on values: NaN and infinity anywhere in a small checkpoint, and what is read of a large one."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import lint_values, open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.lint_reads import FLOATS, ValueScan, scan_floats
from workbench.records import LintFinding, LintReport

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def nonfinite(path: Path, **options: object) -> list[LintFinding]:
    return [f for f in lint_checkpoint(path, **options).findings if f.check == "nan-values"]


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "BF16", "F16"])
def test_every_byte_or_pair_of_bytes_is_seen_as_torch_sees_it(kind):
    size = DTYPES[kind].itemsize
    codes = np.arange(1 << 8 * size, dtype=f"<u{size}")
    values = torch.from_numpy(codes.view(np.uint8).copy()).view(DTYPES[kind]).float()
    for code, value in list(zip(codes, values.tolist(), strict=True))[:: 1 if size == 1 else 37]:
        expected = ValueScan(alive=value != 0, nonfinite=not math.isfinite(value))
        assert scan_floats(code.tobytes(), kind) == expected, code


@pytest.mark.parametrize("kind", ["F32", "F64"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 3.4e38, -1.0])
def test_wide_floats(kind, value):
    tensor = torch.tensor([0.0, value], dtype=torch.float64).to(DTYPES[kind])
    seen = scan_floats(tensor.numpy().tobytes(), kind)
    assert seen == ValueScan(alive=float(tensor[1]) != 0, nonfinite=not math.isfinite(tensor[1]))
    assert set(DTYPES) == set(FLOATS)


@pytest.mark.parametrize(
    "name",
    [
        Q_PROJ,
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "vision_tower.patch.weight",
    ],
)
@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (-1, math.inf), (77, -math.inf)])
def test_one_value_of_a_plain_tensor(tmp_path, name, place, value):
    """The matrix has 64 KiB: a sample of its middle would not see it."""
    tensors = tiny_tensors()
    tensors[Q_PROJ] = torch.full((512, 64), 0.02, dtype=torch.bfloat16)
    tensors["vision_tower.patch.weight"] = torch.full((40, 3, 14, 14), 0.02)
    flat = tensors[name].view(-1)
    flat[place % len(flat)] = value
    (finding,) = lint_checkpoint(write_checkpoint(tmp_path / "m", tensors)).findings
    assert (finding.check, finding.severity, finding.tensors) == ("nan-values", "error", (name,))


@pytest.mark.parametrize(
    ("format", "dialect"),
    [("fp8_channel", "modelopt"), ("fp8_block", "compressed_tensors"), ("mxfp8_e4m3", "modelopt")],
)
@pytest.mark.parametrize("place", [0, -1])
def test_one_fp8_code(tmp_path, format, dialect, place):
    tensors = tiny_tensors()
    tensors[Q_PROJ] = torch.full((512, 64), 0.02, dtype=torch.bfloat16)
    source = write_checkpoint(tmp_path / "m", tensors)
    quantize_checkpoint(source, tmp_path / "q", format=format, dialect=dialect)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    stored[Q_PROJ].view(torch.uint8).view(-1)[place] = 0x7F
    save_file(stored, tmp_path / "q" / "model.safetensors")
    (finding,) = lint_checkpoint(tmp_path / "q").findings
    assert (finding.check, finding.tensors) == ("nan-values", (Q_PROJ,))


def test_a_scale_of_a_layers_input(modelopt, broken):
    module = "model.layers.0.mlp.down_proj"

    def edit(tensors):
        tensors[module + ".pre_quant_scale"] = torch.ones(32, dtype=torch.bfloat16)
        tensors[module + ".pre_quant_scale"][3] = math.nan

    (finding,) = nonfinite(broken(modelopt, edit))
    assert finding.tensors == (module + ".weight",)


def test_a_scale_of_the_kv_cache_is_named_once(tmp_path):
    tensors = tiny_tensors() | {"model.layers.0.self_attn.k_scale": torch.tensor(math.nan)}
    (finding,) = lint_checkpoint(write_checkpoint(tmp_path / "kv", tensors)).findings
    assert finding.check == "kv-scale"


def test_codes_that_cannot_be_nan_are_not_counted(modelopt):
    """Every byte 0x7F of an NVFP4 matrix is a pair of finite codes."""
    report = lint_checkpoint(modelopt)
    with open_checkpoint(modelopt) as checkpoint:
        plain = sum(checkpoint.parts(e.name)["values"].nbytes for e in checkpoint.entries() if not e.quantized)
    assert report.value_bytes_read == report.value_bytes == plain > 0


# ---- stacks ----------------------------------------------------------------------------------------------------------

STACK = "model.layers.0.mlp.experts."


def stacks(path: Path, expert: int, row: int) -> Path:
    """Three experts of 256 x 64; one NaN in a row of one expert's gate and up."""
    tensors = {
        STACK + "gate_up_proj": torch.full((3, 512, 64), 0.02, dtype=torch.bfloat16),
        STACK + "down_proj": torch.full((3, 64, 256), 0.02, dtype=torch.bfloat16),
    }
    tensors[STACK + "gate_up_proj"][expert, row, 1] = math.nan
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "hidden_size": 64}))
    return path


@pytest.mark.parametrize(("expert", "row", "projection"), [(0, 0, "gate"), (2, 255, "gate"), (1, 256, "up")])
def test_a_value_of_a_stack_is_one_experts(tmp_path, expert, row, projection):
    (finding,) = nonfinite(stacks(tmp_path / "m", expert, row))
    assert finding.tensors == (f"{STACK}{expert}.{projection}_proj.weight",)


def test_without_a_budget_to_tell_whose_it_is_all_of_a_stack_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lint_values, "CODE_BUDGET", 0)
    (finding,) = nonfinite(stacks(tmp_path / "m", 1, 256))
    assert finding.tensors == tuple(f"{STACK}{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up"))


# ---- large checkpoints -----------------------------------------------------------------------------------------------


def wide(path: Path, *places: int) -> Path:
    """One matrix of 1 MiB beside a norm; NaN at some places."""
    tensors = {
        "model.layers.0.mlp.down_proj.weight": torch.full((512, 1024), 0.02, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(512, dtype=torch.bfloat16),
    }
    for place in places:
        tensors["model.layers.0.mlp.down_proj.weight"].view(-1)[place] = math.nan
    return write_checkpoint(path, tensors, shards=1, num_hidden_layers=1, n_routed_experts=0)


@pytest.mark.parametrize(("place", "seen"), [(0, True), (1 << 18, True), (-1, True), (1 << 17, False)])
def test_beyond_the_budget_start_middle_and_end_are_read_and_the_report_says_so(tmp_path, monkeypatch, place, seen):
    monkeypatch.setattr(lint_values, "VALUE_BUDGET", 60_000)
    path = wide(tmp_path / "m", place)
    report = lint_checkpoint(path)
    assert bool(report.findings) == seen
    assert (report.value_bytes, report.value_bytes_read) == ((1 << 20) + 1024, 30_000 + 1024)
    whole = lint_checkpoint(path, all_values=True)
    assert [f.check for f in whole.findings] == ["nan-values"]
    assert whole.value_bytes_read == whole.value_bytes


def test_a_tensor_is_read_in_pieces(tmp_path):
    """64 MiB take the memory of one read of 8 MiB and its masked copy, not their own."""
    tensors = {"model.embed_tokens.weight": torch.full((1 << 14, 2048), 0.02, dtype=torch.bfloat16)}
    path = write_checkpoint(tmp_path / "m", tensors, shards=1)
    del tensors
    tracemalloc.start()
    report = lint_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.value_bytes_read == 1 << 26
    assert peak < 40 << 20


def test_reports_from_before_values_were_counted_are_read(tmp_path, plain):
    from workbench import records

    records.write_json(tmp_path / "new.json", lint_checkpoint(plain))
    content = json.loads((tmp_path / "new.json").read_text())
    del content["value_bytes"], content["value_bytes_read"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = records.read_json(LintReport, tmp_path / "old.json")
    assert (old.value_bytes, old.value_bytes_read) == (0, 0)
