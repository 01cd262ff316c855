"""Tensor names as a few patterns with holes for layer and expert: 69,303 names become some ten strings.

    patterns, codes, exceptions = split_names(names, layers, experts)
    # "model.layers.{L}.mlp.experts.{E}.gate_proj.weight"

A name that its pattern does not rebuild exactly is an exception and kept whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MOST_PATTERNS = 254
EXCEPTION = 255


def split_names(
    names: Sequence[str], layers: Sequence[int], experts: Sequence[int]
) -> tuple[list[str], list[int], list[str]]:
    """(patterns, a pattern's index or EXCEPTION for each name, the exceptions in order)."""
    made = [_pattern(*row) for row in zip(names, layers, experts, strict=True)]
    patterns = [p for p, _ in Counter(p for p in made if p is not None).most_common(MOST_PATTERNS)]
    index = {pattern: i for i, pattern in enumerate(patterns)}
    codes = [EXCEPTION if pattern is None else index.get(pattern, EXCEPTION) for pattern in made]
    return patterns, codes, [name for name, code in zip(names, codes, strict=True) if code == EXCEPTION]


def join_name(pattern: str, layer: int, expert: int) -> str:
    """The name that the pattern stands for."""
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))


def _pattern(name: str, layer: int, expert: int) -> str | None:
    if "{" in name:
        return None
    pattern = name
    if layer >= 0:
        pattern = pattern.replace(f".{layer}.", ".{L}.", 1)
    if expert >= 0:
        pattern = pattern.replace(f".{expert}.", ".{E}.", 1)
    return pattern if join_name(pattern, layer, expert) == name else None
