"""Published sentences about requantization, NVFP4 -> MXFP4, and whether they hold by what was measured.

    for sentence in judge_sentences(distributions, octave, averaging, summary):
        print(sentence.holds, sentence.claim, sentence.why)

The sentences are those of AMD's write-up of 2026-09-08 on Qwen3.5-397B-A17B's experts, in our words. A sentence that
holds "under conditions" is right for some weights, scales or inputs and wrong for others, which `why` names. Real
checkpoints (a summary) answer for their model, controls for what the formats do to any model. The thresholds:
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .averaging import AveragingPoint
from .summary import AnalysisSummary, Claim, PairSummary

if TYPE_CHECKING:
    from .controls import ControlPoint

HOLDS, CONDITIONS, NO, UNMEASURED = "holds", "under conditions", "does not hold", "not measured"
ZERO_MEAN = 1e-3  # |mean(e2) / std(e2)| of a model below it is centred: a shift that no product would notice
STANDARD_ERRORS = 4.0  # of a synthetic matrix's mean
CORRELATION, CORRELATION_TOLERANCE = -0.04, 0.05
QUADRATURE_DB = 0.5  # a prediction that misses by less is of use
GAIN = 0.01  # a matrix that shrinks or grows by a larger share has a systematic shift
AVERAGING_DB = 0.5  # a coherence gain below it is none
FIGURE_DB = 0.5  # a published figure counts as met within half of its last digit
CHEAP_DB = 1.0  # what the detour over NVFP4 may cost to be called cheap


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """claim: what was published, in our words. measured: what stands against it. holds: "holds", "under conditions",
    "does not hold" or "not measured"."""

    claim: str
    published: str
    measured: str
    holds: str
    why: str


def judge_sentences(
    distributions: Sequence[ControlPoint],
    octave: Sequence[ControlPoint],
    averaging: Sequence[AveragingPoint],
    summary: AnalysisSummary | None,
) -> tuple[Sentence, ...]:
    """The sentences in their published order."""
    pairs = summary.pairs if summary is not None else ()
    pair = next((p for p in pairs if (p.first_format, p.second_format) == ("nvfp4", "mxfp4")), None)
    claims = {claim.claim: claim for claim in (summary.claims if summary is not None else ())}
    gaussian = [point for point in octave if point.weights == "gaussian"]
    return (
        _zero_mean(distributions, pair),
        _no_shift(octave),
        _uncorrelated(gaussian, pair),
        _quadrature(octave, distributions),
        _averages_out(averaging),
        _figure(claims, "GEMM output SQNR after requantization", 17.0, octave, "sqnr_total_db"),
        _figure(claims, "GEMM output SQNR lost against NVFP4", 3.6, octave, "loss_db"),
        _second_is_cheap(octave, pair),
    )


def _zero_mean(distributions: Sequence[ControlPoint], pair: PairSummary | None) -> Sentence:
    worst = max(abs(point.e2_mean_over_std) for point in distributions)
    measured = f"synthetic weights: at most {worst:.1e}"
    centred = worst <= STANDARD_ERRORS * distributions[0].chance
    if pair is not None:
        centred = centred and abs(pair.e2_mean_over_std) <= ZERO_MEAN
        measured = f"{pair.e2_mean_over_std:+.1e} here; {measured}"
    return Sentence(
        claim="The error that the second rounding adds has mean zero.",
        published="mean / sigma about 1e-4",
        measured=measured,
        holds=HOLDS if centred else NO,
        why="By symmetry: weights symmetric about zero give about 1 / sqrt(elements), here"
        f" {distributions[0].chance:.1e} for the synthetic ones. It says nothing about a model.",
    )


def _no_shift(octave: Sequence[ControlPoint]) -> Sentence:
    low, high = _range(point.gain_excess for point in octave)
    return Sentence(
        claim="So the tensor as a whole is not shifted in any direction.",
        published="no systematic shift",
        measured=f"shrunk or grown by {100 * low:+.1f} to {100 * high:+.1f} % over an octave of scales, beyond what any"
        " quantizer of this noise does",
        holds=HOLDS if max(abs(low), abs(high)) <= GAIN else NO,
        why="A mean of zero does not exclude a factor: a matrix shrinks or grows by what its global scale's place"
        " between two powers of two decides.",
    )


def _uncorrelated(gaussian: Sequence[ControlPoint], pair: PairSummary | None) -> Sentence:
    low, high = _range(point.corr_e1_e2 for point in gaussian)
    measured = f"{low:+.3f} to {high:+.3f} over an octave, Gaussian weights"
    if pair is not None:
        corr = pair.corr_e1_e2
        measured = (
            f"mean {corr.mean:+.3f}, single matrices {corr.minimum:+.3f} to {corr.maximum:+.3f}, mean size"
            f" {pair.mean_abs_corr_e1_e2:.3f} here; {measured}"
        )
    constant = high - low <= CORRELATION_TOLERANCE
    near = abs((low + high) / 2 - CORRELATION) <= CORRELATION_TOLERANCE
    return Sentence(
        claim="The errors of both roundings are nearly uncorrelated.",
        published="mean correlation about -0.04",
        measured=measured,
        holds=(HOLDS if near else NO) if constant else CONDITIONS,
        why="A matrix's correlation follows the place of its global scale between two powers of two, through both"
        " signs; a mean over many matrices averages that away.",
    )


def _quadrature(octave: Sequence[ControlPoint], distributions: Sequence[ControlPoint]) -> Sentence:
    low, high = _range(point.residual_db for point in [*octave, *distributions])
    worst = max(abs(low), abs(high))
    return Sentence(
        claim="The errors are independent, so their powers add.",
        published="sqrt(e1^2 + e2^2)",
        measured=f"the sum of powers misses the measured SQNR by {low:+.2f} to {high:+.2f} dB",
        holds=HOLDS if worst <= QUADRATURE_DB / 5 else CONDITIONS if worst <= 2 * QUADRATURE_DB else NO,
        why="They are not independent: e2 is a function of a = w + e1. The rule is good to within the correlation's"
        " share, which has either sign.",
    )


def _averages_out(averaging: Sequence[AveragingPoint]) -> Sentence:
    plain = _range(point.coherence_gain_db for point in averaging if point.inputs == "incoherent")
    aligned = _range(point.coherence_gain_db for point in averaging if point.inputs == "aligned")
    claimed = _range(point.claimed_gain_db for point in averaging)
    none = max(abs(value) for value in plain) <= AVERAGING_DB
    return Sentence(
        claim="A product over n inputs averages the noise out: signal grows with n, noise with sqrt(n).",
        published=f"a gain of sqrt(n), {claimed[0]:.1f} to {claimed[1]:.1f} dB at these widths",
        measured=f"{plain[0]:+.2f} to {plain[1]:+.2f} dB for incoherent inputs,"
        f" {aligned[0]:+.1f} to {aligned[1]:+.1f} dB for inputs in 8 directions that the weights amplify",
        holds=NO if none else HOLDS,
        why="Signal and noise of a product are both sums over n; without structure that inputs and weights share, both"
        " grow with sqrt(n) and the SQNR stays the weights' own. Only inputs along few directions that the weights"
        " amplify gain.",
    )


def _figure(
    claims: dict[str, Claim], start: str, published_db: float, octave: Sequence[ControlPoint], figure: str
) -> Sentence:
    """A published figure in dB beside the checkpoints' own claim check, or else beside every kind of weights."""
    claim = next((found for name, found in claims.items() if name.startswith(start)), None)
    ranges = {
        kind: _range(getattr(point, figure) for point in octave if point.weights == kind)
        for kind in dict.fromkeys(point.weights for point in octave)
    }
    measured = "weights alone, synthetic, over an octave: " + ", ".join(
        f"{kind} {low:.2f} to {high:.2f} dB" for kind, (low, high) in ranges.items()
    )
    met = [low - FIGURE_DB <= published_db <= high + FIGURE_DB for low, high in ranges.values()]
    holds = HOLDS if all(met) else CONDITIONS if any(met) else NO
    if claim is not None and claim.holds != "not measured":
        both = "not measured" if math.isnan(claim.measured) else f"{claim.measured:.2f} dB"
        measured = f"{claim.measured_weight_only:.2f} dB with exact inputs, {both} with rounded ones here; {measured}"
        holds = {"yes": HOLDS, "only weight-only": CONDITIONS, "no": NO}[claim.holds]
    return Sentence(
        claim=f"{start}.",
        published=f"about {published_db:g} dB",
        measured=measured,
        holds=holds,
        why="It is the weights' own figure, and Gaussian weights have it without any model; heavier tails lose more,"
        " and rounding the inputs as well, as the served product does, costs more again.",
    )


def _second_is_cheap(octave: Sequence[ControlPoint], pair: PairSummary | None) -> Sentence:
    low, high = _range(point.sqnr_direct_db - point.sqnr_total_db for point in octave)
    measured, most = f"{low:.2f} to {high:.2f} dB behind MXFP4 straight from the source, over an octave", high
    if pair is not None and not math.isnan(pair.loss_to_direct_db.pooled):
        most = pair.loss_to_direct_db.pooled
        measured = f"{most:.2f} dB here; {measured}"
    return Sentence(
        claim="The second rounding costs far less than one might fear.",
        published="compared with adding amplitudes, e1 + e2",
        measured=measured,
        holds=HOLDS if most <= CHEAP_DB else CONDITIONS,
        why="True against e1 + e2, which no rounding does. The user's alternative is MXFP4 from the source, and that is"
        " what the detour costs.",
    )


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)
