"""Quark's config block: from tensor specs to canonical formats and back.

    Specs(block).format_of("model.layers.0.mlp.up_proj")        # "mxfp4"
    layer_config("nvfp4", None, static=True, weight_only=False)  # {"weight": [...], "input_tensors": [...], ...}

A layer config has a spec (or a list of two) for the weight and one for the input. A module's is the first of
`layer_quant_config` that covers it (names before globs), then `layer_type_quant_config`'s for Linear, then
`global_quant_config`. A list of two means that the second quantizes the first's block scales (nvfp4), or that the
second quantized the first's codes (int4 on FP8). Source: amd-quark 0.13 and its exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import CheckpointError

from ...match import is_plain_name, matches
from ..base import config_table

WHERE = "config.json quantization_config"
READ_SPECS = (
    "fp4 (mxfp4), fp6_e2m3, fp6_e3m2 and fp8 per_group 32 with e8m0 scales; fp8_e4m3 per_tensor, per_channel,"
    " per_block; int4, uint4 per_group, per_channel; int8, uint8; lists of fp4 per_group 16 and fp8_e4m3 (nvfp4),"
    " of fp8_e4m3 and int4; mx of fp4"
)

_MX = {
    "fp4": "mxfp4",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp8_e4m3": "mxfp8_e4m3",
    "fp8_e5m2": "mxfp8_e5m2",
}
_SCALED = {
    ("fp8_e4m3", "per_tensor"): "fp8_tensor",
    ("fp8_e4m3", "per_channel"): "fp8_channel",
    ("fp8_e4m3", "per_block"): "fp8_block",
    ("fp8_e4m3", "per_group"): "fp8_block",
    ("int4", "per_group"): "int4_group",
    ("int4", "per_channel"): "int4_group",
    ("uint4", "per_group"): "int4_group",
    ("uint4", "per_channel"): "int4_group",
    ("int8", "per_tensor"): "int8_tensor",
    ("int8", "per_channel"): "int8_channel",
    ("int8", "per_group"): "int8_group",
    ("uint8", "per_tensor"): "int8_tensor",
    ("uint8", "per_channel"): "int8_channel",
    ("uint8", "per_group"): "int8_group",
}


class Specs:
    """The layer configs of one config block. Raises CheckpointError for a table that is none, naming it.

    layers: pattern -> layer config, in the order in which they decide. default: of a Linear that none covers.
    """

    def __init__(self, block: Mapping[str, Any]) -> None:
        self.layers = {
            **{p: c for p, c in _layers(block, "kv_cache_quant_config").items() if c.get("weight") is not None},
            **_layers(block, "layer_quant_config"),
        }
        by_type = _layers(block, "layer_type_quant_config")
        self.default = by_type.get("Linear", config_table(block, "global_quant_config", WHERE, of="settings"))
        self.default_where = f"{WHERE}.{'layer_type_quant_config' if 'Linear' in by_type else 'global_quant_config'}"
        method = config_table(block, "export", WHERE, of="settings").get("pack_method")
        self.pack_method = method or block.get("pack_method") or "reorder"

    def weight(self, module: str) -> dict[str, Any]:
        """The spec of a module's weight codes, {} where the config has none: a list's last that is no scale's."""
        layer = self.layers.get(module)
        if layer is None:
            covering = (c for p, c in self.layers.items() if not is_plain_name(p) and matches(module, p))
            layer = next(covering, self.default)
        spec = layer.get("weight")
        stages = [s for s in (spec if isinstance(spec, list) else [spec]) if isinstance(s, dict)]
        return next((s for s in reversed(stages) if not s.get("is_scale_quant")), stages[0] if stages else {})

    def formats(self) -> tuple[str, dict[str, str]]:
        """(default format, pattern -> format); "" leaves a module unquantized. Raises CheckpointError for a spec that
        is not read."""
        layers = {p: weight_format(c, f"{WHERE}.layer_quant_config[{p!r}]") for p, c in self.layers.items()}
        return weight_format(self.default, self.default_where), layers


def weight_format(layer: Mapping[str, Any], where: str) -> str:
    """The canonical format of a layer config's weight, "" when it leaves the weight alone.

    Raises CheckpointError for a spec that is not read.
    """
    spec = layer.get("weight")
    if spec is None:
        return ""
    found = spec_format(spec)
    if not found:
        raise CheckpointError(
            f"{where}.weight is {_describe(spec)}: not read by this version", fix=f"known: {READ_SPECS}"
        )
    return found


def spec_format(spec: Any) -> str:
    """The canonical format of a tensor spec (or a list of one or two), "" for one that is not known."""
    if isinstance(spec, list):
        if len(spec) == 1:
            return spec_format(spec[0])
        if len(spec) != 2 or not all(isinstance(s, dict) for s in spec):
            return ""
        first, second = ((s.get("dtype"), s.get("qscheme"), s.get("group_size")) for s in spec)
        if first == ("fp4", "per_group", 16) and second[:2] == ("fp8_e4m3", "per_tensor"):
            return "nvfp4"
        return (
            "int4_channel" if (first[:2], second[:2]) == (("fp8_e4m3", "per_tensor"), ("int4", "per_channel")) else ""
        )
    if not isinstance(spec, dict):
        return ""
    dtype, scheme = spec.get("dtype"), spec.get("qscheme")
    if dtype == "mx":
        return "mxfp4" if spec.get("mx_element_dtype") == "fp4" and spec.get("group_size") in (32, None) else ""
    if not isinstance(dtype, str) or not isinstance(scheme, str):
        return ""
    powers = spec.get("scale_format") == "e8m0" or spec.get("scale_type") == "float8_e8m0fnu"
    if dtype in _MX and scheme == "per_group" and spec.get("group_size") == 32:
        unsaid = spec.get("scale_format") is None and not dtype.startswith("fp8")
        return _MX[dtype] if powers or unsaid else ""
    if dtype in _MX and scheme == "per_block" and powers and block_size(spec)[1] == 32:
        return _MX[dtype] if dtype.startswith("fp8") else ""
    return _SCALED.get((dtype, scheme), "")


def block_size(spec: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) of a spec's blocks; (0, 0) where it says none."""
    size = spec.get("block_size") or [1, spec.get("group_size")]
    if isinstance(size, list) and len(size) == 2 and all(isinstance(s, int) and s > 0 for s in size):
        return size[0], size[1]
    return 0, 0


def layer_config(format: str, block: tuple[int, int] | None, *, static: bool, weight_only: bool) -> dict[str, Any]:
    """The layer config that declares `format` (a key of `WRITTEN`) with blocks of `block` where they vary.

    static: input scales are stored; weight_only: activations stay unquantized.
    """
    weight, dynamic_input = WRITTEN[format](block)
    inputs: Any = dynamic_input
    if format == "nvfp4":  # its activations need the static global scale
        inputs = [_spec("fp4", group_size=16, is_dynamic=True, **_FP4_OF_NVFP4), weight[1]] if static else None
    elif static and inputs is not None and format != "fp8_block":
        inputs = _spec("fp8_e4m3")
    return {
        "bias": None,
        "input_tensors": None if weight_only else inputs,
        "output_tensors": None,
        "target_device": None,
        "weight": weight,
    }


_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
    "per_block": "PerBlock2DMinMaxObserver",
}
_FP4_OF_NVFP4 = {"scale_format": "float32", "scale_type": "float32", "observer_cls": "PerBlockMXObserver"}


def _spec(dtype: str, **changes: Any) -> dict[str, Any]:
    """A tensor spec with all keys that 0.13 writes: static per tensor, unless `changes` says otherwise."""
    scheme = changes.get("qscheme", "per_group" if "group_size" in changes else "per_tensor")
    blocks = scheme == "per_group" and (dtype == "fp4" or changes.get("scale_format") == "e8m0")
    spec = {
        "block_size": None,
        "ch_axis": -1 if scheme == "per_group" else None,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": None,
        "is_dynamic": False,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver" if blocks else _OBSERVERS[scheme],
        "qscheme": scheme,
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float",
        "symmetric": None if blocks else True,
        "zero_point_type": "int32",
    }
    return {**spec, **changes}


def _mx_spec(dtype: str, *, is_dynamic: bool) -> dict[str, Any]:
    return _spec(dtype, group_size=32, is_dynamic=is_dynamic, scale_format="e8m0", scale_calculation_mode="even")


def _mx_pair(dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return _mx_spec(dtype, is_dynamic=False), _mx_spec(dtype, is_dynamic=True)


def _mxfp8_pair(block: tuple[int, int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    weight, inputs = _mx_pair("fp8_e4m3")
    if block is not None and block[0] != 1:
        weight = _spec("fp8_e4m3", qscheme="per_block", block_size=list(block), scale_type="float8_e8m0fnu")
    return weight, inputs


def _block_pair(block: tuple[int, int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    rows, columns = block or (128, 128)
    return (
        _spec("fp8_e4m3", qscheme="per_block", block_size=[rows, columns], scale_type="float32"),
        _spec("fp8_e4m3", group_size=columns, is_dynamic=True),
    )


def _nvfp4_weight() -> list[dict[str, Any]]:
    return [_spec("fp4", group_size=16, **_FP4_OF_NVFP4), _spec("fp8_e4m3", is_scale_quant=True, scale_type="float32")]


# format -> block -> (weight spec, dynamic input spec)
WRITTEN: dict[str, Any] = {
    "mxfp4": lambda block: _mx_pair("fp4"),
    "nvfp4": lambda block: (_nvfp4_weight(), None),
    "mxfp6_e2m3": lambda block: _mx_pair("fp6_e2m3"),
    "mxfp6_e3m2": lambda block: _mx_pair("fp6_e3m2"),
    "mxfp8_e4m3": _mxfp8_pair,
    "fp8_tensor": lambda block: (_spec("fp8_e4m3"), _spec("fp8_e4m3", is_dynamic=True)),
    "fp8_channel": lambda block: (
        _spec("fp8_e4m3", qscheme="per_channel", ch_axis=0),
        _spec("fp8_e4m3", qscheme="per_channel", ch_axis=1, is_dynamic=True),
    ),
    "fp8_block": _block_pair,
    "int4_group": lambda block: (_spec("int4", group_size=(block or (1, 32))[1]), None),
}


def _layers(block: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """A table of layer configs; null is an empty one."""
    table = config_table(block, key, WHERE)
    return {pattern: config_table(table, pattern, f"{WHERE}.{key}", of="settings") for pattern in table}


def _describe(spec: Any) -> str:
    if isinstance(spec, list):
        return f"a list of {', '.join(_describe(s) for s in spec) or 'nothing'}"
    if not isinstance(spec, dict):
        return repr(spec)[:80]
    words = [
        f"dtype {spec.get('dtype')!r}",
        f"qscheme {spec.get('qscheme')!r}",
        f"group_size {spec.get('group_size')!r}",
    ]
    words += [f"{k} {spec[k]!r}" for k in ("mx_element_dtype", "scale_format") if spec.get(k) is not None]
    return ", ".join(words)[:200]
