"""Routed experts with packed weights, and the expert method that records inputs.

Parameters of a packed layer of E local experts: `w13_weight` uint8 [E, 2I, H/2] (gate rows, then up rows), `w2_weight`
uint8 [E, H, I/2], `*_weight_scale`, for nvfp4 `w13_weight_scale_2` float32 [E, 2] and `w2_weight_scale_2` [E], and
where the checkpoint has static input scales `w13_input_scale` [E, 2], `w2_input_scale` [E]. Gate, up and down of every
expert keep their own scales (`compat` says when not). After loading, input scales that are equal are joined, to
[E] or [1], so that no call has to compare them.

The loader of these parameters is our own: vLLM's dispatches on method class names and lets the up projection's
input_scale overwrite the gate's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.utils import set_weight_attrs

from workbench.errors import CheckpointError, ConfigError
from workbench.formats import get_format

from . import compat, ops, plain
from .linear import check_block, describe_plan, scale_dtype, scales_by_token
from .settings import ModulePlan


class _ExpertMethod(FusedMoEMethodBase):
    """What both methods share: registering and loading expert parameters, tensor parallel and expert parallel."""

    def __init__(self, moe: Any, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self._registered: list[str] = []
        self._seen: set[tuple[str, str, int]] = set()

    def _register(self, layer: RoutedExperts, name: str, data: Tensor) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter(name, parameter)
        self._registered.append(name)

        def load(  # the engine calls it by these keywords
            param: Tensor,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local != -1:
                self._load(layer, name, param.data, loaded_weight, shard_id, local, weight_name)
            return (local != -1) if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]
        set_weight_attrs(parameter, {"weight_loader": load})

    def _load(
        self,
        layer: RoutedExperts,
        name: str,
        data: Tensor,
        loaded: Tensor,
        shard: str,
        expert: int,
        weight_name: str,
    ) -> None:
        """Copy one expert's share of `loaded` for this rank into `data[expert]`. shard: w1 gate, w3 up, w2 down."""
        target = data[expert]
        if name.endswith(("_weight_scale_2", "_input_scale")):
            target = target if shard == "w2" else target[0 if shard == "w1" else 1]
            loaded = loaded.reshape(())
        else:
            dim = 1 if shard == "w2" else 0
            if shard != "w2":
                half = target.shape[0] // 2
                target = target[:half] if shard == "w1" else target[half:]
            ranks, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
            if loaded.shape[dim] != target.shape[dim] * ranks or loaded.shape[1 - dim] != target.shape[1 - dim]:
                raise CheckpointError(
                    f"{weight_name} of expert {expert} is {tuple(loaded.shape)}, the engine expects"
                    f" {tuple(target.shape)} on each of {ranks} ranks",
                    fix="run `workbench lint` on the checkpoint",
                )
            loaded = loaded.narrow(dim, rank * target.shape[dim], target.shape[dim])
        target.copy_(loaded)
        self._seen.add((name, shard, expert))

    def _check_complete(self, layer: RoutedExperts) -> None:
        for name in self._registered:
            for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                missing = [e for e in range(getattr(layer, name).shape[0]) if (name, shard, e) not in self._seen]
                if missing and not name.endswith("_input_scale"):
                    raise CheckpointError(
                        f"{self.prefix}: no {name} ({shard}) for local experts {missing[:8]}",
                        fix="run `workbench lint` on the checkpoint",
                    )
        self._seen.clear()

    def _check_kind(self, layer: RoutedExperts) -> None:
        activation = getattr(layer.activation, "value", layer.activation)
        unusual = {
            "activation": None if activation == "silu" else activation,
            "a bias": self.moe.has_bias or None,
            "no gate": None if self.moe.is_act_and_mul else True,
            "swiglu_limit": getattr(layer, "swiglu_limit", None),
        }
        found = [f"{k} {v}" for k, v in unusual.items() if v is not None]
        if found:
            raise ConfigError(
                f"{self.prefix}: only SiLU-gated experts without bias run quantized here; this layer has"
                f" {', '.join(found)}",
                fix=f"exclude it (exclude=['{self.prefix}*']), or use backend=reference",
            )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make()

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """vLLM 0.26 asks whether to wrap the method into its modular kernel; these methods run as they are."""
        return

    @staticmethod
    def _local(layer: RoutedExperts, topk_ids: Tensor) -> Tensor:
        return topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]


class PackedMoEMethod(_ExpertMethod):
    """Weights stay packed; each call decodes the experts that have tokens. as_vllm: scales are combined as vLLM's own
    methods do (`compat`)."""

    def __init__(self, moe: Any, prefix: str, plan: ModulePlan, *, static: list[bool], as_vllm: bool = False) -> None:
        super().__init__(moe, prefix)
        self.plan, self.static, self.as_vllm = plan, static, as_vllm
        self.ranks = ""  # the process group that w2's K is split over, where tokens have scales of their own

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        self._check_kind(layer)
        spec, inter = get_format(self.plan.weight), intermediate_size_per_partition
        check_block(f"{self.prefix} (w1, w3)", hidden_size, 1, spec.name)
        check_block(f"{self.prefix} (w2)", inter, layer.moe_config.tp_size, spec.name)
        if layer.moe_config.tp_size > 1 and scales_by_token(self.plan.activation, self.static):
            self.ranks = self._ranks(layer)
        codes, scales = torch.uint8, scale_dtype(spec.name)
        self._register(layer, "w13_weight", torch.empty(num_experts, 2 * inter, hidden_size // 2, dtype=codes))
        self._register(layer, "w2_weight", torch.empty(num_experts, hidden_size, inter // 2, dtype=codes))
        shape13 = (num_experts, 2 * inter, hidden_size // spec.block)
        shape2 = (num_experts, hidden_size, inter // spec.block)
        self._register(layer, "w13_weight_scale", torch.empty(shape13, dtype=scales))
        self._register(layer, "w2_weight_scale", torch.empty(shape2, dtype=scales))
        scalars = (["weight_scale_2"] if spec.has_global else []) + (["input_scale"] if any(self.static) else [])
        for name in scalars:  # float32 spelled out: the default dtype here is the model's
            for stem, shape in (("w13", (num_experts, 2)), ("w2", (num_experts,))):
                self._register(layer, f"{stem}_{name}", torch.full(shape, float("nan"), dtype=torch.float32))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self._check_complete(layer)
        for name in ("w13_weight_scale_2", "w2_weight_scale_2"):
            scale = getattr(layer, name, None)
            if scale is not None and bool(scale.isnan().any()):
                bad = sorted({int(i[0]) for i in scale.isnan().nonzero()})
                raise CheckpointError(
                    f"{self.prefix}: {name} is NaN for local experts {bad[:8]}",
                    fix="run `workbench lint` on the checkpoint",
                )
        if self.as_vllm and getattr(layer, "w13_weight_scale_2", None) is not None:
            layer.w13_weight_scale_2.data.copy_(compat.expert_globals(layer.w13_weight_scale_2.data))
        for name in ("w13_input_scale", "w2_input_scale"):
            scale = getattr(layer, name, None)
            if scale is None:
                continue
            given = compat.expert_input_scale(scale.data) if self.as_vllm else scale.data
            joined = ops.joined_input_scale(given)
            layer.register_parameter(name, None if joined is None else torch.nn.Parameter(joined, False))

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        # The routed output alone: the runner adds the shared experts, scales in place and reduces over ranks.
        return torch.ops.workbench.packed_moe(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            getattr(layer, "w13_weight_scale_2", None),
            layer.w2_weight,
            layer.w2_weight_scale,
            getattr(layer, "w2_weight_scale_2", None),
            topk_weights,
            self._local(layer, topk_ids),
            getattr(layer, "w13_input_scale", None),
            getattr(layer, "w2_input_scale", None),
            self.plan.weight,
            self.plan.activation,
            layer.apply_router_weight_on_input,
            self.ranks,
        )

    def _ranks(self, layer: RoutedExperts) -> str:
        from vllm.distributed import get_tensor_model_parallel_world_size

        if layer.moe_config.tp_size != get_tensor_model_parallel_world_size():
            raise ConfigError(
                f"{self.prefix}: a token's own NVFP4 scale is not computed over data-parallel ranks that share experts",
                fix="use expert parallelism, one data-parallel rank, or a checkpoint with input scales",
            )
        return ops.split_over()

    def describe(self) -> dict[str, Any]:
        """The audit's entry, without the bytes."""
        return describe_plan(self.plan, self.static, as_vllm=self.as_vllm)


class CapturingMoEMethod(_ExpertMethod):
    """Dense experts run by our own loop, so that each expert's rows and true intermediates can be recorded."""

    def __init__(self, moe: Any, recorder: Any, names: list[str]) -> None:
        super().__init__(moe, names[0].rpartition(".experts.")[0] + ".experts")
        self.recorder = recorder
        self._names: dict[int, list[str]] = {}
        for name in names:
            self._names.setdefault(int(name.split(".")[-2]), []).append(name)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        self._check_kind(layer)
        inter = intermediate_size_per_partition
        self._register(layer, "w13_weight", torch.empty(num_experts, 2 * inter, hidden_size, dtype=params_dtype))
        self._register(layer, "w2_weight", torch.empty(num_experts, hidden_size, inter, dtype=params_dtype))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self._check_complete(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        def observe(expert: int, x_mh: Tensor, h_mi: Tensor) -> None:
            down = [n for n in self._names[expert] if n.endswith((".down_proj", ".w2"))]
            self.recorder.record([n for n in self._names[expert] if n not in down], x_mh)
            self.recorder.record(down, h_mi)

        return plain.expert_loop(
            x,
            topk_weights,
            topk_ids,
            decode_experts=lambda ids: (layer.w13_weight[ids], layer.w2_weight[ids]),
            experts=layer.w13_weight.shape[0],
            weights_per_expert=layer.w13_weight[0].numel() + layer.w2_weight[0].numel(),
            weight_on_input=layer.apply_router_weight_on_input,
            observe=observe,
        )
