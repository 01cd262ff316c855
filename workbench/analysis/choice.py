"""Which matrices an analysis looks at: those that are quantized, of a glob, or a stratified sample.

    chosen = choose_matrices(pairs, original, checkpoints, select="*experts*", sample=500, seed=0)
    chosen.names, chosen.weights["model.layers.1...weight"], chosen.faults

A sample takes as many matrices of every stratum (projection, shared or routed) as its share of all, at least two, drawn
without replacement; each stands for `weight` matrices of its stratum.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.checkpoints.selection import converted_at_load
from workbench.errors import CheckpointError, ConfigError, FormatError

from .faults import Fault
from .inputs import OpenCheckpoints

if TYPE_CHECKING:
    from .matrices import ArmPair

GRANULARITIES = ("layer", "expert")


_EXAMPLES = 20  # names that are kept of more


@dataclass(frozen=True, slots=True)
class Chosen:
    """names: matrices to measure, in layer order. by_pair: those of each pair's key. weights: of a sampled matrix (1.0
    without a sample). of: how many there are to choose from. faults: what an arm lacks or holds in another shape."""

    names: list[str]
    by_pair: dict[str, set[str]]
    weights: dict[str, float]
    of: int
    faults: list[Fault] = field(default_factory=list)

    def part(self, names: list[str]) -> Chosen:
        """The same of some of its names, without faults."""
        by_pair = {key: held.intersection(names) for key, held in self.by_pair.items()}
        return Chosen(names, by_pair, {name: self.weights[name] for name in names}, self.of)


def choose_matrices(
    pairs: Sequence[ArmPair],
    original: Any,
    checkpoints: OpenCheckpoints,
    *,
    has_source: bool,
    select: str | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Chosen:
    """Names that are quantized in a pair's first checkpoint (without one: in its second, or direct).

    original: the source's checkpoint, or without a source the first's. Raises ConfigError when `select` matches none,
    CheckpointError when no arm is quantized.
    """
    faults: list[Fault] = []
    by_pair = {pair.key: _matrices_of(pair, original, checkpoints, has_source, faults) for pair in pairs}
    wanted = set().union(*by_pair.values()) if by_pair else set()
    entries = [e for e in original.entries() if e.name in wanted]
    if select is not None:
        entries = [e for e in entries if _is_of(e, select)]
        faults = [f for f in faults if fnmatch.fnmatchcase(f.tensor, select)]
        if not entries and not faults:
            raise ConfigError(
                f"--select {select} matches no quantized matrix", fix="a glob over whole names, e.g. '*experts.*'"
            )
    weights = {e.name: 1.0 for e in entries} if sample is None else sample_entries(entries, sample, seed)
    names = [e.name for e in entries if e.name in weights]
    return Chosen(names, by_pair, weights, len(entries), faults)


def quantized_alone(pair: ArmPair, checkpoints: OpenCheckpoints) -> list[dict[str, Any]]:
    """Of two stored checkpoints, what each quantizes and the other does not: `summary.Alone`'s fields."""
    if pair.first is None or pair.second is None:
        return []
    first, second = (
        [entry.name for entry in checkpoints.open(path).entries() if entry.quantized]
        for path in (pair.first, pair.second)
    )
    found = []
    for arm, other, own, others in (
        (pair.first_arm, pair.second_arm, first, set(second)),
        (pair.second_arm, pair.first_arm, second, set(first)),
    ):
        if names := [name for name in own if name not in others]:
            found.append({"arm": arm, "other": other, "matrices": len(names), "examples": names[:_EXAMPLES]})
    return found


def sample_entries(entries: list[Any], size: int, seed: int) -> dict[str, float]:
    """Name -> weight of about `size` of the entries, at least two of every stratum."""
    strata: dict[tuple[str, bool], list[str]] = {}
    for entry in entries:
        strata.setdefault((entry.projection, entry.shared_expert), []).append(entry.name)
    rng = np.random.default_rng(seed)
    weights: dict[str, float] = {}
    for key in sorted(strata):
        names = strata[key]
        count = min(len(names), max(2, round(size * len(names) / max(1, len(entries)))))
        for index in sorted(rng.choice(len(names), size=count, replace=False)):
            weights[names[index]] = len(names) / count
    return weights


def pick_entries(entries: Sequence[Any], select: str | None = None, exclude: Sequence[str] = ()) -> list[Any]:
    """The entries whose name or module is of the glob `select` and of none of `exclude`. Raises ConfigError when none
    is left."""
    picked = [e for e in entries if (select is None or _is_of(e, select)) and not any(_is_of(e, g) for g in exclude)]
    if not picked:
        given = [f"--select {select}"] * (select is not None) + [f"--exclude {glob}" for glob in exclude]
        raise ConfigError(f"{' '.join(given)} leaves no matrix", fix="globs cover whole names, e.g. '*experts.*'")
    return picked


def units_of(entries: Sequence[Any], granularity: str) -> dict[str, list[Any]]:
    """Entries by what a server runs in one format: fused projections, and all routed experts of a layer ("layer") or
    each of them ("expert")."""
    from workbench.checkpoints.names import fusion_group

    if granularity not in GRANULARITIES:
        raise ConfigError(f"unknown granularity {granularity!r}", fix=f"choose one of: {', '.join(GRANULARITIES)}")
    units: dict[str, list[Any]] = {}
    for entry in entries:
        if entry.expert >= 0:
            container = entry.module.partition(f".experts.{entry.expert}.")[0] + ".experts"
            name = container if granularity == "layer" else f"{container}.{entry.expert}"
        else:
            name = fusion_group(entry.module) or entry.module
        units.setdefault(name, []).append(entry)
    return units


def rounding_fault(entry: Any, w: Any, format: str) -> Fault | None:
    """Why a matrix cannot be rounded to `format`: it is empty, holds NaN or infinity, or its K does not divide."""
    import torch

    from workbench.formats import quantize

    if 0 in entry.shape:
        return Fault(tensor=entry.name, kind="format", message=f"is empty (shape {list(entry.shape)})")
    if w is not None and not bool(torch.isfinite(w).all()):
        return Fault(tensor=entry.name, kind="non-finite", message="holds NaN or infinity")
    try:
        quantize(torch.zeros(1, entry.shape[-1]), format)
    except FormatError as error:
        what = error.message.partition(": ")[2]
        return Fault(tensor=entry.name, kind="format", message=f"does not take {format}: {what}")
    return None


def stored_bits(tensor: Any) -> float:
    """Bits of a matrix as it is stored: of a quantized one codes, block scales and zero points; one number for a whole
    matrix (a global scale) counts as none."""
    if not hasattr(tensor, "codes"):
        return 8.0 * float(tensor.nbytes)
    parts = (tensor.codes, tensor.block_scales, tensor.zero_points)
    return 8.0 * sum(t.nbytes for t in parts if t is not None)


def kept_bits(checkpoint: Any, entry: Any) -> float:
    """Stored bits of an entry as it is in its checkpoint; a plain one is not read for it."""
    plain = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64}.get(entry.format)
    if plain is not None:
        return float(plain * math.prod(entry.shape))
    return stored_bits(checkpoint.read(entry.name))


def _is_of(entry: Any, glob: str) -> bool:
    return fnmatch.fnmatchcase(entry.name, glob) or fnmatch.fnmatchcase(entry.module, glob)


def _matrices_of(
    pair: ArmPair, original: Any, checkpoints: OpenCheckpoints, has_source: bool, faults: list[Fault]
) -> set[str]:
    """Names that every arm of the pair holds in one shape; the others become faults. Where the second is made from the
    first as it loads, those that loading converts."""
    leading = pair.first or pair.second or pair.direct
    if leading is None:
        raise ConfigError(
            f"arm {pair.second_arm!r} has no stored checkpoint, so nothing says which matrices are quantized",
            fix="give the first, second or direct checkpoint of the pair",
        )
    names = {entry.name for entry in checkpoints.open(leading).entries() if entry.quantized}
    if not names:
        raise CheckpointError(
            f"{leading} holds no quantized matrix, so there is nothing to analyze",
            fix="check the arm's path; `workbench lint` says what the checkpoint holds",
        )
    if pair.first is not None and pair.second is None:
        names = {entry.name for entry in converted_at_load(checkpoints.open(pair.first).entries())}
    shapes = {entry.name: tuple(entry.shape) for entry in original.entries()}
    good = set(names)
    for arm, path in (("first", pair.first), ("second", pair.second), ("direct", pair.direct)):
        if path is None:
            continue
        held = {entry.name: tuple(entry.shape) for entry in checkpoints.open(path).entries()}
        for name in sorted(good):
            fault = _compare(name, arm, path, leading, held.get(name), shapes.get(name), original, has_source)
            if fault is not None:
                faults.append(fault)
                good.discard(name)
    return good


def _compare(
    name: str,
    arm: str,
    path: str | Path,
    leading: str | Path,
    held: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
    original: Any,
    has_source: bool,
) -> Fault | None:
    whole = "source" if has_source else "first arm"
    if shape is None:
        what = f"is quantized in {leading}, but the {whole} {original.path} does not hold it"
        return Fault(tensor=name, kind="missing", arm=whole, message=what)
    if held is None:
        what = f"is quantized in {leading}, but {path} does not hold it"
        return Fault(tensor=name, kind="missing", arm=arm, message=what)
    if held != shape:
        what = f"is {held} in {path} and {shape} in the {whole} {original.path}"
        return Fault(tensor=name, kind="shape", arm=arm, message=what)
    return None
