"""The analysis stage of a run: weight errors, matrix-product noise and their summary, from arms to files.

    analyze_arms(out=run_dir, source=Path("kimi"), source_arm="source",
                 arms={"nvfp4": ArmNumerics(checkpoint=Path("kimi-nvfp4")),
                       "nvfp4_to_mxfp4": ArmNumerics(checkpoint=Path("kimi-nvfp4"), requant_format="mxfp4")},
                 pairs=[("nvfp4", "nvfp4_to_mxfp4", None)], activations=run_dir / "activations.safetensors")

Writes tensors.parquet, gemm.parquet and analysis.json into `out`, each when it is complete; one that exists is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import ConfigError
from workbench.records import write_json

from .algebra import RESAMPLES
from .gemm import GemmArm, analyze_gemm
from .inputs import Progress
from .summary import summarize
from .tensors import ArmPair, analyze_weights, write_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmNumerics:
    """What an arm computes with: a checkpoint's weights, converted to `requant_format` where given, and whether
    activations pass the weights' format (`round_activations`)."""

    checkpoint: Path
    requant_format: str | None = None
    requant_rule: str | None = None
    round_activations: bool = True


def analyze_arms(
    *,
    out: Path,
    source: Path,
    source_arm: str,
    arms: Mapping[str, ArmNumerics],
    pairs: Sequence[tuple[str, str, str | None]],
    activations: Path | None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Measure every (first, second, direct) of `pairs` and the matrix products of every arm they name.

    Raises ConfigError for a pair that names no arm; CheckpointError naming the tensor where arms do not fit together.
    """
    import pandas as pd

    named = list(dict.fromkeys(arm for pair in pairs for arm in pair if arm is not None))
    unknown = [arm for arm in named if arm not in arms]
    if unknown:
        raise ConfigError(f"the analysis names the arm {unknown[0]!r}", fix=f"arms: {', '.join(arms)}")
    tensors_file, gemm_file = out / "tensors.parquet", out / "gemm.parquet"
    if not tensors_file.exists():
        chains = [_chain(arms, *pair) for pair in pairs]
        frame = analyze_weights(
            source=source, pairs=chains, source_arm=source_arm, journal=out / ".tensors.journal", resamples=resamples,
            seed=seed, progress=progress,
        )  # fmt: skip
        write_frame(tensors_file, frame)
    if not gemm_file.exists():
        numerics = [_gemm_arm(name, arms[name]) for name in named]
        frame = analyze_gemm(
            source=source, arms=numerics, activations=activations, journal=out / ".gemm.journal", resamples=resamples,
            seed=seed, progress=progress,
        )  # fmt: skip
        write_frame(gemm_file, frame)
    write_json(out / "analysis.json", summarize(pd.read_parquet(tensors_file), pd.read_parquet(gemm_file)))
    for journal in (".tensors.journal", ".gemm.journal"):
        (out / journal).unlink(missing_ok=True)


def stored_format(checkpoint: Path) -> str:
    """The format of a checkpoint's quantized matrices ("" when it has none; the most frequent of several)."""
    from collections import Counter

    from workbench.checkpoints import open_checkpoint

    with open_checkpoint(checkpoint) as opened:
        counts = Counter(entry.format for entry in opened.entries() if entry.quantized)
    return counts.most_common(1)[0][0] if counts else ""


def _chain(arms: Mapping[str, ArmNumerics], first: str, second: str, direct: str | None) -> ArmPair:
    after = arms[second]
    converted = after.requant_format is not None
    form = after.requant_format or stored_format(after.checkpoint)
    rule = after.requant_rule or ("even" if form == "mxfp4" else "amax")
    if converted and after.checkpoint != arms[first].checkpoint:
        raise ConfigError(
            f"analysis pair ({first}, {second}): {second} requantizes another checkpoint than {first}'s",
            fix="let the second arm's checkpoint be the first's, or a stored one without requantization",
        )
    straight = arms[direct] if direct is not None else None
    return ArmPair(
        first=arms[first].checkpoint,
        first_arm=first,
        second_arm=second,
        second=None if converted else after.checkpoint,
        second_format=form,
        second_rule=rule,
        direct=straight.checkpoint if straight is not None and straight.requant_format is None else None,
    )


def _gemm_arm(name: str, arm: ArmNumerics) -> GemmArm:
    form = arm.requant_format or stored_format(arm.checkpoint)
    rule = arm.requant_rule or ("even" if form == "mxfp4" else "amax")
    return GemmArm(
        arm=name,
        checkpoint=arm.checkpoint,
        requant_format=arm.requant_format,
        requant_rule=rule,
        activation_format=form if arm.round_activations else "",
    )
