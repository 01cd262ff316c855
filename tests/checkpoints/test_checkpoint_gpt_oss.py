"""gpt-oss MXFP4: reading against transformers' own dequantization, and writing back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects import Written, choose_dialect, get_dialect
from workbench.checkpoints.files import Folder
from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, quantize

EXPERTS, INNER, HIDDEN = 3, 96, 64
CONTAINER = "model.layers.1.mlp.experts"
GATE_UP, DOWN = f"{CONTAINER}.gate_up_proj", f"{CONTAINER}.down_proj"
BLOCK = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def stored_tensors() -> dict[str, torch.Tensor]:
    """One layer with every nibble and scale bytes from far below to far above 127."""
    g = torch.Generator().manual_seed(0)

    def codes(n: int, k: int) -> torch.Tensor:
        return torch.randint(0, 256, (EXPERTS, n, k // 32, 16), generator=g, dtype=torch.uint8)

    def scales(n: int, k: int) -> torch.Tensor:
        return torch.randint(100, 140, (EXPERTS, n, k // 32), generator=g, dtype=torch.uint8)

    return {
        GATE_UP + "_blocks": codes(2 * INNER, HIDDEN),
        GATE_UP + "_scales": scales(2 * INNER, HIDDEN),
        GATE_UP + "_bias": torch.randn(EXPERTS, 2 * INNER, generator=g).bfloat16(),
        DOWN + "_blocks": codes(HIDDEN, INNER),
        DOWN + "_scales": scales(HIDDEN, INNER),
        DOWN + "_bias": torch.randn(EXPERTS, HIDDEN, generator=g).bfloat16(),
        "model.layers.1.self_attn.q_proj.weight": torch.randn(8, HIDDEN, generator=g).bfloat16(),
        "model.layers.1.mlp.router.weight": torch.randn(EXPERTS, HIDDEN, generator=g).bfloat16(),
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    config = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "quantization_config": BLOCK}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    return write(tmp_path / "gpt_oss", stored_tensors())


def bundle(path: Path) -> dict[str, QuantizedTensor | torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {e.name: checkpoint.read(e.name) for e in checkpoint.entries() if ".experts." in e.name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_transformers_dequantization(checkpoint_path, dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    stored = load_file(checkpoint_path / "model.safetensors")
    with open_checkpoint(checkpoint_path) as checkpoint:
        assert checkpoint.dialect == "gpt_oss"
        for stack, projections in ((GATE_UP, {"gate_proj": 0, "up_proj": 1}), (DOWN, {"down_proj": None})):
            theirs = mxfp4.convert_moe_packed_tensors(stored[stack + "_blocks"], stored[stack + "_scales"], dtype=dtype)
            for projection, first in projections.items():
                columns = slice(None) if first is None else slice(first, None, 2)
                for expert in range(EXPERTS):
                    ours = checkpoint.read_dense(f"{CONTAINER}.{expert}.{projection}.weight", dtype)
                    assert torch.equal(ours, theirs[expert][:, columns].T)  # they hold [E, K, N]


def test_entries_are_one_matrix_each(checkpoint_path):
    with open_checkpoint(checkpoint_path) as checkpoint:
        assert checkpoint.problems == ()
        entry = checkpoint.entry(f"{CONTAINER}.2.up_proj.weight")
        assert (entry.format, entry.quantized, entry.shape) == ("mxfp4", True, (INNER, HIDDEN))
        assert (entry.layer, entry.expert, entry.projection) == (1, 2, "up_proj")
        bias = checkpoint.entry(f"{CONTAINER}.2.up_proj.bias")
        assert (bias.format, bias.quantized, bias.shape) == ("bf16", False, (INNER,))
        assert torch.equal(checkpoint.read(bias.name), stored_tensors()[GATE_UP + "_bias"][2, 1::2])
        assert len(checkpoint.entries()) == EXPERTS * 6 + 2


def test_one_expert_is_read_at_a_time(checkpoint_path, monkeypatch):
    loads = []
    load = Folder.load
    monkeypatch.setattr(Folder, "load", lambda self, name, rows=None: loads.append(rows) or load(self, name, rows))
    with open_checkpoint(checkpoint_path) as checkpoint:
        checkpoint.read(f"{CONTAINER}.1.down_proj.weight")
    assert loads == [(1, 2), (1, 2)]


def test_config_is_read_as_transformers_reads_it(checkpoint_path):
    with open_checkpoint(checkpoint_path) as checkpoint:
        declared = checkpoint.declaration
    assert (declared.algorithm, declared.format) == ("MXFP4", "mxfp4")
    assert declared.format_of(f"{CONTAINER}.0.gate_proj") == "mxfp4"
    assert not declared.expects_quantized("model.layers.1.self_attn.q_proj")
    assert not declared.expects_quantized("model.layers.1.mlp.router")
    assert not declared.expects_quantized("lm_head")


def test_write_gives_back_the_same_bytes(checkpoint_path):
    dialect = get_dialect("gpt_oss")
    members = bundle(checkpoint_path)
    assert {dialect.bundle(name) for name in members} == {CONTAINER}
    assert dialect.bundle("model.layers.1.mlp.router.weight") is None
    written = dialect.disassemble_bundle(CONTAINER, members)
    expected = {k: v for k, v in stored_tensors().items() if ".experts." in k}
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name
        assert written[name].dtype == tensor.dtype


def test_dense_experts_are_written_as_the_same_models_dense_stacks(checkpoint_path, tmp_path):
    """A layer that stays unquantized: `[E, K, N]`, interleaved, and read back the same."""
    members = {
        name: m.dequantize(torch.bfloat16) if isinstance(m, QuantizedTensor) else m
        for name, m in bundle(checkpoint_path).items()
    }
    written = get_dialect("gpt_oss").disassemble_bundle(CONTAINER, members)
    assert written[GATE_UP].shape == (EXPERTS, HIDDEN, 2 * INNER)
    assert written[DOWN].shape == (EXPERTS, INNER, HIDDEN)
    with open_checkpoint(write(tmp_path / "dense", written)) as checkpoint:
        assert {e.name for e in checkpoint.entries()} == members.keys()
        for name, tensor in members.items():
            assert torch.equal(checkpoint.read(name), tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(f"{CONTAINER}.1.up_proj.weight"), "experts.1.up_proj.weight is missing"),
        (lambda m: m.pop(f"{CONTAINER}.0.down_proj.bias"), "experts.0.down_proj.bias is missing"),
        (lambda m: m.update({f"{CONTAINER}.1.up_proj.weight": torch.ones(INNER, HIDDEN)}), "and others not"),
        (
            lambda m: m.update({f"{CONTAINER}.1.up_proj.weight": quantize(torch.ones(INNER, HIDDEN), "nvfp4")}),
            "the format nvfp4",
        ),
    ],
)
def test_bundles_that_make_no_stack_are_refused(checkpoint_path, change, message):
    members = bundle(checkpoint_path)
    change(members)
    with pytest.raises(CheckpointError) as caught:
        get_dialect("gpt_oss").disassemble_bundle(CONTAINER, members)
    assert message in caught.value.message
    assert caught.value.fix


def test_only_experts_can_be_quantized():
    with pytest.raises(CheckpointError, match="quantized experts only"):
        get_dialect("gpt_oss").disassemble(
            "model.layers.0.self_attn.q_proj.weight", quantize(torch.ones(2, 32), "mxfp4")
        )


def test_written_config(checkpoint_path):
    dialect = get_dialect("gpt_oss")
    config = json.loads((checkpoint_path / "config.json").read_text())
    written = Written(formats={f"{CONTAINER}.0.gate_proj": "mxfp4"}, excludes=("lm_head", "lm_head", "a.router"))
    block = dialect.config_files(config, written)["config.json"]["quantization_config"]
    assert block == {"quant_method": "mxfp4", "modules_to_not_convert": ["a.router", "lm_head"]}
    dense = dialect.config_files(config, Written(dtype="bf16"))["config.json"]
    assert "quantization_config" not in dense
    assert dense["dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match="model_type is 'qwen3_moe'"):
        dialect.config_files({"model_type": "qwen3_moe"}, written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE_UP + "_scales"), "gate_up_proj_scales is in no shard"),
        (lambda t: t.pop(DOWN + "_blocks"), "down_proj_scales is U8"),
        (
            lambda t: t.update({DOWN + "_scales": t[DOWN + "_scales"][:, :, :2].contiguous()}),
            "expected E8M0 bytes (U8)",
        ),
        (lambda t: t.update({DOWN + "_scales": t[DOWN + "_scales"].float()}), "is F32"),
        (
            lambda t: t.update({DOWN + "_blocks": t[DOWN + "_blocks"].flatten(2)}),
            "expected packed U8 [experts, N, K/32",
        ),
        (
            lambda t: t.update({DOWN + "_blocks": torch.empty(1 << 30, 2, 0, 16, dtype=torch.uint8)}),
            "expected packed U8 [experts, N, K/32",
        ),
    ],
)
def test_stacks_that_do_not_fit_are_refused(tmp_path, change, message):
    tensors = stored_tensors()
    change(tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write(tmp_path / "broken", tensors))
    assert message in caught.value.message
    assert caught.value.fix


def test_known_by_its_tensors_when_the_config_says_nothing(tmp_path):
    path = write(tmp_path / "bare", stored_tensors())
    (path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dialect == "gpt_oss"
        assert [p.severity for p in checkpoint.problems] == ["warning"]


@pytest.mark.parametrize("size", ["20b", "120b"])
def test_the_published_configs(shared_data, size):
    config = json.loads((shared_data / "metadata" / f"openai--gpt-oss-{size}_config.json").read_text())
    folder = Folder(path=Path(), tensors={}, config=config, files=(), headers={})
    dialect = choose_dialect(folder)
    declared = dialect.declare(folder)
    assert (dialect.name, declared.algorithm) == ("gpt_oss", "MXFP4")
    assert declared.format_of("model.layers.23.mlp.experts.31.down_proj") == "mxfp4"
    assert not declared.expects_quantized("model.layers.23.self_attn.o_proj")
