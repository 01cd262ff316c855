"""Conversions of odd sources and requests: what is told, what is refused, and nothing that ends in a traceback."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import check_request, quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.errors import ConfigError, FormatError
from workbench.formats import quantize

GATE = "model.layers.0.mlp.gate_proj.weight"
NORM = "model.norm.weight"
NVFP4 = {"format": "nvfp4", "dialect": "modelopt"}


def odd(path: Path, **tensors: torch.Tensor) -> Path:
    return write_checkpoint(path, tiny_tensors() | tensors, shards=1)


def test_mxfp4_projections_of_two_widths_are_rounded_one_by_one(tmp_path):
    """No server can fuse them, so no codes are carried under one scale."""
    narrow = torch.linspace(-0.04, 0.04, 32 * 32).reshape(32, 32).bfloat16()
    source = odd(tmp_path / "source", **{GATE: narrow})
    quantize_checkpoint(source, tmp_path / "mxfp4", format="mxfp4", dialect="quark")
    quantize_checkpoint(tmp_path / "mxfp4", tmp_path / "q", **NVFP4)
    with open_checkpoint(tmp_path / "mxfp4") as before, open_checkpoint(tmp_path / "q") as after:
        gate, up = before.read_dense(GATE), before.read_dense(GATE.replace("gate", "up"))
        shared = torch.maximum(gate.abs().amax(), up.abs().amax()) / 2688
        expected = quantize(gate, "nvfp4", global_scale=shared)
        assert torch.equal(after.read_dense(GATE), expected.dequantize())


@pytest.mark.parametrize("target", [NVFP4, {"format": "bf16", "dialect": "plain"}], ids=lambda t: t["format"])
def test_a_kept_tensor_with_nan_is_written_as_it_is_and_told(tmp_path, target):
    norm = torch.ones(64, dtype=torch.bfloat16)
    norm[3] = math.nan
    result = quantize_checkpoint(odd(tmp_path / "source", **{NORM: norm}), tmp_path / "q", **target)
    (warning,) = [w for w in result.warnings if "broken" in w]
    assert f"{NORM} in model.safetensors is written with NaN or infinite values (1 of 64)" in warning
    assert load_file(tmp_path / "q" / "model.safetensors")[NORM].isnan().sum() == 1


def test_a_value_that_the_target_dtype_cannot_hold_is_told(tmp_path):
    gate = torch.zeros(32, 64, dtype=torch.float64)
    gate[0, :2] = torch.tensor([1e300, 3e38])  # the second is none of bf16's infinities
    source = odd(tmp_path / "source", **{GATE: gate})
    result = quantize_checkpoint(source, tmp_path / "q", format="bf16", dialect="plain")
    assert f"{GATE} in model.safetensors is written with NaN or infinite values (1 of 2048)" in result.warnings[0]


@pytest.mark.parametrize(
    ("format", "dialect", "block", "axis"),
    [
        ("fp8_block", "compressed_tensors", (1 << 30, 1 << 30), "N = 64"),
        ("fp8_block", "compressed_tensors", (1, 4097), "K = 32"),
        ("int4_group", "quark", (1, 1 << 30), "K = 32"),
    ],
)
def test_a_block_far_larger_than_the_matrix_is_refused_before_memory_is_taken(
    plain, tmp_path, format, dialect, block, axis
):
    with pytest.raises(FormatError, match=f"larger than its {axis}") as caught:
        quantize_checkpoint(plain, tmp_path / "q", format=format, dialect=dialect, block=block)
    assert "--exclude" in caught.value.fix
    assert not (tmp_path / "q").exists()


def test_a_block_somewhat_larger_than_the_matrix_is_one_block(plain, tmp_path):
    options = {"format": "fp8_block", "dialect": "compressed_tensors", "block": (256, 4096)}
    result = quantize_checkpoint(plain, tmp_path / "q", **options, include=[GATE.removesuffix(".weight")])
    assert [o.block for o in result.outcomes if o.block] == [(256, 4096)]
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert stored[GATE + "_scale"].shape == (1, 1)
    assert stored[GATE].shape == (32, 64)


@pytest.mark.parametrize("block", [((1 << 30) + 1, 1), (0, 0), (-1, 5)])
def test_a_block_that_no_format_has_is_refused_before_a_calibration_starts(block):
    with pytest.raises(FormatError, match=f"fp8_block has no blocks of {block[0]} x {block[1]}"):
        check_request("fp8_block", "compressed_tensors", None, None, block=block, shared_globals=True)


@pytest.mark.parametrize(("option", "value"), [("jobs", 0), ("max_shard_bytes", 0), ("max_shard_bytes", -5)])
def test_counts_below_one_are_refused(plain, tmp_path, option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        quantize_checkpoint(plain, tmp_path / "q", **NVFP4, **{option: value})


@pytest.mark.parametrize("target", [NVFP4, {"format": "mxfp4", "dialect": "quark"}], ids=lambda t: t["format"])
def test_scales_that_lint_will_reject_are_told_when_they_are_written(tmp_path, target):
    source = odd(tmp_path / "source", **{GATE: (torch.ones(32, 64) * 1e30).bfloat16()})
    result = quantize_checkpoint(source, tmp_path / "q", **target)
    (warning,) = [w for w in result.warnings if "global-scale-range" in w]
    rejected = {name for f in lint_checkpoint(result.path).findings if f.severity == "error" for name in f.tensors}
    assert GATE in rejected
    assert f"{len(rejected)} tensors" in warning
    sound = quantize_checkpoint(odd(tmp_path / "sound"), tmp_path / "q2", **target)
    assert not [w for w in sound.warnings if "lint" in w]


def test_a_source_that_lint_rejects_by_its_headers_is_told(tmp_path):
    source = odd(tmp_path / "source", **{GATE: torch.ones(16, 64).bfloat16()})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"n_routed_experts": -3}))
    warnings = [w for w in quantize_checkpoint(source, tmp_path / "q", **NVFP4).warnings if "lint rejects" in w]
    assert len(warnings) == 2
    assert "config-conflict: config.json: n_routed_experts is -3" in warnings[0]
    assert "shape-conflict" in warnings[1]
