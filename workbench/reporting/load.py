"""Read what a run folder holds. A stage that did not run leaves no file; the report says so instead of failing.

files = load_run(run_dir)
files.verdict is None      # the gate did not run
files.problems             # files that are there but cannot be read
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.errors import ConfigError
from workbench.records import (
    SCHEMA_VERSION,
    Comparison,
    Evaluation,
    GemmRecord,
    LintReport,
    Manifest,
    ServerRecord,
    TensorRecord,
    Verdict,
    read_json,
)

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_MARKS = (
    "config.yaml", "manifest.json", "verdict.json", "comparison.json", "analysis.json", "tensors.parquet",
    "gemm.parquet", "eval", "lint/*.json", "server/*.json",
)  # fmt: skip
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError)


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """One run's records; None or empty where a stage did not run. analysis: analysis.json as plain data."""

    run_dir: Path
    manifest: Manifest | None = None
    config: str = ""
    lint: dict[str, LintReport] = field(default_factory=dict)
    tensors: pd.DataFrame | None = None
    gemm: pd.DataFrame | None = None
    analysis: dict[str, Any] | None = None
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    problems: list[str] = field(default_factory=list)

    def damaged(self, *names: str) -> list[str]:
        """Those of the files (or of the folders' files) that are there but cannot be read."""
        files = [problem.partition(": ")[0] for problem in self.problems]
        return [file for file in files if file in names or file.partition("/")[0] in names]

    def arms(self) -> list[str]:
        """Arm names: the config's order first, then whatever else left a file."""
        from omegaconf import OmegaConf

        try:
            config: Any = OmegaConf.to_container(OmegaConf.create(self.config))
        except Exception:  # the parser's errors are several unrelated types; the order of arms is no reason to fail
            config = {}
        arms = config.get("arms") if isinstance(config, dict) else None
        named = [str(arm) for arm in arms] if isinstance(arms, dict) else []
        rest = [*self.servers, *self.evaluations, *self.lint]
        return list(dict.fromkeys([*named, *rest]))


def load_run(run_dir: Path) -> RunFiles:
    """Read every known file of `run_dir`; unreadable ones are named in `problems`.

    Raises ConfigError when the folder does not exist or holds none of a run's files.
    """
    if not any(next(run_dir.glob(mark), None) for mark in _MARKS):
        why = "it does not exist" if not run_dir.exists() else "it holds none of a run's files"
        raise ConfigError(f"{run_dir} is no run folder: {why}", fix="give the folder that a run printed")
    files = RunFiles(run_dir=run_dir)
    files.manifest = _record(files, Manifest, run_dir / "manifest.json")
    files.comparison = _record(files, Comparison, run_dir / "comparison.json")
    files.verdict = _record(files, Verdict, run_dir / "verdict.json")
    files.lint = _per_arm(files, LintReport, sorted(run_dir.glob("lint/*.json")), lambda p: p.stem)
    servers = [path for path in sorted(run_dir.glob("server/*.json")) if not path.name.endswith(".audit.json")]
    files.servers = _per_arm(files, ServerRecord, servers, lambda p: p.stem)
    files.evaluations = _per_arm(files, Evaluation, sorted(run_dir.glob("eval/*/scores.json")), lambda p: p.parent.name)
    files.tensors = _frame(files, run_dir / "tensors.parquet", TensorRecord)
    files.gemm = _frame(files, run_dir / "gemm.parquet", GemmRecord)
    config, analysis = run_dir / "config.yaml", run_dir / "analysis.json"
    if config.is_file():
        try:
            files.config = config.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            files.problems.append(f"config.yaml: {error}")
    if analysis.is_file():
        try:
            content = json.loads(analysis.read_text(encoding="utf-8"))
            if content["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {content['schema_version']}, this code reads {SCHEMA_VERSION}")
            files.analysis = content
        except _UNREADABLE as error:
            files.problems.append(f"analysis.json: {error}")
    return files


def _record(files: RunFiles, kind: type[T], path: Path) -> T | None:
    if not path.is_file():
        return None
    try:
        return read_json(kind, path)
    except _UNREADABLE as error:
        files.problems.append(f"{path.relative_to(files.run_dir)}: {error}")
        return None


def _per_arm(files: RunFiles, kind: type[T], paths: list[Path], arm_of: Any) -> dict[str, T]:
    found = {arm_of(path): _record(files, kind, path) for path in paths}
    return {arm: record for arm, record in found.items() if record is not None}


def _frame(files: RunFiles, path: Path, kind: type) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except _UNREADABLE as error:  # pyarrow's errors are subclasses of these
        files.problems.append(f"{path.name}: {error}")
        return None
    absent = [field for field in dataclasses.fields(kind) if field.name not in frame.columns]
    if absent:
        files.problems.append(f"{path.name}: its contents do not fit (no column {absent[0].name})")
        return None
    return frame if len(frame) else None
