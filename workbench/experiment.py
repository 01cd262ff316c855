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

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench import records, runfolder
from workbench.arm_evaluation import ArmEvaluation, task_specs
from workbench.arms import Arms, check_arms, fit_model_len, is_given
from workbench.composition import resolved_yaml, with_values
from workbench.divergences import Divergences
from workbench.errors import ConfigError, OutputError
from workbench.progress import Progress
from workbench.settings import STAGES, ArmSettings, Settings, read_settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workbench.analysis.compute import Compute
    from workbench.records import LintReport, Verdict
    from workbench.reporting.load import RunFiles


def run_experiment(config: DictConfig) -> int:
    """Run one composed experiment; returns the verdict's exit code.

    Raises WorkbenchError when it could not run, and at the end of stages without a gate: nothing was judged then.
    """
    settings = read_settings(config)
    say = Progress()
    if (length := fit_model_len(settings)) != settings.engine.max_model_len:
        say.note(f"model.max_model_len={length}, which is all that the model holds; our default is longer")
        config = with_values(config, {"model": {"max_model_len": length}, "engine": {"max_model_len": length}})
        settings = read_settings(config)
    _check_rooms(settings)
    folder = runfolder.open_run(Path(settings.paths.out), settings.name, resolved_yaml(config), settings.resume)
    try:
        return _Run(settings=settings, folder=folder, say=say).all_stages()
    finally:
        folder.close()


def judge(run: Path, policy: dict[str, Any], since: Path | None = None, policy_from: str = "") -> Verdict:
    """Judge a run folder's records by a policy; writes verdict.json and junit.xml. since: a committed baseline, which
    the run's arms are paired with as well. policy_from: where the policy was written.

    Raises as `judge_files` does, ConfigError for a folder that is no run too.
    """
    from workbench.reporting.load import load_run

    return judge_files(load_run(run), policy, since, policy_from)


def judge_files(files: RunFiles, policy: dict[str, Any], since: Path | None = None, policy_from: str = "") -> Verdict:
    """Judge a run whose files were read already.

    Raises ConfigError for a policy that is not understood or an arm that the run does not have; OutputError naming
    what is damaged.
    """
    from workbench.comparison import check_figures, check_sources, compare_with_baseline, read_baseline
    from workbench.gating import gate, read_policy, read_promised, to_junit
    from workbench.records.judged import evidence_digests

    run = files.run_dir
    evidence = ("lint", "server", "equality", "eval", "comparison.json", "tensors.parquet", "serving_cost.json")
    files.refuse_damaged("config.yaml", "manifest.json", *evidence)
    known = _arms_of(files)
    if not policy.get("gated"):
        has = f"; this run has {', '.join(known)}" if known else ""
        raise ConfigError(
            f"the policy {policy.get('name', '')} gates no arm, so there is nothing to judge",
            fix=f"name the arms that the verdict is about: --gated ARM, or gated: [ARM] in the policy{has}",
        )
    if files.comparison is not None:
        check_sources(run, files.comparison, files.evaluations)
        check_figures(run, files.comparison, files.evaluations)
    rules = read_policy(policy)
    judged = evidence_digests(run, files.comparison)
    _check_named(f"{run} has", [*rules.gated, *rules.reported], known)
    verdict = gate(
        rules,
        comparison=files.comparison,
        lint=files.lint,
        tensors=files.tensors if files.tensors is not None else [],
        evaluations=files.evaluations,
        servers=files.servers,
        equality=files.equality,
        numerics=files.numerics,
        preflights=files.preflights,
        serving_cost=files.serving_cost,
        since=compare_with_baseline(run, read_baseline(since)) if since else None,
        judged=judged,
        policy_from=policy_from,
        roles=files.roles(),
        promised=read_promised(files.settings, files.manifest.stage_seconds if files.manifest is not None else ()),
    )
    records.write_json(run / "verdict.json", verdict)
    records.write_text(run / "junit.xml", to_junit(verdict))
    return verdict


def _arms_of(files: RunFiles) -> list[str]:
    """Every arm that left something in a run folder, or that its configuration names."""
    names = files.arms()
    if files.comparison is not None:
        names += [name for task in files.comparison.tasks for name in (task.baseline, task.candidate)]
    if files.tensors is not None:
        names += [*files.tensors["first_arm"].unique(), *files.tensors["second_arm"].unique()]
    return [name for name in dict.fromkeys(names) if name]


def _check_named(where: str, named: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an arm that does not exist. Where none is known, the evidence says what is missing."""
    unknown = [name for name in named if name not in known]
    if unknown and known:
        raise ConfigError(f"{where} no arm {unknown[0]!r}", fix=f"arms: {', '.join(known)}")


def _check_rooms(settings: Settings) -> None:
    """What the rooms own and check themselves, asked before a stage is run: tasks, policy, arms, engine."""
    from workbench.evaluation.run import check_settings
    from workbench.evaluation.spec import check_tasks
    from workbench.gating import read_policy

    if "evaluate" in settings.stages:
        check_tasks(task_specs(settings))
        if settings.kld.text and not Path(settings.kld.text).is_file():
            raise ConfigError(f"kld.text={settings.kld.text}: there is no such file", fix="kld.text=FILE, or null")
        model = settings.model
        tokenizer = Path(model.tokenizer)
        for arm in settings.arms.values():
            check_settings(arm.request_order, 1, model.api, model.chat_template, tokenizer, model.thinking_budget)
    if settings.serving_cost.preset != "off":
        from workbench.bench.serve import check_repeats, loads_of

        loads_of(settings.serving_cost.preset, settings.engine.max_model_len)
        check_repeats(settings.serving_cost.repeat, settings.serving_cost.margin)
    if "gate" in settings.stages:
        policy = read_policy(settings.gate)
        _check_named("gate: the experiment has", [*policy.gated, *policy.reported], settings.arms)
    if settings.compute.kind != "local" and "analyze" in settings.stages:
        _compute(settings)
    check_arms(settings)


@dataclass(kw_only=True)
class _Run:
    settings: Settings
    folder: runfolder.RunFolder
    say: Progress
    arms: Arms = field(init=False)

    def __post_init__(self) -> None:
        self.arms = Arms(settings=self.settings, say=self.say, capture=self._activations)

    def all_stages(self) -> int:
        self.say.title(f"{self.settings.name} · {self.settings.model.name}", str(self.folder.path))
        _set_threads(self.settings.compute.threads)
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
                    self.report()
        self._manifest()
        if verdict is None:
            with_gate = ",".join(stage for stage in STAGES if stage in (*self.settings.stages, "gate"))
            raise ConfigError(
                f"nothing was judged: stages=[{','.join(self.settings.stages)}] has no gate;"
                f" what was written is in {self.folder.path}",
                fix=f"for a verdict 'stages=[{with_gate}]', with the stages that write what it judges",
            )
        self.say.verdict(verdict, self.folder.path / "report.html")
        return verdict.exit_code

    # ---- prepare and lint --------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Every arm's checkpoint as a folder. False when a given one is so broken that nothing may be made from it."""
        from workbench.checkpoints import open_checkpoint

        self.say.stage("prepare")
        arms = self.settings.arms.items()
        given = {name: arm for name, arm in arms if is_given(arm.checkpoint) and self.arms.present(arm.checkpoint)}
        for checkpoint in {arm.checkpoint for arm in given.values()}:
            with open_checkpoint(self.arms.folder(checkpoint)):  # what cannot be read at all ends here
                pass
        far = self._on_hub()
        for name, arm in given.items():
            if not far and self._lint_arm(name, arm).errors:
                self.arms.give_up_making()
                return False
        for arm in self.settings.arms.values():
            self.arms.folder(arm.checkpoint)
        self._manifest()
        return True

    def lint(self) -> bool:
        """Lint every arm's checkpoint; False when one has errors that lint.allow does not list."""
        self.say.stage("lint")
        if far := self._on_hub():
            self.say.note(f"left out: it would ask the Hub for every scale; `workbench lint {far}` does")
            return True
        arms = self.settings.arms.items()
        reports = [self._lint_arm(name, arm) for name, arm in arms if self.arms.present(arm.checkpoint)]
        return not any(report.errors for report in reports)

    def _on_hub(self) -> str:
        """The last checkpoint that is read on the Hub ("": none). Then none is linted, so that all are judged alike."""
        given = {arm.checkpoint for arm in self.settings.arms.values() if is_given(arm.checkpoint)}
        found = [str(self.arms.folder(checkpoint)) for checkpoint in given]
        return max((path.replace("hf:/", "hf://") for path in found if path.startswith("hf:")), default="")

    def _lint_arm(self, name: str, arm: ArmSettings) -> LintReport:
        from workbench.checkpoints.lint import lint_checkpoint

        target = self.folder.path / "lint" / f"{name}.json"
        if target.exists():
            return runfolder.read_record(records.LintReport, target)
        for other, twin in self.settings.arms.items():  # arms that share a checkpoint share its findings
            twin_file = self.folder.path / "lint" / f"{other}.json"
            if twin.checkpoint == arm.checkpoint and twin_file.exists():
                report = runfolder.read_record(records.LintReport, twin_file)
                break
        else:
            report = lint_checkpoint(self.arms.folder(arm.checkpoint), allow=self.settings.lint.allow)
            self.say.lint(name, report)
        records.write_json(target, report)
        return report

    # ---- analyze -----------------------------------------------------------------------------------------------------

    def analyze(self) -> None:
        from workbench.analysis.controls import run_controls
        from workbench.analysis.device import Device
        from workbench.analysis.study import analyze_pairs

        self.say.stage("analyze")
        settings = self.settings
        self._compare_bytes()
        if not settings.analysis.pairs:
            self.say.note("no analysis.pairs: nothing to analyze")
            return
        device, pairs = Device(settings.analysis.device), settings.analysis.pairs
        named = {settings.baseline, *(arm for pair in pairs for arm in (pair.first, pair.second, pair.direct))}
        summary = analyze_pairs(
            out=self.folder.path,
            source_arm=settings.baseline,
            pairs=pairs,
            arms={
                name: (
                    self.arms.folder(arm.checkpoint),
                    arm.format if arm.backend.kind == "requant" else None,
                    self._activation_rounding(arm),
                )
                for name, arm in settings.arms.items()
                if name in named
            },
            activations=self._activations() if settings.analysis.capture else None,
            bootstrap=settings.analysis.bootstrap,
            sample=settings.analysis.sample,
            seed=settings.seed,
            progress=self.say.bar,
            say=self.say.note,
            device=device,
            compute=_compute(settings),
        )
        self.folder.measured_on(device.name, device.peak_bytes())
        target = self.folder.path / "controls.json"
        if settings.analysis.controls and not target.exists():
            self.say.note("controls: the same chain on synthetic weights, over an octave of scales and over widths")
            records.write_json(target, controls := run_controls(summary, seed=settings.seed))
            for sentence in controls.sentences:
                self.say.note(f"{sentence.holds}: {sentence.claim} ({sentence.measured})")

    def _activation_rounding(self, arm: ArmSettings) -> str:
        """Which inputs the arm's server rounds, as `analysis.study.Arm` says it."""
        if arm.backend.kind == "reference" or arm.backend.activations == "none":
            return "none"
        return "native" if self.settings.engine.kind == "external" else "auto"

    def _compare_bytes(self) -> None:
        """Where the policy asks for it: what an arm's checkpoint leaves unquantized, against the source's bytes."""
        from workbench.checkpoints.equality import compare_bytes
        from workbench.gating import read_policy

        if "gate" not in self.settings.stages or not read_policy(self.settings.gate).equal_bytes:
            return
        source = self.settings.arms[self.settings.baseline].checkpoint
        for name, arm in self.settings.arms.items():
            target = self.folder.path / "equality" / f"{name}.json"
            if arm.checkpoint != source and not target.exists():
                found = compare_bytes(self.arms.folder(source), self.arms.folder(arm.checkpoint), name)
                records.write_json(target, found)

    def _activations(self) -> Path:
        """The source's layer inputs on training prompts of the tasks, captured once a run."""
        from workbench.evaluation.prompts import training_prompts
        from workbench.serving.capture import capture_activations

        target = self.folder.path / "activations.safetensors"
        if not target.exists():
            prompts = training_prompts(
                task_specs(self.settings), self.settings.analysis.prompts, scratch=self.folder.path / "scratch"
            )
            self.say.note(f"capturing layer inputs of {self.settings.baseline} on {len(prompts)} prompts")
            capture_activations(
                self.arms.serve_spec(self.settings.baseline),
                prompts,
                target,
                reservoir_rows=self.settings.analysis.reservoir_rows,
            )
        return target

    # ---- evaluate ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        self.say.stage("evaluate")
        ArmEvaluation(settings=self.settings, folder=self.folder, say=self.say, arms=self.arms).run()

    # ---- compare, gate, report ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        from workbench.comparison import compare_arms

        self.say.stage("compare")
        settings = self.settings
        candidates = [
            name
            for name, arm in settings.arms.items()
            if name != settings.baseline and not (arm.optional and not (self.folder.path / "eval" / name).is_dir())
        ]
        comparison = compare_arms(
            self.folder.path, baseline=settings.baseline, candidates=candidates, noise_arm=settings.noise_arm or ""
        )
        records.write_json(self.folder.path / "comparison.json", comparison)
        Divergences(settings=settings, folder=self.folder, say=self.say, tasks=()).compare()

    def gate(self) -> Verdict:
        self.say.stage("gate")
        return judge(self.folder.path, self.settings.gate, policy_from="config.yaml")

    def report(self) -> None:
        from workbench.reporting import build_report
        from workbench.reporting.index import build_index

        self.say.stage("report")
        self._manifest()
        build_report(self.folder.path, strict=True)
        try:
            build_index(Path(self.settings.paths.out))
        except OutputError as error:  # the run itself is whole
            self.say.note(f"no list of runs: {error.message}")

    def _manifest(self) -> None:
        self.folder.write_manifest(
            runfolder.describe(
                experiment=self.settings.name,
                checkpoints=self.arms.describe(),
                seeds={"seed": self.settings.seed},
                command=runfolder.command_line(),
            )
        )


def _set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _compute(settings: Settings) -> Compute:
    from workbench.analysis.compute import choose_compute

    compute = settings.compute
    return choose_compute(compute.kind, address=compute.address, cpus=compute.cpus, device=settings.analysis.device)
