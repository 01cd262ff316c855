"""The composed configuration as typed, frozen settings.

    settings = read_settings(compose(["experiment=kimi_requant"]))

Hydra composes `conf/` (`workbench.composition`); this module turns the result into dataclasses and refuses what it does
not know: a key that nobody reads is a setting that silently does nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from workbench.analysis import compute
from workbench.composition import resolve
from workbench.errors import ConfigError

STAGES = ("prepare", "lint", "analyze", "evaluate", "compare", "gate", "report")
COMPUTE = compute.KINDS
BACKENDS = ("reference", "emulation", "requant", "stock")
MOST = 1_000_000  # of whatever is counted: above it lies a typing mistake
MOST_SEED = (1 << 32) - 1  # numpy's
BESIDE_ARMS = (".facts", ".audit", ".numerics")  # server/<arm>.json has such files beside it
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecipeRule:
    """One line of a recipe, as in the files of conf/recipe: what the modules that `match` covers become."""

    match: str
    format: str
    rule: str | None = None
    block: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """A recipe that is planned first: stored bits a weight, and the formats to choose among (`workbench plan`)."""

    bits: float
    formats: tuple[str, ...]
    granularity: str = "layer"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a missing checkpoint is made, from the model's checkpoint named `source`. calibrate: write input_scale.

    rules: decide before `format` does, which then may be null; the first that covers a module counts. plan: instead of
    rules, those of a plan, made on captured inputs. note: as recipes have it; it changes nothing.
    """

    source: str
    format: str | None
    dialect: str
    exclude: tuple[str, ...] = ()
    rule: str | None = None
    rules: tuple[RecipeRule, ...] = ()
    shared_globals: bool = True
    calibrate: bool = False
    plan: PlanSettings | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """A checkpoint of the model: at `path`, or made by `make` when path is empty."""

    path: str | None = None
    make: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    kind: str
    activations: str = "auto"
    compat: str = "none"


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    name: str
    rule: str | None = None


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """One arm: a checkpoint, a backend, a KV dtype. concurrency_factor scales the engine's concurrency for this arm.
    optional: a server that cannot be started is shown and does not end the run."""

    checkpoint: CheckpointSettings
    backend: BackendSettings
    format: FormatSettings | None = None
    kv_cache_dtype: str = "auto"
    base_url: str = ""
    request_order: str = "forward"
    concurrency_factor: float = 1.0
    exclude: tuple[str, ...] | None = None
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    name: str
    root: str
    tokenizer: str
    max_model_len: int
    checkpoints: dict[str, CheckpointSettings]
    exclude: tuple[str, ...] = ()
    api: str = "completions"
    chat_template: bool = False
    thinking: str = ""
    thinking_budget: int = 0


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
    numerics: bool = False
    baselines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Two arms whose errors are set against each other; direct: the second format straight from the source."""

    first: str
    second: str
    direct: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """sample: about so many matrices, stratified (null: all). controls: the same chain on synthetic weights, too.
    device: of the weights' pass: cpu, cuda, cuda:1."""

    pairs: tuple[PairSettings, ...]
    capture: bool
    prompts: int
    reservoir_rows: int
    bootstrap: int
    sample: int | None = None
    controls: bool = False
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class LintSettings:
    allow: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """kind: where weights are measured, local or ray. threads: of this process (null: all). address, cpus: of Ray: the
    cluster (null: $RAY_ADDRESS, else one that is started here), and the processors of a task."""

    kind: str = "local"
    threads: int | None = None
    address: str | None = None
    cpus: int = 1


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class ServingCostSettings:
    """What is measured of serving after the answers: a preset of `bench.serve.PRESETS`, or "off".

    baseline: the arm that ratios are taken to (null: the experiment's).
    """

    preset: str = "off"
    baseline: str | None = None
    repeat: int = 10
    margin: float = 0.01
    together: bool = True


@dataclass(frozen=True, kw_only=True)
class KldSettings:
    """KL divergence of the arms' next-token distributions: windows (0: none) of tokens, the top_k told of each, on the
    text of a file or on the tasks' training prompts."""

    windows: int = 16
    tokens: int = 256
    top_k: int = 20
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    out: str
    cache: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One experiment, whole. `gate` and each task of `eval` stay mappings: their rooms own and check their keys.

    source, first: short for two checkpoints' paths, in experiments whose arms refer to them.
    """

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
    report: ReportSettings
    compute: ComputeSettings
    serving_cost: ServingCostSettings = field(default_factory=ServingCostSettings)
    kld: KldSettings = field(default_factory=KldSettings)
    resume: str | None = None
    source: str | None = None
    first: str | None = None


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
    settings = _read(Settings, resolve(config), "")
    _check(settings)
    return _with_baselines(settings)


def check_name(what: str, name: str) -> None:
    """Raise ConfigError unless `name` can be one part of a path: letters, digits, dot, dash, underscore."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(
            f"{what} is {name!r}, which cannot name a file",
            fix="use letters, digits, dot, dash and underscore, at most 100, not starting with a dot",
        )


def check_arm_name(what: str, name: str) -> None:
    """Raise ConfigError as `check_name` does, and for an arm whose files would be taken for another arm's."""
    check_name(what, name)
    if name.endswith(BESIDE_ARMS):
        raise ConfigError(
            f"{what} is {name!r}: server/{name}.json would be taken for a file of the arm {name.rpartition('.')[0]!r}",
            fix=f"choose a name that does not end in {', '.join(BESIDE_ARMS)}",
        )


def _check(settings: Settings) -> None:
    arms = settings.arms
    check_name("name", settings.name)
    check_name("model.name", settings.model.name)
    for checkpoint_name in settings.model.checkpoints:
        check_name(f"model.checkpoints.{checkpoint_name}", checkpoint_name)
    for arm_name in arms:
        check_arm_name(f"arms.{arm_name}", arm_name)
    for key in ("out", "cache"):
        if not getattr(settings.paths, key):
            raise ConfigError(f"paths.{key} is empty", fix=f"name a folder, e.g. paths.{key}=reports")
    _within("seed", settings.seed, 0, MOST_SEED)
    _within("engine.concurrency", settings.engine.concurrency, 1, MOST)
    _within("engine.tensor_parallel_size", settings.engine.tensor_parallel_size, 1, MOST)
    _within("analysis.prompts", settings.analysis.prompts, 1, MOST)
    _within("analysis.reservoir_rows", settings.analysis.reservoir_rows, 1, MOST)
    _within("kld.windows", settings.kld.windows, 0, MOST)
    _within("kld.tokens", settings.kld.tokens, 2, MOST)
    _within("kld.top_k", settings.kld.top_k, 1, MOST)
    _within("analysis.bootstrap", settings.analysis.bootstrap, 1, MOST)
    if settings.analysis.sample is not None:
        _within("analysis.sample", settings.analysis.sample, 1, MOST)
    own = settings.model.checkpoints.get("source")
    if settings.source and not settings.first and (own is None or settings.source != own.path):
        raise ConfigError(
            f"source={settings.source} is given alone; its first quantization would be made from another source",
            fix="give both: source=FOLDER first=FOLDER (or hf://org/name)",
        )
    if settings.compute.threads is not None:
        _within("compute.threads", settings.compute.threads, 1, os.cpu_count() or 1)
    _within("compute.cpus", settings.compute.cpus, 1, MOST)
    if settings.compute.kind not in COMPUTE:
        raise ConfigError(
            f"compute.kind is {settings.compute.kind!r}", fix=f"choose one: compute={' or compute='.join(COMPUTE)}"
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
    if settings.serving_cost.baseline not in (None, *arms):
        raise ConfigError(
            f"serving_cost.baseline {settings.serving_cost.baseline!r} is not among the arms",
            fix=f"serving_cost.baseline=null (then {settings.baseline}), or one of {', '.join(arms)}",
        )
    unknown = [stage for stage in settings.stages if stage not in STAGES]
    if unknown:
        raise ConfigError(f"unknown stages: {', '.join(unknown)}", fix=f"choose among {', '.join(STAGES)}")
    for pair in settings.analysis.pairs:
        for named in (pair.first, pair.second, pair.direct):
            if named is not None and named not in arms:
                raise ConfigError(
                    f"analysis.pairs names the arm {named!r}, which does not exist", fix=f"arms: {', '.join(arms)}"
                )
    for name, arm in arms.items():
        if arm.backend.kind not in BACKENDS:
            raise ConfigError(
                f"arms.{name}.backend.kind is {arm.backend.kind!r}", fix=f"choose one of {', '.join(BACKENDS)}"
            )
        if arm.backend.compat not in ("none", "vllm"):
            raise ConfigError(f"arms.{name}.backend.compat is {arm.backend.compat!r}", fix="choose none or vllm")
        if arm.backend.compat != "none" and arm.backend.kind != "emulation":
            raise ConfigError(
                f"arms.{name}.backend.compat={arm.backend.compat} is emulation's, the arm runs {arm.backend.kind}",
                fix=f"arms.{name}.backend.compat=none",
            )
        if arm.backend.kind == "requant" and arm.format is None:
            raise ConfigError(
                f"arm {name} requantizes but has no target format",
                fix=f"add +format@arms.{name}.format=mxfp4, or list /format@arms.{name}.format in the experiment",
            )
        if not 0 < arm.concurrency_factor <= MOST:
            raise ConfigError(
                f"arms.{name}.concurrency_factor is {arm.concurrency_factor}", fix=f"a number above 0, at most {MOST}"
            )
        if arm.request_order not in ("forward", "reversed"):
            raise ConfigError(f"arms.{name}.request_order is {arm.request_order!r}", fix="choose forward or reversed")
        if not arm.checkpoint.path and arm.checkpoint.make is None:
            raise ConfigError(f"arm {name} has no checkpoint", fix="give its path, or a make: recipe, in the model")


def _with_baselines(settings: Settings) -> Settings:
    """The arms of `engine.baselines` added: for stock an `<arm>_stock` for every checkpoint, named after its first arm.

    Optional: vLLM may have no path of its own for a checkpoint. Raises ConfigError for an unknown baseline, an engine
    that is not started here, or an arm of that name that is there already.
    """
    unknown = [name for name in settings.engine.baselines if name != "stock"]
    if unknown:
        raise ConfigError(f"engine.baselines names {unknown[0]!r}", fix="choose: engine.baselines=[stock]")
    if not settings.engine.baselines:
        return settings
    if settings.engine.kind != "vllm":
        raise ConfigError(
            "engine.baselines=[stock] starts vLLM with our plugin switched off; an external engine is not started here",
            fix="engine=vllm, or give that server as an arm of its own: arms.NAME.base_url=URL",
        )
    arms, seen = dict(settings.arms), {a.checkpoint for a in settings.arms.values() if a.backend.kind == "stock"}
    for name, arm in settings.arms.items():
        if arm.checkpoint in seen:
            continue
        seen.add(arm.checkpoint)
        if f"{name}_stock" in arms:
            raise ConfigError(f"arm {name}_stock is there already", fix="rename it, or drop engine.baselines")
        arms[f"{name}_stock"] = ArmSettings(
            checkpoint=arm.checkpoint,
            backend=BackendSettings(kind="stock"),
            kv_cache_dtype=arm.kv_cache_dtype,
            concurrency_factor=arm.concurrency_factor,
            optional=True,
        )
    return dataclasses.replace(settings, arms=arms)


def _missing_keys(node: Any, where: str = "") -> list[str]:
    """Dotted keys whose value is `???`. (OmegaConf's own search stops at interpolations that lead to one.)"""
    if node == "???":
        return [where]
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [key for name, item in items for key in _missing_keys(item, f"{where}.{name}".lstrip("."))]


def _within(key: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{key} is {value}", fix=f"a whole number from {least} to {most}")


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
    hints = typing.get_type_hints(kind)
    plain_first = sorted(
        value.items(), key=lambda item: isinstance(item[1], Mapping)
    )  # a fault is named where it is set
    return kind(**{key: _convert(hints[key], item, f"{where}.{key}".lstrip(".")) for key, item in plain_first})


def _convert(hint: Any, value: Any, where: str) -> Any:
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
        if args[1] is str:  # an environment: a number is as good as its digits
            value = {key: str(item) if _is_number(item) else item for key, item in value.items()}
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and _is_number(value):
        return float(value)
    if hint is str and not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}, expected text", fix=_quoted(where, value))
    if (hint is int and isinstance(value, bool)) or not isinstance(value, hint):
        raise ConfigError(
            f"{where} is {value!r}, expected {hint.__name__}", fix=f"give another: {where}=VALUE (see --cfg job)"
        )
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _quoted(where: str, value: Any) -> str:
    """How to write what is meant as text and reads as something else, on Hydra's command line."""
    if not isinstance(value, (bool, int, float)):
        return f"give another: {where}=VALUE (see --cfg job)"
    key, _, element = where.partition("[")
    text = f'"{str(value).lower()}"'
    return f"for text quote it: '{key}={f'[{text}]' if element else text}'"
