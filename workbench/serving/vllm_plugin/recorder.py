"""A bounded sample of the rows that reach each module, with exact amax, counts and second moments.

    recorder.limit, recorder.moments, recorder.enabled = 256, "diagonal", True
    recorder.record(["model.layers.1.mlp.experts.3.gate_proj", "model.layers.1.mlp.experts.3.up_proj"], x_mk)
    recorder.write(path, expected=[...], metadata={})

Sampling is uniform over all rows seen: each row draws a key from a generator seeded with the module's name, and the
rows with the largest keys are kept, so the same prompts in the same order give the same sample. Second moments E[x x^T]
are of all rows seen, summed in float64 (a relative error of 1e-13 for a million rows), and rounded once to the file's
float32 (6e-8). A whole moment takes K^2 numbers, so those of all modules together are bounded: see `full_bytes`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

_ROWS_AT_ONCE = 1024  # widened to float64 for a second moment


@dataclass
class _Sample:
    generator: torch.Generator
    rows: Tensor  # [m, K], in order of arrival
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    amax: float = 0.0
    seen: int = 0
    squares: Tensor | None = None  # sum of x x^T, float64: its diagonal [K], or [K, K]


class ActivationRecorder:
    """Off until `enabled` is set (an engine runs dummy tokens while it starts).

    limit: rows kept for a module. moments: "none", "diagonal" or "full" second moments. full_bytes: what the whole
    moments may take in the file; modules are served in the order in which rows first reach them, and one that no longer
    fits keeps its diagonal (`write` notes how many). In memory a moment takes twice its size in the file.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.limit = 256
        self.moments = "none"
        self.full_bytes = 0
        self._samples: dict[str, _Sample] = {}
        self._aliases: dict[str, str] = {}

    def record(self, modules: list[str], x: Tensor) -> None:
        """Note that all `modules` received `x` `[..., K]`; the first one stores it, the others are its aliases."""
        if not self.enabled or not modules:
            return
        stored, *others = modules
        for other in others:
            self._aliases[other] = stored
        rows = x.detach().reshape(-1, x.shape[-1])
        if not rows.shape[0]:
            return
        sample = self._samples.get(stored)
        if sample is None:
            generator = torch.Generator().manual_seed(zlib.crc32(stored.encode()))
            sample = self._samples[stored] = _Sample(generator, rows[:0].cpu(), squares=self._no_squares(rows.shape[1]))
        keys = torch.rand(rows.shape[0], generator=sample.generator, dtype=torch.float64)
        sample.seen += rows.shape[0]
        sample.amax = max(sample.amax, float(rows.abs().amax()))
        if sample.squares is not None:
            _add_squares(sample.squares, rows)
        if sample.keys.numel() >= self.limit:  # most rows of a long capture cannot enter: pick before copying
            entering = keys > sample.keys.min()
            keys, rows = keys[entering], rows[entering.to(rows.device)]
        rows = rows.cpu().clone()
        all_keys = torch.cat([sample.keys, keys])
        all_rows = torch.cat([sample.rows, rows])
        if all_keys.numel() > self.limit:
            kept = all_keys.topk(self.limit).indices.sort().values  # back in order of arrival
            all_keys, all_rows = all_keys[kept], all_rows[kept]
        sample.keys, sample.rows = all_keys, all_rows

    def write(self, path: Path, *, expected: list[str], metadata: dict[str, str]) -> None:
        """Write what was recorded. `expected` modules that saw no row are stored with zero rows of zero columns, and
        have no second moment."""
        from workbench.formats.activations import write_activations

        inputs = {m: s.rows.float() if s.rows.dtype == torch.float16 else s.rows for m, s in self._samples.items()}
        amax = {m: s.amax for m, s in self._samples.items()}
        seen = {m: s.seen for m, s in self._samples.items()}
        squares = {m: (s.squares, s.seen) for m, s in self._samples.items() if s.squares is not None}
        for module in expected:
            if self._aliases.get(module, module) not in inputs:
                inputs[module], amax[module], seen[module] = torch.empty(0, 0), 0.0, 0
        notes = {"second_moments": self.moments}
        if self.moments == "full":
            cut = sum(total.dim() == 1 for total, _ in squares.values())
            notes |= {"second_moments_bytes": str(self.full_bytes), "second_moments_diagonal_only": str(cut)}
        write_activations(
            path,
            inputs=inputs,
            amax=amax,
            tokens_seen=seen,
            aliases={a: m for a, m in self._aliases.items() if m in inputs},
            metadata=metadata | notes,
            second_moments={m: (total / rows).float() for m, (total, rows) in squares.items()},
        )

    def _no_squares(self, k: int) -> Tensor | None:
        """Where a module's second moment is summed; its diagonal where all of it does not fit any more."""
        if self.moments == "none":
            return None
        sums = [sample.squares for sample in self._samples.values()]
        held = sum(4 * total.numel() for total in sums if total is not None and total.dim() > 1)
        whole = self.moments == "full" and held + 4 * k * k <= self.full_bytes
        return torch.zeros((k, k) if whole else (k,), dtype=torch.float64)


def _add_squares(total: Tensor, rows: Tensor) -> None:
    """Add the sum of x x^T of `rows` [m, K], computed where they lie, to `total` (on the CPU)."""
    for part in rows.split(_ROWS_AT_ONCE):
        x = part.double()
        total += (x.square().sum(0) if total.dim() == 1 else x.T @ x).cpu()
