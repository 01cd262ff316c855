"""ModelOpt's own exports (golden_modelopt.*) as checkpoints, for the tests of that dialect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import DIALECTS, choose_dialect
from workbench.checkpoints.files import Folder
from workbench.errors import CheckpointError

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_modelopt.json").read_text())["presets"]
K_PROJ = "model.layers.0.self_attn.k_proj"
W = f"{K_PROJ}.weight"


def golden(preset: str) -> dict[str, torch.Tensor]:
    stored = load_file(HERE / "golden_modelopt.safetensors")
    return {n.partition("/")[2]: t for n, t in stored.items() if n.startswith(preset + "/")}


def write(path: Path, tensors: dict[str, torch.Tensor], block: object = None, side: object = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    config = {"model_type": "llama"} | ({} if block is None else {"quantization_config": block})
    (path / "config.json").write_text(json.dumps(config))
    if side is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(side))
    return path


def write_golden(path: Path, preset: str) -> Path:
    facts = GOLDEN[preset]
    return write(path, golden(preset), facts["quantization_config"], facts["hf_quant_config"])


def declare(tmp_path: Path, block: object = None, side: object = None):
    if side is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    config = {} if block is None else {"quantization_config": block}
    folder = Folder(path=tmp_path, tensors={}, config=config, files=(), headers={})
    assert choose_dialect(folder).name == "modelopt"
    return DIALECTS["modelopt"].declare(folder)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.fix
