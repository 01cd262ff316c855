"""Open a checkpoint of any known dialect and read it tensor by tensor in canonical form.

    with open_checkpoint("mini_kimi_nvfp4") as checkpoint:
        for entry in checkpoint.entries():          # embeddings, layer 0, layer 1, ..., the rest
            tensor = checkpoint.read(entry.name)    # QuantizedTensor or torch.Tensor, one at a time

A folder, or `hf://org/name[@revision]` without downloading its weights. Opening reads headers and config only. Whatever
is not understood is refused with the tensor's and the file's name; `strict=False` (for lint) keeps such faults in
`checkpoint.problems` instead. No pickle is ever loaded and no code of a checkpoint is run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from .dialects import Declaration, Dialect, Located, choose_dialect
from .files import CONFIG_FILES, Folder, Problem, read_folder
from .header import StoredTensor
from .names import layer_order, parse_name

_SAMPLE_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One canonical tensor of a checkpoint; companions (scales) belong to their weight and are no entries.

    name: "model.layers.1.mlp.experts.3.gate_proj.weight". module: without ".weight". format: "nvfp4", "mxfp4", or the
    plain dtype ("bf16", "f32", ...). shape: logical. layer, expert: -1 where none. projection: last module name of a
    matrix, "" otherwise. file: where its values lie. shared: its stored tensors hold other entries too (an expert of a
    stack, gate and up in one): `parts` then describes more than this entry.
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
    shared: bool = False


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
    _by_name: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {entry.name: entry for entry in self._entries}

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
        self._locate(name)
        return self._by_name[name]

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
        """The stored tensors behind one entry, by role (values, block_scales, global_scale, input_scale).

        Whole stored tensors: those of an entry that is `shared` hold other entries as well.
        """
        return {role: self.folder.tensors[stored] for role, stored in self._locate(name).parts.items()}

    def fingerprint(self) -> str:
        """16 hex digits of a SHA-256 over config, headers and 64 bytes from the middle of every stored tensor.

        Tells two exports of one model apart without reading them whole; it is no proof that every byte is equal. On the
        Hub the shards' own hashes, which it lists, stand for the bytes: nothing is read, and the fingerprint is another
        than the same files have in a folder.
        """
        digest = hashlib.sha256()
        for name in CONFIG_FILES:
            if (self.path / name).is_file():
                digest.update((self.path / name).read_bytes())
        for file in sorted(self.folder.headers):
            digest.update(self.folder.headers[file])
        if hashes := self.folder.content_hashes():
            digest.update("".join(hashes[file] for file in sorted(hashes)).encode())
            return digest.hexdigest()[:16]
        for name in sorted(self.folder.tensors):
            digest.update(self._sample(self.folder.tensors[name]))
        return digest.hexdigest()[:16]

    def weights_digest(self) -> str:
        """16 hex digits of a SHA-256 over every stored tensor's name, dtype, shape and 64 bytes from its middle: of the
        weights alone, whatever config, shards and side files say. "" on the Hub, where each sample would be a request.
        """
        if self.folder.name.startswith("hf://"):
            return ""
        digest = hashlib.sha256()
        for name in sorted(self.folder.tensors):
            info = self.folder.tensors[name]
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
            digest.update(self._sample(info))
        return digest.hexdigest()[:16]

    def _sample(self, info: StoredTensor) -> bytes:
        count = min(_SAMPLE_BYTES, info.nbytes)
        return self.folder.load_bytes(info, (info.nbytes - count) // 2, count)

    def total_bytes(self) -> int:
        """Bytes of all tensors as stored, each once."""
        return sum(info.nbytes for info in self.folder.tensors.values())

    def _locate(self, name: str) -> Located:
        if name not in self._located:
            near = [n for n in self._located if n.endswith(name.rpartition(".")[0].rpartition(".")[2] + ".weight")]
            hint = f"; a tensor there: {near[0]}" if near else ""
            raise CheckpointError(f"no tensor {name!r} in {self.folder.name}", fix=f"use a name from entries(){hint}")
        return self._located[name]


def open_checkpoint(path: str | Path, *, strict: bool = True) -> Checkpoint:
    """Open a checkpoint folder, or `hf://org/name[@revision]` by ranges (`hub.py`; the local Hub cache is used).

    Raises CheckpointError: missing folder, shard or config, broken JSON, truncated shard, an index that lists what no
    shard holds, duplicate tensors, unknown quant_method or quant_algo, a missing companion, a scale of wrong shape or
    dtype; for the Hub also a missing or gated repository and a connection that fails. strict=False keeps the tensor
    faults in `problems` and leaves those tensors out of `entries()`.
    """
    folder = _read_folder(path)
    try:
        return _open_folder(folder, strict)
    except BaseException:
        folder.close()
        raise


def resolve_path(path: str | Path) -> Path:
    """A local folder for `path`; `hf://org/name[@revision]` is looked up in the local Hub cache, for a whole snapshot.

    For those who need files, such as a server. Raises CheckpointError with the download command otherwise.
    """
    if _is_hub_name(path):
        from .hub import cached_folder

        return cached_folder(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"unusable path {str(path)!r}: {error}", fix="give another path") from error


def _is_hub_name(path: str | Path) -> bool:
    """pathlib makes one slash of two, or none, so all count; a folder of that name is `./hf:...`."""
    return str(path).startswith("hf:")


def _read_folder(path: str | Path) -> Folder:
    if _is_hub_name(path):
        from .hub import read_hub_folder  # not before it is needed: huggingface_hub takes a while to import

        return read_hub_folder(path)
    return read_folder(resolve_path(path))


def _open_folder(folder: Folder, strict: bool) -> Checkpoint:
    dialect = choose_dialect(folder)
    declaration = dialect.declare(folder)
    problems = folder.problems
    located: dict[str, Located] = {}
    for found in dialect.locate(folder, problems):
        if found.name in located:
            both = (next(iter(entry.parts.values())) for entry in (located[found.name], found))
            raise CheckpointError(
                f"{folder.name} stores {found.name} twice, as {' and as '.join(both)}",
                fix="remove one of them; which is meant cannot be told",
            )
        located[found.name] = found
    errors = [p for p in problems if p.severity == "error"]
    if strict and errors:
        first = errors[0]
        more = f"\n  and {len(errors) - 1} more faults; `workbench lint {folder.name}` lists them" if errors[1:] else ""
        raise CheckpointError(f"{folder.name}: {first.message}{more}", fix=first.fix)
    uses = Counter(stored for entry in located.values() for stored in set(entry.parts.values()))
    entries = sorted((_entry(entry, folder, uses) for entry in located.values()), key=lambda e: layer_order(e.name))
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


def _entry(located: Located, folder: Folder, uses: Counter[str]) -> Entry:
    parsed = parse_name(located.name)
    values = next(iter(located.parts.values()))
    return Entry(
        name=located.name,
        module=parsed.module,
        format=located.format,
        shape=located.shape,
        quantized=located.quantized,
        file=folder.tensors[values].file,
        layer=parsed.layer,
        expert=parsed.expert,
        projection=parsed.projection if len(located.shape) >= 2 else "",
        shared_expert=parsed.shared_expert,
        has_input_scale="input_scale" in located.parts,
        shared=uses[values] > 1,
    )
