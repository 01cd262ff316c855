"""NVIDIA ModelOpt: `weight`, `weight_scale`, `weight_scale_2`, `input_scale`; hf_quant_config.json and config.json.

NVFP4: weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 and input_scale F32, both decode multipliers
(amax / 2688); value = e2m1 * (weight_scale * weight_scale_2). MXFP4: weight U8 and weight_scale U8 (E8M0) [N, K/32].
The config lives in hf_quant_config.json (`exclude_modules`, nested under `quantization` or flat) and, in newer exports,
in config.json's quantization_config (`ignore`). Source: nvidia-modelopt 0.47.0 exports and its export code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

SIDE_FILE = "hf_quant_config.json"
METHODS = {"modelopt", "modelopt_fp4", "modelopt_mixed"}
# quant_algo (upper case) -> canonical format; "" = said per module.
ALGORITHMS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP4": "mxfp4", "MIXED_PRECISION": ""}
PRODUCER_VERSION = "0.47.0"  # the export layout that `config_files` writes


class ModelOpt(Dialect):
    name = "modelopt"
    writes = ("nvfp4",)

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        if block is not None:
            method = block.get("quant_method")
            return (isinstance(method, str) and method in METHODS) or (method is None and "quant_algo" in block)
        return (folder.path / SIDE_FILE).is_file()

    def detect_tensors(self, folder: Folder) -> bool:
        return any(
            info.dtype == "U8" and name.endswith(".weight") and name + "_scale_2" in folder.tensors
            for name, info in folder.tensors.items()
        )

    def declare(self, folder: Folder) -> Declaration:
        statements = []
        block = find_config_block(folder.config)
        if block is not None:
            statements.append(_read_statement(block, "config.json quantization_config"))
        side = folder.read_json(SIDE_FILE)
        if side is not None:
            nested = side.get("quantization")
            statements.append(_read_statement(nested if isinstance(nested, dict) else side, SIDE_FILE))
        if not statements:
            return Declaration()
        first, *rest = statements
        conflicts = [c for other in rest for c in _conflicts(first, other)]
        return Declaration(
            files=tuple(f for s in statements for f in s.files),
            algorithm=first.algorithm,
            format=first.format,
            excludes=first.excludes,
            modules=first.modules,
            listed_only=first.listed_only,
            weight_only=first.weight_only,
            conflicts=tuple(conflicts),
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        return locate_fp4_linears(folder, problems, input_scale="input_scale")

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        return assemble_fp4(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return disassemble_fp4(name, tensor, input_scale="input_scale")

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        excludes = sorted(set(written.excludes))
        four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"weights": four_bits, "targets": ["Linear"]}
        if written.static_activations:
            group = {"input_activations": dict(four_bits), **group}
        algorithm = "NVFP4" if written.static_activations else "W4A16_NVFP4"
        producer = {"name": "modelopt", "version": PRODUCER_VERSION}
        block = {
            "config_groups": {"group_0": group},
            "ignore": excludes,
            "quant_algo": algorithm,
            "producer": producer,
            "quant_method": "modelopt",
        }
        side = {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": excludes,
            },
        }
        return {"config.json": {**without_config_block(config), "quantization_config": block}, SIDE_FILE: side}


def _read_statement(block: Mapping[str, Any], where: str) -> Declaration:
    algorithm = block.get("quant_algo") or ""
    format = _canonical_format(str(algorithm), f"{where}.quant_algo")
    listed = block.get("quantized_layers") or {}
    if not isinstance(listed, dict) or not all(isinstance(v or {}, dict) for v in listed.values()):
        raise CheckpointError(f"{where}.quantized_layers is no table of module names", fix="repair the config")
    algorithms = {m: str((v or {}).get("quant_algo", "")).upper() for m, v in listed.items()}
    modules = {m: _canonical_format(a, f"{where}.quantized_layers[{m!r}]") for m, a in algorithms.items()}
    excludes = string_list(block.get("ignore"), f"{where}.ignore") + string_list(
        block.get("exclude_modules"), f"{where}.exclude_modules"
    )
    return Declaration(
        files=(where,),
        algorithm=str(algorithm).upper(),
        format=format,
        excludes=tuple(dict.fromkeys(excludes)),
        modules=modules,
        listed_only=bool(modules),
        weight_only=frozenset(m for m, algorithm in algorithms.items() if algorithm.startswith("W4A16")),
    )


def _canonical_format(algorithm: str, where: str) -> str:
    if not algorithm:
        return ""
    if algorithm.upper() not in ALGORITHMS:
        raise CheckpointError(
            f"{where} is {algorithm!r}, which this version does not read", fix=f"known: {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[algorithm.upper()]


def _conflicts(first: Declaration, other: Declaration) -> Iterable[str]:
    if first.algorithm != other.algorithm:
        yield f"{first.files[0]} says quant_algo {first.algorithm}, {other.files[0]} says {other.algorithm}"
    only_first, only_other = set(first.excludes) - set(other.excludes), set(other.excludes) - set(first.excludes)
    for names, has, lacks in ((only_first, first, other), (only_other, other, first)):
        if names:
            yield (
                f"{has.files[0]} excludes {sorted(names)[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                + f", {lacks.files[0]} does not"
            )
