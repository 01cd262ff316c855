"""Output noise of y = x W^T, layer by layer, with the activations that really reached the layer.

    frame = analyze_gemm(
        source=Path("kimi"),
        activations=run_dir / "activations.safetensors",
        arms=[GemmArm(arm="nvfp4", checkpoint=Path("kimi-nvfp4"), activation_format="nvfp4"),
              GemmArm(arm="nvfp4_to_mxfp4", checkpoint=Path("kimi-nvfp4"), requant_format="mxfp4",
                      activation_format="mxfp4")],
    )

Per matrix and arm three rows (`records.GemmRecord`): quantized weights with exact activations, exact weights with
rounded activations, and both, as a W4A4 matrix product is. Errors are formed before the product (x dW^T, dx W^T), so an
arm that changes nothing has an error of exactly zero. Products are float32, sums of squares float64. Weights and
activations keep the formats' float32 values: the last cast to the model's bfloat16 (below -50 dB) is left out.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.errors import CheckpointError, FormatError
from workbench.formats import PACKED_FORMATS, QuantizedTensor, get_format, quantize
from workbench.formats.activations import Activations, read_activations
from workbench.records import SCHEMA_VERSION, GemmRecord

from .algebra import sqnr_db
from .bootstrap import MIN_UNITS, RESAMPLES, draw_counts, interval
from .inputs import OpenCheckpoints, Progress, check_resamples, shown
from .journal import Journal
from .moments import expected_power, moment_for

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("weight", "activation", "both")
GAUSSIAN_TOKENS, MAX_TOKENS = 256, 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GemmArm:
    """Whose numerics to apply.

    checkpoint: folder of the arm's weights. requant_format: convert its decoded weights to this format first, under
    `requant_rule` (the requant backend: in a checkpoint of mixed precision the four-bit ones only); None: as stored.
    activation_format: "" leaves activations exact, "same" takes the weights' format, "emulated" too, but of
    `formats.PACKED_FORMATS` only; nvfp4 uses the checkpoint's `input_scale` where it has one, else each token's own
    amax; mxfp4 takes a scale per block of 32.
    """

    arm: str
    checkpoint: str | Path
    requant_format: str | None = None
    requant_rule: str | None = None
    activation_format: str = ""
    activation_rule: str | None = None


def analyze_gemm(
    *,
    source: str | Path,
    arms: Sequence[GemmArm],
    activations: Path | Activations | None = None,
    gaussian_tokens: int = GAUSSIAN_TOKENS,
    max_tokens: int = MAX_TOKENS,
    only: Collection[str] | None = None,
    moments: bool = False,
    journal: Path | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Measure every matrix that is quantized in an arm's checkpoint; columns are GemmRecord's, `attrs["inputs"]`
    is what they depend on.

    activations: a captured file (`formats.activations`), or one that is read already; None takes N(0, 1) rows
    (`gaussian_tokens` of them, seeded per module, NVFP4's global scale then per token). At most `max_tokens` rows of a
    module are used. A module without a captured row still gets its rows, with tokens = 0 and NaN figures; fewer than 8
    tokens give NaN intervals. only: names of the matrices to measure, of those. moments: instead of rows, the exact
    expected noise of weight errors given E[x x^T] (`moments.py`): the file's second moments, else those of its rows,
    else the identity; kind "weight".
    Raises CheckpointError naming the tensor where source, arm and activations do not fit together, ConfigError for
    resamples < 1.
    """
    import pandas as pd

    check_resamples(resamples)
    captured = read_activations(activations) if isinstance(activations, Path) else activations
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        original = checkpoints.open(source)
        wanted = _matrices_by_arm(arms, original, checkpoints)
        if only is not None:
            wanted = {arm: matrices & set(only) for arm, matrices in wanted.items()}
        names = [e.name for e in original.entries() if any(e.name in w for w in wanted.values())]
        file = None if captured is None else captured.path
        key = _key(checkpoints, arms, file, [gaussian_tokens, max_tokens, resamples, seed, moments])
        log = stack.enter_context(Journal.open(journal, key))
        for name in shown(names, "matrix products", progress):
            if name not in log:
                entry = original.entry(name)
                x, seen = _rows_for(entry, captured, gaussian_tokens, max_tokens, seed)
                chosen = [arm for arm in arms if name in wanted[arm.arm]]
                if moments:
                    log.add(name, _expect_layer(entry, original, chosen, checkpoints, x, seen, captured))
                    continue
                log.add(name, _measure_layer(entry, original, chosen, checkpoints, x, seen, captured, resamples, seed))
        columns = [f.name for f in dataclasses.fields(GemmRecord)]
        frame = pd.DataFrame([row for name in names for row in log.rows(name)], columns=columns)
        frame.attrs["inputs"] = key
        return frame


def products_key(
    source: str | Path,
    arms: Sequence[GemmArm],
    activations: Path | None,
    *,
    gaussian_tokens: int = GAUSSIAN_TOKENS,
    max_tokens: int = MAX_TOKENS,
    moments: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """What `attrs["inputs"]` of the table is for these arguments of `analyze_gemm`; reads headers only."""
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        for path in (source, *(arm.checkpoint for arm in arms)):
            checkpoints.open(path)
        return _key(checkpoints, arms, activations, [gaussian_tokens, max_tokens, resamples, seed, moments])


def output_noise(
    x: Tensor, x_hat: Tensor, w: Tensor, w_hat: Tensor
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Per-token power of y = x W^T and of its error by kind ("weight", "activation", "both"), each `[tokens]` float64.

    x, x_hat: `[M, K]`; w, w_hat: `[N, K]`, float32.
    """
    dw, dx = w_hat - w, x_hat - x
    by_weight, by_activation = x @ dw.T, dx @ w.T
    errors = {"weight": by_weight, "activation": by_activation, "both": by_weight + by_activation + dx @ dw.T}
    return _row_power(x @ w.T), {kind: _row_power(error) for kind, error in errors.items()}


# ---- one layer -------------------------------------------------------------------------------------------------------


def _measure_layer(
    entry: Any,
    original: Any,
    arms: Sequence[GemmArm],
    checkpoints: OpenCheckpoints,
    x: Tensor,
    seen: int,
    captured: Activations | None,
    resamples: int,
    seed: int,
) -> list[list[Any]]:
    w = original.read_dense(entry.name)
    rows = []
    rounded: dict[tuple[str, str | None, float | None], Tensor] = {}  # arms often round the same rows alike
    for arm in arms:
        stored = checkpoints.open(arm.checkpoint).read(entry.name)
        tensor = _arm_weights(stored, arm, entry.name, checkpoints)
        w_hat = tensor.effective()
        activation_format = _activation_format(tensor.format, arm.activation_format)
        input_scale = tensor.input_scale if captured is not None else None
        how = (activation_format, arm.activation_rule, None if input_scale is None else float(input_scale))
        if how not in rounded:
            rounded[how] = _round_activations(x, activation_format, arm.activation_rule, input_scale)
        x_hat = rounded[how]
        signal, errors = output_noise(x, x_hat, w, w_hat)
        weight_sqnr = float(sqnr_db(_power(w), _power(w_hat - w)))
        for kind in KINDS:
            value, low, high = _sqnr_with_interval(signal, errors[kind], resamples, seed)
            record = GemmRecord(
                name=entry.name,
                layer=entry.layer,
                expert=entry.expert,
                projection=entry.projection,
                shared_expert=entry.shared_expert,
                arm=arm.arm,
                weight_format=tensor.format,
                activation_format=activation_format,
                kind=kind,
                activations="captured" if captured is not None else "gaussian",
                tokens=len(signal),
                tokens_seen=seen,
                sqnr_db=value,
                sqnr_db_low=low,
                sqnr_db_high=high,
                weight_sqnr_db=weight_sqnr,
                coherence_gain_db=_difference(value, weight_sqnr) if kind == "weight" else math.nan,
                output_power=float(signal.mean()) if len(signal) else math.nan,
            )
            rows.append(list(dataclasses.astuple(record)))
    return rows


def _expect_layer(
    entry: Any,
    original: Any,
    arms: Sequence[GemmArm],
    checkpoints: OpenCheckpoints,
    x: Tensor,
    seen: int,
    captured: Activations | None,
) -> list[list[Any]]:
    """Rows of kind "weight" from second moments: no sampling, so no interval."""
    w = original.read_dense(entry.name)
    moment, how = moment_for(entry.module, entry.shape[-1], captured, x)
    signal = expected_power(w, moment) if moment is not None else math.nan
    rows = []
    for arm in arms:
        tensor = _arm_weights(checkpoints.open(arm.checkpoint).read(entry.name), arm, entry.name, checkpoints)
        error = tensor.effective() - w
        value = float(sqnr_db(signal, expected_power(error, moment))) if moment is not None else math.nan
        weight_sqnr = float(sqnr_db(_power(w), _power(error)))
        record = GemmRecord(
            name=entry.name,
            layer=entry.layer,
            expert=entry.expert,
            projection=entry.projection,
            shared_expert=entry.shared_expert,
            arm=arm.arm,
            weight_format=tensor.format,
            activation_format="",
            kind="weight",
            activations=how,
            tokens=len(x) if captured is not None else 0,
            tokens_seen=seen if captured is not None else 0,
            sqnr_db=value,
            sqnr_db_low=math.nan,
            sqnr_db_high=math.nan,
            weight_sqnr_db=weight_sqnr,
            coherence_gain_db=_difference(value, weight_sqnr),
            output_power=signal,
        )
        rows.append(list(dataclasses.astuple(record)))
    return rows


def _arm_weights(
    stored: QuantizedTensor | Tensor, arm: GemmArm, name: str, checkpoints: OpenCheckpoints
) -> QuantizedTensor:
    if arm.requant_format is not None and checkpoints.converts(arm.checkpoint, name):
        dense = stored.effective() if isinstance(stored, QuantizedTensor) else stored.float()
        return quantize(dense, arm.requant_format, arm.requant_rule, name=name)
    assert isinstance(stored, QuantizedTensor)  # _matrices_of chose it
    return stored


def _activation_format(format: str, wanted: str) -> str:
    """The format that activations are rounded through beside weights of `format`. "same": itself, or "" for one that
    only weights have (INT4). "emulated": itself where a packed layer holds it."""
    if wanted == "emulated":
        return format if format in PACKED_FORMATS else ""
    if wanted == "same":
        return format if get_format(format).qdq_activation is not None else ""
    return wanted


def _round_activations(x: Tensor, format: str, rule: str | None, input_scale: Tensor | None) -> Tensor:
    if not format or not len(x):
        return x
    spec = get_format(format)
    if spec.qdq_activation is None:
        raise FormatError(f"{format} rounds no activations", fix="choose an activation format, e.g. nvfp4 or mxfp4")
    return spec.qdq_activation(x, spec.rule(rule), input_scale)


def _rows_for(
    entry: Any, captured: Activations | None, gaussian_tokens: int, max_tokens: int, seed: int
) -> tuple[Tensor, int]:
    """Input rows `[M, K]` float32 of the entry's module and how many reached it."""
    k = entry.shape[-1]
    if captured is None:
        generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(entry.module.encode()))
        x = torch.randn(gaussian_tokens, k, generator=generator)
        return x, gaussian_tokens
    if entry.module not in captured:
        return torch.empty(0, k), 0
    x = captured.input(entry.module)
    if x.dim() != 2 or x.shape[1] != k:
        raise CheckpointError(
            f"{entry.name} takes {k} inputs, but the captured activations of {entry.module} are {tuple(x.shape)}",
            fix="capture the activations again with this checkpoint",
        )
    return x[:max_tokens].float(), captured.tokens_seen(entry.module)


def _matrices_by_arm(arms: Sequence[GemmArm], original: Any, checkpoints: OpenCheckpoints) -> dict[str, set[str]]:
    """Matrices that each arm quantizes: those quantized in its checkpoint; of a plain one, the others'."""
    held = {entry.name: tuple(entry.shape) for entry in original.entries()}
    wanted: dict[str, set[str]] = {}
    for arm in arms:
        shapes = {e.name: tuple(e.shape) for e in checkpoints.open(arm.checkpoint).entries() if e.quantized}
        for name, shape in sorted(shapes.items()):
            if held.get(name) != shape:
                raise CheckpointError(
                    f"{name} is {shape} in {arm.checkpoint} and {held.get(name, 'missing')} in the source"
                    f" {original.path}",
                    fix="all arms must be made from one source: check their paths",
                )
        wanted[arm.arm] = set(shapes)
    union = set().union(*wanted.values()) if wanted else set()
    for arm in arms:
        if not wanted[arm.arm] and arm.requant_format is not None:
            wanted[arm.arm] = union
    if not union:
        raise CheckpointError(
            "no arm's checkpoint holds a quantized matrix, so there is nothing to analyze",
            fix="give at least one arm a quantized checkpoint",
        )
    return wanted


# ---- sums ------------------------------------------------------------------------------------------------------------


def _sqnr_with_interval(
    signal: NDArray[np.float64], error: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float, float]:
    tokens = len(signal)
    if tokens == 0:
        return math.nan, math.nan, math.nan
    with np.errstate(over="ignore"):
        value = float(sqnr_db(signal.sum(), error.sum()))
    if tokens < MIN_UNITS or resamples < 2:
        return value, math.nan, math.nan
    counts = draw_counts(tokens, resamples, seed)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite power: resamples without that token are NaN
        return value, *interval(sqnr_db(counts @ signal, counts @ error))


def _row_power(y: Tensor) -> NDArray[np.float64]:
    return y.double().square().sum(-1).numpy()


def _power(t: Tensor) -> float:
    return float(t.double().square().sum())


def _difference(a: float, b: float) -> float:
    return math.nan if math.isinf(a) and math.isinf(b) else a - b


def _key(
    checkpoints: OpenCheckpoints, arms: Sequence[GemmArm], activations: Path | None, settings: list[Any]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoints": checkpoints.fingerprints(),
        "arms": [{k: str(v) for k, v in dataclasses.asdict(arm).items()} for arm in arms],
        "activations": _stamp(activations),
        "settings": settings,
    }


def _stamp(path: Path | None) -> list[Any]:
    if path is None:
        return ["gaussian"]
    stat = Path(path).stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]
