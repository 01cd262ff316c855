"""Captured activations as one file: input rows, amax and token counts per module.

Serving writes it at the layers' real inputs, analysis and calibration read it:

    write_activations(path, inputs={"model.layers.1.mlp.experts.3.gate_proj": x_mk}, amax={...}, tokens_seen={...},
                      aliases={"model.layers.1.mlp.experts.3.up_proj": "model.layers.1.mlp.experts.3.gate_proj"})
    captured = read_activations(path)
    x_mk = captured.input("model.layers.1.mlp.experts.3.up_proj")

File layout (safetensors): `<module>.input` [m, K] bfloat16 or float32, a bounded sample of rows; `<module>.amax`
float32 scalar over *all* rows seen; `<module>.tokens_seen` int64 scalar; optionally `<module>.second_moment` float32,
E[x x^T] over *all* rows seen: its diagonal [K], or whole [K, K]. Modules carry their checkpoint names, unfused.
Modules that share one input (gate and up, q_a and kv_a) store it once: the metadata key "aliases" is JSON
{alias module: stored module}. Trade-off: a sample of rows keeps the file small; amax and counts stay exact.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.errors import CheckpointError, OutputError

_KIND = "workbench-activations"


@dataclass(frozen=True, slots=True)
class Activations:
    """An opened activations file; tensors are read when asked for. Every method resolves aliases.

    metadata: what the writer noted (str to str), without the alias table.
    """

    path: Path
    aliases: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    _stored: frozenset[str] = frozenset()

    def modules(self) -> list[str]:
        """All module names, aliases included, sorted."""
        return sorted(self._stored | set(self.aliases))

    def __contains__(self, module: str) -> bool:
        return self.aliases.get(module, module) in self._stored

    def input(self, module: str) -> Tensor:
        """Sampled input rows `[m, K]` of `module`, bfloat16 or float32. Raises CheckpointError for an unknown one."""
        return self._read(module, "input")

    def amax(self, module: str) -> float:
        """Largest magnitude over all rows that reached `module`; 0.0 where none did."""
        return float(self._read(module, "amax"))

    def input_amax(self) -> dict[str, float]:
        """amax of every module that saw a token, aliases included: what a calibration takes."""
        return {module: self.amax(module) for module in self.modules() if self.tokens_seen(module) > 0}

    def tokens_seen(self, module: str) -> int:
        """Rows that reached `module`, before the sample was cut."""
        return int(self._read(module, "tokens_seen"))

    def second_moment(self, module: str) -> Tensor | None:
        """E[x x^T] over all rows that reached `module`, float32: `[K]` its diagonal or `[K, K]`; None: not captured."""
        from safetensors import safe_open

        stored = self.aliases.get(module, module)
        with safe_open(self.path, framework="pt") as handle:
            key = f"{stored}.second_moment"
            return handle.get_tensor(key) if key in handle.keys() else None  # noqa: SIM118

    def _read(self, module: str, what: str) -> Tensor:
        from safetensors import safe_open

        stored = self.aliases.get(module, module)
        if stored not in self._stored:
            raise CheckpointError(
                f"{self.path} holds no activations of {module}",
                fix="capture the activations again with the checkpoint that this module belongs to",
            )
        with safe_open(self.path, framework="pt") as handle:
            return handle.get_tensor(f"{stored}.{what}")


def write_activations(
    path: Path,
    *,
    inputs: Mapping[str, Tensor],
    amax: Mapping[str, float],
    tokens_seen: Mapping[str, int],
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an activations file atomically. `inputs`, `amax` and `tokens_seen` have the same keys (module names).

    Raises ValueError when the keys differ or an alias points nowhere, OutputError when the file cannot be written.
    """
    from safetensors.torch import save_file

    aliases = dict(aliases or {})
    if not (set(inputs) == set(amax) == set(tokens_seen)):
        raise ValueError("inputs, amax and tokens_seen name different modules")
    dangling = sorted(a for a, stored in aliases.items() if stored not in inputs)
    if dangling:
        raise ValueError(f"aliases without a stored module: {dangling[:3]}")
    tensors: dict[str, Tensor] = {}
    for module, rows in inputs.items():
        tensors[f"{module}.input"] = rows.detach().cpu().contiguous()
        tensors[f"{module}.amax"] = torch.tensor(float(amax[module]), dtype=torch.float32)
        tensors[f"{module}.tokens_seen"] = torch.tensor(int(tokens_seen[module]), dtype=torch.int64)
    for module, moment in (second_moments or {}).items():
        tensors[f"{module}.second_moment"] = moment.detach().cpu().float().contiguous()
    notes = {**(metadata or {}), "kind": _KIND, "aliases": json.dumps(aliases, sort_keys=True)}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        save_file(tensors, temporary, metadata=notes)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except Exception as error:  # safetensors raises its own type on a full disk
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise OutputError.of(path, error) from error


def read_activations(path: Path) -> Activations:
    """Open an activations file. Raises CheckpointError when it is missing, damaged, or something else."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt") as handle:
            notes = dict(handle.metadata() or {})
            keys = list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the activations file {path}: {error}", fix="capture the activations again"
        ) from error
    if notes.pop("kind", "") != _KIND:
        raise CheckpointError(f"{path} is no activations file", fix="give a file that the workbench captured")
    aliases = json.loads(notes.pop("aliases", "{}"))
    stored = frozenset(key.removesuffix(".input") for key in keys if key.endswith(".input"))
    return Activations(path, aliases, notes, stored)
