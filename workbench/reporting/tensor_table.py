"""Every matrix of one pair as data for the page's script: its table, filters and heat maps.

    table = make_tensor_table(rows, gemm, pair)     # plain data for <script type="application/json">

METRICS says which figures, in which unit, and how finely they are kept. Nothing here is new: columns of
tensors.parquet, and of gemm.parquet those that concern the pair's second arm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .columns import pack
from .tensor_names import split_names

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. digits: printed after the point; the step is one of the last. scale: "up" (brighter is more),
    "zero" (two colours around zero) or "octave" (cyclic on [0, 1))."""

    key: str
    label: str
    unit: str
    digits: int
    scale: str
    short: str


METRICS = (  # the first are kept longest where a page grows too large
    Metric("sqnr_total_db", "SQNR after both quantizations", "dB", 2, "up", "after both"),
    Metric("sqnr_first_db", "SQNR after the first quantization", "dB", 2, "up", "first"),
    Metric("sqnr_direct_db", "SQNR of the second format directly from the source", "dB", 2, "up", "direct"),
    Metric("corr_e1_e2", "correlation of e1 and e2", "", 3, "zero", "corr(e1, e2)"),
    Metric("gain_total_excess", "gain beyond what centroids have", "", 4, "zero", "gain excess"),
    Metric("scale_phase", "scale phase: where the first global scale falls in its octave", "", 3, "octave", "phase"),
    Metric("output_db", "output SQNR, weights and activations rounded", "dB", 2, "up", "output"),
    Metric(
        "coherence_gain_db", "coherence gain: output SQNR minus the weights' own", "dB", 2, "zero", "coherence gain"
    ),
    Metric("residual_quadrature_db", "measured minus predicted without correlation", "dB", 2, "zero", "residual"),
    Metric("worst_block_excess", "worst scale block, times the mean error", "", 1, "up", "worst block"),
    Metric("e2_code_asymmetry", "asymmetry of e2 over codes, standard errors", "", 1, "up", "asymmetry"),
)


def make_tensor_table(
    rows: pd.DataFrame, gemm: pd.DataFrame | None, second_arm: str, *, most: int = len(METRICS)
) -> dict[str, Any] | None:
    """The first `most` metrics that have a value, packed, with what rebuilds the names; None for no rows."""
    if not len(rows):
        return None
    layers, experts = rows["layer"].to_numpy(np.int64), rows["expert"].to_numpy(np.int64)
    patterns, codes, exceptions = split_names([str(name) for name in rows["name"]], layers.tolist(), experts.tolist())
    projections = list(dict.fromkeys(str(p) for p in rows["projection"]))
    place = {name: i for i, name in enumerate(projections)}
    whole: dict[str, tuple[Any, float]] = {
        "pattern": (np.array(codes, np.float64), 1.0),
        "layer": (layers.astype(np.float64), 1.0),
        "expert": (experts.astype(np.float64), 1.0),
        "projection": (np.array([place[str(p)] for p in rows["projection"]], np.float64), 1.0),
        "shared": (rows["shared_expert"].to_numpy(np.float64), 1.0),
    }
    values = _values(rows, gemm, second_arm)
    shown = [m for m in METRICS[:most] if m.key in values and not np.isnan(values[m.key]).all()]
    packed = pack(whole | {m.key: (values[m.key], 10.0**-m.digits) for m in shown})
    steps = {column["name"]: column["step"] for column in packed["columns"]}
    metrics = [
        {"key": m.key, "label": m.label, "short": m.short, "unit": m.unit, "digits": m.digits, "scale": m.scale,
         "step": steps[m.key]}
        for m in shown
    ]  # fmt: skip
    return packed | {
        "metrics": metrics, "projections": projections, "patterns": patterns, "exceptions": exceptions,
    }  # fmt: skip


def _values(rows: pd.DataFrame, gemm: pd.DataFrame | None, second_arm: str) -> dict[str, Any]:
    values = {m.key: rows[m.key].to_numpy(np.float64) for m in METRICS if m.key in rows.columns}
    for key, kind, column in (("output_db", "both", "sqnr_db"), ("coherence_gain_db", "weight", "coherence_gain_db")):
        if gemm is None:
            continue
        chosen = gemm[(gemm["arm"] == second_arm) & (gemm["kind"] == kind)].drop_duplicates("name")
        if len(chosen):
            values[key] = chosen.set_index("name")[column].reindex(rows["name"]).to_numpy(np.float64)
    return values
