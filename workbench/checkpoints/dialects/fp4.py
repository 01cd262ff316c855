"""Locating and reading what the FP4 dialects share: a packed `weight` with scales beside it, and plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format

from ..files import Folder, Problem
from ..header import StoredTensor
from .base import Load, Located

PLAIN_FORMATS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64"}
LOW_BIT_DTYPES = {"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"}
# Suffixes that belong to a weight in some dialect; none of them is a tensor of its own.
COMPANION_SUFFIXES = (
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "input_scale_2",
    "weight_scale_inv",
    "weight_packed",
    "weight_global_scale",
    "input_global_scale",
    "weight_shape",
    "weight_zero_point",
    "pre_quant_scale",
    "qweight",
    "qzeros",
    "scales",
)


def locate_fp4_linears(folder: Folder, problems: list[Problem], input_scale: str) -> list[Located]:
    """Tensors of a dialect that writes `<m>.weight` U8 with `<m>.weight_scale` (+ `weight_scale_2`, + `input_scale`).

    NVFP4 where weight_scale is F8_E4M3, MXFP4 where it holds E8M0 bytes (U8 or F8_E8M0). Everything else is a plain
    tensor or a problem: a low-bit tensor without scales is never passed on.
    """
    tensors = folder.tensors
    located: list[Located] = []
    used: set[str] = set()
    for name, info in tensors.items():
        if not name.endswith(".weight") or info.dtype not in LOW_BIT_DTYPES:
            continue
        stem = name.removesuffix("weight")
        roles = {
            role: stem + suffix
            for role, suffix in {
                "block_scales": "weight_scale",
                "global_scale": "weight_scale_2",
                "input_scale": input_scale,
            }.items()
            if stem + suffix in tensors
        }
        used.update(roles.values(), (name,))
        found = _check_fp4(info, tensors, stem, roles, problems)
        if found is not None:
            located.append(found)
    for name, info in tensors.items():
        if name not in used:
            plain = locate_plain(info, problems)
            if plain is not None:
                located.append(plain)
    return located


def locate_plain(info: StoredTensor, problems: list[Problem]) -> Located | None:
    """A tensor that is what its dtype says; a low-bit or packed tensor, or a left-over companion, is a problem."""
    _, _, parameter = info.name.rpartition(".")
    if parameter in COMPANION_SUFFIXES:
        problems.append(
            Problem(
                "missing-companion",
                "error",
                f"{info.name} ({info.dtype} {list(info.shape)}) belongs to no quantized weight that this dialect knows",
                tensor=info.name,
                file=info.file,
                fix="its weight is missing, unquantized, or written in another dialect; export the checkpoint again",
            )
        )
        return None
    if info.dtype in LOW_BIT_DTYPES or parameter.endswith(("_blocks", "_scales", "_packed", "_qdata")):
        problems.append(
            Problem(
                "missing-companion",
                "error",
                f"{info.name} is {info.dtype} {list(info.shape)} in {info.file} without scales: it is no usable weight",
                tensor=info.name,
                file=info.file,
                fix="export the checkpoint again with its scales, or with a dialect this version reads",
            )
        )
        return None
    return Located(
        name=info.name,
        format=PLAIN_FORMATS.get(info.dtype, info.dtype.lower()),
        shape=info.shape,
        parts={"values": info.name},
    )


def assemble_fp4(located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
    """The canonical tensor of `locate_fp4_linears` / `locate_plain`."""
    if not located.quantized:
        return load(located.parts["values"])
    spec = get_format(located.format)
    *lead, k = located.shape
    scales = load(located.parts["block_scales"]).reshape(*lead, k // spec.block)
    scale_dtype = torch.float8_e4m3fn if spec.has_global else torch.uint8
    return QuantizedTensor(
        format=located.format,
        codes=load(located.parts["values"]).view(torch.uint8),
        block_scales=scales.view(scale_dtype),
        global_scale=_scalar(located, "global_scale", load) if spec.has_global else None,
        shape=located.shape,
        input_scale=_scalar(located, "input_scale", load),
    )


def disassemble_fp4(name: str, q: QuantizedTensor, input_scale: str) -> dict[str, torch.Tensor]:
    """Canonical tensor to `weight`, `weight_scale`, `weight_scale_2`, `<input_scale>`; scalars are 0-dim float32."""
    stem = name.removesuffix("weight")
    parts = {name: q.codes.contiguous(), stem + "weight_scale": q.block_scales.contiguous()}
    for suffix, value in (("weight_scale_2", q.global_scale), (input_scale, q.input_scale)):
        if value is not None:
            if value.numel() != 1:
                raise CheckpointError(
                    f"{name} has {value.numel()} global scales; this dialect stores one a tensor",
                    fix="write the fused shards apart",
                )
            parts[stem + suffix] = value.float().reshape(()).clone()  # a shared global: its own storage
    return parts


def _scalar(located: Located, role: str, load: Load) -> torch.Tensor | None:
    return load(located.parts[role]).float().reshape(()) if role in located.parts else None


def _check_fp4(
    info: StoredTensor,
    tensors: Mapping[str, StoredTensor],
    stem: str,
    roles: dict[str, str],
    problems: list[Problem],
) -> Located | None:
    def fault(check: str, message: str, fix: str, part: StoredTensor = info) -> None:
        problems.append(Problem(check, "error", message, tensor=part.name, file=part.file, fix=fix))

    if "block_scales" not in roles:
        fault(
            "missing-companion",
            f"{info.name} is {info.dtype} {list(info.shape)} in {info.file}, but {stem}weight_scale is in no shard",
            "export the checkpoint again; without its block scales the weight cannot be decoded",
        )
        return None
    scale = tensors[roles["block_scales"]]
    if info.dtype not in ("U8", "I8") or scale.dtype not in ("F8_E4M3", "U8", "F8_E8M0"):
        fault(
            "scale-shape",
            f"{info.name} is {info.dtype} {list(info.shape)} with {scale.name} {scale.dtype} {list(scale.shape)};"
            " expected packed U8 codes with F8_E4M3 (nvfp4) or U8 E8M0 (mxfp4) block scales",
            "this version reads nvfp4 and mxfp4 weights; exclude or decode other formats first",
        )
        return None
    format = "nvfp4" if scale.dtype == "F8_E4M3" else "mxfp4"
    block = get_format(format).block
    if len(info.shape) != 2:
        fault(
            "scale-shape",
            f"{info.name} has shape {list(info.shape)}; expected a matrix [N, K/2], one expert a tensor",
            "split fused expert stacks into one tensor an expert",
        )
        return None
    n, k = info.shape[0], info.shape[1] * 2
    if k % block:
        fault(
            "k-divisible",
            f"{info.name}: K = {k} is not a multiple of {format}'s block of {block}",
            "this tensor cannot be what its scales say; export it again or exclude it",
        )
        return None
    expected = (n, k // block)
    squeezed = tuple(d for i, d in enumerate(scale.shape) if not (d == 1 and i < len(scale.shape) - 2))
    if squeezed != expected:
        fault(
            "scale-shape",
            f"{scale.name} in {scale.file} is {list(scale.shape)}, expected {list(expected)}"
            f" ({format}: one scale per {block} of K = {k} in each of {n} rows)",
            "export the checkpoint again; scales of another shape have no meaning",
            scale,
        )
        return None
    if format == "nvfp4" and "global_scale" not in roles:
        fault(
            "missing-companion",
            f"{info.name} in {info.file} has E4M3 block scales, but {stem}weight_scale_2 is in no shard",
            "export the checkpoint again; without its global scale the weight cannot be decoded",
        )
        return None
    if format == "mxfp4" and "global_scale" in roles:
        part = tensors[roles["global_scale"]]
        fault(
            "scale-shape",
            f"{part.name} stands beside E8M0 block scales; MXFP4 has no global scale",
            "find out which format the weight is in; a global scale must not be dropped",
            part,
        )
        return None
    for role in ("global_scale", "input_scale"):
        if role in roles:
            part = tensors[roles[role]]
            if part.dtype not in PLAIN_FORMATS or part.shape not in ((), (1,)):
                fault(
                    "scale-shape",
                    f"{part.name} in {part.file} is {part.dtype} {list(part.shape)}, expected one F32 value, [] or [1]",
                    "export the checkpoint again",
                    part,
                )
                return None
    return Located(name=info.name, format=format, shape=(n, k), parts={"values": info.name, **roles}, quantized=True)
