"""A run folder is created once, held by one process, and resumed only under its own settings."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench import records, runfolder
from workbench.errors import ConfigError, OutputError

CONFIG = "name: demo\nseed: 0\n"


def test_a_new_run_gets_its_own_folder_also_within_a_second(tmp_path: Path) -> None:
    folders = [runfolder.open_run(tmp_path, "demo", CONFIG, None) for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    assert all((folder.path / "config.yaml").read_text() == CONFIG for folder in folders)
    for folder in folders:
        folder.close()


def test_latest_is_the_run_that_started_last(tmp_path: Path) -> None:
    for _ in range(3):
        last = runfolder.open_run(tmp_path, "demo", CONFIG, None)
        last.close()
        time.sleep(0.01)
    again = runfolder.open_run(tmp_path, "demo", CONFIG, "latest")
    assert again.path == last.path
    assert again.resumed
    again.close()


def test_resuming_under_other_settings_is_refused_showing_the_difference(tmp_path: Path) -> None:
    first = runfolder.open_run(tmp_path, "demo", CONFIG, None)
    first.close()
    with pytest.raises(ConfigError, match=r"\+seed: 1"):
        runfolder.open_run(tmp_path, "demo", CONFIG.replace("seed: 0", "seed: 1"), str(first.path))


def test_nothing_to_resume_and_a_folder_that_is_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        runfolder.open_run(tmp_path, "demo", CONFIG, "latest")
    with pytest.raises(ConfigError, match="no run folder"):
        runfolder.open_run(tmp_path, "demo", CONFIG, str(tmp_path))


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = runfolder.open_run(tmp_path, "demo", CONFIG, None)
    script = (
        "import sys; from pathlib import Path; from workbench import runfolder\n"
        f"runfolder.open_run(Path({str(tmp_path)!r}), 'demo', {CONFIG!r}, 'latest')"
    )
    second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert second.returncode != 0
    assert "another process" in second.stderr
    folder.close()


def test_an_output_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(OutputError, match="file"):
        runfolder.open_run(blocker / "reports", "demo", CONFIG, None)


def test_a_record_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = runfolder.open_run(tmp_path, "demo", CONFIG, None)
    (folder.path / "manifest.json").write_text("[]")
    folder.close()
    with pytest.raises(OutputError, match=r"manifest\.json is damaged") as refused:
        runfolder.open_run(tmp_path, "demo", CONFIG, "latest")
    assert "delete it" in refused.value.fix
    (folder.path / "lint.json").mkdir()
    with pytest.raises(OutputError, match=r"lint\.json is damaged"):
        runfolder.read_record(records.LintReport, folder.path / "lint.json")


def test_a_disk_without_locks_is_not_taken_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("workbench.records.locks.fcntl.flock", no_locks)
    with pytest.raises(OutputError, match="No locks available"):
        runfolder.open_run(tmp_path, "demo", CONFIG, None)


def test_the_manifest_keeps_the_first_start_and_adds_up_stages(tmp_path: Path) -> None:
    def describe() -> records.Manifest:
        return runfolder.describe(experiment="demo", checkpoints={}, seeds={"seed": 0}, command=("x",))

    folder = runfolder.open_run(tmp_path, "demo", CONFIG, None)
    with folder.timed("lint"):
        pass
    first = describe()
    folder.write_manifest(first)
    folder.close()
    again = runfolder.open_run(tmp_path, "demo", CONFIG, "latest")
    with again.timed("analyze"):
        time.sleep(0.02)
    again.write_manifest(describe())
    stored = records.read_json(records.Manifest, again.path / "manifest.json")
    assert stored.started == first.started
    assert set(stored.stage_seconds) == {"lint", "analyze"}
    assert stored.packages["torch"]
    again.close()


def test_a_failed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        records.write_text(tmp_path / "a.json", "{}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.1, None])
def test_records_survive_json(value: float | None) -> None:
    check = records.GateCheck(
        name="a", arm="b", status="pass", reason="r", value=float("nan") if value is None else value
    )
    verdict = records.Verdict(status="pass", exit_code=0, headline="h", policy="p", policy_note="", checks=(check,))
    again = records.from_json(records.Verdict, records.to_json(verdict))
    assert records.to_json(again) == records.to_json(verdict)
    assert repr(again.checks[0].value) == repr(verdict.checks[0].value)


def test_a_record_of_another_schema_is_refused() -> None:
    text = records.to_json(records.GateCheck(name="a", arm="b", status="pass", reason="r"))
    with pytest.raises(ValueError, match="schema version 99"):
        records.from_json(records.GateCheck, text.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(ValueError, match="surprise"):
        records.from_json(records.GateCheck, text.replace('"arm"', '"surprise"'))
