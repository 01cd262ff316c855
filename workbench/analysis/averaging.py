"""Does a wide matrix product average quantization noise away? The claim of "a gain of sqrt(n)", tested over n.

    study = averaging_study((256, 1024, 4096), inputs="incoherent")

For inputs of mean zero that are not correlated with each other the noise grows with n as the signal does, so the output
has the weights' own SQNR at any width: a coherence gain of 0 dB. A gain needs structure that signal and inputs share
and the noise does not: inputs in a few directions that the weights amplify ("aligned").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.errors import ConfigError
from workbench.formats import quantize

from .figures import sqnr_db

INPUTS = ("incoherent", "aligned")


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragingPoint:
    """One width. claimed_gain_db: 10 log10(sqrt(n)), what the claim would add; coherence_gain_db = output_sqnr_db -
    weight_sqnr_db, what there is."""

    n: int
    inputs: str
    weight_sqnr_db: float
    output_sqnr_db: float
    coherence_gain_db: float
    claimed_gain_db: float


def averaging_study(
    widths: Sequence[int],
    *,
    inputs: str = "incoherent",
    format: str = "mxfp4",
    rows: int = 256,
    tokens: int = 256,
    rank: int = 8,
    seed: int = 0,
) -> list[AveragingPoint]:
    """Gaussian weights `[rows, n]` rounded to `format`, products with exact inputs `[tokens, n]`, for every width n.

    inputs: "incoherent": N(0, 1) elements. "aligned": in `rank` directions, which a third of the weights' power lies
    in. Raises ConfigError for other inputs.
    """
    if inputs not in INPUTS:
        raise ConfigError(f"inputs {inputs!r} are none of the study's", fix=f"choose one of: {', '.join(INPUTS)}")
    points = []
    for n in widths:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + n)
        w = 0.02 * torch.randn(rows, n, generator=generator)
        x = torch.randn(tokens, n, generator=generator)
        if inputs == "aligned":
            directions = torch.randn(rank, n, generator=generator)
            mix = torch.randn(rows, rank, generator=generator) / rank**0.5
            w = 0.02 * (w / 0.02 * (2 / 3) ** 0.5 + mix @ directions * (1 / 3) ** 0.5)
            x = torch.randn(tokens, rank, generator=generator) @ directions
        error = quantize(w, format).dequantize() - w
        weight = float(sqnr_db(float(w.double().square().sum()), float(error.double().square().sum())))
        y, noise = x.double() @ w.double().T, x.double() @ error.double().T
        output = float(sqnr_db(float(y.square().sum()), float(noise.square().sum())))
        points.append(
            AveragingPoint(
                n=n,
                inputs=inputs,
                weight_sqnr_db=weight,
                output_sqnr_db=output,
                coherence_gain_db=output - weight,
                claimed_gain_db=float(5 * torch.log10(torch.tensor(float(n)))),
            )
        )
    return points
