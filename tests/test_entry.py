"""Exit codes: only the gate produces 0, 1 or 2; everything else that goes wrong ends in 3."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig
from workbench.mini_models import model_path

from workbench import cli, experiment, run
from workbench.errors import CheckpointError


@pytest.fixture(autouse=True)
def fresh_logging() -> None:
    """Hydra's handlers of an earlier call hold that test's captured streams."""
    for logger in (logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))):
        for handler in [h for h in logger.handlers if type(h) is logging.StreamHandler]:
            logger.removeHandler(handler)


def test_verdicts_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 1, 2):
        monkeypatch.setattr(experiment, "run_experiment", lambda config, code=code: code)
        assert run.main(["experiment=kimi_requant"]) == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense=1"],
        ["experiment=nope"],
        ["--badflag"],
        ["experiment=kimi_requant", "model=nope"],
        ["experiment=kimi_requant", "engine.port=["],
        [],
    ],
)
def test_hydra_errors_and_bad_flags_exit_3(arguments: list[str]) -> None:
    assert run.main(arguments) == 3


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job", "experiment=kimi_requant"], ["--info", "defaults"]])
def test_help_and_config_exit_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 0
    assert "kimi_requant" in capsys.readouterr().out or arguments[0] == "--info"


def test_a_user_error_is_one_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: DictConfig) -> int:
        raise CheckpointError("shard x is truncated", fix="download it again")

    monkeypatch.setattr(experiment, "run_experiment", fail)
    assert run.main(["experiment=kimi_requant"]) == 3
    printed = capsys.readouterr().err
    assert "shard x is truncated" in printed
    assert "fix: download it again" in printed
    assert "Traceback" not in printed


def test_a_bug_exits_3_with_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def bug(config: DictConfig) -> int:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(experiment, "run_experiment", bug)
    assert run.main(["experiment=kimi_requant"]) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("codes", "worst"), [((0, 2), 2), ((0, 3, 2), 3), ((3, 1, 0), 1), ((0, 0), 0), ((2, 1), 1)])
def test_multirun_runs_every_job_and_the_worst_counts(
    codes: tuple[int, ...], worst: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = list(codes)

    def job(config: DictConfig) -> int:
        code = left.pop(0)
        if code == 3:
            raise RuntimeError("a job that breaks must not stop the others")
        return code

    monkeypatch.setattr(experiment, "run_experiment", job)
    seeds = ",".join(str(i) for i in range(len(codes)))
    assert run.main(["--multirun", "experiment=kimi_requant", f"seed={seeds}", f"paths.out={tmp_path}"]) == worst
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_exits_3(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom workbench import experiment, run\n"
        "def job(config):\n    print('started', flush=True)\n    time.sleep(60)\n    return 0\n"
        "experiment.run_experiment = job\nsys.exit(run.main(['experiment=kimi_requant']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "HYDRA_FULL_ERROR": "0"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=20) == 3


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["lint"], ["dance"], [], ["quantize", "a", "b", "--format", "int3", "--dialect", "plain"]]
)
def test_the_command_line_exits_3_on_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 3
    assert "error:" in capsys.readouterr().err


def test_the_command_line_names_a_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", str(tmp_path / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_help_answers_in_under_a_second() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "workbench.cli", "--help"], capture_output=True, check=True)
    assert b"quantize" in done.stdout
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("override", ["foo=1", "engine=bogus", "eval=[bogus]", "eval=5", "a=b=c", "engine.port=["])
def test_hydras_own_errors_are_one_message_with_a_way_out(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["experiment=kimi_requant", override]) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "fix: " in printed
    assert "Traceback" not in printed
    assert "HYDRA_FULL_ERROR" not in printed


def test_a_damaged_record_and_a_folder_that_is_no_run_are_named_by_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gate", str(tmp_path / "nowhere"), "--gated", "nvfp4"]) == 3
    assert "nowhere" in capsys.readouterr().err
    (tmp_path / "comparison.json").write_text("[1")
    assert cli.main(["gate", str(tmp_path), "--gated", "nvfp4"]) == 3
    assert "comparison.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"- 1\n", b"a: !unknown 1"])
def test_a_policy_that_cannot_be_read_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.yaml").write_bytes(content)
    assert cli.main(["gate", str(tmp_path), "--policy", str(tmp_path / "policy.yaml")]) == 3
    printed = capsys.readouterr().err
    assert "policy.yaml" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["lint", "{model}", "--json", "{model}/config.json"], "lies within the checkpoint"),
        (["lint", "{model}", "--json", "/dev/full"], "no regular file"),
        (["lint", "{model}", "--tensor-parallel", "0"], "tensor-parallel size 0"),
        (
            [
                "quantize",
                "{model}",
                "out",
                "--format",
                "fp8_block",
                "--dialect",
                "plain",
                "--block",
                "99999999999999999999x1",
            ],
            "at most",
        ),
        (["quantize", "{model}", "out", "--format", "mxfp4", "--dialect", "quark", "--exclude="], "pattern is empty"),
        (["quantize", "{model}", "hf://org/name", "--format", "mxfp4", "--dialect", "quark"], "the destination is hf:"),
        (
            ["quantize", "{model}", "out", "--format", "mxfp4", "--dialect", "quark", "--max-model-len", "-3"],
            "max-model-len",
        ),
        (["bench", "kernels", "--rows", "9" * 20], "cannot be measured"),
        (["compare", "{folder}/nowhere"], "there is no folder"),
        (["gate", "{folder}", "--gated", "nope"], "has no arm 'nope'"),
    ],
)
def test_a_value_that_cannot_be_is_named_and_nothing_is_touched(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lint").mkdir()
    (tmp_path / "lint" / "source.json").write_text("{}")
    before = (model_path() / "config.json").read_bytes()
    assert cli.main([a.format(model=model_path(), folder=tmp_path) for a in arguments]) == 3
    message = capsys.readouterr().err
    assert named in message
    assert "fix:" in message
    assert (model_path() / "config.json").read_bytes() == before
    assert not Path("/dev/full").is_file()


def test_a_report_to_a_full_disk_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-u", "-m", "workbench.cli", "lint", str(model_path())]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "disk is full" in done.stderr


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert cli.main(["lint", str(model_path()), "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size > 0
