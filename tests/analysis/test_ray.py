"""Weights measured as tasks of a Ray cluster of two workers: the bytes of one process, and every way to fail."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from workbench.analysis import cluster, ray_process, tensors
from workbench.analysis.choice import Chosen
from workbench.analysis.compute import choose_compute
from workbench.analysis.inputs import OpenCheckpoints
from workbench.analysis.matrices import ArmPair, Result
from workbench.cli import main
from workbench.composition import compose
from workbench.errors import CheckpointError, ComputeError, ConfigError
from workbench.experiment import run_experiment
from workbench.formats import quantize
from workbench.settings import read_settings

from .trio_checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
MATRICES, OF_A_TASK = 60, 8
OWNER = """
import ray, sys
ray.init("local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With source and NVFP4 of many small matrices; one is zero, and one holds a NaN."""
    root = tmp_path_factory.mktemp("ray")
    generator = torch.Generator().manual_seed(5)
    source, first = {}, {}
    for index in range(MATRICES):
        name = f"model.layers.1.mlp.experts.{index // 2}.{('gate', 'up')[index % 2]}_proj.weight"
        w = source[name] = (0.05 * torch.randn(64, 128, generator=generator)).bfloat16()
        q = quantize(w, "nvfp4")
        assert q.global_scale is not None
        scales = {"_scale": q.block_scales, "_scale_2": q.global_scale.reshape(()).clone()}
        first |= {name: q.codes} | {name + suffix: scale for suffix, scale in scales.items()}
        if index == 20:
            w.zero_()
        if index == 41:
            w[3, 5] = torch.nan
    write_checkpoint(root / "source", source)
    write_checkpoint(root / "first", first, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    return root


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """What one process writes."""
    with contextlib.chdir(folder):
        assert main(["analyze", "source", "first", "--out", "alone"]) == 2
    return folder / "alone"


@pytest.fixture(scope="module")
def cluster_of_two() -> Iterator[str]:
    """The address of a cluster of two workers, which find this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")  # as a cluster that Ray starts for itself has it
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_worker_niceness", "0")  # else what is busy beside the tests has the processors first
        _need_ray()
        command = [sys.executable, "-c", OWNER]
        with subprocess.Popen(command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdin is not None
            assert owner.stdout is not None
            yield owner.stdout.readline().strip()
            owner.stdin.close()


@pytest.fixture
def workers(cluster_of_two: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", cluster_of_two)
    return cluster_of_two


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative, to a folder where no worker was started; tasks are small."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cluster, "TASK_MATRICES", OF_A_TASK)


def analyze(out: Path, *more: str) -> int:
    return main(["analyze", "source", "first", "--out", str(out), "--compute", "ray", *more])


def assert_same(out: Path, alone: Path) -> None:
    names = {path.name for path in alone.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    for name in names - {"manifest.json"}:
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name


def seen(orders: cluster.Orders, part: Chosen) -> list[Result]:
    """The task, which leaves a file for the worker: how many threads it measured with."""
    found = cluster.measure_part(orders, part)
    Path(orders.folder, str(os.getpid())).write_text(str(torch.get_num_threads()))
    time.sleep(0.1)  # long enough for the other worker to take the next
    return found


def dies_once(orders: cluster.Orders, part: Chosen) -> list[Result]:
    """The task, of which the third is killed the first time it is run."""
    mark = Path(orders.folder, "died")
    if part.names[0].endswith("experts.8.gate_proj.weight") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cluster.measure_part(orders, part)


def dies(orders: cluster.Orders, part: Chosen) -> list[Result]:
    """The task, of which the third is killed each time."""
    if part.names[0].endswith("experts.8.gate_proj.weight"):
        os.kill(os.getpid(), signal.SIGKILL)
    return cluster.measure_part(orders, part)


def lost(orders: cluster.Orders, part: Chosen) -> list[Result]:
    """The task on a node where the driver's folder does not exist."""
    os.chdir("/")
    return cluster.measure_part(dataclasses.replace(orders, folder="/not on this node"), part)


def slow(orders: cluster.Orders, part: Chosen) -> list[Result]:
    time.sleep(2)
    return cluster.measure_part(orders, part)


def bug(orders: cluster.Orders, part: Chosen) -> list[Result]:
    raise ZeroDivisionError("of a bug")


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_write_the_bytes_and_name_the_faults_of_one_process(
    folder: Path, alone: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "measure_part", seen)
    before = dict(os.environ)
    assert analyze(tmp_path / "out") == 2
    assert "ray" not in sys.modules  # nor what it sets in the environment of the process that imports it
    assert dict(os.environ) == before
    assert_same(tmp_path / "out", alone)
    faults = json.loads((alone / "analysis.json").read_text())["faults"]
    assert {fault["kind"] for fault in faults} == {"all-zero", "non-finite"}
    assert [path.read_text() for path in folder.iterdir() if path.name.isdecimal()] == ["1", "1"]


def test_the_driver_holds_few_results(workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight tasks, four are submitted before the first is taken."""
    submitted: list[int] = []
    parts, take = cluster._parts, cluster._take

    def counted(*arguments: object) -> Iterator[Chosen]:
        for part in parts(*arguments):  # type: ignore[arg-type]
            submitted.append(0)
            yield part

    def taken(*arguments: object) -> list[Result]:
        submitted[-1] = len(submitted)
        return take(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "_parts", counted)
    monkeypatch.setattr(cluster, "_take", taken)
    assert analyze(tmp_path / "out") == 2
    assert [count for count in submitted if count] == [4, 5, 6, 7, 8]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_a_worker_cannot_see_is_named_with_the_host(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "measure_part", lost)
    assert analyze(tmp_path / "out") == 3
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: the Ray worker {socket.gethostname()} cannot open first: ")
    assert "under the same path" in shown


@pytest.mark.parametrize(("changed", "error", "words"), [
    ({"fingerprints": (("source", "0" * 16),)}, CheckpointError, "source on the Ray worker .* is another checkpoint"),
    ({"packages": (("quantization-workbench", "0"), ("torch", "1"), ("numpy", "2"), ("numba", "3"))}, ComputeError,
     "numba .*, not 3: its figures may differ"),
])  # fmt: skip
def test_a_worker_with_other_files_or_packages_is_refused(changed, error, words) -> None:  # type: ignore[no-untyped-def]
    with contextlib.ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        fingerprint = checkpoints.open("source").fingerprint()
    orders = cluster.Orders(
        source="source", source_arm="source", pairs=(ArmPair(first="first", second_arm="second"),),
        fingerprints=(("source", fingerprint),), folder=os.getcwd(), packages=cluster._packages(), cpus=1,
    )  # fmt: skip
    cluster._opened(orders)
    with pytest.raises(error, match=words):
        cluster._opened(dataclasses.replace(orders, **changed))


def test_servers_that_do_not_start_in_time_are_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray raises no more than an Exception then."""
    _need_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    late = "import ray\ndef late(**options): raise Exception('The node timed out.')\nray.init = late\n"
    monkeypatch.setattr(ray_process, "START", late + ray_process.START)
    assert analyze(tmp_path / "out") == 3
    assert capsys.readouterr().err.startswith("error: no Ray cluster could be started here: The node timed out.\n")


def test_a_bug_keeps_its_traceback(
    workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "measure_part", bug)
    assert analyze(tmp_path / "out") == 3
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: of a bug" in shown
    assert "this is a bug in the workbench" in shown


def test_more_processors_than_a_node_has_are_refused(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(tmp_path / "out", "--ray-cpus", "3") == 3
    assert "has 3 processors; the largest has 2" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from workbench.analysis import cluster, tensors
from workbench.cli import main
cluster.TASK_MATRICES = 8
add, before = tensors.Journal.add, []
def counted(self, *rest):
    before.append(add(self, *rest))
    assert signal.getsignal(signal.SIGTERM).__module__ == "workbench.interrupt"
    if len(before) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
tensors.Journal.add = counted
sys.exit(main(["analyze", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_killed_driver_leaves_no_server_and_goes_on_to_the_same_bytes(
    folder: Path, alone: Path, workers: str, tmp_path: Path
) -> None:
    """Killed with a cluster of its own; the other cluster goes on."""
    before, out = _of_ray(), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, "source", "first", "--out", str(out), "--compute", "ray"]
    killed = subprocess.run(command, cwd=folder, env={**os.environ, "RAY_ADDRESS": ""}, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len((out / ".tensors.journal").read_text().splitlines()) == 1 + 20
    assert analyze(out) == 2
    assert_same(out, alone)
    assert _ends(before)


class Slain:
    """Stops or kills a process once this many matrices are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, kill: Callable[[psutil.Process], object]) -> None:
        self.done = 0
        add = tensors.Journal.add

        def counted(journal: tensors.Journal, *rest: Any) -> None:
            add(journal, *rest)
            self.done += 1
            if self.done == after:
                kill(_driver())

        monkeypatch.setattr(tensors.Journal, "add", counted)


@pytest.mark.slow
def test_a_kill_of_the_process_that_is_connected_ends_the_pass_and_nothing_is_lost(
    alone: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = tmp_path / "out", []
    with monkeypatch.context() as patch:
        Slain(patch, 20, lambda driver: (found.append(driver), driver.kill()))
        assert analyze(out) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("error: the process that is connected to Ray was killed by SIGKILL\n")
    assert f"_{found[0].pid}.log" in shown  # Ray's own log of it
    assert "the same command goes on after the matrices that are done" in shown
    assert not found[0].is_running()
    journaled = len((out / ".tensors.journal").read_text().splitlines()) - 1
    assert 20 <= journaled < MATRICES
    again = Slain(monkeypatch, 0, lambda driver: None)
    assert analyze(out) == 2
    assert again.done == MATRICES - journaled
    assert_same(out, alone)


@pytest.mark.slow
def test_a_cluster_of_this_machine_whose_server_is_killed_ends_the_pass(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray then exits with 1 in the process that asks for a result, and prints nothing."""
    _need_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before, out = _of_ray(), tmp_path / "out"

    def kill(driver: psutil.Process) -> None:
        for process in driver.children():
            if process.name() == "raylet":
                process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "measure_part", slow)
        Slain(patch, OF_A_TASK, kill)
        assert analyze(out) == 3
    shown = capsys.readouterr().err
    assert re.match(
        r"error: (the process that is connected to Ray ended with exit code 1\n|Ray's server on this node)", shown
    )
    assert "the same command goes on" in shown
    assert main(["analyze", "source", "first", "--out", str(out)]) == 2
    assert_same(out, alone)
    assert _ends(before)


def test_the_task_of_a_worker_that_is_killed_is_done_by_another(
    folder: Path, alone: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "measure_part", dies_once)
    assert analyze(tmp_path / "out") == 2
    assert (folder / "died").exists()
    assert_same(tmp_path / "out", alone)


@pytest.mark.slow
def test_a_task_that_kills_every_worker_is_named_and_the_rest_goes_on_without_it(
    alone: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "RETRIES", 1)
        patch.setattr(cluster, "measure_part", dies)
        assert analyze(out) == 3
    shown = capsys.readouterr().err
    assert "Ray gave up on model.layers.1.mlp.experts.8.gate_proj.weight, " in shown
    assert "and 3 more (a task is tried 2 times)" in shown
    assert "the same command goes on" in shown
    assert len((out / ".tensors.journal").read_text().splitlines()) == 1 + 2 * OF_A_TASK
    assert main(["analyze", "source", "first", "--out", str(out)]) == 2  # one process goes on with it
    assert_same(out, alone)


def test_a_task_has_the_threads_that_it_is_given(
    folder: Path, alone: Path, workers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "measure_part", seen)
    for path in folder.iterdir():
        if path.name.isdecimal():
            path.unlink()
    assert analyze(tmp_path / "out", "--ray-cpus", "2") == 2
    assert_same(tmp_path / "out", alone)
    assert {path.read_text() for path in folder.iterdir() if path.name.isdecimal()} == {"2"}


# ---- what is refused before anything is measured ---------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "words"), [
    ({"address": "127.0.0.1:1"}, "nothing answers at 127.0.0.1:1"),
    ({"address": "ray://127.0.0.1:1"}, "'ray://127.0.0.1:1' is no address"),
    ({"device": "cuda"}, "device 'cuda' with compute=ray"),
    ({"kind": "dask"}, "compute 'dask'"),
])  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, str], words: str) -> None:
    _need_ray()
    with pytest.raises((ConfigError, ComputeError), match=words):
        choose_compute(**({"kind": "ray"} | settings))  # type: ignore[arg-type]


def test_without_ray_the_way_out_is_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert analyze(tmp_path / "out") == 3
    assert "pip install 'quantization-workbench[ray]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Ray cannot be imported"):  # before a stage is run
        run_experiment(compose(["experiment=kimi_requant", "compute=ray", f"paths.out={tmp_path}"]))
    assert not list(tmp_path.iterdir())


def test_an_experiment_takes_the_cluster_from_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["experiment=kimi_requant", "compute=ray"]
    found = read_settings(compose([*base, "compute.address=10.0.0.1:6379", "compute.cpus=4"])).compute
    assert (found.kind, found.address, found.cpus) == ("ray", "10.0.0.1:6379", 4)
    assert read_settings(compose(base[:1])).compute.kind == "local"
    with pytest.raises(ConfigError, match=r"compute\.kind is 'dask'"):
        read_settings(compose([*base, "compute.kind=dask"]))
    assert main(["analyze", "source", "first", "--out", "unused", "--ray-cpus", "2"]) == 3
    assert "belong to --compute ray" in capsys.readouterr().err


def _need_ray() -> None:
    """Without importing it, which no process of ours does but the one that is connected."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the ray extra is not installed")


def _driver() -> psutil.Process:
    (found,) = (p for p in psutil.Process().children() if "workbench.analysis.ray_driver" in " ".join(p.cmdline()))
    return found


def _of_ray() -> set[int]:
    """Each cluster's two servers; its workers end with them."""
    return {
        process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in ("raylet", "gcs_server")
    }


def _ends(before: set[int]) -> bool:
    """Whether all servers of Ray that came after `before` end within some seconds."""
    for _ in range(100):
        if _of_ray() <= before:
            return True
        time.sleep(0.2)
    return False
