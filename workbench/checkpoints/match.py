"""Exclude patterns against module names, one meaning for every dialect.

    matches_any("model.layers.0.self_attn.q_proj", ["*self_attn*", "lm_head"])   # True

A pattern covers a module, and everything below it, when it is
- `re:<regex>`: a regex that matches from the start of the name (`re.match`), as compressed-tensors and vLLM read it;
- a glob with `*`, `?` or `[`: it fits the whole name or a parent's (`model.layers.1*` therefore also covers layer 12,
  and `model.layers.*.self_attn` covers `self_attn.q_proj`);
- a dotted name: that module or a parent of it (`x.shared_expert_gate` is not `x.shared_expert`);
- a bare name: a part of the module's name (`gate` is each router, `head` is not `lm_head`).

Producers write names as the checkpoint has them or as a runtime has them, so a leading `model.` does not count,
`model.language_model.` equals `language_model.model.`, a fused name (`qkv_proj`, `gate_up_proj`) stands for its parts
too, and a trailing `.weight` or wrapper suffix `.linear` is dropped. The readers differ in details (fnmatch on the
whole name, substrings, names only); for published lists this one meaning gives what the tensors are.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from workbench.errors import CheckpointError

# Runtimes' names of fused projections -> the projections that checkpoints store.
FUSED_NAMES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "w13": ("w1", "w3"),
}

_FUSED = re.compile(r"(?<![A-Za-z0-9_])(?:" + "|".join(FUSED_NAMES) + r")(?![A-Za-z0-9_])")
_ROOTS = (
    ("model.language_model.", "language_model."),
    ("language_model.model.", "language_model."),
    ("model.", ""),
)
_WILDCARD = re.compile(r"[*?\[]")
_KEPT_MATCHERS = 32
_MOST_REPEATS = 100  # more count as unbounded


def matches(module: str, pattern: str) -> bool:
    """Whether `pattern` covers `module`. Raises CheckpointError for a regex that does not compile."""
    return _cached_matcher((pattern,)).covers(module)


def matches_any(module: str, patterns: Iterable[str]) -> bool:
    """Whether any of `patterns` covers `module`. Fastest with the same tuple again and again, of any length.

    Raises CheckpointError for a regex that does not compile.
    """
    return _matcher_of(patterns).covers(module)


def compile_regex(pattern: str, where: str) -> re.Pattern[str]:
    """Compile `re:<regex>` of a config that may be hostile. `where`: for the message.

    Raises CheckpointError for one that does not compile, and for a repetition within a repetition, whose matching can
    take exponential time.
    """
    fix = "write a Python regex after re:"
    try:
        compiled = re.compile(pattern.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where} {pattern[:80]!r} is no regular expression: {error}", fix=fix) from error
    if _repeats_a_repeat(re._parser.parse(compiled.pattern), inside=False):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{where} {pattern[:80]!r} repeats a repetition, which can take exponential time",
            fix=f"{fix}, with * and + not within one another",
        )
    return compiled


def unmatched_patterns(patterns: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The patterns that cover none of `modules`, in their order."""
    modules = tuple(modules)
    parts = {part for module in modules for part in module.split(".")}
    names = {name for module in modules for name in _parents(_without_root(module))}

    def is_met(pattern: str) -> bool:
        if not is_plain_name(pattern):
            return any(map(_cached_matcher((pattern,)).covers, modules))
        return any((name in parts if "." not in name else _without_root(name) in names) for name in _spellings(pattern))

    return [pattern for pattern in patterns if not is_met(pattern)]


def is_plain_name(pattern: str) -> bool:
    """Whether a pattern is a plain module name: neither regex nor glob."""
    return not pattern.startswith("re:") and _WILDCARD.search(pattern) is None


def plain_name(pattern: str) -> str:
    """The module a plain pattern names, without `.weight` and wrapper suffixes."""
    return pattern.removesuffix(".weight").removesuffix(".linear")


class _Matcher:
    """One test for many patterns. What can be looked up is not tried: names in sets, globs by their literal start or by
    a part that they spell out in full."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._parts: set[str] = set()
        self._names: set[str] = set()
        self._starts: dict[int, dict[str, list[Test]]] = {}  # length -> literal start -> tests of what follows it
        self._globs: dict[str, list[Test]] = {}  # part of a module's name ("": any module) -> tests of the whole name
        self._regexes: list[Test] = []
        for pattern in dict.fromkeys(spelling for p in patterns for spelling in _spellings(p)):
            self._add(pattern)
        self._anywhere = self._globs.pop("", [])

    def covers(self, module: str) -> bool:
        parts = module.split(".")
        if not self._parts.isdisjoint(parts):
            return True
        name = _without_root(module)
        if self._names and not self._names.isdisjoint(_parents(name)):
            return True
        for length, starts in self._starts.items():
            if (tests := starts.get(name[:length])) is not None and _any(tests, name[length:]):
                return True
        if self._globs:
            for part in self._globs.keys() & parts:
                if _any(self._globs[part], module):
                    return True
        if _any(self._anywhere, module):
            return True
        return bool(self._regexes) and any(_any(self._regexes, name) for name in _runtime_names(module))

    def _add(self, pattern: str) -> None:
        if pattern.startswith("re:"):
            self._regexes.append(_compile(pattern))
        elif is_plain_name(pattern):
            (self._names if "." in pattern else self._parts).add(_without_root(pattern))
        else:
            rest = _without_root(pattern)
            start = rest[: _WILDCARD.search(rest).start()]  # type: ignore[union-attr]  # a glob has one
            if any(root.startswith(start) for root, _ in _ROOTS):  # `*x`, `model.*`, `mod*`: not without its root
                self._globs.setdefault(_whole_part(pattern), []).append(_glob_test(pattern))
            else:
                tests = self._starts.setdefault(len(start), {}).setdefault(start, [])
                tests.append(_glob_test(rest[len(start) :]))


Test = Callable[[str], object]


def _any(tests: list[Test], name: str) -> bool:
    for test in tests:  # noqa: SIM110 (any() of a generator takes three times as long)
        if test(name):
            return True
    return False


def _whole_part(glob: str) -> str:
    """A part between dots that every name under `glob` has, "" when it spells out none; a number is the rarest."""
    parts = [] if "[" in glob else [p for p in glob.split(".") if p and _WILDCARD.search(p) is None]
    return max(parts, key=lambda p: (p.isdigit(), len(p)), default="")


def _glob_test(glob: str) -> Test:
    """A test for a name that fits `glob`, or whose parent does."""
    if glob == "*":
        return lambda _: True
    inner = glob[1:-1]
    if glob[0] == "*" == glob[-1] and len(glob) > 2 and _WILDCARD.search(inner) is None:
        return lambda name: inner in name
    body = fnmatch.translate(glob)[:-2]  # without the end of string, \Z or \z
    return re.compile(body + r"(?:\..*)?\Z", re.DOTALL).match


def _compile(pattern: str) -> Test:
    return compile_regex(pattern, "exclude pattern").match


def _repeats_a_repeat(items: Any, *, inside: bool) -> bool:
    """Whether an unbounded repetition lies within another, in a parsed regex or any part of it."""
    if isinstance(items, (tuple, list, re._parser.SubPattern)):  # type: ignore[attr-defined]
        parts = list(items)
        if len(parts) == 3 and isinstance(parts[0], int) and isinstance(parts[1], int):  # least, most, what
            unbounded = parts[1] > _MOST_REPEATS
            return (unbounded and inside) or _repeats_a_repeat(parts[2], inside=inside or unbounded)
        return any(_repeats_a_repeat(part, inside=inside) for part in parts)
    return False


def _spellings(pattern: str) -> list[str]:
    """A pattern without the suffixes that name no module, and once more for each part of a fused name in it."""
    if not pattern.startswith("re:"):
        pattern = plain_name(pattern) if is_plain_name(pattern) else pattern.removesuffix(".weight")
    fused = _FUSED.search(pattern)
    if fused is None:
        return [pattern]
    return [pattern, *(_FUSED.sub(part, pattern, count=1) for part in FUSED_NAMES[fused[0]])]


def _without_root(name: str) -> str:
    """A name without the leading `model.`; `language_model.` stays, in one spelling."""
    for root, kept in _ROOTS:
        if name.startswith(root):
            return kept + name[len(root) :]
    return name


def _runtime_names(module: str) -> tuple[str, ...]:
    """A module under the names that runtimes give it; regexes are written for one of them."""
    name = _without_root(module)
    if not name.startswith("language_model."):
        return (module,)
    return (module, "model." + name, name.replace("language_model.", "language_model.model.", 1))


def _parents(name: str) -> list[str]:
    """The name itself and every module above it."""
    names = []
    while name:
        names.append(name)
        name = name.rpartition(".")[0]
    return names


@functools.lru_cache(maxsize=4096)
def _cached_matcher(patterns: tuple[str, ...]) -> _Matcher:
    return _Matcher(patterns)


# Hashing a tuple of thousands takes longer than matching: it is recognized by its identity, and kept alive here.
_matchers: dict[int, tuple[tuple[str, ...], _Matcher]] = {}


def _matcher_of(patterns: Iterable[str]) -> _Matcher:
    if not isinstance(patterns, tuple):
        return _cached_matcher(tuple(patterns))
    known = _matchers.get(id(patterns))
    if known is None or known[0] is not patterns:
        if len(_matchers) >= _KEPT_MATCHERS:
            _matchers.clear()
        known = _matchers[id(patterns)] = (patterns, _cached_matcher(patterns))
    return known[1]
