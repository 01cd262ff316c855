"""The out-of-tree vLLM plugin: load format "workbench" and quantization method "workbench".

vLLM calls `register` in every process of its environment (API server, engine core, workers). It patches nothing and
claims no stock quantization method, so a vLLM that asks for neither is not changed.
"""

from __future__ import annotations


def register() -> None:
    """Register the model loader and the quantization config. Idempotent."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if "workbench" not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from .loader import WorkbenchModelLoader

        register_model_loader("workbench")(WorkbenchModelLoader)
    if "workbench" not in QUANTIZATION_METHODS:
        from .config import WorkbenchConfig

        register_quantization_config("workbench")(WorkbenchConfig)
