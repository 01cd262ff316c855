"""How much an analysis will read from the Hub, said before it is read.

    for note in fetch_notes("hf://org/name", pairs, products, sample=300, seed=0):
        print(note)     # 300 of 92160 matrices of hf://org/name: 5.03 GB in 600 requests, headers apart

Ranges are not kept, so a matrix that the weights' and the products' pass both need is fetched twice, and once more for
every arm that converts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choice import choose_matrices
from .inputs import OpenCheckpoints

if TYPE_CHECKING:
    from .gemm import GemmArm
    from .matrices import ArmPair


def fetch_notes(
    source: str | Path, pairs: Sequence[ArmPair], products: Sequence[GemmArm], *, sample: int | None, seed: int
) -> list[str]:
    """A sentence for every checkpoint on the Hub; none where all are folders. Reads headers only.

    products: the arms whose matrix products are measured as well.
    """
    stored = [path for pair in pairs for path in (pair.first, pair.second, pair.direct) if path is not None]
    reads = Counter([str(source), *(str(path) for path in stored)])
    reads.update(str(arm.checkpoint) for arm in products)
    if products:
        reads[str(source)] += 1
    remote = [path for path in reads if path.startswith("hf:")]
    if not remote:
        return []
    with ExitStack() as stack:
        checkpoints = OpenCheckpoints(stack)
        original = checkpoints.open(source)
        chosen = choose_matrices(pairs, original, checkpoints, has_source=True, sample=sample, seed=seed)
        notes = []
        for path in remote:
            size, requests = stored_bytes(checkpoints.open(path), chosen.names)
            address = "hf://" + path.removeprefix("hf:").lstrip("/")  # as pathlib does not write it
            notes.append(
                f"{len(chosen.names)} of {chosen.of} matrices of {address}: {size * reads[path] / 1e9:.3g} GB in"
                f" {requests * reads[path]} requests ({reads[path]} times {size / 1e9:.3g} GB), headers apart"
            )
        return notes


def stored_bytes(checkpoint: Any, names: Sequence[str]) -> tuple[int, int]:
    """Bytes that the matrices `names` take in a checkpoint, scales included, and in how many stored tensors they lie.

    Of a stored tensor that holds several matrices, a matrix takes its share of the elements.
    """
    holders: Counter[str] = Counter()
    for entry in checkpoint.entries():
        if entry.shared:
            for stored in checkpoint.parts(entry.name).values():
                holders[stored.name] += math.prod(entry.shape)
    size = count = 0
    for name in names:
        entry = checkpoint.entry(name)
        for stored in checkpoint.parts(name).values():
            share = math.prod(entry.shape) / holders[stored.name] if stored.name in holders else 1.0
            size += round(stored.nbytes * share)
            count += 1
    return size, count
