"""torchao: tensor subclasses flattened into safetensors; quant_method "torchao". Read only.

A weight `<m>.weight` is stored as `<m>._weight_qdata`, `<m>._weight_scale` and so on; what they are, block size and
element type included, is JSON in the safetensors metadata under the weight's name. Read here:

    MXTensor     qdata U8 [N, K/2] or F8 [N, K], scale F8_E8M0       blocks of 32
    NVFP4Tensor  qdata U8 [N, K/2], scale F8_E4M3, per_tensor_scale F32 (absent: 1), act_per_tensor_scale F32
    Float8Tensor qdata F8_E4M3, scale F32                            a tensor, a row or a block [r, c]
    Int8Tensor, IntxUnpackedToInt8Tensor  qdata I8, scale, zero_point  a tensor, a row or a group of K

With `is_swizzled_scales` the scales of MXTensor and NVFP4Tensor lie in tiles of 128 rows by 4 columns, padded to whole
tiles; `unswizzle_scales` makes them row-major. What is packed for one kernel (Int4Tensor and its kin) is refused.
Source: torchao 0.18.0 (prototype/safetensors, prototype/mx_formats) and its exports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format

from ..files import Folder, Problem
from ..header import StoredTensor
from .base import Declaration, Dialect, Load, Located, config_table, find_config_block, string_list
from .deepseek_fp8 import translate_skip_list
from .dense import PLAIN_FORMATS, locate_plain
from .stacks import read_plain, split_expert_stacks

TILE_ROWS, TILE_COLUMNS = 128, 4
READ_TYPES = ("MXTensor", "NVFP4Tensor", "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_MX_ELEMENTS = {"float4_e2m1fn_x2": "mxfp4", "float8_e4m3fn": "mxfp8_e4m3", "float8_e5m2": "mxfp8_e5m2"}
_QDATA_DTYPES = {"e2m1": "U8", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "int8": "I8"}
_ROLES = {
    "qdata": "values",
    "scale": "block_scales",
    "per_tensor_scale": "global_scale",
    "act_per_tensor_scale": "input_scale",
    "zero_point": "zero_points",
}
_FLOAT_KINDS = {(0, 0): "fp8_tensor", (1, 0): "fp8_channel"}
_INT_KINDS = {(0, 0): "int8_tensor", (1, 0): "int8_channel"}


class TorchAo(Dialect):
    name = "torchao"
    writes = ()

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        return block is not None and block.get("quant_method") == "torchao"

    def detect_tensors(self, folder: Folder) -> bool:
        return any(name.endswith("_qdata") for name in folder.tensors)

    def declare(self, folder: Folder) -> Declaration:
        block = find_config_block(folder.config)
        if block is None:
            return Declaration()
        where = "config.json quantization_config"
        types = block.get("quant_type")
        main = types
        if not isinstance(types, str):
            main = config_table(block, "quant_type", where, of="settings").get("default")
        if not isinstance(main, str | dict | None):
            raise CheckpointError(
                f"{where}.quant_type.default is {repr(main)[:80]}, expected a name or a table of settings",
                fix="repair the config",
            )
        format = _declared_format(main)
        skipped = string_list(block.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
        return Declaration(
            files=(where,),
            algorithm=str(main.get("_type", "torchao") if isinstance(main, dict) else main or "torchao"),
            format=format,
            excludes=translate_skip_list(skipped),
            activations=format if "DynamicActivation" in str(main) else "",
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        located: list[Located] = []
        used: set[str] = set()
        for name, description in _read_metadata(folder).items():
            if description.get("_type") in ("Tensor", None):
                continue
            module, _, parameter = name.rpartition(".")
            names = description.get("_tensor_data_names")
            data = [d for d in names if isinstance(d, str)] if isinstance(names, list) else []
            parts = {d: f"{module}._{parameter}_{d}" for d in data}
            used.update(parts.values())
            try:
                located.append(_locate(name, description, parts, folder.tensors))
            except _Fault as fault:
                first = folder.tensors.get(next(iter(parts.values()), ""))
                problems.append(
                    Problem(
                        fault.check,
                        "error",
                        f"{name}: {fault}",
                        tensor=name,
                        file=first.file if first else "",
                        fix="export it again with a configuration that this version reads: " + ", ".join(READ_TYPES),
                    )
                )
        for name in [n for n in folder.tensors if n.endswith("_qdata") and n not in used]:
            used.update(name.removesuffix("qdata") + part for part in _ROLES)
            problems.append(_undescribed(folder.tensors[name]))
        rest = (locate_plain(info, problems) for name, info in folder.tensors.items() if name not in used)
        return located + split_expert_stacks(folder, (e for e in rest if e is not None), problems)

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        if not located.quantized:
            return read_plain(located, load)
        form: _Form = located.detail
        spec = get_format(located.format)
        scale_shape = spec.scale_shape(located.shape, form.block)
        scales = load(located.parts["block_scales"])
        if form.swizzled:
            scales = unswizzle_scales(scales, *scale_shape)
        if spec.scale == "e8m0":
            scales = scales.view(torch.uint8)
        elif spec.scale == "float":
            scales = scales.float()
        scalars = {
            role: load(located.parts[role]).float().reshape(())
            for role in ("global_scale", "input_scale")
            if role in located.parts
        }
        if spec.has_global:
            scalars.setdefault("global_scale", torch.ones((), dtype=torch.float32))
        zero_points = load(located.parts["zero_points"]) if "zero_points" in located.parts else None
        return QuantizedTensor(
            format=located.format,
            codes=load(located.parts["values"]),
            block_scales=scales.reshape(scale_shape),
            global_scale=scalars.get("global_scale"),
            shape=located.shape,
            block=form.block,
            zero_points=None if zero_points is None else zero_points.int().reshape(scale_shape),
            input_scale=scalars.get("input_scale"),
        )


def unswizzle_scales(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """One-byte scales in 128x4 tiles, of any shape, to `[rows, columns]`; the padding to whole tiles is dropped.

    A tile lies as 32 x 16: row r of the tile is row r % 32 there, at columns 4 * (r // 32) to + 3. Source: cuBLAS,
    "1D block scaling factors layout"; torchao's `to_blocked`.
    """
    tiles_down, tiles_across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = blocked.view(torch.uint8).reshape(tiles_down, tiles_across, 32, TILE_ROWS // 32, TILE_COLUMNS)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(tiles_down * TILE_ROWS, tiles_across * TILE_COLUMNS)
    return linear[:rows, :columns].contiguous().view(blocked.dtype)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the metadata says beyond the format. block: None where the format has its own."""

    block: tuple[int, int] | None
    swizzled: bool


class _Fault(Exception):
    """Why a subclass cannot be read: a lint check's id and a sentence about the weight."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.check = check


def _undescribed(info: StoredTensor) -> Problem:
    return Problem(
        "missing-companion",
        "error",
        f"{info.name} is {info.dtype} {list(info.shape)} in {info.file}, whose metadata does not say what it is",
        tensor=info.name,
        file=info.file,
        fix="saving it again dropped the safetensors metadata: take the file that torchao wrote",
    )


def _read_metadata(folder: Folder) -> dict[str, dict[str, Any]]:
    """Tensor name -> what torchao recorded of it, over all shards. Raises CheckpointError for broken JSON."""
    described: dict[str, dict[str, Any]] = {}
    for file, raw in folder.headers.items():
        metadata = json.loads(raw).get("__metadata__")
        for name, text in metadata.items() if isinstance(metadata, dict) else ():
            if name in ("tensor_names", "format") or not isinstance(text, str) or not text.startswith("{"):
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"{folder.path / file}: the metadata of {name} is broken JSON ({error})",
                    fix="copy or download the shard again",
                ) from error
            if isinstance(value, dict):
                described[name] = value
    return described


def _locate(
    name: str, description: Mapping[str, Any], parts: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> Located:
    kind, attributes = description.get("_type"), description.get("_data")
    if kind not in READ_TYPES or not isinstance(attributes, dict):
        raise _Fault("missing-companion", f"it is a torchao {kind}, which this version does not read")
    absent = [f"{part} ({stored})" for part, stored in parts.items() if stored not in tensors]
    absent += [part for part in ("qdata", "scale") if part not in parts]
    if absent:
        raise _Fault("missing-companion", f"its part {absent[0]} is in no shard")
    unknown = [part for part in parts if part not in _ROLES]
    if unknown:
        raise _Fault("missing-companion", f"it has a part {unknown[0]!r} that this version does not know")
    values, scale = tensors[parts["qdata"]], tensors[parts["scale"]]
    if len(values.shape) != 2:
        raise _Fault("scale-shape", f"{values.name} is {values.dtype} {list(values.shape)}, expected a matrix")
    packed = 2 if values.dtype == "U8" else 1
    shape = (values.shape[0], values.shape[1] * packed)
    format, block = _format_of(str(kind), attributes, shape)
    spec = get_format(format)
    if values.dtype != _QDATA_DTYPES[spec.element]:
        raise _Fault(
            "scale-shape", f"{values.name} is {values.dtype}, expected {_QDATA_DTYPES[spec.element]} ({format})"
        )
    columns = (block or (spec.rows, spec.block))[1]
    if columns and shape[1] % columns:
        raise _Fault("k-divisible", f"K = {shape[1]} is not a multiple of its block of {columns}")
    swizzled = attributes.get("is_swizzled_scales") is True
    _check_scale(scale, spec.scale, spec.scale_shape(shape, block), swizzled)
    for part in ("per_tensor_scale", "act_per_tensor_scale"):
        info = tensors.get(parts.get(part, ""))
        if info is not None and (info.dtype not in PLAIN_FORMATS or math.prod(info.shape) != 1):
            raise _Fault("scale-shape", f"{info.name} is {info.dtype} {list(info.shape)}, expected one float")
    zero = tensors.get(parts.get("zero_point", ""))
    if zero is not None and (
        not spec.zero_points
        or zero.dtype not in ("I8", "I32", "I64")
        or math.prod(zero.shape) != math.prod(scale.shape)
    ):
        raise _Fault(
            "scale-shape", f"{zero.name} is {zero.dtype} {list(zero.shape)}, expected integers like the scales"
        )
    return Located(
        name=name,
        format=format,
        shape=shape,
        parts={_ROLES[part]: stored for part, stored in parts.items()},
        quantized=True,
        detail=_Form(block, swizzled),
    )


def _format_of(kind: str, attributes: Mapping[str, Any], shape: tuple[int, int]) -> tuple[str, tuple[int, int] | None]:
    """Canonical format and block (None: the format's own) of a subclass with these attributes."""
    size = attributes.get("block_size")
    if kind in ("MXTensor", "NVFP4Tensor"):
        element = attributes.get("elem_dtype")
        word = element.get("_data") if isinstance(element, dict) else None
        format = "nvfp4" if kind == "NVFP4Tensor" else _MX_ELEMENTS.get(str(word), "")
        if not format or size != get_format(format).block:
            raise _Fault("missing-companion", f"it is a torchao {kind} of {word or 'FP4'} in blocks of {size!r}")
        return format, (1, size) if format.startswith("mxfp8") else None
    if not isinstance(size, list) or len(size) != 2 or not all(type(v) is int and v > 0 for v in size):
        raise _Fault("missing-companion", f"its block_size is {size!r}, expected two positive whole numbers")
    # -1 is not written; a block as large as the matrix means that one scale serves all of it.
    block = tuple(0 if b >= d else b for b, d in zip(size, shape, strict=True))
    kinds = _FLOAT_KINDS if kind == "Float8Tensor" else _INT_KINDS
    if shape[0] == 1:
        block = (1, block[1])
    if block in kinds:
        return kinds[block], None
    if kind == "Float8Tensor":
        return "fp8_block", (min(size[0], shape[0]), min(size[1], shape[1]))
    if block[0] != 1:
        raise _Fault("missing-companion", f"its blocks are {size}, expected groups of one row")
    return "int8_group", (1, size[1])


def _check_scale(scale: StoredTensor, kind: str, expected: tuple[int, ...], swizzled: bool) -> None:
    dtypes = {"e4m3": ("F8_E4M3",), "e8m0": ("F8_E8M0", "U8"), "float": ("F32", "BF16", "F16")}[kind]
    count = math.prod(expected)
    if swizzled:
        count = -(-expected[0] // TILE_ROWS) * -(-expected[1] // TILE_COLUMNS) * TILE_ROWS * TILE_COLUMNS
    if scale.dtype not in dtypes or math.prod(scale.shape) != count:
        layout = f" in {TILE_ROWS}x{TILE_COLUMNS} tiles ({count} values)" if swizzled else ""
        raise _Fault(
            "scale-shape",
            f"{scale.name} in {scale.file} is {scale.dtype} {list(scale.shape)}, expected {' or '.join(dtypes)}"
            f" {list(expected)}{layout}",
        )


def _declared_format(config: Any) -> str:
    """The canonical format that a torchao configuration names; "" where it says less."""
    if not isinstance(config, dict):
        return ""
    kind, data = str(config.get("_type", "")), config.get("_data")
    if kind.startswith("NVFP4"):
        return "nvfp4"
    weight = data.get("weight_dtype") if isinstance(data, dict) else None
    word = weight.get("_data") if isinstance(weight, dict) else None
    return _MX_ELEMENTS.get(str(word), "") if kind.startswith("MX") else ""
