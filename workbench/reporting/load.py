"""Read what a run folder holds. A stage that did not run leaves no file; the report says so instead of failing.

files = load_run(run_dir)
files.verdict is None                # the gate did not run
files.verdict.status                 # "outdated" where the files that it judged have changed since
files.problems                       # files that are there but cannot be read
files.refuse_damaged("comparison.json", "eval")   # raises where one of them cannot
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.errors import ConfigError, OutputError
from workbench.records import (
    SCHEMA_VERSION,
    Comparison,
    Divergence,
    Evaluation,
    GemmRecord,
    LintReport,
    Manifest,
    NumericsCard,
    Preflight,
    ServerRecord,
    ServingCost,
    TensorEquality,
    TensorRecord,
    Verdict,
    from_json,
    parse_json,
)
from workbench.records.judged import contradiction, out_of_date

from .settings import read_settings

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
STAGE_OF = {  # a file, or a folder of files: the stage that writes it
    "lint": "lint",
    "analysis.json": "analyze", "tensors.parquet": "analyze", "gemm.parquet": "analyze", "equality": "analyze",
    "pooled.parquet": "analyze", "fused.parquet": "analyze",
    "server": "evaluate", "kld": "evaluate", "serving_cost.json": "evaluate", "eval": "evaluate",
    "comparison.json": "compare", "verdict.json": "gate",
}  # fmt: skip
_MARKS = (
    "config.yaml", "manifest.json", "verdict.json", "comparison.json", "analysis.json", "tensors.parquet",
    "gemm.parquet", "serving_cost.json", "eval", "lint/*.json", "server/*.json",
)  # fmt: skip
_PAIR = {"first_arm": str, "second_arm": str, "second_rule": str}
POOLED = _PAIR | {
    "level": str, "layer": int, "expert": int, "projection": str, "shared_expert": bool, "matrices": int,
    **{f"sqnr_{what}_db": float for what in ("first", "total", "direct")}, "power_e1": float, "power_e2": float,
    **{f"{arm}_error_{cause}": float for arm in ("first", "second")
       for cause in ("scale", "element", "saturation", "underflow")},
}  # fmt: skip
FUSED = _PAIR | {
    "group": str, "name": str, "sqnr_first_db": float, "sqnr_merged_largest_db": float, "sqnr_merged_first_db": float,
}  # fmt: skip
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError)


@dataclass(kw_only=True, slots=True)
class RunFiles:
    """One run's records; None or empty where a stage did not run. analysis: analysis.json as plain data.

    config, settings: config.yaml's text, and as plain data.
    """

    run_dir: Path
    manifest: Manifest | None = None
    config: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    lint: dict[str, LintReport] = field(default_factory=dict)
    tensors: pd.DataFrame | None = None
    gemm: pd.DataFrame | None = None
    pooled: pd.DataFrame | None = None
    fused: pd.DataFrame | None = None
    analysis: dict[str, Any] | None = None
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    equality: dict[str, TensorEquality] = field(default_factory=dict)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    numerics: dict[str, NumericsCard] = field(default_factory=dict)
    preflights: dict[str, Preflight] = field(default_factory=dict)
    divergences: dict[str, Divergence] = field(default_factory=dict)
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    serving_cost: ServingCost | None = None
    problems: list[str] = field(default_factory=list)
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of each file that was read: path below run_dir -> the attribute that holds it, and its key there ("": alone)."""

    def without(self, names: Sequence[str], why: str) -> RunFiles:
        """These files left out, each named among the problems with the reason."""
        changes: dict[str, Any] = {}
        for name in names:
            attribute, key = self.sources[name]
            held = changes.get(attribute, getattr(self, attribute))
            changes[attribute] = {k: v for k, v in held.items() if k != key} if key else None
        changes["sources"] = {name: source for name, source in self.sources.items() if name not in names}
        return dataclasses.replace(self, problems=[*self.problems, *(f"{name}: {why}" for name in names)], **changes)

    def damaged(self, *names: str) -> list[str]:
        """Those of the files (or of the folders' files) that are there but cannot be read."""
        files = [problem.partition(": ")[0] for problem in self.problems]
        return [file for file in files if file in names or file.partition("/")[0] in names]

    def refuse_damaged(self, *names: str) -> None:
        """Raise OutputError where one of the files (without names: any) cannot be read, naming all and their stages."""
        wanted = self.damaged(*names) if names else None
        lines, stages = [], []
        for problem in self.problems:
            file, _, why = problem.partition(": ")
            if wanted is not None and file not in wanted:
                continue
            stage = STAGE_OF.get(file.partition("/")[0])
            lines.append(
                f"{self.run_dir / file} is damaged: {why}" + (f" (the {stage} stage writes it)" if stage else "")
            )
            stages += [stage] if stage else []
        again = f"delete it and run its stage again: {', '.join(dict.fromkeys(stages))}"
        if lines:
            raise OutputError("\n".join(lines), fix=again if stages else "delete it, or put back what the run wrote")

    def arms(self) -> list[str]:
        """Arm names: the config's order first, then whatever else left a file."""
        arms = self.settings.get("arms")
        named = [str(arm) for arm in arms] if isinstance(arms, dict) else []
        rest = [*self.servers, *self.evaluations, *self.lint, *self.numerics]
        return list(dict.fromkeys([*named, *rest]))

    def roles(self) -> dict[str, str]:
        """What the configuration makes of each arm: "baseline", "noise" or its backend's kind ("": it says none)."""
        arms = self.settings.get("arms")
        roles = {}
        for name, arm in arms.items() if isinstance(arms, dict) else ():
            backend = arm.get("backend") if isinstance(arm, dict) else None
            roles[str(name)] = str(backend.get("kind") or "") if isinstance(backend, dict) else ""
        named = {self.settings.get("noise_arm"): "noise", self.settings.get("baseline"): "baseline"}
        return roles | {str(name): role for name, role in named.items() if name}


def is_run(folder: Path) -> bool:
    """Whether `folder` holds any of a run's files."""
    return any(next(folder.glob(mark), None) for mark in _MARKS)


def load_run(run_dir: Path, *, tables: bool = True) -> RunFiles:
    """Read every known file of `run_dir`; unreadable ones are named in `problems`. tables: the parquet files too.

    Raises ConfigError when the folder does not exist or holds none of a run's files.
    """
    if not is_run(run_dir):
        why = "it does not exist" if not run_dir.exists() else "it holds none of a run's files"
        raise ConfigError(f"{run_dir} is no run folder: {why}", fix="give the folder that a run printed")
    files = RunFiles(run_dir=run_dir)
    files.manifest = _record(files, Manifest, run_dir / "manifest.json", "manifest")
    files.comparison = _record(files, Comparison, run_dir / "comparison.json", "comparison")
    files.verdict = _verdict(files)
    files.serving_cost = _record(files, ServingCost, run_dir / "serving_cost.json", "serving_cost")
    files.lint = _per_arm(files, "lint", LintReport, sorted(run_dir.glob("lint/*.json")), lambda p: p.stem)
    raw = (".audit.json", ".facts.json", ".numerics.json")
    servers = [path for path in sorted(run_dir.glob("server/*.json")) if not path.name.endswith(raw)]
    files.servers = _per_arm(files, "servers", ServerRecord, servers, lambda p: p.stem)
    cards = sorted(run_dir.glob("server/*.numerics.json"))
    files.numerics = _per_arm(files, "numerics", NumericsCard, cards, lambda p: p.name.removesuffix(".numerics.json"))
    files.preflights = _per_arm(files, "preflights", Preflight, _preflights(run_dir), lambda p: p.parent.parent.name)
    files.equality = _per_arm(
        files, "equality", TensorEquality, sorted(run_dir.glob("equality/*.json")), lambda p: p.stem
    )
    files.evaluations = _per_arm(
        files, "evaluations", Evaluation, sorted(run_dir.glob("eval/*/scores.json")), lambda p: p.parent.name
    )
    found = sorted([*run_dir.glob("eval/*/kld*.json"), *run_dir.glob("kld/*.json")])
    files.divergences = _per_arm(files, "divergences", Divergence, found, lambda p: str(p.relative_to(run_dir)))
    if tables:
        files.tensors = _frame(files, "tensors", run_dir / "tensors.parquet", TensorRecord)
        files.gemm = _frame(files, "gemm", run_dir / "gemm.parquet", GemmRecord)
        files.pooled = _frame(files, "pooled", run_dir / "pooled.parquet", POOLED)
        files.fused = _frame(files, "fused", run_dir / "fused.parquet", FUSED)
    _read_config(files, run_dir / "config.yaml")
    analysis = run_dir / "analysis.json"
    if analysis.exists():
        try:
            content = parse_json(analysis.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}, expected a JSON object")
            if content.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"schema version {content.get('schema_version')}, this code reads {SCHEMA_VERSION}")
            files.analysis = content
            files.sources[analysis.name] = ("analysis", "")
        except _UNREADABLE as error:
            files.problems.append(f"analysis.json: {error}")
    return files


def _verdict(files: RunFiles) -> Verdict | None:
    """The gate's verdict; one of status "outdated" where what it judged is not what lies there now."""
    verdict = _record(files, Verdict, files.run_dir / "verdict.json", "verdict")
    if verdict is not None and (why := contradiction(verdict)):
        files.problems.append(f"verdict.json: {why}")
        del files.sources["verdict.json"]
        return None
    return out_of_date(files.run_dir, verdict) if verdict is not None else None


def _preflights(run_dir: Path) -> list[Path]:
    """Each arm's newest preflight.json; that of an evaluation that was refused, or still runs, lies in `.partial`."""
    newest: dict[Path, Path] = {}
    for path in sorted(run_dir.glob("eval/*/*/preflight.json"), key=lambda path: path.stat().st_mtime_ns):
        newest[path.parent.parent] = path
    return [newest[arm] for arm in sorted(newest)]


def _read_config(files: RunFiles, path: Path) -> None:
    """The configuration's text and its settings; neither where there is none, or none that can be read."""
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
        files.settings = read_settings(text)
        files.config = text
    except _UNREADABLE as error:
        files.problems.append(f"{path.name}: {error}")


def _record(files: RunFiles, kind: type[T], path: Path, attribute: str, key: str = "") -> T | None:
    if not path.exists():
        return None
    name = str(path.relative_to(files.run_dir))
    try:
        record = from_json(kind, path.read_text(encoding="utf-8"))
        if isinstance(record, ServerRecord | NumericsCard) and record.arm != key:
            raise ValueError(f"it is about the arm {record.arm!r}, its place says {key!r}")
    except _UNREADABLE as error:
        files.problems.append(f"{name}: {error}")
        return None
    files.sources[name] = (attribute, key)
    return record


def _per_arm(files: RunFiles, attribute: str, kind: type[T], paths: list[Path], arm_of: Any) -> dict[str, T]:
    found = {arm_of(path): _record(files, kind, path, attribute, arm_of(path)) for path in paths}
    return {arm: record for arm, record in found.items() if record is not None}


def _frame(files: RunFiles, attribute: str, path: Path, kind: Any) -> pd.DataFrame | None:
    """kind: a record, whose fields without a default must be there, or {column: type}."""
    if not path.exists():
        return None
    import pandas as pd

    if isinstance(kind, dict):
        hints, required = kind, list(kind)
    else:
        hints = typing.get_type_hints(kind)
        required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    try:
        frame = pd.read_parquet(path)
        for name in required:
            if name not in frame.columns:
                raise ValueError(f"its contents do not fit (no column {name})")
        for name in frame.columns:
            if hints.get(name) in (int, float) and not pd.api.types.is_numeric_dtype(frame[name]):
                raise ValueError(f"its contents do not fit (column {name} holds no numbers)")
    except _UNREADABLE as error:  # pyarrow's errors are subclasses of these
        files.problems.append(f"{path.name}: {error}")
        return None
    files.sources[path.name] = (attribute, "")
    return frame if len(frame) else None
