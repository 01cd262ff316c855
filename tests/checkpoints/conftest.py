"""Checkpoints for the tests of this folder, and ways to break a copy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "tiny", tiny_tensors())


@pytest.fixture(scope="session")
def input_amax() -> dict[str, float]:
    """Every projection measured, with its own value."""
    names = [n.removesuffix(".weight") for n in tiny_tensors() if "_proj" in n]
    return {name: 1.0 + 0.01 * i for i, name in enumerate(names)}


@pytest.fixture(scope="session")
def modelopt(plain: Path, input_amax: dict[str, float]) -> Path:
    from workbench.checkpoints.convert import quantize_checkpoint

    target = plain.parent / "nvfp4"
    quantize_checkpoint(plain, target, format="nvfp4", dialect="modelopt", input_amax=input_amax)
    return target


@pytest.fixture(scope="session")
def quark(plain: Path) -> Path:
    from workbench.checkpoints.convert import quantize_checkpoint

    target = plain.parent / "mxfp4"
    quantize_checkpoint(plain, target, format="mxfp4", dialect="quark")
    return target


Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """broken(source, edit, **config): a copy of a one-shard checkpoint whose tensors (and config keys) were edited."""

    def make(source: Path, edit: Edit | None = None, **config: object) -> Path:
        target = tmp_path / "broken"
        shutil.copytree(source, target)
        if edit is not None:
            file = target / "model.safetensors"
            tensors = load_file(file)
            edit(tensors)
            save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
        if config:
            content = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps({**content, **config}))
        return target

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party checkpoints, where the developer has them; the tests that read them skip otherwise."""
    root = os.environ.get("WORKBENCH_SHARED_DATA")
    if not root:
        pytest.skip("WORKBENCH_SHARED_DATA is not set")
    return Path(root)
