"""A mixed-precision plan: which layers get more bits within a budget of stored bits per weight.

    plan = plan_bits(source=Path("kimi"), bits=5.0, sensitivity=Path("sensitivity"))      # measured, `sensitivity.py`
    plan = plan_bits(source=Path("kimi"), bits=5.0, formats=("mxfp4", "nvfp4", "keep"))   # predicted from the weights
    write_recipe(Path("plan.yaml"), plan)          # workbench quantize SRC DST --recipe plan.yaml --dialect ...

Units are what a server runs in one format: fused projections, and all routed experts of a layer ("layer"), or each
expert ("expert"). A unit's noise in a format is the KL divergence that was measured with it alone rounded; without a
measurement, its expected output noise over its expected output power (`moments.py`) times the matrix's share in what
its layer adds: 1, or for a routed expert its share of the layer's tokens. The noise of units is added up, and which get
more bits is a knapsack, solved exactly (HiGHS). Trade-off: the sum over output noises takes every layer to be equally
harmful, which it is not; the measured one costs a run of the model for each unit and format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import QuantizedTensor, get_format, quantize
from workbench.formats.activations import Activations, read_activations
from workbench.records import write_text

from .choice import kept_bits, pick_entries, rounding_fault, stored_bits, units_of
from .faults import Fault
from .inputs import Progress, shown
from .moments import expected_power, moment_for

KEEP = "keep"
FORMATS = ("mxfp4", "nvfp4", "fp8_channel", KEEP)
_NAMED = 5  # tensors that a message names
_GAP, _SOLVER_S = 1e-6, 120.0
NOISE, DIVERGENCE = "output noise", "KL divergence, nats"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Matrices that get one format. bits, noise: by format that it can have, stored bits of all its weights and its
    noise."""

    name: str
    modules: tuple[str, ...]
    weights: int
    bits: dict[str, float]
    noise: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The format of one unit. share: of the plan's noise."""

    unit: str
    modules: tuple[str, ...]
    format: str
    weights: int
    noise: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """bits: stored bits a weight over all units, at most `budget`. noise: sum over units, of `measure`: output noise
    relative to the outputs, or KL divergence in nats.

    uniform: for each format alone (kept, where a unit cannot have it), its bits and noise; best_uniform: the quietest
    of those within the budget ("" : none). choices: noisiest unit first. activations: what the inputs' second moments
    are from, or what the measured model did with its inputs. kept: modules that were left out and share a container
    with planned ones. faults: what some format cannot take.
    """

    source: str
    budget: float
    bits: float
    noise: float
    granularity: str
    activations: str
    uniform: dict[str, dict[str, float]]
    best_uniform: str
    choices: tuple[Choice, ...] = field(default_factory=tuple)
    measure: str = NOISE
    kept: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


def plan_bits(
    *,
    source: str | Path,
    bits: float,
    formats: Sequence[str] | None = None,
    activations: Path | None = None,
    sensitivity: Path | None = None,
    granularity: str | None = None,
    select: str | None = None,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> Plan:
    """Choose a format for every unit of the source's linear weights. bits: stored bits a weight, scales included.

    sensitivity: a folder of `measure_sensitivity`, whose divergences decide; its units and formats are then the plan's.
    select, exclude: globs of matrices; the others stay as they are and count for nothing. Raises ConfigError for a
    budget below the smallest format's bits, an unknown granularity or format, a measurement of another source or
    without a format; CheckpointError where the source has no linear weight.
    """
    faults: list[Fault] = []
    if sensitivity is not None:
        if activations is not None:
            raise ConfigError("both activations and a measured sensitivity are given", fix="give one of them")
        units, made_with, granularity = _measured_units(
            source, sensitivity, formats, granularity, select, exclude, faults
        )
    else:
        granularity = granularity or "layer"
        made_with = "captured" if activations is not None else "white"
        units = measure_units(
            source=source,
            formats=formats or FORMATS,
            activations=activations,
            granularity=granularity,
            select=select,
            exclude=exclude,
            faults=faults,
            progress=progress,
        )
    chosen = choose_formats(units, bits, faults)
    weights = sum(unit.weights for unit in units)
    noise = sum(unit.noise[chosen[unit.name]] for unit in units)
    uniform = _uniform(units)
    within = {f: of["noise"] for f, of in uniform.items() if of["bits"] <= bits + 1e-9}
    choices = [
        Choice(
            unit=unit.name,
            modules=unit.modules,
            format=chosen[unit.name],
            weights=unit.weights,
            noise=unit.noise[chosen[unit.name]],
            share=unit.noise[chosen[unit.name]] / noise if noise > 0 else 0.0,
        )
        for unit in units
    ]
    return Plan(
        source=str(source),
        budget=bits,
        bits=sum(unit.bits[chosen[unit.name]] for unit in units) / weights,
        noise=noise,
        granularity=granularity,
        activations=made_with,
        uniform=uniform,
        best_uniform=min(within, key=lambda f: within[f]) if within else "",
        choices=tuple(sorted(choices, key=lambda c: (-c.noise, c.unit))),
        measure=NOISE if sensitivity is None else DIVERGENCE,
        kept=_kept(source, units),
        faults=tuple(faults),
    )


def measure_units(
    *,
    source: str | Path,
    formats: Sequence[str],
    activations: Path | None = None,
    granularity: str = "layer",
    select: str | None = None,
    exclude: Sequence[str] = (),
    faults: list[Fault] | None = None,
    progress: Progress | None = None,
) -> list[Unit]:
    """Every unit of the source with its bits and expected output noise under every format, in layer order. What a
    format cannot take goes to `faults`; its unit does not have that format, but may be kept."""
    from workbench.checkpoints import open_checkpoint

    for name in formats:
        if name != KEEP:
            get_format(name)
    captured = read_activations(activations) if activations is not None else None
    faults = [] if faults is None else faults
    with open_checkpoint(source) as checkpoint:
        entries = pick_entries(_linear(checkpoint), select, exclude)
        units = units_of(entries, granularity)
        shares = _shares(entries, captured)
        unit_of = {entry.name: unit for unit, of in units.items() for entry in of}
        by_name = {entry.name: entry for entry in entries}
        sums = {unit: _Sum() for unit in units}
        for name in shown(list(by_name), "weights", progress):
            tensor = checkpoint.read(name)
            sums[unit_of[name]].add(by_name[name], tensor, formats, captured, shares[name], faults)
    return [sums[name].unit(name) for name in units]


def choose_formats(units: Sequence[Unit], bits: float, faults: Sequence[Fault] = ()) -> dict[str, str]:
    """The format of each unit: least noise within `bits` a weight, as a multiple-choice knapsack (SciPy's HiGHS).

    Raises ConfigError where the fewest bits are too many, with the `faults` that keep units unquantized.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    weights = sum(unit.weights for unit in units)
    least = sum(min(unit.bits.values()) for unit in units) / weights
    if least > bits * (1 + 1e-12):
        raise _too_few(bits, least, faults)
    options = [(place, unit, f) for place, unit in enumerate(units) for f in unit.bits]
    noise = np.array([unit.noise[f] for _, unit, f in options])
    cost = np.array([unit.bits[f] for _, unit, f in options]) / weights
    rows = np.array([place for place, _, _ in options])
    one_each = csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(len(units), len(rows)))
    found = milp(
        noise * (1e4 / (noise.max() or 1.0)),  # its tolerances are absolute
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(cost[None], -np.inf, bits * (1 + 1e-12))],
        options={"mip_rel_gap": _GAP, "time_limit": _SOLVER_S},
    )
    if found.x is None:
        raise ConfigError(f"no plan was found within {_SOLVER_S} s: {found.message}", fix="plan by --granularity layer")
    return {unit.name: f for (_, unit, f), taken in zip(options, found.x, strict=True) if taken > 0.5}


def _too_few(bits: float, least: float, faults: Sequence[Fault]) -> ConfigError:
    fix = f"these formats take at least {least:.3f}"
    if not faults:
        return ConfigError(f"a budget of {bits} bits a weight", fix=fix)
    of = {fault.tensor: fault.message for fault in faults}
    named = "; ".join(f"{tensor} {message}" for tensor, message in list(of.items())[:_NAMED])
    return ConfigError(
        f"a budget of {bits} bits a weight: what shares a format with {len(of)} matrices that cannot be rounded"
        f" stays as it is ({named}{'; ...' if len(of) > _NAMED else ''})",
        fix=f"repair the source, or leave them out (--exclude NAME); else {fix}",
    )


def write_recipe(path: Path, plan: Plan) -> None:
    """The plan as a recipe for `workbench quantize`. Raises OutputError."""
    note = (
        f"Planned for {plan.budget:g} bits a weight ({plan.bits:.3f} used) from {plan.activations} inputs:"
        f" {plan.measure} {plan.noise:.4g}, {plan.best_uniform or 'no single format'} alone"
        f" {plan.uniform[plan.best_uniform]['noise'] if plan.best_uniform else float('nan'):.4g}."
    )
    lines = [f"note: {json.dumps(note)}", "rules:"]
    lines += [f"  - {{match: {json.dumps(module)}, format: {KEEP}}}" for module in plan.kept]
    for choice in plan.choices:
        container = _container(choice.modules)
        for pattern in [container] if container else choice.modules:
            lines.append(f"  - {{match: {json.dumps(pattern)}, format: {choice.format}}}")
    lines.append('  - {match: "*", format: keep}')
    write_text(path, "\n".join(lines) + "\n")


# ---- units -----------------------------------------------------------------------------------------------------------


def _linear(checkpoint: Any) -> list[Any]:
    from workbench.checkpoints.selection import linear_weights

    entries: list[Any] = linear_weights(checkpoint)
    if not entries:
        raise CheckpointError(
            f"{checkpoint.path} has no linear layer", fix="give a checkpoint with `layers.<i>` matrices"
        )
    return entries


def _measured_units(
    source: str | Path,
    folder: Path,
    formats: Sequence[str] | None,
    granularity: str | None,
    select: str | None,
    exclude: Sequence[str],
    faults: list[Fault],
) -> tuple[list[Unit], str, str]:
    """The units of a measured pass, what it did with inputs, and its granularity."""
    from workbench.checkpoints import open_checkpoint

    from .sensitivity import read_sensitivity

    frame, record = read_sensitivity(folder)
    wanted = tuple(formats or (*record.formats, KEEP))
    lacking = [f for f in wanted if f not in (*record.formats, KEEP)]
    if lacking or granularity not in (None, record.granularity):
        what = f"format {lacking[0]!r}" if lacking else f"granularity {granularity!r}"
        raise ConfigError(f"{folder} was not measured with {what}", fix="measure it, or plan with what was measured")
    faults += record.faults
    with open_checkpoint(source) as checkpoint:
        if checkpoint.fingerprint() != record.fingerprint:
            raise ConfigError(f"{folder} was measured on {record.source}, not on {source}", fix="measure this one")
        entries = units_of(pick_entries(_linear(checkpoint), select, exclude), record.granularity)
        rows = {(row.unit, row.format): row for row in frame[frame["kind"] == "unit"].itertuples()}
        units = []
        for name, of in entries.items():
            modules = tuple(entry.module for entry in of)
            measured = {f: rows[name, f] for f in wanted if (name, f) in rows}
            if any(set(row.modules) != set(modules) for row in measured.values()):
                raise ConfigError(
                    f"{folder} was measured with other matrices in {name}", fix="give --select, --exclude as there"
                )
            bits = {f: float(row.bits) for f, row in measured.items()}
            noise = {f: float(row.kl) for f, row in measured.items()}
            if KEEP in wanted or len(bits) < len(wanted):
                bits[KEEP], noise[KEEP] = sum(kept_bits(checkpoint, entry) for entry in of), 0.0
            size = sum(entry.shape[0] * entry.shape[1] for entry in of)
            units.append(Unit(name=name, modules=modules, weights=size, bits=bits, noise=noise))
    return units, record.activations, record.granularity


def _uniform(units: Sequence[Unit]) -> dict[str, dict[str, float]]:
    """Bits and noise of every format alone; a unit that cannot have it is kept."""
    formats = dict.fromkeys(f for unit in units for f in unit.bits)
    weights = sum(unit.weights for unit in units)
    found = {}
    for f in formats:
        of = [(unit, f if f in unit.bits else KEEP) for unit in units]
        if all(taken in unit.bits for unit, taken in of):
            bits = sum(unit.bits[taken] for unit, taken in of) / weights
            found[f] = {"bits": bits, "noise": sum(unit.noise[taken] for unit, taken in of)}
    return found


def _kept(source: str | Path, units: Sequence[Unit]) -> tuple[str, ...]:
    """Experts that no unit holds, in layers whose experts a recipe's line names as a whole."""
    from workbench.checkpoints import open_checkpoint

    containers = {c for unit in units if (c := _container(unit.modules))}
    planned = {module for unit in units for module in unit.modules}
    with open_checkpoint(source) as checkpoint:
        return tuple(
            entry.module
            for entry in _linear(checkpoint)
            if entry.module not in planned and any(entry.module.startswith(f"{c}.") for c in containers)
        )


class _Sum:
    """One unit's bits and noise, matrix by matrix."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.weights = 0
        self.bits: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.kept = 0.0
        self.refused: set[str] = set()

    def add(
        self,
        entry: Any,
        tensor: Any,
        formats: Sequence[str],
        captured: Activations | None,
        share: float,
        faults: list[Fault],
    ) -> None:
        w = tensor.effective() if isinstance(tensor, QuantizedTensor) else tensor.float()
        self.modules.append(entry.module)
        self.weights += w.numel()
        self.kept += stored_bits(tensor)
        fits = []
        for format in formats:
            fault = None if format == KEEP else rounding_fault(entry, w, format)
            if fault is None:
                fits.append(format)
            else:
                self.refused.add(format)
                if fault not in faults:
                    faults.append(fault)
        moment = signal = None
        if any(format != KEEP for format in fits):
            moment, _ = moment_for(entry.module, w.shape[-1], captured, _rows(entry.module, captured, w.shape[-1]))
            signal = expected_power(w, moment) if moment is not None else None
        for format in fits:
            size, noise = stored_bits(tensor), 0.0
            if format != KEEP:
                rounded = quantize(w, format, name=entry.name)
                size = stored_bits(rounded)
                if moment is not None and signal:
                    noise = share * expected_power(rounded.dequantize() - w, moment) / signal
            self.bits[format] = self.bits.get(format, 0.0) + size
            self.noise[format] = self.noise.get(format, 0.0) + noise

    def unit(self, name: str) -> Unit:
        bits = {f: b for f, b in self.bits.items() if f not in self.refused}
        if self.refused:
            bits[KEEP] = self.kept
        noise = {f: 0.0 if f == KEEP else self.noise[f] for f in bits}
        return Unit(name=name, modules=tuple(self.modules), weights=self.weights, bits=bits, noise=noise)


def _rows(module: str, captured: Activations | None, k: int) -> torch.Tensor:
    return captured.input(module).float() if captured is not None and module in captured else torch.empty(0, k)


def _shares(entries: Sequence[Any], captured: Activations | None) -> dict[str, float]:
    """A routed expert's share of its layer's routed tokens (equal without a file), 1 for every other matrix."""
    peers: dict[tuple[int, str], list[Any]] = {}
    shares = {entry.name: 1.0 for entry in entries}
    for entry in entries:
        if entry.expert >= 0:
            peers.setdefault((entry.layer, entry.projection), []).append(entry)
    for group in peers.values():
        seen = [captured.tokens_seen(e.module) if captured is not None and e.module in captured else 1 for e in group]
        total = sum(seen)
        for entry, tokens in zip(group, seen, strict=True):
            shares[entry.name] = tokens / total if total else 0.0
    return shares


def _container(modules: Sequence[str]) -> str:
    """What stands for all modules of a unit in a recipe: the experts' container, "" where names are listed."""
    if len(modules) < 2:
        return ""
    heads = {module.partition(".experts.")[0] + ".experts" for module in modules if ".experts." in module}
    numbers = {module.partition(".experts.")[2].partition(".")[0] for module in modules}
    if len(heads) != 1 or not all(".experts." in module for module in modules):
        return ""
    head = heads.pop()
    return head if len(numbers) > 1 else f"{head}.{numbers.pop()}"
