"""The evaluate stage: per arm, start its endpoint, ask it, stop it; then what serving costs.

    ArmEvaluation(settings=settings, folder=run_folder, say=progress, arms=arms).run()

Writes eval/<arm>/ with scores.json, server/<arm>.json with the log, the audit and the numerics card, kld/<arm>.jsonl,
and serving_cost.json. An arm that has scores is not started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import records, runfolder
from workbench.divergences import Divergences
from workbench.errors import EngineError

if TYPE_CHECKING:
    from workbench.arms import Arms
    from workbench.evaluation.spec import TaskSpec
    from workbench.progress import Progress
    from workbench.records import Evaluation
    from workbench.settings import ArmSettings, Settings


@dataclass(kw_only=True)
class ArmEvaluation:
    settings: Settings
    folder: runfolder.RunFolder
    say: Progress
    arms: Arms

    def __post_init__(self) -> None:
        self.tasks = task_specs(self.settings)
        self.divergences = Divergences(settings=self.settings, folder=self.folder, say=self.say, tasks=self.tasks)

    def run(self) -> None:
        """Every arm that has no scores yet, then what serving costs; KL divergences beside the answers."""
        for name, arm in self.settings.arms.items():
            scores = self.folder.path / "eval" / name / "scores.json"
            if scores.exists():
                self.say.note(f"{name}: evaluated before")
                continue
            if arm.optional and (card := self._card(name)) is not None and card.error:
                self.say.note(f"{name}: {card.verdict}")
                continue
            try:
                self._evaluate_arm(name, arm)
            except EngineError as error:
                if not arm.optional:
                    raise
                self._note_failure(name, error)
        if self.settings.serving_cost.preset != "off":
            self._measure_serving()

    def _measure_serving(self) -> None:
        """Load time, memory and latency of every arm but the noise arm and those that may not start."""
        from workbench.bench.serve import bench_serve, loads_of

        target, wanted = self.folder.path / "serving_cost.json", self.settings.serving_cost
        if target.exists():
            self.say.note("serving cost: measured before")
            return
        baseline = wanted.baseline or self.settings.baseline
        others = [
            name
            for name, arm in self.settings.arms.items()
            if name not in (baseline, self.settings.noise_arm) and not arm.optional
        ]
        cost = bench_serve(
            [self.arms.serve_spec(name) for name in (baseline, *others)],
            loads_of(wanted.preset, self.settings.engine.max_model_len),
            tokenizer=Path(self.settings.model.tokenizer),
            out=self.folder.path / "serving_cost",
            preset=wanted.preset,
            repeats=wanted.repeat,
            margin=wanted.margin,
            together=wanted.together,
            say=self.say.note,
        )
        records.write_json(target, cost)

    def _evaluate_arm(self, name: str, arm: ArmSettings) -> None:
        from workbench.evaluation.run import evaluate
        from workbench.serving.endpoint import start

        engine, model = self.settings.engine, self.settings.model
        out = self.folder.path / "eval" / name
        baseline = self.folder.path / "eval" / self.settings.baseline
        self.say.arm(name, arm.backend.kind)
        with start(self.arms.serve_spec(name), self.folder.path / "server" / f"{name}.log") as endpoint:
            card = endpoint.numerics()
            if card is not None:
                self.say.note(f"{name}: {card.verdict}")
            fingerprint = _identity(endpoint.record())

            def keep(result: Evaluation) -> None:
                """The scores come last: an arm that has them is not started again."""
                self.divergences.collect(name, endpoint, fingerprint)
                records.write_json(self.folder.path / "server" / f"{name}.json", endpoint.record())
                if card is not None:
                    records.write_json(self._card_file(name), card)
                records.write_json(out / "scores.json", result)

            result = evaluate(
                arm=name,
                base_url=endpoint.base_url,
                model=endpoint.model,
                tokenizer=Path(model.tokenizer),
                tasks=self.tasks,
                out_dir=out,
                concurrency=max(1, round(engine.concurrency * arm.concurrency_factor)),
                request_order=arm.request_order,
                max_length=engine.max_model_len,
                seed=self.settings.seed,
                fingerprint=fingerprint,
                api=model.api,
                chat_template=model.chat_template,
                thinking=model.thinking,
                thinking_budget=model.thinking_budget,
                baseline_dir=baseline if name != self.settings.baseline and baseline.is_dir() else None,
                watch=endpoint.check,
                progress=self.say.counter(f"{name}: answers"),
                keep=keep,
            )
        self.say.scores(result)

    def _note_failure(self, name: str, error: EngineError) -> None:
        """A server that may fail did: its card holds the engine's own words, and the run goes on without it."""
        from workbench.serving.numerics import no_card
        from workbench.serving.serverlog import root_cause

        log = self.folder.path / "server" / f"{name}.log"
        cause = root_cause(log.read_text(errors="replace")) if log.exists() else ""
        backend = self.settings.arms[name].backend.kind
        card = no_card(name, backend, cause or error.message.splitlines()[0], verdict="could not run")
        records.write_json(self._card_file(name), card)
        self.say.note(f"{name}: {card.verdict}")

    def _card_file(self, name: str) -> Path:
        return self.folder.path / "server" / f"{name}.numerics.json"

    def _card(self, name: str) -> records.NumericsCard | None:
        file = self._card_file(name)
        return runfolder.read_record(records.NumericsCard, file) if file.exists() else None


def _identity(server: records.ServerRecord) -> str:
    """What an endpoint computes: answers of an interrupted evaluation are taken over only under the same one."""
    return "|".join(
        (server.fingerprint, server.backend, server.weight_format, server.activation_format, server.activation_scale,
         server.kv_cache_dtype, server.dtype, server.engine, server.engine_version)
    )  # fmt: skip


def task_specs(settings: Settings) -> tuple[TaskSpec, ...]:
    from workbench.evaluation.spec import task_spec

    return tuple(task_spec({"name": name, **task}) for name, task in settings.eval.items())
