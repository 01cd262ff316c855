"""Recipes: which module of a checkpoint becomes which format. Ordered rules; the first that covers a module decides.

    recipe = read_recipe("kimi_k2_6_nvfp4")             # by name from conf/recipe, or a YAML file's path
    recipe.choose("model.layers.1.self_attn.q_proj")    # Rule(match="*self_attn*", format="keep", ...)

A recipe file:

    note: Routed experts in NVFP4, attention in block FP8, the rest as it is.
    rules:
      - {match: "*self_attn*", format: fp8_block, block: [128, 128]}
      - {match: "*experts.*", format: nvfp4, rule: amax}
      - {match: "*", format: keep}

match: a pattern of `match.py` (name, glob, `re:` regex). format: a number format; `bf16` or `f32`: unquantized in that
dtype; `keep`: as it is in the source. rule: the format's scale rule. block: [rows, columns] that share a scale, where
the format leaves them open. A plain name may point to a matrix outside the decoder layers (`lm_head`); patterns cover
the linear layers within them only, so that `*` never quantizes a router, an embedding or a vision tower.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError, ConfigError, FormatError
from workbench.formats import FORMATS, get_format

from .match import is_plain_name, matches, matches_any, plain_name

KEEP = "keep"
DENSE_FORMATS = ("bf16", "f32")
_KEYS = ("match", "format", "rule", "block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One line of a recipe. format: a row of FORMATS, "bf16", "f32", "keep", or "" (unquantized, whatever dtype it has:
    what an exclude pattern asks for). where: file and number, for messages."""

    match: str
    format: str
    rule: str | None = None
    block: tuple[int, int] | None = None
    where: str = ""

    @property
    def quantizes(self) -> bool:
        return self.format in FORMATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Ordered rules under a name. A module that none covers stays unquantized."""

    name: str = ""
    rules: tuple[Rule, ...] = ()

    def choose(self, module: str) -> Rule | None:
        """The first rule that covers `module`, or one beside it that decides the same."""
        return next((rule for patterns, rule in _runs(self.rules) if matches_any(module, patterns)), None)

    def named_modules(self) -> set[str]:
        """Modules that a quantizing rule names one by one."""
        return {plain_name(r.match) for r in self.rules if r.quantizes and is_plain_name(r.match)}

    def formats(self) -> tuple[str, ...]:
        """Number formats in use, in order."""
        return tuple(dict.fromkeys(rule.format for rule in self.rules if rule.quantizes))


def read_recipe(source: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Recipe:
    """A recipe by its name in conf/recipe, from a YAML file, or from the same structure as a mapping (or its rules).

    Raises ConfigError naming file and rule number for an unknown key, format, scale rule or block, and for a pattern
    that is no regular expression.
    """
    if isinstance(source, (str, Path)):
        path = recipe_file(str(source))
        name, where, content = path.stem, str(path), _load_yaml(path)
    else:
        name, where = "", "recipe"
        content = source if isinstance(source, Mapping) else {"rules": source}
    if not isinstance(content, Mapping) or not set(content) <= {"note", "rules"}:
        raise ConfigError(f"{where} is no recipe: expected `rules:` and, if you like, `note:`", fix=_EXAMPLE)
    rows = content.get("rules")
    if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)) or not rows:
        raise ConfigError(f"{where} has no list of rules", fix=_EXAMPLE)
    return Recipe(name=name, rules=tuple(_read_rule(row, f"{where}, rule {n}") for n, row in enumerate(rows, start=1)))


def recipe_file(name: str) -> Path:
    """A recipe by its name in conf/recipe, or a YAML file's own path. Raises ConfigError naming the choices."""
    shipped = Path(str(files("workbench.conf"))) / "recipe"
    for path in (shipped / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    raise ConfigError(f"there is no recipe {name!r}", fix=f"give a YAML file, or one of: {names}")


def combine(
    recipe: Recipe | None,
    *,
    format: str | None,
    rule: str | None = None,
    block: tuple[int, int] | None = None,
    exclude: Iterable[str] = (),
    include: Iterable[str] = (),
) -> Recipe:
    """One recipe from all that a command says: excludes first, then the recipe's rules, then `format` for whatever
    `include` covers (everything by default).

    Raises ConfigError when nothing says what to quantize to, or a part could never decide.
    """
    exclude, include = tuple(exclude), tuple(include)
    rules = [Rule(match=pattern, format="", where="--exclude") for pattern in exclude]
    rules += recipe.rules if recipe is not None else ()
    if format is None:
        if recipe is None:
            raise ConfigError("neither a format nor a recipe is given", fix="--format NAME, or --recipe NAME")
        if include or rule is not None or block is not None:
            raise ConfigError(
                "--include, --scale-rule and --block say how --format is used, and it is not given",
                fix="add --format, or write them into the recipe's rules",
            )
        return _check_purpose(Recipe(name=recipe.name, rules=tuple(rules)))
    if recipe is not None and any(r.match in ("*", "re:.*") for r in recipe.rules):
        raise ConfigError(
            f"the recipe {recipe.name} decides for every module; --format {format} would change nothing",
            fix="leave --format out, or the recipe's last rule",
        )
    own = Rule(match="*", format=format, rule=rule, block=block, where="--format")
    _check_rule(own)
    for pattern in include or ("*",):
        rules.append(Rule(match=pattern, format=format, rule=rule, block=block, where="--format"))
    whole = Recipe(name=recipe.name if recipe is not None else "", rules=tuple(rules))
    return whole if recipe is None else _check_purpose(whole)


def _check_purpose(recipe: Recipe) -> Recipe:
    if not recipe.formats():
        raise ConfigError(
            f"the recipe {recipe.name} quantizes nothing",
            fix="give a rule a number format; to decode a whole checkpoint, --format bf16 without a recipe",
        )
    return recipe


@functools.lru_cache(maxsize=8)
def _runs(rules: tuple[Rule, ...]) -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """Neighbours that decide the same, their patterns together: an exclude list can have thousands."""
    runs = itertools.groupby(rules, key=lambda r: (r.format, r.rule, r.block))
    return tuple((tuple(r.match for r in run), run[0]) for run in (tuple(rows) for _, rows in runs))


_EXAMPLE = 'e.g. rules: [{match: "*self_attn*", format: keep}, {match: "*", format: nvfp4}]'


def _load_yaml(path: Path) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # YAML's and OmegaConf's errors share no base
        raise ConfigError(f"the recipe {path} cannot be read: {error}", fix=_EXAMPLE) from error


def _read_rule(row: Any, where: str) -> Rule:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is {row!r}, expected a mapping", fix=_EXAMPLE)
    unknown = [str(key) for key in row if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where} has unknown keys: {', '.join(unknown)}", fix=f"known: {', '.join(_KEYS)}")
    for key in ("match", "format"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise ConfigError(f"{where} has no {key}", fix=_EXAMPLE)
    if row.get("rule") is not None and not isinstance(row["rule"], str):
        raise ConfigError(f"{where} has rule {row['rule']!r}, expected a name", fix=_EXAMPLE)
    rule = Rule(
        match=row["match"],
        format=row["format"],
        rule=row.get("rule"),
        block=_read_block(row.get("block"), where),
        where=where,
    )
    _check_rule(rule)
    return rule


def _read_block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(sizes) != 2 or not all(type(size) is int and size >= 0 for size in sizes):
        raise ConfigError(f"{where} has block {value!r}", fix="give [rows, columns], e.g. [1, 128] or [128, 128]")
    return sizes[0], sizes[1]


def _check_rule(rule: Rule) -> None:
    """Raise ConfigError for a format, scale rule, block or pattern that cannot be."""
    try:
        matches("", rule.match)
        if rule.format in (*DENSE_FORMATS, KEEP):
            if rule.rule is not None or rule.block is not None:
                raise ConfigError(f"{rule.format} has no scale rule and no block", fix="leave them out")
            return
        if rule.format not in FORMATS:
            raise ConfigError(
                f"unknown format {rule.format!r}", fix=f"choose one of: {', '.join((*FORMATS, *DENSE_FORMATS, KEEP))}"
            )
        spec = get_format(rule.format)
        spec.rule(rule.rule)
        spec.resolve_block(rule.block)
    except (CheckpointError, ConfigError, FormatError) as error:
        message = f"{rule.where}: {error.message}" if rule.where else error.message
        raise ConfigError(message, fix=error.fix) from error
