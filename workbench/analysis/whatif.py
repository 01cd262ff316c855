"""What if: source x first x second x scale rule x block size, predicted from the weights alone in one pass.

    table = what_if(source=Path("kimi"), first=Path("kimi-nvfp4"), sample=200)
    verdict = steering_verdict(table)

Every matrix is read once and rounded every way. "none" as the first is direct quantization from the source; "stored" is
the checkpoint's own. Block sizes other than a format's own are what its arithmetic would give, not files that a server
reads. Steered requantization multiplies each matrix by one number before MXFP4 rounds it and divides afterwards, where
a consumer can (in a norm's weight, a GEMM's alpha): MXFP4's scales are powers of two, so where a matrix falls between
them moves its error. The verdict is what that gained on these matrices, against the unsteered ones, with an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.formats import quantize
from workbench.kernels import mx, nvfp4
from workbench.kernels.reference import nvfp4_dequantize

from .bootstrap import MIN_UNITS, draw_counts, interval
from .choice import sample_entries
from .figures import sqnr_db
from .inputs import OpenCheckpoints, Progress, shown

if TYPE_CHECKING:
    import pandas as pd

PHASES = 16
"""Multipliers tried over an octave; beyond it everything repeats, as scales are powers of two."""
MX_RULES = ("floor", "even", "rceil", "mse")
MX_BLOCKS = (16, 32, 64)
_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringVerdict:
    """What steering gained on the total SQNR, dB, pooled over matrices.

    gain: over the plain requantization, with a 95 % bootstrap interval over matrices; span: over each matrix's worst
    multiplier, which is what simulations quote. largest_gain_db: of one matrix.

    verdict: "gains", "does not gain" or "too few matrices": whether the interval's lower end is above `worth_db`.
    """

    matrices: int
    gain_db: float
    gain_low_db: float
    gain_high_db: float
    span_db: float
    largest_gain_db: float
    worth_db: float
    verdict: str


def what_if(
    *,
    source: str | Path,
    first: str | Path | None = None,
    sample: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Predict every combination; a row for each matrix and combination.

    Columns: name, layer, expert, projection, first, second, rule, block, bits (of the second, with scales), weights,
    power_source, power_total, sqnr_db; for rule "steered" the best multiplier, and power_worst of the worst one.
    Matrices: those quantized in `first`, or the source's linear weights; `sample`: about so many, stratified.
    Raises CheckpointError where a matrix of `first` is not the source's.
    """
    import pandas as pd

    from workbench.checkpoints.selection import linear_weights

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        original = checkpoints.open(source)
        stored = checkpoints.open(first) if first is not None else None
        entries = linear_weights(original)
        if stored is not None:
            held = {e.name: e.shape for e in stored.entries() if e.quantized}
            entries = [e for e in original.entries() if e.name in held]
            wrong = [e.name for e in entries if held[e.name] != e.shape]
            if wrong or not entries:
                what = f"{wrong[0]} has another shape" if wrong else "no quantized matrix of it is the source's"
                raise CheckpointError(f"{first} is not made from {source}: {what}", fix="check the paths")
        if sample is not None:
            chosen = sample_entries(entries, sample, seed)
            entries = [e for e in entries if e.name in chosen]
        by_name = {e.name: e for e in entries}
        for name in shown(list(by_name), "weights", progress):
            entry = by_name[name]
            w = original.read_dense(name)
            decoded = None if stored is None else stored.read_dense(name)
            rows += [_head(entry, w) | row for row in _combinations(w, decoded)]
    frame = pd.DataFrame(rows)
    frame["sqnr_db"] = sqnr_db(frame["power_source"].to_numpy(), frame["power_total"].to_numpy())
    return frame


def rank(table: pd.DataFrame) -> pd.DataFrame:
    """Combinations by pooled SQNR within each first, best one first, with `matrices`, how many were pooled."""
    import pandas as pd

    rows = []
    for key, group in table.groupby(["first", "second", "rule", "block", "bits"], sort=False):
        size = group["weights"].to_numpy()
        pooled = sqnr_db((group["power_source"] * size).sum(), (group["power_total"] * size).sum())
        names = ("first", "second", "rule", "block", "bits")
        rows.append(dict(zip(names, key, strict=True)) | {"sqnr_db": float(pooled), "matrices": len(group)})
    return pd.DataFrame(rows).sort_values(["first", "sqnr_db"], ascending=[True, False], ignore_index=True)


def steering_verdict(table: pd.DataFrame, *, worth_db: float = 0.1, seed: int = 0) -> SteeringVerdict:
    """Judge the rows of rule "steered" against "even" under the same first: stored where there is one, else nvfp4."""
    first = "stored" if (table["first"] == "stored").any() else "nvfp4"
    of = table[(table["first"] == first) & (table["second"] == "mxfp4") & (table["block"] == 32)]
    plain = of[of["rule"] == "even"].set_index("name")
    steered = of[of["rule"] == "steered"].set_index("name").loc[plain.index]
    size = plain["weights"].to_numpy(np.float64)
    columns = np.stack(
        [plain["power_total"] * size, steered["power_total"] * size, steered["power_worst"] * size], axis=1
    )
    total = columns.sum(axis=0)
    low = high = math.nan
    if len(plain) >= MIN_UNITS:
        drawn = draw_counts(len(plain), _RESAMPLES, seed) @ columns
        low, high = interval(sqnr_db(drawn[:, 0], drawn[:, 1]))
    gains = sqnr_db(columns[:, 0], columns[:, 1])
    verdict = "too few matrices" if math.isnan(low) else ("gains" if low > worth_db else "does not gain")
    return SteeringVerdict(
        matrices=len(plain),
        gain_db=float(sqnr_db(total[0], total[1])),
        gain_low_db=low,
        gain_high_db=high,
        span_db=float(sqnr_db(total[2], total[1])),
        largest_gain_db=float(gains.max()),
        worth_db=worth_db,
        verdict=verdict,
    )


# ---- one matrix ------------------------------------------------------------------------------------------------------


def _head(entry: Any, w: Tensor) -> dict[str, Any]:
    return {
        "name": entry.name,
        "layer": entry.layer,
        "expert": entry.expert,
        "projection": entry.projection,
        "weights": w.numel(),
        "power_source": _power(w),
    }


def _combinations(w: Tensor, stored: Tensor | None) -> Iterator[dict[str, Any]]:
    firsts: dict[str, Tensor] = {"none": w}
    if stored is not None:
        firsts["stored"] = stored
    for rule, label in (("amax", "nvfp4"), ("four_over_six", "nvfp4 four_over_six")):
        firsts[label] = quantize(w, "nvfp4", rule).dequantize()
    steered = "nvfp4" if stored is None else "stored"
    for label, a in firsts.items():
        for second, rule, block, bits, rounded in _seconds(a):
            yield {
                "first": label,
                "second": second,
                "rule": rule,
                "block": block,
                "bits": bits,
                "power_total": _power(rounded(a) - w),
                "power_worst": math.nan,
                "multiplier": 1.0,
            }
        if label != steered:
            continue
        best, worst, multiplier = _steer(w, a)
        yield {
            "first": label,
            "second": "mxfp4",
            "rule": "steered",
            "block": 32,
            "bits": 4.25,
            "power_total": best,
            "power_worst": worst,
            "multiplier": multiplier,
        }


def _seconds(a: Tensor) -> Iterator[tuple[str, str, int, float, Callable[[Tensor], Tensor]]]:
    """(format, rule, block, bits, rounding) of every second quantization that a's width allows."""
    for block in MX_BLOCKS:
        if a.shape[-1] % block:
            continue
        for rule in MX_RULES:
            yield "mxfp4", rule, block, 4 + 8 / block, _mx(rule, block)
    for block in (16, 32):
        if a.shape[-1] % block == 0:
            yield "nvfp4", "amax", block, 4 + 8 / block, _nvfp4(block)


def _mx(rule: str, block: int) -> Callable[[Tensor], Tensor]:
    if block == 32:
        return lambda x: quantize(x, "mxfp4", rule).dequantize()
    return lambda x: mx.dequantize(*mx.quantize(x, "e2m1", rule, (1, block)), "e2m1", (1, block))


def _nvfp4(block: int) -> Callable[[Tensor], Tensor]:
    def rounded(x: Tensor) -> Tensor:
        codes, scales, multiplier = nvfp4.quantize(x, "amax", None, block)
        if block == 16:
            return nvfp4_dequantize(codes, scales, multiplier)
        spread = scales.view(torch.uint8).repeat_interleave(block // 16, -1).view(scales.dtype)
        return nvfp4_dequantize(codes, spread, multiplier)

    return rounded


def _steer(w: Tensor, a: Tensor) -> tuple[float, float, float]:
    """Total error power of the best and of the worst multiplier, and the best; 1 is among those tried."""
    found = []
    for phase in range(PHASES):
        multiplier = 2.0 ** (phase / PHASES)
        found.append((_power(quantize(a * multiplier, "mxfp4").dequantize() / multiplier - w), multiplier))
    best, worst = min(found), max(found)
    return best[0], worst[0], best[1]


def _power(t: Tensor) -> float:
    return float(t.double().square().mean())
