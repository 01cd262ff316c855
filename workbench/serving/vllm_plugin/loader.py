"""The canonical loader: `--load-format workbench`.

Opens the checkpoint through `workbench.checkpoints` and yields tensors layer by layer under one set of names
(`<module>.{weight,weight_scale,weight_scale_2,input_scale}`, unfused). Each tensor is converted before vLLM shards it,
so every tensor-parallel size computes with the same numbers, and at most one tensor exists beside its final place, of
experts on a GPU at most 64. There, four-bit tensors are converted on the GPU, by kernels that give the CPU's bytes and
are made ready while the model is built (`preparation`):

- a module that a packed method holds is handed on packed, converted to the plan's format first (requant);
- any other quantized tensor is decoded to the model's dtype (backend reference, kv_b_proj, a quantized lm_head);
  if the plan converts it, it is converted and then decoded, so its weights carry the same rounding;
- the rest is handed on as stored.

After loading, the worker writes an audit file: what each module of the engine really is, how many bytes it holds, and
what reading and converting cost.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from workbench.errors import ConfigError
from workbench.kernels import cpu

from .conversion import convert_tensor, decode_tensor
from .meter import LoadMeter
from .preparation import Preparation, planned_launches, prepare
from .settings import ModulePlan, PluginSettings, plan_modules
from .together import AT_MOST, batches, requantize_together

logger = init_logger("vllm.workbench")

_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_bias", ".v_bias", ".output_scale")


class WorkbenchModelLoader(DefaultModelLoader):
    """Loads any dialect that `workbench.checkpoints` reads. Settings come as `--model-loader-extra-config`."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config
        if not isinstance(extra, dict) or "checkpoint" not in extra:
            raise ConfigError(
                "load format workbench needs its settings in --model-loader-extra-config",
                fix="start the server with `workbench serve`, which passes them",
            )
        self.settings = PluginSettings.from_dict(extra)
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={}))
        self._config: Any = None
        self._load_s = 0.0
        self._meter: LoadMeter | None = None
        self._preparation: Preparation | None = None

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to do: the checkpoint is local, or `workbench.checkpoints` fetches it."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        from .audit import write_audit
        from .tuning import tune_layers

        started = time.perf_counter()
        quant_config = vllm_config.quant_config
        if quant_config is not None and quant_config.get_name() == "workbench":
            self._config = quant_config
            self._preparation = prepare(
                quant_config.launches, device_of_worker(), self.settings.rule, model_config.dtype
            )
        model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if self._config is not None and self._config.taken and current_platform.is_cpu():
            cpu.prepare(model_config.dtype)  # compiled now, not while the first request waits
        elif self._config is not None and self._config.taken:
            tune_layers(model, model_config.dtype)  # before graphs are captured
        if self.settings.audit:
            write_audit(
                Path(self.settings.audit),
                model=model,
                settings=self.settings,
                config=self._config,
                load_s=time.perf_counter() - started,
                weights_s=self._load_s,
                meter=self._meter,
            )
        return model

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        """All tensors in layer order, as (checkpoint name, tensor)."""
        from workbench.checkpoints import open_checkpoint

        self.counter_before_loading_weights = time.perf_counter()
        taken: set[str] = self._config.taken if self._config is not None else set()
        local_experts = getattr(self, "local_expert_ids", None)
        device = next(model.parameters()).device
        meter = self._meter = LoadMeter(device, self._preparation)
        self._preparation = None  # a second load in this process finds the kernels ready
        with open_checkpoint(self.settings.checkpoint) as checkpoint:
            plans = plan_modules(checkpoint, self.settings)
            if self._config is None:  # no module runs packed: what is quantized is decoded
                launches = planned_launches(checkpoint, plans, self.settings)
                meter.preparation = prepare(launches, device, self.settings.rule, model_config.dtype)

            def wanted(entry: Any) -> bool:
                if local_experts is not None and entry.expert >= 0 and entry.expert not in local_experts:
                    return False
                return not entry.name.endswith(_KV_SCALES)  # the engine chooses its KV cache (--kv-cache-dtype)

            def joins(entry: Any) -> bool:
                return entry.expert >= 0 and bool(entry.projection) and entry.module in taken and entry.module in plans

            one_by_one = device.type == "cpu" or self.settings.backend != "requant"
            entries = filter(wanted, checkpoint.entries())
            for batch in batches(entries, joins, 1 if one_by_one else AT_MOST):
                with meter.reading():
                    stored = {entry.name: checkpoint.read(entry.name) for entry in batch}
                packed = convert_batch(batch, stored, plans, self.settings, meter) if len(batch) > 1 else {}
                for entry in batch:
                    plan = plans.get(entry.module) if entry.projection else None
                    value = stored.pop(entry.name)
                    if plan is not None and entry.module in taken:
                        yield from pack_tensor(
                            entry.name, value, plan, self.settings, meter, packed.pop(entry.name, None)
                        )
                    else:
                        value = dense_tensor(entry.name, value, plan, self.settings, model_config.dtype, meter)
                        yield entry.name, value
        meter.finish()
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)
        self._load_s = time.perf_counter() - self.counter_before_loading_weights


def device_of_worker() -> torch.device:
    """Where this worker's weights go, before any of them is there."""
    if current_platform.is_cuda_alike():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def convert_batch(
    batch: list[Any], stored: dict[str, Any], plans: dict[str, ModulePlan], settings: PluginSettings, meter: LoadMeter
) -> dict[str, Any]:
    """Those tensors of a batch that go to MXFP4 in one launch, by name; the others are converted one by one."""
    from workbench.formats import get_format

    wanted = {e.name: stored[e.name] for e in batch if plans[e.module].weight == "mxfp4"}
    rule = get_format("mxfp4").rule(settings.rule or None)
    return requantize_together(wanted, rule, meter, name=batch[0].name)


def pack_tensor(
    name: str, stored: Any, plan: ModulePlan, settings: PluginSettings, meter: LoadMeter, packed: Any = None
) -> list[tuple[str, Tensor]]:
    """A tensor in the plan's format, as the named parts that the packed methods load.

    `<module>.weight` uint8 `[N, K/2]`, `.weight_scale` `[N, K/block]`, and for nvfp4 `.weight_scale_2` float32 scalar;
    `.input_scale` float32 scalar when the plan says static. What was converted lies on the meter's device. packed: what
    was converted with others already.
    """
    if packed is None:
        packed = convert_tensor(name, stored, plan, settings, meter)
    module = name.removesuffix(".weight")
    parts = [(name, packed.codes), (f"{module}.weight_scale", packed.block_scales)]
    if packed.global_scale is not None:
        parts.append((f"{module}.weight_scale_2", packed.global_scale.float().reshape(())))
    if plan.static:
        parts.append((f"{module}.input_scale", stored.input_scale.float().reshape(())))
    return parts


def dense_tensor(
    name: str,
    stored: Any,
    plan: ModulePlan | None,
    settings: PluginSettings,
    dtype: torch.dtype,
    meter: LoadMeter,
) -> Tensor:
    """A tensor as vLLM's unquantized layers take it: decoded exactly in float32, then cast once to `dtype`."""
    if plan is not None:
        stored = convert_tensor(name, stored, plan, settings, meter)
    if isinstance(stored, Tensor):
        return stored
    return decode_tensor(name, stored, dtype, meter)
