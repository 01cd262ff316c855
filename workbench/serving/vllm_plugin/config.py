"""vLLM's view of the plan: which method each of the engine's modules gets.

A module of the engine may hold several of the checkpoint's (qkv_proj, gate_up_proj, fused_qkv_a_proj, all experts of a
layer); those must agree on their format. Modules that the plan does not name run vLLM's own unquantized method.

Exception: MLA's `kv_b_proj`. vLLM absorbs its dense weight into the decode path and calls it live in the prefill path,
so it is decoded once at load and runs unquantized in both: its weight carries the rounding, its input does not, and
loglikelihood and generation see the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from workbench.errors import ConfigError

from .preparation import planned_launches
from .settings import DECODED_AT_LOAD, ModulePlan, PluginSettings, plan_modules, quantizable_modules

logger = init_logger("vllm.workbench")  # only loggers under "vllm" are shown

_FUSED = {  # used where a model class publishes no packed_modules_mapping
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


class WorkbenchConfig(QuantizationConfig):
    """One engine's settings, plan and bookkeeping. `taken`: checkpoint modules whose packed tensors a method holds.
    `launches`: what the load will run on a GPU."""

    def __init__(self, settings: PluginSettings) -> None:
        super().__init__()
        from workbench.checkpoints import open_checkpoint

        self.settings = settings
        self.taken: set[str] = set()
        self.recorder: Any = None
        self._mapper: Any = None  # no closures here: vLLM pickles this object into its worker processes
        with open_checkpoint(settings.checkpoint) as checkpoint:
            self._plans = plan_modules(checkpoint, settings)
            self.launches = planned_launches(checkpoint, self._plans, settings)
            self.capturable = dict.fromkeys(quantizable_modules(checkpoint) if settings.capture else ())
        if settings.capture:
            from .recorder import ActivationRecorder

            self.recorder = ActivationRecorder()
        self._by_engine_name: dict[str, str] | None = None

    @classmethod
    def get_name(cls) -> str:
        return "workbench"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WorkbenchConfig:
        return cls(PluginSettings.from_dict(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Called for model classes that rename checkpoint modules (`language_model.` wrappers)."""
        self._mapper = hf_to_vllm_mapper
        self._by_engine_name = None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        return None  # attention, embeddings, lm_head: vLLM's own; the loader decodes what is packed

    # ---- private

    @property
    def _as_vllm(self) -> bool:
        return self.settings.compat == "vllm"

    def _linear_method(self, prefix: str) -> Any:
        from .linear import CapturingLinearMethod, PackedLinearMethod

        shards = self.shards(prefix)
        if self.recorder is not None and all(s in self.capturable for s in shards):
            return CapturingLinearMethod(self.recorder, shards)
        plans = [self._plans.get(s) for s in shards]
        if not any(plans) or prefix.endswith(DECODED_AT_LOAD):
            return UnquantizedLinearMethod()
        agreed = _agree(prefix, shards, plans)
        self.taken.update(shards)
        return PackedLinearMethod(prefix, agreed[0], static=[p.static for p in agreed], as_vllm=self._as_vllm)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> Any:
        from .moe import CapturingMoEMethod, PackedMoEMethod

        base = prefix.removesuffix(".routed_experts")
        if self.recorder is not None:
            names = self._expert_names(base, self.capturable)
            return CapturingMoEMethod(layer.moe_config, self.recorder, names) if names else None
        names = self._expert_names(base, self._plans)
        if not names:
            return None
        missing = _missing_experts(base, names, layer.moe_config)
        plans = [self._plans.get(n) for n in [*names, *missing]]
        agreed = _agree(prefix, [*names, *missing], plans)
        self.taken.update(names)
        static = [p.static for p in agreed]
        return PackedMoEMethod(layer.moe_config, prefix, agreed[0], static=static, as_vllm=self._as_vllm)

    def shards(self, prefix: str) -> list[str]:
        """Checkpoint modules that the engine's linear module `prefix` holds, in the engine's row order."""
        parent, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last) or _FUSED.get(last) or [last]
        names = self._engine_names()
        candidates = [f"{parent}.{part}" if parent else part for part in parts]
        return [names.get(c, c) for c in candidates]

    def _expert_names(self, base: str, among: Any) -> list[str]:
        """Checkpoint modules `base.<expert>.<projection>` that are `among`."""
        names = self._engine_names()
        start = f"{base}."
        found = [n for engine, n in names.items() if engine.startswith(start) and n in among]
        stacked = [n for n in found if not names_expert(n)]
        if stacked:
            raise ConfigError(
                f"{stacked[0]}: experts stored as one 3-D stack are not served quantized yet",
                fix=f"exclude them (exclude=['{base}*']) or store experts one by one",
            )
        return found

    def _engine_names(self) -> dict[str, str]:
        if self._by_engine_name is None:
            self._by_engine_name = {self._engine_name(n): n for n in [*self._plans, *self.capturable]}
        return self._by_engine_name

    def _engine_name(self, module: str) -> str:
        mapped = self._mapper.apply_list([f"{module}.weight"]) if self._mapper is not None else []
        return mapped[0].removesuffix(".weight") if mapped else module

    def plan(self, module: str) -> ModulePlan | None:
        """The plan of a checkpoint module, None when it runs unquantized."""
        return self._plans.get(module)


def names_expert(module: str) -> bool:
    """Whether the module name holds an expert index: `….experts.<i>.<projection>`."""
    parts = module.split(".")
    return len(parts) > 2 and parts[-2].isdecimal()


def _agree(prefix: str, shards: list[str], plans: list[ModulePlan | None]) -> list[ModulePlan]:
    """The plans of a fused module's shards, all of one format. Raises ConfigError when they differ in format."""
    kinds = {(p.weight, p.activation) if p else ("unquantized", "none"): s for s, p in zip(shards, plans, strict=True)}
    if len(kinds) > 1:
        found = "; ".join(f"{name}: weights {w}, activations {a}" for (w, a), name in kinds.items())
        raise ConfigError(
            f"{prefix}: vLLM runs {len(shards)} modules as one, but their formats differ ({found})",
            fix="exclude all of them or none of them",
        )
    return [p for p in plans if p is not None]


def _missing_experts(base: str, names: list[str], moe_config: Any) -> list[str]:
    """Expert modules that should be in the plan beside `names` and are not."""
    logical = getattr(moe_config, "num_logical_experts", None) or moe_config.num_experts
    first = names[0].removesuffix("." + ".".join(names[0].split(".")[-2:]))
    projections = sorted({n.rpartition(".")[2] for n in names})
    expected = {f"{first}.{e}.{p}" for e in range(logical) for p in projections}
    return sorted(expected - set(names))
