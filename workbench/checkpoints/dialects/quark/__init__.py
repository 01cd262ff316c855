"""AMD Quark: config.json's quantization_config (`quant_method: quark`), and `weight_scale` beside each `weight`.

`layout.py` says what the tensors are, `values.py` reads and writes them, `specs.py` knows the config. Read: MXFP4,
MXFP6, MXFP8, NVFP4, FP8, INT8, INT4, INT4 on FP8, the legacy `mx`. Where the config contradicts the tensors, the
tensors decide and the conflict is a warning. `exclude` holds globs, names and `re:` regexes, often expanded to
thousands of names. Written: the layout of amd-quark 0.13's export in memory, which its importer and vLLM read; not
int4 with zero points, for which the config has no word.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from workbench.formats import QuantizedTensor

from ...files import Folder, Problem
from ...names import expert_peers
from ..base import (
    Declaration,
    Dialect,
    Load,
    Located,
    Written,
    find_config_block,
    string_list,
    without_config_block,
)
from ..stacks import split_expert_stacks
from .layout import POWERS, locate_weights, split_gate_up
from .specs import WHERE, WRITTEN, Specs, layer_config, spec_format
from .values import assemble_weight, disassemble_weight

PRODUCER_VERSION = "0.13"  # the export layout that `config_files` writes


class Quark(Dialect):
    name = "quark"
    writes = tuple(WRITTEN)

    def detect(self, folder: Folder) -> bool:
        block = find_config_block(folder.config)
        return block is not None and block.get("quant_method") == "quark"

    def detect_tensors(self, folder: Folder) -> bool:
        tensors = folder.tensors
        return any(
            name.endswith(".weight")
            and name + "_scale" in tensors
            and ((info.dtype == "U8" and tensors[name + "_scale"].dtype in POWERS) or info.dtype == "I32")
            for name, info in tensors.items()
        )

    def declare(self, folder: Folder) -> Declaration:
        block = find_config_block(folder.config)
        if block is None:
            return Declaration()
        specs = Specs(block)
        default, layers = specs.formats()
        varies = set(layers.values()) - {default}
        return Declaration(
            files=(WHERE,),
            algorithm=(default or next(filter(None, layers.values()), "")).upper(),
            format="" if varies else default,
            excludes=string_list(block.get("exclude"), f"{WHERE}.exclude"),
            modules={**layers, "*": default} if varies else {},
            weight_only=frozenset(p for p, c in specs.layers.items() if varies and not c.get("input_tensors")),
            activations=_activations(specs.default),
            kv_cache=_kv_cache(block),
        )

    def locate(self, folder: Folder, problems: list[Problem]) -> list[Located]:
        specs = Specs(find_config_block(folder.config) or {})
        located = locate_weights(folder.tensors, specs, problems)
        located = split_expert_stacks(folder, located, problems)  # experts that an export in memory left unquantized
        return split_gate_up(located) if folder.config.get("model_type") == "gpt_oss" else located

    def assemble(self, located: Located, load: Load) -> QuantizedTensor | torch.Tensor:
        return assemble_weight(located, load)

    def disassemble(self, name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return disassemble_weight(name, tensor)

    def config_files(self, config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
        layers = {
            format: layer_config(
                format, written.blocks.get(format), static=written.static_activations, weight_only=written.weight_only
            )
            for format in dict.fromkeys(written.formats.values())
        }
        default = max(layers, key=Counter(written.formats.values()).__getitem__)
        experts = [f"{name}.*" for name in written.excludes if name.endswith(".experts")]  # Quark fits whole names
        block: dict[str, Any] = {
            "algo_config": None,
            "exclude": sorted({*written.excludes, *experts}),
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
            "global_quant_config": layers[default],
            "kv_cache_post_rope": False,
            "kv_cache_quant_config": {},
            "layer_quant_config": {p: layers[f] for p, f in _exceptions(written.formats, default).items()},
            "layer_type_quant_config": {},
            "quant_method": "quark",
            "quant_mode": "eager_mode",
            "softmax_quant_spec": None,
            "version": PRODUCER_VERSION,
        }
        return {"config.json": {**without_config_block(config), "quantization_config": block}}


def _exceptions(formats: Mapping[str, str], default: str) -> dict[str, str]:
    """Pattern -> format of the modules that are not in the default one.

    Names, but a layer's experts by one glob where they are in one format: a name an expert and projection would make a
    config of 100 MB. `experts*` fits the experts' own names (Quark) and their container's (vLLM).
    """
    containers: dict[str, set[str]] = defaultdict(set)
    peers: dict[str, set[str]] = defaultdict(set)
    for module, format in formats.items():
        if "*" in (peer := expert_peers(module)):
            peers[peer].add(format)
            containers[peer.partition("*")[0]].add(format)
    exceptions = {}
    for module, format in formats.items():
        if format == default:
            continue
        pattern = module
        peer = expert_peers(module)
        container = peer.partition("*")[0]
        if "*" in peer and len(containers[container]) == 1:
            pattern = container.removesuffix(".") + "*"
        elif "*" in peer and len(peers[peer]) == 1:
            pattern = peer
        exceptions[pattern] = format
    return exceptions


def _activations(layer: Mapping[str, Any]) -> str:
    return spec_format(layer.get("input_tensors"))


def _kv_cache(block: Mapping[str, Any]) -> str:
    """The dtype of the outputs of k_proj and v_proj; older exports list them in layer_quant_config by name."""
    tables = [block.get("kv_cache_quant_config")]
    export = block.get("export")
    group = export.get("kv_cache_group") if isinstance(export, dict) else None
    if group:
        tables.append(block.get("layer_quant_config"))
    for table in tables:
        for layer in table.values() if isinstance(table, dict) else ():
            outputs = layer.get("output_tensors") if isinstance(layer, dict) else None
            if isinstance(outputs, dict) and isinstance(outputs.get("dtype"), str):
                return str(outputs["dtype"])
    return ""
