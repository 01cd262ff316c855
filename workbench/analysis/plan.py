"""A mixed-precision plan: which layers get more bits, by output noise, within a budget of stored bits per weight.

    plan = plan_bits(source=Path("kimi"), bits=5.0, formats=("mxfp4", "nvfp4", "fp8_channel", "keep"))
    write_recipe(Path("plan.yaml"), plan)          # workbench quantize SRC DST --recipe plan.yaml --dialect ...

Every linear weight is rounded to every format; its noise is the expected output noise over the expected output power
(`moments.py`) times the matrix's share in what its layer adds: 1, or for a routed expert its share of the layer's
tokens. Units are what a server runs in one format: fused projections, and all routed experts of a layer ("layer"), or
each expert ("expert"). The noise of units adds; which of them get more bits is a knapsack, solved along each unit's
lower convex hull, optimal but for the last unit. Trade-off: noise is added up, not carried through the network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import QuantizedTensor, get_format, quantize
from workbench.formats.activations import Activations, read_activations
from workbench.records import write_text

from .inputs import Progress, shown
from .moments import expected_power, moment_for

KEEP = "keep"
FORMATS = ("mxfp4", "nvfp4", "fp8_channel", KEEP)
GRANULARITIES = ("layer", "expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Matrices that get one format. bits, noise: by format, stored bits of all its weights and weighted noise."""

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
    """bits: stored bits a weight over all units, at most `budget`. noise: sum over units, relative to their outputs.

    uniform: for each format alone, its bits and noise; best_uniform: the quietest of those within the budget ("" :
    none). choices: noisiest unit first. activations: what the inputs' second moments are from.
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


def plan_bits(
    *,
    source: str | Path,
    bits: float,
    formats: Sequence[str] = FORMATS,
    activations: Path | None = None,
    granularity: str = "layer",
    progress: Progress | None = None,
) -> Plan:
    """Choose a format for every unit of the source's linear weights. bits: stored bits a weight, scales included.

    Raises ConfigError for a budget below the smallest format's bits, an unknown granularity or format;
    CheckpointError where the source has no linear weight.
    """
    units = measure_units(
        source=source, formats=formats, activations=activations, granularity=granularity, progress=progress
    )
    chosen = choose_formats(units, bits)
    weights = sum(unit.weights for unit in units)
    noise = sum(unit.noise[chosen[unit.name]] for unit in units)
    uniform = {
        f: {
            "bits": sum(unit.bits[f] for unit in units) / weights,
            "noise": sum(unit.noise[f] for unit in units),
        }
        for f in formats
    }
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
        activations="captured" if activations is not None else "white",
        uniform=uniform,
        best_uniform=min(within, key=lambda f: within[f]) if within else "",
        choices=tuple(sorted(choices, key=lambda c: (-c.noise, c.unit))),
    )


def measure_units(
    *,
    source: str | Path,
    formats: Sequence[str],
    activations: Path | None = None,
    granularity: str = "layer",
    progress: Progress | None = None,
) -> list[Unit]:
    """Every unit of the source with its bits and noise under every format, in layer order."""
    from workbench.checkpoints import open_checkpoint
    from workbench.checkpoints.selection import linear_weights

    if granularity not in GRANULARITIES:
        raise ConfigError(f"unknown granularity {granularity!r}", fix=f"choose one of: {', '.join(GRANULARITIES)}")
    for name in formats:
        if name != KEEP:
            get_format(name)
    captured = read_activations(activations) if activations is not None else None
    with open_checkpoint(source) as checkpoint:
        entries = linear_weights(checkpoint)
        if not entries:
            raise CheckpointError(f"{source} has no linear layer", fix="give a checkpoint with `layers.<i>` matrices")
        shares = _shares(entries, captured)
        by_name = {entry.name: entry for entry in entries}
        found: dict[str, _Sum] = {}
        for name in shown(list(by_name), "weights", progress):
            entry = by_name[name]
            tensor = checkpoint.read(name)
            unit = found.setdefault(_unit_of(entry, granularity), _Sum())
            unit.add(entry, tensor, formats, captured, shares[name])
    return [
        Unit(name=name, modules=tuple(s.modules), weights=s.weights, bits=s.bits, noise=s.noise)
        for name, s in found.items()
    ]


def choose_formats(units: Sequence[Unit], bits: float) -> dict[str, str]:
    """The format of each unit: least noise within `bits` a weight.

    Starts from each unit's fewest bits and takes the step that removes most noise a bit, as long as one fits. Raises
    ConfigError where the fewest bits are too many.
    """
    hulls = {unit.name: _hull(unit) for unit in units}
    chosen = {name: 0 for name in hulls}
    left = bits * sum(unit.weights for unit in units) * (1 + 1e-12)
    left -= sum(unit.bits[hulls[unit.name][0]] for unit in units)
    if left < 0:
        least = sum(unit.bits[hulls[unit.name][0]] for unit in units) / sum(unit.weights for unit in units)
        raise ConfigError(f"a budget of {bits} bits a weight", fix=f"these formats take at least {least:.3f}")
    by_name = {unit.name: unit for unit in units}
    while True:
        steps = []
        for name, place in chosen.items():
            hull, unit = hulls[name], by_name[name]
            if place + 1 < len(hull):
                more = unit.bits[hull[place + 1]] - unit.bits[hull[place]]
                if more <= left:
                    steps.append(((unit.noise[hull[place]] - unit.noise[hull[place + 1]]) / more, name, more))
        if not steps:
            return {name: hulls[name][place] for name, place in chosen.items()}
        _, name, more = max(steps)
        chosen[name] += 1
        left -= more


def write_recipe(path: Path, plan: Plan) -> None:
    """The plan as a recipe for `workbench quantize`. Raises OutputError."""
    note = (
        f"Planned for {plan.budget:g} bits a weight ({plan.bits:.3f} used) from {plan.activations} inputs: output noise"
        f" {plan.noise:.4g}, {plan.best_uniform or 'no single format'} alone"
        f" {plan.uniform[plan.best_uniform]['noise'] if plan.best_uniform else float('nan'):.4g}."
    )
    lines = [f"note: {json.dumps(note)}", "rules:"]
    for choice in plan.choices:
        container = _container(choice.modules)
        for pattern in [container] if container else choice.modules:
            lines.append(f"  - {{match: {json.dumps(pattern)}, format: {choice.format}}}")
    lines.append('  - {match: "*", format: keep}')
    write_text(path, "\n".join(lines) + "\n")


# ---- one matrix ------------------------------------------------------------------------------------------------------


class _Sum:
    def __init__(self) -> None:
        self.modules: list[str] = []
        self.weights = 0
        self.bits: dict[str, float] = {}
        self.noise: dict[str, float] = {}

    def add(self, entry: Any, tensor: Any, formats: Sequence[str], captured: Activations | None, share: float) -> None:
        w = tensor.effective() if isinstance(tensor, QuantizedTensor) else tensor.float()
        rows = _rows(entry.module, captured, w.shape[-1])
        moment, _ = moment_for(entry.module, w.shape[-1], captured, rows)
        signal = expected_power(w, moment) if moment is not None else 0.0
        self.modules.append(entry.module)
        self.weights += w.numel()
        for format in formats:
            if format == KEEP:
                size = _stored_bits(tensor) if isinstance(tensor, QuantizedTensor) else 8.0 * tensor.nbytes
                noise = 0.0
            else:
                rounded = quantize(w, format, name=entry.name)
                size = _stored_bits(rounded)
                noise = 0.0
                if moment is not None and signal > 0:
                    noise = share * expected_power(rounded.dequantize() - w, moment) / signal
            self.bits[format] = self.bits.get(format, 0.0) + size
            self.noise[format] = self.noise.get(format, 0.0) + noise


def _stored_bits(tensor: QuantizedTensor) -> float:
    """Bits of codes, block scales and zero points; one number for a whole matrix (a global scale) counts as none."""
    parts = (tensor.codes, tensor.block_scales, tensor.zero_points)
    return 8.0 * sum(t.nbytes for t in parts if t is not None)


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


def _unit_of(entry: Any, granularity: str) -> str:
    from workbench.checkpoints.names import fusion_group

    container = entry.module.partition(f".experts.{entry.expert}.")[0] + ".experts"
    if entry.expert >= 0:
        return container if granularity == "layer" else f"{container}.{entry.expert}"
    return fusion_group(entry.module) or entry.module


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


def _hull(unit: Unit) -> list[str]:
    """Formats on the lower convex hull of (bits, noise), fewest bits first: each step removes less noise a bit."""
    order = sorted(unit.bits, key=lambda f: (unit.bits[f], unit.noise[f]))
    hull: list[str] = []
    for format in order:
        if hull and unit.noise[format] >= unit.noise[hull[-1]]:
            continue
        while len(hull) >= 2:
            first, last = hull[-2], hull[-1]
            slope = (unit.noise[first] - unit.noise[last]) / (unit.bits[last] - unit.bits[first])
            ahead = (unit.noise[last] - unit.noise[format]) / (unit.bits[format] - unit.bits[last])
            if slope > ahead:
                break
            hull.pop()
        hull.append(format)
    return hull
