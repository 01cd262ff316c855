"""AMD Quark: `weight`, `weight_scale` (+ `weight_scale_2`, `input_scale_2` for NVFP4); config.json quantization_config.

MXFP4: weight U8 [N, K/2], weight_scale U8 (E8M0) [N, K/32], activations dynamic. NVFP4: weight_scale F8_E4M3 [N, K/16],
weight_scale_2 a decode multiplier as ModelOpt's, and the weight spec is a list of two. `exclude` holds globs, names and
`re:` regexes. `pack_method: reorder` concerns int4 only. Source: amd-quark 0.13 exports.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.formats import QuantizedTensor

from ..files import Folder, Problem
from .base import (
    Declaration,
    Dialect,
    Load,
    Located,
    Written,
    find_config_block,
    string_list,
    without_config_block,
)
from .fp4 import assemble_fp4, disassemble_fp4, locate_fp4_linears

PRODUCER_VERSION = "0.13"  # the export layout that `config_files` writes
KNOWN_SPECS = {("fp4", "per_group", 32): "mxfp4", ("fp4", "per_group", 16): "nvfp4"}


class Quark(Dialect):
    name = "quark"
    writes = ("mxfp4",)

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        return block is not None and block.get("quant_method") == "quark"

    def detect_tensors(self, folder: Folder) -> bool:
        tensors = folder.tensors
        return any(
            info.dtype == "U8"
            and name.endswith(".weight")
            and name + "_scale" in tensors
            and tensors[name + "_scale"].dtype in ("U8", "F8_E8M0")
            for name, info in tensors.items()
        )

    def declare(self, folder: Folder) -> Declaration:
        block = find_config_block(folder.config)
        if block is None:
            return Declaration()
        where = "config.json quantization_config"
        formats = {}
        layers = block.get("layer_quant_config") or {}
        if not isinstance(layers, dict):
            raise CheckpointError(f"{where}.layer_quant_config is no table of module names", fix="repair the config")
        for pattern, spec in layers.items():
            formats[pattern] = _canonical_format(spec, f"{where}.layer_quant_config[{pattern!r}]")
        default = _canonical_format(block.get("global_quant_config"), f"{where}.global_quant_config")
        return Declaration(
            files=(where,),
            algorithm=(default or next(filter(None, formats.values()), "")).upper(),
            format=default if not formats or set(formats.values()) == {default} else "",
            excludes=string_list(block.get("exclude"), f"{where}.exclude")
            + tuple(pattern for pattern, format in formats.items() if not format),
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        scale = "input_scale_2" if any(n.endswith(".input_scale_2") for n in folder.tensors) else "input_scale"
        return locate_fp4_linears(folder, problems, input_scale=scale)

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        return assemble_fp4(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return disassemble_fp4(name, tensor, input_scale="input_scale_2")

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        block: dict[str, Any] = {
            "algo_config": None,
            "exclude": sorted(set(written.excludes)),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": {
                "bias": None,
                "input_tensors": _mxfp4_spec(is_dynamic=True),
                "output_tensors": None,
                "target_device": None,
                "weight": _mxfp4_spec(is_dynamic=False),
            },
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": {},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": PRODUCER_VERSION,
        }
        return {"config.json": {**without_config_block(config), "quantization_config": block}}


def _mxfp4_spec(is_dynamic: bool) -> dict[str, Any]:
    return {
        "block_size": None,
        "ch_axis": -1,
        "dtype": "fp4",
        "group_size": 32,
        "is_dynamic": is_dynamic,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "round_method": "half_even",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
    }


def _canonical_format(layer: Any, where: str) -> str:
    """The format of a layer config's weight spec, "" when it leaves the weight alone. Raises for an unknown spec."""
    spec = layer.get("weight") if isinstance(layer, dict) else None
    if spec is None:
        return ""
    first = spec[0] if isinstance(spec, list) and spec else spec
    if isinstance(first, dict):
        key = (first.get("dtype"), first.get("qscheme"), first.get("group_size"))
        if (
            all(isinstance(k, (str, int)) for k in key)
            and key in KNOWN_SPECS
            and (KNOWN_SPECS[key] == "nvfp4") == isinstance(spec, list)
        ):
            return KNOWN_SPECS[key]
        found = f"dtype {key[0]!r}, qscheme {key[1]!r}, group_size {key[2]!r}"
    else:
        found = repr(first)
    raise CheckpointError(
        f"{where}.weight is {found}" + (" in a list" if isinstance(spec, list) else "") + ": not read by this version",
        fix="known: fp4 per_group 32 (mxfp4); a list of fp4 per_group 16 and fp8_e4m3 (nvfp4)",
    )
