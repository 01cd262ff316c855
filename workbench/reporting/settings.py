"""`read_settings(text)`: a run's resolved configuration, config.yaml, as plain data.

PyYAML's C loader where it is built: OmegaConf's own takes about thirty times as long, and what a run writes is resolved
already. Only a text with interpolations is given to OmegaConf.
"""

from __future__ import annotations

import re
from typing import Any

import yaml  # type: ignore[import-untyped]


def read_settings(text: str) -> dict[str, Any]:
    """The mapping. Interpolations stay as they are written where they name a resolver that is not loaded.

    Raises ValueError on what is no YAML, no mapping with the experiment's `name`, or is cut off (its last line has no
    end).
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("it is no mapping of settings")
    if not text.endswith("\n"):
        raise ValueError("it is cut off: its last line has no end")
    if not isinstance(content.get("name"), str):
        raise ValueError("it is cut off, or no run's: the experiment's name is missing")
    return _resolved(text) if "${" in text else content


def _resolved(text: str) -> Any:
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.create(text)
    except Exception as error:  # errors of several unrelated types
        raise ValueError(str(error)) from error
    try:
        return OmegaConf.to_container(content, resolve=True)
    except Exception:
        return OmegaConf.to_container(content, resolve=False)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads scalars as OmegaConf does: dates are text, and 1e-05 is a number. A key that is there twice is refused."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice}", node.start_mark)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
