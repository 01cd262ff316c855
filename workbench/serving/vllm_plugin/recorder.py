"""A bounded sample of the rows that reach each module, with exact amax and counts.

Sampling is uniform over all rows seen: each row draws a key from a generator seeded with the module's name, and the
rows with the largest keys are kept, so the same prompts in the same order give the same sample.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class _Sample:
    generator: torch.Generator
    rows: Tensor  # [m, K], in order of arrival
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    amax: float = 0.0
    seen: int = 0


class ActivationRecorder:
    """Off until `enabled` is set (an engine runs dummy tokens while it starts)."""

    def __init__(self) -> None:
        self.enabled = False
        self.limit = 256
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
            sample = self._samples[stored] = _Sample(generator, rows=rows[:0].cpu())
        keys = torch.rand(rows.shape[0], generator=sample.generator, dtype=torch.float64)
        sample.seen += rows.shape[0]
        sample.amax = max(sample.amax, float(rows.abs().amax()))
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
        """Write what was recorded. `expected` modules that saw no row are stored with zero rows of zero columns."""
        from workbench.formats.activations import write_activations

        inputs = {m: s.rows.float() if s.rows.dtype == torch.float16 else s.rows for m, s in self._samples.items()}
        amax = {m: s.amax for m, s in self._samples.items()}
        seen = {m: s.seen for m, s in self._samples.items()}
        for module in expected:
            if self._aliases.get(module, module) not in inputs:
                inputs[module], amax[module], seen[module] = torch.empty(0, 0), 0.0, 0
        aliases = {a: m for a, m in self._aliases.items() if m in inputs}
        write_activations(path, inputs=inputs, amax=amax, tokens_seen=seen, aliases=aliases, metadata=metadata)
