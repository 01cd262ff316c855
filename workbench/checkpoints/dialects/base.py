"""What a dialect is: one file with one subclass of `Dialect`.

It recognizes its checkpoints (`detect`), says from names, dtypes and shapes alone which canonical tensors there are
(`locate`), turns stored parts into a `QuantizedTensor` (`assemble`) and back (`disassemble`), and knows its config
block (`declare`, `config_files`). Parts are stored tensors by role; `detail` holds whatever else a dialect needs to
cut its tensor out of them (an expert's index in a fused stack, a row range, ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder, Problem
from ..match import is_plain_name, matches, matches_any


class Load(Protocol):
    """`Folder.load`: a stored tensor by name, whole or the rows [first, last) of its first dimension."""

    def __call__(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """One canonical tensor, found in the headers. shape: logical. parts: role -> stored tensor name."""

    name: str
    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    quantized: bool = False
    detail: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What the config files claim. algorithm: the producer's word; format: canonical, "" where it varies by module.

    excludes: patterns of modules that stay unquantized. modules: pattern (`match.py`; a name covers what lies below it)
    -> canonical format, where the producer gives formats by module; "" there leaves a module unquantized; the first
    that covers a module decides, plain names before globs and regexes. listed_only: a module that none of them covers
    is unquantized, instead of `format`. weight_only: names of `modules` whose activations stay unquantized.
    activations: canonical name of what activations are rounded to ("" none, or unknown). kv_cache: producer's word for
    the KV cache's format. conflicts: contradictions between files.
    """

    files: tuple[str, ...] = ()
    algorithm: str = ""
    format: str = ""
    excludes: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    listed_only: bool = False
    weight_only: frozenset[str] = frozenset()
    activations: str = ""
    kv_cache: str = ""
    conflicts: tuple[str, ...] = ()
    _patterns: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_patterns", tuple(p for p in self.modules if not is_plain_name(p)))

    def expects_quantized(self, module: str) -> bool:
        """Whether the config says that the linear layer `module` is quantized."""
        if not self.algorithm or matches_any(module, self.excludes):
            return False
        listed = self._listed(module)
        return not self.listed_only if listed is None else bool(listed)

    def format_of(self, module: str) -> str:
        """The canonical format that the config gives the linear layer `module`; "" where it leaves it unquantized, or
        does not say which."""
        if not self.expects_quantized(module):
            return ""
        return self._listed(module) or self.format

    def _listed(self, module: str) -> str | None:
        name = module
        while name and self.modules:  # a name, or a parent's: looked up, since there can be tens of thousands
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        return next((self.modules[p] for p in self._patterns if matches(module, p)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a conversion writes, for the config: everything a producer's config says about a checkpoint.

    formats: quantized module -> format, in checkpoint order.
    excludes: unquantized linear modules (plain names; a layer's experts by their container when all of them are).
    patterns: the user's own exclude patterns.
    rules: format -> scale rule used. blocks: format -> (rows, columns), where the format leaves them VARIABLE.
    zero_points: formats whose tensors have them.
    static_activations: whether `input_scale` is stored. weight_only: activations stay unquantized.
    dtype: of what stays dense ("bf16", "f32").
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    excludes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    zero_points: frozenset[str] = frozenset()
    static_activations: bool = False
    weight_only: bool = False
    dtype: str = "bf16"

    @property
    def only_format(self) -> str:
        """The one format in use; "" when there are several, or none."""
        kinds = set(self.formats.values())
        return kinds.pop() if len(kinds) == 1 else ""


class Dialect(ABC):
    """How one producer names, packs and declares quantized tensors."""

    name: str
    writes: tuple[str, ...]  # formats that `disassemble` can write

    @abstractmethod
    def detect(self, folder: Folder) -> bool:
        """Whether this folder's config or side files name this dialect (tensor signatures: `detect_tensors`)."""

    def detect_tensors(self, folder: Folder) -> bool:
        """Whether the stored tensors alone bear this dialect's signature; asked when no config names a dialect."""
        return False

    @abstractmethod
    def declare(self, folder: Folder) -> Declaration:
        """Read the config block. Raises CheckpointError for a value this dialect does not know."""

    @abstractmethod
    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        """Every canonical tensor, from headers alone; what cannot be one goes to `problems`."""

    @abstractmethod
    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        """Read the parts of one located tensor into canonical form."""

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        """Canonical tensor `name` (`<module>.weight`) to stored tensors by name. Raises CheckpointError for a tensor
        that this dialect does not write."""
        raise self._not_written()

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        """File name -> JSON to write, from the source's config without its quantization block. Raises CheckpointError
        for what this dialect's config cannot say."""
        raise self._not_written()

    def bundle(self, name: str) -> str | None:
        """A key shared by the tensors that this dialect stores as one (gpt-oss: a layer's experts); None: alone."""
        return None

    def disassemble_bundle(
        self, key: str, members: Mapping[str, QuantizedTensor | torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The members of one bundle, canonical, to stored tensors by name. Raises CheckpointError for a missing one."""
        raise NotImplementedError(f"{self.name} has no bundles")

    def _not_written(self) -> CheckpointError:
        return CheckpointError(f"the {self.name} dialect is read, not written", fix="choose another dialect")


def find_config_block(config: dict[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` (or the older `compression_config`), at the top or within `text_config`: the first of them.

    Raises CheckpointError for any that is no JSON object (null counts as absent).
    """
    return next(iter(find_config_blocks(config).values()), None)


def find_config_blocks(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every quantization block by its place, in the order in which one is chosen. Raises CheckpointError."""
    inner = config.get("text_config")
    blocks: dict[str, dict[str, Any]] = {}
    for place, holder in (("", config), ("text_config.", inner if isinstance(inner, dict) else {})):
        for key in ("quantization_config", "compression_config"):
            block = holder.get(key)
            if block is None:
                continue
            if not isinstance(block, dict):
                raise CheckpointError(
                    f"config.json: broken {place}{key}: it is {repr(block)[:80]}, expected a JSON object",
                    fix="restore the producer's config.json; without quantization, leave the key out",
                )
            blocks[place + key] = block
    return blocks


def without_config_block(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of `config` without any quantization block."""
    blocks = ("quantization_config", "compression_config")
    copy = {k: v for k, v in config.items() if k not in blocks}
    if isinstance(copy.get("text_config"), dict):
        copy["text_config"] = {k: v for k, v in copy["text_config"].items() if k not in blocks}
    return copy


def config_table(block: Mapping[str, Any], key: str, where: str, *, of: str = "module names") -> dict[str, Any]:
    """A table of a config block; absent and null are empty. Raises CheckpointError for anything else, also an empty
    list or string: what it was to say cannot be told."""
    value = block.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}.{key} is no table of {of}, but {repr(value)[:80]}", fix="repair the config")
    return value


def string_list(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings from a config; None is empty. Raises CheckpointError naming `where`."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{where} is {value!r}, expected a list of names", fix="repair the config")
    return tuple(value)
