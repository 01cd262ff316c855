"""Every name of vLLM that the plugin uses, looked up in vLLM's source without importing it.

    python vllm_touch_points.py /path/to/site-packages/vllm     # prints what is missing there; exit code 1

`missing(folder)` serves the test, which looks at the installed vLLM; the script serves any other version's source.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

LAYERS = "model_executor/layers"
# (file or package, dotted name, parameters that are passed or received by keyword). `self.x`: an attribute that a
# method of the class sets, or one of its annotated fields.
POINTS: list[tuple[str, str, tuple[str, ...]]] = [
    ("logger", "init_logger", ()),
    ("config", "VllmConfig", ()),
    ("config", "ModelConfig", ()),
    ("config/load", "LoadConfig", ()),
    ("config/load", "LoadConfig.self.model_loader_extra_config", ()),
    ("platforms/interface", "Platform.is_cpu", ()),
    ("platforms/interface", "Platform.is_cuda_alike", ()),
    ("plugins", "load_general_plugins", ()),
    ("distributed/parallel_state", "get_tensor_model_parallel_rank", ()),
    ("distributed/parallel_state", "get_tensor_model_parallel_world_size", ()),
    ("distributed/parallel_state", "get_tp_group", ()),
    ("distributed/parallel_state", "_groups", ()),
    ("distributed/parallel_state", "GroupCoordinator.self.unique_name", ()),
    ("distributed/parallel_state", "GroupCoordinator.self.device_group", ()),
    ("distributed/parallel_state", "GroupCoordinator.self.device_communicator", ()),
    ("distributed/device_communicators/cuda_communicator", "CudaCommunicator.self.pynccl_comm", ()),
    ("distributed/device_communicators/pynccl", "PyNcclCommunicator.all_reduce", ("in_tensor", "op")),
    ("distributed/device_communicators/pynccl", "PyNcclCommunicator.self.disabled", ()),
    (f"{LAYERS}/quantization", "QUANTIZATION_METHODS", ()),
    (f"{LAYERS}/quantization", "register_quantization_config", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.get_quant_method", ("layer", "prefix")),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.get_name", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.get_supported_act_dtypes", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.get_min_capability", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.get_config_filenames", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.from_config", ("config",)),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.apply_vllm_mapper", ("hf_to_vllm_mapper",)),
    (f"{LAYERS}/quantization/base_config", "QuantizationConfig.self.packed_modules_mapping", ()),
    (f"{LAYERS}/quantization/base_config", "QuantizeMethodBase.process_weights_after_loading", ("layer",)),
    ("model_executor/models/utils", "WeightsMapper.apply_list", ()),
    (f"{LAYERS}/linear", "LinearBase.self.quant_method", ()),
    (f"{LAYERS}/linear", "LinearBase.self.params_dtype", ()),
    (f"{LAYERS}/linear", "LinearBase.self.input_size", ()),
    (f"{LAYERS}/linear", "LinearBase.self.output_size", ()),
    (f"{LAYERS}/linear", "LinearMethodBase.create_weights", (
        "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size", "params_dtype")),
    (f"{LAYERS}/linear", "LinearMethodBase.apply", ("layer", "x", "bias")),
    (f"{LAYERS}/linear", "UnquantizedLinearMethod", ()),
    (f"{LAYERS}/linear", "register_weight_loader_v2_supported_method", ()),
    ("model_executor/parameter", "ModelWeightParameter", ()),
    ("model_executor/parameter", "GroupQuantScaleParameter", ()),
    ("model_executor/parameter", "PerTensorScaleParameter", ()),
    ("model_executor/utils", "set_weight_attrs", ()),
    (f"{LAYERS}/fused_moe", "RoutedExperts", ()),
    (f"{LAYERS}/fused_moe", "FusedMoEMethodBase", ()),
    (f"{LAYERS}/fused_moe/fused_moe_method_base", "FusedMoEMethodBase.create_weights", (
        "layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")),
    (f"{LAYERS}/fused_moe/fused_moe_method_base", "FusedMoEMethodBase.apply", (
        "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")),
    (f"{LAYERS}/fused_moe/fused_moe_method_base", "FusedMoEMethodBase.get_fused_moe_quant_config", ("layer",)),
    (f"{LAYERS}/fused_moe/fused_moe_method_base", "FusedMoEMethodBase.self.moe", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEQuantConfig.make", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEConfig.self.num_experts", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEConfig.self.has_bias", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEConfig.is_act_and_mul", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEConfig.tp_size", ()),
    (f"{LAYERS}/fused_moe/config", "FusedMoEConfig.tp_rank", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts.self.moe_config", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts.self.activation", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts.self.swiglu_limit", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts.self.apply_router_weight_on_input", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts.expert_map", ()),
    (f"{LAYERS}/fused_moe/routed_experts", "RoutedExperts._map_global_expert_id_to_local_expert_id", ()),
    ("model_executor/model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER", ()),
    ("model_executor/model_loader", "register_model_loader", ("load_format",)),
    ("model_executor/model_loader/default_loader", "DefaultModelLoader.get_all_weights", ("model_config", "model")),
    ("model_executor/model_loader/default_loader", "DefaultModelLoader.download_model", ("model_config",)),
    ("model_executor/model_loader/default_loader", "DefaultModelLoader._get_weights_iterator", ("source",)),
    ("model_executor/model_loader/default_loader", "DefaultModelLoader.self.local_expert_ids", ()),
    ("model_executor/model_loader/default_loader", "DefaultModelLoader.self.counter_before_loading_weights", ()),
    ("model_executor/model_loader/base_loader", "BaseModelLoader.load_model", (
        "vllm_config", "model_config", "prefix")),
]  # fmt: skip


def missing(vllm: Path) -> list[str]:
    """The points that the vLLM whose package folder is `vllm` has not, one line each."""
    return [found for file, name, parameters in POINTS if (found := _check(vllm, file, name, parameters))]


def _check(vllm: Path, file: str, name: str, parameters: tuple[str, ...]) -> str:
    path = vllm / f"{file}.py"
    path = path if path.is_file() else vllm / file / "__init__.py"
    if not path.is_file():
        return f"{file}: no such module"
    first, *rest = name.split(".")
    node = _top(path).get(first)
    if node is None:
        return f"{file}: no {first}"
    if rest and rest[0] == "self":
        return "" if rest[1] in _attributes(node) else f"{file}: {first} has no attribute {rest[1]}"
    if rest:
        node = next((n for n in getattr(node, "body", []) if getattr(n, "name", "") == rest[0]), None)
        if node is None:
            return f"{file}: {first} has no {rest[0]}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        known = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        if lost := sorted(set(parameters) - known):
            return f"{file}: {name} takes no {', '.join(lost)}"
    return ""


@functools.cache
def _top(path: Path) -> dict[str, ast.AST]:
    """What a module defines or imports at its top level."""
    names: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif hasattr(node, "name"):
            names[node.name] = node
    return names


def _attributes(node: ast.AST) -> set[str]:
    """Annotated fields of a class, and what its methods assign to self."""
    found: set[str] = set()
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in [t for outer in targets for t in (outer.elts if isinstance(outer, ast.Tuple) else [outer])]:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                found.add(target.attr)
            elif isinstance(target, ast.Name) and isinstance(inner, ast.AnnAssign):
                found.add(target.id)
    return found


if __name__ == "__main__":
    lines = missing(Path(sys.argv[1]))
    print("\n".join(lines) or "nothing is missing")
    sys.exit(bool(lines))
