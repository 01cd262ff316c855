"""Are the tensors that a quantized checkpoint leaves alone the source's, byte for byte?

    found = compare_bytes("Kimi-K2.6", "Kimi-K2.6-NVFP4", arm="nvfp4")
    found.differing                                    # names; () where every unquantized tensor is the source's

A tensor counts as left alone where the other checkpoint stores its name with its dtype, and as missing where that has
no tensor of its module at all. Bytes are read in pieces of 64 MiB, from both, so the time is that of reading them.
"""

from __future__ import annotations

from pathlib import Path

from workbench.records import TensorEquality

from .files import Folder
from .header import StoredTensor
from .open import open_checkpoint

_PIECE = 64 << 20


def compare_bytes(source: str | Path, other: str | Path, arm: str) -> TensorEquality:
    """Compare the folders `source` and `other`. Raises CheckpointError for one that cannot be read."""
    with open_checkpoint(source) as a, open_checkpoint(other) as b:
        modules = {_module(name) for name in b.folder.tensors}
        compared, differing, missing = 0, [], []
        for name, info in a.folder.tensors.items():
            twin = b.folder.tensors.get(name)
            if twin is None:
                if _module(name) not in modules:
                    missing.append(name)
            elif twin.dtype == info.dtype:
                compared += 1
                if not _equal(a.folder, info, b.folder, twin):
                    differing.append(name)
        return TensorEquality(arm=arm, compared=compared, differing=tuple(differing), missing=tuple(missing))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _equal(folder: Folder, info: StoredTensor, other: Folder, twin: StoredTensor) -> bool:
    if (info.shape, info.nbytes) != (twin.shape, twin.nbytes):
        return False
    for start in range(0, info.nbytes, _PIECE):
        count = min(_PIECE, info.nbytes - start)
        if folder.load_bytes(info, start, count) != other.load_bytes(twin, start, count):
            return False
    return True
