"""The plugin's touch points with vLLM exist in the installed version, and the check tells when one does not."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import vllm_touch_points
from vllm_touch_points import POINTS, missing

from workbench.serving import vllm_plugin


@pytest.fixture
def vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent


def test_the_installed_vllm_has_them(vllm: Path) -> None:
    assert missing(vllm) == []


def test_what_is_missing_is_named(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        ("nowhere", "x", ()),
        ("logger", "no_such", ()),
        ("model_executor/layers/linear", "LinearBase.self.no_such", ()),
        ("model_executor/layers/linear", "LinearMethodBase.no_such", ()),
        ("model_executor/layers/linear", "LinearMethodBase.apply", ("x", "no_such")),
    ]
    monkeypatch.setattr(vllm_touch_points, "POINTS", wrong)
    found = missing(vllm)
    assert len(found) == len(wrong)
    assert all("no_such" in line or "nowhere" in line for line in found)


def test_every_import_of_the_plugin_is_among_them() -> None:
    listed = {name.split(".")[0] for _, name, _ in POINTS}
    listed |= {"current_platform", "parallel_state"}  # instances and modules, whose members are listed
    optional = {"cpu_fused_moe", "cpu_prepack_moe_weight"}  # imported where they exist
    for file in Path(vllm_plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                assert {alias.name for alias in node.names} <= listed | optional, file.name
