"""What of a checkpoint could not be analyzed, named one by one; everything else is.

    faults = [Fault(tensor="model.layers.3....weight", arm="first", kind="shape", message="is [16, 64], not [32, 64]")]

A fault never stops a pass: the command lists them, writes them into analysis.json and exits with 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import CheckpointError

KINDS = {
    "missing": "an arm does not hold the matrix",
    "shape": "an arm holds it in another shape",
    "unreadable": "it cannot be read as its checkpoint declares it",
    "format": "it does not fit the format that it is to be rounded to, or is empty",
    "non-finite": "an arm's values hold NaN or infinity",
    "all-zero": "every value is zero, so ratios are undefined (its row is kept)",
    "unrelated": "the first arm's values do not resemble the source's (its row is kept)",
}
KEPT = ("all-zero", "unrelated")
"""Faults of a matrix that still has a row: its figures are right, and say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One matrix that is not as it should be. kind: a key of KINDS. arm: which arm's ("" : several)."""

    tensor: str
    kind: str
    message: str
    arm: str = ""


def count_faults(faults: Sequence[Fault]) -> dict[str, int]:
    """How many of each kind, in KINDS' order."""
    counts = Counter(fault.kind for fault in faults)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}


def raise_first(faults: Sequence[Fault]) -> None:
    """Raise CheckpointError for the first fault that leaves a matrix without a row; nothing for the others."""
    for fault in faults:
        if fault.kind not in KEPT:
            raise CheckpointError(
                f"{fault.tensor} {fault.message}", fix="all arms must be made from one source: check their paths"
            )
