"""The built wheel holds what the demo needs, and the front door works from it in another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from workbench.checkpoints import open_checkpoint

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
    for path in ROOT.glob("experiments/mini_models/mini_*/*"):
        assert f"workbench/mini_models/{path.parent.name}/{path.name}" in names
    for path in ROOT.glob("workbench/reporting/templates/**/*"):
        assert path.is_dir() or str(path.relative_to(ROOT)) in names
    for package, folder in (("workbench", "workbench"), ("workbench/kernels", "kernels")):
        for path in ROOT.glob(f"{folder}/**/*.py"):  # a package that pyproject.toml does not list is left out silently
            assert f"{package}/{path.relative_to(ROOT / folder)}" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"workbench", next(t for t in tops if t.endswith(".dist-info"))}  # no top-level `kernels`


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed; the checkout is not on its path."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return site


def run_installed(site: Path, work: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`module`'s main() from the installed wheel, in `work`; its first line says which workbench it was."""
    script = f"import workbench, sys; print(workbench.__file__); from {module} import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_the_front_door_composes_from_the_wheel_in_another_folder(site: Path, tmp_path: Path) -> None:
    done = run_installed(site, tmp_path, "workbench.run", "experiment=kimi_requant", "--cfg", "job", "--resolve")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert str(site / "workbench" / "mini_models" / "mini_kimi") in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing is left beside the user's files


def test_the_wheel_quantizes_lints_and_judges_in_another_folder(site: Path, tmp_path: Path) -> None:
    """The demo's stages that need no engine, from the installed wheel."""
    overrides = ["experiment=kimi_requant", "stages=[prepare,lint,analyze,gate,report]", "analysis.capture=false"]
    overrides += ["model.checkpoints.nvfp4.make.calibrate=false", "analysis.bootstrap=20"]
    overrides += ["+model.checkpoints.mxfp4.make.rules=[{match: '*layers.2.*', format: keep}]"]
    done = run_installed(site, tmp_path, "workbench.run", *overrides)
    assert done.stdout.startswith(str(site))
    assert done.returncode == 2, done.stdout + done.stderr  # nothing was asked, so nothing can pass
    made = next((tmp_path / "reports" / "checkpoints").glob("mini-kimi-mxfp4-*"))
    with open_checkpoint(made) as checkpoint:  # a recipe's rules reach the conversion
        quantized = {entry.layer for entry in checkpoint.entries() if entry.quantized}
    assert quantized == {1, 3, 4}
    run = next((tmp_path / "reports" / "kimi_requant").iterdir())
    assert (run / "report.html").stat().st_size > 0
