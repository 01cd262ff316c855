"""What the plugin is told, and what follows from it for each module. Imports no vLLM.

The endpoint passes `PluginSettings` twice: to the loader as `--model-loader-extra-config`, to the quantization config
inside `--hf-overrides {"quantization_config": {"quant_method": "workbench", …}}` (which also replaces a checkpoint's
own `quantization_config` and hf_quant_config.json). Both sides derive the same plan from the checkpoint's headers:

    plan = plan_modules(checkpoint, settings)     # {module: ModulePlan}; a module that is not in it runs unquantized
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.checkpoints import Checkpoint

BACKENDS = ("reference", "emulation", "requant")
ACTIVATIONS = ("auto", "none")
COMPAT = ("none", "vllm")
DECODED_AT_LOAD = ("kv_b_proj",)  # quantized linear modules that vLLM uses as dense ones: MLA absorbs them


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginSettings:
    """checkpoint: its folder. backend: see BACKENDS. format, rule: target of requant. activations: "auto" rounds
    activations through the weight format's quantize-dequantize, "none" leaves them. compat: "none" keeps every matrix's
    own scales, "vllm" combines them as vLLM's own NVFP4 methods do (backend emulation only; `compat`). exclude: module
    patterns. audit: where the worker writes what it loaded ("" = nowhere). capture: record the inputs of every
    quantizable module (backend reference only)."""

    checkpoint: str
    backend: str = "reference"
    format: str = ""
    rule: str = ""
    activations: str = "auto"
    compat: str = "none"
    exclude: tuple[str, ...] = ()
    audit: str = ""
    capture: bool = False

    def __post_init__(self) -> None:
        _choose("backend", self.backend, BACKENDS)
        _choose("activations", self.activations, ACTIVATIONS)
        if self.backend == "requant" and not self.format:
            raise ConfigError("backend requant needs a target format", fix="set format=mxfp4 (or nvfp4)")
        if self.backend != "requant" and (self.format or self.rule):
            raise ConfigError(
                f"format and rule are requant's; backend {self.backend} runs the checkpoint's own format",
                fix="drop format and rule, or choose backend=requant",
            )
        _choose("compat", self.compat, COMPAT)
        if self.compat != "none" and self.backend != "emulation":
            raise ConfigError(
                f"compat={self.compat} combines the scales of a checkpoint that runs as stored; backend {self.backend}"
                " does not run it so",
                fix="use backend=emulation, or compat=none",
            )
        if self.capture and self.backend != "reference":
            raise ConfigError("activations are captured on the decoded model", fix="use backend=reference")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exclude": list(self.exclude)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PluginSettings:
        """The inverse of `to_dict`; ignores "quant_method". Raises ConfigError for an unknown key."""
        values = {k: v for k, v in values.items() if k != "quant_method"}
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown plugin settings {unknown}", fix="run the same workbench on both sides")
        if "checkpoint" not in values:
            raise ConfigError("the plugin settings name no checkpoint", fix="start vLLM through `workbench serve`")
        return cls(**{**values, "exclude": tuple(values.get("exclude", ()))})


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """How one module runs. stored: its format in the checkpoint; weight: its format at GEMM time; activation: the
    format activations are rounded through, or "none"; static: a stored input_scale is that rounding's global scale."""

    module: str
    stored: str
    weight: str
    activation: str
    static: bool

    def converts(self, settings: PluginSettings) -> bool:
        """Whether what is stored is rounded anew at load: into another format, or into its own by a rule that is asked
        for."""
        return settings.backend == "requant" and (self.stored != self.weight or bool(settings.rule))


def plan_modules(checkpoint: Checkpoint, settings: PluginSettings) -> dict[str, ModulePlan]:
    """Plans of all modules that run quantized, by checkpoint module name.

    emulation: what the checkpoint holds in PACKED_FORMATS; a module in another format (FP8 beside NVFP4) is decoded as
    it loads. requant: what is quantized, converted, but in a checkpoint of mixed precision only the four-bit modules,
    as published pipelines do; of an unquantized checkpoint, every linear layer inside a decoder layer except routers.
    In both, what `exclude` covers runs unquantized. reference: nothing. Raises ConfigError when nothing is left to run
    quantized, FormatError for an unknown format or rule.
    """
    from workbench.checkpoints.match import matches_any
    from workbench.checkpoints.selection import converted_at_load, linear_weights
    from workbench.formats import PACKED_FORMATS, get_format

    if settings.backend == "reference":
        return {}
    if settings.format:
        _choose("format", settings.format, PACKED_FORMATS)
        get_format(settings.format).rule(settings.rule or None)
    candidates = [e for e in checkpoint.entries() if e.quantized and e.projection]
    any_quantized = bool(candidates)
    stored = sorted({e.format for e in candidates})
    if settings.backend == "emulation":
        candidates = [e for e in candidates if e.format in PACKED_FORMATS]
    else:
        candidates = converted_at_load(candidates)
    if any_quantized and not candidates:
        raise ConfigError(
            f"{settings.checkpoint} is quantized as {', '.join(stored)}; emulation runs {' and '.join(PACKED_FORMATS)}",
            fix="use backend=reference, which decodes it, or requant with format=mxfp4 or nvfp4",
        )
    if settings.backend == "requant" and not any_quantized:
        candidates = linear_weights(checkpoint)
    plans: dict[str, ModulePlan] = {}
    for entry in candidates:
        if matches_any(entry.module, settings.exclude):
            continue
        weight = settings.format or entry.format
        activation = weight if settings.activations == "auto" else "none"
        static = activation == "nvfp4" and entry.format == "nvfp4" and entry.has_input_scale
        plans[entry.module] = ModulePlan(entry.module, entry.format, weight, activation, static)
    if not plans:
        why = "every module is excluded" if any_quantized or settings.backend == "requant" else "it is not quantized"
        raise ConfigError(
            f"{settings.checkpoint}: nothing to run under backend {settings.backend}: {why}",
            fix="for an unquantized checkpoint use backend=reference, or requant to quantize it; else exclude less",
        )
    return plans


def quantizable_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules that a quantizer would consider, in layer order: the capture's list."""
    from workbench.checkpoints.selection import linear_weights

    return [e.module for e in linear_weights(checkpoint)]


def _choose(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{what} is {value!r}", fix=f"choose one of: {', '.join(choices)}")
