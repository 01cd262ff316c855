"""torchao's flattened subclasses: files of torchao 0.18.0 (make_golden_torchao.py), and faults in their metadata."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.dialects.torchao import unswizzle_scales
from workbench.errors import CheckpointError

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_torchao.json").read_text())["tensors"]
FORMATS = {
    "mxfp4_swizzled": "mxfp4",
    "mxfp4_linear": "mxfp4",
    "mxfp8_e4m3": "mxfp8_e4m3",
    "nvfp4_swizzled": "nvfp4",
    "nvfp4_single_level": "nvfp4",
    "fp8_channel": "fp8_channel",
    "int8_channel": "int8_channel",
    "int4_group_asymmetric": "int8_group",
}
SWIZZLED = "model.layers.0.mxfp4_swizzled"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    shutil.copyfile(HERE / "golden_torchao.safetensors", tmp_path / "model.safetensors")
    block = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": block}))
    return tmp_path


def edit_metadata(path: Path, name: str, value: object) -> None:
    """Replace one tensor's description (None: drop it)."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    metadata.pop(name)
    if value is not None:
        metadata[name] = value if isinstance(value, str) else json.dumps(value)
    save_file(tensors, file, metadata=metadata)


def description(path: Path, name: str) -> dict[str, object]:
    with safe_open(path / "model.safetensors", "pt") as opened:
        value: dict[str, object] = json.loads(opened.metadata()[name])
    return value


@pytest.mark.parametrize("name", FORMATS)
def test_values_equal_torchaos_own_dequantization(golden, name):
    full = f"model.layers.0.{name}.weight"
    with open_checkpoint(golden) as checkpoint:
        assert checkpoint.dialect == "torchao"
        entry = checkpoint.entry(full)
        assert entry.format == FORMATS[name]
        assert entry.quantized
        values = checkpoint.read_dense(full)
    if GOLDEN[full]["dtype"] == "bfloat16":  # this subclass dequantizes to its own dtype only
        values = values.bfloat16().float()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == GOLDEN[full]["sha256_f32_le"]


def test_swizzled_scales_come_out_linear(golden):
    """The same weight stored both ways: 130 rows and 3 blocks fill no whole 128x4 tile."""
    with open_checkpoint(golden) as checkpoint:
        swizzled = checkpoint.read(SWIZZLED + ".weight")
        linear = checkpoint.read("model.layers.0.mxfp4_linear.weight")
        assert checkpoint.parts(SWIZZLED + ".weight")["block_scales"].shape == (64, 16)
    assert swizzled.block_scales.shape == (130, 3)
    assert torch.equal(swizzled.block_scales, linear.block_scales)


@given(rows=st.integers(1, 300), columns=st.integers(1, 11))
@settings(max_examples=40, deadline=None)
def test_unswizzling_undoes_the_tiles(rows, columns):
    """Against cuBLAS' own words: scale (r, c) of a tile lies at byte (r % 32) * 16 + (r // 32) * 4 + c."""
    down, across = -(-rows // 128), -(-columns // 4)
    linear = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    blocked = torch.zeros(down * across * 512, dtype=torch.uint8)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (r // 128) * across + c // 4
    blocked[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = linear
    stored = blocked.reshape(down * 32, across * 16)
    assert torch.equal(unswizzle_scales(stored, rows, columns), linear)


def test_a_real_export(shared_data):
    folder = shared_data / "oracles" / "torchao--mxfp4wo--llama"
    oracle = json.loads((folder / "oracle.json").read_text())["tensors"]
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.dialect, checkpoint.problems) == ("torchao", ())
        assert checkpoint.declaration.format == "mxfp4"
        quantized = [e for e in checkpoint.entries() if e.quantized]
        assert {e.name for e in quantized} == set(oracle)
        for entry in quantized:
            digest = hashlib.sha256(checkpoint.read_dense(entry.name).numpy().tobytes()).hexdigest()
            assert digest == oracle[entry.name]["sha256_f32_le"], entry.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_type": "Int4TilePackedTo4dTensor"}, "Int4TilePackedTo4dTensor, which this version does not read"),
        ({"_tensor_data_names": ["qdata", "scale", "lut"]}, "lut"),
        ({"_tensor_data_names": ["qdata"]}, "its part scale is in no shard"),
        ({"_data": {"elem_dtype": {"_data": "float4_e2m1fn_x2"}, "block_size": 16}}, "in blocks of 16"),
        ({"_data": {"elem_dtype": {"_data": "float6_e3m2fn"}, "block_size": 32}}, "float6_e3m2fn"),
        ({"_data": {"elem_dtype": {"_data": "float8_e4m3fn"}, "block_size": 32}}, "expected F8_E4M3"),
        ({"_data": {"elem_dtype": {"_data": "float4_e2m1fn_x2"}, "block_size": 32}}, "expected F8_E8M0 or U8 [130, 3]"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(golden, change, message):
    """The last: swizzled scales whose metadata does not say so have another number of values."""
    edit_metadata(golden, SWIZZLED + ".weight", {**description(golden, SWIZZLED + ".weight"), **change})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(golden)
    assert SWIZZLED in caught.value.message
    assert message in caught.value.message
    assert caught.value.fix


def test_a_weight_without_its_description_is_refused(golden):
    edit_metadata(golden, SWIZZLED + ".weight", None)
    with pytest.raises(
        CheckpointError, match=r"mxfp4_swizzled\._weight_qdata is U8 .* metadata does not say what it is"
    ):
        open_checkpoint(golden)


def test_broken_metadata_names_the_file(golden):
    edit_metadata(golden, SWIZZLED + ".weight", '{"_type": ')
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the metadata of .*mxfp4_swizzled"):
        open_checkpoint(golden)


def test_nothing_is_written(golden):
    with open_checkpoint(golden) as checkpoint:
        q = checkpoint.read(SWIZZLED + ".weight")
        with pytest.raises(CheckpointError, match="read, not written"):
            checkpoint._dialect.disassemble(SWIZZLED + ".weight", q)
