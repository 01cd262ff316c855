"""What a runtime computes that gives fused projections (gate/up, q/k/v) one global scale without touching block scales.

    fused = fused_view(tensors)      # fused.parquet: a row per pair, group and matrix

Runtimes that run gate and up as one matrix take one of their global scales, the largest (dense layers) or the first
(experts), for both. A matrix with another global is then decoded as a' = r a, r = merged / own, and its error follows
from the sums at hand: |r a - w|^2 = r^2 <a, a> - 2 r <a, w> + <w, w>. Where the globals agree, r = 1 and nothing
changes. A reader that keeps each matrix's own global (this project's) is the `sqnr_first_db` column.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .figures import sqnr_db

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "first_arm",
    "second_arm",
    "second_rule",
    "group",
    "name",
    "members",
    "ratio_largest",
    "ratio_first",
    "sqnr_first_db",
    "sqnr_merged_largest_db",
    "sqnr_merged_first_db",
)


def fused_view(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each matrix of a fused group of two or more; columns COLUMNS.

    ratio_largest, ratio_first: r where the group takes its largest or its first member's global; SQNRs in dB. NaN where
    a member has no global scale, or without a source.
    """
    import pandas as pd

    from workbench.checkpoints.names import fusion_group

    rows: list[dict[str, Any]] = []
    for pair, part in frame.groupby(["first_arm", "second_arm", "second_rule"], sort=False):
        groups = part["name"].map(lambda name: fusion_group(name.removesuffix(".weight")) or "")
        for group, members in part.groupby(groups, sort=False):
            if not group or len(members) < 2:
                continue
            globals_ = members["first_global_scale"].to_numpy()
            for _, row in members.iterrows():
                own = row["first_global_scale"]
                largest, first = globals_.max() / own, globals_[0] / own
                rows.append(
                    dict(zip(("first_arm", "second_arm", "second_rule"), pair, strict=True))
                    | {
                        "group": group,
                        "name": row["name"],
                        "members": len(members),
                        "ratio_largest": float(largest),
                        "ratio_first": float(first),
                        "sqnr_first_db": row["sqnr_first_db"],
                        "sqnr_merged_largest_db": _merged(row, float(largest)),
                        "sqnr_merged_first_db": _merged(row, float(first)),
                    }
                )
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = COLUMNS[COLUMNS.index("members") :]
    return table if rows else table.astype(dict.fromkeys(numbers, float))  # of a sample without a whole group, too


def _merged(row: pd.Series, ratio: float) -> float:
    """SQNR of r a against w, dB. In terms of e1, so that r = 1 gives the first's own SQNR to the last digits."""
    if math.isnan(ratio):
        return math.nan
    change = ratio - 1.0  # r a - w = e1 + (r - 1) a
    a_e1 = row["cross_source_e1"] + row["power_e1"]
    power = row["power_e1"] + 2 * change * a_e1 + change * change * row["power_first"]
    return float(sqnr_db(row["power_source"], max(0.0, power)))
