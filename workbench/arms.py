"""An experiment's arms: where the checkpoint of each lies, found or made, and what is to serve it.

    arms = Arms(settings=settings, say=Progress(), capture=activations_file)
    arms.folder(arm.checkpoint)   # found at its path, or made by its recipe once and kept for the next run
    arms.serve_spec("nvfp4")      # what serving starts

check_arms(settings)              # what can be wrong with an arm without opening a file
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.composition import model_defaults
from workbench.errors import CheckpointError, ConfigError, WorkbenchError
from workbench.progress import Progress
from workbench.settings import ArmSettings, CheckpointSettings, EngineSettings, Recipe, Settings

if TYPE_CHECKING:
    from workbench.serving.spec import EngineSpec, ServeSpec

RECIPE_VERSION = 1  # raise when quantize_checkpoint's output changes: cached checkpoints are made anew


def check_arms(settings: Settings) -> None:
    """Refuse formats, recipes, KV dtypes and engine settings that no run could use. Raises ConfigError."""
    from workbench.checkpoints.convert import check_request
    from workbench.formats import get_format
    from workbench.serving.spec import check_kv_cache_dtype

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
            recipe = None if is_given(arm.checkpoint) else arm.checkpoint.make
            if recipe is not None:
                check_request(
                    recipe.format,
                    recipe.dialect,
                    recipe.rule,
                    _possible_rules(recipe),
                    shared_globals=recipe.shared_globals,
                )
    _engine_spec(settings.engine, settings.engine.base_url)


def fit_model_len(settings: Settings) -> int:
    """`engine.max_model_len`, or the context that the arms' checkpoints hold where it is only the model file's default.

    Raises ConfigError where the user asks for more than they hold. Another's server has its own limit.
    """
    from workbench.checkpoints.context import ALLOW_LONGER, fit_context

    engine, model = settings.engine, settings.model
    if engine.kind != "vllm" or ALLOW_LONGER in engine.env or any("overrides" in name for name in engine.args):
        return engine.max_model_len
    used = {arm.checkpoint for arm in settings.arms.values()}
    sources = {c.make.source for c in used if not is_given(c) and c.make is not None}
    used |= {model.checkpoints[name] for name in sources if name in model.checkpoints}
    return fit_context(
        engine.max_model_len,
        [Path(c.path).expanduser() for c in used if c.path],
        default=model_defaults(model.name)["max_model_len"],
        key="model.max_model_len={}" if engine.max_model_len == model.max_model_len else "engine.max_model_len={}",
    )


def is_given(checkpoint: CheckpointSettings) -> bool:
    """Whether the user names a folder; else the recipe makes it."""
    return bool(checkpoint.path)


@dataclass(kw_only=True)
class Arms:
    """The arms' checkpoints, each found or made once. capture: makes (or finds) the file of the source's layer inputs.

    folders: what was found or made so far; an empty path stands for one that is not to be made, or that only the
    external server has.
    """

    settings: Settings
    say: Progress
    capture: Callable[[], Path]
    folders: dict[CheckpointSettings, Path] = field(default_factory=dict)

    def folder(self, checkpoint: CheckpointSettings) -> Path:
        """Where a checkpoint lies: a folder, or on the Hub where no server needs it. Raises CheckpointError when it is
        given and not there, and what making it raises."""
        if checkpoint not in self.folders:
            found = self._existing(checkpoint) if is_given(checkpoint) else self._make(checkpoint)
            self.folders[checkpoint] = found
        return self.folders[checkpoint]

    def give_up_making(self) -> None:
        """What has not been found or made yet stays away."""
        for arm in self.settings.arms.values():
            self.folders.setdefault(arm.checkpoint, Path())

    def present(self, checkpoint: CheckpointSettings) -> bool:
        """Whether there is a folder to look into: not after making was given up, nor where only a server has it."""
        return self.folder(checkpoint) != Path()

    def describe(self) -> dict[str, dict[str, str]]:
        """Path, dialect and fingerprint of every checkpoint that was found or made, for the manifest."""
        from workbench.checkpoints import open_checkpoint

        described = {}
        for checkpoint_settings, path in self.folders.items():
            if path == Path():
                continue
            with open_checkpoint(path) as checkpoint:
                described[self._name(checkpoint_settings)] = {
                    "path": str(path), "dialect": checkpoint.dialect, "fingerprint": checkpoint.fingerprint(),
                }  # fmt: skip
        return described

    def serve_spec(self, name: str) -> ServeSpec:
        """What serving an arm needs to know."""
        from workbench.serving.spec import ServeSpec

        arm = self.settings.arms[name]
        return ServeSpec(
            arm=name,
            checkpoint=self.folder(arm.checkpoint) if self.present(arm.checkpoint) else str(arm.checkpoint.path),
            backend=arm.backend.kind,
            format=arm.format.name if arm.format else None,
            rule=arm.format.rule if arm.format else None,
            activations=arm.backend.activations,
            compat=arm.backend.compat,
            exclude=self._exclude(arm),
            kv_cache_dtype=arm.kv_cache_dtype,
            engine=_engine_spec(self.settings.engine, arm.base_url or self.settings.engine.base_url),
        )

    # ---- private

    def _existing(self, checkpoint: CheckpointSettings) -> Path:
        assert checkpoint.path
        if checkpoint.path.startswith("hf:"):
            return self._on_hub(checkpoint.path)
        path, name = Path(checkpoint.path).expanduser(), self._name(checkpoint)
        if not path.is_dir():
            if self.settings.engine.kind == "external":  # whoever serves it has it
                self.say.note(f"{name}: there is no folder {path}; answers are asked of the server alone")
                return Path()
            raise CheckpointError(
                f"checkpoint {name}: there is no folder {path}",
                fix=f"download it there, or give another: model.checkpoints.{name}.path=FOLDER or model.root=FOLDER",
            )
        return path.resolve()

    def _on_hub(self, path: str) -> Path:
        """A repository's own address where only weights are read; the whole local snapshot where a server needs it."""
        from workbench.checkpoints.open import resolve_path

        capture = "analyze" in self.settings.stages and self.settings.analysis.capture
        return resolve_path(path) if "evaluate" in self.settings.stages or capture else Path(path)

    def _make(self, checkpoint: CheckpointSettings) -> Path:
        """Make a checkpoint by its recipe, or take it from the cache when the same recipe made it before."""
        from workbench.checkpoints import open_checkpoint
        from workbench.checkpoints.convert import quantize_checkpoint
        from workbench.checkpoints.match import unmatched_patterns

        recipe = checkpoint.make
        assert recipe is not None
        name = self._name(checkpoint)
        source_settings = self.settings.model.checkpoints.get(recipe.source)
        if source_settings is None:
            raise ConfigError(
                f"model.checkpoints.{name}.make.source is {recipe.source!r}, which is not a checkpoint of the model",
                fix=f"choose one of: {', '.join(self.settings.model.checkpoints)}",
            )
        source = self.folder(source_settings)
        with open_checkpoint(source) as opened:
            key = self._recipe_key(recipe, opened.fingerprint())
            unmet = unmatched_patterns(recipe.exclude, {entry.module for entry in opened.entries()})
        target = Path(self.settings.paths.cache).resolve() / f"{self.settings.model.name}-{name}-{key}"
        if (target / "config.json").is_file():
            self.say.note(f"{name}: {target} (made before by the same recipe)")
            return target
        ours = set(unmet) & set(model_defaults(self.settings.model.name)["exclude"])  # for models of every kind
        amax = self._input_amax() if recipe.calibrate else None
        rules = self._planned(recipe, source, target) if recipe.plan is not None else _rules_of(recipe)
        self.say.note(f"{name}: {recipe.format or 'a recipe'} in {recipe.dialect}'s dialect from {source}")
        result = quantize_checkpoint(
            source,
            target,
            format=recipe.format,
            dialect=recipe.dialect,
            exclude=[pattern for pattern in recipe.exclude if pattern not in ours],
            rule=recipe.rule,
            recipe=rules,
            shared_globals=recipe.shared_globals,
            input_amax=amax,
            progress=self.say.counter("tensors"),
        )
        for warning in result.warnings:
            self.say.note(f"  warning: {warning}")
        return target

    def _planned(self, recipe: Recipe, source: Path, target: Path) -> Any:
        """The rules of a plan under the recipe's budget, measured on captured inputs; `<target>.plan.yaml` keeps it."""
        from workbench.analysis.plan import plan_bits, write_recipe
        from workbench.checkpoints.recipe import read_recipe
        from workbench.records import write_json

        plan = recipe.plan
        assert plan is not None
        found = plan_bits(
            source=source,
            bits=plan.bits,
            formats=plan.formats,
            granularity=plan.granularity,
            activations=self.capture(),
            progress=self.say.bar,
        )
        file = target.with_name(f"{target.name}.plan.yaml")
        write_recipe(file, found)
        write_json(file.with_suffix(".json"), found)
        self.say.note(f"planned for {plan.bits:g} bits a weight: {found.bits:.3f} used; {file}")
        return read_recipe(file)

    def _recipe_key(self, recipe: Recipe, fingerprint: str) -> str:
        calibration: Any = None
        if recipe.calibrate or recipe.plan is not None:
            calibration = [self.settings.analysis.prompts, sorted(self.settings.eval.items())]
        asked = dataclasses.asdict(recipe)
        del asked["note"]
        if recipe.plan is None:
            del asked["plan"]
        content = json.dumps([RECIPE_VERSION, fingerprint, asked, calibration], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def _input_amax(self) -> dict[str, float]:
        from workbench.formats.activations import read_activations

        return read_activations(self.capture()).input_amax()

    def _name(self, checkpoint: CheckpointSettings) -> str:
        for name, candidate in self.settings.model.checkpoints.items():
            if candidate == checkpoint:
                return name
        return next(name for name, arm in self.settings.arms.items() if arm.checkpoint == checkpoint)

    def _exclude(self, arm: ArmSettings) -> tuple[str, ...]:
        """An arm's own excludes; else the model's, where a backend must choose what to quantize: a checkpoint that is
        quantized already says itself what it leaves out."""
        from workbench.checkpoints import open_checkpoint

        if arm.exclude is not None or arm.backend.kind != "requant" or self.settings.engine.kind == "external":
            return arm.exclude or ()
        with open_checkpoint(self.folder(arm.checkpoint)) as checkpoint:
            quantized = any(entry.quantized for entry in checkpoint.entries())
        return () if quantized else self.settings.model.exclude


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Say of a room's complaint which setting it is about."""
    try:
        yield
    except WorkbenchError as error:
        raise ConfigError(f"{where}: {error.message}", fix=error.fix) from error


def _engine_spec(engine: EngineSettings, base_url: str) -> EngineSpec:
    from workbench.serving.spec import EngineSpec

    fields = {f.name for f in dataclasses.fields(EngineSpec)}
    values = {key: value for key, value in dataclasses.asdict(engine).items() if key in fields}
    return EngineSpec(**values | {"base_url": base_url, "model": engine.served_model})


def _possible_rules(recipe: Recipe) -> Any:
    """The recipe's rules; of one that is planned, one for each format that a plan may choose."""
    from workbench.checkpoints.recipe import read_recipe

    if recipe.plan is None:
        return _rules_of(recipe)
    if recipe.format is not None or recipe.rules:
        raise ConfigError("make.plan decides for every module", fix="leave make.format and make.rules empty")
    return read_recipe([{"match": "*", "format": name} for name in recipe.plan.formats])


def _rules_of(recipe: Recipe) -> Any:
    """The rules of `make.rules` as conversion takes them; None where there are none."""
    from workbench.checkpoints.recipe import read_recipe

    return read_recipe([dataclasses.asdict(rule) for rule in recipe.rules]) if recipe.rules else None
