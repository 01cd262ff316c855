"""Real published configs (WORKBENCH_SHARED_DATA's metadata): each gives the plan that a person reads in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_plans import PLANS

from workbench.checkpoints.dialects import Declaration, choose_dialect
from workbench.checkpoints.files import Folder
from workbench.checkpoints.header import StoredTensor

BARE_BLOCK = "compressed-tensors-example--llama1.1b_quant"  # a quantization_config without its config.json


def declare(root: Path, tmp_path: Path, model: str) -> tuple[str, Declaration]:
    """Dialect and declaration of a published model, from the one or two files of it, with the plan's modules there."""
    found = [p for p in (root / f"{model}_config.json", root / f"{model}.json") if p.is_file()]
    config = json.loads(found[0].read_text()) if found else {}
    if model == BARE_BLOCK:
        config = {"quantization_config": config}
    side = root / f"{model}_hf_quant_config.json"
    if side.is_file():
        (tmp_path / "hf_quant_config.json").write_text(side.read_text())
    names = [f"{module}.weight" for module in PLANS[model].formats]
    tensors = {name: StoredTensor(name, "model.safetensors", "BF16", (8, 8), 0, 128) for name in names}
    folder = Folder(path=tmp_path, tensors=tensors, config=config, files=(), headers={})
    dialect = choose_dialect(folder)
    return dialect.name, dialect.declare(folder)


@pytest.mark.parametrize("model", PLANS)
def test_a_published_config_gives_the_plan_that_stands_in_it(shared_data, tmp_path, model):
    dialect, declared = declare(shared_data / "metadata", tmp_path, model)
    plan = PLANS[model]
    assert (dialect, declared.algorithm) == (plan.dialect, plan.algorithm)
    assert {module: declared.format_of(module) for module in plan.formats} == plan.formats
    assert all(declared.expects_quantized(module) == bool(format) for module, format in plan.formats.items())
    said = (declared.kv_cache, declared.activations, len(declared.weight_only))
    assert said == (plan.kv_cache, plan.activations, plan.weight_only)
    if plan.modules:
        assert len(declared.modules) == plan.modules
    assert len(declared.excludes) == plan.excludes
    assert len(declared.conflicts) == len(plan.conflicts)
    assert all(any(word in conflict for conflict in declared.conflicts) for word in plan.conflicts)


def test_no_published_file_is_left_out(shared_data):
    files = {file.name for file in (shared_data / "metadata").glob("*.json")}
    read = {f"{model}{end}.json" for model in PLANS for end in ("_config", "_hf_quant_config", "")}
    assert files - read == set()
