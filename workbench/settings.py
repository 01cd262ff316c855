"""The composed configuration as typed, frozen settings.

Hydra composes `conf/`; this module turns the result into dataclasses and refuses what it does not know: a key that
nobody reads is a setting that silently does nothing. `compose(overrides)` is the one way to get a configuration
without Hydra's command line.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from workbench.errors import ConfigError

STAGES = ("prepare", "lint", "analyze", "evaluate", "compare", "gate", "report")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecipeRule:
    """One line of a recipe, as in the files of conf/recipe: what the modules that `match` covers become."""

    match: str
    format: str
    rule: str | None = None
    block: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a missing checkpoint is made, from the model's checkpoint named `source`. calibrate: write input_scale.

    rules: decide before `format` does, which then may be null; the first that covers a module counts.
    """

    source: str
    format: str | None
    dialect: str
    exclude: tuple[str, ...] = ()
    rule: str | None = None
    rules: tuple[RecipeRule, ...] = ()
    shared_globals: bool = True
    calibrate: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """A checkpoint of the model: at `path`, or made by `make` when path is empty."""

    path: str | None = None
    make: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    kind: str
    activations: str = "auto"


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    name: str
    rule: str | None = None


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """One arm: a checkpoint, a backend, a KV dtype. concurrency_factor scales the engine's concurrency for this arm."""

    checkpoint: CheckpointSettings
    backend: BackendSettings
    format: FormatSettings | None = None
    kv_cache_dtype: str = "auto"
    base_url: str = ""
    request_order: str = "forward"
    concurrency_factor: float = 1.0
    exclude: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    name: str
    root: str
    tokenizer: str
    max_model_len: int
    checkpoints: dict[str, CheckpointSettings]
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    kind: str
    host: str
    port: int
    base_url: str
    served_model: str
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    enforce_eager: bool
    startup_timeout_s: float
    concurrency: int
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Two arms whose errors are set against each other; direct: the second format straight from the source."""

    first: str
    second: str
    direct: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    pairs: tuple[PairSettings, ...]
    capture: bool
    prompts: int
    reservoir_rows: int
    bootstrap: int


@dataclass(frozen=True, kw_only=True)
class LintSettings:
    allow: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    out: str
    cache: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One experiment, whole. `gate` and each task of `eval` stay mappings: their rooms own and check their keys."""

    name: str
    arms: dict[str, ArmSettings]
    baseline: str
    noise_arm: str | None
    stages: tuple[str, ...]
    seed: int
    model: ModelSettings
    engine: EngineSettings
    eval: dict[str, dict[str, Any]]
    analysis: AnalysisSettings
    gate: dict[str, Any]
    lint: LintSettings
    paths: PathSettings
    report: dict[str, Any]
    compute: dict[str, Any]
    resume: str | None = None


def register_resolvers() -> None:
    """Resolvers of conf/: `mini_model:NAME` is the folder of a shipped mini model."""
    OmegaConf.register_new_resolver("mini_model", _mini_model, replace=True)


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose conf/ with Hydra overrides, without Hydra's command line. Raises ConfigError."""
    import hydra
    from hydra.errors import HydraException

    register_resolvers()
    try:
        with hydra.initialize_config_module("workbench.conf", version_base="1.3"):
            return hydra.compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"could not compose the configuration: {error}", fix="see --help and --cfg job") from error


def read_settings(config: DictConfig) -> Settings:
    """The composed configuration as Settings. Raises ConfigError for an unknown, missing or contradictory key."""
    missing = _missing_keys(OmegaConf.to_container(config, resolve=False))
    if "name" in missing:
        raise ConfigError(
            "no experiment is chosen", fix="add experiment=NAME, e.g. experiment=kimi_requant (see --help for all)"
        )
    if missing:
        raise ConfigError(
            f"these settings have no value: {', '.join(missing)}",
            fix="give each on the command line, e.g. " + " ".join(f"{key}=…" for key in missing),
        )
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"could not resolve the configuration: {error}") from error
    settings = _read(Settings, plain, "")
    _check(settings)
    return settings


def check_name(what: str, name: str) -> None:
    """Raise ConfigError unless `name` can be one part of a path: letters, digits, dot, dash, underscore."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(
            f"{what} is {name!r}, which cannot name a file",
            fix="use letters, digits, dot, dash and underscore, at most 100, not starting with a dot",
        )


def policy_file(name: str) -> Path:
    """A gate policy by its name in conf/gate, or a YAML file's own path. Raises ConfigError naming the choices."""
    from importlib.resources import files

    shipped = Path(str(files("workbench.conf"))) / "gate"
    for path in (shipped / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise ConfigError(f"there is no gate policy {name!r}", fix=f"give a YAML file, or one of: {names}")


def _check(settings: Settings) -> None:
    arms = settings.arms
    check_name("name", settings.name)
    for arm_name in arms:
        check_name(f"arms.{arm_name}", arm_name)
    if not settings.paths.out:
        raise ConfigError("paths.out is empty", fix="name a folder, e.g. paths.out=reports")
    _at_least("seed", settings.seed, 0)
    _at_least("engine.concurrency", settings.engine.concurrency, 1)
    _at_least("engine.tensor_parallel_size", settings.engine.tensor_parallel_size, 1)
    _at_least("analysis.prompts", settings.analysis.prompts, 1)
    _at_least("analysis.reservoir_rows", settings.analysis.reservoir_rows, 1)
    _at_least("analysis.bootstrap", settings.analysis.bootstrap, 1)
    threads = settings.compute.get("threads")
    cores = os.cpu_count() or 1
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= cores):
        raise ConfigError(
            f"compute.threads is {threads!r}", fix=f"a whole number from 1 to {cores}, or null for every core"
        )
    if settings.noise_arm == settings.baseline:
        raise ConfigError("noise_arm is the baseline itself", fix="noise_arm=null, or an arm that repeats the baseline")
    if len(set(settings.stages)) != len(settings.stages) or not settings.stages:
        raise ConfigError(f"stages is {list(settings.stages)}", fix="name each stage once, at least one")
    if not arms:
        raise ConfigError("the experiment has no arms", fix="choose an experiment: experiment=kimi_requant")
    if settings.baseline not in arms:
        raise ConfigError(f"baseline arm {settings.baseline!r} is not among the arms", fix=f"arms: {', '.join(arms)}")
    if settings.noise_arm and settings.noise_arm not in arms:
        raise ConfigError(
            f"noise_arm {settings.noise_arm!r} is not among the arms",
            fix=f"noise_arm=null, or one of {', '.join(arms)}",
        )
    unknown = [stage for stage in settings.stages if stage not in STAGES]
    if unknown:
        raise ConfigError(f"unknown stages: {', '.join(unknown)}", fix=f"choose among {', '.join(STAGES)}")
    for pair in settings.analysis.pairs:
        for arm in (pair.first, pair.second, pair.direct):
            if arm is not None and arm not in arms:
                raise ConfigError(
                    f"analysis.pairs names the arm {arm!r}, which does not exist", fix=f"arms: {', '.join(arms)}"
                )
    for name, arm in arms.items():
        if arm.backend.kind not in ("reference", "emulation", "requant"):
            raise ConfigError(
                f"arms.{name}.backend.kind is {arm.backend.kind!r}", fix="choose reference, emulation or requant"
            )
        if arm.backend.kind == "requant" and arm.format is None:
            raise ConfigError(
                f"arm {name} requantizes but has no target format",
                fix=f"add +format@arms.{name}.format=mxfp4, or list /format@arms.{name}.format in the experiment",
            )
        if not arm.concurrency_factor > 0:
            raise ConfigError(f"arms.{name}.concurrency_factor is {arm.concurrency_factor}", fix="a number above 0")
        if arm.request_order not in ("forward", "reversed"):
            raise ConfigError(f"arms.{name}.request_order is {arm.request_order!r}", fix="choose forward or reversed")
        if not arm.checkpoint.path and arm.checkpoint.make is None:
            raise ConfigError(f"arm {name} has no checkpoint", fix="give its path, or a make: recipe, in the model")


def _missing_keys(node: Any, where: str = "") -> list[str]:
    """Dotted keys whose value is `???`. (OmegaConf's own search stops at interpolations that lead to one.)"""
    if node == "???":
        return [where]
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [key for name, item in items for key in _missing_keys(item, f"{where}.{name}".lstrip("."))]


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{key} is {value}", fix=f"a whole number of at least {least}")


def _mini_model(name: str) -> str:
    from workbench.mini_models import model_path

    return str(model_path(name))


def _read(kind: type[T], value: Any, where: str) -> T:
    """Build dataclass `kind` from plain data, naming the dotted key of anything that does not fit."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where or 'the configuration'} is {value!r}, expected a mapping",
            fix="see --cfg job for what belongs there" if where else "see --help",
        )
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [str(key) for key in value if key not in fields]
    if unknown:
        place = f"in {where}" if where else "at the top level"
        raise ConfigError(
            f"unknown setting{'s' if len(unknown) > 1 else ''} {place}: {', '.join(sorted(unknown))}",
            fix=f"known here: {', '.join(fields)}",
        )
    absent = [
        name
        for name, f in fields.items()
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if absent:
        raise ConfigError(
            f"missing in {where or 'the configuration'}: {', '.join(absent)}",
            fix="give each a value on the command line; --cfg job shows the whole configuration",
        )
    import typing

    hints = typing.get_type_hints(kind)
    return kind(**{key: _convert(hints[key], item, f"{where}.{key}".lstrip(".")) for key, item in value.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    import types
    import typing

    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return _read(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{where} is {value!r}, expected a list", fix=f"e.g. '{where}=[a,b]'")
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}, expected a mapping", fix=f"e.g. +{where}.key=value")
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if (hint is int and isinstance(value, bool)) or not isinstance(value, hint):
        raise ConfigError(
            f"{where} is {value!r}, expected {hint.__name__}", fix=f"give another: {where}=VALUE (see --cfg job)"
        )
    return value


def resolved_yaml(config: DictConfig) -> str:
    """The configuration with every interpolation resolved, `resume` left out: what a run folder keeps."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("resume", None)
    return OmegaConf.to_yaml(OmegaConf.create(plain))
