"""How close two devices' tables of one analysis must be: what is counted or named equal, figures within a band.

A sum differs by the order of float64 summation: less than 1e-12 of the sum of its terms' magnitudes (SUM). A figure
that is a quotient or a logarithm of sums inherits that, times the cancellation in it: a mean, a correlation or a
skewness is near zero because large terms cancel, so its band is absolute, on its own natural scale. Intervals add a
numeric derivative with a step of 1e-4, which turns 1e-16 into 1e-12 and, through the kurtosis, some more (BOUND).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

SUM = 1e-12
FIGURE = 1e-10  # of dimensionless figures: SUM, times what cancels in them
BOUND = 1e-9  # of ends of intervals
EXACT = ("worst_block_row", "worst_block_column", "interval_doubtful", "missing", "scale_phase", "sample_weight",
         "first_global_scale")  # fmt: skip


def figure_bands(figures: Mapping[str, float]) -> dict[str, float]:
    """The largest difference that each figure may have; 0: equal."""
    return {key: _band(key, float(value), figures) for key, value in figures.items()}


def _band(key: str, value: float, figures: Mapping[str, float]) -> float:
    if not math.isfinite(value) or key in EXACT or key.endswith(("saturated", "underflowed")):
        return 0.0
    if key.endswith(("_low", "_high")):
        return BOUND * max(1.0, abs(value))
    if key.startswith(("power_", "worst_block_")):
        return SUM * abs(value)
    if "_error_" in key:  # of the mean square of the error it divides
        of = "power_e1" if key.startswith("first") else "power_e2"
        return SUM * (figures[of] if math.isfinite(figures[of]) else abs(value))
    if key in ("e2_mean", "e2_std"):
        return SUM * math.sqrt(figures["power_e2"])
    return FIGURE * max(1.0, abs(value))


def compare_tables(found: pd.DataFrame, want: pd.DataFrame) -> list[str]:
    """A line for each column that differs by more than it may, in the table's order; [] where none does."""
    assert list(found.columns) == list(want.columns)
    assert len(found) == len(want)
    lines = []
    rows = want.to_dict("records")
    for column in want.columns:
        if want[column].dtype != np.float64:
            differs = (found[column] != want[column]).to_numpy()
            worst = ""
        else:
            x, y = found[column].to_numpy(), want[column].to_numpy()
            bands = np.array([_band(column, value, row) for value, row in zip(y, rows, strict=True)])
            with np.errstate(invalid="ignore"):
                off = np.abs(x - y)
                differs = ~((x == y) | (np.isnan(x) & np.isnan(y)) | (off <= bands))
            worst = f", by up to {np.nanmax(np.where(differs, off, 0.0)):.3g}"
        if differs.any():
            at = int(np.argmax(differs))
            lines.append(f"{column}: {differs.sum()} of {len(want)} rows differ{worst}; row {at}: "
                         f"{found[column].iloc[at]!r} and {want[column].iloc[at]!r}")  # fmt: skip
    return lines


def largest_differences(found: pd.DataFrame, want: pd.DataFrame) -> dict[str, float]:
    """For each kind of band the largest share of it that a figure's difference takes."""
    shares: dict[str, float] = {}
    rows = want.to_dict("records")
    for column in want.columns[want.dtypes == np.float64]:
        x, y = found[column].to_numpy(), want[column].to_numpy()
        kind = "bounds" if column.endswith(("_low", "_high")) else "sums" if "power" in column else "figures"
        for ours, theirs, row in zip(x, y, rows, strict=True):
            band = _band(column, theirs, row)
            if band and math.isfinite(ours):
                shares[kind] = max(shares.get(kind, 0.0), abs(ours - theirs) / band)
    return shares
