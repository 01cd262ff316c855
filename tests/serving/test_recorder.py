"""What the recorder keeps of the rows that it is shown: second moments of all of them, within what they may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench.formats.activations import read_activations
from workbench.serving.vllm_plugin.recorder import ActivationRecorder

GATE, UP, DOWN = (f"model.layers.1.mlp.experts.3.{name}_proj" for name in ("gate", "up", "down"))


def recorder(moments: str, full_bytes: int = 1 << 20) -> ActivationRecorder:
    made = ActivationRecorder()
    made.limit, made.moments, made.full_bytes, made.enabled = 8, moments, full_bytes, True
    return made


def calls() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 3, 16)
    return [(torch.randn(rows, 16, generator=generator) * scale).bfloat16() for rows in (1, 700, 2100)]


@pytest.mark.parametrize("moments", ["diagonal", "full"])
def test_moments_are_of_all_rows_and_the_sample_is_not(tmp_path: Path, moments: str) -> None:
    made = recorder(moments)
    for x in calls():
        made.record([GATE, UP], x)
    made.write(tmp_path / "a", expected=[GATE, UP, DOWN], metadata={})
    captured = read_activations(tmp_path / "a")
    assert len(captured.input(GATE)) == 8
    assert captured.tokens_seen(UP) == 2801
    rows = torch.cat(calls()).double()
    want = rows.T @ rows / len(rows)
    got = captured.second_moment(UP)  # an alias of the gate's
    assert got is not None
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), want if moments == "full" else want.diagonal(), rtol=1e-6, atol=1e-7 * float(want.abs().min())
    )
    assert captured.second_moment(DOWN) is None  # no token reached it
    assert captured.metadata["second_moments"] == moments


def test_what_does_not_fit_keeps_its_diagonal_and_is_counted(tmp_path: Path) -> None:
    made = recorder("full", full_bytes=4 * 16 * 16)
    for x in calls():
        made.record([GATE, UP], x)
        made.record([DOWN], x[:, :8])
    made.write(tmp_path / "a", expected=[], metadata={})
    captured = read_activations(tmp_path / "a")
    shapes = {module: tuple(captured.second_moment(module).shape) for module in (GATE, DOWN)}  # type: ignore[union-attr]
    assert shapes == {GATE: (16, 16), DOWN: (8,)}
    assert captured.metadata["second_moments_diagonal_only"] == "1"


def test_no_moments_are_no_moments(tmp_path: Path) -> None:
    made = recorder("none")
    made.record([GATE], calls()[0])
    made.write(tmp_path / "a", expected=[], metadata={})
    assert read_activations(tmp_path / "a").second_moment(GATE) is None
