"""The policy: what may be lost, by whom, and what is needed as evidence. Read from `conf/gate/*.yaml`.

    name: smoke
    note: few items and a wide margin; it finds broken arms, not small losses
    margin_pp: {default: 10.0, gsm8k_mini: 10.0}   # percentage points, per task; or one number for all
    gated: [nvfp4, nvfp4_to_mxfp4]                 # the verdict is about these arms
    reported: [mxfp4_direct]                       # shown with the same figures, never part of the verdict
    lint: {allow: [input_scale_missing]}           # ids of lint checks whose errors are accepted
    weights: {min_sqnr_db: 10.0, max_below_median_db: 6.0}    # every matrix against the source; null = unchecked
    evidence: {chance: {mmlu_pro_mini: 0.1}, max_empty_share: 0.05, max_truncated_share: 0.1, min_items: 1}

An unknown key is an error: a policy with a typo would gate something else than its author believes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A checked policy. Margins in percentage points, shares as proportions, SQNR in dB; None = not checked."""

    name: str
    gated: tuple[str, ...]
    margin_pp: dict[str, float]
    note: str = ""
    reported: tuple[str, ...] = ()
    lint_allow: tuple[str, ...] = ()
    min_sqnr_db: float | None = None
    max_below_median_db: float | None = None
    chance: dict[str, float] = field(default_factory=dict)
    max_empty_share: float | None = None
    max_truncated_share: float | None = None
    min_items: int = 1

    def margin(self, task: str) -> float:
        """The margin of a task in percentage points."""
        return self.margin_pp.get(task, self.margin_pp["default"])


def read_policy(settings: Mapping[str, Any]) -> Policy:
    """Check a policy mapping. Raises ConfigError naming the key, what was found and what is known."""
    _known(settings, ("name", "note", "margin_pp", "gated", "reported", "lint", "weights", "evidence"), "gate")
    lint = _section(settings, "lint", ("allow",))
    weights = _section(settings, "weights", ("min_sqnr_db", "max_below_median_db"))
    evidence = _section(settings, "evidence", ("chance", "max_empty_share", "max_truncated_share", "min_items"))
    gated = _names(settings.get("gated"), "gate.gated")
    reported = _names(settings.get("reported"), "gate.reported")
    if not gated:
        raise ConfigError(
            "gate.gated names no arm: nothing would be judged", fix="list the arms that the verdict is about"
        )
    for arm in gated:
        if arm in reported:
            raise ConfigError(f"arm {arm!r} is both in gate.gated and in gate.reported", fix="keep it in one of them")
    min_items = evidence.get("min_items", 1)
    if isinstance(min_items, bool) or not isinstance(min_items, int) or min_items < 1:
        raise ConfigError(f"gate.evidence.min_items={min_items!r}", fix="a whole number of at least 1")
    return Policy(
        name=str(settings.get("name") or "unnamed"),
        note=str(settings.get("note") or ""),
        gated=gated,
        reported=reported,
        margin_pp=_margins(settings.get("margin_pp")),
        lint_allow=_names(lint.get("allow"), "gate.lint.allow"),
        min_sqnr_db=_number(weights.get("min_sqnr_db"), "gate.weights.min_sqnr_db"),
        max_below_median_db=_number(weights.get("max_below_median_db"), "gate.weights.max_below_median_db", low=0.0),
        chance=_chances(evidence.get("chance")),
        max_empty_share=_number(evidence.get("max_empty_share"), "gate.evidence.max_empty_share", 0.0, 1.0),
        max_truncated_share=_number(evidence.get("max_truncated_share"), "gate.evidence.max_truncated_share", 0.0, 1.0),
        min_items=min_items,
    )


def _known(mapping: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in mapping:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}", fix=f"{hint}known keys: {', '.join(known)}")


def _section(settings: Mapping[str, Any], key: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    section = settings.get(key)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"gate.{key}={section!r}", fix=f"a mapping with the keys {', '.join(known)}")
    _known(section, known, f"gate.{key}")
    return section


def _names(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}={value!r}", fix="a list of names, e.g. [nvfp4]")
    return tuple(value)


def _number(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{where}={value!r}", fix=f"a number from {low:g} to {high:g}, or null for no check")
    return float(value)


def _margins(value: Any) -> dict[str, float]:
    fix = "percentage points above 0: one number, or a mapping with `default` and task names"
    if isinstance(value, Mapping):
        margins = dict(value)
    else:
        margins = {"default": value}
    if "default" not in margins:
        raise ConfigError("gate.margin_pp has no `default`", fix=fix)
    for task, margin in margins.items():
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0.0 < margin <= 100.0:
            raise ConfigError(f"gate.margin_pp ({task}) is {margin!r}", fix=fix)
    return {str(task): float(margin) for task, margin in margins.items()}


def _chances(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"gate.evidence.chance={value!r}", fix="a mapping of task names to a guesser's score, e.g. {mmlu_pro: 0.1}"
        )
    return {str(task): _number(share, f"gate.evidence.chance.{task}", 0.0, 1.0) or 0.0 for task, share in value.items()}
