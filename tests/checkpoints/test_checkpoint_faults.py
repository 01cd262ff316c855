"""Broken headers, configs, scales and places: every one is a typed error that names what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints import open_checkpoint
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.lint import lint_checkpoint
from workbench.checkpoints.writer import _host, _output_error
from workbench.errors import CheckpointError, FormatError, OutputError, WorkbenchError

WEIGHT = "model.layers.1.mlp.experts.2.down_proj.weight"
NVFP4 = {"format": "nvfp4", "dialect": "modelopt"}
MXFP4 = {"format": "mxfp4", "dialect": "quark"}
BF16 = {"format": "bf16", "dialect": "plain"}


def refused(path: Path, *fragments: str) -> None:
    """Strict opening and lint raise alike."""
    for attempt in (open_checkpoint, lint_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            attempt(path)
        for fragment in fragments:
            assert fragment in caught.value.message, caught.value.message


def with_header(folder: Path, header: str, data: int = 8) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    raw = header.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return folder


def row(shape: str = "[1]", offsets: str = "[0, 4]", dtype: str = '"F32"') -> str:
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


@pytest.mark.parametrize(
    "first",
    [
        row(offsets="[-4, 0]"),
        row(offsets="[4, 0]"),
        row(offsets="[0, 4, 8]"),
        row(offsets="[0.0, 4.0]"),
        row(shape="[-1]"),
        row(shape="[true]"),
        row(shape="[1.0]"),
        row(shape='"1"'),
        row(dtype='["F32"]'),
        "5",
    ],
)
def test_header_rows_of_wrong_types_or_signs(tmp_path, first):
    refused(with_header(tmp_path / "c", f'{{"first": {first}}}'), "model.safetensors", "first")


def test_header_duplicates_overlaps_gaps_and_depth(tmp_path):
    twice = f'{{"first": {row()}, "first": {row(offsets="[4, 8]")}}}'
    refused(with_header(tmp_path / "twice", twice), "model.safetensors", "first twice")
    overlap = f'{{"first": {row(offsets="[0, 8]", shape="[2]")}, "second": {row(offsets="[4, 8]")}}}'
    refused(with_header(tmp_path / "overlap", overlap), "model.safetensors", "second overlaps first")
    gap = f'{{"first": {row(offsets="[4, 8]")}}}'
    refused(with_header(tmp_path / "gap", gap), "first leaves unused bytes")
    refused(with_header(tmp_path / "deep", "[" * 100_000 + "]" * 100_000), "model.safetensors")


def test_deeply_nested_config(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (target / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    refused(target, "config.json", "nested too deeply")


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_regular_file_is_not_opened(modelopt, tmp_path, file, kind):
    target = Path(shutil.copytree(modelopt, tmp_path / "c"))
    (target / file).unlink()
    if kind == "pipe":
        os.mkfifo(target / file)
    elif kind == "folder":
        (target / file).mkdir()
    else:
        (target / file).symlink_to("/dev/zero")
    refused(target, file, "not a regular file")


@pytest.mark.parametrize("block", [5, "nvfp4", [1], False])
def test_config_block_that_is_no_object(plain, broken, tmp_path, block):
    target = write_checkpoint(tmp_path / "c", tiny_tensors(), quantization_config=block)
    refused(target, "broken quantization_config", repr(block))


@pytest.mark.parametrize(("source", "method"), [("modelopt", "quark"), ("quark", "modelopt")])
def test_quant_method_of_the_other_producer_is_a_conflict(request, broken, source, method):
    target = broken(request.getfixturevalue(source))
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (target / "config.json").write_text(json.dumps(config))
    assert any(f.check == "config-conflict" for f in lint_checkpoint(target).findings)


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("target", [BF16, MXFP4, NVFP4])
def test_unusable_global_scale_is_not_decoded_or_copied(modelopt, broken, tmp_path, value, target):
    source = broken(modelopt, lambda t: t.update({WEIGHT + "_scale_2": torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=re.escape(WEIGHT)):
        quantize_checkpoint(source, tmp_path / "q", **target)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(("fixture", "byte"), [("modelopt", 0x7F), ("modelopt", 0xFF), ("quark", 255)])
@pytest.mark.parametrize("target", [BF16, MXFP4, NVFP4])
def test_nan_block_scale_is_not_decoded_or_copied(request, broken, tmp_path, fixture, byte, target):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT + "_scale"].view(torch.uint8).view(-1)[0] = byte

    source = broken(request.getfixturevalue(fixture), edit)
    with pytest.raises(CheckpointError, match=re.escape(WEIGHT)):
        quantize_checkpoint(source, tmp_path / "q", **target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32])
def test_weights_that_are_no_floats_are_not_quantized(tmp_path, dtype):
    tensors = {**tiny_tensors(), WEIGHT: torch.ones(64, 32, dtype=dtype)}
    source = write_checkpoint(tmp_path / "c", tensors)
    with pytest.raises(FormatError, match=re.escape(WEIGHT) + " is (i64|bool|i32)"):
        quantize_checkpoint(source, tmp_path / "q", **NVFP4)


@pytest.mark.parametrize("shape", [(0, 32), (64, 0)])
def test_empty_matrices(tmp_path, shape):
    source = write_checkpoint(tmp_path / "c", {**tiny_tensors(), WEIGHT: torch.zeros(shape, dtype=torch.bfloat16)})
    for target in (NVFP4, MXFP4):
        with pytest.raises(FormatError, match="is empty"):
            quantize_checkpoint(source, tmp_path / "q", **target)
    quantize_checkpoint(source, tmp_path / "kept", **NVFP4, exclude=["*experts.2.down_proj"])
    quantize_checkpoint(source, tmp_path / "plain", **BF16)
    lint_checkpoint(tmp_path / "plain")


def test_quantized_matrix_without_rows_decodes_to_one(modelopt, broken, tmp_path):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in (WEIGHT, WEIGHT + "_scale"):
            tensors[name] = tensors[name][:0]

    source = broken(modelopt, edit)
    lint_checkpoint(source)
    quantize_checkpoint(source, tmp_path / "plain", **BF16)
    with open_checkpoint(tmp_path / "plain") as checkpoint:
        assert checkpoint.read(WEIGHT).shape == (0, 32)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "x" * 250])
def test_destination_names_that_no_file_system_takes(plain, tmp_path, name):
    with pytest.raises(WorkbenchError):
        quantize_checkpoint(plain, tmp_path / name, **MXFP4)
    with pytest.raises(WorkbenchError):
        open_checkpoint(tmp_path / name)


def test_every_written_file_honours_the_umask(plain, tmp_path):
    old = os.umask(0o022)
    try:
        quantize_checkpoint(plain, tmp_path / "q", **NVFP4)
        os.umask(0o027)
        quantize_checkpoint(plain, tmp_path / "r", **NVFP4)
    finally:
        os.umask(old)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "q").iterdir()} == {0o644}
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "r").iterdir()} == {0o640}
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o750


def test_what_killed_processes_left_is_removed_and_nothing_else(plain, modelopt, tmp_path):
    script = (
        "import os, signal, sys\nfrom workbench.checkpoints.convert import quantize_checkpoint\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], format='mxfp4', dialect='quark',"
        " progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(plain), str(tmp_path / "q")], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    alive = left.with_name(f".q.new-{_host()}-{os.getpid()}-00000000")
    for other in (alive, left.with_name(left.name.replace(".q.", ".qq.")), tmp_path / ".q.mine"):
        other.mkdir()
    kept = set(tmp_path.iterdir()) - {left}
    quantize_checkpoint(plain, tmp_path / "q", **MXFP4)
    assert set(tmp_path.iterdir()) == kept | {tmp_path / "q"}
    # killed between the two renames of a replacement: the old checkpoint comes back, and is not replaced unasked
    (tmp_path / "q").rename(tmp_path / "gone")
    aside = left.with_name(left.name.replace(".q.new", ".q.old"))
    shutil.copytree(modelopt, aside / "previous")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_checkpoint(plain, tmp_path / "q", **MXFP4)
    assert open_checkpoint(tmp_path / "q").dialect == "modelopt"
    assert not aside.exists()


def test_only_a_full_disk_is_told_to_free_space(plain, tmp_path):
    for error in (FileExistsError(17, "File exists"), IsADirectoryError(21, "Is a directory")):
        assert "free" not in str(_output_error(tmp_path / "q", error))
    assert "free space" in _output_error(tmp_path / "q", OSError(28, "No space left on device")).fix
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        quantize_checkpoint(plain, tmp_path / "file" / "q", **MXFP4)
    assert "free space" not in str(caught.value)
