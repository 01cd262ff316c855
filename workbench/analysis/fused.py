"""What a runtime computes that gives fused projections (gate/up, q/k/v) one global scale without touching block scales.

    fused = fused_view(tensors)      # fused.parquet: a row per pair, group and matrix

Runtimes that run gate and up as one matrix take one of their global scales, the largest (dense layers) or the first
(experts), for both. A matrix with another global is then decoded as a' = r a, r = merged / own, and its error follows
from the sums at hand: |r a - w|^2 = r^2 <a, a> - 2 r <a, w> + <w, w>. Where the globals agree, r = 1 and nothing
changes. A reader that keeps each matrix's own global (this project's) is the `sqnr_first_db` column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
_NUMBERS = COLUMNS[COLUMNS.index("members") :]


def fused_view(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each matrix of a fused group of two or more; columns COLUMNS.

    ratio_largest, ratio_first: r where the group takes its largest or its first member's global; SQNRs in dB. NaN where
    a member has no global scale, or without a source.
    """
    import pandas as pd

    from workbench.checkpoints.names import fusion_group

    tables = [pd.DataFrame(columns=list(COLUMNS)).astype(dict.fromkeys(_NUMBERS, float))]
    for pair, part in frame.groupby(list(COLUMNS[:3]), sort=False):
        groups = part["name"].map(lambda name: fusion_group(name.removesuffix(".weight")) or "").to_numpy()
        number, found = pd.factorize(groups)
        members = np.bincount(number, minlength=len(found))[number]
        fused = (groups != "") & (members >= 2)
        own = part["first_global_scale"].to_numpy(np.float64)
        largest = np.full(len(found), -np.inf)
        with np.errstate(invalid="ignore"):  # NaN stays: a member without a global scale
            np.maximum.at(largest, number, own)
        first = own[np.unique(number, return_index=True)[1]]
        ratios = {"largest": largest[number] / own, "first": first[number] / own}
        at = {key: part[key].to_numpy(np.float64) for key in ("power_source", "power_first", "power_e1")}
        a_e1 = part["cross_source_e1"].to_numpy(np.float64) + at["power_e1"]
        columns: dict[str, Any] = dict(zip(COLUMNS[:3], pair, strict=True))
        columns |= {"group": groups, "name": part["name"].to_numpy(), "members": members.astype(float)}
        columns |= {f"ratio_{which}": ratio for which, ratio in ratios.items()}
        columns |= {"sqnr_first_db": part["sqnr_first_db"].to_numpy()}
        columns |= {f"sqnr_merged_{which}_db": _merged(at, a_e1, ratio) for which, ratio in ratios.items()}
        table = pd.DataFrame(columns, columns=list(COLUMNS))[fused]
        in_order = np.argsort(number[fused], kind="stable")  # a group's members stand together
        tables.append(table.iloc[in_order])
    return pd.concat([t for t in tables if len(t)] or tables, ignore_index=True)


def _merged(at: dict[str, NDArray[np.float64]], a_e1: NDArray[np.float64], ratio: NDArray[np.float64]) -> Any:
    """SQNR of r a against w, dB. In terms of e1, so that r = 1 gives the first's own SQNR to the last digits."""
    change = ratio - 1.0  # r a - w = e1 + (r - 1) a
    power = at["power_e1"] + 2 * change * a_e1 + change * change * at["power_first"]
    return sqnr_db(at["power_source"], np.maximum(0.0, power))
