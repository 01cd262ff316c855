"""From weights to answers: round one unit of a model at a time, run the model, and measure what reaches its answers.

    found = measure_sensitivity(source=Path("mini_kimi"), windows=windows, formats=("mxfp4", "nvfp4"), out=Path("s"))
    found = measure_recipes(source=..., windows=held_out, recipes={"plan": "plan.yaml", "nvfp4": "nvfp4"}, out=...)

A unit is what `plan.py` gives one format. Each is rounded alone, the rest left as the source has it, and three figures
are taken on given text: noise where the unit's sublayer ends, noise in the residual stream (after its layer, after the
last), and the KL divergence of the next-token distribution over the whole vocabulary. Then everything at once and some
random subsets, against the sum of their units' divergences: an error much smaller than what the model tells apart moves
the KL divergence by a quadratic form, so independent errors add; how well they do is measured here. Every case is one
run of the model from the changed layer on, journalled, so that a killed pass goes on.

`sensitivity.parquet` has a row a case, `sensitivity.json` the record (`Sensitivity`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import FORMATS, get_format
from workbench.records import write_json

from .bootstrap import MIN_UNITS, draw_counts, interval
from .choice import kept_bits, pick_entries, rounding_fault, units_of
from .faults import Fault
from .inputs import Progress, shown
from .journal import Journal

if TYPE_CHECKING:
    import pandas as pd

    from .through import Baseline, Network, Rounding

KEEP = "keep"
DEFAULT_FORMATS = ("mxfp4", "nvfp4", "fp8_channel")
RESAMPLES = 1000
TABLE, RECORD, JOURNAL = "sensitivity.parquet", "sensitivity.json", ".sensitivity.journal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Additivity:
    """One case of several units: its measured KL divergence (nats, with a 95 % interval over windows) and the sum of
    its units' own."""

    case: str
    units: int
    kl: float
    kl_low: float
    kl_high: float
    predicted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """KL divergence of recipe `first` minus that of `second`, nats, paired by window, with a 95 % interval."""

    first: str
    second: str
    first_bits: float
    second_bits: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """What was measured, and on what. ranking: units, the largest divergence a bit saved first, by format. faults: what
    could not be rounded. vocabulary: tokens that the divergence is summed over (all)."""

    source: str
    fingerprint: str
    text_fingerprint: str
    windows: int
    tokens: int
    vocabulary: int
    device: str
    granularity: str
    formats: tuple[str, ...]
    activations: str
    seed: int
    seconds: float
    ranking: dict[str, tuple[str, ...]] = field(default_factory=dict)
    additivity: tuple[Additivity, ...] = ()
    differences: tuple[Difference, ...] = ()
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """Modules to round. kind: unit, all, subset or recipe. units: format by unit, for the sum."""

    name: str
    kind: str
    roundings: Mapping[str, Rounding]
    format: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""


def measure_sensitivity(
    *,
    source: str | Path,
    windows: Sequence[Sequence[int]],
    out: Path,
    formats: Sequence[str] = DEFAULT_FORMATS,
    granularity: str = "layer",
    activations: bool = False,
    subsets: int = 8,
    select: str | None = None,
    exclude: Sequence[str] = (),
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Sensitivity:
    """Round every unit to every format alone, then all units to each, then `subsets` random choices; write the table
    and the record into `out`.

    windows: token ids, equally many each; intervals are over windows, NaN below 8 of them. activations: the inputs of
    rounded modules pass the format as well. What a format cannot take is a fault, and its unit has no such row. Raises
    ConfigError for an unknown format or granularity or unequal windows, what `load_network` raises, CheckpointError
    where the source's own answers are NaN, OutputError.
    """
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.selection import linear_weights

    from .through import Rounding

    start = time.monotonic()
    for name in formats:
        get_format(name)
    faults: list[Fault] = []
    with open_checkpoint(source) as checkpoint:
        fingerprint = checkpoint.fingerprint()
        linear = linear_weights(checkpoint)
        if not linear:
            raise CheckpointError(f"{source} has no linear layer", fix="give a checkpoint with `layers.<i>` matrices")
        units = units_of(pick_entries(linear, select, exclude), granularity)
        possible: dict[str, list[str]] = {unit: list(formats) for unit in units}
        for unit, entries in units.items():
            for entry in entries:
                found = [rounding_fault(entry, checkpoint.read_dense(entry.name), f) for f in formats]
                faults += list(dict.fromkeys(fault for fault in found if fault is not None))
                bad = {f for f, fault in zip(formats, found, strict=True) if fault is not None}
                possible[unit] = [f for f in possible[unit] if f not in bad]

    def rounded(choice: Mapping[str, str]) -> dict[str, Rounding]:
        return {e.module: Rounding(f, activations=activations) for unit, f in choice.items() for e in units[unit]}

    cases = [
        _Case(f"{unit} {f}", "unit", rounded({unit: f}), f, {unit: f}, unit) for unit in units for f in possible[unit]
    ]
    choices: dict[str, tuple[str, str, dict[str, str]]] = {
        f"all {f}": ("all", f, {unit: f for unit in units if f in possible[unit]}) for f in formats
    }
    rng = np.random.default_rng(seed)
    for number in range(subsets):
        choice = {unit: str(rng.choice(of)) for unit, of in possible.items() if of and rng.random() < 0.5}
        choices[f"subset {number}"] = ("subset", "", choice)
    cases += [_Case(name, kind, rounded(of), f, of) for name, (kind, f, of) in choices.items() if of]
    key = {
        "cases": "sensitivity 1",
        "source": fingerprint,
        "text": _fingerprint(windows),
        "formats": list(formats),
        "granularity": granularity,
        "activations": activations,
        "select": select,
        "exclude": list(exclude),
        "subsets": subsets,
        "seed": seed,
    }
    if (done := _finished(out, key)) is not None:
        return done
    rows, vocabulary = _run(source, windows, out, cases, key, device, progress)
    sizes = {unit: (sum(_size(e) for e in of), tuple(e.module for e in of)) for unit, of in units.items()}
    frame = _frame(rows, cases, sizes, activations, seed)
    record = Sensitivity(
        source=str(source),
        fingerprint=fingerprint,
        text_fingerprint=str(key["text"]),
        windows=len(windows),
        tokens=len(windows[0]),
        vocabulary=vocabulary,
        device=device,
        granularity=granularity,
        formats=tuple(formats),
        activations="rounded" if activations else "exact",
        seed=seed,
        seconds=round(time.monotonic() - start, 1),
        ranking={f: _ranking(frame, f) for f in formats},
        additivity=_additivity(frame),
        faults=tuple(faults),
    )
    _write(out, frame, record, key)
    return record


def measure_recipes(
    *,
    source: str | Path,
    windows: Sequence[Sequence[int]],
    out: Path,
    recipes: Mapping[str, str],
    activations: bool = False,
    exclude: Sequence[str] = (),
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Sensitivity:
    """Round the model by each recipe (a name or file of `workbench quantize --recipe`, or one format for all linear
    weights) and measure its divergence; the first one is held against every other, window by window.

    exclude: globs that stay as they are under every recipe. Raises as `measure_sensitivity`, and FormatError naming the
    matrix that a recipe's format cannot take.
    """
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.recipe import combine, read_recipe
    from workbench.checkpoints.selection import linear_weights

    from .through import Rounding

    start = time.monotonic()
    cases = []
    with open_checkpoint(source) as checkpoint:
        fingerprint = checkpoint.fingerprint()
        linear = pick_entries(linear_weights(checkpoint), None, exclude)
        kept = {entry.module: kept_bits(checkpoint, entry) for entry in linear}
    for name, of in recipes.items():
        recipe = combine(None, format=of) if of in FORMATS else read_recipe(of)
        chosen = {entry.module: recipe.choose(entry.module) for entry in linear}
        roundings = {
            module: Rounding(rule.format, rule.rule, rule.block, activations)
            for module, rule in chosen.items()
            if rule is not None and rule.quantizes
        }
        cases.append(_Case(name, "recipe", roundings, of))
    key = {
        "cases": "recipes 1",
        "source": fingerprint,
        "text": _fingerprint(windows),
        "recipes": {case.name: repr(sorted(case.roundings.items())) for case in cases},
        "seed": seed,
    }
    if (done := _finished(out, key)) is not None:
        return done
    rows, vocabulary = _run(source, windows, out, cases, key, device, progress)
    total = sum(_size(entry) for entry in linear)
    for case in cases:
        rows[case.name]["bits"] += sum(bits for module, bits in kept.items() if module not in case.roundings)
    frame = _frame(rows, cases, {}, activations, seed).assign(weights=total)
    record = Sensitivity(
        source=str(source),
        fingerprint=fingerprint,
        text_fingerprint=str(key["text"]),
        windows=len(windows),
        tokens=len(windows[0]),
        vocabulary=vocabulary,
        device=device,
        granularity="",
        formats=tuple(dict.fromkeys(r.format for case in cases for r in case.roundings.values())),
        activations="rounded" if activations else "exact",
        seed=seed,
        seconds=round(time.monotonic() - start, 1),
        differences=_differences(frame, seed),
    )
    _write(out, frame, record, key)
    return record


def read_sensitivity(folder: Path) -> tuple[pd.DataFrame, Sensitivity]:
    """The table and record of a measured pass over units. Raises ConfigError where the folder holds none."""
    from workbench.records import read_json

    from .tensors import read_frame

    try:
        frame, record = read_frame(folder / TABLE), read_json(Sensitivity, folder / RECORD)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} holds no sensitivity measurement: {error}", fix="make one with `workbench sensitivity`"
        ) from error
    if "unit" not in set(frame["kind"]):
        raise ConfigError(f"{folder} holds recipes, not units", fix="run `workbench sensitivity` without --recipe")
    return frame, record


def _finished(out: Path, key: dict[str, Any]) -> Sensitivity | None:
    """The record of this very measurement, where `out` holds it. Raises ConfigError where it holds another."""
    from workbench.records import read_json

    from .tensors import read_frame

    if not (out / TABLE).is_file():
        return None
    if read_frame(out / TABLE).attrs.get("inputs") != key:
        raise ConfigError(f"{out} holds another measurement", fix="give another --out, or empty this one")
    return read_json(Sensitivity, out / RECORD) if (out / RECORD).is_file() else None


# ---- running ---------------------------------------------------------------------------------------------------------


def _run(
    source: str | Path,
    windows: Sequence[Sequence[int]],
    out: Path,
    cases: Sequence[_Case],
    key: dict[str, Any],
    device: str,
    progress: Progress | None,
) -> tuple[dict[str, dict[str, Any]], int]:
    """A row for every case by name, through the journal, and the vocabulary's size."""
    from .through import load_network

    if not windows or len({len(w) for w in windows}) != 1 or len(windows[0]) < 2:
        raise ConfigError("no windows of equal length, of two tokens at least", fix="cut them with `cut_windows`")
    rows: dict[str, dict[str, Any]] = {}
    with Journal.open(out / JOURNAL, key) as log:
        names = [case.name for case in cases]
        by_name = {case.name: case for case in cases}
        network: Network = load_network(source, device=device, tokens=len(windows) * len(windows[0]))
        baseline = network.baseline(windows)
        if not all(bool(logs.isfinite().all()) for logs in baseline.logs):
            raise CheckpointError(
                f"{source}: its own answers are NaN or infinite, so nothing can be held against them",
                fix="`workbench lint --all-values` names tensors that hold NaN",
            )
        for name in shown(names, "runs of the model", progress):
            if name not in log:
                log.add(name, [], _measure(network, baseline, by_name[name]))
            rows[name] = log.extra(name)
    return rows, int(baseline.logs[0].shape[-1])


def _measure(network: Network, baseline: Baseline, case: _Case) -> dict[str, Any]:
    """One run; every figure as a list over windows."""
    modules = list(case.roundings)
    blocks = {network.block_of(module) for module in modules}
    block = blocks.pop() if len(blocks) == 1 else ""
    numbers = [number for number in network.layers if any(f".layers.{number}." in f".{m}" for m in modules)]
    with network.rounded(case.roundings) as bits:
        found = network.outcome(baseline, first_layer=min(numbers, default=max(network.layers) + 1), block=block)
    row: dict[str, Any] = {"bits": sum(bits.values()), "kl": list(found.kl), "same_top1": list(found.same_top1)}
    row["logits"] = list(found.logits)
    for place, power in (("block", found.block), ("residual", found.residual), ("last", found.last)):
        row[place] = None if power is None else [list(power.noise), list(power.signal)]
    return row


# ---- the table -------------------------------------------------------------------------------------------------------


def _frame(
    rows: Mapping[str, Mapping[str, Any]],
    cases: Sequence[_Case],
    units: Mapping[str, tuple[int, tuple[str, ...]]],
    activations: bool,
    seed: int,
) -> pd.DataFrame:
    """A row a case. Noise is a power ratio, pooled over windows; `kl_windows` are the windows' own means."""
    import pandas as pd

    single = {(c.unit, c.format): np.array(rows[c.name]["kl"]) for c in cases if c.kind == "unit"}
    table = []
    for case in cases:
        row = rows[case.name]
        kl = np.array(row["kl"])
        parts = [single[of] for of in case.units.items() if of in single]
        predicted = np.sum(parts, axis=0) if parts else np.full(len(kl), math.nan)
        low, high = _interval(kl, np.ones(len(kl)), seed)
        predicted_low, predicted_high = _interval(predicted, np.ones(len(kl)), seed)
        entry: dict[str, Any] = {
            "case": case.name,
            "kind": case.kind,
            "unit": case.unit,
            "format": case.format,
            "activations": "rounded" if activations else "exact",
            "choice": json.dumps(dict(case.units)),
            "weights": sum(units[unit][0] for unit in case.units),
            "modules": list(units[case.unit][1]) if case.unit else [],
            "bits": row["bits"],
            "kl": kl.mean(),
            "kl_low": low,
            "kl_high": high,
            "kl_predicted": predicted.mean(),
            "kl_predicted_low": predicted_low,
            "kl_predicted_high": predicted_high,
            "same_top1": float(np.mean(row["same_top1"])),
            "log_probability_mse": float(np.mean(row["logits"])),
        }
        for place in ("block", "residual", "last"):
            noise, signal = (np.array(x) for x in row[place]) if row[place] else (np.full(1, math.nan),) * 2
            low, high = _interval(noise, signal, seed)
            ratio = noise.sum() / signal.sum() if signal.sum() else math.nan
            entry |= {f"noise_{place}": ratio, f"noise_{place}_low": low, f"noise_{place}_high": high}
        table.append(entry | {"kl_windows": kl.tolist()})
    return pd.DataFrame(table)


def _interval(above: NDArray[np.float64], below: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval over windows of a ratio of sums."""
    if len(above) < MIN_UNITS:
        return math.nan, math.nan
    counts = draw_counts(len(above), RESAMPLES, seed)
    return interval((counts @ above) / (counts @ below))


def _ranking(frame: pd.DataFrame, format: str) -> tuple[str, ...]:
    of = frame[(frame["kind"] == "unit") & (frame["format"] == format)]
    return tuple(of.assign(rate=of["kl"] / of["weights"]).sort_values("rate", ascending=False)["unit"])


def _additivity(frame: pd.DataFrame) -> tuple[Additivity, ...]:
    of = frame[frame["kind"].isin(["all", "subset"])]
    return tuple(
        Additivity(
            case=row.case,
            units=len(json.loads(row.choice)),
            kl=float(row.kl),
            kl_low=float(row.kl_low),
            kl_high=float(row.kl_high),
            predicted=float(row.kl_predicted),
        )
        for row in of.itertuples()
    )


def _differences(frame: pd.DataFrame, seed: int) -> tuple[Difference, ...]:
    of = list(frame.itertuples())
    found = []
    for other in of[1:]:
        difference = np.array(of[0].kl_windows) - np.array(other.kl_windows)
        low, high = _interval(difference, np.ones(len(difference)), seed)
        found.append(
            Difference(
                first=of[0].case,
                second=other.case,
                first_bits=float(of[0].bits / of[0].weights),
                second_bits=float(other.bits / other.weights),
                mean=float(difference.mean()),
                low=low,
                high=high,
            )
        )
    return tuple(found)


def _write(out: Path, frame: pd.DataFrame, record: Sensitivity, key: dict[str, Any]) -> None:
    from .tensors import write_frame

    frame.attrs["inputs"] = key
    write_frame(out / TABLE, frame)
    write_json(out / RECORD, record)
    (out / JOURNAL).unlink(missing_ok=True)


def _size(entry: Any) -> int:
    return int(entry.shape[0]) * int(entry.shape[1])


def _fingerprint(windows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(window) for window in windows]).encode()).hexdigest()[:16]
