"""Lint checks on the scale values of each matrix, from the facts that `lint_facts.read_facts` gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from workbench.formats import QuantizedTensor, get_format
from workbench.kernels.elements import ELEMENTS
from workbench.records import LintFinding

from .lint_facts import Facts, ScaleFacts
from .lint_findings import entry_finding
from .lint_reads import scan_tensor
from .match import is_plain_name, matches_any
from .open import Checkpoint

PLAUSIBLE_AMAX = (1e-6, 1e3)  # of a weight matrix
E4M3_MIN_NORMAL = 2.0**-6
UNIT_SCALES = 4  # static scales that are exactly 1 and no longer a coincidence


def check_scale_nan(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-nan: NaN bytes (E4M3 0x7F and 0xFF, E8M0 255), NaN or infinite floats among the block scales."""
    bad = [f for f in facts if f.scan.nan]
    if bad:
        yield _finding(
            "scale-nan",
            "error",
            f"{_of(bad[0].scan.nan, bad[0])} block scales are NaN",
            bad,
            "the blocks decode to NaN: export again (producers must clamp scales to 448 before the E4M3 cast)",
        )
    infinite = [f for f in facts if f.scan.infinite]
    if infinite:
        yield _finding(
            "scale-nan",
            "error",
            f"{_of(infinite[0].scan.infinite, infinite[0])} block scales are infinite",
            infinite,
            "export again: a scale was divided by zero or overflowed",
        )


def check_nan_values(facts: Facts) -> Iterator[LintFinding]:
    """nan-values: FP8 codes or plain weights that are NaN or infinite, where values were looked at."""
    bad = [f.entry for f in facts.matrices if f.nan_values] + facts.nonfinite
    if bad:
        yield entry_finding(
            "nan-values",
            "error",
            f"the {bad[0].format} {'matrix' if len(bad[0].shape) == 2 else 'tensor'} holds values that are NaN or"
            " infinite",
            bad,
            "restore it from the source; ModelOpt's FP8 export of an all-zero matrix is all NaN: exclude such matrices",
        )


def check_scale_sign(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-zero-or-negative: negative block scales; zero scales that erase non-zero codes."""
    negative = [f for f in facts if f.scan.negative]
    if negative:
        yield _finding(
            "scale-zero-or-negative",
            "error",
            f"{_of(negative[0].scan.negative, negative[0])} block scales are negative",
            negative,
            "a scale has no sign: the bytes are not what the format says; export again",
        )
    zero = [f for f in facts if f.zero_live and not f.dead]
    for small, severity, why, fix in (
        (
            True,
            "warning",
            "they underflowed",
            "export again with a producer that clamps block scales to 2^-9, or accept that these blocks are zero",
        ),
        (False, "error", "whole rows or blocks are lost", "export again: a float scale does not underflow by itself"),
    ):
        hit = [f for f in zero if _is_e4m3(f) == small]
        if hit:
            yield _finding(
                "scale-zero-or-negative",
                severity,
                f"{_of(hit[0].zero_live or 0, hit[0])} block scales are zero, their codes are not: {why}",
                hit,
                fix,
            )
    unread = [f for f in facts if f.zero_live is None]
    if unread:
        yield _finding(
            "scale-zero-or-negative",
            "warning",
            f"{_of(unread[0].scan.zero, unread[0])} block scales are zero; the codes of so many matrices with zero"
            " scales are not read, so this may be harmless",
            unread,
            "`workbench analyze` compares with the source weights",
        )


def check_scale_subnormal(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """scale-subnormal: all of a tensor's E4M3 scales are below 2^-6, which some kernels misread."""
    small = [f for f in facts if _is_e4m3(f) and not f.dead and 0 < f.scan.largest < E4M3_MIN_NORMAL]
    if small:
        yield _finding(
            "scale-subnormal",
            "warning",
            f"the largest block scale is {small[0].scan.largest:.3g}, below E4M3's smallest normal 2^-6",
            small,
            "legal, but backend-sensitive; a global scale of amax / 2688 uses the full range",
        )


def check_global_scale_range(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """global-scale-range: zero, negative or non-finite globals; scales that imply impossible weights.
    global-scale-reciprocal: a global that is plausible only when it is inverted."""
    facts = [f for f in facts if f.entry.quantized]
    bad = [f for f in facts if f.global_scale is not None and not 0 < f.global_scale < math.inf]
    if bad:
        yield _finding(
            "global-scale-range",
            "error",
            f"the global scale is {bad[0].global_scale}",
            bad,
            "the matrix decodes to zeros, infinities or NaN; export it again (all-zero matrices: exclude them)",
        )
    usable = [f for f in facts if f.global_scale is None or 0 < f.global_scale < math.inf]
    inverted = [f for f in usable if not f.dead and _is_inverted(f)]
    if inverted:
        first = inverted[0]
        yield _finding(
            "global-scale-reciprocal",
            "error",
            f"the global scale {_shown(first.global_scale)} implies weights up to {_implied_amax(first):.3g}, its"
            f" reciprocal up to {_implied_amax(first, inverted=True):.3g}",
            inverted,
            "a divisor (compressed-tensors' convention) stands where a multiplier belongs, or the reverse: weights are"
            " off by its square; store the reciprocal, once",
        )
    known = {f.entry.name for f in inverted}
    huge = [f for f in usable if _implied_amax(f) > PLAUSIBLE_AMAX[1] and f.entry.name not in known]
    if huge:
        yield _finding(
            "global-scale-range",
            "error",
            f"the scales imply weights up to {_implied_amax(huge[0]):.3g}"
            + (f" (global scale {_shown(huge[0].global_scale)})" if huge[0].global_scale is not None else ""),
            huge,
            "the scales are read in another number format than they were written in (E8M0 bytes as numbers, say), or"
            " the global scale is wrong; export again",
        )
    tiny = [f for f in usable if not f.dead and 0 < _implied_amax(f) < PLAUSIBLE_AMAX[0] and f.entry.name not in known]
    if tiny:
        yield _finding(
            "global-scale-range",
            "warning",
            f"the scales imply weights of at most {_implied_amax(tiny[0]):.3g}",
            tiny,
            "compare with the source weights (`workbench analyze`)",
        )


def scale_doubt(q: QuantizedTensor) -> str:
    """What check_global_scale_range would reject of one tensor, "" for nothing."""
    factor = 1.0 if q.global_scale is None else float(q.global_scale.max())
    if q.global_scale is not None and not bool((q.global_scale.isfinite() & (q.global_scale > 0)).all()):
        return f"the global scale is {factor}"
    implied = _largest_value(q.format, scan_tensor(q.block_scales).largest, factor)
    return f"the scales imply weights up to {implied:.3g}" if implied > PLAUSIBLE_AMAX[1] else ""


def check_input_scale(facts: Sequence[ScaleFacts], checkpoint: Checkpoint) -> Iterator[LintFinding]:
    """input-scale-missing: some modules of a format have a static activation scale and others do not, or an unusable
    one; none has, though the config needs one; all are exactly 1."""
    declared = checkpoint.declaration
    patterns = tuple(p for p in declared.weight_only if not is_plain_name(p))
    quantized = [f for f in facts if f.entry.quantized]
    for format in dict.fromkeys(f.entry.format for f in quantized):
        alike = [f for f in quantized if f.entry.format == format]
        having = [f for f in alike if f.input_scale is not None]
        lacking = [f for f in alike if f.input_scale is None]
        if having and lacking:
            lacking = [f for f in lacking if not _is_listed(f.entry.module, declared.weight_only, patterns)]
        if having and lacking:
            yield _finding(
                "input-scale-missing",
                "error",
                "input_scale is missing, while other modules have one; servers fill in zero, and 1 / 0 is infinite",
                lacking,
                "calibrate again; experts without tokens take their siblings' largest amax (`workbench calibrate`)",
            )
        if alike and not having and _needs_input_scale(checkpoint, format):
            yield LintFinding(
                check="input-scale-missing",
                severity="warning",
                message=f"the config declares {declared.activations} activations, but no {format} module has an"
                " input_scale",
                file="config.json",
                fix="calibrate, or declare a weight-only scheme (ModelOpt's is W4A16_NVFP4)",
                count=len(alike),
                tensors=tuple(f.entry.name for f in alike),
            )
        unusable = [f for f in having if not 0 < (f.input_scale or 0.0) < math.inf]
        if unusable:
            yield _finding(
                "input-scale-missing",
                "error",
                f"input_scale is {unusable[0].input_scale}",
                unusable,
                "calibrate again: a zero, negative or non-finite activation scale gives NaN outputs, and a server that"
                " takes the largest of a layer's experts spreads it to all of them",
            )
        unit = [f for f in having if f.input_scale == 1.0]
        if len(unit) >= UNIT_SCALES:
            yield _finding(
                "input-scale-missing",
                "warning",
                "input_scale is exactly 1: set by hand, not calibrated",
                unit,
                "calibrate (`workbench calibrate`), if the producer's recipe does not want it so",
            )


def check_dead_tensor(facts: Sequence[ScaleFacts]) -> Iterator[LintFinding]:
    """dead-tensor: a matrix whose every value is zero."""
    dead = [f for f in facts if f.dead]
    if dead:
        yield _finding(
            "dead-tensor",
            "error",
            "every value of the matrix is zero",
            dead,
            "restore it from the source checkpoint; if the source is zero there too, pass --allow dead-tensor",
        )


def _finding(check: str, severity: str, message: str, bad: Sequence[ScaleFacts], fix: str) -> LintFinding:
    return entry_finding(check, severity, message, [f.entry for f in bad], fix)


def _of(count: int, f: ScaleFacts) -> str:
    """ "3 of 128", or how many of a sample."""
    return f"{count} of {f.blocks}" if f.scan.count == f.blocks else f"{count} of {f.scan.count} sampled"


def _is_e4m3(f: ScaleFacts) -> bool:
    return f.entry.quantized and get_format(f.entry.format).scale == "e4m3"


def _implied_amax(f: ScaleFacts, *, inverted: bool = False) -> float:
    """The largest weight that the scales can make."""
    factor = 1.0 if f.global_scale is None else f.global_scale
    return _largest_value(f.entry.format, f.scan.largest, 1 / factor if inverted else factor)


def _largest_value(format: str, largest_scale: float, factor: float) -> float:
    return ELEMENTS[get_format(format).element].max * largest_scale * factor


def _is_inverted(f: ScaleFacts) -> bool:
    low, high = PLAUSIBLE_AMAX
    return (
        f.global_scale is not None
        and f.scan.largest > 0
        and not low <= _implied_amax(f) <= high
        and low <= _implied_amax(f, inverted=True) <= high
    )


def _shown(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:.6g}"


def _needs_input_scale(checkpoint: Checkpoint, format: str) -> bool:
    """Whether activations are declared in a format whose scale is stored: NVFP4's global one, ModelOpt's FP8."""
    declared = checkpoint.declaration
    if declared.activations == "nvfp4":
        return format == "nvfp4"
    return checkpoint.dialect == "modelopt" and declared.algorithm == "FP8" and format == "fp8_tensor"


def _is_listed(module: str, names: frozenset[str], patterns: tuple[str, ...]) -> bool:
    """Whether weight-only modules include `module`. names are looked up, since there can be thousands; patterns: those
    of them that are none; "Linear" is compressed-tensors' word for every layer that no other group takes."""
    if "Linear" in names or (patterns and matches_any(module, patterns)):
        return True
    while module and module not in names:
        module = module.rpartition(".")[0]
    return bool(module)
