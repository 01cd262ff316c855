"""GPTQ against what GPTQModel 7.7.0 packed and decodes (golden_int4.safetensors), and against words made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.dialects import DIALECTS
from workbench.checkpoints.files import Folder
from workbench.errors import CheckpointError

HERE = Path(__file__).parent
MODULE = "model.layers.0.self_attn.q_proj"
CASES = {
    "gptq_v1": {"bits": 4, "group_size": 32},
    "gptq_v2": {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "gptq_act_order": {"bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq_one_group": {"bits": 4, "group_size": -1},
    "gptq_8bit": {"bits": 8, "group_size": 64},
}


def golden(case: str) -> dict[str, torch.Tensor]:
    stored = load_file(HERE / "golden_int4.safetensors")
    return {n.removeprefix(case + "."): t for n, t in stored.items() if n.startswith(case + ".")}


def write(path: Path, parts: dict[str, torch.Tensor], **block: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {f"{MODULE}.{role}": part.contiguous() for role, part in parts.items() if role != "dequantized"}
    save_file({**tensors, "lm_head.weight": torch.zeros(8, 32).half()}, path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "gptq", **block}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def read(path: Path):
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dialect == "gptq"
        return checkpoint.read(MODULE + ".weight")


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.fix


def words_along_rows(codes: list[int]) -> torch.Tensor:
    """One column of codes, eight 4-bit ones a word, by arithmetic on Python integers: [len / 8, 1]."""
    words = [sum(code << (4 * i) for i, code in enumerate(codes[at : at + 8])) for at in range(0, len(codes), 8)]
    return torch.tensor([[w - (1 << 32) if w >= 1 << 31 else w] for w in words], dtype=torch.int32)


@pytest.mark.parametrize("case", CASES)
def test_decodes_as_the_tool_does(tmp_path, case):
    """The tool decodes in float16, one rounding of a product that float32 holds exactly."""
    parts, block = golden(case), CASES[case]
    with open_checkpoint(write(tmp_path / "m", parts, **block)) as checkpoint:
        q = checkpoint.read(MODULE + ".weight")
        assert checkpoint.declaration.format == q.format == f"int{block['bits']}_group"
        assert checkpoint.declaration.expects_quantized(MODULE)
        assert checkpoint.problems == ()
        assert checkpoint.read("lm_head.weight").dtype == torch.float16
    assert torch.equal(q.dequantize().T.half(), parts["dequantized"])
    assert (q.group_index is not None) == (case == "gptq_act_order")
    assert q.block == (1, 128 if case == "gptq_one_group" else block["group_size"])


def test_both_formats_of_one_weight_decode_alike(tmp_path):
    """v1 stores zeros less one; one that is 0 borrows from its neighbour, so adding one code by code would be wrong."""
    one, two = golden("gptq_v1"), golden("gptq_v2")
    assert not torch.equal(one["qzeros"], two["qzeros"])
    assert bool((one["qzeros"][:, 0] & 0xF == 0xF).all())  # a zero point of 0, less one
    first = read(write(tmp_path / "v1", one, **CASES["gptq_v1"]))
    second = read(write(tmp_path / "v2", two, **CASES["gptq_v2"]))
    assert torch.equal(first.dequantize(), second.dequantize())
    mistaken = read(write(tmp_path / "v1_as_v2", one, **CASES["gptq_v2"]))
    assert not torch.equal(mistaken.dequantize(), second.dequantize())


def test_codes_and_zeros_by_hand(tmp_path):
    """Eight outputs alike: codes 0..15 and again, zero point 8 (stored 7), scales 0.5 and 2: (code - 8) * scale."""
    codes = [*range(16), *range(16)]
    parts = {
        "qweight": words_along_rows(codes).repeat(1, 8),
        "qzeros": torch.full((2, 1), 0x77777777, dtype=torch.int32),
        "scales": torch.tensor([[0.5], [2.0]]).half().repeat(1, 8),
        "g_idx": torch.arange(32, dtype=torch.int32) // 16,
    }
    q = read(write(tmp_path / "m", parts, bits=4, group_size=16, sym=True))
    assert q.zero_points is None  # the middle of the range: symmetric
    expected = [(c - 8) * (0.5 if i < 16 else 2.0) for i, c in enumerate(codes)]
    assert q.dequantize().tolist() == [expected] * 8


def test_without_g_idx_the_groups_lie_in_order(tmp_path):
    parts = golden("gptq_v1")
    index = parts.pop("g_idx")
    assert index.tolist() == [i // 32 for i in range(128)]
    q = read(write(tmp_path / "m", parts, **CASES["gptq_v1"]))
    assert torch.equal(q.dequantize().T.half(), parts["dequantized"])


def test_the_tensors_decide_over_the_config(tmp_path):
    parts = golden("gptq_8bit")
    with open_checkpoint(write(tmp_path / "m", parts, bits=4, group_size=128)) as checkpoint:
        q = checkpoint.read(MODULE + ".weight")
        assert (checkpoint.declaration.format, q.format, q.block) == ("int4_group", "int8_group", (1, 64))
    assert torch.equal(q.dequantize().T.half(), parts["dequantized"])


def test_a_side_file_in_place_of_the_config_block(tmp_path):
    path = write(tmp_path / "m", golden("gptq_v1"))
    (path / "config.json").write_text("{}")
    (path / "quantize_config.json").write_text(json.dumps(CASES["gptq_v1"]))
    assert read(path).format == "int4_group"


def test_dynamic_settings_by_module(tmp_path):
    block = {"bits": 4, "dynamic": {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8}, r".*\.0\..*": {"group_size": 64}}}
    config = {"quantization_config": {"quant_method": "gptq", **block}}
    declared = DIALECTS["gptq"].declare(Folder(path=tmp_path, tensors={}, config=config, files=(), headers={}))
    assert declared.format_of("model.layers.0.self_attn.k_proj") == ""
    assert declared.format_of("model.layers.0.mlp.down_proj") == "int8_group"
    assert declared.format_of(MODULE) == "int4_group"


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": None}, "bits is None"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"bits": 4, "dynamic": {}}, None),
        ({"bits": 4, "dynamic": None}, None),
        ({"bits": 4, "dynamic": []}, "dynamic is no table"),
        ({"bits": 4, "dynamic": ["x"]}, "dynamic is no table"),
        ({"bits": 4, "dynamic": {"x": {"bits": 2}}}, "bits is 2"),
    ],
)
def test_settings_that_are_not_read(tmp_path, block, word):
    path = write(tmp_path / "m", golden("gptq_v1"), **block)
    if word is None:
        assert read(path).format == "int4_group"
    else:
        refused(path, word)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": None}, ("scales is in no shard",)),
        ({"qzeros": None}, ("qzeros is in no shard",)),
        ({"scales": torch.ones(4, 31).half()}, ("31 columns, expected 32",)),
        ({"scales": torch.ones(4, 256).half()}, ("as AWQ does",)),
        ({"qzeros": torch.zeros(4, 3, dtype=torch.int32)}, ("[4, 3], expected [4, 4]",)),
        ({"qzeros": torch.zeros(4, 4)}, ("expected I32 words",)),
        ({"g_idx": torch.zeros(7, dtype=torch.int32)}, ("4 and 8 are read",)),
        ({"g_idx": torch.zeros(128)}, ("g_idx is F32", "expected I32 [K]")),
        ({"scales": torch.ones(0, 32).half(), "qzeros": torch.zeros(0, 4, dtype=torch.int32)}, ("0 groups",)),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    parts = {role: part for role, part in {**golden("gptq_v1"), **change}.items() if part is not None}
    refused(write(tmp_path / "m", parts, **CASES["gptq_v1"]), MODULE, *words)


def test_act_order_without_its_order_is_refused(tmp_path):
    parts = golden("gptq_act_order")
    del parts["g_idx"]
    refused(write(tmp_path / "m", parts, **CASES["gptq_act_order"]), "g_idx is in no shard", "not in order")


@pytest.mark.parametrize("group", [-1, 4])
def test_a_group_that_does_not_exist_is_refused_when_read(tmp_path, group):
    parts = golden("gptq_v1")
    parts["g_idx"][5] = group
    path = write(tmp_path / "m", parts, **CASES["gptq_v1"])
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match="there are 4"):
        checkpoint.read(MODULE + ".weight")


def test_gptq_is_not_written():
    with pytest.raises(CheckpointError, match="read, not written"):
        DIALECTS["gptq"].config_files({}, None)


def test_copied_zero_points_are_declared(tmp_path):
    """Carried to compressed-tensors unchanged: a config that called them symmetric would lose the zero points."""
    source = write(tmp_path / "m", golden("gptq_v2"), **CASES["gptq_v2"])
    done = quantize_checkpoint(source, tmp_path / "out", format="int4_group", dialect="compressed_tensors")
    assert done.copied == (MODULE + ".weight",)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["symmetric"] is False
    with open_checkpoint(tmp_path / "out") as written:
        assert torch.equal(written.read_dense(MODULE + ".weight"), read(source).dequantize())
