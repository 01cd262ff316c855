"""An endpoint's life, with a fake server at the process border: start, wait, record, stop, and every way to fail."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import CheckpointError, ConfigError, EngineError
from workbench.serving import command
from workbench.serving.endpoint import start
from workbench.serving.serve import serve_forever
from workbench.serving.spec import EngineSpec, ServeSpec

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def spec(tmp_path) -> ServeSpec:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}, folder / "model.safetensors")
    return ServeSpec(arm="arm", checkpoint=folder, engine=EngineSpec(startup_timeout_s=20))


@pytest.fixture
def fake(monkeypatch):
    """Replaces the command line alone; everything around it is real."""
    real = command.build_command

    def build(spec, *, port, model, audit):
        _, env = real(spec, port=port, model=model, audit=audit)
        layer = {"weight": "mxfp4", "activation": "mxfp4", "activation_scale": "dynamic_per_block", "weight_bytes": 17}
        audit.write_text(
            json.dumps({"engine_version": "fake 1", "load_s": 1.5, "weight_bytes": 17, "layers": {"a": layer}})
        )
        return [sys.executable, str(FAKE), "--port", str(port)], env

    monkeypatch.setattr(command, "build_command", build)


def with_env(spec: ServeSpec, **env: str) -> ServeSpec:
    return dataclasses.replace(spec, engine=dataclasses.replace(spec.engine, env=env))


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_an_endpoint_answers_is_recorded_and_is_gone_afterwards(spec, fake, tmp_path):
    with start(with_env(spec, SOME_FLAG="1"), tmp_path / "log") as endpoint:
        assert endpoint.alive()
        time.sleep(0.7)  # one sample of memory
        record = endpoint.record()
        tree = psutil.Process(endpoint._supervisor.pid).children(recursive=True)
    assert record.base_url == endpoint.base_url
    assert record.base_url.endswith("/v1")
    assert record.env == {"SOME_FLAG": "1"}
    assert record.load_s == 1.5
    assert record.weight_bytes == 17
    assert record.activation_scale == "dynamic_per_block"
    assert record.ready_s > 0
    assert record.peak_rss_bytes > 5e6
    assert len(record.fingerprint) == 16
    assert tree
    assert all(gone(p.pid) for p in tree)
    endpoint.stop()  # a second time is harmless


def test_a_child_that_ignores_sigterm_and_left_the_session_is_killed(spec, fake, tmp_path):
    pid_file = tmp_path / "pid"
    with start(with_env(spec, FAKE_CHILD=str(pid_file)), tmp_path / "log"):
        child = int(pid_file.read_text())
        assert psutil.pid_exists(child)
    assert gone(child)


def test_the_server_is_stopped_on_an_error_in_the_block(spec, fake, tmp_path):
    def interrupt():
        with start(spec, tmp_path / "log") as endpoint:
            tree.extend(psutil.Process(endpoint._supervisor.pid).children(recursive=True))
            raise KeyboardInterrupt

    tree: list[psutil.Process] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert tree
    assert all(gone(p.pid) for p in tree)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphan_when_the_workbench_is_killed(spec, tmp_path, number):
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from workbench.serving import command, endpoint
        from workbench.serving.spec import ServeSpec
        command.build_command = lambda spec, *, port, model, audit: (
            [sys.executable, {str(FAKE)!r}, "--port", str(port)],
            {{"FAKE_CHILD": {str(tmp_path / "pid")!r}, "FAKE_DEAF": "1"}})
        arm = ServeSpec(arm="a", checkpoint=Path({str(spec.checkpoint)!r}))
        e = endpoint.start(arm, Path({str(tmp_path / "log")!r}))
        print("ready", flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    below = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    assert len(below) >= 3  # supervisor, server, its child
    parent.send_signal(number)
    parent.wait()
    time.sleep(5)  # the grace of a server that ignores SIGTERM
    assert all(gone(pid) for pid in below)
    assert gone(int((tmp_path / "pid").read_text()))


def test_leftovers_are_killed_when_the_supervisor_itself_was(spec, fake, tmp_path):
    pid_file = tmp_path / "pid"
    with start(with_env(spec, FAKE_CHILD=str(pid_file)), tmp_path / "log") as endpoint:
        time.sleep(0.7)
        os.kill(endpoint._supervisor.pid, signal.SIGKILL)
        endpoint._supervisor.wait()
        with pytest.raises(EngineError, match="has died"):
            endpoint.check()
    assert gone(int(pid_file.read_text()))


def test_a_server_that_dies_at_start_shows_its_log(spec, fake, tmp_path):
    message = "ValueError: Model architectures ['FooForCausalLM'] are not supported for now."
    with pytest.raises(EngineError) as caught:
        start(with_env(spec, FAKE_DIES=message), tmp_path / "log")
    assert "exit code 7" in str(caught.value)
    assert message in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert "does not know this architecture" in caught.value.fix


def test_a_typed_error_inside_the_engine_gives_its_own_fix(spec, fake, tmp_path):
    with pytest.raises(EngineError) as caught:
        start(
            with_env(spec, FAKE_DIES="(Worker) ERROR CheckpointError: x is NaN\n  fix: repair x\nlater"),
            tmp_path / "log",
        )
    assert caught.value.fix == "repair x"


def test_a_server_that_never_answers_times_out_and_is_stopped(spec, fake, tmp_path):
    pid_file = tmp_path / "pid"
    slow = with_env(spec, FAKE_HANGS="1", FAKE_CHILD=str(pid_file))
    slow = dataclasses.replace(slow, engine=dataclasses.replace(slow.engine, startup_timeout_s=1.5))
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        start(slow, tmp_path / "log")
    assert gone(int(pid_file.read_text()))


def test_a_server_that_is_up_but_completes_nothing_is_an_error(spec, fake, tmp_path):
    with pytest.raises(EngineError, match="the model has no vocabulary"):
        start(with_env(spec, FAKE_REFUSES="1"), tmp_path / "log")


def test_a_port_in_use(spec, fake, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = dataclasses.replace(spec, engine=EngineSpec(port=holder.getsockname()[1]))
        with pytest.raises(EngineError, match="Address already in use") as caught:
            start(taken, tmp_path / "log")
    assert "engine.port=0" in caught.value.fix
    assert not (tmp_path / "log").exists()


def test_what_is_wrong_before_a_process_starts(spec, tmp_path):
    with pytest.raises(CheckpointError):
        start(dataclasses.replace(spec, checkpoint=tmp_path / "missing"), tmp_path / "log")
    with pytest.raises(ConfigError, match="it is not quantized"):
        start(dataclasses.replace(spec, backend="emulation"), tmp_path / "log")
    with pytest.raises(ConfigError, match="every module is excluded"):
        start(dataclasses.replace(spec, backend="requant", format="mxfp4", exclude=("*",)), tmp_path / "log")
    with pytest.raises(ConfigError, match="needs a target format"):
        start(dataclasses.replace(spec, backend="requant"), tmp_path / "log")
    with pytest.raises(ConfigError, match="requant's"):
        start(dataclasses.replace(spec, format="mxfp4"), tmp_path / "log")
    with pytest.raises(ConfigError, match="unknown engine"):
        EngineSpec(kind="vlm")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("port", 70000), ("port", -1), ("tensor_parallel_size", 0), ("dtype", "int8"), ("startup_timeout_s", 0),
        ("startup_timeout_s", float("nan")), ("max_model_len", -1), ("base_url", "host:8000"), ("base_url", "http://"),
        ("base_url", "http://h:70000"),
    ],
)  # fmt: skip
def test_engine_settings_are_checked(setting, value):
    with pytest.raises(ConfigError, match=f"engine.{setting}=") as caught:
        EngineSpec(**{setting: value})
    assert caught.value.fix


def test_serve_ends_in_the_error_of_a_wrong_port(tmp_path, capsys):
    from workbench.cli import main

    assert main(["serve", str(tmp_path), "--port", "70000"]) == 3
    assert "--port 70000" in capsys.readouterr().err


def test_an_external_endpoint_is_probed_and_left_running(spec, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    external = dataclasses.replace(spec, engine=EngineSpec(kind="external", base_url=url))
    with pytest.raises(EngineError, match="no answer"):
        start(external, tmp_path / "log")
    server = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port)])
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        with start(external, tmp_path / "log") as endpoint:
            record = endpoint.record()
        assert (record.engine, record.model, record.peak_rss_bytes) == ("external", "served", None)
        assert server.poll() is None
        wrong = dataclasses.replace(external, engine=EngineSpec(kind="external", base_url=url, model="other"))
        with pytest.raises(EngineError, match="it lists served"):
            start(wrong, tmp_path / "log")
        root = dataclasses.replace(external, engine=EngineSpec(kind="external", base_url=url.removesuffix("/v1")))
        with pytest.raises(EngineError, match="404") as caught:
            start(root, tmp_path / "log")
        assert "/v1" in caught.value.fix
    finally:
        server.kill()
        server.wait()


def test_engine_arguments_and_environment_pass_through(spec, tmp_path):
    engine = EngineSpec(
        args={"max_num_seqs": 4, "--enforce-eager": False, "enable_prefix_caching": True, "seed": None, "port": 9},
        env={"OMP_WAIT_POLICY": "ACTIVE"},
        max_model_len=64,
    )
    line, env = command.build_command(
        dataclasses.replace(spec, engine=engine, kv_cache_dtype="fp8"), port=1, model="m", audit=tmp_path / "a"
    )
    assert line[line.index("--max-num-seqs") + 1] == "4"
    assert line[line.index("--port") + 1] == "9"
    assert line[line.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--enforce-eager" not in line
    assert "--enable-prefix-caching" in line
    assert "--seed" not in line
    assert env["OMP_WAIT_POLICY"] == "ACTIVE"
    overrides = json.loads(line[line.index("--hf-overrides") + 1])
    assert overrides == {"quantization_config": None}


def test_serving_until_interrupted(spec, fake, tmp_path):
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if "Ctrl-C" in text:
                super().write(text)
                raise KeyboardInterrupt
            return super().write(text)

    out = Interrupting()
    serve_forever(spec, tmp_path / "log", out=out)
    assert "http://127.0.0.1:" in out.getvalue()
    assert out.getvalue().endswith("stopped\n")
