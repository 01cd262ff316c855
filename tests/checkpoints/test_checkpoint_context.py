"""The context that a model holds by its config, and what it does to the one asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench import cli
from workbench.checkpoints.context import ALLOW_LONGER, context_length, fit_context
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 1024}, "max_position_embeddings": 77}, 1024),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 2048, "rope_parameters": {"full_attention": {"rope_type": "linear"}}}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": None}}, None),
        ({"max_position_embeddings": 2048, "model_max_length": 8192}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": None}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_models_own_context(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


@pytest.fixture
def short(tmp_path: Path) -> Path:
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return tmp_path / "short"


def test_a_default_gives_way_and_what_is_asked_for_is_refused(short: Path, tmp_path: Path) -> None:
    fit = {"default": 4096, "key": "--max-model-len {}"}
    assert fit_context(4096, [short, tmp_path / "absent"], **fit) == 2048
    assert fit_context(1024, [short], **fit) == 1024
    assert fit_context(0, [short], **fit) == 0
    assert fit_context(4096, [tmp_path / "absent"], **fit) == 4096
    with pytest.raises(ConfigError, match=r"--max-model-len 8192 is more than .*short holds: 2048") as refused:
        fit_context(8192, [short], **fit)
    assert refused.value.fix == "--max-model-len 2048"


@pytest.mark.parametrize("words", [["serve"], ["numerics"], ["calibrate", "--out", "x"]])
def test_the_command_line_asks_for_no_more_than_the_model_holds(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = write_checkpoint(tmp_path / "tiny", tiny_tensors(), max_position_embeddings=512)
    (tmp_path / "p.txt").write_text("a prompt")
    asked = []
    for place in ("serve.serve_forever", "serve.take_card", "capture.capture_activations"):
        monkeypatch.setattr(f"workbench.serving.{place}", lambda spec, *_, **__: asked.append(spec) or sys.exit(9))
    prompts = ["--prompts", "p.txt"] if words[0] == "calibrate" else []
    with pytest.raises(SystemExit, match="9"):
        cli._run([*words, str(short), *prompts])
    assert asked[0].engine.max_model_len == 512
    assert cli.main([*words, str(short), *prompts, "--max-model-len", "600"]) == 3
    assert "--max-model-len 512" in capsys.readouterr().err


def test_the_engines_own_switch_is_left_to_it(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LONGER, "1")
    assert fit_context(8192, [short], default=4096, key="{}") == 8192
