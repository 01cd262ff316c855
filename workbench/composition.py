"""From Hydra's groups in conf/ to one configuration, and a way out of what Hydra refuses.

    config = compose(["experiment=kimi_requant", "model=local", "model.root=/data"])

`compose` is the one way to get a configuration without Hydra's command line (`workbench.run` is the other way);
`workbench.settings` reads it.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from workbench.errors import ConfigError

MOST_POLICY_BYTES = 1 << 20
_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|0[xXbB][0-9a-fA-F_]+|[0-9][0-9_]*(:[0-9]{1,2})+(\.[0-9_]*)?)")
"""Octal, hexadecimal, binary and sexagesimal numbers of YAML 1.1."""


def register_resolvers() -> None:
    """Resolvers of conf/: `mini_model:NAME` is the folder of a shipped mini model."""
    OmegaConf.register_new_resolver("mini_model", _mini_model, replace=True)


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose conf/ with Hydra overrides, without Hydra's command line. Raises ConfigError."""
    import hydra

    register_resolvers()
    try:
        with hydra.initialize_config_module("workbench.conf", version_base="1.3"):
            return hydra.compose("config", overrides=list(overrides))
    except Exception as error:
        if not is_refusal(error):
            raise
        raise ConfigError(f"could not compose the configuration: {error}", fix=way_out(error)) from error


def resolve(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain data with every interpolation resolved. Raises ConfigError."""
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        fix = f"give {_where_written(config, error) or 'it'} another value; --cfg job shows every key"
        raise ConfigError(f"could not resolve the configuration: {error}", fix=fix) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def resolved_yaml(config: DictConfig) -> str:
    """The configuration with every interpolation resolved, `resume` left out: what a run folder keeps."""
    plain = resolve(config)
    plain.pop("resume", None)
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def with_values(config: DictConfig, values: dict[str, Any]) -> DictConfig:
    """The configuration with some settings decided anew."""
    merged = OmegaConf.merge(config, values)
    assert isinstance(merged, DictConfig)
    return merged


def group_choices(group: str) -> list[str]:
    """Names of the files in one group of conf/; of the groups themselves for ""."""
    folder = _conf() / group
    if not group:
        return sorted(path.name for path in folder.iterdir() if any(path.glob("*.yaml")))
    return sorted(path.stem for path in folder.glob("*.yaml"))


def model_defaults(name: str) -> dict[str, Any]:
    """What a file of conf/model itself says, references as written; of `local`, any model's, where there is none."""
    own = _conf() / "model" / f"{name}.yaml"
    loaded = OmegaConf.to_container(OmegaConf.load(own if own.is_file() else _conf() / "model" / "local.yaml"))
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def policy_file(name: str) -> Path:
    """A gate policy by its name in conf/gate, or a YAML file's own path. Raises ConfigError naming the choices."""
    shipped = _conf() / "gate" / f"{name}.yaml"
    path = shipped if shipped.is_file() else Path(name)
    if name and path.exists() and not path.is_dir():
        return path
    what = f"the policy {name} is a folder" if name and path.is_dir() else f"there is no gate policy {name!r}"
    raise ConfigError(what, fix=f"give a YAML file, or one of: {', '.join(group_choices('gate'))}")


def read_policy_file(name: str) -> dict[str, Any]:
    """The settings of a gate policy, by name or path (a pipe will do). Raises ConfigError naming the file."""
    path = policy_file(name)
    fix = "write it like conf/gate/smoke.yaml: a mapping with the keys margin_pp, gated, …"
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_POLICY_BYTES)
        if len(content) == MOST_POLICY_BYTES:
            raise ConfigError(f"the policy {path} is larger than {MOST_POLICY_BYTES >> 20} MiB", fix=fix)
        text = content.decode()
        _check_yaml(text, path)
        policy = OmegaConf.to_container(OmegaConf.create(text), resolve=True) if text.strip() else None
    except ConfigError:
        raise
    except Exception as error:  # YAML's and OmegaConf's errors share no base
        why = " ".join(str(error).split())[:300] or "it is no mapping of settings"
        raise ConfigError(f"the policy {path} cannot be read: {why}", fix=fix) from error
    if not policy:
        raise ConfigError(f"the policy {path} is empty", fix=fix)
    if not isinstance(policy, dict):
        raise ConfigError(f"the policy {path} is not a mapping of settings", fix=fix)
    return {str(key): value for key, value in policy.items()}


def _check_yaml(text: str, path: Path) -> None:
    """Refuse what YAML 1.1 reads as something else than it says (010 is 8, 1:30 is 90), and references, by which a
    small file may grow without end. Raises ConfigError.
    """
    import yaml  # type: ignore[import-untyped]

    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"the policy {path}, line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}: a reference (*{event.anchor}) is not read", fix="write its value out")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _OTHER_BASE.fullmatch(event.value):
            raise ConfigError(
                f"{where}: {event.value[:40]} is a number of another base in YAML (010 is 8, 1:30 is 90)",
                fix="write it as a decimal number without leading zeros, or in quotes",
            )


# ---- what Hydra refuses ----------------------------------------------------------------------------------------------


def is_refusal(error: Exception) -> bool:
    """Whether Hydra or OmegaConf refused an override: their own types, or a plain error raised in their code."""
    from hydra.errors import HydraException

    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    if isinstance(error, OSError):  # of a stream or a file, wherever it was raised
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(part in frames[-1].filename for part in ("/hydra/", "/omegaconf/", "/antlr4/"))


def way_out(error: Exception) -> str:
    """What to write instead of an override that was refused: the choices or the known keys where the error has them."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return (
            f"write {error.override!r} as KEY=VALUE, in quotes for the shell where the value has brackets, braces,"
            " commas or spaces, e.g. 'eval=[gsm8k_mini,mmlu_pro_mini]'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        choices = sorted(error.options or group_choices(group))
        return f"choose for {group}: {_closest_first(name, choices)}" if group and choices else "see --help"
    unknown = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(unknown, (ConfigAttributeError, ConfigKeyError)) and isinstance(unknown.parent_node, DictConfig):
        place = (unknown.full_key or "").rpartition(".")[0]
        known = [str(key) for key in unknown.parent_node]
        if known:
            listed = _closest_first(str(unknown.key), known)
            return (
                f"keys {f'in {place}' if place else 'here'}: {listed}; an optional one that is not set needs the plus"
            )
        return f"{place} is an open mapping: add a key of your own with a plus, +{unknown.full_key}=VALUE"
    return f"--cfg job shows every key, --help the choices of each group: {', '.join(group_choices(''))}"


def _where_written(config: DictConfig, error: OmegaConfBaseException) -> str:
    """The key that holds the reference which leads nowhere; the error may name another that refers to that key."""
    missing = re.search(r"Interpolation key '([^']+)' not found", str(error))
    places: list[tuple[str, Any]] = [("", OmegaConf.to_container(config, resolve=False))]
    while missing and places:
        where, node = places.pop()
        if isinstance(node, str) and f"${{{missing[1]}" in node:
            return where
        items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        places += [(f"{where}.{name}".lstrip("."), item) for name, item in items]
    return str(error.full_key or "")


def _closest_first(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1)
    return ", ".join([*close, *(choice for choice in choices if choice not in close)])


def _conf() -> Path:
    return Path(str(files("workbench.conf")))


def _mini_model(name: str) -> str:
    from workbench.mini_models import model_path

    return str(model_path(name))
