"""Quark's stored tensors to canonical ones and back. The forms are those of `layout.py`.

Integers become two's complement whatever they were stored as; a zero point that is 0 throughout is none. What is
written is what the export in memory writes: its importer and vLLM read that form.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format
from workbench.kernels.elements import ELEMENTS, pack
from workbench.kernels.reference import e8m0_values

from ..base import Load, Located
from ..int4 import unpack_int32
from ..stacks import read_plain
from .layout import LEGACY_BLOCK_BYTES, Packing

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight columns each slot of a word holds, the lowest bits first
_ZERO_POINTS = "write another format: Quark's config has one symmetry for all weights of a format"


def assemble_weight(located: Located, load: Load) -> QuantizedTensor | Tensor:
    """The canonical tensor of `layout.locate_weights`."""
    if not located.quantized and not isinstance(located.detail, Packing):
        return read_plain(located, load)
    packing: Packing = located.detail
    if not located.quantized:
        return load(located.parts["values"])[packing.rows].contiguous()
    spec = get_format(located.format)
    element = ELEMENTS[spec.element]
    n = located.shape[0] if packing.rows is None else 2 * located.shape[0]
    shape = (n, *located.shape[1:])
    stored = load(located.parts["values"])
    scales = None if packing.legacy else load(located.parts["block_scales"])
    if scales is None:
        codes, scales = _split_legacy(stored)
    elif spec.element == "int4":
        codes = unpack_int32(stored, 4, packing.order)
        codes = (codes[:, :n].T if packing.transposed else codes) ^ (8 if packing.unsigned else 0)
        codes = pack(codes.contiguous(), "int4")
    elif spec.element == "int8":
        bytes_ = stored.view(torch.uint8) ^ (0x80 if packing.unsigned else 0)
        codes = (bytes_.T if packing.transposed else bytes_).contiguous().view(torch.int8)
    else:
        codes = stored.view(element.dtype)
    q = QuantizedTensor(
        format=located.format,
        codes=codes,
        block_scales=_block_scales(scales, spec.scale, spec.scale_shape(shape, packing.block), packing),
        global_scale=_scalar(located, "global_scale", load) if spec.has_global else None,
        shape=shape,
        block=packing.block,
        zero_points=_zero_points(located, packing, spec.scale_shape(shape, packing.block), load),
        input_scale=_scalar(located, "input_scale", load),
    )
    return q if packing.rows is None else _take_rows(q, packing.rows, located.name)


def disassemble_weight(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """A canonical tensor to Quark's stored ones; scalars are 0-dim float32.

    Raises CheckpointError for what the dialect cannot hold: several global scales, zero points, act-order groups, a
    scale of the layer's input.
    """
    _check_writable(name, q)
    parts = {"": q.codes.contiguous(), "_scale": q.block_scales.contiguous()}
    if q.format == "int4_group":
        parts = _int4_in_memory(name, q)
    elif q.spec.scale == "float":
        scales = e8m0_values(q.block_scales) if q.block_scales.dtype == torch.uint8 else q.block_scales
        shape = {"fp8_tensor": (), "fp8_channel": (q.shape[0],)}.get(q.format, tuple(scales.shape))
        parts["_scale"] = scales.float().reshape(shape).clone()
    elif q.block is not None and q.block[0] != 1:  # as the spec's scale_type says
        parts["_scale"] = parts["_scale"].view(torch.float8_e8m0fnu)
    stored = {name + suffix: part for suffix, part in parts.items()}
    scalars = {f"{name}_scale_2": q.global_scale, name.removesuffix("weight") + _input_scale(q.format): q.input_scale}
    for key, value in scalars.items():
        if value is not None:
            stored[key] = value.float().reshape(()).clone()  # a shared global: its own storage
    return stored


def _input_scale(format: str) -> str:
    return "input_scale_2" if format == "nvfp4" else "input_scale"


def _split_legacy(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of a signed exponent and 16 bytes of codes, [N, 17 K / 32], to codes [N, K / 2] and E8M0 [N, K / 32]."""
    blocks = stored.reshape(stored.shape[0], stored.shape[1] // LEGACY_BLOCK_BYTES, LEGACY_BLOCK_BYTES)
    exponents = blocks[..., 0].contiguous().view(torch.int8).int()
    return blocks[..., 1:].flatten(-2).contiguous(), (exponents + 127).clamp(0, 255).to(torch.uint8)


def _block_scales(scales: Tensor, kind: str, shape: tuple[int, ...], packing: Packing) -> Tensor:
    if packing.scale_transposed:
        scales = scales.T
    scales = scales.reshape(shape)
    if kind == "e4m3":
        return scales.view(torch.float8_e4m3fn)
    powers = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return scales.contiguous().view(torch.uint8) if powers else scales.float().contiguous()


def _zero_points(located: Located, packing: Packing, shape: tuple[int, ...], load: Load) -> Tensor | None:
    if "zero_points" not in located.parts:
        return None
    stored = load(located.parts["zero_points"])
    if get_format(located.format).element == "int4":
        points = unpack_int32(stored, 4, packing.order).int()
        if packing.transposed:
            points = points[..., : shape[0]].T
        points = points.reshape(shape) if points.numel() == shape[0] * shape[1] else points
        signed = points if packing.unsigned else (points ^ 8) - 8
    else:
        points = stored.int()
        signed = points.T if points.dim() == 2 and packing.scale_transposed else points
    if signed.numel() != shape[0] * shape[1]:
        raise CheckpointError(
            f"{located.parts['zero_points']} holds {signed.numel()} zero points, expected {list(shape)}",
            fix="export the checkpoint again",
        )
    signed = signed.reshape(shape) - (_half(located.format) if packing.unsigned else 0)
    if not bool(signed.any()):
        return None
    if not get_format(located.format).zero_points:
        raise CheckpointError(
            f"{located.parts['zero_points']} is not 0, but {located.format} has no zero points",
            fix="decode the checkpoint with the tool that wrote it",
        )
    return signed.contiguous()


def _half(format: str) -> int:
    """What unsigned codes, and their zero points, are above the signed ones."""
    return 1 << (ELEMENTS[get_format(format).element].bits - 1)


def _scalar(located: Located, role: str, load: Load) -> Tensor | None:
    return load(located.parts[role]).float().reshape(()) if role in located.parts else None


def _take_rows(q: QuantizedTensor, rows: slice, name: str) -> QuantizedTensor:
    """Every second row of a fused weight. Raises CheckpointError where one scale belongs to rows of both halves."""
    n = q.shape[0]
    if q.block_scales.shape[0] not in (1, n):
        raise CheckpointError(
            f"{name} is a part of an interleaved weight in blocks of {q.block} rows, which mix gate and up",
            fix="decode the checkpoint with the tool that wrote it",
        )

    def take(t: Tensor) -> Tensor:
        return t[rows].contiguous() if t.shape[0] == n else t

    codes = take(q.codes)
    return replace(
        q,
        codes=codes,
        block_scales=take(q.block_scales),
        zero_points=None if q.zero_points is None else take(q.zero_points),
        shape=(codes.shape[0], *q.shape[1:]),
    )


def _check_writable(name: str, q: QuantizedTensor) -> None:
    found = {
        "zero points": (q.zero_points is not None, _ZERO_POINTS),
        "groups in act-order": (q.group_index is not None, "decode it, and quantize it again"),
        "a pre_quant_scale": (
            q.pre_quant_scale is not None,
            "decode it (which multiplies the scale in), and quantize it",
        ),
    }
    for what, (present, fix) in found.items():
        if present:
            raise CheckpointError(f"{name} has {what}, which the quark dialect does not store", fix=fix)
    if q.global_scale is not None and q.global_scale.numel() != 1:
        raise CheckpointError(
            f"{name} has {q.global_scale.numel()} global scales; this dialect stores one a tensor",
            fix="write the fused shards apart",
        )


def _int4_in_memory(name: str, q: QuantizedTensor) -> dict[str, Tensor]:
    """int32 [K, N / 8] in AWQ order, scales [K / g, N] (BF16 where that is exact), zero points of 0."""
    if q.shape[0] % 8:
        raise CheckpointError(
            f"{name} has {q.shape[0]} rows; Quark packs eight of them in a word",
            fix=f"exclude it: --exclude '{name.removesuffix('.weight')}'",
        )
    codes = torch.stack((q.codes & 0xF, q.codes >> 4), dim=-1).flatten(-2)
    scales = q.block_scales.float().T.contiguous()
    words = pack(codes.T.reshape(q.shape[1], -1, 8)[..., AWQ_ORDER], "int4").view(torch.int32).flatten(-2)
    return {
        "": words,
        "_scale": scales.bfloat16() if torch.equal(scales.bfloat16().float(), scales) else scales,
        "_zero_point": torch.zeros((scales.shape[0], words.shape[1]), dtype=torch.int32),
    }
