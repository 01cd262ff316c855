"""An experiment's analysis: its pairs of arms -> tensors.parquet, gemm.parquet, analysis.json.

    analyze_pairs(out=run_dir, source_arm="source", pairs=pairs, arms=arms, activations=file)

A file that exists is not made again; a killed or failed pass leaves its journal (`.tensors.journal`, `.gemm.journal`),
from which the same call continues, and which goes once the table is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from workbench.errors import ConfigError
from workbench.formats import get_format
from workbench.formats.activations import read_activations
from workbench.records import write_json

from .bootstrap import RESAMPLES
from .compute import Compute
from .device import Device
from .faults import Fault
from .fetch import fetch_notes
from .fused import fused_view
from .gemm import GemmArm, analyze_gemm, products_key
from .inputs import Progress, check_resamples
from .matrices import ArmPair
from .pooling import pool_rows
from .summary import AnalysisSummary, summarize
from .tensors import analyze_weights, inputs_of, read_frame, write_frame

if TYPE_CHECKING:
    import pandas as pd


class Pair(Protocol):
    """Names of arms: first, second = quantized from first, direct = the second format straight from the source."""

    @property
    def first(self) -> str: ...
    @property
    def second(self) -> str: ...
    @property
    def direct(self) -> str | None: ...


class TargetFormat(Protocol):
    """What a requant arm converts to."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> str | None: ...


Arm = tuple[Path, TargetFormat | None, str]
"""An arm's checkpoint, what it is converted to as it loads (None: nothing), and its activations: "none", "auto"
(rounded where a packed layer rounds them) or "native" (wherever the format has a rounding of its own)."""


def analyze_pairs(
    *,
    out: Path,
    source_arm: str,
    pairs: Sequence[Pair],
    arms: Mapping[str, Arm],
    activations: Path | None,
    bootstrap: int = RESAMPLES,
    sample: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
    device: Device | None = None,
    compute: Compute | None = None,
) -> AnalysisSummary:
    """Analyze every pair's weights and every named arm's matrix products; write tensors, gemm, pooled and
    fused.parquet and analysis.json into `out`.

    activations: captured layer inputs; None: N(0, 1) rows, and the table says so. sample: about so many matrices, of
    weights and of products. device, compute: of the weights' pass (None: the processor, this process); products
    stay there.
    say: told what will be fetched from the Hub, before it is. Raises ConfigError for an arm that does not exist or
    cannot be second and for bootstrap < 1, CheckpointError for an activations file that cannot be read (before anything
    is measured) and naming the tensor where arms do not fit, OutputError.
    """
    check_resamples(bootstrap)
    captured = read_activations(activations) if activations is not None else None
    source = _arm(arms, source_arm)[0]
    chain = [_arm_pair(pair, arms) for pair in pairs]
    named = dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second, pair.direct) if name)
    products = [_gemm_arm(name, arms) for name in named]
    if say is not None:
        for note in fetch_notes(source, chain, products, sample=sample, seed=seed):
            say(note)
    tensors = _table(
        out / "tensors.parquet",
        lambda journal: analyze_weights(
            source=source,
            source_arm=source_arm,
            pairs=chain,
            journal=journal,
            seed=seed,
            sample=sample,
            progress=progress,
            device=device,
            compute=compute,
        ),
    )
    gemm = _table(
        out / "gemm.parquet",
        lambda journal: analyze_gemm(
            source=source,
            arms=products,
            activations=captured,
            only=None if sample is None else set(tensors["name"]),
            journal=journal,
            resamples=bootstrap,
            seed=seed,
            progress=progress,
        ),
    )
    if len(tensors):
        write_frame(out / "pooled.parquet", pool_rows(tensors, seed=seed))
        write_frame(out / "fused.parquet", fused_view(tensors))
    summary = summarize(tensors, gemm, seed=seed)
    write_json(out / "analysis.json", summary)
    return summary


def analyze_checkpoints(
    *,
    out: Path,
    source: Path | None,
    pair: ArmPair,
    source_arm: str = "source",
    arms: Sequence[GemmArm] = (),
    activations: Path | None = None,
    moments: bool = False,
    bootstrap: int = RESAMPLES,
    seed: int = 0,
    select: str | None = None,
    sample: int | None = None,
    progress: Progress | None = None,
    read_bytes: Callable[[int], None] | None = None,
    device: Device | None = None,
    compute: Compute | None = None,
) -> AnalysisSummary:
    """One pair on plain paths: tensors.parquet, pooled.parquet, fused.parquet, analysis.json, and with `arms` (and a
    source) gemm.parquet. What cannot be analyzed is named in the summary's `faults`; the rest is.

    device, compute: of the weights' pass (None: the processor, this process); products stay there.
    The same call continues a killed one and ends in the same bytes. Raises ConfigError when `out` holds an analysis of
    other inputs, CheckpointError for an activations file that cannot be read (both before anything is measured), and
    what `analyze_weights` raises.
    """
    check_resamples(bootstrap)
    captured = read_activations(activations) if activations is not None else None
    path = out / "tensors.parquet"
    if path.is_file():
        _check_same(path, inputs_of(source, [pair], seed, select, sample, device, source_arm))
    products = out / "gemm.parquet"
    if products.is_file() and source is not None:
        _check_same(products, products_key(source, arms, activations, resamples=bootstrap, seed=seed, moments=moments))
    faults: list[Fault] = []
    tensors = _table(
        path,
        lambda journal: analyze_weights(
            source=source,
            source_arm=source_arm,
            pairs=[pair],
            journal=journal,
            seed=seed,
            select=select,
            sample=sample,
            faults=faults,
            progress=progress,
            read_bytes=read_bytes,
            device=device,
            compute=compute,
        ),
    )
    gemm = None
    if source is not None and arms:
        names = set(tensors["name"])
        gemm = _table(
            products,
            lambda journal: analyze_gemm(
                source=source,
                arms=arms,
                activations=captured,
                only=names,
                moments=moments,
                journal=journal,
                resamples=bootstrap,
                seed=seed,
                progress=progress,
            ),
        )
    if len(tensors):
        write_frame(out / "pooled.parquet", pool_rows(tensors, seed=seed))
        write_frame(out / "fused.parquet", fused_view(tensors))
    summary = summarize(tensors, gemm, seed=seed)
    write_json(out / "analysis.json", summary)
    return summary


def _check_same(path: Path, inputs: dict[str, Any]) -> None:
    """Raises ConfigError where the table at `path` was made from others."""
    if read_frame(path).attrs.get("inputs") != inputs:
        raise ConfigError(
            f"{path.parent} holds an analysis of other checkpoints or settings ({path.name})",
            fix="give another --out, or empty this one",
        )


def _table(path: Path, make: Callable[[Path], pd.DataFrame]) -> pd.DataFrame:
    """The table at `path`, made (through a journal beside it) when it is not there."""
    if not path.is_file():
        journal = path.with_name(f".{path.stem}.journal")
        write_frame(path, make(journal))
        journal.unlink(missing_ok=True)
    return read_frame(path)


def _arm_pair(pair: Pair, arms: Mapping[str, Arm]) -> ArmPair:
    first_path, first_target, _ = _arm(arms, pair.first)
    second_path, target, _ = _arm(arms, pair.second)
    if first_target is not None:
        raise ConfigError(
            f"analysis.pairs: the first arm {pair.first!r} is converted as it loads; a first arm must be stored",
            fix="name an arm whose checkpoint holds the first quantization",
        )
    if target is not None and second_path != first_path:
        raise ConfigError(
            f"analysis.pairs: {pair.second!r} converts {second_path}, which is not the checkpoint of {pair.first!r}",
            fix="give both arms the same checkpoint, or name another pair",
        )
    direct, named = None, ""
    if pair.direct:
        direct_path, direct_target, _ = _arm(arms, pair.direct)
        if direct_target is None:
            direct, named = direct_path, pair.direct
    if target is None:
        return ArmPair(
            first=first_path,
            first_arm=pair.first,
            second_arm=pair.second,
            second=second_path,
            second_rule="",
            direct=direct,
            direct_arm=named,
        )
    return ArmPair(
        first=first_path,
        first_arm=pair.first,
        second_arm=pair.second,
        second_format=target.name,
        second_rule=get_format(target.name).rule(target.rule).value,
        direct=direct,
        direct_arm=named,
    )


def _gemm_arm(name: str, arms: Mapping[str, Arm]) -> GemmArm:
    path, target, activations = _arm(arms, name)
    return GemmArm(
        arm=name,
        checkpoint=path,
        requant_format=target.name if target else None,
        requant_rule=target.rule if target else None,
        activation_format={"none": "", "native": "same"}.get(activations, "emulated"),
    )


def _arm(arms: Mapping[str, Arm], name: str) -> Arm:
    if name not in arms:
        raise ConfigError(f"the analysis names the arm {name!r}, which does not exist", fix=f"arms: {', '.join(arms)}")
    return arms[name]
