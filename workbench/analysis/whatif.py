"""What if: source x first x second x scale rule x block size, predicted from the weights alone in one pass.

    found = what_if(source=Path("kimi"), first=Path("kimi-nvfp4"), sample=200)
    rank(found.table), steering_verdict(found.table), found.faults

Every matrix is read once and rounded every way. "none" as the first is direct quantization from the source; "stored" is
the checkpoint's own. Block sizes other than a format's own are what its arithmetic would give, not files that a server
reads. Steered requantization multiplies each matrix by one number before MXFP4 rounds it and divides afterwards, where
a consumer can (in a norm's weight, a GEMM's alpha): MXFP4's scales are powers of two, so where a matrix falls between
them moves its error. The verdict is what that gained on these matrices, against the unsteered ones, with an interval.

Rules of one block size differ in which of three neighbouring exponents a block gets, so each block is rounded under the
three once (`whatif_loops.py`) and every rule picks among their sums. Of a matrix beyond `ROWS_ABOVE` weights only
evenly spread rows are rounded, and its SQNR carries the interval of that sample. Matrices are measured in threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import CheckpointError, WorkbenchError
from workbench.formats import global_scale, quantize
from workbench.kernels.reference import mx_exponents, nvfp4_block_scales
from workbench.records import Divergence

from .bootstrap import MIN_UNITS, draw_counts, interval
from .choice import pick_entries, sample_entries
from .faults import Fault
from .figures import sqnr_db
from .inputs import OpenCheckpoints, Progress, shown

if TYPE_CHECKING:
    import pandas as pd

PHASES = 16
"""Multipliers tried over an octave; beyond it everything repeats, as scales are powers of two."""
MX_RULES = ("floor", "even", "rceil", "mse")
MX_BLOCKS = (16, 32, 64)
NVFP4_BLOCKS = (16, 32)
ROWS_ABOVE = 1 << 22
"""Weights of a matrix above which a sample of its rows is rounded, of about so many weights."""
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class WhatIf:
    """table: a row for each matrix and combination. faults: matrices, or formats of them, that were left out. names:
    what the table is about, the matrices that a sample stands for included."""

    table: pd.DataFrame
    faults: list[Fault] = field(default_factory=list)
    names: frozenset[str] = frozenset()


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
    select: str | None = None,
    exclude: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> WhatIf:
    """Predict every combination; a row for each matrix and combination.

    Columns: name, layer, expert, projection, first, second, rule, block, bits (of the second, with scales), weights,
    rows (how many were rounded), power_source, power_total, sqnr_db with sqnr_low_db and sqnr_high_db (95 %, of the
    sampled rows; equal to it where all were rounded); for rule "steered" the best multiplier, and power_worst of the
    worst one. Matrices: those quantized in `first`, or the source's linear weights, of the globs `select` and not
    `exclude`; `sample`: about so many, stratified. What cannot be rounded is left out and named in `faults`.
    Raises CheckpointError where `first` is not made from the source or nothing could be rounded, ConfigError where the
    globs leave nothing.
    """
    import pandas as pd

    from workbench.checkpoints.selection import linear_weights

    rows: list[dict[str, Any]] = []
    faults: list[Fault] = []
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
        entries = pick_entries(entries, select, exclude)
        names = {e.name for e in entries}
        if sample is not None:
            chosen = sample_entries(entries, sample, seed)
            entries = [e for e in entries if e.name in chosen]
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1)) as pool:
            # as many matrices are held as there are threads, and one more that waits
            found = _ahead(pool, threads + 1, entries, lambda entry: _matrix(entry, original, stored))
            for _ in shown([e.name for e in entries], "weights", progress):
                of_matrix, of_faults = next(found)
                rows += of_matrix
                faults += of_faults
    if not rows:
        raise CheckpointError(
            f"{faults[0].tensor} {faults[0].message}", fix="nothing could be rounded; check the paths"
        )
    return WhatIf(pd.DataFrame(rows), faults, frozenset(names - {fault.tensor for fault in faults}))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A choice of the lattice as it was served: its predicted SQNR and its measured KL divergence from the source."""

    first: str
    second: str
    rule: str
    bits: float
    sqnr_db: float
    divergence: Divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """rank_correlation: Spearman's, of predicted noise (minus the SQNR) with the measured mean divergence (its lower
    bound); 1: the lattice's order is the served one. NaN below 3 choices."""

    source: str
    choices: tuple[Verified, ...]
    rank_correlation: float


def servable(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """The `count` best combinations of `rank` that a backend can run: a second format with its own block size, a rule
    that is in the file (steering is not). NVFP4 again after NVFP4 is left out."""
    of = rank(table)
    own = ((of["second"] == "mxfp4") & (of["block"] == 32)) | ((of["second"] == "nvfp4") & (of["block"] == 16))
    twice = (of["second"] == "nvfp4") & (of["first"] != "none")
    of = of[own & ~twice & (of["rule"] != "steered")]
    return of.sort_values("sqnr_db", ascending=False, ignore_index=True).head(count)


def verify(source: str | Path, choices: pd.DataFrame, divergences: Sequence[Divergence]) -> Verification:
    """Predicted against measured. choices: rows of `servable`; divergences: each one's, in the same order."""
    from scipy.stats import spearmanr

    measured = [d.mean.lower for d in divergences]
    predicted = [-float(x) for x in choices["sqnr_db"]]
    rho = float(spearmanr(predicted, measured).statistic) if len(measured) >= 3 else math.nan
    return Verification(
        source=str(source),
        choices=tuple(
            Verified(first=r.first, second=r.second, rule=r.rule, bits=r.bits, sqnr_db=r.sqnr_db, divergence=d)
            for r, d in zip(choices.itertuples(), divergences, strict=True)
        ),
        rank_correlation=rho,
    )


# ---- one matrix ------------------------------------------------------------------------------------------------------

Rows = tuple[list[dict[str, Any]], list[Fault]]


def _ahead(pool: ThreadPoolExecutor, held: int, entries: Sequence[Any], work: Any) -> Iterator[Rows]:
    """work(entry) of every entry in order, at most `held` of them begun and not handed on."""
    waiting = [pool.submit(work, entry) for entry in entries[:held]]
    for entry in [*entries[held:], *[None] * len(waiting)]:
        yield waiting.pop(0).result()
        if entry is not None:
            waiting.append(pool.submit(work, entry))


def _matrix(entry: Any, original: Any, stored: Any) -> Rows:
    """All rows of one matrix, and what of it was left out."""
    if 0 in entry.shape:
        return [], [Fault(tensor=entry.name, kind="format", message=f"is empty (shape {list(entry.shape)})")]
    try:
        w = original.read_dense(entry.name)
        decoded = None if stored is None else stored.read_dense(entry.name)
    except WorkbenchError as error:
        return [], [Fault(tensor=entry.name, kind="unreadable", message=error.message)]
    for arm, t in (("source", w), ("stored", decoded)):
        if t is not None and not bool(torch.isfinite(t).all()):
            return [], [Fault(tensor=entry.name, kind="non-finite", message="holds NaN or infinity", arm=arm)]
    n, k = w.shape
    left_out = [block for block in (16, 32) if k % block]
    what = f"has K = {k}, which blocks of {' and '.join(map(str, left_out))} do not divide"
    faults = [Fault(tensor=entry.name, kind="format", message=what)] if left_out else []
    picked = _picked_rows(n, k)
    head = {
        "name": entry.name,
        "layer": entry.layer,
        "expert": entry.expert,
        "projection": entry.projection,
        "weights": n * k,
        "rows": len(picked),
    }
    source = w[picked].contiguous()
    signal = source.double().square().sum(1).numpy()
    rows = []
    for row, errors in _combinations(w, decoded, picked):
        low, high = _sampled_interval(signal, errors, n)
        power = {"power_source": signal.sum() / source.numel(), "power_total": errors.sum() / source.numel()}
        sqnr = {"sqnr_db": float(sqnr_db(signal.sum(), errors.sum())), "sqnr_low_db": low, "sqnr_high_db": high}
        rows.append(head | power | row | sqnr)
    return rows, faults


def _picked_rows(n: int, k: int) -> Tensor:
    """All rows, or evenly spread ones of about ROWS_ABOVE weights."""
    count = n if n * k <= ROWS_ABOVE else max(MIN_UNITS, ROWS_ABOVE // k)
    return torch.linspace(0, n - 1, min(n, count)).round().long()


def _sampled_interval(signal: NDArray[np.float64], errors: NDArray[np.float64], of: int) -> tuple[float, float]:
    """95 % interval of the SQNR that all `of` rows have: the ratio of sums over sampled rows, its error linearized."""
    value = float(sqnr_db(signal.sum(), errors.sum()))
    n = len(signal)
    if n >= of or not errors.sum() or not signal.sum():
        return value, value
    residual = errors / errors.sum() - signal / signal.sum()
    relative = math.sqrt(n / (n - 1) * float(residual @ residual) * (1 - n / of))
    spread = 1.96 * relative * 10 / math.log(10)
    return value - spread, value + spread


def _combinations(w: Tensor, stored: Tensor | None, picked: Tensor) -> Iterator[tuple[dict[str, Any], Any]]:
    """(columns, squared error by row) of every combination that the width allows."""
    source = w[picked].contiguous()
    for label, a, amax in _firsts(w, stored, source, picked):
        for second, rule, block, errors in _seconds(source, a, amax):
            yield _row(label, second, rule, block), errors
        if label == ("nvfp4" if stored is None else "stored") and a.shape[-1] % 32 == 0:
            yield _steered(label, source, a)


def _row(first: str, second: str, rule: str, block: int) -> dict[str, Any]:
    row = {"first": first, "second": second, "rule": rule, "block": block, "bits": 4 + 8 / block}
    return row | {"power_worst": math.nan, "multiplier": 1.0}


def _firsts(
    w: Tensor, stored: Tensor | None, source: Tensor, picked: Tensor
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(label, values of the picked rows, largest magnitude of all rows; None: that of the picked ones)."""
    all_rows = len(picked) == len(w)
    yield "none", source, w.abs().amax()
    if stored is not None:
        yield "stored", stored[picked].contiguous(), stored.abs().amax()
    if w.shape[-1] % 16:
        return
    for rule, label in (("amax", "nvfp4"), ("four_over_six", "nvfp4 four_over_six")):
        shared = global_scale("nvfp4", rule, w.abs().amax())
        a = _nvfp4(source, shared, rule)
        # the largest weight is a code's own value under either rule, so that the rounded maximum is the weights'
        yield label, a, None if all_rows else w.abs().amax()


def _seconds(w: Tensor, a: Tensor, amax: Tensor | None) -> Iterator[tuple[str, str, int, Any]]:
    """(format, rule, block, squared error by row) of every second quantization that a's width allows."""
    from .whatif_loops import rounding_errors

    n, k = a.shape
    for block in MX_BLOCKS:
        if k % block:
            continue
        largest = a.unflatten(-1, (-1, block)).abs().amax(-1).reshape(-1)
        floor = mx_exponents(largest, "floor")
        candidates = torch.stack([floor, floor + 1, floor - 1])
        own, total = rounding_errors(a, w, _powers(candidates, largest), block=block)
        for rule in MX_RULES:
            if rule == "mse":  # floor's, unless another errs less
                chosen = own.argmin(0)
            else:
                chosen = (mx_exponents(largest, rule) - floor).numpy()
            yield "mxfp4", rule, block, np.take_along_axis(total, chosen[None], 0).reshape(n, -1).sum(1)
    shared = global_scale("nvfp4", "amax", a.abs().amax() if amax is None else amax)
    for block in NVFP4_BLOCKS:
        if k % block == 0:
            largest = a.unflatten(-1, (-1, block)).abs().amax(-1).reshape(-1)
            steps = nvfp4_block_scales(largest, shared).float() * shared
            yield "nvfp4", "amax", block, rounding_errors(a, w, steps[None], block=block)[1].reshape(n, -1).sum(1)


def _powers(exponents: Tensor, largest: Tensor) -> Tensor:
    """2**k, within what E8M0 and float32 hold; a zero block's is the smallest."""
    return torch.exp2(torch.where(largest == 0, -127, exponents.clamp(-127, 125)).double()).float()


def _nvfp4(w: Tensor, shared: Tensor, rule: str) -> Tensor:
    """Rounded to NVFP4 under a given global scale."""
    from .whatif_loops import round_blocks, rounding_errors

    if rule == "amax":
        return quantize(w, "nvfp4", global_scale=shared).dequantize()
    largest = w.unflatten(-1, (-1, 16)).abs().amax(-1).reshape(-1)
    steps = torch.stack([nvfp4_block_scales(largest * by, shared).float() * shared for by in (1.0, 1.5)])
    own = rounding_errors(w, w, steps, block=16)[0]
    return round_blocks(w, steps.gather(0, torch.from_numpy(own.argmin(0))[None])[0], block=16)


def _steered(first: str, w: Tensor, a: Tensor) -> tuple[dict[str, Any], Any]:
    """The best multiplier's error by row, beside the worst one's; 1 is among those tried."""
    from .whatif_loops import steered_errors

    multipliers = (2.0 ** (np.arange(PHASES) / PHASES)).astype(np.float32)
    errors = steered_errors(a, w, multipliers)
    totals = errors.sum(0)
    best = int(totals.argmin())
    row = _row(first, "mxfp4", "steered", 32)
    row |= {"power_worst": totals.max() / w.numel(), "multiplier": float(2.0 ** (best / PHASES))}
    return row, errors[:, best]
