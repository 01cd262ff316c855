"""One matrix after the other: every stored arm read, every pair measured, a row each.

    matrices = MatrixPass(source=Path("kimi"), source_arm="source", pairs=pairs, chosen=chosen, ...)
    for result in matrices.results(names, threads=2):       # in the order of names
        result.rows, result.extra

The next matrix is read while one is measured; values exist a few rows at a time. A result depends on its matrix alone,
so whoever holds the checkpoints may measure any part of the names, and the parts together are the whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from workbench.errors import FormatError, WorkbenchError
from workbench.formats import QuantizedTensor
from workbench.records import TensorRecord

from .algebra import Measured, Sides, measure_sides
from .choice import Chosen
from .device import Device
from .faults import Fault
from .histograms import extra_of
from .inputs import OpenCheckpoints
from .reading import read_ahead, work_ahead
from .sides import RoundedSide, Side, side_of

UNRELATED_SQNR_DB = 3.0
"""A first arm below it does not resemble its source: four bits hold ordinary weights at 15 dB and more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArmPair:
    """One chain source -> first -> second to measure.

    first: folder of the stored first checkpoint; None: there is none, second is made from the source.
    second: folder of a stored second checkpoint; None: quantize the first's decoded values to `second_format` under
    `second_rule`, as the requant backend does. For a stored one the rule is a label ("": not known).
    direct: folder of a stored direct checkpoint; None: quantize the source to `second_format` under `second_rule`.
    Beside a stored second only where that is in `second_format` too; else there is none.
    *_arm: names in the table.
    """

    first: str | Path | None
    first_arm: str = ""
    second_arm: str
    second: str | Path | None = None
    second_format: str = "mxfp4"
    second_rule: str = "even"
    direct: str | Path | None = None
    direct_arm: str = ""

    @property
    def key(self) -> str:
        return f"{self.first_arm}|{self.second_arm}|{self.second_rule}"


Arms = dict[str, QuantizedTensor | Tensor]
"""What was read of one matrix, by checkpoint path ("" : the source)."""


class Result(NamedTuple):
    """One matrix measured. nbytes: what was read of it, as stored. rows: of TensorRecord's values, a row a pair. extra:
    what is pooled over matrices by pair, and "faults"."""

    nbytes: int
    rows: list[list[Any]]
    extra: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPass:
    """Which checkpoints are measured against each other, how, and on what device. source: None where there is none.
    chosen: says of each name which pairs hold it and how many matrices it stands for."""

    source: str | Path | None
    source_arm: str
    pairs: Sequence[ArmPair]
    chosen: Chosen
    checkpoints: OpenCheckpoints
    device: Device

    def results(self, names: Sequence[str], threads: int) -> Generator[Result]:
        """Measure these matrices, in their order; what cannot be read or does not fit is a fault of its result."""
        with ThreadPoolExecutor(threads, initializer=_alone) as pool:
            read = read_ahead(names, lambda name: self.device.stage(self.read(name)))
            shared = pool if self.device.loops else None
            yield from work_ahead(read, lambda item: self.measure(*item, shared), self.device.workers)

    @property
    def leading(self) -> Any:
        """The checkpoint whose entries name the matrices: the source's, without one the first pair's first."""
        path = self.source if self.source is not None else self.pairs[0].first
        assert path is not None  # `analyze_weights` has checked it
        return self.checkpoints.open(path)

    def read(self, name: str) -> Arms:
        """Every stored arm of one matrix, packed as it lies on disk."""
        arms: Arms = {} if self.source is None else {"": self.checkpoints.open(self.source).read(name)}
        for pair in self._pairs(name):
            for path in (pair.first, pair.second, pair.direct):
                if path is not None and str(path) not in arms:
                    arms[str(path)] = self.checkpoints.open(path).read(name)
        return arms

    def measure(self, name: str, arms: Arms | WorkbenchError, pool: ThreadPoolExecutor | None) -> Result:
        """Rows of one matrix, and what is pooled over matrices. pool: threads that share its chunks."""
        if isinstance(arms, WorkbenchError):
            return Result(0, [], {"faults": [_fault(name, "unreadable", arms.message)]})
        rows: list[list[Any]] = []
        extra: dict[str, Any] = {}
        faults: list[dict[str, str]] = []
        for pair in self._pairs(name):
            try:
                row, more, found = self._measure_pair(name, pair, arms, pool)
            except FormatError as error:
                found = [_fault(name, "format", error.message.removeprefix(f"{name}: "))]
            else:
                rows += [row] if row is not None else []
                extra |= {pair.key: more} if more else {}
            faults += [fault for fault in found if fault not in faults]
        nbytes = sum(tensor.nbytes for tensor in arms.values())
        return Result(nbytes, rows, extra | ({"faults": faults} if faults else {}))

    def _pairs(self, name: str) -> list[ArmPair]:
        return [pair for pair in self.pairs if name in self.chosen.by_pair[pair.key]]

    def _measure_pair(
        self, name: str, pair: ArmPair, arms: Arms, pool: ThreadPoolExecutor | None
    ) -> tuple[list[Any] | None, dict[str, Any], list[dict[str, str]]]:
        stored = {arm: arms.get(str(path)) for arm, path in paths_of(pair).items() if path is not None}

        def measure(elements: int) -> tuple[Sides, Measured]:
            placed = self.device.place(arms)
            stored = {arm: placed.get(str(path)) for arm, path in paths_of(pair).items() if path is not None}
            sides = _sides(name, pair, placed.get(""), stored)
            return sides, measure_sides(sides, name=name, pool=pool, elements=elements)

        sides, measured = self.device.with_less(measure, name)
        if measured.nonfinite:
            arm = measured.nonfinite[0]
            return None, {}, [_fault(name, "non-finite", f"holds NaN or infinity in the {arm} arm", arm)]
        entry, first = self.leading.entry(name), stored.get("first")
        scale = _global_scale(first)
        row = TensorRecord(
            name=name,
            layer=entry.layer,
            expert=entry.expert,
            projection=entry.projection,
            shared_expert=entry.shared_expert,
            rows=math.prod(entry.shape[:-1]),
            columns=entry.shape[-1],
            source_arm=self.source_arm,
            first_arm=pair.first_arm,
            second_arm=pair.second_arm,
            source_format=entry.format if self.source is not None else "",
            first_format=_format_of(first),
            second_format=pair.second_format if pair.second is None else _format_of(stored.get("second")),
            second_rule=pair.second_rule,
            direct_arm=pair.direct_arm if stored.get("direct") is not None else "",
            first_global_scale=scale,
            scale_phase=math.log2(scale) % 1.0 if scale > 0 else math.nan,
            missing=",".join(arm for arm in ("source", "first", "direct") if getattr(sides, arm) is None),
            sample_weight=self.chosen.weights[name],
            interval_doubtful=",".join(measured.doubtful),
            **cast(dict[str, Any], measured.figures),
            **_worst(measured),
        )
        return (
            list(dataclasses.astuple(row)),
            extra_of(measured.density, measured.codes, measured.figures["power_e2"]),
            _doubts(name, measured),
        )


def _sides(
    name: str,
    pair: ArmPair,
    source: QuantizedTensor | Tensor | None,
    stored: dict[str, QuantizedTensor | Tensor | None],
) -> Sides:
    def side(tensor: QuantizedTensor | Tensor | None) -> Side | None:
        return None if tensor is None else side_of(tensor)

    w, a, b, d = side(source), side(stored.get("first")), side(stored.get("second")), side(stored.get("direct"))
    base = a if a is not None else w
    if b is None and base is not None:
        b = RoundedSide(base, pair.second_format, pair.second_rule or None, name)
    comparable = pair.second is None or _format_of(stored.get("second")) == pair.second_format
    if d is None and w is not None and comparable:
        d = RoundedSide(w, pair.second_format, pair.second_rule or None, name)
    return Sides(source=w, first=a, second=b, direct=d)


def paths_of(pair: ArmPair) -> dict[str, str | Path | None]:
    return {"first": pair.first, "second": pair.second, "direct": pair.direct}


def _worst(measured: Measured) -> dict[str, Any]:
    """Position and size of the block with the most error."""
    if not measured.worst:
        return {}
    worst = measured.worst[0]
    return {
        "worst_block_row": worst.row,
        "worst_block_column": worst.column,
        "worst_block_share": worst.share,
        "worst_block_excess": worst.excess,
        "worst_block_sqnr_db": worst.sqnr_db,
    }


def _doubts(name: str, measured: Measured) -> list[dict[str, str]]:
    """Faults of a matrix whose figures stand."""
    figures = measured.figures
    power = figures["power_first"] if math.isnan(figures["power_source"]) else figures["power_source"]
    if power == 0:
        return [_fault(name, "all-zero", "is zero everywhere", "source")]
    if figures["sqnr_first_db"] < UNRELATED_SQNR_DB:
        what = f"has an SQNR of {figures['sqnr_first_db']:.1f} dB in the first arm: a wrong scale, or another model's"
        return [_fault(name, "unrelated", what, "first")]
    return []


def _fault(tensor: str, kind: str, message: str, arm: str = "") -> dict[str, str]:
    return dataclasses.asdict(Fault(tensor=tensor, kind=kind, message=message, arm=arm))


def _format_of(tensor: QuantizedTensor | Tensor | None) -> str:
    if tensor is None:
        return ""
    return tensor.format if isinstance(tensor, QuantizedTensor) else "dense"


def _global_scale(tensor: QuantizedTensor | Tensor | None) -> float:
    """The tensor's decode multiplier; NaN where it has none, or one per fused shard."""
    if not isinstance(tensor, QuantizedTensor) or tensor.global_scale is None or tensor.global_scale.numel() != 1:
        return math.nan
    return float(tensor.global_scale.float())


def _alone() -> None:
    """Of a worker thread: chunks are the unit of parallel work, so torch adds no threads within one."""
    torch.set_num_threads(1)
