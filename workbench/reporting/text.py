"""Numbers as readers want them: units, intervals, a dash for what was not measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

DASH = "–"
_SINGULAR = re.compile(r"\b(matrices|\w+s)\b")
_ONE = {"matrices": "matrix"}


def number(value: Any, digits: int = 2, unit: str = "", signed: bool = False) -> str:
    """A figure with fixed digits: 20.44 dB; "–" for NaN or None, "∞" for infinity; a true minus sign."""
    value = real(value)
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        text = "∞" if value > 0 else "−∞"
    else:
        text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
        if float(text) == 0:
            text = text.lstrip("+-")  # a rounded zero has no sign
        text = text.replace("-", "−")
    return f"{text} {unit}" if unit else text


def real(value: Any) -> float:
    """A float from JSON's null, "inf" and "-inf"."""
    return math.nan if value is None else float(value)


def small(value: Any) -> str:
    """A figure of any size in three significant digits: 0.0123, 1.9e-04."""
    value = real(value)
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e4:
        return number(value, 0 if value == 0 else 4)
    return f"{value:.1e}".replace("-", "−")


def interval(low: Any, high: Any, digits: int = 2, scale: float = 1.0) -> str:
    """[low, high]; empty where there is none."""
    low, high = real(low) * scale, real(high) * scale
    if math.isnan(low) or math.isnan(high):
        return ""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def percent(value: Any, digits: int = 1) -> str:
    """A proportion as percent: 0.84 -> 84.0 %."""
    return number(real(value) * 100, digits, "%")


def size(value: Any) -> str:
    """Bytes in binary units: 22.1 MiB."""
    value = real(value)
    if math.isnan(value):
        return DASH
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return number(value, 0 if unit == "B" else 1, unit)
        value /= 1024
    return number(value, 2, "TiB")


def seconds(value: Any) -> str:
    """5.3 s, 4 min 10 s, 2 h 5 min."""
    value = real(value)
    if math.isnan(value):
        return DASH
    if value < 60 or math.isinf(value):
        return number(value, 1, "s")
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(value: Any) -> str:
    """A number of things; "–" for -1, what a client did not keep."""
    return DASH if value is None or value < 0 else f"{value:g}"


def counted(n: Any, things: str) -> str:
    """A number of things in words: 1 finding, 2 findings, no findings. things: their plural, the noun's first word."""
    if n in (1, "1"):
        return f"1 {_SINGULAR.sub(lambda m: _ONE.get(m.group(), m.group()[:-1]), things, count=1)}"
    return f"{n} {things}"


def detectable(losses_pp: Mapping[str, Any]) -> str:
    """Smallest detectable losses by the share flipped: "3.18 / 4.52 / 6.41", or one figure where all are the same."""
    shown = [number(loss) for loss in losses_pp.values()]
    return " / ".join(shown if len(set(shown)) > 1 else shown[:1]) or DASH


def probability(value: Any) -> str:
    """p values: 0.031, <0.001."""
    value = real(value)
    return "<0.001" if value < 0.001 else number(value, 3)


def clip(text: Any, limit: int = 1200) -> str:
    """Long text cut in the middle, with the number of characters left out."""
    text = str(text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters left out…] {text[-half:]}"


def cell(text: Any) -> str:
    """Text that is safe inside a Markdown table cell."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ").replace("`", "ʼ")


def of_unit(value: Any, unit: str) -> str:
    """A gate check's figure: two digits for measures, none for counts."""
    return number(value, 2 if unit in ("dB", "pp", "%", "") else 0, unit)


def visible(value: Any) -> Any:
    """Text whose control and direction characters are spelled out: they could hide or reorder what is read."""
    return _UNSEEN.sub(lambda m: f"⟨U+{ord(m.group()):04X}⟩", value) if type(value) is str else value


_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def step(value: float) -> str:
    """A resolution without an exponent: 0.0001."""
    return f"{value:.12f}".rstrip("0").rstrip(".")


FILTERS: dict[str, Callable[..., str]] = {
    "number": number,
    "count": count,
    "counted": counted,
    "detectable": detectable,
    "small": small,
    "percent": percent,
    "size": size,
    "seconds": seconds,
    "probability": probability,
    "clip": clip,
    "step": step,
    "cell": cell,
    "value": lambda check: of_unit(check.value, check.unit),
    "limit": lambda check: of_unit(check.limit, check.unit),
}
