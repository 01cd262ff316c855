"""ModelOpt's tensors: `<m>.weight` with its scales beside it, located, read and written.

    located = locate_tensors(folder, problems, declared=declaration.format_of)   # from headers alone
    tensor = read_tensor(located[0], folder.load)                                # QuantizedTensor or torch.Tensor
    stored = write_tensor("m.weight", tensor)                                    # back to parts by name

The format follows from the dtypes and shapes of weight and scales (`_recognize`). The config decides only what they
cannot tell: E4M3 scales of 32 values each are a format of their own, and also what a damaged NVFP4 export has; one FP8
scale is a tensor's or a block's. A low-bit tensor without scales is never passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format
from workbench.formats.table import WHOLE
from workbench.kernels.elements import pack
from workbench.kernels.reference import e8m0_values, unpack_fp4

from ...files import Folder, Problem
from ...header import StoredTensor
from ..base import Load, Located
from ..dense import LOW_BIT_DTYPES, PLAIN_FORMATS, locate_plain
from ..stacks import read_plain, split_expert_stacks

E8M0_DTYPES = {"U8", "F8_E8M0"}
FP8_BLOCK = 128  # rows and columns of a block: the producer writes no size
_SUFFIXES = {
    "block_scales": "weight_scale",
    "global_scale": "weight_scale_2",
    "input_scale": "input_scale",
    "pre_quant_scale": "pre_quant_scale",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a stored weight is. shape: logical `[N, K]`. block: (rows, columns) that share a scale, None: the format's
    own. row_pairs: a byte holds two 4-bit codes of neighbouring rows, the even row low (else of neighbouring K)."""

    format: str
    shape: tuple[int, int]
    block: tuple[int, int] | None = None
    row_pairs: bool = False


def locate_tensors(
    folder: Folder,
    problems: list[Problem],
    *,
    declared: Callable[[str], str] = lambda module: "",
) -> list[Located]:
    """Every low-bit `<m>.weight` with its companions; the rest as plain tensors, expert stacks taken apart.

    declared: module -> the format its config gives. What cannot be decoded goes to `problems`.
    """
    tensors = folder.tensors
    located: list[Located] = []
    used: set[str] = set()
    for name, info in tensors.items():
        if not name.endswith(".weight") or info.dtype not in LOW_BIT_DTYPES:
            continue
        stem = name.removesuffix("weight")
        parts = {role: tensors[stem + s] for role, s in _SUFFIXES.items() if stem + s in tensors}
        used.update((name, *(part.name for part in parts.values())))
        try:
            layout = _read_layout(info, parts, stem, declared)
        except _Misfit as fault:
            problems.append(fault.problem)
            continue
        names = {"values": name, **{role: part.name for role, part in parts.items()}}
        if not get_format(layout.format).has_global:
            names.pop("global_scale", None)
        located.append(
            Located(name=name, format=layout.format, shape=layout.shape, parts=names, quantized=True, detail=layout)
        )
    plain = (locate_plain(info, problems) for name, info in tensors.items() if name not in used)
    return located + split_expert_stacks(folder, (entry for entry in plain if entry is not None), problems)


def read_tensor(located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
    """The canonical tensor of an entry of `locate_tensors`."""
    if not located.quantized:
        return read_plain(located, load)
    layout: Layout = located.detail
    spec = get_format(layout.format)
    codes = load(located.parts["values"])
    if layout.row_pairs:
        codes = pack(_split_row_pairs(codes), spec.element)
    elif spec.element == "e2m1":
        codes = codes.view(torch.uint8)
    scales = load(located.parts["block_scales"])
    if spec.scale == "float":
        scales = scales.view(torch.uint8) if scales.element_size() == 1 else scales.float()
    elif spec.scale == "e8m0":
        scales = scales.view(torch.uint8)  # bytes, whichever dtype names them; a cast would take them for numbers

    def scalar(role: str) -> torch.Tensor | None:
        return load(located.parts[role]).float().reshape(()) if role in located.parts else None

    smoothing = located.parts.get("pre_quant_scale")
    return QuantizedTensor(
        format=layout.format,
        codes=codes,
        block_scales=scales.reshape(spec.scale_shape(layout.shape, layout.block)),
        global_scale=scalar("global_scale"),
        shape=layout.shape,
        block=layout.block,
        input_scale=scalar("input_scale"),
        pre_quant_scale=None if smoothing is None else load(smoothing).float().reshape(-1),
    )


def write_tensor(name: str, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Canonical tensor to `weight`, `weight_scale`, `weight_scale_2`, `input_scale`. Scalars are 0-dim float32, float
    scales are float32: `[N]` for rows, `[a, 1, b, 1]` for blocks.

    Raises CheckpointError for what these parts cannot say: several globals, zero points, act-order, pre_quant_scale.
    """
    stem = name.removesuffix("weight")
    for what, value in (
        ("zero points", q.zero_points),
        ("act-order groups", q.group_index),
        ("a pre_quant_scale on its input", q.pre_quant_scale),
    ):
        if value is not None:
            raise CheckpointError(
                f"{name} ({q.format}) has {what}, which this dialect does not write",
                fix="quantize it again (from its decoded values) instead of copying it",
            )
    scales = q.block_scales
    if q.spec.scale == "float":
        scales = e8m0_values(scales) if scales.dtype == torch.uint8 else scales.float()
        if q.spec.block == WHOLE:
            scales = scales.reshape(() if q.spec.rows == WHOLE else (q.shape[-2],))
        else:
            scales = scales.unsqueeze(-1).unsqueeze(-3)
    parts = {name: q.codes.contiguous(), stem + "weight_scale": scales.contiguous().clone()}
    for suffix, value in (("weight_scale_2", q.global_scale), ("input_scale", q.input_scale)):
        if value is not None:
            if value.numel() != 1:
                raise CheckpointError(
                    f"{name} has {value.numel()} global scales; this dialect stores one a tensor",
                    fix="write the fused shards apart",
                )
            parts[stem + suffix] = value.float().reshape(()).clone()  # a shared global: its own storage
    return parts


class _Misfit(Exception):
    """Why a weight and its companions are no format."""

    def __init__(self, check: str, message: str, fix: str, part: StoredTensor) -> None:
        super().__init__(message)
        self.problem = Problem(check, "error", message, tensor=part.name, file=part.file, fix=fix)


_EXPORT_AGAIN = "export the checkpoint again"


def _read_layout(
    weight: StoredTensor, parts: dict[str, StoredTensor], stem: str, declared: Callable[[str], str]
) -> Layout:
    """The layout of a weight with its companions. Raises _Misfit."""
    if "block_scales" not in parts:
        raise _Misfit(
            "missing-companion",
            f"{weight.name} is {weight.dtype} {list(weight.shape)} in {weight.file}, but {stem}weight_scale is in no"
            " shard",
            _EXPORT_AGAIN + "; without its scales the weight cannot be decoded",
            weight,
        )
    scale = parts["block_scales"]
    if len(weight.shape) != 2:
        raise _Misfit(
            "scale-shape",
            f"{weight.name} has shape {list(weight.shape)}; expected a matrix, one expert a tensor",
            "split fused expert stacks into one tensor an expert",
            weight,
        )
    layout = _recognize(weight, scale, lambda: declared(stem.removesuffix(".")))
    has_global = get_format(layout.format).has_global
    if has_global and "global_scale" not in parts:
        raise _Misfit(
            "missing-companion",
            f"{weight.name} in {weight.file} has E4M3 block scales, but {stem}weight_scale_2 is in no shard",
            _EXPORT_AGAIN + "; without its global scale the weight cannot be decoded",
            weight,
        )
    if not has_global and "global_scale" in parts and not layout.row_pairs:
        raise _Misfit(
            "scale-shape",
            f"{parts['global_scale'].name} stands beside {scale.dtype} scales: {layout.format} has no global scale",
            "find out which format the weight is in; a global scale must not be dropped",
            parts["global_scale"],
        )
    for role in ("global_scale", "input_scale", "pre_quant_scale"):
        part = parts.get(role)
        shapes: tuple[tuple[int, ...], ...] = ((), (1,))
        wanted = "one F32 value, [] or [1]"
        if role == "pre_quant_scale":
            shapes, wanted = ((layout.shape[1],),), f"a float for each of the {layout.shape[1]} inputs"
        if part is not None and (part.dtype not in PLAIN_FORMATS or part.shape not in shapes):
            raise _Misfit(
                "scale-shape",
                f"{part.name} in {part.file} is {part.dtype} {list(part.shape)}, expected {wanted}",
                _EXPORT_AGAIN,
                part,
            )
    return layout


def _recognize(weight: StoredTensor, scale: StoredTensor, declared: Callable[[], str]) -> Layout:
    """The layout that a matrix and its scales have by dtype and shape. Raises _Misfit."""
    is_float, is_e8m0 = scale.dtype in PLAIN_FORMATS, scale.dtype in E8M0_DTYPES
    grid = _squeeze(scale.shape)
    if weight.dtype == "U8" and is_float and len(grid) == 2 and grid[0] == 2 * weight.shape[0]:
        return _int4_row_pairs(weight, scale)
    if weight.dtype == "I8" and is_float:
        kind = _whole_scale(weight, scale)
        if kind:
            return Layout(f"int8_{kind}", _pair(weight.shape))
        raise _misshapen(weight, scale, "int8", f"[] or [{weight.shape[0]}]")
    if weight.dtype in ("U8", "I8") and (scale.dtype == "F8_E4M3" or is_e8m0):
        return _packed_fp4(weight, scale, declared)
    if weight.dtype in ("F8_E4M3", "F8_E5M2") and (is_float or is_e8m0):
        return _fp8(weight, scale, declared)
    raise _Misfit(
        "scale-shape",
        f"{weight.name} is {weight.dtype} {list(weight.shape)} with {scale.name} {scale.dtype} {list(scale.shape)};"
        " expected packed U8 codes with F8_E4M3 (nvfp4), E8M0 (mxfp4) or two rows a byte with F32 scales (int4), or I8"
        " or F8 codes with F32 scales",
        "find out which tool wrote this tensor; exclude or decode it first",
        weight,
    )


def _packed_fp4(weight: StoredTensor, scale: StoredTensor, declared: Callable[[], str]) -> Layout:
    n, k = weight.shape[0], weight.shape[1] * 2
    format = "nvfp4" if scale.dtype == "F8_E4M3" else "mxfp4"
    squeezed = _squeeze(scale.shape)
    if format == "nvfp4" and k % 32 == 0 and squeezed == (n, k // 32) and declared() == "nvfp4_w4a8":
        format = "nvfp4_w4a8"
    block = get_format(format).block
    if k % block:
        raise _Misfit(
            "k-divisible",
            f"{weight.name}: K = {k} is not a multiple of {format}'s block of {block}",
            "this tensor cannot be what its scales say; export it again or exclude it",
            weight,
        )
    if squeezed != (n, k // block):
        raise _misshapen(
            weight, scale, format, f"{[n, k // block]} ({format}: one scale per {block} of K = {k} in each of {n} rows)"
        )
    return Layout(format, (n, k))


def _int4_row_pairs(weight: StoredTensor, scale: StoredTensor) -> Layout:
    n, k = 2 * weight.shape[0], weight.shape[1]
    groups = _squeeze(scale.shape)[1]
    if groups == 0 or k % groups or k % 2:
        raise _misshapen(weight, scale, "int4", f"[{n}, K / group] with K = {k} (two rows a byte)")
    return Layout("int4_group", (n, k), (1, k // groups), row_pairs=True)


def _fp8(weight: StoredTensor, scale: StoredTensor, declared: Callable[[], str]) -> Layout:
    n, k = shape = _pair(weight.shape)
    element = "e4m3" if weight.dtype == "F8_E4M3" else "e5m2"
    grid = _squeeze(scale.shape)
    if scale.dtype in E8M0_DTYPES and k % 32 == 0 and grid == (n, k // 32):
        return Layout(f"mxfp8_{element}", shape, (1, 32))
    kind = _whole_scale(weight, scale)
    if element == "e4m3" and kind == "tensor" and max(shape) <= FP8_BLOCK and declared() == "fp8_block":
        return Layout("fp8_block", shape, (FP8_BLOCK, FP8_BLOCK))  # a matrix of one block: its scale is one number too
    if element == "e4m3" and kind:
        return Layout(f"fp8_{kind}", shape)
    if element == "e4m3" and len(grid) == 2:
        block = tuple(_block_size(size, count) for size, count in zip(shape, grid, strict=True))
        if all(block):
            return Layout("fp8_block", shape, _pair(block))
    raise _misshapen(
        weight,
        scale,
        "fp8",
        f"[], [{n}], one a block of {FP8_BLOCK} ({[math.ceil(n / FP8_BLOCK), math.ceil(k / FP8_BLOCK)]}), or E8M0"
        f" {[n, k // 32]}",
    )


def _whole_scale(weight: StoredTensor, scale: StoredTensor) -> str:
    """ "tensor" for one scale, "channel" for one a row, "" for more."""
    if scale.shape in ((), (1,), (1, 1)):
        return "tensor"
    return "channel" if scale.shape in ((weight.shape[0],), (weight.shape[0], 1)) else ""


def _block_size(size: int, count: int) -> int:
    """Elements of a dimension that share a scale; 0: the scales do not say. A quotient alone would be a guess: 576 rows
    with 5 scales are blocks of 128, the last one partial, not of 116."""
    if count == math.ceil(size / FP8_BLOCK):
        return FP8_BLOCK
    exact = size // count if count and size % count == 0 else 0
    return exact if exact and exact & (exact - 1) == 0 else 0


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A scale grid's two dimensions: `[1, a, b]` and the block-wise `[a, 1, b, 1]` hold the same values."""
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return (shape[0], shape[2])
    return tuple(d for i, d in enumerate(shape) if not (d == 1 and i < len(shape) - 2))


def _pair(dims: tuple[int, ...]) -> tuple[int, int]:
    first, second = dims
    return first, second


def _misshapen(weight: StoredTensor, scale: StoredTensor, format: str, expected: str) -> _Misfit:
    return _Misfit(
        "scale-shape",
        f"{scale.name} in {scale.file} is {list(scale.shape)}, expected {expected}; {weight.name} is {weight.dtype}"
        f" {list(weight.shape)}",
        _EXPORT_AGAIN + f"; {format} scales of another shape have no meaning",
        scale,
    )


def _split_row_pairs(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[N/2, K]`, the even row in the low nibble, to one code an element, uint8 `[N, K]`."""
    codes: torch.Tensor = unpack_fp4(packed.unsqueeze(-1))
    return codes.transpose(-1, -2).flatten(0, 1)
