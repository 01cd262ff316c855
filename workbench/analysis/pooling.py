"""Figures pooled over matrices: of the model, a layer, a projection, a layer's projection, an expert.

    pooled = pool_rows(tensors)          # pooled.parquet: a row per pair, level and group

A pooled figure is that of all the group's weights as one matrix: sums of squares and products add, weighted by the
matrices' sizes and, for a sample, by how many matrices each stands for. Intervals are a 95 % bootstrap over matrices,
within the strata of a sample (projection, shared or routed), for groups of at least 8 matrices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .bootstrap import MIN_UNITS, draw_counts, interval
from .figures import COLUMNS, NEEDS, WITH_INTERVAL, figures_of_sums

if TYPE_CHECKING:
    import pandas as pd

PAIR = ["source_arm", "first_arm", "second_arm", "second_rule"]
LEVELS: dict[str, list[str]] = {
    "model": [],
    "projection": ["projection", "shared_expert"],
    "layer": ["layer"],
    "layer projection": ["layer", "projection", "shared_expert"],
    "expert": ["layer", "expert"],
}
_PARTS = ("scale", "element", "saturation", "underflow")
CAUSES = tuple(f"{arm}_error_{part}" for arm in ("first", "second") for part in _PARTS)
SHARES = tuple(f"{arm}_{what}" for arm in ("first", "second") for what in ("saturated", "underflowed"))
_RESAMPLES = 1000
_MOST_UNITS = 2048  # matrices drawn one by one; more are drawn as runs of neighbours


def pool_rows(frame: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """A table of every level's groups, in the order of LEVELS and of the groups' first matrices.

    Columns: the pair's, level, layer, expert (-1: all), projection ("": all), shared_expert, matrices (measured), of
    (that they stand for), weights, every figure of `figures.NEEDS`, `_low` and `_high` of `figures.WITH_INTERVAL`, and
    the error parts by cause. Levels of the experts hold routed experts only.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for pair, group in frame.groupby(PAIR, sort=False):
        sums, causes = matrix_sums(group), _cause_sums(group)
        strata = group.groupby(["projection", "shared_expert"], sort=False).ngroup().to_numpy()
        for level, keys in LEVELS.items():
            within = group if level != "expert" else group[group["expert"] >= 0]
            if not len(within):
                continue
            if keys:
                labels = within.groupby(keys, sort=False).ngroup().to_numpy()
            else:
                labels = np.zeros(len(within), np.int64)
            positions = group.index.get_indexer(within.index)
            rows += _pool_level(
                level, dict(zip(PAIR, pair, strict=True)), within, labels, positions, sums, causes, strata, seed
            )
    return pd.DataFrame(rows, columns=_columns())


def matrix_sums(group: pd.DataFrame) -> NDArray[np.float64]:
    """Each row's sums `[matrices, columns]` (`figures.COLUMNS`), times what the matrix stands for."""
    at = {name: group[name].to_numpy(np.float64) for name in group.columns if group[name].dtype.kind in "fi"}
    mean, std = at["e2_mean"], at["e2_std"]
    second = at["power_e2"]
    skewness, kurtosis = (np.where(std == 0, 0.0, at[k]) for k in ("e2_skewness", "e2_excess_kurtosis"))
    third = skewness * std**3 + 3 * mean * second - 2 * mean**3
    fourth = (kurtosis + 3.0) * std**4 + 4 * mean * third - 6 * mean**2 * second + 3 * mean**4
    if np.isnan(at["power_source"]).all():  # without a source: a stands for it, as in `algebra`
        zero = np.zeros(len(group))
        at |= {"mean_source": at["mean_first"], "power_source": at["power_first"], "mean_total": mean}
        at |= {"power_total": second, "cross_source_total": at["cross_first_e2"]}
        at |= dict.fromkeys(("mean_e1", "power_e1", "cross_source_e1", "cross_e1_e2"), zero)
    means = {
        "w": at["mean_source"],
        "e1": at["mean_e1"],
        "e2": mean,
        "e": at["mean_total"],
        "ed": at["mean_direct"],
        "w_w": at["power_source"],
        "e1_e1": at["power_e1"],
        "e2_e2": second,
        "e_e": at["power_total"],
        "ed_ed": at["power_direct"],
        "w_e1": at["cross_source_e1"],
        "w_e": at["cross_source_total"],
        "w_ed": at["cross_source_direct"],
        "e1_e2": at["cross_e1_e2"],
        "e2_e2_e2": third,
        "e2_e2_e2_e2": fourth,
        "n": np.ones(len(group)),
    }
    return np.stack([means[column] for column in COLUMNS], axis=1) * _sizes(group)[:, None]


# ---- one level -------------------------------------------------------------------------------------------------------


def _pool_level(
    level: str,
    pair: dict[str, Any],
    within: pd.DataFrame,
    labels: NDArray[np.int64],
    positions: NDArray[np.int64],
    sums: NDArray[np.float64],
    causes: NDArray[np.float64],
    strata: NDArray[np.int64],
    seed: int,
) -> list[dict[str, Any]]:
    absent = set().union(*(missing.split(",") for missing in within["missing"].unique()))

    def undefined(key: str) -> bool:
        return not absent.isdisjoint(NEEDS[key])

    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(labels[order]) > 0])
    members = np.split(order, starts[1:])
    pooled = figures_of_sums(np.add.reduceat(sums[positions[order]], starts, axis=0))
    parts = np.add.reduceat(causes[positions[order]], starts, axis=0)
    sizes = np.add.reduceat(_sizes(within)[order], starts)
    rows = []
    for index, rows_of in enumerate(members):
        head = within.iloc[rows_of[0]]
        row: dict[str, Any] = pair | {
            "level": level,
            "layer": int(head["layer"]) if "layer" in LEVELS[level] else -1,
            "expert": int(head["expert"]) if level == "expert" else -1,
            "projection": head["projection"] if "projection" in LEVELS[level] else "",
            "shared_expert": bool(head["shared_expert"]) if "projection" in LEVELS[level] else False,
            "matrices": len(rows_of),
            "of": float(within["sample_weight"].to_numpy()[rows_of].sum()),
            "weights": float(sizes[index]),
        }
        row |= {key: math.nan if undefined(key) else float(pooled[key][index]) for key in NEEDS}
        at = positions[rows_of]
        bounds = _intervals(sums[at], strata[at], seed) if level != "expert" else {}
        row |= {key: value for key, value in bounds.items() if not undefined(key.rpartition("_")[0])}
        row |= dict(zip((*CAUSES, *SHARES), parts[index] / sizes[index], strict=True))
        rows.append(row)
    return rows


def _intervals(sums: NDArray[np.float64], strata: NDArray[np.int64], seed: int) -> dict[str, float]:
    if len(sums) < MIN_UNITS:
        return {}
    drawn = np.zeros((_RESAMPLES, sums.shape[1]))
    for stratum in np.unique(strata):
        part = sums[strata == stratum]
        n = len(part)
        if n > _MOST_UNITS:
            part = np.add.reduceat(part, np.arange(_MOST_UNITS) * n // _MOST_UNITS, axis=0)
        with np.errstate(invalid="ignore", over="ignore"):
            drawn += draw_counts(len(part), _RESAMPLES, seed + int(stratum)) @ part
    found = figures_of_sums(drawn, only=WITH_INTERVAL)
    bounds = {key: interval(values) for key, values in found.items()}
    return {
        f"{key}_{end}": value for key, pair in bounds.items() for end, value in zip(("low", "high"), pair, strict=True)
    }


def _sizes(group: pd.DataFrame) -> NDArray[np.float64]:
    return (group["rows"] * group["columns"] * group["sample_weight"]).to_numpy(np.float64)


def _cause_sums(group: pd.DataFrame) -> NDArray[np.float64]:
    return np.stack([group[c].to_numpy(np.float64) for c in (*CAUSES, *SHARES)], axis=1) * _sizes(group)[:, None]


def _columns() -> list[str]:
    columns = [*PAIR, "level", "layer", "expert", "projection", "shared_expert", "matrices", "of", "weights"]
    for key in NEEDS:
        columns += [key, *((f"{key}_low", f"{key}_high") if key in WITH_INTERVAL else ())]
    return [*columns, *CAUSES, *SHARES]
