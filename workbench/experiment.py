"""The stages of one experiment, in order, each resumable. The only file that knows every room.

prepare   find each arm's checkpoint, or make it by its recipe (linted before anything is served)
lint      every checkpoint's bytes against its own claims
analyze   capture the source's layer inputs; weight errors; matrix-product noise
evaluate  per arm: start the endpoint, run lm-eval against it, stop it
compare   pair each arm's answers with the baseline's
gate      policy + records -> verdict
report    report.html, summary.md, junit.xml

A stage's files are written whole; a stage (an arm, for evaluate; a matrix, for analyze) whose files exist is not done
again. A lint error stops the run before a server starts, with the verdict `invalid`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench import records, runfolder
from workbench.errors import CheckpointError, ConfigError, OutputError, WorkbenchError
from workbench.progress import Progress
from workbench.runfolder import CONFIG
from workbench.settings import (
    ArmSettings,
    CheckpointSettings,
    EngineSettings,
    Recipe,
    Settings,
    read_settings,
    resolved_yaml,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workbench.evaluation.spec import TaskSpec
    from workbench.records import Evaluation, LintReport, Verdict
    from workbench.serving.spec import EngineSpec, ServeSpec

T = TypeVar("T")
RECIPE_VERSION = 1  # raise when quantize_checkpoint's output changes: cached checkpoints are made anew


def run_experiment(config: DictConfig) -> int:
    """Run one composed experiment; returns the verdict's exit code. Raises WorkbenchError when it could not run."""
    settings = read_settings(config)
    _check_rooms(settings)
    folder = runfolder.open_run(Path(settings.paths.out), settings.name, resolved_yaml(config), settings.resume)
    try:
        return _Run(settings=settings, folder=folder, say=Progress()).all_stages()
    finally:
        folder.close()


def _check_rooms(settings: Settings) -> None:
    """What the rooms own and check themselves, asked before a stage is run: tasks, policy, formats, recipes, engine."""
    from workbench.checkpoints.convert import check_request
    from workbench.evaluation.spec import check_tasks
    from workbench.formats import get_format
    from workbench.gating import read_policy
    from workbench.serving.spec import check_kv_cache_dtype

    if "evaluate" in settings.stages:
        check_tasks(_task_specs(settings))
    if "gate" in settings.stages:
        policy = read_policy(settings.gate)
        for arm in (*policy.gated, *policy.reported):
            if arm not in settings.arms:
                raise ConfigError(
                    f"the gate names the arm {arm!r}, which does not exist", fix=f"arms: {', '.join(settings.arms)}"
                )
    for name, checkpoint in settings.model.checkpoints.items():
        if checkpoint.make is not None and checkpoint.make.source == name:
            raise ConfigError(
                f"model.checkpoints.{name} is made from itself", fix=f"model.checkpoints.{name}.make.source=source"
            )
    for arm_name, arm in settings.arms.items():
        with _at(f"arms.{arm_name}"):
            check_kv_cache_dtype(arm.kv_cache_dtype)
            if arm.format is not None:
                get_format(arm.format.name).rule(arm.format.rule)
            recipe = None if _given(arm.checkpoint) else arm.checkpoint.make
            if recipe is not None:
                check_request(
                    recipe.format,
                    recipe.dialect,
                    recipe.rule,
                    _rules_of(recipe),
                    shared_globals=recipe.shared_globals,
                )
    _engine_spec(settings.engine, settings.engine.base_url)


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Say of a room's complaint which setting it is about."""
    try:
        yield
    except WorkbenchError as error:
        raise ConfigError(f"{where}: {error.message}", fix=error.fix) from error


def judge(run: Path, policy: dict[str, Any]) -> Verdict:
    """Judge a run folder's records by a policy; writes verdict.json and junit.xml. Raises ConfigError, OutputError."""
    from workbench.gating import gate, to_junit

    if not (run / CONFIG).exists() and not any((run / name).exists() for name in ("comparison.json", "lint", "eval")):
        raise ConfigError(f"{run} is no run folder", fix="give the folder that a run printed, or an evaluation wrote")
    lint = {file.stem: _stored(records.LintReport, file) for file in sorted((run / "lint").glob("*.json"))}
    comparison_file, tensors_file = run / "comparison.json", run / "tensors.parquet"
    comparison = _stored(records.Comparison, comparison_file) if comparison_file.exists() else None
    tensors = None
    if tensors_file.exists():
        import pandas

        try:
            tensors = pandas.read_parquet(tensors_file)
        except (OSError, ValueError) as error:
            raise OutputError(f"{tensors_file} is damaged: {error}", fix="delete it and analyze again") from error
    evaluations = {
        file.parent.name: _stored(records.Evaluation, file) for file in sorted(run.glob("eval/*/scores.json"))
    }
    verdict = gate(policy, comparison=comparison, lint=lint, tensors=tensors, evaluations=evaluations)
    records.write_json(run / "verdict.json", verdict)
    records.write_text(run / "junit.xml", to_junit(verdict))
    return verdict


@dataclass(kw_only=True)
class _Run:
    settings: Settings
    folder: runfolder.RunFolder
    say: Progress
    paths: dict[CheckpointSettings, Path] = field(default_factory=dict)

    def all_stages(self) -> int:
        self.say.title(f"{self.settings.name} · {self.settings.model.name}", str(self.folder.path))
        _set_threads(self.settings.compute.get("threads"))
        verdict: Verdict | None = None
        invalid = False
        for stage in self.settings.stages:
            if invalid and stage in ("analyze", "evaluate", "compare"):
                continue
            with self.folder.timed(stage):
                if stage == "prepare":
                    invalid = not self.prepare()
                elif stage == "lint":
                    invalid = not self.lint() or invalid
                elif stage == "analyze":
                    self.analyze()
                elif stage == "evaluate":
                    self.evaluate()
                elif stage == "compare":
                    self.compare()
                elif stage == "gate":
                    verdict = self.gate()
                elif stage == "report":
                    self.report(verdict)
        self._manifest()
        if verdict is None:
            self.say.note(f"no gate stage: nothing was judged; files are in {self.folder.path}")
            return 3
        self.say.verdict(verdict, self.folder.path / "report.html")
        return verdict.exit_code

    # ---- prepare and lint --------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Every arm's checkpoint as a folder. False when a given one is so broken that nothing may be made from it."""
        from workbench.checkpoints import open_checkpoint

        self.say.stage("prepare")
        arms = self.settings.arms
        given = {arm.checkpoint for arm in arms.values() if _given(arm.checkpoint)}
        for checkpoint in given:
            self.paths[checkpoint] = _existing(checkpoint, self._checkpoint_name(checkpoint))
            with open_checkpoint(self.paths[checkpoint]):  # what cannot be read at all ends here
                pass
        for name, arm in arms.items():
            if arm.checkpoint in given and self._lint_arm(name, arm).errors:
                self.paths.update({a.checkpoint: Path() for a in arms.values() if a.checkpoint not in self.paths})
                return False
        for arm in arms.values():
            self._path(arm)
        self._manifest()
        return True

    def lint(self) -> bool:
        """Lint every arm's checkpoint; False when one has errors that lint.allow does not list."""
        self.say.stage("lint")
        reports = [self._lint_arm(name, arm) for name, arm in self.settings.arms.items() if self._path(arm) != Path()]
        return not any(report.errors for report in reports)

    def _lint_arm(self, name: str, arm: ArmSettings) -> LintReport:
        from workbench.checkpoints.lint import lint_checkpoint

        target = self.folder.path / "lint" / f"{name}.json"
        if target.exists():
            return records.read_json(records.LintReport, target)
        for other, twin in self.settings.arms.items():  # arms that share a checkpoint share its findings
            twin_file = self.folder.path / "lint" / f"{other}.json"
            if twin.checkpoint == arm.checkpoint and twin_file.exists():
                report = records.read_json(records.LintReport, twin_file)
                break
        else:
            report = lint_checkpoint(self._path(arm), allow=self.settings.lint.allow)
            self.say.lint(name, report)
        records.write_json(target, report)
        return report

    def _make(self, checkpoint: CheckpointSettings) -> Path:
        """Make a checkpoint by its recipe, or take it from the cache when the same recipe made it before."""
        from workbench.checkpoints import open_checkpoint
        from workbench.checkpoints.convert import quantize_checkpoint

        recipe = checkpoint.make
        assert recipe is not None
        name = self._checkpoint_name(checkpoint)
        source_settings = self.settings.model.checkpoints.get(recipe.source)
        if source_settings is None:
            raise ConfigError(
                f"model.checkpoints.{name}.make.source is {recipe.source!r}, which is not a checkpoint of the model",
                fix=f"choose one of: {', '.join(self.settings.model.checkpoints)}",
            )
        source = self._folder_of(source_settings)
        with open_checkpoint(source) as opened:
            key = self._recipe_key(recipe, opened.fingerprint())
        target = Path(self.settings.paths.cache).resolve() / f"{self.settings.model.name}-{name}-{key}"
        if (target / "config.json").is_file():
            self.say.note(f"{name}: {target} (made before by the same recipe)")
            return target
        amax = self._input_amax(recipe) if recipe.calibrate else None
        self.say.note(f"{name}: {recipe.format or 'a recipe'} in {recipe.dialect}'s dialect from {source}")
        result = quantize_checkpoint(
            source,
            target,
            format=recipe.format,
            dialect=recipe.dialect,
            exclude=recipe.exclude,
            rule=recipe.rule,
            recipe=_rules_of(recipe),
            shared_globals=recipe.shared_globals,
            input_amax=amax,
            progress=self.say.counter("tensors"),
        )
        for warning in result.warnings:
            self.say.note(f"  warning: {warning}")
        return target

    def _recipe_key(self, recipe: Recipe, fingerprint: str) -> str:
        calibration: Any = None
        if recipe.calibrate:
            calibration = [self.settings.analysis.prompts, sorted(self.settings.eval.items())]
        content = json.dumps([RECIPE_VERSION, fingerprint, dataclasses.asdict(recipe), calibration], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def _input_amax(self, recipe: Recipe) -> dict[str, float]:
        from workbench.formats.activations import read_activations

        return read_activations(self._activations()).input_amax()

    def _checkpoint_name(self, checkpoint: CheckpointSettings) -> str:
        for name, candidate in self.settings.model.checkpoints.items():
            if candidate == checkpoint:
                return name
        return next(name for name, arm in self.settings.arms.items() if arm.checkpoint == checkpoint)

    def _path(self, arm: ArmSettings) -> Path:
        return self._folder_of(arm.checkpoint)

    def _folder_of(self, checkpoint: CheckpointSettings) -> Path:
        """Where a checkpoint lies, found or made once a run."""
        if checkpoint not in self.paths:
            given = _given(checkpoint)
            name = self._checkpoint_name(checkpoint)
            self.paths[checkpoint] = _existing(checkpoint, name) if given else self._make(checkpoint)
        return self.paths[checkpoint]

    # ---- analyze -----------------------------------------------------------------------------------------------------

    def analyze(self) -> None:
        from workbench.analysis.study import analyze_pairs

        self.say.stage("analyze")
        settings = self.settings
        if not settings.analysis.pairs:
            self.say.note("no analysis.pairs: nothing to analyze")
            return
        named = {settings.baseline}
        for pair in settings.analysis.pairs:
            named |= {arm for arm in (pair.first, pair.second, pair.direct) if arm is not None}
        analyze_pairs(
            out=self.folder.path,
            source_arm=settings.baseline,
            pairs=settings.analysis.pairs,
            arms={
                name: (
                    self._path(arm),
                    arm.format if arm.backend.kind == "requant" else None,
                    "none" if arm.backend.kind == "reference" else arm.backend.activations,
                )
                for name, arm in settings.arms.items()
                if name in named
            },
            activations=self._activations() if settings.analysis.capture else None,
            bootstrap=settings.analysis.bootstrap,
            seed=settings.seed,
            progress=self.say.bar,
        )

    def _activations(self) -> Path:
        """The source's layer inputs on training prompts of the tasks, captured once a run."""
        from workbench.evaluation.prompts import training_prompts
        from workbench.serving.capture import capture_activations

        target = self.folder.path / "activations.safetensors"
        if not target.exists():
            baseline = self.settings.arms[self.settings.baseline]
            prompts = training_prompts(
                self._tasks(), self.settings.analysis.prompts, scratch=self.folder.path / "scratch"
            )
            self.say.note(f"capturing layer inputs of {self.settings.baseline} on {len(prompts)} prompts")
            capture_activations(
                self._spec(self.settings.baseline, baseline),
                prompts,
                target,
                reservoir_rows=self.settings.analysis.reservoir_rows,
            )
        return target

    # ---- evaluate ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        self.say.stage("evaluate")
        for name, arm in self.settings.arms.items():
            scores = self.folder.path / "eval" / name / "scores.json"
            if scores.exists():
                self.say.note(f"{name}: evaluated before")
                continue
            self._evaluate_arm(name, arm)

    def _evaluate_arm(self, name: str, arm: ArmSettings) -> None:
        from workbench.evaluation.run import evaluate
        from workbench.serving.endpoint import start

        engine = self.settings.engine
        out = self.folder.path / "eval" / name
        self.say.arm(name, arm.backend.kind)
        with start(self._spec(name, arm), self.folder.path / "server" / f"{name}.log") as endpoint:
            result: Evaluation = evaluate(
                arm=name,
                base_url=endpoint.base_url,
                model=endpoint.model,
                tokenizer=Path(self.settings.model.tokenizer),
                tasks=self._tasks(),
                out_dir=out,
                concurrency=max(1, round(engine.concurrency * arm.concurrency_factor)),
                request_order=arm.request_order,
                max_length=engine.max_model_len,
                seed=self.settings.seed,
                fingerprint=_identity(endpoint.record()),
                watch=endpoint.check,
                progress=self.say.counter(f"{name}: answers"),
            )
            records.write_json(self.folder.path / "server" / f"{name}.json", endpoint.record())
        records.write_json(out / "scores.json", result)
        self.say.scores(result)

    def _tasks(self) -> tuple[TaskSpec, ...]:
        return _task_specs(self.settings)

    def _spec(self, name: str, arm: ArmSettings) -> ServeSpec:
        from workbench.serving.spec import ServeSpec

        return ServeSpec(
            arm=name,
            checkpoint=self._path(arm),
            backend=arm.backend.kind,
            format=arm.format.name if arm.format else None,
            rule=arm.format.rule if arm.format else None,
            activations=arm.backend.activations,
            exclude=self._exclude(arm),
            kv_cache_dtype=arm.kv_cache_dtype,
            engine=_engine_spec(self.settings.engine, arm.base_url or self.settings.engine.base_url),
        )

    def _exclude(self, arm: ArmSettings) -> tuple[str, ...]:
        """An arm's own excludes; else the model's, where a backend must choose what to quantize: a checkpoint that is
        quantized already says itself what it leaves out."""
        from workbench.checkpoints import open_checkpoint

        if arm.exclude is not None or arm.backend.kind != "requant" or self.settings.engine.kind == "external":
            return arm.exclude or ()
        with open_checkpoint(self._path(arm)) as checkpoint:
            quantized = any(entry.quantized for entry in checkpoint.entries())
        return () if quantized else self.settings.model.exclude

    # ---- compare, gate, report ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        from workbench.comparison import compare_arms

        self.say.stage("compare")
        settings = self.settings
        candidates = [name for name in settings.arms if name != settings.baseline]
        comparison = compare_arms(
            self.folder.path, baseline=settings.baseline, candidates=candidates, noise_arm=settings.noise_arm or ""
        )
        records.write_json(self.folder.path / "comparison.json", comparison)

    def gate(self) -> Verdict:
        self.say.stage("gate")
        return judge(self.folder.path, self.settings.gate)

    def report(self, verdict: Verdict | None) -> None:
        from workbench.reporting import build_report

        self._manifest()
        build_report(self.folder.path)

    def _manifest(self) -> None:
        from workbench.checkpoints import open_checkpoint

        described = {}
        for settings, path in self.paths.items():
            if path == Path():
                continue
            with open_checkpoint(path) as checkpoint:
                described[self._checkpoint_name(settings)] = {
                    "path": str(path), "dialect": checkpoint.dialect, "fingerprint": checkpoint.fingerprint(),
                }  # fmt: skip
        self.folder.write_manifest(
            runfolder.describe(
                experiment=self.settings.name,
                checkpoints=described,
                seeds={"seed": self.settings.seed},
                command=runfolder.command_line(),
            )
        )


def _stored(kind: type[T], path: Path) -> T:
    """A record that an earlier stage wrote. Raises OutputError when the file is damaged."""
    try:
        return records.read_json(kind, path)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise OutputError(f"{path} is damaged: {error}", fix="delete it and run its stage again") from error


def _engine_spec(engine: EngineSettings, base_url: str) -> EngineSpec:
    from workbench.serving.spec import EngineSpec

    fields = {f.name for f in dataclasses.fields(EngineSpec)}
    values = {key: value for key, value in dataclasses.asdict(engine).items() if key in fields}
    return EngineSpec(**values | {"base_url": base_url, "model": engine.served_model})


def _identity(server: records.ServerRecord) -> str:
    """What an endpoint computes: answers of an interrupted evaluation are taken over only under the same one."""
    return "|".join(
        (server.fingerprint, server.backend, server.weight_format, server.activation_format, server.activation_scale,
         server.kv_cache_dtype, server.dtype, server.engine, server.engine_version)
    )  # fmt: skip


def _task_specs(settings: Settings) -> tuple[TaskSpec, ...]:
    from workbench.evaluation.spec import task_spec

    return tuple(task_spec({"name": name, **task}) for name, task in settings.eval.items())


def _rules_of(recipe: Recipe) -> Any:
    """The rules of `make.rules` as conversion takes them; None where there are none."""
    from workbench.checkpoints.recipe import read_recipe

    return read_recipe([dataclasses.asdict(rule) for rule in recipe.rules]) if recipe.rules else None


def _given(checkpoint: CheckpointSettings) -> bool:
    return bool(checkpoint.path)


def _existing(checkpoint: CheckpointSettings, name: str) -> Path:
    assert checkpoint.path
    path = Path(checkpoint.path).expanduser()
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {name}: there is no folder {path}",
            fix=f"download it there, or give another: model.checkpoints.{name}.path=FOLDER or model.root=FOLDER",
        )
    return path.resolve()


def _set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(int(threads))
        os.environ.setdefault("OMP_NUM_THREADS", str(int(threads)))
