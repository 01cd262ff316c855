"""AWQ against what AutoAWQ 0.2.9 packed and decodes (golden_int4.safetensors), and against words written out here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects.int4 import pack_int32, unpack_int32
from workbench.errors import CheckpointError

HERE = Path(__file__).parent
MODULE = "model.layers.0.mlp.up_proj"


def golden(case: str) -> dict[str, torch.Tensor]:
    stored = load_file(HERE / "golden_int4.safetensors")
    return {n.removeprefix(case + "."): t for n, t in stored.items() if n.startswith(case + ".")}


def write(path: Path, parts: dict[str, torch.Tensor], **block: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {f"{MODULE}.{role}": part.contiguous() for role, part in parts.items() if role != "dequantized"}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq", **block}}))
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(("case", "group"), [("awq", 32), ("awq_one_group", 128)])
def test_decodes_as_the_tool_does(tmp_path, case, group):
    parts = golden(case)
    block = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    with open_checkpoint(write(tmp_path / "m", parts, **block)) as checkpoint:
        q = checkpoint.read(MODULE + ".weight")
        assert (checkpoint.dialect, checkpoint.problems) == ("awq", ())
        assert checkpoint.declaration.format == q.format == "int4_group"
    assert (q.shape, q.block) == ((32, 128), (1, group))
    assert torch.equal(q.dequantize().T.half(), parts["dequantized"])


def test_the_order_of_a_word_by_hand(tmp_path):
    """Outputs 0..7 hold the codes 0..7: slots 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits are 0x75316420."""
    word = torch.full((32, 1), 0x75316420, dtype=torch.int32)
    parts = {"qweight": word, "qzeros": word[:1] * 0 + 0x11111111, "scales": torch.full((1, 8), 0.5).half()}
    with open_checkpoint(write(tmp_path / "m", parts)) as checkpoint:
        assert checkpoint.read_dense(MODULE + ".weight")[:, 3].tolist() == [(c - 1) * 0.5 for c in range(8)]


def test_words_and_codes_are_inverses():
    words = torch.randint(-(2**31), 2**31 - 1, (5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for bits, order in ((4, "sequential"), (4, "awq"), (8, "sequential")):
        codes = unpack_int32(words, bits, order)
        assert codes.shape == (5, 3 * 32 // bits)
        assert torch.equal(pack_int32(codes, bits, order), words)
    assert unpack_int32(torch.tensor([[-0x1234568]], dtype=torch.int32), 4)[0].tolist() == [
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
    ]


def test_the_tensors_alone_tell_awq_from_gptq(tmp_path):
    for case, dialect in (("awq", "awq"), ("gptq_v1", "gptq")):
        path = write(tmp_path / case, golden(case))
        (path / "config.json").write_text("{}")
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.dialect == dialect
    path = write(tmp_path / "old", golden("awq"))
    (path / "config.json").write_text("{}")
    (path / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 32, "version": "GEMM"}')
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.declaration.files == ("quant_config.json",)


def test_modules_not_converted_are_parts_of_names(tmp_path):
    with open_checkpoint(
        write(tmp_path / "m", golden("awq"), modules_to_not_convert=["visual", "k_proj"])
    ) as checkpoint:
        declared = checkpoint.declaration
    assert not declared.expects_quantized("visual.blocks.0.mlp.up_proj")
    assert not declared.expects_quantized("model.layers.0.self_attn.k_proj")
    assert declared.expects_quantized(MODULE)


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"pack_method": "order"}, "pack_method is 'order'"),
        ({"modules_to_not_convert": "visual"}, "modules_to_not_convert is 'visual'"),
    ],
)
def test_settings_that_are_not_read(tmp_path, block, word):
    refused(write(tmp_path / "m", golden("awq"), **block), word)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scales": None}, ("scales is in no shard",)),
        ({"qzeros": None}, ("qzeros is in no shard",)),
        ({"scales": torch.ones(4, 4).half()}, ("as GPTQ does",)),
        ({"scales": torch.ones(4, 16).half()}, ("16 columns, expected 32",)),
        ({"qzeros": torch.zeros(2, 4, dtype=torch.int32)}, ("[2, 4], expected [4, 4]",)),
        ({"scales": torch.ones(3, 32).half(), "qzeros": torch.zeros(3, 4, dtype=torch.int32)}, ("3 groups", "K = 128")),
        ({"scales": torch.ones(4, 32, dtype=torch.int32)}, ("I32 scales",)),
        ({"qweight": torch.zeros(4, 4, 4, dtype=torch.int32)}, ("not all matrices",)),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    parts = {role: part for role, part in {**golden("awq"), **change}.items() if part is not None}
    refused(write(tmp_path / "m", parts), MODULE, *words)
