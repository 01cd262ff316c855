"""What two quantizations did to every matrix of a model: a streaming pass over checkpoints, two matrices in memory.

    frame = analyze_weights(
        source=Path("kimi"),
        pairs=[ArmPair(first=Path("kimi-nvfp4"), first_arm="nvfp4", second_arm="nvfp4_to_mxfp4", second_rule="even")],
        journal=run_dir / ".tensors.journal",
    )
    write_frame(run_dir / "tensors.parquet", frame)

Every matrix that is quantized in the first checkpoint becomes one row per pair (`records.TensorRecord`). The second
quantization is made here as the `requant` backend makes it, or read from a stored checkpoint. The next matrix is read
while one is measured; values exist a few rows at a time. Everything is recomputed from the files, so that the figures
do not depend on what a server did; a journal of finished matrices makes the pass resumable.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from workbench.errors import ConfigError, FormatError, WorkbenchError
from workbench.formats import QuantizedTensor
from workbench.records import SCHEMA_VERSION, TensorRecord, write_bytes

from .algebra import Measured, Sides, measure_sides
from .choice import Chosen, choose_matrices
from .device import Device
from .faults import Fault, raise_first
from .histograms import extra_of, pool_codes, pool_density
from .inputs import OpenCheckpoints, Progress, shown
from .journal import Journal
from .reading import read_ahead, work_ahead
from .sides import RoundedSide, Side, side_of

if TYPE_CHECKING:
    import pandas as pd

UNRELATED_SQNR_DB = 3.0
"""A first arm below it does not resemble its source: four bits hold ordinary weights at 15 dB and more."""
_ROWS_AT_ONCE = 4096  # of the table, while it is put together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArmPair:
    """One chain source -> first -> second to measure.

    first: folder of the stored first checkpoint; None: there is none, second is made from the source.
    second: folder of a stored second checkpoint; None: quantize the first's decoded values to `second_format` under
    `second_rule`, as the requant backend does. For a stored one the rule is a label ("": not known).
    direct: folder of a stored direct checkpoint; None: quantize the source to `second_format` under `second_rule`.
    *_arm: names in the table.
    """

    first: str | Path | None
    first_arm: str = ""
    second_arm: str
    second: str | Path | None = None
    second_format: str = "mxfp4"
    second_rule: str = "even"
    direct: str | Path | None = None

    @property
    def key(self) -> str:
        return f"{self.first_arm}|{self.second_arm}|{self.second_rule}"


def analyze_weights(
    *,
    source: str | Path | None,
    pairs: Sequence[ArmPair],
    source_arm: str = "source",
    journal: Path | None = None,
    seed: int = 0,
    select: str | None = None,
    sample: int | None = None,
    faults: list[Fault] | None = None,
    progress: Progress | None = None,
    read_bytes: Callable[[int], None] | None = None,
    device: Device | None = None,
) -> pd.DataFrame:
    """Measure every quantized matrix under every pair; columns are TensorRecord's, rows in the source's layer order.

    source: None leaves every figure that needs it NaN, and `missing` says so. Rows are keyed by (name, source_arm,
    first_arm, second_arm, second_rule). `journal`: file of finished matrices; a second call with equal inputs continues
    it, and returns the same table as an uninterrupted call. select: a glob over names. sample: about so many matrices,
    stratified (`choice.py`). read_bytes: told the stored bytes of each matrix that was read.
    device: where values are made and summed (None: the processor, all its threads). A GPU's figures are the processor's
    up to the order of float64 sums (`measure_sides`); a journal is continued on the kind of device that began it, else
    begun anew.
    faults: a list that takes what could not be analyzed, while the rest goes on; None: the first one raises.
    The frame's `attrs`: "inputs", all that it depends on; "faults"; "error_density", per pair's key, counts over
    (e1/rms, e2/rms) pooled over matrices; "codes", per pair's key and projection, a row for each code of the second
    format: elements, sum of e2 and of e2 squared, each over its matrix's rms.
    Raises CheckpointError naming the tensor where an arm lacks it or its shape differs, ConfigError for two pairs of
    one key, and without a source for a pair without a first.
    """
    _check_pairs(pairs, source)
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        leading = source if source is not None else pairs[0].first
        original = checkpoints.open(leading) if leading is not None else None
        chosen = choose_matrices(
            pairs, original, checkpoints, has_source=source is not None, select=select, sample=sample, seed=seed
        )
        if faults is None:
            raise_first(chosen.faults)
        device = device or Device()
        key = _journal_key(source_arm if source is not None else "", pairs, checkpoints, seed, device)
        log = stack.enter_context(Journal.open(journal, key))
        pass_ = _Pass(
            source_arm if source is not None else "",
            None if source is None else original,
            original,
            pairs,
            chosen,
            checkpoints,
            device,
        )
        todo = [name for name in chosen.names if name not in log]
        with ThreadPoolExecutor(torch.get_num_threads(), initializer=_alone) as threads:
            pool = threads if device.loops else None
            read = read_ahead(todo, lambda name: device.stage(pass_.read(name)))
            done = work_ahead(read, lambda item: (_nbytes(item[1]), *pass_.measure(*item, pool)), device.workers)
            for name in shown(chosen.names, "weights", progress):
                if name in log:
                    continue
                nbytes, rows, extra = next(done)
                if read_bytes is not None and nbytes:
                    read_bytes(nbytes)
                log.add(name, rows, extra)
                if faults is None:
                    raise_first(_faults_of(log, name))
        frame = _table(log, chosen)
        found = [*chosen.faults, *(fault for name in chosen.names for fault in _faults_of(log, name))]
        if faults is not None:
            faults += found
        frame.attrs["inputs"] = key | {"select": select, "sample": sample}
        frame.attrs["faults"] = [dataclasses.asdict(fault) for fault in found]
        frame.attrs["error_density"] = {pair.key: pool_density(log, chosen.names, pair.key) for pair in pairs}
        frame.attrs["codes"] = {pair.key: pool_codes(log, chosen.names, pair.key, original) for pair in pairs}
    return frame


def inputs_of(
    source: str | Path | None,
    pairs: Sequence[ArmPair],
    seed: int,
    select: str | None,
    sample: int | None,
    device: Device | None = None,
) -> dict[str, Any]:
    """What `attrs["inputs"]` of the table is for these arguments (source_arm "source"); reads headers only."""
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        for path in (source, *(path for pair in pairs for path in _paths(pair).values())):
            if path is not None:
                checkpoints.open(path)
        key = _journal_key("source" if source is not None else "", pairs, checkpoints, seed, device or Device())
        return key | {"select": select, "sample": sample}


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as parquet, atomically; `attrs` go along. Raises OutputError."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_bytes(path, buffer.getvalue())


def read_frame(path: Path) -> pd.DataFrame:
    """Read a table that `write_frame` wrote."""
    import pandas as pd

    return pd.read_parquet(path)


# ---- one matrix ------------------------------------------------------------------------------------------------------

Arms = dict[str, QuantizedTensor | Tensor]
"""What was read of one matrix, by checkpoint path ("" : the source)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    source_arm: str
    source: Any
    leading: Any
    pairs: Sequence[ArmPair]
    chosen: Chosen
    checkpoints: OpenCheckpoints
    device: Device

    def read(self, name: str) -> Arms:
        """Every stored arm of one matrix, packed as it lies on disk."""
        arms: Arms = {} if self.source is None else {"": self.source.read(name)}
        for pair in self._pairs(name):
            for path in (pair.first, pair.second, pair.direct):
                if path is not None and str(path) not in arms:
                    arms[str(path)] = self.checkpoints.open(path).read(name)
        return arms

    def measure(
        self, name: str, arms: Arms | WorkbenchError, pool: ThreadPoolExecutor | None
    ) -> tuple[list[list[Any]], dict[str, Any]]:
        """Rows of one matrix, a row per pair, and what is pooled over matrices."""
        if isinstance(arms, WorkbenchError):
            return [], {"faults": [_fault(name, "unreadable", arms.message)]}
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
        return rows, extra | ({"faults": faults} if faults else {})

    def _pairs(self, name: str) -> list[ArmPair]:
        return [pair for pair in self.pairs if name in self.chosen.by_pair[pair.key]]

    def _measure_pair(
        self, name: str, pair: ArmPair, arms: Arms, pool: ThreadPoolExecutor | None
    ) -> tuple[list[Any] | None, dict[str, Any], list[dict[str, str]]]:
        stored = {arm: arms.get(str(path)) for arm, path in _paths(pair).items() if path is not None}

        def measure(elements: int) -> tuple[Sides, Measured]:
            placed = self.device.place(arms)
            stored = {arm: placed.get(str(path)) for arm, path in _paths(pair).items() if path is not None}
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


def _nbytes(arms: Arms | WorkbenchError) -> int:
    return 0 if isinstance(arms, WorkbenchError) else sum(tensor.nbytes for tensor in arms.values())


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
    if d is None and w is not None:
        d = RoundedSide(w, pair.second_format, pair.second_rule or None, name)
    return Sides(source=w, first=a, second=b, direct=d)


def _paths(pair: ArmPair) -> dict[str, str | Path | None]:
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


def _faults_of(log: Journal, name: str) -> list[Fault]:
    return [Fault(**fault) for fault in log.extra(name).get("faults", [])]


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


# ---- the pass --------------------------------------------------------------------------------------------------------


def _check_pairs(pairs: Sequence[ArmPair], source: str | Path | None) -> None:
    keys = [pair.key for pair in pairs]
    if len(set(keys)) != len(keys):
        raise ConfigError(
            f"two pairs have the same arms and rule: {sorted(k for k in keys if keys.count(k) > 1)[0]}",
            fix="give every (first arm, second arm, rule) once",
        )
    if source is None and any(pair.first is None for pair in pairs):
        raise ConfigError("neither a source nor a first checkpoint", fix="give at least one of them")


def _journal_key(
    source_arm: str, pairs: Sequence[ArmPair], checkpoints: OpenCheckpoints, seed: int, device: Device
) -> dict[str, Any]:
    return device.key | {
        "schema_version": SCHEMA_VERSION,
        "columns": [f.name for f in dataclasses.fields(TensorRecord)],
        "source_arm": source_arm,
        "checkpoints": checkpoints.fingerprints(),
        "pairs": [{k: str(v) for k, v in dataclasses.asdict(pair).items()} for pair in pairs],
        "intervals": "influence",
        "seed": seed,
    }


def _table(log: Journal, chosen: Chosen) -> pd.DataFrame:
    """All rows, some thousand at a time: as Python lists they take several times the table's memory."""
    import pandas as pd

    columns = [f.name for f in dataclasses.fields(TensorRecord)]
    parts, rows = [], []
    weight = columns.index("sample_weight")
    for name in chosen.names:
        for row in log.rows(name):
            row[weight] = chosen.weights[name]  # of a journal that another selection began
            rows.append(row)
        if len(rows) >= _ROWS_AT_ONCE:
            parts.append(pd.DataFrame(rows, columns=columns))
            rows = []
    if rows or not parts:
        parts.append(pd.DataFrame(rows, columns=columns))
    return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]
