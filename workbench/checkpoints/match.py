"""Exclude patterns against module names, one meaning for every dialect.

    matches_any("model.layers.0.self_attn.q_proj", ["*self_attn*", "lm_head"])   # True

A pattern is one of
- `re:<regex>`: matched from the start of the name (`re.match`), as compressed-tensors and Quark do;
- a glob with `*`, `?` or `[`: matched against the whole name (`model.layers.1*` therefore also covers layer 12);
- a plain name: that module and everything below it (`vision_tower` covers `vision_tower.a.b`; `head` is not `lm_head`).
A trailing `.weight` is ignored, and so is a wrapper suffix `.linear` that some producers record.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable

from workbench.errors import CheckpointError


def matches(module: str, pattern: str) -> bool:
    """Whether `pattern` covers `module`. Raises CheckpointError for a regex that does not compile."""
    return _matcher((pattern,))(module)


def matches_any(module: str, patterns: Iterable[str]) -> bool:
    """Whether any of `patterns` covers `module`. Raises CheckpointError for a regex that does not compile."""
    return _matcher(tuple(patterns))(module)


def is_plain_name(pattern: str) -> bool:
    """Whether a pattern is a plain module name: neither regex nor glob."""
    return not pattern.startswith("re:") and not any(c in pattern for c in "*?[")


def plain_name(pattern: str) -> str:
    """The module a plain pattern names, without `.weight` and wrapper suffixes."""
    return pattern.removesuffix(".weight").removesuffix(".linear")


@functools.lru_cache(maxsize=4096)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """One test for many patterns: names by looking up the module and its parents in a set, the rest as one regex."""
    names = {plain_name(p) for p in patterns if is_plain_name(p)}
    regexes = [_regex(p) for p in patterns if not is_plain_name(p)]
    regex = re.compile("|".join(f"(?:{r})" for r in regexes)) if regexes else None

    def covers(module: str) -> bool:
        if regex is not None and regex.match(module):
            return True
        while names and module:
            if module in names:
                return True
            module = module.rpartition(".")[0]
        return False

    return covers


def _regex(pattern: str) -> str:
    if not pattern.startswith("re:"):
        return fnmatch.translate(pattern.removesuffix(".weight"))
    try:
        re.compile(pattern[3:])
    except re.error as error:
        raise CheckpointError(
            f"exclude pattern {pattern!r} is no regular expression: {error}", fix="write a Python regex after re:"
        ) from error
    return pattern[3:]
