"""What two quantizations did to every matrix of a model: a streaming pass over checkpoints, one matrix in memory.

    frame = analyze_weights(
        source=Path("kimi"),
        pairs=[ArmPair(first=Path("kimi-nvfp4"), first_arm="nvfp4", second_arm="nvfp4_to_mxfp4", second_rule="even")],
        journal=run_dir / ".tensors.journal",
    )
    write_frame(run_dir / "tensors.parquet", frame)

Every matrix that is quantized in the first checkpoint becomes one row per pair (`records.TensorRecord`). The second
quantization is made here as the `requant` backend makes it (`quantize(first.dequantize(), ...)`), or read from a stored
checkpoint. Trade-off: everything is recomputed from the files, with the reference kernels, so that the figures do not
depend on what a server did; a journal of finished matrices makes the pass resumable.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import QuantizedTensor, get_format, quantize
from workbench.records import SCHEMA_VERSION, TensorRecord, write_bytes

from .algebra import RESAMPLES, error_density, measure_matrix
from .inputs import OpenCheckpoints, Progress, check_resamples, shown
from .journal import Journal

if TYPE_CHECKING:
    import pandas as pd


DENSITY_BINS, DENSITY_LIMIT = 48, 3.0


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
    source: str | Path,
    pairs: Sequence[ArmPair],
    source_arm: str = "source",
    journal: Path | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure every quantized matrix under every pair; columns are TensorRecord's, rows in the source's layer order.

    Rows are keyed by (name, source_arm, first_arm, second_arm, second_rule). `journal`: file of finished matrices; a
    second call with equal inputs continues it, and returns the same table as an uninterrupted call. The frame's
    `attrs["error_density"]` holds, per pair's key, counts over (e1/rms, e2/rms) pooled over matrices.
    Raises CheckpointError naming the tensor where an arm lacks it or its shape differs, ConfigError for two pairs of
    one key and for resamples < 1.
    """
    import pandas as pd

    check_resamples(resamples)
    keys = [pair.key for pair in pairs]
    if len(set(keys)) != len(keys):
        raise ConfigError(
            f"two pairs have the same arms and rule: {sorted(k for k in keys if keys.count(k) > 1)[0]}",
            fix="give every (first arm, second arm, rule) once",
        )
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        original = checkpoints.open(source)
        wanted = {pair.key: _matrices_of(pair, original, checkpoints) for pair in pairs}
        names = [e.name for e in original.entries() if any(e.name in matrices for matrices in wanted.values())]
        log = stack.enter_context(Journal.open(journal, _journal_key(source_arm, pairs, checkpoints, resamples, seed)))
        for name in shown(names, "weights", progress):
            if name not in log:
                chosen = [pair for pair in pairs if name in wanted[pair.key]]
                rows, extra = _measure_tensor(name, source_arm, original, chosen, checkpoints, resamples, seed)
                log.add(name, rows, extra)
        columns = [f.name for f in dataclasses.fields(TensorRecord)]
        frame = pd.DataFrame([row for name in names for row in log.rows(name)], columns=columns)
        frame.attrs["error_density"] = {key: _pool_density(log, names, key) for key in keys}
    return frame


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


def _measure_tensor(
    name: str,
    source_arm: str,
    original: Any,
    pairs: Sequence[ArmPair],
    checkpoints: OpenCheckpoints,
    resamples: int,
    seed: int,
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows of one tensor, a row per pair, and its error densities. Holds w, a, b, d of one matrix at a time."""
    entry = original.entry(name)
    w = original.read_dense(name)
    rows, extra = [], {}
    for pair in pairs:
        first = _read_quantized(checkpoints.open(pair.first), name) if pair.first is not None else None
        a = first.effective() if isinstance(first, QuantizedTensor) else first
        second = _make_second(pair, w if a is None else a, name, checkpoints)
        b = second.effective() if isinstance(second, QuantizedTensor) else second
        d = (
            checkpoints.open(pair.direct).read_dense(name)
            if pair.direct is not None
            else quantize(w, pair.second_format, pair.second_rule or None, name=name).dequantize()
        )
        figures = measure_matrix(
            w, a, b, d, block=_bootstrap_block(first, second), resamples=resamples, seed=seed, name=name
        )
        record = TensorRecord(
            name=name,
            layer=entry.layer,
            expert=entry.expert,
            projection=entry.projection,
            shared_expert=entry.shared_expert,
            rows=math.prod(w.shape[:-1]),
            columns=w.shape[-1],
            source_arm=source_arm,
            first_arm=pair.first_arm,
            second_arm=pair.second_arm,
            source_format=entry.format,
            first_format=_format_of(first),
            second_format=_format_of(second),
            second_rule=pair.second_rule,
            first_global_scale=_global_scale(first),
            **figures,
        )
        rows.append(list(dataclasses.astuple(record)))
        if a is not None:
            extra[pair.key] = _pack(error_density(w, a, b, bins=DENSITY_BINS, limit=DENSITY_LIMIT))
    return rows, extra


def _make_second(pair: ArmPair, a: Tensor, name: str, checkpoints: OpenCheckpoints) -> QuantizedTensor | Tensor:
    if pair.second is not None:
        return _read_quantized(checkpoints.open(pair.second), name)
    return quantize(a, pair.second_format, pair.second_rule or None, name=name)


def _read_quantized(checkpoint: Any, name: str) -> QuantizedTensor | Tensor:
    tensor = checkpoint.read(name)
    return tensor if isinstance(tensor, QuantizedTensor) else tensor.float()


def _format_of(tensor: QuantizedTensor | Tensor | None) -> str:
    if tensor is None:
        return ""
    return tensor.format if isinstance(tensor, QuantizedTensor) else "dense"


def _global_scale(tensor: QuantizedTensor | Tensor | None) -> float:
    """The tensor's decode multiplier; NaN where it has none, or one per fused shard."""
    if not isinstance(tensor, QuantizedTensor) or tensor.global_scale is None or tensor.global_scale.numel() != 1:
        return math.nan
    return float(tensor.global_scale.float())


def _bootstrap_block(*tensors: QuantizedTensor | Tensor | None) -> int:
    """The coarser scale block: what happens inside one block is not independent."""
    return max((get_format(t.format).block for t in tensors if isinstance(t, QuantizedTensor)), default=1)


# ---- which matrices --------------------------------------------------------------------------------------------------


def _matrices_of(pair: ArmPair, original: Any, checkpoints: OpenCheckpoints) -> set[str]:
    """Names that are quantized in the pair's first checkpoint (without one: in its second, or direct). All must agree.

    Raises CheckpointError naming the first tensor that an arm lacks or holds in another shape.
    """
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
    shapes = {entry.name: tuple(entry.shape) for entry in original.entries()}
    for path in (pair.first, pair.second, pair.direct):
        if path is None:
            continue
        held = {entry.name: tuple(entry.shape) for entry in checkpoints.open(path).entries()}
        for name in sorted(names):
            if name not in shapes:
                raise _mismatch(name, f"is quantized in {leading}, but the source {original.path} does not hold it")
            if name not in held:
                raise _mismatch(name, f"is quantized in {leading}, but {path} does not hold it")
            if held[name] != shapes[name]:
                raise _mismatch(name, f"is {held[name]} in {path} and {shapes[name]} in the source {original.path}")
    return names


def _mismatch(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name} {what}", fix="all arms must be made from one source: check their paths")


def _journal_key(
    source_arm: str, pairs: Sequence[ArmPair], checkpoints: OpenCheckpoints, resamples: int, seed: int
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "source_arm": source_arm,
        "checkpoints": checkpoints.fingerprints(),
        "pairs": [{k: str(v) for k, v in dataclasses.asdict(pair).items()} for pair in pairs],
        "resamples": resamples,
        "seed": seed,
    }


# ---- densities -------------------------------------------------------------------------------------------------------


def _pack(counts: NDArray[np.int64]) -> str:
    return base64.b64encode(zlib.compress(counts.astype("<u2").tobytes(), 9)).decode()


def _pool_density(log: Journal, names: Sequence[str], key: str) -> dict[str, Any]:
    """Counts summed over matrices: {"limit", "counts"} with counts[e1 bin][e2 bin]."""
    total = np.zeros((DENSITY_BINS, DENSITY_BINS), np.int64)
    for name in names:
        packed = log.extra(name).get(key)
        if packed:
            total += np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<u2").reshape(total.shape).astype(int)
    return {"limit": DENSITY_LIMIT, "counts": total.tolist()}
