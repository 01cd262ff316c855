"""Broken headers, configs, scales and places: every one is a typed error that names what is wrong."""

from __future__ import annotations

import errno
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


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/../../outside.safetensors",
        "sub/inside.safetensors",
        "..\\outside.safetensors",
        "outside\0.safetensors",
        "x" * 1000 + ".safetensors",
        "pytorch_model.bin",
        "config.json",
        "..",
        "",
    ],
)
def test_index_entries_that_are_no_shard_of_the_folder(plain, tmp_path, file):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    shutil.copy(target / SHARD, tmp_path / "outside.safetensors")
    index = target / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = file
    index.write_text(json.dumps(content))
    refused(target, "model.safetensors.index.json names the file", "in the checkpoint folder")


def test_a_shard_name_that_no_file_system_takes(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    index = target / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra"] = "x" * 300 + ".safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(target)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "hf_quant_config.json", SHARD])
def test_links_that_leave_the_folder_are_not_followed(plain, tmp_path, file):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    outside = tmp_path / "outside"
    shutil.copy(target / file, outside) if (target / file).exists() else outside.write_text("{}")
    (target / file).unlink(missing_ok=True)
    (target / file).symlink_to(outside)
    refused(target, file, "leaves the checkpoint folder", str(outside))


def test_links_within_the_folder_and_to_the_folder_are_followed(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (target / "store").mkdir()
    (target / SHARD).rename(target / "store" / "blob")
    (target / SHARD).symlink_to("store/blob")
    (tmp_path / "link").symlink_to(target)
    with open_checkpoint(tmp_path / "link") as checkpoint:
        assert {e.name for e in checkpoint.entries()} == set(tiny_tensors())


def test_a_snapshot_of_the_hub_cache_is_links_to_its_own_blobs_only(plain, tmp_path):
    snapshot, blobs = tmp_path / "models--org--tiny" / "snapshots" / "abc", tmp_path / "models--org--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    with open_checkpoint(snapshot) as checkpoint:
        assert len(checkpoint.entries()) == len(tiny_tensors())
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(plain / SHARD, other / "0")
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to("../../../models--org--other/blobs/0")
    refused(snapshot, SHARD, "leaves the checkpoint folder")


def test_side_files_do_not_leave_the_folder(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (tmp_path / "secret").write_text("secret")
    (target / "notes.txt").symlink_to(tmp_path / "secret")
    with (
        open_checkpoint(target) as checkpoint,
        pytest.raises(CheckpointError, match=r"notes\.txt is a link that leaves"),
    ):
        checkpoint.folder.side_files()
    (target / "notes.txt").unlink()
    os.mkfifo(target / "notes.txt")
    with open_checkpoint(target) as checkpoint, pytest.raises(CheckpointError, match="not a regular file"):
        checkpoint.folder.side_files()


def test_a_refused_checkpoint_leaves_no_file_open(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    second = target / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    refused(target, "truncated")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_loop_and_a_dangling_link(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (target / SHARD).unlink()
    (target / SHARD).symlink_to(SHARD)
    refused(target, SHARD)
    (target / SHARD).unlink()
    (target / SHARD).symlink_to("nowhere")
    refused(target, SHARD, "does not exist")


def test_no_pickle_is_loaded_and_no_code_is_run(plain, tmp_path):
    """A pickle and a model's own code, each of which would leave a mark."""
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w').close()"
    bomb = f"cbuiltins\nexec\n(V{code}\ntR.".encode()
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (target / "pytorch_model.bin").write_bytes(bomb)
    (target / "modeling_tiny.py").write_text(code)
    (target / "__init__.py").write_text(code)
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_tiny.Config", "AutoModelForCausalLM": "modeling_tiny.Model"}
    (target / "config.json").write_text(json.dumps(config))
    with open_checkpoint(target) as checkpoint:
        for entry in checkpoint.entries():
            checkpoint.read(entry.name)
    lint_checkpoint(target)
    only = tmp_path / "only"
    only.mkdir()
    (only / "config.json").write_text("{}")
    (only / "pytorch_model.bin").write_bytes(bomb)
    refused(only, "holds no *.safetensors")
    (only / "model.safetensors").write_bytes(bomb)
    refused(only, "no whole safetensors file")
    assert not mark.exists()
    exec(code)  # the mark is left by whoever runs the code
    assert mark.exists()


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x1b[2J", "x" * 1001])
def test_tensor_names_that_cannot_be_printed(tmp_path, name):
    refused(with_header(tmp_path / "c", f"{{{json.dumps(name)}: {row()}}}", data=4), "a tensor is called")


@pytest.mark.parametrize("name", ["model.layers.\u00b2.norm", "model.layers.\u0663.norm", "model." + "9" * 900, "²"])
def test_tensor_names_with_other_digits_and_long_numbers(tmp_path, name):
    with open_checkpoint(with_header(tmp_path / "c", f"{{{json.dumps(name)}: {row()}}}", data=4)) as checkpoint:
        assert [e.name for e in checkpoint.entries()] == [name]
    lint_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    "header",
    [
        f'{{"first": {row(shape="[9223372036854775807]")}}}',
        f'{{"first": {row(shape="[0, 4611686018427387904, 4611686018427387904]", offsets="[0, 0]")}}}',
        f'{{"first": {row(shape="[" + "1, " * 40 + "1]")}}}',
        f'{{"first": {row(offsets="[0, 99999999999999999999]")}}}',
        f'{{"first": {row()[:-1]}, "more": Infinity}}}}',
        f'{{"__metadata__": [], "first": {row()}}}',
        f'{{"__metadata__": {{"a": 1}}, "first": {row()}}}',
    ],
)
def test_header_values_that_no_file_can_have(tmp_path, header):
    refused(with_header(tmp_path / "c", header, data=4), "model.safetensors")


@pytest.mark.parametrize("place", ["name", "metadata", "config.json", "model.safetensors.index.json"])
def test_half_a_character(plain, tmp_path, place):
    """JSON can spell it; no terminal, file or other JSON can hold it."""
    half = '"\\ud800"'
    if place in ("name", "metadata"):
        header = f"{{{half}: {row()}}}" if place == "name" else f'{{"__metadata__": {{"a": {half}}}, "first": {row()}}}'
        refused(with_header(tmp_path / "c", header, data=4), "no valid JSON table", "surrogates")
        return
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    content = json.loads((target / place).read_text())
    (target / place).write_text(json.dumps({**content, "weight_map": {"x": "\ud800"}}))
    refused(target, place, "broken JSON")


def test_a_config_may_hold_infinity(plain, tmp_path):
    """Published ones do (a Mamba layer's `time_step_limit`): transformers writes them with Python's json."""
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    (target / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.config["time_step_limit"] == [0.0, float("inf")]


def test_a_header_in_another_encoding(tmp_path):
    folder = with_header(tmp_path / "c", "{}")
    raw = f'{{"first": {row()}}}'.encode("utf-16")
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    refused(folder, "no valid JSON table")


def test_a_config_of_absurd_size_is_not_read(plain, tmp_path):
    target = Path(shutil.copytree(plain, tmp_path / "c"))
    with (target / "config.json").open("r+b") as stream:
        stream.truncate(10**12)  # a hole: no disk is used
    refused(target, "config.json has 1000000000000 bytes")


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


def converts_only_to_bf16(source: Path, tmp_path: Path) -> None:
    """Decoding shows what is there, and says so; nothing is rounded to a format that could not hold it."""
    for target in (MXFP4, NVFP4):
        with pytest.raises(CheckpointError, match=re.escape(WEIGHT)):
            quantize_checkpoint(source, tmp_path / "q", **target)
        assert not (tmp_path / "q").exists()
    assert any(WEIGHT in warning for warning in quantize_checkpoint(source, tmp_path / "q", **BF16).warnings)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_unusable_global_scale_is_not_copied_or_rounded(modelopt, broken, tmp_path, value):
    source = broken(modelopt, lambda t: t.update({WEIGHT + "_scale_2": torch.tensor(value)}))
    converts_only_to_bf16(source, tmp_path)


def test_a_negative_global_scale_is_not_even_decoded(modelopt, broken, tmp_path):
    source = broken(modelopt, lambda t: t.update({WEIGHT + "_scale_2": torch.tensor(-0.5)}))
    for target in (BF16, MXFP4, NVFP4):
        with pytest.raises(CheckpointError, match=re.escape(WEIGHT)):
            quantize_checkpoint(source, tmp_path / "q", **target)


@pytest.mark.parametrize(("fixture", "byte"), [("modelopt", 0x7F), ("modelopt", 0xFF), ("quark", 255)])
def test_nan_block_scale_is_not_copied_or_rounded(request, broken, tmp_path, fixture, byte):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT + "_scale"].view(torch.uint8).view(-1)[0] = byte

    source = broken(request.getfixturevalue(fixture), edit)
    converts_only_to_bf16(source, tmp_path)
    with open_checkpoint(tmp_path / "q") as checkpoint:
        assert checkpoint.read(WEIGHT).isnan().sum() == (16 if fixture == "modelopt" else 32)


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
    for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO, errno.EINVAL, errno.ESTALE, None):
        error = OSError(number, "x") if number else OSError("x")
        assert "free" not in str(_output_error(tmp_path / "q", error))
        assert "choose another output folder" in _output_error(tmp_path / "q", error).fix
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert "free space" in _output_error(tmp_path / "q", OSError(number, os.strerror(number))).fix
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        quantize_checkpoint(plain, tmp_path / "file" / "q", **MXFP4)
    assert "free space" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that takes no files")
def test_a_place_that_takes_no_files_is_named(plain):
    with pytest.raises(OutputError) as caught:
        quantize_checkpoint(plain, "/proc/workbench/q", **MXFP4)
    assert "could not write the checkpoint /proc/workbench/q" in caught.value.message
    assert "choose another output folder" in caught.value.fix
    assert "free" not in str(caught.value)
