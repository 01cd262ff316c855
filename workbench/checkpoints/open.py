"""Open a checkpoint of any known dialect and read it tensor by tensor in canonical form.

    with open_checkpoint("mini_kimi_nvfp4") as checkpoint:
        for entry in checkpoint.entries():          # embeddings, layer 0, layer 1, ..., the rest
            tensor = checkpoint.read(entry.name)    # QuantizedTensor or torch.Tensor, one at a time

Opening reads headers and config only. Whatever is not understood is refused with the tensor's and the file's name;
`strict=False` (for lint) keeps such faults in `checkpoint.problems` instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from .dialects import Declaration, Dialect, Located, choose_dialect
from .files import Folder, Problem, read_folder
from .header import StoredTensor
from .names import layer_order, parse_name

_SAMPLE_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One canonical tensor of a checkpoint; companions (scales) belong to their weight and are no entries.

    name: "model.layers.1.mlp.experts.3.gate_proj.weight". module: without ".weight". format: "nvfp4", "mxfp4", or the
    plain dtype ("bf16", "f32", ...). shape: logical. layer, expert: -1 where none. projection: last module name of a
    matrix, "" otherwise. file: where its values lie.
    """

    name: str
    module: str
    format: str
    shape: tuple[int, ...]
    quantized: bool
    file: str
    layer: int
    expert: int
    projection: str
    shared_expert: bool
    has_input_scale: bool


@dataclass(slots=True)
class Checkpoint:
    """An open checkpoint. problems: faults and warnings found while opening (all warnings, unless strict=False)."""

    path: Path
    config: dict[str, Any]
    dialect: str
    declaration: Declaration
    problems: tuple[Problem, ...]
    folder: Folder
    _dialect: Dialect
    _located: dict[str, Located]
    _entries: list[Entry] = field(default_factory=list)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.folder.close()

    def entries(self) -> list[Entry]:
        """Every tensor in layer order: embeddings, layers 0, 1, ..., then the rest."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry called `name`. Raises CheckpointError."""
        return _entry(self._locate(name), self.folder)

    def read(self, name: str) -> QuantizedTensor | torch.Tensor:
        """Read one tensor in canonical form (its own memory; nothing is cached). Raises CheckpointError."""
        return self._dialect.assemble(self._locate(name), self.folder.load)

    def read_dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read one tensor as values: quantized ones decoded exactly in float32, then cast once to `dtype`.

        A scale of the layer's input (`pre_quant_scale`) is multiplied into the weight.
        """
        tensor = self.read(name)
        return tensor.effective(dtype) if isinstance(tensor, QuantizedTensor) else tensor.to(dtype)

    def parts(self, name: str) -> dict[str, StoredTensor]:
        """The stored tensors behind one entry, by role (values, block_scales, global_scale, input_scale)."""
        return {role: self.folder.tensors[stored] for role, stored in self._locate(name).parts.items()}

    def fingerprint(self) -> str:
        """16 hex digits of a SHA-256 over config, headers and 64 bytes from the middle of every stored tensor.

        Tells two exports of one model apart without reading them whole; it is no proof that every byte is equal.
        """
        digest = hashlib.sha256()
        for name in ("config.json", "hf_quant_config.json"):
            if (self.path / name).is_file():
                digest.update((self.path / name).read_bytes())
        for file in sorted(self.folder.headers):
            digest.update(self.folder.headers[file])
        for name in sorted(self.folder.tensors):
            info = self.folder.tensors[name]
            count = min(_SAMPLE_BYTES, info.nbytes)
            digest.update(self.folder.load_bytes(info, (info.nbytes - count) // 2, count))
        return digest.hexdigest()[:16]

    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self.folder.tensors.values())

    def _locate(self, name: str) -> Located:
        if name not in self._located:
            near = [n for n in self._located if n.endswith(name.rpartition(".")[0].rpartition(".")[2] + ".weight")]
            hint = f"; a tensor there: {near[0]}" if near else ""
            raise CheckpointError(f"no tensor {name!r} in {self.path}", fix=f"use a name from entries(){hint}")
        return self._located[name]


def open_checkpoint(path: str | Path, *, strict: bool = True) -> Checkpoint:
    """Open a checkpoint folder, or `hf://org/name[@revision]` in the local Hub cache.

    Raises CheckpointError: missing folder, shard or config, broken JSON, truncated shard, stale index, duplicate
    tensors, unknown quant_method or quant_algo, a missing companion, a scale of wrong shape or dtype. strict=False
    keeps the tensor faults in `problems` and leaves those tensors out of `entries()`.
    """
    folder = read_folder(resolve_path(path))
    dialect = choose_dialect(folder)
    declaration = dialect.declare(folder)
    problems = folder.problems
    located = {entry.name: entry for entry in dialect.locate(folder, problems)}
    errors = [p for p in problems if p.severity == "error"]
    if strict and errors:
        first = errors[0]
        more = f"\n  and {len(errors) - 1} more faults; `workbench lint {folder.path}` lists them" if errors[1:] else ""
        raise CheckpointError(f"{folder.path}: {first.message}{more}", fix=first.fix)
    entries = sorted((_entry(entry, folder) for entry in located.values()), key=lambda e: layer_order(e.name))
    return Checkpoint(
        path=folder.path,
        config=folder.config,
        dialect=dialect.name,
        declaration=declaration,
        problems=tuple(problems),
        folder=folder,
        _dialect=dialect,
        _located=located,
        _entries=entries,
    )


def resolve_path(path: str | Path) -> Path:
    """A local folder for `path`; `hf://org/name[@revision]` is looked up in the local Hub cache.

    Raises CheckpointError with the download command when the cache does not hold it.
    """
    if not str(path).startswith("hf://"):
        try:
            return Path(path).expanduser()
        except RuntimeError as error:
            raise CheckpointError(f"unusable path {str(path)!r}: {error}", fix="give another path") from error
    from huggingface_hub import snapshot_download

    name, _, revision = str(path).removeprefix("hf://").partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except Exception as error:  # the library raises several unrelated types for "not in the cache"
        option = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{path} is not in the local Hub cache ({type(error).__name__})", fix=f"run `hf download {name}{option}`"
        ) from error


def _entry(located: Located, folder: Folder) -> Entry:
    parsed = parse_name(located.name)
    return Entry(
        name=located.name,
        module=parsed.module,
        format=located.format,
        shape=located.shape,
        quantized=located.quantized,
        file=folder.tensors[next(iter(located.parts.values()))].file,
        layer=parsed.layer,
        expert=parsed.expert,
        projection=parsed.projection if len(located.shape) >= 2 else "",
        shared_expert=parsed.shared_expert,
        has_input_scale="input_scale" in located.parts,
    )
