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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.records import SCHEMA_VERSION, TensorRecord, write_bytes

from .choice import Chosen, choose_matrices, quantized_alone
from .compute import Compute, LocalCompute
from .device import Device
from .faults import Fault, raise_first
from .histograms import pool_codes, pool_density
from .inputs import OpenCheckpoints, Progress, shown
from .journal import Journal
from .matrices import ArmPair, MatrixPass, paths_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ArmPair", "analyze_weights", "inputs_of", "read_frame", "write_frame"]

_ROWS_AT_ONCE = 4096  # of the table, while it is put together


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
    compute: Compute | None = None,
) -> pd.DataFrame:
    """Measure every quantized matrix under every pair; columns are TensorRecord's, rows in the source's layer order.

    source: None leaves every figure that needs it NaN, and `missing` says so. Rows are keyed by (name, source_arm,
    first_arm, second_arm, second_rule). `journal`: file of finished matrices; a second call with equal inputs continues
    it, and returns the same table as an uninterrupted call. select: a glob over names. sample: about so many matrices,
    stratified (`choice.py`). read_bytes: told the stored bytes of each matrix that was read.
    device: where values are made and summed (None: the processor, all its threads). A GPU's figures are the processor's
    up to the order of float64 sums (`measure_sides`); a journal is continued on the kind of device that began it, else
    begun anew.
    compute: where matrices are measured (None: in this process); the result does not depend on it (`compute.py`).
    faults: a list that takes what could not be analyzed, while the rest goes on; None: the first one raises.
    The frame's `attrs`: "inputs", all that it depends on; "faults"; "alone", see `quantized_alone`; "error_density",
    per pair's key, counts over (e1/rms, e2/rms) pooled over matrices; "codes", per pair's key and projection, a row for
    each code of the second format: elements, sum of e2 and of e2 squared, each over its matrix's rms.
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
        device, compute = device or Device(), compute or LocalCompute()
        source_arm = source_arm if source is not None else ""
        key = _journal_key(source_arm, pairs, checkpoints, seed, device)
        log = stack.enter_context(Journal.open(journal, key))
        matrices = MatrixPass(
            source=source, source_arm=source_arm, pairs=pairs, chosen=chosen, checkpoints=checkpoints, device=device
        )
        todo = [name for name in chosen.names if name not in log]
        with closing(compute.results(matrices, todo)) as results:
            for name in shown(chosen.names, "weights", progress):
                if name in log:
                    continue
                result = next(results)
                if read_bytes is not None and result.nbytes:
                    read_bytes(result.nbytes)
                log.add(name, result.rows, result.extra)
                if faults is None:
                    raise_first(_faults_of(log, name))
        frame = _table(log, chosen)
        found = [*chosen.faults, *(fault for name in chosen.names for fault in _faults_of(log, name))]
        if faults is not None:
            faults += found
        frame.attrs["inputs"] = key | {"select": select, "sample": sample}
        frame.attrs["faults"] = [dataclasses.asdict(fault) for fault in found]
        frame.attrs["alone"] = [found for pair in pairs for found in quantized_alone(pair, checkpoints)]
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
    source_arm: str = "source",
) -> dict[str, Any]:
    """What `attrs["inputs"]` of the table is for these arguments; reads headers only."""
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        for path in (source, *(path for pair in pairs for path in paths_of(pair).values())):
            if path is not None:
                checkpoints.open(path)
        arm = source_arm if source is not None else ""
        key = _journal_key(arm, pairs, checkpoints, seed, device or Device())
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


def _faults_of(log: Journal, name: str) -> list[Fault]:
    return [Fault(**fault) for fault in log.extra(name).get("faults", [])]


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
