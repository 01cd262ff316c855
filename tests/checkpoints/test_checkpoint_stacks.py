"""Fused expert stacks in plain checkpoints: which matrices come out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects.stacks import Stack, StackLayout
from workbench.checkpoints.files import Folder
from workbench.errors import CheckpointError

EXPERTS, INNER, HIDDEN = 3, 4, 6
LAYER = "model.layers.0.mlp.experts"


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def experts(e: int = EXPERTS, i: int = INNER, h: int = HIDDEN) -> dict[str, torch.Tensor]:
    """Every expert's own matrices, `[E, N, K]` by projection, all values different."""
    gate = torch.arange(e * i * h, dtype=torch.float32).reshape(e, i, h)
    return {"gate_proj": gate, "up_proj": gate + 1000, "down_proj": (gate + 2000).reshape(e, h, i)}


def read_experts(path: Path, container: str = LAYER) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        names = {e.name for e in checkpoint.entries()}
        found = {}
        for projection in ("gate_proj", "up_proj", "down_proj"):
            mine = sorted(n for n in names if n.startswith(container) and n.endswith(f".{projection}.weight"))
            found[projection] = torch.stack([checkpoint.read(n) for n in mine])
            for name, w in zip(mine, found[projection], strict=True):
                assert checkpoint.entry(name).shape == w.shape
        assert not any(n.endswith("gate_up_proj") for n in names)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for projection, w in expected.items():
        assert torch.equal(found[projection], w), projection


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for fragment in fragments:
        assert fragment in caught.value.message, caught.value.message
    assert "hidden_size" in caught.value.fix


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_transformers_5_stacks_have_gate_before_up(tmp_path, suffix):
    w = experts()
    container = "model.language_model.layers.0.mlp.experts"
    tensors = {
        f"{container}.gate_up_proj{suffix}": torch.cat([w["gate_proj"], w["up_proj"]], 1),
        f"{container}.down_proj{suffix}": w["down_proj"],
    }
    path = write(tmp_path, tensors, model_type="qwen3_5_moe", text_config={"hidden_size": HIDDEN})
    assert_same(read_experts(path, container), w)
    with open_checkpoint(path) as checkpoint:
        entry = checkpoint.entry(f"{container}.1.up_proj.weight")
        assert (entry.layer, entry.expert, entry.projection, entry.format) == (0, 1, "up_proj", "f32")


@pytest.mark.parametrize("model_type", ["llama4_text", "qwen3_vl_moe"])
def test_llama_4_and_qwen3_vl_stacks_are_transposed(tmp_path, model_type):
    w = experts()
    tensors = {
        f"{LAYER}.gate_up_proj": torch.cat([w["gate_proj"], w["up_proj"]], 1).mT.contiguous(),
        f"{LAYER}.down_proj": w["down_proj"].mT.contiguous(),
    }
    assert_same(read_experts(write(tmp_path, tensors, model_type=model_type, hidden_size=HIDDEN)), w)


def test_gpt_oss_stacks_are_transposed_and_interleaved_and_have_biases(tmp_path):
    """I == H as in gpt-oss-20b: down_proj's orientation follows from gate_up_proj's."""
    w = experts(i=HIDDEN)
    gate_up = torch.stack([w["gate_proj"], w["up_proj"]], 2).flatten(1, 2)
    bias = torch.arange(EXPERTS * 2 * HIDDEN, dtype=torch.float32).reshape(EXPERTS, 2 * HIDDEN)
    tensors = {
        f"{LAYER}.gate_up_proj": gate_up.mT.contiguous(),
        f"{LAYER}.gate_up_proj_bias": bias,
        f"{LAYER}.down_proj": w["down_proj"].mT.contiguous(),
        f"{LAYER}.down_proj_bias": bias[:, :HIDDEN].contiguous(),
    }
    path = write(tmp_path, tensors, model_type="gpt_oss", hidden_size=HIDDEN)
    assert_same(read_experts(path), w)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.read(f"{LAYER}.2.gate_proj.bias"), bias[2, 0::2])
        assert torch.equal(checkpoint.read(f"{LAYER}.2.up_proj.bias"), bias[2, 1::2])
        assert torch.equal(checkpoint.read(f"{LAYER}.1.down_proj.bias"), bias[1, :HIDDEN])


@pytest.mark.parametrize(
    ("stored", "container"),
    [
        (("moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight"), "moe.experts"),
        (("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"), "block_sparse_moe.experts"),
        (("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"), "mlp.experts"),
    ],
)
def test_other_families_stacks(tmp_path, stored, container):
    """Step-3.5's, GraniteMoe's, and stacks that keep gate and up apart."""
    w = experts()
    parts = [w["gate_proj"], w["up_proj"]] if len(stored) == 3 else [torch.cat([w["gate_proj"], w["up_proj"]], 1)]
    tensors = {f"model.layers.0.{n}": t for n, t in zip(stored, [*parts, w["down_proj"]], strict=True)}
    assert_same(read_experts(write(tmp_path, tensors, hidden_size=HIDDEN), f"model.layers.0.{container}"), w)


def test_the_shape_decides_over_the_family(tmp_path):
    """A Qwen3-VL file saved in transformers 5's own orientation."""
    w = experts()
    tensors = {
        f"{LAYER}.gate_up_proj": torch.cat([w["gate_proj"], w["up_proj"]], 1),
        f"{LAYER}.down_proj": w["down_proj"],
    }
    assert_same(read_experts(write(tmp_path, tensors, model_type="qwen3_vl_moe", hidden_size=HIDDEN)), w)


def test_only_one_experts_part_is_read(tmp_path, monkeypatch):
    w = experts()
    tensors = {
        f"{LAYER}.gate_up_proj": torch.cat([w["gate_proj"], w["up_proj"]], 1),
        f"{LAYER}.down_proj": w["down_proj"],
    }
    path = write(tmp_path, tensors, hidden_size=HIDDEN)
    loads = []
    load = Folder.load
    monkeypatch.setattr(Folder, "load", lambda self, name, rows=None: loads.append(rows) or load(self, name, rows))
    with open_checkpoint(path) as checkpoint:
        up = checkpoint.read(f"{LAYER}.2.up_proj.weight")
    assert loads == [(2, 3)]
    assert up.untyped_storage().nbytes() == INNER * HIDDEN * 4  # memory of its own, not the other half's too


def test_fused_matrices_of_dense_layers_stay_whole(tmp_path):
    tensors = {
        f"model.layers.0.{n}.weight": torch.ones(2 * INNER, HIDDEN) for n in ("mlp.gate_up_proj", "self_attn.qkv_proj")
    }
    with open_checkpoint(write(tmp_path, tensors, hidden_size=HIDDEN)) as checkpoint:
        assert {e.name for e in checkpoint.entries()} == set(tensors)


def test_an_unknown_transposed_family_is_refused(tmp_path):
    tensors = {
        f"{LAYER}.gate_up_proj": torch.ones(EXPERTS, HIDDEN, 2 * INNER),
        f"{LAYER}.down_proj": torch.ones(EXPERTS, INNER, HIDDEN),
    }
    words = ("[E, K, N]", "order of gate and up")
    refused(write(tmp_path, tensors, model_type="novel", hidden_size=HIDDEN), *words, "model_type is 'novel'")
    refused(write(tmp_path, tensors, hidden_size=HIDDEN), *words, "config.json has no model_type")


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "llama4"])
def test_square_experts_need_a_known_family(tmp_path, model_type):
    """Only square stacks: the shape tells nothing. Llama-4's are known to be transposed; others are refused."""
    w = torch.arange(EXPERTS * HIDDEN * HIDDEN, dtype=torch.float32).reshape(EXPERTS, HIDDEN, HIDDEN)
    path = write(tmp_path, {f"{LAYER}.down_proj": w}, model_type=model_type, hidden_size=HIDDEN)
    if model_type == "llama4":
        with open_checkpoint(path) as checkpoint:
            assert torch.equal(checkpoint.read(f"{LAYER}.1.down_proj.weight"), w[1].T)
    else:
        refused(path, "both dimensions are the hidden_size 6", "down_proj")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "config.json has no hidden_size"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "6"}, "config.json's hidden_size is '6', no whole number above 0"),
        ({"hidden_size": -6}, "config.json's hidden_size is -6, no whole number above 0"),
        ({"hidden_size": True}, "config.json's hidden_size is True"),
        ({"text_config": {"hidden_size": [6]}}, "config.json's hidden_size is [6]"),
        ({"hidden_size": HIDDEN + 1}, "neither dimension is the hidden_size 7 of config.json"),
        ({"model_type": "gpt_oss"}, "do not fit each other as [E, K, N], which config.json's model_type says"),
    ],
)
def test_a_hidden_size_or_family_that_does_not_tell_the_layout_is_named(tmp_path, config, words):
    tensors = {
        f"{LAYER}.gate_up_proj": torch.ones(EXPERTS, 2 * INNER, HIDDEN),
        f"{LAYER}.down_proj": torch.ones(EXPERTS, HIDDEN, INNER),
    }
    refused(write(tmp_path, tensors, **config), words)
    with open_checkpoint(tmp_path, strict=False) as checkpoint:
        assert {p.file for p in checkpoint.problems} == {"config.json"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"gate_up_proj": (EXPERTS, 8, 5), "down_proj": (EXPERTS, HIDDEN, 4)},
            "neither dimension is the hidden_size 6",
        ),
        ({"gate_up_proj": (EXPERTS, 8, HIDDEN), "down_proj": (EXPERTS, 4, HIDDEN)}, "contradict each other"),
        (
            {"gate_up_proj": (EXPERTS, 9, HIDDEN), "down_proj": (EXPERTS, HIDDEN, 4)},
            "cannot share its 9 outputs evenly",
        ),
        ({"down_proj": (EXPERTS, HIDDEN, 4), "1.down_proj.weight": (HIDDEN, 4)}, "1.down_proj.weight is stored too"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(tmp_path, tensors, message):
    stored = {f"{LAYER}.{name}": torch.ones(shape) for name, shape in tensors.items()}
    refused(write(tmp_path, stored, hidden_size=HIDDEN), message)


def test_an_empty_stack_is_no_million_experts(tmp_path):
    """A header of a few bytes can claim any number of experts if another dimension is zero."""
    tensors = {f"{LAYER}.down_proj": torch.empty(1 << 40, HIDDEN, 0)}
    with open_checkpoint(write(tmp_path, tensors, hidden_size=HIDDEN)) as checkpoint:
        assert [e.name for e in checkpoint.entries()] == [f"{LAYER}.down_proj"]


def test_lint_sees_the_fault_and_no_half_read_stack(tmp_path):
    tensors = {f"{LAYER}.gate_up_proj": torch.ones(EXPERTS, HIDDEN, 2 * INNER), "model.norm.weight": torch.ones(HIDDEN)}
    with open_checkpoint(write(tmp_path, tensors, model_type="novel", hidden_size=HIDDEN), strict=False) as checkpoint:
        assert [e.name for e in checkpoint.entries()] == ["model.norm.weight"]
        assert [(p.check, p.severity, p.tensor) for p in checkpoint.problems] == [
            ("config-conflict", "error", f"{LAYER}.gate_up_proj")
        ]


@given(
    e=st.integers(1, 4),
    i=st.integers(1, 5),
    h=st.integers(1, 7),
    transposed=st.booleans(),
    interleaved=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_layout_gives_back_the_matrices_it_was_made_of(e, i, h, transposed, interleaved):
    w = experts(e, i, h)
    pair = [w["gate_proj"], w["up_proj"]]
    stored = torch.stack(pair, 2).flatten(1, 2) if interleaved else torch.cat(pair, 1)
    stored = stored.mT.contiguous() if transposed else stored
    stack = Stack("s", "c.experts", "gate_up_proj", "weight", tuple(stored.shape), StackLayout(transposed, interleaved))

    def load(name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return stored[slice(*rows)] if rows else stored

    for name, shape, place in stack.members():
        expert, projection = name.split(".")[2:4]
        value = place.read(load, "s")
        assert value.shape == shape
        assert torch.equal(value, w[projection][int(expert)])
    assert len(list(stack.members())) == 2 * e
