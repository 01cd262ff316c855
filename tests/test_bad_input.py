"""Bad input ends in one clear message that names the thing and the way out, exit 3, and nothing half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import resource
import shutil
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
from workbench import cli, records
from workbench import run as front_door
from workbench.checkpoints.convert import quantize_checkpoint
from workbench.records import TensorRecord

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


def run_apart(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The front door in `folder` as a process of its own, with its output."""
    command = [sys.executable, "-m", "workbench.run", "experiment=kimi_requant", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which need not import everything again."""
    out, err = io.StringIO(), io.StringIO()
    arguments = ["experiment=kimi_requant", *overrides]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = front_door.main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


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
    assert_refused(run_apart(tmp_path, *MODEL, f"model.root={tmp_path}/nowhere"), "nowhere")


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


def test_a_copy_of_the_source_under_a_quantized_name_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The noise arm, which is to have the source's weights, and what is requantized at load are not."""
    shutil.copytree(model_path(), tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace("{", '{"transformers_version": "another",', 1))
    given = [f"model.root={model_path()}", f"model.checkpoints.nvfp4.path={tmp_path / 'copy'}"]
    judged = ["gate.margin_pp=none", "gate.weights=null", "gate.reported=[mxfp4_direct,source_again]"]
    done = run(tmp_path, *MODEL, *given, *judged, "stages=[prepare,lint,gate,report]")
    told = "Nothing was quantized in nvfp4: the weights are those of source."
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in " ".join(done.stdout.split())
    folder = next((tmp_path / "reports" / "kimi_requant").iterdir())
    verdict = records.read_json(records.Verdict, folder / "verdict.json")
    assert [check.arm for check in verdict.checks if check.name == "weights unquantized"] == ["nvfp4"]
    for file in ("report.html", "summary.md", "report.json", "junit.xml"):
        assert told in (folder / file).read_text(), file
    assert cli.main(["gate", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert told in printed
    assert "  reported: nvfp4: weights unquantized: its checkpoint's weights are those of source, every" in printed
    assert "policy: smoke, from config.yaml" in printed


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


def test_a_model_that_holds_less_than_our_default_is_run_with_its_own_context(tmp_path: Path) -> None:
    shutil.copytree(model_path("mini_qwen"), model := tmp_path / "model")
    config = (model / "config.json").read_text()
    length = '"max_position_embeddings": 4096'
    assert length in config
    (model / "config.json").write_text(config.replace(length, length.replace("4096", "2048")))
    dense = [f"model.root={model}", "model.checkpoints.nvfp4.make.calibrate=false"]
    done = run(tmp_path, *MODEL, *dense, "stages=[prepare]")
    assert "model.max_model_len=2048" in done.stdout
    assert "nothing was judged" in done.stderr
    written = next(tmp_path.glob("reports/kimi_requant/*/config.yaml")).read_text()
    assert written.count("max_model_len: 2048") == 2
    assert "matches no module" not in done.stdout  # the router of our own list, in a model without experts
    done = run(tmp_path, *MODEL, *dense, "stages=[prepare]", "model.exclude=[lm_head,'*typo*','*.mlp.gate']")
    assert "'*typo*' matches no module" in done.stdout
    for key in ("model", "engine"):
        (other := tmp_path / f"{key}_asks").mkdir()
        longer = run(other, *MODEL, *dense, f"{key}.max_model_len=8192")
        assert_refused(longer, f"{key}.max_model_len=8192", f"{key}.max_model_len=2048")
        assert not list(other.iterdir())


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
    done = run_apart(tmp_path, "stages=[evaluate]", "+engine.args.no_such_flag=1")
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


# ---- a run's own files -----------------------------------------------------------------------------------------------


def small_run(folder: Path) -> Path:
    """A run folder with one small record of every stage but the evaluation's answers."""
    import pandas

    empty = {"float": math.nan, "int": 0, "bool": False}
    record = {field.name: empty.get(str(field.type), "") for field in dataclasses.fields(TensorRecord)}
    row = record | {"name": "a.weight", "source_arm": "source", "first_arm": "nvfp4", "second_arm": "requant"}
    folder.mkdir()
    pandas.DataFrame([row]).to_parquet(folder / "tensors.parquet")
    records.write_text(folder / "config.yaml", "name: small\narms: {source: {}, nvfp4: {}, requant: {}}\n")
    records.write_text(folder / "analysis.json", '{"schema_version": 1, "pairs": [], "gemm": [], "claims": []}')
    records.write_json(folder / "comparison.json", records.Comparison(baseline="source", noise_arm="", tasks=()))
    score = records.TaskScore(
        arm="nvfp4", task="t", filter="f", metric="m", n=1, value=1.0, low=0.2, high=1.0, num_fewshot=0,
        samples="s.jsonl", primary=True,
    )  # fmt: skip
    evaluation = records.Evaluation(
        arm="nvfp4", scores=(score,), command=(), harness="h", request_order="forward", concurrency=1, seconds=1.0
    )
    records.write_json(folder / "eval" / "nvfp4" / "scores.json", evaluation)
    lint = records.LintReport(
        checkpoint="c", dialect="plain", checks=(), findings=(), quantized_tensors=0, tensors=1, seconds=0.1
    )
    records.write_json(folder / "lint" / "nvfp4.json", lint)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return replace


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def wrong_columns(path: Path) -> None:
    import pandas

    pandas.DataFrame({"a": [1]}).to_parquet(path)


def words_for_numbers(path: Path) -> None:
    import pandas

    pandas.read_parquet(path).assign(sqnr_total_db="high").to_parquet(path)


def written(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


DAMAGES = [
    ("comparison.json", cut, "compare"),
    ("comparison.json", written("[]"), "compare"),
    ("comparison.json", a_folder, "compare"),
    ("comparison.json", replaced('"tasks": []', '"tasks": {}'), "compare"),
    ("comparison.json", replaced('"source"', "5"), "compare"),
    ("comparison.json", replaced('"noise_floor": {}', '"noise_floor": {"t|f": true}'), "compare"),
    ("tensors.parquet", cut, "analyze"),
    ("tensors.parquet", written(""), "analyze"),
    ("tensors.parquet", wrong_columns, "analyze"),
    ("tensors.parquet", words_for_numbers, "analyze"),
    ("eval/nvfp4/scores.json", replaced('"n": 1', '"n": "1"'), "evaluate"),
    ("eval/nvfp4/scores.json", replaced('"primary": true', '"primary": 1'), "evaluate"),
    ("lint/nvfp4.json", replaced('"checks": []', '"checks": "all"'), "lint"),
    ("lint/nvfp4.json", replaced('"dialect": "plain"', '"dialect": null'), "lint"),
    ("config.yaml", written("[]"), None),
    ("config.yaml", written(""), None),
    ("config.yaml", written("5"), None),
    ("manifest.json", written("[]"), None),
]


SHOWN_ONLY = [
    ("analysis.json", cut, "analyze"),
    ("analysis.json", written("[]"), "analyze"),
    ("analysis.json", replaced("[]", "5"), "analyze"),
    ("gemm.parquet", written("x"), "analyze"),
    ("server/nvfp4.json", written("{}"), "evaluate"),
    ("verdict.json", written("{}"), "gate"),
]


@pytest.mark.parametrize(("file", "damage", "stage"), DAMAGES + SHOWN_ONLY)
def test_a_report_of_a_damaged_file_names_it_and_its_stage_and_exits_3(
    file: str, damage: Callable[[Path], object], stage: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = small_run(tmp_path / "run")
    (run_dir / file).parent.mkdir(exist_ok=True)
    damage(run_dir / file)
    assert cli.main(["report", str(run_dir)]) == 3
    message = capsys.readouterr().err
    assert f"{run_dir / file} is damaged: " in message
    assert "fix: delete it" in message
    assert "Traceback" not in message
    if stage is not None:
        assert f"(the {stage} stage writes it)" in message
        assert f"run its stage again: {stage}\n" in message
    assert f"{file}: " in (run_dir / "summary.md").read_text()


def test_a_report_names_every_damaged_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = small_run(tmp_path / "run")
    for name in ("comparison.json", "tensors.parquet", "analysis.json"):
        cut(run_dir / name)
    assert cli.main(["report", str(run_dir)]) == 3
    message = capsys.readouterr().err
    assert message.count(" is damaged: ") == 3
    assert "run its stage again: compare, analyze" in message


@pytest.mark.parametrize("file", ["comparison.json", "tensors.parquet", "analysis.json", "eval", "lint", "config.yaml"])
def test_a_report_without_a_file_says_that_its_part_was_not_run(file: str, tmp_path: Path) -> None:
    run_dir = small_run(tmp_path / "run")
    path = run_dir / file
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert cli.main(["report", str(run_dir)]) == 0
    assert "not run" in (run_dir / "summary.md").read_text()


@pytest.mark.parametrize(("file", "damage", "stage"), DAMAGES)
def test_the_gate_judges_nothing_by_a_damaged_file(
    file: str, damage: Callable[[Path], object], stage: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = small_run(tmp_path / "run")
    damage(run_dir / file)
    assert cli.main(["gate", str(run_dir), "--gated", "nvfp4"]) == 3
    message = capsys.readouterr().err
    assert f"{run_dir / file} is damaged: " in message
    assert "fix: delete it" in message
    assert not (run_dir / "verdict.json").exists()
