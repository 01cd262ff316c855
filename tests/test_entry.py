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

from workbench import cli, experiment, run, settings
from workbench.commands import analysis
from workbench.commands.arguments import Parser
from workbench.errors import CheckpointError, ConfigError

FULL_OUTPUT = "error: the output could not be written: its disk is full\n  fix: free space\n"
EVALUATE = ["evaluate", "http://127.0.0.1:9/v1", "--model", "m", "--tokenizer", "{model}", "--out", "{folder}/run"]


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
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "fix: report it" in printed


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
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HYDRA_FULL_ERROR": "0"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, message = process.communicate(timeout=20)
    assert process.returncode == 3
    assert message == "error: interrupted\n  fix: continue with resume=latest; the endpoints are stopped\n"


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["lint"], ["dance"], [], ["quantize", "a", "b", "--format", "int3", "--dialect", "plain"]]
)
def test_the_command_line_exits_3_on_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 3
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("kind", settings.COMPUTE)
def test_compute_takes_what_the_settings_know(kind: str) -> None:
    words = ["analyze", "a", "b", "--out", "c"]
    assert cli._parser().parse_args([*words, "--compute", kind]).compute == kind


def test_the_choices_of_compute_are_those_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "COMPUTE", ("here", "there"))
    assert cli.main(["analyze", "a", "b", "--out", "c", "--compute", "ray"]) == 3
    assert "choose from 'here', 'there'" in capsys.readouterr().err


def test_a_command_that_is_not_asked_for_adds_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that choices whose import takes time cost the other commands nothing."""

    def fail(parser: Parser) -> None:
        raise AssertionError("it was not asked for")

    monkeypatch.setattr(analysis, "_analyze_options", fail)
    assert cli.main(["--help"]) == cli.main(["lint", "--help"]) == 0


def test_the_command_line_names_a_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", str(tmp_path / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_help_answers_in_under_a_second() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "workbench.cli", "--help"], capture_output=True, check=True)
    assert b"quantize" in done.stdout
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    ("override", "says", "way_out"),
    [
        ("foo=1", "Could not override 'foo'", "keys here: "),
        ("engine.prot=1", "Could not override 'engine.prot'", "keys in engine: port, "),
        ("engine.args.max_num_seqs=1", "Could not override", "+engine.args.max_num_seqs=VALUE"),
        ("engine=bogus", "Could not find 'engine/bogus'", "choose for engine: atom_kimi_k2_5, external, "),
        ("eval=[gsm8k_mimi]", "Could not load 'eval/gsm8k_mimi'", "choose for eval: gsm8k_mini, "),
        ("eval=5", "Got int", "--help"),
        ("a=b=c", "mismatched input", "'a=b=c' as KEY=VALUE"),
        ("engine.port=[", "no viable alternative", "'engine.port=[' as KEY=VALUE"),
        ("~nope", "Could not delete", "--cfg job"),
        ("bogus/group@x=1", "'bogus/group' does not exist", "each group: analysis, backend, "),
        ("model.root=${nope}", "Interpolation key 'nope' not found", "give model.root another value"),
        ("--badflag", "unrecognized arguments: --badflag", "--hydra-help"),
        ("--cfg=nope", "invalid choice: 'nope'", "--hydra-help"),
    ],
)
def test_hydras_own_errors_are_one_message_with_a_way_out(
    override: str, says: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["experiment=kimi_requant", override]) == 3
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1
    assert says in printed
    assert way_out in printed.partition("fix: ")[2]
    assert "Traceback" not in printed
    assert "HYDRA_FULL_ERROR" not in printed


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.api=chatty", "api='chatty'"),
        ("model.thinking_budget=-1", "thinking_budget=-1"),
        ("+arms.source.request_order=random", "request_order"),
    ],
)
def test_how_an_endpoint_is_asked_is_checked_before_a_stage(
    override: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["experiment=kimi_requant", override, f"paths.out={tmp_path}"]) == 3
    printed = capsys.readouterr().err
    assert named in printed
    assert "fix: " in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stages", ["report", "analyze,report"])
def test_a_run_without_a_gate_says_why_it_exits_3(
    stages: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"stages=[{stages}]", "analysis.pairs=[]", f"paths.out={tmp_path}"]
    assert run.main(["experiment=kimi_requant", *overrides]) == 3
    printed = capsys.readouterr().err
    assert f"error: nothing was judged: stages=[{stages}] has no gate" in printed
    assert f"fix: for a verdict 'stages=[{stages.replace('report', 'gate,report')}]'" in printed


def test_what_is_no_run_folder_is_named_by_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gate", str(tmp_path / "nowhere"), "--gated", "nvfp4"]) == 3
    assert "nowhere is no run folder" in capsys.readouterr().err


def test_an_arm_that_the_run_does_not_have_is_refused_by_the_judge(tmp_path: Path) -> None:
    policy = {"name": "mine", "margin_pp": 1.0}
    (tmp_path / "config.yaml").write_text("name: small\narms: {source: {}, nvfp4: {}}\n")
    with pytest.raises(ConfigError, match="has no arm 'nope'") as refused:
        experiment.judge(tmp_path, {**policy, "gated": ["nvfp4"], "reported": ["nope"]})
    assert refused.value.fix == "arms: source, nvfp4"
    with pytest.raises(ConfigError, match="the policy mine gates no arm") as refused:
        experiment.judge(tmp_path, {**policy, "gated": []})
    assert "--gated ARM" in refused.value.fix
    assert "source, nvfp4" in refused.value.fix
    assert not (tmp_path / "verdict.json").exists()
    assert experiment.judge(tmp_path, {**policy, "gated": ["nvfp4"]}).status == "invalid"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"- 1\n", "is not a mapping"),
        (b"5", "cannot be read: it is no mapping"),
        (b"a: !unknown 1", "cannot be read"),
        (b"", "is empty"),
        (b"\n# nothing\n", "is empty"),
        (b"# " + b"x" * (1 << 20), "is larger than 1 MiB"),
    ],
)
def test_a_policy_that_cannot_be_read_is_named(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.yaml").write_bytes(content)
    assert cli.main(["gate", str(tmp_path), "--policy", str(tmp_path / "policy.yaml")]) == 3
    printed = capsys.readouterr().err
    assert f"policy.yaml {says}" in printed
    assert "fix: write it like conf/gate/smoke.yaml" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("policy", "says"),
    [("/dev/null", "/dev/null is empty"), ("/dev", "/dev is a folder"), ("nope", "there is no gate policy 'nope'")],
)
def test_a_policy_that_is_no_ordinary_file_is_named(
    policy: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gate", str(tmp_path), "--policy", policy]) == 3
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["lint", "{model}", "--json", "{model}/config.json"], "lies within {model}, which the command reads"),
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
                "modelopt",
                "--block",
                "99999999999999999999x1",
            ],
            "rows = 1 to 1073741824",
        ),
        (["quantize", "{model}", "out", "--format", "mxfp4", "--dialect", "quark", "--exclude="], "pattern is empty"),
        (["quantize", "{model}", "hf://org/name", "--format", "mxfp4", "--dialect", "quark"], "the destination is hf:"),
        (
            ["quantize", "{model}", "out", "--format", "mxfp4", "--dialect", "quark", "--max-model-len", "-3"],
            "max-model-len",
        ),
        (["bench", "kernels", "--rows", "9" * 20], "cannot be measured"),
        (["bench", "kernels", "--threads", "9" * 10], "cores"),
        (["bench", "kernels", "--json", "{folder}"], "is a folder"),
        (["compare", "{folder}/nowhere"], "there is no folder"),
        (["gate", "{folder}", "--gated", "nope"], "has no arm 'nope'"),
        (["gate", "{folder}", "--policy="], "it is empty"),
        (["report", ""], "it is empty"),
        (["report", "a" * 5000], "File name too long"),
        (["calibrate", "{model}", "--out", "{folder}"], "is a folder"),
        (["calibrate", "{model}", "--out", "{folder}/file/a.safetensors"], "file is no folder"),
        (["calibrate", "{folder}/nowhere", "--out", "{folder}/a.safetensors"], "no checkpoint at"),
        (["serve", "{model}", "--log", "{folder}"], "is a folder"),
        (["serve", "{model}", "--engine-arg", "=5"], "'=5' is not KEY=VALUE"),
        (["serve", "{model}", "--engine-env", "A"], "'A' is not KEY=VALUE"),
        (["analyze", "{model}", "{model}", "--out", "{folder}/file"], "file is no folder"),
        (["analyze", "{model}", "{model}", "--out", "x", "--second", "nope"], "neither a format nor a checkpoint's"),
        (["analyze", "{model}", "{model}", "--out", "x", "--activations", "{folder}"], "is a folder"),
        (["analyze", "{model}", "{model}", "--out", "x", "--bootstrap", "nan"], "'nan' is no whole number from 1"),
        ([*EVALUATE, "--task", "gsm8k_mini]"], "there is no task 'gsm8k_mini]'"),
        ([*EVALUATE, "--task", ""], "there is no task ''"),
        ([*EVALUATE, "--task", "gsm8k_local"], "eval.gsm8k.data.test"),
        ([*EVALUATE, "--task", "gsm8k_mini", "--limit", "-3"], "'-3' is no whole number from 1"),
        ([*EVALUATE, "--task", "gsm8k_mini", "--out", "{folder}/file"], "file is no folder"),
    ],
)
def test_a_value_that_cannot_be_is_named_and_nothing_is_touched(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: small\narms: {source: {}}\n")
    (tmp_path / "file").write_text("")
    before = (model_path() / "config.json").read_bytes()
    assert cli.main([a.format(model=model_path(), folder=tmp_path) for a in arguments]) == 3
    message = capsys.readouterr().err
    assert named.format(model=model_path()) in message
    assert "fix:" in message
    assert "Traceback" not in message
    assert (model_path() / "config.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "file"]
    assert not Path("/dev/full").is_file()


@pytest.mark.parametrize(
    ("module", "unbuffered"), [("workbench.cli", ""), ("workbench.run", ""), ("workbench.run", "1")]
)
def test_help_to_a_full_disk_or_a_reader_that_has_gone_ends_in_3(module: str, unbuffered: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (3, FULL_OUTPUT)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    message = "error: what read the output has closed it\n  fix: let it read to the end, or write to a file\n"
    assert (done.returncode, done.stderr) == (3, message)


def test_a_closed_stdout_is_no_error() -> None:
    command = [sys.executable, "-m", "workbench.cli", "lint", str(model_path())]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_stdout_cannot_encode_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "ünï cødé").symlink_to(model_path())
    command = [sys.executable, "-m", "workbench.cli", "lint", str(tmp_path / "ünï cødé")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\\xfcn\\xef c\\xf8d\\xe9: plain" in done.stdout


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
