"""Bad input ends in one clear message that names the thing and the way out, exit 3, and nothing half-written."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from workbench.mini_models import model_path

from tests import broken
from workbench import records
from workbench.checkpoints.convert import quantize_checkpoint

MODEL = ["model=local", "model.name=mini", "analysis.capture=false"]


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mini-kimi in NVFP4 as the demo makes it, with a made-up calibration."""
    from workbench.checkpoints import open_checkpoint

    target = tmp_path_factory.mktemp("made") / "nvfp4"
    exclude = ["*self_attn*", "*.mlp.gate", "lm_head", "*embed_tokens"]
    with open_checkpoint(model_path()) as source:
        amax = {entry.module: 8.0 for entry in source.entries()}
    quantize_checkpoint(
        model_path(),
        target,
        format="nvfp4",
        dialect="modelopt",
        exclude=exclude,
        input_amax=amax,
        max_shard_bytes=4 << 20,
    )
    return target


def run(folder: Path, *overrides: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The front door in `folder`, with its output."""
    command = [sys.executable, "-m", "workbench.run", "experiment=kimi_requant", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]


def left_over(folder: Path) -> list[int]:
    """Processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process.pid)
    return found


def assert_refused(done: subprocess.CompletedProcess[str], *named: str) -> None:
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in named:
        assert word in done.stderr
    assert "fix:" in done.stderr


def test_a_missing_folder(tmp_path: Path) -> None:
    assert_refused(run(tmp_path, *MODEL, f"model.root={tmp_path}/nowhere"), "nowhere")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (broken.truncate_shard, ("model-0000", "truncated")),
        (broken.index_names_missing_file, ("model-00009-of-00009.safetensors",)),
        (broken.unknown_quant_method, ("magic4",)),
        (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
        (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    ],
)
def test_a_damaged_checkpoint(
    damage: Callable[[Path], object], named: tuple[str, ...], nvfp4: Path, tmp_path: Path
) -> None:
    folder = broken.copy_of(nvfp4, tmp_path / "damaged")
    damage(folder)
    done = run(tmp_path, *MODEL, f"model.root={model_path()}", f"model.checkpoints.nvfp4.path={folder}")
    assert_refused(done, *named)
    assert not list((tmp_path / "reports" / "checkpoints").glob("*"))


def test_a_scale_of_the_wrong_shape(nvfp4: Path, tmp_path: Path) -> None:
    folder = broken.edit_tensors(broken.copy_of(nvfp4, tmp_path / "damaged"), broken.misshape_scale)
    done = run(tmp_path, *MODEL, f"model.root={model_path()}", f"model.checkpoints.nvfp4.path={folder}")
    assert_refused(done, "model.layers.2.mlp.experts.5.up_proj", "weight_scale")


def test_a_nan_scale_is_invalid_before_a_server_starts_unless_allowed(nvfp4: Path, tmp_path: Path) -> None:
    folder = broken.edit_tensors(broken.copy_of(nvfp4, tmp_path / "damaged"), broken.nan_scale)
    given = [f"model.root={model_path()}", f"model.checkpoints.nvfp4.path={folder}"]
    done = run(tmp_path, *MODEL, *given)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.layers.2.mlp.experts.5.up_proj" in done.stdout
    assert "scale-nan" in done.stdout
    path = next((tmp_path / "reports" / "kimi_requant").iterdir())
    assert records.read_json(records.Verdict, path / "verdict.json").status == "invalid"
    assert (path / "report.html").exists()
    assert not (path / "server").exists()
    lint = subprocess.run([sys.executable, "-m", "workbench.cli", "lint", str(folder)], capture_output=True, text=True)
    assert lint.returncode == 1
    assert "scale-nan" in lint.stdout
    allowed = run(tmp_path, *MODEL, *given, "lint.allow=[scale-nan]", "stages=[prepare,lint,gate]")
    assert "allowed scale-nan" in allowed.stdout


def test_an_unknown_override(tmp_path: Path) -> None:
    done = run(tmp_path, "engine.prot=1")
    assert done.returncode == 3
    assert "prot" in done.stderr


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("engine.dtype=", "engine.dtype"),
        ("+arms.nvfp4.kv_cache_dtype=foo", "arms.nvfp4: kv_cache_dtype='foo'"),
        ("model.checkpoints.nvfp4.make.format=int3", "int3"),
        ("model.checkpoints.nvfp4.make.dialect=gpt_oss", "gpt_oss"),
        ("+model.checkpoints.mxfp4.make.shared_globals=false", "no global scales"),
        ("+model.checkpoints.nvfp4.make.rules=[{match: '*experts*', format: int3}]", "int3"),
        ("arms.nvfp4_to_mxfp4.format.rule=odd", "arms.nvfp4_to_mxfp4: mxfp4 has no scale rule 'odd'"),
    ],
)
def test_a_value_that_a_room_refuses_is_refused_before_the_first_stage(
    override: str, named: str, tmp_path: Path
) -> None:
    assert_refused(run(tmp_path, override), named)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["evaluate"])
def test_a_port_in_use(stage: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path, f"engine.port={port}", "stages=[evaluate]", "analysis.capture=false")
    assert_refused(done, str(port))


@pytest.mark.vllm
def test_a_server_that_dies_at_start_shows_its_log_and_leaves_no_process(tmp_path: Path) -> None:
    done = run(tmp_path, "stages=[evaluate]", "+engine.args.no_such_flag=1")
    assert_refused(done, "no-such-flag", ".log")
    assert not left_over(tmp_path)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    target = tmp_path / "out"
    command = [sys.executable, "-m", "workbench.cli", "quantize", str(model_path()), str(target)]
    command += ["--format", "mxfp4", "--dialect", "quark", "--exclude", "*self_attn*"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files, env={**os.environ})
    assert_refused(done, str(target))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_destination_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    command = [sys.executable, "-m", "workbench.cli", "quantize", str(model_path()), str(tmp_path / "out")]
    done = subprocess.run([*command, "--format", "bf16", "--dialect", "plain"], capture_output=True, text=True)
    assert_refused(done, "out")
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"


def test_a_conversion_that_is_terminated_exits_3_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench.cli", "quantize", str(model_path()), str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--format", "nvfp4", "--dialect", "modelopt"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    _, message = process.communicate(timeout=60)
    assert process.returncode == 3, message
    assert b"interrupted" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.vllm
def test_a_prompt_longer_than_the_context_is_named_by_the_calibration(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Short.\n" + "seven eight nine " * 50 + "\n")
    command = [sys.executable, "-m", "workbench.cli", "calibrate", str(model_path()), "--max-model-len", "64"]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "activations.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert_refused(done, "prompt 2 of 2", "64", "--max-model-len")
    assert not (tmp_path / "activations.safetensors").exists()
