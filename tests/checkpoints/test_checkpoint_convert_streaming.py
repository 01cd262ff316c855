"""Conversions as processes: bounded memory, killed and resumed, several jobs; the bytes are the same in each case."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversion_memory import measure, write_sparse_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tensors, write_checkpoint

from workbench.checkpoints.convert import quantize_checkpoint
from workbench.checkpoints.writer import CheckpointWriter
from workbench.errors import CheckpointError

NVFP4 = {"format": "nvfp4", "dialect": "modelopt"}
SHARD = 12_000  # bytes: the tiny checkpoint gives some ten shards
KILL = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs in a background ignores it
    "from workbench.checkpoints.convert import quantize_checkpoint\n"
    "def stop(done, *_):\n    if done == 45: os.kill(os.getpid(), signal.{signal})\n"
    "quantize_checkpoint(sys.argv[1], sys.argv[2], format='nvfp4', dialect='modelopt', max_shard_bytes={shard},"
    " resume={resume}, progress=stop{options})\n"
)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def left_by_a_killed_one(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    left = kill(plain, tmp_path_factory.mktemp("killed") / "q")
    assert left is not None
    return left


@pytest.fixture
def left(left_by_a_killed_one: Path, tmp_path: Path) -> Path:
    """What a killed conversion to tmp_path / "q" left behind."""
    return Path(shutil.copytree(left_by_a_killed_one, tmp_path / left_by_a_killed_one.name))


@pytest.fixture(scope="module")
def whole(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the files of an uninterrupted conversion."""
    target = tmp_path_factory.mktemp("whole") / "q"
    quantize_checkpoint(plain, target, **NVFP4, max_shard_bytes=SHARD)
    return digests(target)


def kill(
    plain: Path, target: Path, *, signal: str = "SIGKILL", resume: bool = False, shard: int = SHARD
) -> Path | None:
    """Start a conversion that ends itself in the middle; the folder that it leaves, if any."""
    script = KILL.format(signal=signal, resume=resume, shard=shard, options="")
    done = subprocess.run([sys.executable, "-c", script, str(plain), str(target)], check=False, capture_output=True)
    assert done.returncode != 0
    left = [p for p in target.parent.iterdir() if p.name.startswith(f".{target.name}.new")]
    return left[0] if left else None


# ---- the writer ------------------------------------------------------------------------------------------------------


def test_a_streamed_shard_is_byte_for_byte_what_the_safetensors_library_writes(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float16]
    dtypes += [torch.int8, torch.int32, torch.float64, torch.int16, torch.float8_e5m2, torch.float8_e8m0fnu]
    tensors = {f"t{i}": torch.arange(1, 4 + i).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "ünï": torch.ones(2, 2).t()}
    with CheckpointWriter(tmp_path / "ours") as writer:
        for name, tensor in tensors.items():
            writer.add({name: tensor})
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"format": "f32", "dialect": "plain"}, NVFP4], ids=["decode", "quantize"])
def test_the_peak_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch, options):
    """20 and 80 matrices of 2 MiB, in one shard each: four times the weights, the same peak. Were a shard collected, it
    would grow by 34 MiB (NVFP4) or 240 MiB (f32)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # freed matrices go back to the system at once
    grown_mib = []
    for count in (20, 80):
        source = write_sparse_checkpoint(tmp_path / f"source{count}", count, side=1024, shard_matrices=count)
        found = measure(source, tmp_path / f"target{count}", **options)
        grown_mib.append(found["peak_mib"] - found["first_mib"])
    assert grown_mib[1] < grown_mib[0] + 8, grown_mib


# ---- killed and resumed ----------------------------------------------------------------------------------------------


def test_a_killed_conversion_is_resumed_to_the_same_bytes_without_repeating_finished_shards(
    plain, left, whole, tmp_path
):
    finished = sorted(left.glob("shard-*.safetensors"))
    assert len(finished) > 2
    inodes = {p.stat().st_ino for p in finished}
    seen: list[int] = []
    result = quantize_checkpoint(
        plain, tmp_path / "q", **NVFP4, max_shard_bytes=SHARD, resume=True, progress=lambda done, *_: seen.append(done)
    )
    assert seen[0] > 10
    assert seen[-1] == len(tiny_tensors()) == len(result.outcomes)
    assert digests(tmp_path / "q") == whole
    assert inodes <= {p.stat().st_ino for p in (tmp_path / "q").glob("*.safetensors")}
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_a_torn_journal_or_shard_is_made_again(plain, left, whole, tmp_path):
    journal = left / "shard-00001.safetensors.json"
    journal.write_text(journal.read_text()[:-5])
    (left / "shard-00002.safetensors").unlink()
    (left / "config.json").write_text("half")
    (left / "sub").mkdir()
    quantize_checkpoint(plain, tmp_path / "q", **NVFP4, max_shard_bytes=SHARD, resume=True)
    assert digests(tmp_path / "q") == whole


def test_killed_between_renaming_the_shards_and_the_folder(plain, left, whole, tmp_path):
    (left / "shard-00000.safetensors").rename(left / "model-00001-of-00009.safetensors")
    inode = (left / "model-00001-of-00009.safetensors").stat().st_ino
    quantize_checkpoint(plain, tmp_path / "q", **NVFP4, max_shard_bytes=SHARD, resume=True)
    assert digests(tmp_path / "q") == whole
    assert inode in {p.stat().st_ino for p in (tmp_path / "q").iterdir()}


CHANGES = {
    "format": ({"format": "mxfp4"}, "recipe was * nvfp4 (rule amax, block 1x16), now * mxfp4 (rule"),
    "rule": ({"rule": "mse"}, "recipe was * nvfp4 (rule amax, block 1x16), now * nvfp4 (rule mse, block 1x16)"),
    "dialect": ({"dialect": "quark"}, "dialect was modelopt, now quark"),
    "exclude": ({"exclude": ["*self_attn*"]}, "recipe was nothing of it, now *self_attn* unquantized"),
    "shared_globals": ({"shared_globals": False}, "shared global scales was True, now False"),
    "weight_only": ({"weight_only": True}, "weight-only was False, now True"),
    "max_shard_bytes": ({"max_shard_bytes": SHARD + 1}, f"shard size was {SHARD}, now {SHARD + 1}"),
    "source": ({"source": "other"}, "source fingerprint was "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_recipe_or_source_is_not_resumed(plain, left, tmp_path, what):
    change, words = dict(CHANGES[what][0]), CHANGES[what][1]
    source = write_checkpoint(tmp_path / "other", tiny_tensors(seed=1)) if change.pop("source", None) else plain
    with pytest.raises(CheckpointError, match="another source or by another recipe") as caught:
        quantize_checkpoint(source, tmp_path / "q", **{**NVFP4, "max_shard_bytes": SHARD, **change}, resume=True)
    assert words in caught.value.message
    assert caught.value.message.count(", now ") == 1
    assert "leave --resume out" in caught.value.fix
    assert left.is_dir()
    assert not (tmp_path / "q").exists()


def test_another_recipe_is_refused_before_a_shard_was_finished(plain, tmp_path):
    """All of the tiny checkpoint fits one shard, so a killed conversion has none."""
    left = kill(plain, tmp_path / "q", shard=1 << 30)
    assert left is not None
    assert not list(left.glob("shard-*"))
    with pytest.raises(CheckpointError, match=r"now \* nvfp4 \(rule mse"):
        quantize_checkpoint(plain, tmp_path / "q", **NVFP4, max_shard_bytes=1 << 30, rule="mse", resume=True)
    quantize_checkpoint(
        plain, tmp_path / "q", **NVFP4, max_shard_bytes=1 << 30, rule="amax", resume=True
    )  # its default
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_rules_in_another_order_and_a_lost_request_are_told(plain, left, tmp_path):
    request = left / ".conversion.json"
    content = json.loads(request.read_text())
    excludes = {"exclude": ["*o_proj", "*k_proj"]}
    request.write_text(
        json.dumps({**content, "recipe": ["*k_proj unquantized", "*o_proj unquantized", *content["recipe"]]})
    )
    with pytest.raises(CheckpointError, match="recipe in another order"):
        quantize_checkpoint(plain, tmp_path / "q", **NVFP4, **excludes, max_shard_bytes=SHARD, resume=True)
    request.unlink()
    with pytest.raises(CheckpointError, match="it does not say how"):
        quantize_checkpoint(plain, tmp_path / "q", **NVFP4, max_shard_bytes=SHARD, resume=True)


def test_resume_without_anything_to_resume_starts_anew(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "a" / "q", **NVFP4, resume=True)
    quantize_checkpoint(plain, tmp_path / "b" / "q", **NVFP4)
    assert digests(tmp_path / "a" / "q") == digests(tmp_path / "b" / "q")


def test_an_interrupt_keeps_finished_shards_only_with_resume(plain, tmp_path):
    assert kill(plain, tmp_path / "q", signal="SIGINT") is None
    assert kill(plain, tmp_path / "q", signal="SIGINT", resume=True) is not None
    quantize_checkpoint(plain, tmp_path / "q", **NVFP4, max_shard_bytes=SHARD, resume=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q"]


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [NVFP4, {"format": "mxfp4", "dialect": "quark"}], ids=lambda t: t["format"])
def test_any_number_of_jobs_writes_the_same_bytes(plain, tmp_path, target):
    for jobs in (1, 2, 5):
        quantize_checkpoint(plain, tmp_path / str(jobs) / "q", **target, jobs=jobs, max_shard_bytes=SHARD)
    assert digests(tmp_path / "1" / "q") == digests(tmp_path / "2" / "q") == digests(tmp_path / "5" / "q")


def test_a_fault_in_one_job_ends_the_conversion_and_leaves_nothing(tmp_path):
    tensors = tiny_tensors()
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    source = write_checkpoint(tmp_path / "nan", tensors)
    with pytest.raises(Exception, match=re.escape("model.layers.1.self_attn.o_proj.weight")):
        quantize_checkpoint(source, tmp_path / "q", **NVFP4, jobs=3)
    assert [p.name for p in tmp_path.iterdir()] == ["nan"]


def test_terminated_by_a_signal_with_jobs(plain, tmp_path):
    script = KILL.format(signal="SIGTERM", resume=False, shard=SHARD, options=", jobs=3")
    script = "import signal\nfrom workbench.interrupt import terminable\nwith terminable():\n " + script.replace(
        "\n", "\n "
    )
    done = subprocess.run([sys.executable, "-c", script, str(plain), str(tmp_path / "q")], capture_output=True)
    assert b"Interrupted" in done.stderr
    assert done.returncode not in (0, -signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_load_file_of_the_library_reads_a_streamed_shard(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "q", format="f32", dialect="plain")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for name, value in tiny_tensors().items():
        assert torch.equal(stored[name], value.float()), name
