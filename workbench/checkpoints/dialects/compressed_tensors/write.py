"""Writing compressed-tensors: canonical tensors to stored ones, and the config block of what was written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor, get_format
from workbench.formats.table import WHOLE
from workbench.kernels.reference import e8m0_values
from workbench.kernels.tables import ScaleRule

from ...names import expert_peers, is_embedding, parse_name
from ..base import Written
from ..int4 import pack_int32
from .groups import Block

PRODUCER_VERSION = "0.19.0"  # the layout that `make_config_block` writes
PACKING = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
    "fp8_tensor": "float-quantized",
    "fp8_channel": "float-quantized",
    "fp8_block": "float-quantized",
    "int4_group": "pack-quantized",
    "int8_channel": "int-quantized",
}
WRITABLE = tuple(PACKING)
ASYMMETRIC_RULES = {ScaleRule.MINMAX, ScaleRule.LLM_COMPRESSOR_ASYM}
STATIC_INPUTS = ("nvfp4", "fp8_tensor")  # the others' activations are dynamic
WORD_CODES = 8  # 4-bit codes a word


def split_tensor(name: str, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Canonical tensor `name` (`<module>.weight`) to stored tensors by name.

    Float scales are stored as BF16 where that loses nothing, as the tool writes them, else as F32. Raises
    CheckpointError for what the dialect has no place for: a `pre_quant_scale`, several globals, an input scale beside
    dynamic activations, act-order, a global that has no finite divisor.
    """
    _refuse_unwritable(name, q)
    stem = name.removesuffix("weight")
    parts = {}
    if q.format == "int4_group":
        parts[stem + "weight_packed"] = _pack_words(q)
        parts[stem + "weight_shape"] = torch.tensor(q.shape, dtype=torch.int64)
    else:
        parts[stem + ("weight_packed" if q.codes.dtype == torch.uint8 else "weight")] = q.codes.contiguous()
    parts[stem + "weight_scale"] = _store_scales(q)
    if q.zero_points is not None:
        parts[stem + "weight_zero_point"] = _store_zero_points(name, q)
    if q.global_scale is not None:
        parts[stem + "weight_global_scale"] = _divisor(q.global_scale, f"{name}: global scale")
    if q.input_scale is not None and q.format == "nvfp4":
        parts[stem + "input_global_scale"] = _divisor(q.input_scale, f"{name}: input scale")
    elif q.input_scale is not None:
        parts[stem + "input_scale"] = q.input_scale.float().reshape(1).clone()
    return parts


def make_config_block(written: Written) -> dict[str, Any]:
    """`quantization_config` for what was written: a group a format, the commonest for every linear layer that `ignore`
    does not name, the others for their modules by name."""
    modules: dict[str, list[str]] = {}
    for module, format in written.formats.items():
        modules.setdefault(format, []).append(module)
    common = max(modules, key=lambda f: len(modules[f]), default="")
    groups = {}
    for number, (format, names) in enumerate(modules.items()):
        targets = ["Linear"] if format == common else _name_targets(names, written.formats)
        groups[f"group_{number}"] = {
            "format": PACKING[format],
            "input_activations": _input_args(format, written),
            "output_activations": None,
            "targets": targets,
            "weights": _weight_args(format, written),
        }
    packings = {PACKING[format] for format in modules}
    return {
        "config_groups": groups,
        "format": packings.pop() if len(packings) == 1 else "mixed-precision" if packings else "dense",
        "global_compression_ratio": None,
        "ignore": _ignore(written.excludes),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": PRODUCER_VERSION,
    }


def _refuse_unwritable(name: str, q: QuantizedTensor) -> None:
    dialect = "compressed-tensors"
    if q.format not in PACKING:
        raise CheckpointError(
            f"{name} is {q.format}, which {dialect} is not written in", fix=f"use {', '.join(PACKING)}"
        )
    if q.pre_quant_scale is not None:
        raise CheckpointError(
            f"{name} has a pre_quant_scale; {dialect} stores none", fix="quantize its effective weight instead"
        )
    if q.group_index is not None:
        raise CheckpointError(
            f"{name} has act-order groups; compressed-tensors reads none since 0.18, nor does vLLM",
            fix="decode it and quantize it again",
        )
    if len(q.shape) != 2 or (q.global_scale is not None and q.global_scale.numel() != 1):
        raise CheckpointError(
            f"{name} is a stack {list(q.shape)} or has several global scales; {dialect} stores matrices with one",
            fix="write the fused shards or experts apart",
        )
    if q.input_scale is not None and q.format not in STATIC_INPUTS:
        raise CheckpointError(
            f"{name} is {q.format} with a static input scale; it is written with dynamic activations",
            fix=f"leave the calibration out; static ones are written for {', '.join(STATIC_INPUTS)}",
        )
    if q.format in ("mxfp8_e4m3", "int4_group") and q.block is not None and q.block[0] != 1:
        raise CheckpointError(
            f"{name} is {q.format} whose rows share scales; it is written with scales of their own",
            fix="decode it and quantize it again",
        )


def _pack_words(q: QuantizedTensor) -> torch.Tensor:
    """Two's-complement nibbles to I32 words of offset-binary ones; the last word is filled up with zero bits."""
    stored = q.codes ^ 0x88
    padding = -stored.shape[1] % 4
    return torch.nn.functional.pad(stored, (0, padding)).contiguous().view(torch.int32)


def _store_scales(q: QuantizedTensor) -> torch.Tensor:
    scales = q.block_scales
    if q.spec.scale != "float":
        return scales.contiguous()
    scales = e8m0_values(scales) if scales.dtype == torch.uint8 else scales
    half = scales.bfloat16()
    scales = half if torch.equal(half.float(), scales) else scales
    return scales.reshape(1) if q.format == "fp8_tensor" else scales.contiguous()


def _store_zero_points(name: str, q: QuantizedTensor) -> torch.Tensor:
    """I32 packed along the rows for int4, I8 for int8."""
    assert q.zero_points is not None
    low, high = (-8, 7) if q.format == "int4_group" else (-128, 127)
    if bool(((q.zero_points < low) | (q.zero_points > high)).any()):
        raise CheckpointError(
            f"{name} has zero points outside {low} to {high}; compressed-tensors stores them in the weight's own type",
            fix="decode it and quantize it again",
        )
    if q.format != "int4_group":
        return q.zero_points.to(torch.int8)
    codes = (q.zero_points + 8).to(torch.uint8).T
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % WORD_CODES))
    return pack_int32(padded, 4).T.contiguous()


def _divisor(multiplier: torch.Tensor, what: str) -> torch.Tensor:
    """F32 [1], the divisor nearest to the reciprocal of a decode multiplier; the very one that a float64 came from."""
    divisor = (1.0 / multiplier.double()).float().reshape(1)
    if not bool(divisor.isfinite() & (divisor > 0)):
        raise CheckpointError(
            f"{what} {multiplier.item()} has no positive finite float32 divisor",
            fix="the source is broken or its module saw no token: calibrate it, or export the source again",
        )
    return divisor


def _ignore(excludes: Iterable[str]) -> list[str]:
    """The excluded linear layers; a name covers itself alone, so a container of experts becomes a regex."""
    return [
        f"re:{re.escape(name)}(\\..*)?$" if name.endswith(".experts") else name
        for name in excludes
        if not is_embedding(name)
    ]


def _name_targets(modules: list[str], formats: Mapping[str, str]) -> list[str]:
    """Modules by name; one projection of all experts of a layer, where they agree, as one regex.

    The regex leaves the prefix open: servers rename `model.language_model.` in names, not in regexes.
    """
    others = {expert_peers(m) for m, format in formats.items() if format != formats[modules[0]]}
    targets: dict[str, None] = {}
    for module in modules:
        parsed = parse_name(module + ".weight")
        peers = expert_peers(module)
        if parsed.expert < 0 or parsed.layer < 0 or peers in others:
            targets[module] = None
        else:
            tail = peers[peers.index(f"layers.{parsed.layer}.") :]
            targets["re:(.*\\.)?" + re.escape(tail).replace(r"\*", r"\d+") + "$"] = None
    return list(targets)


def _weight_args(format: str, written: Written) -> dict[str, Any]:
    number, bits = ("int", 4 if format == "int4_group" else 8) if format.startswith("int") else _float_bits(format)
    strategy = _strategy(format, written)
    args = _args(number, bits, strategy, observer="memoryless_minmax", scale_dtype=_scale_dtype(format))
    asymmetric = format in written.zero_points or written.rules.get(format) in ASYMMETRIC_RULES
    return {**args, "symmetric": False, "zp_dtype": "torch.int8"} if asymmetric else args


def _input_args(format: str, written: Written) -> dict[str, Any] | None:
    """What servers round activations to: a static scale where it is stored, else per token or group; None: nothing."""
    if written.weight_only or format == "int4_group" or (format == "nvfp4" and not written.static_activations):
        return None
    static = written.static_activations and format in STATIC_INPUTS
    strategy: dict[str, Any] = {"strategy": "token"}
    if format == "fp8_block":
        strategy = {"strategy": "group", "group_size": _block(format, written)[1]}
    elif format not in ("fp8_tensor", "fp8_channel", "int8_channel") or static:
        strategy = _strategy(format, written)
    return _args(
        *(("int", 8) if format == "int8_channel" else _float_bits(format)),
        strategy,
        dynamic="local" if format == "nvfp4" else not static,
        observer="static_minmax" if static else None,
        scale_dtype=_scale_dtype(format),
    )


def _args(
    number: str,
    bits: int,
    strategy: Mapping[str, Any],
    *,
    observer: str | None,
    scale_dtype: str | None,
    dynamic: bool | str = False,
) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": bits,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": scale_dtype,
        **strategy,
        "symmetric": True,
        "type": number,
        "zp_dtype": None,
    }


def _float_bits(format: str) -> tuple[str, int]:
    return "float", 4 if format in ("nvfp4", "mxfp4") else 8


def _scale_dtype(format: str) -> str | None:
    return {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8", "mxfp8_e4m3": "torch.uint8"}.get(format)


def _strategy(format: str, written: Written) -> dict[str, Any]:
    rows, columns = _block(format, written)
    if format == "nvfp4":
        return {"strategy": "tensor_group", "group_size": columns}
    if rows == WHOLE:
        return {"strategy": "tensor"}
    if columns == WHOLE:
        return {"strategy": "channel"}
    if rows == 1:
        return {"strategy": "group", "group_size": columns}
    return {"strategy": "block", "block_structure": [rows, columns]}


def _block(format: str, written: Written) -> Block:
    return written.blocks.get(format) or get_format(format).resolve_block(None)
