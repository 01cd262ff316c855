"""The process that is connected to Ray, and what is said of its end: with stand-ins, where no Ray is installed too."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from workbench.analysis import cluster, ray_driver, ray_process
from workbench.analysis.choice import Chosen
from workbench.errors import ComputeError

STANDING_IN = """
import os, signal, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv()
connection.send(("waiting",))
print("its last words", flush=True)
{}
"""


@pytest.mark.parametrize(("ends", "how"), [
    ("os._exit(1)", "ended with exit code 1"),
    ("raise ZeroDivisionError('its last words')", "ended with exit code 1"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ("connection.close(); signal.pause()", "closed its connection"),
    ("signal.pause()", "has not answered for 0.5 s"),
    ("os.write(connection.fileno(), bytes([0, 0, 1, 0])); signal.pause()", "has not answered for 0.5 s"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "has not answered for 0.5 s"),
])  # fmt: skip
def test_however_the_process_that_is_connected_ends_it_is_said_with_its_last_words(
    ends: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_process, "START", STANDING_IN.format(ends))
    monkeypatch.setattr(ray_process, "SILENT_S", 0.5 if "0.5" in how else 60.0)
    monkeypatch.setattr(ray_process, "ENDING_S", 0.2 if "closed" in how else 30.0)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with ray_process.DriverProcess("do it again") as driver:
        logs = tmp_path / "ray" / "session_2026" / "logs"
        logs.mkdir(parents=True)
        told = [f"[2026-12-01 12:04:36,101 {level} 8 9] store.cc:1: the {level} line" for level in "IWI"]
        (logs / f"python-core-driver-01ff_{driver.pid}.log").write_text("\n".join(told))
        (logs / "raylet.out").write_text("[2026-12-01 12:04:36,101 C 8 9] agent.cc:1: why it went\n")
        with pytest.raises(ComputeError) as caught:
            driver.ask("connect")
    assert not psutil.pid_exists(driver.pid)
    first, *rest = caught.value.message.splitlines()
    assert first == f"the process that is connected to Ray {how}"
    assert caught.value.fix == "do it again"
    assert any("its last words" in line for line in rest)
    assert [line.strip() for line in rest[-3:]] == [
        f"{logs}/python-core-driver-01ff_{driver.pid}.log:", told[1],
        "[2026-12-01 12:04:36,101 C 8 9] agent.cc:1: why it went",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "words"), [("head", "the Ray cluster's head"), ("node", "Ray's server on this node")]
)
def test_a_server_that_is_gone_is_said_to_be(missing: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits on."""

    class Timeout(Exception): ...

    class Lost(Exception): ...

    class Fake:
        """Ray, with a task that does not end."""

        exceptions = SimpleNamespace(
            GetTimeoutError=Timeout, RayTaskError=Lost, LocalRayletDiedError=Lost, RayError=Lost
        )

        def get(self, reference: object, timeout: float) -> bytes:
            time.sleep(timeout)
            raise Timeout

        def get_runtime_context(self) -> object:
            return SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "here")

        def nodes(self) -> list[dict[str, object]]:
            return [{"NodeID": "here", "Alive": missing != "node"}, {"NodeID": "there", "Alive": False}]

    monkeypatch.setattr(ray_driver, "takes_connections", lambda address: missing != "head")
    waited: list[int] = []
    answer = ray_driver.take(Fake(), None, lambda: waited.append(0), poll_s=0.01, gone_s=0.1)
    assert answer == ("gone", missing)
    assert 3 < len(waited) < 20
    driver = SimpleNamespace(ask=lambda what: answer)
    with pytest.raises(ComputeError, match=rf"{re.escape(words)}.* no longer answers"):
        cluster._take(driver, Chosen([], {}, {}, 0))  # type: ignore[arg-type]
