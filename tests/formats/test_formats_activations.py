"""The activations file, and the recorder that fills it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import CheckpointError
from workbench.formats.activations import read_activations, write_activations
from workbench.serving.vllm_plugin.recorder import ActivationRecorder


def test_written_activations_are_read_back_through_their_aliases(tmp_path):
    rows = torch.randn(3, 8).bfloat16()
    path = tmp_path / "a" / "activations.safetensors"
    write_activations(
        path,
        inputs={"m.gate": rows},
        amax={"m.gate": 2.5},
        tokens_seen={"m.gate": 7},
        aliases={"m.up": "m.gate"},
        metadata={"dtype": "bfloat16"},
    )
    captured = read_activations(path)
    assert captured.modules() == ["m.gate", "m.up"]
    assert torch.equal(captured.input("m.up"), rows)
    assert captured.input("m.up").dtype == torch.bfloat16
    assert (captured.amax("m.up"), captured.tokens_seen("m.gate")) == (2.5, 7)
    assert captured.metadata["dtype"] == "bfloat16"
    assert "m.up" in captured
    assert "m.down" not in captured
    with pytest.raises(CheckpointError, match=r"no activations of m\.down"):
        captured.input("m.down")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_is_no_activations_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        read_activations(tmp_path / "missing")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="no activations file"):
        read_activations(tmp_path / "other")
    with pytest.raises(ValueError, match="different modules"):
        write_activations(tmp_path / "x", inputs={"a": torch.ones(1, 1)}, amax={}, tokens_seen={})
    with pytest.raises(ValueError, match="without a stored module"):
        write_activations(
            tmp_path / "x", inputs={"a": torch.ones(1, 1)}, amax={"a": 1.0}, tokens_seen={"a": 1}, aliases={"b": "c"}
        )


def test_the_recorder_keeps_a_uniform_sample_and_exact_totals(tmp_path):
    recorder = ActivationRecorder()
    recorder.record(["m"], torch.full((5, 1), 99.0))  # off: start-up runs dummy tokens
    recorder.limit, recorder.enabled = 200, True
    values = torch.arange(20000, dtype=torch.float32).unsqueeze(-1)
    for chunk in values.split(333):
        recorder.record(["m", "alias"], chunk)
    recorder.write(tmp_path / "f", expected=["m", "alias", "unseen"], metadata={})
    captured = read_activations(tmp_path / "f")
    kept = captured.input("alias").squeeze(-1)
    assert captured.tokens_seen("m") == 20000
    assert captured.amax("m") == 19999.0
    assert kept.numel() == kept.unique().numel() == 200
    assert bool((kept.diff() > 0).all())  # in order of arrival
    assert abs(float(kept.mean()) - 10000) < 4 * 5774 / 200**0.5  # four standard errors of a uniform sample
    assert captured.tokens_seen("unseen") == 0
    assert captured.input("unseen").shape[0] == 0
