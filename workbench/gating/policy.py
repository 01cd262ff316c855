"""The policy: what may be lost, by whom, and what is needed as evidence. Read from `conf/gate/*.yaml`.

    name: smoke
    note: few items and a wide margin; it finds broken arms, not small losses
    margin_pp: {default: 10.0, gsm8k_mini: 10.0}   # percentage points, per task; or one number for all
    correction: holm                               # over an arm's tasks, for "fail"; or none
    tiers: {default: critical, mmlu: supporting, serving: advisory}    # tasks, and the words weights and serving
    gated: [nvfp4, nvfp4_to_mxfp4]                 # the verdict is about these arms
    reported: [mxfp4_direct]                       # shown with the same figures, never part of the verdict
    lint: {allow: [input_scale_missing]}           # ids of lint checks whose errors are accepted
    weights: {min_sqnr_db: 10.0, max_below_median_db: 6.0, min_correlation: 0.95, max_error_correlation: 0.3,
              equal_bytes: true}                   # every matrix against the source; null = unchecked
    serving: {max_ratio: {load_s: 2.0, weight_bytes: 0.4}, max: {ready_s: 300}}    # of the baseline arm's, absolute
    thresholds: [{task: gsm8k, filter: strict-match, metric: exact_match, value: 0.95, tolerance: 0.02}]  # unpaired
    evidence: {chance: {mmlu_pro_mini: 0.1}, max_empty_share: 0.05, max_truncated_share: 0.1, max_failed_share: 0.0,
               min_items: 1}

An unknown key is an error: a policy with a typo would gate something else than its author believes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import ConfigError

CORRECTIONS = ("holm", "none")
TIERS = ("critical", "supporting", "advisory")
# Of serving_cost.json, repeated and with intervals; the others are one measurement each.
LATENCY_KEYS = ("ttft_mean_ms", "tpot_mean_ms", "itl_mean_ms", "e2el_mean_ms", "s_per_output_token")
SERVING_KEYS = ("ready_s", "load_s", "peak_rss_bytes", "weight_bytes", "evaluation_s", *LATENCY_KEYS)


_MOST = 1e15  # no limit of a policy is larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """A fixed accuracy: `value` less `tolerance` is the least that passes. Proportions. filter "", metric "": any, the
    task's primary result first.
    """

    task: str
    value: float
    tolerance: float = 0.0
    filter: str = ""
    metric: str = ""

    @property
    def limit(self) -> float:
        return self.value - self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A checked policy. Margins in percentage points, shares as proportions, SQNR in dB; None = not checked.

    margin_pp empty: no paired comparison is judged (a policy of thresholds or of weights alone). serving_ratio: largest
    ratio to the baseline arm's figure, serving_max: largest figure, by name (s or bytes).
    """

    name: str
    gated: tuple[str, ...]
    margin_pp: dict[str, float]
    note: str = ""
    reported: tuple[str, ...] = ()
    correction: str = "holm"
    tiers: dict[str, str] = field(default_factory=dict)
    lint_allow: tuple[str, ...] = ()
    min_sqnr_db: float | None = None
    max_below_median_db: float | None = None
    min_correlation: float | None = None
    max_error_correlation: float | None = None
    equal_bytes: bool = False
    serving_ratio: dict[str, float] = field(default_factory=dict)
    serving_max: dict[str, float] = field(default_factory=dict)
    thresholds: tuple[Threshold, ...] = ()
    chance: dict[str, float] = field(default_factory=dict)
    max_empty_share: float | None = None
    max_truncated_share: float | None = None
    max_failed_share: float | None = None
    min_items: int = 1

    def margin(self, task: str) -> float:
        """The margin of a task in percentage points."""
        return self.margin_pp.get(task, self.margin_pp["default"])

    def tier(self, name: str) -> str:
        """The tier of a task, of "weights" or of "serving"."""
        return self.tiers.get(name, self.tiers.get("default", "critical"))

    @property
    def whole_note(self) -> str:
        """The note, then what the policy asks of answers, from its own margins."""
        margins = [f"{margin:g} pp on {task}" for task, margin in self.margin_pp.items() if task != "default"]
        asked = "No answers are judged: the policy has no margin."
        if self.margin_pp:
            everywhere = f"{self.margin_pp['default']:g} pp a task"
            asked = f"Margin: {', '.join([everywhere, *margins])}."
        note = self.note.strip()
        return f"{note}{'' if note.endswith(('.', '!', '?')) else '.'} {asked}" if note else asked

    def weigh(self, status: str, name: str) -> str:
        """What a status counts for in a tier: an advisory check is only reported, and faulty evidence of a supporting
        one leaves it open instead of making the run invalid.
        """
        tier = self.tier(name)
        if tier == "advisory":
            return "reported"
        return "inconclusive" if tier == "supporting" and status == "invalid" else status


def read_policy(settings: Mapping[str, Any]) -> Policy:
    """Check a policy mapping. Raises ConfigError naming the key, what was found and what is known."""
    known = "name note margin_pp correction tiers gated reported lint weights serving thresholds evidence"
    _known(settings, tuple(known.split()), "gate")
    lint = _section(settings, "lint", ("allow",))
    weights = _section(
        settings,
        "weights",
        ("min_sqnr_db", "max_below_median_db", "min_correlation", "max_error_correlation", "equal_bytes"),
    )
    serving = _section(settings, "serving", ("max_ratio", "max"))
    shares = ("max_empty_share", "max_truncated_share", "max_failed_share")
    evidence = _section(settings, "evidence", ("chance", "min_items", *shares))
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
    if isinstance(min_items, bool) or not isinstance(min_items, int) or not 1 <= min_items <= _MOST:
        raise ConfigError(f"gate.evidence.min_items={str(min_items)[:40]}", fix=f"a whole number from 1 to {_MOST:g}")
    equal_bytes = weights.get("equal_bytes") or False
    if not isinstance(equal_bytes, bool):
        raise ConfigError(f"gate.weights.equal_bytes={equal_bytes!r}", fix="true or false")
    thresholds = _thresholds(settings.get("thresholds"))
    return Policy(
        name=_line("unnamed" if settings.get("name") is None else settings["name"], "gate.name"),
        note=str(settings.get("note") or ""),
        gated=gated,
        reported=reported,
        margin_pp={} if thresholds and settings.get("margin_pp") is None else _margins(settings.get("margin_pp")),
        correction=_choice(settings.get("correction", "holm"), CORRECTIONS, "gate.correction"),
        tiers=_tiers(settings.get("tiers")),
        lint_allow=_names(lint.get("allow"), "gate.lint.allow"),
        min_sqnr_db=_number(weights.get("min_sqnr_db"), "gate.weights.min_sqnr_db"),
        max_below_median_db=_number(weights.get("max_below_median_db"), "gate.weights.max_below_median_db", low=0.0),
        min_correlation=_number(weights.get("min_correlation"), "gate.weights.min_correlation", -1.0, 1.0),
        max_error_correlation=_number(
            weights.get("max_error_correlation"), "gate.weights.max_error_correlation", 0.0, 1.0
        ),
        equal_bytes=equal_bytes,
        serving_ratio=_limits(serving.get("max_ratio"), "gate.serving.max_ratio"),
        serving_max=_limits(serving.get("max"), "gate.serving.max"),
        thresholds=thresholds,
        chance=_chances(evidence.get("chance")),
        max_empty_share=_number(evidence.get("max_empty_share"), "gate.evidence.max_empty_share", 0.0, 1.0),
        max_truncated_share=_number(evidence.get("max_truncated_share"), "gate.evidence.max_truncated_share", 0.0, 1.0),
        max_failed_share=_number(evidence.get("max_failed_share"), "gate.evidence.max_failed_share", 0.0, 1.0),
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
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}={str(value)[:80]!r}", fix="a list of names, e.g. [nvfp4]")
    return tuple(_line(name, where) for name in value)


def _line(value: Any, where: str) -> str:
    """A name: it is printed beside the verdict, and must not print a verdict of its own."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= 1000 or value == "???":
        raise ConfigError(
            f"{where}={str(value)[:80]!r}", fix="a name: one printable line, in quotes where it is a number"
        )
    return value


def _number(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or not -_MOST <= value <= _MOST:
        low, high = max(low, -_MOST), min(high, _MOST)
        fix = f"a number from {low:g} to {high:g}, or null for no check"
        raise ConfigError(f"{where}={str(value)[:40]}", fix=fix)
    return float(value)


def _choice(value: Any, known: tuple[str, ...], where: str) -> str:
    if value not in known:
        raise ConfigError(f"{where}={value!r}", fix=f"choose one of: {', '.join(known)}")
    return str(value)


def _tiers(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"gate.tiers={value!r}", fix="a mapping of task names (and default) to tiers")
    return {str(name): _choice(tier, TIERS, f"gate.tiers.{name}") for name, tier in value.items()}


def _margins(value: Any) -> dict[str, float]:
    fix = "percentage points above 0: one number, or a mapping with `default` and task names; none: no answer is judged"
    if value == "none":
        return {}
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


def _limits(value: Any, where: str) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}", fix=f"a mapping of {', '.join(SERVING_KEYS)} to numbers above 0")
    _known(value, SERVING_KEYS, where)
    found = {str(key): _number(limit, f"{where}.{key}", 0.0) for key, limit in value.items()}
    return {key: limit for key, limit in found.items() if limit is not None}


def _thresholds(value: Any) -> tuple[Threshold, ...]:
    fix = "a list of {task: NAME, value: ACCURACY, tolerance: PROPORTION, filter: NAME, metric: NAME}"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise ConfigError(f"gate.thresholds={value!r}", fix=fix)
    found = []
    for place, item in enumerate(value):
        where = f"gate.thresholds[{place}]"
        _known(item, ("task", "value", "tolerance", "filter", "metric"), where)
        accuracy = _number(item.get("value"), f"{where}.value", 0.0, 1.0)
        if not isinstance(item.get("task"), str) or accuracy is None:
            raise ConfigError(f"{where} lacks a task or a value", fix=fix)
        tolerance = _number(item.get("tolerance", 0.0), f"{where}.tolerance", 0.0, 1.0) or 0.0
        if accuracy <= tolerance:
            limit = f"value {accuracy:g} less tolerance {tolerance:g} is a limit of {100 * (accuracy - tolerance):g} %"
            raise ConfigError(f"{where}: {limit}, which every arm passes", fix="give a tolerance below the value")
        names = {key: str(item.get(key) or "") for key in ("filter", "metric")}
        found.append(Threshold(task=item["task"], value=accuracy, tolerance=tolerance, **names))
    return tuple(found)


def _chances(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"gate.evidence.chance={value!r}", fix="a mapping of task names to a guesser's score, e.g. {mmlu_pro: 0.1}"
        )
    return {str(task): _number(share, f"gate.evidence.chance.{task}", 0.0, 1.0) or 0.0 for task, share in value.items()}
