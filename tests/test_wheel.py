"""The built wheel holds what the demo needs, and the front door works from it in another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a copy: setuptools leaves build/ and egg-info beside its sources
    ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "build", "tests", ".*_cache", "20*")
    shutil.copytree(ROOT, sources, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(sources),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_configuration_model_tasks_and_templates(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in [*ROOT.glob("conf/**/*.yaml")]:
        assert f"workbench/conf/{path.relative_to(ROOT / 'conf')}" in names
    for path in ROOT.glob("experiments/mini_models/mini_kimi/*"):
        assert f"workbench/mini_models/mini_kimi/{path.name}" in names
    for path in ROOT.glob("workbench/reporting/templates/*"):
        assert f"workbench/reporting/templates/{path.name}" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"workbench", next(t for t in tops if t.endswith(".dist-info"))}  # no top-level `kernels`


def test_the_front_door_composes_from_the_wheel_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    script = "import workbench, sys; print(workbench.__file__); from workbench.run import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "experiment=kimi_requant", "--cfg", "job", "--resolve"],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert str(site / "workbench" / "mini_models" / "mini_kimi") in done.stdout
    assert list(work.iterdir()) == []  # nothing is left beside the user's files
