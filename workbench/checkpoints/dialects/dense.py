"""Tensors that are what their dtype says; and those that cannot be, because they are packed or belong to a weight."""

from __future__ import annotations

from ..files import Problem
from ..header import StoredTensor
from .base import Located

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
    "g_idx",
)


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
