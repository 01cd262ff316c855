"""quant_method "fp8": DeepSeek V3 to V4 and whoever writes like them (Qwen, GLM, MiniMax, Kimi-K2, Step, Quark's FP8).

    <m>.weight F8_E4M3 [N, K], <m>.weight_scale_inv F32 [ceil(N/128), ceil(K/128)]    multiplies, despite its name
    ... with scale_fmt "ue8m0": powers of two, as F32, F8_E8M0 or U8
    <m>.weight F8_E4M3, <m>.weight_scale_inv U8 [N, K/32]                             MXFP8 (MiniMax)
    <m>.weight F8_E4M3, <m>.weight_scale [] or [N], <m>.input_scale []                static FP8 (Quark)
    <m>.weight I8 [N, K/2], <m>.scale F8_E8M0 [N, K/32]                               V4's experts: MXFP4
    <m>.weight U8 [N, K/2], <m>.weight_scale F8_E4M3 [N, K/16], <m>.weight_scale_2    NVIDIA's V4-NVFP4 experts
    experts.gate_up_proj F8_E4M3 [E, 2I, H], experts.gate_up_proj_scale_inv [E, ...]  stacks (transformers 5, Step-3.5)

Tensors decide: the format follows from dtypes and shapes, the block from the shapes of weight and scales. The config's
block is taken where it fits; where it does not, the only block (a power of two up to 256) that does, with a warning. A
low-bit weight without a known scale is refused. Read only.
Source: published configs and names; finegrained_fp8 of transformers 5.19; vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format

from ..files import Folder, Problem
from ..header import StoredTensor
from ..match import is_plain_name
from .base import Declaration, Dialect, Load, Located, config_table, find_config_block, string_list
from .dense import LOW_BIT_DTYPES, PLAIN_FORMATS, locate_plain
from .stacks import ExpertSlice, Stack, find_stacks, language_configs, read_plain, split_expert_stacks

WEIGHT_FORMATS = {"e4m3", "float8_e4m3fn"}
SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
INPUT_SUFFIXES = ("input_scale", "activation_scale")
E8M0_DTYPES = ("F8_E8M0", "U8")
PACKED_DTYPES = ("U8", "I8")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
MAX_BLOCK = 256  # that is inferred; a config's may have MAX_DECLARED
MAX_DECLARED = 4096
# What every reader of these models keeps dense although no config lists it: the input of a prediction layer, DeepSeek's
# indexer weights, and V4's KV compressor (vLLM builds them without a quantization config).
NEVER_QUANTIZED = ("*.eh_proj", "*.indexer.weights_proj", "*.compressor.wkv", "*.compressor.wgate")
_QUANT_ALGOS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8_e4m3"}


class DeepSeekFp8(Dialect):
    name = "deepseek_fp8"
    writes = ()

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        return block is not None and block.get("quant_method") == "fp8"

    def detect_tensors(self, folder: Folder) -> bool:
        tensors = folder.tensors
        return any(
            info.dtype == "F8_E4M3"
            and name.endswith(".weight")
            and (name + "_scale_inv" in tensors or name.removesuffix("weight") + "scale" in tensors)
            for name, info in tensors.items()
        )

    def declare(self, folder: Folder) -> Declaration:
        """What the config claims. `quantized_layers` (NVIDIA's V4 exports) names the modules in another format; their
        `ignore` list means "stays FP8", so it excludes nothing."""
        block = find_config_block(folder.config)
        if block is None:
            return Declaration()
        where = "config.json quantization_config"
        element = block.get("fmt")
        if element is not None and str(element) not in WEIGHT_FORMATS:
            raise CheckpointError(
                f"{where}.fmt is {element!r}, which this version does not read",
                fix=f"known: {', '.join(sorted(WEIGHT_FORMATS))}",
            )
        shape = _read_block(block)
        skipped = [
            name for key in ("modules_to_not_convert", "ignored_layers") for name in string_list(block.get(key), key)
        ]
        default = "" if shape is None else "mxfp8_e4m3" if shape == (1, 32) else "fp8_block"
        others = _read_modules(block, where, default)
        if not others and "fp4" in (c.get("expert_dtype") for c in language_configs(folder.config)):
            others = {"*.experts.*": "mxfp4"}
        if others and default:
            others["*"] = default
        return Declaration(
            files=(where,),
            algorithm=str(block.get("quant_algo") or "FP8").upper(),
            format="" if others else default,
            excludes=translate_skip_list(dict.fromkeys(skipped)),
            modules={**dict.fromkeys(NEVER_QUANTIZED, ""), **others},
            kv_cache=str(block.get("kv_cache_quant_algo") or ""),
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        tensors = folder.tensors
        declared = _read_block(find_config_block(folder.config) or {})
        low_bit = [name for name, info in tensors.items() if info.dtype in LOW_BIT_DTYPES]
        stacks = find_stacks(folder, low_bit, problems)
        reader = _Reader(tensors=tensors, declared=declared, problems=problems)
        for name in low_bit:
            if name in stacks or name.endswith(".weight"):
                reader.add(tensors[name], stacks.get(name), refused=stacks.get(name, name) is None)
        reader.report_blocks()
        rest = (locate_plain(info, problems) for name, info in tensors.items() if name not in reader.used)
        return reader.located + split_expert_stacks(folder, (e for e in rest if e is not None), problems)

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        cut: _Cut = located.detail
        spec = get_format(located.format)
        scales = _read_part(load, located.parts["block_scales"], cut.scales)
        if spec.scale == "e4m3":
            scales = scales.view(torch.float8_e4m3fn)
        elif scales.element_size() == 1:
            scales = scales.view(torch.uint8)  # E8M0 bytes, whichever dtype names them
        else:
            scales = scales.float()
        codes = _read_part(load, located.parts["values"], cut.values)
        scalars = {
            role: _read_part(load, located.parts[role], cut.scalar).float().reshape(())
            for role in ("global_scale", "input_scale")
            if role in located.parts
        }
        return QuantizedTensor(
            format=located.format,
            codes=codes.view(torch.uint8) if spec.element == "e2m1" else codes,
            block_scales=scales.reshape(spec.scale_shape(located.shape, cut.block)),
            global_scale=scalars.get("global_scale"),
            shape=located.shape,
            block=cut.block,
            input_scale=scalars.get("input_scale"),
        )


def translate_skip_list(names: Iterable[str]) -> tuple[str, ...]:
    """`modules_to_not_convert` in the meaning of `match.py`.

    transformers reads an entry as a regex from the start of a module's name, or as its end. A full name stays a name; a
    short one (`gate`, `lm_head`) covers it wherever whole words end a name; a glob covers what lies below it too.
    """
    return tuple(_translate_entry(name) for name in names)


def _read_part(load: Load, name: str, place: ExpertSlice | None) -> torch.Tensor:
    return load(name) if place is None else place.read(load, name)


def _translate_entry(entry: str) -> str:
    if entry.startswith("re:"):
        return entry
    if is_plain_name(entry):
        full = entry.startswith("model.") or any(part.isdigit() for part in entry.split("."))
        return entry if full else rf"re:(.*\.)?{re.escape(entry)}(\..*)?$"
    return "re:" + ".*".join(re.escape(part) for part in entry.split("*")) + r"(\..*)?$"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How one matrix is cut out of its stored parts; values, scales: None where they are stored alone."""

    block: tuple[int, int] | None
    values: ExpertSlice | None
    scales: ExpertSlice | None

    @property
    def scalar(self) -> ExpertSlice | None:
        return None if self.values is None else ExpertSlice(self.values.expert, slice(None))


@dataclass(slots=True)
class _Reader:
    """Collects what `locate` finds. surprises: what scales lie over -> weights for which the config says otherwise."""

    tensors: Mapping[str, StoredTensor]
    declared: tuple[int, int] | None
    problems: list[Problem]
    located: list[Located] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    surprises: dict[str, list[str]] = field(default_factory=dict)

    def add(self, info: StoredTensor, stack: Stack | None, *, refused: bool) -> None:
        """Locate the weight `info`, or each of a stack's matrices; `refused`: only take its parts out of the rest."""
        roles = self._roles(info.name)
        self.used.update((info.name, *roles.values()))
        if refused:
            return
        try:
            if stack is None:
                self.located.append(self._locate_matrix(info, roles))
            else:
                self.located += list(self._locate_stack(info, roles, stack))
        except _Fault as fault:
            self.problems.append(
                Problem(
                    fault.check,
                    "error",
                    f"{info.name} is {info.dtype} {list(info.shape)} in {info.file}{fault}",
                    tensor=info.name,
                    file=info.file,
                    fix="export or download the checkpoint again; without its own scales the weight cannot be decoded",
                )
            )

    def report_blocks(self) -> None:
        """One warning for each block that was read from shapes against, or without, the config's word."""
        for found, names in self.surprises.items():
            config = "gives no weight_block_size" if self.declared is None else f"says blocks of {list(self.declared)}"
            self.problems.append(
                Problem(
                    "config-conflict",
                    "warning",
                    f"config.json {config}; the shapes of {names[0]} and its scales say {found}"
                    + (f" ({len(names)} such tensors)" if len(names) > 1 else ""),
                    tensor=names[0],
                    file="config.json",
                    fix="the tensors decide what is read here; make weight_block_size say what they are",
                )
            )

    def _roles(self, name: str) -> dict[str, str]:
        """Role -> stored name of what belongs to the weight `name`."""
        stem = name.removesuffix("weight") if name.endswith(".weight") else ""
        roles: dict[str, str] = {}
        for role, suffixes in (
            ("block_scales", SCALE_SUFFIXES),
            ("global_scale", ("weight_scale_2",)),
            ("input_scale", INPUT_SUFFIXES),
        ):
            names = [stem + s if stem else f"{name}_{s.removeprefix('weight_')}" for s in suffixes]
            present = [n for n in names if n in self.tensors]
            if present:
                roles[role] = present[0]
            roles.update({f"surplus {role} {i}": n for i, n in enumerate(present[1:])})
        return roles

    def _locate_matrix(self, info: StoredTensor, roles: dict[str, str]) -> Located:
        scale = self._scale_of(roles, scalars=((), (1,)))
        format, shape, block = self._classify(info, info.shape, scale, scale.shape, "global_scale" in roles)
        self._note(info.name, format, block)
        parts = {"values": info.name, **roles}
        return Located(
            name=info.name, format=format, shape=shape, parts=parts, quantized=True, detail=_Cut(block, None, None)
        )

    def _locate_stack(self, info: StoredTensor, roles: dict[str, str], stack: Stack) -> Iterator[Located]:
        experts, n = stack.shape[:2]
        scale = self._scale_of(roles, scalars=((experts,), (experts, 1), (experts, 1, 1)))
        found = f"; {scale.name} is {scale.dtype} {list(scale.shape)}"
        if stack.layout.transposed:
            raise _Fault("scale-shape", ": a transposed stack of low-bit experts, whose scales' order is not known")
        if not scale.shape or scale.shape[0] != experts:
            raise _Fault("scale-shape", f"{found}, not one part for each of {experts} experts")
        # Rows of scales are cut like rows of weights; a single row, or a scale an expert, is gate's and up's alike.
        rows = scale.shape[1] if len(scale.shape) > 1 else 1
        across = _Fault("scale-shape", f"{found}, so that a block lies across gate and up")
        if rows == 1:
            cuts = dict.fromkeys((projection for projection, _ in stack.outputs(n)), slice(None))
        elif rows % 2 and stack.projection == "gate_up_proj":
            raise across
        else:
            cuts = dict(stack.outputs(rows))
        for name, shape, place in stack.members():
            cut = cuts[name.split(".")[-2]]
            scale_shape = (len(range(rows)[cut]), *scale.shape[2:]) if len(scale.shape) > 1 else ()
            stored = (shape[0], shape[1] // 2) if info.dtype in PACKED_DTYPES else shape
            format, logical, block = self._classify(info, stored, scale, scale_shape, "global_scale" in roles)
            if len(cuts) == 2 and block is not None and shape[0] % block[0] and rows == -(-n // block[0]) > 1:
                raise across  # or two scales for two short halves: it cannot be told
            if place.expert == 0:
                self._note(name, format, block)
            yield Located(
                name=name,
                format=format,
                shape=logical,
                parts={"values": info.name, **roles},
                quantized=True,
                detail=_Cut(block, place, ExpertSlice(place.expert, cut)),
            )

    def _scale_of(self, roles: dict[str, str], scalars: tuple[tuple[int, ...], ...]) -> StoredTensor:
        """The block scales, after a check of every part's presence and of the single values' shapes."""
        if "block_scales" not in roles:
            raise _Fault("missing-companion", ", but no scale of it is in any shard")
        surplus = [name for role, name in roles.items() if role.startswith("surplus")]
        if surplus:
            raise _Fault(
                "scale-shape", f", and which of its scales is meant cannot be told: {surplus[0]} is one of two"
            )
        for role in ("global_scale", "input_scale"):
            part = self.tensors.get(roles.get(role, ""))
            if part is not None and (part.dtype not in PLAIN_FORMATS or part.shape not in scalars):
                raise _Fault("scale-shape", f"; {part.name} is {part.dtype} {list(part.shape)}, expected single floats")
        return self.tensors[roles["block_scales"]]

    def _classify(
        self,
        info: StoredTensor,
        stored: tuple[int, ...],
        scale: StoredTensor,
        scale_shape: tuple[int, ...],
        has_global: bool,
    ) -> tuple[str, tuple[int, int], tuple[int, int] | None]:
        """Format, logical shape and block (None: the format's own) of one stored matrix. Raises _Fault."""
        found = f"; {scale.name} is {scale.dtype} {list(scale.shape)}"
        if len(stored) != 2:
            raise _Fault("scale-shape", ", expected a matrix or a stack of experts")
        n, columns = stored
        bytes_scale = scale.dtype in E8M0_DTYPES
        if info.dtype in PACKED_DTYPES:
            shape = (n, 2 * columns)
            if bytes_scale and scale_shape == (n, shape[1] // 32) and shape[1] % 32 == 0 and not has_global:
                return "mxfp4", shape, None
            if scale.dtype == "F8_E4M3" and scale_shape == (n, shape[1] // 16) and shape[1] % 16 == 0 and has_global:
                return "nvfp4", shape, None
            expected = (
                f"E8M0 {[n, shape[1] // 32]} (mxfp4), or F8_E4M3 {[n, shape[1] // 16]} and weight_scale_2 (nvfp4)"
            )
            raise _Fault("scale-shape", f"{found}, expected {expected}")
        shape = (n, columns)
        if info.dtype not in FP8_DTYPES or has_global or not (bytes_scale or scale.dtype in PLAIN_FORMATS):
            raise _Fault("scale-shape", f"{found}: no FP8 scale that this version knows")
        block = self._find_block(shape, scale_shape)
        if bytes_scale and block is not None and block[1] == 32:
            return {"F8_E4M3": "mxfp8_e4m3", "F8_E5M2": "mxfp8_e5m2"}[info.dtype], shape, block
        if info.dtype != "F8_E4M3":
            raise _Fault("scale-shape", f"{found}: F8_E5M2 is known with E8M0 scales [N, K/32] only")
        if block is not None:
            return "fp8_block", shape, block
        if scale_shape in ((), (1,)) or (scale_shape == (1, 1) and self.declared is None):
            return "fp8_tensor", shape, None
        if scale_shape in ((n,), (n, 1)):
            return "fp8_channel", shape, None
        expected = "one scale, one for each row, or one for each block of a power of two"
        if self.declared is not None:
            counts = [-(-d // b) for d, b in zip(shape, self.declared, strict=True)]
            expected = f"{counts} (blocks of {list(self.declared)})"
        raise _Fault("scale-shape", f"{found}, expected {expected}")

    def _find_block(self, shape: tuple[int, int], scale_shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The block that makes `scale_shape` out of `shape`; None for scales of a whole row or matrix, or if there is
        none. A count of scales does not tell the block by division (576 rows in 5 blocks are no blocks of 116)."""
        if len(scale_shape) != 2:
            return None
        if self.declared is not None and scale_shape == tuple(
            -(-d // b) for d, b in zip(shape, self.declared, strict=True)
        ):
            return self.declared
        if scale_shape in ((1, 1), (shape[0], 1)):
            return None
        sizes = [_block_size(d, count) for d, count in zip(shape, scale_shape, strict=True)]
        return (sizes[0], sizes[1]) if all(sizes) else None

    def _note(self, name: str, format: str, block: tuple[int, int] | None) -> None:
        """Remember a weight whose block is not the config's. Packed experts have their formats' own blocks."""
        if not format.startswith(("fp8", "mxfp8")) or block == self.declared:
            return
        if format.startswith("mxfp8") and self.declared is None:
            return  # E8M0 scales over 32 of K: nothing was guessed
        kind = {"fp8_tensor": "one scale", "fp8_channel": "a scale a row"}.get(format, f"blocks of {list(block or ())}")
        self.surprises.setdefault(kind, []).append(name)


class _Fault(Exception):
    """Why a weight cannot be read: a lint check's id and the end of a sentence about the weight."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.check = check


def _block_size(size: int, count: int) -> int:
    """The power of two up to MAX_BLOCK that cuts `size` into `count` blocks; 0: none. A single block: 128 or more."""
    sizes = [1 << e for e in range(MAX_BLOCK.bit_length()) if -(-size // (1 << e)) == count]
    if count == 1:
        return next((s for s in sizes if s >= 128), 0)
    return sizes[0] if sizes else 0


def _read_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size` as (rows, columns), None when there is none. Raises CheckpointError for anything else."""
    value = config.get("weight_block_size")
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(v) is int and 0 < v <= MAX_DECLARED for v in value)
    ):
        raise CheckpointError(
            f"config.json quantization_config.weight_block_size is {str(value)[:80]}, expected two positive whole"
            f" numbers up to {MAX_DECLARED}",
            fix="repair the config; leave the key out for scales of whole tensors or rows",
        )
    return value[0], value[1]


def _read_modules(block: Mapping[str, Any], where: str, default: str) -> dict[str, str]:
    listed = config_table(block, "quantized_layers", where)
    known = {**_QUANT_ALGOS, "FP8": default or "fp8_tensor"}
    modules = {}
    for module in listed:
        layer = config_table(listed, module, f"{where}.quantized_layers", of="settings")
        algorithm = str(layer.get("quant_algo", "")).upper()
        if algorithm not in known:
            raise CheckpointError(
                f"{where}.quantized_layers[{module!r}] is {algorithm!r}, which this version does not read",
                fix=f"known: {', '.join(known)}",
            )
        modules[module] = known[algorithm]
    return modules
