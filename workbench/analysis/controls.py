"""The chain NVFP4 -> MXFP4 on weights whose distribution is known: what the formats alone explain.

    controls = run_controls(summary, seed=0)        # summary: of real checkpoints, or None
    write_json(run_dir / "controls.json", controls)

Three controls. Distributions: Gaussian, Student-t with 5 degrees and Laplace weights, each under three scale rules. An
octave: the same matrix times 2^p for p from 0 to 1; NVFP4's error does not change, MXFP4's scales are powers of two, so
all that moves is where the first format's grid falls on the second's. Widths: whether a product over n inputs averages
noise away (`averaging.py`). Beside them stand the published sentences about this chain, each with what was measured and
whether it holds. Trade-off: one matrix a control, so a figure wanders by a few hundredths of a dB with the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .algebra import Sides, measure_sides
from .averaging import INPUTS, AveragingPoint, averaging_study
from .sentences import Sentence, judge_sentences
from .sides import DenseSide, RoundedSide
from .summary import AnalysisSummary

SIGMA = 0.02  # of the published golden values: MX figures depend on it within an octave
WEIGHTS = ("gaussian", "student_t5", "laplace")
RULES = ("even", "floor", "rceil")
PHASES = 16
WIDTHS = (256, 1024, 4096, 16384)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPoint:
    """One matrix through the chain. phase: log2 of what it was multiplied with. SQNRs in dB, of the weights.

    loss_db: sqnr_first - sqnr_total. residual_db: sqnr_total minus what adding both errors' powers predicts.
    gain_excess: <w, b> / <w, w> beyond that of a quantizer whose values are centroids. e2_mean_over_std: mean(e2) /
    std(e2); by chance it would be about `chance` = 1 / sqrt(elements).
    """

    weights: str
    rule: str
    phase: float
    sqnr_first_db: float
    sqnr_total_db: float
    sqnr_direct_db: float
    loss_db: float
    residual_db: float
    corr_e1_e2: float
    gain_excess: float
    e2_mean_over_std: float
    chance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """controls.json. shape: of the matrices. octave: all weights under the rule "even", phases 0 to 1."""

    shape: tuple[int, int]
    distributions: tuple[ControlPoint, ...]
    octave: tuple[ControlPoint, ...]
    averaging: tuple[AveragingPoint, ...]
    sentences: tuple[Sentence, ...]


def run_controls(
    summary: AnalysisSummary | None = None,
    *,
    seed: int = 0,
    shape: tuple[int, int] = (512, 4096),
    phases: int = PHASES,
    widths: Sequence[int] = WIDTHS,
) -> Controls:
    """Measure the controls and judge the published sentences by them and by `summary`'s first NVFP4 -> MXFP4 pair."""
    distributions = tuple(
        control_point(synthetic_weights(kind, shape, seed), kind, rule) for kind in WEIGHTS for rule in RULES
    )
    octave = []
    for kind in WEIGHTS:
        w = synthetic_weights(kind, shape, seed)
        octave += [control_point(w * 2.0 ** (i / phases), kind, "even", phase=i / phases) for i in range(phases)]
    averaging = tuple(point for inputs in INPUTS for point in averaging_study(widths, inputs=inputs, seed=seed))
    return Controls(
        shape=shape,
        distributions=distributions,
        octave=tuple(octave),
        averaging=averaging,
        sentences=judge_sentences(distributions, octave, averaging, summary),
    )


def synthetic_weights(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Independent weights `[N, K]` float32 of standard deviation SIGMA; kind: one of WEIGHTS."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return SIGMA * torch.randn(shape, generator=generator)
    if kind == "laplace":
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        drawn = -uniform.sign() * torch.log1p(-2 * uniform.abs()) / math.sqrt(2)
        return (SIGMA * drawn).float()
    degrees = 5
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    chi_square = torch.zeros(shape, dtype=torch.float64)
    for _ in range(degrees):
        chi_square += torch.randn(shape, generator=generator, dtype=torch.float64).square()
    drawn = normal / (chi_square / degrees).sqrt() / math.sqrt(degrees / (degrees - 2))
    return (SIGMA * drawn).float()


def control_point(w_nk: Tensor, weights: str, rule: str, *, phase: float = 0.0) -> ControlPoint:
    """The chain's figures for one matrix `[N, K]` float32."""
    source = DenseSide(w_nk)
    first = RoundedSide(source, "nvfp4", None, weights)
    second, direct = (RoundedSide(side, "mxfp4", rule, weights) for side in (first, source))
    sides = Sides(source=source, first=first, second=second, direct=direct)
    figures = measure_sides(sides, name=weights).figures
    return ControlPoint(
        weights=weights,
        rule=rule,
        phase=phase,
        sqnr_first_db=figures["sqnr_first_db"],
        sqnr_total_db=figures["sqnr_total_db"],
        sqnr_direct_db=figures["sqnr_direct_db"],
        loss_db=figures["sqnr_first_db"] - figures["sqnr_total_db"],
        residual_db=figures["residual_quadrature_db"],
        corr_e1_e2=figures["corr_e1_e2"],
        gain_excess=figures["gain_total_excess"],
        e2_mean_over_std=figures["e2_mean_over_std"],
        chance=1 / math.sqrt(w_nk.numel()),
    )
