"""Quark's tensors: which canonical weights there are, and how each is packed.

`<m>.weight` with `<m>.weight_scale` (+ `weight_scale_2`, `weight_zero_point`, `input_scale` or `input_scale_2`). What a
weight is, its dtypes and shapes say; the config is asked only for what they cannot tell (E2M3 or E3M2, signed or not).
Stored forms, w = [N, K]:
- fp4, fp6, fp8: weight [N, packed K], scale [N, K / block] (E8M0 bytes, or E4M3 beside a global scale);
- fp8: scale [], [N] or a value a block; int8: weight [N, K], scale [] or [N];
- int4 per group, in memory: int32 [K, N / 8] in AWQ order, scale [K / g, N], zero points, also of symmetric ones;
- int4 per group, file to file: int32 [K, N / 8] in sequence whatever the config says, scale [N, K / g], no zero points;
- int4 per channel: int32 [N, K / 8], scale [N]; with `weight_scale` [] and `weight_scale_2` [N]: of FP8 values;
- legacy `mx`: a byte of scale (a signed exponent) and 16 of codes a block of 32, in one tensor;
- gpt-oss: `experts.<e>.gate_up_proj` with the rows of gate and up in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.formats import get_format

from ...files import Problem
from ...header import StoredTensor
from ..base import Located
from ..dense import PLAIN_FORMATS, locate_plain
from .specs import Specs, block_size

CODE_DTYPES = {"U8", "I8", "I32", "F8_E4M3", "F8_E5M2"}
POWERS = {"U8", "F8_E8M0"}  # dtypes of E8M0 scales
MX_BLOCK = 32
LEGACY_BLOCK_BYTES = 17
# role -> suffixes, the first that is there
ROLES = {
    "block_scales": ("weight_scale",),
    "second_scale": ("weight_scale_2",),
    "zero_points": ("weight_zero_point", "weight_zero_point_2"),
    "input_scale": ("input_scale_2", "input_scale"),
    "input_zero_point": ("input_zero_point",),
}
_SIX_BITS = {"fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2"}
_AGAIN = "export the checkpoint again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a weight is cut out of its stored parts.

    block: as QuantizedTensor's. order: of int4 codes in a word. unsigned: codes are offset by half their range.
    transposed: weight is [K, N]. scale_transposed: scale is [K / g, N]. legacy: scale bytes stand among the codes.
    rows: which of the stored rows are this tensor's; None: all.
    """

    block: tuple[int, int] | None = None
    order: str = ""
    unsigned: bool = False
    transposed: bool = False
    scale_transposed: bool = False
    legacy: bool = False
    rows: slice | None = None


def locate_weights(tensors: Mapping[str, StoredTensor], specs: Specs, problems: list[Problem]) -> list[Located]:
    """Every tensor of a Quark checkpoint under its stored name; what cannot be one goes to `problems`."""
    located: list[Located] = []
    used: set[str] = set()
    contradicting: list[str] = []
    for name, info in tensors.items():
        if not name.endswith(".weight") or info.dtype not in CODE_DTYPES:
            continue
        stem = name.removesuffix("weight")
        parts = {"values": info}
        for role, suffixes in ROLES.items():
            found = next((tensors[stem + s] for s in suffixes if stem + s in tensors), None)
            if found is not None:
                parts[role] = found
        used.update(part.name for part in parts.values())
        try:
            entry = _locate_weight(parts, specs)
        except _Fault as fault:
            part = fault.part or info
            problems.append(
                Problem(fault.check, "error", str(fault), tensor=part.name, file=part.file, fix=fault.way_out)
            )
            continue
        if entry.detail.order == "sequential" and specs.pack_method == "reorder":
            contradicting.append(name)
        located.append(entry)
    for name, info in tensors.items():
        if name not in used:
            plain = locate_plain(info, problems)
            located += [plain] if plain is not None else []
    if contradicting:
        problems.append(_order_conflict(contradicting, tensors[contradicting[0]].file))
    return located


def split_gate_up(located: Iterable[Located]) -> list[Located]:
    """Gate and up of each expert's interleaved `gate_up_proj` (gpt-oss) as two entries; the others as they are."""
    entries = []
    for entry in located:
        if ".experts." not in entry.name or ".gate_up_proj." not in entry.name:
            entries.append(entry)
            continue
        for projection, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))):
            part = replace(
                entry,
                name=entry.name.replace(".gate_up_proj.", f".{projection}."),
                shape=(len(range(entry.shape[0])[rows]), *entry.shape[1:]),
                detail=replace(entry.detail or Packing(), rows=rows),
            )
            entries.append(part)
    return entries


class _Fault(Exception):
    def __init__(self, check: str, message: str, way_out: str, part: StoredTensor | None = None) -> None:
        super().__init__(message)
        self.check, self.way_out, self.part = check, way_out, part


def _locate_weight(parts: Mapping[str, StoredTensor], specs: Specs) -> Located:
    info, scale = parts["values"], parts.get("block_scales")
    spec = specs.weight(info.name.removesuffix(".weight"))
    if len(info.shape) != 2:
        raise _Fault(
            "scale-shape",
            f"{info.name} has shape {list(info.shape)}; expected a matrix, one expert a tensor",
            "split fused expert stacks into one tensor an expert",
        )
    if scale is None:
        format, shape, packing = _legacy(info, spec)
    elif info.dtype == "I32":
        format, shape, packing = _int4(parts, spec, specs)
    elif scale.dtype in POWERS:
        format, shape, packing = _powers_of_two(info, scale, spec)
    elif info.dtype in ("U8", "I8") and scale.dtype == "F8_E4M3":
        format, shape, packing = _nvfp4(info, scale)
    elif info.dtype in ("U8", "I8") and scale.dtype in PLAIN_FORMATS:
        format, shape, packing = _int8(parts)
    elif info.dtype == "F8_E4M3" and scale.dtype in PLAIN_FORMATS:
        format, shape, packing = _fp8(info, scale, spec)
    else:
        raise _Fault(
            "scale-shape",
            f"{info.name} is {info.dtype} {list(info.shape)} with {scale.name} {scale.dtype} {list(scale.shape)};"
            " expected packed codes with scales that this version reads",
            "decode the checkpoint with the tool that wrote it",
        )
    _check_companions(format, packing, parts)
    return Located(
        name=info.name,
        format=format,
        shape=shape,
        parts={_canonical_role(role, format): part.name for role, part in parts.items()},
        quantized=True,
        detail=packing,
    )


Layout = tuple[str, tuple[int, ...], Packing]


def _legacy(info: StoredTensor, spec: Mapping[str, Any]) -> Layout:
    n, columns = info.shape
    if spec.get("dtype") != "mx":
        raise _Fault(
            "missing-companion",
            f"{info.name} is {info.dtype} {list(info.shape)} in {info.file}, but {info.name}_scale is in no shard",
            f"{_AGAIN}; without its scales the weight cannot be decoded",
        )
    if info.dtype != "U8" or columns % LEGACY_BLOCK_BYTES:
        raise _Fault(
            "scale-shape",
            f"{info.name} is {info.dtype} {list(info.shape)}, expected U8 rows of whole blocks of"
            f" {LEGACY_BLOCK_BYTES} bytes (dtype mx of fp4)",
            _AGAIN,
        )
    return "mxfp4", (n, columns // LEGACY_BLOCK_BYTES * MX_BLOCK), Packing(legacy=True)


def _powers_of_two(info: StoredTensor, scale: StoredTensor, spec: Mapping[str, Any]) -> Layout:
    n, columns = info.shape
    width = scale.shape[1] if len(scale.shape) == 2 else 0
    if info.dtype in ("F8_E4M3", "F8_E5M2"):
        declared = block_size(spec)
        if (
            declared[1] not in (0, MX_BLOCK)
            and info.dtype == "F8_E4M3"
            and _blocks(info.shape, declared) == scale.shape
        ):
            return "fp8_block", info.shape, Packing(block=declared)
        block = _block_of(info, scale, (declared[0] or 1, MX_BLOCK))
        if block[1] != MX_BLOCK:
            raise _Fault(
                "scale-shape",
                f"{scale.name} in {scale.file} is {list(scale.shape)} for {list(info.shape)} values, expected a scale a"
                f" block of {MX_BLOCK}",
                _AGAIN,
                scale,
            )
        return ("mxfp8_e4m3" if info.dtype == "F8_E4M3" else "mxfp8_e5m2"), info.shape, Packing(block=block)
    k = width * MX_BLOCK
    bits = 8 * columns // k if k else 0
    if bits == 6 and bits * k == 8 * columns:
        format = _SIX_BITS.get(spec.get("dtype", ""), "")
        if not format:
            raise _Fault(
                "config-conflict",
                f"{info.name} {list(info.shape)} holds 6-bit codes, and the config names neither fp6_e2m3 nor fp6_e3m2"
                " for it",
                "restore the producer's quantization_config: the tensors cannot tell the two apart",
            )
    else:
        format, k, bits = "mxfp4", columns * 2, 4
    if k % MX_BLOCK:
        raise _Fault(
            "k-divisible",
            f"{info.name}: K = {k} is not a multiple of {format}'s block of {MX_BLOCK}",
            "this tensor cannot be what its scales say; export it again or exclude it",
        )
    _expect_shape(scale, (n, k // MX_BLOCK), f"{format}: one scale per {MX_BLOCK} of K = {k} in each of {n} rows")
    return format, (n, k), Packing()


def _nvfp4(info: StoredTensor, scale: StoredTensor) -> Layout:
    n, k, block = info.shape[0], info.shape[1] * 2, get_format("nvfp4").block
    if k % block:
        raise _Fault(
            "k-divisible",
            f"{info.name}: K = {k} is not a multiple of nvfp4's block of {block}",
            "this tensor cannot be what its scales say; export it again or exclude it",
        )
    _expect_shape(scale, (n, k // block), f"nvfp4: one scale per {block} of K = {k} in each of {n} rows")
    return "nvfp4", (n, k), Packing()


def _fp8(info: StoredTensor, scale: StoredTensor, spec: Mapping[str, Any]) -> Layout:
    if scale.shape in ((), (1,)):
        return "fp8_tensor", info.shape, Packing()
    if scale.shape in ((info.shape[0],), (info.shape[0], 1)) and block_size(spec)[1] == 0:
        return "fp8_channel", info.shape, Packing()
    return "fp8_block", info.shape, Packing(block=_block_of(info, scale, block_size(spec)))


def _int8(parts: Mapping[str, StoredTensor]) -> Layout:
    info, scale = parts["values"], parts["block_scales"]
    unsigned = info.dtype == "U8"
    if scale.shape in ((), (1,)):
        return "int8_tensor", info.shape, Packing(unsigned=unsigned)
    if scale.shape in ((info.shape[0],), (info.shape[0], 1)):
        return "int8_channel", info.shape, Packing(unsigned=unsigned)
    k, n = info.shape
    group, scale_transposed = _group_of(parts, k, (n,))
    packing = Packing(block=(1, group), unsigned=unsigned, transposed=True, scale_transposed=scale_transposed)
    return "int8_group", (n, k), packing


def _int4(parts: Mapping[str, StoredTensor], spec: Mapping[str, Any], specs: Specs) -> Layout:
    info, scale = parts["values"], parts["block_scales"]
    dtype = spec.get("dtype")
    if dtype not in ("int4", "uint4"):
        raise _Fault(
            "config-conflict",
            f"{info.name} is I32 {list(info.shape)}, and the config names neither int4 nor uint4 for it: {dtype!r}",
            "restore the producer's quantization_config: the words cannot tell signed codes from unsigned ones",
        )
    declared = "sequential" if specs.pack_method == "order" else "awq"
    unsigned = dtype == "uint4"
    n, k = info.shape[0], info.shape[1] * 8
    if "second_scale" in parts:
        second = parts["second_scale"]
        _expect_shape(scale, (), "one value, of the FP8 step")
        _expect_shape(second, (n,), f"one scale for each of {n} rows")
        return "int4_channel", (n, k), Packing(order=declared, unsigned=unsigned)
    # In memory there are zero points, also of symmetric weights, and the config's order holds; file to file neither.
    order = declared if "zero_points" in parts else "sequential"
    if len(scale.shape) == 1:
        _expect_shape(scale, (n,), f"one scale for each of {n} rows")
        return "int4_group", (n, k), Packing(block=(1, k), order=order, unsigned=unsigned)
    k, words = info.shape
    group, scale_transposed = _group_of(parts, k, range(max(1, words * 8 - 7), words * 8 + 1))
    n = scale.shape[1] if scale_transposed else scale.shape[0]
    packing = Packing(
        block=(1, group), order=order, unsigned=unsigned, transposed=True, scale_transposed=scale_transposed
    )
    return "int4_group", (n, k), packing


def _group_of(parts: Mapping[str, StoredTensor], k: int, possible_n: Any) -> tuple[int, bool]:
    """(group size, whether the scale is [K / g, N]) of a transposed weight."""
    scale = parts["block_scales"]
    rows, columns = scale.shape if len(scale.shape) == 2 else (0, 0)
    in_memory = 0 < rows <= k and k % rows == 0 and columns in possible_n
    to_file = 0 < columns <= k and k % columns == 0 and rows in possible_n
    if in_memory and to_file:  # a square scale: only the export in memory has zero points
        in_memory = "zero_points" in parts
    if not (in_memory or to_file):
        raise _Fault(
            "scale-shape",
            f"{scale.name} in {scale.file} is {list(scale.shape)} beside {parts['values'].name}"
            f" {list(parts['values'].shape)}; expected [K / group, N] or [N, K / group] with K = {k}",
            f"{_AGAIN}; scales of another shape have no meaning",
            scale,
        )
    return (k // rows, True) if in_memory else (k // columns, False)


def _block_of(info: StoredTensor, scale: StoredTensor, declared: tuple[int, int]) -> tuple[int, int]:
    """The block whose scales have this shape: the config's, else the one that divides the weight evenly."""
    if 0 not in declared and _blocks(info.shape, declared) == scale.shape:
        return declared
    if len(scale.shape) == 2 and all(0 < s <= d and d % s == 0 for d, s in zip(info.shape, scale.shape, strict=True)):
        return info.shape[0] // scale.shape[0], info.shape[1] // scale.shape[1]
    wanted = f"blocks of {list(declared)}" if 0 not in declared else "blocks that the config does not name"
    raise _Fault(
        "scale-shape",
        f"{scale.name} in {scale.file} is {list(scale.shape)} for {list(info.shape)} values; expected {wanted}",
        "correct block_size in the config: which rows a scale belongs to cannot be guessed",
        scale,
    )


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-d // b) for d, b in zip(shape, block, strict=True))


def _expect_shape(part: StoredTensor, shape: tuple[int, ...], meaning: str) -> None:
    if part.shape == shape or (shape == () and part.shape == (1,)):
        return
    raise _Fault(
        "scale-shape",
        f"{part.name} in {part.file} is {list(part.shape)}, expected {list(shape)} ({meaning})",
        f"{_AGAIN}; scales of another shape have no meaning",
        part,
    )


def _check_companions(format: str, packing: Packing, parts: Mapping[str, StoredTensor]) -> None:
    info, second = parts["values"], parts.get("second_scale")
    if format == "nvfp4" and second is None:
        raise _Fault(
            "missing-companion",
            f"{info.name} in {info.file} has E4M3 block scales, but {info.name}_scale_2 is in no shard",
            f"{_AGAIN}; without its global scale the weight cannot be decoded",
        )
    if second is not None and not get_format(format).has_global:
        raise _Fault(
            "scale-shape",
            f"{second.name} stands beside {parts['block_scales'].name}; {format.upper()} has no global scale",
            "find out which format the weight is in; a global scale must not be dropped",
            second,
        )
    zero_points = parts.get("zero_points")
    if zero_points is None and packing.unsigned:
        raise _Fault(
            "missing-companion",
            f"{info.name} in {info.file} holds unsigned codes, but {info.name}_zero_point is in no shard",
            "quantize the checkpoint again in memory: Quark's file-to-file export leaves the zero points out",
        )
    integers = {"int4": ("I32",), "int8": ("I8", "U8", "I32")}.get(get_format(format).element, ())
    if zero_points is not None and (zero_points.dtype not in integers or len(zero_points.shape) > 2):
        raise _Fault(
            "scale-shape",
            f"{zero_points.name} is {zero_points.dtype} {list(zero_points.shape)} beside a weight read as {format};"
            " expected integers, and only of int4 and int8",
            "decode the checkpoint with the tool that wrote it",
            zero_points,
        )
    for part in (parts.get("input_scale"), second if format == "nvfp4" else None):
        if part is not None and (part.dtype not in PLAIN_FORMATS or part.shape not in ((), (1,))):
            raise _Fault(
                "scale-shape",
                f"{part.name} in {part.file} is {part.dtype} {list(part.shape)}, expected one F32 value, [] or [1]",
                _AGAIN,
                part,
            )


def _canonical_role(role: str, format: str) -> str:
    """`weight_scale` and `weight_scale_2` by meaning: int4_channel's first is the global one."""
    if format == "int4_channel":
        return {"block_scales": "global_scale", "second_scale": "block_scales"}.get(role, role)
    return "global_scale" if role == "second_scale" else role


def _order_conflict(names: list[str], file: str) -> Problem:
    return Problem(
        "config-conflict",
        "warning",
        f"config.json says pack_method reorder, but {names[0]} has no zero points, as only Quark's file-to-file export"
        f" writes it: its words are read in sequence ({len(names)} tensors)",
        tensor=names[0],
        file=file,
        fix="compare a few decoded values with the source's, and set export.pack_method to order",
    )
