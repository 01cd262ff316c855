"""Figures of the error algebra from sums over elements: of one matrix, with intervals, or pooled over many.

    figures, doubtful = figures_of(units, units.sum(0), missing, constant)

A sum is one of `kernels.cpu_errors.SUMS`, then the number of elements. a = w + e1 and b = w + e follow by linearity.
Definitions with units: docs/analysis.md and docs/schema.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.cpu_errors import SUMS

from .influence import FEW_EFFECTIVE, NONE, Interval, intervals

Sums = NDArray[np.float64] | float
COLUMNS = (*SUMS, "n")


class Missing(NamedTuple):
    """Which arms are not there."""

    source: bool = False
    first: bool = False
    second: bool = False
    direct: bool = False


WITH_INTERVAL = (
    "sqnr_first_db",
    "sqnr_total_db",
    "sqnr_direct_db",
    "corr_e1_e2",
    "cov_e1_e2_share",
    "gain_total_excess",
)
_SUMS_OF_INTERVALS = [
    COLUMNS.index(c) for c in ("e1", "e2", "w_w", "e1_e1", "e2_e2", "e_e", "ed_ed", "w_e", "e1_e2", "n")
]
# What each figure needs: an arm, or an error (which needs its arms).
_SOURCE, _FIRST, _SECOND, _DIRECT = "source", "first", "second", "direct"
_E1, _E2, _E, _ED = (_SOURCE, _FIRST), (_FIRST, _SECOND), (_SOURCE, _SECOND), (_SOURCE, _DIRECT)
_CHAIN = (_SOURCE, _FIRST, _SECOND)
NEEDS: dict[str, tuple[str, ...]] = {
    "power_source": (_SOURCE,),
    "power_first": (_FIRST,),
    "power_e1": _E1,
    "power_e2": _E2,
    "power_total": _E,
    "power_direct": _ED,
    "mean_source": (_SOURCE,),
    "mean_first": (_FIRST,),
    "mean_e1": _E1,
    "mean_total": _E,
    "mean_direct": _ED,
    "cross_source_e1": _E1,
    "cross_source_total": _E,
    "cross_source_direct": _ED,
    "cross_e1_e2": _CHAIN,
    "cross_first_e2": _E2,
    "sqnr_first_db": _E1,
    "sqnr_second_db": _E2,
    "sqnr_total_db": _E,
    "sqnr_direct_db": _ED,
    "sqnr_total_predicted_quadrature_db": _CHAIN,
    "sqnr_total_predicted_linear_db": _CHAIN,
    "residual_quadrature_db": _CHAIN,
    "residual_linear_db": _CHAIN,
    "cov_e1_e2": _CHAIN,
    "cov_e1_e2_share": _CHAIN,
    "corr_e1_e2": _CHAIN,
    "corr_e2_a": _E2,
    "corr_e1_w": _E1,
    "gain_first": _E1,
    "gain_total": _E,
    "gain_direct": _ED,
    "gain_total_excess": _E,
    "e2_mean": _E2,
    "e2_std": _E2,
    "e2_mean_over_std": _E2,
    "e2_skewness": _E2,
    "e2_excess_kurtosis": _E2,
}
_CONSTANT_MATTERS = {
    "corr_e1_e2": ("e1", "e2"),
    "corr_e2_a": ("e2", "a"),
    "corr_e1_w": ("e1", "w"),
    "e2_mean_over_std": ("e2",),
    "e2_skewness": ("e2",),
    "e2_excess_kurtosis": ("e2",),
}


def sqnr_db(power_signal: Sums, power_error: Sums) -> NDArray[np.float64]:
    """10 log10(signal / error): +inf for an error of exactly zero, NaN where both are zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10.0 * np.log10(np.asarray(power_signal, np.float64) / np.asarray(power_error, np.float64))


def figures_of(
    units: NDArray[np.float64], total: NDArray[np.float64], missing: Missing, constant: dict[str, bool]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Every figure of NEEDS and the intervals of WITH_INTERVAL, from sums by unit `[units, columns]`; then the figures
    whose interval rests on few units (`influence.FEW_EFFECTIVE`).

    constant: which of w, a, e1, e2 hold one value only; their correlations are NaN.
    """
    point = {key: float(value[0]) for key, value in figures_of_sums(total[None]).items()}
    bounds = intervals(units[:, _SUMS_OF_INTERVALS], _figures_with_interval)
    absent = {arm for arm, gone in missing._asdict().items() if gone}
    figures: dict[str, float] = {}
    doubtful = []
    for key, needs in NEEDS.items():
        undefined = not absent.isdisjoint(needs) or any(constant[s] for s in _CONSTANT_MATTERS.get(key, ()))
        figures[key] = math.nan if undefined else point[key]
        if key in WITH_INTERVAL:
            found: Interval = NONE if undefined else bounds[key]
            limit = 1.0 if key.startswith("corr") else math.inf
            figures[f"{key}_low"], figures[f"{key}_high"] = (_within(v, limit) for v in found[:2])
            doubtful += [key] if found.effective < FEW_EFFECTIVE else []
    if constant["e2"] and not absent.intersection(_E2):
        figures["e2_std"] = 0.0
    return figures, tuple(doubtful)


def _figures_with_interval(sums: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Those of WITH_INTERVAL, from the sums that they need."""
    whole = np.zeros((len(sums), len(COLUMNS)))
    whole[:, _SUMS_OF_INTERVALS] = sums
    return figures_of_sums(whole, only=WITH_INTERVAL)


def _within(value: float, limit: float) -> float:
    return value if math.isnan(value) else max(-limit, min(limit, value))


def figures_of_sums(sums: NDArray[np.float64], only: tuple[str, ...] | None = None) -> dict[str, NDArray[np.float64]]:
    """The figures from rows of sums `[r, columns]`; `only` some of them (those of WITH_INTERVAL) where it is given."""
    s = dict(zip(COLUMNS, sums.T, strict=True))
    n, ww, e1e1, e2e2, ee = s["n"], s["w_w"], s["e1_e1"], s["e2_e2"], s["e_e"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        covariance = s["e1_e2"] / n - s["e1"] / n * (s["e2"] / n)
        gain = np.where(ww > 0, 1.0 + s["w_e"] / ww, np.nan)
        found = {
            "sqnr_first_db": sqnr_db(ww, e1e1),
            "sqnr_total_db": sqnr_db(ww, ee),
            "sqnr_direct_db": sqnr_db(ww, s["ed_ed"]),
            "corr_e1_e2": correlation(s["e1_e2"], s["e1"], s["e2"], e1e1, e2e2, n),
            "cov_e1_e2_share": 2 * covariance / (ee / n),
            "gain_total_excess": gain - (1.0 - ee / ww),
        }
        if only is not None:
            return {key: found[key] for key in only}
        a, aa, w_e2 = s["w"] + s["e1"], ww + 2 * s["w_e1"] + e1e1, s["w_e"] - s["w_e1"]
        quadrature = sqnr_db(ww, e1e1 + e2e2)
        linear = sqnr_db(ww, np.maximum(0.0, e1e1 + e2e2 + 2 * s["e1_e2"]))
        mean, second = s["e2"] / n, e2e2 / n
        variance = np.maximum(0.0, second - mean**2)
        third = s["e2_e2_e2"] / n - 3 * mean * second + 2 * mean**3
        fourth = s["e2_e2_e2_e2"] / n - 4 * mean * s["e2_e2_e2"] / n + 6 * mean**2 * second - 3 * mean**4
        return found | {
            "power_source": ww / n,
            "power_first": aa / n,
            "power_e1": e1e1 / n,
            "power_e2": second,
            "power_total": ee / n,
            "power_direct": s["ed_ed"] / n,
            "mean_source": s["w"] / n,
            "mean_first": a / n,
            "mean_e1": s["e1"] / n,
            "mean_total": s["e"] / n,
            "mean_direct": s["ed"] / n,
            "cross_source_e1": s["w_e1"] / n,
            "cross_source_total": s["w_e"] / n,
            "cross_source_direct": s["w_ed"] / n,
            "cross_e1_e2": s["e1_e2"] / n,
            "cross_first_e2": (w_e2 + s["e1_e2"]) / n,
            "sqnr_second_db": sqnr_db(aa, e2e2),
            "sqnr_total_predicted_quadrature_db": quadrature,
            "sqnr_total_predicted_linear_db": linear,
            "residual_quadrature_db": _difference(found["sqnr_total_db"], quadrature),
            "residual_linear_db": _difference(found["sqnr_total_db"], linear),
            "cov_e1_e2": covariance,
            "corr_e2_a": correlation(w_e2 + s["e1_e2"], s["e2"], a, e2e2, aa, n),
            "corr_e1_w": correlation(s["w_e1"], s["e1"], s["w"], e1e1, ww, n),
            "gain_first": np.where(ww > 0, 1.0 + s["w_e1"] / ww, np.nan),
            "gain_total": gain,
            "gain_direct": np.where(ww > 0, 1.0 + s["w_ed"] / ww, np.nan),
            "e2_mean": mean,
            "e2_std": np.sqrt(variance),
            "e2_mean_over_std": np.where(variance > 0, mean / np.sqrt(variance), np.nan),
            "e2_skewness": np.where(variance > 0, third / variance**1.5, np.nan),
            "e2_excess_kurtosis": np.where(variance > 0, fourth / variance**2 - 3.0, np.nan),
        }


def correlation(xy: Sums, x: Sums, y: Sums, xx: Sums, yy: Sums, n: Sums) -> NDArray[np.float64]:
    """Pearson correlation from sums; NaN where a side has no variance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        covariance = xy - x * y / n
        spread = np.sqrt(np.maximum(xx - x * x / n, 0.0)) * np.sqrt(np.maximum(yy - y * y / n, 0.0))
        return np.clip(np.where(spread > 0, covariance / spread, np.nan), -1.0, 1.0)


def _difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a - b; 0 where both are the same infinity (neither prediction nor measurement has an error)."""
    return np.where(a == b, 0.0, a - b)
