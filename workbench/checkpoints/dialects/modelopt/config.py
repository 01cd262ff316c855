"""ModelOpt's config: hf_quant_config.json and config.json's quantization_config, read and written.

    declaration = read_declaration(folder)
    files = write_config({...}, Written(formats={"model.layers.0.mlp.up_proj": "nvfp4"}))

hf_quant_config.json says `quant_algo`, `exclude_modules`, `quantized_layers`, `kv_cache_quant_algo`, flat or nested
under `quantization`; config.json says the same as `ignore`, `config_groups`, `kv_cache_scheme`. Either may be missing,
and they may disagree: config.json is taken and the difference is a conflict. Source: nvidia-modelopt 0.47.0,
`export/quant_utils.py` and `export/convert_hf_config.py`, its exports, and published configs since 0.22.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.errors import CheckpointError

from ...files import Folder
from ..base import Declaration, Written, config_table, find_config_block, string_list, without_config_block

SIDE_FILE = "hf_quant_config.json"
METHODS = {"modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed", "nvfp4"}
MIXED = "MIXED_PRECISION"
# quant_algo (upper case) -> canonical format of weights, and what activations are rounded to ("": they are not).
ALGORITHMS: dict[str, tuple[str, str]] = {
    "FP8": ("fp8_tensor", "fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", "fp8_channel"),  # a token is a row of activations
    "FP8_PB_WO": ("fp8_block", ""),
    "FP8_PB_REAL": ("fp8_block", ""),
    "FP8_BLOCK_SCALES": ("fp8_block", ""),
    "W4A16_AWQ": ("int4_group", ""),
    "W4A8_AWQ": ("int4_group", "fp8_tensor"),
    "W8A16": ("int8_channel", ""),
    "W8A8_SQ_PER_CHANNEL": ("int8_channel", "int8_tensor"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "NVFP4_SVD": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", ""),
    "W4A8_NVFP4_FP8": ("nvfp4_w4a8", "fp8_tensor"),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8_tensor"),
    "MXFP8": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "MXFP4": ("mxfp4", "mxfp4"),
    MIXED: ("", ""),  # said per module
}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # the export layout that `write_config` writes
_WEIGHT_ONLY = {
    algorithm for algorithm, (_, activations) in ALGORITHMS.items() if algorithm != MIXED and not activations
}
# format -> quant_algo as the tool spells it, and its group_size; NVFP4 as well, when activations have static scales.
_WRITTEN: dict[str, tuple[str, int | None]] = {
    "nvfp4": ("W4A16_NVFP4", 16),
    "mxfp4": ("mxfp4", None),
    "mxfp8_e4m3": ("MXFP8", 32),
    "fp8_tensor": ("FP8", None),
    "fp8_channel": ("FP8_PER_CHANNEL_PER_TOKEN", None),
    "fp8_block": ("fp8_pb_wo", None),
}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


def is_modelopt(folder: Folder) -> bool:
    """Whether config.json names ModelOpt, or, where it has no quantization block, the side file lies beside it."""
    block = find_config_block(folder.config)
    if block is None:
        return (folder.path / SIDE_FILE).is_file()
    method = block.get("quant_method")
    if method is None:  # some exports leave it out
        return "quant_algo" in block or isinstance(block.get("quantization"), dict)
    return isinstance(method, str) and method in METHODS


def read_declaration(folder: Folder) -> Declaration:
    """What both files claim. Raises CheckpointError for a quant_algo that ModelOpt does not write, or a broken key."""
    blocks = {
        "config.json quantization_config": find_config_block(folder.config),
        SIDE_FILE: folder.read_json(SIDE_FILE),
    }
    stated = {where: _unnest(block, where) for where, block in blocks.items() if block is not None}
    statements = [_read_statement(block, where) for where, block in stated.items()]
    if not statements:
        return Declaration()
    first = next((s for s in statements if s.algorithm), statements[0])
    conflicts = [*first.conflicts]
    for other in statements:
        if other is not first:
            conflicts += [*other.conflicts, *_differences(first, other)]
    versions = {where: _version(block) for where, block in blocks.items() if block is not None and _version(block)}
    if len(set(versions.values())) > 1:
        conflicts.append(" and ".join(f"{where} is by ModelOpt {v}" for where, v in versions.items()) + ": two exports")
    return replace(first, files=tuple(stated), conflicts=tuple(conflicts))


def write_config(config: dict[str, Any], written: Written) -> dict[str, dict[str, Any]]:
    """config.json and hf_quant_config.json as ModelOpt writes them, from the source's config."""
    config = without_config_block(config)
    if not written.formats:
        return {"config.json": config}
    if written.only_format:
        stated = _single(written)
        groups = _single_groups(stated)
    else:
        stated = {"quant_algo": MIXED, "kv_cache_quant_algo": None, "quantized_layers": _list_layers(written)}
        groups = {"config_groups": _mixed_groups(stated["quantized_layers"])}
        groups["quantized_layers"] = stated["quantized_layers"]
    block = {
        **groups,
        "ignore": stated.get("exclude_modules", []),
        "quant_algo": stated["quant_algo"],
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }
    return {
        "config.json": {**config, "quantization_config": block},
        SIDE_FILE: {"producer": PRODUCER, "quantization": stated},
    }


# ---- Reading ---------------------------------------------------------------------------------------------------------


def _unnest(block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    return config_table(block, "quantization", where, of="settings") or block


def _version(block: Mapping[str, Any]) -> str:
    producer = block.get("producer")
    return str(producer.get("version") or "") if isinstance(producer, dict) else ""


def _read_statement(block: Mapping[str, Any], where: str) -> Declaration:
    listed = config_table(block, "quantized_layers", where)
    layers = {module: config_table(listed, module, f"{where}.quantized_layers", of="settings") for module in listed}
    algorithm = _algorithm(block.get("quant_algo"), f"{where}.quant_algo") or (MIXED if listed else "")
    algorithms = {
        module: _algorithm(layer.get("quant_algo"), f"{where}.quantized_layers[{module!r}].quant_algo")
        for module, layer in layers.items()
    }
    format, activations = ALGORITHMS.get(algorithm, ("", ""))
    groups = list(_groups(block, where))
    if algorithm == "NVFP4" and groups and not any(has_input for _, has_input, _ in groups):
        activations = ""  # servers, too, run such a checkpoint weight-only
    excludes = (*string_list(block.get("ignore"), f"{where}.ignore"),)
    excludes += string_list(block.get("exclude_modules"), f"{where}.exclude_modules")
    return Declaration(
        files=(where,),
        algorithm=algorithm,
        format=format,
        excludes=tuple(dict.fromkeys(excludes)),
        modules={module: ALGORITHMS.get(a, ("", ""))[0] for module, a in algorithms.items()},
        listed_only=bool(algorithms),
        weight_only=frozenset(module for module, a in algorithms.items() if a in _WEIGHT_ONLY),
        activations=activations,
        kv_cache=_kv_cache(block, where),
        conflicts=tuple(_group_conflicts(groups, algorithms, where)),
    )


def _algorithm(value: Any, where: str) -> str:
    algorithm = "" if value is None else str(value).upper()
    if algorithm and algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"{where} is {value!r}, which this version does not read", fix=f"known: {', '.join(ALGORITHMS)}"
        )
    return algorithm


def _kv_cache(block: Mapping[str, Any], where: str) -> str:
    """`kv_cache_quant_algo`, or `kv_cache_scheme`: a word, or a table whose 8-bit float is the word FP8."""
    stated = (block.get(key) for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
    value = next((v for v in stated if v not in (None, "", {})), "")
    if isinstance(value, dict):
        kind, bits = value.get("type"), value.get("num_bits")
        return "FP8" if (kind, bits) == ("float", 8) else f"{kind} {bits}"
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: the KV cache's format is {value!r}, expected a name", fix="repair the config")
    return value.upper()


def _groups(block: Mapping[str, Any], where: str) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """config_groups: name, whether its activations are quantized, the modules it names."""
    groups = config_table(block, "config_groups", where, of="groups")
    for name in groups:
        group = config_table(groups, name, f"{where}.config_groups", of="settings")
        targets = string_list(group.get("targets"), f"{where}.config_groups.{name}.targets")
        yield name, group.get("input_activations") is not None, targets


def _group_conflicts(
    groups: Iterable[tuple[str, bool, tuple[str, ...]]], algorithms: Mapping[str, str], where: str
) -> Iterator[str]:
    for name, has_input, targets in groups:
        named = [t for t in targets if t in algorithms]
        wrong = [t for t in named if has_input == (algorithms[t] in _WEIGHT_ONLY)]
        if wrong:
            yield (
                f"{where}: config_groups.{name} says activations are {'' if has_input else 'not '}quantized,"
                f" quantized_layers says {algorithms[wrong[0]]} for {wrong[0]}{_more(wrong, 'modules')}"
            )


def _differences(first: Declaration, other: Declaration) -> Iterator[str]:
    one, two = first.files[0], other.files[0]
    if other.algorithm != first.algorithm:
        yield f"{one} says quant_algo {first.algorithm}, {two} says {other.algorithm or 'none'}"
    if other.kv_cache != first.kv_cache:
        yield f"{one} says KV cache {first.kv_cache or 'unquantized'}, {two} says {other.kv_cache or 'unquantized'}"
    only_first, only_other = set(first.excludes) - set(other.excludes), set(other.excludes) - set(first.excludes)
    for names, has, lacks in ((only_first, one, two), (only_other, two, one)):
        if names:
            yield f"{has} excludes {min(names)}{_more(names, 'patterns')}, {lacks} does not"
    layers = {**first.modules, **other.modules}
    unlike = sorted(
        m
        for m in layers
        if first.modules.get(m) != other.modules.get(m) or (m in first.weight_only) != (m in other.weight_only)
    )
    if unlike:
        yield f"{one} and {two} give {unlike[0]} different formats in quantized_layers{_more(unlike, 'modules')}"


def _more(names: Any, what: str) -> str:
    return f" ({len(names)} such {what})" if len(names) > 1 else ""


# ---- Writing ---------------------------------------------------------------------------------------------------------


def _layer(format: str, written: Written) -> dict[str, Any]:
    """quant_algo and group_size of one format."""
    algorithm, group_size = _WRITTEN[format]
    if format == "nvfp4" and written.static_activations and not written.weight_only:
        algorithm = "NVFP4"
    return {"quant_algo": algorithm} | ({} if group_size is None else {"group_size": group_size})


def _single(written: Written) -> dict[str, Any]:
    layer = _layer(written.only_format, written)
    return {
        "quant_algo": layer.pop("quant_algo"),
        "kv_cache_quant_algo": None,
        **layer,
        "exclude_modules": sorted(set(written.excludes)),
    }


def _single_groups(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The tool writes config_groups for these three only."""
    if stated["quant_algo"] not in ("FP8", "NVFP4", "W4A16_NVFP4"):
        return {}
    return {"config_groups": {"group_0": {**_group(stated), "targets": ["Linear"]}}}


def _list_layers(written: Written) -> dict[str, dict[str, Any]]:
    """Module -> its algorithm; a layer's experts by their container where all of them have one and none is dense."""
    kinds: dict[str, set[str]] = {}
    for module, format in written.formats.items():
        kinds.setdefault(_container(module), set()).add(format)
    broken = {_container(module) for module in written.excludes if _container(module) != module}
    layers: dict[str, dict[str, Any]] = {}
    for module, format in written.formats.items():
        container = _container(module)
        name = container if len(kinds[container]) == 1 and container not in broken else module
        layers.setdefault(name, _layer(format, written))
    return layers


def _container(module: str) -> str:
    match = _EXPERT.match(module)
    return match[1] if match else module


def _mixed_groups(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One group for each distinct algorithm, in the order of the layers."""
    order = Counter(tuple(layer.items()) for layer in layers.values())
    return {
        f"group_{number}": {
            **_group(dict(kind)),
            "targets": sorted(name for name, layer in layers.items() if tuple(layer.items()) == kind),
        }
        for number, kind in enumerate(order)
    }


def _group(layer: Mapping[str, Any]) -> dict[str, Any]:
    """input_activations and weights of an algorithm; a raw internal name stands alone."""
    algorithm, size = layer["quant_algo"], layer.get("group_size")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MXFP8"):
        return {"quant_algo": algorithm}
    bits = 4 if algorithm.endswith("NVFP4") else 8
    kind: dict[str, Any] = {"dynamic": False, "num_bits": bits, "type": "float"}
    if size is not None:
        kind["group_size"] = size
    weights = {**kind, "strategy": "channel"} if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else kind
    return {"weights": weights} if algorithm == "W4A16_NVFP4" else {"input_activations": dict(kind), "weights": weights}
